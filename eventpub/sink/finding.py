"""Single events of the topic: whether one stands in a range, which is the oldest."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import closing

from eventpub import config
from eventpub.sink import records
from eventpub.sink.folded import time_of
from eventpub.sink.missing_markers import MARKER_TIMEOUT, PartitionId
from eventpub.sink.reading import READ_TIMEOUT, Reading, iter_ranges, own_records
from eventpub.sink.topics import list_offsets

_FEW = 50
"""Offsets of a partition that are read at first: mostly the first one is an event."""


def has_event(  # noqa: PLR0913 (what is looked for, and where)
    sink: config.Sink,
    place: PartitionId,
    offsets: tuple[int, int],
    aggregate_id: str,
    version: int,
    *,
    app_ids: Collection[str],
    meanwhile: Callable[[], None],
) -> bool | None:
    """Whether it does, committed; None: that cannot be known, since retention has removed a part of
    the range, or an open transaction of another producer keeps it from readers.

    Args:
        sink: the section `[sink]`.
        place: the partition.
        offsets: the first and the next after the last.
        aggregate_id, version: of the event.
        app_ids: whose events count, by `ce_source`.
        meanwhile: called again and again; what it raises ends the reading.

    Raises:
        SinkError: the range cannot be read.
    """
    first, end = offsets
    if first >= end:
        return False
    if list_offsets(sink, [place], "earliest")[place] > first:
        return None
    until = time.monotonic() + MARKER_TIMEOUT  # a commit is answered before its markers are written
    while list_offsets(sink, [place], "latest", committed=True)[place] < end:
        meanwhile()
        if time.monotonic() > until:
            return None
        time.sleep(0.1)
    ranges, sequence = {place: (first, end)}, str(version).encode()
    with closing(Reading(sink, ranges, patience=READ_TIMEOUT, meanwhile=meanwhile)) as reading:
        found = own_records(reading, app_ids, {aggregate_id.encode()})
        return any(headers.get(records.SEQUENCE) == sequence for _, headers in found)


def oldest_events(
    sink: config.Sink,
    places: list[PartitionId],
    app_ids: Collection[str],
    meanwhile: Callable[[], None] = lambda: None,
) -> dict[PartitionId, int | None]:
    """When the oldest event that retention has left was created, of each partition that it has cut.

    Args:
        places: the partitions; those that still have their first record are left out.
        app_ids: whose events count, by `ce_source`.
        meanwhile: called again and again; what it raises ends the reading.

    Returns:
        µs; None: no event is left.

    Raises:
        SinkError: a partition cannot be read.
    """
    lows = list_offsets(sink, places, "earliest")
    cut = [place for place in places if lows[place] > 0]
    ends = list_offsets(sink, cut, "latest", committed=True)
    found: dict[PartitionId, int | None] = {}
    for most in (_FEW, None):
        left = {p: (lows[p], ends[p]) for p in cut if p not in found}
        if most is not None:
            left = {p: (low, min(low + most, end)) for p, (low, end) in left.items()}
        for message in iter_ranges(sink, left, committed=True, few=True, meanwhile=meanwhile):
            place, headers = (message.topic(), message.partition()), dict(message.headers() or ())
            if place not in found and records.is_ours(headers.items(), app_ids):
                found[place] = time_of((headers.get(records.TIME) or b"").decode(errors="replace"))
                if found.keys() >= left.keys():
                    break
    return {place: found.get(place) for place in cut}
