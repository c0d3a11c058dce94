"""Time lines of a whole publisher, without sleeping: what happens, and what is done about it."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from eventpub.admission import EVENTS
from eventpub.channel import Comparison, Folding, Lease, Request, Stop
from eventpub.coordinator import events as e
from eventpub.coordinator.shards import MOST_PAGES, MOST_WINDOWS
from eventpub.errors import EventpubError, SinkError, StateError, StoreError
from eventpub.store.events import NewRow
from tests.coordinator.life import (
    NOW,
    SECOND,
    FakeLane,
    Life,
    begin,
    begun,
    layout,
    of_shard,
    some_rows,
    streaming,
)

AWAY = SinkError("sink.unreachable", "no broker answers", retriable=True)
FENCED = SinkError("sink.fenced", "another producer has taken this shard")
GONE = StoreError("store.denied", "the account may not read the table")
MOVED = StoreError("store.moved", "another server answers", retriable=True)


def at(second: float) -> int:
    """A time of the database, µs."""
    return round(second * SECOND)


def upto(lane: FakeLane) -> list[float]:
    """Where the windows end that a runner was sent, in seconds."""
    return [window.upto / SECOND for window in lane.windows]


class TestAStart:
    def test_a_runner_of_each_shard_is_started_once(self) -> None:
        life = begin(shards=3)
        life.waits(4.0)
        assert life.starts == [0, 1, 2]

    def test_who_joins_gets_the_lease_and_what_the_former_run_knew(self) -> None:
        life = begin(acknowledged={("events", 1): 17}, is_placed=True, former_shards=5)
        lane = life.joins(1)
        [lease] = lane.leases
        assert lease == Lease(
            1,
            low=at(1_000),
            position=at(1_000),
            acknowledged={("events", 1): 17},
            is_placed=True,
            uncounted_since=lease.uncounted_since,
            former_shards=5,
        )
        assert life.coordinator.is_current(1, 1)
        assert not life.coordinator.is_current(0, 1)
        assert not life.coordinator.is_current(1, 0)
        assert not life.coordinator.is_current(9, 1)

    def test_nothing_is_polled_until_all_shards_have_a_runner(self) -> None:
        life = begin()
        life.joins(0)
        assert life.poll() is None
        life.joins(1)
        assert life.poll() is not None
        assert life.last(e.Poll).after == at(1_000)

    def test_it_waits_two_seconds_for_those_that_do_not_come(self) -> None:
        life = begin()
        life.joins(0)
        life.waits(1.9)
        assert life.poll() is None
        life.waits(1.2)
        assert life.poll() is not None

    def test_nothing_is_polled_while_nobody_could_read(self) -> None:
        life = begin()
        life.waits(30.0)
        assert life.all(e.Poll) == []

    def test_who_comes_later_begins_with_what_is_planned_by_then(self) -> None:
        life = begin()
        first = life.joins(0)
        life.waits(3.0)
        life.polled(at(1_500))
        life.polled(at(2_000))
        late = life.joins(1)
        assert upto(first) == [1_500, 2_000]
        assert upto(late) == [2_000]

    @pytest.mark.parametrize(("shard", "run"), [(0, 6), (2, 7), (-1, 7)])
    def test_a_runner_of_another_run_or_of_no_shard_is_told_to_leave(
        self, shard: int, run: int
    ) -> None:
        life = begin()
        lane = life.joins(shard, run)
        assert lane.sent == [Stop()]
        life.reports(lane, position=at(4_000))
        life.leaves(lane)
        life.loses(lane)
        assert not life.is_ending()
        assert life.written["position"] == at(1_000)

    def test_former_indexes_are_removed_when_every_shard_has_taken_its_part(self) -> None:
        life = begin(former_shards=5, former_indexes=("/of/four",))
        lanes = [life.joins(number) for number in range(2)]
        life.reports(lanes[0], position=at(1_000))
        assert life.all(e.ForgetFormer) == []
        assert life.written["shards"] == 5, "until then they are what a next start begins with"
        life.reports(lanes[1], position=at(1_000))
        assert life.all(e.ForgetFormer) == [e.ForgetFormer(5)]
        assert life.written["shards"] == 2
        life.loses(lanes[0])
        assert life.joins(0).leases[0].former_shards is None


class TestWindows:
    def test_a_window_is_the_same_for_all_shards_and_the_next_begins_where_it_ends(self) -> None:
        life, lanes = begun()
        life.polled(at(2_000), hidden_since=at(1_990))
        for lane in lanes:
            [window] = lane.windows
            assert (window.number, window.upto) == (1, at(2_000))
            assert (window.hidden_since, window.rows) == (at(1_990), None)
        life.polled(at(2_001))
        assert [w.number for w in lanes[0].windows] == [1, 2]
        assert [p.after / SECOND for p in life.all(e.Poll)] == [1_000, 2_000]

    def test_where_nothing_is_new_nothing_is_sent(self) -> None:
        life, lanes = streaming()
        sent = [len(lane.sent) for lane in lanes]
        for _ in range(20):
            life.polled()
        assert [len(lane.sent) for lane in lanes] == sent

    def test_it_polls_again_when_the_boundary_says_and_never_twice_at_a_time(self) -> None:
        life, _ = streaming()
        life.polled(pause=0.3)
        assert life.poll() is None
        life.waits(0.29)
        assert life.poll() is None
        life.waits(0.02)
        assert life.poll() is not None
        polls = len(life.all(e.Poll))
        life.waits(10.0)
        assert len(life.all(e.Poll)) == polls

    def test_the_rows_of_a_page_go_to_their_shards(self) -> None:
        life, lanes = begun()
        parts = tuple(
            pa.Table.from_pylist([{"aggregate_id": a, "version": 1}], EVENTS) for a in "ab"
        )
        life.polled(at(2_000), is_page=True, rows=parts)
        for lane, part in zip(lanes, parts, strict=True):
            [window] = lane.windows
            assert (window.after, window.upto) == (at(1_000), at(2_000))
            assert window.rows is not None
            assert window.rows.equals(part)

    @pytest.mark.parametrize(("policy", "reads"), [("hold_aggregate", True), ("hold_shard", False)])
    def test_where_a_shard_may_wait_each_reads_for_itself(self, policy: str, reads: bool) -> None:
        life, _ = begun(sections={"gaps": {"policy": policy}})
        assert life.poll() is not None
        assert life.last(e.Poll).with_rows is reads

    def test_a_page_is_followed_by_the_next_at_once(self) -> None:
        life, _ = begun()
        life.pages(at(1_100))
        assert life.poll() is not None
        assert life.last(e.Poll).after == at(1_100)

    def test_of_a_backlog_a_few_pages_are_on_their_way(self) -> None:
        life, lanes = begun()
        for page in range(MOST_PAGES):
            life.pages(at(1_100 + page))
        assert life.poll() is None, "the shards are to come to it"
        life.reports(lanes[0], done=2, position=at(1_101))
        assert life.poll() is None, "the other one has not"
        life.reports(lanes[1], done=1, position=at(1_100))
        assert life.poll() is not None
        life.pages(at(1_200))
        assert [len(lane.windows) for lane in lanes] == [MOST_PAGES + 1] * 2

    def test_a_shard_that_stalls_is_waited_for_five_seconds_and_then_reads_one_window(self) -> None:
        life, (stalled, other) = begun()
        for page in range(MOST_PAGES):
            life.pages(at(1_100 + page))
        life.reports_done(other)
        life.waits(4.0)
        assert life.poll() is None
        life.waits(2.0)
        for page in range(10):
            life.pages(at(1_200 + page))
            life.reports_done(other)
        assert upto(stalled) == [1_100, 1_101, 1_102, 1_103], "it has no room for more"
        assert upto(other)[-1] == 1_209
        life.reports(stalled, done=MOST_PAGES - 1, position=at(1_102))
        assert len(stalled.windows) == MOST_PAGES, "not before it has done all of these"
        life.reports_done(stalled)
        assert upto(stalled)[MOST_PAGES:] == [1_209]
        assert stalled.windows[-1].rows is None
        assert life.coordinator.progress.position == at(1_103)
        life.reports_done(stalled)
        assert life.coordinator.progress.position == at(1_209)
        life.pages(at(1_300))
        assert upto(stalled)[-1] == upto(other)[-1] == 1_300

    def test_small_windows_that_a_shard_does_not_come_to_become_one(self) -> None:
        life, (slow, other) = begun()
        for number in range(40):
            life.polled(at(1_100 + number))
            life.reports_done(other)
        assert len(slow.windows) == MOST_WINDOWS
        assert upto(other)[-1] == 1_139, "nobody waits for it"
        life.reports_done(slow)
        assert upto(slow)[MOST_WINDOWS:] == [1_139]

    def test_the_position_is_that_of_the_slowest_shard(self) -> None:
        life, lanes = begun()
        life.polled(at(2_000))
        life.reports_done(lanes[0])
        life.waits(1.0)
        assert life.written["position"] == at(1_000)
        life.reports_done(lanes[1], low=at(1_700))
        life.waits(1.0)
        assert (life.written["position"], life.written["low"]) == (at(2_000), at(1_700))

    def test_it_says_that_everything_is_published_as_soon_as_it_is(self) -> None:
        life, lanes = begun()
        life.on(e.LagMeasured(at(1_000), at(2_000), 30.0, 400))
        assert life.coordinator.progress.lag_events == 400
        life.polled(at(2_000), upper=at(2_000))
        for lane in lanes:
            life.reports_done(lane)
        assert life.coordinator.progress.lag_events == 0
        life.on(e.LagMeasured(at(1_000), at(2_000), 30.0, 400))
        assert life.coordinator.progress.lag_events == 0, "that was before"


class TestWhatMustLast:
    def test_the_position_is_written_with_what_was_hidden_below_it(self) -> None:
        life, lanes = streaming()
        counted_with(life)
        life.polled(at(3_000), hidden_since=at(1_600))
        for lane in lanes:
            life.reports_done(lane, hidden_since=lane.windows[-1].hidden_since)
        life.waits(1.0)
        assert life.written["position"] == at(3_000)
        assert life.written["hidden_since"] == at(1_600)

    def test_what_one_shard_has_not_passed_yet_is_not_written_as_hidden_nor_as_read(self) -> None:
        life, lanes = begun(hidden_since=at(1_000))
        life.polled(at(2_000), hidden_since=at(1_600))
        life.reports_done(lanes[0], hidden_since=at(1_600))
        life.waits(1.0)
        assert life.written["position"] == at(1_000)
        assert life.written["hidden_since"] <= at(1_000)

    def test_what_has_ended_and_is_not_counted_yet_is_written_as_hidden(self) -> None:
        """A14: who starts next counts it; the transaction itself is gone by then."""
        life, lanes = streaming()
        counted_with(life)
        assert life.written.get("hidden_since") is None
        life.polled(at(2_001), ended=((at(400), at(402)),))
        for lane in lanes:
            life.reports_done(lane)
        life.waits(1.0)
        assert life.written["position"] == at(2_001)
        assert life.written["hidden_since"] == at(400)
        counted_with(life)
        life.waits(1.0)
        assert life.written.get("hidden_since") is None

    def test_who_polls_anew_begins_with_what_was_hidden(self) -> None:
        life, lanes = streaming()
        counted_with(life)
        life.polled(at(2_001), hidden_since=at(1_400))
        for lane in lanes:
            life.reports_done(lane, hidden_since=at(1_400))
        life.polled(at(2_002))
        assert life.all(e.Poll)[-1].hidden_since == at(1_400)

    def test_a_start_without_a_former_run_knows_of_nothing_hidden(self) -> None:
        life = begin(position=None)
        for number in range(2):
            life.joins(number)
        assert life.all(e.Poll)[0].hidden_since is None

    def test_it_is_written_when_something_has_changed(self) -> None:
        """It is synced, and was written each second of an idle day."""
        life, lanes = streaming()
        life.waits(2.0)
        written = len(life.all(e.Remember))
        for _ in range(100):
            life.polled()
        assert life.now > 1_030
        assert len(life.all(e.Remember)) == written
        life.polled(at(2_001))
        for lane in lanes:
            life.reports_done(lane)
        life.waits(1.5)
        assert len(life.all(e.Remember)) == written + 1

    def test_what_a_full_disk_has_refused_is_written_again(self) -> None:
        life, _ = streaming()
        life.waits(2.0)
        written = life.all(e.Remember)
        full = StateError("state.disk_full", "no space", retriable=True)
        life.on(e.Failed(written[-1], full))
        assert not life.is_ending()
        assert "disk_full" in str(life.coordinator.progress.last_error)
        life.waits(1.1)
        assert life.all(e.Remember)[len(written) :] == [written[-1]]

    def test_it_says_where_shards_are_acknowledged_to_be(self) -> None:
        life, lanes = streaming()
        life.reports(lanes[0], done=1, position=at(2_000), offsets={("events", 0): 12})
        life.reports(lanes[1], done=1, position=at(2_000), offsets={("events", 1): 3})
        life.waits(1.0)
        assert sorted(life.written["ends"]) == [["events", 0, 12], ["events", 1, 3]]


class TestTheLoop:
    def test_a_second_is_seen_to_however_much_happens(self) -> None:
        """Reports came before each wait was over, and nothing was written or shown meanwhile."""
        life, lanes = streaming()
        life.waits(1.0)
        before = len(life.all(e.MeasureLag))
        life.on(e.LagMeasured(at(2_000), at(2_000), 0.0, 0))
        for _ in range(300):
            life._at(life.now + 0.01)
            if life.coordinator.next_tick(life.now) <= 0:
                life.on(e.Tick())
                life.on(e.LagMeasured(at(2_000), at(2_000), 0.0, 0))
            life.reports(lanes[0], done=1, position=at(2_000))
        assert 2 <= len(life.all(e.MeasureLag)) - before <= 4

    def test_what_became_due_while_commands_were_done_is_not_forgotten(self) -> None:
        life, _ = streaming()
        life.polled(pause=0.05)
        life._at(life.now + 0.3)  # the disk was slow
        assert life.coordinator.next_tick(life.now) == 0.0
        life.on(e.Tick())
        assert life.poll() is not None

    def test_it_does_not_spin_where_nothing_is_to_be_done(self) -> None:
        life, _ = streaming()
        ticks = 0
        until = life.now + 10.0
        while life.now < until:
            life._at(life.now + max(life.coordinator.next_tick(life.now), 1e-9))
            life.on(e.Tick())
            ticks += 1
        assert ticks < 40


class TestHandOver:
    def test_spark_takes_over_when_the_former_runner_has_left(self) -> None:
        life, lanes = streaming()
        life.on(e.PlacementChanged(replaces_runners=True))
        assert life.starts == [0, 1, 0, 1]
        task = life.joins(0)
        assert lanes[0].is_told_to_stop
        assert task.sent == [], "two do not publish one shard"
        life.leaves(lanes[0])
        [lease] = task.leases
        assert lease.number == 2
        assert lease.position == at(2_000)
        assert life.coordinator.is_current(0, 2)
        assert not life.coordinator.is_current(0, 1)
        assert not lanes[1].is_told_to_stop
        assert life.starts == [0, 1, 0, 1]

    def test_or_after_five_seconds_anyway(self) -> None:
        life, (stalled, _) = streaming()
        life.on(e.PlacementChanged(replaces_runners=True))
        task = life.joins(0)
        life.waits(4.9)
        assert not task.leases
        life.waits(0.3)
        assert [lease.number for lease in task.leases] == [2]
        assert stalled.is_closed

    def test_what_a_superseded_runner_reports_is_not_believed(self) -> None:
        life, (stalled, other) = streaming()
        life.on(e.PlacementChanged(replaces_runners=True))
        task = life.joins(0)
        life.waits(6.0)
        life.polled(at(3_000))
        life.reports_done(other)
        published = life.coordinator.progress.published
        life.reports(stalled, done=9, position=at(3_000), published=5, offsets={("events", 0): 99})
        assert life.coordinator.progress.position == at(2_000)
        assert life.coordinator.progress.published == published
        life.leaves(stalled, FENCED)
        life.loses(stalled)
        life.waits(1.0)
        assert life.written["ends"] == []
        assert task.windows
        assert not task.is_closed
        life.reports_done(task)
        assert life.coordinator.progress.position == at(3_000)

    def test_windows_begin_anew_with_each_lease(self) -> None:
        life, (former, other) = streaming()
        life.polled(at(2_500))
        life.reports_done(other)
        life.on(e.PlacementChanged(replaces_runners=True))
        task = life.joins(0)
        life.leaves(former)
        assert [(w.number, w.upto) for w in task.windows] == [(1, at(2_500))]
        life.polled(at(2_600))
        assert [(w.number, w.upto) for w in task.windows[1:]] == [(2, at(2_600))]

    def test_of_two_that_wait_the_later_one_gets_it(self) -> None:
        life, (former, _) = streaming()
        first, second = life.joins(0), life.joins(0)
        assert first.is_closed
        life.loses(first)
        life.leaves(former)
        assert first.sent == []
        assert second.leases

    def test_where_spark_is_lost_threads_begin_when_its_runners_are_gone(self) -> None:
        life, lanes = streaming()
        life.on(e.PlacementChanged(replaces_runners=False))
        assert life.starts == [0, 1]
        life.loses(lanes[0])
        assert life.starts == [0, 1, 0]
        life.loses(lanes[1])
        assert life.starts == [0, 1, 0, 1]

    def test_a_runner_that_was_to_take_over_and_is_lost_costs_nothing_but_time(self) -> None:
        life, (former, _) = streaming()
        task = life.joins(0)
        life.loses(task)
        life.leaves(former)
        assert life.starts == [0, 1, 0]
        assert life.joins(0).leases


class TestRunnersThatSayNothing:
    """They freeze while their connection lives; or what they wait for does not come."""

    SILENT = "nothing is heard"

    def test_is_said_after_a_minute_and_ended_after_ten(self) -> None:
        life, lanes = streaming()
        life.polled(at(2_001))
        life.reports_done(lanes[1])
        life.waits(59.0)
        assert not life.lines(self.SILENT)
        life.waits(3.0)
        (line,) = life.lines(self.SILENT)
        assert line.facts["shard"] == 0
        life.waits(530.0)
        assert len(life.lines(self.SILENT)) == 1
        assert not life.all(e.EndRunner)
        life.waits(10.0)
        assert life.all(e.EndRunner) == [e.EndRunner(0, lanes[0].hello.attempt)]
        life.on(e.RunnerEnded(0, lanes[0].hello.attempt))
        fresh = life.joins(0)
        assert fresh.leases

    def test_the_next_one_has_twice_the_time(self) -> None:
        life, lanes = streaming()
        life.polled(at(2_001))
        life.reports_done(lanes[1])
        life.waits(602.0)
        life.on(e.RunnerEnded(0, lanes[0].hello.attempt))
        life.joins(0)  # and has yet to begin
        life.waits(1_190.0)
        assert len(life.all(e.EndRunner)) == 1
        life.waits(12.0)
        assert len(life.all(e.EndRunner)) == 2

    def test_who_has_nothing_to_do_may_be_silent(self) -> None:
        life, lanes = streaming()
        life.polled(at(2_001))
        for lane in lanes:
            life.reports_done(lane)
        life.waits(3_600.0)
        life.polled(at(6_001))  # what it was silent for before does not count
        life.waits(50.0)
        assert not life.lines(self.SILENT)

    def test_who_reads_the_topic_back_says_so(self) -> None:
        life = begin()
        lanes = [life.joins(0), life.joins(1)]
        for _ in range(60):
            for lane in lanes:
                life.receives(lane, Folding(1_000, 1_000_000))
            life.waits(30.0)
        assert not life.lines(self.SILENT)


class TestRunnersThatFail:
    def test_a_lost_one_is_started_again_at_once(self) -> None:
        life, lanes = streaming()
        life.waits(10.0)
        life.loses(lanes[0])
        assert e.StartRunner(0, 2) in life.new
        life.polled(at(2_001))
        fresh = life.joins(0)
        assert fresh.leases[0].number == 2
        assert upto(fresh) == [2_001]

    def test_but_not_again_and_again_where_it_never_comes_to_a_report(self) -> None:
        """Killed for its memory while it folds, say."""
        life, lanes = streaming()
        lane, began = lanes[0], life.now
        for _ in range(8):
            starts = len(life.starts)
            life.loses(lane)
            while len(life.starts) == starts:
                life.waits(0.1)
            lane = life.joins(0)
        assert life.now - began > 20.0

    def test_one_that_fails_is_started_again_after_growing_waits(self) -> None:
        life, lanes = streaming()
        waits = []
        lane = lanes[0]
        for _ in range(9):
            failed_at, starts = life.now, len(life.starts)
            life.leaves(lane, AWAY)
            while len(life.starts) == starts:
                life.waits(0.05)
            waits.append(life.now - failed_at)
            lane = life.joins(0)
        assert waits == pytest.approx([0.25, 0.5, 1, 2, 4, 8, 16, 30, 30], abs=0.1)
        assert not life.is_ending()
        assert "no broker answers" in str(life.coordinator.progress.last_error)

    def test_and_soon_where_it_had_published(self) -> None:
        life, lanes = streaming()
        life.leaves(lanes[0], AWAY)
        life.waits(0.3)
        lane = life.joins(0)
        life.leaves(lane, AWAY)
        life.waits(0.6)
        lane = life.joins(0)
        life.reports_done(lane)
        life.leaves(lane, AWAY)
        starts = len(life.starts)
        life.waits(0.3)
        assert len(life.starts) == starts + 1

    def test_a_task_that_never_came_is_started_again_after_a_wait(self) -> None:
        life = begin()
        lost = StateError("spark.task_lost", "no executor", retriable=True)
        life.on(e.RunnerEnded(0, 1, lost))
        assert life.starts == [0, 1]
        assert "no executor" in str(life.coordinator.progress.last_error)
        life.waits(0.3)
        assert life.starts == [0, 1, 0]

    def test_the_end_of_a_runner_that_is_known_to_be_gone_starts_no_second_one(self) -> None:
        life, lanes = streaming()
        life.loses(lanes[0])
        life.on(e.RunnerEnded(0, 1, StateError("spark.task_lost", "killed", retriable=True)))
        life.waits(4.0)
        assert life.starts == [0, 1, 0], "the one that is on its way is waited for"

    def test_a_runner_that_does_not_come_is_waited_for_by_one_in_a_thread(self) -> None:
        """A cluster has no place for it: the shard is published by this process until then."""
        life, lanes = streaming()
        life.loses(lanes[0])
        life.waits(6.0)
        started = [(c.shard, c.is_here) for c in life.all(e.StartRunner)][2:]
        assert started == [(0, False), (0, True)]

    def test_one_whose_task_is_over_is_gone_though_its_connection_does_not_say_so(self) -> None:
        """Its machine was cut off, say: nothing comes from there, no end either."""
        life, lanes = streaming()
        life.on(e.RunnerEnded(0, 1, StateError("spark.task_lost", "executor", retriable=True)))
        assert lanes[0].is_closed
        life.waits(0.3)
        assert life.starts == [0, 1, 0]
        assert life.joins(0).leases[0].number == 2
        life.loses(lanes[0])
        assert life.starts == [0, 1, 0]

    def test_one_that_comes_late_takes_over_from_the_thread_that_waited_for_it(self) -> None:
        """The end of the thread was taken for its own, and it was started again, for ever."""
        life, lanes = streaming()
        life.loses(lanes[0])
        life.waits(6.0)
        here = life.joins(0, attempt=3)
        life.reports_done(here)
        task = life.joins(0, attempt=2)
        life.leaves(here)
        assert task.leases
        life.on(e.RunnerEnded(0, 3))
        life.waits(4.0)
        assert not task.is_closed
        assert life.starts == [0, 1, 0, 0]
        life.on(e.RunnerEnded(0, 2, StateError("spark.task_lost", "killed", retriable=True)))
        assert task.is_closed

    def test_where_tasks_end_before_they_have_come_a_thread_publishes(self) -> None:
        """A Spark that takes jobs and runs none, or whose machines do not reach this one."""
        life, lanes = streaming()
        lost = StateError("spark.task_lost", "stopped SparkContext", retriable=True)
        life.loses(lanes[0])
        life.on(e.RunnerEnded(0, 2, lost))
        life.waits(0.3)
        assert life.last(e.StartRunner) == e.StartRunner(0, 3, is_here=True)
        here = life.joins(0)
        assert here.leases

        began, tries = life.now, 0
        while life.now < began + 300.0:
            life.waits(0.3)
            life.reports_done(here)
            if (command := life.last(e.StartRunner)).attempt > 3 + tries:
                assert not command.is_here, "it is tried again"
                tries += 1
                life.on(e.RunnerEnded(0, command.attempt, lost))
        assert 10 <= tries <= 20, "more and more rarely"
        life.loses(here)
        life.waits(31.0)
        assert life.last(e.StartRunner).is_here

    def test_the_end_of_one_that_has_handed_over_is_no_news(self) -> None:
        life, lanes = streaming()
        life.on(e.PlacementChanged(replaces_runners=True))
        task = life.joins(0)
        life.leaves(lanes[0])
        life.on(e.RunnerEnded(0, 1))
        life.on(e.RunnerEnded(1, 2, StateError("spark.task_lost", "no slot", retriable=True)))
        assert not task.is_closed
        assert not lanes[1].is_closed, "which goes on"
        assert life.starts == [0, 1, 0, 1]

    def test_what_waiting_does_not_fix_ends_the_run_and_is_no_less_for_the_others(self) -> None:
        life, lanes = streaming()
        life.leaves(lanes[0], AWAY)
        assert not life.is_ending()
        life.leaves(lanes[1], GONE)
        assert life.ends() is GONE

    def test_what_nobody_knows_is_tried_a_few_times(self) -> None:
        unknown = StateError("shard.failed", "met what eventpub does not know", retriable=True)
        life, lanes = streaming()
        lane = lanes[0]
        for _ in range(5):
            life.leaves(lane, unknown)
            assert not life.is_ending()
            life.waits(31.0)
            lane = life.joins(0)
        life.leaves(lane, unknown)
        assert life.ends() is unknown

    def test_a_table_that_is_away_for_a_moment_is_waited_for(self) -> None:
        missing = StoreError("store.table_missing", "there is no such table")
        life, lanes = streaming()
        life.leaves(lanes[0], missing)
        life.waits(59.0)
        lane = life.joins(0)
        life.leaves(lane, missing)
        assert not life.is_ending()
        life.waits(31.0)
        life.leaves(life.joins(0), missing)
        assert life.ends() is missing

    def test_a_report_in_between_says_that_it_had_come_back(self) -> None:
        missing = StoreError("store.table_missing", "there is no such table")
        life, lanes = streaming()
        life.leaves(lanes[0], missing)
        life.waits(50.0)
        lane = life.joins(0)
        life.reports_done(lane)
        life.waits(40.0)
        life.leaves(lane, missing)
        assert not life.is_ending()

    def test_a_report_of_another_shard_says_nothing(self) -> None:
        """It was tried for ever, as where one shard has a row that the server cannot send."""
        failed = StoreError("store.query_failed", "a packet bigger than max_allowed_packet")
        life, lanes = streaming()
        lane = lanes[0]
        for second in range(4):
            life.leaves(lane, failed)
            if life.is_ending():
                break
            life.waits(31.0)
            lane = life.joins(0)
            life.polled(at(2_001 + second))
            life.reports_done(lanes[1])
        assert life.ends() is failed

    def test_that_it_begins_says_nothing_of_what_a_runner_fails_at(self) -> None:
        """It was tried for ever, and the publisher never said what was wrong."""
        unknown = StateError("shard.failed", "met what eventpub does not know", retriable=True)
        missing = StoreError("store.column_missing", "there is no such column")
        for error in (unknown, missing):
            life, lanes = streaming()
            lane = lanes[0]
            for _ in range(8):
                life.leaves(lane, error)
                if life.is_ending():
                    break
                life.waits(31.0)
                lane = life.joins(0)
                life.reports(lane, position=at(2_000), low=at(2_000))
            assert life.ends() is error

    def test_two_moments_of_an_idle_night_are_not_one_long_failure(self) -> None:
        """Nobody reports while no rows come."""
        failed = StoreError("store.query_failed", "Out of memory")
        life, _ = streaming()
        for _ in range(3):
            commands = life.last(e.Poll), e.Sample(1), e.MeasureLag(at(2_000), 0)
            for command in commands:
                life.on(e.Failed(command, failed))
            assert not life.is_ending()
            life.waits(100.0)
            life.polled()
            life.on(e.Sampled([], 0))
            life.on(e.LagMeasured(at(2_000), at(2_000), 0.0, 0))

    def test_one_that_lasts_ends_the_run_whatever_else_goes_well(self) -> None:
        failed = StoreError("store.query_failed", "no such index")
        life, _ = streaming()
        for _ in range(3):
            assert not life.is_ending()
            life.on(e.Failed(e.Sample(1), failed))
            life.polled()
            life.waits(31.0)
        assert life.ends() is failed

    def test_fenced_three_times_in_an_hour_it_leaves_the_topic_to_the_other_publisher(self) -> None:
        life, lanes = streaming()
        lane = lanes[0]
        life.waits(21.0)
        for _ in range(2):
            life.leaves(lane, FENCED)
            assert not life.is_ending()
            life.waits(1_000.0)
            lane = life.joins(0)
            life.reports_done(lane)
        life.leaves(lane, FENCED)
        error = life.ends()
        assert isinstance(error, SinkError)
        assert error.code == "sink.fenced"
        assert "app.id = orders" in str(error.where)

    def test_what_each_shard_meets_once_is_what_a_former_run_has_left(self) -> None:
        """Runners that outlived it have woken; a shard notices when it publishes next."""
        life, lanes = streaming()
        life.waits(21.0)
        for _ in range(2):
            for number, lane in enumerate(lanes):
                life.leaves(lane, FENCED)
                life.waits(60.0)
                lanes[number] = life.joins(number)
                life.reports_done(lanes[number])
        assert not life.is_ending()
        life.leaves(lanes[0], FENCED)
        assert life.is_ending()

    def test_in_its_first_20_seconds_it_leaves_it_to_the_older_one_to_notice(self) -> None:
        life, lanes = streaming()
        lane = lanes[0]
        for _ in range(8):
            life.leaves(lane, FENCED)
            life.waits(2.0)
            lane = life.joins(0)
            life.reports_done(lane)
        assert not life.is_ending()

    def test_one_that_is_fenced_once_in_an_hour_had_stalled(self) -> None:
        life, lanes = streaming()
        lane = lanes[0]
        life.waits(21.0)
        for _ in range(4):
            life.leaves(lane, FENCED)
            life.waits(3_601.0)
            lane = life.joins(0)
            life.reports_done(lane)
        assert not life.is_ending()


class TestHolds:
    def test_of_one_that_is_due_the_shard_is_sent_a_window_without_rows(self) -> None:
        life, (holder, other) = streaming()
        due = life.database + at(2)
        life.reports(holder, done=1, position=at(2_000), holds=1, next_due=due)
        life.polled()
        life.polled()
        assert life.all(e.Poll)[-1].next_due == due
        windows = len(holder.windows)
        life.database = due + 1
        life.polled(is_due=True, open_since=at(1_234))
        [window] = holder.windows[windows:]
        assert (window.upto, window.open_since) == (at(2_000), at(1_234))
        assert len(other.windows) == 1, "it holds nothing"

    def test_once_for_each_report(self) -> None:
        life, (holder, _) = streaming()
        due = life.database
        life.reports(holder, done=1, position=at(2_000), holds=1, next_due=due)
        for _ in range(5):
            life.polled(is_due=True)
        assert len(holder.windows) == 2
        assert life.all(e.Poll)[-1].next_due is None, "it is on its way"
        life.reports_done(holder, holds=1, next_due=due)
        for _ in range(5):
            life.polled(is_due=True)
        assert len(holder.windows) == 3, "it has said that one is still due"

    def test_one_that_is_not_due_yet_is_left_alone(self) -> None:
        life, (holder, _) = streaming()
        later = life.database + at(100)
        life.reports(holder, done=1, position=at(2_000), holds=1, next_due=later)
        for _ in range(5):
            life.polled(is_due=True)  # another's, say
        assert len(holder.windows) == 1

    def test_what_begins_after_a_poll_may_fill_a_gap_that_is_seen_later(self) -> None:
        """The window may be used much later; a skip needs a poll that is newer than the hold."""
        life, (lane, _) = streaming()
        life.polled(at(2_100), now=at(2_101), open_since=None)
        assert lane.windows[-1].open_since == at(2_101)
        life.polled(at(2_200), now=at(2_201), open_since=at(1_500))
        assert lane.windows[-1].open_since == at(1_500)


class TestRecount:
    def test_nothing_is_counted_before_all_shards_have_said_what_they_know(self) -> None:
        life = begin()
        lanes = [life.joins(number) for number in range(2)]
        life.polled(at(2_000))
        life.reports(lanes[0], position=at(1_000), buckets={990: 3})
        life.waits(5.0)
        assert life.all(e.Count) == []
        life.reports(lanes[1], position=at(1_000), buckets={990: 4})
        life.waits(1.0)
        [count] = life.all(e.Count)
        assert count.expected[990] == 7
        assert count.position == at(1_000)

    def test_one_count_is_under_way_at_a_time_and_one_that_failed_is_made_again(self) -> None:
        life, _ = streaming()
        life.waits(10.0)
        [count] = life.all(e.Count)
        life.on(e.Failed(count, StoreError("store.unavailable", "away", retriable=True)))
        assert not life.is_ending()
        life.waits(1.1)
        assert set(life.all(e.Count)[1].buckets) >= set(count.buckets)

    def test_what_differs_is_compared_by_all_shards_and_the_next_waits_for_it(self) -> None:
        life, lanes = streaming()
        counted_with(life, differs={900, 901})
        for lane in lanes:
            [comparison] = lane.comparisons
            assert (comparison.number, {*comparison.buckets}) == (1, {900, 901})
        counted_with(life, differs={902})
        assert [len(lane.comparisons) for lane in lanes] == [1, 1]
        life.reports(lanes[0], done=1, position=at(2_000), compared=1)
        assert [len(lane.comparisons) for lane in lanes] == [1, 1]
        life.reports(lanes[1], done=1, position=at(2_000), compared=1)
        assert [lane.comparisons[1:] for lane in lanes] == [[Comparison(2, (902,))]] * 2

    def test_who_gets_a_lease_meanwhile_begins_the_comparison_anew(self) -> None:
        life, lanes = streaming()
        counted_with(life, differs={900})
        life.reports(lanes[0], done=1, position=at(2_000), compared=1)
        life.loses(lanes[0])
        fresh = life.joins(0)
        assert fresh.comparisons == [Comparison(1, (900,))]
        life.reports(fresh, position=at(2_000))
        counted_with(life, differs={901})
        assert len(fresh.comparisons) == 1, "not before all have done the first"
        life.reports(lanes[1], done=1, position=at(2_000), compared=1)
        life.reports(fresh, position=at(2_000), compared=1)
        assert fresh.comparisons[-1] == Comparison(2, (901,))

    @pytest.mark.parametrize("seconds", [5, 320])
    def test_what_was_young_when_its_window_was_planned_is_counted_however_long_that_takes(
        self, seconds: int
    ) -> None:
        life, [lane] = begun(1, position=at(1_000), low=at(1_000))
        life.reports(lane, position=at(1_000), low=at(1_000))
        begin, end = at(1_000), life.database - SECOND
        life.polled(end)
        answered = 0
        for second in range(seconds + 20):
            read = begin + (end - begin) * min(second, seconds) // seconds
            life.reports(lane, position=read, low=read)
            for count in life.all(e.Count)[answered:]:
                answered += 1
                rows = dict.fromkeys(count.buckets, 0)
                life.on(e.Counted(life.database, rows, rows, count.in_turn))
            life.waits(1.0)
            if life.poll() is not None:
                life.polled(None)
        asked = {bucket for count in life.all(e.Count) for bucket in count.buckets}
        assert {*range(end // SECOND - 200, end // SECOND)} <= asked

    def test_what_has_ended_is_counted_at_once_however_old_it_is(self) -> None:
        life, _ = streaming()
        counted_with(life)
        life.polled(ended=((at(5), at(7)),))
        life.waits(1.0)
        assert {5, 6} <= {*life.last(e.Count).buckets}
        assert not life.last(e.Count).in_turn

    def test_another_server_is_said_once_and_everything_is_counted_again(self) -> None:
        life, _ = streaming(position=at(4_900))
        counted_with(life)
        life.polled(server="the server")
        assert not counted_with(life) & {*range(4_790, 4_860)}, "they are not due"
        life.polled(server="promoted")
        assert len(life.lines("another database server answers")) == 1
        assert counted_with(life) >= {*range(4_790, 4_860)}
        assert life.written["server"] == "promoted"
        life.polled(server="promoted")
        assert len(life.lines("another database server answers")) == 1

    def test_which_server_it_is_that_a_first_start_reads_is_no_news(self) -> None:
        life, _ = streaming(server="")
        life.polled(server="the server")
        assert not life.lines("another database server")
        life.waits(1.0)
        assert life.written["server"] == "the server"

    def test_that_the_clock_went_back_is_noticed_before_anything_is_counted(self) -> None:
        life = begin()
        lanes = [life.joins(number) for number in range(2)]
        life.polled(at(2_000))
        life.polled(now=NOW - at(30))
        assert len(life.lines("clock went back")) == 1
        assert life.all(e.Count) == []
        life.polled(now=NOW - at(29))
        assert len(life.lines("clock went back")) == 1
        for lane in lanes:
            life.reports(lane, position=at(2_000))
        life.waits(1.0)
        assert life.all(e.Count)

    def test_what_a_shard_had_read_before_anybody_wrote_it_down_is_counted(self) -> None:
        life = begin()
        lanes = [life.joins(number) for number in range(2)]
        life.polled(at(2_000))
        life.reports(lanes[0], position=at(1_004), read_before=at(1_004))
        life.reports(lanes[1], position=at(1_000), read_before=at(1_000))
        for lane in lanes:
            life.reports_done(lane)
        found = counted_with(life)
        assert {1_001, 1_002, 1_003} <= found


def counted_with(life: Life, differs: set[int] = frozenset()) -> set[int]:  # type: ignore[assignment]
    """All counts that are wanted are made; these buckets are found to have a row more.

    They are noted first, as where rows have come behind the reader.
    """
    life.coordinator._recounting.note(sorted(differs))
    found: set[int] = set()
    answered = life.coordinator.__dict__.setdefault("answered", [])
    for _ in range(8):
        life.waits(1.0)
        for count in life.all(e.Count):
            if any(count is other for other in answered):
                continue
            answered.append(count)
            rows = {b: count.expected[b] + (b in differs) for b in count.buckets}
            found.update(count.buckets)
            life.on(e.Counted(life.database, rows, count.expected, count.in_turn))
    return found


class TestRequests:
    def test_one_goes_to_the_shard_of_its_aggregate_and_is_answered_once(self) -> None:
        life, lanes = streaming()
        answers: list[dict[int, str]] = []
        request = Request("r1", "retry", of_shard(1))
        life.on(e.RequestReceived(request, answers.append))
        assert [lane.requests for lane in lanes] == [[], [request]]
        life.reports(lanes[1], done=1, position=at(2_000), answers={"r1": "found"})
        life.reports(lanes[1], done=1, position=at(2_000), answers={"r1": "found"})
        assert answers == [{1: "found"}]
        [line] = life.lines("gaps retry was requested")
        assert line.facts == {"aggregate_id": of_shard(1), "outcome": "found"}

    def test_a_list_is_of_all_shards(self) -> None:
        life, lanes = streaming()
        answers: list[dict[int, str]] = []
        life.on(e.RequestReceived(Request("r1", "list"), answers.append))
        life.reports(lanes[1], done=1, position=at(2_000), answers={"r1": "[1]"})
        assert answers == []
        life.reports(lanes[0], done=1, position=at(2_000), answers={"r1": "[0]"})
        assert answers == [{0: "[0]", 1: "[1]"}]
        assert not life.lines("was requested")

    def test_who_has_the_next_lease_is_asked_again(self) -> None:
        life, lanes = streaming()
        answers: list[dict[int, str]] = []
        request = Request("r1", "skip", of_shard(0), version=4)
        life.on(e.RequestReceived(request, answers.append))
        life.loses(lanes[0])
        fresh = life.joins(0)
        assert fresh.requests == [request]
        life.reports(fresh, position=at(2_000), answers={"r1": "skipped"})
        assert answers == [{0: "skipped"}]
        life.loses(fresh)
        assert life.joins(0).requests == [], "it is answered"

    def test_one_that_was_left_for_the_next_publisher_waits_for_its_runner(self) -> None:
        answers: list[dict[int, str]] = []
        request = Request("r1", "retry", of_shard(0))
        life = begin(requests=((request, answers.append),))
        lane = life.joins(0)
        assert lane.requests == [request]
        life.reports(lane, position=at(1_000), answers={"r1": "nothing is missing"})
        assert answers == [{0: "nothing is missing"}]

    def test_one_that_was_withdrawn_is_asked_of_nobody_any_more(self) -> None:
        life, lanes = streaming()
        answers: list[dict[int, str]] = []
        life.on(e.RequestReceived(Request("r1", "retry", of_shard(0)), answers.append))
        life.on(e.Withdrawn("r1"))
        life.loses(lanes[0])
        fresh = life.joins(0)
        assert fresh.requests == []
        life.reports(fresh, position=at(2_000), answers={"r1": "found"})
        assert answers == []


class TestWhatIsWatched:
    def test_a_state_in_which_open_transactions_cannot_be_seen_is_said_once(self) -> None:
        life, _ = streaming()
        for state in ("open", "stale", "stale", "waiting", "stale"):
            life.polled(state=state)
        assert [line.facts["state"] for line in life.lines("no fresh answer")] == ["stale"]
        life.polled(state="denied")
        assert len(life.lines("may not see open transactions")) == 1
        life.polled(state="open")
        life.polled(state="stale")
        assert len(life.lines("no fresh answer")) == 2, "it had been well in between"
        assert life.coordinator.progress.watermark == "stale"

    def test_transactions_that_are_not_waited_for_any_more_are_counted_over_polls_anew(
        self,
    ) -> None:
        life, _ = streaming()
        for timed_out in (1, 3, 0, 2):  # which counts from its own start
            life.polled(timed_out=timed_out)
        assert life.coordinator.progress.passed == 5

    def test_rows_of_the_past_are_counted_again_and_what_is_sampled_next_waits_for_it(self) -> None:
        life, _ = streaming(newest=(10, NOW), position=at(4_000))
        life.waits(1.0)
        old = at(3_000)
        life.on(e.Sampled([NewRow(12, NOW), NewRow(13, old)], 0))
        assert life.all(e.Sample)[-1].above == 10, "a sample may show but some of those behind"
        life.on(e.Sampled([NewRow(11, NOW), NewRow(12, NOW), NewRow(13, old)], 0))
        assert len(life.lines("created before the horizon")) == 1
        life.waits(1.0)
        assert life.written["newest"] == (10, NOW), "until they are counted"
        assert 2_999 in counted_with(life)
        life.on(e.Sampled([NewRow(13, old)], 0))
        life.waits(1.0)
        assert life.written["newest"][0] == 13

    def test_where_they_keep_coming_the_publisher_stops(self) -> None:
        life, _ = streaming(newest=(10, NOW), position=at(4_000))
        number = 11
        for _ in range(12):
            life.waits(1.1)
            rows = [NewRow(number, life.database - at(3_600)), NewRow(9, NOW - at(1))]
            life.on(e.Sampled(rows, 0))
            if life.all(e.Sample)[-1].above is not None and not life.is_ending():
                life.on(e.Sampled(rows, 0))
            number += 1
            if life.is_ending():
                break
        error = life.ends()
        assert error is not None
        assert error.code == "store.rows_in_past"

    def test_rows_of_the_future_are_said_while_they_last(self) -> None:
        life, _ = streaming()
        for ahead in (0, at(100), at(99), 0):
            life.waits(1.0)
            life.on(e.Sampled([], ahead))
        assert len(life.lines("lies in the future")) == 2  # and that it does not any more
        assert life.coordinator.progress.ahead_seconds == 0.0

    def test_a_topic_is_looked_at_where_this_publisher_has_not_written_for_a_while(self) -> None:
        life, lanes = streaming()
        life.reports(lanes[0], done=1, position=at(2_000), offsets={("events", 0): 5})
        life.reports(lanes[1], done=1, position=at(2_000), offsets={("events", 1): 5})
        life.waits(10.0)
        life.reports(lanes[1], done=1, position=at(2_000), offsets={("events", 1): 6})
        life.waits(10.0)
        assert life.last(e.CheckTopic).ends == {("events", 0): 5}

    @pytest.mark.parametrize("code", ["sink.other_publisher", "sink.topic_recreated"])
    def test_what_it_finds_may_end_the_run(self, code: str) -> None:
        life, _ = streaming()
        life.on(e.Failed(e.CheckTopic({}), SinkError(code, "…", retriable=True)))
        error = life.ends()
        assert error is not None
        assert error.code == code

    def test_what_else_goes_wrong_with_that_look_is_met_by_who_publishes(self) -> None:
        life, _ = streaming()
        life.on(e.Failed(e.CheckTopic({}), SinkError("sink.denied", "…")))
        life.on(e.Failed(e.CheckTable(), GONE))
        life.on(e.Failed(e.CheckOpen({}), SinkError("sink.denied", "…")))
        assert not life.is_ending()

    def test_an_idle_publisher_looks_whether_readers_see_what_it_published(self) -> None:
        life, lanes = streaming()
        ends = {("events", 0): 5}
        counts = some_rows(3)
        life.reports(lanes[0], done=1, position=at(2_000), offsets=ends, counts=counts)
        for _ in range(10):
            life.waits(1.0)
            life.reports(lanes[0], done=1, position=at(2_000), offsets=ends, counts=counts)
        assert life.all(e.CheckOpen) == [], "it is busy"
        life.waits(13.0)
        assert life.all(e.CheckOpen) == [e.CheckOpen(ends)]
        life.on(e.OpenChecked(is_left_open=False))
        assert not lanes[0].is_told_to_stop
        life.on(e.OpenChecked(is_left_open=True))
        assert all(lane.is_told_to_stop for lane in lanes), "their successors fix it"
        life.leaves(lanes[0])
        assert life.starts == [0, 1, 0]

    def test_how_far_the_topic_is_read_back_is_said_every_ten_seconds(self) -> None:
        life = begin()
        lane = life.joins(0)
        for second in range(25):
            life.receives(lane, Folding(1_000 * second, 25_000 - 1_000 * second))
            life.waits(1.0)
        lines = life.lines("reading the topic back")
        assert len(lines) in {3, 4}
        assert lines[-1].facts["seconds_left"] in range(1, 10)

    def test_a_report_of_what_went_wrong_is_a_line_for_the_log(self) -> None:
        life, lanes = streaming()
        gap = {"aggregate_id": "a", "from_version": 1, "to_version": 2}
        dead = {"aggregate_id": "b", "version": 7, "reason": "too large"}
        life.reports(lanes[0], done=1, position=at(2_000), skipped=[gap], dead=[dead])
        assert [line.facts for line in life.lines("gap skipped")] == [gap]
        assert [line.facts for line in life.lines("dead letters")] == [dead]
        life.reports(lanes[0], done=1, position=at(2_000), rebuilt="checksum", published=9)
        [line] = life.lines("index was damaged")
        assert line.facts["damage"] == "checksum"
        assert life.coordinator.progress.published == 9
        assert life.coordinator.progress.dead == 1

    def test_very_many_aggregates_without_their_first_version_are_said_in_growing_steps(
        self,
    ) -> None:
        life, lanes = streaming()
        for _ in range(30):
            life.reports(lanes[0], done=1, position=at(2_000), begin_above=500)
        assert [line.facts["aggregates"] for line in life.lines("begin above")] == [1_000, 10_000]


class TestADatabaseThatChanges:
    def test_a_poll_that_fails_is_tried_again_after_growing_waits_over_new_connections(
        self,
    ) -> None:
        away = StoreError("store.unreachable", "no server answers", retriable=True)
        life, _ = streaming()
        life.polled()
        waits = []
        for _ in range(9):
            while life.poll() is None:
                life.waits(0.01)
            failed_at, polls = life.now, len(life.all(e.Poll))
            life.on(e.Failed(life.last(e.Poll), away))
            while len(life.all(e.Poll)) == polls:
                life.waits(0.05)
            assert life.all(e.Poll)[-1].anew
            waits.append(life.now - failed_at)
        assert waits == pytest.approx([0.25, 0.5, 1, 2, 4, 8, 16, 30, 30], abs=0.1)
        assert "no server answers" in str(life.coordinator.progress.last_error)
        life.polled()
        life.polled()
        assert not life.all(e.Poll)[-1].anew

    def test_one_that_waiting_does_not_fix_ends_the_run(self) -> None:
        life, _ = streaming()
        life.polled()
        life.waits(0.3)
        assert life.poll() is not None
        life.on(e.Failed(life.last(e.Poll), GONE))
        assert life.ends() is GONE

    def test_f3_where_the_address_has_moved_everything_connects_anew(self) -> None:
        """A name, HAProxy: the former primary lives on, and who is connected notices nothing."""
        life, lanes = streaming()
        life.polled()
        life.waits(0.3)
        assert life.poll() is not None
        life.on(e.Failed(life.last(e.Poll), MOVED))
        assert not life.is_ending()
        assert all(lane.is_told_to_stop for lane in lanes)
        for lane in lanes:
            life.leaves(lane)
        assert life.starts == [0, 1, 0, 1]
        fresh = [life.joins(number) for number in range(2)]
        life.waits(0.5)
        assert life.all(e.Poll)[-1].anew
        assert life.all(e.Poll)[-1].after == at(2_000)
        assert life.all(e.Poll)[-1].hidden_since is not None
        life.polled(server="promoted")
        assert all(lane.leases[0].number == 2 for lane in fresh)

    def test_nobody_reads_an_altered_table_as_it_was(self) -> None:
        """Who was told how it was, and comes or waits for the lease, is told to leave."""
        life, lanes = streaming()
        life.on(e.PlacementChanged(replaces_runners=True))
        waits = life.joins(0)
        life.on(e.TableChecked(layout(unit=1000)))
        comes = life.joins(1)
        for task, lane in zip((waits, comes), lanes, strict=True):
            assert task.is_told_to_stop
            life.leaves(lane)
            assert not task.leases
            life.waits(0.3)
            assert life.joins(lane.shard).leases

    def test_an_altered_table_is_read_anew_by_everybody(self) -> None:
        life, lanes = streaming()
        life.on(e.TableChecked(layout()))
        assert not lanes[0].is_told_to_stop
        altered = layout(unit=1_000_000, create_time="`created`")
        life.on(e.TableChecked(altered))
        assert all(lane.is_told_to_stop for lane in lanes)
        assert life.all(e.Reassign) == [e.Reassign(altered)]
        [line] = life.lines("the event table was altered")
        assert line.facts["changed"] == ["create_time", "unit"]
        assert "store.table_altered" in str(life.coordinator.progress.last_error)
        life.waits(1.0)
        assert life.last(e.Poll).anew
        life.on(e.TableChecked(altered))
        assert len(life.lines("the event table was altered")) == 1


class TestAStop:
    def test_all_are_told_and_it_is_over_when_they_have_left(self) -> None:
        life, lanes = streaming()
        life.on(e.StopAsked())
        assert all(lane.is_told_to_stop for lane in lanes)
        life.reports(lanes[0], done=1, position=at(2_000), published=3)
        life.leaves(lanes[0])
        assert not life.is_over()
        life.leaves(lanes[1])
        assert life.is_over()
        assert life.last(e.Finish).error is None
        assert life.coordinator.progress.published == 3, "what they finished counts"

    def test_or_after_a_moment_anyway(self) -> None:
        life, _ = streaming()
        life.on(e.StopAsked())
        life.waits(1.1)
        assert not life.is_over()
        life.waits(0.2)
        assert life.ends() is None

    def test_its_end_is_not_slept_over(self) -> None:
        life, _ = streaming()
        life.on(e.StopAsked())
        life._at(life.now + 1.0)
        assert 0.0 < life.coordinator.next_tick(life.now) <= 0.21
        life._at(life.now + 0.3)
        assert life.coordinator.next_tick(life.now) == 0.0

    def test_nothing_is_begun_any_more(self) -> None:
        life, lanes = streaming()
        life.on(e.StopAsked())
        before = list(life.starts)
        sent = len(lanes[0].sent)
        life.on(e.PlacementChanged(replaces_runners=True))
        late = life.joins(0)
        assert late.sent == [Stop()]
        life.loses(late)
        life.leaves(lanes[1], AWAY)
        life.waits(0.5)
        assert life.starts == before
        assert len(lanes[0].sent) == sent

    def test_the_position_is_written_last(self) -> None:
        life, lanes = streaming()
        life.polled(at(2_500))
        life.on(e.StopAsked())
        for lane in lanes:
            life.reports_done(lane)
            life.leaves(lane)
        assert life.written["position"] == at(2_500)
        assert isinstance(life.said[-1], e.Finish)

    def test_whatever_ends_it_runners_finish_what_they_do(self) -> None:
        life, lanes = streaming(shards=3)
        life.leaves(lanes[0], GONE)
        assert all(lane.is_told_to_stop for lane in lanes[1:])
        life.leaves(lanes[1], StoreError("store.denied", "the other shard says so, too"))
        assert not life.is_over()
        life.reports(lanes[2], done=1, position=at(2_000), published=3)
        life.leaves(lanes[2])
        assert life.is_over()
        assert life.last(e.Finish).error is GONE
        assert life.coordinator.progress.published == 3
        assert life.starts == [0, 1, 2]


class TestARunThatEndsByItself:
    UNTIL = NOW

    def run_to_the_end(self, **last: Any) -> tuple[Life, list[FakeLane]]:
        """Everything up to the end is published."""
        life, lanes = begun(until=self.UNTIL)
        life.polled(self.UNTIL, now=self.UNTIL + at(2))
        for lane in lanes:
            life.reports_done(lane, **last)
        return life, lanes

    def test_it_is_over_when_the_last_count_has_found_nothing(self) -> None:
        life, _ = self.run_to_the_end()
        assert not life.is_ending()
        assert life.all(e.Count), "all of the horizon is counted once more"
        counted_until_over(life)
        assert life.ends() is None

    def test_not_while_a_shard_has_not_come_to_the_end(self) -> None:
        life, lanes = begun(until=self.UNTIL)
        life.polled(self.UNTIL, now=self.UNTIL + at(2))
        life.reports_done(lanes[0])
        counted_until_over(life)
        assert not life.is_ending()

    def test_not_while_a_gap_is_open(self) -> None:
        life, lanes = self.run_to_the_end(holds=1, next_due=self.UNTIL + at(9))
        counted_until_over(life)
        assert not life.is_ending()
        for lane in lanes:
            life.reports_done(lane)
        counted_until_over(life)
        assert life.is_ending()

    def test_what_the_last_count_finds_is_published_and_counted_again(self) -> None:
        life, lanes = self.run_to_the_end()
        count = life.last(e.Count)
        rows = dict.fromkeys(count.buckets, 0) | {count.buckets[-1]: 1}
        life.on(e.Counted(life.database, rows, count.expected, count.in_turn))
        counted_until_over(life)
        assert not life.is_ending()
        [comparison] = lanes[0].comparisons
        assert comparison.buckets == (count.buckets[-1],)
        before = len(life.all(e.Count))
        for lane in lanes:
            life.reports_done(lane, compared=1)
        counted_until_over(life)
        assert life.is_ending()
        assert len(life.all(e.Count)) > before

    def test_without_a_horizon_there_is_nothing_to_count(self) -> None:
        life, lanes = begun(until=self.UNTIL, sections={"recount": {"horizon": 0}})
        life.polled(self.UNTIL, now=self.UNTIL + at(2))
        for lane in lanes:
            life.reports_done(lane)
        assert life.ends() is None
        assert life.is_ending()

    def test_a_run_without_an_end_goes_on(self) -> None:
        life, _ = streaming()
        life.polled()
        counted_until_over(life)
        assert not life.is_ending()


def counted_until_over(life: Life) -> None:
    """All counts that are wanted find what was expected."""
    answered: list[e.Count] = life.coordinator.__dict__.setdefault("answered", [])
    for _ in range(100):
        waiting = [c for c in life.all(e.Count) if not any(c is other for other in answered)]
        if life.is_ending() or not waiting:
            return
        for count in waiting:
            answered.append(count)
            if life.coordinator._recounting._counting is count:
                found = e.Counted(life.database, count.expected, count.expected, count.in_turn)
                life.on(found)


def test_an_error_that_spark_cannot_start_with_is_waited_out_where_it_may_pass() -> None:
    life, _ = streaming()
    passes: EventpubError = StateError("spark.start_failed", "no port", retriable=True)
    life.on(e.Failed(e.StartSpark(), passes))
    assert not life.is_ending()
    assert "no port" in str(life.coordinator.progress.last_error)
    life.on(e.Failed(e.StartSpark(), StateError("spark.java_missing", "no Java")))
    assert life.ends() is not None


def test_a_window_is_never_sent_that_ends_before_the_one_before() -> None:
    """A boundary that connects to another server may see an earlier time."""
    life, lanes = streaming()
    life.polled(at(1_500))
    assert {window.upto for window in lanes[0].windows} == {at(2_000)}
