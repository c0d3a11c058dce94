"""A start: which run it is, what it makes of a state of which a part was lost, and who answers."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import structlog.testing

from eventpub.admission.model import EVENTS, Decision
from eventpub.channel import Request
from eventpub.cli.output import as_error
from eventpub.config import App, Config, Sink, Store
from eventpub.coordinator import events as e
from eventpub.errors import EventpubError, StateError, StoreError
from eventpub.index import Index
from eventpub.index.database import ROCKSDB
from eventpub.ops.asking import ask_running, ask_shards
from eventpub.publisher import run
from eventpub.publisher.prepare import _begin_run, kept_progress
from eventpub.publisher.publisher import CommandRunner
from eventpub.publisher.workers import Worker, end_all
from eventpub.state import StateDir
from tests.ops.served import Source, running

DAY = 86_400_000_000


def config_in(state: Path) -> Config:
    """A publisher's configuration with this state directory."""
    return Config(
        app=App(id="orders", state_dir=state),
        store=Store.model_validate({"url": "mysql+pymysql://u@h:1/d"}),
        sink=Sink(topic="events"),
    )


def test_each_start_has_a_larger_number_even_where_the_clock_went_back(tmp_path: Path) -> None:
    """By it a runner of a former one is told apart, wherever it has stalled."""
    runs = [_begin_run(StateDir(tmp_path), {}, now) for now in (2_000, 1_000, 3_000)]
    assert runs == sorted(set(runs))
    state = StateDir(tmp_path)
    state.run_file.unlink()
    state.write(state.progress_file, {"run": 9_000})
    assert _begin_run(state, {}, 4_000) > 9_000, "what one file has lost another says"


def test_a21_without_progress_json_a_day_below_the_position_is_counted(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    for number, position in enumerate([5 * DAY, 4 * DAY]):
        with Index(state.shard_index(2, number), {}) as index:
            index.begin(None)
            index.record(Decision(EVENTS.empty_table()), {}, position)
    found = kept_progress(state, 2, 0, ROCKSDB)
    assert found["position"] == 4 * DAY
    assert found["hidden_since"] == 3 * DAY
    state.write(state.progress_file, {"position": 7})
    assert kept_progress(state, 2, 0, ROCKSDB) == {"position": 7}


def test_without_java_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(StateError) as error:
        run(config_in(tmp_path / "state"))
    assert error.value.code == "spark.java_missing"
    assert not StateDir(tmp_path / "state").is_running(), "and the lock is let go of"


def test_an_exception_that_cannot_say_anything_is_named_by_its_kind() -> None:
    """Py4J's asks the JVM, which may have died of what went wrong."""

    class OfAJvmError(Exception):
        def __str__(self) -> str:
            raise ConnectionRefusedError

    error, _ = as_error(OfAJvmError())
    assert "OfAJvmError" in str(error)


class TestAWorker:
    def test_what_a_command_comes_to_is_posted_in_order_and_errors_with_their_command(
        self,
    ) -> None:
        away = StoreError("store.unreachable", "away", retriable=True)
        posted: list[e.Event] = []
        closed: list[bool] = []

        def do(command: e.Command) -> bool:
            if isinstance(command, e.CheckTable):
                raise away
            if isinstance(command, e.MeasureLag):
                raise ZeroDivisionError
            return isinstance(command, e.CheckOpen)

        worker = Worker("a worker", do, posted.append, lambda: closed.append(True))
        check, see, is_open = e.CheckTable(), e.MeasureLag(0), e.CheckOpen({})
        for command in (check, see, is_open):
            worker.put(command)
        end_all([worker], 100.0)
        assert posted[0] == e.Failed(check, away)
        assert isinstance(posted[1], e.Failed)
        assert posted[1].command == see
        assert (posted[1].error.code, posted[1].error.retriable) == ("coordinator.failed", True)
        assert posted[2:] == [e.Done(is_open, True)]
        assert closed == [True]


def test_a_broker_that_hangs_keeps_nobody_from_measuring_the_lag() -> None:
    """They had one thread, and the database counted as silent while the broker was."""
    given: dict[str, list[e.Command]] = {"broker": [], "checks": []}
    runner: Any = CommandRunner.__new__(CommandRunner)
    for name, commands in given.items():
        setattr(runner, f"_{name}", SimpleNamespace(put=commands.append))
    of_the_broker: list[e.Command] = [e.CheckTopic({}), e.CheckOpen({})]
    of_the_database: list[e.Command] = [
        e.Count((), 0, {}, False), e.Sample(), e.MeasureLag(0), e.CheckTable(),
    ]  # fmt: skip
    for command in [*of_the_broker, *of_the_database]:
        runner.do(command)
    assert given == {"broker": of_the_broker, "checks": of_the_database}


class TestWhoIsAsked:
    @pytest.fixture
    def state(self, tmp_path: Path) -> StateDir:
        return StateDir(tmp_path)

    def test_nobody_where_none_runs_or_it_is_starting(self, state: StateDir) -> None:
        assert ask_running(state, "status") is None
        state.lock()
        assert ask_running(state, "status") is None
        state.socket_file.touch()
        assert ask_running(state, "status", timeout=1.0) is None
        state.unlock()

    def test_the_one_that_has_the_directory(self, tmp_path: Path) -> None:
        failed = StateError("run.request_failed", "two runners have failed", where="shard 0")
        asked: list[tuple[Request, float]] = []

        class Answering(Source):
            def ask(self, request: Request, timeout: float) -> dict[str, Any]:
                asked.append((request, timeout))
                if request.action == "skip":
                    return {"answers": None, "error": failed.to_dict()}
                return {"answers": {"0": "found", "1": None}, "error": None}

        source = Answering()
        with running(config_in(tmp_path), source) as state:
            status = ask_running(state, "status")
            answers = ask_shards(state, Request("r1", "retry", "a"), 3.0)
            with pytest.raises(StateError) as caught:
                ask_shards(state, Request("r2", "skip", "a", 1), 3.0)
        assert status == source.found | {"is_ready": True}
        assert answers == {0: "found", 1: "None"}
        assert caught.value.to_dict() == failed.to_dict()
        assert asked[0] == (Request("r1", "retry", "a"), 3.0)


def test_what_ends_a_start_is_said_without_its_secrets(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    config = config.model_copy(
        update={
            "store": Store.model_validate({"url": "mysql+pymysql://u:hidden@127.0.0.1:1/d"}),
            "run": config.run.model_copy(update={"engine": "threads"}),
        }
    )
    with structlog.testing.capture_logs() as lines, pytest.raises(EventpubError) as error:
        run(config)
    assert error.value.code == "store.unreachable"
    assert "hidden" not in str(error.value) + str(lines)
    deadline = time.monotonic() + 20.0
    while StateDir(tmp_path).is_running():
        assert time.monotonic() < deadline
        time.sleep(0.005)
