"""Reading ahead of who consumes, in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from eventpub.shard.pace import read_ahead


class Source:
    """Counts what is taken from it, and notes where it was closed."""

    def __init__(self, items: int, fails_after: int | None = None) -> None:
        self.items = items
        self.fails_after = fails_after
        self.made = 0
        self.closed_in: str | None = None

    def __call__(self) -> Iterator[int]:
        try:
            for number in range(self.items):
                if number == self.fails_after:
                    raise ConnectionError("gone")
                self.made += 1
                yield number
        finally:
            self.closed_in = threading.current_thread().name


def settled(source: Source) -> int:
    """How many items were made once no more are."""
    made = -1
    while made != source.made:
        made = source.made
        time.sleep(0.05)
    return made


def test_everything_comes_in_order() -> None:
    with read_ahead(Source(1000)) as items:
        assert list(items) == list(range(1000))


def test_the_next_items_are_made_while_one_is_in_work_but_not_many() -> None:
    source = Source(1000)
    with read_ahead(source) as items:
        assert next(items) == 0
        assert settled(source) == 3


def test_an_error_comes_where_the_item_would_have_come() -> None:
    with read_ahead(Source(10, fails_after=3)) as items:
        assert [next(items) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ConnectionError, match="gone"):
            next(items)


def test_who_leaves_early_leaves_nothing_running() -> None:
    source = Source(1000)
    with read_ahead(source) as items:
        assert next(items) == 0
    assert source.closed_in == "eventpub-read-ahead"
    assert all(t.name != "eventpub-read-ahead" for t in threading.enumerate())
    assert settled(source) < 10
