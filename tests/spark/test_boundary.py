"""The boundary that moves while a micro-batch runs."""

from __future__ import annotations

import json
import threading
import time
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eventpub.admission import Shard
from eventpub.errors import SinkError, StoreError
from eventpub.spark.boundary import Bounds, MovingBoundary, following
from eventpub.spark.progress import ShardReport
from eventpub.spark.shard import _ShardTask
from eventpub.spark.state import StateDir
from tests.publisher.harness import eventually


class Store:
    """Windows of 10 µs up to an end; counts how often it is asked."""

    def __init__(self, end: int) -> None:
        self.end = end
        self.asked: list[int] = []

    def look(self, after: int) -> Bounds | None:
        """The next window."""
        self.asked.append(after)
        return Bounds(after + 10) if after < self.end else None


def upto(file: Path) -> int:
    """Where the file says that the boundary is."""
    return int(json.loads(file.read_text())["upto"]) if file.exists() else 0


def test_it_moves_from_window_to_window_until_it_rests(tmp_path: Path) -> None:
    store, file = Store(130), tmp_path / "boundary.json"
    boundary = MovingBoundary(file, store.look)
    boundary.go(100)
    eventually(lambda: upto(file) == 130, 10)
    eventually(lambda: store.asked.count(130) > 1, 10)
    boundary.rest()
    asked, store.end = len(store.asked), 200
    boundary.rest()
    assert (len(store.asked), upto(file)) == (asked, 130)
    boundary.go(150)
    eventually(lambda: upto(file) == 200, 10)
    boundary.rest()
    assert store.asked[:4] == [100, 110, 120, 130]


def test_an_error_ends_the_tasks_and_is_left_to_who_asks_next(tmp_path: Path) -> None:
    store, file = Store(0), tmp_path / "boundary.json"
    asked: list[int] = []

    def look(after: int) -> Bounds | None:
        asked.append(after)
        if len(asked) == 1:
            raise StoreError("store.unreachable", "away")
        return store.look(after)

    boundary = MovingBoundary(file, look)
    boundary.go(100)
    assert upto(file) == 100
    eventually(lambda: asked == [100], 10)
    eventually(lambda: not file.exists(), 10)
    boundary.rest()
    assert asked == [100]
    store.end = 110
    boundary.go(100)
    eventually(lambda: upto(file) == 110, 10)
    boundary.rest()


def test_a_window_that_ends_where_the_one_before_did_has_a_number(tmp_path: Path) -> None:
    """Whoever looks after a hold needs no rows."""
    file, dues = tmp_path / "boundary.json", [120, 110, 110]

    def look(after: int) -> Bounds | None:
        return Bounds(dues.pop()) if dues else None

    found: set[tuple[int, int]] = set()

    def is_at(*bounds: int) -> bool:
        at = json.loads(file.read_text())
        found.add((at["upto"], at["tick"]))
        return (at["upto"], at["tick"]) == bounds

    boundary = MovingBoundary(file, look)
    boundary.go(110)
    eventually(lambda: is_at(120, 2), 10, every=0.001)
    assert sorted(found) == [(110, 0), (110, 1), (110, 2), (120, 2)]
    boundary.go(120)
    assert is_at(120, 0)
    boundary.rest()


def test_a_look_in_vain_is_a_sign_of_life_and_comes_less_often_after_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eventpub.spark.boundary._RESTS_AFTER", 0.5)
    store, file = Store(0), tmp_path / "boundary.json"
    boundary = MovingBoundary(file, store.look, seldom=0.4)
    boundary.go(100)
    seen = set()
    busy, resting = 0, 0
    began = time.monotonic()
    while (now := time.monotonic() - began) < 2.6:
        if now > 1.0:
            seen.add(file.stat().st_mtime_ns)
        if now < 0.5:
            busy = len(store.asked)
        elif now > 1.0:
            resting = resting or len(store.asked)
        time.sleep(0.001)
    assert 2 <= len(seen) <= 4
    assert busy >= 4
    assert len(store.asked) - resting <= 5
    boundary.rest()


def test_a_disk_that_takes_nothing_ends_it(tmp_path: Path) -> None:
    store, file = Store(130), tmp_path / "missing" / "boundary.json"
    boundary = MovingBoundary(file, store.look)
    boundary.go(100)
    eventually(lambda: store.asked == [100], 10)
    boundary.rest()
    assert not file.exists()


def state_with(tmp_path: Path, **boundary: int | None) -> StateDir:
    """A state directory in which the source has announced a boundary."""
    state = StateDir(tmp_path)
    state.write(state.boundary_file, {"open_since": None, **boundary})
    return state


