"""The publisher's durable position, and which windows come next.

`Poll` → `Done` → `Window` to each shard → `Report` of each → position. Windows are the same for
all shards, and none waits for another: a slow one, or one without a runner, later gets one large
window instead of many small ones, and reads it itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from eventpub.channel import Beginning, PartitionId, Report, Request, Window
from eventpub.config import Gaps
from eventpub.coordinator.boundary import PollResult
from eventpub.coordinator.events import Do, ForgetFormer, Poll, Remember, Reply
from eventpub.coordinator.progress import Progress
from eventpub.coordinator.shards import Shard
from eventpub.sources.mysql import Layout
from eventpub.sources.mysql.open_transactions import DAY


@dataclass(frozen=True)
class StartState:
    """What a start has found out; times are µs.

    Attributes:
        run: number of this start; increases.
        start: events created up to here are not published.
        position: the previous run accounted for everything up to here; None: no previous run.
        low, is_placed, former_shards, former_indexes, acknowledged: see `channel.Beginning`.
        hidden_since: see `channel.Window`; left by the previous run.
        newest: see `DatabaseChanges.newest`.
        server: identity of the database server read last; "": unknown.
        until: the run ends when everything up to here is published; None: no end.
        pause: see `state.StateDir.pause`.
        kept: unchanging facts stored with the position.
    """

    run: int
    now: int
    layout: Layout
    partitions: int
    start: int
    low: int
    position: int | None = None
    hidden_since: int | None = None
    acknowledged: Mapping[PartitionId, int] = field(default_factory=dict)
    is_placed: bool = False
    former_shards: int | None = None
    former_indexes: tuple[str, ...] = ()
    newest: tuple[int, int, str] | None = None
    server: str = ""
    until: int | None = None
    pause: tuple[bool, str] = (False, "")
    kept: Mapping[str, Any] = field(default_factory=dict)
    requests: tuple[tuple[Request, Reply], ...] = ()


class DurableState:
    def __init__(self, begin: StartState) -> None:
        self._begin = begin
        self.position = begin.start if begin.position is None else begin.position
        self.low = begin.low
        self.shards_hidden_since = begin.hidden_since
        self.open_hidden_since: int | None = None
        """From the last poll: while the clock is behind, no window carries it."""
        self._hidden_since: dict[int, int | None] = {}
        self.acknowledged: dict[PartitionId, int] = dict(begin.acknowledged)
        self.is_placed = begin.is_placed
        self.former_shards = begin.former_shards
        self.former_indexes = begin.former_indexes
        self.has_read = begin.position is not None
        self.uncounted_since: int | None = None
        self.written: dict[str, Any] | None = None
        self.to_forget: ForgetFormer | None = None

    def has_first_written(self, report: Report) -> bool:
        """Whether a report has the first known records of a partition."""
        known = self.acknowledged
        return any(end and not known.get(place) for place, end in report.offsets.items())

    def take(self, shards: list[Shard], report: Report, uncounted_since: int | None) -> None:
        """Take over a report: hidden ranges are stored with the position they belong to."""
        self.acknowledged |= report.offsets
        self.is_placed = self.is_placed or report.is_placed
        if report.done:  # before its first window a runner does not know what is hidden
            self._hidden_since[report.shard] = report.hidden_since
        reports = [shard.report for shard in shards if shard.report is not None]
        if len(reports) == len(shards):
            self.position = min(r.position for r in reports)
            self.low = min(r.low for r in reports)
            self.has_read = True
            begun = self._begin.hidden_since
            since = [self._hidden_since.get(r.shard, begun) for r in reports]
            self.shards_hidden_since = min((at for at in since if at is not None), default=None)
        self.uncounted_since = uncounted_since

    def hidden(self, time: int | None) -> int | None:
        """Since when rows may be hidden from a new poller of open transactions, µs.

        Position and uncounted rows go back a day at most: nothing was seen hidden there. `time`: of
        the last poll; None: this run has none.
        """
        if not self.has_read:
            return None
        day_ago = (self._begin.now if time is None else time) - DAY
        others = [self.uncounted_since, self.position]
        seen = [self.shards_hidden_since, self.open_hidden_since]
        if time is None:
            others, seen = [*others, *seen], []
        since = [max(at, day_ago) for at in others if at is not None]
        return min([*since, *(at for at in seen if at is not None)])

    def held(self, shard: Shard) -> tuple[int, int] | None:
        """``(after, upto]``, µs, in which the shard was last reported to hold events."""
        begin, last = self._begin, shard.report
        if last is not None:
            return (last.low, last.position) if last.holds else None
        return None if begin.position is None else (begin.low, begin.position)

    def beginning(self, last: Report | None, uncounted_since: int | None) -> Beginning:
        """What the next runner of a shard knows; `last`: the shard's last report."""
        return Beginning(
            hidden_since=self.unpublished_since(uncounted_since),
            low=self.low if last is None else max(self.low, last.low),
            position=self.position,
            acknowledged=dict(self.acknowledged),
            is_placed=self.is_placed,
            uncounted_since=uncounted_since,
            former_shards=self.former_shards,
            former_indexes=self.former_indexes,
        )

    def unpublished_since(self, *others: int | None) -> int | None:
        since = (self.shards_hidden_since, self.open_hidden_since, *others)
        return min((at for at in since if at is not None), default=None)

    def take_over_former(self) -> None:
        """Former indexes are merged by all shards: remove them once that is written."""
        former, indexes = self.former_shards, self.former_indexes
        self.former_shards, self.former_indexes = None, ()
        if former is not None or indexes:
            self.to_forget = ForgetFormer(former)

    def write(self, what: dict[str, Any], do: Do) -> None:
        """Write the document if it is new: a write waits for the disk."""
        if what != self.written or self.to_forget is not None:
            command = Remember(what, self.to_forget)
            self.written, self.to_forget = what, None
            do(command)

    def is_not_written(self, command: Remember) -> None:
        self.written = None
        self.to_forget = command.then or self.to_forget

    def document(self, shards: int, progress: Progress) -> dict[str, Any]:
        begin = self._begin
        return {
            **begin.kept,
            "run": begin.run,
            "position": self.position,
            "low": self.low,
            "ends": [[*place, end] for place, end in self.acknowledged.items()],
            "shards": shards if self.former_shards is None else self.former_shards,
            "partitions": begin.partitions,
            "placed": self.is_placed,
            "holds": progress.holds_open,
            "server": progress.server,
        }


