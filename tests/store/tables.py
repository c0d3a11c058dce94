"""Event tables for the tests of the store: the one of the documentation and its variants."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

from eventpub.admission.model import EVENTS, Shard, VersionRange
from eventpub.config import Store
from eventpub.sources.mysql import EventStore
from tests.conftest import FreshDatabase

BYTEWISE = {"MySQL": "utf8mb4_0900_bin", "MariaDB": "utf8mb4_nopad_bin"}
SLICE = "slice SMALLINT UNSIGNED GENERATED ALWAYS AS (CRC32(aggregate_id) % 1024) STORED INVISIBLE"
SECOND = 1_000_000


def bytewise(database: FreshDatabase) -> str:
    """The collation that tells all bytes apart."""
    return BYTEWISE[database.server.name.split()[0]]


def create(
    database: FreshDatabase,
    *,
    aggregate_id: str = "",
    version: str = "BIGINT NOT NULL",
    payload: str = "LONGBLOB NULL",
    metadata: str = "metadata JSON NULL,",
    create_time: str = "TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6)",
    indexes: str = "UNIQUE KEY (aggregate_id, version), KEY (create_time)",
    table: str = "events",
) -> Store:
    """Creates the event table of the documentation with some of it changed."""
    identity = f"VARCHAR(255) CHARACTER SET utf8mb4 COLLATE {bytewise(database)} NOT NULL"
    database.execute(
        f"CREATE TABLE {table} (id BIGINT AUTO_INCREMENT PRIMARY KEY,"
        f" aggregate_id {aggregate_id or identity}, version {version},"
        f" event_type VARCHAR(255) NOT NULL, payload {payload}, {metadata}"
        f" create_time {create_time}{', ' + indexes if indexes else ''})"
    )
    return Store(url=database.url, table=table)


def insert(
    database: FreshDatabase,
    rows: Iterable[tuple[str, int, str]],
    *,
    time_zone: str = "+00:00",
) -> None:
    """Inserts (aggregate, version, create_time) rows."""
    with database.connect() as connection, connection.cursor() as cursor:
        cursor.execute("SET time_zone = %s", (time_zone,))
        cursor.executemany(
            "INSERT INTO events (aggregate_id, version, event_type, payload, create_time)"
            " VALUES (%s, %s, 'Placed', 'x', %s)",
            list(rows),
        )


def open_store(config: Store) -> EventStore:
    """The store of a configuration, as a task would open it."""
    return EventStore(config, EventStore.discover(config))


def read(
    store: EventStore, after: int, upto: int, shard: Shard | None = None, **arguments: Any
) -> pa.Table:
    """All of a window."""
    return pa.Table.from_batches(store.window(after, upto, shard, **arguments), EVENTS)


def backtrack(store: EventStore, ranges: list[VersionRange]) -> pa.Table:
    """All events of version ranges."""
    rows, left = store.fetch(ranges, 1_000_000, 1 << 30)
    assert not left
    return rows


def keys(table: pa.Table) -> list[tuple[str, int]]:
    """(aggregate, version) of each row, in order."""
    return [(str(row["aggregate_id"]), int(row["version"])) for row in table.to_pylist()]


def ids(table: pa.Table) -> list[str]:
    """The aggregate of each row, in order."""
    return [aggregate_id for aggregate_id, _ in keys(table)]


def utc(text: str) -> int:
    """µs of a UTC time written as ``2026-01-01 00:00:00.000000``."""
    at = datetime.fromisoformat(text).replace(tzinfo=UTC)
    return (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)
