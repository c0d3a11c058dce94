"""Who runs which shard: runners are started, get the lease, leave, and are replaced.

A shard without a runner is given one (`start_runners`), a thread that connects and gets the lease
of its shard. When it has failed, the next one is started after a wait. Pure: times are arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from eventpub.channel import Folding, Stop
from eventpub.channel.lane import Lane, Received, disconnected
from eventpub.coordinator import wording
from eventpub.coordinator.ending import Ending
from eventpub.coordinator.events import Do, StartRunner
from eventpub.coordinator.requests import Requests
from eventpub.coordinator.shards import Shard
from eventpub.errors import EventpubError

_GONE = {"run.superseded", "run.disconnected"}
"""Errors that say nothing but that a runner has lost its lease or its connection."""


class Leases:
    """See the module. Times are the machine's, s.

    Args:
        shards: of the publisher.
        ending: judges the errors that runners have met.
        requests: those that runners have when they fail.
        do: takes commands.
    """

    def __init__(self, shards: Sequence[Shard], ending: Ending, requests: Requests, do: Do) -> None:
        self._shards = shards
        self._ending = ending
        self._requests = requests
        self._do = do
        self._folding = wording.FoldLog()

    # -- runners come -----------------------------------------------------------------------------

    def admits(self, lane: Lane) -> bool:
        """Whether a runner that has connected is to have the lease; another one is to leave."""
        shard = self._shards[lane.shard]
        is_valid = shard.lane is None and lane.hello.attempt >= shard.valid_from
        if is_valid and not self._ending.is_stopping:
            return True
        lane.send(Stop())
        return False

    def start_runners(self, now: float) -> None:
        """Start one for each shard that wants one."""
        for shard in self._shards:
            if shard.wants_runner(now):
                self._do(StartRunner(shard.number, shard.start()))

    def due_at(self) -> Iterator[float]:
        """When runners are to be started."""
        return (shard.start_at for shard in self._shards if shard.lane is None)

    # -- what is heard of them --------------------------------------------------------------------

    def heard(self, event: Received) -> bool:
        """A runner has said something; whether it has the lease, so that it counts."""
        shard, message = self._shards[event.lane.shard], event.message
        if event.lane is not shard.lane:
            return False
        if isinstance(message, Folding):
            self._folding.add(shard.number, message)
        else:
            self._folding.forget(shard.number)
        return True

    def log_folding(self, now: float) -> None:
        """Say now and then how far runners have read their topics back."""
        if (line := self._folding.line(now)) is not None:
            self._do(line)

    # -- runners go -------------------------------------------------------------------------------

    def lost(self, lane: Lane, now: float) -> None:
        """A runner has ended without a farewell."""
        self.left(lane, disconnected("its thread has ended"), now)

    def left(self, lane: Lane, error: EventpubError | None, now: float) -> None:
        """A runner is gone; what it has left is repaired by the next one.

        Args:
            error: that it has failed with; None: it was asked to leave.
        """
        shard = self._shards[lane.shard]
        if not shard.leave(lane):
            return
        self._folding.forget(shard.number)
        if error is not None:
            self._requests.runner_failed(shard, lane, error)
        is_gone = error is None or error.code in _GONE
        if not (is_gone and self._ending.is_stopping):
            shard.failed(now, at_once=is_gone)
        if error is not None and not is_gone:
            self._ending.judge_shard(shard, error, now)

    def end_all(self, now: float) -> None:
        """Have all runners leave; the next ones come at once."""
        for shard in self._shards:
            shard.start_at = now
            if shard.lane is not None:
                shard.lane.send(Stop())
