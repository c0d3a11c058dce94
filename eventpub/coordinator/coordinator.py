"""The coordinator: what one publisher decides once for all of its shards.

A loop calls `on` with each event and executes the commands it returns. It does no I/O and reads no
clock. It passes each event to the part responsible, then asks each part what follows (`_go_on`).
The parts share only the list of shards.
"""

from __future__ import annotations

from collections.abc import Callable

from eventpub.channel import Ended, Lane, Report
from eventpub.config import Config
from eventpub.coordinator import events as e
from eventpub.coordinator.boundary import PollResult
from eventpub.coordinator.database_changes import DatabaseChanges
from eventpub.coordinator.position import StartState, Windows
from eventpub.coordinator.recounting import Recounting
from eventpub.coordinator.shards import Runners, Shard
from eventpub.coordinator.status import Overview
from eventpub.errors import EventpubError

_FOLDING_EVERY = 10.0
"""Seconds between two log lines on reading the topic back."""


class Coordinator(Overview):
    def __init__(self, config: Config, start_state: StartState) -> None:
        begin, horizon = start_state, config.recount.horizon
        self._commands: list[e.Command] = []
        do = self._commands.append
        super().__init__(config, begin, do)
        shards, durable, progress = self.shards, self.durable, self.progress
        self._until = begin.until
        self._recounting = Recounting(
            horizon, begin.start, begin.now, begin.position, begin.hidden_since
        )
        self.runners = Runners(shards, self.failures, progress, do)
        self.windows = Windows(shards, durable, config.gaps, do)
        self.changes = DatabaseChanges(
            config,
            begin.start,
            begin.newest,
            begin.layout,
            recounting=self._recounting,
            progress=progress,
            do=do,
        )
        self._fold_said_at = float("-inf")
        self._polled_upto = 0
        """Boundary of the last poll, µs; that of `lag` may be newer."""
        self._handlers: dict[type, Callable[..., None]] = {
            Report: self._reported,
            Ended: self.runners.ended,
            e.Tick: self._ticked,
            e.Failed: self._failed,
            e.PauseAsked: self._pause,
            e.StopAsked: lambda _, now: self.runners.stop(None, now),
            # of commands that are done
            e.Poll: self._polled,
            e.Count: self._counted,
            e.Sample: self._sampled,
            e.CheckTable: self._table_checked,
            e.CheckOpen: self._open_checked,
        }

    @property
    def is_stopping(self) -> bool:
        return self.runners.is_stopping

    @property
    def planned(self) -> int:
        return self.windows.planned

    # -- the loop's side --------------------------------------------------------------------------

    def on(self, event: e.Event, now: float) -> list[e.Command]:
        """Handle an event and return what to do; `now`: monotonic, s."""
        was_away = self.health.is_away("database")
        self.see(event, now)
        if was_away and not self.health.is_away("database"):
            self.windows.polling.try_again(now)
            for shard in self.shards:
                shard.start_at = min(shard.start_at, now)
        if isinstance(event, e.Done):
            if (done := self._handlers.get(type(event.command))) is not None:
                done(event.command, event.result, now)
        elif (handle := self._handlers.get(type(event))) is not None:
            handle(event, now)
        if not self.runners.is_over:
            self._go_on(now)
        commands = self._commands.copy()
        self._commands.clear()
        return commands

    def next_tick(self, now: float) -> float:
        """Seconds until the next useful `Tick`."""
        if self.is_stopping:
            return max(0.0, self.runners.stop_by - now)
        due = [shard.start_at for shard in self.shards if shard.lane is None]
        if not self.windows.polling.is_under_way:
            due.append(self.windows.polling.at)
        # what was due by the last event is done; per-second work waits for a tick
        later = [at for at in due if at > self.seen_at]
        return max(0.0, min([*later, self.schedule.second_at]) - now)

    def _go_on(self, now: float) -> None:
        if not self.is_stopping:
            for shard in self.shards:
                if shard.lane is None and now >= shard.start_at:
                    self._start_runner(shard, now)
            self.requests.send(is_paused=self.is_paused)
            if not self.is_paused:
                self.windows.catch_up(now)
                self._compare(now)
            self.windows.poll(now, is_paused=self.is_paused)
        self._finish_if_done(now)

    # -- runners ----------------------------------------------------------------------------------

    def _start_runner(self, shard: Shard, now: float) -> None:
        beginning = self.durable.beginning(shard.report, self._recounting.uncounted_since)
        shard.begin(lane := Lane())
        self._do(e.StartRunner(shard.number, lane, beginning))
        if not self.is_paused:  # else `_pause` catches up
            self._begin_work(shard, now)

    def _begin_work(self, shard: Shard, now: float) -> None:
        self.windows.begin(shard, now)
        shard.compare(self._recounting.comparison, now)

    def _pause(self, event: e.PauseAsked, now: float) -> None:
        self.take_pause(event)
        if not event.is_paused:
            for shard in self.shards:
                if shard.lane is not None and shard.window == 0:  # it was started while paused
                    self._begin_work(shard, now)
            self.windows.polling.at = now
        self._do(e.Show())

    # -- reports ----------------------------------------------------------------------------------

    def _reported(self, report: Report, now: float) -> None:
        shard = self.shards[report.shard]
        is_first = shard.report is None
        held = self.durable.held(shard)
        begins = not shard.has_begun
        known = None if shard.report is None else shard.report.position
        shard.take_report(report)
        if begins:
            self._recounting.began(report, known, held)
        else:
            self._recounting.recount.account(report.shard, report.buckets)
        is_first_written = self.durable.has_first_written(report)
        self.account(report, self._recounting.uncounted_since, now)
        self._recounting.compared([s.report for s in self.shards if s.report is not None])
        if is_first and all(s.report is not None for s in self.shards):
            self.windows.begin_at(self.durable.position)
            self.durable.take_over_former()
            self._remember()
        if is_first_written:  # distinguishes a recreated topic from a new one
            self._remember()
        if self.polled_at is not None and self.durable.position >= self._polled_upto:
            # rows written since that poll are unknown
            self.lag.is_none(self.polled_at)

    def _remember(self) -> None:
        uncounted = self._recounting.uncounted_since
        behind = self._recounting.behind_since(self.durable.position)
        hidden_since = self.durable.unpublished_since(uncounted, behind)
        self.write(hidden_since, self.changes.newest)

    # -- windows ----------------------------------------------------------------------------------

    def _polled(self, poll: e.Poll, result: PollResult, now: float) -> None:
        self.polled_at, self._polled_upto = now, result.upper
        self.lag.boundary = result.upper
        self.progress.without_identity += result.without_identity
        if result.state != "denied":  # hidden rows stay hidden without the privilege
            self.durable.open_hidden_since = result.hidden_since
        if self.changes.polled(result, now):
            self._remember()
        uncounted = self._recounting.uncounted_since
        self.windows.polled(poll.after, result, uncounted, now, is_paused=self.is_paused)

    # -- recount ----------------------------------------------------------------------------------

    def _counted(self, count: e.Count, found: e.Counted, now: float) -> None:
        self._recounting.counted(count, found)
        # by the clock used for the count: if it was set back, the count would be due again at once
        self._count(now, found.now)

    def _count(self, now: float, at_most: int | None = None) -> None:
        """Start the next count, once all shards have reported."""
        found = self.windows.read_upto()
        if found is None or not self.progress.time:
            return
        hidden = self.durable.shards_hidden_since
        time = self.progress.time if at_most is None else min(at_most, self.progress.time)
        count = self._recounting.next_count(time, *found, hidden, now)
        if count is not None:
            self._do(count)

    def _compare(self, now: float) -> None:
        comparison = self._recounting.next_comparison()
        if comparison is not None:
            self.progress.comparisons = comparison.number
            for shard in self.shards:
                shard.compare(comparison, now)

    # -- once a second ----------------------------------------------------------------------------

    def _ticked(self, event: e.Tick, now: float) -> None:
        del event
        if self.is_stopping or not self.schedule.is_second(now):
            return
        self._recounting.second(now)
        self._count(now)
        durable, progress = self.durable, self.progress
        for command in self.schedule.due(
            now, progress.time, durable.position, durable.acknowledged, self.shards
        ):
            self._do(command)
        self._remember()
        self.rate.add(now, progress.published)
        if now - self._fold_said_at >= _FOLDING_EVERY and (foldings := self.health.foldings()):
            self._fold_said_at = now
            text = "reading the topic back into the index before publishing starts"
            read, left = sum(f.read for f in foldings), sum(f.left for f in foldings)
            self._do(e.Log("info", text, {"records": read, "left": left}))
        self._do(e.Show())

    def _sampled(self, _: e.Sample, found: e.Sampled, now: float) -> None:
        above = None if found.above is not None else self.changes.wants_more(found.rows)
        if above is not None:
            self._do(e.Sample(above))
            return
        self.schedule.is_done(e.Sample)
        self.failures.is_done(e.Sample)
        error = self.changes.sampled(found, max(self.progress.position, self.planned), now)
        self.health.mark("times", self.changes.odd_times(now), now)
        if self.changes.doubts:
            self.schedule.hasten(e.CheckTable, now)
        if error is not None:
            self.runners.stop(error, now)

    def _table_checked(self, _: e.CheckTable, found: e.TableChecked, now: float) -> None:
        error = self.changes.altered(found)
        if error is not None:
            self._reconnect(error, now)

    def _open_checked(self, _: e.CheckOpen, is_left_open: bool, now: float) -> None:
        """The last transaction is hidden from consumers: the next runners fix it."""
        if is_left_open:
            self.runners.end_all(now)

    def _reconnect(self, why: EventpubError, now: float) -> None:
        self.runners.wait_out(why)
        self.windows.polling.reconnect = True
        self.runners.end_all(now)

    # -- failures ---------------------------------------------------------------------------------

    def _failed(self, event: e.Failed, now: float) -> None:
        command, error = event.command, event.error
        if isinstance(command, e.Poll):
            self.windows.polling.failed(now)
            if error.code == "store.moved":
                self._reconnect(error, now)
                return
        elif isinstance(command, e.Count):
            self._recounting.not_counted(command)
        final = self.failures.of_command(command, error, now)
        if final is not None:
            self.runners.stop(final, now)
        else:
            self.runners.wait_out(error)

    # -- the end ----------------------------------------------------------------------------------

    def _finish_if_done(self, now: float) -> None:
        if self.is_stopping:
            # those that run out of time have their transactions aborted
            if all(shard.lane is None for shard in self.shards) or now >= self.runners.stop_by:
                self._remember()
                self.runners.finish()
            return
        found = self.windows.read_upto()
        if self._until is None or found is None or found[0] < self._until:
            return
        if self.progress.holds_open or any(shard.sent for shard in self.shards):
            return
        hidden = self.durable.shards_hidden_since
        self._recounting.begin_last(self.progress.time, *found, hidden)
        self._count(now)
        if self._recounting.is_over():
            self.runners.stop(None, now)
