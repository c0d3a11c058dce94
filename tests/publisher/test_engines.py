"""`eventpub run` with the engine spark on real servers, and the change between engines."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any

import psutil
import pytest

from tests.conftest import FreshDatabase
from tests.publisher.conftest import NewPublisher
from tests.publisher.harness import Publisher, commit, create_table, eventually

SPARK: dict[str, dict[str, Any]] = {
    "run": {"engine": "spark", "shards": 2},
    "spark": {"master": "local[2]"},
}
READ = {"delay": "200ms", "watermark": "off"}

pytestmark = pytest.mark.alone


def engine(publisher: Publisher, name: str) -> None:
    """The engine of the next start."""
    publisher.settings["run"]["engine"] = name


def test_either_engine_goes_on_where_the_other_was_killed(
    new_publisher: NewPublisher, database: FreshDatabase
) -> None:
    create_table(database)
    publisher = new_publisher(database, read=READ, **SPARK)
    del publisher.settings["spark"]["master"]
    expected = []
    for number, name in enumerate(("threads", "spark", "threads", "spark"), 1):
        engine(publisher, name)
        publisher.start()
        commit(database, "a", number)
        commit(database, f"only-{number}", 1)
        expected += [("a", number), (f"only-{number}", 1)]
        publisher.until_published("a", [*range(1, number + 1)], timeout=180)
        commit(database, "b", number)
        expected.append(("b", number))
        publisher.kill()
    engine(publisher, "spark")
    assert publisher.command("run", "--available-now", timeout=240).returncode == 0
    found = [(r.key, r.version) for r in publisher.topic.read()]
    assert sorted(found) == sorted(expected)
    assert [v for a, v in found if a == "a"] == [1, 2, 3, 4]
    assert publisher.command("verify").returncode == 0


def test_status_requests_and_pause_are_answered(
    new_publisher: NewPublisher, database: FreshDatabase
) -> None:
    create_table(database)
    gaps = {"backoff_base": "10s", "max_backoff": 8}
    publisher = new_publisher(database, read=READ, gaps=gaps, **SPARK)
    commit(database, "a", 1)
    commit(database, "a", 3)
    publisher.start()
    publisher.until_published("a", [1], timeout=180)

    def status() -> dict[str, Any]:
        found = publisher.command("status", "--json")
        result: dict[str, Any] = json.loads(found.stdout)["result"]["status"]
        return result

    eventually(lambda: status()["holds_open"] == 1)
    found = status()
    assert found["engine"] == "spark"
    assert str(found["spark_ui"]).startswith("http")
    listed = publisher.command("gaps", "list", "--json")
    assert "a" in listed.stdout, listed.stdout + listed.stderr
    skipped = publisher.command("gaps", "skip", "a", "--yes", "--json")
    assert json.loads(skipped.stdout)["ok"], skipped.stdout
    publisher.until_published("a", [1, 3])
    assert publisher.command("pause").returncode == 0
    refused = json.loads(publisher.command("gaps", "retry", "a", "--json").stdout)
    assert refused["error"]["code"] == "run.paused", refused
    assert "eventpub resume" in refused["error"]["suggestion"]
    commit(database, "b", 1)
    time.sleep(3)
    assert not [r for r in publisher.topic.read() if r.key == "b"]
    assert publisher.command("resume").returncode == 0
    publisher.until_published("b", [1])
    assert "the query failed" not in publisher.log.read_text(), "it begins in the same session"
    began = time.monotonic()
    assert publisher.stop() == 143
    assert time.monotonic() - began < 60
    warned = (publisher.state / "spark.log").read_text(errors="replace")
    assert "falling behind" not in warned, "a line for each longer batch fills the disk"


def test_a_spark_that_dies_is_started_again_and_a_frozen_one_keeps_nobody_from_stopping(
    new_publisher: NewPublisher, database: FreshDatabase
) -> None:
    create_table(database)
    publisher = new_publisher(database, read=READ, **SPARK)

    def jvm() -> psutil.Process:
        [found] = [p for p in publisher.family() if p.name() == "java"]
        return found

    publisher.start()
    commit(database, "a", 1)
    publisher.until_published("a", [1], timeout=180)
    jvm().kill()  # as when memory runs out
    commit(database, "a", 2)
    publisher.until_published("a", [1, 2], timeout=180)
    assert "Spark's process has ended" in publisher.log.read_text()
    frozen = jvm()
    frozen.suspend()
    try:
        time.sleep(2)
        began = time.monotonic()
        assert publisher.stop() == 143
        assert time.monotonic() - began < 20
        assert not frozen.is_running() or frozen.status() == psutil.STATUS_ZOMBIE
    finally:
        with suppress(psutil.NoSuchProcess):
            frozen.resume()
    commit(database, "a", 3)
    publisher.start()
    publisher.until_published("a", [1, 2, 3], timeout=180)
    eventually(lambda: publisher.command("verify").returncode == 0)


@pytest.mark.parametrize("first", ["threads", "spark"])
def test_who_takes_over_with_another_state_owns_the_topic(
    new_publisher: NewPublisher, database: FreshDatabase, first: str
) -> None:
    """Each engine stops where a publisher of the other one has begun with its id."""
    create_table(database)
    create = new_publisher(database, read=READ, **SPARK)
    other = Publisher(
        create.folder / "other",
        create.settings["store"]["url"],
        create.settings["sink"]["topic"],
        create.settings["sink"]["bootstrap_servers"],
        {"read": READ, "app": {"id": create.settings["app"]["id"]}, **SPARK},
    )
    create.settings["spark"], other.settings["spark"] = {}, {}
    with other:
        engine(create, first)
        engine(other, "spark" if first == "threads" else "threads")
        commit(database, "a", 1)
        create.start()
        create.until_published("a", [1], timeout=180)
        other.start()
        version = 1

        def has_stopped() -> bool:
            nonlocal version
            version += 1
            commit(database, "a", version)
            assert create.process is not None
            return create.process.poll() is not None

        eventually(has_stopped, 180, every=0.5)
        assert "sink.other_query" in create.log.read_text()
        other.until_published("a", [*range(1, version + 1)])
        assert other.command("verify").returncode in {0, 1}
        other.stop()
        create.start()  # takes it back, from what the other one has published
        version += 1
        commit(database, "a", version)
        create.until_published("a", [*range(1, version + 1)], timeout=180)
        found = [r.version for r in create.topic.read() if r.key == "a"]
        assert found == [*range(1, version + 1)]
