"""The event store's stand-in: the same answers as `eventpub.store.EventStore`, from `World`."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from eventpub.admission import EVENTS, Shard, VersionRange
from eventpub.errors import StoreError
from eventpub.store.events import NewRow, Page, Poll
from eventpub.store.server import Server
from tests.simulation.world import Row, world

_TYPES = [EVENTS.field(i).type for i in range(6)]


@cache
def crc(aggregate_id: str) -> int:
    """What decides an aggregate's partition."""
    return zlib.crc32(aggregate_id.encode())


def record_batch(rows: Sequence[Row]) -> pa.RecordBatch:
    """Rows as the store gives them."""
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


class EventStore:
    """Each call is a statement of its own and sees what is committed when it begins."""

    without_identity = 0

    def never_read(self) -> int:
        """All times can be read."""
        return 0

    @staticmethod
    def discover(config: object) -> Any:
        """Nothing to discover."""
        del config
        setup = world().setup
        return SimpleNamespace(
            key_is_unique=not setup.allows_second or (setup.drops_key and not world().second),
            times_last=True,
            repeated=(),
            read_as="UTC/1",
            where="events",
            table="events",
            zone=None,
            id_index="PRIMARY",
            sampled_by="`id`",
        )

    @staticmethod
    def server(config: object) -> Server:
        """The same one always, none's replica."""
        del config
        return Server("server", read_only=False, source=None, source_is_visible=True)

    def __init__(self, config: object, layout: object) -> None:
        del config, layout
        self._world = world()

    def __enter__(self) -> EventStore:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def close(self) -> None:
        """Nothing to close."""

    def _statement(self, name: str) -> None:
        self._world.point(f"store.{name}")
        if self._world.fault("store away"):
            raise StoreError("store.unreachable", "the connection is gone", retriable=True)

    def require_same_times(self) -> None:
        """The table is never altered."""

    def now(self) -> int:
        """As there."""
        self._statement("now")
        return self._world.clock

    def newest(self, most: int, above: int | None = None) -> list[NewRow]:
        """Samples of the newest ids are not simulated."""
        del most, above
        return []

    def poll(
        self, after: int, delay: int, page_rows: int | None, at_most: int | None = None
    ) -> Poll:
        """As there."""
        self._statement("poll")
        now = self._world.clock
        self._world.polled(after)
        upper = now - delay if at_most is None else min(now - delay, at_most)
        times = sorted(r.create_time for r in self._world.rows if after < r.create_time <= upper)
        page_end = None
        if page_rows is not None and len(times) >= (most := max(page_rows, self._world.page_rows)):
            page_end = times[most - 1]
        newer = [
            r.create_time for r in self._world.rows if max(after, upper) < r.create_time <= now
        ]
        return Poll(now, upper, page_end, bool(times), None if times else min(newer, default=None))

    def counts(self, ranges: Sequence[tuple[int, int]]) -> list[int]:
        """As there."""
        self._statement("counts")
        times = [r.create_time for r in self._world.rows]
        return [sum(after < t <= upto for t in times) for after, upto in ranges]

    def keys(self, after: int, upto: int, shard: Shard | None) -> Iterator[pa.RecordBatch]:
        """As there."""
        self._statement("keys")
        size = self._world.setup.batch_rows
        for batch in self._window(after, upto, shard, size):
            yield batch.select(["aggregate_id", "version", "create_time"])

    def window(
        self, after: int, upto: int, shard: Shard | None, batch_rows: int = 0
    ) -> Iterator[pa.RecordBatch]:
        """As there."""
        self._statement("window")
        return self._window(after, upto, shard, batch_rows or self._world.setup.batch_rows)

    def page(self, after: int, upto: int, rows: int, size: int) -> Page:
        """As there; the size is left to the tests of the store itself."""
        del size
        self._statement("page")
        self._world.reached = max(self._world.reached, upto)
        found = self._rows(after, upto, None)
        if len(found) < (most := max(rows, self._world.page_rows)):
            return Page([record_batch(found)] if found else [], None)
        last = found[most - 1].create_time
        kept = [r for r in found if r.create_time < last]
        return Page([record_batch(kept)], kept[-1].create_time) if kept else Page([], last)

    def _window(
        self, after: int, upto: int, shard: Shard | None, size: int
    ) -> Iterator[pa.RecordBatch]:
        self._world.reached = max(self._world.reached, upto)
        rows = self._rows(after, upto, shard)
        for at in range(0, len(rows), size):
            self._statement("rows")
            yield record_batch(rows[at : at + size])

    def _rows(self, after: int, upto: int, shard: Shard | None) -> list[Row]:
        rows = [
            r
            for r in self._world.rows
            if after < r.create_time <= upto
            and (
                shard is None
                or crc(r.aggregate_id) % shard.partitions % shard.shards == shard.number
            )
        ]
        return sorted(rows, key=lambda r: (r.create_time, r.payload))

    def fetch(
        self, ranges: Sequence[VersionRange], rows: int, size: int, seconds: float | None = None
    ) -> tuple[pa.Table, list[VersionRange]]:
        """As there, but for seconds."""
        del seconds
        self._statement("backtrack")
        self._world.process.looked = self._world.moment
        found: list[Row] = []
        rest: list[VersionRange] = []
        for wanted in ranges:
            for version in range(wanted.first, wanted.last + 1):
                more = self._world.rows_of((wanted.aggregate_id, version))
                together = [*found, *more]
                if len(found) >= rows or (
                    more and found and sum(len(r.payload) for r in together) > size
                ):
                    rest.append(replace(wanted, first=version))
                    break
                found = together
        most = self._world.setup.most_fetched
        if most and len(found) > most:
            self._world.too_much = f"{len(found)} rows asked for by version, more than {most}"
        return pa.Table.from_batches([record_batch(found)]), rest

    def existing(self, wanted: Sequence[tuple[str, int]]) -> set[tuple[str, int]]:
        """As there."""
        self._statement("backtrack")
        self._world.process.looked = self._world.moment
        return {key for key in wanted if key in self._world.committed}

    def below(
        self, aggregate_ids_and_versions: Sequence[tuple[str, int]], limit: int = 16
    ) -> Iterator[pa.RecordBatch]:
        """As there."""
        self._statement("below")
        committed = self._world.committed
        rows: list[Row] = []
        for aggregate_id, version in sorted(aggregate_ids_and_versions):
            versions = range(version - 1, -1, -1)
            found = [committed[aggregate_id, v] for v in versions if (aggregate_id, v) in committed]
            rows += found[:limit]
        yield record_batch(rows).select(["aggregate_id", "version", "create_time"])
