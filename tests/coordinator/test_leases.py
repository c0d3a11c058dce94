"""Who runs which shard: runners that come, and that fail.

Time lines of a whole coordinator, without sleeping.
"""

from __future__ import annotations

import pytest

from eventpub.coordinator import events as e
from eventpub.errors import SinkError, StateError, StoreError
from tests.coordinator.life import at, streaming, upto

AWAY = SinkError("sink.unreachable", "no broker answers", retriable=True)
FENCED = SinkError("sink.fenced", "another producer has taken this shard")
GONE = StoreError("store.denied", "the account may not read the table")


class TestLeases:
    def test_of_two_runners_one_publishes(self) -> None:
        life, (former, _) = streaming()
        second = life.joins(0)
        assert second.is_told_to_stop
        assert not second.leases
        life.leaves(second)
        assert not former.is_told_to_stop
        assert life.starts == [0, 1]

    def test_the_next_one_has_another_lease(self) -> None:
        life, (former, _) = streaming()
        life.loses(former)
        fresh = life.joins(0)
        [lease] = fresh.leases
        assert lease.number == 2
        assert lease.position == at(2_000)
        assert life.coordinator.is_current(0, 2)
        assert not life.coordinator.is_current(0, 1)

    def test_what_one_without_the_lease_reports_is_not_believed(self) -> None:
        life, (stalled, other) = streaming()
        life.loses(stalled)
        fresh = life.joins(0)
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
        assert life.starts == [0, 1, 0]
        life.reports_done(fresh)
        assert life.coordinator.progress.position == at(3_000)

    def test_windows_begin_anew_with_each_lease(self) -> None:
        life, (former, other) = streaming()
        life.polled(at(2_500))
        life.reports_done(other)
        life.loses(former)
        fresh = life.joins(0)
        assert [(w.number, w.upto) for w in fresh.windows] == [(1, at(2_500))]
        life.polled(at(2_600))
        assert [(w.number, w.upto) for w in fresh.windows[1:]] == [(2, at(2_600))]


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

    def test_while_one_is_on_its_way_no_second_one_is_started(self) -> None:
        life, lanes = streaming()
        life.loses(lanes[0])
        life.waits(30.0)
        assert life.starts == [0, 1, 0]

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
