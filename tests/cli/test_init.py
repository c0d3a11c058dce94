"""`init` on real servers: what it proposes can be checked, and run."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_command import envelope, eventpub
from tests.conftest import FreshDatabase
from tests.publisher.harness import create_table

both = pytest.mark.parametrize("database", ["mysql", "mariadb"], indirect=True)

OTHER_NAMES = """
CREATE TABLE domain_events (
  global_index      BIGINT AUTO_INCREMENT PRIMARY KEY,
  event_identifier  VARCHAR(64) NOT NULL UNIQUE,
  stream_id         VARCHAR(100) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
  sequence_number   BIGINT NOT NULL,
  payload_type      VARCHAR(200) NOT NULL,
  event_data        LONGTEXT,
  meta_data         TEXT,
  changed           DATETIME(6) NULL,
  recorded_at       DATETIME(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
  UNIQUE KEY (stream_id, sequence_number), KEY (recorded_at)
)
"""
MAPPED = {
    "id": "global_index",
    "aggregate_id": "stream_id",
    "version": "sequence_number",
    "event_type": "payload_type",
    "payload": "event_data",
    "metadata": "meta_data",
    "create_time": "recorded_at",
}


def with_password(url: str, password: str) -> str:
    return url.replace("root@", f"root:{password}@")


@both
def test_a_table_of_other_names_is_found_and_what_is_written_works(
    database: FreshDatabase, tmp_path: Path
) -> None:
    database.execute(OTHER_NAMES)
    database.execute("CREATE TABLE users (id INT PRIMARY KEY, name VARCHAR(20), at DATETIME)")
    database.execute(
        "INSERT INTO domain_events (event_identifier, stream_id, sequence_number, payload_type)"
        " VALUES ('x', 'a', 0, 'Opened'), ('y', 'a', 1, 'Closed')"
    )
    done = eventpub(
        "init", "--url", database.url, "--bootstrap-servers", "kafka-1:9092", "--json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    result = envelope(done)["result"]
    assert (result["table"], result["columns"]) == ("domain_events", MAPPED)
    assert (result["others"], result["first_version"]) == ([], 0)
    assert result["left_out"] == ["changed", "event_identifier"]
    [note] = result["notes"]
    assert note.startswith("store.url in eventpub.toml has the user eventpub, not root: ")
    written = tomllib.loads((tmp_path / "eventpub.toml").read_text())
    assert written["store"]["columns"] == MAPPED
    assert written["store"]["first_version"] == 0
    assert written["sink"]["topic"] == f"{database.name}.domain_events"
    assert written["sink"]["bootstrap_servers"] == "kafka-1:9092"
    checked = eventpub("config", "check", cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr

    # the account that it asks for is enough
    assert "eventpub@" in written["store"]["url"]
    user = f"init{database.name[-8:]}"
    try:
        for statement in result["account"]:
            sql = statement.partition("  --")[0].replace("'eventpub'", f"'{user}'")
            database.execute(sql.replace("…", "secret").rstrip(";"))
        done = eventpub(
            "doctor", "--json", cwd=tmp_path,
            EVENTPUB_STORE__URL=database.url_of(user), EVENTPUB_STORE__PASSWORD="secret",
            EVENTPUB_SINK__BOOTSTRAP_SERVERS="127.0.0.1:1",
        )  # fmt: skip
    finally:
        database.execute(f"DROP USER IF EXISTS '{user}'@'%'")
    checks = envelope(done)["result"]["checks"]
    of_store = [c for c in checks if c["name"].startswith("event store")]
    assert len(of_store) > 5
    assert [c for c in of_store if c["status"] == "wrong"] == []


def test_columns_of_unusual_names_are_found_by_what_is_left_or_named(
    database: FreshDatabase, tmp_path: Path
) -> None:
    table = """CREATE TABLE happened (
      seq BIGINT AUTO_INCREMENT PRIMARY KEY, what VARCHAR(64) NOT NULL, nth INT NOT NULL,
      sort VARCHAR(80) NOT NULL, thing JSON, at DATETIME(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
      UNIQUE KEY (what, nth), KEY (at))"""
    database.execute(table)
    done = eventpub("init", "--url", database.url, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    columns = {
        "id": "seq", "aggregate_id": "what", "version": "nth", "event_type": "sort",
        "payload": "thing", "create_time": "at",
    }  # fmt: skip
    assert {k: v for k, v in envelope(done)["result"]["columns"].items() if v} == columns

    # two that may be it: it says so, and how to name the right one
    database.execute("ALTER TABLE happened ADD COLUMN country VARCHAR(2)")
    done = eventpub("init", "--url", database.url, "--force", "--json", cwd=tmp_path)
    assert done.returncode == 1
    error = envelope(done)["error"]
    assert error["code"] == "init.column_unknown"
    assert "happened" in error["message"]
    assert "--table happened --set store.columns.event_type=" in error["suggestion"]
    named = ("--table", "happened", "--set", "store.columns.event_type=country")
    done = eventpub("init", "--url", database.url, "--force", "--json", *named, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    written = tomllib.loads((tmp_path / "eventpub.toml").read_text())
    assert written["store"]["columns"] == columns | {"event_type": "country"}


def test_a_column_that_is_not_recognised_can_be_named(
    database: FreshDatabase, tmp_path: Path
) -> None:
    names = OTHER_NAMES.replace("payload_type", "what").replace("recorded_at", "booked")
    database.execute(names)
    named = ("--set", "store.columns.event_type=what", "--set", "store.columns.metadata=")
    done = eventpub("init", "--url", database.url, *named, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    written = tomllib.loads((tmp_path / "eventpub.toml").read_text())["store"]
    assert written["table"] == "domain_events"
    assert written["columns"] == {
        "id": "global_index",
        "aggregate_id": "stream_id",
        "version": "sequence_number",
        "event_type": "what",
        "payload": "event_data",
        "create_time": "booked",
    }


def test_of_several_tables_the_likeliest_is_taken_and_the_others_are_named(
    database: FreshDatabase, tmp_path: Path
) -> None:
    database.execute(OTHER_NAMES.replace("domain_events", "archive"))
    create_table(database)
    done = eventpub("init", "--url", database.url, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "for table events" in done.stdout
    assert "--table archive" in done.stdout
    assert "GRANT SELECT ON" in done.stdout
    assert "eventpub doctor" in done.stdout
    assert "the statement for the table" not in done.stdout
    written = tomllib.loads((tmp_path / "eventpub.toml").read_text())
    assert written["store"]["table"] == "events"
    assert "columns" not in written["store"]

    # never over what is there
    again = eventpub("init", "--url", database.url, "--table", "archive", "--json", cwd=tmp_path)
    assert again.returncode == 2
    assert envelope(again)["error"]["code"] == "init.file_exists"
    assert tomllib.loads((tmp_path / "eventpub.toml").read_text()) == written
    forced = eventpub(
        "init", "--url", database.url, "--table", "archive", "--force", "--topic", "t",
        "--app-id", "mine", cwd=tmp_path,
    )  # fmt: skip
    assert forced.returncode == 0, forced.stderr
    written = tomllib.loads((tmp_path / "eventpub.toml").read_text())
    assert (written["store"]["table"], written["sink"]["topic"]) == ("archive", "t")
    assert written["app"]["id"] == "mine"
    elsewhere = eventpub("init", "--url", database.url, "--output", "b.toml", cwd=tmp_path)
    assert elsewhere.returncode == 0
    assert eventpub("config", "check", "--config", "b.toml", cwd=tmp_path).returncode == 0


def test_what_cannot_be_found_is_said_and_no_password_is_written(
    database: FreshDatabase, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE users (id INT PRIMARY KEY, name VARCHAR(20), at DATETIME)")

    def refused(*arguments: str, **environ: str) -> dict[str, Any]:
        done = eventpub("init", *arguments, "--json", cwd=tmp_path, **environ)
        error: dict[str, Any] = json.loads(done.stdout)["error"]
        # the database that has answered is no service that is away
        status = {"init": 1, "config": 2, "store": 3}[error["code"].partition(".")[0]]
        assert done.returncode == status
        assert "hunter2" not in done.stdout + done.stderr
        return error

    assert refused("--url", database.url)["code"] == "init.no_table"
    unknown = refused("--url", database.url, "--table", "users")
    assert unknown["code"] == "init.column_unknown"
    assert "version" in unknown["message"]
    assert "--set store.columns.version=…" in unknown["suggestion"]
    named = refused("--url", database.url, "--table", "users", "--set", "store.columns.version=no")
    assert "version (it has no column no)" in named["message"]
    assert refused("--url", database.url, "--table", "none")["code"] == "store.table_missing"
    assert refused()["code"] == "config.missing_key"
    wrong = refused("--url", with_password(database.url, "hunter2"))
    assert wrong["code"] == "store.auth_failed"
    assert not (tmp_path / "eventpub.toml").exists()

    create_table(database)
    user = f"pw{database.name[-8:]}"
    database.execute(f"CREATE USER {user}@'%' IDENTIFIED BY 'hunter2'")
    database.execute(f"GRANT SELECT ON {database.name}.* TO {user}@'%'")
    try:
        done = eventpub("init", "--url", database.url_of(user, "hunter2"), cwd=tmp_path)
    finally:
        database.execute(f"DROP USER {user}@'%'")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "eventpub.toml").read_text()
    assert f"//{user}@" in text
    assert "has the user" not in done.stdout
    assert "hunter2" not in text + done.stdout + done.stderr


@both
def test_a_view_is_said_to_be_one_by_all_who_need_the_table(
    database: FreshDatabase, tmp_path: Path
) -> None:
    """`init` took it, and its note asked for an index, which a view cannot have."""
    create_table(database)
    database.execute("CREATE VIEW v AS SELECT * FROM events")
    given = ("--table", "v", "--json")
    done = eventpub("init", "--url", database.url, *given, cwd=tmp_path)
    assert done.returncode == 3
    error = envelope(done)["error"]
    assert error["code"] == "store.is_view"
    assert "v is a view" in error["message"]
    assert "store.table" in error["suggestion"]
    assert not (tmp_path / "eventpub.toml").exists()
    # without a name it is not taken for one
    found = eventpub("init", "--url", database.url, "--json", cwd=tmp_path)
    assert envelope(found)["result"]["table"] == "events"
    assert envelope(found)["result"]["others"] == []

    environ = {
        "EVENTPUB_STORE__URL": database.url,
        "EVENTPUB_SINK__BOOTSTRAP_SERVERS": "127.0.0.1:1",
    }
    for command in ("migrate", "doctor", "run"):
        done = eventpub(
            command,
            *(given[2:] if command == "run" else given),
            cwd=tmp_path,
            EVENTPUB_STORE__TABLE="v",
            **environ,
        )
        answer = envelope(done)
        assert done.returncode == 3
        if command == "doctor":
            [check] = [c for c in answer["result"]["checks"] if c["name"] == "event store: table"]
            assert check["code"] == "store.is_view"
        else:
            assert answer["error"]["code"] == "store.is_view", answer
