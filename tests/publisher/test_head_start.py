"""While Spark starts the driver publishes: prompt, once, and without a seam to what comes after."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.conftest import FreshDatabase
from tests.publisher.conftest import NewPublisher
from tests.publisher.harness import Publisher, create_table, eventually
from tests.publisher.test_crashes import assert_whole, commit_some, stop_when_whole

STEPS = [
    "before_begin",
    "after_begin",
    "after_produce",
    "before_commit",
    "after_commit",
    "before_index",
    "after_index",
]


@contextmanager
def stalled(publisher: Publisher) -> Iterator[None]:
    """The JVM stands still."""

    def found() -> psutil.Process | None:
        submit = "org.apache.spark.deploy.SparkSubmit"  # not `java -version`
        with suppress(psutil.NoSuchProcess):
            return next((p for p in publisher.family() if submit in p.cmdline()), None)
        return None

    jvm = eventually(found, every=0.01)
    assert jvm is not None
    jvm.suspend()
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            jvm.resume()


def test_events_are_published_before_spark_runs_and_by_spark_afterwards(
    new_publisher: NewPublisher, database: FreshDatabase
) -> None:
    create_table(database)
    publisher = new_publisher(database, gaps={"backoff_base": "1s"})
    commit_some(database, range(1, 3))
    publisher.start()
    with stalled(publisher):
        publisher.until_published("a-3", [1, 2])
        commit_some(database, range(3, 5))
        commit_some(database, range(6, 7))  # a gap, held by the driver
        publisher.until_published("a-3", [1, 2, 3, 4])
        assert publisher.workers() == []
    eventually(publisher.workers, 120)
    commit_some(database, range(5, 6))
    publisher.until_published("a-3", [1, 2, 3, 4, 5, 6])
    commit_some(database, range(7, 8))
    publisher.until_published("a-3", [1, 2, 3, 4, 5, 6, 7])
    stop_when_whole(database, publisher)
    assert publisher.gaps.read() == []
    assert "published 140 events" in publisher.words()


def test_killed_at_each_step_of_the_head_start(
    publisher: Publisher, database: FreshDatabase, tmp_path: Path
) -> None:
    for number, step in enumerate(STEPS):
        commit_some(database, range(number * 2 + 1, number * 2 + 3))
        marker = tmp_path / f"{step}.pid"
        publisher.start(environment={"EVENTPUB_FAILPOINT": f"head_start.{step}:1:{marker}"})
        eventually(marker.exists, 60)
        assert publisher.process is not None
        assert int(marker.read_text()) == publisher.process.pid
        publisher.kill()
    last = len(STEPS) * 2 + 1
    commit_some(database, range(last, last + 1))
    publisher.start()
    publisher.until_published("a-3", [*range(1, last + 1)])
    stop_when_whole(database, publisher)


def test_a_backlog_is_left_to_spark(
    new_publisher: NewPublisher, database: FreshDatabase, tmp_path: Path
) -> None:
    create_table(database)
    commit_some(database, range(1, 3))
    publisher = new_publisher(database, read={"page_rows": 10})
    marker = tmp_path / "marker"
    publisher.start(environment={"EVENTPUB_FAILPOINT": f"head_start.before_begin:1:{marker}"})
    publisher.until_published("a-3", [1, 2])
    stop_when_whole(database, publisher)
    assert not marker.exists()


def test_f12_sigterm_while_the_jvm_starts_does_not_wait_for_it(
    new_publisher: NewPublisher, database: FreshDatabase
) -> None:
    create_table(database)
    publisher = new_publisher(database)
    commit_some(database, range(1, 3))
    publisher.start()
    with stalled(publisher):
        publisher.until_published("a-3", [1, 2])
        assert publisher.stop(timeout=30) == 143
        assert publisher.family() == []
    assert_whole(database, publisher)
