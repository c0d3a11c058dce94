"""The modelled channel: what is sent arrives in order or not at all; a connection may be lost.

Whether and when either end sees that it is lost is part of a schedule.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from eventpub.channel import Farewell, FromRunner, Hello, Lease, Stop, Work
from eventpub.channel import lane as channel
from eventpub.channel.lane import Joined, Lost, Received, disconnected, superseded

if TYPE_CHECKING:
    from tests.simulation.driver import Driver
    from tests.simulation.world import Worker


class Lane(channel.Lane):
    """The coordinator's end of a connection."""

    def __init__(self, hello: Hello, connection: Connection) -> None:
        super().__init__(hello)
        self._connection = connection

    def send(self, message: Lease | Work) -> None:
        """As there."""
        self._connection.arrives(message)


class Connection(channel.Link):
    """A runner's end.

    Args:
        driver: runs the coordinator.
        worker: runs the runner.
        hello: what the runner says.

    Attributes:
        is_up: whether what is sent arrives.
    """

    def __init__(self, driver: Driver, worker: Worker, hello: Hello) -> None:
        self._driver = driver
        self._coordinator = driver.coordinator
        self._worker = worker
        self._world = driver.world
        self._came: deque[Lease | Work | None] = deque()
        self._unseen = 0
        self._lease = 0
        self._stops = False
        self.is_up = True
        self.lane = Lane(hello, self)
        driver.post(Joined(self.lane))

    # -- what happens to it -----------------------------------------------------------------------

    def arrives(self, message: Lease | Work) -> None:
        """Something was sent to the runner."""
        if not self.is_up:
            return
        self._stops = self._stops or isinstance(message, Stop)
        self._came.append(message)

    def cut(self, unseen: int = 0) -> None:
        """Nothing arrives any more; the runner sends so many reports before it sees that."""
        if self.is_up:
            self.is_up, self._unseen = False, unseen

    def lose(self) -> None:
        """It is lost, and so is what the coordinator has not heard yet."""
        self.cut(self._world.setup.unseen)
        self._driver.lose(self.lane)

    @property
    def is_ready(self) -> bool:
        """Whether who waits for work has something to do."""
        return bool(self._came) or not self.is_up

    @property
    def has_work(self) -> bool:
        """Whether some has come."""
        return bool(self._came) and any(message is not None for message in self._came)

    # -- what a runner does with it ---------------------------------------------------------------

    def _next(self) -> Lease | Work | None:
        while not self._came:
            if not self.is_up:
                self._unseen = 0
                raise disconnected("it was lost")
            self._worker.stale = False
            self._worker.waits = True
            self._worker.hand_over()
        return self._came.popleft()

    def wake(self) -> None:
        """As there."""
        self._came.append(None)

    def send(self, message: FromRunner) -> None:
        """As there."""
        if not self.is_up:
            if self._unseen and not isinstance(message, Farewell):
                self._unseen -= 1
                self._world.counts["reports in vain"] += 1
                return
            self._unseen = 0
            raise disconnected("it was lost")
        self._driver.post(Received(self.lane, message))
        if isinstance(message, Farewell):
            self.cut()
        elif self._world.setup.order == "prompt" and not self._worker.stale:
            self._worker.hand_over()

    def confirm(self) -> None:
        """As there: asked over a connection of its own."""
        self._world.point("confirm")
        coordinator = self._driver.coordinator
        if coordinator is None or coordinator is not self._coordinator:
            raise disconnected("it is not reached")
        if not coordinator.is_current(self.lane.shard, self._lease):
            self._world.counts["superseded"] += 1
            raise superseded(self.lane.shard)

    @property
    def is_stopping(self) -> bool:
        """As there."""
        return self._stops or not (self.is_up or self._unseen)

    def close(self) -> None:
        """The runner is gone."""
        if self.is_up:
            self.cut()
            self._driver.post(Lost(self.lane))
