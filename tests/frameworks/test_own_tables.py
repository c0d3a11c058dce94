"""Tables of one's own: what `init` chooses, refuses and asks for, and what `doctor` has one do."""

from __future__ import annotations

from pathlib import Path

import pytest

from eventpub.config import Store
from eventpub.sources.mysql import EventStore
from eventpub.sources.mysql.migrating import migrate
from tests.conftest import FreshDatabase
from tests.frameworks.test_frameworks import both, command, found, init, refused, written
from tests.publisher.harness import create_table

BASE = """CREATE TABLE {name} (
  id BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
  stream_id VARCHAR(100) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL, version INT NOT NULL,
  event_type VARCHAR(100) NOT NULL, payload JSON NOT NULL,
  created_at TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6){more})"""
KEYS = ", UNIQUE KEY (stream_id, version), KEY (created_at)"


def make(
    database: FreshDatabase, more: str = KEYS, *, name: str = "events", **changes: str
) -> Store:
    """A table with some of it changed, and the configuration that reads it."""
    sql = BASE.format(name=name, more=more)
    for old, new in changes.items():
        sql = sql.replace({"id_type": "VARCHAR(100) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin",
                           "time": "TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6)",
                           "version": "INT NOT NULL"}[old], new)  # fmt: skip
    database.execute(sql)
    columns = {"aggregate_id": "stream_id", "create_time": "created_at"}
    return Store.model_validate({"url": database.url, "table": name, "columns": columns})


def insert(database: FreshDatabase, *keys: tuple[str, int], table: str = "events") -> None:
    with database.connect() as connection, connection.cursor() as cursor:
        cursor.executemany(
            f"INSERT INTO {table} (stream_id, version, event_type, payload)"  # noqa: S608
            " VALUES (%s, %s, 'x', '{}')",
            list(keys),
        )


def test_of_two_equal_tables_init_takes_none(database: FreshDatabase, tmp_path: Path) -> None:
    """It took one, with status 0."""
    make(database, name="order_events")
    make(database, name="customer_events")
    error = refused(database, tmp_path)
    assert error["code"] == "init.several_tables"
    assert "customer_events, order_events" in error["message"]
    assert "--table customer_events, or --table order_events" in error["suggestion"]
    insert(database, ("a", 1), table="order_events")
    assert init(database, tmp_path)["table"] == "order_events"


@both
def test_a_table_that_migrate_left_behind_is_not_preferred(
    database: FreshDatabase, tmp_path: Path
) -> None:
    """After an `init` that failed, `migrate --yes` made an empty `events`, which `init` took."""
    make(database, name="happened_to_orders", time="VARCHAR(40) NOT NULL DEFAULT ''")
    insert(database, ("a", 1), ("a", 2), table="happened_to_orders")
    migrate(Store(url=database.url))
    result = init(database, tmp_path)
    assert result["table"] == "happened_to_orders"
    assert [other["table"] for other in result["others"]] == ["events"]
    assert any("created_at is varchar(40), not TIMESTAMP" in note for note in result["notes"])
    [statement] = result["statements"]
    database.execute(statement)
    assert init(database, tmp_path, "--force")["statements"] == []


def test_a_view_is_found_where_no_table_is(database: FreshDatabase, tmp_path: Path) -> None:
    database.execute(
        "CREATE TABLE secret (a VARCHAR(9) PRIMARY KEY, b INT, c VARCHAR(9), d TEXT, e TIMESTAMP)"
    )
    database.execute(
        "CREATE VIEW events AS SELECT a AS aggregate_id, b AS version, c AS event_type,"
        " d AS payload, e AS create_time FROM secret"
    )
    status, answer = command(tmp_path, "init", "--url", database.url)
    error = answer["error"]
    assert (status, error["code"]) == (3, "store.is_view")
    assert error["message"].startswith("events is a view")


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_a_system_versioned_table_is_found(database: FreshDatabase, tmp_path: Path) -> None:
    config = make(database)
    database.execute("ALTER TABLE events ADD SYSTEM VERSIONING")
    insert(database, ("a", 1), ("a", 2))
    result = init(database, tmp_path)
    assert (result["table"], result["statements"]) == ("events", [])
    assert result["columns"]["create_time"] == "created_at"
    assert {check.status for check in found(config).values()} <= {"ok", "warn"}


