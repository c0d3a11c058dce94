"""Scenarios D4 to D7: what is missing, wrong or hostile in the set-up, by the installed command.

Both `doctor` and `run` have to name it and what mends it; `run` ends with status 3 before it has
started Spark. A broker that does not answer takes 10 s, all else one or two.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

from tests.conftest import FreshDatabase
from tests.publisher.conftest import NewPublisher
from tests.publisher.harness import Publisher, compare, create_table, insert, transaction
from tests.sink import conftest as sinks

PASSWORD = "hunter2-hunter2"

guarded_broker = sinks.own_broker


@dataclass(frozen=True)
class Said:
    """What the two commands answer about one fault."""

    run: dict[str, Any]
    wrong: list[dict[str, Any]]


def ask(publisher: Publisher, *, status: int = 3, doctor_status: int = 1) -> Said:
    """The error of `run`, and what `doctor` calls wrong."""
    answers = []
    for command, expected in (("run", status), ("doctor", doctor_status)):
        done = publisher.command(command, "--json")
        assert done.returncode == expected, done.stdout + done.stderr
        assert not (publisher.state / "spark.log").exists()
        assert PASSWORD not in done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        answers.append(json.loads(done.stdout))
    run, doctor = answers
    return Said(run["error"], [c for c in doctor["result"]["checks"] if c["status"] == "wrong"])


def assert_both_say(said: Said, code: str, *words: str) -> None:
    """The code, and in message and suggestion together the words."""

    def says_it(found: dict[str, Any]) -> bool:
        text = f"{found['message']} {found.get('where')} {found['suggestion']}"
        return found["code"] == code and all(word in text for word in words)

    assert says_it(said.run), said.run
    assert any(says_it(check) for check in said.wrong), said.wrong


DATABASE_FAULTS: dict[str, tuple[str, str, list[str]]] = {
    "no table": ("DROP TABLE events", "store.table_missing", ["events", "eventpub migrate"]),
    "no column": (
        "ALTER TABLE events DROP COLUMN payload",
        "store.column_missing",
        ["'payload'", "[store.columns]"],
    ),
    "a column of another type": (
        "ALTER TABLE events MODIFY version VARCHAR(20) NOT NULL",
        "store.column_type",
        ["'version'", "varchar(20)"],
    ),
    "no index by time": (
        "ALTER TABLE events DROP INDEX create_time",
        "store.index_missing",
        ["ALTER TABLE `events` ADD INDEX (`create_time`)"],
    ),
    "no index by key": (
        "ALTER TABLE events DROP INDEX aggregate_id",
        "store.index_missing",
        ["ALTER TABLE `events` ADD UNIQUE INDEX (`aggregate_id`, `version`)"],
    ),
}


@pytest.mark.parametrize("fault", DATABASE_FAULTS)
def test_d4_what_the_event_table_lacks_is_named_with_what_mends_it(
    publisher: Publisher, database: FreshDatabase, fault: str
) -> None:
    statement, code, words = DATABASE_FAULTS[fault]
    database.execute(statement)
    assert_both_say(ask(publisher), code, *words)


def test_d4_the_statement_that_is_named_mends_it(
    publisher: Publisher, database: FreshDatabase
) -> None:
    for index in ("create_time", "aggregate_id"):
        database.execute(f"ALTER TABLE events DROP INDEX {index}")
    database.execute(ask(publisher).run["suggestion"])  # one statement, for both
    assert publisher.command("doctor", "--json").returncode == 0


@pytest.fixture
def account(database: FreshDatabase) -> Iterator[Callable[..., str]]:
    """Makes an account with these privileges on the event table; its URL."""
    name = f"d{database.name[-10:]}"
    database.execute(f"CREATE USER {name}@'%' IDENTIFIED BY '{PASSWORD}'")

    def make(*grants: str) -> str:
        for grant in grants:
            database.execute(f"GRANT {grant} TO {name}@'%'")
        return database.url_of(name, PASSWORD)

    yield make
    database.execute(f"DROP USER {name}@'%'")


def test_d4_an_account_without_select_is_named(
    publisher: Publisher, database: FreshDatabase, account: Callable[..., str]
) -> None:
    database.execute("CREATE TABLE other (id INT)")
    publisher.settings["store"]["url"] = account(f"SELECT ON {database.name}.other")
    assert_both_say(ask(publisher), "store.privilege_missing", "SELECT", "events")


def test_d4_select_on_the_event_table_is_enough(
    publisher: Publisher, database: FreshDatabase, account: Callable[..., str]
) -> None:
    publisher.settings["store"]["url"] = account(f"SELECT ON {database.name}.events")
    done = publisher.command("doctor", "--json")
    assert done.returncode == 0, done.stdout
    assert PASSWORD not in done.stdout + done.stderr


def test_d4_a_missing_generated_column_is_told_and_migrate_adds_it(
    publisher: Publisher, database: FreshDatabase
) -> None:
    """It is not needed, so that nothing is wrong; the statement is there for who wants it."""
    done = publisher.command("doctor", "--json")
    assert done.returncode == 0, done.stdout
    checks = {c["name"]: c for c in json.loads(done.stdout)["result"]["checks"]}
    said = checks["event store: slice column"]
    assert "ALTER TABLE `events` ADD COLUMN `slice`" in said["suggestion"]
    database.execute(said["suggestion"].partition("or: ")[2])
    done = publisher.command("doctor", "--json")
    checks = {c["name"]: c for c in json.loads(done.stdout)["result"]["checks"]}
    assert checks["event store: slice column"]["suggestion"] is None


def new_topics(address: str, **partitions: int) -> None:
    """Topics made by somebody else."""
    admin = AdminClient({"bootstrap.servers": address})
    made = admin.create_topics([NewTopic(name, n, 1) for name, n in partitions.items()])
    for future in made.values():
        future.result(20)


def test_d5_topics_that_are_missing_and_may_not_be_created(publisher: Publisher) -> None:
    publisher.settings["sink"]["create_topics"] = False
    topic = publisher.topic.name
    for missing in (topic, f"{topic}.gaps", f"{topic}.dead"):
        said = ask(publisher)
        assert_both_say(said, "sink.topic_missing", missing, "kafka-topics.sh", "--create")
        new_topics(publisher.topic.bootstrap_servers, **{missing: 4})
    assert publisher.command("doctor", "--json").returncode == 0


@pytest.mark.engines("here", why="the engine threads has no such topic")
def test_d5_the_topic_of_batches_is_missing_and_may_not_be_created(
    new_publisher: NewPublisher, database: FreshDatabase
) -> None:
    """It was created nevertheless."""
    create_table(database)
    publisher = new_publisher(database)
    publisher.settings["sink"]["create_topics"] = False
    topic, servers = publisher.topic.name, publisher.topic.bootstrap_servers
    new_topics(servers, **{topic: 4, f"{topic}.gaps": 4, f"{topic}.dead": 4})
    said = ask(publisher)
    assert_both_say(said, "sink.topic_missing", f"{topic}.batches", "cleanup.policy=compact")
    new_topics(servers, **{f"{topic}.batches": 2})
    assert publisher.command("doctor", "--json").returncode == 0
    publisher.publish_everything()


def test_d5_a_side_topic_with_another_number_of_partitions(publisher: Publisher) -> None:
    topic = publisher.topic.name
    new_topics(publisher.topic.bootstrap_servers, **{topic: 4, f"{topic}.gaps": 2})
    said = ask(publisher)
    assert_both_say(said, "sink.partition_count", f"{topic}.gaps", "--alter", "--partitions 4")


def test_d5_more_shards_than_partitions(publisher: Publisher) -> None:
    new_topics(publisher.topic.bootstrap_servers, **{publisher.topic.name: 4})
    publisher.settings["sink"]["partitions"] = 16
    publisher.settings["run"]["shards"] = 8
    assert_both_say(ask(publisher), "sink.partition_count", "set run.shards to at most 4")


def login(name: str, password: str, **more: str) -> dict[str, str]:
    """The client's properties for a broker that asks for a password."""
    return {
        "security.protocol": "sasl_plaintext",
        "sasl.mechanism": "PLAIN",
        "sasl.username": name,
        "sasl.password": password,
        **more,
    }


