"""Counts of durations by size, as Prometheus histograms want them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

LATENCY_BOUNDS = (
    0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0,
)  # fmt: skip
"""Seconds: upper bounds, inclusive; a last bucket is for all above."""

STEP_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Seconds, of one step of one transaction."""


@dataclass
class Histogram:
    """How many durations were at most each bound, and above the last.

    Attributes:
        bounds: seconds, ascending.
        counts: one more than there are bounds; not cumulative.
        sum: of all durations, s.
    """

    bounds: Sequence[float]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, seconds: float) -> None:
        """One more."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds

    def add(self, counts: Sequence[int], total: float) -> None:
        """Those that somebody else has counted by the same bounds.

        Args:
            total: their sum, s.
        """
        if len(counts) == len(self.counts):
            self.counts = [a + b for a, b in zip(self.counts, counts, strict=True)]
            self.sum += total