@both
@pytest.mark.parametrize("is_named", [False, True], ids=["unnamed", "named"])
def test_a_table_whose_version_numbers_all_rows_is_refused(
    database: FreshDatabase, tmp_path: Path, is_named: bool
) -> None:
    """`init` coached towards it, and `doctor` passed it."""
    database.execute(
        "CREATE TABLE events (version BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY, stream_id"
        " VARCHAR(50) NOT NULL, event_type VARCHAR(50) NOT NULL, payload JSON NOT NULL, created_at"
        " TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6), KEY (created_at),"
        " UNIQUE KEY (stream_id, version))"
    )
    arguments = ("--table", "events") if is_named else ()
    error = refused(database, tmp_path, *arguments)
    assert error["code"] == "init.not_publishable"
    assert "version is AUTO_INCREMENT: it numbers the rows" in error["message"]
    columns = {"aggregate_id": "stream_id", "create_time": "created_at"}
    config = Store.model_validate({"url": database.url, "columns": columns})
    assert found(config)["versions"].status == "wrong"


@both
def test_a_sample_tells_that_versions_number_all_rows(
    database: FreshDatabase, tmp_path: Path
) -> None:
    config = make(database)
    insert(database, ("a", 1), ("b", 2), ("a", 3), ("c", 4), ("b", 5))
    check = found(config)["versions"]
    assert check.status == "wrong"
    assert "numbers the rows of the table" in check.message
    assert refused(database, tmp_path)["code"] == "init.not_publishable"
    # an aggregate with a hole is none
    database.execute("DELETE FROM events")
    assert found(config)["versions"].message == "consecutive within each aggregate"
    insert(database, ("a", 1), ("a", 2), ("b", 1), ("b", 4), ("c", 1))
    check = found(config)["versions"]
    assert (check.status, check.message) == (
        "ok",
        "versions are missing in 1 of 2 aggregates with several events",
    )
    insert(database, ("c", 3), ("c", 5), ("d", 1), ("d", 3))
    check = found(config)["versions"]
    assert check.status == "warn"
    assert check.message.startswith("versions are missing in 3 of 4 aggregates with several")
    assert init(database, tmp_path)


@both
def test_aggregates_that_lost_their_old_versions_are_published(
    database: FreshDatabase, tmp_path: Path
) -> None:
    """No two had a version in common, so that `init` refused them."""
    config = make(database)
    insert(database, ("a", 101), ("a", 102), ("b", 40), ("b", 41), ("c", 7))
    assert found(config)["versions"].message == "consecutive within each aggregate"
    assert init(database, tmp_path)
    database.execute("DELETE FROM events")
    insert(database, ("a", 1), ("a", 2), ("b", 3), ("b", 4), ("c", 5))
    assert found(config)["versions"].status == "wrong"


def test_a_table_without_versions_is_told_that_it_cannot_be_published(
    database: FreshDatabase, tmp_path: Path
) -> None:
    database.execute(
        "CREATE TABLE events (id BIGINT AUTO_INCREMENT PRIMARY KEY, entity_id VARCHAR(50) NOT NULL,"
        " event_type VARCHAR(50) NOT NULL, payload JSON NOT NULL,"
        " created_at TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6))"
    )
    error = refused(database, tmp_path)
    assert error["code"] == "init.column_unknown"
    assert "table events lacks version" in error["message"]
    assert "each row needs a version (1, 2, 3, … in its aggregate)" in error["suggestion"]


@both
@pytest.mark.parametrize("of", ["ENUM('opened', 'closed')", "INT", "VARBINARY(20)", "TINYBLOB"])
def test_an_event_type_of_any_type_is_taken_as_run_takes_it(
    database: FreshDatabase, tmp_path: Path, of: str
) -> None:
    """`init` said that the table lacks it, and to name the column."""
    config = make(database)
    database.execute(f"ALTER TABLE events MODIFY event_type {of} NOT NULL")
    assert init(database, tmp_path)["columns"]["event_type"] == "event_type"
    assert found(config)["table"].status == "ok"
    columns = "stream_id, version, event_type, payload"
    database.execute(f"INSERT INTO events ({columns}) VALUES ('a', 1, 1, '{{}}')")  # noqa: S608
    with EventStore(config, EventStore.discover(config)) as store:
        [batch] = store.window(0, store.now(), None)
    assert batch.column("event_type").to_pylist() == ["opened" if "ENUM" in of else "1"]
    database.execute("DELETE FROM events")
    # of similar names, text goes first
    database.execute("ALTER TABLE events CHANGE event_type kind ENUM('opened', 'x') NOT NULL")
    assert init(database, tmp_path, "--force")["columns"]["event_type"] == "kind"
    database.execute("ALTER TABLE events ADD COLUMN class VARCHAR(20) NOT NULL")
    assert init(database, tmp_path, "--force")["columns"]["event_type"] == "class"


