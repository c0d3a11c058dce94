"""The files of the state directory, beside processes that write and read them."""

from __future__ import annotations

import multiprocessing
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from eventpub.channel import Request
from eventpub.errors import StateError
from eventpub.publisher.publisher import Publisher
from eventpub.state import Running, StateDir, replace_file

_MANY = 300


def _write(path: Path, barrier: Any) -> None:
    for number in range(_MANY):
        barrier.wait()
        replace_file(path, f'{{"number": {number}}}')


def test_a18_processes_that_write_at_one_time_leave_a_file_that_can_be_read(
    tmp_path: Path,
) -> None:
    """All of them wrote one temporary file, which another then read empty: `state.corrupt`."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(3)
    file = tmp_path / "run.json"
    replace_file(file, "{}")
    writers = [context.Process(target=_write, args=(file, barrier)) for _ in range(3)]
    for writer in writers:
        writer.start()
    state = StateDir(tmp_path)
    while any(writer.is_alive() for writer in writers):
        assert state.read(state.run_file) is not None
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert state.read(state.run_file) == {"number": _MANY - 1}
    assert [found.name for found in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("left", ["", "{", '{"run": 1', "\0\0\0", "[1]"])
def test_a18_what_cannot_be_read_is_not_there(tmp_path: Path, left: str) -> None:
    state = StateDir(tmp_path)
    (tmp_path / "progress.json").write_text(left)
    assert state.read(state.progress_file) is None


def test_to_ask_whether_a_publisher_runs_keeps_none_from_starting(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    assert not state.is_running()
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            StateDir(tmp_path).is_running()

    askers = [threading.Thread(target=ask) for _ in range(3)]
    for asker in askers:
        asker.start()
    try:
        for _ in range(200):
            state.lock()
            assert state.is_running()
            state.unlock()
    finally:
        stop.set()
        for asker in askers:
            asker.join()


def test_a_second_publisher_is_refused_within_a_moment(tmp_path: Path) -> None:
    first, second = StateDir(tmp_path), StateDir(tmp_path)
    first.lock()
    began = time.monotonic()
    with pytest.raises(StateError) as refused:
        second.lock()
    assert refused.value.code == "state.locked"
    assert str(os.getpid()) in refused.value.message
    assert time.monotonic() - began < 5.0


def test_what_there_is_belongs_to_its_user_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        state = StateDir(tmp_path / "state")
        state.keep(Request("r1", "retry", "a"))
        state.write(state.run_file, {})
        state.lock()
    finally:
        os.umask(before)
    assert not state.protect()
    state.index.mkdir()
    state.index.chmod(0o755)
    (state.index / "older").write_text("")
    (state.index / "older").chmod(0o664)
    state.start_file.write_text("")
    state.start_file.chmod(0o644)
    assert state.protect()
    assert not state.protect()
    for path in [state.root, *state.root.rglob("*")]:
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


def test_what_cannot_be_written_is_as_it_was_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = StateDir(tmp_path)
    state.write(state.run_file, {"run": 1})
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(StateError) as full:
        state.write(state.run_file, {"run": 2}, lasting=True)
    assert (full.value.code, full.value.retriable) == ("state.disk_full", True)
    assert state.read(state.run_file) == {"run": 1}
    assert [found.name for found in tmp_path.iterdir()] == ["run.json"]


def test_the_lock_says_where_its_publisher_is_asked(tmp_path: Path) -> None:
    state, other = StateDir(tmp_path), StateDir(tmp_path)
    assert other.running() is None
    state.lock()
    assert other.running() == Running(os.getpid())
    here = Running(os.getpid(), "grpc://127.0.0.1:1234", "token", None)
    state.write_address(here)
    assert other.running() == here
    state.unlock()
    assert not other.is_running()
    (tmp_path / "lock").write_text(str(os.getpid()))  # as versions before wrote it
    assert other.running() is None


def test_requests_that_wait_are_kept_in_order_until_they_are_withdrawn(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    assert state.kept() == []
    requests = [Request(f"r{n}", "skip", "ä", n, None) for n in range(3)]
    for request in requests:
        state.keep(request)
        time.sleep(0.01)
    assert StateDir(tmp_path).kept() == requests
    assert state.withdraw(requests[1])
    assert not state.withdraw(requests[1])
    assert state.kept() == [requests[0], requests[2]]


def test_a_directory_that_cannot_be_written_is_named_whatever_is_to_be_kept(tmp_path: Path) -> None:
    state, request = StateDir(tmp_path), Request("r", "retry", "a")
    (tmp_path / "requests").touch()
    for write in (state.keep, state.withdraw):
        with pytest.raises(StateError) as caught:
            write(request)
        assert caught.value.code == "state.not_writable"
        assert str(caught.value.where).startswith(str(state.requests))


def test_a_kept_request_is_gone_when_it_was_answered_and_not_when_it_failed(
    tmp_path: Path,
) -> None:
    """The next start tries it again."""
    state, request = StateDir(tmp_path), Request("r", "skip", "a", 1, 1)
    state.keep(request)
    reply = Publisher._forget(Mock(_state=state), request)
    reply(StateError("run.request_failed", "two runners have failed with it"))
    assert state.kept() == [request]
    reply({0: "skipped"})
    assert state.kept() == []


@pytest.mark.parametrize(
    "text", ["", "[]", '{"id": "r", "action": "drop"}', '{"id": "other", "action": "skip"}']
)
def test_a_file_that_is_no_request_is_moved_aside(tmp_path: Path, text: str) -> None:
    state = StateDir(tmp_path)
    state.requests.mkdir()
    (state.requests / "r.json").write_text(text)
    assert state.kept() == []
    assert state.set_invalid_requests_aside() == [state.requests / "r.invalid"]
    assert [found.name for found in state.requests.iterdir()] == ["r.invalid"]


def test_what_a_former_version_or_run_has_left_is_cleared_and_nothing_else(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    for name in ("live", "checkpoint", "pages", "spark", "index"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
    for name in ("boundary.json", "passed.json", "run.json", "progress.json", "start.json"):
        (tmp_path / name).write_text("{}")
    state.keep(Request("r1", "retry", "a"))
    state.clear()
    left = {"index", "run.json", "progress.json", "start.json", "requests"}
    assert {found.name for found in tmp_path.iterdir()} == left
    assert state.kept()


def test_a_file_in_the_place_of_the_directory_is_said_to_be_no_folder(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("")
    for root in (taken, taken / "state"):
        with pytest.raises(StateError) as caught:
            StateDir(root).lock()
        assert (caught.value.code, caught.value.message) == (
            "state.not_writable",
            f"{root} is not a folder",
        )


def test_a_file_that_may_not_be_read_is_an_error_with_a_code(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.progress_file.mkdir()
    with pytest.raises(StateError) as caught:
        state.read(state.progress_file)
    assert caught.value.code == "state.not_readable"
    assert caught.value.where == str(state.progress_file)
