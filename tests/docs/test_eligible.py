"""Tables that docs/how-to/eligible.md calls eligible once something is added to them."""

from __future__ import annotations

import json
import uuid

import pytest

from tests.conftest import FreshDatabase
from tests.docs.pages import ROOT, blocks
from tests.publisher.conftest import NewPublisher, new_publisher
from tests.publisher.harness import Publisher

__all__ = ["new_publisher"]


def wrong(publisher: Publisher) -> set[str]:
    """The codes of what `doctor` finds wrong."""
    done = publisher.command("doctor", "--json")
    checks = json.loads(done.stdout)["result"]["checks"]
    return {check["code"] for check in checks if check["status"] == "wrong"}


def agrees(publisher: Publisher) -> None:
    """Publish, and let `verify` say that nothing differs."""
    publisher.publish_everything()
    done = publisher.command("verify")
    assert done.returncode == 0, done.stdout


def test_axons_table_with_a_time_of_the_database(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    database.execute(
        "CREATE TABLE domain_event_entry ("
        " global_index BIGINT AUTO_INCREMENT PRIMARY KEY,"
        " event_identifier VARCHAR(255) NOT NULL UNIQUE,"
        " aggregate_identifier VARCHAR(255) NOT NULL,"
        " sequence_number BIGINT NOT NULL,"
        " type VARCHAR(255), meta_data LONGBLOB, payload LONGBLOB NOT NULL,"
        " payload_type VARCHAR(255) NOT NULL, payload_revision VARCHAR(255),"
        " time_stamp VARCHAR(255) NOT NULL,"
        " UNIQUE KEY (aggregate_identifier, sequence_number))"
    )

    def append(number: int) -> None:
        database.execute(
            "INSERT INTO domain_event_entry (event_identifier, aggregate_identifier,"
            " sequence_number, type, payload, payload_type, time_stamp) VALUES"
            " (%s, 'order-1', %s, 'Order', '{}', 'shop.Created', '2026-01-01T00:00:00Z')",
            (str(uuid.uuid4()), number),
        )

    names = {
        "id": "global_index",
        "aggregate_id": "aggregate_identifier",
        "version": "sequence_number",
        "event_type": "payload_type",
        "metadata": "",
        "create_time": "time_stamp",
    }
    append(0)
    append(1)
    store = {"table": "domain_event_entry", "first_version": 0, "columns": names}
    publisher = new_publisher(database, store=store)
    assert wrong(publisher) == {"store.column_type"}
    database.execute(
        "ALTER TABLE domain_event_entry ADD COLUMN create_time TIMESTAMP(6) NOT NULL"
        " DEFAULT CURRENT_TIMESTAMP(6), ADD INDEX (create_time)"
    )
    names["create_time"] = "create_time"
    assert not wrong(publisher)
    agrees(publisher)
    append(2)
    agrees(publisher)
    assert publisher.topic.versions("order-1") == [0, 1, 2]


def test_a_table_whose_ids_are_the_bytes_of_uuids(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    database.execute(
        "CREATE TABLE events ("
        " stream BINARY(16) NOT NULL, version BIGINT NOT NULL, event_type VARCHAR(255) NOT NULL,"
        " payload JSON, create_time TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6),"
        " PRIMARY KEY (stream, version), KEY (create_time))"
    )
    publisher = new_publisher(database, store={"columns": {"aggregate_id": "stream"}})
    assert not wrong(publisher)
    one = str(uuid.uuid4())
    for version in (1, 2):
        database.execute(
            "INSERT INTO events (stream, version, event_type, payload)"
            " VALUES (UUID_TO_BIN(%s), %s, 'happened', '{}')",
            (one, version),
        )
    agrees(publisher)
    assert publisher.topic.versions(one) == [1, 2]


@pytest.mark.parametrize("database", ["mysql", "mariadb"], indirect=True)
def test_a_table_without_a_version_gets_one(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    database.execute(
        "CREATE TABLE events (id BIGINT AUTO_INCREMENT PRIMARY KEY, aggregate_id VARCHAR(64)"
        " NOT NULL, event_type VARCHAR(64) NOT NULL, payload JSON, create_time TIMESTAMP(6)"
        " NOT NULL DEFAULT CURRENT_TIMESTAMP(6), KEY (create_time))"
    )
    for aggregate_id in ("a", "b", "a", "a"):
        row = (aggregate_id,)
        database.execute(
            "INSERT INTO events (aggregate_id, event_type, payload) VALUES (%s, 'E', '{}')", row
        )
    page = blocks(ROOT / "docs" / "how-to" / "eligible.md")
    [statements] = [block.text for block in page if "ADD COLUMN version" in block.text]
    for statement in filter(str.strip, statements.split(";")):
        database.execute(statement)
    rows = database.execute("SELECT aggregate_id, version FROM events ORDER BY id")
    assert rows == (("a", 1), ("b", 1), ("a", 2), ("a", 3))
    publisher = new_publisher(database, store={"columns": {"metadata": ""}})
    assert not wrong(publisher)
    agrees(publisher)
