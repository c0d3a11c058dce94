"""Windows and their bounds: complete, tied rows together, in order, whatever the precision."""

# ruff: noqa: S608

from __future__ import annotations

import zlib
from typing import Any

import pyarrow as pa
import pytest

from eventpub.admission.model import EVENTS, Shard
from eventpub.errors import StoreError
from eventpub.sources.mysql import events, statements
from eventpub.sources.mysql.connection import run
from tests.conftest import FreshDatabase
from tests.store.tables import SECOND, SLICE, create, ids, insert, keys, open_store, read, utc

both = pytest.mark.parametrize("database", ["mysql", "mariadb"], indirect=True)
NOON = utc("2026-03-01 12:00:00")
WITH_SLICE = f"UNIQUE KEY (aggregate_id, version), {SLICE}, KEY (create_time, slice)"


@both
def test_a_row_arrives_as_it_was_written(database: FreshDatabase) -> None:
    store = open_store(create(database))
    database.execute(
        "INSERT INTO events (aggregate_id, version, event_type, payload, metadata, create_time)"
        " VALUES (%s, 7, 'Angelegt', %s, '{\"k\": \"ü\"}', FROM_UNIXTIME(1772366400.000001)),"
        " ('null', 1, 'T', NULL, NULL, FROM_UNIXTIME(1772366400.000002)),"
        " ('empty', 1, 'T', '', NULL, FROM_UNIXTIME(1772366400.000003))",
        ("Straße 1", b"\x00\xff'\\"),
    )
    table = read(store, NOON, NOON + SECOND)
    assert table.schema == EVENTS
    rows = table.to_pylist()
    assert rows[0]["aggregate_id"] == "Straße 1"
    assert rows[0]["version"] == 7
    assert rows[0]["event_type"] == "Angelegt"
    assert rows[0]["payload"] == b"\x00\xff'\\"
    assert rows[0]["metadata"].decode().replace(" ", "") == '{"k":"ü"}'
    assert rows[0]["create_time"] == NOON + 1
    assert [row["payload"] for row in rows[1:]] == [None, b""]
    assert rows[1]["metadata"] is None


@both
def test_a_window_begins_behind_its_first_bound_and_ends_with_its_last(
    database: FreshDatabase,
) -> None:
    store = open_store(create(database))
    insert(database, [("a", n, f"2026-03-01 12:00:00.00000{n}") for n in range(1, 6)])
    assert keys(read(store, NOON + 1, NOON + 3)) == [("a", 2), ("a", 3)]
    assert keys(read(store, NOON + 3, NOON + 3)) == []
    assert keys(read(store, NOON + 5, NOON)) == []
    assert len(read(store, -1, utc("9999-12-31 23:59:59"))) == 5
    assert len(read(store, -utc("2026-01-01"), 0)) == 0


@both
@pytest.mark.parametrize("rows", [3, 4, 30])
def test_pages_of_tied_rows_neither_lose_nor_repeat_nor_loop(
    database: FreshDatabase, rows: int
) -> None:
    """One page of rows with one create_time, one more, ten pages of them."""
    store = open_store(create(database))
    insert(database, [(f"t{n:02}", 1, "2026-03-01 12:00:00.5") for n in range(rows)])
    insert(database, [("z", 1, "2026-03-01 12:00:01")])
    after, found, windows = NOON, [], 0
    while (poll := store.poll(after, SECOND, 3)).has_rows:
        upto = poll.upper if poll.page_end is None else poll.page_end
        assert upto > after
        found += keys(read(store, after, upto))
        after, windows = upto, windows + 1
    assert sorted(found) == [*((f"t{n:02}", 1) for n in range(rows)), ("z", 1)]
    assert windows == 2


@both
def test_a_page_ends_before_the_moment_that_it_may_have_cut(database: FreshDatabase) -> None:
    store = open_store(create(database))
    rows = [(f"t{n:02}", 1, f"2026-03-01 12:00:0{n // 3}") for n in range(1, 12)]
    insert(database, rows)
    after, found, ends = NOON - 1, [], []
    while True:
        page = store.page(after, NOON + 60 * SECOND, 7, 1 << 20)
        found += keys(pa.Table.from_batches(page.batches, EVENTS))
        if page.end is None:
            break
        after = page.end
        ends.append(after)
    assert sorted(found) == [(a, v) for a, v, _ in rows]
    assert ends == [NOON + 1 * SECOND]


