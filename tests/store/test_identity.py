"""The key of an aggregate: of one column or several, of every type, hashed and found by index."""

from __future__ import annotations

import uuid
import zlib
from typing import Any

import pytest

from eventpub.admission.model import Shard, VersionRange, topic_partition
from eventpub.config import Columns, Store
from eventpub.errors import StoreError
from eventpub.sources.mysql import EventStore, Layout, statements
from eventpub.sources.mysql.connection import connect_for_reading, run
from eventpub.sources.mysql.values import joined, split
from tests.conftest import FreshDatabase
from tests.store.plans import explain
from tests.store.tables import SECOND, backtrack, keys, read, utc

both = pytest.mark.parametrize("database", ["mysql", "mariadb"], indirect=True)
NOON = utc("2026-03-01 12:00:00")
AT = "2026-03-01 12:00:01"
AWKWARD = ["a", "|", "%", "a|b", "%7C", "%25", "%257C", "\\", "'", "é", "", "日本", "a-1 ", "A-1"]
SOME_UUID = uuid.UUID("0A1B2C3D-4e5f-6071-8293-a4b5c6d7e8f9")
UTF8MB3 = "CHARACTER SET utf8mb3 COLLATE utf8mb3_bin NOT NULL"
LATIN1 = "CHARACTER SET latin1 COLLATE latin1_general_cs NOT NULL"
LOOSE = "CHARACTER SET utf8mb4 COLLATE utf8mb4_unicode_ci NOT NULL"


def table(database: FreshDatabase, columns: dict[str, str], key: str) -> Store:
    """An event table whose identity is some columns."""
    listed = ", ".join(f"{name} {kind}" for name, kind in columns.items())
    database.execute(
        f"CREATE TABLE events (id BIGINT AUTO_INCREMENT PRIMARY KEY, {listed}, version INT,"
        " event_type VARCHAR(50) NOT NULL DEFAULT 'x', payload TEXT,"
        f" create_time TIMESTAMP(6) NOT NULL DEFAULT '{AT}', {key}, KEY (create_time))"
    )
    return Store(url=database.url, columns=Columns(aggregate_id=tuple(columns)))


def insert(database: FreshDatabase, columns: list[str], rows: list[tuple[Any, ...]]) -> None:
    with database.connect() as connection, connection.cursor() as cursor:
        marks = ", ".join(["%s"] * (len(columns) + 1))
        cursor.executemany(
            f"INSERT INTO events ({', '.join(columns)}, version) VALUES ({marks})",  # noqa: S608
            rows,
        )


@pytest.mark.parametrize("values", [["a", "b"], ["a|b", "%7C"], ["", "%", "|"], ["%25", "|"]])
def test_a_key_gives_its_parts_back(values: list[str]) -> None:
    assert split(joined(values)) == values


@pytest.mark.parametrize("key", ["100%", "a%7Db|c", "%7c|x", "%2", "a%"])
def test_what_no_row_makes_has_no_parts(key: str) -> None:
    assert split(key) == []


TYPES: list[tuple[str, list[Any], list[str]]] = [
    (f"VARCHAR(40) {UTF8MB3}", [v for v in AWKWARD if v != "é"], []),
    (f"VARCHAR(40) {LATIN1}", [v for v in AWKWARD if v != "日本"], []),
    ("VARBINARY(40) NOT NULL", AWKWARD, []),
    (f"CHAR(40) {UTF8MB3}", ["a", "|%", "é"], []),
    ("BIGINT UNSIGNED NOT NULL", [0, 7, 18446744073709551615], []),
    ("INT NOT NULL", [-5, 0, 7], []),
    ("INT(6) UNSIGNED ZEROFILL NOT NULL", [0, 7, 123456], []),
    ("UUID NOT NULL", [str(SOME_UUID), str(uuid.UUID(int=1))], []),
    (
        f"ENUM('%', 'B', '2', 'é', 'a|b', '10', '') {LATIN1}",
        ["%", "B", "2", "é", "a|b", "10", ""],
        [],
    ),
    ("ENUM('b', 'é', '日', 'z') COLLATE utf8mb4_bin NOT NULL", ["b", "é", "日", "z"], []),
    ("BINARY(16) NOT NULL", [SOME_UUID.bytes, bytes(16)], [str(SOME_UUID), str(uuid.UUID(int=0))]),
]


