"""Whose transaction keeps readers from the end of a partition, and for how long it has.

Kafka gives readers nothing behind the first open transaction, whoever's it is. Where other
producers write to the topic in transactions that overlap, one of theirs may be open at any time:
that says nothing of ours. The record at the last stable offset is the first of the transaction that
is open there, and says who has written it.

What must hold: a transaction of ours is never taken for another's for good, since nobody but us
would end it. What stands behind one of others' is not known: it is found when that one has ended,
since the last stable offset stops at ours then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from eventpub import config
from eventpub.errors import SinkError
from eventpub.sink import client
from eventpub.sink.missing_markers import PartitionId, read_ranges
from eventpub.sink.origin import Sources
from eventpub.sink.topics import list_offsets

OTHERS_TIMEOUT = 1000.0
"""Seconds after which an open transaction is not taken for one of others' any more: by default a
broker lets none last longer than 15 minutes (`transaction.max.timeout.ms`)."""

_READ_TIMEOUT = 5.0
_FIRST_SAID = 10.0
_SAID_EVERY = 60.0


class FirstOpen:
    """What is open in some partitions, asked again and again.

    Args:
        sink: the configuration.
        sources: whose records are ours; None: all are.
    """

    def __init__(self, sink: config.Sink, sources: Sources | None) -> None:
        self._sink = sink
        self._sources = sources
        self._stable: dict[PartitionId, int] = {}
        self._since: dict[PartitionId, float] = {}
        self._of_others: dict[PartitionId, bool] = {}
        self._said_at = 0.0
        self._now = 0.0

    def seen(self, stable: Mapping[PartitionId, int], now: float) -> None:
        """Last stable offsets, as the broker has just given them."""
        self._now = now
        self._said_at = self._said_at or now + _FIRST_SAID - _SAID_EVERY
        for place, offset in stable.items():
            if self._stable.get(place) != offset:
                self._stable[place], self._since[place] = offset, now
                self._of_others.pop(place, None)

    def seconds(self, place: PartitionId) -> float:
        """How long the last stable offset of a partition has stood still."""
        return self._now - self._since[place]

    def of_others(self, blocked: Iterable[PartitionId]) -> set[PartitionId]:
        """Those of the partitions in which the first open transaction is another producer's.

        What cannot be read counts as ours, as does what another publisher of events has written:
        that is an error, which is found elsewhere.
        """
        recent = {place for place in blocked if self.seconds(place) <= OTHERS_TIMEOUT}
        unread = {p: self._stable[p] for p in recent if p not in self._of_others}
        if unread and self._sources is not None:
            others = _of_others(self._sink, self._sources, unread)
            if others is not None:
                self._of_others |= {place: place in others for place in unread}
        found = {place for place in recent if self._of_others.get(place)}
        self._say(found)
        return found

    def _say(self, found: set[PartitionId]) -> None:
        if not found or self._now - self._said_at < _SAID_EVERY:
            return
        self._said_at = self._now
        topic, partition = place = min(found, key=lambda each: self._since[each])
        client.log.warning(
            "%s[%d] is held by a transaction of another producer, which began at offset %d and has"
            " been first for %.0f s: what was published behind it cannot be read before that has"
            " ended; this shard waits for it",
            *(topic, partition, self._stable[place], self.seconds(place)),
        )


def are_left_open(
    sink: config.Sink,
    sources: Sources,
    ends: Mapping[PartitionId, int],
    timeout: float,
) -> bool:
    """Whether a transaction of ours keeps readers from what was committed up to these offsets.

    One of another producer's says nothing of ours: when that has ended, it is asked again.

    Raises:
        SinkError: as `check_topics`.
    """
    stable = list_offsets(sink, list(ends), "latest", committed=True, timeout=timeout)
    blocked = {place: stable[place] for place, end in ends.items() if stable[place] < end}
    return bool(blocked.keys() - (_of_others(sink, sources, blocked) or set()))


def _of_others(
    sink: config.Sink, sources: Sources, stable: Mapping[PartitionId, int]
) -> set[PartitionId] | None:
    """Where the record at the last stable offset is another producer's; None: reading failed."""
    ranges = {place: (at, at + 1) for place, at in stable.items()}
    try:
        found = read_ranges(sink, ranges, committed=False, few=True, timeout=_READ_TIMEOUT)
    except SinkError as error:
        client.log.info("reading what is first of an open transaction: %s", error)
        return None
    return {(m.topic(), m.partition()) for m in found if _is_of_others(sources, m)}


def _is_of_others(sources: Sources, message: Any) -> bool:
    headers = dict(message.headers() or ())
    if not (headers or message.key() or message.value()):
        return False  # a record by which we end what was left open
    return sources.origin(message, headers) in {"ignored", "unrecognised"}
