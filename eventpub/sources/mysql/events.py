"""The event table as a `Source`; each call is its own statement, under READ COMMITTED."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from time import monotonic
from typing import Any

import pyarrow as pa

from eventpub.admission.model import EVENTS, Shard, VersionRange
from eventpub.config import Store
from eventpub.errors import StoreError
from eventpub.private_apis.packets import Columns, stream
from eventpub.sources.base import NewRow, Page, Poll, RowSeen, Source
from eventpub.sources.mysql import server, statements
from eventpub.sources.mysql.connection import connect_for_reading, run
from eventpub.sources.mysql.layout import Layout, layout_of
from eventpub.sources.mysql.statements import (
    keys_batch,
    local_times,
    micros,
    record_batch,
    rows_seen,
    spooled,
    with_identity,
)
from eventpub.sources.mysql.table import read_table
from eventpub.times import ZONES_DIFFER

_BATCH_ROWS = 10_000
_BATCH_BYTES = 4 << 20
_PORTION_ROWS = 100_000
"""Most rows of one statement, roughly; and of a block of keys."""
_PORTION_BYTES = 16 << 20
_LONG = 10_000_000
"""µs; longer windows are read in portions."""
_UNIONS_PER_STATEMENT = 100
_RANGES_PER_STATEMENT = 500
_MOST_NEVER_READ = 1_000
_MOST_AHEAD = 10_000


class EventStore(Source):
    """The event table as a `Source`; connects lazily."""

    @staticmethod
    def discover(config: Store) -> Layout:
        with closing(connect_for_reading(config)) as connection:
            return layout_of(config, read_table(config, connection))

    @staticmethod
    def server(config: Store) -> server.Server:
        with closing(connect_for_reading(config)) as connection:
            found = server.examine(config, connection)
        found.require_primary(config)
        return found

    def __init__(self, config: Store, layout: Layout) -> None:
        self._config = config
        self._layout = layout
        self._pool = server.Pool(config, layout.where)
        self.repeated = layout.clock.repeated
        self.without_identity = 0

    def close(self) -> None:
        self._pool.close()

    @property
    def moved_by(self) -> int | None:
        """How much later than once a row's time may be read, µs: its zone was corrected; None: any,
        as with ON UPDATE."""
        if not self._layout.times_last:
            return None
        return 0 if self._layout.zone is None else ZONES_DIFFER

    def _run(self, sql: str) -> list[tuple[Any, ...]]:
        with self._pool.connection() as connection:
            return run(connection, sql)

    def _blocks(
        self, sql: str, rows: int | None = None, size: int = _BATCH_BYTES
    ) -> Iterator[Columns]:
        with self._pool.connection() as connection:
            yield from stream(connection, sql, rows=rows or _BATCH_ROWS, size=size)

    # -- how far it may be read ----------------------------------------------------------------

    def require_same_times(self) -> None:
        if self.discover(self._config).read_as != self._layout.read_as:
            raise altered_table(self._layout)

    def now(self) -> int:
        return int(self._run(statements.NOW)[0][0])

    def poll(
        self, after: int, delay: int, page_rows: int | None, at_most: int | None = None
    ) -> Poll:
        # Local time repeats itself where the clocks go back: a window ends before that.
        while True:
            stop = self._layout.clock.next_backward_change(after + 2) - 1
            with self._pool.connection() as connection:
                values = statements.now_and_first_time(self._layout, after, stop)
                identity, (now, first) = server.require_primary(self._config, connection, values)
            boundary = self._boundary(now, delay, at_most)
            oldest = None if first is None else self._layout.instant(micros(first), after, stop)
            end = min(boundary, stop)
            if oldest is not None and oldest <= end:
                page_end = oldest if page_rows == 1 else self._page_end(after, end, page_rows)
                return Poll(now, end, page_end, True, None, identity)
            if oldest is not None or stop >= now:
                is_newer = oldest is not None and oldest <= now
                return Poll(now, boundary, None, False, oldest if is_newer else None, identity)
            after = stop

    def _boundary(self, now: int, delay: int, at_most: int | None) -> int:
        boundary = now - delay if at_most is None else min(now - delay, at_most)
        unit = self._layout.unit
        # the last value that has passed completely
        return boundary if unit == 1 else boundary // unit * unit - unit

    def _page_end(self, after: int, upto: int, rows: int | None) -> int | None:
        values = statements.local_range(self._layout, after, upto)
        if rows is None or values is None:
            return None
        found = self._run(statements.nth_time(self._layout, *values, rows))
        return self._layout.instant(micros(found[0][0]), after, upto) if found else None

    def newest(self, most: int, above: int | None = None) -> list[NewRow]:
        layout, last = self._layout, None
        if layout.id_index is None:
            now = self.now()
            passed = statements.local_range(layout, now - _LONG, now)
            if passed is None:
                return []
            last = passed[1]
        return [
            NewRow(int(number), layout.clock.latest(micros(time)))
            for number, time in self._run(statements.newest(layout, above, last, most))
            if isinstance(time, datetime)  # a zero date is no time
        ]

    def ahead(self) -> tuple[int, int]:
        # one statement for both: between two, the process may be suspended while rows arrive
        [(now, time)] = self._run(statements.now_and_newest_time(self._layout))
        newest = self._layout.instant(micros(time)) if isinstance(time, datetime) else 0
        if newest <= now:
            return 0, 0
        return newest - int(now), self.counts([(int(now), newest)], _MOST_AHEAD)[0]

    def never_read(self) -> int:
        return int(self._run(statements.without_time(self._layout, _MOST_NEVER_READ))[0][0])

    # -- windows -------------------------------------------------------------------------------

    def window(
        self, after: int, upto: int, shard: Shard | None, *, is_page: bool = False
    ) -> Generator[pa.RecordBatch, None, None]:
        """See `Source.window`.

        No statement stays open while a batch is processed: it would block an ALTER TABLE, and then
        every writer. A long window is read in portions of all shards' rows: without a row for
        `connection.READ_TIMEOUT` the connection would count as lost.
        """
        is_long = shard is not None and shard.shards > 1 and upto - after > _LONG and not is_page
        for end in self._portions(after, upto, by_rows=is_long):
            while after < end:
                page = self.page(after, end, _PORTION_ROWS, _PORTION_BYTES, shard)
                upto_here = end if page.end is None else page.end
                is_too_large = page.end is not None and not page.batches
                batches = self._moment(upto_here, shard) if is_too_large else page.batches
                yield from (batch for batch in batches if batch.num_rows)
                after = upto_here

    def _moment(self, upto: int, shard: Shard | None) -> Iterator[pa.RecordBatch]:
        """`window` for one moment with more rows than a portion: by their keys."""
        # rows read by key get the first instant of a repeated local time
        at_key = self._layout.instant(self._layout.clock.local(upto))
        times = EVENTS.field("create_time")
        for keys in self.keys(upto - 1, upto, shard):
            for at in range(0, len(keys), _BATCH_ROWS):
                events = dict.fromkeys(_events_of(keys.slice(at, _BATCH_ROWS)))
                left = [VersionRange(a, version, version) for a, version in events]
                while left:
                    rows, left = self.fetch(left, _BATCH_ROWS, _PORTION_BYTES)
                    rows = rows.filter(pa.array(rows.column("create_time").to_numpy() == at_key))
                    here = pa.repeat(pa.scalar(upto, times.type), len(rows))
                    yield from rows.set_column(5, times, here).to_batches()

    def _portions(self, after: int, upto: int, *, by_rows: bool) -> Iterator[int]:
        while after < upto:
            end = min(self._layout.clock.next_backward_change(after + 2) - 1, upto)
            rows_end = self._page_end(after, end, _PORTION_ROWS) if by_rows else None
            after = end if rows_end is None else rows_end
            yield after

    def page(self, after: int, upto: int, rows: int, size: int, shard: Shard | None = None) -> Page:
        layout = self._layout
        values = statements.local_range(layout, after, upto)
        if values is None:
            return Page([], None)
        batches: list[pa.RecordBatch] = []
        left_rows, left_size, newest = rows, size, None
        for block in self._blocks(statements.window(layout, *values, shard, rows)):
            kept = with_identity(block) if layout.skips_nulls else block
            self.without_identity += len(block[0]) - len(kept[0])
            batches.append(record_batch(layout, kept, after, upto))
            left_rows -= len(block[0])
            left_size -= batches[-1].nbytes
            newest = block[-1][-1:]
            if left_size <= 0:  # breaking closes the connection
                break
        if newest is None or (left_rows > 0 and left_size > 0):
            return Page(batches, None)
        last = int(layout.clock.utc(local_times(newest), after, upto)[0])
        return _without_moment(last, batches)

    def counts(self, ranges: Sequence[tuple[int, int]], most: int | None = None) -> list[int]:
        found = [0] * len(ranges)
        values = [(n, statements.local_range(self._layout, *r)) for n, r in enumerate(ranges)]
        some = [(n, local) for n, local in values if local is not None]
        for at in range(0, len(some), _UNIONS_PER_STATEMENT):
            sql = statements.counts(self._layout, some[at : at + _UNIONS_PER_STATEMENT], most)
            for number, count in self._run(sql):
                found[int(number)] = int(count)
        return found

    def keys(self, after: int, upto: int, shard: Shard | None) -> Iterator[pa.RecordBatch]:
        for end in self._portions(after, upto, by_rows=upto - after > _LONG):
            values = statements.local_range(self._layout, after, end)
            if values is not None:
                sql = statements.keys(self._layout, *values, shard)
                # to its end, as in `window`: the consumer waits for the broker
                blocks = self._blocks(sql, _PORTION_ROWS)
                batches = (keys_batch(self._layout, block, after, end) for block in blocks)
                yield from spooled(batches, _PORTION_BYTES)
            after = end

    # -- by aggregate and version --------------------------------------------------------------

    def fetch(
        self, ranges: Sequence[VersionRange], rows: int, size: int, seconds: float | None = None
    ) -> tuple[pa.Table, list[VersionRange]]:
        until = None if seconds is None else monotonic() + seconds
        batches: list[pa.RecordBatch] = []
        rest: list[VersionRange] = []
        left_rows, left_size = rows, size
        for at in range(0, len(ranges), _RANGES_PER_STATEMENT):
            if left_rows <= 0 or left_size <= 0 or (at and until and monotonic() > until):
                rest += ranges[at:]
                break
            some = ranges[at : at + _RANGES_PER_STATEMENT]
            read: dict[str, int] = {}
            sql = statements.versions_by_key(self._layout, some)
            block_size = min(left_size, _BATCH_BYTES)
            for block in self._blocks(sql, min(left_rows, _BATCH_ROWS), block_size):
                batch = record_batch(self._layout, block, None, None)
                batches.append(batch)
                left_rows -= batch.num_rows
                left_size -= batch.nbytes
                read.update(_events_of(batch))  # ordered: the last version of each aggregate
                if left_rows <= 0 or left_size <= 0:  # breaking closes the connection
                    rest = _unread(some, read, repeats=not self._layout.key_is_unique)
                    break
        table = pa.Table.from_batches(batches, EVENTS)
        if rest and not self._layout.key_is_unique:  # read again, with all rows of the version
            again = {(r.aggregate_id, r.first) for r in rest}
            table = table.filter(pa.array([event not in again for event in _events_of(table)]))
        return table, rest

    def seen(self, of: VersionRange) -> list[RowSeen]:
        blocks = self._blocks(statements.versions_by_key(self._layout, [of]))
        return [row for block in blocks for row in rows_seen(self._layout, block)]

    def versions(self, of: VersionRange, most: int, *, highest: bool = False) -> list[int]:
        sql = statements.version_numbers(self._layout, of, most, highest=highest)
        return [int(version) for (version,) in self._run(sql)]

    def existing(self, wanted: Sequence[tuple[str, int]]) -> set[tuple[str, int]]:
        found: set[tuple[str, int]] = set()
        for at in range(0, len(wanted), _RANGES_PER_STATEMENT):
            some = [VersionRange(a, v, v) for a, v in wanted[at : at + _RANGES_PER_STATEMENT]]
            sql = statements.versions_by_key(self._layout, some, only_keys=True)
            for ids, versions in self._blocks(sql, _PORTION_ROWS):
                columns = ids.cast(pa.string()), versions.cast(pa.string()).cast(pa.int64())
                found.update(zip(*(column.to_pylist() for column in columns), strict=True))
        return found

    def below(
        self, aggregate_ids_and_versions: Sequence[tuple[str, int]], limit: int = 16
    ) -> Iterator[pa.RecordBatch]:
        at_once = max(1, min(_UNIONS_PER_STATEMENT, _PORTION_ROWS // limit))
        for at in range(0, len(aggregate_ids_and_versions), at_once):
            some = aggregate_ids_and_versions[at : at + at_once]
            sql = statements.lower_versions(self._layout, some, limit)
            blocks = self._blocks(sql, _PORTION_ROWS)
            batches = [keys_batch(self._layout, block, None, None) for block in blocks]
            if batches:
                yield from pa.Table.from_batches(batches).combine_chunks().to_batches()


def altered_table(layout: Layout) -> StoreError:
    return StoreError(
        "store.table_altered",
        "the event table was altered; its layout was read again",
        where=layout.where,
        suggestion="nothing to do",
        retriable=True,
    )


def _without_moment(last: int, batches: list[pa.RecordBatch]) -> Page:
    kept = []
    for batch in batches:
        times = batch.column("create_time").to_numpy()
        kept.append(batch.filter(pa.array(times != last)) if last in times[-1:] else batch)
    kept = [batch for batch in kept if batch.num_rows]
    if not kept:
        return Page([], last)
    return Page(kept, int(kept[-1].column("create_time")[-1].as_py()))


def _events_of(rows: pa.Table | pa.RecordBatch) -> Iterator[tuple[str, int]]:
    columns = (rows.column(name).to_pylist() for name in ("aggregate_id", "version"))
    return zip(*columns, strict=True)


def _unread(
    ranges: Sequence[VersionRange], read: Mapping[str, int], *, repeats: bool
) -> list[VersionRange]:
    """The ranges, or parts, that may be unread.

    `read` has the last version read of each aggregate. If a version may have several rows
    (`repeats`), that one counts as unread, unless it is all that was read.
    """
    rest = []
    for r in ranges:
        last = read.get(r.aggregate_id, r.first - 1)
        first = last if repeats and last > r.first else last + 1
        if (first := max(r.first, first)) <= r.last:
            rest.append(replace(r, first=first))
    return rest
