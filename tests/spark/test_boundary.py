"""The boundary that moves while a micro-batch runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eventpub.errors import StoreError
from eventpub.spark.boundary import MovingBoundary
from tests.publisher.harness import eventually


class Store:
    """Windows of 10 µs up to an end; counts how often it is asked."""

    def __init__(self, end: int) -> None:
        self.end = end
        self.asked: list[int] = []

    def look(self, after: int) -> dict[str, Any] | None:
        """The next window."""
        self.asked.append(after)
        return {"upto": after + 10, "open_since": None} if after < self.end else None


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


def test_an_error_of_the_store_is_left_to_who_asks_next(tmp_path: Path) -> None:
    store, file = Store(0), tmp_path / "boundary.json"
    asked: list[int] = []

    def look(after: int) -> dict[str, Any] | None:
        asked.append(after)
        if len(asked) == 1:
            raise StoreError("store.unreachable", "away")
        return store.look(after)

    boundary = MovingBoundary(file, look)
    boundary.go(100)
    eventually(lambda: asked == [100], 10)
    boundary.rest()
    store.end = 110
    boundary.go(100)
    eventually(lambda: upto(file) == 110, 10)
    boundary.rest()


def test_a_disk_that_takes_nothing_ends_it(tmp_path: Path) -> None:
    store, file = Store(130), tmp_path / "missing" / "boundary.json"
    boundary = MovingBoundary(file, store.look)
    boundary.go(100)
    eventually(lambda: store.asked == [100], 10)
    boundary.rest()
    assert not file.exists()
