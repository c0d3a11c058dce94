"""The coordinator: what one publisher decides once for all of its shards.

One loop calls `on` with one event after the other and does what it returns. It does no I/O and asks
no clock, so a test plays a life of it in a few lines. It gives each event to the part that it is
for, and then asks each part what follows (`_go_on`):

- `Leases`: who runs which shard;
- `Windows`: how far the table is read;
- `Recounting`: what is counted again, and what shards compare because of it;
- `DatabaseChanges`: what polls and samples show of the database;
- `Checks`: what is checked once a second;
- `Requests`: what users ask of shards;
- `DurableState`: what must outlive the process;
- `Health`: whether all of that works, as named checks;
- `Ending`: how the publisher stops; `Failures` judges which error makes it.

The parts share the list of shards; what they are made with says which others they know. All else
that one needs of another is passed here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from eventpub.channel import Farewell, Report
from eventpub.channel.lane import Joined, Lost, Received
from eventpub.config import Config
from eventpub.coordinator import events as e
from eventpub.coordinator import wording
from eventpub.coordinator.checks import Checks
from eventpub.coordinator.database_changes import DatabaseChanges
from eventpub.coordinator.durable_state import DurableState, StartState
from eventpub.coordinator.ending import Ending
from eventpub.coordinator.failures import Failures
from eventpub.coordinator.health import Health
from eventpub.coordinator.leases import Leases
from eventpub.coordinator.newest import NewestRows
from eventpub.coordinator.progress import Progress, Rate
from eventpub.coordinator.recounting import Recounting
from eventpub.coordinator.requests import Requests
from eventpub.coordinator.shards import Shard, positions
from eventpub.coordinator.windows import Windows
from eventpub.errors import EventpubError

_LAG_IS_OLD = 5.0
"""Seconds after which a lag that was measured has grown by its age; it is measured every second."""


class Coordinator:
    """See the module.

    Args:
        config: the whole configuration.
        start_state: what the start has found out.

    Attributes:
        shards: each as it stands.
        progress: of the publisher as a whole.
        health: named checks, and the last error of each shard.
        is_paused: nothing that is not under way is published.
        paused_by: who has paused it, and when; "": not known.
        seen_at: when the last event was handled, the machine's s.
    """

    def __init__(self, config: Config, start_state: StartState) -> None:
        begin, horizon = start_state, config.recount.horizon
        self._commands: list[e.Command] = []
        do = self._commands.append
        self.seen_at = float("-inf")
        self.is_paused, self.paused_by = begin.is_paused, begin.paused_by
        self.shards = shards = [Shard(number) for number in range(config.run.shards)]
        self.progress = progress = Progress(server=begin.server)
        self.health = Health(shards)
        self._is_written_paused = begin.is_paused
        self._pauses: deque[e.PauseAsked] = deque()
        """Those that wait for what they want to be written down, the first first."""
        self._lag_measured_at: float | None = None
        self._has_lag = False
        """Whether the lag was ever measured; until then its age is that of the process."""
        self._published = Rate()
        self._boundary = 0
        self._durable = durable = DurableState(begin)
        self._recounting = Recounting(
            horizon, begin.start, begin.now, begin.position, begin.hidden_since
        )
        self._failures = Failures(config)
        self._ending = Ending(shards, self._failures, progress, begin.until, do)
        self._requests = Requests(shards, begin.partitions, do)
        for request, reply in begin.requests:
            self._requests.receive(request, reply, is_kept=True)
        self._leases = Leases(shards, self._ending, self._requests, do)
        gaps = config.gaps
        self._windows = Windows(shards, durable, gaps.policy != "hold_shard", gaps.longest_wait, do)
        newest = NewestRows(horizon, begin.start, begin.newest)
        self._changes = DatabaseChanges(
            newest,
            self._recounting,
            durable,
            progress,
            do,
            is_fatal=config.recount.rows_in_past == "stop",
        )
        self._checks = Checks(config.sink.delivery == "exactly_once")
        self._report_log = wording.ReportLog(config)
        self._handlers = self._handlers_by_type()

    def _handlers_by_type(self) -> dict[type[e.Event], Callable[..., None]]:
        """What takes an event of each type, and the time at which it has come."""
        leases, requests, ending = self._leases, self._requests, self._ending
        return {
            Joined: self._joined,
            Received: self._received,
            Lost: lambda event, now: leases.lost(event.lane, now),
            e.Polled: self._polled,
            e.Counted: self._counted,
            e.Tick: self._ticked,
            e.Sampled: self._sampled,
            e.LagMeasured: self._lag_measured,
            e.TopicChecked: lambda *_: self._checks.is_done(e.CheckTopic),
            e.TableChecked: self._table_checked,
            e.OpenChecked: self._open_checked,
            e.Failed: self._failed,
            e.RequestReceived: lambda event, _: requests.receive(event.request, event.reply),
            e.Withdrawn: lambda event, _: requests.withdraw(event.id),
            e.PauseAsked: self._pause,
            e.Written: self._written,
            e.StopAsked: lambda _, now: ending.stop(None, now),
        }

    @property
    def database_seen_at(self) -> float | None:
        """When the last poll was answered, in the machine's seconds; None: none was."""
        return self._changes.seen_at

    @property
    def state(self) -> str:
        """What the publisher does: starting, running, paused or stopping."""
        if self._ending.is_stopping:
            return "stopping"
        if any(shard.report is None for shard in self.shards):
            return "starting"
        return "paused" if self.is_paused else "running"

    def lag_seconds(self, now: float) -> float:
        """Age below the boundary of the oldest event that is not published, held ones included.

        While it cannot be measured it grows with time.
        """
        lag = self.unread_seconds(now)
        if self.progress.holds_open and self._boundary:
            lag = max(lag, (self._boundary - self._durable.low) / 1e6)
        return lag

    def unread_seconds(self, now: float) -> float:
        """The same without what is held."""
        lag, measured_at = self.progress.lag_seconds, self._lag_measured_at
        if measured_at is not None and now - measured_at > _LAG_IS_OLD:
            lag += now - measured_at
        return lag

    def lag_events(self, now: float) -> int | None:
        """Events below the boundary that are not read yet, and held aggregates; None: not known."""
        if not self._lag_is_known(now):
            return None
        return self.progress.lag_events + self.progress.holds_open

    def _lag_is_known(self, now: float) -> bool:
        at = self._lag_measured_at
        return self._has_lag and at is not None and now - at <= _LAG_IS_OLD

    def published_per_second(self, now: float) -> float:
        """Over the last few seconds."""
        return self._published.at(now)

    def in_work(self, shard: Shard) -> int:
        """How much a shard was sent and has not done yet."""
        compares = shard.compares_since is not None
        return len(shard.sent) + self._requests.under_way(shard) + compares

    def shard_lag_seconds(self, shard: Shard, now: float) -> float:
        """The same of one shard; at most that of the publisher."""
        lag, report = self.lag_seconds(now), shard.report
        if report is None or not lag or not self._lag_is_known(now):
            return lag
        is_read = not shard.sent and report.position >= self._windows.planned
        if is_read and not report.holds:
            # where nothing is planned any more, what comes may be this shard's
            is_published = shard.lane is not None and not self.is_paused
            return 0.0 if is_published else self.unread_seconds(now)
        return min(lag, max(0.0, (self._boundary - report.low) / 1e6))

    # -- the loop's side --------------------------------------------------------------------------

    def on(self, event: e.Event, now: float) -> list[e.Command]:
        """What is to be done because of an event.

        Args:
            now: the machine's time, s; it only grows.
        """
        self.seen_at = now
        if self._lag_measured_at is None:
            self._lag_measured_at = now
            self._published.add(now, 0)
        was_away = self.health.is_away("database")
        self.health.observe(event, now)
        for name, seconds in self.health.take_recovered():
            self._do(e.Log("info", f"{name}: ok again after {seconds:.0f} s", {}))
        if was_away and not self.health.is_away("database"):
            self._windows.polling.try_again(now)
            for shard in self.shards:
                shard.start_at = min(shard.start_at, now)
        self._handlers[type(event)](event, now)
        if not self._ending.is_over:
            self._go_on(now)
        commands = self._commands.copy()
        self._commands.clear()
        return commands

    def next_tick(self, now: float) -> float:
        """Seconds until the next `Tick` is of use."""
        if self._ending.is_stopping:
            return max(0.0, self._ending.stop_by - now)
        due = [*self._leases.due_at(), *self._windows.due_at()]
        # what was due by the last event was seen to then; a second's work waits for a tick
        later = [at for at in due if at > self.seen_at]
        return max(0.0, min([*later, self._checks.second_at]) - now)

    def is_current(self, shard: int, lease: int) -> bool:
        """Whether a lease is in force; may be asked from any thread."""
        return 0 <= shard < len(self.shards) and self.shards[shard].lease == lease

    def _go_on(self, now: float) -> None:
        """What follows from how things are, whatever has happened."""
        if not self._ending.is_stopping:
            self._leases.start_runners(now)
            self._requests.send(is_paused=self.is_paused)
            if not self.is_paused:
                self._windows.catch_up(now)
                self._compare(now)
            self._windows.poll(now, is_paused=self.is_paused)
        self._finish_if_done(now)

    # -- runners ----------------------------------------------------------------------------------

    def _joined(self, event: Joined, now: float) -> None:
        """Give the lease to a runner that has connected, and what it is to do now."""
        lane, shard = event.lane, self.shards[event.lane.shard]
        if not self._leases.admits(lane):
            return
        shard.grant(lane, self._durable.lease(shard, self._recounting.uncounted_since))
        if not self.is_paused:  # else `_resume` catches up
            self._windows.begin(shard, now)
            shard.compare(self._recounting.comparison, now)

    def _received(self, event: Received, now: float) -> None:
        lane, message = event.lane, event.message
        if isinstance(message, Farewell):
            self._leases.left(lane, message.error, now)
            if message.error is not None and message.error.code == "store.table_altered":
                self._checks.table_is_in_doubt(now)
        elif self._leases.heard(event) and isinstance(message, Report):
            self._reported(self.shards[lane.shard], message, now)

    def _pause(self, event: e.PauseAsked, now: float) -> None:
        if event.is_paused == self.is_paused == self._is_written_paused and not self._pauses:
            event.reply(sum(map(self.in_work, self.shards)))
            return
        self._pauses.append(event)
        if event.is_paused != self.is_paused:
            self.is_paused = event.is_paused
            self.paused_by = event.by if event.is_paused else ""
            text = "paused: run `eventpub resume` to publish again"
            self._do(e.Log("info", text if self.is_paused else "resumed", {"by": event.by}))
            if not self.is_paused:
                self._resume(now)
        self._remember()

    def _written(self, event: e.Written, now: float) -> None:
        self.health.written(now)
        self._is_written_paused = event.what["is_paused"]
        self._reply_to_pauses(self._is_written_paused, sum(map(self.in_work, self.shards)))

    def _reply_to_pauses(self, is_paused: bool, outcome: int | EventpubError) -> None:
        """What was written, or was not, said whether it is paused: as who asked first wanted."""
        while self._pauses and self._pauses[0].is_paused == is_paused:
            self._pauses.popleft().reply(outcome)

    def _resume(self, now: float) -> None:
        """Who has got the lease meanwhile begins."""
        comparison = self._recounting.comparison
        for shard in self.shards:
            if shard.lane is not None and shard.window == 0:
                self._windows.begin(shard, now)
                shard.compare(comparison, now)
        self._windows.polling.at = now

    # -- reports ----------------------------------------------------------------------------------

    def _reported(self, shard: Shard, report: Report, now: float) -> None:
        is_first = shard.report is None
        held = self._durable.held(shard)
        is_of_other_lease = shard.reported_lease != shard.lease
        known = None if shard.report is None else shard.report.position
        shard.take_report(report)
        if is_of_other_lease and report.read_before is not None:
            self._recounting.began(report.read_before, known)
        if is_of_other_lease:
            self._recounting.account_anew(report, held)
        else:
            self._recounting.account(report)
        is_first_written = self._durable.has_first_written(report)
        self._durable.take(self.shards, report, self._recounting)
        has_progressed = bool(report.done or report.published)
        self._failures.is_well(shard.number, now, has_progressed=has_progressed)
        if report.counts.rows or report.published:
            self._checks.had_rows(now)
        assert shard.lane is not None
        self.progress.add(report, shard.lane.hello.where)
        self.progress.position = self._durable.position
        self._recounting.compared([s.report for s in self.shards if s.report is not None])
        for line in self._report_log.lines(report, self.progress, now):
            self._do(line)
        for request_id, answer in report.answers.items():
            self._requests.answered(request_id, shard.number, answer)
        if is_first and all(s.report is not None for s in self.shards):
            self._all_have_reported()
        if is_first_written:  # which tells a topic that is made again from a new one
            self._remember()
        seen_at = self.database_seen_at
        if seen_at is not None and self._windows.is_reached(self._durable.position):
            # what has been written since that poll, nobody knows
            self.progress.lag_seconds, self.progress.lag_events = 0.0, 0
            self._lag_measured_at = max(seen_at, self._lag_measured_at or seen_at)
            self._has_lag = True

    def _all_have_reported(self) -> None:
        """From now on the position is this run's; what former indexes knew was taken over."""
        self._windows.begin_at(self._durable.position)
        self._durable.take_over_former()
        self._remember()

    def _remember(self) -> None:
        what = self._durable.document(len(self.shards), self.progress, self._recounting)
        what |= {"is_paused": self.is_paused, "paused_by": self.paused_by}
        self._durable.write(what, self._do)

    # -- windows ----------------------------------------------------------------------------------

    def _polled(self, event: e.Polled, now: float) -> None:
        self._failures.is_done(e.Poll)
        self._boundary = event.result.upper
        self.progress.without_identity += event.result.without_identity
        if self._changes.polled(event.result, now):
            self._remember()
        self._windows.polled(event, self._recounting.uncounted_since, now, is_paused=self.is_paused)

    # -- recount ----------------------------------------------------------------------------------

    def _counted(self, event: e.Counted, now: float) -> None:
        self._failures.is_done(e.Count)
        self._recounting.counted(event)
        # by the clock that it was counted by: were that set back, it would be due again at once
        self._count(now, event.now)

    def _count(self, now: float, at_most: int | None = None) -> None:
        """The next count; not before all shards have said what they have accounted for.

        Args:
            at_most: the database's time, where it is less than at the last poll, µs.
        """
        found = self._read_upto()
        if found is None or not self.progress.time:
            return
        hidden = self._durable.shards_hidden_since
        time = self.progress.time if at_most is None else min(at_most, self.progress.time)
        count = self._recounting.next_count(time, *found, hidden, now)
        if count is not None:
            self._do(count)

    def _read_upto(self) -> tuple[int, int] | None:
        """Up to where all shards have read, and any of them, or the database for them; µs.

        Rows may be as old as their window when a shard comes to them: what was young when that
        was planned is counted, however long it takes.
        """
        found = positions(self.shards)
        return None if found is None else (found[0], max(found[1], self._windows.planned))

    def _compare(self, now: float) -> None:
        comparison = self._recounting.next_comparison()
        if comparison is not None:
            self.progress.comparisons = comparison.number
            for shard in self.shards:
                shard.compare(comparison, now)

    # -- once a second ----------------------------------------------------------------------------

    def _ticked(self, event: e.Tick, now: float) -> None:
        del event
        if self._ending.is_stopping or not self._checks.is_second(now):
            return
        self._recounting.second(now)
        self._count(now)
        durable, progress = self._durable, self.progress
        position = durable.position, progress.rows_read
        for command in self._checks.due(
            now, progress.time, position, durable.acknowledged, self.shards
        ):
            self._do(command)
        self._remember()
        self._published.add(now, progress.published)
        self._leases.log_folding(now)
        self._do(e.Show())

    def _sampled(self, event: e.Sampled, now: float) -> None:
        above = None if event.above is not None else self._changes.wants_more(event.rows)
        if above is not None:
            self._do(e.Sample(above))
            return
        self._checks.is_done(e.Sample)
        self._failures.is_done(e.Sample)
        error = self._changes.sampled(event, now)
        self.health.mark("times", self._changes.odd_times(now), now)
        if error is not None:
            self._ending.stop(error, now)

    def _lag_measured(self, event: e.LagMeasured, now: float) -> None:
        self._checks.is_done(e.MeasureLag)
        self._failures.is_done(e.MeasureLag)
        self._boundary, self._lag_measured_at = max(self._boundary, event.upper), now
        self._has_lag = True
        if event.position >= self._durable.position or event.seconds == 0.0:
            self.progress.lag_seconds, self.progress.lag_events = event.seconds, event.events
        else:  # the position has moved on meanwhile: what is left is younger than that
            left = max(0.0, (event.upper - self._durable.position) / 1e6)
            self.progress.lag_seconds = min(event.seconds, left)
            self.progress.lag_events = event.events if left else 0

    def _table_checked(self, event: e.TableChecked, now: float) -> None:
        error = self._changes.altered(event)
        if error is not None:
            for shard in self.shards:
                shard.outdate()
            self._connect_anew(error, now)

    def _open_checked(self, event: e.OpenChecked, now: float) -> None:
        """What was published last is kept from consumers: the next runners fix it."""
        if event.is_left_open:
            self._leases.end_all(now)

    def _connect_anew(self, why: EventpubError, now: float) -> None:
        """All that reads the database begins again, on new connections."""
        self._ending.wait_out(why)
        self._windows.connect_anew()
        self._leases.end_all(now)

    # -- failures ---------------------------------------------------------------------------------

    def _failed(self, event: e.Failed, now: float) -> None:
        command, error = event.command, event.error
        self._checks.is_done(type(command))
        if error.code in {"store.index_missing", "store.column_missing"}:
            self._checks.table_is_in_doubt(now)
        if isinstance(command, e.Poll):
            self._windows.polling.failed(now)
            if error.code == "store.moved":
                self._connect_anew(error, now)
                return
        elif isinstance(command, e.Count):
            self._recounting.not_counted(command)
        elif isinstance(command, e.Remember):
            self._durable.is_not_written(command)
            self._reply_to_pauses(command.what["is_paused"], error)
        self._ending.judge_command(command, error, now)

    # -- the end ----------------------------------------------------------------------------------

    def _finish_if_done(self, now: float) -> None:
        if self._ending.is_stopping:
            if self._ending.is_due(now):
                self._remember()
                self._ending.finish()
            return
        found = self._read_upto()
        if found is None or not self._ending.has_published_all(found[0]):
            return
        hidden = self._durable.shards_hidden_since
        self._recounting.begin_last(self.progress.time, *found, hidden)
        self._count(now)
        if self._recounting.is_over():
            self._ending.stop(None, now)

    def _do(self, command: e.Command) -> None:
        self._commands.append(command)
