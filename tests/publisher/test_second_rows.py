"""Scenario D9: a table without a unique key has two rows of one version."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
from confluent_kafka import Producer

from tests.conftest import FreshDatabase
from tests.publisher.conftest import NewPublisher
from tests.publisher.harness import Publisher, Record, Topic, eventually, transaction

pytestmark = pytest.mark.engines("threads", "here")

both = pytest.mark.parametrize("database", ["mysql", "mariadb"], indirect=True)

# no unique key, as every table has whose identity is really (type, id, version)
EVENTS = """
CREATE TABLE events (
  id BIGINT AUTO_INCREMENT PRIMARY KEY, stream_id VARCHAR(100) NOT NULL, version INT NOT NULL,
  event_type VARCHAR(100) NOT NULL, payload JSON NOT NULL, metadata JSON NULL,
  created_at {time} NOT NULL DEFAULT CURRENT_TIMESTAMP{precision},
  KEY (stream_id, version), KEY (created_at))
"""
TYPES = ["TIMESTAMP(6)", "DATETIME"]
PLACED, INVOICED = "Order.Placed", "Invoice.Written"


def create(database: FreshDatabase, time: str = TYPES[0]) -> None:
    database.execute(
        EVENTS.format(time=time, precision=time[time.find("(") :] if "(" in time else "")
    )


def insert(
    database: FreshDatabase, *rows: tuple[str, int, str, int], metadata: str | None = None
) -> None:
    """Rows of stream, version, type and age in seconds, committed together."""
    with transaction(database) as cursor:
        cursor.executemany(
            "INSERT INTO events (stream_id, version, event_type, payload, metadata, created_at)"
            " VALUES (%s, %s, %s, '{}', %s, NOW(6) - INTERVAL %s SECOND)",
            [(*row[:3], metadata, row[3]) for row in rows],
        )
        cursor.connection.commit()


def letters(publisher: Publisher) -> list[Record]:
    """What stands on the topic of dead letters."""
    return Topic(publisher.topic.bootstrap_servers, f"{publisher.topic.name}.dead").read()


def published(publisher: Publisher) -> list[tuple[str, int, str]]:
    """Key, version and type of each record, in order."""
    records = publisher.topic.read()
    return sorted((r.key, r.version, r.headers["ce_type"].decode()) for r in records)


def refused(publisher: Publisher) -> list[tuple[str, int, str]]:
    """The same of the dead letters, all of which say why."""
    found = letters(publisher)
    for letter in found:
        assert letter.headers["eventpub_reason"].startswith(b"admission.version_conflict: ")
    return sorted((r.key, r.version, r.headers["ce_type"].decode()) for r in found)


def verdict(publisher: Publisher, status: int) -> dict[str, Any]:
    """The result of `verify`."""
    done = publisher.command("verify", "--json")
    assert done.returncode == status, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(done.stdout)["result"]
    return result


def counters(publisher: Publisher) -> dict[str, int]:
    """Of the last run."""
    done = publisher.command("status", "--json")
    found: dict[str, int] = json.loads(done.stdout)["result"]["status"]["counters"]
    return found


START = "2020-01-01T00:00:00Z"
COLUMNS = {"aggregate_id": "stream_id", "create_time": "created_at"}


@pytest.mark.parametrize(
    ("database", "time"), [*zip(["mysql", "mariadb"], TYPES, strict=True)], indirect=["database"]
)
def test_d9_a_second_row_is_a_dead_letter_whenever_it_comes(
    database: FreshDatabase, new_publisher: NewPublisher, time: str
) -> None:
    create(database, time)
    publisher = new_publisher(database, store={"columns": COLUMNS})
    insert(database, ("order-1", 1, PLACED, 200), ("order-1", 2, "Order.Paid", 10))
    insert(database, ("order-2", 1, PLACED, 10), ("order-2", 1, INVOICED, 10))  # one window
    publisher.publish_everything()
    of_2 = [("order-2", 1, PLACED), ("order-2", 1, INVOICED)]
    assert len(refused(publisher)) == 1
    assert sorted([*refused(publisher), *(e for e in published(publisher) if e in of_2)]) == sorted(
        of_2
    )
    insert(database, ("order-1", 1, INVOICED, 150))  # between two rows that were published
    publisher.publish_everything()
    assert ("order-1", 1, INVOICED) in refused(publisher)
    insert(database, ("order-1", 2, "Invoice.Paid", 0))  # after all of them
    publisher.publish_everything()
    expected = refused(publisher)
    assert len(expected) == 3
    before = published(publisher)
    assert before[:2] == [("order-1", 1, PLACED), ("order-1", 2, "Order.Paid")]
    assert len(before) == 3

    # what is known of them survives: they are dead letters once
    publisher.lose_index()
    insert(database, ("order-3", 1, PLACED, 100))
    publisher.publish_everything()
    assert (refused(publisher), len(published(publisher))) == (expected, 4)
    shutil.rmtree(publisher.state)
    publisher.publish_everything()
    assert (refused(publisher), len(published(publisher))) == (expected, 4)

    found = verdict(publisher, 0)
    assert (found["doubled"], found["missing"], found["altered"]) == (0, 0, 0)
    assert found["accounted"]["dead"] == 3
    done = publisher.command("trace", "order-1", "1", "--json")
    assert done.returncode == 1
    [version] = json.loads(done.stdout)["result"]["versions"]
    rows = [version["stored"], *version["stored"]["others"]]
    assert {row["event_type"] for row in rows} == {PLACED, INVOICED}
    assert version["verdict"] == "dead"
    assert "2 rows" in version["note"]
    shown = publisher.command("trace", "order-1", "1").stdout
    for event_type in (PLACED, INVOICED):  # of 80 columns, the cell may have a part
        assert event_type[:8] in shown, shown
    assert publisher.answer(1, "dead", "list")["letters"] is not None


@both
def test_d9_a_second_row_of_the_same_event_is_counted_as_a_duplicate(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create(database)
    publisher = new_publisher(database, store={"columns": COLUMNS})
    meta = '{"user": "u", "n": [1, {"a": null}]}'
    insert(database, ("a", 1, PLACED, 90), ("a", 1, PLACED, 80), metadata=meta)
    publisher.publish_everything()
    insert(database, ("a", 1, PLACED, 85), ("a", 2, PLACED, 0), metadata=meta)
    publisher.publish_everything()
    insert(database, ("a", 1, PLACED, 0), metadata=meta)
    publisher.publish_everything()
    assert counters(publisher)["duplicates"] >= 1
    assert letters(publisher) == []
    assert published(publisher) == [("a", 1, PLACED), ("a", 2, PLACED)]
    shutil.rmtree(publisher.state)
    publisher.publish_everything()
    assert (letters(publisher), len(published(publisher))) == ([], 2)
    insert(database, ("a", 1, PLACED, 0), metadata='{"user": "another"}')
    publisher.publish_everything()
    assert len(letters(publisher)) == 1
    found = verdict(publisher, 1)
    assert (found["doubled"], found["accounted"]["dead"]) == (3, 1)
    assert {e["note"] for e in found["examples"]["doubled"]} == {
        "the same event is in the table more than once"
    }
    insert(database, ("a", 2, INVOICED, 0))  # not published yet
    seen = publisher.command("verify", "--json", "--to", "2037-01-01T00:00:00Z", "--from", START)
    found = json.loads(seen.stdout)["result"]
    assert (found["doubled"], found["accounted"]["dead"]) == (4, 1)
    assert "the table has other events of this version, too" in seen.stdout


def test_d9_a_table_that_lets_two_requests_store_one_version(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """As spatie's before 4.10: times in whole seconds, and rows of no aggregate."""
    database.execute(
        "CREATE TABLE events (id BIGINT AUTO_INCREMENT PRIMARY KEY, stream_id CHAR(36),"
        " version BIGINT UNSIGNED, event_type VARCHAR(255) NOT NULL, payload JSON NOT NULL,"
        " metadata JSON NOT NULL, created_at TIMESTAMP NOT NULL,"
        " KEY (stream_id, version), KEY (created_at))"
    )
    store = {"columns": COLUMNS, "without_identity": "skip"}
    publisher = new_publisher(database, store=store)
    rows: list[tuple[str | None, int | None, str, int]] = [
        ("a-1", 1, "Created", 9), ("a-1", 2, "NameChanged", 5), ("a-1", 2, "MailChanged", 5),
        (None, None, "NewsletterSent", 5), ("a-1", 3, "Closed", 1), ("a-2", 1, "Created", 9),
        ("a-2", 1, "CreatedAgain", 7),
    ]  # fmt: skip
    insert(database, *rows, metadata="[]")  # type: ignore[arg-type]
    publisher.publish_everything()
    assert [e for e in published(publisher) if e[:2] != ("a-1", 2)] == [
        ("a-1", 1, "Created"), ("a-1", 3, "Closed"), ("a-2", 1, "Created"),
    ]  # fmt: skip
    assert sorted([*published(publisher), *refused(publisher)]) == sorted(
        row[:3] for row in rows if row[0]
    )
    accounted = verdict(publisher, 0)["accounted"]
    assert (accounted["dead"], accounted["without_identity"]) == (2, 1)


