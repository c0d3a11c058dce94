"""A runner's work as it comes, with its windows' rows read ahead in a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from eventpub.channel import Comparison, Request, Stop, Window, Work
from eventpub.shard.context import PublishingContext
from eventpub.shard.pace import Sizes
from eventpub.shard.prefetch import Prefetch


@dataclass(frozen=True)
class Rows:
    """At most a chunk of a window's rows."""

    window: Window
    rows: pa.Table


@dataclass(frozen=True)
class WindowEnd:
    """A window has no more rows."""

    window: Window


Item: TypeAlias = Rows | WindowEnd | Comparison | Request | Stop


class Reading:
    """The coordinator's work in order, by `prefetch` or `next`; owns the context's `reader`."""

    def __init__(self, context: PublishingContext) -> None:
        self._context = context
        self._last: Window | None = None
        self._unhandled: deque[Comparison | Request | Stop] = deque()
        self._is_left = False

    @property
    def received(self) -> int:
        """The number of the last window received; 0: none."""
        return 0 if self._last is None else self._last.number

    def prefetch(self) -> AbstractContextManager[Prefetch[Item]]:
        """Everything after the index's position, as far as windows reach.

        The reading thread owns this object until the block is left. Call `handled` after other
        work.
        """
        self._is_left = False
        return self._context.parts.read_ahead(self._items, self._leave)

    def _leave(self) -> None:
        self._is_left = True
        self._context.lane.wake()

    def handled(self) -> None:
        """Drop the oldest comparison, request or stop, which is done."""
        self._unhandled.popleft()

    def next(self) -> Work:
        """The next work, without reading rows."""
        if self._unhandled:
            return self._unhandled.popleft()
        while (work := self._context.lane.receive()) is None:
            self._context.sink.serve()
        if isinstance(work, Window):
            self._last = work
        return work

    def _items(self) -> Iterator[Item]:
        context = self._context
        # what other runners published before, the fold has read from the topic
        horizon = context.assignment.config.recount.horizon
        after = max(context.assignment.start or 0, context.beginning.low - horizon)
        after = max(after, context.index.position or 0)
        yield from list(self._unhandled)
        # a window received earlier, perhaps while the shard waited
        work: Work | None = self._last
        while True:
            if isinstance(work, Window):
                self._last = work
                for rows in self._window(after, work):
                    yield Rows(work, rows)
                yield WindowEnd(work)
                after = max(after, work.upto)
            elif work is not None:
                self._unhandled.append(work)
                yield work
            # None: no work, or woken, perhaps for a block that was left earlier
            work = context.lane.receive()
            if self._is_left:
                self._keep(work)
                return

    def _keep(self, work: Work | None) -> None:
        """Leave for `next` what came after the last rows were read."""
        if isinstance(work, Window):
            self._last = work
        elif work is not None:
            self._unhandled.append(work)

    def _window(self, after: int, window: Window) -> Iterator[pa.Table]:
        """A window's rows in chunks: those sent along, and those missing before them."""
        rows = window.rows
        if rows is not None and after < window.upto:
            if after < window.after:
                yield from self._read(after, window.after)
            elif after > window.after:
                rows = rows.filter(pc.greater(rows.column("create_time"), pa.scalar(after)))
            if rows.num_rows:
                yield rows
        elif after < window.upto:
            yield from self._read(after, window.upto)

    def _read(self, after: int, upto: int) -> Iterator[pa.Table]:
        context = self._context
        return chunks(context.reader.window(after, upto, context.shard), context.parts.sizes)


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
