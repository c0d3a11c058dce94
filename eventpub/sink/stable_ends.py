"""To where a shard's partitions are to be read: their ends, when nothing is open before them.

A fold reads to the *high watermark*: a reader that trusted the last stable offset would stop before
an open transaction and publish its events a second time. So no transaction may be open there; see
`missing_markers` for how one may be although its producer is fenced. Those of other shards are
waited for, up to ends that are taken once: where they overlap, one stands before any end that is
taken later. What must hold: ends are given only where everything before them is committed or
aborted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from eventpub import config
from eventpub.sink.folded import Scope
from eventpub.sink.missing_markers import (
    MARKER_TIMEOUT,
    MissingMarkerError,
    PartitionId,
    Written,
    hanging,
)
from eventpub.sink.topics import End, check_leaders, list_offsets, tail_gone


@dataclass(frozen=True)
class _Seen:
    """What the broker has answered.

    Attributes:
        ends: high watermarks.
        stable: last stable offsets.
        short: partitions that end before their saved offset.
    """

    ends: dict[PartitionId, int]
    stable: dict[PartitionId, int]
    short: set[PartitionId]

    @property
    def blocked(self) -> set[PartitionId]:
        """Partitions with an open transaction."""
        return {place for place, end in self.ends.items() if self.stable[place] < end}


class StandingStill:
    """For how long the last stable offset of each partition has stood still."""

    def __init__(self) -> None:
        self._stable: dict[PartitionId, int] = {}
        self._since: dict[PartitionId, float] = {}
        self._now = 0.0

    def seen(self, stable: Mapping[PartitionId, int], now: float) -> None:
        """Last stable offsets, as the broker has just given them."""
        self._now = now
        for place, offset in stable.items():
            if self._stable.get(place) != offset:
                self._stable[place], self._since[place] = offset, now

    def seconds(self, place: PartitionId) -> float:
        """Since it was another one."""
        return self._now - self._since[place]


class StableEnds:
    """Waits for the ends of the partitions of a fold, and has its own transactions ended there.

    Args:
        scope: which partitions.
        written: where a saved offset is that of a transaction's end: what it has written.
        acknowledged: next offsets up to which all counts as committed, though the saved ones, of a
            lost or older index, may be behind.
        end_open: ends what the shard's own producer has open in these partitions.
        timeout: seconds after which an open transaction is an error.
        meanwhile: called again and again while it waits; what it raises ends that.
    """

    def __init__(  # noqa: PLR0913 (as of a fold)
        self,
        scope: Scope,
        written: Mapping[PartitionId, Written],
        acknowledged: Mapping[PartitionId, int],
        end_open: Callable[[set[PartitionId]], None] | None,
        timeout: float,
        *,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        self._scope = scope
        self._written = written
        self._acknowledged = acknowledged
        self._end_open = end_open
        self._timeout = timeout
        self._meanwhile = meanwhile

    def settle(self, saved: Mapping[PartitionId, int]) -> dict[PartitionId, int]:
        """The ends, once no transaction is open and none of them is before its saved offset.

        Raises:
            MissingMarkerError: something that was committed is not visible.
            SinkError: `sink.hanging_transaction`, `sink.topic_recreated`, or as `check_topics`.
        """
        began: float | None = None
        still = StandingStill()
        ended: set[PartitionId] = set()
        kept: dict[PartitionId, int] = {}
        while True:
            ends = {**self._list("latest"), **kept}
            short = {p for p, end in ends.items() if self._reached(p, saved.get(p, 0)) > end}
            kept |= {p: end for p, end in ends.items() if p in self._scope.of_others - short}
            seen = _Seen(ends, self._list("latest", committed=True), short)
            now = time.monotonic()
            began = began or now  # not before the broker answers
            still.seen(seen.stable, now)
            held = seen.blocked | short
            if not held:
                return ends
            if now - began > MARKER_TIMEOUT:
                seconds = {place: still.seconds(place) for place in held}
                # a marker may come after the answer that its transaction is over
                late = {place for place, since in seconds.items() if since > MARKER_TIMEOUT}
                self._check_committed(seen, saved, late)
                own = (seen.blocked & late) - self._scope.of_others - ended
                if self._end_open is not None and own:
                    self._end_open(own)
                    ended |= own
                elif max(seconds.values()) > self._timeout or now - began > 4 * self._timeout:
                    place = max(sorted(seconds), key=seconds.__getitem__)
                    stable, end = seen.stable[place], ends[place]
                    raise hanging(self._scope.sink, place, stable, end, seconds[place])
            self._meanwhile()
            time.sleep(0.02 if now - began < 0.5 else 0.2)

    def _check_committed(
        self, seen: _Seen, saved: Mapping[PartitionId, int], late: set[PartitionId]
    ) -> None:
        """Whether all that is known as committed is still there, and none of it left open.

        Args:
            late: partitions in which what is open has been so for long.
        """
        sink, ends = self._scope.sink, seen.ends
        for place in sorted(seen.short):
            # a marker that is missing is one offset
            at = saved.get(place, 0)
            known = self._reached(place, at - (self.before_marker(place, at) is not None))
            if ends[place] < known:
                raise tail_gone(sink, place, known, ends[place])
        missing_markers = {}
        for place in late - self._scope.of_others:
            first = seen.stable[place]
            known = min(self._acknowledged.get(place, 0) - 1, ends[place])
            written = self.before_marker(place, saved.get(place))
            if written is not None and first <= written[0]:
                known = max(known, written[1])
            if known > first:
                missing_markers[place] = (first, known)
            elif place in seen.short:
                raise tail_gone(sink, place, saved[place], ends[place])
        if missing_markers:
            raise MissingMarkerError(missing_markers)

    def _reached(self, place: PartitionId, saved: int) -> int:
        """What the partition must have: `saved`, or what was acknowledged to a former index.

        A side topic that was made again may have less than that.
        """
        is_own = self._scope.kind(place) == "events" and place not in self._scope.of_others
        return max(saved, self._acknowledged.get(place, 0) - 1) if is_own else saved

    def before_marker(self, place: PartitionId, saved: int | None) -> Written | None:
        """What was written before the marker that a saved offset counts on; None: it does not."""
        written = self._written.get(place)
        return None if written is None or saved != written[1] + 1 else written

    def sides_are_whole(self, ends: Mapping[PartitionId, int]) -> bool:
        """Whether skips and dead letters are known to their ends, before events are read.

        Of events that are read, and of a skip below them that is not since a broker has answered
        that leads no more, it would follow that a late event of that skip was published: it would
        be dropped, and nothing that is written afterwards shows that.
        """
        sides = [p for p in ends if self._scope.kind(p) in {"gaps", "dead"}]
        sides = [p for p in sides if p not in self._scope.of_others]
        if not sides:
            return True
        check_leaders(self._scope.sink, sides)
        now = self._list("latest")
        return all(now[place] == ends[place] for place in sides)

    def starts(self) -> dict[PartitionId, int]:
        """Where retention has left the beginning of each partition."""
        return self._list("earliest")

    def _list(self, end: End, *, committed: bool = False) -> dict[PartitionId, int]:
        scope = self._scope
        optional = frozenset({scope.sink.late_topic})
        return list_offsets(scope.sink, scope.places, end, committed=committed, optional=optional)


def are_left_open(sink: config.Sink, ends: Mapping[PartitionId, int], timeout: float) -> bool:
    """Whether a transaction keeps readers from what was committed up to these offsets.

    Raises:
        SinkError: as `check_topics`.
    """
    stable = list_offsets(sink, list(ends), "latest", committed=True, timeout=timeout)
    return any(stable[place] < end for place, end in ends.items())
