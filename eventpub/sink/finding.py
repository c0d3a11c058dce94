"""Whether one event stands in a range of a partition."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from eventpub import config
from eventpub.sink import records
from eventpub.sink.missing_markers import MARKER_TIMEOUT, PartitionId, iter_ranges
from eventpub.sink.topics import list_offsets


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
    key, sequence = aggregate_id.encode(), str(version).encode()
    found = iter_ranges(sink, {place: (first, end)}, committed=True, meanwhile=meanwhile)
    for message in found:
        if message.key() == key:
            headers = dict(message.headers() or ())
            if headers.get(records.SEQUENCE) == sequence and records.is_ours(
                headers.items(), app_ids
            ):
                return True
    return False
