"""Scenario F14: the same results on versions of MySQL and MariaDB that can be had here."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from eventpub.errors import LocalError
from eventpub.local.servers import Database, Kafka
from tests.conftest import FreshDatabase, fresh_database
from tests.publisher.conftest import FAST
from tests.publisher.harness import (
    Publisher,
    commit,
    compare,
    create_table,
    insert,
    transaction,
)
from tests.servers.databases import DATABASES
from tests.variants import variants

SHARED = [("mariadb", "11.4"), ("mysql", "9")]
"""They run for other tests, too."""
OTHERS = [("mysql", "8.4"), ("mariadb", "10.11"), ("mariadb", "11.8")]
VERSIONS = variants([*SHARED, *OTHERS])
COLUMNS = ["TIMESTAMP(6)", "DATETIME(6)"]


@pytest.fixture(scope="module", params=VERSIONS, ids="-".join)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Database]:
    """One of each; skips where this platform cannot have it."""
    kind, version = request.param
    if request.param in SHARED:
        yield request.getfixturevalue(f"{kind}_server")
        return
    start, _ = DATABASES[kind]
    folder = tmp_path_factory.mktemp(kind)
    try:
        running = start(folder, version=version, options=["--skip-log-bin"])
    except LocalError as error:
        if error.code == "local.unsupported_platform":
            pytest.skip(str(error))
        raise
    with running:
        yield running


def test_f14_the_main_scenario_on_several_versions_and_both_types_of_column(
    server: Database, kafka_server: Kafka, tmp_path: Path, topic_name: str
) -> None:
    """A late commit, reversed commits, a gap that is skipped, and its version after all."""
    with ExitStack() as stack:
        pairs = []
        for number, column in enumerate(COLUMNS):
            database = stack.enter_context(fresh_database(server))
            collation = "utf8mb4_0900_bin" if "MySQL" in server.name else "utf8mb4_nopad_bin"
            create_table(database, time=column, collation=collation)
            topic, broker = f"{topic_name}.{number}", kafka_server.bootstrap_servers
            publisher = Publisher(tmp_path / str(number), database.url, topic, broker, FAST)
            stack.enter_context(publisher).start()
            pairs.append((database, publisher))
        for _, publisher in pairs:
            doctor = json.loads(publisher.command("doctor", "--json").stdout)
            said = [c for c in doctor["result"]["checks"] if c["name"].startswith("event store")]
            assert said
            assert not [c for c in said if c["status"] != "ok"], said
        for database, publisher in pairs:
            commit(database, "plain", 1, 2)
            publisher.until_published("plain", [1, 2])
        for database, publisher in pairs:
            the_main_scenario(database, publisher)
        for database, publisher in pairs:
            differences = compare(database, publisher.topic)
            assert not differences, differences
            verified = publisher.command("verify", "--json")
            assert verified.returncode == 0, verified.stdout


def the_main_scenario(database: FreshDatabase, publisher: Publisher) -> None:
    """What the versions of a server could do differently."""
    with transaction(database) as single, transaction(database) as first:
        insert(single, "single", 1)
        insert(first, "reversed", 1)
        time.sleep(0.05)
        commit(database, "reversed", 2)
        commit(database, "gap", 1, 3)
        commit(database, "other", 1)
        publisher.until_published("other", [1])
        time.sleep(1.0)
        first.connection.commit()
        single.connection.commit()
    publisher.until_published("reversed", [1, 2])
    publisher.until_published("single", [1])
    publisher.until_published("gap", [1, 3])
    commit(database, "gap", 2)
    publisher.until_published("gap", [1, 3, 2])
    gaps = [json.loads(r.value) for r in publisher.gaps.read() if r.key == "gap" and r.value]
    assert [(gap["from_version"], gap["to_version"]) for gap in gaps] == [(2, 2)]
