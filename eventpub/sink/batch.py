"""One transaction's records, how they are produced (in bulk where safe), and their reports."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, Message

from eventpub import config
from eventpub.admission.model import Shard
from eventpub.errors import SinkError
from eventpub.private_apis import bulk
from eventpub.sink import client, faults, records
from eventpub.sink.base import Content, CrashPoint, no_crash
from eventpub.sink.client import Clients
from eventpub.sink.encoder import Encoder
from eventpub.sink.records import PartitionId

if TYPE_CHECKING:
    from eventpub.sink.transaction import TransactionWriter

AHEAD_OF_CLOCK = 600_000_000
"""Accepted lead of the database's clock over this machine's, µs; brokers accept up to 1 h."""

_SINGLY = 20
"""Rows produced before waiting for their delivery; after a refusal, some are produced again."""

_CONSEQUENCE = frozenset(
    {KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT, KafkaError._INVALID_DIFFERENT_RECORD}
)


@dataclass(slots=True)
class Reports:
    """Delivery reports of one partition.

    `count`: records delivered; `first`, `last`: the first and last of them; `failed`: errors, each
    with the record's row; `between`: records in between that have no report of their own.
    """

    between: int = 0
    count: int = 0
    first: Any = None
    last: Any = None
    failed: list[tuple[KafkaError, int]] = field(default_factory=list)

    def on_delivery(self, row: int, error: KafkaError | None, message: Message) -> None:
        """Delivery callback; `row` is the record's row in the batch."""
        if error is None:
            if not self.count:
                self.first = message
            self.count += 1
            self.last = message
        else:
            self.failed.append((error, row))

    @property
    def is_whole(self) -> bool:
        """Whether the offsets of first and last prove the unreported records delivered."""
        if not self.between:
            return True
        return self.count == 2 and self.last.offset() - self.first.offset() == self.between + 1


