"""What somebody who asks is told where nothing was done: over HTTP, and by the command line."""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response

from eventpub.channel.flight import Server
from eventpub.config import App, Config, Sink, Store
from eventpub.errors import StateError
from eventpub.ops import gaps, status
from eventpub.ops.pages import Acting
from eventpub.state import Running, StateDir
from tests.ops.documents import document

PAUSED = StateError("run.paused", "the publisher is paused until eventpub resume")
FAILED = StateError("run.request_failed", "two runners have failed: shard.failed: KeyError")
FULL = StateError("state.disk_full", "no space is left on the disk", retriable=True)


def config_in(state: Path) -> Config:
    """A publisher's configuration with this state directory."""
    return Config(
        app=App(id="orders", state_dir=state),
        store=Store.model_validate({"url": "mysql+pymysql://u@h:1/d"}),
        sink=Sink(topic="events"),
    )


@contextmanager
def publisher(config: Config, answer: dict[str, Any]) -> Iterator[None]:
    """One runs that answers this."""
    server = Server("127.0.0.1", "token", lambda _: None, lambda *_: True, lambda *_: answer)
    state = StateDir(config.app.state_dir)
    state.lock()
    location = server.address("127.0.0.1", "token").location
    state.write_address(Running(1, location, "token"))
    try:
        yield
    finally:
        server.end()
        state.unlock()


@pytest.mark.parametrize(("error", "code"), [(PAUSED, 409), (FAILED, 503), (None, 503)])
def test_a_page_that_acts_says_why_it_was_not_done(
    tmp_path: Path, error: StateError | None, code: int
) -> None:
    given = {"answers": None, "error": None if error is None else error.to_dict()}
    source: Any = SimpleNamespace(ask=lambda *_: given)
    answer = asyncio.run(Acting(config_in(tmp_path), source)._ask("skip", "a", 1, 1))
    assert isinstance(answer, Response)
    assert answer.status_code == code
    said = json.loads(bytes(answer.body))["error"]
    assert said == (
        f"{error.code}: {error.message}" if error else "the shard has not answered in time"
    )


@pytest.mark.parametrize("error", [PAUSED, FAILED])
def test_a_command_ends_with_the_error_because_of_which_it_was_not_done(
    tmp_path: Path, error: StateError
) -> None:
    config = config_in(tmp_path)
    with (
        publisher(config, {"answers": None, "error": error.to_dict()}),
        pytest.raises(StateError) as caught,
    ):
        gaps.act(config, "retry", "a")
    assert caught.value.to_dict() == error.to_dict()


def test_a_pause_that_was_not_written_down_is_no_success(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    answer = {"is_paused": True, "in_work": 0, "error": FULL.to_dict()}
    with publisher(config, answer):
        found = status.pause(config, is_paused=True)
    assert (found.outcome, found.is_done) == ("not written", False)
    assert "state.disk_full" in found.error
    source: Any = SimpleNamespace(pause=lambda *_: answer)
    page = asyncio.run(
        Acting(config, source)._set_paused(Request({"type": "http"}), is_paused=True)
    )
    assert page.status_code == 503
    assert json.loads(bytes(page.body))["error"] == found.error


def test_a_pause_is_not_done_while_nobody_says_that_the_work_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said "paused" where the question for the work was not answered."""
    config = config_in(tmp_path)
    monkeypatch.setattr(status, "_PAUSED_WITHIN", 0.3)
    monkeypatch.setattr(
        status,
        "ask_running",
        lambda _, name, *rest, **more: {"is_paused": True} if name == "pause" else None,
    )
    with publisher(config, {}):
        found = status.pause(config, is_paused=True)
    assert (found.outcome, found.is_done) == ("in work", False)


def test_whoever_pauses_is_named(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    asked: list[dict[str, Any]] = []

    def answer(name: str, given: dict[str, Any]) -> dict[str, Any]:
        asked.append(given)
        return {"is_paused": False, "in_work": 0, "error": None}

    server = Server("127.0.0.1", "token", lambda _: None, lambda *_: True, answer)
    state = StateDir(config.app.state_dir)
    state.lock()
    try:
        state.write_address(Running(1, server.address("127.0.0.1", "token").location, "token"))
        status.pause(config, is_paused=False)
    finally:
        server.end()
        state.unlock()
    assert asked[0]["by"].startswith(f"{getpass.getuser()}@")


def test_a_publisher_that_does_not_answer_is_not_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine checks were ok, and the lag 0.0 s, of a process that was frozen for two minutes."""
    config = config_in(tmp_path)
    state = StateDir(config.app.state_dir)
    state.lock()
    try:
        assert status.find(config).kind == "starting"
        state.write(state.status_file, document())
        state.write_address(Running(1, "grpc://127.0.0.1:1", "token"))
        os.utime(tmp_path / "eventpub.lock", (0, time.time() - 30))
        monkeypatch.setattr(status, "ask_running", lambda *_, **__: None)
        found = status.find(config)
    finally:
        state.unlock()
    assert (found.kind, found.is_well) == ("silent", False)
    assert found.document is not None
    process, *others = found.document["checks"]
    assert (process["name"], process["state"]) == ("process", "error")
    assert "no answer for 30 s" in process["message"]
    assert {check["state"] for check in others} <= {"unknown", "error"}
    assert found.document["lag"]["events"] is None
    assert found.document["lag"]["seconds"] >= 30
