"""The files of the state directory, beside processes that write and read them."""

from __future__ import annotations

import multiprocessing
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from eventpub.admission import EVENTS, Decision
from eventpub.errors import StateError
from eventpub.index import Index
from eventpub.spark.recovery import kept_progress
from eventpub.spark.state import StateDir

_MANY = 300


def _end_batches(root: Path, barrier: Any) -> None:
    state = StateDir(root)
    for batch in range(_MANY):
        barrier.wait()
        state.end_batch(1, batch)


def test_a18_shards_that_end_at_one_time_leave_a_file_that_can_be_read(tmp_path: Path) -> None:
    """All of them wrote one temporary file, which another then read empty: `state.corrupt`."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(3)
    writers = [context.Process(target=_end_batches, args=(tmp_path, barrier)) for _ in range(3)]
    for writer in writers:
        writer.start()
    state = StateDir(tmp_path)
    state.end_batch(1, -1)
    while any(writer.is_alive() for writer in writers):
        assert state.read(state.live / "ended.json") is not None
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert state.has_ended(1, _MANY - 1)
    assert [file.name for file in state.live.iterdir()] == ["ended.json"]


@pytest.mark.parametrize("left", ["", "{", '{"run": 1', "\0\0\0", "[1]"])
def test_a18_what_cannot_be_read_is_not_there(tmp_path: Path, left: str) -> None:
    state = StateDir(tmp_path)
    (tmp_path / "progress.json").write_text(left)
    assert state.read(state.progress_file) is None


def test_a21_without_progress_json_a_day_below_the_position_is_counted(tmp_path: Path) -> None:
    state, day = StateDir(tmp_path), 86_400_000_000
    for number, position in enumerate([5 * day, 4 * day]):
        with Index(state.shard_index(2, number), {}) as index:
            index.begin(None)
            index.record(Decision(EVENTS.empty_table()), {}, position)
    found = kept_progress(state, 2, 0)
    assert found["position"] == 4 * day
    assert found["hidden_since"] == 3 * day
    state.write(state.progress_file, {"position": 7})
    assert kept_progress(state, 2, 0) == {"position": 7}


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
        state.write(state.run_file, {})
        state.ask("retry", "a")
        state.tell(1, 1, 0, {})
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
