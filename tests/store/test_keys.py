"""Events by key: by index, byte for byte, whatever the collations of column and session."""

from __future__ import annotations

import pyarrow as pa
import pytest

from eventpub.admission.model import EVENTS, VersionRange
from eventpub.config import Store
from eventpub.errors import StoreError
from eventpub.sources.mysql import EventStore, statements
from eventpub.sources.mysql.connection import connect_for_reading, run
from tests.conftest import FreshDatabase
from tests.store.plans import explain
from tests.store.tables import SECOND, backtrack, create, insert, keys, open_store, read, utc

both = pytest.mark.parametrize("database", ["mysql", "mariadb"], indirect=True)
NOON = utc("2026-03-01 12:00:00")
AT = "2026-03-01 12:00:01"
STRANGE = [
    "a",
    "A",
    "a ",
    " a",
    "ä",
    "a\u0308",
    "a'b\"c`d\\",
    "%s %(x)s :x",
    "x' OR '1'='1",
    "日本語 🎉",
    "ss",
    "ß",
    "",
    "z" * 255,
    "🎉" * 255,
]


def below(store: EventStore, *sights: tuple[str, int], limit: int = 16) -> pa.Table:
    batches = list(store.below(sights, limit))
    for batch in batches:
        assert batch.schema.names == ["aggregate_id", "version", "create_time"]
    return pa.Table.from_batches(batches)


@both
def test_strange_ids_are_told_apart_and_found_by_their_bytes(database: FreshDatabase) -> None:
    store = open_store(create(database))
    insert(database, [(id, version, AT) for id in STRANGE for version in (1, 2)])
    assert sorted(keys(read(store, NOON, NOON + SECOND))) == sorted(
        (id, version) for id in STRANGE for version in (1, 2)
    )
    for id in STRANGE:
        assert keys(backtrack(store, [VersionRange(id, 2, 9)])) == [(id, 2)]
        assert keys(below(store, (id, 2))) == [(id, 1)]
        assert keys(store.fetch([VersionRange(id, 1, 9)], 9, 9999)[0]) == [(id, 1), (id, 2)]
        assert store.existing([(id, 2), (id, 3)]) == {(id, 2)}
        assert store.versions(VersionRange(id, -9, 9), 9) == [1, 2]
        assert store.versions(VersionRange(id, -9, 9), 1, highest=True) == [2]
        assert [row.version for row in store.seen(VersionRange(id, -9, 9))] == [1, 2]


@both
@pytest.mark.parametrize(
    "aggregate_id",
    [
        "VARCHAR(100) CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci NOT NULL",
        "VARCHAR(100) CHARACTER SET latin1 NOT NULL",
        "VARCHAR(100) CHARACTER SET utf16 NOT NULL",
        "CHAR(40) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL",
        "VARBINARY(100) NOT NULL",
    ],
)
def test_every_kind_of_column_is_searched_by_index_for_exact_bytes(
    database: FreshDatabase, aggregate_id: str
) -> None:
    """The table's unique index may take A for a; a non-unique one here lets both in."""
    config = create(
        database,
        aggregate_id=aggregate_id,
        indexes="KEY by_key (aggregate_id, version), KEY (create_time)",
    )
    insert(database, [(f"filler {n}", 1, AT) for n in range(300)])
    insert(database, [(id, v, AT) for id in ("a", "A", "ä") for v in (1, 2, 3)])
    layout = EventStore.discover(config)
    store = EventStore(config, layout)
    for id in ("a", "A", "ä"):
        assert keys(backtrack(store, [VersionRange(id, 1, 9)])) == [(id, 1), (id, 2), (id, 3)]
        assert keys(below(store, (id, 3), limit=1)) == [(id, 2)]
    assert keys(backtrack(store, [VersionRange("日", 1, 9)])) == []
    connection = connect_for_reading(config)
    run(connection, "SET collation_connection = utf8mb4_unicode_ci")
    for sql in (
        statements.versions_by_key(layout, [VersionRange("a", 1, 2), VersionRange("日", 1, 2)]),
        statements.lower_versions(layout, [("a", 3)], 1),
    ):
        for plan in explain(connection, sql):
            assert plan.is_index_range, plan
            assert plan.index == "by_key"
            assert plan.rows < 100
    connection.close()


@both
def test_many_ranges_take_few_statements(database: FreshDatabase) -> None:
    store = open_store(create(database))
    insert(database, [(f"a{n}", version, AT) for n in range(700) for version in (1, 2, 4)])
    ranges = [VersionRange(f"a{n}", 2, 3) for n in range(700)]
    assert len(backtrack(store, ranges)) == 700
    assert len(below(store, *((f"a{n}", 4) for n in range(700)))) == 1400


def test_rows_come_by_aggregate_and_version_whatever_their_time(database: FreshDatabase) -> None:
    store = open_store(create(database))
    insert(
        database,
        [("b", 2, "2026-03-01 12:00:09"), ("b", 1, "2020-01-01"), ("b", 3, "2020-01-02")],
    )
    insert(database, [("a", 5, "2036-01-01")])
    ranges = [VersionRange("b", 1, 3), VersionRange("a", 1, 9), VersionRange("none", 1, 2)]
    assert keys(backtrack(store, ranges)) == [("a", 5), ("b", 1), ("b", 2), ("b", 3)]
    assert backtrack(store, ranges)["create_time"].to_pylist()[2] == NOON + 9 * SECOND
    found = keys(below(store, ("b", 3), ("a", 5), ("a", 6)))
    assert found == [("b", 2), ("b", 1), ("a", 5)]


