"""The words that all packages share: an event, a shard, a hold, a skip.

Times are UTC microseconds since 1970 on the database's clock. Nothing here does I/O.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

_FIELDS: list[pa.Field[Any]] = [
    pa.field("aggregate_id", pa.string(), nullable=False),
    pa.field("version", pa.int64(), nullable=False),
    pa.field("event_type", pa.string(), nullable=False),
    pa.field("payload", pa.binary(), nullable=True),
    pa.field("metadata", pa.binary(), nullable=True),
    pa.field("create_time", pa.int64(), nullable=False),
]

EVENTS: pa.Schema = pa.schema(_FIELDS)
"""Rows of the event table on their way: `metadata` as stored, `create_time` UTC microseconds."""


@dataclass(frozen=True)
class Shard:
    """One writer's part of the topic: the partitions `p` with ``p % shards == number``."""

    number: int
    shards: int
    partitions: int

    def topic_partitions(self) -> list[int]:
        """The Kafka partitions that only this shard writes."""
        return list(range(self.number, self.partitions, self.shards))


@dataclass(frozen=True)
class VersionRange:
    """Versions `first` to `last` of one aggregate, both included."""

    aggregate_id: str
    first: int
    last: int


@dataclass(frozen=True)
class SkippedGap:
    """A gap that was given up: recorded for good on ``<topic>.gaps``."""

    aggregate_id: str
    from_version: int
    to_version: int
    first_seen: int
    skipped_at: int
    attempts: int
    reason: str


def values(rows: pa.Table | pa.RecordBatch, column: str) -> list[Any]:
    """A column as Python objects."""
    found: list[Any] = rows.column(column).to_pylist()
    return found


def topic_partition(aggregate_id: str, partitions: int) -> int:
    """The Kafka partition of an aggregate: ``CRC32(UTF-8 bytes) % partitions``.

    The same number as MySQL's ``CRC32()`` and librdkafka's ``consistent`` partitioner give.
    """
    return zlib.crc32(aggregate_id.encode()) % partitions


def topic_partitions(aggregate_ids: list[str], partitions: int) -> np.ndarray:
    """`topic_partition` of many, as int32."""
    crc = zlib.crc32
    return np.fromiter(
        (crc(a.encode()) % partitions for a in aggregate_ids), np.int32, len(aggregate_ids)
    )
