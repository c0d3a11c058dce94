"""Scenario F5: the event table is altered while it is read."""

from __future__ import annotations

import time

import pytest

from eventpub.local.servers import Kafka
from tests.conftest import FreshDatabase
from tests.publisher.conftest import NewPublisher
from tests.publisher.harness import (
    Topic,
    commit,
    compare,
    create_table,
    eventually,
    insert,
    transaction,
)
from tests.servers.signals import pause, resume

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


@pytest.mark.engines("threads", "here")
def test_f5_the_table_is_altered_while_it_is_read(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """An index gets another name, the table is away for a moment, and its times lose their zone."""
    create_table(database, time="DATETIME(6)")
    publisher = new_publisher(database, store={"time_zone": ZONE})
    publisher.start()
    write(database, 1)
    publisher.until_published("a", [1])

    execute(database, "ALTER TABLE events RENAME INDEX create_time TO by_time")
    write(database, 2)
    publisher.until_published("a", [1, 2])

    execute(database, "RENAME TABLE events TO away")
    time.sleep(3)
    execute(database, "RENAME TABLE away TO events")
    write(database, 3)
    publisher.until_published("a", [1, 2, 3])

    execute(
        database,
        "ALTER TABLE events MODIFY create_time TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6)",
    )
    write(database, 4)
    publisher.until_published("a", [1, 2, 3, 4])
    publisher.until_said("the event table was altered")
    assert not compare(database, publisher.topic)
    publisher.kill()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("TIMESTAMP", "TIMESTAMP(6)"),
        ("DATETIME(6)", "DATETIME(3)"),
        ("TIMESTAMP(6)", "DATETIME(6)"),
    ],
)
def test_another_type_of_create_time_makes_no_dead_letters(
    database: FreshDatabase, new_publisher: NewPublisher, before: str, after: str
) -> None:
    """Rows are counted in other seconds than before, and have other times than were published."""
    create_table(database, time=before)
    publisher = new_publisher(database)
    publisher.start()
    for version in range(1, 4):
        with transaction(database) as cursor:
            for number in range(600):
                insert(cursor, f"a-{number}", version)
            cursor.connection.commit()
    publisher.until_published("a-599", [1, 2, 3])
    # while it is altered, and known by the minute's check at the latest, the rows are counted again
    decimals = after[after.index("(") :] if "(" in after else ""
    database.execute(
        f"ALTER TABLE events MODIFY create_time {after} NOT NULL"
        f" DEFAULT CURRENT_TIMESTAMP{decimals}"
    )
    publisher.until_said("the event table was altered")
    commit(database, "a-599", 4)
    publisher.until_published("a-599", [1, 2, 3, 4])
    time.sleep(10)  # in which all of the horizon is counted again
    assert not compare(database, publisher.topic)
    assert Topic(publisher.topic.bootstrap_servers, f"{publisher.topic.name}.dead").read() == []
    assert publisher.stop() == 143


def test_while_the_broker_hangs_nobody_waits_for_what_is_read(
    database: FreshDatabase, new_publisher: NewPublisher, kafka_server: Kafka
) -> None:
    """A moment of many rows is read, the broker hangs, and somebody alters the table."""
    create_table(database)
    publisher = new_publisher(database)
    publisher.start()
    commit(database, "a", 1)
    publisher.until_published("a", [1])
    with database.connect() as connection, connection.cursor() as cursor:
        cursor.execute("SET cte_max_recursion_depth = 1000000")
        cursor.execute(
            "INSERT INTO events (aggregate_id, version, event_type, payload)"
            " WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 299999)"
            " SELECT CONCAT('m-', i), 1, 't', REPEAT('x', 400) FROM n"
        )
        pause(kafka_server)
    try:
        publisher.until_said("sink.unreachable")  # by then it has read what it may
        began = time.monotonic()
        database.execute("ALTER TABLE events ADD COLUMN note INT NULL, ALGORITHM=INSTANT")
        commit(database, "a", 2)
        # it would wait for as long as the broker hangs; a loaded machine takes some seconds, too
        assert time.monotonic() - began < 30
    finally:
        resume(kafka_server)
    publisher.until_published("a", [1, 2])
    eventually(lambda: not compare(database, publisher.topic))
