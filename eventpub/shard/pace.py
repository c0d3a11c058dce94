"""How much one transaction holds: bounded by bytes and by time, not only by rows.

A transaction that outlives the time-outs of its messages is aborted, and would be in vain for ever
if it were tried again as it was. So a shard begins with small ones and doubles them as long as they
are fast; one that took long says how much fits into the time that one may take, and what failed is
tried again at half its size. Times are arguments.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

CHUNK_ROWS = 25_000
"""Rows of one transaction, and up to half as many again."""

CHUNK_BYTES = 12 << 20
"""Bytes of one transaction, but for one row: what a shard holds in memory a few times over."""

FIRST_BYTES = 4 << 20
"""Bytes of a shard's first one, while nobody knows yet how fast the broker is."""

_LEAST_BYTES = 64 << 10
_LONGEST = 5.0


class Pace:
    """How many bytes a shard's next transaction may have.

    Args:
        timeout: seconds after which the broker or the client gives a transaction up.
        size: to begin with, where it is known from before.

    Attributes:
        size: bytes; one row may always go.
    """

    def __init__(self, timeout: float, size: int | None = None) -> None:
        self._long = min(_LONGEST, timeout / 8)
        self.size = FIRST_BYTES if size is None else size

    @property
    def is_full(self) -> bool:
        """Whether nothing holds it back."""
        return self.size >= CHUNK_BYTES

    def published(self, size: int, seconds: float) -> None:
        """So many bytes were published in so many seconds."""
        if 4 * size < self.size:
            return  # says nothing about large ones
        if seconds > self._long / 2:
            self.size = min(self.size, max(_LEAST_BYTES, int(size / seconds * self._long)))
        else:
            self.size = min(2 * self.size, CHUNK_BYTES)

    def failed(self, size: int) -> None:
        """So many bytes were not published: perhaps in too long a time, whoever ended it."""
        self.size = max(_LEAST_BYTES, min(self.size, size) // 2)


def rows_within(rows: pa.Table, begin: int, size: int, most: int | None = None) -> int:
    """How many rows from one on one transaction takes: at least one where there is any.

    Args:
        size: at most so many bytes.
        most: at most so many rows; None: any number.
    """
    left = rows.slice(begin, most)
    if left.num_rows <= 1 or left.nbytes <= size:
        return left.num_rows
    ends = np.cumsum(_sizes(left))
    return max(1, int(np.searchsorted(ends, size, "right")))


def portions(rows: pa.Table) -> Iterator[pa.Table]:
    """Rows in parts of what one transaction takes: of about the same number where bytes allow."""
    parts = max(1, round(rows.num_rows / CHUNK_ROWS))
    most = -(-rows.num_rows // parts)
    begin = 0
    while begin < rows.num_rows:
        count = rows_within(rows, begin, CHUNK_BYTES, most)
        yield rows.slice(begin, count)
        begin += count


def _sizes(rows: pa.Table) -> npt.NDArray[np.int64]:
    """Bytes of each row, about."""
    sizes = np.full(rows.num_rows, 100, np.int64)
    for name in ("payload", "metadata", "aggregate_id", "event_type"):
        lengths = pc.fill_null(pc.binary_length(rows.column(name)), 0)
        sizes += np.asarray(lengths, np.int64)
    return sizes
