"""Scenario F14: the oldest supported brokers, the first of a new major version, and the newest.

The others run all other tests. Downloaded on demand; skipped where the jars cannot be had.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from eventpub.errors import LocalError
from eventpub.local.servers import Kafka
from tests.conftest import FreshDatabase
from tests.publisher.conftest import FAST
from tests.publisher.harness import (
    Publisher,
    Topic,
    compare,
    create_table,
    eventually,
    insert,
)
from tests.servers.kafka import kafka

VERSIONS = ["3.9.2", "4.0.2", "4.4.0"]


@pytest.fixture(scope="module", params=VERSIONS)
def broker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Kafka]:
    """A broker of another version."""
    try:
        server = kafka(tmp_path_factory.mktemp("kafka"), version=request.param)
    except LocalError as error:
        if error.code == "local.network":
            pytest.skip(f"Kafka {request.param} cannot be downloaded: {error.message[:200]}")
        raise
    with server:
        yield server


@pytest.mark.long
def test_f14_publishes_survives_a_kill_at_a_commit_folds_and_keeps_what_is_refused(
    broker: Kafka, tmp_path: Path, database: FreshDatabase, topic_name: str
) -> None:
    create_table(database)
    with Publisher(tmp_path, database.url, topic_name, broker.bootstrap_servers, FAST) as publisher:
        checks = publisher.command("doctor", "--json")
        assert checks.returncode == 0, checks.stdout
        found = {c["name"]: c for c in json.loads(checks.stdout)["result"]["checks"]}
        assert found["transactions"]["status"] == "ok"
        assert found["broker settings"]["status"] == "ok"

        marker = tmp_path / "committed"
        publisher.start(environment={"EVENTPUB_FAILPOINT": f"after_commit:1:{marker}"})
        with database.connect() as connection, connection.cursor() as cursor:
            for number in range(200):
                insert(cursor, f"order-{number % 20}", number // 20 + 1)
            insert(cursor, "large", 1, os.urandom(3_000_000))
            insert(cursor, "large", 2)
        eventually(marker.exists)
        publisher.kill()
        publisher.start()
        publisher.until_published("large", [2])
        publisher.kill()
        differences = compare(database, publisher.topic)
        assert differences.missing == [("large", 1)]
        assert differences.counts()[1:] == (0, 0)
        dead = Topic(broker.bootstrap_servers, f"{topic_name}.dead")
        assert [r.key for r in dead.read()] == ["large"]
