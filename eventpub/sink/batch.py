"""What one transaction shall make visible, and the delivery reports that tell what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from confluent_kafka import KafkaError, Message

from eventpub import config
from eventpub.admission.model import Shard, SkippedGap
from eventpub.errors import SinkError
from eventpub.sink import faults, records
from eventpub.sink.records import DeadRow
from eventpub.sink.unmarked import Place

_CONSEQUENCE = frozenset(
    {KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT, KafkaError._INVALID_DIFFERENT_RECORD}
)


class Reports:
    """Counts the delivery reports of one partition."""

    __slots__ = ("count", "failed", "first", "last")

    def __init__(self) -> None:
        self.count = 0
        self.first: Any = None
        self.last: Any = None
        self.failed: list[tuple[KafkaError, Any]] = []

    def on_delivery(self, error: KafkaError | None, message: Message) -> None:
        """Given to the client with each record."""
        if error is None:
            if not self.count:
                self.first = message
            self.count += 1
            self.last = message
        else:
            self.failed.append((error, message))


class Batch:
    """What one transaction shall make visible, and what came of it so far."""

    def __init__(
        self, columns: dict[str, records.Columns], side: list[tuple[str, records.Record]]
    ) -> None:
        self.columns = columns
        self.side = side
        self.produced = 0
        self.reports: dict[Place, Reports] = {}
        self.refused: list[tuple[str, int, str]] = []
        """Topic, row and reason of what the client itself has refused."""

    def reports_of(self, topic: str, partition: int) -> Reports:
        """Those of one partition."""
        return self.reports.setdefault((topic, partition), Reports())

    def failed(self) -> list[tuple[str, KafkaError, Any]]:
        """The delivery reports that say no, without those that only follow from another's."""
        return [
            (topic, error, message)
            for (topic, _), reports in self.reports.items()
            for error, message in reports.failed
            if error.code() not in _CONSEQUENCE
        ]

    def rows_of(self, failed: list[tuple[str, KafkaError, Any]]) -> list[tuple[str, int, str]]:
        """Topic, row and reason of failed records; a report has no row, so content finds it."""
        rows = []
        for topic, error, message in failed:
            reason = faults.says(error)
            if topic not in self.columns:
                rows.append((topic, 0, reason))
                continue
            key, value = message.key().decode(), message.value()
            columns = self.columns[topic]
            at = zip(columns.keys, columns.values, strict=True)
            taken = {row for t, row, _ in rows if t == topic}
            rows.append(
                next(
                    (topic, row, reason)
                    for row, (k, v) in enumerate(at)
                    if k == key and v == value and row not in taken
                )
            )
        return rows


def batch_of(
    sink: config.Sink,
    app: str,
    shard: Shard,
    events: pa.Table | pa.RecordBatch,
    late: npt.NDArray[np.bool_] | None,
    gaps: Sequence[SkippedGap],
    dead: Sequence[DeadRow],
    diverted: pa.Table | None,
) -> Batch:
    """The records of a shard, with their partitions; the arguments are those of `publish`.

    Raises:
        SinkError: `sink.wrong_partition`.
    """
    columns = {sink.topic: records.event_columns(events, app, shard.partitions, late)}
    if diverted is not None and len(diverted):
        marks = np.ones(len(diverted), np.bool_)
        columns[sink.late_topic] = records.event_columns(diverted, app, shard.partitions, marks)
    first = shard.topic_partitions()[0]
    side = [(sink.gaps_topic, records.gap_record(g, shard.partitions)) for g in gaps]
    side += [(sink.dead_topic, records.dead_record(d, app, shard.partitions, first)) for d in dead]
    partitions = np.concatenate(
        [c.partitions for c in columns.values()]
        + [np.array([r.partition for _, r in side], np.int32)]
    )
    foreign = partitions[partitions % shard.shards != shard.number]
    if len(foreign):
        raise SinkError(
            "sink.wrong_partition",
            f"shard {shard.number} of {shard.shards} was given records of partition"
            f" {int(foreign[0])}",
            where=f"topic {sink.topic}",
            suggestion="this is a defect of eventpub; nothing was published",
        )
    return Batch(columns, side)
