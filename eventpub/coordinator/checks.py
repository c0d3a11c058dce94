"""What is checked now and then: lag, topic, table, ends, and samples of the newest rows.

Each is a command, of which one is under way at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from eventpub.channel import PartitionId
from eventpub.coordinator import events as e
from eventpub.coordinator.shards import Shard

_SECOND = 1.0
_TOPIC_EVERY = 5.0
"""Seconds between two checks whether the topic is the same, and whether another publisher writes to
it where this one does not."""

_IN_DOUBT_AFTER = 0.5
_TABLE_EVERY = 60.0
"""Seconds between two checks whether the event table is the same: by an altered type its times are
read wrongly, by an altered collation no index is of use any more."""

_OPEN_EVERY = 10.0
"""Seconds without a window after which what consumers see is compared with what was published."""

_IDLE_AFTER = 2.0
"""Seconds without a report of rows after which a publisher is idle."""


class Checks:
    """When each is due, in the machine's seconds.

    Args:
        is_exact: whether transactions are used, so that one can be left open.
    """

    def __init__(self, is_exact: bool) -> None:
        self._is_exact = is_exact
        self.second_at = 0.0
        self._topic_at = self._table_at = self._open_at = 0.0
        self._busy_at = float("-inf")
        self._stood: dict[PartitionId, int] = {}
        self._measures_lag = self._checks_topic = False
        self._samples = False

    def is_second(self, now: float) -> bool:
        """Whether another second has begun; it has then."""
        if now < self.second_at:
            return False
        self.second_at = now + _SECOND
        return True

    def had_rows(self, now: float) -> None:
        """A shard has reported some."""
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
        if not self._measures_lag:
            self._measures_lag = True
            yield e.MeasureLag(*position)
        if not self._samples and time:
            self._samples = True
            yield e.Sample()
        if now >= self._topic_at and not self._checks_topic:
            self._topic_at, self._checks_topic = now + _TOPIC_EVERY, True
            stood, self._stood = self._stood, dict(ends)
            yield e.CheckTopic({at: end for at, end in ends.items() if stood.get(at) == end})
        if now >= self._table_at:
            self._table_at = now + _TABLE_EVERY
            yield e.CheckTable()
        if now - self._busy_at < _IDLE_AFTER or not ends:
            self._open_at = now + _OPEN_EVERY
        elif now >= self._open_at and self._is_exact and all(s.is_idle() for s in shards):
            self._open_at = now + _OPEN_EVERY
            yield e.CheckOpen(ends)

    def table_is_in_doubt(self, now: float) -> None:
        """A statement has met another table than is known: it is looked at soon."""
        self._table_at = min(self._table_at, now + _IN_DOUBT_AFTER)

    def topic_is_checked(self) -> None:
        """It may be checked again; while a broker hangs no more are waiting."""
        self._checks_topic = False

    def lag_is_measured(self) -> None:
        """It may be measured again."""
        self._measures_lag = False

    def is_sampled(self) -> None:
        """It may be sampled again."""
        self._samples = False
