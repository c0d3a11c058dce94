"""What the coordinator knows of each shard: who has its lease, what is on its way, where it is."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from eventpub.channel import Comparison, Lease, Report, Window
from eventpub.channel.lane import Lane

MOST_PAGES = 4
"""Full pages on their way to a shard."""

MOST_WINDOWS = 16
"""Windows on their way to a shard; what comes then is one window, when these are done."""

_STALLED = 5.0
"""Seconds after which nobody waits for a shard that has not done what it was sent."""

_FIRST_WAIT = 0.25
_LONGEST_WAIT = 10.0
"""Seconds until a runner that has failed is started again, twice as many each time: as long as
librdkafka waits, at most, before it connects again."""


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
        valid_from: the first attempt that may have the lease.
        start_at: when the next one is started, where none runs.
        wait: until it is started after another failure.
        failures: runners that have failed in a row.
    """

    number: int
    lane: Lane | None = None
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
    valid_from: int = 0
    start_at: float = 0.0
    wait: float = _FIRST_WAIT
    failures: int = 0

    # -- who has the lease ------------------------------------------------------------------------

    def grant(self, lane: Lane, lease: Lease) -> None:
        """Give the lease to a runner that has connected."""
        self.lane, self.is_starting = lane, False
        self.lease, self.window = lease.number, 0
        lane.send(lease)

    def leave(self, lane: Lane) -> bool:
        """A runner is gone; whether it was the one that had the lease."""
        if lane is not self.lane:
            return False
        self.lane = None
        self.sent.clear()
        self.is_behind = False
        self.compares_since = None
        return True

    def failed(self, now: float, *, at_once: bool = False) -> None:
        """Its runner is gone: another one is started, after a wait.

        Args:
            at_once: without a wait, unless one has failed before.
        """
        self.start_at = now if at_once and self.failures == 0 else now + self.wait
        self.wait = min(2 * self.wait, _LONGEST_WAIT)
        self.failures += 1

    def outdate(self) -> None:
        """A runner on its way does not get the lease: what it was started with is out of date."""
        self.valid_from, self.is_starting = self.attempt + 1, False

    def wants_runner(self, now: float) -> bool:
        """Whether a runner is to be started."""
        return self.lane is None and not self.is_starting and now >= self.start_at

    def start(self) -> int:
        """A runner is started; the number of the attempt."""
        self.attempt += 1
        self.is_starting = True
        return self.attempt

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
