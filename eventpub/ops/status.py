"""A publisher's status: from the running one, or the last one recorded."""

from __future__ import annotations

import getpass
import os
import socket
import time
from pathlib import Path
from typing import Any

from eventpub import __version__
from eventpub.config import Config, format_time
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
            starts_paused = bool((state.read(state.progress_file) or {}).get("is_paused"))
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


def pause(config: Config, *, is_paused: bool) -> tuple[str, str]:
    """Pause publishing, also for later starts, or resume it; waits until in-flight work is done.

    Returns:
        "paused", "resumed"; "kept": no publisher runs, and the next one starts so; "starting": it
        has not got the request; "no answer"; "in work": paused, but in-flight work is not finished;
        or "not written": in effect until the publisher ends, as it could not be saved. And the
        error for which it could not.
    """
    state = StateDir(config.app.state_dir)
    by = f"{_user()}@{socket.gethostname()} (eventpub {'pause' if is_paused else 'resume'})"
    answer = ask_running(state, "pause" if is_paused else "resume", {"by": by})
    if answer is None and not state.is_running():
        _keep(state, is_paused, by)
        return "kept", ""
    if answer is None and kind_without_answer(state) == "starting":
        return "starting", ""
    if answer is None or answer["is_paused"] is None:
        return "no answer", ""
    if answer["error"] is not None:
        return "not written", answer["error"]
    deadline = time.monotonic() + _PAUSED_WITHIN
    while is_paused:
        document = ask_running(state, "status", timeout=_ANSWERED_WITHIN)
        has_ended = document is None and not state.is_running()
        if has_ended or (document is not None and _is_done(document)):
            break
        if time.monotonic() > deadline:
            return "in work", ""
        time.sleep(0.1)
    return "paused" if is_paused else "resumed", ""


def _is_done(document: dict[str, Any]) -> bool:
    is_known = document["state"] != "not answering"
    return is_known and not any(shard["in_work"] for shard in document["shards"])


def not_lasting(error: dict[str, Any], is_paused: bool) -> str:
    return (
        f"{'paused' if is_paused else 'events are published again'}, but only until the publisher"
        f" ends: it could not be saved ({error['code']}: {error['message']})"
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"


def _keep(state: StateDir, is_paused: bool, by: str) -> None:
    _progress_of(state)  # before the lock, which would create the directory
    state.lock()
    try:
        progress = _progress_of(state)
        by = f"{by} at {format_time(round(time.time() * 1e6))}" if is_paused else ""
        paused = {"is_paused": is_paused, "paused_by": by}
        state.write(state.progress_file, progress | paused, lasting=True)
    finally:
        state.unlock()


def _progress_of(state: StateDir) -> dict[str, Any]:
    found = state.read_progress()
    if found is None:
        raise StateError(
            "state.not_started",
            "no publisher is running, and none has run on this state directory",
            where=str(state.root),
            suggestion="start one with eventpub run, or set app.state_dir to its state directory",
        )
    return found
