"""Reading the event table: how far it may be read, a window of it, and single versions of it.

Each call is one statement of its own (or several that do not depend on one another's view), under
READ COMMITTED: nothing is concluded from two reads of one snapshot. An `EventStore` holds no state
but connections, so any call may be made again after an error.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from time import monotonic
from typing import Any

import numpy as np
import pyarrow as pa

from eventpub.admission.model import EVENTS, Shard, VersionRange
from eventpub.config import Store
from eventpub.errors import StoreError
from eventpub.private_apis.packets import Columns, stream
from eventpub.store import server, statements
from eventpub.store.connection import (
    ASKED_AFTER,
    KEPT_FOR,
    Connection,
    connect_for_reading,
    is_alive,
    run,
)
from eventpub.store.failures import mapped
from eventpub.store.layout import Layout, discover
from eventpub.store.rows import (
    RowSeen,
    keys_batch,
    local_times,
    record_batch,
    rows_seen,
    with_identity,
)

_BATCH_BYTES = 4 * 1024 * 1024
_BATCH_ROWS = 10_000
_PORTION_ROWS = 100_000
_PORTION_BYTES = 16 << 20
_LONG = 10_000_000
"""µs of a window from which on it is read in portions, which costs a question each."""

_EVENT = "aggregate_id", "version"
_RANGES_PER_STATEMENT = 500
_UNIONS_PER_STATEMENT = 100
_MOST_NEVER_READ = 1_000
_MOST_AHEAD = 10_000
"""Rows of the future that are counted."""
_MOST_BELOW = 100_000
"""Rows that one statement of `below` may bring."""


@dataclass(frozen=True)
class Poll:
    """How far the store may be read.

    Args:
        now: the database's time, µs.
        upper: the boundary ``now − delay``, lowered to a value of the column's precision whose
            time has passed altogether, and to the next change of the clocks backward.
        page_end: `create_time` of the page's last row; None if there are fewer rows.
        has_rows: whether there is any row behind `after` and up to `upper`.
        next_row: where there is none, `create_time` of the first above `upper`; None: there is none
            of these either, or it is of the future.
        server: who has answered; see `server.Server.identity`.
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
    """A row of a sample.

    Attributes:
        id: its `id`.
        created: its `create_time`, µs; of two instants that a local time may be, the later.
    """

    id: int
    created: int