@both
@pytest.mark.parametrize("version", ["decimal(20,0)", "varchar(20)"])
def test_a_column_of_a_type_that_is_not_taken_is_named_with_it(
    database: FreshDatabase, tmp_path: Path, version: str
) -> None:
    make(database)
    database.execute(f"ALTER TABLE events MODIFY version {version} NOT NULL")
    error = refused(database, tmp_path)
    assert error["code"] == "init.column_unknown"
    assert f"table events lacks version (version is {version}, not big" in error["message"]
    assert "--set store.columns.version=…" in error["suggestion"]


def test_init_beside_a_file_says_that_it_is_there(database: FreshDatabase, tmp_path: Path) -> None:
    """It said that store.url is not set."""
    create_table(database)
    assert init(database, tmp_path)
    text = (tmp_path / "eventpub.toml").read_text()
    status, answer = command(tmp_path, "init")
    error = answer["error"]
    assert (status, error["code"]) == (2, "init.file_exists")
    assert "eventpub doctor" in error["suggestion"]
    assert (tmp_path / "eventpub.toml").read_text() == text


@both
@pytest.mark.parametrize("id_type", ["VARCHAR(1000) CHARACTER SET utf8mb4", "TEXT"])
def test_ids_longer_than_an_index_may_be(
    database: FreshDatabase, tmp_path: Path, id_type: str
) -> None:
    """MySQL refused the key that doctor printed; MariaDB made one that is no use, for ever."""
    config = make(database, ", KEY (created_at)", id_type=id_type)
    insert(database, ("urn:order:1", 1), ("urn:order:1", 2), ("urn:order:2", 1))
    check = found(config)["table"]
    assert (check.status, check.code) == ("wrong", "store.index_missing")
    database.execute(str(check.suggestion))
    after = found(config)
    assert {name for name, c in after.items() if c.status == "wrong"} == set()
    said = after["identity of aggregates"]
    assert "no unique key is possible: it would have up to" in said.message
    assert said.suggestion == "make sure that writers write each version once"
    insert(database, ("urn:order:1", 2))
    said = found(config)["identity of aggregates"]
    assert str(said.suggestion).startswith("correct the repeated rows: SELECT")
    assert init(database, tmp_path)["statements"] == []


@both
def test_a_table_partitioned_by_time_gets_no_unique_key(database: FreshDatabase) -> None:
    config = make(database, time="DATETIME(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6)")
    database.execute("DROP TABLE events")
    database.execute(
        "CREATE TABLE events (stream_id VARCHAR(100) NOT NULL, version INT NOT NULL, event_type"
        " VARCHAR(100) NOT NULL, payload JSON NOT NULL, created_at DATETIME(6) NOT NULL DEFAULT"
        " CURRENT_TIMESTAMP(6), PRIMARY KEY (stream_id, created_at, version))"
        " PARTITION BY RANGE (TO_DAYS(created_at)) (PARTITION p0 VALUES LESS THAN (TO_DAYS("
        "'2026-01-01')), PARTITION p1 VALUES LESS THAN MAXVALUE)"
    )
    for _ in range(2):  # by key, by time
        check = found(config)["table"]
        if check.status == "wrong":
            database.execute(str(check.suggestion))
    after = found(config)
    assert after["table"].status == "ok"
    assert "created_at, by which the table is partitioned" in (
        after["identity of aggregates"].message
    )
    assert "ALTER" not in str(after["identity of aggregates"].suggestion)
    # and the number that it asks for can be added
    assert after["order of insertion"].status == "warn"
    database.execute(str(after["order of insertion"].suggestion))
    assert found(config)["order of insertion"].status == "ok"


