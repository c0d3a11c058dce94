"""Handing a batch to the client: many events at once where that is safe, else one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt
from confluent_kafka import KafkaError, KafkaException, Message

from eventpub.private_apis import bulk
from eventpub.sink import client, faults, records
from eventpub.sink.base import CrashPoint, no_crash
from eventpub.sink.batch import Batch, Events
from eventpub.sink.causes import Caution
from eventpub.sink.client import Clients
from eventpub.sink.owned_producer import OwnedProducer


def _passing(crash_point: CrashPoint, name: str) -> Iterator[Any]:
    """Nothing, to be chained between rows: what it costs, it costs once."""
    crash_point(name)
    yield from ()


class Producing:
    """Produces the batches of one shard.

    Args:
        owned: where to.
        caution: whether each record is to be reported.
    """

    def __init__(self, clients: Clients, owned: OwnedProducer, caution: Caution) -> None:
        self._clients, self._sink = clients, clients.sink
        self._owned = owned
        self._caution = caution

    def produce(self, batch: Batch, crash_point: CrashPoint) -> None:
        """All of it; what the client itself refuses is noted in the batch.

        Raises:
            KafkaException: the client takes no more.
            SinkError: `sink.unreachable`, `sink.fatal`.
        """
        for topic, events in batch.events.items():
            self._produce_events(topic, events, batch, crash_point)
        for topic, r in batch.side:
            on_delivery = partial(batch.reports_of(topic, r.partition).on_delivery, 0)
            try:
                self._produce_one(topic, r, on_delivery)
            except KafkaException as exception:
                error = faults.kafka_error(exception)
                if error.code() not in faults.REFUSED_RECORD:
                    raise
                batch.refused.append((topic, 0, self._refusal(error)))
                break
            batch.produced += 1

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
        # At once only in a transaction: what failed without a report is not visible then.
        one_by_one = (
            not self._owned.is_transactional
            or self._owned.sends_singly
            or self._caution.reports_each
        )
        if (
            one_by_one
            or (at_once := self._clients.bulk(self._owned.client, len(events.rows))) is None
            or (fixed := events.fixed) is None
        ):
            self._produce_columns(topic, events.columns, batch, crash_point)
            return
        first, last = events.ends()
        between = np.ones(len(events.rows), np.bool_)
        between[first] = between[last] = False
        rows = np.flatnonzero(between)
        half = len(rows) // 2
        batch.has_unreported = True
        self._produce_columns(topic, events.taken(first), batch, no_crash, first)
        self._produce_at_once(at_once, topic, fixed, rows[:half])
        crash_point("during_produce")
        self._produce_at_once(at_once, topic, fixed, rows[half:])
        self._produce_columns(topic, events.taken(last), batch, no_crash, last)
        for partition, count in enumerate(np.bincount(events.partitions[rows]).tolist()):
            batch.reports_of(topic, partition).between = count

    def _produce_at_once(
        self, at_once: bulk.Bulk, topic: str, events: records.FixedEvents, rows: npt.NDArray[Any]
    ) -> None:
        deadline = self._clients.clock.monotonic() + self._owned.flush_timeout
        while len(rows):
            if done := at_once.produce(topic, events, rows):
                deadline = self._clients.clock.monotonic() + self._owned.flush_timeout
            rows = rows[done:]
            if len(rows):
                self._wait_for_space(deadline)

    def _wait_for_space(self, deadline: float) -> None:
        """The producer's queue is full."""
        if self._clients.clock.monotonic() > deadline:
            self._owned.needs_replacement = True
            raise faults.unreachable(
                self._sink, "producing", self._owned.flush_timeout, self._owned.log.last_error
            )
        client.call(self._owned.client.poll, 0.05)

    def _produce_columns(
        self,
        topic: str,
        columns: records.Columns,
        batch: Batch,
        crash_point: CrashPoint,
        numbers: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """One by one; `numbers` are those of the rows in the batch, where these are only some."""
        produce = self._owned.client.produce
        partitions = columns.partitions.tolist()
        callbacks = {p: batch.reports_of(topic, p).on_delivery for p in set(partitions)}
        refused_here = len(batch.refused)
        rows = zip(
            columns.keys,
            columns.values,
            partitions,
            columns.timestamps,
            columns.headers,
            strict=True,
        )
        row = -1
        first_half = islice(rows, len(partitions) // 2)
        rows_and_point = chain(first_half, _passing(crash_point, "during_produce"), rows)
        for row, (key, value, partition, timestamp, headers) in enumerate(rows_and_point):
            number = row if numbers is None else int(numbers[row])
            on_delivery = partial(callbacks[partition], number)
            try:
                # By position: keywords cost more than the call.
                produce(topic, value, key, partition, on_delivery, on_delivery, timestamp, headers)
            except BufferError:
                record = records.Record(key, value, partition, timestamp, headers)
                self._produce_one(topic, record, on_delivery)
            except KafkaException as exception:
                error = faults.kafka_error(exception)
                if error.code() not in faults.REFUSED_RECORD:
                    raise
                batch.refused.append((topic, number, self._refusal(error)))
                if self._sink.delivery == "at_least_once":
                    break
        batch.produced += row + 1 - (len(batch.refused) - refused_here)

    def _refusal(self, error: KafkaError) -> str:
        limit = f"the client's message.max.bytes ({self._owned.message_limit})"
        return faults.refuses(error, limit)

    def _produce_one(
        self,
        topic: str,
        r: records.Record,
        on_delivery: Callable[[KafkaError | None, Message], None],
    ) -> None:
        deadline = self._clients.clock.monotonic() + self._owned.flush_timeout
        while True:
            try:
                self._owned.client.produce(
                    *(topic, r.value, r.key, r.partition, on_delivery, on_delivery),
                    *(r.timestamp, r.headers),
                )
                return
            except BufferError:
                self._wait_for_space(deadline)
