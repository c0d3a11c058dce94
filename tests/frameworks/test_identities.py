"""Tables whose identity is easily mistaken: what `init` chooses, and what `doctor` has one do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eventpub.config import Store
from eventpub.sources.mysql.migrating import migrate
from tests.conftest import FreshDatabase
from tests.frameworks.test_frameworks import both, found, init, refused, written

TABLE = """CREATE TABLE {name} (
  id BIGINT NOT NULL{auto} PRIMARY KEY, {columns}, event_type VARCHAR(100) NOT NULL,
  payload JSON NOT NULL, created_at TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
  {key}, KEY (created_at))"""
STREAM = "stream_id VARBINARY(40) NOT NULL, version INT NOT NULL"


def make(database: FreshDatabase, columns: str, key: str, name: str = "events") -> None:
    auto = " AUTO_INCREMENT"
    database.execute(TABLE.format(name=name, columns=columns, key=key, auto=auto))


def insert(database: FreshDatabase, columns: str, *rows: tuple[Any, ...]) -> None:
    with database.connect() as connection, connection.cursor() as cursor:
        marks = ", ".join(["%s"] * len(rows[0]))
        cursor.executemany(
            f"INSERT INTO events ({columns}, event_type, payload) VALUES ({marks}, 'x', '{{}}')",  # noqa: S608
            list(rows),
        )


KEYS = [
    ("kind ENUM('A', 'B') NOT NULL", "kind, stream_id, version", ["kind", "stream_id"]),
    ("kind ENUM('A', 'B') NOT NULL", "version, stream_id, kind", ["stream_id", "kind"]),
    (
        "tenant INT NOT NULL, `group` ENUM('A', 'b|c') NOT NULL",
        "tenant, `group`, stream_id, version",
        ["tenant", "group", "stream_id"],
    ),
    ("shop_no INT NOT NULL", "shop_no, stream_id, version", ["shop_no", "stream_id"]),
]


@both
@pytest.mark.parametrize(("columns", "key", "identity"), KEYS, ids=[key for _, key, _ in KEYS])
def test_no_column_of_the_unique_key_is_left_out(
    database: FreshDatabase, tmp_path: Path, columns: str, key: str, identity: list[str]
) -> None:
    """Of an ENUM `init` said that no key tells, and merged two aggregates into one."""
    make(database, f"{columns}, {STREAM}", f"UNIQUE KEY ({key})")
    result = init(database, tmp_path)
    assert result["columns"]["aggregate_id"] == identity
    assert (result["statements"], len(result["notes"])) == ([], 1)  # on the account
    config = Store.model_validate(written(tmp_path) | {"url": database.url})
    assert {check.status for check in found(config).values()} == {"ok"}
    # whoever has configured a part of it is told the whole
    names = config.columns.model_copy(update={"aggregate_id": ("stream_id",)})
    said = found(config.model_copy(update={"columns": names})).values()
    [fix] = [str(c.suggestion) for c in said if "set aggregate_id" in str(c.suggestion)]
    assert all(f'"{name}"' in fix for name in identity)


@both
def test_a_key_with_a_column_of_another_type_asks_for_the_identity(
    database: FreshDatabase, tmp_path: Path
) -> None:
    make(database, f"flags SET('A', 'B') NOT NULL, {STREAM}", "UNIQUE (flags, stream_id, version)")
    error = refused(database, tmp_path)
    assert error["code"] == "init.column_unknown"
    assert "aggregate_id (a unique key has flags, too)" in error["message"]
    assert "--table events --set store.columns.aggregate_id=…;" in error["suggestion"]
    named = ("--table", "events", "--set", "store.columns.aggregate_id=stream_id")
    assert init(database, tmp_path, *named)["columns"]["aggregate_id"] == "stream_id"


OTHER_REASONS = [
    ("x INT NOT NULL", "UNIQUE KEY (stream_id, version, x)"),
    ("x INT NOT NULL UNIQUE", "UNIQUE KEY (x, stream_id, version)"),
    ("x DATETIME NOT NULL DEFAULT '2026-01-01'", "UNIQUE KEY (x, stream_id, version)"),
    ("x INT NOT NULL", "UNIQUE KEY (id, stream_id, version)"),
    ("x INT NOT NULL", "UNIQUE KEY (x, stream_id, version), UNIQUE KEY (version, stream_id)"),
]


@pytest.mark.parametrize(
    ("column", "key"), OTHER_REASONS, ids=[f"{c} {k}" for c, k in OTHER_REASONS]
)
def test_columns_that_a_key_has_for_other_reasons_are_none_of_the_identity(
    database: FreshDatabase, tmp_path: Path, column: str, key: str
) -> None:
    make(database, f"{column}, {STREAM}", key)
    assert init(database, tmp_path)["columns"]["aggregate_id"] == "stream_id"


@both
def test_a_number_by_which_the_table_is_partitioned_is_none_of_the_identity(
    database: FreshDatabase, tmp_path: Path
) -> None:
    make(database, f"month INT NOT NULL, {STREAM}", "KEY (stream_id, version)")
    database.execute(
        "ALTER TABLE events DROP PRIMARY KEY, ADD KEY (id), ADD PRIMARY KEY (month, stream_id,"
        " version) PARTITION BY RANGE (month) (PARTITION p VALUES LESS THAN MAXVALUE)"
    )
    assert init(database, tmp_path)["columns"]["aggregate_id"] == "stream_id"


ORDERS = (
    "CREATE TABLE order_events (event_id BINARY(16) PRIMARY KEY, order_id INT NOT NULL,"
    " event_number SMALLINT NOT NULL, name VARCHAR(50) NOT NULL, json JSON NOT NULL,"
    " recorded_on DATETIME(6) NOT NULL, UNIQUE (order_id, event_number))"
)


@both
def test_a_key_that_ends_with_a_version_begins_with_the_identity(
    database: FreshDatabase, tmp_path: Path
) -> None:
    database.execute(ORDERS)
    columns = init(database, tmp_path)["columns"]
    assert (columns["aggregate_id"], columns["version"]) == ("order_id", "event_number")
    # a table of lines is none of events
    database.execute(
        "CREATE TABLE order_lines (order_id INT NOT NULL, no INT NOT NULL, product VARCHAR(50),"
        " remark TEXT, created_at TIMESTAMP(6) NOT NULL, PRIMARY KEY (order_id, no))"
    )
    assert init(database, tmp_path, "--force")["others"] == []


def test_each_table_that_may_be_meant_is_named(database: FreshDatabase, tmp_path: Path) -> None:
    database.execute(ORDERS.replace("UNIQUE", "KEY"))
    database.execute("CREATE TABLE cart_events LIKE order_events")
    error = refused(database, tmp_path)
    assert error["code"] == "init.column_unknown"
    for name in ("cart_events", "order_events"):
        assert f"table {name} lacks aggregate_id" in error["message"]
    assert "--table cart_events or order_events --set store.columns" in error["suggestion"]


@both
@pytest.mark.parametrize(
    "columns", [f"kind ENUM('A') NOT NULL, {STREAM}", "stream_id INT, version INT"]
)
def test_init_and_migrate_say_the_same_of_an_index_of_any_identity(
    database: FreshDatabase, tmp_path: Path, columns: str
) -> None:
    """`init` had writers wait for an index that `migrate` adds without keeping them."""
    key = ["kind"] * ("kind" in columns) + ["stream_id", "version"]
    make(database, columns, f"UNIQUE KEY ({', '.join(key)})")
    database.execute("ALTER TABLE events DROP KEY created_at")
    result = init(database, tmp_path)
    assert result["statements"] == ["ALTER TABLE `events` ADD INDEX (`created_at`);"]
    assert "writers are not blocked" in result["next"][0]
    config = Store.model_validate(written(tmp_path) | {"url": database.url})
    assert migrate(config) == result["statements"]
    assert init(database, tmp_path, "--force")["statements"] == []
    database.execute("ALTER TABLE events DROP COLUMN created_at")
    assert "while writers wait" in init(database, tmp_path, "--force")["next"][0]


@pytest.mark.parametrize("kind", ["DECIMAL(10, 0)", "VARCHAR(20)", "FLOAT"])
def test_a_version_of_another_type_is_told_which_it_may_be(
    database: FreshDatabase, kind: str
) -> None:
    make(database, f"stream_id INT NOT NULL, version {kind}", "UNIQUE KEY (stream_id, version)")
    config = Store.model_validate(
        {"url": database.url, "columns": {"aggregate_id": "stream_id", "create_time": "created_at"}}
    )
    check = found(config)["table"]
    assert (check.code, check.status) == ("store.column_type", "wrong")
    assert str(check.suggestion).endswith('version = "…", or make this one BIGINT')


@pytest.mark.parametrize("kind", ["BINARY(20)", "SET('a')"])
def test_an_id_of_another_type_gets_a_sentence(database: FreshDatabase, kind: str) -> None:
    make(
        database, f"stream_id {kind} NOT NULL, version INT NOT NULL", "UNIQUE (stream_id, version)"
    )
    config = Store.model_validate(
        {"url": database.url, "columns": {"aggregate_id": "stream_id", "create_time": "created_at"}}
    )
    check = found(config)["table"]
    assert check.code == "store.column_type"
    said, _, definition = str(check.suggestion).partition(", such as ")
    assert said == 'map another column in [store.columns]: aggregate_id = "…"'
    database.execute(f"ALTER TABLE events ADD COLUMN {definition}")
