"""One count and one comparison at a time; which seconds are counted is in `test_recount`.

Time lines of a whole coordinator, without sleeping.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from eventpub.channel import Comparison
from eventpub.coordinator import events as e
from eventpub.errors import StoreError
from tests.coordinator.life import (
    NOW,
    SECOND,
    at,
    begin,
    begun,
    counted_with,
    streaming,
)


class TestRecount:
    def test_nothing_is_counted_before_all_shards_have_said_what_they_know(self) -> None:
        life = begin()
        lanes = [life.next_runner(number) for number in range(2)]
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
        fewer = life.all(e.Count)[1].buckets
        assert fewer == count.buckets[: len(fewer)]
        assert len(fewer) == max(1, len(count.buckets) // 4)

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
        life.ends(lanes[0])
        fresh = life.next_runner(0)
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
                life.on(e.Done(replace(count, expected=rows), e.Counted(life.database, rows)))
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

    def test_that_the_clock_went_back_without_a_recount_is_said_as_it_is(self) -> None:
        life, _ = streaming(sections={"recount": {"horizon": "0"}})
        life.polled(now=NOW - at(30))
        assert len(life.lines("until it catches up, nothing finds new rows")) == 1

    def test_that_the_clock_went_back_is_noticed_before_anything_is_counted(self) -> None:
        life = begin()
        lanes = [life.next_runner(number) for number in range(2)]
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

    def test_that_the_clock_went_ahead_is_said(self) -> None:
        life = begin()
        life.polled(at(2_000))
        life.polled(now=NOW + 600_000_000)
        [said] = life.lines("clock went ahead")
        assert said.facts["seconds"] == pytest.approx(600, abs=1)

    def test_an_index_from_elsewhere_tells_what_nobody_remembers(self) -> None:
        """progress.json is lost; copies, or the executors' disks, know how far it was."""
        life = begin(position=None, low=0)
        lanes = [life.next_runner(number) for number in range(2)]
        for lane, position in zip(lanes, (at(1_500), at(1_400)), strict=True):
            life.reports(lane, position=position, low=position, read_before=position)
        assert life.coordinator._recounting.uncounted_since == 0, "all that may have been hidden"
        life.polled(at(100))  # which was asked for before they had reported
        life.waits(1.0)
        assert life.last(e.Poll).after == at(1_400), "what all have read is not read again"

    def test_nor_where_the_first_runners_knew_less(self) -> None:
        """Where the reports of those that came first were lost with them."""
        life = begin(position=None, low=0)
        lanes = [life.next_runner(number) for number in range(2)]
        for lane in lanes:
            life.reports(lane, position=at(1_000), low=at(1_000))
        life.polled(at(1_100))
        life.ends(lanes[0])
        fresh = life.next_runner(0)
        life.reports(fresh, position=at(1_800), low=at(1_800), read_before=at(1_800))
        assert life.coordinator._recounting.uncounted_since == at(999)

    def test_what_a_shard_had_read_before_anybody_wrote_it_down_is_counted(self) -> None:
        life = begin()
        lanes = [life.next_runner(number) for number in range(2)]
        life.polled(at(2_000))
        life.reports(lanes[0], position=at(1_004), read_before=at(1_004))
        life.reports(lanes[1], position=at(1_000), read_before=at(1_000))
        for lane in lanes:
            life.reports_done(lane)
        found = counted_with(life)
        assert {1_001, 1_002, 1_003} <= found