class EventStore:
    """The event table, read only, over connections of its own that are made when needed.

    Errors of the database are `StoreError`; a retriable one leaves the store usable. One of them is
    store.replica: the address leads to a server that may not be read, now.

    Attributes:
        without_identity: rows that windows and pages had and that were passed over, since they have
            no aggregate or no version (`store.without_identity`).
    """

    @staticmethod
    def discover(config: Store) -> Layout:
        """What the event table looks like.

        Raises:
            StoreError: it cannot be reached, or is not a table that can be published.
        """
        connection = connect_for_reading(config)
        try:
            return discover(config, connection)
        finally:
            connection.close()

    @staticmethod
    def server(config: Store) -> server.Server:
        """Which server it is, and its role.

        Raises:
            StoreError: it cannot be reached, or store.replica.
        """
        connection = connect_for_reading(config)
        try:
            found = server.examine(config, connection)
        finally:
            connection.close()
        found.require_primary(config)
        return found

    def __init__(self, config: Store, layout: Layout) -> None:
        self._config = config
        self._layout = layout
        self._idle: list[tuple[Connection, float, float]] = []
        self.without_identity = 0

    def __enter__(self) -> EventStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections; the next call makes new ones."""
        while self._idle:
            self._idle.pop()[0].close()

    def require_same_times(self) -> None:
        """Nothing where `create_time` is still read as the layout says.

        Raises:
            StoreError: store.table_altered; what was read meanwhile means something else.
        """
        if self.discover(self._config).read_as != self._layout.read_as:
            raise altered_table(self._layout)

    def now(self) -> int:
        """The database's time, µs."""
        with self._connection() as connection:
            return int(run(connection, statements.NOW)[0][0])

    def poll(
        self, after: int, delay: int, page_rows: int | None, at_most: int | None = None
    ) -> Poll:
        """Looks how far a window that begins behind `after` may reach now.

        Args:
            after: the position, µs.
            delay: between the boundary and the database's time, µs.
            page_rows: most rows of the window; None: any number, which saves counting them.
            at_most: the boundary is never above it, µs.
        """
        layout = self._layout
        with self._connection() as connection:
            who = server.columns(connection)
            if layout.zone is None:  # values are in the order of time, so one question tells all
                sql = statements.now_and_first_time(layout, after, who)
                now, first, *flags, identity = run(connection, sql)[0]
                server.require_same_role(self._config, connection, flags, identity)
                boundary = self._boundary(now, delay, at_most)
                oldest = None if first is None else self._instant(first, after, boundary)
                if oldest is None or oldest > boundary:
                    is_newer = oldest is not None and oldest <= now
                    next_row = oldest if is_newer else None
                    return Poll(now, boundary, None, False, next_row, identity)
                page_end = self._page_end(connection, after, boundary, page_rows, oldest)
                return Poll(now, boundary, page_end, True, None, identity)
            now, *flags, identity = run(connection, statements.now_and(who))[0]
            server.require_same_role(self._config, connection, flags, identity)
            boundary = self._boundary(now, delay, at_most)
            # Local time repeats itself where the clocks go back: a window ends before that.
            back = [t - 1 for t in layout.zone.backward_changes(after + 1, now)]
            top = next((t for t in back if t >= boundary), now)
            start, oldest = after, None
            for end in [*(t for t in back if t < boundary), boundary]:
                upto = top if end == boundary else end
                oldest = self._page_end(connection, start, upto, 1)
                if oldest is not None and oldest <= end:
                    page_end = self._page_end(connection, start, end, page_rows, oldest)
                    return Poll(now, end, page_end, True, None, identity)
                start = end
            return Poll(now, boundary, None, False, oldest, identity)

    def _boundary(self, now: int, delay: int, at_most: int | None) -> int:
        boundary = now - delay if at_most is None else min(now - delay, at_most)
        unit = self._layout.unit
        # the last value whose time has passed as a whole
        return boundary if unit == 1 else boundary // unit * unit - unit

    def _page_end(
        self,
        connection: Connection,
        after: int,
        upto: int,
        rows: int | None,
        oldest: int | None = None,
    ) -> int | None:
        """When the last row of a page was created; None where there are fewer rows."""
        if rows is None:
            return None
        if rows == 1 and oldest is not None:
            return oldest
        values = statements.local_range(self._layout, after, upto)
        if values is None:
            return None
        found = run(connection, statements.nth_time(self._layout, *values, rows))
        return self._instant(found[0][0], after, upto) if found else None

    def waiting(self, after: int, upto: int, most: int) -> tuple[int, int]:
        """How much is not read yet: the oldest `create_time`, and how many rows there are.

        Args:
            after: the position, µs.
            upto: the boundary, µs.
            most: the count stops here; a count of a long backlog costs as much as reading it.
        """
        values = statements.local_range(self._layout, after, upto)
        if values is None:
            return upto, 0
        with self._connection() as connection:
            rows = run(connection, statements.waiting(self._layout, *values, most))
        oldest, count = rows[0]
        return (self._instant(oldest, after, upto) if count else upto), int(count)

    def newest(self, most: int, above: int | None = None) -> list[NewRow]:
        """The rows with the highest ids.

        Where the table has no index of numbers by `id`, those with the latest `create_time` that
        has passed, and that is the id, as µs of local time.

        Args:
            most: so many.
            above: the lowest of those with a higher id instead.
        """
        with self._connection() as connection:
            if self._layout.id_index is not None:
                return newest_ids(self._layout, connection, most, above)
            now = int(run(connection, statements.NOW)[0][0])
            passed = statements.local_range(self._layout, now - _LONG, now)
            if passed is None:
                return []
            found = run(connection, statements.newest_times(self._layout, above, passed[1], most))
        return _new_rows(self._layout, found)

    def ahead(self) -> tuple[int, int]:
        """By how much the newest `create_time` lies in the future, µs; and how many rows do.

        One statement tells both: a process may be suspended between two, and rows come meanwhile.
        """
        with self._connection() as connection:
            now, time = run(connection, statements.now_and_newest_time(self._layout))[0]
        newest = _instant_of(self._layout, time)
        if newest is None or newest <= int(now):
            return 0, 0
        return newest - int(now), self.waiting(int(now), newest, _MOST_AHEAD)[1]

    def never_read(self) -> int:
        """How many rows are never read, for the time that they have; some 1,000 are counted."""
        with self._connection() as connection:
            sql = statements.without_time(self._layout, _MOST_NEVER_READ)
            return int(run(connection, sql)[0][0])

    def window(
        self, after: int, upto: int, shard: Shard | None, batch_rows: int = 10_000
    ) -> Generator[pa.RecordBatch, None, None]:
        """The events of ``after < create_time ≤ upto`` (of one shard), ordered by `create_time`.

        In batches of at most `batch_rows` rows, schema `EVENTS`; however long the window is, a
        portion of it is in memory. No statement is open while a batch is worked on: until its end
        it would keep whoever alters the table waiting, and behind them all who write to it. And
        however few rows of a long window are the shard's, each is one of about 100,000 rows:
        without a row for `connection.READ_TIMEOUT` the server would count as gone, again and again.
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
        """As `window`, of one moment that has more rows than a portion: by their ids or keys."""
        if self._layout.ties_by_id:
            yield from self._moment_by_id(upto, shard)
            return
        keys = self.keys(upto - 1, upto, shard)
        events = dict.fromkeys(event for batch in keys for event in _events(batch))
        ranges = [VersionRange(a, version, version) for a, version in events]
        zone = self._layout.zone  # of a repeated local time, rows by key have the first instant
        at_key = upto if zone is None else int(zone.utc(np.array([zone.local(upto)]))[0])
        for at in range(0, len(ranges), _BATCH_ROWS):
            some = ranges[at : at + _BATCH_ROWS]
            while some:
                rows, some = self.fetch(some, _BATCH_ROWS, _PORTION_BYTES)
                rows = rows.filter(pa.array(rows.column("create_time").to_numpy() == at_key))
                times = pa.repeat(pa.scalar(upto, EVENTS.field(5).type), len(rows))
                yield from rows.set_column(5, EVENTS.field(5), times).to_batches()

    def _moment_by_id(self, at: int, shard: Shard | None) -> Iterator[pa.RecordBatch]:
        layout, last, is_over = self._layout, None, False
        values = statements.local_range(layout, at - 1, at)
        while values is not None and not is_over:
            batches: list[pa.RecordBatch] = []
            rows = 0
            statement = statements.moment(layout, values[0], shard, last, _PORTION_ROWS)
            for *block, ids in self._blocks(statement, _BATCH_ROWS, _BATCH_BYTES):
                batches.append(record_batch(layout, self._identified(block), at - 1, at))
                last, rows = int(ids[-1].as_py()), rows + len(ids)
                if sum(batch.nbytes for batch in batches) >= _PORTION_BYTES:
                    break
            else:
                is_over = rows < _PORTION_ROWS
            yield from batches

    def _identified(self, block: Columns) -> Columns:
        if not self._layout.skips_nulls:
            return block
        kept = with_identity(block)
        self.without_identity += len(block[0]) - len(kept[0])
        return kept

    def _portions(self, after: int, upto: int, *, by_rows: bool) -> Iterator[int]:
        """Where the portions of a window end: where the clocks go back, and after each
        `_PORTION_ROWS` rows of all shards, about."""
        zone = self._layout.zone
        back = zone.backward_changes(after + 1, upto) if zone else []
        for stop in [*(t - 1 for t in back), upto]:
            while after < stop:
                end = None
                if by_rows:
                    with self._connection() as connection:
                        end = self._page_end(connection, after, stop, _PORTION_ROWS)
                after = stop if end is None else end
                yield after

    def page(self, after: int, upto: int, rows: int, size: int, shard: Shard | None = None) -> Page:
        """The first events of a window, by `create_time`, but for those of its last moment.

        What the last moment has need not be complete where a page ends. To leave it to the next one
        costs less than to have the rows counted before they are read.

        Args:
            after: the window's begin, µs.
            upto: its end, µs; the clocks do not go back in between.
            rows: most rows.
            size: about so many bytes, at most.
            shard: only its rows; None: all.
        """
        layout = self._layout
        values = statements.local_range(layout, after, upto)
        if values is None:
            return Page([], None)
        statement = statements.window(layout, *values, shard, rows)
        batches: list[pa.RecordBatch] = []
        left_rows, left_size, newest = rows, size, None
        for block in self._blocks(statement, _BATCH_ROWS, _BATCH_BYTES):
            batches.append(record_batch(layout, self._identified(block), after, upto))
            left_rows -= len(block[0])
            left_size -= batches[-1].nbytes
            newest = block[-1][-1:]
            if left_size <= 0:  # leaving it closes the connection
                break
        if newest is None or (left_rows > 0 and left_size > 0):
            return Page(batches, None)
        return _without_last_moment(layout, batches, newest, (after, upto))

    def counts(self, ranges: Sequence[tuple[int, int]]) -> list[int]:
        """How many rows each of some windows ``(after, upto]`` has, of all shards."""
        found = [0] * len(ranges)
        values = {
            number: local
            for number, (after, upto) in enumerate(ranges)
            if (local := statements.local_range(self._layout, after, upto)) is not None
        }
        numbers = list(values)
        with self._connection() as connection:
            for at in range(0, len(numbers), _UNIONS_PER_STATEMENT):
                some = numbers[at : at + _UNIONS_PER_STATEMENT]
                sql = statements.counts(self._layout, [values[n] for n in some])
                for number, count in run(connection, sql):
                    found[some[int(number)]] = int(count)
        return found

    def keys(self, after: int, upto: int, shard: Shard | None) -> Iterator[pa.RecordBatch]:
        """`aggregate_id`, `version` and `create_time` of the rows of a window (of one shard)."""
        layout = self._layout
        for end in self._portions(after, upto, by_rows=upto - after > _LONG):
            values = statements.local_range(layout, after, end)
            if values is not None:
                with self._connection() as connection:
                    statement = statements.keys(layout, *values, shard)
                    # to its end, as of `window`: who compares them waits for the broker
                    blocks = list(stream(connection, statement, rows=100_000, size=_BATCH_BYTES))
                for block in blocks:
                    yield keys_batch(layout, block, after, end)
            after = end

    def fetch(
        self,
        ranges: Sequence[VersionRange],
        rows: int,
        size: int,
        seconds: float | None = None,
    ) -> tuple[pa.Table, list[VersionRange]]:
        """As many events of version ranges as one batch may hold, whatever their `create_time`.

        Args:
            rows: about so many, at most.
            size: about so many bytes, at most.
            seconds: no other statement is begun after so many; None: however long it takes.

        Returns:
            The events, each aggregate's in ascending order, and what of the ranges was not read:
            fewer than before, or smaller ones.
        """
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
            for batch in self._by_range(some, min(left_rows, _BATCH_ROWS), left_size):
                batches.append(batch)
                left_rows -= batch.num_rows
                left_size -= batch.nbytes
                read.update(_events(batch))  # ordered: the last version of each aggregate
                if left_rows <= 0 or left_size <= 0:  # leaving it closes the connection
                    rest = _unread(some, read, repeats=not self._layout.key_is_unique)
                    break
        table = pa.Table.from_batches(batches, EVENTS)
        if rest and not self._layout.key_is_unique:  # read again, with all rows of the version
            again = {(r.aggregate_id, r.first) for r in rest}
            table = table.filter(pa.array([event not in again for event in _events(table)]))
        return table, rest

    def _by_range(
        self, ranges: Sequence[VersionRange], rows: int, size: int
    ) -> Iterator[pa.RecordBatch]:
        sql = statements.versions_by_key(self._layout, ranges)
        for block in self._blocks(sql, rows, min(size, _BATCH_BYTES)):
            yield record_batch(self._layout, block, None, None)

    def _blocks(self, sql: str, rows: int, size: int) -> Iterator[Columns]:
        """As `stream`; one that is left before its end closes its connection."""
        with self._connection() as connection:
            yield from stream(connection, sql, rows=rows, size=size)

    def seen(self, of: VersionRange) -> list[RowSeen]:
        """The rows of a range as they are, in the order of their versions; for who looks at them.

        Of a row that cannot be published no error is made.
        """
        sql = statements.versions_by_key(self._layout, [of])
        blocks = self._blocks(sql, _BATCH_ROWS, _BATCH_BYTES)
        return [row for block in blocks for row in rows_seen(self._layout, block)]

    def versions(self, of: VersionRange, most: int, *, highest: bool = False) -> list[int]:
        """Which versions of a range there are, whatever else their rows have.

        Args:
            most: the lowest so many, ascending.
            highest: the highest so many instead, descending.
        """
        sql = statements.version_numbers(self._layout, of, most, highest=highest)
        with self._connection() as connection:
            return [int(version) for (version,) in run(connection, sql)]

    def existing(self, wanted: Sequence[tuple[str, int]]) -> set[tuple[str, int]]:
        """Which of some (aggregate, version) there are; costs no row, only the index."""
        found: set[tuple[str, int]] = set()
        with self._connection() as connection:
            for at in range(0, len(wanted), _RANGES_PER_STATEMENT):
                some = wanted[at : at + _RANGES_PER_STATEMENT]
                sql = statements.existing(self._layout, some)
                for ids, versions in stream(connection, sql, rows=100_000, size=_BATCH_BYTES):
                    columns = ids.cast(pa.string()), versions.cast(pa.string()).cast(pa.int64())
                    found.update(zip(*(column.to_pylist() for column in columns), strict=True))
        return found

    def below(
        self, aggregate_ids_and_versions: Sequence[tuple[str, int]], limit: int = 16
    ) -> Iterator[pa.RecordBatch]:
        """For each (aggregate, version): the keys and times of at most `limit` lower versions.

        In batches that hold all of what was asked for of each aggregate, schema as `keys`.
        """
        layout = self._layout
        at_once = max(1, min(_UNIONS_PER_STATEMENT, _MOST_BELOW // limit))
        with self._connection() as connection:
            for at in range(0, len(aggregate_ids_and_versions), at_once):
                some = aggregate_ids_and_versions[at : at + at_once]
                sql = statements.lower_versions(layout, some, limit)
                blocks = [
                    keys_batch(layout, block, None, None)
                    for block in stream(connection, sql, rows=_MOST_BELOW, size=_BATCH_BYTES)
                ]
                if blocks:
                    yield from pa.Table.from_batches(blocks).combine_chunks().to_batches()

    def _instant(self, time: object, after: int, upto: int) -> int:
        local = np.array([time], "datetime64[us]").astype(np.int64)
        zone = self._layout.zone
        return int((zone.utc(local, after, upto) if zone else local)[0])

    @contextmanager
    def _connection(self) -> Iterator[Connection]:
        """A connection that nobody else uses; it is not used again after an error."""
        connection, made = self._take_idle() or (self._connect(), monotonic())
        finished = False
        try:
            with mapped(self._layout.where):
                yield connection
            finished = True
        finally:
            if finished:
                self._idle.append((connection, made, monotonic()))
            else:
                connection._force_close()  # type: ignore[attr-defined]

    def _connect(self) -> Connection:
        connection = connect_for_reading(self._config)
        try:
            server.require_primary(self._config, connection)
        except BaseException:
            connection._force_close()  # type: ignore[attr-defined]
            raise
        return connection

    def _take_idle(self) -> tuple[Connection, float] | None:
        """One that is there, and when it was made.

        What has not been used for a while, a server or a proxy may close; what was made long ago
        may lead to a server that is not the store any more.
        """
        while True:
            try:  # not asked before whether there is one: another thread may take the last
                connection, made, used = self._idle.pop()
            except IndexError:
                return None
            if monotonic() - made > KEPT_FOR:
                connection.close()
                continue
            if monotonic() - used <= ASKED_AFTER or is_alive(connection):
                return connection, made
            connection._force_close()  # type: ignore[attr-defined]


def altered_table(layout: Layout) -> StoreError:
    """The event table is not what it was."""
    return StoreError(
        "store.table_altered",
        "the event table was altered; its layout was read again",
        where=layout.where,
        suggestion="nothing to do",
        retriable=True,
    )


def newest_ids(
    layout: Layout, connection: Connection, most: int, above: int | None = None
) -> list[NewRow]:
    """As `EventStore.newest`."""
    return _new_rows(layout, run(connection, statements.newest_ids(layout, above, most)))


def _new_rows(layout: Layout, found: Sequence[tuple[Any, ...]]) -> list[NewRow]:
    # a zero date is no time
    rows = [(number, time) for number, time in found if isinstance(time, datetime)]
    local = np.array([time for _, time in rows], "datetime64[us]").astype(np.int64)
    created = local if layout.zone is None else layout.zone.latest(local)
    return [NewRow(int(n), at) for (n, _), at in zip(rows, created.tolist(), strict=True)]


def newest_time(layout: Layout, connection: Connection) -> int | None:
    """The highest `create_time`, µs; None: there is no row."""
    found = run(connection, statements.newest_time(layout))
    return _instant_of(layout, found[0][0]) if found else None


def _instant_of(layout: Layout, time: object) -> int | None:
    """A `create_time`, µs; None for what is no time, such as a zero date."""
    if not isinstance(time, datetime):
        return None
    local = np.array([time], "datetime64[us]").astype(np.int64)
    return int((layout.zone.utc(local) if layout.zone else local)[0])


def _events(rows: pa.Table | pa.RecordBatch) -> Iterator[tuple[str, int]]:
    """Aggregate and version of each row."""
    return zip(*(rows.column(name).to_pylist() for name in _EVENT), strict=True)


def _unread(
    ranges: Sequence[VersionRange], read: Mapping[str, int], *, repeats: bool
) -> list[VersionRange]:
    """What of some ranges is not known to be read, from the last version read of each aggregate.

    What is read and empty behind it is among it: only the end of the answer would tell. Where a
    version may have more rows, the last one is, too, unless it is all that was read.
    """
    rest = []
    for r in ranges:
        last = read.get(r.aggregate_id, r.first - 1)
        first = last if repeats and last > r.first else last + 1
        if (first := max(r.first, first)) <= r.last:
            rest.append(replace(r, first=first))
    return rest


def _without_last_moment(
    layout: Layout,
    batches: list[pa.RecordBatch],
    newest: pa.Array[Any],
    window: tuple[int, int],
) -> Page:
    """A page without the rows of the time that was read last, which may have more."""
    zone, local = layout.zone, local_times(newest)
    last = int((zone.utc(local, *window) if zone else local)[0])
    kept = []
    for batch in batches:
        times = batch.column("create_time").to_numpy()
        kept.append(batch.filter(pa.array(times != last)) if last in times[-1:] else batch)
    kept = [batch for batch in kept if batch.num_rows]
    if not kept:
        return Page([], last)
    return Page(kept, int(kept[-1].column("create_time")[-1].as_py()))
