"""How much one transaction holds, and reading the next chunk while one is published.

A transaction is bounded by bytes and by time, not only by rows: one that outlives its messages'
timeouts is aborted, and would fail again if unchanged. So a shard starts small and doubles while
that is fast; a slow one is resized to fit the limit, and a failed one is halved. Times are
arguments.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import pyarrow as pa

_LONGEST = 5.0
"""Seconds that a transaction may take."""

_ENOUGH = 1
"""Queued chunks; with the one in use and the one being read, three are in memory."""

T = TypeVar("T")
_Item = tuple[T | None, BaseException | None] | None


@dataclass(frozen=True)
class Sizes:
    """Limits of transactions.

    Attributes:
        rows: up to half as many again are taken.
        most: bytes, except for a single row; a shard holds a few times as much in memory.
        first: bytes of a shard's first one, while the broker's speed is unknown.
        least: bytes that are always tried.
    """

    rows: int = 25_000
    most: int = 12 << 20
    first: int = 4 << 20
    least: int = 64 << 10


class Pace:
    """The size of a shard's next transaction, bytes; it fails after `timeout` seconds."""

    def __init__(self, timeout: float, sizes: Sizes, size: int | None = None) -> None:
        self._sizes = sizes
        self._long = min(_LONGEST, timeout / 8)
        self.size = sizes.first if size is None else size

    @property
    def is_full(self) -> bool:
        return self.size >= self._sizes.most

    def published(self, size: int, seconds: float) -> None:
        """Adapt to `size` bytes published in `seconds`."""
        if 4 * size < self.size:
            return  # too small to tell
        if seconds > self._long / 2:
            self.size = min(self.size, max(self._sizes.least, int(size / seconds * self._long)))
        else:
            self.size = min(2 * self.size, self._sizes.most)

    def failed(self, size: int) -> None:
        """Publishing this many bytes failed, perhaps by a time-out: halve the size."""
        self.size = max(self._sizes.least, min(self.size, size) // 2)


def chunks(batches: Iterator[pa.RecordBatch], sizes: Sizes) -> Iterator[pa.Table]:
    """Combine batches to what one transaction takes."""
    chunk: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        chunk.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        if rows >= sizes.rows or size >= sizes.most:
            yield pa.Table.from_batches(chunk)
            chunk, rows, size = [], 0, 0
    if chunk:
        yield pa.Table.from_batches(chunk)


def rows_within(rows: pa.Table, begin: int, size: int, most: int) -> int:
    """Rows from `begin` that fit `size` bytes and `most` rows; at least one if any is left."""
    left = rows.slice(begin, most)
    while left.num_rows > 1 and left.nbytes > size:
        left = left.slice(0, left.num_rows // 2)
    return left.num_rows


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
