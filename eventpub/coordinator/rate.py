"""How fast something goes, from totals that are noted now and then."""

from __future__ import annotations

from collections import deque

_SECONDS = 5.0


class Rate:
    """How much a second over the last few seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def add(self, at: float, total: int) -> None:
        """Note a total, at a time in seconds."""
        self._seen.append((at, total))
        while len(self._seen) > 2 and self._seen[1][0] <= at - _SECONDS:
            self._seen.popleft()

    def at(self, now: float) -> float:
        """The rate over what was noted; falls while nothing comes."""
        if not self._seen:
            return 0.0
        (start, first), (_, last) = self._seen[0], self._seen[-1]
        return max(0, last - first) / max(now - start, 0.001)
