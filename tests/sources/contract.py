"""What every `Source` does, whatever database is behind it.

A test module subclasses `SourceContract` and gives it the fixture `case`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from itertools import pairwise
from typing import Protocol

import pyarrow as pa
import pytest

from eventpub.admission.model import EVENTS, Shard, VersionRange
from eventpub.sources.base import Source

SECOND = 1_000_000
T = 1_767_225_600 * SECOND  # 2026-01-01
EVERYTHING = T - SECOND, T + 100 * SECOND
Key = tuple[str, int]


class Case(Protocol):
    """A source over an empty table, and a way to commit rows to it."""

    @property
    def source(self) -> Source: ...

    def commit(self, *rows: tuple[str, int, int]) -> None:
        """(aggregate, version, create_time), by one transaction."""


def keys(batches: Iterable[pa.RecordBatch]) -> list[Key]:
    """Aggregate and version of each row, in order."""
    return [(row["aggregate_id"], row["version"]) for b in batches for row in b.to_pylist()]


def window(source: Source, after: int, upto: int, shard: Shard | None = None) -> list[Key]:
    """The keys of a window's events."""
    return keys(source.window(after, upto, shard))


class SourceContract:
    """Of windows, pages, polls, counts, and lookups by key."""

    @pytest.fixture
    def source(self, case: Case) -> Source:
        """The one under test."""
        return case.source

    def test_a_window_begins_after_its_first_bound_and_includes_the_last(
        self, case: Case, source: Source
    ) -> None:
        case.commit(("a", 2, T + 2), ("a", 1, T + 1), ("b", 1, T + 2), ("a", 3, T + 3))
        found = window(source, T + 1, T + 2)
        assert sorted(found) == [("a", 2), ("b", 1)]
        assert window(source, *EVERYTHING)[0] == ("a", 1)
        assert window(source, *EVERYTHING)[-1] == ("a", 3)

    def test_events_have_the_schema_and_what_was_written(self, case: Case, source: Source) -> None:
        case.commit(("a", 1, T))
        (batch,) = source.window(*EVERYTHING, None)
        assert batch.schema == EVENTS
        [row] = batch.select(["aggregate_id", "version", "create_time"]).to_pylist()
        assert row["aggregate_id"] == "a"
        assert row["version"] == 1
        assert batch.column("create_time").cast(pa.int64()).to_pylist() == [T]

    def test_a_window_read_again_has_what_was_committed_since(
        self, case: Case, source: Source
    ) -> None:
        case.commit(("a", 2, T + 2))
        assert window(source, *EVERYTHING) == [("a", 2)]
        case.commit(("a", 1, T + 1))
        assert window(source, *EVERYTHING) == [("a", 1), ("a", 2)]

    @pytest.mark.parametrize("partitions", [8, 7])
    def test_each_row_is_of_the_shard_that_its_id_hashes_to(
        self, case: Case, source: Source, partitions: int
    ) -> None:
        case.commit(*((f"ü{n}", 1, T + n) for n in range(40)))
        for number in range(3):
            found = window(source, *EVERYTHING, Shard(number, 3, partitions))
            assert found == [
                (f"ü{n}", 1)
                for n in range(40)
                if zlib.crc32(f"ü{n}".encode()) % partitions % 3 == number
            ]

    def test_a_window_and_its_keys_and_counts_agree(self, case: Case, source: Source) -> None:
        case.commit(*(("a", n, T + n // 2) for n in range(1, 8)), ("b", 1, T))
        for after, upto in pairwise([T - 5, T - 1, T, T + 1, T + 3, T + 9]):
            found = window(source, after, upto)
            assert sorted(keys(source.keys(after, upto, None))) == sorted(found)
            assert source.counts([(after, upto)]) == [len(found)]
        assert source.counts([(T - 1, T), (T + 50, T + 60), (T, T + 1)]) == [2, 0, 2]
        assert source.counts([]) == []

    def test_a_page_that_is_not_full_is_the_whole_window(self, case: Case, source: Source) -> None:
        case.commit(("a", 1, T), ("a", 2, T + 1))
        page = source.page(*EVERYTHING, 3, 1 << 20)
        assert (keys(page.batches), page.end) == ([("a", 1), ("a", 2)], None)
        empty = source.page(T + 50, T + 60, 3, 1 << 20)
        assert (keys(empty.batches), empty.end) == ([], None)

    def test_a_full_page_leaves_its_last_moment_to_the_next(
        self, case: Case, source: Source
    ) -> None:
        case.commit(("a", 1, T), ("a", 2, T + 1), ("b", 1, T + 2), ("c", 1, T + 2), ("a", 3, T + 3))
        page = source.page(*EVERYTHING, 3, 1 << 20)
        assert (keys(page.batches), page.end) == ([("a", 1), ("a", 2)], T + 1)

    def test_a_moment_with_more_rows_than_a_page_is_named(self, case: Case, source: Source) -> None:
        case.commit(*((f"a{n}", 1, T + 5) for n in range(6)))
        page = source.page(*EVERYTHING, 3, 1 << 20)
        assert (keys(page.batches), page.end) == ([], T + 5)
        assert len(window(source, T, T + 5)) == 6

    def test_pages_one_after_the_other_are_the_window(self, case: Case, source: Source) -> None:
        case.commit(*((f"a{n}", 1, T + n // 3) for n in range(20)))
        after, found = EVERYTHING[0], list[Key]()
        while True:
            page = source.page(after, EVERYTHING[1], 5, 1 << 20)
            found += keys(page.batches)
            if page.end is None:
                break
            if not page.batches:
                found += window(source, after, page.end)
            after = page.end
        assert sorted(found) == sorted(window(source, *EVERYTHING))
        assert len(found) == 20

    def test_a_poll_tells_the_boundary_and_whether_there_is_anything(
        self, case: Case, source: Source
    ) -> None:
        poll = source.poll(T, SECOND, 10)
        assert not poll.has_rows
        assert poll.page_end is poll.next_row is None
        assert poll.upper == poll.now - SECOND
        assert poll.now <= source.now()
        case.commit(("a", 1, T), ("a", 2, T + 1), ("a", 3, T + 2))
        assert not source.poll(T + 2, SECOND, 10).has_rows
        assert source.poll(T, SECOND, 10).has_rows
        assert [source.poll(T - 1, 0, rows).page_end for rows in (1, 2, 3, 4, None)] == [
            *(T, T + 1, T + 2, None, None)
        ]

    def test_a_poll_may_be_kept_below_a_bound_and_names_the_next_row(
        self, case: Case, source: Source
    ) -> None:
        case.commit(("a", 1, T + 10), ("a", 2, source.now() + 3_600 * SECOND))
        poll = source.poll(T, 0, None, at_most=T + 5)
        assert (poll.upper, poll.has_rows, poll.next_row) == (T + 5, False, T + 10)
        poll = source.poll(T + 10, 0, None)
        assert (poll.has_rows, poll.next_row) == (False, None), "a row of the future is not waiting"

    def test_fetch_finds_versions_whatever_their_time(self, case: Case, source: Source) -> None:
        case.commit(("a", 3, T), ("a", 1, T + 9), ("a", 2, T + 50), ("b", 1, T))
        rows, rest = source.fetch([VersionRange("a", 1, 5), VersionRange("c", 1, 2)], 100, 1 << 20)
        assert rest == []
        assert keys(rows.to_batches()) == [("a", 1), ("a", 2), ("a", 3)]
        assert rows.column("create_time").cast(pa.int64()).to_pylist() == [T + 9, T + 50, T]

    def test_fetch_reads_no_more_than_requested_and_says_what_is_left(
        self, case: Case, source: Source
    ) -> None:
        case.commit(*((a, n, T + n) for a in "ab" for n in range(1, 6)))
        left = [VersionRange("a", 1, 5), VersionRange("b", 2, 9)]
        found = list[Key]()
        for _ in range(20):
            rows, left = source.fetch(left, 2, 1 << 20)
            assert len(rows) <= 2
            found += keys(rows.to_batches())
            if not left:
                break
        assert sorted(found) == [("a", n) for n in range(1, 6)] + [("b", n) for n in range(2, 6)]

    def test_which_versions_there_are(self, case: Case, source: Source) -> None:
        case.commit(*(("a", n, T + n) for n in (1, 2, 4, 5, 9)), ("A", 1, T))
        assert source.existing([("a", 1), ("a", 3), ("A", 1), ("b", 1)]) == {("a", 1), ("A", 1)}
        assert source.versions(VersionRange("a", 2, 8), 2) == [2, 4]
        assert source.versions(VersionRange("a", 2, 8), 2, highest=True) == [5, 4]
        assert source.versions(VersionRange("b", 1, 8), 2) == []
        assert [row.version for row in source.seen(VersionRange("a", 4, 9))] == [4, 5, 9]
        assert source.seen(VersionRange("a", 4, 4))[0].create_time == T + 4

    def test_what_is_below_a_version(self, case: Case, source: Source) -> None:
        case.commit(*(("a", n, T + n) for n in (1, 2, 4, 5)), ("b", 1, T), ("c", 7, T))
        found = list(source.below([("a", 5), ("b", 3), ("c", 7)], 2))
        assert sorted(keys(found)) == [("a", 2), ("a", 4), ("b", 1)]
        assert [b.schema.names for b in found] == [["aggregate_id", "version", "create_time"]]

    def test_how_much_is_waiting_and_how_far_rows_are_ahead(
        self, case: Case, source: Source
    ) -> None:
        assert source.counts([(T, T + 9)], 5) == [0]
        assert source.ahead() == (0, 0)
        case.commit(*(("a", n, T + n) for n in range(1, 9)))
        assert source.counts([(T, T + 8), (T + 6, T + 8)], 5) == [5, 2]
        assert source.never_read() == 0
        case.commit(("b", 1, source.now() + 3_600 * SECOND))
        ahead, rows = source.ahead()
        assert (0 < ahead <= 3_600 * SECOND, rows) == (True, 1)

    def test_the_newest_rows_are_those_inserted_last(self, case: Case, source: Source) -> None:
        assert source.newest(3) == []
        case.commit(("a", 1, T + 9), ("a", 2, T + 1), ("a", 3, T + 5))
        newest = source.newest(2)
        assert [row.created for row in newest] == [T + 5, T + 1]
        assert source.newest(5, above=newest[1].id) == newest[:1]

    def test_a_closed_source_opens_again(self, case: Case, source: Source) -> None:
        case.commit(("a", 1, T))
        source.close()
        assert window(source, *EVERYTHING) == [("a", 1)]
        source.require_same_times()
