"""Who runs which shard: hand-overs, runners that say nothing, that fail, that do not come.

Time lines of a whole coordinator, without sleeping.
"""

from __future__ import annotations

import pytest

from eventpub.channel import Folding
from eventpub.coordinator import events as e
from eventpub.errors import EventpubError, SinkError, StateError, StoreError
from tests.coordinator.life import (
    at,
    begin,
    in_spark,
    streaming,
    until_started,
    upto,
)

AWAY = SinkError("sink.unreachable", "no broker answers", retriable=True)
FENCED = SinkError("sink.fenced", "another producer has taken this shard")
GONE = StoreError("store.denied", "the account may not read the table")
LOST = StateError("spark.task_lost", "no executor", retriable=True)
READ_ONLY = StateError("index.not_writable", "the index cannot be written")
PUBLISHED_HERE = "a thread of this process publishes it"


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

    SILENT = "no message from the runner"

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

    def test_but_not_once_a_runner_has_done_something_in_between(self) -> None:
        """After eight freezes of a year the next one was ended after 42 hours."""
        life, lanes = streaming()
        lane = lanes[0]
        for ended in range(5):
            life.polled(at(2_001 + ended))
            life.reports_done(lanes[1])
            life.waits(603.0)
            assert len(life.all(e.EndRunner)) == ended + 1
            life.on(e.RunnerEnded(0, lane.hello.attempt))
            lane = life.joins(0)
            life.reports_done(lane)

    def test_what_an_ended_one_says_at_last_shortens_nothing(self) -> None:
        """A thread, say, which cannot be ended: it takes that long for a window."""
        life, lanes = streaming()
        for second in range(2):
            life.polled(at(2_001 + second))
            life.reports_done(lanes[1])
            life.waits(700.0)
            life.reports_done(lanes[0])
        assert len(life.all(e.EndRunner)) == 1

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
    def test_one_whose_connection_is_lost_is_ended(self) -> None:
        """It may not see that, wait for work for ever, and keep its index locked."""
        life, lanes = streaming()
        life.loses(lanes[1])
        assert life.last(e.EndRunner) == e.EndRunner(1, lanes[1].hello.attempt)

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
        assert waits == pytest.approx([0.25, 0.5, 1, 2, 4, 8, 10, 10, 10], abs=0.1)
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
        life, tasks = in_spark()
        life.loses(tasks[0])
        life.on(e.RunnerEnded(0, 3, LOST))
        life.waits(0.3)
        assert life.last(e.StartRunner) == e.StartRunner(0, 4, is_here=True)
        here = life.joins(0)
        assert here.leases

        began, tries = life.now, 0
        while life.now < began + 300.0:
            life.waits(0.3)
            life.reports_done(here)
            if (command := life.last(e.StartRunner)).attempt > 4 + tries:
                assert not command.is_here, "it is tried again"
                tries += 1
                life.on(e.RunnerEnded(0, command.attempt, LOST))
        assert 25 <= tries <= 40, "more and more rarely, every 10 s at last"
        assert not here.is_told_to_stop
        (line,) = life.lines(PUBLISHED_HERE)
        assert "no executor" in str(line.facts["error"])
        life.loses(here)
        life.waits(1.0)
        assert life.last(e.StartRunner).is_here

    def test_one_that_ends_on_its_way_while_a_thread_publishes_is_tried_again(self) -> None:
        """Nothing moved the shard any more, though Spark was up."""
        life, tasks = in_spark()
        life.loses(tasks[0])
        life.waits(6.0)
        assert [c.is_here for c in life.all(e.StartRunner)[-2:]] == [False, True]
        here = life.joins(0, attempt=4)
        life.reports_done(here)
        life.on(e.RunnerEnded(0, 3, LOST))
        life.waits(300.0)
        assert life.last(e.StartRunner) == e.StartRunner(0, 5, is_here=False)
        task = life.joins(0)
        life.leaves(here)
        assert task.leases

    def test_while_one_is_on_its_way_a_thread_that_fails_is_followed_by_a_thread(self) -> None:
        """A second task would wait in the cluster's queue behind the first."""
        life, tasks = in_spark()
        life.loses(tasks[0])
        life.waits(6.0)
        life.leaves(life.joins(0, attempt=4), AWAY)
        assert until_started(life).is_here

    def test_one_that_comes_together_with_the_thread_that_waits_for_it(self) -> None:
        life, tasks = in_spark()
        life.loses(tasks[0])
        life.waits(6.0)
        task = life.joins(0, attempt=3)
        assert task.leases
        here = life.joins(0, attempt=4)
        life.leaves(task)
        assert here.leases
        assert life.last(e.StartRunner) == e.StartRunner(0, 5), "it does not stay in the thread"
        life.on(e.RunnerEnded(0, 3))
        life.leaves(here)
        assert life.joins(0).leases

    def test_one_that_waits_for_the_lease_and_whose_task_is_over_does_not_get_it(self) -> None:
        life, (former, _) = streaming()
        life.on(e.PlacementChanged(replaces_runners=True))
        task = life.joins(0)
        life.on(e.RunnerEnded(0, 2, LOST))
        assert task.is_closed
        life.leaves(former)
        assert not task.leases
        assert life.joins(0).leases

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
            commands = life.last(e.Poll), e.Sample(), e.MeasureLag(at(2_000), 0)
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
            life.on(e.Failed(e.Sample(), failed))
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


def test_an_error_that_spark_cannot_start_with_is_waited_out_where_it_may_pass() -> None:
    life, _ = streaming()
    passes: EventpubError = StateError("spark.start_failed", "no port", retriable=True)
    life.on(e.Failed(e.StartSpark(), passes))
    assert not life.is_ending()
    assert "no port" in str(life.coordinator.progress.last_error)
    life.on(e.Failed(e.StartSpark(), StateError("spark.java_missing", "no Java")))
    assert life.ends() is not None


def test_a_refused_login_is_waited_out_for_as_long_as_a_new_password_takes_to_arrive() -> None:
    life, _ = streaming()
    refused = StoreError("store.auth_failed", "access denied")
    life.on(e.Failed(e.Poll(0, None, False), refused))
    life.waits(60.0)
    life.on(e.Failed(e.Poll(0, None, False), refused))
    assert not life.coordinator._ending.is_stopping
    life.waits(61.0)
    life.on(e.Failed(e.Poll(0, None, False), refused))
    assert life.coordinator._ending.is_stopping
