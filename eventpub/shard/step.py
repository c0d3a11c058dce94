"""A shard's step: what is done with a window's rows, and with other work.

For both engines: a runner does it for each window, a Spark task once for its micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pyarrow as pa

from eventpub import admission
from eventpub.admission.model import window_of
from eventpub.channel import Comparison
from eventpub.shard.answering import Answering
from eventpub.shard.context import COUNTED_LATE, Accounted, ShardContext
from eventpub.shard.pace import Prefetch
from eventpub.shard.publishing import NO_EVENTS, Publishing

_DUE_AT_ONCE = 250
_HOLDS_TURN = 0.1
_HOLDS_SHARE = 4
"""Holds retried in one transaction, seconds for due holds after each window, and the inverse of
their share of the time while there are rows: with very many holds, other events neither wait for
all of them nor lose most of the machine."""


class Step:
    """Handles a shard's windows, comparisons and requests, with its index up to date."""

    def __init__(self, context: ShardContext, renew_sink: Callable[[], None]) -> None:
        self._context = context
        self._horizon = context.assignment.config.recount.horizon
        self.accounted = Accounted(self._horizon)
        self._publishing = publishing = Publishing(context, self.accounted, renew_sink)
        self._holds_not_before = 0.0
        self.comparing = Comparing(context, publishing)
        self.answering = Answering(context, publishing)

    def rows(self, rows: pa.Table) -> bool:
        """Publish rows of a window, sorted by `create_time`; False: the shard waits, or stops."""
        times = rows.column("create_time").to_numpy()
        if not len(times):
            return True
        # older rows are counted again only where open transactions hide some
        since = self._context.now - self._horizon - COUNTED_LATE
        if (hidden_since := self._context.window.hidden_since) is not None:
            since = min(since, hidden_since)
        self.accounted.add(times, since)
        return self._publishing.step(rows, int(times[-1]) - 1)

    def end(self, upto: int | None, *, had_rows: bool = False) -> None:
        """Record a window's end (µs; None: the position stays), and retry due holds in portions;
        rows that came get their share of time."""
        context, clock = self._context, self._context.parts.clock
        began = now = clock.monotonic()
        if began < self._holds_not_before:
            self._publishing.step(NO_EVENTS, upto)
            return
        while now - began < _HOLDS_TURN:
            self._publishing.step(NO_EVENTS, upto, due=_DUE_AT_ONCE)
            due = context.index.holds.next_due()
            if due is None or due > context.now or context.is_stopping:
                return
            now = clock.monotonic()
        if had_rows:
            self._holds_not_before = now + (_HOLDS_SHARE - 1) * (now - began)


class Comparing:
    """At most one comparison at a time; a thread reads its keys with the context's `lookup`.

    Comparing later than reading is safe: the index only learns more, and a row that it does not
    know then was unknown before, too.
    """

    def __init__(self, context: ShardContext, publishing: Publishing) -> None:
        self._context = context
        self._publishing = publishing
        self._comparison: Comparison | None = None
        self._keys: Prefetch[tuple[int, pa.RecordBatch | int]]
        self._reading = ExitStack()
        self._done: set[int] = set()
        self._unfinished: set[int] = set()

    @property
    def is_under_way(self) -> bool:
        return self._comparison is not None

    def begin(self, comparison: Comparison) -> None:
        """Start one, dropping what is left of another."""
        context = self._context
        self.close()
        if comparison.number <= context.report.compared:
            return
        self._comparison = comparison
        self._done.clear()
        self._unfinished.clear()
        position = context.index.position
        # no position: a waiting shard with a new index has read nothing yet
        if position is None or not comparison.buckets:
            self.leave_rest()
            return
        upto = position

        def keys() -> Iterator[tuple[int, pa.RecordBatch | int]]:
            """Each bucket's keys, then their number."""
            for bucket in comparison.buckets:
                rows = 0
                for some in context.lookup.keys(*window_of(bucket, upto), context.shard):
                    rows += some.num_rows
                    yield bucket, some
                yield bucket, rows

        self._keys = self._reading.enter_context(context.parts.read_ahead(keys))

    def leave_rest(self) -> None:
        """End it; buckets not compared completely are reported as unfinished."""
        comparison, report = self._comparison, self._context.report
        if comparison is not None:
            report.unfinished = [b for b in comparison.buckets if b not in self._done]
            report.compared = comparison.number
            self.close()

    def go_on(self, *, finish: bool = False, waits: bool = False) -> bool:
        """Compare what was read (`waits`: the next part, `finish`: all); whether that ended it."""
        context = self._context
        while self.is_under_way and (finish or waits or self._keys.is_ready):
            found = next(self._keys, None)
            if found is None:
                self.leave_rest()
                return True
            bucket, some = found
            if not isinstance(some, int):
                if not self._admit_unknown(some):
                    self._unfinished.add(bucket)
                if not finish:
                    return False  # the next window does not wait for more
            elif bucket not in self._unfinished:
                self._done.add(bucket)
                context.index.set_buckets({bucket: some}, context.oldest_bucket())
                context.report.buckets[bucket] = some
        return False

    def _admit_unknown(self, keys: pa.RecordBatch) -> bool:
        """Publish rows that the index does not know; False if the shard waits."""
        context, counts = self._context, self._context.report.counts
        ids: list[Any] = keys.column("aggregate_id").unique().to_pylist()
        ranges = admission.unknown(keys, context.index.known(ids), context.rules)
        if not ranges:
            return True
        before = counts.admitted + counts.late
        whole = True
        while ranges and whole:
            rows, ranges = context.fetch(ranges)
            whole = self._publishing.step(rows.sort_by("create_time"), None)
            whole = whole and not (ranges and context.is_stopping)
        context.report.recount_found += counts.admitted + counts.late - before
        return whole

    def close(self) -> None:
        """Stop reading; returns when the thread has ended."""
        self._comparison = None
        self._reading.close()
