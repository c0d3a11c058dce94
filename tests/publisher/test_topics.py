"""Scenario F9, and what the broker refuses: by the installed command.

Each test stops its publisher by `kill -9`: what is tested happens before Spark has started.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    ConfigResource,
    NewPartitions,
    NewTopic,
)

from tests.conftest import FreshDatabase
from tests.publisher.conftest import FAST, NewPublisher
from tests.publisher.harness import (
    Publisher,
    Topic,
    create_table,
    delete_as_proposed,
    differences,
    eventually,
    insert,
    transaction,
)
from tests.servers.kafka import kafka

AGGREGATES = [f"a-{number}" for number in range(40)]
QUIET = [f"q-{number}" for number in range(20)]


def commit(database: FreshDatabase, version: int, aggregates: Iterable[str] = AGGREGATES) -> None:
    """One more version of each."""
    with transaction(database) as cursor:
        for aggregate_id in aggregates:
            insert(cursor, aggregate_id, version)
        cursor.connection.commit()


def admin(publisher: Publisher) -> AdminClient:
    """Of its broker; kept, since what a client was asked ends with it."""
    return _admin_of(publisher.topic.bootstrap_servers)


@cache
def _admin_of(servers: str) -> AdminClient:
    return AdminClient({"bootstrap.servers": servers, "log_level": 0})  # outlives some brokers


def results(futures: dict[Any, Any]) -> None:
    """Wait for what was asked for."""
    for future in futures.values():
        future.result(15)


def side(publisher: Publisher, name: str) -> Topic:
    """One of the topics beside it."""
    return Topic(publisher.topic.bootstrap_servers, f"{publisher.topic.name}.{name}")


def published(publisher: Publisher, count: int) -> None:
    """Publish until so many records are visible, each once; then it is killed."""
    publisher.start()
    try:
        eventually(lambda: is_there(publisher, count), every=0.3)
    except AssertionError as error:
        raise AssertionError(f"{error}: {len(publisher.topic.read())} of {count}") from error
    finally:
        if publisher.settings["run"]["engine"] == "spark":
            time.sleep(2)  # until it is written down where the topics end
        publisher.kill()
    assert len(publisher.topic.read()) == count, publisher.words()


def is_there(publisher: Publisher, count: int) -> bool:
    """Whether so many records are visible; fails if it has ended."""
    assert publisher.process is not None
    assert publisher.process.poll() is None, publisher.words()
    return len(publisher.topic.read()) >= count


def refusal(publisher: Publisher, code: str) -> dict[str, Any]:
    """What `doctor` and `run` both say."""
    checks = json.loads(publisher.command("doctor", "--json").stdout)["result"]["checks"]
    assert code in {check["code"] for check in checks if check["status"] == "wrong"}, checks
    done = publisher.command("run", "--json")
    assert done.returncode == 3, done.stderr
    error: dict[str, Any] = json.loads(done.stdout)["error"]
    assert error["code"] == code, error
    return error


def remake(publisher: Publisher, partitions: int = 4) -> None:
    """Delete the topic, and make it again."""
    client, name = admin(publisher), publisher.topic.name
    results(client.delete_topics([name]))
    eventually(lambda: name not in client.list_topics(timeout=5).topics, 20)
    results(client.create_topics([NewTopic(name, partitions, 1)]))


def test_a4_a23_what_the_broker_refuses_stops_nobody(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create_table(database, time="DATETIME(6)")
    publisher = new_publisher(database, sink={"partitions": 1}, run={"shards": 1})
    commit(database, 1)
    published(publisher, 40)
    limit = ConfigResource("topic", publisher.topic.name)
    for resource in (limit, ConfigResource("topic", f"{publisher.topic.name}.dead")):
        resource.set_config("message.timestamp.after.max.ms", "3600000")
        results(admin(publisher).alter_configs([resource]))
    future = datetime.now(UTC).replace(tzinfo=None) + timedelta(hours=14)
    trace = json.dumps({"trace": "x" * 1_200_000})
    with transaction(database) as cursor:
        insert(cursor, "a-1", 2, create_time=future)  # published by the backtrack of the next
        insert(cursor, "a-1", 3)
        insert(cursor, "a-2", 2, b"p" * 3_000_000, create_time=future)  # and its dead letter
        insert(cursor, "a-2", 3)
        insert(cursor, "a-3", 2, metadata=trace)
        insert(cursor, "a-3", 3)
        insert(cursor, "a-4", -1, b"p" * 1_300_000)
        cursor.connection.commit()
    commit(database, 2, AGGREGATES[5:])
    published(publisher, 40 + 2 + 1 + 1 + 35)
    found = {(r.key, r.version): r for r in publisher.topic.read()}
    early = found["a-1", 2]
    assert early.timestamp < time.time() * 1000
    assert early.headers["ce_time"].decode()[:19] == future.isoformat()[:19]
    letters = {(r.key, r.version): r.headers for r in side(publisher, "dead").read()}
    assert letters.keys() == {("a-2", 2), ("a-3", 2), ("a-4", -1)}
    assert letters["a-3", 2]["eventpub_metadata_bytes"] == str(len(trace) + 0).encode()
    assert letters["a-4", -1]["eventpub_payload_bytes"] == b"1300000"


@pytest.mark.engines(
    "threads",
    why="Spark publishes what the last recount.horizon has to a topic that was accepted again",
)
def test_a6_a_topic_that_was_deleted_and_made_again(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """Each way on that the message names is gone; nothing is published twice, nothing is lost."""
    create_table(database)
    publisher = new_publisher(database)
    commit(database, 1)
    published(publisher, 40)

    remake(publisher)
    error = refusal(publisher, "sink.topic_recreated")
    assert "remove app.state_dir" in error["suggestion"]
    shutil.rmtree(publisher.state)
    published(publisher, 40)

    remake(publisher)
    commit(database, 2)
    error = refusal(publisher, "sink.topic_recreated")
    accepted = error["suggestion"].rpartition('sink.accept_topic_id = "')[2].rstrip('"')
    publisher.settings["sink"]["accept_topic_id"] = accepted
    published(publisher, 40)
    assert {r.version for r in publisher.topic.read()} == {2}

    client = admin(publisher)
    results(client.delete_topics([publisher.topic.name]))
    eventually(lambda: publisher.topic.name not in client.list_topics(timeout=5).topics, 20)
    partitions = client.list_topics(timeout=5).topics[f"{publisher.topic.name}.gaps"].partitions
    publisher.settings["sink"]["partitions"] = 3  # meanwhile; the topic had as many as those beside
    error = refusal(publisher, "sink.topic_missing")
    assert "no longer exists" in error["message"]
    assert f"--partitions {len(partitions)} " in error["suggestion"]
    assert publisher.topic.name not in client.list_topics(timeout=5).topics


@pytest.mark.engines("threads", "here")
def test_a6_topics_beside_it_that_were_deleted_are_made_again(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create_table(database)
    publisher = new_publisher(database)
    commit(database, 1)
    commit(database, 3, ["gap"])
    with transaction(database) as cursor:
        insert(cursor, "dead", 1, b"p" * 3_000_000)
        cursor.connection.commit()
    published(publisher, 41)
    names = [f"{publisher.topic.name}.{name}" for name in ("gaps", "dead")]
    client = admin(publisher)
    results(client.delete_topics(names))
    eventually(lambda: not set(names) & set(client.list_topics(timeout=5).topics), 20)
    commit(database, 2)
    published(publisher, 81)
    assert "was deleted and created again" in publisher.log.read_text()
    assert side(publisher, "dead").read() == []


def test_a6_a_topic_that_has_lost_its_last_records(
    database: FreshDatabase, tmp_path: Path, topic_name: str
) -> None:
    create_table(database)
    with kafka(tmp_path / "kafka") as server:
        settings = {**FAST, "sink": {"partitions": 2}}
        with Publisher(
            tmp_path / "p", database.url, topic_name, server.bootstrap_servers, settings
        ) as publisher:
            commit(database, 1)
            published(publisher, 40)
            lost = {r.key for r in publisher.topic.read() if r.partition == 1}
            commit(database, 3, lost)  # a skip, without which the topic is left
            published(publisher, 40 + len(lost))
            server.kill()
            shutil.rmtree(server.directory / "data" / f"{topic_name}-1")
            server.start()
            assert len(eventually(publisher.topic.read, 30)) == 40 - len(lost)
            error = refusal(publisher, "sink.topic_recreated")
            assert "are lost" in error["message"]
            delete_as_proposed(publisher, error)
            shutil.rmtree(publisher.state)
            published(publisher, 40 + len(lost))
            commit(database, 2, {*AGGREGATES} - lost)
            published(publisher, 80)


@pytest.mark.engines("threads", "here")
def test_partitions_that_are_added_while_it_runs_count_from_the_next_start_on(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """Spark's sink used them at once, and stopped at the next dead letter: others had fewer."""
    create_table(database)
    publisher = new_publisher(database, run={"shards": 2})
    publisher.start()
    commit(database, 1)
    publisher.until_published(AGGREGATES[-1], [1])
    results(admin(publisher).create_partitions([NewPartitions(publisher.topic.name, 7)]))
    time.sleep(2)  # by then a client knows of them
    commit(database, 2)
    commit(database, 1, QUIET)
    commit(database, -1, ["dead"])
    publisher.until_said("row refused")
    for aggregate_id in AGGREGATES:
        publisher.until_published(aggregate_id, [1, 2])
    for aggregate_id in QUIET:
        publisher.until_published(aggregate_id, [1])
    assert {record.partition for record in publisher.topic.read()} <= {0, 1, 2, 3}
    assert publisher.stop() == 143


