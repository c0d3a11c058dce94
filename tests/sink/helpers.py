"""Rows, shards and an independent reader for the tests of the sink."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import pyarrow as pa
from confluent_kafka import OFFSET_END, Consumer, TopicPartition

from eventpub import config
from eventpub.admission.model import EVENTS, Shard, topic_partition
from eventpub.errors import SinkError
from eventpub.shard.publishing import _MOST_REDOS
from eventpub.sink.base import REDO, Content
from eventpub.sink.client import Clients
from eventpub.sink.records import Columns, Record
from eventpub.sink.shard import ShardSink

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


def records_of(columns: Columns) -> list[Record]:
    """Records one by one; publishing loops over the columns."""
    names = "keys", "values", "partitions", "timestamps", "headers"
    rows = zip(*(getattr(columns, name) for name in names), strict=True)
    return [Record(key, value, int(number), *rest) for key, value, number, *rest in rows]


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
        ends = _ends(bootstrap_servers, topic, partitions)
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


@cache
def _asking(bootstrap_servers: str, isolation: str) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": "ends",
            "isolation.level": isolation,
            "log_level": 0,
        }
    )


def forget_leaders() -> None:
    """To be called after a broker was started again: who led a partition does not any more."""
    _asking.cache_clear()


def _ends(
    bootstrap_servers: str,
    topic: str,
    partitions: Iterable[int] = range(PARTITIONS),
    isolation: str = "read_uncommitted",
) -> dict[int, int]:
    # High watermarks: a `read_committed` consumer is told the last stable offsets instead, which
    # lag behind a commit that was answered a moment ago.
    places = [TopicPartition(topic, p, OFFSET_END) for p in partitions]
    asked = _asking(bootstrap_servers, isolation).offsets_for_times(places, 10)
    assert all(place.error is None and place.offset >= 0 for place in asked), asked
    return {place.partition: place.offset for place in asked}


def high_watermarks(bootstrap_servers: str, topic: str) -> dict[int, int]:
    """Of each partition."""
    return _ends(bootstrap_servers, topic)


def stable_offsets(bootstrap_servers: str, topic: str) -> dict[int, int]:
    """The last stable offset of each partition."""
    return _ends(bootstrap_servers, topic, isolation="read_committed")


def open_transactions(bootstrap_servers: str, topic: str) -> list[int]:
    """The partitions whose last stable offset is below the high watermark."""
    stable = stable_offsets(bootstrap_servers, topic)
    return [p for p, high in high_watermarks(bootstrap_servers, topic).items() if stable[p] < high]


def _at(consumer: Consumer) -> list[TopicPartition]:
    return consumer.position(consumer.assignment())


def identities(messages: Sequence[Any]) -> list[tuple[str, int]]:
    """(aggregate, version) of each message, in order."""
    return [(m.key().decode(), int(dict(m.headers())["ce_sequence"])) for m in messages]


class Way:
    """Publishes as a shard's task does: what is in doubt is replaced, folded, and done again.

    Attributes:
        told: the codes of the errors that were met.
        sinks: how many sinks were made.
    """

    def __init__(self, sink: config.Sink) -> None:
        self._config = sink
        self._sink: ShardSink | None = None
        self._published: set[tuple[str, int]] = set()
        self.told: list[str] = []
        self.sinks = 0

    def publish(self, rows: pa.Table, crash_point: Callable[[str], None] = lambda _: None) -> None:
        """Publishes what of these rows is not on the topic yet."""
        for _ in range(_MOST_REDOS):
            try:
                self._own().publish(Content(self._missing(rows)), crash_point=crash_point)
            except SinkError as error:
                self.told.append(error.code)
                fails = error.code not in REDO
                if fails and error.code != "sink.fenced" and not error.retriable:
                    raise
                if fails:
                    self.close()  # the task fails, and the driver has another one take its place
                last_error = error
                continue
            self._published |= as_set(rows)
            return
        raise last_error

    def fold(self) -> set[tuple[str, int]]:
        """What was on the topic when the shard was taken over."""
        self._own()
        return self._published

    def _own(self) -> ShardSink:
        if self._sink is not None and not self._sink.needs_replacement:
            return self._sink
        self.close()
        self._sink = ShardSink(Clients(self._config), APP, WHOLE)
        self.sinks += 1
        self._published = {
            pair
            for part in self._sink.fold({})
            if part.kind == "events"
            for pair in zip(part.aggregate_ids, part.versions.tolist(), strict=True)
        }
        return self._sink

    def _missing(self, rows: pa.Table) -> pa.Table:
        pairs = zip(rows["aggregate_id"].to_pylist(), rows["version"].to_pylist(), strict=True)
        return rows.filter(pa.array([pair not in self._published for pair in pairs]))

    def close(self) -> None:
        """Lets go of the sink."""
        if self._sink is not None:
            self._sink.close()
        self._sink = None


def as_set(rows: pa.Table) -> set[tuple[str, int]]:
    """(aggregate, version) of each row."""
    ids, versions = rows["aggregate_id"].to_pylist(), rows["version"].to_pylist()
    return {(str(a), int(v or 0)) for a, v in zip(ids, versions, strict=True)}


def assert_published_once(bootstrap_servers: str, topic: str, *batches: pa.Table) -> None:
    """Each event is on the topic once and in order, and every partition can be read to its end."""
    seen = identities(read_topic(bootstrap_servers, topic))
    assert sorted(seen) == sorted(pair for rows in batches for pair in as_set(rows))
    for aggregate_id in {a for a, _ in seen}:
        versions = [v for a, v in seen if a == aggregate_id]
        assert versions == sorted(versions), aggregate_id
