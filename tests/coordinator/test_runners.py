"""Who publishes which shard: runners that come, and that fail.

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


class TestOneAfterTheOther:
    def test_the_next_one_is_started_when_the_last_has_ended(self) -> None:
        """However long it stalls: a shard never has two in one process."""
        life, (stalled, other) = streaming()
        life.on(e.Done(e.CheckOpen({}), True))
        life.ends(other)
        life.waits(600.0)
        assert stalled.is_told_to_stop
        assert life.starts == [0, 1, 1]
        life.ends(stalled)
        assert life.starts == [0, 1, 1, 0]

    def test_it_begins_where_the_last_one_was(self) -> None:
        life, (former, _) = streaming()
        life.ends(former)
        beginning = life.next_runner(0).beginning
        assert (beginning.low, beginning.position) == (at(2_000), at(2_000))

    def test_what_the_last_one_was_sent_is_sent_again(self) -> None:
        life, (former, other) = streaming()
        life.polled(at(2_500))
        life.reports_done(other)
        life.ends(former)
        fresh = life.next_runner(0)
        assert [(w.number, w.upto) for w in fresh.windows] == [(1, at(2_500))]
        life.polled(at(2_600))
        assert [(w.number, w.upto) for w in fresh.windows[1:]] == [(2, at(2_600))]


class TestRunnersThatFail:
    def test_one_that_was_asked_to_leave_is_followed_at_once(self) -> None:
        life, lanes = streaming()
        life.waits(10.0)
        life.ends(lanes[0])
        assert [c.shard for c in life.new if isinstance(c, e.StartRunner)] == [0]
        life.polled(at(2_001))
        assert upto(life.runner(0)) == [2_000, 2_001]

    def test_but_not_again_and_again_where_it_never_comes_to_a_report(self) -> None:
        life, lanes = streaming()
        lane, began = lanes[0], life.now
        for _ in range(8):
            starts = len(life.starts)
            life.ends(lane)
            while len(life.starts) == starts:
                life.waits(0.1)
            lane = life.next_runner(0)
        assert life.now - began > 20.0

    def test_one_that_fails_is_started_again_after_growing_waits(self) -> None:
        life, lanes = streaming()
        waits = []
        lane = lanes[0]
        for _ in range(9):
            failed_at, starts = life.now, len(life.starts)
            life.ends(lane, AWAY)
            while len(life.starts) == starts:
                life.waits(0.05)
            waits.append(life.now - failed_at)
            lane = life.next_runner(0)
        assert waits == pytest.approx([0.25, 0.5, 1, 2, 4, 8, 10, 10, 10], abs=0.1)
        assert not life.is_ending()
        assert "no broker answers" in str(life.coordinator.progress.last_error)

    def test_and_soon_where_it_had_published(self) -> None:
        life, lanes = streaming()
        life.ends(lanes[0], AWAY)
        life.waits(0.3)
        lane = life.next_runner(0)
        life.ends(lane, AWAY)
        life.waits(0.6)
        lane = life.next_runner(0)
        life.reports_done(lane)
        life.ends(lane, AWAY)
        starts = len(life.starts)
        life.waits(0.3)
        assert len(life.starts) == starts + 1

    def test_what_waiting_does_not_fix_ends_the_run_and_is_no_less_for_the_others(self) -> None:
        life, lanes = streaming()
        life.ends(lanes[0], AWAY)
        assert not life.is_ending()
        life.ends(lanes[1], GONE)
        assert life.outcome() is GONE

    def test_what_nobody_knows_is_tried_a_few_times(self) -> None:
        unknown = StateError("shard.failed", "met what eventpub does not know", retriable=True)
        life, lanes = streaming()
        lane = lanes[0]
        for _ in range(5):
            life.ends(lane, unknown)
            assert not life.is_ending()
            life.waits(31.0)
            lane = life.next_runner(0)
        life.ends(lane, unknown)
        assert life.outcome() is unknown

    def test_a_table_that_is_away_for_a_moment_is_waited_for(self) -> None:
        missing = StoreError("store.table_missing", "there is no such table")
        life, lanes = streaming()
        life.ends(lanes[0], missing)
        life.waits(59.0)
        lane = life.next_runner(0)
        life.ends(lane, missing)
        assert not life.is_ending()
        life.waits(31.0)
        life.ends(life.next_runner(0), missing)
        assert life.outcome() is missing

    def test_a_report_in_between_says_that_it_had_come_back(self) -> None:
        missing = StoreError("store.table_missing", "there is no such table")
        life, lanes = streaming()
        life.ends(lanes[0], missing)
        life.waits(50.0)
        lane = life.next_runner(0)
        life.reports_done(lane)
        life.waits(40.0)
        life.ends(lane, missing)
        assert not life.is_ending()

    def test_a_runner_that_begins_while_paused_had_come_back(self) -> None:
        """It has nothing to do: a second failure during a long pause stopped the publisher."""
        missing = StoreError("store.table_missing", "there is no such table")
        life, lanes = streaming()
        life.on(e.PauseAsked(True, "me"))
        life.ends(lanes[0], missing)
        life.waits(2.0)
        lane = life.next_runner(0)
        life.reports(lane, position=at(2_000), low=at(2_000))
        life.waits(120.0)
        life.ends(lane, missing)
        assert not life.is_ending()

    def test_a_report_of_another_shard_says_nothing(self) -> None:
        """It was tried for ever, as where one shard has a row that the server cannot send."""
        failed = StoreError("store.query_failed", "a packet bigger than max_allowed_packet")
        life, lanes = streaming()
        lane = lanes[0]
        for second in range(4):
            life.ends(lane, failed)
            if life.is_ending():
                break
            life.waits(31.0)
            lane = life.next_runner(0)
            life.polled(at(2_001 + second))
            life.reports_done(lanes[1])
        assert life.outcome() is failed

    def test_that_it_begins_says_nothing_of_what_a_runner_fails_at(self) -> None:
        """It was tried for ever, and the publisher never said what was wrong."""
        unknown = StateError("shard.failed", "met what eventpub does not know", retriable=True)
        missing = StoreError("store.column_missing", "there is no such column")
        for error in (unknown, missing):
            life, lanes = streaming()
            lane = lanes[0]
            for _ in range(8):
                life.ends(lane, error)
                if life.is_ending():
                    break
                life.waits(31.0)
                lane = life.next_runner(0)
                life.reports(lane, position=at(2_000), low=at(2_000))
            assert life.outcome() is error

    def test_two_moments_of_an_idle_night_are_not_one_long_failure(self) -> None:
        """Nobody reports while no rows come."""
        failed = StoreError("store.query_failed", "Out of memory")
        life, _ = streaming()
        for _ in range(3):
            commands = life.last(e.Poll), e.Sample(), e.MeasureLag(at(2_000))
            for command in commands:
                life.on(e.Failed(command, failed))
            assert not life.is_ending()
            life.waits(100.0)
            life.polled()
            life.on(e.Done(e.Sample(), e.Sampled([], 0)))
            life.on(e.Done(e.MeasureLag(at(2_000)), e.LagMeasured(at(2_000), at(2_000), 0.0, 0)))

    def test_one_that_lasts_ends_the_run_whatever_else_goes_well(self) -> None:
        failed = StoreError("store.query_failed", "no such index")
        life, _ = streaming()
        for _ in range(3):
            assert not life.is_ending()
            life.on(e.Failed(e.Sample(), failed))
            life.polled()
            life.waits(31.0)
        assert life.outcome() is failed

    def test_fenced_three_times_in_an_hour_it_leaves_the_topic_to_the_other_publisher(self) -> None:
        life, lanes = streaming()
        lane = lanes[0]
        life.waits(21.0)
        for _ in range(2):
            life.ends(lane, FENCED)
            assert not life.is_ending()
            life.waits(1_000.0)
            lane = life.next_runner(0)
            life.reports_done(lane)
        life.ends(lane, FENCED)
        error = life.outcome()
        assert isinstance(error, SinkError)
        assert error.code == "sink.fenced"
        assert "app.id = orders" in str(error.where)

    def test_what_each_shard_meets_once_is_what_a_former_run_has_left(self) -> None:
        """Runners that outlived it have woken; a shard notices when it publishes next."""
        life, lanes = streaming()
        life.waits(21.0)
        for _ in range(2):
            for number, lane in enumerate(lanes):
                life.ends(lane, FENCED)
                life.waits(60.0)
                lanes[number] = life.next_runner(number)
                life.reports_done(lanes[number])
        assert not life.is_ending()
        life.ends(lanes[0], FENCED)
        assert life.is_ending()

    def test_in_its_first_20_seconds_it_leaves_it_to_the_older_one_to_notice(self) -> None:
        life, lanes = streaming()
        lane = lanes[0]
        for _ in range(8):
            life.ends(lane, FENCED)
            life.waits(2.0)
            lane = life.next_runner(0)
            life.reports_done(lane)
        assert not life.is_ending()

    def test_one_that_is_fenced_once_in_an_hour_had_stalled(self) -> None:
        life, lanes = streaming()
        lane = lanes[0]
        life.waits(21.0)
        for _ in range(4):
            life.ends(lane, FENCED)
            life.waits(3_601.0)
            lane = life.next_runner(0)
            life.reports_done(lane)
        assert not life.is_ending()


def test_a_refused_login_is_waited_out_for_as_long_as_a_new_password_takes_to_arrive() -> None:
    life, _ = streaming()
    refused = StoreError("store.auth_failed", "access denied")
    life.on(e.Failed(e.Poll(0, None, False), refused))
    life.waits(60.0)
    life.on(e.Failed(e.Poll(0, None, False), refused))
    assert not life.coordinator.runners.is_stopping
    life.waits(61.0)
    life.on(e.Failed(e.Poll(0, None, False), refused))
    assert life.coordinator.runners.is_stopping
