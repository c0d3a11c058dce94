"""The dynamic boundary: how far the store may be read now.

A window ends at the database's *now − delay*, or at the `page_rows`-th row of a backlog, and below
what visible open transactions may hide. Only one client may poll these: two at one pace see nothing
new (see `Watermark`). A page is read once for all shards: each of them would have the database find
every row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from eventpub.admission.model import EVENTS, topic_partitions
from eventpub.errors import StoreError
from eventpub.shard.assignment import Assignment
from eventpub.sources.base import Poll
from eventpub.sources.mysql import Watermark

_BEFORE_IT_SHOWS = 100_000
"""µs until a statement that has begun shows among the open transactions, with a wide margin."""

_SHOWS_AT_LAST = 3_000_000
"""Upper bound of the same, µs: after two seconds an INSERT is in the process list."""

_UNKNOWN_FOR = 300_000_000
"""µs for which a transaction counts as open after it was last seen open; the recount's horizon if
that is larger."""

_IDLE_AFTER = 1.0
_IDLE_EVERY = 0.3
"""After `_IDLE_AFTER` s without rows, poll every `_IDLE_EVERY` × the delay (at most 1 s): early
enough to read rows when their delay has passed."""

_SOON = 1_000_000
"""µs; `read.max_wait` if larger."""

PAGE_BYTES = 32 << 20
"""Approximate size of a page read for all shards."""


@dataclass(frozen=True)
class PollResult:
    """The answer of one poll.

    Attributes:
        now, upper: the database's time and the boundary, µs.
        end: of the next window, µs; None: nothing to read.
        is_page: the window is a full page, so more follows.
        is_due: a requested hold is due, and open transactions were polled for it.
        open_since, hidden_since: see `channel.Window`.
        state: see `sources.mysql.Watermark`.
        timed_out: transactions that are no longer waited for since this poll.
        ended: ranges ``(after, upto]``, µs, of rows that ended transactions may have added.
        pause: seconds until the next useful poll.
        rows: the window's rows by shard; None: the shards read themselves.
    """

    now: int
    upper: int
    end: int | None
    is_page: bool = False
    is_due: bool = False
    server: str = ""
    open_since: int | None = None
    hidden_since: int | None = None
    state: str = "off"
    timed_out: int = 0
    ended: tuple[tuple[int, int], ...] = ()
    pause: float = 0.05
    rows: tuple[pa.Table, ...] | None = None
    without_identity: int = 0


class Boundary:
    """Polls over its own connections; nothing created after `until`, µs, is read (None: no end)."""

    def __init__(
        self, of: Assignment, until: int | None = None, hidden_since: int | None = None
    ) -> None:
        config, parts = of.config, of.parts
        self._every = config.run.trigger / 1e6
        self._clock = parts.clock
        self._shards = config.run.shards, of.partitions
        self._config, self._read = config.store, config.read
        self._until = until
        self._store = parts.stores(config.store, of.layout)
        self._server: str | None = None
        self._is_first = True
        self._is_behind = False
        self._found_at = float("-inf")
        self._watermark: Watermark | None = None
        if self._read.watermark == "auto":
            self._watermark = parts.watermark(
                config.store,
                self._read.max_wait,
                unknown_for=max(config.recount.horizon, _UNKNOWN_FOR),
                hidden_since=hidden_since,
                clock=parts.clock,
            )

    def close(self) -> None:
        self._store.close()
        if self._watermark is not None:
            self._watermark.close()

    @property
    def hidden_since(self) -> int | None:
        since = None if self._watermark is None else self._watermark.hidden_since
        return None if since is None else since - _SHOWS_AT_LAST

    def poll(
        self,
        after: int,
        next_due: int | None = None,
        *,
        with_rows: bool = False,
        page_rows: int | None = None,
        page_bytes: int = PAGE_BYTES,
    ) -> PollResult:
        """Find how far a window beginning after `after`, µs, reaches.

        Args:
            next_due: when the next hold is due, µs; a skip needs a newer poll of open transactions.
            with_rows: also read the rows of a full page, and of the window after one.
            page_bytes: approximate size of a page read for all shards.

        Raises:
            StoreError: also store.moved: every reader must reconnect.
        """
        page_rows = page_rows or self._read.page_rows
        reads = with_rows and self._is_behind
        passed_over, watermark = self._store.without_identity, self._watermark
        timed_out = 0 if watermark is None else watermark.timed_out
        poll, is_due = self._poll(after, next_due, None if reads else page_rows)
        upto = poll.upper if self._until is None else min(poll.upper, self._until)
        is_last = self._until is not None and poll.upper >= self._until
        end = upto if poll.page_end is None else min(poll.page_end, upto)
        is_page, rows = poll.page_end is not None, None
        if (reads or (with_rows and is_page)) and poll.has_rows and upto > after:
            rows, end, is_page = self._page(after, upto, page_rows, page_bytes)
        is_new = end > after and (poll.has_rows or is_last or self._is_first)
        self._is_behind = is_new and is_page
        if is_new:
            self._is_first = False
            self._found_at = self._clock.monotonic()
        return PollResult(
            now=poll.now,
            upper=poll.upper,
            end=end if is_new else None,
            is_page=is_new and is_page,
            is_due=is_due,
            server=poll.server,
            open_since=None if watermark is None else watermark.open_since,
            hidden_since=self.hidden_since,
            state="off" if watermark is None else watermark.state,
            timed_out=0 if watermark is None else watermark.timed_out - timed_out,
            ended=()
            if watermark is None
            else tuple(
                (at - _SHOWS_AT_LAST, upto + _SHOWS_AT_LAST) for at, upto in watermark.take_ended()
            ),
            pause=self._pause(poll),
            rows=rows,
            without_identity=self._store.without_identity - passed_over,
        )

    def _page(
        self, after: int, upto: int, most: int, size: int
    ) -> tuple[tuple[pa.Table, ...] | None, int, bool]:
        """A page's rows by shard, its end, and whether more follows."""
        page = self._store.page(after, upto, most, size)
        end, is_full = (upto, False) if page.end is None else (page.end, True)
        if is_full and not page.batches:
            return None, end, is_full
        shards, partitions = self._shards
        parts: list[list[pa.RecordBatch]] = [[] for _ in range(shards)]
        for batch in page.batches:
            for part, rows in zip(parts, _of_shards(batch, shards, partitions), strict=True):
                part.append(rows)
        return tuple(pa.Table.from_batches(part, EVENTS) for part in parts), end, is_full

    def _poll(self, after: int, next_due: int | None, rows: int | None) -> tuple[Poll, bool]:
        delay = self._read.delay
        if self._watermark is None:
            poll = self._of_one_server(self._store.poll(after, delay, rows))
            return poll, next_due is not None and next_due <= poll.now
        # count a page's rows only up to the boundary
        poll = self._of_one_server(self._store.poll(after, delay, None))
        is_due = next_due is not None and next_due <= poll.now
        must_poll = self._is_first or self._until is not None or is_due
        # Not only when the first rows' delay has passed: a transaction open at the first poll may
        # hide any row. Not only while rows come: those of a timed-out transaction show when it
        # ends, and while the clock is behind the position, new rows do not show here.
        is_behind = poll.now < after
        hides = self._comes_soon(poll) or self._watermark.has_open or is_behind
        if poll.has_rows or must_poll or hides:
            self._watermark.poll(after)
            if self._watermark.server is not None:
                self._require_same_server(self._watermark.server)
        if not (poll.has_rows or must_poll):
            return poll, is_due
        upto = self._watermark.upto
        if upto is not None:
            # a statement begun just before a poll does not show in it yet
            upto -= min(delay, _BEFORE_IT_SHOWS)
        # not its `upper`, which is a whole unit of the column's below: it would be lowered again
        most = poll.now - delay if upto is None else min(upto, poll.now - delay)
        poll = self._of_one_server(self._store.poll(after, delay, rows, max(most, after)))
        return poll, is_due

    def _comes_soon(self, poll: Poll) -> bool:
        """Whether a row's delay passes soon, before open transactions time out."""
        row, soon = poll.next_row, max(self._read.max_wait, _SOON)
        return row is not None and row + self._read.delay - poll.now <= soon

    def _pause(self, poll: Poll) -> float:
        comes = self._comes_soon(poll)
        is_idle = self._clock.monotonic() - self._found_at > _IDLE_AFTER
        usual = every = self._every
        if is_idle:
            usual = max(every, _IDLE_EVERY * min(self._read.delay / 1e6, 1.0))
        if not (comes or poll.has_rows):
            return usual  # no sooner for a long transaction's end
        wait = self._watermark.next_poll if self._watermark else None
        return min(usual, wait or (every if comes else usual))

    def _of_one_server(self, poll: Poll) -> Poll:
        self._require_same_server(poll.server)
        return poll

    def _require_same_server(self, server: str) -> None:
        self._server = self._server or server
        if server != self._server and not self._config.allow_replica:
            raise StoreError(
                "store.moved",
                "another database server answers now; reconnecting",
                where="store.url",
                suggestion="nothing to do after a planned failover; else make sure that "
                "store.url leads to one server, the primary",
                retriable=True,
            )


def _of_shards(batch: pa.RecordBatch, shards: int, partitions: int) -> Iterator[pa.RecordBatch]:
    if shards == 1:
        yield batch
        return
    encoded: Any = batch.column("aggregate_id").dictionary_encode()
    of_each = topic_partitions(encoded.dictionary.to_pylist(), partitions) % shards
    numbers = of_each[np.asarray(encoded.indices)]
    for number in range(shards):
        yield batch.filter(pa.array(numbers == number))
