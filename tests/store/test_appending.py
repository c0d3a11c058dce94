"""`eventpub.append`: in the caller's transaction, next versions only, conflicts named."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy.orm import Session

import eventpub
from eventpub import NewEvent, VersionConflict, append
from tests.conftest import FreshDatabase
from tests.store.tables import create, keys, open_store, read

both = pytest.mark.parametrize("database", ["mysql", "mariadb"], indirect=True)


def versions(database: FreshDatabase, aggregate_id: str = "a") -> list[int]:
    rows = database.execute(
        "SELECT version FROM events WHERE aggregate_id = %s ORDER BY version", (aggregate_id,)
    )
    return [version for (version,) in rows]


def test_importing_the_package_imports_no_database_library() -> None:
    import subprocess
    import sys

    heavy = "pymysql sqlalchemy pyarrow pyspark confluent_kafka pydantic numpy"
    code = f"import sys, eventpub; print([m for m in '{heavy}'.split() if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    with pytest.raises(AttributeError, match="nothing"):
        eventpub.nothing  # noqa: B018


@both
def test_events_get_the_next_versions_and_the_caller_commits(database: FreshDatabase) -> None:
    create(database)
    with database.connect(autocommit=False) as connection:
        assert append(connection, "a", 0, [NewEvent("T"), NewEvent("T")]) == [1, 2]
        assert versions(database) == []
        connection.commit()
        assert append(connection, "a", 2, [NewEvent("T")]) == [3]
        connection.rollback()
    assert versions(database) == [1, 2]


@both
@pytest.mark.parametrize("expected", [0, 1, 3, -1, 7])
def test_any_other_expected_version_is_a_conflict_and_writes_nothing(
    database: FreshDatabase, expected: int
) -> None:
    create(database)
    with database.connect() as connection:
        append(connection, "a", 0, [NewEvent("T"), NewEvent("T")])
        with pytest.raises(VersionConflict, match="'a'") as caught:
            append(connection, "a", expected, [NewEvent("T"), NewEvent("T")])
    assert caught.value.code == "store.version_conflict"
    assert versions(database) == [1, 2]


@both
def test_the_faster_of_two_wins_and_the_other_is_told(database: FreshDatabase) -> None:
    create(database)
    told: list[object] = []

    def second() -> None:
        with database.connect(autocommit=False) as connection:
            try:
                told.append(append(connection, "a", 0, [NewEvent("late")]))
            except VersionConflict as conflict:
                told.append(conflict.code)

    with database.connect(autocommit=False) as first:
        append(first, "a", 0, [NewEvent("early")])
        waiting = threading.Thread(target=second)
        waiting.start()
        waiting.join(0.5)
        assert waiting.is_alive()  # for the outcome of the first
        first.commit()
        waiting.join(30)
    assert told == ["store.version_conflict"]
    assert versions(database) == [1]


@both
def test_a_snapshot_older_than_the_expected_version_does_not_matter(
    database: FreshDatabase,
) -> None:
    create(database)
    with database.connect(autocommit=False) as old, database.connect() as other:
        with old.cursor() as cursor:
            cursor.execute("SELECT COUNT(*) FROM events")  # the snapshot begins
        append(other, "a", 0, [NewEvent("T")])
        assert append(old, "a", 1, [NewEvent("T")]) == [2]
        append(other, "b", 0, [NewEvent("T")])
        with pytest.raises(VersionConflict):
            append(old, "b", 0, [NewEvent("T")])
        with pytest.raises(VersionConflict):
            append(old, "c", 1, [NewEvent("T")])
        old.commit()
    assert versions(database) == [1, 2]


def through_connection(engine: sqlalchemy.Engine, **arguments: Any) -> list[int]:
    with engine.begin() as connection:
        return append(connection, "a%s", 0, [NewEvent("T", b"\xff", {"k%": "ü"})], **arguments)


def through_session(engine: sqlalchemy.Engine, **arguments: Any) -> list[int]:
    with Session(engine) as session, session.begin():
        return append(session, "a%s", 0, [NewEvent("T", b"\xff", {"k%": "ü"})], **arguments)


@pytest.mark.parametrize("way", [through_connection, through_session])
def test_sqlalchemy_connections_and_sessions(database: FreshDatabase, way: Any) -> None:
    config = create(database)
    engine = sqlalchemy.create_engine(database.url)
    assert way(engine) == [1]
    with pytest.raises(VersionConflict):
        way(engine)
    engine.dispose()
    with open_store(config) as store:
        (row,) = read(store, 0, store.now()).to_pylist()
    assert row["aggregate_id"] == "a%s"
    assert row["payload"] == b"\xff"
    assert row["metadata"].decode().replace(" ", "") == '{"k%":"ü"}'


@both
@pytest.mark.parametrize("payload", ["JSON", "TEXT CHARACTER SET latin1", "LONGBLOB"])
def test_payloads_fit_the_column(database: FreshDatabase, payload: str) -> None:
    config = create(database, payload=payload)
    with database.connect(charset="utf8mb4") as connection:
        append(connection, "a", 0, [NewEvent("T", '{"n": "Müller"}'.encode()), NewEvent("T")])
    with open_store(config) as store:
        rows = read(store, 0, store.now()).to_pylist()
    assert [row["payload"] and row["payload"].decode() for row in rows] == [
        '{"n": "Müller"}',
        None,
    ]


def test_another_table_with_other_names_that_begins_at_zero(database: FreshDatabase) -> None:
    database.execute(
        "CREATE TABLE `domain event` (aid VARCHAR(50), seq INT, event_type TEXT, payload BLOB,"
        " PRIMARY KEY (aid, seq))"
    )
    names = {"aggregate_id": "aid", "version": "seq", "metadata": ""}
    mapping: Any = {"table": "domain event", "columns": names, "first_version": 0}
    with database.connect() as connection:
        assert append(connection, "a", -1, [NewEvent("T")], **mapping) == [0]
        assert append(connection, "a", 0, [NewEvent("T")], **mapping) == [1]
        with pytest.raises(VersionConflict):
            append(connection, "b", 0, [NewEvent("T")], **mapping)
        with pytest.raises(ValueError, match="metadata"):
            append(connection, "b", -1, [NewEvent("T", None, {"k": "v"})], **mapping)
        assert append(connection, "a", 1, [], **mapping) == []


def test_a_duplicate_of_another_key_is_not_a_conflict(database: FreshDatabase) -> None:
    import pymysql

    config = create(database)
    database.execute("ALTER TABLE events ADD UNIQUE (event_type)")
    with database.connect() as connection:
        append(connection, "a", 0, [NewEvent("T")])
        with pytest.raises(pymysql.err.IntegrityError):
            append(connection, "a", 1, [NewEvent("T")])
    with open_store(config) as store:
        assert keys(read(store, 0, store.now())) == [("a", 1)]
