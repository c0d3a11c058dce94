"""The source reads pages of a backlog for all shards, and no further ahead than they can use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

from eventpub.spark.page_files import PageFiles
from eventpub.spark.source import EventStoreStreamReader
from eventpub.spark.state import StateDir
from tests.conftest import FreshDatabase
from tests.publisher.harness import create_table, eventually, insert, transaction

PAGE, PAGES, SHARDS, PARTITIONS = 10, 12, 2, 4
Reader = tuple[EventStoreStreamReader, StateDir, PageFiles]


@pytest.fixture
def reader(database: FreshDatabase, tmp_path: Path) -> Iterator[Reader]:
    """The publisher's source, a second apart from rows that are a millisecond apart."""
    create_table(database)
    with transaction(database) as cursor:
        cursor.execute("SET time_zone = '+00:00'")
        for number in range(PAGE * PAGES):
            at = f"2026-01-01 00:00:00.{1000 * number:06d}"
            insert(cursor, f"a-{number % 7}", number // 7 + 1, create_time=at)
        cursor.connection.commit()
    state = StateDir(tmp_path / "state")
    options = {
        "url": database.url,
        "page_rows": str(PAGE),
        "shards": str(SHARDS),
        "partitions": str(PARTITIONS),
        "windows": "true",
        "position": "0",
        "wake_file": str(state.progress_file),
        "boundary_file": str(state.boundary_file),
        "live_dir": str(state.live),
        "page_dir": str(state.pages),
    }
    made = EventStoreStreamReader(options)
    yield made, state, PageFiles(state.pages, SHARDS, PARTITIONS)
    made.stop()


def files(state: StateDir) -> int:
    """How many there are, of all shards."""
    return len(list(state.pages.glob("*.arrow")))


def boundary(state: StateDir) -> int:
    """Where it has come to."""
    return int((state.read(state.boundary_file) or {"upto": 0})["upto"])


def tell(state: StateDir, *positions: int) -> None:
    """How far each shard is."""
    for shard, position in enumerate(positions):
        state.tell(1, 1, shard, {"position": position})


def test_pages_are_read_a_little_ahead_of_what_the_shards_tell(reader: Reader) -> None:
    source, state, pages = reader
    first: Any = source.latestOffset(source.initialOffset(), ReadMaxRows(PAGE))
    windows = source.partitions(source.initialOffset(), first)
    assert [(w.shard, w.moves, w.more) for w in windows] == [(0, True, True), (1, True, True)]  # type: ignore[attr-defined]
    millisecond, start = 1_000, first["position"] - 1_000 * (PAGE - 1)
    end = [start + millisecond * (PAGE * n - 1) for n in range(PAGES + 1)]
    assert first["position"] == end[1]

    eventually(lambda: boundary(state) == end[5], 10)
    assert files(state) == 4 * SHARDS
    tell(state, end[3], end[1])
    eventually(lambda: boundary(state) == end[5], 1)
    tell(state, end[3], end[2])
    eventually(lambda: boundary(state) == end[6], 10)
    assert files(state) == 4 * SHARDS, "and what all have passed is forgotten"

    found = [pages.take(end[n], end[n + 1], shard) for n in range(2, 6) for shard in range(SHARDS)]
    assert sum(page[1].num_rows for page in found if page is not None) == 4 * PAGE
    tell(state, *[end[6]] * SHARDS)
    eventually(lambda: boundary(state) == end[10], 10)
    tell(state, *[end[10]] * SHARDS)
    eventually(lambda: boundary(state) == end[12], 10)  # and nothing is behind it


def test_a_batch_takes_up_what_was_read_for_the_one_before(reader: Reader) -> None:
    source, state, _ = reader
    first: Any = source.latestOffset(source.initialOffset(), ReadMaxRows(PAGE))
    eventually(lambda: files(state) == 4 * SHARDS, 10)
    read = {path: path.stat().st_mtime_ns for path in state.pages.iterdir()}
    page = (boundary(state) - first["position"]) // 4  # as far apart as the rows are
    second: Any = source.latestOffset(first, ReadMaxRows(PAGE))
    source.partitions(first, second)
    tell(state, *[second["position"]] * SHARDS)
    eventually(lambda: boundary(state) == second["position"] + 4 * page, 10)
    kept = {p: p.stat().st_mtime_ns for p in state.pages.iterdir() if p in read}
    assert kept.items() <= read.items(), "none was read a second time"
    assert len(kept) >= 2 * SHARDS