@dataclass(frozen=True)
class Events:
    """Rows of `EVENTS` for one topic; `limit` caps timestamps, µs."""

    rows: pa.Table
    encoder: Encoder
    late: npt.NDArray[np.bool_] | None
    partitions: npt.NDArray[np.int32]
    limit: int = records.FAR_AHEAD

    def columns(self, rows: npt.NDArray[np.int64] | None = None) -> records.Columns:
        """Rows, by default all, to be produced one by one."""
        if rows is None:
            return self.encoder.events(self.rows, self.partitions, self.late, self.limit)
        late = None if self.late is None else self.late[rows]
        some: Any = self.rows.take(rows)
        return self.encoder.events(some, self.partitions[rows], late, self.limit)

    @property
    def fixed(self) -> records.FixedEvents | None:
        """All rows, to be produced in bulk; None if their headers are not uniform."""
        return self.encoder.fixed(self.rows, self.partitions, self.late, self.limit)

    def ends(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Each partition's first row, and its last row where that is another."""
        _, first = np.unique(self.partitions, return_index=True)
        _, behind = np.unique(self.partitions[::-1], return_index=True)
        last = len(self.partitions) - 1 - behind
        return np.sort(first), np.sort(last[last != first])


@dataclass
class Batch:
    """One transaction's records and what became of them.

    `produced` counts records with a delivery report of their own; if `has_unreported`, the offsets
    around the others prove their delivery. `Columns` are produced one by one. `refused`: topic, row
    and reason of records the client refused; row 0 on a side topic.
    """

    events: Mapping[str, Events | records.Columns]
    side: Sequence[tuple[str, records.Record]]
    produced: int = 0
    has_unreported: bool = False
    reports: dict[PartitionId, Reports] = field(default_factory=dict)
    refused: list[tuple[str, int, str]] = field(default_factory=list)

    def reports_of(self, topic: str, partition: int) -> Reports:
        return self.reports.setdefault((topic, partition), Reports())

    @property
    def delivered(self) -> int:
        return sum(reports.count for reports in self.reports.values())

    @property
    def is_delivered(self) -> bool:
        return self.delivered == self.produced and all(r.is_whole for r in self.reports.values())

    @property
    def places(self) -> set[PartitionId]:
        found = {(t, p) for t, of in self.events.items() for p in np.unique(of.partitions).tolist()}
        return found | {(topic, record.partition) for topic, record in self.side}

    def failed(self) -> list[tuple[str, KafkaError, int]]:
        """Topic, error and row (0 on a side topic) of failures not caused by another record's."""
        return [
            (topic, error, row)
            for (topic, _), reports in self.reports.items()
            for error, row in reports.failed
            if error.code() not in _CONSEQUENCE
        ]


@dataclass
class Caution:
    """Precautions of a transactional id until a batch is published; they outlive a failed producer.

    Attributes:
        sends_singly: one record per record batch, to find those the broker refuses.
        reports_each: request a report of each record, to find what failed.
        reduces_dead: dead letters without payload, type and metadata, since one was refused.
    """

    sends_singly: bool = False
    reports_each: bool = False
    reduces_dead: bool = False

    def forget(self) -> None:
        self.sends_singly = self.reports_each = self.reduces_dead = False


def batch_of(
    sink: config.Sink,
    encoder: Encoder,
    shard: Shard,
    content: Content,
    *,
    reduced: bool = False,
) -> Batch:
    """Encode a shard's content, or raise `sink.wrong_partition`."""

    def of(rows: pa.Table, late: npt.NDArray[np.bool_] | None) -> Events:
        placed = records.partitions_of(rows, shard.partitions)
        return Events(rows, encoder, late, placed, limit)

    count = shard.partitions
    limit = int(time.time() * 1e6) + AHEAD_OF_CLOCK
    limit = limit if content.now is None else min(content.now, limit)

    by_topic = {sink.topic: of(content.events, content.late)}
    diverted = content.diverted
    if diverted is not None and len(diverted):
        by_topic[sink.late_topic] = of(diverted, np.ones(len(diverted), np.bool_))
    first = shard.topic_partitions()[0]
    side = [(sink.gaps_topic, encoder.gap(g, count, limit)) for g in content.gaps]
    side += [
        (sink.dead_topic, encoder.dead(d, (count, first), limit, reduced=reduced))
        for d in content.dead
    ]
    batch = Batch(by_topic, side)
    if foreign := [n for _, n in batch.places if n % shard.shards != shard.number]:
        raise SinkError(
            "sink.wrong_partition",
            f"shard {shard.number} of {shard.shards} was given records of partition {min(foreign)}",
            where=f"topic {sink.topic}",
            suggestion="this is a bug in eventpub; nothing was published",
        )
    return batch


def _passing(crash_point: CrashPoint, name: str) -> Iterator[Any]:
    """Yield nothing; chained between rows, so that the loop has no cost per row."""
    crash_point(name)
    yield from ()


class Producing:
    def __init__(self, clients: Clients, writer: TransactionWriter) -> None:
        self._clients, self._sink = clients, clients.sink
        self._writer = writer

    def produce(self, batch: Batch, crash_point: CrashPoint) -> None:
        """Produce the batch; records the client refuses are noted in `batch.refused`.

        Raises:
            KafkaException: the client accepts no more.
            SinkError: `sink.unreachable`, `sink.fatal`.
        """
        for topic, events in batch.events.items():
            self._produce_events(topic, events, batch, crash_point)
        for topic in dict.fromkeys(topic for topic, _ in batch.side):
            of_topic = [record for name, record in batch.side if name == topic]
            self._produce_columns(topic, records.columns_of(of_topic), batch, no_crash)

    def _produce_events(
        self,
        topic: str,
        events: Events | records.Columns,
        batch: Batch,
        crash_point: CrashPoint,
    ) -> None:
        if isinstance(events, records.Columns):
            self._produce_columns(topic, events, batch, crash_point)
            return
        # Bulk only in a transaction, which hides records that failed without a report.
        one_by_one = (
            not self._writer.is_transactional
            or self._writer.sends_singly
            or self._writer.caution.reports_each
        )
        if (
            one_by_one
            or (at_once := self._clients.bulk(self._writer.client, len(events.rows))) is None
            or (fixed := events.fixed) is None
        ):
            self._produce_columns(topic, events.columns(), batch, crash_point)
            return
        first, last = events.ends()
        between = np.ones(len(events.rows), np.bool_)
        between[first] = between[last] = False
        rows = np.flatnonzero(between)
        half = len(rows) // 2
        batch.has_unreported = True
        self._produce_columns(topic, events.columns(first), batch, no_crash, first)
        self._produce_at_once(at_once, topic, fixed, rows[:half])
        crash_point("during_produce")
        self._produce_at_once(at_once, topic, fixed, rows[half:])
        self._produce_columns(topic, events.columns(last), batch, no_crash, last)
        for partition, count in enumerate(np.bincount(events.partitions[rows]).tolist()):
            batch.reports_of(topic, partition).between = count

    def _produce_at_once(
        self, at_once: bulk.Bulk, topic: str, events: records.FixedEvents, rows: npt.NDArray[Any]
    ) -> None:
        deadline = self._clients.clock.monotonic() + self._writer.flush_timeout
        while len(rows):
            if done := at_once.produce(topic, events, rows):
                deadline = self._clients.clock.monotonic() + self._writer.flush_timeout
            rows = rows[done:]
            if len(rows):
                self._wait_for_space(deadline)

    def _wait_for_space(self, deadline: float) -> None:
        if self._clients.clock.monotonic() > deadline:
            self._writer.needs_replacement = True
            raise faults.unreachable(
                self._sink, "producing", self._writer.flush_timeout, self._writer.log.last_error
            )
        client.call(self._writer.client.poll, 0.05)

    def _produce_columns(
        self,
        topic: str,
        columns: records.Columns,
        batch: Batch,
        crash_point: CrashPoint,
        numbers: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """`numbers`: the rows' numbers in the batch, if these are only some of it."""
        rows = zip(
            range(len(columns.partitions)) if numbers is None else numbers.tolist(),
            columns.keys,
            columns.values,
            columns.partitions.tolist(),
            columns.timestamps,
            columns.headers,
            strict=True,
        )
        if self._writer.is_transactional and self._writer.sends_singly:
            self._produce_singly(topic, [*rows], batch)
            return
        first_half = islice(rows, len(columns.partitions) // 2)
        point = _passing(crash_point, "during_produce")
        self._produce_rows(topic, chain(first_half, point, rows), batch)

    def _produce_rows(self, topic: str, rows: Iterable[tuple[Any, ...]], batch: Batch) -> None:
        produce = self._writer.client.produce
        callbacks: dict[int, Any] = {}
        for number, key, value, partition, timestamp, headers in rows:
            if (callback := callbacks.get(partition)) is None:
                callback = callbacks[partition] = batch.reports_of(topic, partition).on_delivery
            on_delivery = partial(callback, number)
            batch.produced += 1
            try:
                # Positional: keywords cost more than the call.
                produce(topic, value, key, partition, on_delivery, on_delivery, timestamp, headers)
            except BufferError:
                self._produce_one(
                    topic, value, key, partition, *(on_delivery,) * 2, timestamp, headers
                )
            except KafkaException as exception:
                error = faults.kafka_error(exception)
                if error.code() not in faults.REFUSED_RECORD:
                    raise
                batch.produced -= 1
                limit = f"the client's message.max.bytes ({self._writer.message_limit})"
                batch.refused.append((topic, number, faults.refuses(error, limit)))
                if self._sink.delivery == "at_least_once":
                    break

    def _produce_singly(self, topic: str, rows: list[tuple[Any, ...]], batch: Batch) -> None:
        """Find all rows that the broker refuses, in one pass.

        After one, a transaction sends nothing more: another takes the rest, and is not committed.
        """
        while rows:
            some, rows, failure = rows[:_SINGLY], rows[_SINGLY:], None
            try:
                self._produce_rows(topic, some, batch)
            except KafkaException as exception:
                failure = exception
            is_delivered = self._writer.wait_for_delivery(batch)
            by_broker = [f for f in batch.failed() if f[1].code() in faults.REFUSED_RECORD]
            if failure is not None and not by_broker:
                raise failure
            if is_delivered and not batch.failed():
                continue
            batch.refused += [(t, row, faults.refuses(e)) for t, e, row in by_broker]
            # where it refuses nearly all, a setting is probably wrong
            is_enough = len(batch.refused) > self._sink.dead_limit + batch.delivered
            if not by_broker or is_enough or not self._writer.begin_again():
                return
            for reports in batch.reports.values():
                reports.failed.clear()
            refused = {row for t, row, _ in batch.refused if t == topic}
            rows = [row for row in some if row[0] not in refused] + rows

    def _produce_one(self, *arguments: Any) -> None:
        deadline = self._clients.clock.monotonic() + self._writer.flush_timeout
        while True:
            try:
                self._writer.client.produce(*arguments)
                return
            except BufferError:
                self._wait_for_space(deadline)
