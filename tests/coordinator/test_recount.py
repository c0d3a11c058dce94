"""When time buckets are counted again, and which are compared."""

from __future__ import annotations

import time

import pytest

from eventpub.admission.model import WIDTH, bucket_of, window_of
from eventpub.channel import Comparison, Report
from eventpub.coordinator.events import Count, Counted
from eventpub.coordinator.recount import Recount
from eventpub.coordinator.recounting import Recounting

HORIZON = 60_000_000
SECOND = 1_000_000


def finds(recount: Recount, now: int, rows: dict[int, int], *, in_turn: bool = True) -> None:
    """The database has so many rows in these buckets, and the shards what they said last."""
    recount.counted(now, rows, recount.ask(rows), in_turn=in_turn)


def looks(recount: Recount, bucket: int, until: int, rows: int = 0) -> list[int]:
    """The seconds at which a bucket is counted, with the reader one second behind."""
    found = []
    for second in range(1, until):
        due = recount.due(second * SECOND, (second - 1) * SECOND)
        if bucket in due:
            found.append(second)
        finds(recount, second * SECOND, dict.fromkeys(due, rows))
    return found


def test_a_bucket_is_counted_at_growing_ages_up_to_the_horizon() -> None:
    recount = Recount(HORIZON, start=0)
    assert looks(recount, bucket=9, until=100) == [12, 14, 18, 26, 42, 70]


def test_after_a_start_every_bucket_of_the_horizon_is_counted_at_once() -> None:
    recount = Recount(HORIZON, start=0)
    assert recount.due(1000 * SECOND, 990 * SECOND) == list(range(939, 990))
    assert recount.due(1000 * SECOND, 990 * SECOND) == []


def test_the_bucket_that_an_idle_reader_has_stopped_in_is_counted_as_far_as_it_was_read() -> None:
    recount = Recount(HORIZON, start=900 * SECOND)
    position = 990 * SECOND + SECOND // 3
    assert recount.due(993 * SECOND, position)[-1] == 990
    assert window_of(990, position) == (990 * SECOND, position)


def test_nothing_older_than_the_start_is_counted() -> None:
    assert Recount(HORIZON, start=980 * SECOND).due(1000 * SECOND, 990 * SECOND) == list(
        range(980, 990)
    )


def test_a_horizon_of_zero_counts_nothing() -> None:
    assert Recount(0, start=0).due(1000 * SECOND, 990 * SECOND) == []


def test_only_buckets_whose_numbers_differ_are_compared_and_only_until_they_were() -> None:
    recount = Recount(HORIZON, start=0)
    recount.account(0, {5: 3, 6: 1})
    recount.account(1, {5: 4, 7: 2})
    finds(recount, 20 * SECOND, {5: 7, 6: 2, 7: 1, 8: 0, 9: 1})
    assert recount.take() == [6, 7, 9]
    recount.compared([6, 7])
    assert recount.take() == [9]
    recount.compared([9])
    assert not recount.has_mismatches()


def test_a_shards_later_number_replaces_its_earlier_one() -> None:
    recount = Recount(HORIZON, start=0)
    recount.account(0, {5: 3})
    recount.account(0, {5: 9})
    finds(recount, 20 * SECOND, {5: 9})
    assert not recount.has_mismatches()


def test_many_rows_are_compared_in_several_batches() -> None:
    recount = Recount(HORIZON, start=0)
    finds(recount, 20 * SECOND, dict.fromkeys(range(10), 50_000))
    assert recount.take() == [0, 1, 2, 3]


def test_a_row_lies_in_the_window_of_its_bucket() -> None:
    for created in (1, WIDTH - 1, WIDTH, WIDTH + 1, 7 * WIDTH):
        after, upto = window_of(bucket_of(created), 100 * WIDTH)
        assert after < created <= upto


def test_after_the_clock_was_set_everything_is_counted_again() -> None:
    recount = Recount(HORIZON, start=0)
    due = recount.due(1000 * SECOND, 990 * SECOND)
    finds(recount, 1000 * SECOND, dict.fromkeys(due, 0))
    recount.everything(970 * SECOND)
    assert recount.due(970 * SECOND, 990 * SECOND) == list(range(909, 990))


