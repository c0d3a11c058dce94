"""Open transactions: what may still become visible behind the reader, and is never forgotten.

Nothing comes behind the late events, neither in their aggregates nor in others: no gap shows them.
Nor is there a column of ascending numbers, whose newest would show that a row has come late.
Publishers here do not wait for Spark: what publishes while it starts does the same.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pymysql
import pytest

from eventpub.local.servers import Database
from tests.conftest import FreshDatabase, fresh_database
from tests.publisher.conftest import NewPublisher
from tests.publisher.harness import (
    Publisher,
    commit,
    compare,
    create_table,
    eventually,
    insert,
    transaction,
)
from tests.servers.databases import mariadb, mysql
from tests.variants import variants

SETTINGS: dict[str, dict[str, Any]] = {
    "recount": {"horizon": "2s"},
    "read": {"delay": "300ms", "max_wait": "500ms"},
}
LONGER_THAN_THE_HORIZON = 5.0

both = pytest.mark.parametrize("database", variants(["mysql", "mariadb"]), indirect=True)


def create(database: FreshDatabase, **columns: str) -> None:
    """An event table for MySQL or MariaDB."""
    names = {"MySQL": "utf8mb4_0900_bin", "MariaDB": "utf8mb4_nopad_bin"}
    create_table(database, collation=names[database.server.name.split()[0]], **columns)
    database.execute("ALTER TABLE events DROP COLUMN id")


def begin(database: FreshDatabase, new_publisher: NewPublisher, **store: Any) -> Publisher:
    """A publisher that publishes."""
    publisher = new_publisher(database, **SETTINGS, store=store)
    publisher.start()
    commit(database, "other", 1)
    publisher.until_published("other", [1])
    return publisher


def pass_by(database: FreshDatabase, publisher: Publisher, version: int) -> None:
    """Have the reader read on, past what is open."""
    time.sleep(1.0)
    commit(database, "other", version)
    publisher.until_published("other", list(range(1, version + 1)))


def unprivileged(database: FreshDatabase) -> str:
    """The URL of an account that does not see open transactions."""
    user = f"r{database.name[-8:]}"
    database.execute(f"CREATE USER {user} IDENTIFIED BY 'r'")
    database.execute(f"GRANT SELECT ON {database.name}.events TO {user}")
    return database.url_of(user, "r")


def whole(database: FreshDatabase, publisher: Publisher) -> None:
    """Everything is on the topic, once and in order."""
    differences = compare(database, publisher.topic)
    assert not differences, differences


ZONES: dict[str, tuple[Callable[..., Database], str, str]] = {
    "mysql-America/New_York": (mysql, "America/New_York", "DATETIME(6)"),
    "mariadb-Asia/Kolkata": (mariadb, "Asia/Kolkata", "TIMESTAMP(6)"),
}


@pytest.fixture(params=ZONES)
def zoned(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[FreshDatabase, dict[str, str]]]:
    """A database of a server whose system keeps local time, and what of it is to be configured."""
    start, zone, column = ZONES[request.param]
    server: Database
    with (
        start(tmp_path_factory.mktemp("zoned"), time_zone=zone) as server,
        fresh_database(server) as database,
    ):
        create(database, time=column)
        yield database, {"time_zone": zone} if column.startswith("DATETIME") else {}


def test_a1_the_zone_of_the_servers_system(
    zoned: tuple[FreshDatabase, dict[str, str]], new_publisher: NewPublisher
) -> None:
    database, store = zoned
    publisher = begin(database, new_publisher, **store)
    with (
        transaction(database) as late,
        transaction(database) as gap,
        transaction(database) as never,
    ):
        insert(gap, "gap", 2)
        commit(database, "gap", 1, 3)
        insert(late, "late", 1)
        insert(never, "never", 1)
        never.connection.rollback()
        pass_by(database, publisher, 2)
        time.sleep(LONGER_THAN_THE_HORIZON)
        assert publisher.topic.versions("gap") == [1], "it may be filled"
        late.connection.commit()
        gap.connection.commit()
        publisher.until_published("late", [1])
        publisher.until_published("gap", [1, 2, 3])
        commit(database, "never", 2)
        time.sleep(2.0)  # what begins now cannot fill that
        insert(late, "late", 2)
        publisher.until_published("never", [2], 30)
        late.connection.commit()
        publisher.until_published("late", [1, 2])
    assert not [r for r in publisher.topic.read() if r.late]
    whole(database, publisher)


@contextmanager
def locked(database: FreshDatabase, statement: str) -> Iterator[None]:
    """While nobody may write."""
    with database.connect() as connection, connection.cursor() as cursor:
        cursor.execute(statement)
        yield
        cursor.execute("UNLOCK TABLES")


@pytest.mark.parametrize(
    ("database", "lock"),
    [("mysql", "FLUSH TABLES WITH READ LOCK"), ("mariadb", "LOCK TABLES events READ")],
    ids=["global-mysql", "table-mariadb"],
    indirect=["database"],
)
def test_a7_a_statement_that_waits_before_the_engine_knows_of_it(
    database: FreshDatabase, new_publisher: NewPublisher, lock: str
) -> None:
    create(database)
    publisher = begin(database, new_publisher)
    publisher.until_spark_publishes()  # whose first batch counts again what came before it
    commit(database, "waits", 2)  # as long as that is held the reader reads on without any row

    def write(aggregate_id: str, stays_open: float) -> None:
        with transaction(database) as cursor:
            insert(cursor, aggregate_id, 1)
            time.sleep(stays_open)
            cursor.connection.commit()

    writers = [threading.Thread(target=write, args=(f"late-{n}", 3.0 * n)) for n in range(2)]
    with locked(database, lock):
        for writer in writers:
            writer.start()
        time.sleep(LONGER_THAN_THE_HORIZON)
    commit(database, "other", 2)
    publisher.until_published("other", [1, 2])
    for number, writer in enumerate(writers):
        writer.join()
        publisher.until_published(f"late-{number}", [1])
    publisher.until_published("waits", [2], 30)  # its gap is not skipped before they have ended
    whole(database, publisher)


@both
def test_a7_a_statement_that_has_not_come_to_the_engine(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """It has run for longer than the horizon and not inserted anything."""
    create(database)
    publisher = begin(database, new_publisher)

    def write() -> None:
        database.execute(
            "INSERT INTO events (aggregate_id, version, event_type)"
            " SELECT CONCAT('slow', slept), 1, 't' FROM (SELECT SLEEP(7) AS slept) AS slowly"
        )

    writer = threading.Thread(target=write)
    writer.start()
    for version in range(2, 8):
        pass_by(database, publisher, version)
    writer.join()
    publisher.until_published("slow0", [1])
    whole(database, publisher)


@pytest.mark.parametrize(
    "sight", variants(["open transactions", "progress.json is lost", "no privilege"], 2)
)
def test_a21_what_commits_while_the_publisher_is_down_for_longer_than_the_horizon(
    database: FreshDatabase, new_publisher: NewPublisher, sight: str
) -> None:
    create(database)
    sees = sight != "no privilege"
    url = database.url if sees else unprivileged(database)
    publisher = begin(database, new_publisher, url=url)
    with transaction(database) as late, transaction(database) as young:
        if sees:
            insert(late, "late", 1)
            time.sleep(LONGER_THAN_THE_HORIZON)
        insert(young, "young", 1)
        pass_by(database, publisher, 2)
        publisher.kill()
        if sight == "progress.json is lost":
            os.truncate(publisher.state / "progress.json", 0)
        late.connection.commit()
        young.connection.commit()
    time.sleep(LONGER_THAN_THE_HORIZON)
    publisher.start()
    commit(database, "other", 3)
    publisher.until_published("other", [1, 2, 3])
    publisher.until_published("young", [1])
    if sees:
        publisher.until_published("late", [1])
    whole(database, publisher)


def test_a14_what_was_passed_by_an_earlier_run_ends_in_a_later_one(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """Longer than the horizon after the start, prepared or not, whoever commits it."""
    create(database)
    publisher = begin(database, new_publisher)
    with transaction(database) as late:
        insert(late, "late", 1)
        with transaction(database) as prepared:
            prepared.execute("XA START 'x'")
            insert(prepared, "prepared", 1)
            prepared.execute("XA END 'x'")
            pass_by(database, publisher, 2)
            prepared.execute("XA PREPARE 'x'")
        pass_by(database, publisher, 3)
        publisher.kill()
        time.sleep(LONGER_THAN_THE_HORIZON)
        publisher.start()
        pass_by(database, publisher, 4)
        insert(late, "late", 2)
        time.sleep(LONGER_THAN_THE_HORIZON)
        late.connection.commit()
        database.execute("XA COMMIT 'x'")
    publisher.until_published("late", [1, 2])
    publisher.until_published("prepared", [1])
    whole(database, publisher)


@both
def test_a14_what_was_prepared_before_the_database_restarted_ends_after_the_first_start(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """The server says that it began when it was recovered; its row is older than the horizon."""
    create(database)
    with transaction(database) as prepared:
        prepared.execute("XA START 'y'")
        insert(prepared, "prepared", 1)
        prepared.execute("XA END 'y'")
        prepared.execute("XA PREPARE 'y'")
    commit(database, "other", 1)
    time.sleep(LONGER_THAN_THE_HORIZON)
    database.server.kill()
    database.server.start()
    publisher = new_publisher(database, **SETTINGS)
    publisher.start()
    publisher.until_published("other", [1])
    pass_by(database, publisher, 2)
    database.execute("XA COMMIT 'y'")
    publisher.until_published("prepared", [1])
    whole(database, publisher)


@both
def test_a24_a_dump_holds_neither_events_nor_gaps(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create(database)
    publisher = begin(database, new_publisher)
    with transaction(database) as dump:
        dump.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT")
        dump.execute("SELECT CONNECTION_ID()")
        (number,) = dump.fetchone()
        statement = "SELECT /*!40001 SQL_NO_CACHE */ *, SLEEP(60) FROM events"
        thread = threading.Thread(target=_interrupted, args=(dump, statement))
        thread.start()
        commit(database, "gap", 1, 3)
        began = time.monotonic()
        publisher.until_published("gap", [1, 3], 30)
        assert time.monotonic() - began < 20
        commit(database, "other", 2)
        publisher.until_published("other", [1, 2])
        database.execute(f"KILL QUERY {number}")
        thread.join()
    whole(database, publisher)


def _interrupted(cursor: Any, statement: str) -> None:
    with suppress(pymysql.err.MySQLError):
        cursor.execute(statement)


def test_a21_runs_of_a_timer(database: FreshDatabase, new_publisher: NewPublisher) -> None:
    """`--available-now`, longer apart than the horizon."""
    create(database)
    publisher = new_publisher(database, **SETTINGS)
    with transaction(database) as late:
        insert(late, "late", 1)
        time.sleep(LONGER_THAN_THE_HORIZON)
        commit(database, "other", 1)
        publisher.publish_everything()
        assert publisher.topic.versions("other") == [1]
        late.connection.commit()
    time.sleep(LONGER_THAN_THE_HORIZON)
    publisher.publish_everything()
    eventually(lambda: publisher.topic.versions("late") == [1], 5)
    whole(database, publisher)