@both
def test_a_moment_with_more_rows_than_a_page_is_not_cut(database: FreshDatabase) -> None:
    store = open_store(create(database))
    insert(database, [(f"t{n:02}", 1, "2026-03-01 12:00:01") for n in range(5)])
    page = store.page(NOON, NOON + 60 * SECOND, 3, 1 << 20)
    assert (page.batches, page.end) == ([], NOON + SECOND)


def test_the_keys_of_one_moment_are_not_held_in_memory_at_once(
    database: FreshDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_PORTION_ROWS", 200)
    monkeypatch.setattr(events, "_PORTION_BYTES", 1_000)
    store, rows = open_store(create(database)), 20_000
    insert(database, [(f"{n:0100}", 1, "2026-03-01 12:00:01") for n in range(rows)])
    before, most, found = pa.total_allocated_bytes(), 0, 0
    for batch in store.keys(NOON, NOON + SECOND, None):
        most = max(most, pa.total_allocated_bytes() - before)
        found += len(batch)
    assert found == rows
    assert most < 100 * rows / 4


@both
def test_a_page_of_large_rows_has_few(database: FreshDatabase) -> None:
    store = open_store(create(database))
    insert(database, [("t", n, f"2026-03-01 12:00:{n:02}") for n in range(1, 21)])
    database.execute("UPDATE events SET payload = REPEAT('x', 1048576)")
    page = store.page(NOON, NOON + 60 * SECOND, 1_000, 6 << 20)
    versions = [v for batch in page.batches for v in batch.column("version").to_pylist()]
    assert versions == [*range(1, len(versions) + 1)]
    assert 4 <= len(versions) <= 12
    assert page.end == NOON + len(versions) * SECOND
    assert store.page(page.end, NOON + 60 * SECOND, 1_000, 1 << 30).end is None


@both
def test_the_boundary_is_the_database_time_less_the_delay(database: FreshDatabase) -> None:
    store = open_store(create(database))
    poll = store.poll(0, 5 * SECOND, 10)
    assert (poll.page_end, poll.has_rows) == (None, False)
    assert poll.upper == poll.now - 5 * SECOND
    database.execute("INSERT INTO events (aggregate_id, version, event_type) VALUES ('a', 1, 't')")
    now = store.now()
    assert not store.poll(0, 60 * SECOND, 10).has_rows
    assert store.poll(0, 0, 10).has_rows
    assert store.poll(0, 0, 1).page_end is not None
    assert abs(now - poll.now) < 60 * SECOND


@pytest.mark.parametrize("kind", ["TIMESTAMP", "DATETIME"])
def test_rows_younger_than_the_delay_are_told_of_and_those_of_the_future_are_not(
    database: FreshDatabase, kind: str
) -> None:
    config = create(database, create_time=f"{kind}(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6)")
    store = open_store(config)

    def found() -> tuple[bool, bool]:
        poll = store.poll(0, 60 * SECOND, 10)
        assert poll.next_row is None or abs(poll.now - poll.next_row) < 60 * SECOND
        return poll.has_rows, poll.next_row is not None

    insert(database, [("a", 1, "2037-01-01 00:00:00")])
    assert found() == (False, False)
    database.execute("INSERT INTO events (aggregate_id, version, event_type) VALUES ('b', 1, 't')")
    assert found() == (False, True)
    insert(database, [("c", 1, "2026-03-01 12:00:00")])
    assert found() == (True, False)


@both
@pytest.mark.parametrize(("digits", "unit"), [(0, SECOND), (3, 1_000)])
@pytest.mark.parametrize("kind", ["TIMESTAMP", "DATETIME"])
def test_a_coarse_clock_is_read_when_its_second_has_passed(
    database: FreshDatabase, kind: str, digits: int, unit: int
) -> None:
    """CURRENT_TIMESTAMP(0) cuts off: until the second is over, more rows of it may come."""
    current = f"CURRENT_TIMESTAMP({digits})"
    store = open_store(create(database, create_time=f"{kind}({digits}) NOT NULL DEFAULT {current}"))
    insert(database, [("a", n, f"2026-03-01 12:00:0{n}") for n in range(1, 4)])
    now = store.now()
    delay = now - (NOON + 3 * SECOND - unit // 2)  # puts the boundary in the last unit before 3 s
    poll = store.poll(0, delay, 10)
    assert poll.upper % unit == 0
    assert poll.upper + unit <= poll.now - delay
    assert poll.upper + 2 * unit > poll.now - delay
    assert keys(read(store, 0, NOON + 2 * SECOND)) == [("a", 1), ("a", 2)]
    assert keys(read(store, NOON + SECOND, NOON + 2 * SECOND + unit // 2)) == [("a", 2)]
    assert keys(read(store, NOON + SECOND + unit // 2, NOON + 3 * SECOND)) == [("a", 2), ("a", 3)]


@both
@pytest.mark.parametrize(
    "indexes", ["UNIQUE KEY (aggregate_id, version), KEY (create_time)", WITH_SLICE]
)
@pytest.mark.parametrize("partitions", [8, 7])
def test_shards_share_a_window_by_the_bytes_of_the_aggregate(
    database: FreshDatabase, indexes: str, partitions: int
) -> None:
    store = open_store(create(database, indexes=indexes))
    written = [f"ä-{n}" for n in range(60)] + ["a", "A", "a "]
    insert(database, [(id, 1, "2026-03-01 12:00:01") for id in written])
    for number in range(3):
        found = ids(read(store, NOON, NOON + SECOND, Shard(number, 3, partitions)))
        assert sorted(found) == sorted(
            id for id in written if zlib.crc32(id.encode()) % partitions % 3 == number
        )


def test_a_long_window_of_a_shard_is_read_in_portions_of_all_shards_rows(
    database: FreshDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(create(database))
    # one aggregate has nearly all rows, seven of them at one moment; shard 1 has two
    mine, other = (next(x for x in "abcdefgh" if zlib.crc32(x.encode()) % 2 == n) for n in (1, 0))
    rows = [(other, n, f"2026-03-01 12:01:{max(n, 7):02d}") for n in range(1, 40)]
    insert(database, [(mine, 1, "2026-03-01 12:00:30"), *rows, (mine, 2, "2026-03-01 12:01:40")])
    asked: list[str] = []

    def window(*values: Any) -> str:
        asked.append(made(*values))
        return asked[-1]

    made = statements.window
    monkeypatch.setattr(statements, "window", window)
    monkeypatch.setattr(events, "_PORTION_ROWS", 5)
    upto = NOON + 120 * SECOND
    assert keys(read(store, NOON, upto, Shard(1, 2, 2))) == [(mine, 1), (mine, 2)]
    assert len(asked) == 8
    assert keys(read(store, NOON, upto, Shard(0, 2, 2))) == [(x, n) for x, n, _ in rows]
    assert sorted(keys(read(store, NOON, upto))) == sorted([(mine, 1), *rows_of(rows), (mine, 2)])
    asked.clear()
    assert len(read(store, NOON + 100 * SECOND - 1, NOON + 101 * SECOND, Shard(1, 2, 2))) == 1
    assert len(asked) == 1


def rows_of(rows: list[tuple[str, int, str]]) -> list[tuple[str, int]]:
    return [(a, version) for a, version, _ in rows]


@both
@pytest.mark.parametrize(
    "of_id", ["", "DROP COLUMN id", "MODIFY id CHAR(36) NOT NULL DEFAULT (UUID())"]
)
def test_no_statement_is_open_while_a_window_is_worked_on(
    database: FreshDatabase, monkeypatch: pytest.MonkeyPatch, of_id: str
) -> None:
    """Not in a moment of many rows either: who alters the table waits for nobody."""
    monkeypatch.setattr(events, "_PORTION_ROWS", 100)
    monkeypatch.setattr(events, "_BATCH_ROWS", 10)
    config = create(database)
    if of_id:
        database.execute(f"ALTER TABLE events {of_id}")
    store = open_store(config)
    insert(database, [(f"a{n}", 1, "2026-03-01 12:00:01") for n in range(250)])
    insert(database, [("a7", version, "2026-03-01 12:00:01") for version in range(2, 40)])
    insert(database, [("b", version, "2026-03-01 12:00:02") for version in range(1, 150)])
    insert(database, [("c", 1, "2026-03-01 12:00:03")])
    database.execute("UPDATE events SET payload = REPEAT('x', 65536)")
    found: list[tuple[str, int]] = []
    for batch in store.window(NOON, NOON + 10 * SECOND, None):
        if not found:
            with database.connect() as connection, connection.cursor() as cursor:
                cursor.execute("SET lock_wait_timeout = 5")
                cursor.execute("ALTER TABLE events ADD COLUMN note INT NULL")
        found += keys(pa.Table.from_batches([batch]))
    assert len(found) == len(set(found)) == 250 + 38 + 149 + 1
    assert [a for a, _ in found[-150:]] == ["b"] * 149 + ["c"]
    assert [v for a, v in found if a == "a7"] == [*range(1, 40)]


@both
@pytest.mark.parametrize("charset", ["latin1", "utf16", "utf8mb3"])
def test_ids_of_another_character_set_are_the_same_bytes_to_us(
    database: FreshDatabase, charset: str
) -> None:
    config = create(database, aggregate_id=f"VARCHAR(100) CHARACTER SET {charset} NOT NULL")
    written = ["Straße", "äöü", "plain"]
    insert(database, [(id, 1, "2026-03-01 12:00:01") for id in written])
    store = open_store(config)
    found = [
        id
        for number in range(4)
        for id in ids(read(store, NOON, NOON + SECOND, Shard(number, 4, 16)))
        if zlib.crc32(id.encode()) % 16 % 4 == number
    ]
    assert sorted(found) == sorted(written)


@both
@pytest.mark.parametrize(
    "payload", ["JSON", "LONGTEXT", "VARCHAR(200) CHARACTER SET latin1", "LONGBLOB"]
)
def test_payloads_of_every_type_are_utf8_bytes(database: FreshDatabase, payload: str) -> None:
    store = open_store(create(database, payload=payload, metadata="metadata TEXT,"))
    text = '{"name": "Müller"}'
    database.execute(
        "INSERT INTO events (aggregate_id, version, event_type, payload, metadata, create_time)"
        " VALUES ('a', 1, 't', %s, %s, FROM_UNIXTIME(1772366401))",
        (text.encode() if payload == "LONGBLOB" else text, text),
    )
    (row,) = read(store, NOON, NOON + SECOND).to_pylist()
    assert row["payload"].decode() == text
    assert row["metadata"] == text.encode()


@both
def test_a_table_without_metadata_or_id(database: FreshDatabase) -> None:
    config = create(database, metadata="")
    database.execute("ALTER TABLE events DROP COLUMN id")
    insert(database, [("a", 1, "2026-03-01 12:00:01")])
    (row,) = read(open_store(config), NOON, NOON + SECOND).to_pylist()
    assert row["metadata"] is None


def test_rows_of_tens_of_megabytes(database: FreshDatabase) -> None:
    store = open_store(create(database))
    for version, size in ((1, 17), (2, 0), (3, 33)):
        database.execute(
            "INSERT INTO events (aggregate_id, version, event_type, payload, create_time) VALUES"
            f" ('a', {version}, 't', REPEAT('x', {size} * 1048576), FROM_UNIXTIME(1772366401))"
        )
    sizes = [
        len(row["payload"])
        for batch in store.window(NOON, NOON + SECOND, None)
        for row in batch.to_pylist()
    ]
    assert [size >> 20 for size in sizes] == [17, 0, 33]


def test_batches_are_bounded_in_rows_and_in_bytes(
    database: FreshDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_BATCH_ROWS", 10)
    store = open_store(create(database))
    insert(database, [("a", n, "2026-03-01 12:00:01") for n in range(1, 26)])
    batches = list(store.window(NOON, NOON + SECOND, None))
    assert [batch.num_rows for batch in batches] == [10, 10, 5]
    database.execute("UPDATE events SET payload = REPEAT('x', 1048576)")
    batches = list(store.window(NOON, NOON + SECOND, None))
    assert sum(batch.num_rows for batch in batches) == 25
    assert max(batch.nbytes for batch in batches) < 12 << 20


@both
def test_a_half_read_window_leaves_the_store_usable(
    database: FreshDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "_BATCH_ROWS", 10)
    store = open_store(create(database))
    insert(database, [("a", n, "2026-03-01 12:00:01") for n in range(1, 1001)])
    window = store.window(NOON, NOON + SECOND, None)
    assert next(window).num_rows == 10
    assert store.now() > 0  # beside it
    window.close()
    assert len(read(store, NOON, NOON + SECOND)) == 1000


@both
@pytest.mark.parametrize(
    ("version", "value", "reason"),
    [
        ("BIGINT UNSIGNED NOT NULL", str(2**63), "beyond"),
        ("BIGINT NULL", "NULL", "no version"),
    ],
)
def test_a_row_that_cannot_be_an_event_is_named(
    database: FreshDatabase, version: str, value: str, reason: str
) -> None:
    store = open_store(create(database, version=version))
    insert(database, [("fine", 1, "2026-03-01 12:00:01")])
    database.execute(
        "INSERT INTO events (aggregate_id, version, event_type, create_time)"
        f" VALUES ('bad', {value}, 't', FROM_UNIXTIME(1772366401))"
    )
    with pytest.raises(StoreError, match=reason) as caught:
        read(store, NOON, NOON + SECOND)
    assert caught.value.code == "store.row_invalid"
    assert "'bad'" in caught.value.message
    assert ("store.without_identity" in str(caught.value.suggestion)) == (value == "NULL")
    assert not caught.value.retriable


@both
def test_a_row_without_aggregate_is_refused_not_passed_over(database: FreshDatabase) -> None:
    store = open_store(create(database, aggregate_id="VARCHAR(50) NULL"))
    database.execute(
        "INSERT INTO events (version, event_type, create_time)"
        " VALUES (1, 't', FROM_UNIXTIME(1772366401))"
    )
    assert len(read(store, NOON, NOON + SECOND, Shard(1, 2, 8))) == 0
    with pytest.raises(StoreError, match="no aggregate_id"):
        read(store, NOON, NOON + SECOND, Shard(0, 2, 8))


@both
def test_ids_that_are_not_utf8_are_refused(database: FreshDatabase) -> None:
    store = open_store(create(database, aggregate_id="VARBINARY(50) NOT NULL"))
    database.execute(
        "INSERT INTO events (aggregate_id, version, event_type, create_time) VALUES"
        " (X'C3A4', 1, 't', FROM_UNIXTIME(1772366401)),"
        " (X'FF', 1, 't', FROM_UNIXTIME(1772366402))"
    )
    assert keys(read(store, NOON, NOON + SECOND)) == [("ä", 1)]
    with pytest.raises(StoreError, match="not UTF-8"):
        read(store, NOON, NOON + 2 * SECOND)


def test_what_waits_is_counted_and_dated(database: FreshDatabase) -> None:
    store = open_store(create(database))
    insert(database, [("a", n, f"2026-03-01 12:00:0{n}") for n in range(1, 6)])
    assert store.counts([(NOON, NOON + 4 * SECOND)], 100) == [4]
    assert store.counts([(NOON, NOON + 4 * SECOND)], 3) == [3]
    assert store.counts([(NOON + 9 * SECOND, NOON + 10 * SECOND)], 3) == [0]


@both
def test_what_is_written_while_a_reader_stands_still_is_not_of_the_future(
    database: FreshDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the process is suspended between its statements."""
    store = open_store(create(database))
    assert store.ahead() == (0, 0)

    def run_and_wait(*arguments: Any) -> Any:
        found = run(*arguments)
        database.execute("DO SLEEP(0.01)")
        append()
        return found

    def append(seconds: int = 0) -> None:
        database.execute(
            "INSERT INTO events (aggregate_id, version, event_type, create_time)"
            " SELECT 'a', COUNT(*), 't', NOW(6) + INTERVAL %s SECOND FROM events",
            (seconds,),
        )

    monkeypatch.setattr(events, "run", run_and_wait)
    assert [store.ahead() for _ in range(3)] == [(0, 0)] * 3
    append(100)
    ahead, rows = store.ahead()
    assert 90 * SECOND < ahead <= 100 * SECOND
    assert rows >= 1


def test_an_empty_window_has_the_schema_of_events(database: FreshDatabase) -> None:
    store = open_store(create(database))
    assert pa.Table.from_batches(store.window(0, NOON, None), EVENTS).num_rows == 0


@both
def test_a_time_that_does_not_exist_is_named_by_whoever_meets_it_first(
    database: FreshDatabase,
) -> None:
    """A writer may be allowed to write it; the client gives it as text."""
    store = open_store(create(database, create_time="DATETIME(6) NOT NULL"))
    with database.connect() as connection, connection.cursor() as cursor:
        cursor.execute("SET sql_mode = 'ALLOW_INVALID_DATES'")
        cursor.execute(
            "INSERT INTO events (aggregate_id, version, event_type, create_time)"
            " VALUES ('a', 1, 't', '2026-02-30 10:00:00')"
        )
        connection.commit()
    for page_rows in (None, 1):
        with pytest.raises(StoreError, match="which does not exist") as caught:
            store.poll(utc("2026-02-01 00:00:00"), 0, page_rows)
        assert (caught.value.code, caught.value.retriable) == ("store.row_invalid", False)