@both
def test_rows_of_two_types_with_one_id_are_told_apart_by_the_type(
    database: FreshDatabase, tmp_path: Path
) -> None:
    """The key that was printed cannot be added: 1062."""
    more = ", stream_type VARCHAR(50) NOT NULL DEFAULT 'order', KEY (created_at)"
    config = make(database, more + ", KEY (stream_id, version)")
    insert(database, ("1", 1), ("1", 2))
    database.execute(
        "INSERT INTO events (stream_id, version, event_type, payload, stream_type)"
        " VALUES ('1', 1, 'x', '{}', 'invoice')"
    )
    check = found(config)["identity of aggregates"]
    assert check.suggestion == (
        'set aggregate_id = ["stream_type", "stream_id"] in [store.columns]; if events have been'
        " published, also another app.id, app.state_dir and sink.topic"
    )
    # with a unique key it is seen without rows
    database.execute("ALTER TABLE events ADD UNIQUE KEY (stream_type, stream_id, version)")
    assert found(config)["identity of aggregates"].suggestion == check.suggestion
    # also where no index begins with what is configured
    database.execute("ALTER TABLE events DROP KEY stream_id")
    assert found(config)["table"].suggestion == check.suggestion
    result = init(database, tmp_path)
    assert result["columns"]["aggregate_id"] == ["stream_type", "stream_id"]
    both_columns = Store.model_validate(written(tmp_path) | {"url": database.url})
    assert "twice" not in found(both_columns)["identity of aggregates"].message


@both
def test_aggregates_that_only_a_collation_takes_for_one_are_not_there_twice(
    database: FreshDatabase, tmp_path: Path
) -> None:
    """Both were to be "corrected": whoever did so deleted events."""
    id_type = "VARCHAR(100) CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci"
    config = make(database, ", KEY (created_at), KEY (stream_id, version)", id_type=id_type)
    insert(database, ("Kx9", 1), ("kx9", 1), ("kx9", 2))
    check = found(config)["identity of aggregates"]
    assert "twice" not in check.message.partition("no unique key")[2]
    assert "collation utf8mb4_general_ci treats ids as equal" in check.message
    assert str(check.suggestion).startswith("give the column the collation utf8mb4_")
    result = init(database, tmp_path)
    assert (result["columns"]["aggregate_id"], result["statements"]) == ("stream_id", [])
    [note] = [note for note in result["notes"] if "unique key" in note]
    assert "collation utf8mb4_general_ci treats ids as equal" in note
    # of rows that are repeated, only these are listed
    insert(database, ("kx9", 1))
    check = found(config)["identity of aggregates"]
    assert "stream_id kx9, version 1 is there twice" in check.message
    assert database.execute(str(check.suggestion).partition(": ")[2]) == (("kx9", 1),)
    database.execute("DELETE FROM events WHERE id = 2")
    collation = str(found(config)["identity of aggregates"].suggestion)
    name = collation.removeprefix("give the column the collation ").partition(",")[0]
    database.execute(
        f"ALTER TABLE events MODIFY stream_id VARCHAR(100) COLLATE {name} NOT NULL,"
        " ADD UNIQUE KEY (stream_id, version)"
    )
    assert found(config)["identity of aggregates"].status == "ok"


@both
def test_a_version_that_is_there_twice_gets_no_unique_key(
    database: FreshDatabase, tmp_path: Path
) -> None:
    config = make(database, ", KEY (created_at), KEY (stream_id, version)")
    insert(database, ("a", 1), ("a", 2), ("a", 2), ("b", 1))
    check = found(config)["identity of aggregates"]
    assert "stream_id a, version 2 is there twice" in check.message
    listed = str(check.suggestion).partition(": ")[2]
    assert database.execute(listed) == (("a", 2),)
    result = init(database, tmp_path)
    assert result["statements"] == []
    assert any("stream_id a, version 2 is there twice" in note for note in result["notes"])
    # without them, the key that it prints can be added
    database.execute("DELETE FROM events WHERE id = 3")
    database.execute(str(found(config)["identity of aggregates"].suggestion))
    assert "twice" not in found(config)["identity of aggregates"].message


