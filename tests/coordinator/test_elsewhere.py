"""Runners outside the publisher's process that fail: one in a thread publishes meanwhile.

Time lines of a whole coordinator, without sleeping.
"""

from __future__ import annotations

import pytest

from eventpub.coordinator import events as e
from eventpub.errors import EventpubError, SinkError, StateError, StoreError
from tests.coordinator.life import at, in_spark, layout, streaming, until_started

AWAY = SinkError("sink.unreachable", "no broker answers", retriable=True)
FENCED = SinkError("sink.fenced", "another producer has taken this shard")
READ_ONLY = StateError("index.not_writable", "the index cannot be written")
PUBLISHED_HERE = "a thread of this process publishes it"

UNKNOWN = StateError("shard.failed", "no module named zstandard", retriable=True)
NO_FILE = StoreError("store.auth_failed", "the database refuses logins from that machine")


class TestRunnersThatFailOnlyElsewhere:
    """Executors that do not reach Kafka, say, or whose disk is read-only; this process could."""

    @pytest.mark.parametrize("error", [AWAY, READ_ONLY, UNKNOWN, NO_FILE])
    def test_a_thread_takes_over_and_goes_on(self, error: EventpubError) -> None:
        life, tasks = in_spark()
        life.leaves(tasks[0], error)
        assert not until_started(life).is_here, "once may be chance, and another node may do"
        assert not life.lines(PUBLISHED_HERE)
        life.leaves(life.joins(0), error)
        assert life.last(e.StartRunner).is_here
        here = life.joins(0)
        assert here.leases
        (line,) = life.lines(PUBLISHED_HERE)
        assert line.level == "warning"
        assert line.facts == {
            "shard": 0,
            "error": f"{error.code}: {error.message}",
            "where": "machine of 0",
            "tried_again_in": "30 s",
        }

        ended, handed_over, began = life.now, [], life.now
        for number in range(20):
            life.polled(at(2_001 + number))
            life.reports_done(here, published=1)
            assert not until_started(life, within=400.0).is_here
            handed_over.append(life.now - ended)
            task = life.joins(0)
            assert here.is_told_to_stop
            life.leaves(here)
            assert task.leases
            life.leaves(task, error)
            ended = life.now
            life.on(e.RunnerEnded(0, task.hello.attempt))
            assert life.last(e.StartRunner).is_here, "at once"
            here = life.joins(0)
            assert here.leases
            assert not life.is_ending()
        assert handed_over[:5] == pytest.approx([30, 60, 120, 240, 300], abs=1.1)
        assert handed_over[5:] == pytest.approx([300] * 15, abs=1.1)
        assert life.now - began > 4_500
        assert len(life.lines(PUBLISHED_HERE)) == 21

    @pytest.mark.parametrize("error", [AWAY, READ_ONLY, UNKNOWN])
    def test_also_in_an_idle_night(self, error: EventpubError) -> None:
        """No report says that the thread gets on."""
        life, tasks = in_spark()
        task = tasks[0]
        for _ in range(20):
            life.leaves(task, error)
            if (command := until_started(life)).is_here:
                here = life.joins(0)
                life.reports(here, position=at(2_000), low=at(2_000))
                command = until_started(life, within=400.0)
                task = life.joins(0)
                life.leaves(here)
            else:
                task = life.joins(0)
            assert not command.is_here
            assert not life.is_ending()

    def test_what_the_thread_meets_too_ends_the_run(self) -> None:
        life, tasks = in_spark()
        life.leaves(tasks[0], READ_ONLY)
        life.waits(0.3)
        life.leaves(life.joins(0), READ_ONLY)
        assert not life.is_ending()
        life.leaves(life.joins(0), READ_ONLY)
        assert life.ends() is READ_ONLY

    def test_a_defect_ends_it_wherever_it_is_met(self) -> None:
        defect = StateError("publish.order_violated", "a version twice")
        life, tasks = in_spark()
        life.leaves(tasks[0], defect)
        assert life.ends() is defect

    def test_another_publisher_is_noticed_there_too(self) -> None:
        life, tasks = in_spark()
        life.waits(21.0)
        task = tasks[0]
        for _ in range(2):
            life.leaves(task, FENCED)
            assert not life.is_ending()
            until_started(life)
            task = life.joins(0)
            life.reports_done(task)
        life.leaves(task, FENCED)
        assert life.is_ending()

    def test_one_that_publishes_for_a_while_is_a_new_beginning(self) -> None:
        life, tasks = in_spark()
        life.leaves(tasks[0], AWAY)
        life.waits(0.3)
        life.leaves(life.joins(0), AWAY)
        here = life.joins(0)
        life.waits(31.0)
        task = life.joins(0)
        life.leaves(here)
        life.reports_done(task)
        assert not life.lines("outside this process again"), "not yet"
        life.waits(31.0)
        life.polled(at(2_001))
        life.reports_done(task)
        (line,) = life.lines("outside this process again")
        assert line.facts == {"shard": 0, "where": "machine of 0"}
        life.leaves(task, AWAY)
        assert not until_started(life).is_here

    def test_one_that_publishes_a_little_and_fails_is_not(self) -> None:
        """It reaches one broker of three, say: the thread was asked to leave again and again."""
        life, tasks = in_spark()
        life.leaves(tasks[0], AWAY)
        life.waits(0.3)
        task = life.joins(0)
        pauses = []
        for number in range(4):
            life.leaves(task, AWAY)
            here, ended = life.joins(0), life.now
            life.polled(at(2_001 + number))
            until_started(life, within=400.0)
            pauses.append(life.now - ended)
            task = life.joins(0)
            life.leaves(here)
            life.reports_done(task, published=1)
        assert pauses == pytest.approx([30, 60, 120, 240], abs=1.1)

    def test_a_new_spark_is_given_a_chance(self) -> None:
        life, tasks = in_spark()
        life.leaves(tasks[0], AWAY)
        life.waits(0.3)
        life.leaves(life.joins(0), AWAY)
        here = life.joins(0)
        life.on(e.PlacementChanged(replaces_runners=False))
        life.waits(400.0)
        assert not here.is_told_to_stop, "there is nowhere else"
        life.on(e.PlacementChanged(replaces_runners=True))
        task = life.joins(0)
        life.leaves(here)
        assert task.leases
        life.leaves(task, AWAY)
        assert not until_started(life).is_here

    def test_threads_alone_stay_where_they_are(self) -> None:
        """`spark.master = "none"`: there is nothing to hand over to."""
        life, lanes = streaming()
        lane = lanes[0]
        for _ in range(5):
            life.leaves(lane, AWAY)
            until_started(life)
            lane = life.joins(0)
        life.waits(400.0)
        assert not lane.is_told_to_stop
        assert not life.lines(PUBLISHED_HERE)

    def test_a_task_that_was_asked_to_leave_has_not_failed(self) -> None:
        """The table is altered twice in an idle night."""
        life, tasks = in_spark()
        for unit in (1_000, 1_000_000):
            life.on(e.TableChecked(layout(unit=unit)))
            for number, task in enumerate(tasks):
                life.leaves(task)
                tasks[number] = life.joins(number)
                assert not life.last(e.StartRunner).is_here
        assert not life.lines(PUBLISHED_HERE)
