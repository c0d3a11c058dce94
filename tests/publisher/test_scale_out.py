"""Scenario C12: a cluster's executors die while shards move between them.

Once on Spark's own cluster in one process tree (`local-cluster`), once on a standalone cluster of
two workers, one of which dies for good. State is also lost: the index of a shard is removed with
its executor, as where each executor has a disk of its own.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.cluster import SHARDS, Standalone, kill
from eventpub.ops.asking import ask_running
from eventpub.state import StateDir
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

TURNS = 2
RUN = {"shards": SHARDS}
SPARK = {
    "properties": {
        "spark.executor.memory": "512m",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
    },
}


def commit(database: FreshDatabase, version: int) -> None:
    """The next version of many aggregates, and some that come once."""
    with transaction(database) as cursor:
        for number in range(40):
            insert(cursor, f"a-{number}", version)
            insert(cursor, f"once-{version}-{number}", 1)
        cursor.connection.commit()


def executors(parents: Sequence[psutil.Process]) -> list[psutil.Process]:
    """The JVMs of executors below these processes."""
    found = {}
    for parent in parents:
        with suppress(psutil.Error):
            for process in parent.children(recursive=True):
                with suppress(psutil.Error):
                    if "CoarseGrainedExecutorBackend" in " ".join(process.cmdline()):
                        found[process.pid] = process
    return list(found.values())


def lose_index(publisher: Publisher, shard: int) -> None:
    """As if it had lain on the disk of a machine that is gone."""
    shutil.rmtree(publisher.state / "index" / f"{SHARDS}-shards" / str(shard), ignore_errors=True)


def publish_while_executors_die(
    publisher: Publisher, database: FreshDatabase, parents: list[psutil.Process]
) -> None:
    """Again and again: new events, an executor dies, the index of a shard is lost."""
    commit(database, 1)
    publisher.until_published("a-39", [1])
    for turn in range(TURNS):
        version = turn + 2
        victims = eventually(lambda: executors(parents), 120)
        commit(database, version)
        time.sleep(0.3 * turn)
        kill(victims[turn % len(victims)])
        lose_index(publisher, turn % SHARDS)
        publisher.until_published("a-39", list(range(1, version + 1)))
    # one aggregate tells of its shard; the others may be with executors that have just begun
    eventually(lambda: not compare(database, publisher.topic), 60)
    assert publisher.stop() == 143
    differences = compare(database, publisher.topic)
    assert not differences, differences


@pytest.mark.long
def test_c12_executors_of_a_local_cluster_are_killed(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create_table(database)
    publisher = new_publisher(
        database, spark=SPARK | {"master": "local-cluster[2,1,512]"}, run=RUN, channel=HERE
    )
    publisher.start()
    assert publisher.process is not None
    publish_while_executors_die(publisher, database, [psutil.Process(publisher.process.pid)])


HERE = {"host": "127.0.0.1"}


@pytest.fixture
def standalone(tmp_path: Path) -> Iterator[Standalone]:
    """A cluster whose workers see the publisher's disk."""
    with Standalone(tmp_path, cores=2) as cluster:
        yield cluster


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Standalone]:
    """As `standalone`, but nobody sees another's state directory."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("to hide a folder from a process needs root and unshare(1)")
    state = tmp_path / "publisher-0" / "state"
    state.mkdir(parents=True)
    with Standalone(tmp_path, hidden=state) as cluster:
        yield cluster


def test_c12_executors_and_a_worker_of_a_standalone_cluster_are_killed(
    database: FreshDatabase,
    new_publisher: NewPublisher,
    standalone: Standalone,
) -> None:
    url, workers = standalone.url, standalone.workers
    create_table(database)
    publisher = new_publisher(database, spark=SPARK | {"master": url}, run=RUN, channel=HERE)
    publisher.start()
    commit(database, 1)
    publisher.until_published("a-39", [1])
    kill(workers[0])
    commit(database, 2)
    publisher.until_published("a-39", [1, 2])
    for version in (3, 4):
        (victim, *_) = eventually(lambda: executors(workers[1:]), 120)
        commit(database, version)
        kill(victim)
        lose_index(publisher, version % SHARDS)
        publisher.until_published("a-39", list(range(1, version + 1)))
    # one aggregate tells of its shard; the others may be with executors that have just begun
    eventually(lambda: not compare(database, publisher.topic), 60)
    assert publisher.stop() == 143
    differences = compare(database, publisher.topic)
    assert not differences, differences


@pytest.mark.long
def test_the_lag_of_a_cluster_is_that_of_what_its_executors_have_not_published(
    database: FreshDatabase, new_publisher: NewPublisher, standalone: Standalone
) -> None:
    """They are stopped, not ended: nothing tells the publisher but that the lag grows."""
    create_table(database)
    publisher = new_publisher(
        database, spark=SPARK | {"master": standalone.url}, run=RUN, channel=HERE
    )
    publisher.start()
    commit(database, 1)
    publisher.until_published("a-39", [1])
    publisher.until_spark_publishes()

    def status() -> dict[str, Any]:
        return eventually(lambda: ask_running(StateDir(publisher.state), "status") or {}, 30)

    eventually(lambda: status()["lag"]["seconds"] == 0, 60)
    places = {shard["where"] for shard in status()["shards"]}
    assert "" not in places
    assert "this process" not in places, places
    stopped = executors(standalone.workers)
    assert stopped
    for process in stopped:
        for each in [process, *process.children(recursive=True)]:
            each.suspend()
    try:
        commit(database, 2)
        began = time.monotonic()
        lags = []
        while time.monotonic() - began < 6:
            lags.append(status()["lag"]["seconds"])
            time.sleep(0.5)
        assert lags[-1] > 3, lags
        assert lags[3:] == sorted(lags[3:]), lags
    finally:
        for process in stopped:
            for each in [process, *process.children(recursive=True)]:
                each.resume()
    publisher.until_published("a-39", [1, 2])
    eventually(lambda: status()["lag"]["seconds"] == 0, 60)
    assert publisher.stop() == 143
    differences = compare(database, publisher.topic)
    assert not differences, differences


def test_f13_a_machine_that_is_new_to_a_shard_takes_a_copy_of_its_index(
    database: FreshDatabase,
    new_publisher: NewPublisher,
    apart: Standalone,
    tmp_path: Path,
) -> None:
    """Machines that share no disk; one is lost for good, with the executors and indexes on it."""
    url, workers = apart.url, apart.workers
    create_table(database)
    state = {"snapshots": str(tmp_path / "snapshots"), "snapshot_every": "1s"}
    publisher = new_publisher(
        database, spark=SPARK | {"master": url}, state=state, run=RUN, channel=HERE
    )
    publisher.start()
    for version in range(1, 11):
        commit(database, version)
    publisher.until_published("a-39", list(range(1, 11)))
    publisher.until_spark_publishes()
    copies = tmp_path / "snapshots"
    eventually(lambda: len({f.parent.parent for f in copies.rglob("complete.json")}) == SHARDS, 120)
    for victim in executors(workers[:1]):
        kill(victim)
    kill(workers[0])
    commit(database, 11)
    publisher.until_published("a-39", list(range(1, 12)))
    eventually(lambda: not compare(database, publisher.topic), 60)
    held = publisher.command("gaps", "list", "--json")
    assert '"open": []' in held.stdout, held.stdout
    assert publisher.stop() == 143
    differences = compare(database, publisher.topic)
    assert not differences, differences
    assert ": fetched a copy" in publisher.log.read_text()