@both
def test_a_number_is_added_under_a_free_name_and_then_found(database: FreshDatabase) -> None:
    """doctor added a column seq that was there (1060), under the heading of the time zone."""
    config = make(database, time="DATETIME(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6)")
    assert found(config)["order of insertion"].status == "ok"
    database.execute("ALTER TABLE events MODIFY id BIGINT NOT NULL, DROP PRIMARY KEY")
    database.execute("ALTER TABLE events DROP COLUMN id, ADD COLUMN SEQ INT")
    said = found(config)
    assert said["time zone"].status == "ok"
    assert said["order of insertion"].status == "warn"
    database.execute(str(said["order of insertion"].suggestion))
    check = found(config)["order of insertion"]
    assert (check.status, check.message) == ("ok", "by eventpub_seq")


@both
def test_an_auto_increment_of_any_name_is_the_id(database: FreshDatabase) -> None:
    """A second AUTO_INCREMENT was asked for: 1075."""
    config = make(database, time="DATETIME(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6)")
    database.execute("ALTER TABLE events RENAME COLUMN id TO no, ADD COLUMN id CHAR(36)")
    check = found(config)["order of insertion"]
    assert (check.status, check.message) == ("ok", "by no")


@both
def test_a_time_that_the_application_writes_as_text_gets_a_column_beside_it(
    database: FreshDatabase,
) -> None:
    """doctor said no more than what types there may be."""
    config = make(database, ", UNIQUE KEY (stream_id, version)", time="VARCHAR(40) NOT NULL")
    check = found(config)["table"]
    assert check.code == "store.column_type"
    statement, _, setting = str(check.suggestion).partition(", and set ")
    assert setting == 'create_time = "create_time" in [store.columns]'
    database.execute(statement)
    columns = config.columns.model_copy(update={"create_time": "create_time"})
    assert found(config.model_copy(update={"columns": columns}))["table"].status == "ok"

    database.execute("ALTER TABLE events DROP COLUMN create_time")
    missing = config.model_copy(update={"columns": columns})
    check = found(missing)["table"]
    assert check.code == "store.column_missing"
    database.execute(str(check.suggestion))
    assert found(missing)["table"].status == "ok"


@both
def test_columns_that_may_be_null_keep_all_else(database: FreshDatabase) -> None:
    config = make(
        database,
        id_type="VARCHAR(100) CHARACTER SET latin1 COLLATE latin1_bin",
        time="DATETIME(6) NULL DEFAULT CURRENT_TIMESTAMP(6) COMMENT 'it''s DEFAULT NULL'",
    )
    database.execute("ALTER TABLE events MODIFY version BIGINT UNSIGNED DEFAULT NULL COMMENT 'v'")
    database.execute("ALTER TABLE events MODIFY stream_id VARCHAR(100) CHARACTER SET latin1"
                     " COLLATE latin1_bin NULL")  # fmt: skip
    insert(database, ("a", 1))
    before = database.execute("SHOW CREATE TABLE events")[0][1]
    check = found(config)["rows without identity or time"]
    assert check.status == "warn"
    database.execute(str(check.suggestion).partition("; or ")[0])
    assert found(config)["rows without identity or time"].status == "ok"
    after = database.execute("SHOW CREATE TABLE events")[0][1]
    for kept in ("latin1_bin", "bigint", "unsigned", "COMMENT 'v'", "it''s DEFAULT NULL"):
        assert kept in before
        assert kept in after
    insert(database, ("a", 2))


@both
def test_rows_without_identity_get_no_statement_that_refuses_them(
    database: FreshDatabase, tmp_path: Path
) -> None:
    """NOT NULL cannot be added, and "remove the row" cannot be followed."""
    config = make(database)
    database.execute("ALTER TABLE events MODIFY version INT NULL")
    database.execute(
        "INSERT INTO events (stream_id, version, event_type, payload) VALUES ('a', NULL, 'x', '{}')"
    )
    check = found(config)["rows without identity or time"]
    assert "1 row of the newest" in check.message
    assert str(check.suggestion).startswith('set store.without_identity = "skip"')
    skips = config.model_copy(update={"without_identity": "skip"})
    assert found(skips)["rows without identity or time"].status == "ok"
    assert init(database, tmp_path)["without_identity"] == "skip"


