"""The recount: what to count and compare next, one of each in flight. Pure: times are arguments."""

from __future__ import annotations

from collections.abc import Sequence

from eventpub.admission.model import CLOCK_STEP
from eventpub.channel import Comparison, Report
from eventpub.coordinator.events import Count, Counted
from eventpub.coordinator.recount import MOST_BUCKETS, Recount

_LATE_SHARE = 0.5
"""Share of each second for counting out of turn."""

_PAUSE = 60_000_000
"""µs until a bucket that could not be counted alone is tried again."""

_AHEAD = 10_000_000
"""µs that the database's clock may gain on this machine's before it counts as a step."""


class Recounting:
    """`comparison` has no buckets if none is in flight; for the arguments see `Recount`."""

    def __init__(
        self,
        horizon: int,
        start: int,
        now: int = 0,
        position: int | None = None,
        hidden_since: int | None = None,
    ) -> None:
        self.recount = Recount(horizon, start, now, position, hidden_since)
        self._horizon = horizon
        self._last_time = now
        self._lead: float | None = None
        self._counting: Count | None = None
        self._at_most = MOST_BUCKETS
        self._alone: set[int] = set()
        self._late_until, self._late_first = 0.0, False
        self._is_last = False
        self.comparison = Comparison()

    # -- what is learned --------------------------------------------------------------------------

    def began(self, report: Report, known: int | None, held: tuple[int, int] | None) -> None:
        """Take over a runner's first report; its index may be older than the previous one.

        `known`: the last reported position; `held`: ``(after, upto]`` in which the shard held
        events, µs. What is no longer held is counted again.
        """
        if report.read_before is not None:
            self.recount.read_before(report.read_before, known)
        self.recount.account(report.shard, report.buckets, of_all=True)
        if held is not None and held[0] < min(report.low, held[1]):
            self.recount.ended(held[0], min(report.low, held[1]))

    @property
    def uncounted_since(self) -> int | None:
        return self.recount.uncounted_since

    def behind_since(self, position: int) -> int | None:
        """Start of the rows to count, µs, while the clock is behind the position, else None."""
        if not self._horizon or self._last_time + CLOCK_STEP >= position:
            return None
        return self._last_time - self._horizon

    def clock_stepped(self, now: int, at: float) -> float:
        """Seconds that the database's clock stepped, or 0; affected buckets are counted again."""
        step, lead = now - self._last_time, now - at * 1e6
        self._last_time = now
        if step < -CLOCK_STEP:
            self._lead = lead
            self.recount.clock_went_back(now)
            return step / 1e6
        # a late answer, or one to a process that was suspended, has a smaller lead once
        before = lead if self._lead is None else self._lead
        self._lead = max(lead, before)
        if lead - before <= _AHEAD:
            return 0.0
        self.recount.clock_went_ahead(now, int(lead - before))
        return (lead - before) / 1e6

    # -- counting ---------------------------------------------------------------------------------

    def second(self, now: float) -> None:
        """Give late counts their share; the first of them precedes others, which may take longer
        than that."""
        self._late_until, self._late_first = now + _LATE_SHARE, True

    def next_count(
        self,
        now: int,
        position: int,
        reached: int,
        hidden_since: int | None,
        at: float,
    ) -> Count | None:
        """The next count, if one is due and none in flight. `now` is µs, `at` monotonic s."""
        if self._counting is not None:
            return None
        buckets = self.recount.late(now, position) if self._late_first else []
        in_turn, self._late_first = not buckets, False
        if not buckets:
            buckets = self.recount.due(now, position, reached, hidden_since)
        if not buckets and (at < self._late_until or self._is_last):
            buckets, in_turn = self.recount.late(now, position), False
        if not buckets:
            return None
        alone = [b for b in buckets if b in self._alone]
        chosen = [b for b in buckets if b not in self._alone][: self._at_most] or alone[:1]
        self.recount.not_counted({*buckets} - {*chosen}, in_turn=in_turn)
        self._counting = Count(tuple(chosen), position, self.recount.ask(chosen), in_turn)
        return self._counting

    def counted(self, count: Count, found: Counted) -> None:
        self._counting = None
        self._alone -= found.rows.keys()
        self._at_most = min(2 * self._at_most, MOST_BUCKETS)
        self.recount.counted(
            found.now, found.rows, count.expected, in_turn=count.in_turn, upto=count.position
        )

    def not_counted(self, count: Count) -> None:
        """Retry with fewer buckets; one that failed alone is delayed, so as not to block others."""
        pause = range(0)
        if not self._is_last and (self._at_most == 1 or count.buckets[0] in self._alone):
            self._alone.update(count.buckets)
            pause = range(self._last_time, self._last_time + _PAUSE)
        else:
            self._at_most = max(1, len(count.buckets) // 4)
        self._counting = None
        self.recount.not_counted(count.buckets, pause, in_turn=count.in_turn)

    # -- comparing --------------------------------------------------------------------------------

    def next_comparison(self) -> Comparison | None:
        if self.comparison.buckets or not self.recount.has_mismatches():
            return None
        self.comparison = Comparison(self.comparison.number + 1, tuple(self.recount.take()))
        return self.comparison

    def compared(self, reports: Sequence[Report]) -> None:
        comparison = self.comparison
        if not comparison.buckets or any(report.compared < comparison.number for report in reports):
            return
        unfinished = {b for report in reports for b in report.unfinished}
        again = min((r.next_due for r in reports if r.next_due is not None), default=0)
        self.recount.compared(comparison.buckets, unfinished, again)
        self.comparison = Comparison(comparison.number)

    # -- the last count of a run that ends by itself ----------------------------------------------

    def begin_last(self, now: int, position: int, reached: int, hidden_since: int | None) -> None:
        if not self._is_last:
            self._is_last = True
            self.recount.trusts_counts = True  # what ages during it would prolong it forever
            self.recount.not_counted(self.recount.due(now, position, reached, hidden_since))
            self.recount.everything(now)

    def is_over(self) -> bool:
        """Whether the last count found nothing; otherwise it restarts."""
        if not self._is_last or self._counting is not None:
            return False
        if self.comparison.buckets or self.recount.has_mismatches():
            self._is_last = False
            return False
        return True