@both
@pytest.mark.parametrize(("kind", "stored", "texts"), TYPES, ids=[t[0] for t in TYPES])
@pytest.mark.parametrize("is_one", [True, False], ids=["alone", "second of two"])
def test_what_python_and_the_database_take_for_the_key_is_the_same(
    database: FreshDatabase, kind: str, stored: list[Any], texts: list[str], is_one: bool
) -> None:
    if kind.startswith("UUID") and database.server.name.startswith("MySQL"):
        pytest.skip("MySQL has no such type")
    columns = {"b": kind} if is_one else {"a": f"VARCHAR(40) {LOOSE}", "b": kind}
    config = table(database, columns, f"KEY ({', '.join(columns)}, version)")
    expected = texts or [str(value) for value in stored]
    first = "o%|r"
    rows = [((value, 1) if is_one else (first, value, 1)) for value in stored]
    insert(database, [*columns], rows)
    wanted = sorted(text if is_one else joined([first, text]) for text in expected)
    layout = EventStore.discover(config)
    store = EventStore(config, layout)
    assert sorted(key for key, _ in keys(read(store, NOON, NOON + SECOND))) == wanted
    for shards in (2, 3):
        for number in range(shards):
            some = keys(read(store, NOON, NOON + SECOND, Shard(number, shards, 12)))
            own = [key for key in wanted if topic_partition(key, 12) % shards == number]
            assert sorted(key for key, _ in some) == own
    with database.connect() as connection:
        hashed = run(connection, f"SELECT CRC32({layout.identity.utf8}) FROM events")  # noqa: S608
    assert sorted(number for (number,) in hashed) == sorted(zlib.crc32(k.encode()) for k in wanted)
    assert store.existing([(key, 1) for key in wanted]) == {(key, 1) for key in wanted}
    for key in wanted:
        assert keys(backtrack(store, [VersionRange(key, 1, 99)])) == [(key, 1)]
    strangers = [
        "x",
        "",
        "1",
        "b",
        "e",
        "00007",
        "7.0",
        "1e0",
        "a|b|c",
        str(SOME_UUID).upper(),
        "9" * 40,
        "日 ",
    ]
    strangers += [f"{joined([first])}|{stranger}" for stranger in strangers]
    assert store.existing([(key, 1) for key in strangers if key not in wanted]) == set()


@both
def test_a_value_that_an_enum_does_not_list_is_an_empty_one(database: FreshDatabase) -> None:
    """Stored by a writer without strict mode, as its number 0."""
    config = table(database, {"kind": "ENUM('x', 'y') NOT NULL"}, "UNIQUE KEY (kind, version)")
    with database.connect(sql_mode="") as connection:
        run(connection, "INSERT INTO events (kind, version) VALUES ('none', 1), ('y', 1), ('y', 2)")
    store = EventStore(config, EventStore.discover(config))
    assert sorted(keys(read(store, NOON, NOON + SECOND))) == [("", 1), ("y", 1), ("y", 2)]
    wanted = [("", 1), ("0", 1), ("2", 1), ("none", 1), ("Y", 1), ("y", 2)]
    assert store.existing(wanted) == {("", 1), ("y", 2)}


ORDERS = [
    ("UNIQUE KEY by_key (kind, name, version)", True),
    ("UNIQUE KEY by_key (name, kind, version)", True),
    ("UNIQUE KEY by_key (name, version, kind)", True),
    ("UNIQUE KEY by_key (name, version, kind), KEY other (kind, id)", True),
    ("UNIQUE KEY u (name, version, kind), KEY by_key (kind, name, version, id)", True),
    ("KEY by_key (kind, name, version)", False),
]
KINDS = [f"VARCHAR(40) {LOOSE}", f"ENUM('k1', 'k0') {LOOSE}"]


