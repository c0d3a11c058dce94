"""Scenario A12: from the beginning, from now, from a time; and what a restart makes of it."""

from __future__ import annotations

import json
import time

from tests.conftest import FreshDatabase
from tests.publisher.conftest import NewPublisher
from tests.publisher.harness import create_table, insert, transaction


def commit_at(database: FreshDatabase, aggregate_id: str, version: int, second: int) -> None:
    """An event created at a second of one minute."""
    with transaction(database) as cursor:
        cursor.execute("SET time_zone = '+00:00'")
        insert(cursor, aggregate_id, version, create_time=f"2026-01-01 00:00:{second:02}")
        cursor.connection.commit()


def test_a12_from_a_time_exactly_the_events_after_it_with_a_gap_directly_above(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create_table(database)
    publisher = new_publisher(database, read={"start": "2026-01-01T00:00:10Z"})
    for version, second in ((1, 1), (2, 10), (3, 11), (4, 12)):
        commit_at(database, "across", version, second)
    commit_at(database, "before", 1, 9)
    commit_at(database, "after", 1, 11)
    for version, second in ((1, 1), (2, 5), (4, 12)):
        commit_at(database, "gap", version, second)
    for version, second in ((1, 1), (2, 11), (3, 9), (4, 12)):
        commit_at(database, "inverted", version, second)
    publisher.start()
    publisher.until_published("after", [1])
    commit_at(database, "gap", 3, 11)
    publisher.until_published("gap", [3, 4])
    assert publisher.stop() == 143
    assert publisher.topic.versions("across") == [3, 4]
    assert publisher.topic.versions("inverted") == [2, 4]
    assert publisher.topic.versions("before") == []
    assert publisher.gaps.read() == []


def test_a12_from_now_and_the_start_stays_where_it_was(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create_table(database)
    publisher = new_publisher(database, read={"start": "now"})
    with transaction(database) as cursor:
        insert(cursor, "old", 1)
        insert(cursor, "both", 1)
        cursor.connection.commit()
    time.sleep(0.1)
    publisher.publish_everything()
    with transaction(database) as cursor:
        insert(cursor, "both", 2)
        insert(cursor, "new", 1)
        cursor.connection.commit()
    publisher.publish_everything()
    assert {(r.key, r.version) for r in publisher.topic.read()} == {("both", 2), ("new", 1)}


def test_a12_a_gap_directly_above_the_start_is_skipped_and_a_restart_keeps_the_start(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """What lies at or before the start is never missed, also where the configured start moves."""
    create_table(database)
    publisher = new_publisher(database, read={"start": "2026-01-01T00:00:10Z"})
    for version, second in ((1, 1), (2, 10), (4, 11), (5, 12)):
        commit_at(database, "gap", version, second)
    commit_at(database, "new", 2, 11)  # no baseline: its first version is missing
    commit_at(database, "before", 1, 10)
    publisher.publish_everything()
    assert publisher.topic.versions("gap") == [4, 5]
    assert publisher.topic.versions("new") == [2]
    found = [json.loads(r.value) for r in publisher.gaps.read() if r.value]
    skipped = {(g["aggregate_id"], g["from_version"], g["to_version"]) for g in found}
    assert skipped == {("gap", 3, 3), ("new", 1, 1)}

    publisher.settings["read"]["start"] = "beginning"
    with transaction(database) as cursor:
        insert(cursor, "before", 2)
        cursor.connection.commit()
    publisher.publish_everything()
    assert "the first start stays in force" in publisher.words()
    assert publisher.topic.versions("before") == [2]
    assert publisher.topic.versions("gap") == [4, 5]