@pytest.fixture
def soon_lifeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks end 1.2 s after the source has shown a sign of life, and look for one at once."""
    monkeypatch.setattr("eventpub.spark.boundary._NO_SIGN_OF_LIFE", 1.2)
    monkeypatch.setattr("eventpub.spark.boundary._RESTS_AFTER", 0.0)


def test_a_task_follows_from_window_to_window_until_the_source_ends_it(tmp_path: Path) -> None:
    state = state_with(tmp_path, upto=120, open_since=7)
    windows = following(state, Bounds(100), 60.0, 0)
    assert next(windows) == Bounds(120, 7)
    state_with(tmp_path, upto=130)
    assert next(windows) == Bounds(130)
    state_with(tmp_path, upto=130, tick=1)
    assert next(windows) == Bounds(130, tick=1)
    state_with(tmp_path, upto=140, tick=1)
    assert next(windows) == Bounds(140, tick=1)
    state.boundary_file.unlink()
    assert list(windows) == []


@pytest.mark.usefixtures("soon_lifeless")
def test_a_boundary_of_a_batch_before_is_not_followed(tmp_path: Path) -> None:
    assert list(following(state_with(tmp_path, upto=90), Bounds(100), 60.0, 0)) == []
    assert list(following(StateDir(tmp_path / "elsewhere"), Bounds(100), 60.0, 0)) == []


@pytest.mark.usefixtures("soon_lifeless")
def test_a_task_waits_as_long_as_the_source_lives(tmp_path: Path) -> None:
    state = state_with(tmp_path, upto=100)
    boundary = MovingBoundary(state.boundary_file, lambda _: None)
    boundary.go(100)
    windows = following(state, Bounds(100), 60.0, 0)
    announced = threading.Timer(3.0, lambda: state_with(tmp_path, upto=120))
    announced.start()
    assert next(windows) == Bounds(120)
    announced.join()
    boundary.rest()  # as the process of the source does that is killed
    assert list(windows) == []


def test_time_that_publishing_takes_is_no_time_without_a_window(tmp_path: Path) -> None:
    windows = following(state_with(tmp_path, upto=120, more=True), Bounds(100), 60.0, 0)
    next(windows)
    time.sleep(2.2)
    announced = threading.Timer(0.5, lambda: state_with(tmp_path, upto=130))
    announced.start()
    assert next(windows) == Bounds(130)
    announced.join()


def test_where_more_is_known_to_come_it_does_not_wait_for_long(tmp_path: Path) -> None:
    windows = following(state_with(tmp_path, upto=90), Bounds(100, more=True), 60.0, 0)
    announced = threading.Timer(1.4, lambda: state_with(tmp_path, upto=120, more=True))
    announced.start()
    since = time.monotonic()
    assert list(windows) == [Bounds(120, more=True)]
    assert 3.3 < time.monotonic() - since < 5.0
    announced.join()


def test_the_first_batch_follows_only_through_full_pages(tmp_path: Path) -> None:
    assert list(following(state_with(tmp_path, upto=120), Bounds(100), 60, 0, only_more=True)) == []
    windows = following(
        state_with(tmp_path, upto=120), Bounds(100, more=True), 60, 0, only_more=True
    )
    assert next(windows) == Bounds(120)
    state_with(tmp_path, upto=130)
    assert list(windows) == [], "the one before was no full page"


def test_it_ends_where_another_shard_has(tmp_path: Path) -> None:
    state = state_with(tmp_path, upto=120)
    state.end_batch(7, 3)
    for ended, batch, goes_on in ((7, 3, False), (7, 4, True), (8, 3, True)):
        windows = following(state, Bounds(100), 60.0, 0, partial(state.has_ended, ended, batch))
        state_with(tmp_path, upto=120)
        assert next(windows) == Bounds(120)
        state_with(tmp_path, upto=130)
        assert next(windows, None) == (Bounds(130) if goes_on else None)


def test_it_ends_where_another_batch_is_wanted_and_after_its_time(tmp_path: Path) -> None:
    state = state_with(tmp_path, upto=120)
    state.write(state.progress_file, {"wanted": 3})
    for seconds, wanted in ((60.0, 2), (0.0, 3)):
        windows = following(state, Bounds(100), seconds, wanted)
        assert next(windows) == Bounds(120), "which another shard may have published"
        state_with(tmp_path, upto=130)
        assert list(windows) == []
        state_with(tmp_path, upto=120)
    windows = following(state, Bounds(100), 60.0, 3)
    next(windows)
    state_with(tmp_path, upto=130)
    assert next(windows) == Bounds(130)


def test_a5_an_error_ends_a_task_that_follows(tmp_path: Path) -> None:
    """It waited for the thread that reads ahead, which followed the boundary for minutes."""
    state = state_with(tmp_path, upto=1_000)
    state.write(state.progress_file, {"wanted": 0})
    moving = MovingBoundary(state.boundary_file, lambda _: None)  # a source that finds nothing new
    moving.go(1_000)
    task: Any = object.__new__(_ShardTask)
    config = SimpleNamespace(
        app=SimpleNamespace(state_dir=tmp_path), recount=SimpleNamespace(horizon=0)
    )
    task._job = SimpleNamespace(
        config=config, follows=60.0, wanted=0, run=1, batch=1, all_buckets=False, pages=None
    )
    task._index = SimpleNamespace(position=1_000)
    task._report = ShardReport(0)
    task._leaves = False
    task._now = 0
    task._shard = Shard(0, 1, 1)
    window = Bounds(1_000)
    began = time.monotonic()
    broken = pytest.raises(SinkError)
    with broken, closing(task.rows(chain([window], task.following(window)))) as chunks:
        for _ in chunks:
            time.sleep(1.5)  # it rests by now
            raise SinkError("sink.unreachable", "the broker restarts", retriable=True)
    moving.rest()
    assert time.monotonic() - began < 5.0
