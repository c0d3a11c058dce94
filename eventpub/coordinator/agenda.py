"""What is to be done when: windows, what is checked now and then, requests that wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from eventpub.channel import PartitionId, Request, Window
from eventpub.coordinator import wording

POLLS_AGAIN = 0.25
"""Seconds until a poll that has failed is tried again, twice as many each time."""

_STARTS_WITHIN = 2.0
"""Seconds for which the first window waits for all shards to have a runner."""

MANY_BEGIN_ABOVE = 1_000
"""Aggregates without their first version from which on that is said."""


@dataclass
class Plan:
    """Which windows are planned; the machine's times are seconds.

    Attributes:
        planned: the end of the last window, µs.
        started_at: when the first event came; None: none has.
        window: the last window; None: nothing is planned yet.
        boundary: as it was polled last, µs.
        poll_at: when the next poll is of use.
        wait: until the one after it, if it fails.
        is_polling: whether one is under way.
        can_poll: whether nothing but time is waited for.
        anew: whether the next one connects anew.
    """

    planned: int
    window: Window | None = None
    boundary: int = 0
    started_at: float | None = None
    poll_at: float = 0.0
    wait: float = POLLS_AGAIN
    is_polling: bool = False
    can_poll: bool = False
    anew: bool = False

    def begin(self, now: float) -> None:
        """An event has come."""
        if self.started_at is None:
            self.started_at = now

    def waits_for_runners(self, now: float) -> bool:
        """Whether it is too early to begin without some of them."""
        return self.started_at is None or now < self.started_at + _STARTS_WITHIN

    def is_reached(self, position: int) -> bool:
        """Whether everything up to the boundary is published."""
        return bool(self.boundary) and position >= self.boundary


@dataclass
class Schedule:
    """When what is looked at now and then is looked at next, in the machine's seconds."""

    second_at: float = 0.0
    topic_at: float = 0.0
    table_at: float = 0.0
    open_at: float = 0.0
    busy_at: float = float("-inf")
    measures_lag: bool = False
    samples: bool = False
    samples_more: bool = False
    stood: dict[PartitionId, int] = field(default_factory=dict)
    watermark_logged: str = ""
    begin_above_logged: int = MANY_BEGIN_ABOVE
    gaps_named: wording.Named = field(default_factory=wording.Named)


@dataclass
class PendingRequest:
    """A request that not all of its shards have answered."""

    request: Request
    reply: Callable[[dict[int, str]], None]
    shards: set[int]
    answers: dict[int, str] = field(default_factory=dict)
