"""Which publisher has written a record of the topic, and what follows from it.

The fold takes the versions on the topic for published, so it may believe only what this publisher
has written: `ce_source` must be its application id, or one that it had before. What must hold: no
record of another writer raises a version here, and no second publisher stays unnoticed: it would
publish everything twice, since publishers of different ids do not fence each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from eventpub import config
from eventpub.errors import SinkError
from eventpub.sink import faults, records, topics
from eventpub.sink.client import Clients
from eventpub.sink.reading import iter_ranges
from eventpub.sink.records import PartitionId

Origin = Literal["own", "other_publisher", "unrecognised"]

_SHAPE = (records.SOURCE, "ce_specversion", "ce_type", records.TIME)
_SAMPLE = 50
"""Offsets that are read of each end of a partition by `check_sample`."""
_LONGEST = 5.0
"""Seconds that a sample may take."""
_MOST_BETWEEN = 200
"""Offsets that are read of a partition by `check_between`."""

Sources = frozenset[str]
"""Application ids, as `ce_source` has them: this publisher's, and those that it had before."""


def sources_of(app_id: str, former_ids: Iterable[str] = ()) -> Sources:
    """What the configuration says of them."""
    return frozenset({app_id, *former_ids})


def origin_of(message: Any, headers: Mapping[str, Any], sources: Sources) -> Origin:
    """Whose a record of the topic is."""
    if records.is_ours(headers, sources):
        return "own"
    key, sequence = message.key(), headers.get(records.SEQUENCE)
    if key is None or sequence is None or not all(name in headers for name in _SHAPE):
        return "unrecognised"
    is_event = headers.get("ce_subject") == key and headers.get("ce_id") == key + b"/" + sequence
    return "other_publisher" if is_event else "unrecognised"


def other_publisher(sink: config.Sink, message: Any) -> SinkError:
    """Another publisher's event is on the topic."""
    headers = dict(message.headers() or ())
    name = (headers.get(records.SOURCE) or b"").decode(errors="replace")
    return SinkError(
        "sink.other_publisher",
        f"a publisher with the app.id {name!r} has also written to this topic:"
        f" {message.topic()}[{message.partition()}], offset {message.offset()}",
        where=f"topic {sink.topic}",
        suggestion="a topic must be its publisher's own: give each another sink.topic and"
        f" app.state_dir; if this publisher was called {name!r} before:"
        f" app.former_ids = [{json.dumps(name)}]",
    )


def check_sample(clients: Clients, sources: Sources) -> None:
    """Look for another publisher's events at both ends of each partition of the topic.

    Raises:
        SinkError: `sink.other_publisher`.
    """
    whole = _whole(clients, [clients.sink.topic])
    first = {p: (low, min(low + _SAMPLE, end)) for p, (low, end) in whole.items()}
    last = {p: (max(first[p][1], end - _SAMPLE), end) for p, (_, end) in whole.items()}
    for ranges in (first, last):
        _check(clients, sources, ranges)


def has_written(clients: Clients, sources: Sources, names: Iterable[str] = ()) -> bool:
    """Whether there are records of this publisher.

    Args:
        names: of the topics; by default the topic of the events.
    """
    ranges = _whole(clients, names or [clients.sink.topic])
    return any(
        records.is_ours(dict(message.headers() or ()), sources)
        for message in iter_ranges(clients, ranges, committed=True)
    )


def check_sides(clients: Clients, sources: Sources) -> None:
    """Whether the side topics are of this topic, where no state says so: not if it was never
    written, and they were.

    Raises:
        SinkError: `sink.side_topics_left`.
    """
    topic, *sides = clients.sink.topics
    is_new = not any(end for _, end in _whole(clients, [topic]).values())
    if is_new and has_written(clients, sources, sides):
        raise faults.sides_left(clients.sink)


def _whole(clients: Clients, names: Iterable[str]) -> dict[PartitionId, tuple[int, int]]:
    """What readers see of some topics, as far as these are there."""
    counts = topics.partition_counts(clients)
    places = [(name, number) for name in names for number in range(counts.get(name, 0))]
    lows = topics.list_offsets(clients, places, "earliest")
    ends = topics.list_offsets(clients, places, "latest", committed=True)
    return {place: (lows[place], ends[place]) for place in places}


def check_between(
    clients: Clients, sources: Sources, ranges: Mapping[PartitionId, tuple[int, int]]
) -> None:
    """Look for another publisher's events in offsets that this one has not written.

    Committed or not: waiting for that would block as long as a transaction is open there.

    Args:
        ranges: first and next offset; of a long range, its beginning is read.
    """
    own = {p: r for p, r in ranges.items() if p[0] == clients.sink.topic}
    lows = topics.list_offsets(clients, list(own), "earliest")
    began = {place: max(at, lows[place]) for place, (at, _) in own.items()}
    some = {place: (at, min(own[place][1], at + _MOST_BETWEEN)) for place, at in began.items()}
    _check(clients, sources, some, committed=False)


def first_own(
    clients: Clients,
    sources: Sources,
    ranges: Mapping[PartitionId, tuple[int, int]],
    timeout: float,
) -> Any:
    """The first record of this publisher in some offsets, committed or not; None: there is none.

    Args:
        ranges: first and next offset.
        timeout: seconds without a record after which it fails.

    Raises:
        SinkError: `sink.other_publisher`: an event of another one comes before, on the topic; ….
    """
    for message in iter_ranges(clients, ranges, committed=False, timeout=timeout):
        origin = origin_of(message, dict(message.headers() or ()), sources)
        if origin == "own":
            return message
        if origin == "other_publisher" and message.topic() == clients.sink.topic:
            raise other_publisher(clients.sink, message)
    return None


def _check(
    clients: Clients,
    sources: Sources,
    ranges: Mapping[PartitionId, tuple[int, int]],
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
        if origin_of(message, dict(message.headers() or ()), sources) == "other_publisher":
            raise other_publisher(clients.sink, message)
