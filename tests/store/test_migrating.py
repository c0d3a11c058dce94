"""`migrate`: the event table, or what is missing of it; nothing of the user's is altered."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import pytest

import eventpub
from eventpub.config import Store
from eventpub.errors import StoreError
from eventpub.sources.mysql import EventStore
from eventpub.sources.mysql.checking import checks
from eventpub.sources.mysql.migrating import migrate, script_location, would_execute
from tests.conftest import FreshDatabase
from tests.store.tables import create, insert

both = pytest.mark.parametrize("database", ["mysql", "mariadb"], indirect=True)


def tables(database: FreshDatabase) -> set[str]:
    return {name for (name,) in database.execute("SHOW TABLES")}


@both
def test_a_new_table_has_what_the_publisher_needs(database: FreshDatabase) -> None:
    config = Store(url=database.url)
    (said,) = would_execute(config)
    assert tables(database) == set()
    assert migrate(config) == [said]
    assert tables(database) == {"events", "eventpub_alembic_version"}
    layout = EventStore.discover(config)
    assert all(part.is_bytewise for part in layout.identity.parts)
    assert layout.key_is_unique
    assert layout.slice
    assert (layout.unit, layout.zone) == (1, None)
    for id in ("a", "A", "a ", "ä"):
        # an INSERT without a column list does not see the slice
        database.execute("INSERT INTO events VALUES (NULL, %s, 1, 't', 'p', NULL, NOW(6))", (id,))
    assert migrate(config) == []


@both
def test_an_existing_table_keeps_its_columns_and_gets_what_it_lacks(
    database: FreshDatabase,
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = create(
        database,
        aggregate_id="VARCHAR(100) CHARACTER SET latin1 NOT NULL",
        version="INT NOT NULL",
        create_time="DATETIME NOT NULL",
        indexes="",
    )
    insert(database, [("ä", 1, "2026-01-01")])
    described = "SELECT column_name, column_type, collation_name, is_nullable, column_default"
    described += " FROM information_schema.columns WHERE table_schema = DATABASE()"
    described += " AND table_name = 'events' AND column_name <> 'slice' ORDER BY 1"
    before = database.execute(described)
    with pytest.raises(StoreError) as caught:
        EventStore.discover(config)
    assert caught.value.code == "store.index_missing"
    (statement,) = migrate(config)
    assert "ADD UNIQUE INDEX (`aggregate_id`, `version`)" in statement
    # on the one or the other, as another test in this process has set up the log
    assert "writers wait until that is done" in "".join(capsys.readouterr()), "of a7"
    assert database.execute(described) == before
    assert EventStore.discover(config).slice
    assert migrate(config) == []


@both
def test_a7_an_index_is_added_while_others_write(
    database: FreshDatabase, capsys: pytest.CaptureFixture[str]
) -> None:
    config = Store(url=database.url)
    migrate(config)
    database.execute("ALTER TABLE events DROP INDEX create_time")
    assert migrate(config) == ["ALTER TABLE `events` ADD INDEX (`create_time`, `slice`);"]
    assert "writers wait" not in capsys.readouterr().out
    assert migrate(config) == []


@both
def test_a_second_run_mends_what_was_dropped_and_makes_another_table(
    database: FreshDatabase,
) -> None:
    config = Store(url=database.url)
    migrate(config)
    database.execute("ALTER TABLE events DROP INDEX create_time")
    (statement,) = migrate(config)
    assert "ADD INDEX (`create_time`, `slice`)" in statement
    migrate(Store(url=database.url, table="others"))
    assert "others" in tables(database)
    assert migrate(config) == []


@both
def test_an_alter_may_take_longer_than_an_answer(database: FreshDatabase) -> None:
    """The copy of a large table was given up after store.url's read_timeout, and went on alone."""
    create(database, indexes="")
    config = Store(url=f"{database.url}?read_timeout=1")
    reader = database.connect(autocommit=False)
    with reader.cursor() as cursor:
        cursor.execute("SELECT * FROM events")
        timer = threading.Timer(3.0, reader.rollback)  # until then ALTER TABLE waits for it
        timer.start()
        try:
            assert migrate(config)
        finally:
            timer.join()
            reader.close()