_FIRST_WAIT = 0.25
_LONGEST_WAIT = 30.0
"""Seconds until a failed poll is retried, doubling."""

_PAUSED_EVERY = 1.0
"""Seconds between polls while paused."""


@dataclass
class Polling:
    """When the boundary is polled next; times are monotonic s."""

    at: float = 0.0
    wait: float = _FIRST_WAIT
    is_under_way: bool = False
    reconnect: bool = False

    def begin(self) -> bool:
        self.is_under_way = True
        reconnect, self.reconnect = self.reconnect, False
        return reconnect

    def done(self, pause: float, now: float) -> None:
        self.is_under_way, self.wait = False, _FIRST_WAIT
        self.at = now + pause

    def try_again(self, now: float) -> None:
        self.at, self.wait = min(self.at, now), _FIRST_WAIT

    def failed(self, now: float) -> None:
        """The poll failed: the next one reconnects, so that no conclusion spans two servers."""
        self.is_under_way, self.reconnect = False, True
        self.at = now + self.wait
        self.wait = min(2 * self.wait, _LONGEST_WAIT)


def due_by(time: int, due: int | None, longest_wait: int) -> int | None:
    """When a hold is due; now if the database's clock was set back since it was seen (µs)."""
    return time if due is not None and due > time + longest_wait else due


class Windows:
    """Pure: times are arguments, monotonic s unless stated otherwise."""

    def __init__(self, shards: Sequence[Shard], durable: DurableState, gaps: Gaps, do: Do) -> None:
        self._shards = shards
        self._durable = durable
        self._gaps = gaps
        self._do = do
        self.planned = durable.position
        self._time: int | None = None
        self.polling = Polling()
        self.last: Window | None = None

    # -- polls ------------------------------------------------------------------------------------

    def poll(self, now: float, *, is_paused: bool = False) -> None:
        """Poll if due and no shard is full; while paused, only boundary and open transactions."""
        polling = self.polling
        if polling.is_under_way or now < polling.at:
            return
        live = [shard for shard in self._shards if shard.lane is not None]
        if not live or any(shard.is_full(now) for shard in live):
            return
        shards = [] if is_paused else live
        dues = [due for shard in shards if (due := self._next_due(shard)) is not None]
        next_due, hidden_since = min(dues, default=None), self._durable.hidden(self._time)
        reconnect = polling.begin()
        with_rows = self._gaps.policy != "hold_shard" and not is_paused
        self._do(Poll(self.planned, next_due, with_rows, reconnect, hidden_since))

    def polled(
        self,
        after: int,
        result: PollResult,
        uncounted_since: int | None,
        now: float,
        *,
        is_paused: bool = False,
    ) -> None:
        """`after`: of the poll, µs."""
        self.polling.done(max(result.pause, _PAUSED_EVERY) if is_paused else result.pause, now)
        before = self._time
        self._time = result.now
        # transactions begun since the poll are unknown: a gap seen later is not skipped
        open_since = result.now if result.open_since is None else result.open_since
        if self.last is not None and before is not None and result.now < before:
            # by the old clock it says nothing of transactions begun since
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
        if after != self.planned:
            # all shards have read further meanwhile: its rows begin too low
            result = replace(result, rows=None)
        if result.end is not None or self.last is None:
            self._send(window, result, after, now)
        elif result.is_due:
            self._send_for_holds(window, result, now)

    def begin_at(self, position: int) -> None:
        """All shards have read up to here, µs; a runner with an older index must do so too."""
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
        """Send one window to each shard that was left out and has finished its work."""
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
        for shard in self._shards:
            due = self._next_due(shard)
            if due is not None and due <= result.now:
                shard.due_sent_for = shard.report
                shard.send(window, now)

    def _next_due(self, shard: Shard) -> int | None:
        return due_by(self._time or 0, shard.next_due(), self._gaps.longest_wait)

    # -- how far it is ----------------------------------------------------------------------------

    def read_upto(self) -> tuple[int, int] | None:
        """µs up to which all shards have read, and any of them; None until all have reported."""
        reports = [shard.report for shard in self._shards if shard.report is not None]
        if len(reports) < len(self._shards):
            return None
        at = [report.position for report in reports]
        return min(at), max([*at, self.planned])
