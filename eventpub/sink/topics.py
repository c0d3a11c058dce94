"""The topic and its side topics: are they there, and do they fit together?

What must hold before anything is published: the topic exists, `<topic>.gaps`, `<topic>.dead` (and
`<topic>.late` where late events are diverted) exist with the same number of partitions, and there
are at least as many partitions as shards.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal
from weakref import WeakSet

from confluent_kafka import (
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # its stubs export neither
    NewTopic,
    OffsetSpec,
)

from eventpub import config
from eventpub.errors import SinkError
from eventpub.sink import client, faults

REACH_TIMEOUT = 10.0
"""Seconds that a broker may take to answer before it counts as away."""


End = Literal["earliest", "latest"]

_connected: WeakSet[Any] = WeakSet()


@dataclass(frozen=True)
class TopicLayout:
    """What was found: `created` are the topics that were missing."""

    topic: str
    partitions: int
    side_topics: tuple[str, ...]
    created: tuple[str, ...]


def check_topics(
    sink: config.Sink, *, shards: int = 1, late: bool = False, timeout: float = REACH_TIMEOUT
) -> TopicLayout:
    """The topic's layout; what is missing is created where `create_topics` allows it.

    Args:
        sink: the configuration.
        shards: of the publisher; at most the topic's partitions.
        late: True where late events are diverted to ``<topic>.late``.
        timeout: seconds until a broker that does not answer counts as away.

    Raises:
        SinkError: `sink.unreachable`, `sink.auth_failed`, `sink.not_authorized`,
            `sink.topic_missing`, `sink.partition_count`.
    """
    side = (sink.gaps_topic, sink.dead_topic, *((sink.late_topic,) if late else ()))
    found = partition_counts(sink, timeout)
    missing = [t for t in (sink.topic, *side) if t not in found]
    partitions = found.get(sink.topic, sink.partitions)
    if missing:
        if not sink.create_topics:
            raise faults.topic_missing(sink, missing[0], partitions)
        _create(sink, missing, partitions, timeout)
        found = _wait_for(sink, missing, timeout)
        partitions = found[sink.topic]
    for topic in side:
        if found[topic] != partitions:
            raise SinkError(
                "sink.partition_count",
                f"{topic} has {found[topic]} partitions, {sink.topic} has {partitions};"
                " they must be equal",
                where=f"topic {topic}",
                suggestion=f"kafka-topics.sh --bootstrap-server {sink.bootstrap_servers} --alter"
                f" --topic {topic} --partitions {partitions}"
                if found[topic] < partitions
                else f"delete {topic} if it is empty, and let it be created again",
            )
    if shards > partitions:
        raise SinkError(
            "sink.partition_count",
            f"{shards} shards need at least {shards} partitions; {sink.topic} has {partitions}",
            where="spark.shards",
            suggestion=f"set spark.shards to at most {partitions}",
        )
    return TopicLayout(sink.topic, partitions, side, tuple(missing))


def partition_counts(sink: config.Sink, timeout: float | None = None) -> dict[str, int]:
    """The number of partitions of each topic that this client may see."""
    timeout = REACH_TIMEOUT if timeout is None else timeout
    admin, client_log = client.admin(sink)
    _serve(admin)  # what it has logged since the last call
    client_log.forget()
    deadline = time.monotonic() + timeout
    while True:
        try:
            metadata = client.call(admin.list_topics, None, min(1.0, timeout))
            break
        except KafkaException as exception:
            error = faults.kafka_error(exception)
            _serve(admin)
            heard = client_log.last_error
            if heard is not None and heard.code() in faults.AUTHENTICATION:
                raise faults.auth_failed(sink, heard) from exception
            if time.monotonic() > deadline:
                raise faults.unreachable(
                    sink, "asking for the topics", timeout, heard or error
                ) from exception
    return {
        name: len(topic.partitions)
        for name, topic in metadata.topics.items()
        if topic.error is None and topic.partitions
    }


def _serve(admin: Any) -> None:
    try:
        client.call(admin.poll, 0)
    except KafkaException:
        return


def _create(sink: config.Sink, topics: list[str], partitions: int, timeout: float) -> None:
    admin, _ = client.admin(sink)
    new = [
        NewTopic(
            topic,
            partitions,
            sink.replication_factor,
            # What is published is the truth; and records carry the time of their event, so that
            # a retention by time would delete an old store's events as soon as they arrive.
            config={"retention.ms": "-1"},
        )
        for topic in topics
    ]
    created: dict[str, Future[None]] = admin.create_topics(new, request_timeout=timeout)
    for topic, future in created.items():
        try:
            future.result(timeout + 5)
        except KafkaException as exception:
            error = faults.kafka_error(exception)
            if error.code() == KafkaError.TOPIC_ALREADY_EXISTS:
                continue
            if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                raise faults.topic_missing(sink, topic, partitions) from exception
            raise faults.fault(error, f"creating the topic {topic}", sink) from exception


def _wait_for(sink: config.Sink, topics: list[str], timeout: float) -> dict[str, int]:
    # A broker answers "created" before every broker's metadata has it.
    deadline = time.monotonic() + timeout
    while True:
        found = partition_counts(sink, timeout)
        missing = [t for t in topics if t not in found]
        if not missing:
            # … and before its partitions have a leader that answers.
            list_offsets(sink, [(t, p) for t in topics for p in range(found[t])], "latest")
            return found
        if time.monotonic() > deadline:
            raise faults.topic_missing(sink, missing[0])
        time.sleep(0.05)


def list_offsets(
    sink: config.Sink,
    partitions: list[tuple[str, int]],
    end: End,
    *,
    committed: bool = False,
    optional: frozenset[str] = frozenset(),
    timeout: float = REACH_TIMEOUT,
) -> dict[tuple[str, int], int]:
    """The low or high watermark, or with `committed` the last stable offset, of each partition.

    Topics in `optional` may be missing; they are then left out of the answer. librdkafka 2.16
    gives -1001 and no error where the connection was lost before the answer: that is asked again.

    Raises:
        SinkError: as `check_topics`.
    """
    admin, client_log = client.admin(sink)
    _serve(admin)  # what it has logged since the last call
    client_log.forget()
    _connect(admin, sink.topic, timeout)
    spec: Any = getattr(OffsetSpec, end)()
    level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
    deadline = time.monotonic() + timeout
    offsets: dict[tuple[str, int], int] = {}
    asking = set(partitions)
    while asking:
        futures: Mapping[TopicPartition, Future[Any]] = admin.list_offsets(
            {TopicPartition(topic, number): spec for topic, number in asking},
            isolation_level=level,
            request_timeout=timeout,
        )
        for at, future in futures.items():
            place = (at.topic, at.partition)
            try:
                offset = future.result(timeout + 5).offset
                if offset >= 0:
                    offsets[place] = offset
                    asking.discard(place)
                elif time.monotonic() > deadline:
                    raise faults.unreachable(
                        sink, "asking for offsets", timeout, client_log.last_error
                    )
            except TimeoutError as exception:
                raise faults.unreachable(sink, "asking for offsets", timeout, None) from exception
            except KafkaException as exception:
                error = faults.kafka_error(exception)
                if error.code() in faults.MISSING and at.topic in optional:
                    asking.discard(place)
                elif error.code() not in faults.MOMENTARY or time.monotonic() > deadline:
                    _serve(admin)
                    if error.code() in faults.MISSING:
                        raise faults.topic_missing(sink, at.topic) from exception
                    if error.code() == KafkaError._TIMED_OUT:
                        raise faults.unreachable(
                            sink, "asking for offsets", timeout, client_log.last_error or error
                        ) from exception
                    raise faults.fault(error, "asking for offsets", sink) from exception
        if asking:
            time.sleep(0.05)
            admin, client_log = client.admin(sink, anew=True)
            _connect(admin, sink.topic, timeout)
    return offsets


def _connect(admin: Any, topic: str, timeout: float) -> None:
    """Have a new client know its broker before it is asked for offsets.

    Of first questions for offsets, which came while it connected, 10 of 120 took 3 s: librdkafka
    missed who leads the partitions, and asks again after that time. Behind this question, which
    takes some 10 ms, none of 240 did. Whatever is wrong is met again by what is asked for.
    """
    if admin in _connected:
        return
    timeout = min(1.0, timeout)
    with suppress(KafkaException, TimeoutError):
        topics = TopicCollection([topic])
        admin.describe_topics(topics, request_timeout=timeout)[topic].result(timeout + 1)
        _connected.add(admin)
