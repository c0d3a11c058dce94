"""Reads ranges of Kafka partitions.

No record outside a range is returned, and a range counts as read only when its end was seen, by a
record or by the broker's end-of-partition event.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from eventpub.errors import SinkError
from eventpub.sink import client, faults, records
from eventpub.sink.client import Clients
from eventpub.sink.topics import MARKER_TIMEOUT, Meanwhile, list_offsets, open_below

Place = records.PartitionId
_FEW = 50
"""Offsets of a partition that are read at first: mostly the first one is an event."""
Message = Any  # its types say None where there is always a value

READ_TIMEOUT = 60.0
"""Seconds without a record after which reading fails, by default."""


class Reading(Iterator[list[Message]]):
    """Chunks of the records of ranges (first and next offset), in order per partition.

    Args:
        few: fetch little at a time.
        chunk: maximum records in a chunk.
        until: monotonic time, s, at which it stops, with the rest `unread`.
        patience: seconds without a record after which it fails.

    Raises:
        SinkError: sink.unreachable, sink.topic_missing, sink.not_authorized, sink.auth_failed.
    """

    def __init__(  # noqa: PLR0913 (options, by keyword)
        self,
        clients: Clients,
        ranges: Mapping[Place, tuple[int, int]],
        *,
        committed: bool = True,
        few: bool = False,
        chunk: int = 10_000,
        until: float = float("inf"),
        patience: float = float("inf"),
        meanwhile: Meanwhile = lambda: None,
    ) -> None:
        self.unread = {place for place, (at, end) in ranges.items() if at < end}
        self._clients, self._sink = clients, clients.sink
        self._ranges = ranges
        self._committed, self._few, self._chunk = committed, few, chunk
        self._until, self._patience = until, patience
        self._meanwhile = meanwhile
        self._chunks = self._consume()

    def __next__(self) -> list[Message]:
        return next(self._chunks)

    def close(self) -> None:
        self._chunks.close()

    def _consume(self) -> Any:
        if not self.unread:
            return
        consumer = self._clients.consumer(
            client.ClientLog(), committed=self._committed, few=self._few
        )
        try:
            consumer.assign([TopicPartition(*p, self._ranges[p][0]) for p in self.unread])
            deadline = self._clients.clock.monotonic() + self._patience
            while self.unread and self._clients.clock.monotonic() < self._until:
                self._meanwhile()
                first = client.call(consumer.poll, 0.1)
                if first is None:
                    if self._clients.clock.monotonic() > deadline:
                        raise self._stuck()
                    continue
                more = client.call(consumer.consume, self._chunk - 1, 0)
                chunk = self._take(consumer, [first, *more])
                if chunk:
                    yield chunk
                    deadline = self._clients.clock.monotonic() + self._patience
        except KafkaException as exception:
            error = faults.kafka_error(exception)
            raise faults.fault(error, "reading the topic", self._sink) from exception
        finally:
            consumer.close()

    def _take(self, consumer: Consumer, messages: list[Message]) -> list[Message]:
        """Those messages that are records of the ranges."""
        taken, ended = [], set()
        for message in messages:
            error, place = message.error(), (message.topic(), message.partition())
            if error is not None and error.code() != KafkaError._PARTITION_EOF:
                if error.code() == KafkaError._AUTO_OFFSET_RESET:
                    raise self._gone(place)
                if place[0] is not None or error.fatal():
                    raise faults.fault(error, "reading the topic", self._sink)
                continue  # of a connection: the client reconnects
            if place not in self.unread:
                continue
            end = self._ranges[place][1]
            if error is None and message.offset() < end:
                taken.append(message)
            if message.offset() >= end - (error is None):
                self.unread.discard(place)
                ended.add(place)
        if ended:  # or records after their ranges would be fetched before the others
            consumer.pause([TopicPartition(*place) for place in ended])
        return taken

    def _gone(self, place: Place) -> SinkError:
        topic, partition = place
        return SinkError(
            "sink.offset_gone",
            f"retention removed records of {topic}[{partition}] while they were read",
            where=f"topic {topic}",
            suggestion="nothing to do: reading restarts at the oldest record left; if this repeats,"
            " raise the topic's retention.ms",
            retriable=True,
        )

    def _stuck(self) -> SinkError:
        topic, partition = min(self.unread)
        return SinkError(
            "sink.unreachable",
            f"no records from {topic}[{partition}] for {self._patience:.0f} s",
            where=f"topic {topic}",
            retriable=True,
        )


def iter_ranges(  # noqa: PLR0913 (options, by keyword)
    clients: Clients,
    ranges: Mapping[Place, tuple[int, int]],
    *,
    committed: bool,
    few: bool = False,
    timeout: float = READ_TIMEOUT,
    meanwhile: Meanwhile = lambda: None,
) -> Iterator[Message]:
    """The records of ranges one by one; see `Reading`. `timeout`: seconds without a record."""
    reading = Reading(
        clients, ranges, committed=committed, few=few, patience=timeout, meanwhile=meanwhile
    )
    with closing(reading):
        for chunk in reading:
            yield from chunk


def read_committed(
    clients: Clients,
    starts: Mapping[Place, int],
    until: float = float("inf"),
    ends: Mapping[Place, int] | None = None,
) -> Reading:
    """What a `read_committed` consumer sees up to `ends`, by default the current ones.

    With an infinite `until`, a minute without a record is an error.
    """
    places = list(starts)
    ends = ends or list_offsets(clients, places, "latest", committed=True)
    lows = list_offsets(clients, places, "earliest")
    ranges = {place: (max(at, lows[place]), ends[place]) for place, at in starts.items()}
    patience = READ_TIMEOUT if until == float("inf") else float("inf")
    return Reading(clients, ranges, until=until, patience=patience)


def own_records(
    reading: Iterable[list[Message]],
    app_ids: Collection[str],
    keys: Collection[bytes] | None = None,
) -> Iterator[tuple[Message, dict[str, Any]]]:
    """Records of these application ids with their headers; `keys`: only those of these keys."""
    for chunk in reading:
        for message in chunk:
            if keys is None or message.key() in keys:
                headers = dict(message.headers() or ())
                if records.is_ours(headers, app_ids):
                    yield message, headers


def has_event(  # noqa: PLR0913 (what is looked for, and where)
    clients: Clients,
    place: Place,
    offsets: tuple[int, int],
    aggregate_id: str,
    version: int,
    *,
    app_ids: Collection[str],
    meanwhile: Meanwhile,
) -> bool | None:
    """Whether an event is committed between two offsets (first, next); None: unknown.

    It is unknown if retention has removed some of them, or an open transaction hides them.
    """
    first, end = offsets
    if first >= end:
        return False
    if list_offsets(clients, [place], "earliest")[place] > first:
        return None
    # a commit is answered before its markers are written
    if open_below(clients, {place: end}, MARKER_TIMEOUT, meanwhile):
        return None
    ranges, sequence = {place: (first, end)}, str(version).encode()
    with closing(Reading(clients, ranges, patience=READ_TIMEOUT, meanwhile=meanwhile)) as reading:
        found = own_records(reading, app_ids, {aggregate_id.encode()})
        return any(headers.get(records.SEQUENCE) == sequence for _, headers in found)


def oldest_events(
    clients: Clients,
    places: list[Place],
    app_ids: Collection[str],
    meanwhile: Meanwhile = lambda: None,
) -> dict[Place, int | None]:
    """`create_time` (µs) of the oldest event left, of each partition that retention has cut.

    None if no event is left; partitions that still have their first record are left out.
    """
    lows = list_offsets(clients, places, "earliest")
    cut = [place for place in places if lows[place] > 0]
    ends = list_offsets(clients, cut, "latest", committed=True)
    found: dict[Place, int | None] = {}
    for most in (_FEW, None):
        left = {p: (lows[p], ends[p]) for p in cut if p not in found}
        if most is not None:
            left = {p: (low, min(low + most, end)) for p, (low, end) in left.items()}
        for message in iter_ranges(clients, left, committed=True, few=True, meanwhile=meanwhile):
            place, headers = (message.topic(), message.partition()), dict(message.headers() or ())
            if place not in found and records.is_ours(headers, app_ids):
                found[place] = records.time_of(
                    (headers.get(records.TIME) or b"").decode(errors="replace")
                )
                if found.keys() >= left.keys():
                    break
    return {place: found.get(place) for place in cut}
