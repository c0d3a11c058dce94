"""Rows of the past and of the future, once a second: what is said of them, and what is done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from eventpub.admission.buckets import bucket_of
from eventpub.coordinator import wording
from eventpub.coordinator.events import Log
from eventpub.coordinator.newest import NewestRows
from eventpub.errors import StoreError
from eventpub.store import Layout
from eventpub.store.events import NewRow

_ENDED_FOR = 60.0
"""Seconds for which rows are explained by a transaction that has ended."""

_SAID_EVERY = 60.0
"""Seconds between two warnings of one kind, where their reason lasts."""

_CLOCK_TOLERANCE = 60_000_000
"""µs by which an event may lie in the future without a word."""


class OddRows:
    """What samples of the newest rows say. Pure: times are arguments.

    Args:
        newest: takes the samples.
        is_fatal: whether rows of the past that keep coming end the publisher.
    """

    def __init__(self, newest: NewestRows, *, is_fatal: bool) -> None:
        self.newest = newest
        self._is_fatal = is_fatal
        self.ahead_seconds = 0.0
        self._ended: dict[tuple[int, int], float] = {}
        self._said_of_past = self._said_of_future = float("-inf")

    def ended(self, ranges: Sequence[tuple[int, int]], at: float) -> None:
        """Transactions that wrote there, ``(after, upto]`` in µs, have ended."""
        known = {
            buckets: since for buckets, since in self._ended.items() if at - since < _ENDED_FOR
        }
        found = {(bucket_of(after + 1), bucket_of(upto)) for after, upto in ranges}
        self._ended = known | dict.fromkeys(found, at)

    def sample(
        self, now: int, position: int, rows: Sequence[NewRow], at: float
    ) -> tuple[list[int], list[Log]]:
        """The buckets to count again, and what is to be said.

        Args:
            now: the database's time, µs.
            position: everything created at or before has been read, µs.
            rows: as of `NewestRows.sample`.
            at: the machine's time, s.
        """
        self.ended((), at)
        found = self.newest.sample(now, position, rows, list(self._ended))
        said = []
        if found and at - self._said_of_past >= _SAID_EVERY:
            self._said_of_past = at
            oldest = min(row.created for row in found)
            said.append(wording.rows_of_the_past(len(found), oldest, now))
        return [bucket_of(row.created) for row in found], said

    def future(self, ahead: int, at: float) -> Iterator[Log]:
        """The newest row lies so many µs in the future."""
        before, self.ahead_seconds = self.ahead_seconds, 0.0
        if ahead > _CLOCK_TOLERANCE:
            self.ahead_seconds = ahead / 1e6
        after = self.ahead_seconds
        is_news = not before or (after > before and at - self._said_of_future > _SAID_EVERY)
        if after and is_news:
            self._said_of_future = at
            yield wording.rows_of_the_future(after)
        elif before and not after:
            yield Log("info", "no event lies in the future any more", {})

    def error(self, now: int, layout: Layout) -> StoreError | None:
        """The one to end with, where rows of the past keep coming.

        Args:
            now: the database's time, µs.
            layout: of the event table.
        """
        if not (self._is_fatal and self.newest.trips):
            return None
        zone = None if layout.zone is None else layout.zone.name
        return self.newest.error(now, layout.where, zone)
