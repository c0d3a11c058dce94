"""The coordinator: what one publisher decides once for all of its shards.

One loop calls `on` with one event after the other and does what it returns. It alone plans windows,
gives leases, counts again, answers requests and keeps what must last. It does no I/O and asks no
clock, so a test plays a life of it in a few lines.

A window's way: `Poll` → `Polled` → `Window` to each shard → `Report` of each → position. One window
is the same for all shards, and none waits for another: a shard that is slow, or has no runner, is
sent one large window instead of many small ones when it is ready, and reads it itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from eventpub.channel import (
    Comparison,
    Farewell,
    Folding,
    Lease,
    Report,
    Stop,
    Window,
)
from eventpub.channel.lane import Joined, Lane, Lost, Received
from eventpub.config import Config
from eventpub.coordinator import events as e
from eventpub.coordinator import wording
from eventpub.coordinator.agenda import POLLS_AGAIN, Ending, Logged, Plan
from eventpub.coordinator.boundary import PollResult
from eventpub.coordinator.checks import Checks
from eventpub.coordinator.failures import Failures
from eventpub.coordinator.newest import NewestRows
from eventpub.coordinator.past import OddRows
from eventpub.coordinator.progress import Progress
from eventpub.coordinator.recounting import Recounting
from eventpub.coordinator.requests import Requests
from eventpub.coordinator.shards import Shard, positions
from eventpub.coordinator.silence import Silence
from eventpub.coordinator.standing import DurableState, StartState
from eventpub.errors import EventpubError, StoreError

_LONGEST_WAIT = 30.0
"""Seconds until a poll that has failed is tried again, twice as many each time."""

_STOPS_WITHIN = 1.2
"""Seconds in which runners may finish what they do when the publisher is to stop."""


class Coordinator:
    """See the module.

    Args:
        config: the whole configuration.
        beginning: what the start has found out.
    """

    def __init__(self, config: Config, start_state: StartState) -> None:
        begin = start_state
        self._config = config
        self._begin = begin
        self.shards = [Shard(number) for number in range(config.spark.shards)]
        self.progress = Progress(server=begin.server)
        self._durable = DurableState(begin)
        self._plan = Plan(begin.start if begin.position is None else begin.position)
        self._recounting = Recounting(
            config.recount.horizon, begin.start, begin.now, begin.position, begin.hidden_since
        )
        self._odd = OddRows(NewestRows(config.recount.horizon, begin.start, begin.newest))
        self._failures = Failures(config)
        self._requests = Requests(self.shards, begin.partitions)
        self._checks = Checks(config.sink.delivery == "exactly_once")
        self._logged = Logged()
        self._silence = Silence()
        self._commands: list[e.Command] = []
        self._ending = Ending()
        self.database_seen_at: float | None = None
        for request, reply in begin.requests:
            self._requests.send(request, reply)

    # -- the loop's side --------------------------------------------------------------------------

    def on(self, event: e.Event, now: float) -> list[e.Command]:
        """What is to be done because of an event.

        Args:
            now: the machine's time, s; it only grows.
        """
        self._plan.happened(now)
        handle = self._HANDLERS[type(event)]
        handle(self, event, now)
        if not self._ending.is_over:
            self._go_on(now)
        commands, self._commands = self._commands, []
        return commands

    def next_tick(self, now: float) -> float:
        """Seconds until the next `Tick` is of use."""
        if self._ending.is_stopping:
            return max(0.0, self._ending.stop_by - now)
        at = [s.start_at for s in self.shards if s.lane is None]
        at += [s.handover_by for s in self.shards if s.next_lane is not None]
        at += [s.comes_by for s in self.shards if s.is_starting and s.lane is None]
        if self._plan.can_poll:
            at.append(self._plan.poll_at)
        # what was due by the last event was seen to then; a second's work waits for a tick
        later = [t for t in at if t > self._plan.seen_at]
        return max(0.0, min([*later, self._checks.second_at]) - now)

    def is_current(self, shard: int, lease: int) -> bool:
        """Whether a lease is in force; may be asked from any thread."""
        return 0 <= shard < len(self.shards) and self.shards[shard].lease == lease

    # -- runners ----------------------------------------------------------------------------------

    def _joined(self, event: Joined, now: float) -> None:
        lane, shard = event.lane, self._shard_of(event.lane)
        hello = lane.hello
        is_ours = (
            shard is not None and hello.run == self._begin.run and not self._ending.is_stopping
        )
        if shard is None or not is_ours or hello.attempt < shard.valid_from:
            lane.send(Stop())
            return
        shard.join(lane, now)

    def _shard_of(self, lane: Lane) -> Shard | None:
        return self.shards[lane.shard] if 0 <= lane.shard < len(self.shards) else None

    def _received(self, event: Received, now: float) -> None:
        shard, message = self._shard_of(event.lane), event.message
        if shard is None:
            return  # it was asked to leave
        if isinstance(message, Farewell):
            self._left(shard, event.lane, message.error, now)
            return
        if event.lane is not shard.lane:
            return  # of somebody whose lease was given away
        self._silence.heard(shard.number, now)
        if isinstance(message, Folding):
            self._logged.folding.add(shard.number, message)
        else:
            self._reported(shard, message, now)

    def _lost(self, event: Lost, now: float) -> None:
        shard = self._shard_of(event.lane)
        if shard is not None:
            self._left(shard, event.lane, None, now)

    def _runner_ended(self, event: e.RunnerEnded, now: float) -> None:
        shard = self.shards[event.shard]
        if shard.has_ended(event.attempt, now):
            if event.error is not None:
                self._met(event.error)
        elif shard.lane is not None and event.attempt == shard.lane.hello.attempt:
            # of a machine that is gone the connection may say nothing for a quarter of an hour
            lane = shard.lane
            lane.close()
            self._left(shard, lane, event.error, now)

    def _placement_changed(self, event: e.PlacementChanged, now: float) -> None:
        for shard in self.shards:
            shard.start_at, shard.is_starting, shard.never_came = now, False, False
            if event.replaces_runners and not self._ending.is_stopping:
                self._do(e.StartRunner(shard.number, shard.start(now, is_here=False)))

    def _left(
        self,
        shard: Shard,
        lane: Lane,
        error: EventpubError | None,
        now: float,
    ) -> None:
        """A runner is gone; what it has left is repaired by the next one."""
        if not shard.leave(lane):
            return
        self._logged.folding.forget(shard.number)
        if error is None:
            if shard.next_lane is None and not self._ending.is_stopping:
                shard.failed(now, at_once=shard.failures == 0)
            return
        self._fail(shard, error, now)

    def _fail(self, shard: Shard, error: EventpubError, now: float) -> None:
        if error.code in {"run.superseded", "run.disconnected"}:
            shard.failed(now, at_once=shard.failures == 0)
            return
        shard.failed(now)
        final = self._failures.of_shard(shard.number, error, shard.failures, now)
        if final is not None:
            self._stop(final, now)
        elif not self._ending.is_stopping:
            self._met(error)

    def _grant(self, now: float) -> None:
        for shard in self.shards:
            if not shard.is_free(now):
                continue
            number = shard.lease + 1
            self._silence.heard(shard.number, now)
            shard.grant(
                Lease(
                    number,
                    low=self._durable.low,
                    position=self._durable.position,
                    acknowledged=dict(self._durable.acknowledged),
                    is_placed=self._durable.is_placed,
                    uncounted_since=self._recounting.uncounted_since,
                    former_shards=self._durable.former_shards,
                    former_indexes=self._durable.former_indexes,
                )
            )
            if self._plan.window is not None:
                shard.send(self._plan.window, now)
            if self._recounting.comparison.buckets and shard.lane is not None:
                shard.lane.send(self._recounting.comparison)

    def _check_silence(self, now: float) -> None:
        for shard, seconds, is_over in self._silence.check(self.shards, now):
            assert shard.lane is not None
            hello = shard.lane.hello
            text = "nothing is heard of the runner of a shard, which has work"
            if is_over:
                text += "; it is ended, and another one is started (where it is a thread of the"
                text += " publisher itself: start that again)"
                self._do(e.EndRunner(shard.number, hello.attempt))
            facts = {"shard": shard.number, "where": hello.where, "seconds": round(seconds)}
            self._do(wording.warning(text, **facts))

    def _start_runners(self, now: float) -> None:
        for shard in self.shards:
            if shard.wants_runner(now):
                is_here = shard.starts_here(now)
                attempt = shard.start(now, is_here=is_here)
                self._do(e.StartRunner(shard.number, attempt, is_here))

    # -- reports ----------------------------------------------------------------------------------

    def _reported(self, shard: Shard, report: Report, now: float) -> None:
        self._logged.folding.forget(shard.number)
        is_first = shard.report is None
        held = self._held(shard)
        is_of_other_lease = shard.reported_lease != shard.lease
        shard.take_report(report)
        if is_first and report.read_before is not None:
            self._recounting.began(report.read_before)
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
        named = self._logged.gaps_named.take(len(report.skipped), now)
        for line in wording.of_report(report, self._config.sink.gaps_topic, named):
            self._do(line)
        self._warn_of_first_versions()
        for request_id, answer in report.answers.items():
            if (said := self._requests.answered(request_id, shard.number, answer)) is not None:
                self._do(said)
        if is_first and all(s.report is not None for s in self.shards):
            self._all_have_reported()
        if is_first_written:  # which tells a topic that is made again from a new one
            self._remember()
        if self._plan.is_reached(self._durable.position):
            self.progress.lag_seconds, self.progress.lag_events = 0.0, 0

    def _held(self, shard: Shard) -> tuple[int, int] | None:
        """Between which times the shard may hold events, as it or the former run has said last."""
        begin, last = self._begin, shard.report
        if last is not None:
            return (last.low, last.position) if last.holds else None
        return None if begin.position is None else (begin.low, begin.position)

    def _all_have_reported(self) -> None:
        """From now on the position is this run's; what former indexes knew was taken over."""
        former, indexes = self._durable.former_shards, self._durable.former_indexes
        self._durable.former_shards, self._durable.former_indexes = None, ()
        self._remember()
        if former is not None or indexes:
            self._do(e.ForgetFormer(former))

    def _warn_of_first_versions(self) -> None:
        found = self.progress.begin_above
        if found >= self._logged.begin_above:
            self._logged.begin_above = 10 * found
            self._do(wording.first_versions_missing(found, self._config.store.first_version))

    def _remember(self) -> None:
        what = self._durable.document(self._config, self._begin, self.progress, self._recounting)
        if what != self._durable.written:  # else it waits for the disk each second of an idle day
            self._durable.written = what
            self._do(e.Remember(what))

    # -- windows ----------------------------------------------------------------------------------

    def _polled(self, event: e.Polled, now: float) -> None:
        result, plan = event.result, self._plan
        self._failures.is_done(e.Poll)
        self.database_seen_at = now
        plan.is_polling = False
        plan.wait = POLLS_AGAIN
        plan.poll_at = now + result.pause
        self.progress.time, plan.boundary = result.now, result.upper
        self._meet(result.server)
        self._recounting.ended(result.ended)
        self._odd.ended(result.ended, now)
        self.progress.no_longer_waited_for(result.timed_out)
        self._say_watermark(result.state)
        if seconds := self._recounting.clock_went_back(result.now):
            self._do(wording.clock_went_back(seconds, self._durable.position))
        window = Window(
            0,
            plan.planned if result.end is None else max(result.end, plan.planned),
            # what has begun since the poll is not known: a gap that is seen later is not skipped
            open_since=result.now if result.open_since is None else result.open_since,
            hidden_since=result.hidden_since,
            uncounted_since=self._recounting.uncounted_since,
        )
        if result.end is not None and event.after == plan.planned:
            self._send(window, result, event.after, now)
        elif result.is_due or self._waits_for_bounds():
            self._send_for_holds(window, result, now)

    def _send(self, window: Window, result: PollResult, after: int, now: float) -> None:
        plan = self._plan
        plan.planned, plan.window = window.upto, window
        if result.is_page:
            plan.poll_at = now
        for shard in self.shards:
            rows = None if result.rows is None else result.rows[shard.number]
            with_rows = Window(**{**vars(window), "after": after}) if rows is not None else window
            shard.send(with_rows, now, rows=rows, is_page=result.is_page)

    def _waits_for_bounds(self) -> bool:
        """Whether a runner has begun and nothing was planned yet."""
        return self._plan.window is None

    def _send_for_holds(self, window: Window, result: PollResult, now: float) -> None:
        """A window without rows for the shards whose holds are due."""
        for shard in self.shards:
            due = shard.next_due()
            if due is not None and due <= result.now:
                shard.due_sent_for = shard.report
                shard.send(window, now)

    def _catch_up(self, now: float) -> None:
        """One window for what was left out, where a shard has done what it was sent."""
        for shard in self.shards:
            if shard.is_behind and not shard.sent and self._plan.window is not None:
                shard.send(self._plan.window, now)

    def _poll(self, now: float) -> None:
        plan = self._plan
        if plan.is_polling or now < plan.poll_at or self._ending.is_stopping:
            plan.can_poll = not plan.is_polling and not self._ending.is_stopping
            return
        live = [shard for shard in self.shards if shard.lane is not None]
        is_early = len(live) < len(self.shards) and plan.waits_for_runners(now)
        if not live or is_early or any(shard.is_full(now) for shard in live):
            plan.can_poll = False
            return
        dues = [due for shard in live if (due := shard.next_due()) is not None]
        plan.is_polling, plan.can_poll = True, False
        anew, plan.anew = plan.anew, False
        with_rows = self._config.gaps.policy != "hold_shard"
        self._do(
            e.Poll(plan.planned, min(dues, default=None), with_rows, anew, self._durable.hidden())
        )

    def _meet(self, server: str) -> None:
        """Which server is read; a change is said, and everything is counted again."""
        before = self.progress.server
        if not server or server == before:
            return
        self.progress.server = server
        if before:
            self._do(wording.another_server(before, server))
            self._recounting.everything(self.progress.time)

    def _say_watermark(self, state: str) -> None:
        if state != self.progress.watermark and state in wording.WATERMARK:
            if state != self._logged.watermark:
                self._do(wording.warning(wording.WATERMARK[state], state=state))
            self._logged.watermark = state
        elif state in {"open", "off"}:
            self._logged.watermark = ""
        self.progress.watermark = state

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
        found = positions(self.shards)
        if found is None or not self.progress.time:
            return
        hidden = self._durable.shards_hidden_since
        time = self.progress.time if at_most is None else min(at_most, self.progress.time)
        count = self._recounting.next_count(time, *found, hidden, now)
        if count is not None:
            self._do(count)

    def _compare(self) -> None:
        comparison: Comparison | None = self._recounting.next_comparison()
        if comparison is not None:
            self.progress.comparisons = comparison.number
            for shard in self.shards:
                shard.compare(comparison)

    # -- once a second ----------------------------------------------------------------------------

    def _ticked(self, event: e.Tick, now: float) -> None:
        del event
        if self._ending.is_stopping or not self._checks.is_second(now):
            return
        self._check_silence(now)
        self._recounting.second(now)
        self._count(now)
        durable, progress = self._durable, self.progress
        position = durable.position, progress.rows_read
        for command in self._checks.due(
            now, progress.time, position, durable.acknowledged, self.shards
        ):
            self._do(command)
        self._remember()
        if (line := self._logged.folding.line(now)) is not None:
            self._do(line)
        self._do(e.Show())

    def _sampled(self, event: e.Sampled, now: float) -> None:
        """Rows that are inserted now but say that they were created long ago, or will be."""
        newest = self._odd.newest
        above = newest.wants_more(event.rows)
        if above is not None and self._checks.samples_more():
            self._do(e.Sample(self.progress.time, above))
            return
        self._checks.is_sampled()
        self._failures.is_done(e.Sample)
        buckets, lines = self._odd.sample(
            self.progress.time, self._durable.position, event.rows, now
        )
        if not (buckets or self._recounting.has_late):
            self._durable.newest = newest.last
        if buckets:
            self._recounting.note(buckets)
        for line in [*lines, *self._odd.future(event.ahead, now)]:
            self._do(line)
        self.progress.ahead_seconds = self._odd.ahead_seconds
        if newest.trips and self._config.recount.rows_in_past == "stop":
            layout = self._durable.layout
            zone = None if layout.zone is None else layout.zone.name
            self._stop(newest.error(self.progress.time, layout.where, zone), now)

    def _lag_measured(self, event: e.LagMeasured, now: float) -> None:
        del now
        self._checks.lag_is_measured()
        self._failures.is_done(e.MeasureLag)
        if event.position >= self._durable.position or event.seconds == 0.0:
            self.progress.lag_seconds, self.progress.lag_events = event.seconds, event.events

    def _topic_checked(self, event: e.TopicChecked, now: float) -> None:
        del event, now

    def _table_checked(self, event: e.TableChecked, now: float) -> None:
        layout, before = event.layout, self._durable.layout
        if layout == before:
            return
        names = [name for name in vars(layout) if vars(layout)[name] != vars(before)[name]]
        self._do(wording.warning("the event table was altered", table=layout.table, changed=names))
        self._durable.layout = layout
        self._do(e.Reassign(layout))
        for shard in self.shards:
            shard.outdate()
        self._connect_anew(
            StoreError(
                "store.table_altered",
                "the event table was altered; it is read anew, as it is now",
                where=layout.where,
                retriable=True,
            ),
            now,
        )

    def _open_checked(self, event: e.OpenChecked, now: float) -> None:
        """What was published last is kept from readers: the next runners fix it."""
        if event.is_left_open:
            self._end_leases(now)

    def _connect_anew(self, why: EventpubError, now: float) -> None:
        """All that reads the database begins again, on new connections."""
        self._met(why)
        self._plan.anew = True
        self._end_leases(now)

    def _end_leases(self, now: float) -> None:
        for shard in self.shards:
            shard.start_at = now
            if shard.lane is not None:
                shard.lane.send(Stop())

    # -- failures ---------------------------------------------------------------------------------

    def _failed(self, event: e.Failed, now: float) -> None:
        command, error = event.command, event.error
        if isinstance(command, e.Poll):
            plan = self._plan
            plan.is_polling = False
            plan.poll_at = now + plan.wait
            plan.wait = min(2 * plan.wait, _LONGEST_WAIT)
            if error.code == "store.moved":
                self._connect_anew(error, now)
                return
            plan.anew = True  # whatever was the reason: nothing is concluded from two servers
        elif isinstance(command, e.Count):
            self._recounting.not_counted(command)
        elif isinstance(command, e.Sample):
            self._checks.is_sampled()
        elif isinstance(command, e.MeasureLag):
            self._checks.lag_is_measured()
        elif isinstance(command, e.Remember):
            self._durable.written = None
        final = self._failures.of_command(command, error, now)
        if final is not None:
            self._stop(final, now)
        else:
            self._met(error)

    def _met(self, error: EventpubError) -> None:
        """Show what is waited out."""
        self.progress.last_error = str(error)
        self._do(e.Show())

    # -- requests ---------------------------------------------------------------------------------

    def _request_received(self, event: e.RequestReceived, now: float) -> None:
        del now
        self._requests.send(event.request, event.reply)

    def _withdrawn(self, event: e.Withdrawn, now: float) -> None:
        del now
        self._requests.withdraw(event.id)

    # -- the end ----------------------------------------------------------------------------------

    def _stop_asked(self, event: e.StopAsked, now: float) -> None:
        del event
        self._stop(None, now)

    def _stop(self, error: EventpubError | None, now: float) -> None:
        """Have the runners finish what they do; then it is over.

        Args:
            error: why; None: it was asked for, or everything is published.
        """
        if self._ending.is_stopping:
            return
        self._ending.is_stopping, self._ending.error = True, error
        self._ending.stop_by = now + _STOPS_WITHIN
        for shard in self.shards:
            for lane in (shard.lane, shard.next_lane):
                if lane is not None:
                    lane.send(Stop())

    def _finish(self) -> None:
        self._ending.is_over = True
        self._remember()
        self._do(e.Show())
        self._do(e.Finish(self._ending.error))

    def _finish_if_done(self, now: float) -> None:
        if self._ending.is_stopping:
            # what is cut off is aborted by the broker, and read back by the next start
            if now >= self._ending.stop_by or all(shard.lane is None for shard in self.shards):
                self._finish()
            return
        until, found = self._begin.until, positions(self.shards)
        if until is None or found is None or found[0] < until or self.progress.holds_open:
            return
        if any(shard.sent for shard in self.shards):
            return
        hidden = self._durable.shards_hidden_since
        self._recounting.begin_last(self.progress.time, *found, hidden)
        self._count(now)
        if self._recounting.is_over():
            self._stop(None, now)

    def _go_on(self, now: float) -> None:
        """What follows from how things are, whatever has happened."""
        if not self._ending.is_stopping:
            self._grant(now)
            self._start_runners(now)
            self._catch_up(now)
            self._compare()
            self._poll(now)
        self._finish_if_done(now)

    def _do(self, command: e.Command) -> None:
        self._commands.append(command)

    _HANDLERS: Mapping[type, Callable[..., None]] = {
        Joined: _joined,
        Received: _received,
        Lost: _lost,
        e.Tick: _ticked,
        e.Polled: _polled,
        e.Counted: _counted,
        e.Sampled: _sampled,
        e.LagMeasured: _lag_measured,
        e.TopicChecked: _topic_checked,
        e.TableChecked: _table_checked,
        e.OpenChecked: _open_checked,
        e.Failed: _failed,
        e.RunnerEnded: _runner_ended,
        e.PlacementChanged: _placement_changed,
        e.RequestReceived: _request_received,
        e.Withdrawn: _withdrawn,
        e.StopAsked: _stop_asked,
    }
