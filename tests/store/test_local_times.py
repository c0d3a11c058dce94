"""Servers, sessions and columns that do not run on UTC: no row missed, none outside its window."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product
from typing import Any

import pytest

from eventpub.admission.model import Shard
from eventpub.config import Read, Store
from eventpub.local.servers import Database
from eventpub.ops.verify import behind
from eventpub.sources.mysql import EventStore, events
from eventpub.sources.mysql.checking import checks
from tests.conftest import FreshDatabase, fresh_database
from tests.store.tables import SECOND, create, keys, open_store, read, utc

HOUR = 3600 * SECOND
BACK = utc("2025-10-26 01:00:00")  # Berlin: 03:00 becomes 02:00
FORTH = utc("2025-03-30 01:00:00")  # Berlin: 02:00 becomes 03:00


@pytest.fixture
def berlin(berlin_server: Database) -> Iterator[FreshDatabase]:
    """A fresh database on a server that runs on Berlin's time."""
    with fresh_database(berlin_server) as fresh:
        yield fresh


def write_at(database: FreshDatabase, instants: list[int], **session: Any) -> None:
    """One event at each instant (µs UTC), dated by the database's own CURRENT_TIMESTAMP."""
    with database.connect() as connection, connection.cursor() as cursor:
        for name, value in session.items():
            cursor.execute(f"SET {name} = %s", (value,))
        for instant in instants:
            cursor.execute(f"SET timestamp = {instant // SECOND}.{instant % SECOND:06d}")
            cursor.execute(
                "INSERT INTO events (aggregate_id, version, event_type) VALUES ('a', %s, 't')",
                (instant // SECOND,),
            )


def dated(table: Any) -> dict[int, int]:
    """The second each event was written at → `create_time` as read."""
    return {row["version"]: row["create_time"] for row in table.to_pylist()}


def drain(
    store: EventStore, after: int, upto: int, page_rows: int, *, counted: bool = True
) -> list[tuple[int, int, int]]:
    """(second written, after, upto) of every row of every window, as a publisher would read.

    Args:
        counted: the end of a page is asked for before its rows are read.
    """
    found = []
    while after < upto:
        now = store.now()
        poll = store.poll(after, now - upto, page_rows if counted else None)
        end = poll.upper if poll.page_end is None else poll.page_end
        if not poll.has_rows and end <= after:
            break
        batches = None
        if not counted:
            page = store.page(after, end, page_rows, 1 << 20)
            end = end if page.end is None else page.end
            batches = page.batches or None
        assert end > after
        for batch in store.window(after, end, None) if batches is None else batches:
            for row in batch.to_pylist():
                assert after < row["create_time"] <= end
                found.append((row["version"], after, end))
        after = end
    return found


@pytest.mark.parametrize("digits", [6, 3, 0])
def test_a_timestamp_column_is_utc_whatever_the_server_says(
    berlin: FreshDatabase, digits: int
) -> None:
    current = f"CURRENT_TIMESTAMP({digits})"
    create(berlin, create_time=f"TIMESTAMP({digits}) NOT NULL DEFAULT {current}")
    store = open_store(Store(url=berlin.url))
    instants = [FORTH - 1 * SECOND, FORTH, *range(BACK - HOUR, BACK + HOUR, HOUR // 2)]
    write_at(berlin, instants)
    write_at(berlin, [BACK + 2 * HOUR], time_zone="-08:00")
    expected = {t // SECOND: t for t in [*instants, BACK + 2 * HOUR]}
    assert dated(read(store, FORTH - HOUR, BACK + 3 * HOUR)) == expected
    for counted in (True, False):
        found = drain(store, FORTH - HOUR, BACK + 3 * HOUR, 2, counted=counted)
        assert [version for version, _, _ in found] == sorted(expected)


@pytest.mark.parametrize("zone", ["auto", "Europe/Berlin"])
@pytest.mark.parametrize("digits", [6, 0])
def test_a_datetime_column_holds_local_time(
    berlin: FreshDatabase, zone: str, digits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = f"CURRENT_TIMESTAMP({digits})"
    create(berlin, create_time=f"DATETIME({digits}) NOT NULL DEFAULT {current}")
    store = open_store(Store(url=berlin.url, time_zone=zone))
    step = 10 * 60 * SECOND
    instants = [
        *range(FORTH - HOUR, FORTH + HOUR + 1, step),
        *range(BACK - 2 * HOUR, BACK + 2 * HOUR + 1, step),
    ]
    write_at(berlin, instants)
    written = {t // SECOND for t in instants}
    for page_rows, counted in product((1, 4, 100), (True, False)):
        rows = drain(store, FORTH - 2 * HOUR, BACK + 3 * HOUR, page_rows, counted=counted)
        assert {version for version, _, _ in rows} == written
        # apart from the hour that is lived twice, each row is read once and in the right window
        unsure = range((BACK - HOUR) // SECOND, (BACK + HOUR) // SECOND)
        sure = [row for row in rows if row[0] not in unsure]
        assert sorted(version for version, _, _ in sure) == sorted(written - set(unsure))
        assert all(after < version * SECOND <= upto for version, after, upto in sure)

    def everything(shard: Shard | None) -> dict[int, int]:
        return dated(read(store, FORTH - 2 * HOUR, BACK + 3 * HOUR, shard))

    read_at_once = everything(None)
    monkeypatch.setattr(events, "_PORTION_ROWS", 3)
    in_portions = everything(Shard(0, 2, 2)) | everything(Shard(1, 2, 2))
    for found in read_at_once, in_portions:
        assert set(found) == written
        assert all(t == v * SECOND for v, t in found.items() if v not in unsure)


@pytest.mark.parametrize("column", ["TIMESTAMP(6)", "DATETIME(6)", "DATETIME(0)"])
def test_what_a_publisher_has_not_published_is_found_across_the_change_of_the_clocks(
    berlin: FreshDatabase, column: str
) -> None:
    digits = column.partition("(")[2]
    create(berlin, create_time=f"{column} NOT NULL DEFAULT CURRENT_TIMESTAMP({digits}")
    store = open_store(Store(url=berlin.url))
    instants = range(BACK - 2 * HOUR, BACK + 2 * HOUR + 1, HOUR // 6)
    write_at(berlin, [*instants])

    def due(position: int) -> float:
        return behind(store, Read(), {"position": position}, 0)

    def age(instant: int) -> Any:
        return pytest.approx((store.now() - instant) / 1e6, abs=60)

    assert due(instants[0] - 1) == age(instants[0])
    assert due(BACK + HOUR) == age(BACK + HOUR + HOUR // 6)
    assert due(instants[-1]) == 0


def test_no_window_crosses_the_change_of_the_clocks_backward(berlin: FreshDatabase) -> None:
    create(berlin, create_time="DATETIME(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6)")
    store = open_store(Store(url=berlin.url))
    write_at(berlin, [BACK - HOUR // 2, BACK + HOUR // 2])
    now = store.now()
    before = store.poll(BACK - 2 * HOUR, now - (BACK + HOUR), 100)
    assert (before.has_rows, before.upper) == (True, BACK - 1)
    behind = store.poll(before.upper, store.now() - (BACK + HOUR), 100)
    assert behind.has_rows
    assert behind.upper > BACK
    assert len(read(store, before.upper, behind.upper)) == 2  # both: local times cannot tell


def test_a_change_without_rows_before_it_does_not_stop_the_reader(berlin: FreshDatabase) -> None:
    create(berlin, create_time="DATETIME(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6)")
    store = open_store(Store(url=berlin.url))
    write_at(berlin, [BACK + 3 * HOUR])
    poll = store.poll(0, store.now() - (BACK + 4 * HOUR), 100)
    assert poll.has_rows
    assert keys(read(store, 0, poll.upper)) == [("a", (BACK + 3 * HOUR) // SECOND)]


@pytest.mark.parametrize("database", ["mysql", "mariadb"], indirect=True)
@pytest.mark.parametrize("zone", ["-09:30", "Asia/Kolkata"])
def test_a_datetime_in_a_configured_zone(database: FreshDatabase, zone: str) -> None:
    config = create(database, create_time="DATETIME(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6)")
    store = open_store(config.model_copy(update={"time_zone": zone}))
    write_at(database, [BACK], time_zone="+05:30" if "/" in zone else zone)
    assert dated(read(store, BACK - 1, BACK)) == {BACK // SECOND: BACK}


@pytest.mark.parametrize("database", ["mysql", "mariadb"], indirect=True)
def test_a_datetime_that_the_database_sets_in_utc_is_read_in_it(database: FreshDatabase) -> None:
    """Whatever the server's zone: each event was published hours late, or its time was old."""
    config = create(database, create_time="DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6))")
    database.execute("SET GLOBAL time_zone = '-05:00'")
    try:
        store = open_store(config)
        write_at(database, [BACK])
        assert dated(read(store, BACK - 1, BACK)) == {BACK // SECOND: BACK}
        [check] = [c for c in checks(config) if c.name == "event store: time zone"]
        assert check.status == "ok"
        assert check.message.startswith("DATETIME in UTC, now UTC+00:00; the newest event was cre")
        configured = EventStore.discover(config.model_copy(update={"time_zone": "-03:00"})).zone
        assert configured is not None
        assert configured.name == "-03:00", "as for writers who set it themselves"
    finally:
        database.execute("SET GLOBAL time_zone = DEFAULT")


@pytest.mark.parametrize("database", ["mysql", "mariadb"], indirect=True)
def test_the_delay_holds_for_local_times_as_well(database: FreshDatabase) -> None:
    config = create(database, create_time="DATETIME(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6)")
    store = open_store(config)
    database.execute("INSERT INTO events (aggregate_id, version, event_type) VALUES ('a', 1, 't')")
    assert not store.poll(0, 60 * SECOND, 10).has_rows
    poll = store.poll(0, 0, 10)
    assert poll.has_rows
    (row,) = read(store, 0, poll.upper).to_pylist()
    assert 0 <= poll.now - row["create_time"] < 30 * SECOND


def test_the_rules_that_the_server_tells_are_those_of_its_zone(berlin: FreshDatabase) -> None:
    create(berlin, create_time="DATETIME(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6)")
    probed = EventStore.discover(Store(url=berlin.url)).zone
    known = EventStore.discover(Store(url=berlin.url, time_zone="Europe/Berlin")).zone
    assert probed is not None
    assert known is not None
    assert len(probed.changes) > 100
    for instant in [t + d for t in probed.changes for d in (-1, 0, 1)]:
        assert probed.local(instant) == known.local(instant)
    assert all(a < b for a, b in pairwise(probed.changes))


def test_a_shard_has_no_empty_batch_where_the_window_spans_a_change_of_the_clocks(
    berlin: FreshDatabase,
) -> None:
    """All of its rows are of the hour before, which has the same local times."""
    create(berlin, create_time="DATETIME(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6)")
    store = open_store(Store(url=berlin.url))
    write_at(berlin, [BACK - HOUR // 2])
    after, upto = BACK - 2 * SECOND, BACK + HOUR // 4
    assert list(store.window(after, upto, None)) == []
    assert keys(read(store, BACK - HOUR, after)) == [("a", (BACK - HOUR // 2) // SECOND)]
