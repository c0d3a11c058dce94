"""Rows whose `create_time` is not that of their commit: published, or named by whoever is asked."""

from __future__ import annotations

import time
from typing import Any

import pytest

from eventpub.ops.asking import ask_running
from eventpub.state import StateDir
from tests.conftest import FreshDatabase
from tests.publisher.conftest import NewPublisher
from tests.publisher.harness import (
    Publisher,
    Topic,
    commit,
    compare,
    create_table,
    eventually,
    insert,
    transaction,
)

pytestmark = pytest.mark.engines("threads", "here")


def insert_at(database: FreshDatabase, aggregate_id: str, created: str) -> None:
    """One event with a time of its own, an SQL expression."""
    database.execute(
        "INSERT INTO events (aggregate_id, version, event_type, payload, create_time)"  # noqa: S608
        f" VALUES (%s, 1, 't', '{{}}', {created})",
        (aggregate_id,),
    )


def without_id(database: FreshDatabase) -> None:
    create_table(database, time="DATETIME(6)")
    database.execute("ALTER TABLE events DROP COLUMN id")


def times_of(publisher: Publisher) -> str:
    """What the status says of times; "": nothing."""
    status: Any = ask_running(StateDir(publisher.state), "status")
    if status is None:
        return ""
    [message] = [c["message"] for c in status["checks"] if c["name"] == "times"]
    return str(message)


@pytest.mark.parametrize("number", ["id", "no", ""])
def test_writers_in_utc_on_a_server_elsewhere_stop_the_publisher_and_the_remedy_helps(
    database: FreshDatabase, new_publisher: NewPublisher, number: str
) -> None:
    """Whatever the table's ascending number is called, and where it has none."""
    create_table(database, time="DATETIME(6)")
    change = f"CHANGE id `{number}` BIGINT NOT NULL AUTO_INCREMENT" if number else "DROP COLUMN id"
    database.execute(f"ALTER TABLE events {change}")
    database.execute("SET GLOBAL time_zone = '+08:00'")
    try:
        for before in range(5):
            insert_at(database, f"before-{before}", "UTC_TIMESTAMP(6) - INTERVAL 1 MINUTE")
        publisher = new_publisher(database)
        publisher.start()
        publisher.until_said("progress")
        assert publisher.process is not None
        for event in range(400):
            insert_at(database, f"a-{event}", "UTC_TIMESTAMP(6)")
            if publisher.process.poll() is not None:
                break
            time.sleep(0.2)
        assert publisher.finish(30) != 0
        assert "store.rows_in_past" in publisher.words()
        assert "set store.time_zone to it" in publisher.words()
        publisher.settings.setdefault("store", {})["time_zone"] = "UTC"
        publisher.start()
        insert_at(database, "last", "UTC_TIMESTAMP(6)")
        publisher.until_published("last", [1])
        eventually(lambda: not compare(database, publisher.topic))
        # those that were read by the other zone are on the topic with the times that it gave them
        assert " 0 missing, 0 repeated, 0 out of order" in publisher.command("verify").stdout
    finally:
        database.execute("SET GLOBAL time_zone = DEFAULT")


