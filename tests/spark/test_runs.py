"""Which run a task belongs to: what `run.json` says, and who gives way to whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import structlog.testing

from eventpub.cli.output import as_error
from eventpub.config import App, Config, Sink, Store
from eventpub.errors import SinkError, StateError
from eventpub.spark.publisher import _foremost, _Publisher, _understood
from eventpub.spark.shard import Job, _ShardTask


def config_in(state: Path) -> Config:
    """A publisher's configuration with this state directory."""
    return Config(
        app=App(id="orders", state_dir=state),
        store=Store.model_validate({"url": "mysql+pymysql://u@h:1/d"}),
        sink=Sink(topic="events"),
    )


def start(state: Path, now: int) -> int:
    """The number of a run that starts now."""
    return _Publisher(config_in(state), False, lambda _: None)._begin_run(now)


def give_way(state: Path, run: int) -> None:
    """What a task of a run does once its sink is ready."""
    layout: Any = None
    task = object.__new__(_ShardTask)
    task._job = Job(config_in(state), layout, 1, None, 0, run)
    task._give_way()


def test_each_start_has_a_larger_number_even_where_the_clock_went_back(tmp_path: Path) -> None:
    runs = [start(tmp_path, now) for now in (2_000, 1_000, 3_000)]
    assert runs == sorted(set(runs))


def test_a_task_gives_way_to_a_later_start(tmp_path: Path) -> None:
    first = start(tmp_path, 1_000)
    give_way(tmp_path, first)
    start(tmp_path, 2_000)
    with pytest.raises(StateError) as error:
        give_way(tmp_path, first)
    assert (error.value.code, error.value.retriable) == ("run.superseded", True)


def test_a_task_goes_on_where_the_disk_knows_of_no_start_or_of_an_older_one(tmp_path: Path) -> None:
    give_way(tmp_path, 1_000)
    start(tmp_path, 900)
    give_way(tmp_path, 1_000)


def test_what_waiting_does_not_mend_is_not_hidden_by_another_shards_error() -> None:
    """Nor is that other one."""
    away = SinkError("sink.unreachable", "no answer", retriable=True)
    taken = SinkError("sink.fenced", "another publisher has taken over this shard")
    with structlog.testing.capture_logs() as lines:
        assert _foremost([away, away, taken]) is taken
    assert [str(away)] == [line["error"] for line in lines]
    with structlog.testing.capture_logs() as lines:
        assert _foremost([away, away]) is away
    assert not lines


def test_an_exception_that_cannot_say_anything_is_named_by_its_kind() -> None:
    """Py4J's asks the JVM, which may have died of what went wrong."""

    class OfAJvmError(Exception):
        def __str__(self) -> str:
            raise ConnectionRefusedError

    failure = _understood(OfAJvmError())
    assert failure.code == "spark.query_failed"
    assert "OfAJvmError" in str(failure)
    error, _ = as_error(OfAJvmError())
    assert "OfAJvmError" in str(error)


def test_a_topic_that_brokers_do_not_know_is_waited_for_and_then_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Brokers that start know of no topic for some seconds: that ended the publisher at once."""
    publisher = _Publisher(config_in(tmp_path), False, lambda _: None)

    def passes(at: float, code: str = "sink.topic_missing") -> bool:
        monkeypatch.setattr("eventpub.spark.publisher.time.monotonic", lambda: at)
        return publisher._may_pass(code)

    assert [passes(at) for at in (100.0, 129.0, 131.0)] == [True, True, False]
    assert not passes(100.0, "sink.topic_recreated")


def test_an_outage_leaves_one_trace_in_spark_log_however_often_it_is_met(tmp_path: Path) -> None:
    publisher = _Publisher(config_in(tmp_path), False, lambda _: None)
    publisher._state.root.mkdir(exist_ok=True)
    away = SinkError("sink.unreachable", "no answer", retriable=True)
    for _ in range(50):
        publisher._note(away, "Traceback: of many lines")
    text = publisher._state.spark_log.read_text()
    assert (text.count("Traceback"), text.count("again: ")) == (1, 49)
    publisher._note(SinkError("sink.fenced", "taken over"), "Traceback: another")
    assert publisher._state.spark_log.read_text().endswith("Traceback: another\n")