@both
def test_a_first_version_that_is_wrong_is_corrected(
    database: FreshDatabase, tmp_path: Path
) -> None:
    config = make(database)
    insert(database, ("a", 0), ("a", 1), ("b", 0))
    check = found(config)["first versions"]
    assert (check.status, check.suggestion) == ("wrong", "set store.first_version = 0")
    assert "2 of 2 aggregates begin below version 1" in check.message
    assert init(database, tmp_path)["first_version"] == 0
    insert(database, ("b", 1), ("c", 1), ("d", 1))
    database.execute("DELETE FROM events WHERE version = 0 AND stream_id = 'a'")
    assert init(database, tmp_path, "--force")["first_version"] == 1  # of b's row only
    check = found(config.model_copy(update={"first_version": 0}))["first versions"]
    assert (check.status, check.suggestion) == ("warn", "set store.first_version = 1")


@both
def test_a_time_that_an_update_changes_keeps_its_comment(database: FreshDatabase) -> None:
    config = make(database, time="TIMESTAMP NOT NULL ON UPDATE CURRENT_TIMESTAMP COMMENT 'of PHP'")
    check = found(config)["create_time"]
    assert check.status == "warn"
    database.execute(str(check.suggestion))
    assert found(config)["create_time"].status == "ok"
    assert "COMMENT 'of PHP'" in database.execute("SHOW CREATE TABLE events")[0][1]


@both
@pytest.mark.parametrize(
    "time",
    [
        "TIMESTAMP NULL",
        "TIMESTAMP NULL ON UPDATE CURRENT_TIMESTAMP",
        "DATETIME(3) NULL COMMENT 'c'",
    ],
)
def test_a_time_that_may_be_null_takes_one_statement(database: FreshDatabase, time: str) -> None:
    """The statement for NOT NULL and the one for the default undid each other."""
    config = make(database, time=time)
    insert(database, ("a", 1))
    database.execute("UPDATE events SET created_at = '2026-01-02 03:04:05'")
    said = found(config)
    statement = str(said["rows without identity or time"].suggestion)
    assert "without_identity" not in statement
    assert (statement == said["create_time"].suggestion) == ("ON UPDATE" in time)
    database.execute(statement)
    said = found(config)
    assert {said[n].status for n in ("rows without identity or time", "create_time")} == {"ok"}
    insert(database, ("a", 2))
    database.execute("UPDATE events SET version = 3 WHERE version = 1")
    rows = database.execute("SELECT CAST(created_at AS DATE) FROM events WHERE version = 3")
    assert str(rows[0][0]) == "2026-01-02"


@both
def test_a_time_that_the_database_sets_is_preferred_to_one_of_the_writers(
    database: FreshDatabase, tmp_path: Path
) -> None:
    """A default for the writers' column silenced the warning, and the writers still set it."""
    recorded = ", recorded_at DATETIME(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6)"
    config = make(database, recorded + KEYS, time="DATETIME NOT NULL")
    check = found(config)["create_time"]
    assert check.status == "warn"
    assert 'set create_time = "recorded_at" in [store.columns]' in str(check.suggestion)
    assert init(database, tmp_path)["columns"]["create_time"] == "recorded_at"
    database.execute("ALTER TABLE events ADD KEY (recorded_at)")
    columns = config.columns.model_copy(update={"create_time": "recorded_at"})
    check = found(config.model_copy(update={"columns": columns}))["create_time"]
    assert (check.status, check.message) == (
        "ok",
        "datetime(6), has the default current_timestamp(6)",
    )


@both
def test_migrate_adds_to_a_table_what_init_would(database: FreshDatabase) -> None:
    config = make(database, ", KEY (created_at)", id_type="VARCHAR(1000) CHARACTER SET utf8mb4")
    insert(database, ("a", 1), ("b", 1))
    assert migrate(config)
    assert found(config)["table"].status == "ok"
    assert migrate(config) == []


@pytest.mark.parametrize("database", ["mariadb"], indirect=True)
def test_ids_of_mariadb_s_own_type_are_found(database: FreshDatabase, tmp_path: Path) -> None:
    make(database, id_type="UUID")
    result = init(database, tmp_path)
    assert (result["columns"]["aggregate_id"], result["statements"]) == ("stream_id", [])
