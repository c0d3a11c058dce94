"""The least rights on a broker with ACLs: all works with them, each that is missing is named."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

from tests.conftest import FreshDatabase
from tests.publisher.harness import Publisher, compare, insert
from tests.publisher.kafka_doors import Doors, doors
from tests.publisher.test_kafka_security import password, through
from tests.variants import variants

Right = tuple[Any, str, Any]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    """One for all tests of this file."""
    with doors(tmp_path_factory.mktemp("doors")) as made:
        yield made


def least(publisher: Publisher) -> dict[str, Right]:
    """What docs/how-to/kafka-logins.md says is needed where the topics are there."""
    topic, ids = publisher.topic.name, f"eventpub.{publisher.settings['app']['id']}."
    return {
        "Write": (ResourceType.TOPIC, topic, AclOperation.WRITE),
        "Read": (ResourceType.TOPIC, topic, AclOperation.READ),
        "transactional ids": (ResourceType.TRANSACTIONAL_ID, ids, AclOperation.WRITE),
    }


def allow(broker: Doors, *rights: Right, pattern: Any = ResourcePatternType.PREFIXED) -> None:
    """These and no others, by the prefix of a name, or by the names themselves."""
    admin = AdminClient({"bootstrap.servers": broker.open})
    anything: Any = None
    everything = AclBindingFilter(
        ResourceType.ANY, anything, ResourcePatternType.ANY, "User:poor", anything,
        AclOperation.ANY, AclPermissionType.ANY,
    )  # fmt: skip
    for done in admin.delete_acls([everything]).values():
        done.result(10)
    for kind, name, operation in rights:
        if kind is ResourceType.TRANSACTIONAL_ID:
            pattern = ResourcePatternType.PREFIXED
        binding = AclBinding(
            kind, name, pattern, "User:poor", "*", operation, AclPermissionType.ALLOW
        )
        for done in admin.create_acls([binding]).values():
            done.result(10)


def log_in(publisher: Publisher, broker: Doors, *, create: bool) -> None:
    """As an account that may nothing; its topics are made by somebody else, or are missing."""
    properties = password(broker, "PLAIN", **{"sasl.username": "poor"})
    through(publisher, broker.plain, properties=properties, create_topics=create)
    publisher.topic.bootstrap_servers = broker.open
    if not create:
        name = publisher.topic.name
        admin = AdminClient({"bootstrap.servers": broker.open})
        new = [NewTopic(f"{name}{side}", 4, 1) for side in ("", ".gaps", ".dead", ".batches")]
        for done in admin.create_topics(new).values():
            done.result(20)


@pytest.mark.parametrize("create", [False, True])
def test_everything_works_with_the_least_rights(
    publisher: Publisher, database: FreshDatabase, broker: Doors, create: bool
) -> None:
    log_in(publisher, broker, create=create)
    topic = publisher.topic.name
    more = [(ResourceType.TOPIC, topic, AclOperation.CREATE)] if create else []
    allow(broker, *least(publisher).values(), *more)
    done = publisher.command("doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    publisher.start()
    with database.connect() as connection, connection.cursor() as cursor:
        for version in (1, 2, 3):
            insert(cursor, "a", version)
    publisher.until_published("a", [1, 2, 3])
    publisher.stop()
    for command in (["verify"], ["gaps", "list"], ["doctor"]):
        done = publisher.command(*command, "--json")
        assert done.returncode == 0, done.stdout + done.stderr
    assert not compare(database, publisher.topic)


@pytest.mark.parametrize(
    "taken", variants(["Write", "Read", "transactional ids", "all of the topic", "Create"], 2)
)
def test_each_right_that_is_taken_away_is_named_by_doctor_and_run(
    publisher: Publisher, broker: Doors, taken: str
) -> None:
    log_in(publisher, broker, create=taken == "Create")
    kept = {
        name: right
        for name, right in least(publisher).items()
        if name != taken and (taken != "all of the topic" or name == "transactional ids")
    }
    allow(broker, *kept.values())
    words = ["Describe", "Read", "Write"] if taken == "all of the topic" else [taken]
    run = publisher.command("run", "--json")
    assert run.returncode == 3, run.stdout
    error = json.loads(run.stdout)["error"]
    assert error["code"] == "sink.not_authorized", error
    assert all(word in error["message"] + error["suggestion"] for word in words), error
    assert "kafka-acls.sh" in error["suggestion"]
    if taken == "Create":
        return  # what is missing is known when it is created; doctor creates nothing
    doctor = publisher.command("doctor", "--json")
    wrong = [c for c in json.loads(doctor.stdout)["result"]["checks"] if c["status"] == "wrong"]
    assert any(
        c["code"] == "sink.not_authorized"
        and all(word in c["message"] + c["suggestion"] for word in words)
        for c in wrong
    ), wrong


def test_rights_by_the_name_of_each_topic_are_enough_and_doctor_and_run_ask_for_the_same(
    publisher: Publisher, database: FreshDatabase, broker: Doors
) -> None:
    """`<topic>.late` is read back, too, whether or not anything is diverted to it now."""
    log_in(publisher, broker, create=False)
    name = publisher.topic.name
    rights = [
        (ResourceType.TOPIC, f"{name}{side}", operation)
        for side in ("", ".gaps", ".dead")
        for operation in (AclOperation.READ, AclOperation.WRITE)
    ]
    rights.append(least(publisher)["transactional ids"])
    allow(broker, *rights, pattern=ResourcePatternType.LITERAL)
    with database.connect() as connection, connection.cursor() as cursor:
        for version in (1, 2, 3):
            insert(cursor, "a", version)

    doctor = publisher.command("doctor", "--json")
    wrong = [c for c in json.loads(doctor.stdout)["result"]["checks"] if c["status"] == "wrong"]
    run = publisher.command("run", "--available-now", "--json")
    error = json.loads(run.stdout)["error"]
    assert [c["code"] for c in wrong] == [error["code"]] == ["sink.not_authorized"]
    for said in (wrong[0]["message"], error["message"]):
        assert f"lacks rights: Describe, Read on {name}.late" in said

    rights.append((ResourceType.TOPIC, f"{name}.late", AclOperation.READ))
    allow(broker, *rights, pattern=ResourcePatternType.LITERAL)
    doctor = publisher.command("doctor", "--json")
    assert doctor.returncode == 0, doctor.stdout
    publisher.publish_everything()
    assert publisher.topic.versions("a") == [1, 2, 3]
    done = publisher.command("verify", "--json")
    assert done.returncode == 0, done.stdout