def test_what_a_waiting_shard_has_left_is_counted_again_however_old_it_is_then() -> None:
    recount = Recount(HORIZON, start=0)
    recount.account(0, {5: 1})
    finds(recount, 70 * SECOND, {5: 2})
    recount.compared([5], unfinished=[5], again=90 * SECOND)
    assert not recount.has_mismatches()
    assert 5 not in recount.due(89 * SECOND, 80 * SECOND)
    assert 5 in recount.due(90 * SECOND, 80 * SECOND)


def test_what_one_shard_passed_while_another_waited_is_counted_however_old_it_is_then() -> None:
    recount = Recount(HORIZON, start=0)
    recount.due(1000 * SECOND, 990 * SECOND)
    assert recount.due(1010 * SECOND, 990 * SECOND, 1000 * SECOND) == []
    assert recount.due(1500 * SECOND, 1500 * SECOND)[:10] == list(range(990, 1000))


def out_of_turn(
    recount: Recount, until: int, ended: dict[int, tuple[int, int]]
) -> dict[int, list[int]]:
    """The buckets that are counted in each second beside those in their turn, by what has ended."""
    found = {}
    for second in range(1, until):
        now, position = second * SECOND, (second - 1) * SECOND
        if second in ended:
            first, last = ended[second]
            recount.ended(first * SECOND, (last + 1) * SECOND)
        finds(recount, now, dict.fromkeys(recount.due(now, position), 0))
        found[second] = recount.late(now, position)
        finds(recount, now, dict.fromkeys(found[second], 0), in_turn=False)
    return {second: buckets for second, buckets in found.items() if buckets}


def test_where_rows_may_have_come_is_counted_at_once_and_in_its_turn_all_the_same() -> None:
    recount = Recount(HORIZON, start=0)
    ended = {20: (8, 9), 22: (8, 9)}
    assert out_of_turn(recount, 23, ended) == {20: [8, 9], 22: [8, 9]}
    assert looks(recount, bucket=9, until=100) == [26, 42, 70]


def test_it_is_counted_however_old_it_is_but_not_from_before_the_start() -> None:
    recount = Recount(HORIZON, start=5 * SECOND)
    assert out_of_turn(recount, 220, {200: (3, 6)}) == {200: [5, 6]}


def test_what_is_counted_beyond_the_horizon_is_compared_whatever_the_number() -> None:
    """As many published rows may have been deleted, which is safe there, as have come late."""
    recount, old, young = Recount(HORIZON, start=0), 100, 170
    for bucket in (old, old + 1, young):
        recount.account(0, {bucket: bucket < young or 1})
        recount.ended(bucket * SECOND, (bucket + 1) * SECOND)
    now = position = 200 * SECOND
    recount.due(now, position)
    assert recount.late(now, position) == [old, old + 1, young]
    rows = {old: 1, old + 1: 0, young: 1}
    recount.counted(now, rows, recount.ask(rows) | {old + 1: 0}, in_turn=False)
    assert recount.take() == [old], "nothing is left of the next, and nothing deleted of the last"


def test_what_a_comparison_has_left_beyond_the_horizon_is_compared_whatever_the_number() -> None:
    """A late row was lost where as many were deleted until the next count, in its turn."""
    recount = Recount(HORIZON, start=0)
    recount.account(0, {5: 1})
    finds(recount, 70 * SECOND, {5: 2})
    recount.compared(recount.take(), unfinished=[5], again=90 * SECOND)
    assert 5 in recount.due(90 * SECOND, 80 * SECOND)
    finds(recount, 90 * SECOND, {5: 1})
    assert recount.take() == [5]
    recount.compared([5])
    finds(recount, 95 * SECOND, {5: 1})
    assert not recount.has_mismatches(), "it was compared to its end"


def test_a_count_in_turn_beyond_the_horizon_is_also_that_of_what_has_ended() -> None:
    recount, now = Recount(HORIZON, start=0), 70 * SECOND
    recount.account(0, {5: 1, 20: 1})
    recount.note([5, 20])
    finds(recount, now, {5: 1, 20: 1})
    assert recount.take() == [5], "nothing can have been deleted of the other"


def test_where_updated_rows_leave_their_second_an_equal_number_proves_nothing() -> None:
    """It is compared when a late transaction has ended, and as old as the horizon in any case."""
    recount = Recount(HORIZON, start=0)
    recount.trusts_counts = False
    recount.account(0, {9: 1})
    compared = []
    for second in range(1, 100):
        now, position = second * SECOND, (second - 1) * SECOND
        if second == 26:
            recount.ended(9 * SECOND, 10 * SECOND)
        for in_turn in (True, False):
            found = recount.due(now, position) if in_turn else recount.late(now, position)
            finds(recount, now, {b: int(b == 9) for b in found}, in_turn=in_turn)
        if taken := recount.take():
            compared.append((second, taken))
            recount.compared(taken)
    assert compared == [(28, [9]), (70, [9])], "in its turn at 26, which does not settle it"


