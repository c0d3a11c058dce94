"""How far the publisher is with its windows, with what it has said, and with its end."""

from __future__ import annotations

from dataclasses import dataclass, field

from eventpub.channel import Window
from eventpub.coordinator import wording
from eventpub.coordinator.fold_log import FoldLog
from eventpub.errors import EventpubError

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
        seen_at: when the last one came.
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
    seen_at: float = float("-inf")
    poll_at: float = 0.0
    wait: float = POLLS_AGAIN
    is_polling: bool = False
    can_poll: bool = False
    anew: bool = False

    def happened(self, now: float) -> None:
        """An event has come."""
        self.seen_at = now
        if self.started_at is None:
            self.started_at = now

    def waits_for_runners(self, now: float) -> bool:
        """Whether it is too early to begin without some of them."""
        return self.started_at is None or now < self.started_at + _STARTS_WITHIN

    def is_reached(self, position: int) -> bool:
        """Whether everything up to the boundary is published."""
        return bool(self.boundary) and position >= self.boundary


@dataclass
class Logged:
    """What was said already, so that it is not said again."""

    watermark: str = ""
    begin_above: int = MANY_BEGIN_ABOVE
    gaps_named: wording.Named = field(default_factory=wording.Named)
    folding: FoldLog = field(default_factory=FoldLog)


@dataclass
class Ending:
    """How far the end of the publisher is.

    Attributes:
        is_stopping: whether runners were asked to leave.
        stop_by: when nobody waits for them any more, in the machine's seconds.
        error: why; None: it was asked for, or everything is published.
        is_over: whether nothing is done any more.
    """

    is_stopping: bool = False
    stop_by: float = 0.0
    error: EventpubError | None = None
    is_over: bool = False
