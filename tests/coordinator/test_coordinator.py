"""Time lines of a whole publisher, without sleeping: what happens, and what is done about it."""

from __future__ import annotations

from eventpub.channel import Beginning
from eventpub.coordinator import events as e
from eventpub.errors import SinkError, StateError
from tests.coordinator.life import (
    at,
    begin,
    streaming,
    upto,
)

AWAY = SinkError("sink.unreachable", "no broker answers", retriable=True)


class TestAStart:
    def test_a_runner_of_each_shard_is_started_once(self) -> None:
        life = begin(shards=3)
        life.waits(4.0)
        assert life.starts == [0, 1, 2]

    def test_a_runner_begins_with_what_the_former_run_knew(self) -> None:
        life = begin(acknowledged={("events", 1): 17}, is_placed=True, former_shards=5)
        beginning = life.runner(1).beginning
        assert beginning == Beginning(
            low=at(1_000),
            position=at(1_000),
            acknowledged={("events", 1): 17},
            is_placed=True,
            hidden_since=beginning.hidden_since,
            uncounted_since=beginning.uncounted_since,
            former_shards=5,
        )

    def test_the_table_is_polled_while_runners_begin(self) -> None:
        life = begin()
        assert life.poll() is not None
        assert life.last(e.Poll).after == at(1_000)

    def test_nothing_is_polled_while_nobody_could_read(self) -> None:
        life, runners = streaming()
        for runner in runners:
            life.ends(runner, AWAY)
        before = len(life.all(e.Poll))
        life.waits(0.2)
        assert len(life.all(e.Poll)) == before

    def test_who_comes_later_begins_with_what_is_planned_by_then(self) -> None:
        life = begin()
        first = life.runner(0)
        life.ends(life.runner(1), AWAY)
        life.polled(at(1_500))
        assert upto(first) == [1_500]
        assert upto(life.next_runner(1)) == [1_500]

    def test_former_indexes_are_removed_when_every_shard_has_taken_its_part(self) -> None:
        life = begin(former_shards=5, former_indexes=("/of/four",))
        lanes = [life.next_runner(number) for number in range(2)]
        life.reports(lanes[0], position=at(1_000))
        assert life.last(e.Remember).then is None
        assert life.written["shards"] == 5, "until then they are what a next start begins with"
        life.reports(lanes[1], position=at(1_000))
        assert life.last(e.Remember).then == e.ForgetFormer(5)
        assert life.written["shards"] == 2
        full = StateError("state.disk_full", "no space", retriable=True)
        life.on(e.Failed(life.last(e.Remember), full))
        life.waits(1.5)
        assert life.last(e.Remember).then == e.ForgetFormer(5), "only when that is written"
        life.on(e.Done(e.MeasureLag(at(2_000)), e.LagMeasured(at(2_000), at(2_000), 0.0, 0)))
        life.waits(5.0)
        assert [c.then for c in life.all(e.Remember)].count(e.ForgetFormer(5)) == 2
        life.ends(lanes[0])
        assert life.next_runner(0).beginning.former_shards is None


class TestTheLoop:
    def test_a_second_is_seen_to_however_much_happens(self) -> None:
        """Reports came before each wait was over, and nothing was written or shown meanwhile."""
        life, lanes = streaming()
        life.waits(1.0)
        before = len(life.all(e.MeasureLag))
        life.on(e.Done(e.MeasureLag(at(2_000)), e.LagMeasured(at(2_000), at(2_000), 0.0, 0)))
        for _ in range(300):
            life._at(life.now + 0.01)
            if life.coordinator.next_tick(life.now) <= 0:
                life.on(e.Tick())
                life.on(
                    e.Done(e.MeasureLag(at(2_000)), e.LagMeasured(at(2_000), at(2_000), 0.0, 0))
                )
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