def through(publisher: Publisher, address: str, properties: dict[str, str]) -> None:
    """From now on to another address, in another way."""
    publisher.settings["sink"] |= {"bootstrap_servers": address, "properties": properties}


WRONG_WAYS = {
    "a wrong password": login("owner", PASSWORD),
    "an unknown mechanism": login("owner", PASSWORD, **{"sasl.mechanism": "SCRAM-SHA-256"}),
    "TLS to a port that has none": {"security.protocol": "ssl"},
}


@pytest.mark.parametrize("way", WRONG_WAYS)
def test_d5_wrong_tls_or_sasl(
    publisher: Publisher, guarded_broker: sinks.OwnBroker, way: str
) -> None:
    through(publisher, guarded_broker.guarded, WRONG_WAYS[way])
    said = ask(publisher, doctor_status=3)
    assert_both_say(said, "sink.auth_failed", "security.protocol", "sasl.")


def test_d5_no_login_at_all_to_a_broker_that_asks_for_one(
    publisher: Publisher, guarded_broker: sinks.OwnBroker
) -> None:
    """It closes the connection without a word, so only where we tried to reach can be said."""
    through(publisher, guarded_broker.guarded, {})
    said = ask(publisher, doctor_status=3)
    assert said.run["code"] in {"sink.unreachable", "sink.auth_failed"}
    assert guarded_broker.guarded in str(said.run)


