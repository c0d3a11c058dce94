"""What one transaction shall make visible, and the delivery reports that tell what came of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from confluent_kafka import KafkaError, Message

from eventpub import config
from eventpub.admission.model import Shard
from eventpub.errors import SinkError
from eventpub.sink import records
from eventpub.sink.base import Content
from eventpub.sink.encoder import Encoder
from eventpub.sink.missing_markers import PartitionId

AHEAD_OF_CLOCK = 600_000_000
"""µs that the database's clock may be ahead of this machine's and still be believed: brokers take
timestamps that are up to an hour ahead of theirs."""

_CONSEQUENCE = frozenset(
    {KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT, KafkaError._INVALID_DIFFERENT_RECORD}
)


class Reports:
    """Counts the delivery reports of one partition.

    Attributes:
        count: those that say yes.
        first: the record of the first of them.
        last: that of the last.
        failed: those that say no, with the row of the record.
        between: how many records were produced between those two without a report of their own.
    """

    __slots__ = ("between", "count", "failed", "first", "last")

    def __init__(self) -> None:
        self.between = 0
        self.count = 0
        self.first: Any = None
        self.last: Any = None
        self.failed: list[tuple[KafkaError, int]] = []

    def on_delivery(self, row: int, error: KafkaError | None, message: Message) -> None:
        """Given to the client with each record, together with its row in the batch."""
        if error is None:
            if not self.count:
                self.first = message
            self.count += 1
            self.last = message
        else:
            self.failed.append((error, row))

    @property
    def is_whole(self) -> bool:
        """Whether the records between the first and the last have the offsets between theirs."""
        if not self.between:
            return True
        return self.count == 2 and self.last.offset() - self.first.offset() == self.between + 1


@dataclass(frozen=True)
class Events:
    """Rows of `EVENTS` on their way to one topic, and the partition of each.

    Attributes:
        limit: of the records' timestamps, µs.
        marks: more headers of each record.
    """

    rows: pa.Table
    encoder: Encoder
    late: npt.NDArray[np.bool_] | None
    partitions: npt.NDArray[np.int32]
    limit: int = records.FAR_AHEAD
    marks: Sequence[Sequence[records.Header]] | None = None

    @cached_property
    def columns(self) -> records.Columns:
        """All of them, to be produced one by one."""
        columns = self.encoder.events(self.rows, self.partitions, self.late, self.limit)
        if self.marks is None:
            return columns
        headers = [[*own, *more] for own, more in zip(columns.headers, self.marks, strict=True)]
        return replace(columns, headers=headers)

    def taken(self, rows: npt.NDArray[np.int64]) -> records.Columns:
        """Some of them."""
        late = None if self.late is None else self.late[rows]
        some: Any = self.rows.take(rows)
        return self.encoder.events(some, self.partitions[rows], late, self.limit)

    @property
    def fixed(self) -> records.FixedEvents | None:
        """All of them, to be handed over at once; None: they cannot."""
        if self.marks is not None:
            return None
        return self.encoder.fixed(self.rows, self.partitions, self.late, self.limit)

    def ends(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The first row of each partition, and the last where that is another."""
        _, first = np.unique(self.partitions, return_index=True)
        _, behind = np.unique(self.partitions[::-1], return_index=True)
        last = len(self.partitions) - 1 - behind
        return np.sort(first), np.sort(last[last != first])


class Batch:
    """What one transaction shall make visible, and what came of it so far.

    Args:
        events: by topic; as columns, they are produced one by one.

    Attributes:
        produced: records whose delivery is reported.
        has_unreported: there are others, which the offsets around them prove delivered.
    """

    def __init__(
        self,
        events: Mapping[str, Events | records.Columns],
        side: list[tuple[str, records.Record]],
    ) -> None:
        self.events = events
        self.side = side
        self.produced = 0
        self.has_unreported = False
        self.reports: dict[PartitionId, Reports] = {}
        self.refused: list[tuple[str, int, str]] = []
        """Topic, row and reason of what the client itself has refused; row 0 on a side topic."""

    def reports_of(self, topic: str, partition: int) -> Reports:
        """Those of one partition."""
        return self.reports.setdefault((topic, partition), Reports())

    @property
    def places(self) -> set[PartitionId]:
        """The partitions that it is written to."""
        found = {(t, p) for t, of in self.events.items() for p in np.unique(of.partitions).tolist()}
        return found | {(topic, record.partition) for topic, record in self.side}

    def failed(self) -> list[tuple[str, KafkaError, int]]:
        """Topic, error and row of undelivered records, but those that only follow from another's.

        The row is 0 on a side topic.
        """
        return [
            (topic, error, row)
            for (topic, _), reports in self.reports.items()
            for error, row in reports.failed
            if error.code() not in _CONSEQUENCE
        ]


def batch_of(
    sink: config.Sink, encoder: Encoder, shard: Shard, content: Content, *, reduced: bool = False
) -> Batch:
    """The records of a shard, with their partitions.

    With `reduced`, dead letters have key, version and reason alone.

    Raises:
        SinkError: `sink.wrong_partition`.
    """

    def of(rows: pa.Table, marks: npt.NDArray[np.bool_] | None) -> Events:
        placed = records.partitions_of(rows, shard.partitions)
        return Events(rows, encoder, marks, placed, limit)

    count = shard.partitions
    limit = int(time.time() * 1e6) + AHEAD_OF_CLOCK
    limit = limit if content.now is None else min(content.now, limit)

    by_topic = {sink.topic: replace(of(content.events, content.late), marks=content.marks)}
    diverted = content.diverted
    if diverted is not None and len(diverted):
        by_topic[sink.late_topic] = of(diverted, np.ones(len(diverted), np.bool_))
    first = shard.topic_partitions()[0]
    side = [(sink.gaps_topic, encoder.gap(g, count, limit)) for g in content.gaps]
    side += [
        (sink.dead_topic, encoder.dead(d, (count, first), limit, reduced=reduced))
        for d in content.dead
    ]
    partitions = np.concatenate(
        [e.partitions for e in by_topic.values()]
        + [np.array([r.partition for _, r in side], np.int32)]
    )
    foreign = partitions[partitions % shard.shards != shard.number]
    if len(foreign):
        raise SinkError(
            "sink.wrong_partition",
            f"shard {shard.number} of {shard.shards} was given records of partition"
            f" {int(foreign[0])}",
            where=f"topic {sink.topic}",
            suggestion="this is a bug in eventpub; nothing was published",
        )
    return Batch(by_topic, side)