def test_d9_a_dead_letter_is_published_only_if_its_own_row_is(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """`dead list` took the other row of its version, which was published before, for it."""
    create(database)
    publisher = new_publisher(database, store={"columns": COLUMNS})
    insert(database, ("a", 1, PLACED, 10), ("a", 2, PLACED, 9))
    publisher.publish_everything()
    database.execute("DELETE FROM events WHERE version = 1")
    insert(database, ("a", 1, INVOICED, 8), ("a", 2, INVOICED, 20))
    publisher.publish_everything()
    insert(database, ("a", 2, "Order.Paid", 7))
    publisher.publish_everything()
    found = publisher.answer(1, "dead", "list")
    listed = {(x["version"], x["published"], x["is_last"]) for x in found["letters"]}
    assert listed == {(1, None, True), (2, None, True)}
    assert (found["count"], found["rows"]) == (3, 3), "two of them are of one version"
    reasons = {x["version"]: x["reason"] for x in found["letters"]}
    assert "another event of this version was published before" in reasons[1]
    assert "more than once" not in reasons[1]
    assert "3 dead letters, 0 published since" in publisher.command("dead", "list").stdout
    assert publisher.answer(0, "dead", "show", "a", "1")["published"] is None

    # as where what is of a topic that was deleted is published once more
    [letter] = [x for x in letters(publisher) if x.version == 1]
    names = ("ce_source", "ce_type", "ce_time", "ce_sequence")
    producer = Producer({"bootstrap.servers": publisher.topic.bootstrap_servers})
    producer.produce(
        publisher.topic.name,
        letter.value,
        letter.key,
        headers=[(name, letter.headers[name]) for name in names],
    )
    assert producer.flush(30) == 0
    assert publisher.answer(0, "dead", "show", "a", "1")["published"] is not None


def test_d9_a_running_publisher_finds_it_by_counting(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """Of versions that wait for another one, too, and while they are found by key."""
    create(database)
    publisher = new_publisher(database, store={"columns": COLUMNS}, gaps={"backoff_base": "60s"})
    publisher.start()
    insert(database, ("a", 1, PLACED, 0), ("b", 2, PLACED, 0), ("b", 2, INVOICED, 0))
    publisher.until_published("a", [1])
    insert(database, ("a", 1, INVOICED, 100), ("b", 3, PLACED, 0))
    eventually(lambda: refused(publisher) == [("a", 1, INVOICED)])
    insert(database, ("b", 1, PLACED, 0), ("b", 1, INVOICED, 0), ("b", 3, INVOICED, 50))
    publisher.until_published("b", [1, 2, 3])
    eventually(lambda: len(refused(publisher)) == 4)
    assert publisher.stop() == 143
    of_b = sorted(e for e in [*published(publisher), *refused(publisher)] if e[0] == "b")
    assert of_b == sorted(("b", v, t) for v in (1, 2, 3) for t in (PLACED, INVOICED))
    publisher.publish_everything()
    assert len(refused(publisher)) == 4


def test_d9_two_types_that_share_ids_stop_a_publisher_that_does_not_know_of_it(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create(database)
    publisher = new_publisher(database, store={"columns": COLUMNS}, sink={"dead_limit": 5})
    insert(database, *(("a", v, PLACED, 20) for v in range(1, 8)))
    publisher.publish_everything()
    insert(database, *(("a", v, INVOICED, 10) for v in range(1, 8)))
    publisher.start("--available-now")
    assert publisher.finish() == 3
    assert "store.other_history" in publisher.words()
    assert "store.columns.aggregate_id" in publisher.words()
    # its remedy needs a topic of its own: on this one the same rows would be other events
    database.execute(
        "ALTER TABLE events ADD stream_type VARCHAR(50) NOT NULL DEFAULT 'order',"
        " ADD KEY (stream_type, stream_id, version)"
    )
    two = {**COLUMNS, "aggregate_id": ["stream_type", "stream_id"]}
    publisher.settings["store"]["columns"] = two
    publisher.start("--available-now")
    assert publisher.finish() == 3
    assert "state.foreign" in publisher.words()
    assert len(published(publisher)) == 7


def test_d9_a_table_that_refused_second_rows_and_takes_them_now(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """What the index knows of before tells no rows of a version apart: the topic does."""
    create(database)
    database.execute("ALTER TABLE events ADD UNIQUE INDEX one (stream_id, version)")
    publisher = new_publisher(database, store={"columns": COLUMNS})
    insert(database, ("a", 1, PLACED, 200), ("a", 2, "Order.Paid", 10), ("b", 1, PLACED, 100))
    publisher.publish_everything()
    database.execute("ALTER TABLE events DROP INDEX one")
    insert(database, ("a", 1, INVOICED, 150), ("b", 1, PLACED, 120))
    publisher.publish_everything()
    assert refused(publisher) == [("a", 1, INVOICED)]
    database.execute("DELETE FROM events WHERE event_type = %s OR stream_id = 'b'", [INVOICED])
    database.execute("ALTER TABLE events ADD UNIQUE INDEX one (stream_id, version)")
    insert(database, ("a", 3, PLACED, 5))
    publisher.publish_everything()
    database.execute("ALTER TABLE events DROP INDEX one")
    insert(database, ("a", 3, INVOICED, 7), ("a", 1, PLACED, 170))
    publisher.publish_everything()
    assert refused(publisher) == [("a", 1, INVOICED), ("a", 3, INVOICED)]
    assert len(published(publisher)) == 4


def test_d9_a_running_publisher_notices_that_second_rows_are_taken(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """Those that came before it had looked at the table again are dead letters, too."""
    create(database)
    database.execute("ALTER TABLE events ADD UNIQUE INDEX one (stream_id, version)")
    publisher = new_publisher(database, store={"columns": COLUMNS})
    insert(database, ("a", 1, PLACED, 100), ("a", 2, PLACED, 0))
    publisher.start()
    publisher.until_published("a", [1, 2])
    database.execute("ALTER TABLE events DROP INDEX one")
    insert(database, ("a", 1, INVOICED, 50), ("b", 1, PLACED, 0))
    publisher.until_published("b", [1])
    publisher.until_said("the event table was altered")
    if publisher.settings["run"]["engine"] == "spark":
        assert publisher.finish(60) == 3
        assert "state.second_rows" in publisher.words()
        publisher.start()
    eventually(lambda: refused(publisher) == [("a", 1, INVOICED)])
    assert publisher.stop() == 143


def test_d9_second_rows_of_a_version_below_the_first(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create(database)
    publisher = new_publisher(database, store={"columns": COLUMNS})
    insert(database, ("a", 0, PLACED, 20), ("a", 0, INVOICED, 19), ("a", 0, PLACED, 18))
    insert(database, ("z", 1, PLACED, 20))
    publisher.publish_everything()
    assert letters_of(publisher) == {("a", 0, PLACED), ("a", 0, INVOICED)}
    insert(database, ("a", 0, "Order.Paid", 10), ("a", 1, PLACED, 5), ("a", 0, PLACED, 1))
    shutil.rmtree(publisher.state)
    publisher.publish_everything()
    assert letters_of(publisher) == {("a", 0, e) for e in (PLACED, INVOICED, "Order.Paid")}
    assert len(letters(publisher)) == 3
    publisher.publish_everything()
    assert len(letters(publisher)) == 3
    found = verdict(publisher, 1)
    assert (found["doubled"], found["accounted"]["dead"]) == (2, 3)


def test_d9_a_version_below_the_first_that_commits_late_is_a_dead_letter(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create(database)
    database.execute("ALTER TABLE events ADD UNIQUE INDEX one (stream_id, version)")
    publisher = new_publisher(database, store={"columns": COLUMNS})
    insert(database, ("a", 1, PLACED, 0))
    publisher.start()
    publisher.until_published("a", [1])
    insert(database, ("b", 0, PLACED, 20))  # as of a transaction that was open for so long
    eventually(lambda: letters_of(publisher) == {("b", 0, PLACED)})
    assert publisher.stop() == 143


def letters_of(publisher: Publisher) -> set[tuple[str, int, str]]:
    """Key, version and type of each dead letter."""
    return {(r.key, r.version, r.headers["ce_type"].decode()) for r in letters(publisher)}
