"""Which windows there are: when the boundary is polled, and what each shard is sent because of it.

A window's way: `Poll` → `Polled` → `Window` to each shard → `Report` of each → position. One window
is the same for all shards, and none waits for another: a shard that is slow, or has no runner, is
sent one large window instead of many small ones when it is ready, and reads it itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from eventpub.channel import Window
from eventpub.coordinator.boundary import PollResult
from eventpub.coordinator.durable_state import DurableState
from eventpub.coordinator.events import Do, Poll, Polled
from eventpub.coordinator.shards import Shard

_FIRST_WAIT = 0.25
_LONGEST_WAIT = 30.0
"""Seconds until a poll that has failed is tried again, twice as many each time."""

_PAUSED_EVERY = 1.0
"""Seconds between two polls while the publisher is paused: they find the same window each time."""


@dataclass
class Polling:
    """When the boundary is polled; the machine's times are seconds.

    Attributes:
        at: when the next poll is of use.
        wait: until the one after it, if it fails.
        is_under_way: whether there is one now.
        anew: whether the next poll opens a new connection.
    """

    at: float = 0.0
    wait: float = _FIRST_WAIT
    is_under_way: bool = False
    anew: bool = False

    def begin(self) -> bool:
        self.is_under_way = True
        anew, self.anew = self.anew, False
        return anew

    def done(self, pause: float, now: float) -> None:
        self.is_under_way, self.wait = False, _FIRST_WAIT
        self.at = now + pause

    def try_again(self, now: float) -> None:
        """What one that has failed has met is over."""
        self.at, self.wait = min(self.at, now), _FIRST_WAIT

    def failed(self, now: float) -> None:
        """The poll failed: the next one reconnects, so no conclusion spans two servers."""
        self.is_under_way, self.anew = False, True
        self.at = now + self.wait
        self.wait = min(2 * self.wait, _LONGEST_WAIT)


class Windows:
    """Pure: times are the machine's, s, and arguments, where nothing else is said.

    Args:
        with_rows: whether the rows of full pages are read for the shards.
        longest_wait: of a hold between two attempts, µs.

    Attributes:
        planned: the end of the last window, or where the first begins, µs.
        last: the last window; None: nothing is planned yet.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        durable: DurableState,
        with_rows: bool,
        longest_wait: int,
        do: Do,
    ) -> None:
        self._shards = shards
        self._durable = durable
        self._with_rows = with_rows
        self._longest_wait = longest_wait
        self._do = do
        self.planned = durable.position
        self._boundary = 0
        self._time: int | None = None
        self.polling = Polling()
        self.last: Window | None = None

    # -- polls ------------------------------------------------------------------------------------

    def poll(self, now: float, *, is_paused: bool = False) -> None:
        """Poll the boundary, where that is due and shards can take what comes of it.

        While the publisher is paused, only how far the boundary is, and what is open, is of use.
        """
        polling = self.polling
        if polling.is_under_way or now < polling.at:
            return
        live = [shard for shard in self._shards if shard.lane is not None]
        if not live or any(shard.is_full(now) for shard in live):
            return
        shards = [] if is_paused else live
        dues = [due for shard in shards if (due := self._next_due(shard)) is not None]
        next_due, hidden_since = min(dues, default=None), self._durable.hidden(self._time)
        anew = polling.begin()
        with_rows = self._with_rows and not is_paused
        self._do(Poll(self.planned, next_due, with_rows, anew, hidden_since))

    def polled(
        self, event: Polled, uncounted_since: int | None, now: float, *, is_paused: bool = False
    ) -> None:
        """The boundary was polled: send the window that there is now, if any.

        While the publisher is paused nothing is sent; the window is there again at the next poll.
        """
        result = event.result
        self.polling.done(max(result.pause, _PAUSED_EVERY) if is_paused else result.pause, now)
        before = self._time
        self._boundary, self._time = result.upper, result.now
        # what has begun since the poll is not known: a gap that is seen later is not skipped
        open_since = result.now if result.open_since is None else result.open_since
        if self.last is not None and before is not None and result.now < before:
            # by the clock of before it says nothing of what has begun since
            self.last = replace(self.last, open_since=open_since)
        if is_paused:
            return
        window = Window(
            0,
            self.planned if result.end is None else max(result.end, self.planned),
            open_since=open_since,
            hidden_since=result.hidden_since,
            uncounted_since=uncounted_since,
        )
        if event.after != self.planned:
            # all shards have read further meanwhile: its rows begin too low
            result = replace(result, rows=None)
        if result.end is not None or self.last is None:
            self._send(window, result, event.after, now)
        elif result.is_due:
            self._send_for_holds(window, result, now)

    def begin_at(self, position: int) -> None:
        """All shards have read up to there, µs: windows begin no lower.

        Another runner of a shard, which may have begun already, may have an older index: it reads
        up to there, too.
        """
        self.planned = max(self.planned, position)
        if self.last is not None and self.last.upto < self.planned:
            self.last = replace(self.last, upto=self.planned)
            for shard in self._shards:
                shard.is_behind = shard.lane is not None

    # -- what shards are sent ---------------------------------------------------------------------

    def begin(self, shard: Shard, now: float) -> None:
        if self.last is not None:
            shard.send(self.last, now)

    def catch_up(self, now: float) -> None:
        """One window for what was left out, where a shard has done what it was sent."""
        for shard in self._shards:
            if shard.is_behind and not shard.sent and self.last is not None:
                shard.send(self.last, now)

    def _send(self, window: Window, result: PollResult, after: int, now: float) -> None:
        self.planned, self.last = window.upto, window
        if result.is_page:
            self.polling.at = now
        for shard in self._shards:
            rows = None if result.rows is None else result.rows[shard.number]
            sent = window if rows is None else replace(window, after=after)
            shard.send(sent, now, rows=rows, is_page=result.is_page)

    def _send_for_holds(self, window: Window, result: PollResult, now: float) -> None:
        """A window without rows for the shards whose holds are due."""
        for shard in self._shards:
            due = self._next_due(shard)
            if due is not None and due <= result.now:
                shard.due_sent_for = shard.report
                shard.send(window, now)

    def _next_due(self, shard: Shard) -> int | None:
        """When a hold is due; now where the database's clock was set back since it was seen."""
        due = shard.next_due()
        time = self._time or 0
        return time if due is not None and due > time + self._longest_wait else due

    # -- how far it is ----------------------------------------------------------------------------

    def read_upto(self) -> tuple[int, int] | None:
        """Up to where all shards have read, and any of them, or the database for them; µs.

        None while one of them has not reported. Rows may be as old as their window when a shard
        comes to them: what was young when that was planned is counted, however long it takes.
        """
        reports = [shard.report for shard in self._shards if shard.report is not None]
        if len(reports) < len(self._shards):
            return None
        at = [report.position for report in reports]
        return min(at), max([*at, self.planned])

    def is_reached(self, position: int) -> bool:
        """Whether everything up to the boundary is published: that up to the position, µs, is."""
        return bool(self._boundary) and position >= self._boundary