def test_what_was_counted_just_now_is_counted_a_little_later() -> None:
    ended = dict.fromkeys(range(26, 31), (9, 9))
    found = out_of_turn(Recount(HORIZON, start=0), 40, ended)
    assert found == {28: [9], 30: [9]}, "and at 26 in its turn"


def test_it_is_counted_when_the_position_has_come_to_it() -> None:
    recount = Recount(HORIZON, start=0)
    recount.ended(15 * SECOND, (15 + 1) * SECOND)
    recount.due(20 * SECOND, 10 * SECOND)
    assert recount.late(20 * SECOND, 10 * SECOND) == []
    recount.due(21 * SECOND, 20 * SECOND)
    assert recount.late(21 * SECOND, 20 * SECOND) == [15]


def test_very_many_are_counted_in_several_looks() -> None:
    recount = Recount(HORIZON, start=0)
    assert {len(b) for b in out_of_turn(recount, 1530, {1500: (0, 1399)}).values()} == {
        60,
        20,
    }


def test_with_a_horizon_of_zero_nobody_counts_it() -> None:
    recount = Recount(0, start=0)
    recount.ended(5 * SECOND, (5 + 1) * SECOND)
    recount.due(20 * SECOND, 19 * SECOND)
    assert recount.late(20 * SECOND, 19 * SECOND) == []


def test_a_new_start_counts_from_where_the_former_one_stood_however_long_it_was_down() -> None:
    now, position = 5000 * SECOND, 1000 * SECOND
    recount = Recount(HORIZON, 0, now, position, hidden_since=900 * SECOND)
    assert recount.due(now, now - SECOND)[:3] == [4939, 4940, 4941]
    found: list[int] = []
    assert recount.uncounted_since == 900 * SECOND
    while buckets := recount.late(now, now - SECOND):
        finds(recount, now, dict.fromkeys(buckets, 0), in_turn=False)
        found += buckets
    assert sorted(found) == list(range(900, 1000))
    recount.read_before(1003 * SECOND, None)
    assert recount.late(now, now - SECOND) == list(range(1000, 1003))
    before = recount.uncounted_since
    recount.read_before(1002 * SECOND, 1003 * SECOND)
    assert recount.uncounted_since == before, "this run has read further"


def test_a_start_that_finds_the_clock_behind_counts_a_day() -> None:
    """Nobody knows since when it has been: rows came below the position all the time."""
    day, now = 86_400, 500_000
    recount = Recount(HORIZON, 0, now * SECOND, (now + 600) * SECOND)
    assert recount.uncounted_since == (now - day) * SECOND


def test_a_bucket_that_was_counted_in_part_is_counted_when_more_of_it_is_read() -> None:
    """Also beyond the horizon, and where nothing comes any more that would lead out of it."""
    recount = Recount(HORIZON, start=0)
    recount.due(1000 * SECOND, 998 * SECOND, reached=1100 * SECOND)
    position = 999 * SECOND + SECOND // 2
    assert 999 in recount.due(1200 * SECOND, position)
    rows = {999: 0}
    recount.counted(1200 * SECOND, rows, recount.ask(rows), upto=position)
    assert recount.due(1203 * SECOND, position) == []
    assert 999 in recount.due(1203 * SECOND, position + 1)
    recount.counted(1203 * SECOND, rows, recount.ask(rows), upto=position + 1)
    assert recount.due(1204 * SECOND, 1000 * SECOND) == [], "counted a second ago"
    assert 999 in recount.due(1205 * SECOND, 1000 * SECOND)
    recount.counted(1205 * SECOND, rows, recount.ask(rows), upto=1000 * SECOND)
    assert recount.due(1208 * SECOND, 1000 * SECOND) == []


def test_a_new_start_counts_at_once_what_is_young() -> None:
    recount = Recount(HORIZON, 0, 1000 * SECOND, 990 * SECOND)
    assert recount.due(1000 * SECOND, 999 * SECOND)[:60] == list(range(939, 998))
    assert recount.late(1000 * SECOND, 999 * SECOND) == list(range(930, 939))


