"""What may count as published, since neither the topic nor an index tells it any more.

What is promised, worked out from the broker's log and the rows, not from what the publisher says:
all that was created up to what has been read less the horizon and the longest hold; and what the
table had when that was decided, up to the time of the oldest event that retention has left of its
partition, or of a partition of which nothing is left, up to what has been read. And all that was
created up to that time is to count, as far as the coordinator knows that all was published.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eventpub.sink.records import parse_times

if TYPE_CHECKING:
    from tests.simulation.broker import Broker
    from tests.simulation.world import Row, World


@dataclass(frozen=True)
class _Moment:
    """One at which an index was lost, or older than where a topic was cut.

    Attributes:
        kept: everything created until then was published, but for what open transactions hid.
        cut_before: the same of what is gone from the topic, by partition.
        low: until when the coordinator knows that all was published; 0: it has lost the state.
        uncounted: what open transactions hid and has committed by then, by `World.moment`, is told
            by nothing but a later version: nothing is counted again; 0: it is.
    """

    kept: int
    cut_before: tuple[int, ...]
    low: int
    uncounted: int

    def _cut(self, aggregate: int) -> int:
        return self.cut_before[aggregate % len(self.cut_before)]

    def at_least(self, aggregate: int) -> int:
        """Up to where they must, so that nothing is repeated, µs."""
        return min(self.low, self._cut(aggregate))

    def upto(self, aggregate: int, *, is_seen: bool, was_there: bool) -> int:
        """Up to where events of an aggregate, by its hash, may count as published, µs."""
        return max(was_there * self._cut(aggregate), (not is_seen) * self.kept)


class Forgotten:
    """All such moments of a world."""

    def __init__(self) -> None:
        self._moments: list[_Moment] = []
        self._counted_at = 0

    def counts(self, world: World) -> None:
        """What the table has now is counted as published, as far as it may be."""
        self._counted_at = world.moment

    def note(self, world: World, low: int) -> None:
        """One more, as the world is now."""
        setup, broker = world.setup, world.broker
        waits = setup.horizon + setup.backoff_base * ((1 << setup.max_backoff) - 1)
        cut = [_oldest(broker, p, world.reached) for p in range(broker.partitions)]
        kept = min(world.reached, world.clock) - waits
        reached = world.reached
        if world.has_lost_progress:  # then it is told by the newest event that is left
            reached = max(reached, newest := _newest(broker, world.clock))
            kept = max(kept, newest - waits)
        reached = max(reached, kept)
        before = tuple(min(reached, at) for at in cut)
        low = 0 if world.has_lost_progress else low
        uncounted = 0 if setup.horizon else world.moment
        self._moments.append(_Moment(kept, before, low, uncounted))

    @property
    def baseline(self) -> int:
        """Up to where events may count as published, whatever the table has, µs; 0: none may."""
        return max((m.kept for m in self._moments), default=0)

    def at_least(self, aggregate: int) -> int:
        """Up to where events of an aggregate, by its hash, were to count as published at each of
        them, µs."""
        return min((m.at_least(aggregate) for m in self._moments), default=0)

    def upto(self, aggregate: int, row: Row | None = None, *, is_hidden: bool = True) -> int:
        """Up to where events of an aggregate may count as published, µs; 0: none may.

        Args:
            aggregate: its hash.
            row: one of its rows; of one that was seen open nothing but its own record says it.
            is_hidden: whether the publisher remembers what it has seen.
        """
        is_seen = is_hidden and row is not None and bool(row.seen)
        committed = 0 if row is None else row.committed
        was_there = committed <= self._counted_at
        of = (
            m.upto(aggregate, is_seen=is_seen and committed > m.uncounted, was_there=was_there)
            for m in self._moments
        )
        return max(of, default=0)

    def __bool__(self) -> bool:
        return bool(self._moments)


def _oldest(broker: Broker, partition: int, nothing: int) -> int:
    """When the oldest event left in a partition was created; 0: it was not cut."""
    place = broker.topics[0], partition
    low = broker.lows.get(place, 0)
    return next(iter(_times(broker, place, low)), nothing) if low else 0


def _newest(broker: Broker, now: int) -> int:
    places = [(broker.topics[0], p) for p in range(broker.partitions)]
    times = (at for place in places for at in _times(broker, place, broker.lows.get(place, 0)))
    return max((at for at in times if at <= now), default=0)


def _times(broker: Broker, place: tuple[str, int], low: int) -> Iterable[int]:
    for message in broker.read(place, low):
        if not message.is_foreign:
            yield parse_times([(dict(message.headers())["ce_time"] or b"").decode()]).tolist()[0]
