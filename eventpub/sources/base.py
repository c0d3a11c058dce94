"""The protocol `Source`: what shards and the planner need of the database with the event table.

Times are the database's, in µs since 1970, UTC. Rows may be committed between any two calls, with
any `create_time`. Implementations only read, and keep no state but connections, so a call may be
repeated after a retriable `StoreError`. `tests/sources/contract.py` tests each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import pyarrow as pa

from eventpub.admission.model import Shard, VersionRange
from eventpub.config import Read, parse_time


@dataclass(frozen=True)
class Poll:
    """How far a source may be read.

    Args:
        now: the database's time, µs.
        upper: ``now − delay``, lowered to a value of the column's precision that has passed, and to
            the next change of the clocks backward.
        page_end: `create_time` of the page's last row; None if there are fewer rows.
        has_rows: whether there is a row in ``after < create_time ≤ upper``.
        next_row: if there is none, `create_time` of the first row above `upper` up to `now`.
    """

    now: int
    upper: int
    page_end: int | None
    has_rows: bool
    next_row: int | None = None
    server: str = ""


@dataclass(frozen=True)
class Page:
    """The first rows of a window.

    Attributes:
        batches: schema `EVENTS`; empty if one moment has more rows than a page.
        end: they are complete up to this `create_time`, µs; None: the whole window.
    """

    batches: list[pa.RecordBatch]
    end: int | None


@dataclass(frozen=True)
class NewRow:
    """`id` and `create_time`, µs (the later where a local time is two), of a sampled row."""

    id: int
    created: int


@dataclass(frozen=True)
class RowSeen:
    """A row, published or not. `create_time`, µs, is None if invalid, `payload_bytes` if NULL."""

    version: int
    create_time: int | None
    event_type: str
    payload_bytes: int | None


class Source(Protocol):
    """An event table, read only. Errors are `StoreError`; store.replica: it must not be read now.

    Attributes:
        without_identity: rows passed over so far (`store.without_identity`).
    """

    without_identity: int

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None: ...

    def require_same_times(self) -> None:
        """Raise store.table_altered if `create_time` is read differently by now."""

    def now(self) -> int:
        """The database's time."""

    def poll(
        self, after: int, delay: int, page_rows: int | None, at_most: int | None = None
    ) -> Poll:
        """How far a window after the position `after` may reach now.

        Args:
            delay: between the boundary and the database's time, µs.
            page_rows: most rows of the window; None: any number.
            at_most: upper limit of the boundary, µs.
        """

    def newest(self, most: int, above: int | None = None) -> list[NewRow]:
        """The `most` rows with the highest ids, or the lowest above `above`. Without an indexed
        number, the local `create_time`, µs, is the id, of rows whose time has passed.
        """

    def ahead(self) -> tuple[int, int]:
        """µs by which the newest `create_time` is in the future, and the number of such rows."""

    def never_read(self) -> int:
        """Number of rows without a usable `create_time`, counted up to 1,000."""

    def window(
        self, after: int, upto: int, shard: Shard | None, *, is_page: bool = False
    ) -> Iterator[pa.RecordBatch]:
        """The events of ``after < create_time ≤ upto`` (of one shard), ordered by `create_time`.

        In batches of at most some 10,000 rows, in bounded memory. A later call may return more
        rows, never fewer. `is_page`: the window is known to have less than a few 100,000 rows.
        """

    def page(self, after: int, upto: int, rows: int, size: int, shard: Shard | None = None) -> Page:
        """About the first `rows` rows and `size` bytes of a window (of one shard), by
        `create_time`, without those of the last moment, which are left to the next page.
        """

    def counts(self, ranges: Sequence[tuple[int, int]], most: int | None = None) -> list[int]:
        """The number of rows of each window ``(after, upto]``, of all shards; counted up to
        `most`.
        """

    def keys(self, after: int, upto: int, shard: Shard | None) -> Iterator[pa.RecordBatch]:
        """`aggregate_id`, `version` and `create_time` of the rows of a window, in any order."""

    def fetch(
        self, ranges: Sequence[VersionRange], rows: int, size: int, seconds: float | None = None
    ) -> tuple[pa.Table, list[VersionRange]]:
        """About `rows` rows and `size` bytes, at most, of version ranges, whatever their
        `create_time`.

        Returns:
            The events, each aggregate's in ascending order; and the unread ranges. Versions that do
            not exist count as read. No further statement starts after `seconds`.
        """

    def existing(self, wanted: Sequence[tuple[str, int]]) -> set[tuple[str, int]]:
        """Which of these (aggregate, version) exist, from the index alone."""

    def below(
        self, aggregate_ids_and_versions: Sequence[tuple[str, int]], limit: int = 16
    ) -> Iterator[pa.RecordBatch]:
        """For each (aggregate, version), keys and times of the highest `limit` lower versions.

        A batch holds all rows of its aggregates, with the schema of `keys`.
        """

    def versions(self, of: VersionRange, most: int, *, highest: bool = False) -> list[int]:
        """The lowest `most` versions of a range, ascending, or the highest, descending."""

    def seen(self, of: VersionRange) -> list[RowSeen]:
        """The rows of a range, in the order of their versions."""


BEGINNING = 0


def start_position(read: Read, now: Callable[[], int]) -> int:
    """The position before the first event, µs; events at or before it are baseline."""
    if read.start == "beginning":
        return BEGINNING
    if read.start == "now":
        return now()
    return parse_time(read.start)
