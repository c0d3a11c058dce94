"""Memory, transaction time and the database's load are bounded by bytes and time, not by rows.

F6 and F7: large rows, a slow broker, very many gaps at once.
"""

from __future__ import annotations

import subprocess
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest
from confluent_kafka import Consumer, TopicPartition

from eventpub.local.downloads import find_java
from eventpub.local.servers import Kafka
from tests.conftest import FreshDatabase
from tests.publisher.conftest import NewPublisher
from tests.publisher.harness import (
    Publisher,
    compare,
    create_table,
    end_when_led,
    eventually,
    insert,
    transaction,
)

MIB = 1 << 20


class Memory:
    """The most that a publisher's processes have had at one time, bytes; see `watched`.

    Each page counts once: Spark's Python workers are forked, and share most of theirs.
    """

    def __init__(self, publisher: Publisher) -> None:
        self.most = 0
        self.parts: list[tuple[str, int]] = []
        self._publisher = publisher
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._ended.wait(0.3):
            parts = []
            for process in self._publisher.family():
                try:
                    parts.append((process.name(), process.memory_full_info().pss))
                except psutil.Error:
                    continue
            total = sum(size for _, size in parts)
            if total > self.most:
                self.most, self.parts = total, parts

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size // MIB}" for name, size in self.parts)
        return f"{self.most // MIB} MiB ({parts})"


@contextmanager
def watched(publisher: Publisher) -> Iterator[Memory]:
    """Watches the memory of all processes of a publisher that runs."""
    memory = Memory(publisher)
    memory._thread.start()
    try:
        yield memory
    finally:
        memory._ended.set()
        memory._thread.join()


