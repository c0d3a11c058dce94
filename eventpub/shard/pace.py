"""How much one transaction holds: bounded by bytes and by time, not only by rows.

A transaction that outlives the time-outs of its messages is aborted, and would fail every time
if it were tried again as it was. So a shard begins with small ones and doubles them as long as they
are fast; one that took long says how much fits into the time that one may take, and what failed is
tried again at half its size. Times are arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

_LONGEST = 5.0
"""Seconds that one may take."""


@dataclass(frozen=True)
class Sizes:
    """How large transactions may be.

    Attributes:
        rows: of one, and up to half as many again.
        most: bytes of one, but for one row: what a shard holds in memory a few times over.
        first: bytes of a shard's first one, while the broker's speed is unknown.
        least: bytes that are always tried.
    """

    rows: int = 25_000
    most: int = 12 << 20
    first: int = 4 << 20
    least: int = 64 << 10


class Pace:
    """How many bytes a shard's next transaction may have.

    Args:
        timeout: seconds after which the broker or the client gives a transaction up.
        sizes: what they may have.
        size: to begin with, where it is known from before.

    Attributes:
        size: bytes; one row may always go.
    """

    def __init__(self, timeout: float, sizes: Sizes, size: int | None = None) -> None:
        self._sizes = sizes
        self._long = min(_LONGEST, timeout / 8)
        self.size = sizes.first if size is None else size

    @property
    def is_full(self) -> bool:
        """Whether nothing holds it back."""
        return self.size >= self._sizes.most

    def published(self, size: int, seconds: float) -> None:
        """So many bytes were published in so many seconds."""
        if 4 * size < self.size:
            return  # says nothing about large ones
        if seconds > self._long / 2:
            self.size = min(self.size, max(self._sizes.least, int(size / seconds * self._long)))
        else:
            self.size = min(2 * self.size, self._sizes.most)

    def failed(self, size: int) -> None:
        """Publishing this many bytes failed, perhaps by a time-out: halve the size."""
        self.size = max(self._sizes.least, min(self.size, size) // 2)


def rows_within(rows: pa.Table, begin: int, size: int, most: int) -> int:
    """How many rows from one on one transaction takes: at least one where there is any.

    Args:
        size: at most so many bytes.
        most: at most so many rows.
    """
    left = rows.slice(begin, most)
    if left.num_rows <= 1 or left.nbytes <= size:
        return left.num_rows
    ends = np.cumsum(_sizes(left))
    return max(1, int(np.searchsorted(ends, size, "right")))


def _sizes(rows: pa.Table) -> npt.NDArray[np.int64]:
    """Bytes of each row, about."""
    sizes = np.full(rows.num_rows, 100, np.int64)
    for name in ("payload", "metadata", "aggregate_id", "event_type"):
        lengths = pc.fill_null(pc.binary_length(rows.column(name)), 0)
        sizes += np.asarray(lengths, np.int64)
    return sizes
