"""Scenario F5: large and slow transactions, and what else a database server does meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from tests.conftest import FreshDatabase
from tests.publisher.conftest import NewPublisher
from tests.publisher.harness import compare, create_table, eventually, insert, transaction
from tests.servers.load import Load, Report
from tests.servers.writers import run

SECONDS = 12


def test_f5_large_transactions_xa_locks_ddl_and_a_dump(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create_table(database)
    database.execute("CREATE TABLE counters (id INT PRIMARY KEY, n INT)")
    database.execute("INSERT INTO counters VALUES (1, 0)")
    publisher = new_publisher(database, recount={"horizon": "60s"}, gaps={"max_backoff": 8})
    publisher.start()
    with transaction(database) as cursor:
        insert(cursor, "first", 1)
        cursor.connection.commit()
    publisher.until_published("first", [1])

    load = Load(
        database.url,
        rate=4_000,
        seconds=SECONDS,
        aggregates=60_000,
        open_fraction=0.1,
        open_seconds=(0.0, 3.0),
        events_per_transaction=3_000,
        payload_bytes=100,
        close_all=False,
    )
    parts: list[Callable[[], None]] = [
        lambda: one_transaction_of_100_000_rows(database),
        lambda: prepared_for_some_seconds(database),
        lambda: waits_for_a_row(database),
        lambda: dump(database),
        lambda: changes_of_the_table(database),
    ]
    with ThreadPoolExecutor(len(parts) + 1) as pool:
        written: Future[Report] = pool.submit(run, load)
        for done in [pool.submit(part) for part in parts]:
            done.result()
        report = written.result()
    assert report.transactions > 5
    assert report.held_open >= 1 or report.transactions < 30
    events = database.execute("SELECT COUNT(*) FROM events")[0][0]
    with suppress(AssertionError):  # the comparison says more
        eventually(lambda: sum(1 for _ in publisher.topic.stream()) >= events, every=2.0)
    differences = compare(database, publisher.topic)
    assert not differences, differences
    assert not publisher.gaps.read()


def one_transaction_of_100_000_rows(database: FreshDatabase) -> None:
    """Ten statements, and a pause before the commit."""
    with transaction(database) as cursor:
        for number in range(10):
            cursor.execute(
                "INSERT INTO events (aggregate_id, version, event_type, payload)"
                " WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 1000)"
                " SELECT CONCAT('large-', a.n - 1), b.n + %s, 'happened', 'x'"
                " FROM n AS a JOIN n AS b ON b.n <= 100 WHERE a.n <= 100",
                (number * 100,),
            )
        time.sleep(2.0)
        cursor.connection.commit()


def prepared_for_some_seconds(database: FreshDatabase) -> None:
    """Two phases; the connection of the first is gone before the second."""
    with database.connect() as connection, connection.cursor() as cursor:
        cursor.execute("XA START 'f5'")
        insert(cursor, "xa", 1)
        insert(cursor, "xa", 2)
        cursor.execute("XA END 'f5'")
        cursor.execute("XA PREPARE 'f5'")
    time.sleep(4.0)
    database.execute("XA COMMIT 'f5'")


def waits_for_a_row(database: FreshDatabase) -> None:
    """A statement whose rows are as old as it is when it gets the lock at last."""
    waiting = threading.Thread(
        target=lambda: database.execute(
            "INSERT INTO events (aggregate_id, version, event_type)"
            " SELECT 'waited', 1, 'happened' FROM counters WHERE id = 1 FOR UPDATE"
        )
    )
    with transaction(database) as holder:
        holder.execute("UPDATE counters SET n = n + 1 WHERE id = 1")
        waiting.start()
        time.sleep(6.0)
        holder.connection.commit()
    waiting.join()


def dump(database: FreshDatabase) -> None:
    """As `mysqldump --single-transaction` reads."""
    with transaction(database) as cursor:
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        cursor.execute("START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY")
        for _ in range(6):
            cursor.execute("SELECT SQL_NO_CACHE * FROM events")
            cursor.fetchall()
            time.sleep(1.0)
        cursor.connection.rollback()


def changes_of_the_table(database: FreshDatabase) -> None:
    """An index made online, and a copy of the table, for which writers wait."""
    time.sleep(2.0)
    database.execute("ALTER TABLE events ADD INDEX online (event_type), LOCK = NONE")
    time.sleep(1.0)
    database.execute("ALTER TABLE events ADD COLUMN note INT NULL, ALGORITHM = COPY")
