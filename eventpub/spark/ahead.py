"""Reading ahead: the next chunk comes from the database while this one is published."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

_ENOUGH = 1
"""Items that wait; with the one in work and the one being made, three are in memory."""


@contextmanager
def read_ahead(make: Callable[[], Iterator[T]]) -> Iterator[Iterator[T]]:
    """Iterates in a thread of its own, a little ahead of who consumes.

    An error is raised where the item would have come. Leaving the block ends the iterator (closing
    it, in its thread) after the item that it is making.

    Args:
        make: called in the thread; whatever its iterator uses belongs to that thread until the
            block is left.
    """
    waiting: queue.Queue[tuple[T | None, BaseException | None] | None] = queue.Queue(_ENOUGH)
    left = threading.Event()

    def put(item: tuple[T | None, BaseException | None] | None) -> None:
        while not left.is_set():
            try:
                waiting.put(item, timeout=0.05)
                return
            except queue.Full:
                continue

    def iterate() -> None:
        items = make()
        try:
            for item in items:
                put((item, None))
                if left.is_set():
                    break
            put(None)
        except BaseException as error:
            put((None, error))
        finally:
            close = getattr(items, "close", None)
            if close is not None:
                close()

    def consume() -> Iterator[T]:
        while (found := waiting.get()) is not None:
            item, error = found
            if error is not None:
                raise error
            yield item  # type: ignore[misc]

    thread = threading.Thread(target=iterate, name="eventpub-read-ahead", daemon=True)
    thread.start()
    try:
        yield consume()
    finally:
        left.set()
        thread.join()
