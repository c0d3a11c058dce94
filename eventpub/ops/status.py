"""A publisher's status: from the running one, or the last one recorded."""

from __future__ import annotations

import getpass
import os
import socket
import time
from pathlib import Path
from typing import Any

from eventpub import __version__
from eventpub.config import Config
from eventpub.coordinator.status import unanswered
from eventpub.errors import StateError
from eventpub.ops.asking import ask_running
from eventpub.state import StateDir

_ANSWERED_WITHIN = 5.0
"""Seconds. A publisher that does not answer in time is frozen, or starved of CPU."""

_PAUSED_WITHIN = 30.0
"""Seconds in which in-flight work is finished."""


def find(config: Config) -> dict[str, Any]:
    """A publisher's status: `eventpub status --json`.

    Returns:
        kind: "running"; "starting"; "silent": runs, but does not answer; "stopped"; or "never":
            none has run on this state directory.
        status: of `coordinator.status`; unless "running", the last recorded one, if any.
        starts_paused: none runs, and the next one starts paused.
        damaged: unreadable files of the state directory.
    """
    state = StateDir(config.app.state_dir)
    kind, document = "running", ask_running(state, "status", timeout=_ANSWERED_WITHIN)
    damaged: list[Path] = []
    starts_paused = False
    if document is None:
        document, damaged = state.read(state.status_file), state.damaged()
        if document is not None and not _is_document(document):  # by another version
            document = None
            damaged.append(state.status_file)
        kind = kind_without_answer(state)
        is_over = document is None or document["state"] == "stopped"
        if kind == "silent" and document is not None and not is_over:
            document = unanswered(document, state.beat_at(), time.time())
        elif kind == "stopped":
            starts_paused, _ = state.pause()
            if document is not None and not is_over:
                document |= {"state": "killed", "is_alive": False}
    return {
        "running": kind == "running",
        "kind": kind,
        "starts_paused": starts_paused,
        "damaged": [str(file) for file in damaged],
        "status": document,
    }


def kind_without_answer(state: StateDir) -> str:
    if state.is_running():
        return "silent" if state.socket_file.exists() else "starting"
    return "stopped" if state.was_used() else "never"


def _is_document(kept: dict[str, Any]) -> bool:
    """Whether it is a status of this version; a failed start records only how it ended."""
    is_own = kept.get("version") == __version__ or "checks" not in kept
    is_whole = kept.get("state") != "stopped" or kept.keys() >= {"stopped_at", "stopped_by"}
    return is_own and is_whole and "state" in kept


PAUSED = {"paused", "resumed", "kept"}
"""Outcomes of `pause` that are what was asked for."""


def pause(config: Config, *, is_paused: bool) -> str:
    """Pause publishing, also for later starts, or resume it; waits until in-flight work is done.

    Returns:
        "paused", "resumed"; "kept": no publisher runs, and the next one starts so; "no answer"; or
        "in work": paused, but in-flight work is not finished.

    Raises:
        StateError: state.not_started, or that it could not be saved.
    """
    state = StateDir(config.app.state_dir)
    page = "pause" if is_paused else "resume"
    by = f"{_user()}@{socket.gethostname()} (eventpub {page})"
    answer = ask_running(state, page, {"by": by})
    if answer is None or "error" in answer:
        if not (state.was_used() or state.is_running()):
            raise _not_started(state)
        state.keep_pause(is_paused, by)
    deadline = time.monotonic() + _PAUSED_WITHIN
    while state.is_running():
        document = ask_running(state, "status", timeout=_ANSWERED_WITHIN)
        if document is not None and document["state"] == "not answering":
            document = None
        if document is not None and document["is_paused"] == is_paused:
            if not is_paused:
                return "resumed"
            if not any(shard["in_work"] for shard in document["shards"]):
                return "paused"
        if time.monotonic() > deadline:
            return "no answer" if document is None else "in work"
        time.sleep(0.1)
    return "kept"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"


def _not_started(state: StateDir) -> StateError:
    return StateError(
        "state.not_started",
        "no publisher is running, and none has run on this state directory",
        where=str(state.root),
        suggestion="start one with eventpub run, or set app.state_dir to its state directory",
    )
