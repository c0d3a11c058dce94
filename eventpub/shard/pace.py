"""How much one transaction holds: bounded by bytes and by time, not only by rows.

A transaction that outlives its messages' timeouts is aborted, and would fail again if unchanged. So
a shard starts small and doubles while that is fast; a slow one is resized to fit the limit, and a
failed one is halved. Times are arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

_LONGEST = 5.0
"""Seconds that a transaction may take."""


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


def rows_within(rows: pa.Table, begin: int, size: int, most: int) -> int:
    """Rows from `begin` that fit `size` bytes and `most` rows; at least one if any is left."""
    left = rows.slice(begin, most)
    if left.num_rows <= 1 or left.nbytes <= size:
        return left.num_rows
    ends = np.cumsum(_sizes(left))
    return max(1, int(np.searchsorted(ends, size, "right")))


def _sizes(rows: pa.Table) -> npt.NDArray[np.int64]:
    """Approximate bytes of each row."""
    sizes = np.full(rows.num_rows, 100, np.int64)
    for name in ("payload", "metadata", "aggregate_id", "event_type"):
        lengths = pc.fill_null(pc.binary_length(rows.column(name)), 0)
        sizes += np.asarray(lengths, np.int64)
    return sizes
