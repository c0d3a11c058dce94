"""A checkpoint and its state that are copied or restored, beside indexes of another history."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from tests.conftest import FreshDatabase
from tests.publisher.harness import commit, create_table, insert, transaction
from tests.spark.query import Query, events


def on(query: Query, machine: Path) -> None:
    """Its shard goes on there."""
    query.options["state_dir"] = str(machine)
    query.restart()


def one(query: Query) -> list[tuple[str, int]]:
    """One batch."""
    while not query.plan():
        pass
    rows = [row for part in query.do() for row in part]
    query.reader.commit(query.offsets[-1])
    return events(rows)


@pytest.mark.parametrize("where", ["same machine", "another machine"])
def test_both_restored_together_go_on_and_repeat_nothing(
    database: FreshDatabase, tmp_path: Path, where: str
) -> None:
    create_table(database)
    first, second = tmp_path / "first", tmp_path / "second"
    query = Query(database, tmp_path, watermark="off", state_dir=str(first))
    commit(database, "a", 1)
    found = events(query.run(1))
    shutil.copytree(tmp_path / "state", tmp_path / "backup")
    saved = list(query.offsets)
    commit(database, "z", 1)
    one(query)  # of the history that is lost
    until = query.offsets[-1]["batch"]
    query.offsets = saved
    shutil.rmtree(tmp_path / "state")
    (tmp_path / "backup").rename(tmp_path / "state")
    commit(database, "a", 2, 3)
    if where == "another machine":
        on(query, second)
        while query.offsets[-1]["batch"] < until:
            found += one(query)
    on(query, first)
    commit(database, "a", 4)
    while len(found) < 5:
        found += one(query)
    assert sorted(found) == [("a", 1), ("a", 2), ("a", 3), ("a", 4), ("z", 1)]


def test_a_copy_with_a_state_of_its_own_does_not_use_the_index_of_the_original(
    database: FreshDatabase, tmp_path: Path
) -> None:
    create_table(database)
    first = tmp_path / "first"
    original = Query(database, tmp_path, watermark="off", state_dir=str(first))
    commit(database, "x", 1)
    found = events(original.run(1))
    shutil.copytree(tmp_path / "state", tmp_path / "copied")
    copy = Query(
        database,
        tmp_path,
        watermark="off",
        state=str(tmp_path / "copied"),
        state_dir=str(tmp_path / "second"),
    )
    copy.offsets = list(original.offsets)
    commit(database, "c", 1)
    found += one(copy)
    commit(database, "late", 1)
    time.sleep(0.2)
    one(original)
    assert original.offsets[-1]["batch"] == copy.offsets[-1]["batch"]
    on(copy, first)
    commit(database, "d", 1)
    found += events(copy.run(2))
    assert sorted(found) == [("c", 1), ("d", 1), ("late", 1), ("x", 1)]


def test_a_refused_row_is_said_and_not_needed_for_a_repeated_batch(
    database: FreshDatabase, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    create_table(database)
    query = Query(database, tmp_path, watermark="off", dead_limit="1000")
    with transaction(database) as cursor:
        insert(cursor, "a", 0)
        insert(cursor, "a", 1)
        cursor.connection.commit()
    found: list[tuple[str, int]] = []
    while not found:
        if query.plan():
            found = [e for part in query.do() for e in events(part)]
    database.execute("DELETE FROM events WHERE version = 0")
    assert [e for part in query.do() for e in events(part)] == found == [("a", 1)]
    query.plan()
    assert "row refused" in capsys.readouterr().out
