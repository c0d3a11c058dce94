"""Which publisher has written a record of the topic.

The fold counts versions on the topic as published, so it must believe only this publisher's
records: `ce_source` is its current or a former application id. A second publisher must be found: it
would publish everything twice, since publishers of different ids do not fence each other.
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
"""Offsets that `check_sample` reads at each end of a partition."""
_LONGEST = 5.0
"""Seconds for a sample."""
_MOST_BETWEEN = 200
"""Offsets of a partition that `check_between` reads."""

Sources = frozenset[str]
"""This publisher's current and former application ids, as in `ce_source`."""

_Ranges = dict[PartitionId, tuple[int, int]]


def sources_of(app_id: str, former_ids: Iterable[str] = ()) -> Sources:
    return frozenset({app_id, *former_ids})


def origin_of(message: Any, headers: Mapping[str, Any], sources: Sources) -> Origin:
    if records.is_ours(headers, sources):
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
        f" app.state_dir; if this publisher was called {name!r} before:"
        f" app.former_ids = [{json.dumps(name)}]",
    )


def check_sample(clients: Clients, sources: Sources) -> None:
    """Raise `sink.other_publisher` if another's event is at an end of a partition of the topic."""
    first, last, _ = _ends_first(_whole(clients, [clients.sink.topic]))
    for ranges in (first, last):
        _check(clients, sources, ranges)


def has_written(clients: Clients, sources: Sources, names: Iterable[str] = ()) -> bool:
    """Whether this publisher has records on these topics, by default on the topic of the events."""
    return any(
        records.is_ours(dict(message.headers() or ()), sources)
        for ranges in _ends_first(_whole(clients, names or [clients.sink.topic]))
        for message in iter_ranges(clients, ranges, committed=True)
    )


def check_sides(clients: Clients, sources: Sources) -> None:
    """Raise `sink.side_topics_left` if the topic is new, and its side topics have own records."""
    topic, *sides = clients.sink.topics
    is_new = not any(end for _, end in _whole(clients, [topic]).values())
    if is_new and has_written(clients, sources, sides):
        raise faults.sides_left(clients.sink)


def _ends_first(whole: _Ranges) -> tuple[_Ranges, _Ranges, _Ranges]:
    """The first offsets of each partition, the last, and those between, where others may write."""
    first = {p: (low, min(low + _SAMPLE, end)) for p, (low, end) in whole.items()}
    last = {p: (max(first[p][1], end - _SAMPLE), end) for p, (_, end) in whole.items()}
    return first, last, {p: (first[p][1], last[p][0]) for p in whole}


def _whole(clients: Clients, names: Iterable[str]) -> dict[PartitionId, tuple[int, int]]:
    """Low and last stable offset of each partition of these topics, as far as they exist."""
    counts = topics.partition_counts(clients)
    places = [(name, number) for name in names for number in range(counts.get(name, 0))]
    lows = topics.list_offsets(clients, places, "earliest")
    ends = topics.list_offsets(clients, places, "latest", committed=True)
    return {place: (lows[place], ends[place]) for place in places}


def check_between(
    clients: Clients, sources: Sources, ranges: Mapping[PartitionId, tuple[int, int]]
) -> None:
    """Look for another publisher's events at the beginning of ranges this one has not written.

    Also uncommitted ones: waiting would block as long as a transaction is open there.
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
    """This publisher's first record in some offsets, committed or not; None if there is none.

    Raises `sink.other_publisher` if another's event comes before it on the topic, and
    `sink.unreachable` after `timeout` seconds without a record.
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
