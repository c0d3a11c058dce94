"""The files of the state directory, beside processes that write and read them."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pwd
import re
import resource
import shutil
import stat
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from eventpub.channel import Request
from eventpub.errors import StateError
from eventpub.publisher.publisher import Publisher
from eventpub.state import StateDir
from eventpub.state_files import mapping, raise_file_limit, replace_file

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


def test_a_publisher_is_asked_over_its_socket_however_long_its_path_is(tmp_path: Path) -> None:
    """A path of more than 107 bytes is no address of a socket."""
    state = StateDir(tmp_path / ("x" * 120))
    with pytest.raises(FileNotFoundError):
        state.connect(1.0)
    state.lock()
    with state.listen() as listening, state.connect(1.0) as connection:
        assert stat.S_IMODE(state.socket_file.stat().st_mode) == 0o600
        connection.sendall(b"asked")
        assert listening.accept()[0].recv(5) == b"asked"
    state.unlock()
    state.lock()
    assert not state.socket_file.exists(), "of one that was killed"
    state.unlock()


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
    state.lock_file.touch()
    (tmp_path / "requests").touch()
    for write in (state.keep, state.withdraw):
        with pytest.raises(StateError) as caught:
            write(request)
        assert caught.value.code == "state.not_writable"
        assert str(caught.value.where).startswith(str(state.requests))


def test_what_is_no_file_among_the_requests_is_not_read(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.keep(Request("r", "retry", "a"))
    (state.requests / ".snapshot").mkdir()
    (state.requests / "notes.txt").write_bytes(b"\xff")
    assert state.kept() == [Request("r", "retry", "a")]


def test_another_users_directory_is_said_to_be_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = pwd.getpwuid(tmp_path.stat().st_uid).pw_name
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(StateError) as caught, mapping(tmp_path):
        raise PermissionError(errno.EACCES, "Permission denied")
    assert caught.value.code == "state.not_writable"
    assert f"sudo -u {owner}" in str(caught.value.suggestion)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_a_lack_of_descriptors_passes(tmp_path: Path, number: int) -> None:
    with pytest.raises(StateError, match="too many files are open") as caught, mapping(tmp_path):
        raise OSError(number, os.strerror(number))
    assert caught.value.code == "state.too_many_files"
    assert caught.value.retriable


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1024, 4096), (4096, 4096)),
        ((1024, 1 << 30), (65_536, 1 << 30)),
        ((1024, resource.RLIM_INFINITY), (65_536, resource.RLIM_INFINITY)),
        ((100_000, 200_000), (100_000, 200_000)),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY),) * 2,
    ],
)
def test_the_limit_of_open_files_is_raised_and_never_lowered(
    monkeypatch: pytest.MonkeyPatch, before: tuple[int, int], after: tuple[int, int]
) -> None:
    limits = [before]
    monkeypatch.setattr(resource, "getrlimit", lambda _: before)
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))
    raise_file_limit()
    assert limits[-1] == after


def test_a_directory_that_was_moved_away_is_said_to_be_gone(tmp_path: Path) -> None:
    """It said to give write access, to a folder that was not there."""
    state = StateDir(tmp_path / "state")
    state.keep(Request("r", "retry", "a"))
    state.root.rename(tmp_path / "away")
    with pytest.raises(StateError) as caught:
        state.write(state.progress_file, {})
    assert caught.value.code == "state.not_writable"
    assert caught.value.where == str(state.progress_file)
    assert "move it back" in str(caught.value.suggestion)


def test_a_kept_request_is_gone_when_it_was_answered_and_not_when_it_failed(
    tmp_path: Path,
) -> None:
    """The next start tries it again."""
    state, request = StateDir(tmp_path), Request("r", "skip", "a", 1, 1)
    state.keep(request)
    reply = partial(Publisher._forget, Mock(_state=state), request)
    reply(StateError("run.request_failed", "two runners have failed with it"))
    assert state.kept() == [request]
    reply({0: "skipped"})
    assert state.kept() == []


@pytest.mark.parametrize(
    "text", ["", "[]", '{"id": "r", "action": "drop"}', '{"id": "other", "action": "skip"}']
)
def test_a_file_that_is_no_request_is_passed_over(tmp_path: Path, text: str) -> None:
    state = StateDir(tmp_path)
    state.requests.mkdir()
    (state.requests / "r.json").write_text(text)
    assert state.kept() == []
    state.lock_file.touch()
    (state.requests / "notes.txt").touch()
    state.keep(Request("r1", "retry", "a"))
    assert len([*state.requests.iterdir()]) == 3


def test_what_a_former_run_has_left_is_cleared_and_nothing_else(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.lock_file.touch()
    for name in ("live", "spark", "index"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
    for name in ("run.json", "progress.json", "start.json", "run.json.abc.new", "nginx.new"):
        (tmp_path / name).write_text("{}")
        os.utime(tmp_path / name, (1, 1))
    state.keep(Request("r1", "retry", "a"))
    state.clear()
    left = {"index", "run.json", "progress.json", "start.json", "requests", "live", "nginx.new"}
    left.add("eventpub.lock")
    assert {found.name for found in tmp_path.iterdir()} == left
    assert state.kept()


@pytest.mark.parametrize("name", ["spark", "index/index.html", "server.json", "live/mine.txt"])
def test_a_folder_with_the_files_of_others_is_no_state_directory(tmp_path: Path, name: str) -> None:
    theirs = tmp_path / name
    theirs.parent.mkdir(exist_ok=True)
    theirs.write_text("precious")
    tmp_path.chmod(0o755)
    for write in (
        StateDir(tmp_path).lock,
        lambda: StateDir(tmp_path).keep(Request("r", "retry", "a")),
    ):
        with pytest.raises(StateError) as caught:
            write()
        assert caught.value.code == "state.not_ours"
    assert theirs.read_text() == "precious"
    assert [path.name for path in tmp_path.iterdir()] == [name.partition("/")[0]]
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    fix = re.search('"(.*)"', caught.value.suggestion or "")
    assert fix
    StateDir(Path(fix[1])).lock()


def test_former_indexes_are_those_that_were_last_taken_over_whole(tmp_path: Path) -> None:
    """Partitions are added again before all former indexes have been read."""
    state = StateDir(tmp_path)
    for partitions in (4, 8, 16):
        (state.shard_index(2, 0) / f"of-{partitions}").mkdir(parents=True)
        state.set_aside(2, partitions)
        assert [folder.parent.name for folder in state.former_indexes()] == ["former-4"]
        assert not state.indexed()
    state.forget_former()
    state.shard_index(2, 0).mkdir(parents=True)
    state.set_aside(2, 32)
    assert [folder.parent.name for folder in state.former_indexes()] == ["former-32"]


def test_a_new_volume_is_an_empty_folder_whatever_its_driver_keeps_there(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    (tmp_path / ".snapshot").mkdir()
    StateDir(tmp_path).lock()


@pytest.mark.parametrize("left", ["start.json", "run.json", "progress.json", "index", "lock"])
def test_whatever_is_left_of_a_state_marks_it_as_one(tmp_path: Path, left: str) -> None:
    state = StateDir(tmp_path)
    of = {"app": "a", "topic": "t", "table": "d.events"}
    state.write(state.run_file, {"run": 1, "start": {"position": 0, "of": of}})
    state.write(state.progress_file, {"start": {"position": 0, "of": of}})
    state.write(state.start_file, {"position": 0, "of": of})
    state.shard_index(2, 0).mkdir(parents=True)
    state.lock_file.touch()
    kept = {"index": state.index, "lock": state.lock_file}.get(left, tmp_path / left)
    for path in [*tmp_path.iterdir()]:
        if path != kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (tmp_path / "notes.txt").touch()
    state.lock()


def test_where_files_cannot_be_locked_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS that is mounted without locks: it ended as a defect of eventpub, status 70."""

    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    for ask in (StateDir(tmp_path).lock, StateDir(tmp_path).is_running):
        with pytest.raises(StateError) as caught:
            ask()
        assert caught.value.code == "state.no_locks"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_root_leaves_belongs_to_the_publishers_user(tmp_path: Path) -> None:
    """Of `gaps skip --later` by an operator who is root, the publisher could read nothing."""
    os.chown(tmp_path, 1000, 1000)
    state = StateDir(tmp_path / "new")
    state.keep(Request("r", "retry", "a"))
    found = [state.root, *state.root.rglob("*")]
    assert len(found) == 4
    assert {path.stat().st_uid for path in found} == {1000}


def test_a_file_in_the_place_of_the_directory_is_said_to_be_no_folder(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("")
    for root in (taken, taken / "state"):
        with pytest.raises(StateError) as caught:
            StateDir(root).lock()
        assert (caught.value.code, caught.value.where) == ("state.not_writable", str(root))
        assert "set app.state_dir" in str(caught.value.suggestion)


def test_a_file_that_may_not_be_read_is_an_error_with_a_code(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    state.progress_file.mkdir()
    with pytest.raises(StateError) as caught:
        state.read(state.progress_file)
    assert caught.value.code == "state.not_readable"
    assert caught.value.where == str(state.progress_file)
