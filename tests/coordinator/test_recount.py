"""When time buckets are counted again, and which are compared."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest

from eventpub.config import App, Config, Sink, Store
from eventpub.errors import StateError, StoreError
from eventpub.spark.boundary import Bounds, edition_of
from eventpub.spark.passed import Passed, told
from eventpub.spark.progress import ShardReport
from eventpub.spark.publisher import _Publisher
from eventpub.spark.recount import WIDTH, Comparison, Recount, bucket_of, window_of
from eventpub.spark.recounting import Recounting
from eventpub.spark.shard import _ShardTask

HORIZON = 60_000_000
SECOND = 1_000_000


def looks(recount: Recount, bucket: int, until: int, rows: int = 0) -> list[int]:
    """The seconds at which a bucket is counted, with the reader one second behind."""
    found = []
    for second in range(1, until):
        due = recount.due(second * SECOND, (second - 1) * SECOND)
        if bucket in due:
            found.append(second)
        recount.counted(second * SECOND, dict.fromkeys(due, rows))
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
    recount.heard(0, {5: 3, 6: 1})
    recount.heard(1, {5: 4, 7: 2})
    recount.counted(20 * SECOND, {5: 7, 6: 2, 7: 1, 8: 0, 9: 1})
    assert recount.take() == [6, 7, 9]
    recount.compared([6, 7])
    assert recount.take() == [9]
    recount.compared([9])
    assert not recount.has_suspects()


def test_a_shards_later_number_replaces_its_earlier_one() -> None:
    recount = Recount(HORIZON, start=0)
    recount.heard(0, {5: 3})
    recount.heard(0, {5: 9})
    recount.counted(20 * SECOND, {5: 9})
    assert not recount.has_suspects()


def test_many_rows_are_compared_in_several_batches() -> None:
    recount = Recount(HORIZON, start=0)
    recount.counted(20 * SECOND, dict.fromkeys(range(10), 50_000))
    assert recount.take() == [0, 1, 2, 3]


def test_a_row_lies_in_the_window_of_its_bucket() -> None:
    for created in (1, WIDTH - 1, WIDTH, WIDTH + 1, 7 * WIDTH):
        after, upto = window_of(bucket_of(created), 100 * WIDTH)
        assert after < created <= upto


def test_after_the_clock_was_set_everything_is_counted_again() -> None:
    recount = Recount(HORIZON, start=0)
    due = recount.due(1000 * SECOND, 990 * SECOND)
    recount.counted(1000 * SECOND, dict.fromkeys(due, 0))
    recount.everything(970 * SECOND)
    assert recount.due(970 * SECOND, 990 * SECOND) == list(range(909, 990))


def test_what_a_waiting_shard_has_left_is_counted_again_however_old_it_is_then() -> None:
    recount = Recount(HORIZON, start=0)
    recount.heard(0, {5: 1})
    recount.counted(70 * SECOND, {5: 2})
    recount.compared([5], unfinished=[5], again=90 * SECOND)
    assert not recount.has_suspects()
    assert 5 not in recount.due(89 * SECOND, 80 * SECOND)
    assert 5 in recount.due(90 * SECOND, 80 * SECOND)


def test_what_one_shard_passed_while_another_waited_is_counted_however_old_it_is_then() -> None:
    recount = Recount(HORIZON, start=0)
    recount.due(1000 * SECOND, 990 * SECOND)
    assert recount.due(1010 * SECOND, 990 * SECOND, 1000 * SECOND) == []
    assert recount.due(1500 * SECOND, 1500 * SECOND)[:10] == list(range(990, 1000))


def out_of_turn(
    recount: Recount, until: int, told: dict[int, dict[tuple[int, int], int]]
) -> dict[int, list[int]]:
    """The buckets that are counted in each second beside those in their turn, by what is told."""
    found = {}
    for second in range(1, until):
        now, position = second * SECOND, (second - 1) * SECOND
        recount.told(told.get(second, {}))
        recount.counted(now, dict.fromkeys(recount.due(now, position), 0))
        found[second] = recount.late(now, position)
        recount.counted(now, dict.fromkeys(found[second], 0), in_turn=False)
    return {second: buckets for second, buckets in found.items() if buckets}


def test_where_rows_may_have_come_is_counted_at_once_and_in_its_turn_all_the_same() -> None:
    recount = Recount(HORIZON, start=0)
    told = {20: {(8, 9): 1}, 21: {(8, 9): 1}, 22: {(8, 9): 2}}
    assert out_of_turn(recount, 23, told) == {20: [8, 9], 22: [8, 9]}
    assert looks(recount, bucket=9, until=100) == [26, 42, 70]


def test_it_is_counted_however_old_it_is_but_not_from_before_the_start() -> None:
    recount = Recount(HORIZON, start=5 * SECOND)
    assert out_of_turn(recount, 220, {200: {(3, 6): 1}}) == {200: [5, 6]}


def test_what_was_counted_just_now_is_counted_a_little_later() -> None:
    told = {second: {(9, 9): second} for second in range(26, 31)}
    found = out_of_turn(Recount(HORIZON, start=0), 40, told)
    assert found == {28: [9], 30: [9]}, "and at 26 in its turn"


def test_it_is_counted_when_the_position_has_come_to_it() -> None:
    recount = Recount(HORIZON, start=0)
    recount.told({(15, 15): 1})
    recount.due(20 * SECOND, 10 * SECOND)
    assert recount.late(20 * SECOND, 10 * SECOND) == []
    recount.told({})
    recount.due(21 * SECOND, 20 * SECOND)
    assert recount.late(21 * SECOND, 20 * SECOND) == [15]


def test_very_many_are_counted_in_several_looks() -> None:
    recount = Recount(HORIZON, start=0)
    assert {len(b) for b in out_of_turn(recount, 1530, {1500: {(0, 1399): 1}}).values()} == {
        60,
        20,
    }


def test_with_a_horizon_of_zero_nobody_counts_it() -> None:
    recount = Recount(0, start=0)
    recount.told({(5, 5): 1})
    recount.due(20 * SECOND, 19 * SECOND)
    assert recount.late(20 * SECOND, 19 * SECOND) == []


def test_what_could_not_be_counted_is_counted_the_next_time() -> None:
    recounting = Recounting(HORIZON, start=0)
    asked: list[list[int]] = []

    def counts(windows: list[tuple[int, int]]) -> list[int]:
        asked.append([bucket_of(upto) for _, upto in windows])
        if len(asked) in {1, 3}:
            raise StoreError("store.unavailable", "gone", where="h", suggestion="wait")
        return [0] * len(windows)

    def finds(second: int, passed: dict[tuple[int, int], int]) -> None:
        store: Any = SimpleNamespace(now=lambda: second * SECOND, counts=counts)
        stand = 10 * SECOND, 10 * SECOND, None
        recounting.told(passed)
        recounting.finds(store, [], lambda: stand, is_told=True, last=False)

    recounting._recount.due(49 * SECOND, SECOND)
    looks: list[tuple[int, dict[tuple[int, int], int]]] = [(50, {}), (50, {})]
    looks += [(53, {(2, 2): 1}), (53, {}), (53, {})]
    for second, passed in looks:
        with suppress(StoreError):
            finds(second, passed)
    whole = list(range(1, 10))
    assert asked == [whole, whole, [2], [2]]


@pytest.mark.parametrize(("last", "counted"), [(False, 60), (True, 1400)])
def test_the_last_look_leaves_nothing_that_was_told(
    last: bool, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eventpub.spark.recounting._COUNTS_LATE", -1.0)
    recounting = Recounting(HORIZON, start=0)
    asked: list[tuple[int, int]] = []

    def counts(windows: list[tuple[int, int]]) -> list[int]:
        asked.extend(windows)
        return [0] * len(windows)

    store: Any = SimpleNamespace(now=lambda: 1500 * SECOND, counts=counts)
    recounting._recount.due(1500 * SECOND, 1400 * SECOND)
    stand = 1400 * SECOND, 1400 * SECOND, None
    recounting.told({(0, 1399): 1})
    recounting.finds(store, [], lambda: stand, is_told=True, last=last)
    assert len(set(asked)) == counted


def test_the_file_keeps_what_was_told_until_it_was_heard_also_when_the_source_begins_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "passed.json"
    assert told(file) == {}
    Passed(file).add([(3 * SECOND, 5 * SECOND), (7 * SECOND, 7 * SECOND + 1)])
    first = told(file)
    assert list(first) == [(3, 4), (7, 7)]
    source = Passed(file)
    source.add([(7 * SECOND, 7 * SECOND + 1)])
    then = told(file)
    assert then[3, 4] == first[3, 4]
    assert then[7, 7] != first[7, 7]
    later = time.time_ns() + 3_600_000_000_000
    monkeypatch.setattr("eventpub.spark.passed.time.time_ns", lambda: later)
    source.add([(9 * SECOND, 10 * SECOND)])
    assert told(file)[3, 4] == first[3, 4]
    assert source.since == 3 * SECOND
    source.add([], heard=then[7, 7])
    assert told(file) == {(9, 9): later}
    source.add([], heard=later)
    assert told(file) == {}
    file.write_text("[[4, ")
    assert told(file) == {}


def test_what_a_full_disk_has_refused_is_told_at_the_next_look(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    source = Passed(folder / "passed.json")
    source.add([(3 * SECOND, 4 * SECOND)])
    assert source.since == 3 * SECOND
    folder.mkdir()
    source.add([])
    assert list(told(folder / "passed.json")) == [(3, 3)]


def test_a_new_start_counts_from_where_the_former_one_stood_however_long_it_was_down() -> None:
    now, position = 5000 * SECOND, 1000 * SECOND
    recount = Recount(HORIZON, 0, now, position, hidden_since=900 * SECOND)
    assert recount.due(now, now - SECOND)[:3] == [4939, 4940, 4941]
    found: list[int] = []
    assert recount.uncounted_since == 900 * SECOND
    while buckets := recount.late(now, now - SECOND):
        recount.counted(now, dict.fromkeys(buckets, 0), in_turn=False)
        found += buckets
    assert sorted(found) == list(range(900, 1000))
    recount.read_before(1003 * SECOND)
    assert recount.late(now, now - SECOND) == list(range(1000, 1003))


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
    recount.counted(9000 * SECOND, dict.fromkeys(range(100), 50_000), in_turn=False)
    recount.counted(9000 * SECOND, {8920: 1}, in_turn=False)
    recount.counted(9001 * SECOND, {8989: 7})
    assert recount.take()[:3] == [8989, 8920, 0]
    later = recount.late(9004 * SECOND, 8990 * SECOND)
    assert [b for b in later if b < 8920] == [], "one after the other"


@pytest.mark.parametrize("rows", [0, 9_000])
def test_what_has_just_ended_does_not_wait_for_hours_that_a_start_has_to_count(rows: int) -> None:
    """Nor where every second of them differs, and is compared; nor do they wait for it."""
    now = 200_000 * SECOND
    recount = Recount(HORIZON, 0, now, now - SECOND, hidden_since=now - 4_000 * SECOND)
    while due := recount.due(now, now - SECOND):
        recount.counted(now, dict.fromkeys(due, 0))
    left = len(recount._late)
    assert left > 3_900
    for number in range(1_000):
        now += 3 * SECOND
        fresh = bucket_of(now - 10 * SECOND)
        recount.due(now, now - SECOND)
        recount.told({(fresh, fresh): number})
        counted = recount.late(now, now - SECOND)
        assert fresh in counted
        recount.counted(now, dict.fromkeys(counted, rows), in_turn=False)
        for _ in range(3):
            taken = recount.take()
            assert not rows or _ or fresh in taken
            recount.compared(taken)
        before, left = left, len(recount._late) + len(recount._late_suspects)
        if not left:
            return
        assert left < before
    raise AssertionError(f"{left} were never counted")


def publisher_in(state: Path) -> _Publisher:
    """A driver that is not started."""
    config = Config(
        app=App(id="orders", state_dir=state),
        store=Store.model_validate({"url": "mysql+pymysql://u@h:1/d"}),
        sink=Sink(topic="events"),
    )
    publisher = _Publisher(config, False, lambda _: None)
    publisher._recounting = Recounting(HORIZON, start=0)
    return publisher


def test_a_clock_that_goes_back_during_the_first_batch_is_noticed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publisher = publisher_in(tmp_path)
    publisher._position = publisher._reached = 990 * SECOND
    recount = publisher._recounting._recount
    while recount.due(1000 * SECOND, 990 * SECOND):
        pass
    for now in (1000, 970):
        store: Any = SimpleNamespace(now=lambda now=now: now * SECOND)
        assert not publisher._recount_finds(store), "nobody has said what is accounted for"
        assert publisher._progress.last_error is None
        assert ("clock went back" in capsys.readouterr().out) is (now == 970)
    assert 950 in recount.due(970 * SECOND, 990 * SECOND), "everything is counted again"


def test_the_first_batch_follows_a_while_unless_something_waits_for_its_end(tmp_path: Path) -> None:
    publisher = publisher_in(tmp_path)
    first = publisher._follows(False)
    assert first > 0
    assert publisher._follows(True) == 0
    publisher._former_shards = 3
    assert publisher._follows(False) == 0
    publisher._all_buckets = False
    assert publisher._follows(False) > first


def test_a_batch_that_begins_takes_a_comparison_on_and_is_not_ended_for_it(tmp_path: Path) -> None:
    """Its tasks have told nothing yet; a batch that was wanted for it would begin as this one."""
    publisher = publisher_in(tmp_path)
    publisher._job = SimpleNamespace(run=1, partitions=2)  # type: ignore[assignment]
    publisher._recounting._recount.counted(20 * SECOND, {5: 7})
    assert not publisher._is_compared_meanwhile(None, []), "no batch runs"
    publisher._position = publisher._low = 0
    assert publisher._is_compared_meanwhile(4, [])
    wanted = publisher._state.read(publisher._state.progress_file)
    assert wanted is not None
    assert wanted["comparison"] == {"run": 1, "number": 1, "buckets": [5]}
    publisher._recounting._wanted_since -= 60.0
    assert not publisher._is_compared_meanwhile(4, []), "they do not get to it"


def test_a_batch_that_begins_while_the_publisher_stops_is_ended_as_well(tmp_path: Path) -> None:
    """It takes over what is wanted after the first look whether a batch runs."""
    publisher = publisher_in(tmp_path)
    publisher._job = SimpleNamespace(run=1, partitions=2)  # type: ignore[assignment]
    publisher._position = publisher._low = 0
    ended: list[float] = []

    def batch() -> None:
        """Follows the boundary for five minutes, unless another batch is wanted."""
        time.sleep(0.3)  # Python workers are made, say
        publisher._running, wanted = 7, publisher._wanted
        deadline = time.monotonic() + 20.0
        while time.monotonic() < deadline:
            known = publisher._state.read(publisher._state.progress_file) or {}
            if known.get("wanted", 0) > wanted:
                ended.append(time.monotonic())
                break
            time.sleep(0.01)
        publisher._batch.release()

    publisher._batch.acquire()
    task = threading.Thread(target=batch)
    task.start()
    began = time.monotonic()
    publisher._end_query(SimpleNamespace(isActive=False, stop=lambda: None))  # type: ignore[arg-type]
    task.join()
    assert ended
    assert ended[0] - began < 5.0
    assert publisher._closed


def test_another_server_is_said_and_counted_also_where_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    publisher = publisher_in(tmp_path)
    publisher._meet("former")
    is_full = StateError("state.disk_full", "no space", retriable=True)
    monkeypatch.setattr(publisher._state, "write", Mock(side_effect=is_full))
    with suppress(StateError):
        publisher._meet("promoted")
    publisher._meet("promoted")
    assert publisher._recounting._counts_everything
    assert "another database server answers" in capsys.readouterr().out


def test_progress_is_written_when_something_has_changed(tmp_path: Path) -> None:
    """It is synced, and was written each second of an idle day."""
    publisher = publisher_in(tmp_path)
    publisher._job = SimpleNamespace(run=1, partitions=2)  # type: ignore[assignment]
    publisher._position = publisher._low = 0
    publisher._write_progress()
    written = edition_of(publisher._state.progress_file)
    publisher._write_progress()
    assert edition_of(publisher._state.progress_file) == written
    publisher._want_batch()
    assert edition_of(publisher._state.progress_file) != written


def test_a_comparison_is_over_when_all_shards_have_done_it() -> None:
    recounting = Recounting(HORIZON, start=0)
    recount = recounting._recount
    recount.counted(20 * SECOND, {5: 7, 6: 2})
    assert recounting.next_comparison() == Comparison(1, (5, 6)) == recounting.comparison
    recounting.hear([ShardReport(0, compared=1), ShardReport(1)])
    assert recount.take() == [5, 6]
    recounting.hear([ShardReport(0, compared=1), ShardReport(1, compared=1, unfinished=[6])])
    assert not recounting.has_suspects()
    assert recounting.comparison == Comparison(1)
    assert 6 in recount.due(20 * SECOND, 19 * SECOND)  # of which a shard has left something
    assert recounting.next_comparison() == Comparison(1)  # nothing is wanted


def test_what_comes_while_its_second_is_compared_is_counted_after_that() -> None:
    """Others need not wait for it."""
    recount = Recount(HORIZON, 0, 9000 * SECOND, 8990 * SECOND)
    recount.counted(9000 * SECOND, {5: 1}, in_turn=False)
    assert recount.take() == [5]
    recount.note([5, 6])
    later = 9010 * SECOND
    assert 5 not in recount.late(later, 8990 * SECOND)
    assert 6 in recount.late(later, 8990 * SECOND)
    recount.compared([5])
    assert 5 in recount.late(later, 8990 * SECOND)


def test_what_a_shard_left_of_a_comparison_is_uncounted_until_it_is_counted_again() -> None:
    recount = Recount(10 * SECOND, 0, 100 * SECOND, 100 * SECOND)
    recount.told({(50, 50): 1})
    assert recount.late(100 * SECOND, 100 * SECOND) == [50]
    recount.counted(100 * SECOND, {50: 3}, in_turn=False)
    recount.compared(recount.take(), [50], 110 * SECOND)
    assert recount.uncounted_since == 50 * SECOND
    assert 50 in recount.due(110 * SECOND, 110 * SECOND)
    recount.counted(110 * SECOND, {50: 0})
    assert recount.uncounted_since is None


def test_what_is_counted_during_its_comparison_is_counted_again_after_it() -> None:
    recount = Recount(10 * SECOND, 0, 100 * SECOND, 100 * SECOND)
    recount.told({(95, 95): 1})
    assert recount.late(100 * SECOND, 100 * SECOND) == [95]
    recount.counted(100 * SECOND, {95: 3}, in_turn=False)
    compared = recount.take()
    recount.counted(103 * SECOND, {95: 4})
    recount.compared(compared)
    assert recount.late(110 * SECOND, 110 * SECOND) == [95]


def shard_at(position: int, now: int, uncounted_since: int | None = None) -> Any:
    """A shard's task that has just begun, with a horizon of a minute."""
    task: Any = object.__new__(_ShardTask)
    config = SimpleNamespace(recount=SimpleNamespace(horizon=HORIZON))
    task._job = SimpleNamespace(config=config, pages=None, uncounted_since=uncounted_since)
    task._index = SimpleNamespace(position=position)
    task._report = ShardReport(0)
    task._uncounted = np.empty(0, np.int64)
    task._now, task._hidden_since, task._uncounted_since = now, None, None
    return task


