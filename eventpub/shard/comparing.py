"""The recount's comparison: keys of time buckets that the index may not know, between windows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pyarrow as pa

from eventpub import admission
from eventpub.admission.model import window_of
from eventpub.channel import Comparison
from eventpub.shard.context import ShardContext
from eventpub.shard.prefetch import Prefetch
from eventpub.shard.publishing import Publishing


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
            whole = whole and not (ranges and context.is_full)
        context.report.recount_found += counts.admitted + counts.late - before
        return whole

    def close(self) -> None:
        """Stop reading; returns when the thread has ended."""
        self._comparison = None
        self._reading.close()
