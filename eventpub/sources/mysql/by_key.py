"""Single versions of the event table: fetched, counted and found by aggregate, not by time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import monotonic

import pyarrow as pa

from eventpub.admission.model import EVENTS, VersionRange
from eventpub.config import Store
from eventpub.private_apis.packets import Columns, stream
from eventpub.sources.base import RowSeen
from eventpub.sources.mysql import statements
from eventpub.sources.mysql.connection import ASKED_AFTER, KEPT_FOR, Connection, is_alive, run
from eventpub.sources.mysql.failures import mapped
from eventpub.sources.mysql.layout import Layout
from eventpub.sources.mysql.rows import keys_batch, record_batch, rows_seen
from eventpub.sources.mysql.server import connect_to_primary

BATCH_BYTES = 4 * 1024 * 1024
BATCH_ROWS = 10_000
_ANSWERS = 100_000
"""Rows of an answer that has only keys."""
_RANGES_PER_STATEMENT = 500
_UNIONS_PER_STATEMENT = 100
_MOST_BELOW = 100_000
"""Rows that one statement of `below` may bring."""


class ByKey:
    """The part of `EventStore` that looks rows up by aggregate and version."""

    def __init__(self, config: Store, layout: Layout) -> None:
        self._config = config
        self._layout = layout
        self._pool = Pool(config, layout.where)

    def fetch(
        self, ranges: Sequence[VersionRange], rows: int, size: int, seconds: float | None = None
    ) -> tuple[pa.Table, list[VersionRange]]:
        """The events of version ranges, and what was not read of them; see `Source.fetch`."""
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
            block_size = min(left_size, BATCH_BYTES)
            for block in self._blocks(sql, min(left_rows, BATCH_ROWS), block_size):
                batch = record_batch(self._layout, block, None, None)
                batches.append(batch)
                left_rows -= batch.num_rows
                left_size -= batch.nbytes
                read.update(events_of(batch))  # ordered: the last version of each aggregate
                if left_rows <= 0 or left_size <= 0:  # leaving it closes the connection
                    rest = _unread(some, read, repeats=not self._layout.key_is_unique)
                    break
        table = pa.Table.from_batches(batches, EVENTS)
        if rest and not self._layout.key_is_unique:  # read again, with all rows of the version
            again = {(r.aggregate_id, r.first) for r in rest}
            table = table.filter(pa.array([event not in again for event in events_of(table)]))
        return table, rest

    def seen(self, of: VersionRange) -> list[RowSeen]:
        """The rows of a range as they are, whether or not they can be published."""
        blocks = self._blocks(statements.versions_by_key(self._layout, [of]))
        return [row for block in blocks for row in rows_seen(self._layout, block)]

    def versions(self, of: VersionRange, most: int, *, highest: bool = False) -> list[int]:
        """The lowest versions of a range, or the highest; see `Source.versions`."""
        sql = statements.version_numbers(self._layout, of, most, highest=highest)
        with self._pool.connection() as connection:
            return [int(version) for (version,) in run(connection, sql)]

    def existing(self, wanted: Sequence[tuple[str, int]]) -> set[tuple[str, int]]:
        """Which of some (aggregate, version) there are; costs no row, only the index."""
        found: set[tuple[str, int]] = set()
        for at in range(0, len(wanted), _RANGES_PER_STATEMENT):
            sql = statements.existing(self._layout, wanted[at : at + _RANGES_PER_STATEMENT])
            for ids, versions in self._blocks(sql, _ANSWERS):
                columns = ids.cast(pa.string()), versions.cast(pa.string()).cast(pa.int64())
                found.update(zip(*(column.to_pylist() for column in columns), strict=True))
        return found

    def below(
        self, aggregate_ids_and_versions: Sequence[tuple[str, int]], limit: int = 16
    ) -> Iterator[pa.RecordBatch]:
        """Keys and times of lower versions, at most `limit` of each; see `Source.below`."""
        at_once = max(1, min(_UNIONS_PER_STATEMENT, _MOST_BELOW // limit))
        for at in range(0, len(aggregate_ids_and_versions), at_once):
            some = aggregate_ids_and_versions[at : at + at_once]
            sql = statements.lower_versions(self._layout, some, limit)
            blocks = self._blocks(sql, _MOST_BELOW)
            batches = [keys_batch(self._layout, block, None, None) for block in blocks]
            if batches:
                yield from pa.Table.from_batches(batches).combine_chunks().to_batches()

    def _blocks(
        self, sql: str, rows: int = BATCH_ROWS, size: int = BATCH_BYTES
    ) -> Iterator[Columns]:
        """As `stream`; one that is left before its end closes its connection."""
        with self._pool.connection() as connection:
            yield from stream(connection, sql, rows=rows, size=size)


def events_of(rows: pa.Table | pa.RecordBatch) -> Iterator[tuple[str, int]]:
    """Aggregate and version of each row."""
    columns = (rows.column(name).to_pylist() for name in ("aggregate_id", "version"))
    return zip(*columns, strict=True)


def _unread(
    ranges: Sequence[VersionRange], read: Mapping[str, int], *, repeats: bool
) -> list[VersionRange]:
    """What of some ranges is not known to be read, from the last version read of each aggregate.

    Versions after the last one read count as unread, even if they do not exist: only the end of
    the answer would show that. So does the last one where a version may have more rows, unless it
    is all that was read.
    """
    rest = []
    for r in ranges:
        last = read.get(r.aggregate_id, r.first - 1)
        first = last if repeats and last > r.first else last + 1
        if (first := max(r.first, first)) <= r.last:
            rest.append(replace(r, first=first))
    return rest


class Pool:
    """Connections to a server that may be read."""

    def __init__(self, config: Store, where: str) -> None:
        self._config = config
        self._where = where
        self._idle: list[tuple[Connection, float, float]] = []

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """One that no other caller uses; after an error it is closed.

        Raises:
            StoreError: the database's, or store.replica.
        """
        connection, made = self._take_idle() or self._connect()
        finished = False
        try:
            with mapped(self._where):
                yield connection
            finished = True
        finally:
            if finished:
                self._idle.append((connection, made, monotonic()))
            else:
                connection._force_close()  # type: ignore[attr-defined]

    def close(self) -> None:
        """Closes what is idle."""
        while self._idle:
            self._idle.pop()[0].close()

    def _connect(self) -> tuple[Connection, float]:
        return connect_to_primary(self._config)[0], monotonic()

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
