"""Rows, shards and an independent reader for the tests of the sink."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    OffsetSpec,
)

from eventpub import config
from eventpub.admission.model import EVENTS, Shard, topic_partition

PARTITIONS = 4
APP = "orders"
WHOLE = Shard(0, 1, PARTITIONS)
"""The only shard of its publisher."""
CREATED = 1_767_225_600_123_456
"""2026-01-01T00:00:00.123456Z in µs."""


def settings(topic: str, bootstrap_servers: str, **more: Any) -> config.Sink:
    """A sink's configuration for a topic of `PARTITIONS` partitions."""
    return config.Sink(
        topic=topic, bootstrap_servers=bootstrap_servers, partitions=PARTITIONS, **more
    )


def ids_of(shard: Shard, count: int) -> list[str]:
    """Aggregates that belong to a shard."""
    own = set(shard.topic_partitions())
    found: list[str] = []
    number = 0
    while len(found) < count:
        aggregate_id = f"order-{number}"
        if topic_partition(aggregate_id, shard.partitions) in own:
            found.append(aggregate_id)
        number += 1
    return found


def events(rows: Sequence[tuple[str, int]], **columns: Sequence[Any]) -> pa.Table:
    """Rows of `EVENTS`; other columns than identity have plain values unless given."""
    count = len(rows)
    data: dict[str, Sequence[Any]] = {
        "aggregate_id": [a for a, _ in rows],
        "version": [v for _, v in rows],
        "event_type": ["OrderPlaced"] * count,
        "payload": [b'{"n":%d}' % n for n in range(count)],
        "metadata": [None] * count,
        "create_time": [CREATED + n for n in range(count)],
        **columns,
    }
    return pa.table(data, schema=EVENTS)


def some_events(shard: Shard, count: int, first_version: int = 1) -> pa.Table:
    """Contiguous versions of a few aggregates of the shard."""
    ids = ids_of(shard, min(count, 16))
    rows = [(ids[n % len(ids)], first_version + n // len(ids)) for n in range(count)]
    return events(rows)


def read_topic(bootstrap_servers: str, topic: str, timeout: float = 20.0) -> list[Any]:
    """All that a `read_committed` consumer sees, to the end of every partition.

    Knows nothing of eventpub, and fails if an end cannot be reached.
    """
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": "independent",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )
    try:
        partitions = consumer.list_topics(topic, timeout=10).topics[topic].partitions
        places = [TopicPartition(topic, p, 0) for p in partitions]
        ends = _ends(bootstrap_servers, places)
        consumer.assign(places)
        messages: list[Any] = []
        deadline = time.monotonic() + timeout
        while any((p.offset if p.offset > 0 else 0) < ends[p.partition] for p in _at(consumer)):
            assert time.monotonic() < deadline, f"the end of {topic} cannot be reached: {ends}"
            message = consumer.poll(0.1)
            if message is not None:
                assert message.error() is None, message.error()
                messages.append(message)
        return messages
    finally:
        consumer.close()


def _ends(bootstrap_servers: str, places: list[TopicPartition]) -> dict[int, int]:
    # High watermarks: a `read_committed` consumer is told the last stable offsets instead, which
    # lag behind a commit that was answered a moment ago.
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    latest: Any = OffsetSpec.latest()  # type: ignore[no-untyped-call]
    asked = admin.list_offsets(dict.fromkeys(places, latest))
    return {place.partition: future.result(10).offset for place, future in asked.items()}


def _at(consumer: Consumer) -> list[TopicPartition]:
    return consumer.position(consumer.assignment())


def identities(messages: Sequence[Any]) -> list[tuple[str, int]]:
    """(aggregate, version) of each message, in order."""
    return [(m.key().decode(), int(dict(m.headers())["ce_sequence"])) for m in messages]
