"""A `Source` in memory: rows with commit times, on a clock that the test sets."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol, Self

import pyarrow as pa

from eventpub.admission.model import EVENTS, Shard, VersionRange
from eventpub.sources.base import NewRow, Page, Poll, RowSeen

_KEYS = ["aggregate_id", "version", "create_time"]
_TYPES = [EVENTS.field(i).type for i in range(6)]
_MOST_AHEAD = 10_000


class AnyRow(Protocol):
    """What a row has at least."""

    aggregate_id: str
    version: int
    payload: bytes
    create_time: int


@dataclass
class Row:
    """A row of the event table.

    Args:
        create_time: µs.
        commit_time: when its transaction commits, µs; from then on it is seen.
    """

    aggregate_id: str
    version: int
    create_time: int
    payload: bytes = b"{}"
    commit_time: int = 0


@dataclass
class Table:
    """The event table.

    Args:
        now: the database's time, µs.
        rows: in the order of their ids.
    """

    now: int
    rows: list[Row] = field(default_factory=list)

    @property
    def visible(self) -> list[Row]:
        """What is committed now."""
        return [row for row in self.rows if row.commit_time <= self.now]


@cache
def crc(aggregate_id: str) -> int:
    """What decides an aggregate's partition."""
    return zlib.crc32(aggregate_id.encode())


def record_batch(rows: Sequence[AnyRow]) -> pa.RecordBatch:
    """Rows as a source gives them."""
    types, metadata = _same_in_all(len(rows))
    arrays = [
        pa.array([r.aggregate_id for r in rows], _TYPES[0]),
        pa.array([r.version for r in rows], _TYPES[1]),
        types,
        pa.array([r.payload for r in rows], _TYPES[3]),
        metadata,
        pa.array([r.create_time for r in rows], _TYPES[5]),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=EVENTS)


@cache
def _same_in_all(rows: int) -> tuple[Any, Any]:
    """The columns `event_type` and `metadata` of so many rows."""
    return pa.array(["happened"] * rows, _TYPES[2]), pa.array([None] * rows, _TYPES[4])


