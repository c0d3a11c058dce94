"""What somebody who asks is told where nothing was done: over HTTP, and by the command line."""

from __future__ import annotations

import getpass
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from eventpub.channel import Request
from eventpub.config import App, Config, Sink, Store
from eventpub.errors import StateError, from_dict
from eventpub.ops import gaps, status
from eventpub.ops.http import Asked
from eventpub.ops.pages import Pages
from eventpub.state import StateDir
from tests.ops.documents import document
from tests.ops.served import Source, running

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


class Answering(Source):
    """A publisher that answers this, whatever it is asked.

    Attributes:
        by: who has paused it.
    """

    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__()
        self._answer = answer
        self.by = ""

    def pause(self, is_paused: bool, by: str) -> None:
        self.by = by
        if (error := self._answer.get("error")) is not None:
            raise from_dict(error)

    def ask(self, request: Request, timeout: float) -> dict[str, Any]:
        return self._answer


def ask_page(config: Config, source: Source, path: str, **parameters: str) -> tuple[int, Any]:
    """Status and answer, to the publisher's own user."""
    asked = Asked("POST", path, parameters, is_local=True)
    reply = Pages(config, source, StateDir(config.app.state_dir)).answer(asked)
    return reply.status, json.loads(reply.body)


@pytest.mark.parametrize(("error", "code"), [(PAUSED, 409), (FAILED, 503), (None, 503)])
def test_a_page_that_acts_says_why_it_was_not_done(
    tmp_path: Path, error: StateError | None, code: int
) -> None:
    given = {"answers": None, "error": None if error is None else error.to_dict()}
    versions = {"aggregate_id": "a", "from_version": "1", "to_version": "1"}
    status, said = ask_page(config_in(tmp_path), Answering(given), "/skip", **versions)
    assert status == code
    assert said["error"] == (
        f"{error.code}: {error.message}" if error else "the shard has not answered in time"
    )


@pytest.mark.parametrize("error", [PAUSED, FAILED])
def test_a_command_ends_with_the_error_because_of_which_it_was_not_done(
    tmp_path: Path, error: StateError
) -> None:
    config = config_in(tmp_path)
    source = Answering({"answers": None, "error": error.to_dict()})
    with running(config, source), pytest.raises(StateError) as caught:
        gaps.act(config, "retry", "a")
    assert caught.value.to_dict() == error.to_dict()


def test_a_pause_that_cannot_be_saved_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_in(tmp_path)
    source = Answering({"error": FULL.to_dict()})
    with running(config, source) as state:
        state.write(state.run_file, {})

        def full(*_: object, **__: object) -> None:
            raise FULL

        monkeypatch.setattr(StateDir, "write", full)
        with pytest.raises(StateError) as caught:
            status.pause(config, is_paused=True)
    assert caught.value is FULL
    code, said = ask_page(config, source, "/pause")
    assert (code, said["code"]) == (503, "state.disk_full")


@pytest.mark.parametrize(
    ("found", "outcome"),
    [
        (None, "no answer"),
        ({"state": "not answering", "is_paused": True, "shards": []}, "no answer"),
        ({"state": "running", "is_paused": False, "shards": []}, "in work"),
        ({"state": "paused", "is_paused": True, "shards": [{"in_work": 1}]}, "in work"),
        ({"state": "paused", "is_paused": True, "shards": [{"in_work": 0}]}, "paused"),
    ],
)
def test_a_pause_is_not_done_while_nobody_says_that_the_work_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: dict[str, Any] | None, outcome: str
) -> None:
    """It said "paused" where the question for the work was not answered."""
    config = config_in(tmp_path)
    monkeypatch.setattr(status, "_PAUSED_WITHIN", 0.3)
    monkeypatch.setattr(
        status,
        "ask_running",
        lambda _, name, *rest, **more: {"is_paused": True} if name == "pause" else found,
    )
    with running(config, Source()):
        assert status.pause(config, is_paused=True) == outcome
    assert (outcome in status.PAUSED) == (outcome == "paused")


def test_a_publisher_that_gives_no_answer_finds_the_pause_in_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request was lost, as while it starts, and it published."""
    config = config_in(tmp_path)
    monkeypatch.setattr(status, "_PAUSED_WITHIN", 0.3)
    state = StateDir(config.app.state_dir)
    state.lock()
    try:
        assert status.pause(config, is_paused=True) == "no answer"
    finally:
        state.unlock()
    is_paused, by = state.pause()
    assert is_paused
    assert by.startswith(f"{getpass.getuser()}@")


def test_whoever_pauses_is_named(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    source = Answering({})
    source.found = {"state": "running", "is_paused": False, "shards": []}
    with running(config, source):
        status.pause(config, is_paused=False)
    assert source.by.startswith(f"{getpass.getuser()}@")


def test_a_publisher_that_does_not_answer_is_not_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nine checks were ok, and the lag 0.0 s, of a process that was frozen for two minutes."""
    config = config_in(tmp_path)
    state = StateDir(config.app.state_dir)
    state.lock()
    try:
        assert status.find(config)["kind"] == "starting"
        state.write(state.status_file, document())
        state.socket_file.touch()
        os.utime(tmp_path / "eventpub.lock", (0, time.time() - 30))
        monkeypatch.setattr(status, "ask_running", lambda *_, **__: None)
        found = status.find(config)
    finally:
        state.unlock()
    assert (found["kind"], found["running"]) == ("silent", False)
    process, *others = found["status"]["checks"]
    assert (process["name"], process["state"]) == ("process", "error")
    assert "no answer for 30 s" in process["message"]
    assert {check["state"] for check in others} <= {"unknown", "error"}
    assert found["status"]["lag"]["events"] is None
    assert found["status"]["lag"]["seconds"] >= 30
