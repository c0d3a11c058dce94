"""The keys of a comparison: read from the database while windows are published."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pyarrow as pa

from eventpub.channel import Comparison
from eventpub.shard.prefetch import ReadAhead


class KeyPrefetch:
    """One comparison on its way through a shard.

    What is compared later than it was read loses nothing: the index knows more by then, and a row
    that it does not know then was not known before either.

    Args:
        comparison: which buckets.
        read: the keys of a bucket in batches; called, and iterated, in a thread.
        read_ahead: as of `prefetch`.

    Attributes:
        rows: keys of each bucket so far.
        unfinished: buckets of which something is left, since the shard waits.
    """

    def __init__(
        self,
        comparison: Comparison,
        read: Callable[[int], Iterator[pa.RecordBatch]],
        read_ahead: ReadAhead,
    ) -> None:
        self.comparison = comparison
        self.rows: Counter[int] = Counter()
        self.unfinished: set[int] = set()
        self._read = read
        self._open = ExitStack()
        self._items = self._open.enter_context(read_ahead(self._all))

    def _all(self) -> Iterator[tuple[int, pa.RecordBatch | None]]:
        for bucket in self.comparison.buckets:
            for keys in self._read(bucket):
                yield bucket, keys
            yield bucket, None

    @property
    def are_ready(self) -> bool:
        """Whether `take` would not wait."""
        return self._items.is_ready

    def take(self) -> tuple[int, pa.RecordBatch | None] | None:
        """A bucket and some of its keys; None for keys: it has no more; None alone: the end.

        Raises:
            StoreError: they cannot be read.
        """
        return next(self._items, None)

    def close(self) -> None:
        """Stop reading; returns when the thread has ended."""
        self._open.close()
