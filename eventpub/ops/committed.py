"""Reading some partitions once, as a `read_committed` consumer, to the ends that they have now.

Bounded in time: what lies before an end and was not read by then is known afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from confluent_kafka import OFFSET_END, KafkaError, KafkaException, TopicPartition

from eventpub import config
from eventpub.sink import client, faults
from eventpub.sink.topics import list_offsets

Place: TypeAlias = tuple[str, int]
"""A topic and a partition."""
Message = Any  # its types say None where there is always a value

_CALL = 5.0
_PATIENCE = 20.0
"""Seconds in which a broker is to say at which offset a time begins."""


class Committed(Iterator[list[Message]]):
    """Committed records in chunks; of each partition in order.

    Args:
        sink: the section `[sink]`.
        starts: first offset by partition.
        ends: next offset by partition, up to which is read; None: up to the end that is committed.
        until: on the clock of `time.monotonic`; then it stops.
        chunk: records in a chunk, at most.

    Attributes:
        until: as it was given; may be changed between chunks.
        unread: partitions that were not read to their end.
        read: records so far.

    Raises:
        SinkError: sink.unreachable, sink.topic_missing, sink.not_authorized, sink.auth_failed.
    """

    def __init__(
        self,
        sink: config.Sink,
        starts: Mapping[Place, int],
        until: float,
        ends: Mapping[Place, int] | None = None,
        *,
        chunk: int = 10_000,
    ) -> None:
        if ends is None:
            ends = list_offsets(sink, list(starts), "latest", committed=True)
        lows = list_offsets(sink, list(starts), "earliest")
        self._ends = dict(ends)
        self._starts = {place: max(at, lows[place]) for place, at in starts.items()}
        self.unread = {place for place, at in self._starts.items() if at < self._ends[place]}
        self.read = 0
        self._sink = sink
        self.until = until
        self._chunk = chunk
        self._chunks = self._consume()

    def __next__(self) -> list[Message]:
        return next(self._chunks)

    def close(self) -> None:
        """Read no further."""
        self._chunks.close()

    def _consume(self) -> Any:
        if not self.unread:
            return
        consumer = client.consumer(self._sink, client.ClientLog())
        try:
            consumer.assign([TopicPartition(*place, self._starts[place]) for place in self.unread])
            while self.unread and time.monotonic() < self.until:
                first = client.call(consumer.poll, 0.1)
                if first is None:
                    continue
                chunk = self._take([first, *client.call(consumer.consume, self._chunk - 1, 0)])
                if chunk:
                    yield chunk
        except KafkaException as exception:
            error = faults.kafka_error(exception)
            raise faults.fault(error, "reading the topic", self._sink) from exception
        finally:
            consumer.close()

    def _take(self, messages: list[Message]) -> list[Message]:
        """The records among these that lie before the ends."""
        taken = []
        for message in messages:
            error, place = message.error(), (message.topic(), message.partition())
            if error is not None and error.code() != KafkaError._PARTITION_EOF:
                if place[0] is not None or error.fatal():
                    raise faults.fault(error, "reading the topic", self._sink)
                continue  # of a connection, which is made again
            end = self._ends.get(place, 0)
            if error is None and message.offset() < end:
                taken.append(message)
            if message.offset() >= end - (error is None):
                self.unread.discard(place)
        self.read += len(taken)
        return taken


def offsets_at(sink: config.Sink, places: Iterable[Place], millis: int) -> dict[Place, int]:
    """By partition: no record before this offset has a timestamp at or after a time.

    Args:
        millis: the time, ms since 1970.

    Raises:
        SinkError: as of `Committed`.
    """
    wanted = list(places)
    ends = list_offsets(sink, wanted, "latest", committed=True)
    deadline = time.monotonic() + _PATIENCE
    found: dict[Place, int] = {}
    met: KafkaError | None = None
    while len(found) < len(wanted):
        consumer, _ = client.asking_consumer(sink, committed=True)
        asked = [TopicPartition(*place, millis) for place in wanted if place not in found]
        try:
            for answer in client.call(consumer.offsets_for_times, asked, _CALL):
                place, offset = (answer.topic, answer.partition), answer.offset
                if answer.error is not None:
                    met = answer.error
                elif offset == OFFSET_END:
                    found[place] = ends[place]
                elif 0 <= offset <= ends[place]:  # else: the question, as it was before an answer
                    found[place] = offset
        except KafkaException as exception:
            met = faults.kafka_error(exception)
        if len(found) < len(wanted):
            if met is not None and met.code() not in faults.MOMENTARY | {KafkaError._TIMED_OUT}:
                raise faults.fault(met, "asking for offsets", sink)
            if time.monotonic() > deadline:
                raise faults.unreachable(sink, "asking for offsets", _PATIENCE, None)
            client.renew(sink)
            time.sleep(0.1)
    return found
