"""The event store of a simulation: the twin of `Source`, over the rows of the `World`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pyarrow as pa

from eventpub.admission.model import Shard, VersionRange
from eventpub.errors import StoreError
from eventpub.sources.base import NewRow, Page, Poll
from eventpub.sources.mysql.server import Server
from eventpub.sources.mysql.values import UTC
from tests.simulation.world import Row, world
from tests.twins.source import AnyRow, MemorySource

_BACKTRACKS = {"fetch": "backtrack", "existing": "backtrack"}


class _RowsByKey(Mapping[tuple[str, int], Sequence[Row]]):
    """The world's rows of each version."""

    def __getitem__(self, key: tuple[str, int]) -> Sequence[Row]:
        if rows := world().rows_of(key):
            return rows
        raise KeyError(key)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(world().committed)

    def __len__(self) -> int:
        return len(world().committed)


class EventStore(MemorySource):
    """Statements are points at which a schedule goes on, and fail while the store is away."""

    @staticmethod
    def discover(config: object) -> Any:
        """Nothing to discover."""
        del config
        setup = world().setup
        return SimpleNamespace(
            key_is_unique=not setup.allows_second or (setup.drops_key and not world().second),
            times_last=True,
            clock=UTC,
            read_as="UTC/1",
            ids_as="text of `aggregate_id`",
            columns=("`aggregate_id`",),
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
        super().__init__()
        del config, layout
        self._world = world()
        self.batch_rows = self._world.setup.batch_rows

    def statement(self, name: str) -> None:
        """A point of the schedule."""
        self._world.point(f"store.{_BACKTRACKS.get(name, name)}")
        if self._world.fault("store away"):
            raise StoreError("store.unreachable", "the connection is gone", retriable=True)
        if name in _BACKTRACKS:
            self._world.process.looked = self._world.moment

    @property
    def clock(self) -> int:
        """The world's."""
        return self._world.clock

    @property
    def page_rows(self) -> int:  # type: ignore[override]
        """As the schedule says by now."""
        return self._world.page_rows

    @property
    def rows(self) -> Sequence[AnyRow]:
        """What is committed."""
        return self._world.rows

    @property
    def by_key(self) -> Mapping[tuple[str, int], Sequence[AnyRow]]:
        """The world has them."""
        return _RowsByKey()

    def newest(self, most: int, above: int | None = None) -> list[NewRow]:
        """Samples of the newest ids are not simulated."""
        del most, above
        return []

    def poll(
        self, after: int, delay: int, page_rows: int | None, at_most: int | None = None
    ) -> Poll:
        """Tells the world."""
        found = super().poll(after, delay, page_rows, at_most)
        self._world.polled(after)
        return found

    def page(self, after: int, upto: int, rows: int, size: int, shard: Shard | None = None) -> Page:
        """The size is left to the tests of the store itself."""
        del size
        return super().page(after, upto, rows, 1 << 62, shard)

    def fetch(
        self, ranges: Sequence[VersionRange], rows: int, size: int, seconds: float | None = None
    ) -> tuple[pa.Table, list[VersionRange]]:
        """Says when it was too much."""
        found, rest = super().fetch(ranges, rows, size, seconds)
        most = self._world.setup.most_fetched
        if most and len(found) > most:
            self._world.too_much = f"{len(found)} rows asked for by version, more than {most}"
        return found, rest

    def _window(self, after: int, upto: int, shard: Shard | None) -> list[AnyRow]:
        self._world.reached = max(self._world.reached, upto)
        rows = super()._window(after, upto, shard)
        return sorted(rows, key=lambda r: (r.create_time, r.payload))