def test_a15_partitions_are_added(database: FreshDatabase, new_publisher: NewPublisher) -> None:
    """4 partitions and 2 shards, 6, 8, and 3 shards then: many belong to another shard each time.

    Some have no event since, so that only their former partitions say what was published.
    """
    create_table(database)
    publisher = new_publisher(database)
    commit(database, 1, QUIET)
    commit(database, 1)
    commit(database, 2)
    published(publisher, 80 + len(QUIET))
    names = [publisher.topic.name, *(f"{publisher.topic.name}.{n}" for n in ("gaps", "dead"))]
    results(admin(publisher).create_partitions([NewPartitions(name, 6) for name in names]))
    commit(database, 3)
    published(publisher, 120 + len(QUIET))
    assert "number of partitions has changed" in publisher.log.read_text()
    commit(database, 4)
    published(publisher, 160 + len(QUIET))
    assert not [*publisher.state.glob("index/former-*")], "else the next ones would be read with it"
    publisher.lose_index()
    commit(database, 5)
    published(publisher, 200 + len(QUIET))
    verified(publisher, 0)
    results(admin(publisher).create_partitions([NewPartitions(name, 8) for name in names]))
    commit(database, 6)
    published(publisher, 240 + len(QUIET))
    verified(publisher, 0)
    shutil.rmtree(publisher.state)
    publisher.settings["run"]["shards"] = 3
    commit(database, 7)
    published(publisher, 280 + len(QUIET))
    found = verified(publisher, 1)
    assert found["altered"]
    assert "if partitions were added" in found["notes"][0]
    assert "--from" in found["notes"][0]
    stored = set(database.execute("SELECT aggregate_id, version FROM events"))
    records = publisher.topic.read()
    records.sort(key=lambda record: (record.timestamp, record.version))
    of_topic = differences(stored, records, 8)
    assert of_topic.counts() == (0, 0, 0)
    assert {version for _, version in of_topic.wrong_partition} == {1, 2, 3, 4, 5}, "of before"


