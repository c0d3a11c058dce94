"""How a publisher stops; `failures` judges which error makes it."""

from __future__ import annotations

from collections.abc import Sequence

from eventpub.channel import Stop
from eventpub.coordinator.events import Command, Do, Finish, Show
from eventpub.coordinator.failures import Failures
from eventpub.coordinator.progress import Progress
from eventpub.coordinator.shards import Shard
from eventpub.errors import EventpubError

_STOPS_WITHIN = 1.2
"""Seconds in which runners may finish what they do when the publisher is to stop."""


class Ending:
    """See the module. Pure: times are the machine's, s, and arguments.

    Args:
        shards: of the publisher.
        failures: knows which errors are final.
        progress: shows the last one.
        until: as of `StartState`.
        do: takes commands.

    Attributes:
        is_stopping: whether runners were asked to leave.
        stop_by: when nobody waits for them any more.
        is_over: whether nothing is done any more.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        failures: Failures,
        progress: Progress,
        until: int | None,
        do: Do,
    ) -> None:
        self._shards = shards
        self._failures = failures
        self._progress = progress
        self._until = until
        self._do = do
        self._error: EventpubError | None = None
        self.is_stopping = False
        self.stop_by = 0.0
        self.is_over = False

    def judge_shard(self, shard: Shard, error: EventpubError, now: float) -> None:
        """A runner has failed: start to stop, or wait it out."""
        final = self._failures.of_shard(shard.number, error, shard.failures, now)
        if final is not None:
            self.stop(final, now)
        elif not self.is_stopping:
            self.wait_out(error)

    def judge_command(self, command: Command, error: EventpubError, now: float) -> None:
        """A command has failed: start to stop, or wait it out."""
        final = self._failures.of_command(command, error, now)
        if final is not None:
            self.stop(final, now)
        else:
            self.wait_out(error)

    def wait_out(self, error: EventpubError) -> None:
        """Only show the error."""
        self._progress.last_error = str(error)
        self._do(Show())

    def stop(self, error: EventpubError | None, now: float) -> None:
        """Have the runners finish what they do; then it is over.

        Args:
            error: why; None: it was asked for, or everything is published.
        """
        if self.is_stopping:
            return
        self.is_stopping, self._error = True, error
        self.stop_by = now + _STOPS_WITHIN
        for shard in self._shards:
            if shard.lane is not None:
                shard.lane.send(Stop())

    def has_published_all(self, position: int) -> bool:
        """Whether a run that ends by itself has done what it was sent, and holds nothing.

        Args:
            position: all shards have accounted for what was created at or before, µs.
        """
        if self._until is None or position < self._until or self._progress.holds_open:
            return False
        return not any(shard.sent for shard in self._shards)

    def is_due(self, now: float) -> bool:
        """Whether the runners that were asked to leave have, or have had their time to.

        What is cut off is aborted by the broker, and read back by the next start.
        """
        has_left = all(shard.lane is None for shard in self._shards)
        return self.is_stopping and (has_left or now >= self.stop_by)

    def finish(self) -> None:
        """It is over."""
        self.is_over = True
        self._do(Show())
        self._do(Finish(self._error))
