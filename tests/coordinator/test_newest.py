"""Rows that are inserted now and say that they were created long ago, on time lines."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventpub.coordinator import database_changes as newest_module
from eventpub.coordinator.database_changes import MOST, NewestRows, last_of
from eventpub.sources.base import NewRow

SECOND = 1_000_000
HOUR = 3600 * SECOND
NOW = 1_700_000_000 * SECOND
HORIZON = 300 * SECOND


class Watch:
    """A sample a second."""

    def __init__(self, horizon: int = HORIZON, start: int = 0) -> None:
        self.newest = NewestRows(horizon, start)
        self.now = NOW
        self.rows: list[NewRow] = []
        self.found: list[int] = []

    def second(self, *ages: int, ended: tuple[tuple[int, int], ...] = ()) -> None:
        """So old are the rows that were inserted in it, µs."""
        self.now += SECOND
        for age in ages:
            self.rows.append(NewRow(len(self.rows) + 1, self.now - age))
        sample = self.rows[::-1][:20]
        behind = self.newest.sample(self.now, self.now - SECOND, sample, ended)
        self.found += [row.id for row in behind]


def test_rows_that_keep_being_born_in_the_past_stop_the_publisher() -> None:
    watch = Watch()
    watch.second(0, 0)
    for _ in range(4):
        watch.second(HOUR)
    assert watch.newest.trips
    assert watch.found == [3, 4, 5, 6]
    error = watch.newest.error(watch.now, "shop.events", "Europe/Berlin")
    assert error.code == "store.rows_in_past"
    assert "store.time_zone" in str(error.suggestion)
    error = watch.newest.error(watch.now, "shop.events", None)
    assert "SET time_zone to the zone of the values they write" in str(error.suggestion)
    assert "store.time_zone" not in str(error.suggestion), "a TIMESTAMP is read in UTC"


def test_a_transaction_that_commits_late_has_ids_below_those_that_are_known() -> None:
    watch = Watch()
    watch.second(0, 0)
    began = watch.now
    late = NewRow(3, began)  # given out before the transaction of row 4 began
    watch.rows += [late, NewRow(4, began + SECOND)]
    hidden = [row for row in watch.rows if row is not late]
    for minute in (1, 6):
        watch.now = began + minute * 60 * SECOND
        watch.newest.sample(watch.now, watch.now - SECOND, hidden[::-1], ())
    watch.second()
    assert watch.found == [3], "once"
    watch.second()
    assert watch.found == [3]
    del watch.rows[-1]  # a row that was too low for a sample is not new
    watch.second()
    assert watch.found == [3]
    assert not watch.newest.trips


def test_beside_writers_of_the_right_zone_they_do_as_well() -> None:
    watch = Watch()
    for _ in range(12):
        watch.second(0, 0)
    for _ in range(6):
        watch.second(0, HOUR)
        watch.second(0)
    assert watch.newest.trips


def test_the_first_rows_of_an_empty_table_are_news() -> None:
    """Old ones, too: before, what filled an empty table counted as known."""
    watch = Watch()
    watch.second()
    watch.second(HOUR)
    assert watch.found == [1]
    watch.second(2 * HOUR)
    assert watch.found == [1, 2]


def test_what_was_inserted_since_the_sample_at_the_start_is_news() -> None:
    """A row of the past that comes right behind the first window."""
    watch = Watch()
    watch.newest = NewestRows(HORIZON, 0, last_of([NewRow(1, NOW)], NOW))
    watch.rows = [NewRow(1, NOW)]
    watch.second(HOUR)
    assert watch.found == [2]


def test_what_is_there_at_the_start_and_a_single_late_transaction_do_not() -> None:
    watch = Watch()
    watch.second(HOUR, HOUR, HOUR)
    for _ in range(20):
        watch.second()
    watch.second(*[HOUR] * 500)
    for _ in range(20):
        watch.second(0)
    assert not watch.newest.trips
    assert len(watch.found) == 20


def test_transactions_that_were_seen_to_end_late_explain_their_rows() -> None:
    watch = Watch()
    watch.second(0)
    for _ in range(10):
        bucket = (watch.now - HOUR) // SECOND
        watch.second(HOUR, ended=((bucket - 3, bucket + 3),))
    assert not watch.newest.trips


def test_late_commits_on_a_quiet_table_are_published_and_do_not_stop_the_publisher() -> None:
    """Nobody may see the transactions end; each was open for longer than five minutes."""
    watch = Watch()
    watch.second(0)
    for number in range(20):
        for _ in range(5):
            watch.now += 100 * SECOND
            watch.second()
        watch.second((301 + 29 * number) * SECOND)
    assert not watch.newest.trips
    assert len(watch.found) == 20


def test_rows_that_are_inserted_behind_younger_ones_stop_it_whatever_their_age() -> None:
    """As those of an import: ids are given out in the order of time, but for these."""
    watch = Watch()
    watch.second(0)
    for number in range(4):
        watch.second((4000 - 97 * number) * SECOND)
    assert watch.newest.trips


def test_writers_who_all_keep_the_same_other_zone_stop_it() -> None:
    """Each row is as far behind as the one before, in the order of ids; a transaction takes 5 s."""
    for zone in (15 * 60, 3600, 5 * 3600 + 1800, 14 * 3600):
        watch = Watch()
        for _ in range(5):
            watch.second((zone + 5) * SECOND)
        assert watch.newest.trips, zone


def test_deleted_rows_a_restored_table_and_old_rows_before_the_start_do_not() -> None:
    watch = Watch(start=NOW - 600 * SECOND)
    for _ in range(5):
        watch.second(HOUR)  # before the start: nobody wants them
    watch.second(0, 0, 0)
    for _ in range(3):
        del watch.rows[-1]
        watch.second()
    watch.second(0)
    assert not watch.newest.trips
    assert watch.found == []


def test_what_was_inserted_between_two_runs_is_found_by_the_second() -> None:
    watch = Watch()
    watch.second(0)
    before, last = watch.newest.last, watch.now
    watch.newest = NewestRows(HORIZON, 0, before)
    watch.now += HOUR
    watch.rows += [NewRow(2, last - HOUR), NewRow(3, last + HOUR // 2)]
    watch.second(0)
    assert watch.found == [2]
    assert not watch.newest.trips


def test_many_rows_are_fetched_in_portions_and_none_is_left_out() -> None:
    newest = NewestRows(HORIZON, 0, (0, NOW))
    rows = [NewRow(number, NOW - HOUR) for number in range(1, MOST + 11)]
    assert newest.wants_more(rows[:-21:-1]) == 0
    assert len(newest.sample(NOW + SECOND, NOW, rows[:MOST], ())) == MOST
    fresh = [NewRow(number, NOW) for number in range(MOST + 11, MOST + 50)]
    assert newest.wants_more(fresh) == MOST
    assert len(newest.sample(NOW + 2 * SECOND, NOW, rows[MOST:] + fresh, ())) == 10
    assert newest.wants_more(fresh) is None


def test_a_short_horizon_does_not_make_late_commits_an_error() -> None:
    watch = Watch(horizon=2 * SECOND)
    watch.second(0)
    for _ in range(10):
        watch.second(30 * SECOND)
    assert not watch.newest.trips
    assert len(watch.found) == 10


def test_one_import_is_one_sight_however_many_portions_it_takes() -> None:
    newest = NewestRows(HORIZON, 0, (0, NOW))
    for portion in range(5):
        first = portion * MOST + 1
        rows = [NewRow(first, NOW - HOUR)] * (MOST - 1) + [NewRow(first + MOST - 1, NOW - HOUR)]
        newest.sample(NOW + portion * SECOND, NOW, rows, [])
    assert not newest.trips


@pytest.mark.parametrize("imported", [MOST - 1, MOST, MOST + 1, 2 * MOST])
def test_an_import_of_any_number_of_rows_is_news_once(imported: int) -> None:
    """A portion that finds no more rows does not forget the highest id."""
    table = [NewRow(number, NOW - HOUR) for number in range(1, 5001 + imported)]
    newest = NewestRows(HORIZON, 0, (5000, NOW))
    found = 0
    for second in range(1, 8):
        rows, above = table[:-21:-1], newest.wants_more(table[:-21:-1])
        if above is not None:
            rows = [row for row in table[above:] if row.id > above][:MOST]
        found += len(newest.sample(NOW + second * SECOND, NOW, rows, (), above))
    assert found == imported
    assert not newest.trips
    assert newest.last == (5000 + imported, NOW + 7 * SECOND)


def test_a_table_that_gets_ids_is_not_news() -> None:
    watch = Watch()
    watch.second(0)
    watch.newest.restart()
    watch.rows = [NewRow(number, NOW - HOUR) for number in range(1, 50)]
    for _ in range(3):
        watch.second()
    assert watch.found == []


def test_where_the_time_is_the_id_writers_of_another_zone_stop_the_publisher() -> None:
    newest = NewestRows(HORIZON, 0)
    found = []
    for second in range(6):
        created = NOW + second * SECOND - 8 * HOUR
        rows = [NewRow(created, created)]
        found += newest.sample(NOW + second * SECOND, NOW, rows, ())
    assert len(found) == 5
    assert newest.trips


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("fresh"), st.integers(0, 30)),
            st.tuples(st.just("old"), st.sampled_from([0, 1, 3, 19, 20, 21, 40, 41, 80, 120])),
        ),
        min_size=1,
        max_size=12,
    )
)
def test_each_old_row_is_found_once_whatever_comes_in_between(life: list[tuple[str, int]]) -> None:
    """The highest id is never forgotten, also where an import is exactly some portions long."""
    most = 40
    with patch.object(newest_module, "MOST", most):
        watch = NewestRows(HORIZON, 0, (0, NOW))
        table: list[NewRow] = []
        found: list[int] = []
        # seconds without news at the end, in which what is left is fetched
        more = 2 + sum(rows for _, rows in life) // most
        for second, (kind, rows) in enumerate([*life, *[("fresh", 0)] * more], 1):
            now = NOW + second * SECOND
            created = now - HOUR if kind == "old" else now
            table += [NewRow(len(table) + 1 + n, created) for n in range(rows)]
            shown, above = table[:-21:-1], watch.wants_more(table[:-21:-1])
            if above is not None:
                shown = [row for row in table if row.id > above][:most]
            found += [r.id for r in watch.sample(now, now, shown, (), above)]
        assert len(found) == len(set(found))
        assert watch.last is not None
        assert watch.last[0] == len(table)
        assert set(found) == {row.id for row in table if row.created < NOW}
