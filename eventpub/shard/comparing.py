"""The recount's comparison: keys of time buckets that the index may not know, between windows."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from eventpub import admission
from eventpub.admission.buckets import window_of
from eventpub.channel import Comparison
from eventpub.shard import pace
from eventpub.shard.place import Place
from eventpub.shard.prefetch import KeysAhead
from eventpub.shard.publishing import Publishing


class Comparing:
    """At most one comparison at a time; its keys are read by a thread meanwhile.

    Args:
        place: of the shard; its `lookup` is used by that thread, which it allows.
        publishing: takes what the index does not know.
    """

    def __init__(self, place: Place, publishing: Publishing) -> None:
        self._place = place
        self._publishing = publishing
        self._keys: KeysAhead | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether there is one."""
        return self._keys is not None

    def begin(self, comparison: Comparison) -> None:
        """Take one on; what of another is left does not count."""
        place, report = self._place, self._place.report
        self.close()
        if comparison.number <= report.compared:
            return
        position = place.index.position
        # none: a new index of a shard that waits, nothing is read yet
        if position is None or not comparison.buckets:
            report.unfinished = [*comparison.buckets]
            report.compared = comparison.number
            return
        lookup, shard = place.lookup, place.shard
        self._keys = KeysAhead(
            comparison, lambda bucket: lookup.keys(*window_of(bucket, position), shard)
        )

    def go_on(self, *, finish: bool = False) -> bool:
        """Compare what was read meanwhile; whether it is over with that.

        Args:
            finish: wait for all of it.
        """
        keys, place = self._keys, self._place
        while keys is not None and (finish or keys.are_ready):
            found = keys.take()
            if found is None:
                place.report.unfinished = sorted(keys.unfinished)
                place.report.compared = keys.comparison.number
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
                rows = {bucket: keys.rows[bucket]}
                place.index.set_buckets(rows, place.oldest_bucket())
                place.report.buckets[bucket] = keys.rows[bucket]
        return False

    def _admit_unknown(self, keys: pa.RecordBatch) -> bool:
        """Publish the rows of which the index does not know; False where the shard waits."""
        place, counts = self._place, self._place.report.counts
        ids: list[Any] = keys.column("aggregate_id").unique().to_pylist()
        ranges = admission.unknown(keys, place.index.known(ids), place.rules)
        if not ranges:
            return True
        before = counts.admitted + counts.late
        whole = True
        while ranges and whole:
            rows, ranges = place.lookup.fetch(ranges, pace.CHUNK_ROWS, pace.CHUNK_BYTES)
            whole = self._publishing.step(rows.sort_by("create_time"), None)
        place.report.recount_found += counts.admitted + counts.late - before
        return whole

    def close(self) -> None:
        """Stop reading."""
        keys, self._keys = self._keys, None
        if keys is not None:
            keys.close()
