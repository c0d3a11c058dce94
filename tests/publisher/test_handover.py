"""Threads publish until Spark's tasks do: prompt, once, and without a seam between them."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

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
from tests.publisher.test_crashes import assert_whole, commit_some, stop_when_whole

SPARK = {"master": "local[*]"}

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
    jvm = jvm_of(publisher)
    jvm.suspend()
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            jvm.resume()


def jvm_of(publisher: Publisher) -> psutil.Process:
    """Spark's JVM, as soon as there is one."""

    def found() -> psutil.Process | None:
        submit = "org.apache.spark.deploy.SparkSubmit"  # not `java -version`
        with suppress(psutil.NoSuchProcess):
            return next((p for p in publisher.family() if submit in p.cmdline()), None)
        return None

    jvm = eventually(found, every=0.01)
    assert jvm is not None
    return jvm


def test_events_are_published_before_spark_runs_and_by_spark_afterwards(
    new_publisher: NewPublisher, database: FreshDatabase
) -> None:
    create_table(database)
    publisher = new_publisher(database, gaps={"backoff_base": "1s"}, spark=SPARK)
    commit_some(database, range(1, 3))
    publisher.start()
    with stalled(publisher):
        publisher.until_published("a-3", [1, 2])
        commit_some(database, range(3, 5))
        commit_some(database, range(6, 7))  # a gap, held by a thread
        publisher.until_published("a-3", [1, 2, 3, 4])
        assert publisher.workers() == []
    publisher.until_spark_publishes()
    commit_some(database, range(5, 6))
    publisher.until_published("a-3", [1, 2, 3, 4, 5, 6])
    commit_some(database, range(7, 8))
    publisher.until_published("a-3", [1, 2, 3, 4, 5, 6, 7])
    stop_when_whole(database, publisher)
    assert publisher.gaps.read() == []
    assert "published 140 events" in publisher.words()


def test_killed_at_each_step_in_threads(
    publisher: Publisher, database: FreshDatabase, tmp_path: Path
) -> None:
    for number, step in enumerate(STEPS):
        commit_some(database, range(number * 2 + 1, number * 2 + 3))
        marker = tmp_path / f"{step}.pid"
        publisher.start(environment={"EVENTPUB_FAILPOINT": f"{step}:1:{marker}"})
        eventually(marker.exists, 60)
        assert publisher.process is not None
        assert int(marker.read_text()) == publisher.process.pid
        publisher.kill()
    last = len(STEPS) * 2 + 1
    commit_some(database, range(last, last + 1))
    publisher.start()
    publisher.until_published("a-3", [*range(1, last + 1)])
    stop_when_whole(database, publisher)


def test_a_backlog_is_published_before_spark_runs_and_by_spark_afterwards(
    new_publisher: NewPublisher, database: FreshDatabase
) -> None:
    """Full pages are on their way while the shards change hands."""
    create_table(database)
    commit_some(database, range(1, 31))
    publisher = new_publisher(database, read={"page_rows": 10}, spark=SPARK)
    publisher.start()
    with stalled(publisher):
        publisher.until_published("a-3", [*range(1, 31)])
    with transaction(database) as cursor:
        for version in range(31, 331):
            for number in range(20):
                insert(cursor, f"a-{number}", version)
        cursor.connection.commit()
    publisher.until_spark_publishes()
    publisher.until_published("a-3", [*range(1, 331)])
    stop_when_whole(database, publisher)


def test_without_its_jvm_threads_publish_until_spark_is_back(
    new_publisher: NewPublisher, database: FreshDatabase
) -> None:
    create_table(database)
    publisher = new_publisher(database, spark=SPARK)
    commit_some(database, range(1, 3))
    publisher.start()
    publisher.until_spark_publishes()
    jvm_of(publisher).kill()
    commit_some(database, range(3, 5))
    publisher.until_published("a-3", [1, 2, 3, 4], timeout=30)
    publisher.until_spark_publishes()
    commit_some(database, range(5, 7))
    publisher.until_published("a-3", [1, 2, 3, 4, 5, 6])
    stop_when_whole(database, publisher)


_BROKEN = """#!{python}
import sys
from eventpub.channel import Farewell, Hello
from eventpub.channel.flight import FlightLink
from eventpub.cli import main
from eventpub.errors import StateError
from eventpub.spark import leases

def run_task(assignment, address, attempt, shards):
    for shard in shards:
        link = FlightLink(address, Hello(shard, assignment.run, "a broken node", attempt))
        link.lease()
        link.send(Farewell(StateError("index.not_writable", "the index cannot be written")))
        link.close()
        yield shard

leases.run_task = run_task
sys.exit(main())
"""


def test_where_tasks_fail_that_threads_would_not_threads_publish(
    new_publisher: NewPublisher, database: FreshDatabase, tmp_path: Path
) -> None:
    """The disk of a node is read-only, say: the publisher ended, and again after each restart."""
    create_table(database)
    program = tmp_path / "eventpub"
    program.write_text(_BROKEN.format(python=sys.executable))
    program.chmod(0o755)
    publisher = new_publisher(database, spark=SPARK)
    publisher.program = str(program)
    commit_some(database, range(1, 3))
    publisher.start()
    publisher.until_said("a thread of this process publishes it")
    publisher.until_said("a broken node")
    commit_some(database, range(3, 5))
    publisher.until_published("a-3", [1, 2, 3, 4], timeout=20)
    stop_when_whole(database, publisher)


def test_f12_sigterm_while_the_jvm_starts_does_not_wait_for_it(
    new_publisher: NewPublisher, database: FreshDatabase
) -> None:
    create_table(database)
    publisher = new_publisher(database, spark=SPARK)
    commit_some(database, range(1, 3))
    publisher.start()
    with stalled(publisher):
        eventually(lambda: not compare(database, publisher.topic))
        assert publisher.stop(timeout=30) == 143
        assert publisher.family() == []
    assert_whole(database, publisher)


def test_f12_sigterm_while_a_start_waits_for_a_broker_that_says_nothing(
    new_publisher: NewPublisher, database: FreshDatabase
) -> None:
    """The start gives up after 10 s, with an error; whoever asks it to stop does not wait."""
    create_table(database)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        publisher = new_publisher(database, sink={"bootstrap_servers": address})
        publisher.start()
        silent.settimeout(60)
        silent.accept()
        assert publisher.stop(timeout=8) == 143
