"""Reading ahead: the next chunk comes from the database while this one is published."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Generic, TypeAlias, TypeVar

T = TypeVar("T")
_Item = tuple[T | None, BaseException | None] | None

_ENOUGH = 1
"""Queued items; with the one in use and the one being read, three are in memory."""


class Prefetch(Generic[T]):
    """Items read ahead: an iterator that can tell whether it would block."""

    def __init__(self, waiting: queue.Queue[_Item[T]]) -> None:
        self._waiting = waiting
        self._next: list[_Item[T]] = []
        self._ended = False

    @property
    def is_ready(self) -> bool:
        """Whether the next item, the end or an error is there."""
        return self._ended or bool(self._next) or not self._waiting.empty()

    def wait(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds; returns `is_ready`."""
        if not self.is_ready:
            try:
                self._next.append(self._waiting.get(timeout=timeout))
            except queue.Empty:
                return False
        return True

    def __iter__(self) -> Prefetch[T]:
        return self

    def __next__(self) -> T:
        if self._ended:
            raise StopIteration
        found = self._next.pop() if self._next else self._waiting.get()
        if found is None:
            self._ended = True
            raise StopIteration
        item, error = found
        if error is not None:
            self._ended = True
            raise error
        return item  # type: ignore[return-value]


ReadAhead: TypeAlias = Callable[..., AbstractContextManager[Prefetch[Any]]]


@contextmanager
def read_ahead(
    make: Callable[[], Iterator[T]], wake: Callable[[], None] = lambda: None
) -> Iterator[Prefetch[T]]:
    """Iterate in a thread, a little ahead of the consumer.

    An error is raised where its item would have come. Leaving the block calls `wake`, which must
    end whatever the iterator waits for, and closes the iterator in its thread. What it uses belongs
    to that thread until then.
    """
    waiting: queue.Queue[_Item[T]] = queue.Queue(_ENOUGH)
    left = threading.Event()

    def put(item: _Item[T]) -> None:
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

    thread = threading.Thread(target=iterate, name="eventpub-read-ahead", daemon=True)
    thread.start()
    try:
        yield Prefetch(waiting)
    finally:
        left.set()
        wake()
        thread.join()
