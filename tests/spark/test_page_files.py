"""Pages that the source reads for all shards."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from eventpub.admission import EVENTS
from eventpub.spark import page_files
from eventpub.spark.page_files import PageFiles

PARTITIONS, SHARDS = 6, 3


def batch(first: int, last: int, payload: bytes = b"{}") -> pa.RecordBatch:
    """Events of the times `first` to `last`, of seven aggregates in turns."""
    times = range(first, last + 1)
    return pa.RecordBatch.from_pylist(
        [
            {
                "aggregate_id": f"a-{time % 7}",
                "version": time,
                "event_type": "happened",
                "payload": payload,
                "metadata": None,
                "create_time": time,
            }
            for time in times
        ],
        schema=EVENTS,
    )


def taken(files: PageFiles, after: int, upto: int, shard: int) -> list[Any] | None:
    """The times of a shard's page."""
    page = files.take(after, upto, shard)
    return None if page is None else page[1].column("create_time").to_pylist()


def shard_of(time: int) -> int:
    """By the definition of the topic's partitions."""
    return zlib.crc32(f"a-{time % 7}".encode()) % PARTITIONS % SHARDS


def test_each_shard_takes_its_rows_in_their_order_once(tmp_path: Path) -> None:
    files = PageFiles(tmp_path / "pages", SHARDS, PARTITIONS)
    assert files.leave(0, 40, [batch(1, 25), batch(26, 40)])
    for shard in range(SHARDS):
        own = [time for time in range(1, 41) if shard_of(time) == shard]
        page = files.take(0, 40, shard)
        assert page is not None
        end, rows = page
        assert end == 40
        assert rows.schema == EVENTS
        assert rows.column("create_time").to_pylist() == own
        assert files.take(0, 40, shard) is None
    assert list((tmp_path / "pages").iterdir()) == []
    assert (tmp_path / "pages").stat().st_mode & 0o777 == 0o700


def test_a_page_is_for_who_stands_at_its_beginning_and_reads_to_its_end(tmp_path: Path) -> None:
    files = PageFiles(tmp_path, 1, PARTITIONS)
    files.leave(0, 10, [batch(1, 10)])
    files.leave(10, 20, [batch(11, 20)])
    assert taken(files, 5, 20, 0) is None
    assert taken(files, 0, 9, 0) is None
    assert taken(files, 10, 30, 0) == list(range(11, 21))
    assert taken(files, 0, 30, 0) == list(range(1, 11))
    assert taken(PageFiles(tmp_path / "elsewhere", 1, PARTITIONS), 0, 30, 0) is None


def test_a_page_without_rows_of_a_shard_is_a_page(tmp_path: Path) -> None:
    files = PageFiles(tmp_path, SHARDS, PARTITIONS)
    files.leave(0, 1, [batch(1, 1)])
    rows = [taken(files, 0, 1, shard) for shard in range(SHARDS)]
    assert sorted(rows, key=str) == [[1], [], []]


def test_what_is_too_large_or_not_wanted_any_more_is_left_to_the_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = PageFiles(tmp_path, 1, PARTITIONS)
    assert not files.leave(0, 9, [batch(1, 9)], lambda: True)
    monkeypatch.setattr(page_files, "MOST_BYTES", 5_000)
    assert not files.leave(0, 9, [batch(1, 9, b"x" * 1_000)])
    assert files.leave(0, 9, [batch(1, 9)])
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_takes_nothing_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "pages").write_text("a file in its place")
    files = PageFiles(tmp_path / "pages", 1, PARTITIONS)
    assert not files.leave(0, 9, [batch(1, 9)])
    assert files.take(0, 9, 0) is None


def test_what_nobody_has_taken_is_forgotten_with_its_time(tmp_path: Path) -> None:
    files = PageFiles(tmp_path, 1, PARTITIONS)
    files.leave(0, 10, [batch(1, 10)])
    files.leave(10, 20, [batch(11, 20)])
    files.forget(10)
    assert taken(files, 0, 30, 0) is None
    assert taken(files, 10, 30, 0) == list(range(11, 21))