def test_no_bucket_that_was_read_young_is_dropped_while_nobody_counted() -> None:
    recount = Recount(HORIZON, start=0)
    recount.due(1000 * SECOND, 999 * SECOND)
    assert recount.due(1360 * SECOND, 1359 * SECOND)[:5] == list(range(998, 1003))


def test_a_backlog_that_was_old_when_it_was_read_is_not_counted() -> None:
    recount = Recount(HORIZON, 0, 900_000 * SECOND, 1000 * SECOND)
    recount.due(900_001 * SECOND, 500_000 * SECOND)
    assert recount.due(900_002 * SECOND, 900_000 * SECOND)[0] == 899_940


def test_what_is_counted_in_turn_is_compared_before_thousands_of_old_seconds() -> None:
    recount = Recount(HORIZON, 0, 9000 * SECOND, 8990 * SECOND, hidden_since=0)
    finds(recount, 9000 * SECOND, dict.fromkeys(range(100), 50_000), in_turn=False)
    finds(recount, 9000 * SECOND, {8920: 1}, in_turn=False)
    finds(recount, 9001 * SECOND, {8989: 7})
    assert recount.take()[:3] == [8989, 8920, 0]
    later = recount.late(9004 * SECOND, 8990 * SECOND)
    assert [b for b in later if b < 8920] == [], "one after the other"


@pytest.mark.parametrize("rows", [0, 9_000])
def test_what_has_just_ended_does_not_wait_for_hours_that_a_start_has_to_count(rows: int) -> None:
    """Nor where every second of them differs, and is compared; nor do they wait for it."""
    now = 200_000 * SECOND
    recount = Recount(HORIZON, 0, now, now - SECOND, hidden_since=now - 4_000 * SECOND)
    while due := recount.due(now, now - SECOND):
        finds(recount, now, dict.fromkeys(due, 0))
    left = len(recount._late)
    assert left > 3_900
    for _ in range(1_000):
        now += 3 * SECOND
        fresh = bucket_of(now - 10 * SECOND)
        recount.due(now, now - SECOND)
        recount.ended(fresh * SECOND, (fresh + 1) * SECOND)
        counted = recount.late(now, now - SECOND)
        assert fresh in counted
        finds(recount, now, dict.fromkeys(counted, rows), in_turn=False)
        for turn in range(3):
            taken = recount.take()
            assert not rows or turn or fresh in taken
            recount.compared(taken)
        before, left = left, len(recount._late) + len(recount._late_mismatched)
        if not left:
            return
        assert left < before
    raise AssertionError(f"{left} were never counted")


def test_what_comes_while_its_second_is_compared_is_counted_after_that() -> None:
    """Others need not wait for it."""
    recount = Recount(HORIZON, 0, 9000 * SECOND, 8990 * SECOND)
    finds(recount, 9000 * SECOND, {5: 1}, in_turn=False)
    assert recount.take() == [5]
    recount.note([5, 6])
    later = 9010 * SECOND
    assert 5 not in recount.late(later, 8990 * SECOND)
    assert 6 in recount.late(later, 8990 * SECOND)
    recount.compared([5])
    assert 5 in recount.late(later, 8990 * SECOND)


def test_what_a_shard_left_of_a_comparison_is_uncounted_until_it_is_counted_again() -> None:
    recount = Recount(10 * SECOND, 0, 100 * SECOND, 100 * SECOND)
    recount.ended(50 * SECOND, (50 + 1) * SECOND)
    assert recount.late(100 * SECOND, 100 * SECOND) == [50]
    finds(recount, 100 * SECOND, {50: 3}, in_turn=False)
    recount.compared(recount.take(), [50], 110 * SECOND)
    assert recount.uncounted_since == 50 * SECOND
    assert 50 in recount.due(110 * SECOND, 110 * SECOND)
    finds(recount, 110 * SECOND, {50: 0})
    assert recount.uncounted_since is None


def test_what_is_counted_during_its_comparison_is_counted_again_after_it() -> None:
    recount = Recount(10 * SECOND, 0, 100 * SECOND, 100 * SECOND)
    recount.ended(95 * SECOND, (95 + 1) * SECOND)
    assert recount.late(100 * SECOND, 100 * SECOND) == [95]
    finds(recount, 100 * SECOND, {95: 3}, in_turn=False)
    compared = recount.take()
    finds(recount, 103 * SECOND, {95: 4})
    recount.compared(compared)
    assert recount.late(110 * SECOND, 110 * SECOND) == [95]


