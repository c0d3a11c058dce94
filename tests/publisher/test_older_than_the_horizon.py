"""What committed later than anything looks for it is published by a start that looks further."""

from __future__ import annotations

from tests.conftest import FreshDatabase
from tests.publisher.conftest import NewPublisher
from tests.publisher.harness import commit, compare, create_table


def test_a_start_with_a_longer_horizon_publishes_what_one_before_had_missed(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """As docs/verify.md says it of what is missing and younger than a day.

    The table has no `id`: with one, the newest rows are looked at, and it may be found by that.
    """
    create_table(database)
    database.execute("ALTER TABLE events MODIFY id BIGINT NOT NULL")
    database.execute("ALTER TABLE events DROP PRIMARY KEY, DROP id")
    publisher = new_publisher(database, recount={"horizon": "5s"})
    publisher.settings["store"]["columns"] = {"id": ""}
    publisher.start()
    commit(database, "a", 1)
    publisher.until_published("a", [1])
    assert publisher.stop() == 143
    database.execute(
        "INSERT INTO events (aggregate_id, version, event_type, payload, create_time)"
        " VALUES ('missed', 1, 't', '{}', NOW(6) - INTERVAL 1 HOUR)"
    )
    publisher.start()
    commit(database, "a", 2)
    publisher.until_published("a", [1, 2])
    assert publisher.stop() == 143
    assert publisher.topic.versions("missed") == []
    assert publisher.command("verify").returncode == 1

    publisher.start("--set", "recount.horizon=24h")
    publisher.until_published("missed", [1])
    assert publisher.stop() == 143
    differences = compare(database, publisher.topic)
    assert not differences, differences