def test_rows_of_the_future_are_published_with_the_zone_that_is_advised(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """With it they lie below the position, and no recount goes back as far."""
    create_table(database, time="DATETIME(6)")
    zone = {"time_zone": "+00:00"}
    publisher = new_publisher(database, store=zone, recount={"horizon": "0"})
    insert_at(database, "early", "UTC_TIMESTAMP(6) + INTERVAL 2 HOUR")  # by a session in +02:00
    insert_at(database, "in-time", "UTC_TIMESTAMP(6)")
    publisher.start()
    publisher.until_published("in-time", [1])
    assert publisher.stop() == 143
    publisher.settings["store"]["time_zone"] = "+02:00"
    publisher.start()
    publisher.until_published("early", [1])
    assert publisher.stop() == 143
    assert " 0 missing, 0 repeated, 0 out of order" in publisher.command("verify").stdout


def test_a_row_of_the_future_that_was_published_by_hand_is_found_and_not_repeated(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create_table(database)
    publisher = new_publisher(database)
    insert_at(database, "f", "NOW(6) + INTERVAL 1 HOUR")
    publisher.start()
    eventually(lambda: publisher.command("publish", "f", "1").returncode == 0)
    publisher.until_published("f", [1])
    assert "f/1: published" in publisher.command("trace", "f", "1").stdout
    again = publisher.command("publish", "f", "1").stdout
    assert "it is on the topic already" in again
    assert len(publisher.topic.read()) == 1


@pytest.mark.engines("threads", "spark")
def test_where_they_are_to_be_counted_they_are_published_and_said(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    without_id(database)
    publisher = new_publisher(database, recount={"rows_in_past": "count"})
    publisher.start()
    publisher.until_said("progress")
    insert_at(database, "first", "NOW(6) - INTERVAL 8 HOUR")
    for number in range(5):
        time.sleep(1.2)
        insert_at(database, f"a-{number}", "NOW(6) - INTERVAL 8 HOUR")
    publisher.until_published("a-4", [1])
    publisher.until_published("a-0", [1])
    assert "store.rows_in_past" in eventually(lambda: times_of(publisher), 10)


def test_rows_of_the_future_are_named_by_status_metrics_and_verify(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create_table(database, time="DATETIME(6)")
    publisher = new_publisher(database)
    publisher.start()
    commit(database, "now", 1)
    publisher.until_published("now", [1])
    for number in range(3):
        insert_at(database, f"future-{number}", "NOW(6) + INTERVAL 1 HOUR")
    said = eventually(lambda: times_of(publisher), 20)
    assert said.startswith("store.rows_in_future: ")
    [traced] = publisher.answer(1, "trace", "future-0")["versions"]
    assert traced["verdict"] == "waiting"
    assert traced["note"].endswith("; its create_time lies in the future")
    eventually(lambda: times_of(publisher).startswith("store.rows_in_future: 3 rows"), 20)
    assert publisher.stop() == 143
    notes = publisher.answer(0, "verify")["notes"]
    assert [n for n in notes if n.startswith("not published yet: 3 rows after the database")]


def test_rows_that_are_never_read_are_named_by_status_doctor_and_verify(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create_table(database, time="DATETIME(6)")
    for number, created in enumerate(["'1970-01-01 00:00:00'", "'1969-07-20'", "'0001-01-01'"]):
        insert_at(database, f"old-{number}", created)
    database.execute("ALTER TABLE events MODIFY create_time DATETIME(6) NULL DEFAULT NOW(6)")
    insert_at(database, "none", "NULL")
    with database.connect() as connection, connection.cursor() as cursor:
        cursor.execute("SET sql_mode = ''")
        insert(cursor, "zero", 1, create_time="0000-00-00")
    publisher = new_publisher(database)
    publisher.start()
    commit(database, "now", 1)
    publisher.until_published("now", [1])
    eventually(lambda: times_of(publisher).startswith("5 rows with a create_time before"))
    publisher.answer(0, "publish", "old-0", "1")
    publisher.answer(0, "publish", "old-2", "1")
    assert "store.row_invalid" in publisher.command("publish", "none", "1").stderr
    assert publisher.stop() == 143
    assert "5 rows have no create_time" in publisher.command("doctor").stdout.replace("\n", " ")
    notes = publisher.answer(0, "verify")["notes"]
    assert [n for n in notes if n.startswith("not read: 5 rows")]


def insert_version(database: FreshDatabase, aggregate_id: str, version: int, created: str) -> None:
    database.execute(
        "INSERT INTO events (aggregate_id, version, event_type, payload, create_time)"  # noqa: S608
        f" VALUES (%s, %s, 't', '{{}}', {created})",
        (aggregate_id, version),
    )


def test_what_verify_names_as_missing_is_published_on_request(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """Rows of other times in a table that does not tell which have come last."""
    without_id(database)
    publisher = new_publisher(database)
    old = "NOW(6) - INTERVAL 3 DAY"
    insert_version(database, "first", 1, "NOW(6) - INTERVAL 2 DAY")  # later ones would be noticed
    publisher.start()
    commit(database, "a", 1, 2)
    publisher.until_published("a", [1, 2])
    for aggregate_id, version in (("a", 3), ("b", 1), ("b", 2), ("gap", 2)):
        insert_version(database, aggregate_id, version, old)
    commit(database, "c", 1)
    publisher.until_published("c", [1])
    assert publisher.command("verify").returncode == 1

    def publish(status: int, *arguments: str) -> str:
        return str(publisher.answer(status, "publish", *arguments)["outcome"])

    assert publish(1, "nothing", "1") == "not in the store"
    assert publish(0, "a", "1") == "published before"
    assert publish(1, "gap", "2") == "versions below it are missing"
    assert [publish(0, "b", version) for version in "12"] == ["published"] * 2
    assert publish(0, "a", "3") == "published"
    assert publish(0, "a", "3") == "published before"
    insert_version(database, "gap", 1, old)
    assert publish(0, "gap", "2") == "published"
    assert [publisher.topic.versions(a) for a in ("a", "b", "gap")] == [[1, 2, 3], [1, 2], [1, 2]]
    assert not any(record.late for record in publisher.topic.read())
    assert publisher.command("verify").returncode == 0
    assert publisher.stop() == 143
    insert_version(database, "b", 3, old)
    assert publish(1, "b", "3") == "not running"


def test_an_event_whose_row_got_another_time_is_found_where_it_was_published(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """`publish` looked for it from its new time on, and published it twice."""
    without_id(database)
    now = "CURRENT_TIMESTAMP(6)"
    moves = f"MODIFY create_time DATETIME(6) NOT NULL DEFAULT {now} ON UPDATE {now}"
    database.execute(f"ALTER TABLE events {moves}")
    publisher = new_publisher(database)
    publisher.start()
    commit(database, "a", 1, 2)
    publisher.until_published("a", [1, 2])
    time.sleep(2)
    database.execute("UPDATE events SET event_type = 'corrected'")
    commit(database, "b", 1)
    publisher.until_published("b", [1])
    assert publisher.answer(0, "publish", "a", "1")["outcome"] == "published before"
    versions = publisher.answer(0, "trace", "a")["versions"]
    assert [found["verdict"] for found in versions] == ["published"] * 2
    assert publisher.topic.versions("a") == [1, 2]


def set_once(database: FreshDatabase, on_update: str = "") -> None:
    """The time is that of the insert, or with `on_update` that of the last change."""
    now = "CURRENT_TIMESTAMP(6)"
    change = f"create_time TIMESTAMP(6) NOT NULL DEFAULT {now} {on_update and on_update + now}"
    database.execute(f"ALTER TABLE events MODIFY {change}")


def test_a_late_commit_that_takes_a_published_row_out_of_its_second_is_found(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """Then as many rows are there as before."""
    create_table(database)
    set_once(database, "ON UPDATE ")
    publisher = new_publisher(database)
    publisher.start()
    commit(database, "warm-up", 1)
    publisher.until_published("warm-up", [1])
    time.sleep(1.05 - time.time() % 1)
    commit(database, "published", 1)
    with transaction(database) as cursor:
        insert(cursor, "late", 1)
        publisher.until_published("published", [1])
        time.sleep(4)
        cursor.execute("UPDATE events SET event_type = 'u' WHERE aggregate_id = 'published'")
        cursor.connection.commit()
    publisher.until_published("late", [1], 30)


def test_a_time_that_no_longer_moves_makes_no_dead_letters_of_what_moved_before(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create_table(database)
    set_once(database, "ON UPDATE ")
    publisher = new_publisher(database)
    publisher.start()
    with transaction(database) as cursor:
        for number in range(50):
            insert(cursor, f"a-{number}", 1)
        cursor.connection.commit()
    publisher.until_published("a-49", [1])
    assert publisher.stop() == 143
    database.execute("UPDATE events SET event_type = 'corrected'")
    set_once(database)
    publisher.start()
    commit(database, "b", 1)
    publisher.until_published("b", [1])
    assert Topic(publisher.topic.bootstrap_servers, f"{publisher.topic.name}.dead").read() == []
    assert not compare(database, publisher.topic)


def test_what_was_created_before_the_start_is_published_on_request(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """Alone: what lies below it is of before the start, too. A lower one is late then."""
    without_id(database)
    for version in (1, 2):
        insert_version(database, "a", version, "NOW(6) - INTERVAL 9 HOUR")
    publisher = new_publisher(database, read={"start": "now"})
    publisher.start()
    publisher.until_said("progress")
    insert_version(database, "a", 3, "NOW(6) - INTERVAL 8 HOUR")
    commit(database, "now", 1)
    publisher.until_published("now", [1])
    publisher.answer(0, "publish", "a", "3")
    assert publisher.topic.versions("a") == [3]
    for lower in "12":
        publisher.answer(0, "publish", "a", lower)
    commit(database, "a", 4)
    publisher.until_published("a", [3, 1, 2, 4])
    assert [r.late for r in publisher.topic.read() if r.key == "a"] == [False, True, True, False]
