"""A shard's runners outside this process (tasks of Spark), and what comes of it where they fail.

What is wrong may be wrong there only: a machine that does not reach Kafka, or whose disk is full.
So after two failures in a row a runner in a thread of this process publishes the shard, and one
elsewhere is tried again after a pause that grows. The failures are forgotten when one has published
for as long as the last pause: one that reaches one broker of three gets on a little, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

_MOST_FAILURES = 2

_FIRST_PAUSE = 30.0
_LONGEST_PAUSE = 300.0
"""Seconds; each try costs a hand-over, and the time that it takes to fail: some 10 s where it does
not reach Kafka."""

_FIRST_ABSENCE = 0.25
_LONGEST_ABSENCE = 10.0
"""Seconds after one that has never connected: to try that again costs nothing."""


@dataclass
class Elsewhere:
    """See the module. Pure: times are the machine's, s, and arguments.

    Attributes:
        attempt: the one that runs there, or is on its way; 0: none.
        failures: how many have failed in a row.
        pause: seconds between the last failure and the next try.
        next_at: when one is started there though one publishes here.
    """

    attempt: int = 0
    failures: int = 0
    pause: float = 0.0
    next_at: float = inf

    @property
    def is_failing(self) -> bool:
        """Whether they do not come, or fail, so that one here publishes."""
        return self.failures >= _MOST_FAILURES

    def has(self, attempt: int) -> bool:
        """Whether that attempt is the one there."""
        return self.attempt != 0 and attempt == self.attempt

    def start(self, attempt: int) -> None:
        """One is on its way."""
        self.attempt, self.next_at = attempt, inf

    def end(self, now: float) -> None:
        """It is over, or of no use any more."""
        self.attempt, self.next_at = 0, now

    def failed(self, now: float) -> None:
        """It had connected, and has failed."""
        self.failures += 1
        if self.is_failing:
            self._wait(now, _FIRST_PAUSE, _LONGEST_PAUSE)

    def never_came(self, now: float) -> None:
        """It is over and has never connected."""
        self.attempt = 0
        self.failures += _MOST_FAILURES
        self._wait(now, _FIRST_ABSENCE, _LONGEST_ABSENCE)

    def gets_on(self, seconds: float) -> bool:
        """It has published for so long; whether that ends failures."""
        if seconds < self.pause:
            return False
        was_failing = self.is_failing
        self.failures, self.pause = 0, 0.0
        return was_failing

    def _wait(self, now: float, shortest: float, longest: float) -> None:
        self.pause = max(self.pause, shortest, min(2 * self.pause, longest))
        self.next_at = now + self.pause