@both
def test_writers_do_not_wait_for_good_behind_an_alter_that_waits(database: FreshDatabase) -> None:
    create(database, indexes="")
    reader = database.connect(autocommit=False)
    with reader.cursor() as cursor:
        cursor.execute("SELECT * FROM events")
        with pytest.raises(StoreError) as caught:
            migrate(Store(url=database.url))
    assert caught.value.code == "store.timeout"
    assert "end the transaction that has the table open" in str(caught.value.suggestion)
    reader.close()
    assert migrate(Store(url=database.url))


def test_the_users_own_alembic_table_is_left_alone(database: FreshDatabase) -> None:
    database.execute("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)")
    database.execute("INSERT INTO alembic_version VALUES ('theirs')")
    migrate(Store(url=database.url))
    assert database.execute("SELECT * FROM alembic_version") == (("theirs",),)


@both
def test_an_account_that_may_not_create_is_told_what_to_do(database: FreshDatabase) -> None:
    user = f"m{database.name[-10:]}"
    database.execute(f"CREATE USER {user}@'%' IDENTIFIED BY 'secret'")
    database.execute(f"GRANT SELECT ON {database.name}.* TO {user}@'%'")
    with pytest.raises(StoreError) as caught:
        migrate(Store(url=database.url_of(user, "secret")))
    assert caught.value.code == "store.privilege_missing"
    assert "migrate --sql" in str(caught.value.suggestion)
    database.execute(f"DROP USER {user}@'%'")


def test_a_table_that_holds_something_else_is_not_touched(database: FreshDatabase) -> None:
    database.execute("CREATE TABLE events (id INT PRIMARY KEY, note TEXT)")
    with pytest.raises(StoreError) as caught:
        migrate(Store(url=database.url))
    assert caught.value.code == "store.column_missing"
    assert len(database.execute("SHOW COLUMNS FROM events")) == 2


@both
@pytest.mark.parametrize("charset", ["utf8mb4", "latin1", "ascii"])
def test_an_id_of_fixed_length_gets_a_slice_too(database: FreshDatabase, charset: str) -> None:
    """MariaDB refuses what depends on whether CHAR is padded."""
    config = create(database, aggregate_id=f"CHAR(36) CHARACTER SET {charset} NOT NULL")
    insert(database, [("a-b", 1, "2026-01-01"), ("c", 1, "2026-01-01")])
    assert "RTRIM" in migrate(config)[0]
    assert EventStore.discover(config).slice == "`slice`"
    assert migrate(config) == []
    found = dict(database.execute("SELECT aggregate_id, slice FROM events"))
    assert found == {name: zlib.crc32(name.encode()) % 1024 for name in ("a-b", "c")}
    database.execute("ALTER TABLE events MODIFY aggregate_id VARCHAR(36) NOT NULL")
    assert EventStore.discover(config).slice is None, "a blank at the end counts now"


def test_rows_that_are_there_twice_beyond_what_is_looked_at_are_named(
    database: FreshDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eventpub.sources.mysql.table._MANY", 1)
    config = create(database, indexes="KEY (aggregate_id, version)")
    insert(database, [("a", 1, "2026-01-01"), ("a", 1, "2026-01-01")])
    with pytest.raises(StoreError, match="ADD INDEX instead of ADD UNIQUE INDEX") as failed:
        migrate(config)
    assert failed.value.code == "store.rows_repeated"


def test_versions_that_stand_there_twice_get_an_index_that_is_not_unique(
    database: FreshDatabase,
) -> None:
    """The unique one could not be added; doctor names the rows."""
    config = create(database, indexes="KEY (create_time)")
    insert(database, [("a", 1, "2026-01-01"), ("a", 1, "2026-01-02")])
    (statement,) = migrate(config)
    assert "ADD INDEX (`aggregate_id`, `version`)" in statement
    [said] = [c for c in checks(config) if c.name.endswith("identity of aggregates")]
    assert "aggregate_id a, version 1 is there twice" in said.message
    assert migrate(config) == []


def test_the_migrations_are_found_in_the_source_and_in_an_installed_package(
    tmp_path: Path,
) -> None:
    source = Path(eventpub.__file__).parent.parent
    assert script_location() == source / "migrations"
    # as hatch lays the wheel out
    shutil.copytree(source / "eventpub", tmp_path / "eventpub")
    shutil.copytree(source / "migrations", tmp_path / "eventpub" / "migrations")
    code = "from eventpub.sources.mysql.migrating import script_location; print(script_location())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert Path(done.stdout.strip()) == tmp_path / "eventpub" / "migrations"