def verified(publisher: Publisher, status: int, *arguments: str) -> dict[str, Any]:
    publisher.publish_everything()
    done = publisher.command("verify", *arguments, "--json")
    assert done.returncode == status, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)["result"]
    return found


def write_as_another(publisher: Publisher, version: int = 1) -> None:
    """Events of a publisher with another application id."""
    producer = Producer({"bootstrap.servers": publisher.topic.bootstrap_servers})
    for key in AGGREGATES:
        headers: dict[str, Any] = {
            "ce_specversion": "1.0",
            "ce_id": f"{key}/{version}",
            "ce_source": "billing",
            "ce_type": "Paid",
            "ce_time": "2026-01-01T00:00:00.000000Z",
            "ce_subject": key,
            "ce_sequence": str(version),
        }
        producer.produce(publisher.topic.name, b"{}", key, headers=headers)
    assert producer.flush(10) == 0


@pytest.mark.engines("threads", "here")
def test_a22_two_application_ids_on_one_topic(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create_table(database)
    publisher = new_publisher(database)
    commit(database, 1)
    publisher.start()
    eventually(lambda: is_there(publisher, 40))
    time.sleep(1)
    write_as_another(publisher, 2)
    assert publisher.finish(60) == 3
    assert "sink.other_publisher" in publisher.words()

    error = refusal(publisher, "sink.other_publisher")
    assert "'billing'" in error["message"]


def test_a16_a_renamed_application_is_refused_until_it_has_its_name_again(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create_table(database)
    publisher = new_publisher(database)
    commit(database, 1)
    published(publisher, 40)
    former = publisher.settings["app"]["id"]
    publisher.settings["app"]["id"] = "renamed"
    commit(database, 2)
    assert former in refusal(publisher, "sink.other_publisher")["message"]
    publisher.settings["app"]["id"] = former
    published(publisher, 80)
    publisher.start("--available-now")
    assert publisher.finish() == 0, publisher.words()
    verified = publisher.command("verify")
    assert verified.returncode == 0, verified.stdout
