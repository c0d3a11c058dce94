"""Rows of the past and of the future, once a second: what is said of them, and what is done."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from eventpub.admission.buckets import bucket_of
from eventpub.config import format_time
from eventpub.coordinator import wording
from eventpub.coordinator.events import Log, Sampled
from eventpub.coordinator.newest import NewestRows
from eventpub.errors import StoreError
from eventpub.store import Layout
from eventpub.words import counted

_ENDED_FOR = 60.0
"""Seconds for which rows are explained by a transaction that has ended."""

_SAID_EVERY = 60.0
"""Seconds between two warnings of one kind, where their reason lasts."""

_WARNS_FOR = 300.0
"""Seconds for which the check of times warns of rows of the past after the last of them."""

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
        self.ahead_seconds, self.rows_ahead = 0.0, 0
        self.never_read = 0
        self._past_at, self._past_rows, self._past_oldest = float("-inf"), 0, 0
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
        self, now: int, position: int, sampled: Sampled, at: float
    ) -> tuple[list[int], list[Log]]:
        """The buckets to count again, and what is to be said.

        Args:
            now: the database's time, µs.
            position: everything created at or before has been read, µs.
            at: the machine's time, s.
        """
        self.ended((), at)
        rows, above = sampled.rows, sampled.above
        found = self.newest.sample(now, position, rows, list(self._ended), above)
        said = []
        if found:
            if at - self._past_at > _WARNS_FOR:
                self._past_rows, self._past_oldest = 0, now
            self._past_at, self._past_rows = at, self._past_rows + len(found)
            self._past_oldest = min(self._past_oldest, *(row.created for row in found))
        if found and at - self._said_of_past >= _SAID_EVERY:
            self._said_of_past = at
            oldest = min(row.created for row in found)
            said.append(wording.rows_of_the_past(len(found), oldest, now))
        return [bucket_of(row.created) for row in found], said

    def warning(self, at: float) -> str:
        """What is odd at the moment; "": nothing is."""
        said = []
        if self.ahead_seconds:
            said.append(
                f"store.rows_in_future: {counted(self.rows_ahead, 'row')}, the last"
                f" {self.ahead_seconds:.0f} s ahead of the database's time, held until then"
            )
        if at - self._past_at <= _WARNS_FOR:
            said.append(
                f"store.rows_in_past: {counted(self._past_rows, 'row')} committed lately with old"
                f" times, since {format_time(self._past_oldest)}; they are counted again, which"
                " publishes them (eventpub verify shows whether all are)"
            )
        if self.never_read:
            said.append(
                f"{counted(self.never_read, 'row')} with a create_time before 1970, or none, are"
                " not read (eventpub doctor)"
            )
        return "; ".join(said)

    def future(self, ahead: int, rows: int, at: float) -> Iterator[Log]:
        """So many rows lie in the future, the newest so many µs."""
        before, self.ahead_seconds, self.rows_ahead = self.ahead_seconds, 0.0, 0
        if ahead > _CLOCK_TOLERANCE:
            self.ahead_seconds, self.rows_ahead = ahead / 1e6, rows
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
