"""Tasks go on while rows keep coming; what waits for the end of their batch is not forgotten."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
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


def running_batch(publisher: Publisher) -> int | None:
    """The number of the micro-batch that Spark runs; None: none runs."""
    checkpoint = publisher.state / "checkpoint"
    offsets, commits = (
        max((int(path.name) for path in (checkpoint / log).glob("[0-9]*")), default=-1)
        for log in ("offsets", "commits")
    )
    return offsets if offsets > commits else None


def reached_beyond_its_window(publisher: Publisher) -> bool:
    """Whether an event is visible that was created after the end of the window that Spark runs."""
    return is_beyond_its_window(
        publisher,
        lambda: max(_micros(record.headers["ce_time"]) for record in publisher.topic.read()),
    )


def is_beyond_its_window(publisher: Publisher, moment: Callable[[], int]) -> bool:
    """Whether a moment, µs, lies behind the end of the window that Spark runs."""
    batch = running_batch(publisher)
    if batch is None:
        return False
    checkpoint = publisher.state / "checkpoint"
    lines = (checkpoint / "offsets" / str(batch)).read_text().splitlines()
    end = int(json.loads(lines[-1])["position"])
    later = moment() > end
    # the batch may have ended meanwhile, and another one have got there
    return later and not (checkpoint / "commits" / str(batch)).exists()


def until_it_follows(publisher: Publisher) -> None:
    """The steady writer's events are published, by tasks that go on behind their window."""
    publisher.until_published("steady-0", [1])
    eventually(lambda: reached_beyond_its_window(publisher), 120, every=0.05)


def _micros(text: bytes) -> int:
    since = datetime.fromisoformat(text.decode()) - datetime(1970, 1, 1, tzinfo=UTC)
    return round(since.total_seconds() * 1_000_000)


