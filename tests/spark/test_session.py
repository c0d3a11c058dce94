"""What `eventpub run` asks of a cluster, and says while it does not get it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from pyspark import SparkContext

from eventpub.spark import session
from eventpub.spark.session import Watched
from tests.publisher.harness import eventually


@pytest.mark.parametrize(
    ("said", "cores"),
    [
        ("spark.app.name", {"spark.cores.max": "3"}),
        ("spark.cores.max", {}),
        ("spark.executor.cores", {}),  # Spark starts no part of an executor
        ("spark.task.cpus", {}),
    ],
)
def test_of_a_standalone_master_it_takes_a_core_for_each_shard(
    said: str, cores: dict[str, str]
) -> None:
    found = SimpleNamespace(contains=lambda name: name == said)
    assert session.of_standalone(found, 3) == cores


class Waiting:
    """A query in a batch, of which Spark knows no progress."""

    isActive = True  # noqa: N815 (Spark's name)
    lastProgress = None  # noqa: N815
    exception = Mock(return_value=None)

    def __init__(self, message: str) -> None:
        self.status = {"message": message}


class Context:
    """Spark's, of a cluster; `processes`: the driver and executors."""

    master = "spark://host:7077"
    processes = 1
    _jsc = property(lambda self: self)
    sc = getExecutorMemoryStatus = lambda self: self  # noqa: N815 (Spark's names)

    def size(self) -> int:
        return self.processes


def test_a_batch_that_gets_no_executor_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_ASKED_EVERY", 0.01)
    monkeypatch.setattr(session, "_EXECUTOR_WITHIN", 0.05)
    context = Context()
    watched = Watched(Waiting("Processing new data"), context, session.error_of)
    eventually(lambda: watched.lacks_executor, 5)
    context.processes = 2
    eventually(lambda: not watched.lacks_executor, 5)
    watched.query.isActive = False


def test_a_query_without_a_batch_needs_no_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Executors that are idle may be given back."""
    monkeypatch.setattr(session, "_ASKED_EVERY", 0.01)
    monkeypatch.setattr(session, "_EXECUTOR_WITHIN", 0.0)
    watched = Watched(Waiting("Waiting for data to arrive"), Context(), session.error_of)
    time.sleep(0.2)
    assert not watched.lacks_executor
    watched.query.isActive = False


class Process:
    """Spark's, frozen until it is killed."""

    def __init__(self) -> None:
        self.killed = threading.Event()
        self.kill, self.wait, self.stop = self.killed.set, Mock(), self.killed.wait
        self.proc, self.shutdown = self, Mock()
        self.sc = lambda: SimpleNamespace(isStopped=lambda: bool(self.killed.wait()))


def test_a_spark_that_freezes_while_it_stops_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a cluster the publisher's loop waited for it for ever, and took no signal."""
    monkeypatch.setattr(session, "_ANSWERS_WITHIN", 0.1)
    process: Any = Process()
    monkeypatch.setattr(SparkContext, "_gateway", process)
    monkeypatch.setattr(SparkContext, "_active_spark_context", process)
    asked: Any = SimpleNamespace(sparkContext=SimpleNamespace(_jsc=process))
    assert not session.is_alive(asked)
    session.end_session(kills=False)
    assert process.killed.is_set()
    assert SparkContext._active_spark_context is None


def test_a_cluster_is_left_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    process: Any = Process()
    process.stop = Mock()
    monkeypatch.setattr(SparkContext, "_gateway", process)
    monkeypatch.setattr(SparkContext, "_active_spark_context", process)
    session.end_session(kills=False)
    assert (process.stop.call_count, process.killed.is_set()) == (1, False)


def test_a_large_log_is_emptied_while_others_append_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It grew without end."""
    monkeypatch.setattr(session, "_LARGEST_LOG", 10)
    log, former = tmp_path / "spark.log", tmp_path / "spark.log.1"
    session.limit_log(log)
    with log.open("ab", buffering=0) as out:
        out.write(b"0123456789")
        session.limit_log(log)
        assert not former.exists()
        out.write(b"abcde")
        session.limit_log(log)
        out.write(b"later")
    assert (log.read_bytes(), former.read_bytes()) == (b"later", b"56789abcde")
