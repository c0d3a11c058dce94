"""Rows that windows have shown, by the second of their creation: what the recount compares with."""

from __future__ import annotations

from collections import Counter

import numpy as np
import numpy.typing as npt

from eventpub.admission.buckets import WIDTH


class Accounted:
    """Rows that windows have shown, until the index has them with its position.

    Args:
        horizon: of the recount, µs; 0: nothing is counted.
    """

    def __init__(self, horizon: int) -> None:
        self._horizon = horizon
        self._times: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def add(self, times: npt.NDArray[np.int64], since: int) -> None:
        """Note the times, in order, of rows that were read; those up to `since` do not count."""
        if self._horizon and times[-1] > since:
            self._times = np.append(self._times, times[times > since])

    def forget(self) -> None:
        """What the index does not have yet is read, and shown, again."""
        self._times = self._times[:0]

    def take(self, position: int | None) -> Counter[int]:
        """Rows per time bucket up to a position that are accounted for with it."""
        if position is None or not len(self._times):
            return Counter()
        ready = self._times <= position
        counted = Counter(((self._times[ready] - 1) // WIDTH).tolist())
        self._times = self._times[~ready]
        return counted
