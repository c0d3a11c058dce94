"""A runner's end of its lane, where no thread may wait: who has nothing to do lets others go on."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from eventpub.channel import Ended, FromRunner, Lane, Work

if TYPE_CHECKING:
    from tests.simulation.driver import Driver, Run
    from tests.simulation.world import Worker


class Link:
    """As `channel.Lane` for a runner, and takes what it says.

    Args:
        driver: runs the coordinator.
        run: the publisher's process, of which the runner is a thread.
        worker: runs the runner.
        lane: brings work.
    """

    def __init__(self, driver: Driver, run: Run, worker: Worker, lane: Lane) -> None:
        self._driver = driver
        self._run = run
        self._worker = worker
        self._world = driver.world
        self._lane = lane
        self._came: deque[Work | None] = deque()

    @property
    def is_ready(self) -> bool:
        """Whether who waits for work has something to do."""
        while not self._lane._sent.empty():
            self._came.append(self._lane.receive())
        return bool(self._came)

    @property
    def has_work(self) -> bool:
        """Whether some has come."""
        return self.is_ready and any(message is not None for message in self._came)

    @property
    def is_of_now(self) -> bool:
        """Whether its process is the publisher that runs now."""
        return self._driver.run is self._run

    # -- what a runner does with it ---------------------------------------------------------------

    def receive(self) -> Work | None:
        """As there."""
        while not self.is_ready:
            self._worker.stale = False
            self._worker.waits = True
            self._worker.hand_over()
        return self._came.popleft()

    def wake(self) -> None:
        """As there."""
        self._came.append(None)

    @property
    def is_stopping(self) -> bool:
        """As there."""
        return self._lane.is_stopping

    def post(self, message: FromRunner) -> None:
        """It says something; its coordinator may be frozen, or gone."""
        if not self.is_of_now:
            self._world.counts["reports in vain"] += 1
            return
        self._driver.post(message)
        is_last = isinstance(message, Ended)
        if self._world.setup.order == "prompt" and not (self._worker.stale or is_last):
            self._worker.hand_over()
