"""How far the position is below the boundary, in seconds and in events: for monitoring."""

from __future__ import annotations

import time
from collections.abc import Callable

from eventpub.sources.base import Poll
from eventpub.sources.mysql import EventStore

MOST_EVENTS = 100_000
"""Events that are counted, at most."""

_SHARE = 0.01
"""Of the time that may go into counting."""


class Lag:
    """Looks how far; the oldest event each time, the number of events where that costs little.

    Counting takes a database a fifth of what reading takes, and at the start of a drain it has most
    to do: so a part is counted. A long backlog is counted again after a hundred times of what
    counting it took, and until then what was read since is taken off.

    Attributes:
        seconds: age of the oldest event below the boundary that is not read yet; 0: none is.
        events: how many there are; at most `MOST_EVENTS`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = 0.0
        self.events = 0
        self._clock = clock
        self._again = 0.0
        self._counted = self._read = 0

    def measure(self, store: EventStore, position: int, delay: int, read: int) -> Poll:
        """Measure once more; what the store says of time and boundary.

        Args:
            position: everything created at or before is read, µs.
            delay: between the boundary and the database's time, µs.
            read: rows read so far.

        Raises:
            StoreError: nothing has changed here then.
        """
        poll = store.poll(position, delay, 1)
        if not poll.has_rows:
            self.nothing()
            return poll
        now = self._clock()
        if now >= self._again:
            _, self._counted = store.waiting(position, poll.upper, MOST_EVENTS)
            self._read = read
            done = self._clock()
            self._again = done + (done - now) / _SHARE
        self.seconds = max(0.0, (poll.upper - (poll.page_end or poll.upper)) / 1e6)
        self.events = self._counted
        if self._counted < MOST_EVENTS:
            self.events = max(1, self._counted - (read - self._read))
        return poll

    def nothing(self) -> None:
        """Everything is read."""
        self.seconds, self.events, self._again = 0.0, 0, 0.0
