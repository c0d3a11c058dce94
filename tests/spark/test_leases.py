"""Spark comes up, is lost and comes up again, whatever goes wrong on the way."""

from __future__ import annotations

import os
import queue
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from eventpub.channel.flight import Address
from eventpub.config import App, Config, Run, Sink, Store
from eventpub.config import Spark as SparkSection
from eventpub.coordinator import events as e
from eventpub.errors import StateError
from eventpub.publisher.placement import Placement
from eventpub.spark import leases, session
from eventpub.spark.jvm import find_java
from eventpub.spark.leases import Spark

_UP, _LOST = "up", "lost"

_NOT_SECOND = """#!/bin/sh
[ "$1" = -version ] && exec {java} "$@"
echo >>{starts}
if [ "$(wc -l <{starts})" -eq 2 ]; then
  echo "Could not reserve enough space for object heap" >&2
  exit 1
fi
exec {java} "$@"
"""


@contextmanager
def coming_up(
    folder: Path, master: str, properties: dict[str, str] | None = None
) -> Iterator[tuple[Spark, queue.SimpleQueue[Any]]]:
    """A Spark, and what is heard of it: `_UP`, `_LOST`, events."""
    config = Config(
        app=App(id="restarts", state_dir=folder),
        store=Store.model_validate({"url": "mysql+pymysql://nobody@localhost/none"}),
        sink=Sink(topic="none"),
        run=Run(shards=1),
        spark=SparkSection(
            master=master,
            properties={
                "spark.driver.host": "127.0.0.1",
                "spark.driver.bindAddress": "127.0.0.1",
                "spark.executor.memory": "512m",
                **(properties or {}),
            },
        ),
    )
    heard: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def changed(placement: Placement | None) -> None:
        heard.put(_LOST if placement is None else _UP)

    spark = Spark(config, folder / "spark.log", Address("grpc://nowhere:1", ""), heard.put, changed)
    spark.begin()
    try:
        yield spark, heard
    finally:
        spark.end(60.0)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is started again soon."""
    monkeypatch.setattr(leases, "_FIRST_WAIT", 0.05)


def failure(heard: queue.SimpleQueue[Any]) -> StateError:
    """Why Spark has not come up, which is heard next."""
    event = heard.get(timeout=120)
    assert isinstance(event, e.Failed), event
    assert isinstance(event.command, e.StartSpark)
    assert isinstance(event.error, StateError)
    return event.error


def java_at(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program in the place of Java."""
    program = folder / "jdk" / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(text)
    program.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(folder / "jdk"))


def fail_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: Exception) -> None:
    """The first call raises."""
    real, errors = getattr(owner, name), [error]

    def call(*given: Any, **named: Any) -> Any:
        if errors:
            raise errors.pop()
        return real(*given, **named)

    monkeypatch.setattr(owner, name, call)


def test_a_full_disk_at_its_start_is_waited_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that starts it ended, and nobody ever tried again."""
    java_at(tmp_path, "#!/bin/sh\necho no heap >&2\nexit 1\n", monkeypatch)
    fail_once(monkeypatch, tempfile, "mkdtemp", OSError(28, "No space left on device"))
    with coming_up(tmp_path, "local[1]") as (_, heard):
        first, second = failure(heard), failure(heard)
    assert first.code == second.code == "spark.start_failed"
    assert "No space left" in first.message
    assert "no heap" in second.message, "it was tried again"
    assert first.retriable
    assert second.retriable, "threads publish"


def test_without_java_there_is_no_use_in_trying(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with coming_up(tmp_path, "local[1]") as (_, heard):
        error = failure(heard)
    assert error.code == "spark.java_missing"
    assert not error.retriable


def test_one_that_is_lost_comes_back_though_its_first_restarts_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory at the second start, no Java at the third, in the middle of its upgrade."""
    script = _NOT_SECOND.format(java=find_java(), starts=tmp_path / "starts")
    java_at(tmp_path, script, monkeypatch)
    with coming_up(tmp_path, "local[1]") as (spark, heard):
        assert heard.get(timeout=120) == _UP
        kill_jvm(spark)
        assert heard.get(timeout=30) == _LOST
        missing = StateError("spark.java_missing", "no Java")
        error = failure(heard)
        fail_once(monkeypatch, session, "Jvm", missing)
        assert error.code == "spark.start_failed"
        assert "Could not reserve enough space" in error.message
        assert error.retriable
        error = failure(heard)
        assert error.code == "spark.java_missing"
        assert error.retriable, "it was there before"
        assert heard.get(timeout=120) == _UP


def test_the_driver_of_a_cluster_comes_back_too(tmp_path: Path) -> None:
    """pyspark starts its JVM, and kept the connection to one that had died."""
    with coming_up(tmp_path, "local-cluster[1,1,512]") as (spark, heard):
        assert heard.get(timeout=120) == _UP
        kill_jvm(spark)
        assert heard.get(timeout=30) == _LOST
        assert heard.get(timeout=120) == _UP


def test_a_wrong_master_is_said_and_tried_again(tmp_path: Path) -> None:
    with coming_up(tmp_path, "spork://nowhere:1") as (_, heard):
        for _ in range(2):
            error = failure(heard)
            assert error.code == "spark.start_failed"
            assert error.where == "spark.master = spork://nowhere:1"
            assert "Master must" in error.message
            assert error.retriable


def test_what_spark_says_of_its_settings_is_said_though_its_jvm_is_ended(tmp_path: Path) -> None:
    """Its exception asks the JVM what to say: that was one that nobody expected."""
    with coming_up(tmp_path, "local[1]", {"spark.port.maxRetries": "many"}) as (_, heard):
        for _ in range(2):
            error = failure(heard)
            assert error.where == "spark.master = local[1]"
            assert "many" in error.message
            assert error.retriable


def kill_jvm(spark: Spark) -> None:
    """As where the machine has no memory left."""
    context: Any = spark._context
    os.kill(context._jvm.java.lang.ProcessHandle.current().pid(), 9)
