"""How a run ends: a stop, and a run that ends by itself.

Time lines of a whole coordinator, without sleeping.
"""

from __future__ import annotations

from typing import Any

from eventpub.channel import Stop
from eventpub.coordinator import events as e
from eventpub.errors import SinkError, StoreError
from tests.coordinator.life import (
    NOW,
    Life,
    Runner,
    at,
    begun,
    streaming,
)

AWAY = SinkError("sink.unreachable", "no broker answers", retriable=True)
GONE = StoreError("store.denied", "the account may not read the table")


class TestAStop:
    def test_all_are_told_and_it_is_over_when_they_have_left(self) -> None:
        life, lanes = streaming()
        life.on(e.StopAsked())
        assert all(lane.is_told_to_stop for lane in lanes)
        life.reports(lanes[0], done=1, position=at(2_000), published=3)
        life.ends(lanes[0])
        assert not life.is_over()
        life.ends(lanes[1])
        assert life.is_over()
        assert life.last(e.Finish).error is None
        assert life.coordinator.progress.published == 3, "what they finished counts"

    def test_or_after_a_moment_anyway(self) -> None:
        life, _ = streaming()
        life.on(e.StopAsked())
        life.waits(1.1)
        assert not life.is_over()
        life.waits(0.2)
        assert life.outcome() is None

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
        assert lanes[0].sent[-1] == Stop()
        life.ends(lanes[1], AWAY)
        life.waits(0.5)
        assert life.starts == before
        assert len(lanes[0].sent) == sent

    def test_the_position_is_written_last(self) -> None:
        life, lanes = streaming()
        life.polled(at(2_500))
        life.on(e.StopAsked())
        for lane in lanes:
            life.reports_done(lane)
            life.ends(lane)
        assert life.written["position"] == at(2_500)
        assert isinstance(life.said[-1], e.Finish)

    def test_whatever_ends_it_runners_finish_what_they_do(self) -> None:
        life, lanes = streaming(shards=3)
        life.ends(lanes[0], GONE)
        assert all(lane.is_told_to_stop for lane in lanes[1:])
        life.ends(lanes[1], StoreError("store.denied", "the other shard says so, too"))
        assert not life.is_over()
        life.reports(lanes[2], done=1, position=at(2_000), published=3)
        life.ends(lanes[2])
        assert life.is_over()
        assert life.last(e.Finish).error is GONE
        assert life.coordinator.progress.published == 3
        assert life.starts == [0, 1, 2]


class TestARunThatEndsByItself:
    UNTIL = NOW

    def run_to_the_end(self, **last: Any) -> tuple[Life, list[Runner]]:
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
        assert life.outcome() is None

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
        life.on(e.Done(count, e.Counted(life.database, rows)))
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
        assert life.outcome() is None
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
                found = e.Done(count, e.Counted(life.database, count.expected))
                life.on(found)
