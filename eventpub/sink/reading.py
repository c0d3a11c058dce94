"""Reading ranges of Kafka partitions: one loop around a consumer, and where such ranges begin.

What must hold: no record outside a range is given, and a range counts as read only when its end was
seen, by a record or by the broker's word that there is no more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any, TypeAlias

from confluent_kafka import OFFSET_END, Consumer, KafkaError, KafkaException, TopicPartition

from eventpub import config
from eventpub.errors import SinkError
from eventpub.sink import client, faults, records
from eventpub.sink.topics import list_offsets

Place: TypeAlias = tuple[str, int]
"""A topic and a partition."""
Message = Any  # its types say None where there is always a value

_CALL = 5.0
READ_TIMEOUT = 60.0
"""Seconds without a record after which a reading fails, where nothing else is said."""
_ANSWERED_WITHIN = 20.0
"""Seconds in which a broker is to say at which offset a time begins."""


class Reading(Iterator[list[Message]]):
    """The records of ranges in chunks, of each partition in order.

    Args:
        sink: the section `[sink]`.
        ranges: by place, the first offset and the one after the last.
        committed: leave out what is not.
        few: fetch little at once.
        chunk: records in a chunk, at most.
        until: on the clock of `time.monotonic`; then it stops.
        patience: seconds without a record after which it fails.
        meanwhile: called again and again; what it raises ends the reading.

    Attributes:
        unread: what was not read to its end.

    Raises:
        SinkError: sink.unreachable, sink.topic_missing, sink.not_authorized, sink.auth_failed.
    """

    def __init__(  # noqa: PLR0913 (options, by keyword)
        self,
        sink: config.Sink,
        ranges: Mapping[Place, tuple[int, int]],
        *,
        committed: bool = True,
        few: bool = False,
        chunk: int = 10_000,
        until: float = float("inf"),
        patience: float = float("inf"),
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        self.unread = {place for place, (at, end) in ranges.items() if at < end}
        self._sink = sink
        self._ranges = ranges
        self._committed, self._few, self._chunk = committed, few, chunk
        self._until, self._patience = until, patience
        self._meanwhile = meanwhile
        self._chunks = self._consume()

    def __next__(self) -> list[Message]:
        return next(self._chunks)

    def close(self) -> None:
        """Read no further."""
        self._chunks.close()

    def _consume(self) -> Any:
        if not self.unread:
            return
        consumer = client.consumer(
            self._sink, client.ClientLog(), committed=self._committed, few=self._few
        )
        try:
            consumer.assign([TopicPartition(*p, self._ranges[p][0]) for p in self.unread])
            deadline = time.monotonic() + self._patience
            while self.unread and time.monotonic() < self._until:
                self._meanwhile()
                first = client.call(consumer.poll, 0.1)
                if first is None:
                    if time.monotonic() > deadline:
                        raise self._stuck()
                    continue
                more = client.call(consumer.consume, self._chunk - 1, 0)
                chunk = self._take(consumer, [first, *more])
                if chunk:
                    yield chunk
                    deadline = time.monotonic() + self._patience
        except KafkaException as exception:
            error = faults.kafka_error(exception)
            raise faults.fault(error, "reading the topic", self._sink) from exception
        finally:
            consumer.close()

    def _take(self, consumer: Consumer, messages: list[Message]) -> list[Message]:
        """The records among these that are of the ranges."""
        taken, ended = [], set()
        for message in messages:
            error, place = message.error(), (message.topic(), message.partition())
            if error is not None and error.code() != KafkaError._PARTITION_EOF:
                if error.code() == KafkaError._AUTO_OFFSET_RESET:
                    raise self._gone(place)
                if place[0] is not None or error.fatal():
                    raise faults.fault(error, "reading the topic", self._sink)
                continue  # of a connection, which is made again
            if place not in self.unread:
                continue
            end = self._ranges[place][1]
            if error is None and message.offset() < end:
                taken.append(message)
            if message.offset() >= end - (error is None):
                self.unread.discard(place)
                ended.add(place)
        if ended:  # or what is behind their ranges would be fetched before the others
            consumer.pause([TopicPartition(*place) for place in ended])
        return taken

    def _gone(self, place: Place) -> SinkError:
        topic, partition = place
        return SinkError(
            "sink.offset_gone",
            f"retention removed records of {topic}[{partition}] while they were read",
            where=f"topic {topic}",
            suggestion="nothing to do: it is read again, from what is there; if it goes on, raise"
            " the topic's retention.ms",
            retriable=True,
        )

    def _stuck(self) -> SinkError:
        topic, partition = min(self.unread)
        return SinkError(
            "sink.unreachable",
            f"{topic}[{partition}] gave no records for {self._patience:.0f} s",
            where=f"topic {topic}",
            retriable=True,
        )


def iter_ranges(  # noqa: PLR0913 (options, by keyword)
    sink: config.Sink,
    ranges: Mapping[Place, tuple[int, int]],
    *,
    committed: bool,
    few: bool = False,
    timeout: float = READ_TIMEOUT,
    meanwhile: Callable[[], None] = lambda: None,
) -> Iterator[Message]:
    """The records of ranges one by one; see `Reading`.

    Args:
        timeout: seconds without a record after which it fails.
    """
    reading = Reading(
        sink, ranges, committed=committed, few=few, patience=timeout, meanwhile=meanwhile
    )
    with closing(reading):
        for chunk in reading:
            yield from chunk


def read_committed(
    sink: config.Sink,
    starts: Mapping[Place, int],
    until: float = float("inf"),
    ends: Mapping[Place, int] | None = None,
) -> Reading:
    """What a `read_committed` consumer sees from some offsets on, as far as retention has left it.

    Args:
        starts: first offset by place.
        until: as of `Reading`; where it is endless, a minute without a record is an error.
        ends: the offset after the last by place; None: the ends as they are now.
    """
    places = list(starts)
    ends = ends or list_offsets(sink, places, "latest", committed=True)
    lows = list_offsets(sink, places, "earliest")
    ranges = {place: (max(at, lows[place]), ends[place]) for place, at in starts.items()}
    patience = READ_TIMEOUT if until == float("inf") else float("inf")
    return Reading(sink, ranges, until=until, patience=patience)


def own_records(
    reading: Iterable[list[Message]],
    app_ids: Collection[str],
    keys: Collection[bytes] | None = None,
) -> Iterator[tuple[Message, dict[str, Any]]]:
    """Records that a publisher of these ids has written, each with its headers.

    Args:
        keys: only those with one of these.
    """
    for chunk in reading:
        for message in chunk:
            if keys is None or message.key() in keys:
                headers = dict(message.headers() or ())
                if records.is_ours(headers.items(), app_ids):
                    yield message, headers


def offsets_at(sink: config.Sink, places: Iterable[Place], millis: int) -> dict[Place, int]:
    """By place: no record before this offset has a timestamp at or after a time.

    Args:
        millis: the time, ms since 1970.

    Raises:
        SinkError: as of `Reading`.
    """
    wanted = list(places)
    ends = list_offsets(sink, wanted, "latest", committed=True)
    deadline = time.monotonic() + _ANSWERED_WITHIN
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
                raise faults.unreachable(sink, "asking for offsets", _ANSWERED_WITHIN, None)
            client.renew(sink)
            time.sleep(0.1)
    return found