def test_what_was_open_for_years_is_counted_for_a_month_and_not_second_by_second() -> None:
    """A forgotten XA transaction, say: a set of all its seconds would be gigabytes."""
    now, years, month = 1_700_000_000, 50 * 86_400, 30 * 86_400
    recount = Recount(HORIZON, 0, now * SECOND, now * SECOND, (now - years) * SECOND)
    assert recount.uncounted_since == (now - month) * SECOND
    recount = Recount(HORIZON, 0)
    recount.due(now * SECOND, now * SECOND)
    recount.ended((now - years) * SECOND, (now - 60 + 1) * SECOND)
    assert recount.uncounted_since == (now - 60 - month + 1) * SECOND
    assert recount.late(now * SECOND, now * SECOND)[-1] == now - 60, "the last first"


class Counting:
    """A coordinator's recount, with the reader at 10 s of 50 s."""

    def __init__(self) -> None:
        self.recounting = Recounting(HORIZON, start=0)
        self.asked: list[list[int]] = []

    def next(self, at: float = 0.0, now: int = 50) -> Count | None:
        """What is counted next."""
        count = self.recounting.next_count(now * SECOND, 10 * SECOND, 10 * SECOND, None, at)
        if count is not None:
            self.asked.append(list(count.buckets))
        return count

    def finds(self, count: Count | None, *, more: tuple[int, ...] = (), now: int = 50) -> None:
        """The database has what was expected, and a row more in some."""
        assert count is not None
        rows = {b: count.expected[b] + (b in more) for b in count.buckets}
        self.recounting.counted(count, Counted(now * SECOND, rows))


WHOLE = list(range(10))


def test_what_could_not_be_counted_is_counted_the_next_time() -> None:
    counting = Counting()
    count = counting.next()
    assert count is not None
    assert counting.next() is None, "one at a time"
    counting.recounting.not_counted(count)
    for _ in range(3):
        counting.finds(counting.next())
    assert counting.asked == [WHOLE, [0, 1], [2, 3, 4, 5], [6, 7, 8, 9]], "fewer at first"


def test_a_second_that_cannot_be_counted_keeps_no_others_waiting() -> None:
    """It was due at once, and the lowest, so that nothing else was counted any more."""
    counting = Counting()
    for _ in range(30):
        count = counting.next(now=53)
        if count is None:
            break
        if 3 in count.buckets:
            counting.recounting.not_counted(count)
        else:
            counting.finds(count, now=53)
    counted = {bucket for asked in counting.asked if 3 not in asked for bucket in asked}
    assert counted >= {*WHOLE} - {3}
    while (again := counting.next(now=53 + 61)) is not None:
        counting.finds(again, now=53 + 61)
    assert counting.asked[-1] == [3], "by itself, after all others: it may fail again"


def test_a_second_that_cannot_be_counted_out_of_turn_keeps_no_others_waiting() -> None:
    """As the lowest or the highest of all it was the next one each time."""
    counting = Counting()
    counting.finds(counting.next())
    for bad in (0, 5, 9):
        start, failed = len(counting.asked), 0
        counting.recounting.recount.note(WHOLE)
        for step in range(40):
            now = 60 + 200 * bad + step // 10
            counting.recounting.clock_stepped(now * SECOND, now)
            counting.recounting.second(0.0)
            count = counting.next(now=now)
            if count is not None and bad in count.buckets and not count.in_turn:
                counting.recounting.not_counted(count)
                failed += len(count.buckets) == 1
            elif count is not None:
                counting.finds(count, now=now)
        counted = {b for asked in counting.asked[start:] if bad not in asked for b in asked}
        assert counted >= {*WHOLE} - {bad}
        assert 1 <= failed <= 2
        later = 60 + 200 * bad + 70
        while (again := counting.next(now=later)) is not None:
            counting.finds(again, now=later)
        assert not counting.recounting.recount.has_late


def test_what_was_noted_and_could_not_be_counted_is_counted_the_next_time() -> None:
    counting = Counting()
    counting.finds(counting.next())
    counting.recounting.recount.ended(2 * SECOND, 3 * SECOND)
    counting.recounting.second(0.0)
    count = counting.next(now=53)
    assert count is not None
    counting.recounting.not_counted(count)
    counting.finds(counting.next(now=53), now=53)
    assert counting.asked[1:] == [[2], [2]]
    assert not counting.recounting.recount.has_late


