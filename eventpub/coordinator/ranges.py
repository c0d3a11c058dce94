"""A set of buckets that may be a month of seconds, and costs what its ranges do."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import chain


class Buckets:
    """As a set of numbers, kept as ranges that do not touch."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._ends: list[int] = []

    def add(self, first: int, end: int) -> None:
        """Add ``first <= bucket < end``."""
        if first >= end:
            return
        low, high = bisect_left(self._ends, first), bisect_right(self._firsts, end)
        if low < high:
            first, end = min(first, self._firsts[low]), max(end, self._ends[high - 1])
        self._firsts[low:high], self._ends[low:high] = [first], [end]

    def discard(self, bucket: int) -> None:
        """Remove one, if it is there."""
        at = bisect_right(self._firsts, bucket) - 1
        if at < 0 or bucket >= self._ends[at]:
            return
        first, end = self._firsts[at], self._ends[at]
        left = [(a, b) for a, b in ((first, bucket), (bucket + 1, end)) if a < b]
        self._firsts[at : at + 1] = [a for a, _ in left]
        self._ends[at : at + 1] = [b for _, b in left]

    def clear(self) -> None:
        """Remove all."""
        self._firsts, self._ends = [], []

    def from_both_ends(self, first: int, end: int) -> Iterator[int]:
        """Those of ``first <= bucket < end``: the last, the first, the last but one …"""
        ranges = [
            range(max(a, first), min(b, end))
            for a, b in zip(self._firsts, self._ends, strict=True)
            if a < end and b > first
        ]
        up = chain.from_iterable(ranges)
        down = chain.from_iterable(reversed(some) for some in reversed(ranges))
        for number in range(sum(map(len, ranges))):
            yield next(up if number % 2 else down)

    @property
    def least(self) -> int | None:
        """The first of all; None: there is none."""
        return self._firsts[0] if self._firsts else None

    def __contains__(self, bucket: int) -> bool:
        at = bisect_right(self._firsts, bucket) - 1
        return at >= 0 and bucket < self._ends[at]

    def __len__(self) -> int:
        return sum(b - a for a, b in zip(self._firsts, self._ends, strict=True))

    def __bool__(self) -> bool:
        return bool(self._firsts)
