"""The words that all packages share, as plain values: events, shards, and what a shard remembers
of its aggregates.

Times are UTC microseconds since 1970 on the database's clock. Nothing here does I/O. The `index`
keeps what a shard remembers, `admission` decides on it, and both must agree with what stands on the
topic: the topic is the truth, these are a cache of it. A bucket is a second of `create_time`: rows
are counted, and counted again, by bucket.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
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


CLOCK_STEP = 1_000_000
"""µs by which the database's clock may go back without a word."""


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


WIDTH = 1_000_000
"""µs of a bucket: bucket b has the rows of ``b * WIDTH < create_time <= (b + 1) * WIDTH``."""

KEPT = 86_400
"""Buckets, at most, whose numbers of rows are kept below the horizon: a day. What is older and is
counted all the same is compared key by key."""


def bucket_of(create_time: int) -> int:
    return (create_time - 1) // WIDTH


def window_of(bucket: int, position: int) -> tuple[int, int]:
    """What of a bucket lies up to a position: ``(after, upto]``, µs."""
    after = bucket * WIDTH
    return after, max(after, min(after + WIDTH, position))


def oldest_needed(now: int, horizon: int, *since: int | None) -> int:
    """The first bucket whose number of accounted rows may still be wanted; µs.

    Args:
        now: the database's time.
        horizon: of the recount.
        since: other times from which on rows may be counted: what open transactions hide; None:
            there is none.
    """
    oldest = bucket_of(min([now - horizon, *(at for at in since if at is not None)]))
    return max(oldest, bucket_of(now - horizon) - KEPT)


Versions = tuple[int, int]
"""First and last version of a run, both included."""


@dataclass(frozen=True)
class Hold:
    """One aggregate that waits for a version that is not visible yet.

    Attributes:
        aggregate_id: the aggregate; no other waits for it.
        first_missing: the version it waits for, one above the last that was published.
        seen: the highest version that a window has shown; nothing above it is published.
        first_seen: when the gap was first seen. The wait is measured from here.
        attempts: how many lookups of the missing version have failed.
        next_attempt: when it is looked for next.
        since: the smallest `create_time` among the events held: a reader that has lost its
            index finds the hold again by reading the store from just before here.
        catching_up: nothing is missing; more events were waiting than one batch may fetch.
    """

    aggregate_id: str
    first_missing: int
    seen: int
    first_seen: int
    attempts: int
    next_attempt: int
    since: int
    catching_up: bool = False


def numbers_of(names: list[str], known: Mapping[str, int], otherwise: int) -> np.ndarray:
    """The number of each of some aggregates."""
    return np.fromiter(map(known.get, names, repeat(otherwise)), np.int64, len(names))


@dataclass
class Known:
    """The index's answer for some aggregates.

    Attributes:
        last: the last version that was published, skipped or is baseline; absent: never seen.
        holds: the open holds.
        skipped: per aggregate the skipped versions that have not turned up since.
        baseline: events created at or before this time count as published; None: there are none.
        refused: per aggregate the versions below the first that were dead-lettered already.
        times: per aggregate the highest `create_time` of the rows that were decided, as `Seen`
            packs it; absent: not known.
        rewritten: per aggregate its rewritten versions; absent: none is known.
        contents: of some versions up to the last, what tells the rows that were published or
            dead-lettered from others, see `Rules.contents_of`; absent: not known.
        times_since: rows created at or before, µs, are never taken for other events of versions
            that were published: their times were not kept, or were read in another way. None:
            all were.
    """

    last: Mapping[str, int] = field(default_factory=dict)
    holds: Mapping[str, Hold] = field(default_factory=dict)
    skipped: Mapping[str, Sequence[Versions]] = field(default_factory=dict)
    baseline: int | None = None
    refused: Mapping[str, Sequence[int]] = field(default_factory=dict)
    times: Mapping[str, int] = field(default_factory=dict)
    times_since: int | None = None
    rewritten: Mapping[str, Rewritten] = field(default_factory=dict)
    contents: Mapping[tuple[str, int], set[bytes]] = field(default_factory=dict)


NO_TIME = -(1 << 63)
"""`Seen.packed` of an aggregate of which no row was decided."""


@dataclass(frozen=True)
class Seen:
    """What tells two events of one version apart: when an aggregate's rows were created.

    Packed into one integer, since there is one for each aggregate of a batch.

    Attributes:
        newest: the highest `create_time` of the rows that were published or dead-lettered, µs.
        is_of_last: whether that is the row of the aggregate's last version.
    """

    newest: int
    is_of_last: bool

    def packed(self) -> int:
        return self.newest << 1 | self.is_of_last

    @staticmethod
    def unpacked(packed: int) -> Seen:
        return Seen(packed >> 1, bool(packed & 1))

    def raised(self, created: int) -> Seen:
        """After another row, which is not that of the last version."""
        return Seen(created, False) if created > self.newest else self


@dataclass(frozen=True)
class Rewritten:
    """Published versions of an aggregate that were rewritten, since its newest known conflict.

    `Seen` alone would miss the second of two such rows with one `create_time`, and each that is
    read after a newer one.

    Attributes:
        since: the highest `create_time` of the rows that were decided before that conflict, µs.
        last: the last version then.
        decided: those up to `last` of which a row that was created after `since` was decided.
    """

    since: int
    last: int
    decided: tuple[Versions, ...] = ()

    def differs(self, version: int, created: int) -> bool:
        """Whether a row is not the one that was published: none up to `last` is so new."""
        is_concerned = version <= self.last and created > self.since
        return is_concerned and not in_ranges(version, self.decided)

    def plus(self, version: int, created: int) -> Rewritten:
        """After another row was decided."""
        if not self.differs(version, created):
            return self
        return replace(self, decided=tuple(runs_of([*self.decided, (version, version)])))


def in_ranges(version: int, ranges: Iterable[Versions]) -> bool:
    """Whether a version lies in one of the ranges."""
    return any(first <= version <= last for first, last in ranges)


def runs_of(ranges: Iterable[Versions]) -> list[Versions]:
    """Ranges that do not overlap, ascending; those that adjoin are one."""
    runs: list[Versions] = []
    for first, last in sorted(ranges):
        if runs and first == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], last)
        else:
            runs.append((first, last))
    return runs


def version_ranges(events: Iterable[tuple[str, int]]) -> list[VersionRange]:
    """Aggregates and versions, in any order, as ranges."""
    found: dict[str, set[int]] = {}
    for aggregate_id, version in events:
        found.setdefault(aggregate_id, set()).add(version)
    return [
        VersionRange(aggregate_id, first, last)
        for aggregate_id, versions in found.items()
        for first, last in runs_of((version, version) for version in versions)
    ]


def without(version: int, ranges: Iterable[Versions]) -> list[Versions]:
    left: list[Versions] = []
    for first, last in ranges:
        if not first <= version <= last:
            left.append((first, last))
            continue
        if first < version:
            left.append((first, version - 1))
        if version < last:
            left.append((version + 1, last))
    return left


def after_fold(hold: Hold, last: int, now: int) -> Hold | None:
    """A hold after the topic has shown that `last` is published already.

    Returns None when nothing is left to wait for.
    """
    if last < hold.first_missing:
        return hold
    if last >= hold.seen:
        return None
    return replace(
        hold,
        first_missing=last + 1,
        first_seen=now,
        attempts=0,
        next_attempt=now,
        catching_up=True,
    )