@pytest.mark.parametrize("how", ["ended", "noted"])
def test_what_is_noted_while_its_second_is_counted_is_counted_again(how: str) -> None:
    """The rows of a transaction that has just ended may not have been there yet."""
    counting = Counting()
    counting.finds(counting.next())
    counting.recounting.recount.note([2])
    counting.recounting.second(0.0)
    count = counting.next(now=53)
    assert count is not None
    if how == "ended":
        counting.recounting.recount.ended(2 * SECOND, 3 * SECOND)
    else:
        counting.recounting.recount.note([2])
    counting.finds(count, now=53)
    assert counting.recounting.uncounted_since == 2 * SECOND
    counting.recounting.second(0.0)
    counting.finds(counting.next(now=56), now=56)
    assert not counting.recounting.recount.has_late


def test_a_month_that_is_to_be_counted_costs_no_more_than_a_second() -> None:
    """A report was taken over in a quarter of a second then, and publishing stood still."""
    now = 10_000_000 * SECOND
    month = 30 * 86_400
    recount = Recount(HORIZON, 0, now, now - SECOND, hidden_since=now - month * SECOND)
    began = time.perf_counter()
    for _ in range(1_000):
        assert recount.uncounted_since == (10_000_000 - month) * SECOND
        assert len(recount.late(now, now - SECOND)) == 60
    assert time.perf_counter() - began < 5.0


def test_late_counts_have_their_share_of_a_second() -> None:
    counting = Counting()
    counting.finds(counting.next())
    counting.recounting.recount.note([2])
    counting.recounting.second(7.0)
    counting.finds(counting.next(at=7.6, now=53), now=53)
    counting.recounting.recount.note([3])
    assert counting.next(at=7.6, now=53) is None
    counting.recounting.second(8.0)
    counting.finds(counting.next(at=8.4, now=53), now=53)
    assert counting.asked[1:] == [[2], [3]]


def test_late_counts_come_also_where_each_in_turn_takes_longer_than_their_share() -> None:
    recounting, counts = Recounting(HORIZON, start=0), list[Count]()
    for second in range(20, 40):
        now = second * SECOND
        recounting.second(second)
        if second == 30:
            recounting.recount.note([2])
        count = recounting.next_count(now, now - SECOND, now - SECOND, None, second + 0.7)
        assert count is not None
        recounting.counted(count, Counted(now, count.expected))
        counts.append(count)
    assert [c.buckets for c in counts if not c.in_turn] == [(2,)]


def test_the_last_count_leaves_nothing_that_was_noted_and_has_all_the_time() -> None:
    recounting = Recounting(HORIZON, start=0)
    now, position = 1500 * SECOND, 1400 * SECOND
    recounting.recount.ended(0, position)
    recounting.begin_last(now, position, position, None)
    found: set[int] = set()
    while count := recounting.next_count(now, position, position, None, at=9e9):
        assert not recounting.is_over()
        found.update(count.buckets)
        recounting.counted(count, Counted(now, count.expected))
    assert found == {*range(1400)}
    assert recounting.is_over()


def test_the_last_count_ends_where_equal_numbers_prove_nothing() -> None:
    """However slow it is, some second would have grown as old as the horizon meanwhile."""
    recounting, position = Recounting(HORIZON, start=0), 100 * SECOND
    recounting.recount.trusts_counts = False
    recounting.recount.account(0, dict.fromkeys(range(100), 1))
    recounting.begin_last(position, position, position, None)
    count = recounting.next_count(position, position, position, None, at=0)
    assert count is not None
    recounting.counted(count, Counted(position + 9 * SECOND, count.expected))
    assert recounting.is_over()


def test_a_last_count_that_finds_something_is_not_the_last() -> None:
    counting = Counting()
    recounting = counting.recounting
    stand = 50 * SECOND, 10 * SECOND, 10 * SECOND, None
    assert not recounting.is_over(), "it has not begun"
    recounting.begin_last(*stand)
    counting.finds(counting.next(), more=(4,))
    assert not recounting.is_over()
    assert recounting.next_comparison() == Comparison(1, (4,))
    recounting.compared([Report(0, compared=1)])
    assert not recounting.is_over(), "what came of it is counted once more"
    recounting.begin_last(*stand)
    counting.finds(counting.next())
    assert recounting.is_over()
    assert counting.asked == [WHOLE, WHOLE]