def test_d5_an_account_that_may_not_use_transactions(
    publisher: Publisher,
    database: FreshDatabase,
    guarded_broker: sinks.OwnBroker,
) -> None:
    with transaction(database) as cursor:
        insert(cursor, "a", 1)
        cursor.connection.commit()
    topic = publisher.topic.name
    new_topics(guarded_broker.open, **{topic: 4, f"{topic}.gaps": 4, f"{topic}.dead": 4})
    admin = AdminClient({"bootstrap.servers": guarded_broker.open})
    kind = (ResourceType.TOPIC, topic, ResourcePatternType.PREFIXED, "User:poor", "*")
    for future in admin.create_acls(
        [
            AclBinding(*kind, operation, AclPermissionType.ALLOW)
            for operation in (AclOperation.DESCRIBE, AclOperation.READ, AclOperation.WRITE)
        ]
    ).values():
        future.result(10)
    through(publisher, guarded_broker.guarded, login("poor", sinks.PASSWORDS["poor"]))
    said = ask(publisher, doctor_status=3)
    assert_both_say(said, "sink.not_authorized", "WRITE and DESCRIBE on the transactional ids")


BAD_KEYS: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "unknown": ({"read": {"dealy": "1s"}}, "config.unknown_key", ["read.dealy", "read.delay"]),
    "a wrong unit": ({"read": {"delay": "1 parsec"}}, "config.", ["read.delay", "parsec"]),
    "contradictory": (
        {"store": {"password": PASSWORD, "password_file": "word.txt"}},
        "config.contradiction",
        ["store.password"],
    ),
}


@pytest.mark.parametrize("kind", BAD_KEYS)
def test_d6_a_key_that_is_unknown_wrong_or_contradictory_is_named_and_refused(
    publisher: Publisher, kind: str
) -> None:
    settings, code, words = BAD_KEYS[kind]
    for section, keys in settings.items():
        publisher.settings[section] |= keys
    for command in (["run"], ["doctor"], ["config", "check"]):
        done = publisher.command(*command, "--json")
        assert done.returncode == 2, done.stdout
        error = json.loads(done.stdout)["error"]
        assert error["code"].startswith(code)
        assert all(word in str(error) for word in words), error
        assert PASSWORD not in done.stdout + done.stderr


def test_d6_d7_hostile_names_are_quoted_and_no_secret_is_written_anywhere(
    publisher: Publisher, database: FreshDatabase, account: Callable[..., str]
) -> None:
    """The table and a column are named by SQL; the publisher runs with a password for all to see.

    What it prints, logs and keeps is searched for the password.
    """
    table, column = "ev`; DROP TABLE victim; --", "pay\"load' OR 1=1"
    quoted = "`" + table.replace("`", "``") + "`"
    database.execute("CREATE TABLE victim (id INT)")
    create_table(database, "template")
    database.execute(f"CREATE TABLE {quoted} LIKE template")
    database.execute(f"ALTER TABLE {quoted} RENAME COLUMN payload TO `{column}`")
    database.execute(
        f"INSERT INTO {quoted} (aggregate_id, version, event_type) VALUES"  # noqa: S608
        " ('a', 2, 't'), ('a', 1, 't'), ('x''; DROP TABLE victim; --', 1, 't')"
    )
    url = account(f"SELECT ON {database.name}.{quoted}")
    publisher.settings["store"] |= {"url": url, "table": table, "columns": {"payload": column}}
    publisher.settings["sink"]["properties"] = {"sasl.password": PASSWORD}
    publisher.publish_everything()
    differences = compare(database, publisher.topic, quoted)
    assert not differences, differences
    assert database.execute("SHOW TABLES LIKE 'victim'")
    config = publisher.config
    for file in publisher.folder.rglob("*"):
        if file.is_file() and file != config:
            assert PASSWORD.encode() not in file.read_bytes(), file
