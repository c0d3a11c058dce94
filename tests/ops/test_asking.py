"""What somebody who asks is told where nothing was done: over HTTP, and by the command line."""

from __future__ import annotations

import asyncio
import json
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
