"""Scenario C1 at every step of publishing: killed midway, one after another, and in pairs.

The publisher stands at a named place (`eventpub/failpoint.py`), or waits for the answer to
its `EndTxn`, which a proxy keeps. What must be true at that moment is asserted before it is killed.
While it stands, rows are committed into its window and after it, so that what it does again has
more rows (C2). A consumer reads through all of it; at the end another one must have seen the same.

`EVENTPUB_TEST_PAIRS=all` takes all pairs of steps: about an hour.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition

from eventpub.index import Index
from tests.conftest import FreshDatabase
from tests.publisher.conftest import FAST
from tests.publisher.harness import (
    Publisher,
    Topic,
    compare,
    create_table,
    eventually,
    insert,
    transaction,
)
from tests.sink.conftest import OwnBroker, own_broker  # noqa: F401 (a fixture)
from tests.sink.helpers import high_watermarks, stable_offsets
from tests.sink.mock_cluster import END_TXN

PARTITIONS = 4
AGGREGATES = 12

IN_THE_SHARD = [
    "before_begin",
    "after_begin",
    "during_produce",
    "after_produce",
    "before_commit",
    "commit_sent",
    "commit_unanswered",
    "after_commit",
    "before_index",
    "after_index",
]
AROUND_IT = ["before_report", "before_remember", "after_remember"]
BY_THE_PROXY = {"commit_sent": "held", "commit_unanswered": "muted"}
ALL_PAIRS = os.environ.get("EVENTPUB_TEST_PAIRS") == "all"
NOT_VISIBLE = IN_THE_SHARD[:6]


def every_pair(steps: list[str]) -> list[str]:
    """A walk in which each step follows each step, itself too, once (Hierholzer)."""
    left = {step: list(steps) for step in steps}
    walk, stack = [], [steps[0]]
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            walk.append(stack.pop())
    return walk[::-1]


class Reader:
    """A `read_committed` consumer that reads on while everything around it is killed."""

    def __init__(self, bootstrap_servers: str, topic: str) -> None:
        self._servers, self._topic = bootstrap_servers, topic
        self.seen: dict[int, list[tuple[int, str, int]]] = {p: [] for p in range(PARTITIONS)}
        self._reached = dict.fromkeys(self.seen, 0)
        self._failure: KafkaError | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        consumer = Consumer(
            {
                "bootstrap.servers": self._servers,
                "group.id": "through-it-all",
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "enable.auto.commit": False,
            }
        )
        consumer.assign([TopicPartition(self._topic, p, 0) for p in self.seen])
        while not self._done.is_set():
            message: Any
            for message in consumer.consume(1000, 0.05):
                error, partition = message.error(), message.partition()
                if error is None:
                    version = int(dict(message.headers())["ce_sequence"])
                    row = (message.offset(), message.key().decode(), version)
                    self.seen[partition].append(row)
                    self._reached[partition] = message.offset() + 1
                elif error.code() == KafkaError._PARTITION_EOF:
                    self._reached[partition] = message.offset()
                else:
                    self._failure = error
        consumer.close()

    def identities(self) -> set[tuple[str, int]]:
        """What is visible now."""
        stable = stable_offsets(self._servers, self._topic)
        eventually(lambda: all(self._reached[p] >= stable[p] for p in stable), every=0.02)
        assert self._failure is None, self._failure
        return {(key, version) for rows in self.seen.values() for _, key, version in rows}

    def close(self) -> None:
        """Ends."""
        self._done.set()
        self._thread.join(30)


class World:
    """One publisher, its store and its topic."""

    def __init__(
        self, database: FreshDatabase, broker: OwnBroker, topic: str, folder: Path
    ) -> None:
        self.database, self.broker, self.topic = database, broker, topic
        self.folder = folder
        create_table(database)
        settings = {**FAST, "run": {"shards": 1}, "sink": {"partitions": PARTITIONS}}
        self.publisher = Publisher(
            folder / "publisher", database.url, topic, broker.proxied, settings
        )
        self.version = 0
        self.visible_before: set[tuple[str, int]] = set()
        self.step_before = ""
        self.commit()
        self.publisher.publish_everything()
        self.commit()
        self.reader = Reader(broker.open, topic)

    def commit(self) -> None:
        """One more version of each aggregate as old as the newest one, and one of now.

        Whatever window shows the newest one has more rows the next time that it is read.
        """
        with transaction(self.database) as cursor:
            cursor.execute("SET time_zone = '+00:00'")
            cursor.execute("SELECT COALESCE(MAX(create_time), NOW(6)), NOW(6) FROM events")
            # one time for all of a version, so that no window ends among them
            for at in cursor.fetchone():
                self.version += 1
                for number in range(AGGREGATES):
                    insert(cursor, f"a-{number}", self.version, create_time=at)
            cursor.connection.commit()

    def remembered(self) -> int:
        """The position that is written down, µs."""
        state = json.loads((self.publisher.state / "progress.json").read_text())
        return int(state["position"])

    def has_published(self) -> bool:
        """Whether all that is stored is visible."""
        return self.stored() == self.reader.identities()

    def stored(self) -> set[tuple[str, int]]:
        """The events in the store."""
        rows = self.database.execute("SELECT aggregate_id, version FROM events")
        return {(str(a), int(v)) for a, v in rows}

    def upto_each_version(self) -> list[set[tuple[str, int]]]:
        """What is stored up to each version, since a window may end behind any."""
        stored = self.stored()
        return [{(a, v) for a, v in stored if v <= last} for last in range(1, self.version + 1)]

    def open_records(self) -> int:
        """Records of transactions that are not ended."""
        stable = stable_offsets(self.broker.open, self.topic)
        high = high_watermarks(self.broker.open, self.topic)
        return sum(high[p] - stable[p] for p in high)

    # -- kill ------------------------------------------------------------------------------------

    def arm(self, step: str) -> None:
        """The next `EndTxn` is kept, where that is the step."""
        if step in BY_THE_PROXY:
            self.broker.proxy.strike_next(END_TXN, BY_THE_PROXY[step])  # type: ignore[arg-type]

    def standing(self, step: str, marker: Path) -> psutil.Process:
        """Waits until a process stands at the step, and proves it; that process."""

        def reached() -> bool:
            process = self.publisher.process
            assert process is not None
            assert process.poll() is None, self.publisher.words()
            return self.broker.proxy.has_struck if step in BY_THE_PROXY else marker.exists()

        eventually(reached, every=0.02)
        self.prove(step)
        if step not in BY_THE_PROXY:
            return psutil.Process(int(marker.read_text()))
        marker.touch()
        port = self.broker.proxy.client_port
        (standing,) = (
            worker
            for worker in self.publisher.family()
            if any(c.laddr.port == port for c in worker.net_connections())
        )
        return standing

    def prove(self, step: str) -> None:
        """What is true at a step, and neither before it nor after it."""
        if step in {"before_remember", "after_remember"}:
            return  # of the topic it says nothing
        # Asked until it holds: a commit is answered before the transaction's markers are written,
        # and the reader may be a moment behind.
        try:
            eventually(lambda: self.shows(step), 10)
        except AssertionError as error:
            visible, started = self.reader.identities(), self.open_records()
            unseen = [len(events - visible) for events in self.upto_each_version()]
            raise AssertionError(
                f"{step} after {self.step_before}: {started} records of an open transaction,"
                f" events that are not visible up to each version: {unseen}"
            ) from error

    def shows(self, step: str) -> bool:
        """Whether the topic is as it must be at a step, for a window up to any version."""
        visible = self.reader.identities()
        started = self.open_records()
        for events in self.upto_each_version():
            unseen = len(events - visible)
            if step in {"before_begin", "after_begin"}:
                is_so = started == 0 < unseen
            elif step == "during_produce":
                is_so = 0 < started < unseen
            elif step in NOT_VISIBLE:
                is_so = 0 < started == unseen
            else:
                is_so = started == unseen == 0 and (
                    step == "before_report" or visible > self.visible_before
                )
            if is_so:
                return True
        return False

    def prove_index(self, step: str) -> None:
        """What the dead publisher's index knows of the topic."""
        app, path = self.publisher.settings["app"]["id"], self.publisher.state / "index"
        of_all = {"partitions": PARTITIONS, "shard": [0, 1]}
        identity = {
            "app": app,
            "topic": self.topic,
            "table": f"{self.database.name}.events",
            "key": "one column",
            "start": json.loads((self.publisher.state / "start.json").read_text())["id"],
            **of_all,
        }
        with Index(path / "1-shards" / "0", identity) as index:
            known = {p: index.offsets[self.topic, p] for p in range(PARTITIONS)}
        high = high_watermarks(self.broker.open, self.topic)
        if step in {"commit_unanswered", "after_commit", "before_index"}:
            assert known != high, "visible, not remembered"
        elif step in {"after_index", "before_report"}:
            assert known == high, "remembered, and nobody knows"

    def kill_all_at(self, steps: list[str]) -> None:
        """Each step in a run of its own, ended by `kill -9` of all of its processes."""
        for number, step in enumerate(steps):
            self.arm(step)
            marker = self.folder / f"all-{number}.pid"
            self.visible_before = self.reader.identities()
            self.publisher.start(environment=_spec([(step, marker)]))
            standing = self.standing(step, marker)
            self.commit()
            assert standing in self.publisher.family()
            self.publisher.kill()
            self.let_go(step, delivered=number % 2 == 0)
            self.prove_index(step)
            self.step_before = step

    def let_go(self, step: str, *, delivered: bool) -> None:
        """The `EndTxn` of a process that does not run any more arrives after all, or never."""
        if step == "commit_sent" and delivered:
            self.broker.proxy.release()
        elif step == "commit_sent":
            self.broker.proxy.drop()

    def assert_whole(self) -> None:
        """Both consumers saw the same: each event once, in order, to the end of each partition."""
        topic = Topic(self.broker.open, self.topic)
        differences = compare(self.database, topic)
        assert not differences, differences
        assert self.open_records() == 0
        assert self.reader.identities() == self.stored()
        afterwards: dict[int, list[tuple[int, str, int]]] = {p: [] for p in range(PARTITIONS)}
        for record in topic.read():
            afterwards[record.partition].append((record.offset, record.key, record.version))
        assert self.reader.seen == afterwards


@pytest.fixture
def world(
    database: FreshDatabase,
    own_broker: OwnBroker,  # noqa: F811
    topic_name: str,
    tmp_path: Path,
) -> Iterator[World]:
    made = World(database, own_broker, topic_name, tmp_path)
    yield made
    made.reader.close()
    if made.publisher.process is not None:
        made.publisher.kill()


def test_c1_c2_the_whole_publisher_is_killed_at_every_step(world: World) -> None:
    every = IN_THE_SHARD + AROUND_IT
    world.kill_all_at(every_pair(every) if ALL_PAIRS else every)
    world.publisher.publish_everything()
    world.assert_whole()


def _spec(places: list[tuple[str, Path]]) -> dict[str, str]:
    return {"EVENTPUB_FAILPOINT": ",".join(f"{step}:1:{marker}" for step, marker in places)}
