"""migrate, doctor and verify as processes, on real servers: what they answer and how they end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from eventpub.local.servers import Kafka
from tests.cli.test_command import envelope, eventpub
from tests.conftest import FreshDatabase

pytestmark = pytest.mark.parametrize("database", ["mysql"], indirect=True)


class Installation:
    """A configuration that is right, and commands with something about it changed."""

    def __init__(self, folder: Path, database: FreshDatabase, broker: Kafka, topic: str) -> None:
        self.folder, self.database = folder, database
        self.environ = {
            "EVENTPUB_APP__ID": "orders",
            "EVENTPUB_STORE__URL": database.url,
            "EVENTPUB_SINK__TOPIC": topic,
            "EVENTPUB_SINK__BOOTSTRAP_SERVERS": broker.bootstrap_servers,
        }

    def command(self, *arguments: str, **environ: str) -> tuple[int, dict[str, Any], float]:
        started = time.monotonic()
        done = eventpub(*arguments, "--json", cwd=self.folder, **(self.environ | environ))
        took = time.monotonic() - started
        assert "hunter2" not in done.stdout + done.stderr
        return done.returncode, envelope(done), took


@pytest.fixture
def installation(
    tmp_path: Path, database: FreshDatabase, kafka_server: Kafka, topic_name: str
) -> Installation:
    return Installation(tmp_path, database, kafka_server, topic_name)


def test_migrate_makes_the_table_once_and_says_what_it_would_do(
    installation: Installation,
) -> None:
    status, would, _ = installation.command("migrate", "--sql")
    assert status == 0
    assert "CREATE TABLE" in would["summary"]
    assert not installation.database.execute("SHOW TABLES LIKE 'events'")
    status, did, _ = installation.command("migrate")
    assert status == 0
    assert did["result"]["statements"] == would["result"]["statements"]
    assert installation.database.execute("SHOW TABLES LIKE 'events'")
    status, again, _ = installation.command("migrate")
    assert (status, again["result"]["statements"]) == (0, [])


def test_migrate_without_a_database_can_only_print(
    installation: Installation, tmp_path: Path
) -> None:
    away = {"EVENTPUB_STORE__URL": "mysql+pymysql://nobody@127.0.0.1:1/none"}
    status, answer, _ = installation.command("migrate", **away)
    assert (status, answer["error"]["code"]) == (3, "store.unreachable")
    printed = eventpub("migrate", "--sql", cwd=installation.folder, **away)
    assert printed.returncode == 0
    assert "CREATE TABLE" in printed.stdout
    # nothing at all is configured
    assert eventpub("migrate", cwd=tmp_path).returncode == 2


def test_doctor_finds_nothing_wrong_after_migrate(installation: Installation) -> None:
    installation.command("migrate")
    status, found, _ = installation.command("doctor")
    wrong = [c for c in found["result"]["checks"] if c["status"] == "wrong"]
    assert (status, wrong) == (0, [])
    assert found["ok"] is True


@pytest.mark.parametrize(
    "arguments",
    [
        ["status"], ["doctor"], ["trace", "a"], ["trace", "a", "1"], ["gaps", "list"],
        ["gaps", "retry", "a"], ["gaps", "skip", "a", "--yes"], ["dead", "list"],
        ["dead", "retry", "a", "1"], ["verify"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_command_that_asks_leaves_nothing_behind(
    installation: Installation, arguments: list[str]
) -> None:
    installation.command("migrate")
    installation.command(*arguments)
    assert list(installation.folder.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["trace", "ID"], ["gaps", "retry", "ID"], ["gaps", "cancel", "ID"],
        ["gaps", "skip", "ID", "--yes"], ["dead", "show", "ID", "1"], ["dead", "retry", "ID", "1"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_an_id_never_reaches_the_terminal_as_it_is(
    installation: Installation, arguments: list[str]
) -> None:
    installation.command("migrate")
    id = "\x1b]0;pwned\x07\x1b[31mred"
    insert = "INSERT INTO events (aggregate_id, version, event_type) VALUES (%s, 1, %s)"
    installation.database.execute(insert, (id, id))
    given = [id if a == "ID" else a for a in arguments]
    done = eventpub(*given, cwd=installation.folder, **installation.environ)
    assert r"\x1b]0;pwned\x07\x1b[31mred" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr
    if arguments[0] == "trace":
        _, answer, _ = installation.command(*given)
        assert answer["result"]["aggregate_id"] == id


def test_doctor_names_what_is_missing_and_the_statement(installation: Installation) -> None:
    installation.database.execute(
        "CREATE TABLE events (aggregate_id VARCHAR(255) NOT NULL, version BIGINT NOT NULL,"
        " event_type VARCHAR(255) NOT NULL, payload BLOB, metadata JSON,"
        " create_time TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6),"
        " UNIQUE KEY (aggregate_id, version))"
    )
    status, found, _ = installation.command("doctor")
    assert status == 1
    assert found["error"] is None
    checks = {c["code"]: c for c in found["result"]["checks"] if c["status"] == "wrong"}
    assert "ALTER TABLE" in checks["store.index_missing"]["suggestion"]
    status, answer, took = installation.command("run")
    assert (status, answer["error"]["code"]) == (3, "store.index_missing")
    assert "ALTER TABLE" in answer["error"]["suggestion"]
    assert took < 90


WRONG = [
    ({"EVENTPUB_STORE__PASSWORD": "hunter2"}, "store.auth_failed"),
    ({"EVENTPUB_STORE__TABLE": "no_such_table"}, "store.table_missing"),
    ({"EVENTPUB_SINK__BOOTSTRAP_SERVERS": "127.0.0.1:1"}, "sink.unreachable"),
    ({"EVENTPUB_SINK__CREATE_TOPICS": "false"}, "sink.topic_missing"),
]


@pytest.mark.parametrize(("change", "code"), WRONG, ids=[code for _, code in WRONG])
def test_run_and_doctor_soon_say_what_is_wrong(
    installation: Installation, change: dict[str, str], code: str
) -> None:
    installation.command("migrate")
    status, answer, took = installation.command("run", **change)
    assert status == 3
    assert answer["error"]["code"] == code
    assert took < 90
    status, answer, took = installation.command("doctor", **change)
    wrong = {c["code"] for c in answer["result"]["checks"] if c["status"] == "wrong"}
    assert code in wrong
    assert status == (3 if code in {"store.auth_failed", "sink.unreachable"} else 1)
    assert took < 90