def test_a_comparison_is_over_when_all_shards_have_done_it() -> None:
    counting = Counting()
    recounting = counting.recounting
    assert recounting.next_comparison() is None
    counting.finds(counting.next(), more=(5, 6))
    assert recounting.next_comparison() == Comparison(1, (5, 6)) == recounting.comparison
    recounting.compared([Report(0, compared=1), Report(1)])
    assert recounting.comparison == Comparison(1, (5, 6))
    assert recounting.next_comparison() is None, "one at a time"
    recounting.compared([Report(0, compared=1), Report(1, compared=1, unfinished=[6])])
    assert recounting.comparison == Comparison(1)
    assert recounting.next_comparison() is None
    assert recounting.uncounted_since == 6 * SECOND, "of which a shard has left something"
    count = counting.next()
    assert count is not None
    assert 6 in count.buckets


def test_after_the_clock_went_back_everything_is_counted_again() -> None:
    counting = Counting()
    assert counting.recounting.clock_stepped(50 * SECOND, 7.0) == 0.0
    counting.finds(counting.next())
    assert counting.next() is None
    assert counting.recounting.clock_stepped(50 * SECOND - SECOND // 2, 7.5) == 0.0, "it may drift"
    assert counting.next() is None
    assert counting.recounting.clock_stepped(40 * SECOND, 8.0) == pytest.approx(-9.5)
    assert counting.next(now=40) is not None
    assert counting.recounting.clock_stepped(41 * SECOND, 9.0) == 0.0


@pytest.mark.parametrize("by", [0, 9, 200, 310, 3600, 90_000])
def test_what_commits_after_the_clock_went_ahead_is_found_within_the_horizon(by: int) -> None:
    """An invisible transaction wrote at second 9, the clock steps at 12, and it commits."""
    horizon, position = 300 * SECOND, 1_700_000_000 * SECOND
    for commits in (30, 250):
        recounting = Recounting(horizon, position - 100 * SECOND, position)
        for passed in range(1_000):
            now = position + (passed + (by if passed >= 12 else 0)) * SECOND
            late = 40.0 * (passed == 5)  # the process has stood still, and the clock has not
            stepped = recounting.clock_stepped(now, 5.0 + passed + late)
            assert stepped == pytest.approx(by if passed == 12 and by > 9 else 0)
            count = recounting.next_count(now, now - SECOND, now - SECOND, None, 0.0)
            if count is not None:
                rows = {b: int(b == bucket_of(position) + 9) for b in count.buckets}
                if passed < commits:
                    rows = dict.fromkeys(rows, 0)
                recounting.counted(count, Counted(now, rows))
            if recounting.next_comparison() is not None:
                break
        assert commits <= passed <= 12 + 300, f"{by}: {passed}"


def test_a_clock_that_is_years_off_for_a_moment_costs_no_more_than_a_month(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As that of a machine without a battery before it has asked for the time."""
    monkeypatch.setattr("eventpub.coordinator.recount._MOST_HIDDEN", 86_400)
    now, year = 1_000_000_000 * SECOND, 31_536_000 * SECOND
    began = time.perf_counter()
    for wrong in (now - 25 * year, now + 25 * year):
        recounting = Recounting(HORIZON, 0, now, now - SECOND)
        for at in (now, wrong, now + SECOND):
            recounting.clock_stepped(at, 0.0)
            reached = max(now, wrong) if at != now else now
            count = recounting.next_count(at, reached, reached, None, 0.0)
            assert count is not None
            recounting.counted(count, Counted(at, dict.fromkeys(count.buckets, 0)))
        while True:
            at += 3 * SECOND
            count = recounting.next_count(at, reached, reached, None, 0.0)
            assert count is not None, "what has come since is counted"
            recounting.counted(count, Counted(at, dict.fromkeys(count.buckets, 0)))
            if bucket_of(now) in count.buckets:
                break
        # also when that is longer ago than what is kept in mind: nothing comes by windows
        at += 3 * 86_400 * SECOND
        reached = max(reached, at)
        while True:
            count = recounting.next_count(at, reached, reached, None, 0.0)
            assert count is not None, "what comes from now on is counted"
            recounting.counted(count, Counted(at, dict.fromkeys(count.buckets, 0)))
            if bucket_of(at) - 10 in count.buckets:
                break
    assert time.perf_counter() - began < 60.0
