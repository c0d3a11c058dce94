"""Scenario F5: the event table is altered while it is read."""

from __future__ import annotations

import time

from tests.conftest import FreshDatabase
from tests.publisher.conftest import NewPublisher
from tests.publisher.harness import compare, create_table, insert

ZONE = "-05:00"


def execute(database: FreshDatabase, *statements: str) -> None:
    """In a session that keeps the zone of the table."""
    with database.connect() as connection, connection.cursor() as cursor:
        cursor.execute("SET time_zone = %s", (ZONE,))
        for statement in statements:
            cursor.execute(statement)


def write(database: FreshDatabase, version: int) -> None:
    """Committed at once."""
    with database.connect() as connection, connection.cursor() as cursor:
        cursor.execute("SET time_zone = %s", (ZONE,))
        insert(cursor, "a", version)


def test_f5_the_table_is_altered_while_it_is_read(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """An index gets another name, the table is away for a moment, and its times lose their zone."""
    create_table(database, time="DATETIME(6)")
    publisher = new_publisher(database, store={"time_zone": ZONE})
    publisher.start()
    write(database, 1)
    publisher.until_published("a", [1], 120)

    execute(database, "ALTER TABLE events RENAME INDEX create_time TO by_time")
    write(database, 2)
    publisher.until_published("a", [1, 2], 120)

    execute(database, "RENAME TABLE events TO away")
    time.sleep(3)
    execute(database, "RENAME TABLE away TO events")
    write(database, 3)
    publisher.until_published("a", [1, 2, 3], 120)

    execute(
        database,
        "ALTER TABLE events MODIFY create_time TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6)",
    )
    write(database, 4)
    publisher.until_published("a", [1, 2, 3, 4], 240)
    publisher.until_said("the event table was altered")
    assert not compare(database, publisher.topic)
    publisher.kill()