class MemorySource:
    """Each call sees what is committed when it begins.

    A subclass may have its rows elsewhere (`rows`, `by_key`, `clock`), and be told of each
    statement before it runs (`statement`), to let it fail.
    """

    batch_rows = 10_000
    page_rows = 0
    """Rows that a page has at least, whatever is requested."""

    def __init__(self, table: Table | None = None) -> None:
        self._table = table or Table(0)
        self.without_identity = 0

    def statement(self, name: str) -> None:
        """Called before each statement."""

    @property
    def clock(self) -> int:
        """The database's time."""
        return self._table.now

    @property
    def rows(self) -> Sequence[AnyRow]:
        """What is committed, in the order of insertion."""
        return self._table.visible

    @property
    def by_key(self) -> Mapping[tuple[str, int], Sequence[AnyRow]]:
        """The rows of each version."""
        found: dict[tuple[str, int], list[AnyRow]] = {}
        for row in self.rows:
            found.setdefault((row.aggregate_id, row.version), []).append(row)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing to close."""

    def require_same_times(self) -> None:
        """The table is never altered."""

    def now(self) -> int:
        """As of `Source`, like all below."""
        self.statement("now")
        return self.clock

    def poll(
        self, after: int, delay: int, page_rows: int | None, at_most: int | None = None
    ) -> Poll:
        """Times are of µs, and no clock goes back."""
        self.statement("poll")
        now = self.clock
        upper = now - delay if at_most is None else min(now - delay, at_most)
        times = sorted(r.create_time for r in self.rows if after < r.create_time <= now)
        here = [time for time in times if time <= upper]
        page_end = None
        if page_rows is not None and len(here) >= (most := max(page_rows, self.page_rows)):
            page_end = here[most - 1]
        return Poll(now, upper, page_end, bool(here), None if here or not times else times[0])

    def newest(self, most: int, above: int | None = None) -> list[NewRow]:
        """The id is the number of the row."""
        self.statement("newest")
        rows = [NewRow(number, row.create_time) for number, row in enumerate(self.rows, 1)]
        if above is None:
            return rows[-most:][::-1]
        return [row for row in rows if row.id > above][:most]

    def ahead(self) -> tuple[int, int]:
        """How far rows are in the future."""
        self.statement("ahead")
        newest = max((r.create_time for r in self.rows), default=0)
        if newest <= self.clock:
            return 0, 0
        return newest - self.clock, len(self._window(self.clock, newest, None)[:_MOST_AHEAD])

    def never_read(self) -> int:
        """All times can be read."""
        return 0

    def window(
        self,
        after: int,
        upto: int,
        shard: Shard | None,
        *,
        is_page: bool = False,
    ) -> Iterator[pa.RecordBatch]:
        """The rows of a window by time."""
        del is_page
        self.statement("window")
        return self._batches(self._window(after, upto, shard), self.batch_rows)

    def keys(self, after: int, upto: int, shard: Shard | None) -> Iterator[pa.RecordBatch]:
        """The keys of a window."""
        self.statement("keys")
        for batch in self._batches(self._window(after, upto, shard), self.batch_rows):
            yield batch.select(_KEYS)

    def page(self, after: int, upto: int, rows: int, size: int, shard: Shard | None = None) -> Page:
        """The size is that of the payloads."""
        self.statement("page")
        found = self._window(after, upto, shard)
        read = 0
        most = max(rows, self.page_rows)
        for row in found:
            read, size = read + 1, size - len(row.payload)
            if read >= most or size <= 0:
                break
        else:
            return Page([record_batch(found)] if found else [], None)
        last = found[read - 1].create_time
        kept = [r for r in found if r.create_time < last]
        return Page([record_batch(kept)], kept[-1].create_time) if kept else Page([], last)

    def counts(self, ranges: Sequence[tuple[int, int]], most: int | None = None) -> list[int]:
        """Rows of each window."""
        self.statement("counts")
        times = [r.create_time for r in self.rows]
        return [min(sum(a < t <= b for t in times), most or len(times)) for a, b in ranges]

    def fetch(
        self, ranges: Sequence[VersionRange], rows: int, size: int, seconds: float | None = None
    ) -> tuple[pa.Table, list[VersionRange]]:
        """A call takes no time; the size is that of the payloads."""
        del seconds
        self.statement("fetch")
        by_key = self.by_key
        found: list[AnyRow] = []
        rest: list[VersionRange] = []
        for wanted in ranges:
            for version in range(wanted.first, wanted.last + 1):
                more = by_key.get((wanted.aggregate_id, version), ())
                together = [*found, *more]
                if len(found) >= rows or (
                    more and found and sum(len(r.payload) for r in together) > size
                ):
                    rest.append(replace(wanted, first=version))
                    break
                found = together
        return pa.Table.from_batches([record_batch(found)]), rest

    def existing(self, wanted: Sequence[tuple[str, int]]) -> set[tuple[str, int]]:
        """Which versions there are."""
        self.statement("existing")
        by_key = self.by_key
        return {key for key in wanted if key in by_key}

    def below(
        self, aggregate_ids_and_versions: Sequence[tuple[str, int]], limit: int = 16
    ) -> Iterator[pa.RecordBatch]:
        """Lower versions."""
        self.statement("below")
        by_key = self.by_key
        rows: list[AnyRow] = []
        for aggregate_id, version in sorted(aggregate_ids_and_versions):
            versions = range(version - 1, -1, -1)
            found = [by_key[aggregate_id, v][0] for v in versions if (aggregate_id, v) in by_key]
            rows += found[:limit]
        yield record_batch(rows).select(_KEYS)

    def versions(self, of: VersionRange, most: int, *, highest: bool = False) -> list[int]:
        """Versions of a range."""
        self.statement("versions")
        there = {v for a, v in self.by_key if a == of.aggregate_id and of.first <= v <= of.last}
        return sorted(there, reverse=highest)[:most]

    def seen(self, of: VersionRange) -> list[RowSeen]:
        """Rows to be shown."""
        self.statement("seen")
        rows = [r for r in self.rows if r.aggregate_id == of.aggregate_id]
        rows = [r for r in rows if of.first <= r.version <= of.last]
        rows.sort(key=lambda r: r.version)
        return [RowSeen(r.version, r.create_time, "happened", len(r.payload)) for r in rows]

    def _batches(self, rows: Sequence[AnyRow], size: int) -> Iterator[pa.RecordBatch]:
        for at in range(0, len(rows), size):
            self.statement("rows")
            yield record_batch(rows[at : at + size])

    def _window(self, after: int, upto: int, shard: Shard | None) -> list[AnyRow]:
        rows = [r for r in self.rows if after < r.create_time <= upto]
        if shard is not None:
            own = shard.number
            rows = [r for r in rows if crc(r.aggregate_id) % shard.partitions % shard.shards == own]
        return sorted(rows, key=lambda r: r.create_time)
