"""An account with `SELECT` on the event table and nothing else: all works; what is lost is said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import FreshDatabase
from tests.publisher.conftest import NewPublisher
from tests.publisher.harness import (
    Publisher,
    compare,
    create_table,
    eventually,
    insert,
    transaction,
)

BOTH = pytest.mark.parametrize("database", ["mysql", "mariadb"], indirect=True)


@pytest.fixture
def reader(database: FreshDatabase) -> Iterator[str]:
    """The account's URL."""
    name = f"r{database.name[-10:]}"
    create_table(database, collation="utf8mb4_bin")
    database.execute(f"CREATE USER {name}@'%' IDENTIFIED BY 'reads-only'")
    database.execute(f"GRANT SELECT ON {database.name}.events TO {name}@'%'")
    yield database.url_of(name, "reads-only")
    database.execute(f"DROP USER {name}@'%'")


def answer(publisher: Publisher, status: int, *arguments: str) -> Any:
    """The whole answer of a command, as JSON."""
    done = publisher.command(*arguments, "--json")
    assert done.returncode == status, done.stdout + done.stderr
    return json.loads(done.stdout)


@BOTH
def test_select_on_the_event_table_is_enough_for_everything(
    database: FreshDatabase, new_publisher: NewPublisher, reader: str
) -> None:
    publisher = new_publisher(
        database, store={"url": reader}, gaps={"backoff_base": "60s"}, recount={"horizon": "30s"}
    )
    checks = answer(publisher, 0, "doctor")["result"]["checks"]
    assert not [check for check in checks if check["status"] == "wrong"], checks
    lost = [c for c in checks if "PROCESS" in f"{c['message']} {c['suggestion']}"]
    assert lost, checks
    assert all(check["status"] == "warn" for check in lost), lost

    publisher.start()
    with transaction(database) as late:
        insert(late, "late", 1)
        with database.connect() as connection, connection.cursor() as cursor:
            insert(cursor, "a", 1)
            insert(cursor, "held", 1)
            insert(cursor, "held", 3)
            publisher.until_published("a", [1])
        publisher.until_said("GRANT PROCESS")
        eventually(lambda: publisher.topic.versions("held") == [1])
        late.connection.commit()
    # nothing tells the boundary of it: the recount finds it
    publisher.until_published("late", [1])
    [hold] = answer(publisher, 1, "gaps", "list")["result"]["open"]
    assert hold["aggregate_id"] == "held"
    assert answer(publisher, 0, "verify")["result"]["held"] == 1  # held/3 waits
    with database.connect() as connection, connection.cursor() as cursor:
        insert(cursor, "held", 2)
    done = publisher.command("gaps", "retry", "held", "--json")
    found = json.loads(done.stdout)["result"]["outcome"]
    assert found in {"found", "nothing is missing"}, done.stdout  # it was found before, perhaps
    publisher.until_published("held", [1, 2, 3])
    assert answer(publisher, 0, "verify")["ok"] is True
    assert answer(publisher, 0, "gaps", "list")["result"]["open"] == []
    assert publisher.stop() == 143
    assert not compare(database, publisher.topic)
    publisher.publish_everything()
    assert not compare(database, publisher.topic)


@BOTH
@pytest.mark.usefixtures("reader")
def test_the_account_can_do_nothing_else(database: FreshDatabase) -> None:
    """That the test above tests what it says: the grants are these and no more."""
    name = f"r{database.name[-10:]}"
    grants = [row[0] for row in database.execute(f"SHOW GRANTS FOR {name}@'%'")]
    assert len(grants) == 2, grants
    assert any(g.startswith("GRANT USAGE ON *.*") for g in grants), grants
    assert any(f"GRANT SELECT ON `{database.name}`.`events`" in g for g in grants), grants
