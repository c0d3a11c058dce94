"""Topics that would not keep what is about to be published, or whose brokers would lose it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
)

from eventpub.index.database import ROCKSDB
from eventpub.index.index import Index, summary
from eventpub.local.downloads import find_java
from eventpub.local.servers import Kafka
from tests.conftest import FreshDatabase
from tests.publisher.conftest import NewPublisher
from tests.publisher.harness import Publisher, commit, create_table, eventually
from tests.servers import KafkaCluster, kafka_cluster

pytestmark = pytest.mark.parametrize("database", ["mysql"], indirect=True)
A_WEEK = "604800000"


def make_topics(publisher: Publisher, copies: int, **settings: str) -> None:
    """The topic, its side topics, and their settings."""
    admin = AdminClient({"bootstrap.servers": publisher.topic.bootstrap_servers})
    config = {name.replace("_", "."): value for name, value in settings.items()}
    name = publisher.topic.name
    for side in ("", ".gaps", ".dead"):
        new = NewTopic(name + side, 4, copies, config={"retention.ms": "-1"} | config)
        admin.create_topics([new])[new.topic].result(30)


def do(command: str, broker: Kafka, folder: Path) -> None:
    """What was printed, with Kafka's own program in place of its script."""
    script = folder / "kafka-configs.sh"
    java, jars = find_java(), broker._jars
    script.write_text(f'#!/bin/sh\nexec {java} -cp "{jars}/*" kafka.admin.ConfigCommand "$@"\n')
    script.chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    command = command.partition("  (")[0]
    subprocess.run(command, shell=True, check=True, env=os.environ | {"PATH": path})


def doctor(publisher: Publisher, name: str) -> list[dict[str, Any]]:
    """Its checks of this name."""
    answer = json.loads(publisher.command("doctor", "--json").stdout)
    return [check for check in answer["result"]["checks"] if check["name"] == name]


def go_back(publisher: Publisher, by: int) -> None:
    """Make its position so many µs older, where it is written down and in the shards' indexes."""
    progress = json.loads((publisher.state / "progress.json").read_text())
    progress["position"] -= by
    progress["low"] = min(progress["low"], progress["position"])
    (publisher.state / "progress.json").write_text(json.dumps(progress))
    [shards] = publisher.state.glob("index/*-shards")
    for folder in shards.iterdir():
        known = summary(folder, ROCKSDB)
        assert known is not None
        with Index(folder, known.identity) as index:
            index.go_back(by)


@pytest.mark.engines("threads", why="with Spark the position is that of the checkpoint")
@pytest.mark.parametrize("setting", ["retention_ms", "message_timestamp_before_max_ms"])
def test_a_backlog_that_would_not_stay_on_the_topic_is_not_published(
    database: FreshDatabase,
    new_publisher: NewPublisher,
    kafka_server: Kafka,
    tmp_path: Path,
    setting: str,
) -> None:
    """Kafka removes a segment whose records are older than retention.ms as soon as it is closed."""
    create_table(database)
    publisher = new_publisher(database)
    make_topics(publisher, 1, **{setting: A_WEEK})
    commit(database, "new", 1, 2)
    publisher.publish_everything()
    assert [c["status"] for c in doctor(publisher, "backlog")] == ["ok"]

    # as after an outage of a month; the position was a month ago, too
    month = 30 * 86_400_000_000
    go_back(publisher, month)
    database.execute(
        "INSERT INTO events (aggregate_id, version, event_type, payload, create_time)"
        " VALUES ('old', 1, 'happened', '{}', NOW(6) - INTERVAL 29 DAY)"
    )
    [found] = doctor(publisher, "backlog")
    assert (found["status"], found["code"]) == ("wrong", "sink.backlog_too_old")
    done = publisher.command("run", "--available-now", "--json")
    assert done.returncode not in {0, 1}, done.stdout
    error = json.loads(done.stdout)["error"]
    assert error["code"] == "sink.backlog_too_old"
    assert setting.replace("_", ".") in error["message"]
    assert len(publisher.topic.read()) == 2

    do(error["suggestion"], kafka_server, tmp_path)
    publisher.publish_everything()
    assert publisher.topic.versions("old") == [1]
    assert [c["status"] for c in doctor(publisher, "backlog")] == ["ok"]


def test_a_lost_state_of_a_topic_with_retention_is_no_backlog(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """What is older than the topic's records was published: nobody is asked to keep it for good."""
    create_table(database)
    publisher = new_publisher(database)
    make_topics(publisher, 1)
    database.execute(
        "INSERT INTO events (aggregate_id, version, event_type, payload, create_time)"
        " VALUES ('old', 1, 'happened', '{}', NOW(6) - INTERVAL 29 DAY)"
    )
    commit(database, "new", 1)
    publisher.publish_everything()
    publisher.state.rename(publisher.folder / "lost")
    admin = AdminClient({"bootstrap.servers": publisher.topic.bootstrap_servers})
    alter(admin, publisher.topic.name, "retention.ms", A_WEEK)
    publisher.publish_everything()
    assert publisher.topic.versions("old") == [1]


def alter(admin: Any, topic: str, name: str, value: str) -> None:
    """Set one setting of a topic."""
    entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource("topic", topic, incremental_configs=[entry])
    for done in admin.incremental_alter_configs([resource]).values():
        done.result(30)


def test_doctor_names_what_replication_lacks_and_how_to_fix_it(
    database: FreshDatabase, tmp_path: Path
) -> None:
    create_table(database)
    with kafka_cluster(tmp_path / "kafka") as cluster:
        servers = cluster.bootstrap_servers
        publisher = Publisher(tmp_path / "publisher", database.url, "orders", servers)
        bad = {"unclean_leader_election_enable": "true", "min_insync_replicas": "1"}
        make_topics(publisher, 3, **bad)
        found = doctor(publisher, "replication")
        assert [c["status"] for c in found] == ["warn", "warn"], found
        broker = _a_broker(cluster)
        for check in found:
            assert all(f"orders{side}" in check["message"] for side in ("", ".gaps", ".dead"))
            do(check["suggestion"], broker, tmp_path)
        # brokers learn of it one after the other
        eventually(lambda: [c["status"] for c in doctor(publisher, "replication")] == ["ok"])

        publisher.settings["sink"]["topic"] = publisher.topic.name = "single"
        make_topics(publisher, 1, min_insync_replicas="2")
        found = doctor(publisher, "replication")
        assert [c["status"] for c in found] == ["wrong", "warn"], found
        assert all("single.gaps" in check["message"] for check in found), found
        assert "kafka-reassign-partitions.sh" in found[1]["suggestion"]


def _a_broker(cluster: KafkaCluster) -> Kafka:
    return next(iter(cluster.brokers.values()))
