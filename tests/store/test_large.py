"""A table of 1,000,000 events: the same cost however far behind the reader is, and flat memory."""

# ruff: noqa: S608

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa
import pytest

from eventpub.admission.model import Shard, VersionRange
from eventpub.config import Store
from eventpub.local.servers import Database
from eventpub.sources.mysql import EventStore, Layout, statements
from eventpub.sources.mysql.connection import connect_for_reading
from tests.conftest import FreshDatabase
from tests.store.plans import explain
from tests.store.tables import SECOND, SLICE, create, utc

pytestmark = pytest.mark.alone

START = utc("2026-01-01 00:00:00")
TIED = 500_000
END = START + TIED * 100
POSITIONS = {"beginning": 0, "far": START, "middle": START + TIED * 40, "near": END - 5_000}
Large = tuple[Store, dict[str, Layout]]


@pytest.fixture(scope="module", params=["mysql", "mariadb"])
def large(request: pytest.FixtureRequest) -> Iterator[Large]:
    """500,000 events 100 µs apart and as many of one time; its layouts by kind of index."""
    server: Database = request.getfixturevalue(f"{request.param}_server")
    database = FreshDatabase(server, f"large_{uuid.uuid4().hex[:12]}")
    with server.connect(None, ssl_disabled=True) as connection, connection.cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {database.name}")
    create(database, indexes=SLICE)
    digits = "(SELECT 0 d UNION SELECT 1 UNION SELECT 2 UNION SELECT 3 UNION SELECT 4 UNION"
    digits += " SELECT 5 UNION SELECT 6 UNION SELECT 7 UNION SELECT 8 UNION SELECT 9)"
    number = " + ".join(f"{10**i} * d{i}.d" for i in range(6))
    tables = ", ".join(f"{digits} d{i}" for i in range(6))
    with database.connect() as connection, connection.cursor() as cursor:
        cursor.execute("SET time_zone = '+00:00'")
        cursor.execute(
            "INSERT INTO events (aggregate_id, version, event_type, payload, create_time)"
            " SELECT CONCAT('a', n % 10000), n DIV 10000 + 1, 't', 'payload',"
            f" IF(n < {TIED}, TIMESTAMPADD(MICROSECOND, 100 * n, '2026-01-01'), '2026-02-01')"
            f" FROM (SELECT {number} AS n FROM {tables}) AS numbers"
        )
        cursor.execute(
            "ALTER TABLE events ADD UNIQUE KEY by_key (aggregate_id, version),"
            " ADD KEY by_time (create_time), ADD KEY by_time_and_slice (create_time, slice)"
        )
        cursor.execute("ANALYZE TABLE events")
    config = Store(url=database.url)
    layout = EventStore.discover(config)
    assert layout.time_index == "`by_time_and_slice`"
    plain = replace(
        layout,
        time_index="`by_time`",
        slice=None,
    )
    yield config, {"plain": plain, "slice": layout}
    database.execute(f"DROP DATABASE {database.name}")


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("kind", ["plain", "slice"])
def test_windows_and_pages_are_index_range_scans_at_any_distance(
    large: Large, kind: str, position: str
) -> None:
    config, layouts = large
    layout, after = layouts[kind], POSITIONS[position]
    connection = connect_for_reading(config)
    asked = {
        **{
            f"page of {rows}": statements.nth_time(
                layout, *present(statements.local_range(layout, after, END)), rows
            )
            for rows in (1, 50_000)
        },
        **{
            f"window of {length} for {shard}": statements.window(
                layout,
                *present(statements.local_range(layout, after, max(after, START) + length)),
                shard,
            )
            for length in (500_000, 20_000_000)
            for shard in (None, Shard(1, 2, 8), Shard(1, 2, 7))
        },
    }
    for what, sql in asked.items():
        (plan,) = explain(connection, sql)
        assert plan.access == "range", (what, plan)
        assert plan.index == layout.time_index.strip("`"), (what, plan)
        assert "filesort" not in plan.extra, (what, plan)
        assert "temporary" not in plan.extra, (what, plan)
    first = statements.now_and_first_time(layout, after, 1 << 62)
    _, plan = explain(connection, f"SELECT {first}")
    assert (plan.access, plan.index) == ("range", layout.time_index.strip("`")), plan
    (plan,) = explain(
        connection,
        statements.window(
            layout,
            *present(statements.local_range(layout, END - 1_000_000, END)),
            Shard(0, 2, 8),
        ),
    )
    assert plan.rows < 50_000  # of the 10,000 in that window; no scan of the table
    connection.close()


def present(values: tuple[int, int] | None) -> tuple[int, int]:
    """A range that is there."""
    assert values is not None
    return values


def test_lookups_by_key_are_index_range_scans(large: Large) -> None:
    config, layouts = large
    layout, connection = layouts["plain"], connect_for_reading(config)
    ranges = [VersionRange(f"a{n}", 40, 42) for n in range(500)]
    for sql in (
        statements.versions_by_key(layout, ranges),
        statements.lower_versions(layout, [("a7", 50)], 16),
    ):
        for plan in explain(connection, sql):
            assert (plan.access, plan.index) == ("range", "by_key")
            assert plan.rows < 5_000
    connection.close()


@pytest.mark.parametrize("kind", ["plain", "slice"])
def test_a_poll_takes_no_longer_the_further_behind_it_is(large: Large, kind: str) -> None:
    config, layouts = large
    with EventStore(config, layouts[kind]) as store:

        def seconds(after: int) -> float:
            """The best of some, since the machine has other things to do."""
            taken = []
            for _ in range(4):
                began = time.perf_counter()
                poll = store.poll(after, 0, 10_000)
                taken.append(time.perf_counter() - began)
                assert poll.page_end is not None
            return min(taken)

        near = seconds(END - 2_000_000)
        assert seconds(0) < 3 * near + 0.02
        assert seconds(START + TIED * 40) < 3 * near + 0.02


def test_of_one_create_time_only_the_keys_are_in_memory_at_once(large: Large) -> None:
    config, layouts = large
    tied = utc("2026-02-01 00:00:00")
    with EventStore(config, layouts["slice"]) as store:
        assert store.poll(tied - SECOND, 0, 1_000).page_end == tied
        rows, highest = 0, 0
        before = pa.total_allocated_bytes()
        for batch in store.window(tied - 1, tied, None):
            rows += batch.num_rows
            highest = max(highest, pa.total_allocated_bytes() - before)
    assert rows == TIED
    assert highest < 32 << 20  # 50 bytes a key