@both
@pytest.mark.parametrize("key", ["aggregate_id(100), version", "aggregate_id, version DESC"])
def test_large_json_comes_by_keys_whose_index_does_not_give_the_order(
    database: FreshDatabase, key: str
) -> None:
    """MySQL has 256 KB to sort in, and failed: "Out of sort memory". Each start met it again."""
    store = open_store(create(database, payload="JSON", indexes=f"KEY ({key}), KEY (create_time)"))
    wanted = [(id, version) for id in "abc" for version in (1, 2)]
    for event in wanted:
        database.execute(
            "INSERT INTO events (aggregate_id, version, event_type, payload, metadata)"
            " SELECT %s, %s, 't', doc, doc FROM (SELECT JSON_ARRAY(REPEAT('x', 1 << 20)) doc) d",
            event,
        )
    assert keys(backtrack(store, [VersionRange(id, 1, 2) for id in "abc"])) == wanted


@both
def test_ranges_come_in_portions_of_rows_and_of_bytes(database: FreshDatabase) -> None:
    store = open_store(create(database))
    insert(database, [(f"a{n}", version, AT) for n in range(700) for version in (1, 2, 4)])
    wanted = [VersionRange(f"a{n}", 1, 5) for n in range(700)]
    for rows, size in ((100, 1 << 20), (10_000, 5_000)):
        found: list[tuple[str, int]] = []
        left = wanted
        while left:
            table, rest = store.fetch(left, rows, size)
            assert 0 < table.num_rows <= 300 or not rest
            assert sum(r.last - r.first + 1 for r in rest) < sum(r.last - r.first + 1 for r in left)
            found += keys(table)
            left = rest
        assert len(found) == 2100
        assert found == list(dict.fromkeys(found))
        of_one = [v for a, v in found if a == "a77"]
        assert of_one == [1, 2, 4]


@both
def test_a_portion_and_a_look_for_keys_read_the_index_in_its_order(
    database: FreshDatabase,
) -> None:
    table = create(database)
    store = open_store(table)
    insert(database, [(f"a{n}", version, AT) for n in range(300) for version in (1, 2, 4)])
    layout = store._layout
    connection = connect_for_reading(store._config)
    wanted = [VersionRange(f"a{n}", 1, 5) for n in range(0, 300, 3)]
    for plan in explain(connection, statements.versions_by_key(layout, wanted)):
        assert plan.is_index_range, plan
        assert "filesort" not in plan.extra
    wanted = [VersionRange(f"a{n}", 2, 2) for n in range(90)]
    for plan in explain(connection, statements.versions_by_key(layout, wanted, only_keys=True)):
        assert plan.is_index_range, plan
        assert "Using index" in plan.extra
    connection.close()


def test_asking_for_nothing_is_an_empty_table(database: FreshDatabase) -> None:
    store = open_store(create(database))
    assert backtrack(store, []).schema == EVENTS
    assert list(store.below([])) == []


@both
def test_names_of_table_and_columns_are_quoted_never_executed(database: FreshDatabase) -> None:
    names = {
        "aggregate_id": "id`; DROP TABLE events; --",
        "version": "ver'sion %s",
        "event_type": 'ty"pe :x',
        "payload": "pay load",
        "create_time": "`",
        "metadata": "",
    }
    table = "ev`ents' -- %d"
    from eventpub import NewEvent, append
    from eventpub.sources.mysql.migrating import migrate

    config = Store.model_validate({"url": database.url, "table": table, "columns": names})
    create(database)
    migrate(config)
    assert migrate(config) == []
    with database.connect() as connection:
        append(connection, "a", 0, [NewEvent("t", b"p")], table=table, columns=names)
    store = open_store(config)
    poll = store.poll(0, 0, 1)
    assert poll.has_rows
    assert keys(read(store, 0, poll.upper)) == [("a", 1)]
    assert keys(backtrack(store, [VersionRange("a", 1, 1)])) == [("a", 1)]
    assert database.execute("SELECT COUNT(*) FROM events") == ((0,),)


@both
def test_a_row_that_cannot_be_published_is_seen_as_it_is(database: FreshDatabase) -> None:
    store = open_store(create(database, create_time="DATETIME(6) NULL"))
    insert(database, [("a", 1, AT), ("a", 4, "1969-12-31 23:59:59.5")])
    with database.connect() as connection, connection.cursor() as cursor:
        cursor.execute("SET sql_mode = ''")
        for version, time in ((2, None), (3, "0000-00-00"), (5, "2026-00-00")):
            cursor.execute(
                "INSERT INTO events (aggregate_id, version, event_type, create_time)"
                " VALUES ('a', %s, 'Placed', %s)",
                (version, time),
            )
    every = VersionRange("a", -(2**63), 2**63 - 1)
    times = [NOON + SECOND, None, None, -SECOND // 2, None]
    assert [row.create_time for row in store.seen(every)] == times
    assert [row.payload_bytes for row in store.seen(every)] == [1, None, None, 1, None]
    assert store.versions(every, 2) == [1, 2]
    with pytest.raises(StoreError, match=r"store\.row_invalid"):
        backtrack(store, [every])