@both
@pytest.mark.parametrize(("key", "is_unique"), ORDERS)
@pytest.mark.parametrize("kind", KINDS, ids=["VARCHAR", "ENUM"])
def test_lookups_read_the_index_whatever_the_order_of_its_columns(
    database: FreshDatabase, key: str, is_unique: bool, kind: str
) -> None:
    columns = {"kind": kind, "name": f"CHAR(36) {UTF8MB3}"}
    config = table(database, columns, key)
    insert(
        database,
        [*columns],
        [(f"k{k}", f"n{n}", v) for k in range(2) for n in range(500) for v in (1, 2, 3)],
    )
    database.execute("ANALYZE TABLE events")
    layout = EventStore.discover(config)
    assert (layout.key_index, layout.key_is_unique) == ("`by_key`", is_unique)
    store = EventStore(config, layout)
    ranges = [VersionRange(f"k1|n{n}", 2, 3) for n in range(20)]
    wanted = sorted((r.aggregate_id, v) for r in ranges for v in (2, 3))
    assert sorted(keys(backtrack(store, ranges))) == wanted
    assert store.versions(VersionRange("k0|n7", -9, 9), 2, highest=True) == [3, 2]
    found: list[tuple[str, int]] = []
    left = ranges
    while left:
        rows, left = store.fetch(left, 7, 1 << 20)
        found += keys(rows)
    assert sorted(found) == wanted
    of_one = [version for key, version in found if key == "k1|n7"]
    assert of_one == [2, 3]
    connection = connect_for_reading(config)
    for sql in (
        statements.versions_by_key(layout, ranges[:3]),
        statements.versions_by_key(layout, [VersionRange("k1|n7", 1, 10_000)]),
        statements.lower_versions(layout, [("k1|n7", 3)], 1),
        statements.version_numbers(layout, VersionRange("k1|n7", -9, 99), 3, highest=True),
        statements.versions_by_key(
            layout, [VersionRange("k1|n7", 3, 3), VersionRange("k0|n8", 1, 1)], only_keys=True
        ),
    ):
        for plan in explain(connection, sql):
            assert plan.is_index_range, (plan, sql)
            assert plan.index == "by_key"
            assert plan.rows < 30, (plan, sql)
    connection.close()


@both
def test_a_key_without_an_index_is_refused_with_the_one_to_add(database: FreshDatabase) -> None:
    columns = {"kind": f"VARCHAR(40) {LOOSE}", "name": f"CHAR(36) {UTF8MB3}"}
    config = table(database, columns, "UNIQUE KEY (name, version)")
    with pytest.raises(StoreError) as caught:
        EventStore.discover(config)
    assert caught.value.code == "store.index_missing"
    suggestion = str(caught.value.suggestion)
    assert suggestion == "ALTER TABLE `events` ADD UNIQUE INDEX (`kind`, `name`, `version`)"
    database.execute(suggestion)
    layout: Layout = EventStore.discover(config)
    # the id alone is unique: so is a key with it
    assert layout.key_is_unique


@both
def test_the_rows_of_one_version_come_in_one_portion(database: FreshDatabase) -> None:
    config = table(database, {"name": f"VARCHAR(40) {UTF8MB3}"}, "KEY (name, version)")
    insert(database, ["name"], [(f"n{n}", v) for n in range(30) for v in (1, 2, 2, 3)])
    store = EventStore(config, EventStore.discover(config))
    left = [VersionRange(f"n{n}", 1, 9) for n in range(30)]
    found: list[tuple[str, int]] = []
    while left:
        rows, left = store.fetch(left, 3, 1 << 20)
        portion = keys(rows)
        assert all(portion.count(key) == 2 for key in portion if key[1] == 2)
        found += portion
    assert sorted(found) == sorted((f"n{n}", v) for n in range(30) for v in (1, 2, 2, 3))