@pytest.mark.parametrize(("hidden", "counted"), [(None, [950, 990]), (700, [800, 900, 950, 990])])
def test_what_is_old_when_it_is_read_is_counted_where_something_hides_there(
    hidden: int | None, counted: list[int]
) -> None:
    """A row without a number would be compared by its key when that has ended."""
    task = shard_at(600 * SECOND, 1000 * SECOND)
    times = [at * SECOND for at in (650, 800, 900, 950, 990)]
    task._window = lambda after, upto: [pa.table({"create_time": times})]
    window = Bounds(1000 * SECOND, hidden_since=None if hidden is None else hidden * SECOND)
    for _ in task.rows([window]):
        pass
    assert [at // SECOND for at in task._uncounted] == counted


def test_after_a_long_time_down_the_numbers_that_a_start_counts_again_are_kept() -> None:
    now, position = 9000 * SECOND, 5000 * SECOND
    recount = Recount(HORIZON, 0, now, position)
    task = shard_at(position, now, recount.uncounted_since)
    assert task._oldest_bucket() == bucket_of(position - HORIZON + 1) - 1


def test_what_was_open_for_years_is_counted_for_a_month_and_not_second_by_second() -> None:
    """A forgotten XA transaction, say: a set of all its seconds would be gigabytes."""
    now, years, month = 1_700_000_000, 50 * 86_400, 30 * 86_400
    recount = Recount(HORIZON, 0, now * SECOND, now * SECOND, (now - years) * SECOND)
    assert recount.uncounted_since == (now - month) * SECOND
    recount = Recount(HORIZON, 0)
    recount.due(now * SECOND, now * SECOND)
    recount.told({(now - years, now - 60): 1})
    assert recount.uncounted_since == (now - 60 - month + 1) * SECOND
    assert recount.late(now * SECOND, now * SECOND)[-1] == now - 60, "the last first"
