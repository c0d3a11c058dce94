"""How far behind the reader is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from eventpub.coordinator import events as e
from eventpub.publisher.workers import MOST_EVENTS, ChecksWork
from eventpub.sources.base import Poll

from .life import begun

SECOND = 1_000_000


class Store:
    """So many events, a µs apart, of which the last is at the boundary."""

    def __init__(self, events: int) -> None:
        self.events = events

    def poll(self, after: int, delay: int, page_rows: int) -> Poll:
        """The oldest is the page's last, of a page of one row."""
        assert page_rows == 1
        upper = 100 * SECOND
        oldest = upper - self.events + 1 if self.events else None
        return Poll(upper + delay, upper, oldest, bool(self.events))

    def counts(self, ranges: list[tuple[int, int]], most: int) -> list[int]:
        return [min(self.events, most) for _ in ranges]


def measured(events: int) -> tuple[float, int]:
    """Seconds and events."""
    settings = SimpleNamespace(store=None, read=SimpleNamespace(delay=SECOND))
    parts = SimpleNamespace(stores=lambda *_: Store(events))
    assignment: Any = SimpleNamespace(config=settings, layout=None, parts=parts)
    found = ChecksWork(assignment).lag(0)
    return round(found.seconds, 6), found.events


def test_what_is_not_read_is_counted() -> None:
    assert measured(40) == (0.000039, 40)
    assert measured(0) == (0.0, 0)


def test_of_a_long_backlog_only_the_age_is_exact() -> None:
    assert measured(MOST_EVENTS + 5) == (round((MOST_EVENTS + 4) / SECOND, 6), MOST_EVENTS)


def test_nothing_is_left_where_the_last_window_is_published_although_a_measurement_was_newer() -> (
    None
):
    life, runners = begun()
    life.polled(2_000 * SECOND, now=2_001 * SECOND, upper=2_000 * SECOND)
    newer = e.LagMeasured(1_000 * SECOND, 2_000 * SECOND + 1, 1_000.0, 7)
    life.on(e.Done(e.MeasureLag(1_000 * SECOND), newer))
    assert life.coordinator.progress.lag_seconds == 1_000.0
    for runner in runners:
        life.reports_done(runner)
    assert life.coordinator.progress.lag_seconds == 0.0
