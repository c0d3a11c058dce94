"""A boundary 50 ms behind the database's time, with and without a sight of open transactions."""

from __future__ import annotations

import random
import threading
import time
from contextlib import nullcontext

import pytest

from tests.conftest import FreshDatabase
from tests.publisher.conftest import NewPublisher
from tests.publisher.harness import compare, create_table, eventually, insert, transaction
from tests.store.test_watermark import monitoring
from tests.variants import variants

SECONDS = 12


def write(database: FreshDatabase, number: int) -> None:
    """Transactions that stay open for up to 1.5 s; every fourth rolls back."""
    choice = random.Random(number)
    deadline = time.monotonic() + SECONDS
    turn = 0
    with transaction(database) as cursor:
        while time.monotonic() < deadline:
            turn += 1
            for version in range(1, choice.randint(2, 4)):
                insert(cursor, f"a-{number}-{turn}", version)
                time.sleep(choice.choice([0, 0, 0.1, 0.5]))
            if choice.random() < 0.25:
                cursor.connection.rollback()
            else:
                cursor.connection.commit()


def test_what_was_open_for_longer_than_the_horizon_is_found_when_it_ends(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """Nothing comes behind it, neither in its aggregate nor in any other."""
    create_table(database)
    publisher = new_publisher(database, recount={"horizon": "2s"}, read={"max_wait": "500ms"})
    publisher.start()
    with transaction(database) as late, transaction(database) as cursor:
        insert(cursor, "other", 1)
        cursor.connection.commit()
        publisher.until_spark_publishes()
        insert(late, "late", 1)
        insert(cursor, "other", 2)
        cursor.connection.commit()
        publisher.until_published("other", [1, 2])
        time.sleep(6.0)
        late.connection.commit()
    publisher.until_published("late", [1])
    assert publisher.stop() == 143
    differences = compare(database, publisher.topic)
    assert not differences, differences


@pytest.mark.parametrize("sight", variants(["open transactions", "no privilege", "never fresh"]))
def test_nothing_is_lost_at_a_delay_of_50_ms(
    database: FreshDatabase, new_publisher: NewPublisher, sight: str
) -> None:
    create_table(database)
    publisher = new_publisher(database, read={"delay": "50ms"})
    if sight == "no privilege":
        user = f"r{database.name[-8:]}"
        database.execute(f"CREATE USER {user} IDENTIFIED BY 'r'")
        database.execute(f"GRANT SELECT ON {database.name}.events TO {user}")
        publisher.settings["store"]["url"] = database.url_of(user, "r")
    with monitoring(database) if sight == "never fresh" else nullcontext():
        publisher.start()
        with transaction(database) as cursor:
            insert(cursor, "first", 1)
            cursor.connection.commit()
        publisher.until_published("first", [1])
        writers = [threading.Thread(target=write, args=(database, number)) for number in range(8)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        eventually(lambda: not compare(database, publisher.topic))
        assert publisher.stop() == 143
    differences = compare(database, publisher.topic)
    assert not differences, differences
    said = publisher.log.read_text()
    words = {"no privilege": "GRANT PROCESS", "never fresh": "no fresh answer"}
    for other, text in words.items():
        assert said.count(text) == (other == sight), said[-4000:]