def fill(database: FreshDatabase, rows: int, size: int, aggregates: int, first: int = 1) -> None:
    """Rows of random bytes, which no compression makes smaller, by the database itself."""
    database.execute("SET GLOBAL max_allowed_packet = 67108864")
    with database.connect() as connection, connection.cursor() as cursor:
        cursor.execute("SET cte_max_recursion_depth = 10000000")
        # RANDOM_BYTES gives at most 1024
        cursor.execute(
            "INSERT INTO events (aggregate_id, version, event_type, payload) "
            "WITH RECURSIVE n (i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < %s) "
            "SELECT CONCAT('large-', i %% %s), %s + i DIV %s, 'happened', "
            "REPEAT(RANDOM_BYTES(1024), %s) FROM n",
            [rows - 1, aggregates, first, aggregates, size // 1024],
        )


def test_a8_large_rows_are_published_in_bounded_memory(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """6,000 rows of 100 kB, and some of nearly the broker's limit beside small ones.

    Half of them go out while Spark starts, by the driver, which keeps a part of what they took.
    """
    create_table(database)
    fill(database, 3000, 100_000, 500)
    publisher = new_publisher(database)
    publisher.start()
    with watched(publisher) as memory:
        publisher.until_spark_publishes()
        fill(database, 3000, 100_000, 500, first=7)
        fill(database, 100, 1_000_000, 100, first=13)
        fill(database, 2000, 1024, 100, first=14)
        until_written(publisher, 8100)  # what was aborted is among it
        eventually(lambda: len(publisher.topic.follow()) >= 8100, every=2.0)
    publisher.kill()
    print(memory)
    assert memory.most < 1400 * MIB, str(memory)
    differences = compare(database, publisher.topic)
    assert not differences, differences


def throttle(server: Kafka, client_id: str, quota: str, rate: int) -> None:
    """Let the broker take or give clients of a name no more than so many bytes a second."""
    subprocess.run(
        [
            *(str(find_java()), "-cp", f"{server._jars}/*", "kafka.admin.ConfigCommand"),
            *("--bootstrap-server", server.bootstrap_servers, "--alter"),
            *("--entity-type", "clients", "--entity-name", client_id),
            *("--add-config", f"{quota}={rate}"),
        ],
        check=True,
        capture_output=True,
    )


@pytest.mark.engines("threads", "here")
def test_a8_a_throttled_broker_gets_smaller_transactions_until_they_end_in_time(
    database: FreshDatabase, new_publisher: NewPublisher, kafka_server: Kafka, topic_name: str
) -> None:
    """25 MB at 1 MB/s, of which each transaction has 10 s: half of them at once is too much."""
    create_table(database)
    fill(database, 250, 102_400, 25)
    throttle(kafka_server, topic_name, "producer_byte_rate", 1_000_000)
    publisher = new_publisher(
        database,
        sink={
            "transaction_timeout": "10s",
            "properties": {"client.id": topic_name, "compression.type": "none"},
        },
    )
    publisher.start()
    began = time.monotonic()
    until_written(publisher, 250, 150)  # what was aborted is among it
    eventually(lambda: len(publisher.topic.follow()) >= 250, 150, every=1.0)
    print(f"25.6 MB in {time.monotonic() - began:.0f} s")
    publisher.kill()
    differences = compare(database, publisher.topic)
    assert not differences, differences


MANY = 20_000


def test_a9_very_many_gaps_at_once_let_the_others_flow(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """An archive took the first versions of 20,000 aggregates, with payloads of 5 kB above them."""
    create_table(database)
    for version in (2, 3):
        fill(database, MANY, 5 * 1024, MANY, first=version)
    publisher = new_publisher(database, gaps={"backoff_base": "250ms", "max_backoff": 7})
    publisher.start()
    with watched(publisher) as memory, transaction(database) as cursor:
        publisher.until_said("very many aggregates begin above the first version")
        lags = []
        for number in range(60):
            insert(cursor, "flows", number + 1)
            cursor.connection.commit()
            began = time.monotonic()
            until_seen(publisher, "flows", number + 1)
            lags.append(time.monotonic() - began)
        print(f"lag {sorted(lags)[30]:.2f}, highest {max(lags):.2f} s; {memory}")
        assert sorted(lags)[-3] < 6, lags
        # every gap is given up in the end, and recorded once
        eventually(lambda: len(publisher.gaps.follow()) >= MANY, every=2.0)
        until_written(publisher, 2 * MANY + 60)
        eventually(lambda: len(publisher.topic.follow()) >= 2 * MANY + 60, every=2.0)
    publisher.kill()
    differences = compare(database, publisher.topic)
    assert not differences, differences
    found = Counter(record.key for record in publisher.gaps.stream())
    assert len(found) == MANY
    assert set(found.values()) == {1}


@pytest.mark.engines("here", why="the engine threads keeps no snapshots")
def test_a_transaction_is_not_open_for_as_long_as_a_snapshot_is_uploaded(
    new_publisher: NewPublisher, database: FreshDatabase
) -> None:
    """It expired, and a run that ends by itself failed before it had its first snapshot."""
    create_table(database)
    publisher = new_publisher(database, run={"shards": 1}, sink={"transaction_timeout": "20s"})
    with transaction(database) as cursor:
        insert(cursor, "a", 1)
        cursor.connection.commit()
    marker = publisher.folder / "uploading"  # not that of the fold, which is waited for
    publisher.start(
        "--available-now", environment={"EVENTPUB_FAILPOINT": f"before_snapshot:2:{marker}"}
    )
    assert publisher.finish() == 0, publisher.words()
    assert marker.exists()
    assert publisher.topic.versions("a") == [1]


def until_seen(publisher: Publisher, aggregate_id: str, version: int) -> None:
    """Wait until an event is on the topic, reading only the end of its partition."""
    partition = zlib.crc32(aggregate_id.encode()) % 4
    conf = {"bootstrap.servers": publisher.topic.bootstrap_servers, "group.id": "x"}
    consumer = Consumer({**conf, "isolation.level": "read_committed"})
    place = TopicPartition(publisher.topic.name, partition)
    deadline = time.monotonic() + 60
    try:
        end = end_when_led(consumer, place)
        consumer.assign([TopicPartition(place.topic, partition, max(0, end - 2000))])
        while time.monotonic() < deadline:
            for message in consumer.consume(1000, 0.1):
                key, headers = message.key(), dict(message.headers() or [])
                if key == aggregate_id.encode() and headers["ce_sequence"] == str(version).encode():
                    return
    finally:
        consumer.close()
    raise AssertionError(f"{aggregate_id}/{version} is not on the topic\n{publisher.words()}")


def until_written(publisher: Publisher, records: int, timeout: float = 240) -> None:
    """Wait until a topic has so many offsets, without reading it."""
    consumer = Consumer({"bootstrap.servers": publisher.topic.bootstrap_servers, "group.id": "x"})

    def are_written() -> bool:
        assert publisher.process is not None
        assert publisher.process.poll() is None, publisher.words()
        partitions = consumer.list_topics(publisher.topic.name, timeout=10).topics
        places = [
            TopicPartition(publisher.topic.name, p)
            for p in partitions[publisher.topic.name].partitions
        ]
        ends = [end_when_led(consumer, place) for place in places]
        return sum(ends) >= records

    try:
        eventually(are_written, timeout, every=0.5)
    finally:
        consumer.close()
