"""The recount's comparison: keys of time buckets that the index may not know, between windows."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from eventpub import admission
from eventpub.admission.model import window_of
from eventpub.channel import Comparison
from eventpub.shard.context import ShardContext
from eventpub.shard.key_prefetch import KeyPrefetch
from eventpub.shard.publishing import Publishing


class Comparing:
    """At most one comparison at a time; its keys are read by a thread meanwhile.

    Args:
        context: of the shard; its `lookup` is used by that thread, which it allows.
        publishing: takes what the index does not know.
    """

    def __init__(self, context: ShardContext, publishing: Publishing) -> None:
        self._context = context
        self._publishing = publishing
        self._keys: KeyPrefetch | None = None
        self._done: set[int] = set()

    @property
    def is_under_way(self) -> bool:
        """Whether there is one."""
        return self._keys is not None

    def begin(self, comparison: Comparison) -> None:
        """Take one on; what of another is left does not count."""
        context, report = self._context, self._context.report
        self.close()
        if comparison.number <= report.compared:
            return
        position = context.index.position
        # none: a new index of a shard that waits, nothing is read yet
        if position is None or not comparison.buckets:
            report.unfinished = [*comparison.buckets]
            report.compared = comparison.number
            return
        lookup, shard = context.lookup, context.shard
        self._done.clear()
        self._keys = KeyPrefetch(
            comparison,
            lambda bucket: lookup.keys(*window_of(bucket, position), shard),
            context.parts.read_ahead,
        )

    def leave_rest(self) -> None:
        """What is not compared yet is left: these buckets are unfinished."""
        keys, report = self._keys, self._context.report
        if keys is not None:
            report.unfinished = [b for b in keys.comparison.buckets if b not in self._done]
            report.compared = keys.comparison.number
            self.close()

    def go_on(self, *, finish: bool = False, waits: bool = False) -> bool:
        """Compare what was read meanwhile; whether it is over with that.

        Args:
            finish: wait for all of it.
            waits: wait for the next part of it.
        """
        keys, context = self._keys, self._context
        while keys is not None and (finish or waits or keys.are_ready):
            found = keys.take()
            if found is None:
                context.report.unfinished = sorted(keys.unfinished)
                context.report.compared = keys.comparison.number
                self.close()
                return True
            bucket, some = found
            if some is not None:
                keys.rows[bucket] += some.num_rows
                if not self._admit_unknown(some):
                    keys.unfinished.add(bucket)
                if not finish:
                    return False  # the next window does not wait for more
            elif bucket not in keys.unfinished:
                self._done.add(bucket)
                rows = {bucket: keys.rows[bucket]}
                context.index.set_buckets(rows, context.oldest_bucket())
                context.report.buckets[bucket] = keys.rows[bucket]
        return False

    def _admit_unknown(self, keys: pa.RecordBatch) -> bool:
        """Publish the rows of which the index does not know; False where the shard waits."""
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
        """Stop reading."""
        keys, self._keys = self._keys, None
        if keys is not None:
            keys.close()
