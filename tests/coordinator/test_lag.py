"""How far behind the reader is, and what it costs to know."""

from __future__ import annotations

from typing import Any

from eventpub.publisher.workers import MOST_EVENTS, Lag
from eventpub.sources.base import Poll

SECOND = 1_000_000


class Store:
    """So many events, a µs apart, of which the last is at the boundary."""

    def __init__(self, events: int, seconds_to_count: float = 0.0) -> None:
        self.events = events
        self.counted = 0
        self.time = 0.0
        self._takes = seconds_to_count

    def poll(self, after: int, delay: int, page_rows: int) -> Poll:
        """The oldest is the page's last, of a page of one row."""
        assert page_rows == 1
        upper = 100 * SECOND
        oldest = upper - self.events + 1 if self.events else None
        return Poll(upper + delay, upper, oldest, bool(self.events))

    def counts(self, ranges: list[tuple[int, int]], most: int) -> list[int]:
        """Takes its time."""
        self.counted += 1
        self.time += self._takes
        return [min(self.events, most) for _ in ranges]


def measured(lag: Lag, store: Store, read: int = 0) -> tuple[float, int]:
    """Seconds and events."""
    stand_in: Any = store
    lag.measure(stand_in, 0, SECOND, read)
    return round(lag.seconds, 6), lag.events


def test_what_is_counted_quickly_is_counted_each_time() -> None:
    store = Store(40)
    lag = Lag(lambda: store.time)
    assert measured(lag, store) == (0.000039, 40)
    store.events = 1041
    assert measured(lag, store, read=9) == (0.00104, 1041)
    store.events = 0
    assert measured(lag, store) == (0.0, 0)


def test_a_long_backlog_is_counted_in_a_hundredth_of_the_time() -> None:
    store = Store(50_000, seconds_to_count=0.1)
    lag = Lag(lambda: store.time)
    assert measured(lag, store) == (0.049999, 50_000)
    for second in range(1, 10):
        store.events = 50_000 - 2_000 * second
        store.time += 1.0
        expected = round((store.events - 1) / SECOND, 6), store.events
        assert measured(lag, store, read=2_000 * second) == expected
    assert store.counted == 1
    store.time += 2.0
    store.events += 7
    assert measured(lag, store, read=18_000)[1] == 32_007
    assert store.counted == 2


def test_more_than_is_counted_stays_more_until_it_is_counted_again() -> None:
    store = Store(MOST_EVENTS + 5, seconds_to_count=0.2)
    lag = Lag(lambda: store.time)
    assert measured(lag, store)[1] == MOST_EVENTS
    assert measured(lag, store, read=1000)[1] == MOST_EVENTS


def test_something_is_there_as_long_as_it_is_seen() -> None:
    store = Store(10, seconds_to_count=0.1)
    lag = Lag(lambda: store.time)
    measured(lag, store)
    assert measured(lag, store, read=50)[1] == 1
    store.events = 0
    assert measured(lag, store, read=60) == (0.0, 0)
    store.events = 10
    assert measured(lag, store, read=50)[1] == 10
