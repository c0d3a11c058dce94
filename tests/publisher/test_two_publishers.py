"""Scenarios C4 and C8: somebody else publishes, or a worker wakes up too late."""

from __future__ import annotations

import shutil
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
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
from tests.publisher.harness import commit as commit_one


def commit(database: FreshDatabase, versions: range, aggregates: int = 20) -> None:
    """Several versions of several aggregates."""
    with transaction(database) as cursor:
        for version in versions:
            for number in range(aggregates):
                insert(cursor, f"a-{number}", version)
        cursor.connection.commit()


@contextmanager
def a_stream_of_events(database: FreshDatabase) -> Iterator[None]:
    """Twenty commits a second."""
    stop = threading.Event()

    def write() -> None:
        version = 0
        while not stop.wait(0.05):
            version += 1
            with transaction(database) as cursor:
                for number in range(10):
                    insert(cursor, f"stream-{number}", version)
                cursor.connection.commit()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def places(publisher: Publisher) -> set[tuple[int, int]]:
    """Partition and offset of every record that is visible."""
    return {(r.partition, r.offset) for r in publisher.topic.read()}


@pytest.mark.engines("threads", why="Spark repeats its task, which meets the other query and stops")
def test_c4_a_stalled_worker_wakes_up_after_its_shard_was_published_by_another(
    database: FreshDatabase, new_publisher: NewPublisher, tmp_path: Path
) -> None:
    """Its machine hangs before the commit; when it goes on, another has done the work."""
    create_table(database)
    # one shard: another would be stalled, too, and its error may be another one
    alone = {"shards": 1}
    first, successor = new_publisher(database, run=alone), new_publisher(database, run=alone)
    commit(database, range(1, 4))
    marker = tmp_path / "stalled.pid"
    first.start(environment={"EVENTPUB_FAILPOINT": f"before_commit:1:{marker}"})
    eventually(marker.exists)
    machine = first.family()
    assert int(marker.read_text()) in {process.pid for process in machine}
    for process in machine:
        process.suspend()

    successor.publish_everything()
    before = places(successor)
    assert not compare(database, successor.topic)

    Path(f"{marker}.go").touch()
    for process in machine:
        process.resume()
    first.until_said("sink.fenced")
    assert places(successor) == before
    commit(database, range(4, 6))
    first.until_published("a-1", [1, 2, 3, 4, 5])
    assert first.stop() == 143
    differences = compare(database, first.topic)
    assert not differences, differences


def test_c8_of_two_publishers_with_one_application_id_the_older_one_stops(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """On two state directories they are told apart by the topic, which stays as it must be.

    Workers that are killed between their commits, and their successors, are not another publisher.
    """
    create_table(database)
    first, second = (new_publisher(database, spark={"master": "local[*]"}) for _ in range(2))
    with a_stream_of_events(database):
        first.start()
        first.until_spark_publishes()
        time.sleep(20.0)
        for _ in range(5):
            for worker in eventually(first.workers):
                with suppress(psutil.NoSuchProcess):
                    worker.kill()
            time.sleep(1.5)
        assert first.process is not None
        assert first.process.poll() is None, first.words()

        second.start()
        assert first.finish(240) == 3
        assert "sink.other_query" in first.words()
        assert "only one publisher" in first.words()
        time.sleep(3.0)
        assert second.process is not None
        assert second.process.poll() is None, second.words()
    assert second.stop() == 143
    second.publish_everything()
    differences = compare(database, second.topic)
    assert not differences, differences


@pytest.mark.engines("here", why="the engine threads folds after each loss of a shard")
def test_c8_a_start_on_a_copy_of_the_state_takes_over_from_the_original(
    database: FreshDatabase, new_publisher: NewPublisher, tmp_path: Path
) -> None:
    """As after a snapshot of its machine: both have the same query, and batches of one number.

    The original has decided one without the rows that the copy publishes under its number.
    """
    create_table(database)
    alike = {"run": {"shards": 2}, "state": {"location": "shared"}}  # from where each runs
    original, copy = (new_publisher(database, **alike) for _ in range(2))
    a, b = (next(n for n in map(str, range(99)) if zlib.crc32(n.encode()) % 2 == k) for k in (0, 1))
    commit_one(database, a, 1)
    original.publish_everything()
    stalled = tmp_path / "stalled.pid"
    original.start(environment={"EVENTPUB_FAILPOINT": f"before_commit:1:{stalled}"})
    original.until_spark_publishes()
    [process] = original.family()
    process.suspend()
    for folder in ("state", "shared"):
        ignored = shutil.ignore_patterns("*.sock", "*.new")
        shutil.copytree(original.folder / folder, copy.folder / folder, ignore=ignored)
    process.resume()
    commit_one(database, a, 2)
    eventually(stalled.exists)
    commit_one(database, b, 1)

    copy.publish_everything()
    before = places(copy)
    assert len(before) == 3
    assert "new checkpoint" not in copy.words()
    Path(f"{stalled}.go").touch()
    commit_one(database, a, 3)
    assert original.finish(60) == 3
    assert "sink.other_query" in original.words()
    assert places(copy) == before

    original.publish_everything()
    copy.publish_everything()
    differences = compare(database, copy.topic)
    assert not differences, differences
