"""Scenarios C: a publisher that dies, or loses what it knew, at a chosen point."""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from tests.conftest import FreshDatabase
from tests.publisher.conftest import NewPublisher
from tests.publisher.harness import (
    Publisher,
    compare,
    create_table,
    eventually,
    insert,
    transaction,
)


def commit_some(database: FreshDatabase, versions: range, aggregates: int = 20) -> None:
    """Several versions of several aggregates."""
    with transaction(database) as cursor:
        for version in versions:
            for number in range(aggregates):
                insert(cursor, f"a-{number}", version)
        cursor.connection.commit()


def assert_whole(database: FreshDatabase, publisher: Publisher) -> None:
    """0 missing, 0 repeated, 0 out of order."""
    differences = compare(database, publisher.topic)
    assert not differences, differences


def stop_when_whole(database: FreshDatabase, publisher: Publisher) -> None:
    """One aggregate tells of its shard alone: the others may be behind when it is there."""
    with suppress(AssertionError):  # said below
        eventually(lambda: not compare(database, publisher.topic))
    assert publisher.stop() == 143
    assert_whole(database, publisher)


@pytest.mark.engines("spark", why="the engine threads has no workers")
@pytest.mark.parametrize("step", ["before_commit", "after_commit"])
def test_c1_a_worker_alone_is_killed_and_the_publisher_goes_on(
    publisher: Publisher, database: FreshDatabase, tmp_path: Path, step: str
) -> None:
    marker = tmp_path / "worker.pid"
    commit_some(database, range(1, 4))  # of the first batch, which is made without rows, too
    publisher.start(environment={"EVENTPUB_FAILPOINT": f"{step}:1:{marker}"})
    eventually(marker.exists)
    os.kill(int(marker.read_text()), signal.SIGKILL)
    publisher.until_published("a-3", [1, 2, 3])
    commit_some(database, range(4, 6))
    publisher.until_published("a-3", [1, 2, 3, 4, 5])
    stop_when_whole(database, publisher)


def test_c3_c10_what_is_lost_of_the_state_is_repaired_from_the_topic(
    publisher: Publisher, database: FreshDatabase, tmp_path: Path
) -> None:
    """Index deleted, replaced by an older copy; position deleted; everything deleted."""
    index, older = publisher.index, tmp_path / "older"
    commit_some(database, range(1, 3))
    publisher.publish_everything()
    shutil.copytree(index, older)

    commit_some(database, range(3, 5))
    publisher.publish_everything()
    publisher.lose_index()
    commit_some(database, range(5, 7))
    publisher.publish_everything()
    assert_whole(database, publisher)

    publisher.lose_index()
    shutil.copytree(older, index)
    commit_some(database, range(7, 9))
    publisher.publish_everything()
    assert_whole(database, publisher)

    (publisher.state / "progress.json").unlink()
    commit_some(database, range(9, 11))
    publisher.publish_everything()
    assert_whole(database, publisher)

    shutil.rmtree(publisher.state)
    commit_some(database, range(11, 13))
    publisher.publish_everything()
    assert_whole(database, publisher)


@pytest.mark.engines("threads", "spark")
def test_c3_an_open_hold_survives_the_loss_of_the_index(
    publisher: Publisher, database: FreshDatabase
) -> None:
    publisher.settings["gaps"] = {"backoff_base": "2s", "max_backoff": 8}
    with transaction(database) as late:
        insert(late, "held", 1)
        with transaction(database) as cursor:
            insert(cursor, "held", 2)
            insert(cursor, "other", 1)
            cursor.connection.commit()
        publisher.start()
        publisher.until_published("other", [1])
        publisher.kill()
        publisher.lose_index()
        late.connection.commit()
    publisher.start()
    publisher.until_published("held", [1, 2])
    stop_when_whole(database, publisher)


def test_a10_a_hold_neither_restarts_nor_skips_at_once_after_a_restart(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create_table(database)
    publisher = new_publisher(database, gaps={"backoff_base": "1s", "max_backoff": 5})
    with transaction(database) as cursor:
        insert(cursor, "a", 2)
        insert(cursor, "other", 1)
        cursor.connection.commit()
    publisher.start()
    publisher.until_published("other", [1])
    publisher.kill()
    publisher.publish_everything()
    (gap,) = publisher.gaps.read()
    assert gap.key == "a"
    waited = database.execute(
        "SELECT TIMESTAMPDIFF(MICROSECOND, %s, %s)",
        (_datetime(gap.value, "first_seen"), _datetime(gap.value, "skipped_at")),
    )[0][0]
    assert waited / 1e6 >= 31
    assert_whole(database, publisher)


def test_a8_a_gap_across_two_windows_and_a_restart_is_filled_in_two_parts(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """Above the hole there are events of the window before the kill and of one after it."""
    create_table(database)
    publisher = new_publisher(database, gaps={"backoff_base": "1s", "max_backoff": 8})

    def commit(*versions: int, other: str) -> None:
        with transaction(database) as cursor:
            for version in versions:
                insert(cursor, "a", version)
            insert(cursor, other, 1)
            cursor.connection.commit()

    with transaction(database) as early, transaction(database) as later:
        insert(early, "a", 2)
        insert(later, "a", 3)
        commit(1, 4, other="first-window")
        publisher.start()
        publisher.until_published("first-window", [1])
        publisher.kill()
        commit(6, other="second-window")
        publisher.start()
        publisher.until_published("second-window", [1])
        assert publisher.topic.versions("a") == [1]
        early.connection.commit()
        publisher.until_published("a", [1, 2])
        commit(5, other="third-window")
        publisher.until_published("third-window", [1])
        assert publisher.topic.versions("a") == [1, 2]
        later.connection.commit()
    publisher.until_published("a", [1, 2, 3, 4, 5, 6])
    assert publisher.gaps.read() == []
    stop_when_whole(database, publisher)


def _datetime(value: bytes | None, name: str) -> str:
    import json

    assert value is not None
    text: str = json.loads(value)[name]
    return text.replace("T", " ").rstrip("Z")


def test_c8_a_second_publisher_on_the_same_state_is_refused(
    publisher: Publisher, database: FreshDatabase
) -> None:
    commit_some(database, range(1, 2))
    publisher.start()
    publisher.until_published("a-1", [1])
    second = publisher.command("run", "--json")
    assert second.returncode == 3
    assert "state.locked" in second.stdout
    assert publisher.stop(signal.SIGINT) == 130
    assert_whole(database, publisher)
