"""The protocol `Source`: what a shard and the planner need of the database with the event table.

All times are the database's, in µs since 1970, UTC. Each call is one view of the table of its own:
rows may be committed between two of them, with any `create_time`, so nothing is concluded from two
answers as if they were of one moment. Nothing here writes. An implementation holds no state but
connections: after a retriable `StoreError` the same call may be made again.

Every implementation passes `tests/sources/contract.py`; its twin in memory is
`tests/twins/source.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Protocol, Self

import pyarrow as pa

from eventpub.admission.model import Shard, VersionRange
from eventpub.config import Read


@dataclass(frozen=True)
class Poll:
    """How far a source may be read.

    Args:
        now: the database's time, µs.
        upper: the boundary ``now − delay``, lowered to a value of the column's precision whose
            time has passed altogether, and to the next change of the clocks backward.
        page_end: `create_time` of the page's last row; None if there are fewer rows.
        has_rows: whether there is any row after `after` and up to `upper`.
        next_row: `create_time` of the first row above `upper`, where none is below it and this one
            is not of the future; else None.
        server: the identity of the server that has answered.
    """

    now: int
    upper: int
    page_end: int | None
    has_rows: bool
    next_row: int | None = None
    server: str = ""


@dataclass(frozen=True)
class Page:
    """The first rows of a window, of all shards.

    Attributes:
        batches: the rows, schema `EVENTS`; none where those of one moment are more than a page.
        end: the `create_time` up to which this is everything, µs; None: it is the whole window.
    """

    batches: list[pa.RecordBatch]
    end: int | None


@dataclass(frozen=True)
class NewRow:
    """A row of a sample: its `id` and `create_time`, µs (the later where a local time is two)."""

    id: int
    created: int


@dataclass(frozen=True)
class RowSeen:
    """A row as it is, also one that cannot be published: `create_time` (µs) is None where it has
    none, or one that is no time, such as a zero date; `payload_bytes` where the payload is NULL."""

    version: int
    create_time: int | None
    event_type: str
    payload_bytes: int | None


class Source(Protocol):
    """An event table, read only.

    Errors of the database are `StoreError`; a retriable one leaves the source usable. One of them
    is store.replica: the address leads to a server that may not be read, now.

    Attributes:
        without_identity: rows that windows and pages had and that were passed over, since they have
            no aggregate or no version (`store.without_identity`).
    """

    without_identity: int

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def close(self) -> None:
        """Closes the connections; the next call makes new ones."""

    def require_same_times(self) -> None:
        """Raises: StoreError: store.table_altered: `create_time` is not read any more as when the
        source was opened; what was read meanwhile means something else."""

    def now(self) -> int:
        """The database's time; never the one of this machine."""

    def poll(
        self, after: int, delay: int, page_rows: int | None, at_most: int | None = None
    ) -> Poll:
        """How far a window that begins after the position `after` may reach now.

        Args:
            delay: between the boundary and the database's time, µs.
            page_rows: most rows of the window; None: any number, which saves counting them.
            at_most: the boundary is never above it, µs.
        """

    def waiting(self, after: int, upto: int, most: int) -> tuple[int, int]:
        """The oldest `create_time` of a window, and how many rows it has (the count stops at
        `most`); `upto` and 0 where it has none."""

    def newest(self, most: int, above: int | None = None) -> list[NewRow]:
        """The `most` rows with the highest ids, or with the lowest ids above `above`. Without an
        indexed number the local `create_time`, µs, is the id, of rows whose time has passed."""

    def ahead(self) -> tuple[int, int]:
        """By how much the newest `create_time` lies in the future, µs; and how many rows do."""

    def never_read(self) -> int:
        """How many rows are never read, for the time that they have; the count stops at 1,000."""

    def window(
        self, after: int, upto: int, shard: Shard | None, *, is_page: bool = False
    ) -> Iterator[pa.RecordBatch]:
        """The events of ``after < create_time ≤ upto`` (of one shard), ordered by `create_time`.

        In batches of schema `EVENTS`, some 10,000 rows each at most; however long the window is, a
        portion of it is in memory. Read again later it may have more rows, never fewer.

        Args:
            is_page: the window is known to have less than a few 100,000 rows, of all shards.
        """

    def page(self, after: int, upto: int, rows: int, size: int, shard: Shard | None = None) -> Page:
        """The first events of a window (of one shard), by `create_time`: at most so many rows, and
        about so many bytes, but for those of its last moment, which are left to the next page.

        Args:
            upto: at most the `upper` of a poll from `after`.
        """

    def counts(self, ranges: Sequence[tuple[int, int]]) -> list[int]:
        """How many rows each of some windows ``(after, upto]`` has, of all shards."""

    def keys(self, after: int, upto: int, shard: Shard | None) -> Iterator[pa.RecordBatch]:
        """`aggregate_id`, `version` and `create_time` of the rows of a window, in any order."""

    def fetch(
        self, ranges: Sequence[VersionRange], rows: int, size: int, seconds: float | None = None
    ) -> tuple[pa.Table, list[VersionRange]]:
        """About so many rows and bytes, at most, of version ranges, whatever their `create_time`.

        Args:
            seconds: no other statement is begun after so many; None: however long it takes.

        Returns:
            The events, each aggregate's in ascending order, and what of the ranges was not read:
            fewer than before, or smaller ones. Versions that do not exist count as read.
        """

    def existing(self, wanted: Sequence[tuple[str, int]]) -> set[tuple[str, int]]:
        """Which of some (aggregate, version) there are; costs no row, only the index."""

    def below(
        self, aggregate_ids_and_versions: Sequence[tuple[str, int]], limit: int = 16
    ) -> Iterator[pa.RecordBatch]:
        """For each (aggregate, version): the keys and times of the highest `limit` lower versions.

        In batches that hold all of what was requested of each aggregate, schema as `keys`.
        """

    def versions(self, of: VersionRange, most: int, *, highest: bool = False) -> list[int]:
        """The lowest `most` versions of a range, ascending, or the highest, descending."""

    def seen(self, of: VersionRange) -> list[RowSeen]:
        """The rows of a range as they are, published or not, in the order of their versions."""


BEGINNING = 0
"""Before every event, µs."""


def start_position(read: Read, now: Callable[[], int]) -> int:
    """The position before the first event, µs: events created at or before it are baseline."""
    if read.start == "beginning":
        return BEGINNING
    if read.start == "now":
        return now()
    started = datetime.fromisoformat(read.start) - datetime(1970, 1, 1, tzinfo=UTC)
    return started // timedelta(microseconds=1)
