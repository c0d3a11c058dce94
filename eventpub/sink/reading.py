"""Reads ranges of Kafka partitions, and tells which publisher has written a record.

No record outside a range is returned, and a range counts as read only when its end was seen, by a
record or by the broker's end-of-partition event.

The fold counts versions on the topic as published, so it must believe only this publisher's
records: `ce_source` is its application id. A second publisher must be found: it would publish
everything twice, since publishers of different ids do not fence each other.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from itertools import chain
from typing import Any, Literal

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from eventpub import config
from eventpub.errors import SinkError
from eventpub.sink import client, faults, records
from eventpub.sink.client import Clients
from eventpub.sink.topics import (
    MARKER_TIMEOUT,
    Meanwhile,
    list_offsets,
    open_below,
    partition_counts,
)

Place = records.PartitionId
_FEW = 50
"""Offsets of a partition that are read at first: mostly the first one is an event."""
Message = Any  # its types say None where there is always a value

READ_TIMEOUT = 60.0
"""Seconds without a record after which reading fails, by default."""

Origin = Literal["own", "other_publisher", "unrecognised"]

_SHAPE = (records.SOURCE, "ce_specversion", "ce_type", records.TIME)
_SAMPLE = 50
"""Offsets that `check_sample` reads at each end of a partition."""
_LONGEST = 5.0
"""Seconds for a sample."""
_MOST_BETWEEN = 200
"""Offsets of a partition that `check_between` reads."""


def iter_chunks(  # noqa: PLR0913 (options, by keyword)
    clients: Clients,
    ranges: Mapping[Place, tuple[int, int]],
    *,
    committed: bool = True,
    few: bool = False,
    most: int = 10_000,
    until: float = float("inf"),
    unread: set[Place] | None = None,
    timeout: float = READ_TIMEOUT,
    meanwhile: Meanwhile = lambda: None,
) -> Generator[list[Message], None, None]:
    """Chunks of the records of ranges (first and next offset), in order per partition.

    Args:
        few: fetch little at a time.
        most: maximum records in a chunk.
        until: monotonic time, s, at which it stops; the partitions left are added to `unread`.
        timeout: seconds without a record after which it fails.

    Raises:
        SinkError: sink.unreachable, sink.topic_missing, sink.not_authorized, sink.auth_failed.
    """
    left = {place for place, (at, end) in ranges.items() if at < end}
    if not left:
        return
    now = clients.clock.monotonic
    consumer = clients.consumer(client.ClientLog(), committed=committed, few=few)
    try:
        consumer.assign([TopicPartition(*place, ranges[place][0]) for place in left])
        deadline = now() + timeout
        while left and now() < until:
            meanwhile()
            first = client.call(consumer.poll, 0.1)
            if first is not None:
                more = client.call(consumer.consume, most - 1, 0)
                if chunk := _taken(clients.sink, consumer, [first, *more], ranges, left):
                    yield chunk
                    deadline = now() + timeout
            elif now() > deadline:
                topic, partition = min(left)
                raise SinkError(
                    "sink.unreachable",
                    f"no records from {topic}[{partition}] for {timeout:.0f} s",
                    where=f"topic {topic}",
                    retriable=True,
                )
    except KafkaException as exception:
        error = faults.kafka_error(exception)
        raise faults.fault(error, "reading the topic", clients.sink) from exception
    finally:
        consumer.close()
    if unread is not None:
        unread |= left


def _taken(
    sink: config.Sink,
    consumer: Consumer,
    messages: list[Message],
    ranges: Mapping[Place, tuple[int, int]],
    left: set[Place],
) -> list[Message]:
    """Those messages that are records of the ranges; partitions read to their ends leave `left`."""
    taken, ended = [], set()
    for message in messages:
        error, place = message.error(), (message.topic(), message.partition())
        if error is not None and error.code() != KafkaError._PARTITION_EOF:
            if error.code() == KafkaError._AUTO_OFFSET_RESET:
                raise _gone(place)
            if place[0] is not None or error.fatal():
                raise faults.fault(error, "reading the topic", sink)
            continue  # of a connection: the client reconnects
        if place not in left:
            continue
        end = ranges[place][1]
        if error is None and message.offset() < end:
            taken.append(message)
        if message.offset() >= end - (error is None):
            left.discard(place)
            ended.add(place)
    if ended:  # or records after their ranges would be fetched before the others
        consumer.pause([TopicPartition(*place) for place in ended])
    return taken


def _gone(place: Place) -> SinkError:
    topic, partition = place
    return SinkError(
        "sink.offset_gone",
        f"retention removed records of {topic}[{partition}] while they were read",
        where=f"topic {topic}",
        suggestion="nothing to do: reading restarts at the oldest record left; if this repeats,"
        " raise the topic's retention.ms",
        retriable=True,
    )


def iter_ranges(
    clients: Clients, ranges: Mapping[Place, tuple[int, int]], **options: Any
) -> Iterator[Message]:
    """The records of ranges one by one; for options see `iter_chunks`."""
    with closing(iter_chunks(clients, ranges, **options)) as chunks:
        yield from chain.from_iterable(chunks)


def read_committed(
    clients: Clients,
    starts: Mapping[Place, int],
    until: float = float("inf"),
    ends: Mapping[Place, int] | None = None,
    unread: set[Place] | None = None,
) -> Generator[list[Message], None, None]:
    """What a `read_committed` consumer sees up to `ends`, by default the current ones.

    With an infinite `until`, a minute without a record is an error.
    """
    places = list(starts)
    ends = ends or list_offsets(clients, places, "latest", committed=True)
    lows = list_offsets(clients, places, "earliest")
    ranges = {place: (max(at, lows[place]), ends[place]) for place, at in starts.items()}
    timeout = READ_TIMEOUT if until == float("inf") else float("inf")
    return iter_chunks(clients, ranges, until=until, unread=unread, timeout=timeout)


def own_records(
    messages: Iterable[Message],
    app_id: str,
    keys: Collection[bytes] | None = None,
) -> Iterator[tuple[Message, dict[str, Any]]]:
    """Records of this application with their headers; `keys`: only those of these keys."""
    for message in messages:
        if keys is None or message.key() in keys:
            headers = dict(message.headers() or ())
            if records.is_ours(headers, app_id):
                yield message, headers


def has_event(  # noqa: PLR0913 (what is looked for, and where)
    clients: Clients,
    place: Place,
    offsets: tuple[int, int],
    aggregate_id: str,
    version: int,
    *,
    app_id: str,
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
    messages = iter_ranges(clients, {place: (first, end)}, committed=True, meanwhile=meanwhile)
    found = own_records(messages, app_id, {aggregate_id.encode()})
    return any(headers.get(records.SEQUENCE) == str(version).encode() for _, headers in found)


def oldest_events(
    clients: Clients,
    places: list[Place],
    app_id: str,
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
        messages = iter_ranges(clients, left, committed=True, few=True, meanwhile=meanwhile)
        for message, headers in own_records(messages, app_id):
            if (place := (message.topic(), message.partition())) not in found:
                time = (headers.get(records.TIME) or b"").decode(errors="replace")
                found[place] = records.time_of(time)
            if found.keys() >= left.keys():
                break
    return {place: found.get(place) for place in cut}


def origin_of(message: Any, headers: Mapping[str, Any], app_id: str) -> Origin:
    if records.is_ours(headers, app_id):
        return "own"
    key, sequence = message.key(), headers.get(records.SEQUENCE)
    if key is None or sequence is None or not all(name in headers for name in _SHAPE):
        return "unrecognised"
    is_event = headers.get("ce_subject") == key and headers.get("ce_id") == key + b"/" + sequence
    return "other_publisher" if is_event else "unrecognised"


def other_publisher(sink: config.Sink, message: Any) -> SinkError:
    headers = dict(message.headers() or ())
    name = (headers.get(records.SOURCE) or b"").decode(errors="replace")
    return SinkError(
        "sink.other_publisher",
        f"a publisher with the app.id {name!r} has also written to this topic:"
        f" {message.topic()}[{message.partition()}], offset {message.offset()}",
        where=f"topic {sink.topic}",
        suggestion="a topic must be its publisher's own: give each another sink.topic and"
        f" app.state_dir; if this publisher's app.id was {name!r}, set it back",
    )


def check_sample(clients: Clients, app_id: str) -> None:
    """Raise `sink.other_publisher` if another's event is at an end of a partition of the topic."""
    whole = _whole(clients, [clients.sink.topic])
    first = {p: (low, min(low + _SAMPLE, end)) for p, (low, end) in whole.items()}
    last = {p: (max(first[p][1], end - _SAMPLE), end) for p, (_, end) in whole.items()}
    for ranges in (first, last):
        _check(clients, app_id, ranges)


