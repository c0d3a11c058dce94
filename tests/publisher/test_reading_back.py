"""Findings A25 and A15: a topic that is read back into a new index, and takes long."""

from __future__ import annotations

import json
import os
import shutil
import time
from typing import Any

import pytest

from eventpub import settings
from eventpub.admission.model import Shard
from eventpub.local.servers import Kafka
from eventpub.ops.asking import ask_running
from eventpub.sink import fold
from eventpub.sink.base import Content
from eventpub.sink.client import Clients
from eventpub.sink.layout import check_topics
from eventpub.sink.shard import ShardSink
from eventpub.state import StateDir
from tests.conftest import FreshDatabase
from tests.publisher.conftest import NewPublisher
from tests.publisher.harness import Publisher, create_table, insert, transaction
from tests.publisher.test_bounded import throttle
from tests.publisher.test_power_loss import AGGREGATES, commit, started
from tests.sink.helpers import events

OLD = 40_000
SLOW, FAST = 150_000, 1 << 30
FORMER_KEYS = (
    *("position", "low", "holds", "ends", "shards"),
    "partitions",
)
"""Of progress.json before it knew of topics' ids and of partitions that were added."""


def publish_before(publisher: Publisher) -> None:
    """Events that are on the topic and not in the table."""
    config = settings.load(publisher.config, {}, {}).config
    check_topics(Clients(config.sink))
    with ShardSink(Clients(config.sink), config.app.id, Shard(0, 1, 4)) as sink:
        for first in range(0, OLD, 10_000):
            rows = [(f"old-{n}", 1) for n in range(first, first + 10_000)]
            sink.publish(Content(events(rows, payload=[os.urandom(500) for _ in rows])))


def test_a25_a_stop_does_not_wait_until_the_topic_is_read_back(
    database: FreshDatabase, new_publisher: NewPublisher, kafka_server: Kafka, topic_name: str
) -> None:
    """20 MB at 150 kB/s; SIGTERM waited for all of it, and nothing said how much was left.

    Meanwhile it is alive, and an orchestrator leaves it alone.
    """
    create_table(database)
    publisher = new_publisher(database, sink={"properties": {"client.id": topic_name}})
    publish_before(publisher)
    throttle(kafka_server, topic_name, "consumer_byte_rate", SLOW)
    with transaction(database) as cursor:
        insert(cursor, "new", 1)
        cursor.connection.commit()
    publisher.start()
    publisher.until_said("reading the topic back into the index")
    for _ in range(5):
        status = ask_running(StateDir(publisher.state), "status")
        assert status is not None
        assert (status["is_alive"], status["state"]) == (True, "starting")
        time.sleep(1.0)
    began = time.monotonic()
    assert publisher.stop(timeout=60) == 143, "it has waited for the rest, which takes 130 s"
    print(f"stopped within {time.monotonic() - began:.1f} s")
    assert publisher.topic.versions("new") == []
    throttle(kafka_server, topic_name, "consumer_byte_rate", FAST)
    publisher.start()
    publisher.until_published("new", [1])
    publisher.kill()
    assert len(publisher.topic.read()) == OLD + 1


def test_a15_one_lost_index_of_a_former_version_s_state_is_enough_to_read_all_partitions(
    database: FreshDatabase, new_publisher: NewPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing in that state said whether partitions had ever been added; the topic itself does."""
    everywhere: list[bool] = []
    make = fold.Fold.__init__

    def made(self: Any, scope: Any, *arguments: Any, **options: Any) -> None:
        everywhere.append(scope.everywhere)
        make(self, scope, *arguments, **options)

    monkeypatch.setattr(fold.Fold, "__init__", made)
    create_table(database)
    publisher = new_publisher(database)
    progress = publisher.state / "progress.json"

    def published(version: int) -> set[bool]:
        """Start and publish; how partitions were read back."""
        everywhere.clear()
        commit(database, version)
        with started(publisher) as until:
            until(version)
        return set(everywhere)

    published(1)
    kept = json.loads(progress.read_text())
    progress.write_text(json.dumps({key: kept[key] for key in FORMER_KEYS}))
    assert published(2) == {False}
    assert json.loads(progress.read_text())["placed"] is False
    shutil.rmtree(publisher.state / "index" / "2-shards" / "1")
    assert published(3) == {False, True}
    assert json.loads(progress.read_text())["placed"] is True
    shutil.rmtree(publisher.state / "index")
    assert published(4) == {False}
    records = [(r.key, r.version) for r in publisher.topic.read()]
    assert len(records) == len(set(records)) == 4 * AGGREGATES