def test_the_position_is_kept_while_tasks_follow_the_boundary(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """A start, and who watches, know of it before the batch ends, which may take minutes."""
    publisher = started(database, new_publisher)

    def position() -> int:
        return int(json.loads((publisher.state / "progress.json").read_text())["position"])

    with steady_writer(database):
        until_it_follows(publisher)
        eventually(lambda: is_beyond_its_window(publisher, position), 60, every=0.05)
        assert publisher.stop() == 143


def test_what_waits_for_a_batch_is_done_while_tasks_follow_the_boundary(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    publisher = started(database, new_publisher, gaps={"backoff_base": "60s"})
    with steady_writer(database), transaction(database) as late, transaction(database) as cursor:
        insert(late, "late", 1)
        insert(cursor, "gap", 2)
        cursor.connection.commit()
        until_it_follows(publisher)

        # behind the window, and nothing will ever show that it is missing
        late.connection.commit()
        publisher.until_published("late", [1], 60)

        # a hold whose next attempt is a minute away
        eventually(lambda: reached_beyond_its_window(publisher), 120, every=0.05)
        asked = time.monotonic()
        skipped = publisher.command("gaps", "skip", "gap", "--yes")
        assert skipped.returncode == 0, skipped.stderr
        publisher.until_published("gap", [2], 60)
        assert time.monotonic() - asked < 60

        eventually(lambda: reached_beyond_its_window(publisher), 120, every=0.05)
        assert publisher.stop() == 143
    publisher.publish_everything()
    differences = compare(database, publisher.topic)
    assert not differences, differences


def test_a_recounts_find_is_published_by_the_tasks_that_follow(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    publisher = started(database, new_publisher)
    with steady_writer(database):
        until_it_follows(publisher)

        def is_found_within_a_batch(number: int) -> bool:
            eventually(lambda: reached_beyond_its_window(publisher), 120, every=0.05)
            with transaction(database) as late:
                insert(late, f"late-{number}", 1)
                time.sleep(1.0)  # its window has been read
                late.connection.commit()
            before = running_batch(publisher)
            publisher.until_published(f"late-{number}", [1], 60)
            return before is not None and running_batch(publisher) == before

        # on a busy machine a batch may end in between, because no event has come for a moment
        assert any(is_found_within_a_batch(number) for number in range(5))
        assert publisher.stop() == 143
    publisher.publish_everything()
    differences = compare(database, publisher.topic)
    assert not differences, differences


def test_what_a_killed_worker_has_published_counts(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """A task is done again with what the one before it has told of, but for its last window."""
    publisher = started(database, new_publisher)
    with steady_writer(database):
        until_it_follows(publisher)
        time.sleep(3.0)
        workers = publisher.workers()
        assert workers
        for worker in workers:
            worker.kill()
        publisher.until_published("steady-300", [1])
    publisher.until_published("steady-299", [1])
    events = database.execute("SELECT COUNT(*) FROM events")[0][0]
    eventually(lambda: len(publisher.topic.read()) == events, 60)
    assert publisher.stop() == 143
    said = re.search(r"^published ([\d,]+) events", publisher.log.read_text(), re.MULTILINE)
    assert said, publisher.words()
    assert events - 20 <= int(said[1].replace(",", "")) <= events


def until_a_gap_is_skipped(database: FreshDatabase, publisher: Publisher) -> None:
    """A version whose predecessor never comes is published, and what was skipped is said."""
    with transaction(database) as cursor:
        insert(cursor, "gap", 2)
        cursor.connection.commit()
    publisher.until_published("gap", [2], 60)
    publisher.until_said("gap skipped", 30)


def test_what_is_skipped_while_tasks_follow_is_said_soon(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """The line is written when the batch ends: without a reason it would not for minutes."""
    publisher = started(database, new_publisher)
    with steady_writer(database):
        until_it_follows(publisher)
        until_a_gap_is_skipped(database, publisher)
        assert publisher.stop() == 143


def resting_batch(publisher: Publisher) -> int:
    """The micro-batch whose tasks wait for what comes."""
    found: list[int | None] = []

    def stays() -> bool:
        found.append(running_batch(publisher))
        return found[-1] is not None and found[-25:] == found[-1:] * 25

    eventually(stays, 60)
    batch = found[-1]
    assert batch is not None
    return batch


def test_more_shards_than_cores_follow_side_by_side(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """A task that waits for another one to end would wait for minutes."""
    shards = 2 * (os.cpu_count() or 1)
    publisher = started(
        database, new_publisher, spark={"shards": shards}, sink={"partitions": shards}
    )

    def all_follow() -> bool:
        batch = running_batch(publisher)
        told = (publisher.state / "live" / f"{shard}.json" for shard in range(shards))
        found = [json.loads(file.read_text()) for file in told if file.exists()]
        of_this = [f["report"]["counts"]["rows"] for f in found if f["batch"] == batch]
        return len(of_this) == shards and all(of_this)

    with steady_writer(database):
        eventually(all_follow, 60)
        assert publisher.stop() == 143


def publish_one(database: FreshDatabase, publisher: Publisher, aggregate_id: str) -> None:
    """An event that must come out."""
    with transaction(database) as cursor:
        insert(cursor, aggregate_id, 1)
        cursor.connection.commit()
    publisher.until_published(aggregate_id, [1], 60)


def test_without_new_rows_tasks_wait_for_the_first_and_for_holds_that_are_due(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """A single event, hours after the one before, does not pay for a batch of its own."""
    publisher = started(database, new_publisher, gaps={"backoff_base": "20ms", "max_backoff": 8})
    batch = resting_batch(publisher)
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
    publisher.until_published("filled", [1, 2], 60)
    assert running_batch(publisher) == batch, "no other was needed"

    until_a_gap_is_skipped(database, publisher)
    assert publisher.stop() == 143


def test_connections_that_were_closed_meanwhile_are_no_error(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """Servers and proxies close what is not used for a while."""
    publisher = started(database, new_publisher)
    batch = resting_batch(publisher)
    publish_one(database, publisher, "one")
    time.sleep(6.0)
    resting = [
        number
        for (number,) in database.execute(
            "SELECT id FROM information_schema.processlist"
            " WHERE db = DATABASE() AND command = 'Sleep' AND time >= 5"
        )
    ]
    assert len(resting) >= 2, "of each shard"
    for number in resting:
        database.execute(f"KILL {number}")
    for number in range(8):
        publish_one(database, publisher, f"after-{number}")
    assert running_batch(publisher) == batch
    assert publisher.stop() == 143


def test_a_source_that_dies_does_not_leave_the_tasks_waiting(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    publisher = started(database, new_publisher)
    resting_batch(publisher)
    [source] = [
        process
        for process in publisher.family()
        if any("python_streaming_source_runner" in word for word in process.cmdline())
    ]
    source.kill()
    publish_one(database, publisher, "after")
    assert publisher.stop() == 143
