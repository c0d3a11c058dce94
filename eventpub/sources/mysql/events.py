"""The event table as a `Source`: how far it may be read, and windows of it.

Each call is one statement of its own (or several that do not depend on one another's view), under
READ COMMITTED.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from datetime import datetime
from typing import Any, Self

import pyarrow as pa

from eventpub.admission.model import EVENTS, Shard, VersionRange
from eventpub.config import Store
from eventpub.errors import StoreError
from eventpub.private_apis.packets import Columns
from eventpub.sources.base import NewRow, Page, Poll
from eventpub.sources.mysql import server, statements
from eventpub.sources.mysql.by_key import BATCH_ROWS, ByKey, events_of
from eventpub.sources.mysql.connection import connect_for_reading, run
from eventpub.sources.mysql.layout import Layout, discover
from eventpub.sources.mysql.rows import keys_batch, local_times, micros, record_batch, with_identity

_PORTION_ROWS = 100_000
_PORTION_BYTES = 16 << 20
_LONG = 10_000_000
"""µs of a window from which on it is read in portions, which costs a question each."""
_COUNTS_PER_STATEMENT = 100
_MOST_NEVER_READ = 1_000
_MOST_AHEAD = 10_000
"""Rows of the future that are counted."""


class EventStore(ByKey):
    """The event table, over connections of its own that are made when needed: a `Source`."""

    @staticmethod
    def discover(config: Store) -> Layout:
        """What the event table looks like.

        Raises:
            StoreError: it cannot be reached, or is not a table that can be published.
        """
        with closing(connect_for_reading(config)) as connection:
            return discover(config, connection)

    @staticmethod
    def server(config: Store) -> server.Server:
        """Which server it is, and its role.

        Raises:
            StoreError: it cannot be reached, or store.replica.
        """
        with closing(connect_for_reading(config)) as connection:
            found = server.examine(config, connection)
        found.require_primary(config)
        return found

    def __init__(self, config: Store, layout: Layout) -> None:
        super().__init__(config, layout)
        self.without_identity = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections; the next call makes new ones."""
        self._pool.close()

    def require_same_times(self) -> None:
        """Raises: StoreError: store.table_altered: `create_time` is read in another way now."""
        if self.discover(self._config).read_as != self._layout.read_as:
            raise altered_table(self._layout)

    def now(self) -> int:
        """The database's time, µs."""
        return int(self._run(statements.NOW)[0][0])

    def poll(
        self, after: int, delay: int, page_rows: int | None, at_most: int | None = None
    ) -> Poll:
        """How far a window that begins after `after` may reach now; see `Source.poll`."""
        # Local time repeats itself where the clocks go back: a window ends before that.
        while True:
            stop = self._layout.next_backward_change(after + 2) - 1
            with self._pool.connection() as connection:
                who = server.columns(connection)
                sql = statements.now_and_first_time(self._layout, after, stop, who)
                now, first, *flags, identity = run(connection, sql)[0]
                server.require_same_role(self._config, connection, flags, identity)
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
        # the last value whose time has passed as a whole
        return boundary if unit == 1 else boundary // unit * unit - unit

    def _page_end(self, after: int, upto: int, rows: int | None) -> int | None:
        """When the last row of a page was created; None where there are fewer rows."""
        values = statements.local_range(self._layout, after, upto)
        if rows is None or values is None:
            return None
        found = self._run(statements.nth_time(self._layout, *values, rows))
        return self._layout.instant(micros(found[0][0]), after, upto) if found else None

    def waiting(self, after: int, upto: int, most: int) -> tuple[int, int]:
        """The oldest `create_time` of what is not read yet, and how many rows that are."""
        values = statements.local_range(self._layout, after, upto)
        if values is None:
            return upto, 0
        [(oldest, count)] = self._run(statements.waiting(self._layout, *values, most))
        return self._layout.instant(micros(oldest), after, upto) if count else upto, int(count)

    def newest(self, most: int, above: int | None = None) -> list[NewRow]:
        """The rows with the highest ids, or the lowest above one; see `Source.newest`."""
        layout = self._layout
        if layout.id_index is not None:
            found = self._run(statements.newest_ids(layout, above, most))
        else:
            now = self.now()
            passed = statements.local_range(layout, now - _LONG, now)
            if passed is None:
                return []
            found = self._run(statements.newest_times(layout, above, passed[1], most))
        return [
            NewRow(int(number), layout.latest_instant(micros(time)))
            for number, time in found
            if isinstance(time, datetime)  # a zero date is no time
        ]

    def ahead(self) -> tuple[int, int]:
        """By how much the newest `create_time` lies in the future, µs; and how many rows do.

        One statement for both: a process may be suspended between two, and rows come meanwhile.
        """
        [(now, time)] = self._run(statements.now_and_newest_time(self._layout))
        newest = self._layout.instant(micros(time)) if isinstance(time, datetime) else 0
        if newest <= now:
            return 0, 0
        return newest - int(now), self.waiting(int(now), newest, _MOST_AHEAD)[1]

    def never_read(self) -> int:
        """How many rows are never read, for the time that they have; some 1,000 are counted."""
        return int(self._run(statements.without_time(self._layout, _MOST_NEVER_READ))[0][0])

    def window(
        self, after: int, upto: int, shard: Shard | None, batch_rows: int = 10_000
    ) -> Generator[pa.RecordBatch, None, None]:
        """The events of a window in the order of time; see `Source.window`.

        No statement is open while a batch is worked on: until its end it would keep whoever alters
        the table waiting, and with it every writer queued after it. And however few rows of a long
        window are the shard's, each is one of about 100,000 rows: without a row for
        `connection.READ_TIMEOUT` the server would count as gone, again and again.
        """
        is_long = shard is not None and shard.shards > 1 and upto - after > _LONG
        for end in self._portions(after, upto, by_rows=is_long):
            while after < end:
                page = self.page(after, end, _PORTION_ROWS, _PORTION_BYTES, shard)
                upto_here = end if page.end is None else page.end
                is_too_large = page.end is not None and not page.batches
                moment = self._moment(upto_here, shard) if is_too_large else page.batches
                for batch in moment:
                    for at in range(0, batch.num_rows, batch_rows):
                        yield batch.slice(at, batch_rows)
                after = upto_here

    def _moment(self, upto: int, shard: Shard | None) -> Iterator[pa.RecordBatch]:
        """As `window`, of one moment that has more rows than a portion: by their keys."""
        # of a repeated local time, rows by key have the first instant
        at_key = self._layout.instant(self._layout.local(upto))
        times = EVENTS.field("create_time")
        for keys in self.keys(upto - 1, upto, shard):
            for at in range(0, len(keys), BATCH_ROWS):
                events = dict.fromkeys(events_of(keys.slice(at, BATCH_ROWS)))
                left = [VersionRange(a, version, version) for a, version in events]
                while left:
                    rows, left = self.fetch(left, BATCH_ROWS, _PORTION_BYTES)
                    rows = rows.filter(pa.array(rows.column("create_time").to_numpy() == at_key))
                    here = pa.repeat(pa.scalar(upto, times.type), len(rows))
                    yield from rows.set_column(5, times, here).to_batches()

    def _identified(self, block: Columns) -> Columns:
        if not self._layout.skips_nulls:
            return block
        kept = with_identity(block)
        self.without_identity += len(block[0]) - len(kept[0])
        return kept

    def _portions(self, after: int, upto: int, *, by_rows: bool) -> Iterator[int]:
        """Where the portions of a window end: where the clocks go back, and after each
        `_PORTION_ROWS` rows of all shards, about."""
        while after < upto:
            end = min(self._layout.next_backward_change(after + 2) - 1, upto)
            rows_end = self._page_end(after, end, _PORTION_ROWS) if by_rows else None
            after = end if rows_end is None else rows_end
            yield after

    def page(self, after: int, upto: int, rows: int, size: int, shard: Shard | None = None) -> Page:
        """The first events of a window, but for those of its last moment; see `Source.page`."""
        layout = self._layout
        values = statements.local_range(layout, after, upto)
        if values is None:
            return Page([], None)
        batches: list[pa.RecordBatch] = []
        left_rows, left_size, newest = rows, size, None
        for block in self._blocks(statements.window(layout, *values, shard, rows)):
            batches.append(record_batch(layout, self._identified(block), after, upto))
            left_rows -= len(block[0])
            left_size -= batches[-1].nbytes
            newest = block[-1][-1:]
            if left_size <= 0:  # leaving it closes the connection
                break
        if newest is None or (left_rows > 0 and left_size > 0):
            return Page(batches, None)
        return _without_moment(int(layout.instants(local_times(newest), after, upto)[0]), batches)

    def counts(self, ranges: Sequence[tuple[int, int]]) -> list[int]:
        """How many rows each of some windows ``(after, upto]`` has, of all shards."""
        found = [0] * len(ranges)
        values = [(n, statements.local_range(self._layout, *r)) for n, r in enumerate(ranges)]
        some = [(n, local) for n, local in values if local is not None]
        for at in range(0, len(some), _COUNTS_PER_STATEMENT):
            sql = statements.counts(self._layout, some[at : at + _COUNTS_PER_STATEMENT])
            for number, count in self._run(sql):
                found[int(number)] = int(count)
        return found

    def keys(self, after: int, upto: int, shard: Shard | None) -> Iterator[pa.RecordBatch]:
        """`aggregate_id`, `version` and `create_time` of the rows of a window (of one shard)."""
        for end in self._portions(after, upto, by_rows=upto - after > _LONG):
            values = statements.local_range(self._layout, after, end)
            if values is not None:
                sql = statements.keys(self._layout, *values, shard)
                # to its end, as of `window`: what compares them waits for the broker
                for block in list(self._blocks(sql, _PORTION_ROWS)):
                    yield keys_batch(self._layout, block, after, end)
            after = end

    def _run(self, sql: str) -> list[tuple[Any, ...]]:
        with self._pool.connection() as connection:
            return run(connection, sql)


def altered_table(layout: Layout) -> StoreError:
    """The event table is not what it was."""
    return StoreError(
        "store.table_altered",
        "the event table was altered; its layout was read again",
        where=layout.where,
        suggestion="nothing to do",
        retriable=True,
    )


def _without_moment(last: int, batches: list[pa.RecordBatch]) -> Page:
    """A page without the rows of the time that was read last, which may have more."""
    kept = []
    for batch in batches:
        times = batch.column("create_time").to_numpy()
        kept.append(batch.filter(pa.array(times != last)) if last in times[-1:] else batch)
    kept = [batch for batch in kept if batch.num_rows]
    if not kept:
        return Page([], last)
    return Page(kept, int(kept[-1].column("create_time")[-1].as_py()))
