"""Who runs which shard: runners are started, get the lease, leave, and are replaced.

A runner connects (`joined`) and gets the lease of its shard (`grant`) when the runner before it has
left, or has had its time to. A shard without a runner is given one (`start_runners`), later each
time that it fails. It runs elsewhere where there are executors; where it does not come or fails
there, one in a thread of this process takes the shard, and elsewhere is tried again after a pause.
Pure: times are arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from eventpub.channel import Folding, Report, Stop
from eventpub.channel.lane import Joined, Lane, Received, disconnected
from eventpub.coordinator import wording
from eventpub.coordinator.ending import Ending
from eventpub.coordinator.events import (
    Do,
    EndRunner,
    Log,
    PlacementChanged,
    RunnerEnded,
    StartRunner,
)
from eventpub.coordinator.requests import Requests
from eventpub.coordinator.shards import MakeLease, Shard, has_got_on
from eventpub.coordinator.silence import Silence
from eventpub.errors import EventpubError

_GONE = {"run.superseded", "run.disconnected"}
"""Errors that say nothing but that a runner has lost its lease or its connection."""


class Leases:
    """See the module. Times are the machine's, s.

    Args:
        shards: of the publisher.
        run: its number; runners of another run do not get a lease.
        ending: judges the errors that runners have met.
        requests: those that runners have when they fail.
        do: takes commands.
    """

    def __init__(
        self, shards: Sequence[Shard], run: int, ending: Ending, requests: Requests, do: Do
    ) -> None:
        self._shards = shards
        self._run = run
        self._ending = ending
        self._requests = requests
        self._do = do
        self._has_executors = False
        self._silence = Silence()
        self._folding = wording.FoldLog()

    # -- runners come -----------------------------------------------------------------------------

    def joined(self, event: Joined, now: float) -> None:
        """A runner wants the lease of its shard."""
        lane, shard = event.lane, self._shard_of(event.lane)
        hello = lane.hello
        is_ours = shard is not None and hello.run == self._run and not self._ending.is_stopping
        if shard is None or not is_ours or hello.attempt < shard.valid_from:
            lane.send(Stop())
            return
        shard.join(lane, now)

    def grant(self, make: MakeLease, now: float) -> list[Shard]:
        """Give each lease that is free to the runner that waits for it; whose were given."""
        granted = [shard for shard in self._shards if shard.is_free(now)]
        for shard in granted:
            self._silence.heard(shard.number, now)
            shard.grant(make(shard), now)
        return granted

    def start_runners(self, now: float) -> None:
        """Start one for each shard that wants one."""
        for shard in self._shards:
            if shard.wants_runner(now):
                is_here = shard.starts_here(now)
                is_elsewhere = self._has_executors and not is_here
                attempt = shard.start(now, is_elsewhere=is_elsewhere)
                self._do(StartRunner(shard.number, attempt, is_here))

    def placement_changed(self, event: PlacementChanged, now: float) -> None:
        """Runners are to move."""
        self._has_executors = event.replaces_runners
        for shard in self._shards:
            shard.move(now)
            if event.replaces_runners and not self._ending.is_stopping:
                self._do(StartRunner(shard.number, shard.start(now, is_elsewhere=True)))

    def due_at(self) -> Iterator[float]:
        """When a runner is to be started, or is not waited for any more."""
        for shard in self._shards:
            yield shard.start_at if shard.lane is None else shard.elsewhere.next_at
            if shard.next_lane is not None:
                yield shard.handover_by
            if shard.is_starting and shard.lane is None:
                yield shard.comes_by

    # -- what is heard of them --------------------------------------------------------------------

    def heard(self, event: Received, now: float) -> bool:
        """A runner has said something; whether it has the lease, so that it counts."""
        shard, message = self._shard_of(event.lane), event.message
        if shard is None or event.lane is not shard.lane:
            return False  # it was asked to leave, or its lease was given away
        self._silence.heard(shard.number, now)
        if isinstance(message, Folding):
            self._folding.add(shard.number, message)
        else:
            self._folding.forget(shard.number)
        if isinstance(message, Report) and has_got_on(message):
            self._silence.ends(shard)
            if shard.gets_on(now):
                text = "the shard is published by a runner outside this process again"
                facts = {"shard": shard.number, "where": event.lane.hello.where}
                self._do(Log("info", text, facts))
        return True

    def check_silence(self, now: float) -> None:
        """Warn of runners that have work and say nothing, and end them at last."""
        for shard, seconds, is_over in self._silence.check(self._shards, now):
            assert shard.lane is not None
            hello = shard.lane.hello
            text = "no message from the runner of a shard although it has work"
            if is_over:
                text += "; ending it and starting another (if it is a thread of the"
                text += " publisher itself, restart that)"
                self._do(EndRunner(shard.number, hello.attempt))
            facts = {"shard": shard.number, "where": hello.where, "seconds": round(seconds)}
            self._do(wording.warning(text, **facts))

    def log_folding(self, now: float) -> None:
        """Say now and then how far runners have read their topics back."""
        if (line := self._folding.line(now)) is not None:
            self._do(line)

    # -- runners go -------------------------------------------------------------------------------

    def lost(self, lane: Lane, now: float) -> None:
        """The connection of a runner was lost: it may not see that, and keep its index locked."""
        if self._shard_of(lane) is not None:
            self._do(EndRunner(lane.shard, lane.hello.attempt))
        self.left(lane, disconnected("its process may have ended"), now)

    def left(self, lane: Lane, error: EventpubError | None, now: float) -> None:
        """A runner is gone; what it has left is repaired by the next one.

        Args:
            error: that it has failed with; None: it was asked to leave.
        """
        shard = self._shard_of(lane)
        if shard is None:
            return
        is_elsewhere = shard.is_elsewhere(lane)
        if not shard.leave(lane, now):
            return
        self._folding.forget(shard.number)
        if error is not None:
            self._requests.runner_failed(shard, lane, error)
        is_gone = error is None or error.code in _GONE
        is_replaced = shard.next_lane is not None or self._ending.is_stopping
        if error is not None and is_elsewhere and not is_replaced:
            if shard.failed_elsewhere(now, at_once=is_gone):
                self._do(_is_published_here(shard, error, lane.hello.where))
        elif not (is_gone and is_replaced):
            shard.failed(now, at_once=is_gone)
        if error is not None and not is_gone:
            self._ending.judge_shard(shard, error, now, is_elsewhere=is_elsewhere)

    def runner_ended(self, event: RunnerEnded, now: float) -> None:
        """The thread or task of a runner is over."""
        shard = self._shards[event.shard]
        for lane in (shard.lane, shard.next_lane):
            if lane is not None and event.attempt == lane.hello.attempt:
                # of a machine that is gone the connection may say nothing for a quarter of an hour
                lane.close()
                self.left(lane, event.error, now)
                return
        if shard.elsewhere.has(event.attempt):
            is_new = not shard.elsewhere.is_failing
            shard.never_came(now)
            if is_new and event.error is not None and not self._ending.is_stopping:
                self._do(_is_published_here(shard, event.error))
        elif not shard.has_ended(event.attempt, now):
            return
        if event.error is not None:
            self._ending.wait_out(event.error)

    def end_all(self, now: float) -> None:
        """Have all runners leave; the next ones come at once."""
        for shard in self._shards:
            shard.start_at = now
            if shard.lane is not None:
                shard.lane.send(Stop())

    def _shard_of(self, lane: Lane) -> Shard | None:
        return self._shards[lane.shard] if 0 <= lane.shard < len(self._shards) else None


def _is_published_here(shard: Shard, error: EventpubError, where: str | None = None) -> Log:
    """A runner elsewhere has failed so often that one here publishes the shard."""
    text = "a shard's runners outside this process fail; a thread of this process publishes it"
    facts = {
        "shard": shard.number,
        "error": f"{error.code}: {error.message}",
        "where": where or "it did not connect",
        "tried_again_in": f"{shard.elsewhere.pause:g} s",
    }
    return wording.warning(text, **facts)
