"""What is checked now and then: lag, topic, table, ends, and samples of the newest rows.

Each is a command, of which one is under way at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from eventpub.channel import PartitionId
from eventpub.coordinator import events as e
from eventpub.coordinator.shards import Shard
from eventpub.errors import EventpubError

_SECOND = 1.0
_TOPIC_EVERY = 5.0
"""Seconds between two checks whether the topic is the same, and whether another publisher writes to
it where this one does not."""

_IN_DOUBT_AFTER = 0.5
_TABLE_EVERY = 60.0
"""Seconds between two checks whether the event table is the same: by an altered type its times are
read wrongly, by an altered collation no index is of use any more."""

_OF_ANOTHER_TABLE = {"store.table_altered", "store.index_missing", "store.column_missing"}

_OPEN_EVERY = 10.0
"""Seconds without a window after which what consumers see is compared with what was published."""

_IDLE_AFTER = 2.0
"""Seconds without a report of rows after which a publisher is idle."""


class Checks:
    """When each is due, in the machine's seconds.

    Args:
        is_exact: whether transactions are used: only then one can be left open.
    """

    def __init__(self, is_exact: bool) -> None:
        self._is_exact = is_exact
        self.second_at = 0.0
        self._topic_at = self._table_at = self._open_at = 0.0
        self._busy_at = float("-inf")
        self._stood: dict[PartitionId, int] = {}
        self._under_way: set[type[e.Command]] = set()

    def is_second(self, now: float) -> bool:
        """Whether another second has begun; it has then."""
        if now < self.second_at:
            return False
        self.second_at = now + _SECOND
        return True

    def had_rows(self, now: float) -> None:
        self._busy_at = now

    def due(
        self,
        now: float,
        time: int,
        position: tuple[int, int],
        ends: Mapping[PartitionId, int],
        shards: Sequence[Shard],
    ) -> Iterator[e.Command]:
        """What is to be checked now.

        Args:
            time: the database's, µs; 0: it is not known yet.
            position: everything created at or before is read, µs; and how many rows.
            ends: up to where the topics are known to be written.
        """
        if e.MeasureLag not in self._under_way:
            yield self._begin(e.MeasureLag(*position))
        if e.Sample not in self._under_way and time:
            yield self._begin(e.Sample())
        if now >= self._topic_at and e.CheckTopic not in self._under_way:
            self._topic_at = now + _TOPIC_EVERY
            stood, self._stood = self._stood, dict(ends)
            yield self._begin(
                e.CheckTopic({at: end for at, end in ends.items() if stood.get(at) == end})
            )
        if now >= self._table_at:
            self._table_at = now + _TABLE_EVERY
            yield e.CheckTable()
        if now - self._busy_at < _IDLE_AFTER or not ends:
            self._open_at = now + _OPEN_EVERY
        elif now >= self._open_at and self._is_exact and all(s.is_idle() for s in shards):
            self._open_at = now + _OPEN_EVERY
            yield e.CheckOpen(ends)

    def met(self, error: EventpubError, now: float) -> None:
        """Where a statement has met another table than is known, it is looked at soon."""
        if error.code in _OF_ANOTHER_TABLE:
            self._table_at = min(self._table_at, now + _IN_DOUBT_AFTER)

    def _begin(self, command: e.Command) -> e.Command:
        self._under_way.add(type(command))
        return command

    def is_done(self, kind: type[e.Command]) -> None:
        """A command of this type may be given again; while a server hangs no more are waiting."""
        self._under_way.discard(kind)
