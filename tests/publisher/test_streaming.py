"""Runners go on while rows keep coming; nothing that comes in between is forgotten for it."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

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

SPARK: dict[str, object] = {"master": "local[*]"}


@contextmanager
def steady_writer(database: FreshDatabase) -> Iterator[None]:
    """An event about every 20 ms, each of an aggregate of its own."""
    done = threading.Event()

    def write() -> None:
        with transaction(database) as cursor:
            number = 0
            while not done.wait(0.02):
                insert(cursor, f"steady-{number}", 1)
                cursor.connection.commit()
                number += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        done.set()
        writer.join()


def started(
    database: FreshDatabase, new_publisher: NewPublisher, **sections: dict[str, object]
) -> Publisher:
    """A publisher whose windows end 50 ms before the present, whatever is open."""
    create_table(database)
    read = {"delay": "50ms", "watermark": "off"}
    publisher = new_publisher(database, read=read, **sections)
    publisher.start()
    publisher.until_spark_publishes()
    return publisher


def assert_whole(database: FreshDatabase, publisher: Publisher) -> None:
    """After another run, everything is on the topic."""
    publisher.publish_everything()
    differences = compare(database, publisher.topic)
    assert not differences, differences


def test_the_position_is_kept_while_events_stream(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    publisher = started(database, new_publisher)

    def position() -> int:
        return int(json.loads((publisher.state / "progress.json").read_text())["position"])

    with steady_writer(database):
        publisher.until_published("steady-0", [1])
        began = (datetime.now(UTC) - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() * 1e6
        eventually(lambda: position() > began, 30, every=0.05)
        assert publisher.stop() == 143


def test_what_comes_late_or_is_requested_is_done_while_events_stream(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    publisher = started(database, new_publisher, gaps={"backoff_base": "60s"})
    with steady_writer(database), transaction(database) as late, transaction(database) as cursor:
        insert(late, "late", 1)
        insert(cursor, "gap", 2)
        cursor.connection.commit()
        publisher.until_published("steady-50", [1])

        # behind the window, and nothing will ever show that it is missing
        late.connection.commit()
        publisher.until_published("late", [1])

        # a hold whose next attempt is a minute away
        asked = time.monotonic()
        skipped = publisher.command("gaps", "skip", "gap", "--yes")
        assert skipped.returncode == 0, skipped.stderr
        publisher.until_published("gap", [2])
        assert time.monotonic() - asked < 60
        assert publisher.stop() == 143
    assert_whole(database, publisher)


def test_what_is_skipped_while_events_stream_is_said_soon(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    publisher = started(database, new_publisher)
    with steady_writer(database):
        with transaction(database) as cursor:
            insert(cursor, "gap", 2)
            cursor.connection.commit()
        publisher.until_published("gap", [2])
        publisher.until_said("gap skipped", 5)
        assert publisher.stop() == 143


def test_what_a_killed_worker_has_published_counts(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """But for what it had not reported, which the next one reads back from the topic."""
    publisher = started(database, new_publisher, spark=SPARK)
    with steady_writer(database):
        publisher.until_published("steady-100", [1])
        workers = publisher.workers()
        assert workers
        for worker in workers:
            worker.kill()
        publisher.until_published("steady-300", [1])
    publisher.until_published("steady-299", [1])
    events = database.execute("SELECT COUNT(*) FROM events")[0][0]
    eventually(lambda: len(publisher.topic.follow()) == events)
    assert publisher.stop() == 143
    said = re.search(r"^published ([\d,]+) events", publisher.log.read_text(), re.MULTILINE)
    assert said, publisher.words()
    assert events - 20 <= int(said[1].replace(",", "")) <= events
    assert_whole(database, publisher)


def publish_one(database: FreshDatabase, publisher: Publisher, aggregate_id: str) -> None:
    """An event that must come out."""
    with transaction(database) as cursor:
        insert(cursor, aggregate_id, 1)
        cursor.connection.commit()
    publisher.until_published(aggregate_id, [1])


def test_idle_runners_wait_for_the_first_row_and_for_holds_that_are_due(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    publisher = started(database, new_publisher, gaps={"backoff_base": "20ms", "max_backoff": 8})
    for number in range(3):
        publish_one(database, publisher, f"seldom-{number}")
        time.sleep(1.5)
    with transaction(database) as late, transaction(database) as cursor:
        insert(late, "filled", 1)
        insert(cursor, "filled", 2)
        cursor.connection.commit()
        time.sleep(0.5)
        assert publisher.topic.versions("filled") == []
        late.connection.commit()
    publisher.until_published("filled", [1, 2])
    with transaction(database) as cursor:
        insert(cursor, "gap", 2)
        cursor.connection.commit()
    publisher.until_published("gap", [2])
    assert publisher.stop() == 143


def test_connections_that_were_closed_meanwhile_are_no_error(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """Servers and proxies close what is not used for a while."""
    publisher = started(database, new_publisher)
    publish_one(database, publisher, "one")
    time.sleep(6.0)
    idle = [
        number
        for (number,) in database.execute(
            "SELECT id FROM information_schema.processlist"
            " WHERE db = DATABASE() AND command = 'Sleep' AND time >= 5"
        )
    ]
    assert len(idle) >= 2, "of each shard"
    for number in idle:
        database.execute(f"KILL {number}")
    for number in range(8):
        publish_one(database, publisher, f"after-{number}")
    assert publisher.stop() == 143
    assert "waiting before a retry" not in publisher.log.read_text()
