"""What the coordinator knows of each shard: who has its lease, what is on its way, where it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import pyarrow as pa

from eventpub.channel import Comparison, Lease, Report, Stop, Window
from eventpub.channel.lane import Lane
from eventpub.coordinator.elsewhere import Elsewhere

MOST_PAGES = 4
"""Full pages on their way to a shard."""

MOST_WINDOWS = 16
"""Windows on their way to a shard; what comes then is one window, when these are done."""

_STALLED = 5.0
"""Seconds after which nobody waits for a shard that has not done what it was sent."""

_HANDOVER = 5.0
"""Seconds in which a runner may finish what it does before another one gets its lease anyway."""

_COMES_WITHIN = 5.0
"""Seconds after which a runner that was started and does not come, since a cluster has no place for
it, is waited for by one in a thread of this process."""

_FIRST_WAIT = 0.25
_LONGEST_WAIT = 10.0
"""Seconds until a runner that has failed is started again, twice as many each time: as long as
librdkafka waits, at most, before it connects again."""

MakeLease: TypeAlias = Callable[["Shard"], Lease]
"""The next lease of a shard, as things are now."""


@dataclass
class Sent:
    """A window on its way."""

    number: int
    upto: int
    is_page: bool
    at: float


@dataclass
class Shard:
    """One shard, from the start of a run to its end. Times of the machine are seconds.

    Attributes:
        number: the shard's.
        lane: of the runner that has the lease; None: nobody has.
        next_lane: of one that waits for it.
        lease: number of the lease; 0: there was none.
        sent: windows on their way.
        is_behind: whether a window was left out, so that one is due when these are done.
        window: the number of the last window.
        report: the last one; None: the shard has not said anything in this run.
        reported_lease: the number of the lease that it is of.
        comparison: the number of the last that it was sent.
        compares_since: when the comparison was sent that it has not done, s; None: it has.
        due_sent_for: what the last report was when a window for holds that are due was sent.
        attempt: how often a runner was started.
        is_starting: whether the last one has not connected yet.
        comes_by: when that is to have connected.
        elsewhere: its runners outside this process.
        valid_from: the first attempt that may have the lease.
        lease_at: when the lease was given.
    """

    number: int
    lane: Lane | None = None
    next_lane: Lane | None = None
    lease: int = 0
    sent: deque[Sent] = field(default_factory=deque)
    is_behind: bool = False
    window: int = 0
    report: Report | None = None
    reported_lease: int = 0
    comparison: int = 0
    compares_since: float | None = None
    due_sent_for: Report | None = None
    attempt: int = 0
    is_starting: bool = False
    comes_by: float = 0.0
    elsewhere: Elsewhere = field(default_factory=Elsewhere)
    valid_from: int = 0
    lease_at: float = 0.0
    start_at: float = 0.0
    wait: float = _FIRST_WAIT
    handover_by: float = 0.0
    failures: int = 0

    # -- who has the lease ------------------------------------------------------------------------

    def join(self, lane: Lane, now: float) -> None:
        """A runner wants the lease; it gets it from `grant` when `is_free`."""
        self.is_starting = False
        if self.next_lane is not None:
            self.next_lane.close()
        self.next_lane = lane
        if self.lane is not None:
            self.lane.send(Stop())
            self.handover_by = now + _HANDOVER

    def leave(self, lane: Lane, now: float) -> bool:
        """A runner is gone; whether it was the one that had the lease."""
        if self.is_elsewhere(lane):
            self.elsewhere.end(now)
        if lane is self.next_lane:
            self.next_lane = None
        if lane is not self.lane:
            return False
        self.lane = None
        self.sent.clear()
        self.is_behind = False
        self.compares_since = None
        return True

    def is_free(self, now: float) -> bool:
        """Whether who waits for the lease may have it."""
        return self.next_lane is not None and (self.lane is None or now > self.handover_by)

    def grant(self, lease: Lease, now: float) -> None:
        """Give the lease to who waits for it."""
        if self.lane is not None:
            self.lane.close()  # it has had its time; the new one fences it
            self.leave(self.lane, now)
        self.lane, self.next_lane = self.next_lane, None
        assert self.lane is not None
        self.lease, self.window, self.lease_at = lease.number, 0, now
        self.lane.send(lease)

    def failed(self, now: float, *, at_once: bool = False) -> None:
        """Its runner is gone: another one is started, after a wait unless it is the first."""
        is_first = self.failures == 0
        self.failures += 1
        self._wait(now, at_once=at_once and is_first)

    def failed_elsewhere(self, now: float, *, at_once: bool = False) -> bool:
        """A runner elsewhere has failed; whether one here is to publish the shard."""
        is_first = self.elsewhere.failures == 0
        self._wait(now, at_once=at_once and is_first)
        self.elsewhere.failed(now)
        if self.elsewhere.is_failing:
            self.start_at = now
        return self.elsewhere.is_failing

    def never_came(self, now: float) -> None:
        """The runner elsewhere is over and has never connected: one here publishes at once."""
        if self.attempt == self.elsewhere.attempt:
            self.is_starting = False
        self.elsewhere.never_came(now)
        self.start_at = now

    def gets_on(self, now: float) -> bool:
        """Who has the lease has got on; whether that ends failures elsewhere."""
        assert self.lane is not None
        return self.is_elsewhere(self.lane) and self.elsewhere.gets_on(now - self.lease_at)

    def _wait(self, now: float, *, at_once: bool) -> None:
        self.start_at = now if at_once else now + self.wait
        self.wait = min(2 * self.wait, _LONGEST_WAIT)

    def is_elsewhere(self, lane: Lane) -> bool:
        """Whether it leads to the runner outside this process."""
        return self.elsewhere.has(lane.hello.attempt)

    def outdate(self, now: float) -> None:
        """Runners without a lease do not get it: what they were started with is out of date."""
        self.valid_from, self.is_starting = self.attempt + 1, False
        if self.next_lane is not None:
            self.next_lane.send(Stop())
            self.next_lane = None
        if self.elsewhere.attempt and (self.lane is None or not self.is_elsewhere(self.lane)):
            self.elsewhere.end(now)

    def move(self, now: float) -> None:
        """There are other places now: what has failed at those before says nothing."""
        self.start_at, self.is_starting = now, False
        self.elsewhere = Elsewhere()

    def start(self, now: float, *, is_elsewhere: bool) -> int:
        """A runner is started; the number of the attempt."""
        self.attempt += 1
        self.comes_by = now + _COMES_WITHIN
        self.is_starting = True
        if is_elsewhere:
            self.elsewhere.start(self.attempt)
        return self.attempt

    def starts_here(self, now: float) -> bool:
        """Whether nobody publishes the shard, and nobody elsewhere does soon."""
        if self.lane is not None or self.next_lane is not None:
            return False
        if self.is_starting:
            return now >= self.comes_by
        return self.elsewhere.is_failing or self.elsewhere.attempt != 0

    def has_ended(self, attempt: int, now: float) -> bool:
        """A runner here is over; whether it never connected."""
        if attempt != self.attempt or not self.is_starting:
            return False
        self.is_starting = False
        self._wait(now, at_once=False)
        return True

    def wants_runner(self, now: float) -> bool:
        """Whether a runner is to be started."""
        if self.is_starting:
            return self.starts_here(now)
        if self.lane is None and self.next_lane is None:
            return now >= self.start_at
        return self.next_lane is None and now >= self.elsewhere.next_at

    # -- what it is sent --------------------------------------------------------------------------

    def send(
        self, window: Window, now: float, *, rows: pa.Table | None = None, is_page: bool = False
    ) -> None:
        """Send a window, or note that one is due."""
        if self.lane is None:
            return  # the next runner begins with what is planned by then
        is_full = self.pages >= MOST_PAGES if is_page else len(self.sent) >= MOST_WINDOWS
        if is_full or (self.is_behind and self.sent):
            self.is_behind = True
            return
        self.window += 1
        self.is_behind = False
        self.sent.append(Sent(self.window, window.upto, is_page, now))
        self.lane.send(replace(window, number=self.window, rows=rows))

    def compare(self, comparison: Comparison, now: float) -> None:
        """Send a comparison, where there is one that it has not done."""
        is_done = self.report and self.has_begun and self.report.compared >= comparison.number
        if self.lane is not None and comparison.buckets and not is_done:
            self.lane.send(comparison)
            self.comparison = comparison.number
            self.compares_since = now

    @property
    def pages(self) -> int:
        """How many full pages are on their way."""
        return sum(sent.is_page for sent in self.sent)

    def is_full(self, now: float) -> bool:
        """Whether the next page is to wait for it."""
        if self.pages < MOST_PAGES or self.is_behind:
            return False
        return now - self.sent[0].at < _STALLED

    @property
    def has_begun(self) -> bool:
        """Whether it has a runner, which has read the topic back."""
        return self.lane is not None and self.reported_lease == self.lease

    def has_work(self) -> bool:
        """Whether its runner has yet to begin, or to do what it was sent."""
        return self.lane is not None and (self.works_since is not None or not self.has_begun)

    @property
    def works_since(self) -> float | None:
        """When the first was sent of what it has not done yet, s; None: it has done all."""
        since = [*(sent.at for sent in self.sent), self.compares_since]
        return min((at for at in since if at is not None), default=None)

    def is_idle(self) -> bool:
        """Whether it has a runner, which has done all that it was sent."""
        return self.lane is not None and not self.sent and self.report is not None

    # -- what it says -----------------------------------------------------------------------------

    def take_report(self, report: Report) -> None:
        """Take over a report of who has the lease."""
        while self.sent and self.sent[0].number <= report.done:
            self.sent.popleft()
        if report.compared >= self.comparison:
            self.compares_since = None
        self.report = report
        self.reported_lease = self.lease
        if has_got_on(report):
            self.failures, self.wait = 0, _FIRST_WAIT

    def next_due(self) -> int | None:
        """When its next hold is due, unless a window was sent for it already; µs."""
        if self.lane is None or self.report is None or self.report is self.due_sent_for:
            return None
        return None if self.sent else self.report.next_due


def has_got_on(report: Report) -> bool:
    """Whether a runner has done something; that it begins says nothing of what it fails at."""
    return bool(report.done or report.published)


def positions(shards: Sequence[Shard]) -> tuple[int, int] | None:
    """Up to where all shards have accounted for everything, and up to where any of them has; µs.

    None while one of them has not said anything.
    """
    reports = [shard.report for shard in shards if shard.report is not None]
    if len(reports) < len(shards):
        return None
    return min(r.position for r in reports), max(r.position for r in reports)