def has_written(clients: Clients, app_id: str, names: Iterable[str] = ()) -> bool:
    """Whether this publisher has records on these topics, by default on the topic of the events."""
    whole = _whole(clients, names or [clients.sink.topic])
    own = own_records(iter_ranges(clients, whole, committed=True), app_id)
    return next(own, None) is not None


def check_sides(clients: Clients, app_id: str) -> None:
    """Raise `sink.side_topics_left` if the topic is new, and its side topics have own records."""
    topic, *sides = clients.sink.topics
    is_new = not any(end for _, end in _whole(clients, [topic]).values())
    if is_new and has_written(clients, app_id, sides):
        raise faults.sides_left(clients.sink)


def _whole(clients: Clients, names: Iterable[str]) -> dict[Place, tuple[int, int]]:
    """Low and last stable offset of each partition of these topics, as far as they exist."""
    counts = partition_counts(clients)
    places = [(name, number) for name in names for number in range(counts.get(name, 0))]
    lows = list_offsets(clients, places, "earliest")
    ends = list_offsets(clients, places, "latest", committed=True)
    return {place: (lows[place], ends[place]) for place in places}


def check_between(clients: Clients, app_id: str, ranges: Mapping[Place, tuple[int, int]]) -> None:
    """Look for another publisher's events at the beginning of ranges this one has not written.

    Also uncommitted ones: waiting would block as long as a transaction is open there.
    """
    own = {p: r for p, r in ranges.items() if p[0] == clients.sink.topic}
    lows = list_offsets(clients, list(own), "earliest")
    began = {place: max(at, lows[place]) for place, (at, _) in own.items()}
    some = {place: (at, min(own[place][1], at + _MOST_BETWEEN)) for place, at in began.items()}
    _check(clients, app_id, some, committed=False)


def first_own(
    clients: Clients,
    app_id: str,
    ranges: Mapping[Place, tuple[int, int]],
    timeout: float,
) -> Any:
    """This publisher's first record in some offsets, committed or not; None if there is none.

    Raises `sink.other_publisher` if another's event comes before it on the topic, and
    `sink.unreachable` after `timeout` seconds without a record.
    """
    for message in iter_ranges(clients, ranges, committed=False, timeout=timeout):
        origin = origin_of(message, dict(message.headers() or ()), app_id)
        if origin == "own":
            return message
        if origin == "other_publisher" and message.topic() == clients.sink.topic:
            raise other_publisher(clients.sink, message)
    return None


def _check(
    clients: Clients,
    app_id: str,
    ranges: Mapping[Place, tuple[int, int]],
    *,
    committed: bool = True,
) -> None:
    try:
        found = [*iter_ranges(clients, ranges, committed=committed, few=True, timeout=_LONGEST)]
    except SinkError as error:
        if error.code != "sink.unreachable":
            raise
        return  # the sample is optional: a fold finds what it would have found
    for message in found:
        if origin_of(message, dict(message.headers() or ()), app_id) == "other_publisher":
            raise other_publisher(clients.sink, message)
