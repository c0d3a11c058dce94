"""The topic and its side topics: are they there, and do they fit together?

What must hold before anything is published: the topic exists, `<topic>.gaps`, `<topic>.dead` (and
`<topic>.late` where late events are diverted) exist with the same number of partitions, and there
are at least as many partitions as shards.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    OFFSET_INVALID,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # its stubs export none
    AclOperation,
    NewTopic,
)

from eventpub import config
from eventpub.errors import SinkError
from eventpub.sink import client, faults
from eventpub.terminal import counted

REACH_TIMEOUT = 10.0
"""Seconds that a broker may take to answer before it counts as away."""


_NO_IDS = {"", "None", "AAAAAAAAAAAAAAAAAAAAAA", "AAAAAAAAAAAAAAAAAAAAAQ"}

_KNOWN_WITHIN = 5.0
"""Seconds in which a broker that has just started knows of the topics that are there."""

_FIRST_PATIENCE = 2.0
"""Seconds that a partition's leader, as we know it, has to answer; doubled for each who follows."""

End = Literal["earliest", "latest"]

_NO_ANSWER = frozenset(
    {
        KafkaError._TIMED_OUT,
        KafkaError._TRANSPORT,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._DESTROY_BROKER,
    }
)


@dataclass(frozen=True)
class TopicLayout:
    """What was found: `created` are the topics that were missing."""

    topic: str
    partitions: int
    created: tuple[str, ...]


def check_topics(
    sink: config.Sink,
    *,
    shards: int = 1,
    late: bool = False,
    was_written: bool = False,
    timeout: float = REACH_TIMEOUT,
) -> TopicLayout:
    """The topic's layout; what is missing is created where `create_topics` allows it.

    Args:
        sink: the configuration.
        shards: of the publisher; at most the topic's partitions.
        late: True where late events are diverted to ``<topic>.late``.
        was_written: this publisher has written to the topic before: it is not created again.
        timeout: seconds until a broker that does not answer counts as away.

    Raises:
        SinkError: `sink.unreachable`, `sink.auth_failed`, `sink.not_authorized`,
            `sink.topic_missing`, `sink.partition_count`.
    """
    side = (sink.gaps_topic, sink.dead_topic, *((sink.late_topic,) if late else ()))
    found = partition_counts(sink, timeout)
    deadline = time.monotonic() + _KNOWN_WITHIN
    while was_written and sink.topic not in found and time.monotonic() < deadline:
        time.sleep(0.2)
        found = partition_counts(sink, timeout)
    if lacking := missing_rights(sink, timeout, late=late):
        raise faults.rights_missing(sink, lacking)
    missing = [t for t in (sink.topic, *side) if t not in found]
    partitions = found.get(sink.topic, sink.partitions)
    if was_written and sink.topic in missing:
        raise faults.topic_gone(sink)
    if missing and not sink.create_topics:
        raise faults.topic_missing(sink, missing[0], partitions)
    if shards > partitions:
        raise too_few_partitions(sink, shards, found.get(sink.topic))
    if missing:
        _create(sink, missing, partitions, timeout)
        found = _wait_for(sink, missing, timeout)
        partitions = found[sink.topic]
    for topic in side:
        if found[topic] != partitions:
            raise SinkError(
                "sink.partition_count",
                f"{topic} has {counted(found[topic], 'partition')}, {sink.topic} has {partitions};"
                " they must be equal",
                where=f"topic {topic}",
                suggestion=f"kafka-topics.sh --bootstrap-server {sink.bootstrap_servers} --alter"
                f" --topic {topic} --partitions {partitions}"
                if found[topic] < partitions
                else f"delete {topic} if it is empty, and let it be created again",
            )
    return TopicLayout(sink.topic, partitions, tuple(missing))


def too_few_partitions(sink: config.Sink, shards: int, partitions: int | None) -> SinkError:
    """The error of shards that have no partition.

    Args:
        partitions: of the topic; None: it is to be created.
    """
    need = f"{shards} shards need at least {shards} partitions"
    if partitions is None:
        return SinkError(
            "sink.partition_count",
            f"{need}; {sink.topic} is not there yet, and would be created with {sink.partitions}",
            where="run.shards",
            suggestion=f"set sink.partitions to at least {shards}, or run.shards to at most"
            f" {sink.partitions}",
        )
    return SinkError(
        "sink.partition_count",
        f"{need}; {sink.topic} has {partitions}",
        where="run.shards",
        suggestion=f"set run.shards to at most {partitions}",
    )


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
            last_error = client_log.last_error
            if last_error is not None and faults.is_refusal(last_error):
                raise faults.auth_failed(sink, last_error) from exception
            if time.monotonic() > deadline:
                raise faults.unreachable(
                    sink, "asking for the topics", timeout, last_error or error
                ) from exception
            # it may go on to ask one that does not answer
            client.renew(sink)
            admin, client_log = client.admin(sink)
    return {
        name: len(topic.partitions)
        for name, topic in metadata.topics.items()
        if topic.error is None and topic.partitions
    }


def topic_ids(
    sink: config.Sink, names: Iterable[str], timeout: float = REACH_TIMEOUT
) -> dict[str, str]:
    """Kafka's id of each topic: that of a topic that is made again under its name is another.

    Without topics that are not there, that this account may not describe, or whose broker gives
    topics no id (before 2.8).

    Raises:
        SinkError: as `check_topics`.
    """
    admin, client_log = client.admin(sink)
    _serve(admin)
    client_log.forget()
    deadline = time.monotonic() + timeout
    patience = min(_FIRST_PATIENCE, timeout)
    asking = set(names)
    found: dict[str, str] = {}
    while asking:
        futures = admin.describe_topics(TopicCollection(sorted(asking)), request_timeout=patience)
        met: KafkaError | None = None
        for name, future in futures.items():
            try:
                id_ = str(future.result(patience + 5).topic_id)
            except TimeoutError:
                continue
            except KafkaException as exception:
                met = faults.kafka_error(exception)
                if met.code() == KafkaError._TIMED_OUT:
                    continue
                allowed = met.code() != KafkaError.TOPIC_AUTHORIZATION_FAILED
                if allowed and met.code() not in faults.MISSING | faults.MOMENTARY:
                    _serve(admin)
                    error = client_log.last_error or met
                    raise faults.fault(error, "describing topics", sink) from exception
            else:
                if id_ not in _NO_IDS:
                    found[name] = id_
            asking.discard(name)
        if not asking:
            break
        # It asks the one broker that it knows as the controller, and waits for that one to come
        # back, whoever else answers: a new client learns of another one.
        _serve(admin)
        last_error = client_log.last_error
        client.renew(sink)
        admin, client_log = client.admin(sink)
        left = deadline - time.monotonic()
        if left <= 0:
            raise faults.unreachable(sink, "describing topics", timeout, last_error or met)
        patience = min(2 * patience, max(left, _FIRST_PATIENCE))
    return found


def visible_ends(
    sink: config.Sink,
    places: Sequence[tuple[str, int]] | None = None,
    timeout: float = REACH_TIMEOUT,
) -> dict[tuple[str, int], int]:
    """Up to where readers of committed records come; by default in each partition of the topic.

    Raises:
        SinkError: as `check_topics`.
    """
    if places is None:
        count = partition_counts(sink, timeout).get(sink.topic, 0)
        places = [(sink.topic, number) for number in range(count)]
    optional = frozenset(sink.topics[1:])
    return list_offsets(
        sink, list(places), "latest", committed=True, optional=optional, timeout=timeout
    )


def first_offsets(
    sink: config.Sink, places: Sequence[tuple[str, int]]
) -> dict[tuple[str, int], int]:
    """Where each partition begins.

    Raises:
        SinkError: as `check_topics`.
    """
    return list_offsets(sink, list(places), "earliest")


def check_written(
    sink: config.Sink,
    ids: Mapping[str, str],
    known: Mapping[str, str],
    ends: Mapping[tuple[str, int], int],
) -> dict[tuple[str, int], int]:
    """Whether the topic is still the one that was written, to where it was written.

    Args:
        sink: the configuration.
        ids: of the topics that are there.
        known: of those that were written.
        ends: next offsets that were reached.

    Returns:
        Those of them that still mean something.

    Raises:
        SinkError: `sink.topic_recreated`, or as `check_topics`.
    """
    made_again = {name for name, id_ in ids.items() if known.get(name, id_) != id_}
    if sink.topic in made_again:
        if ids[sink.topic] != sink.accept_topic_id:
            raise faults.topic_remade(sink, ids[sink.topic])
        made_again = set(sink.topics)
    kept = {place: end for place, end in ends.items() if place[0] in set(sink.topics) - made_again}
    found = list_offsets(sink, list(kept), "latest", optional=frozenset(sink.topics[1:]))
    marker = 1 if sink.delivery == "exactly_once" else 0
    for place, end in found.items():
        if end < kept[place] - marker:  # one offset less: a marker is missing, a fold sees to it
            raise tail_gone(sink, place, kept[place], end)
    return {place: kept[place] for place in found}


def tail_gone(sink: config.Sink, place: tuple[str, int], saved: int, end: int) -> SinkError:
    """What it means that a partition ends before what was written to it.

    Its last records are gone, unless its brokers do not agree who leads it: one that is cut off
    from the others goes on to answer, with the end that it knows.
    """
    leaders = _leaders(sink, *place)
    if len(set(leaders.values())) < 2:
        return faults.records_gone(sink, place, saved, end)
    client.renew(sink)  # the old one may ask the wrong one for 15 minutes
    why = f"one has answered with the end {end}, but {saved} was reached before"
    return _disagree(sink, place, leaders, why)


def check_leaders(sink: config.Sink, places: Iterable[tuple[str, int]]) -> None:
    """Whether a second broker says the same of who leads these partitions.

    One that is cut off from the others, and not from us, goes on to answer for what it led, with
    ends that are old. Where no second one answers, nobody can tell.

    Raises:
        SinkError: `sink.unreachable`: they do not agree, or none answers; ….
    """
    numbers: dict[str, set[int]] = {}
    for topic, partition in places:
        numbers.setdefault(topic, set()).add(partition)
    for topic, partitions in numbers.items():
        metadata = _metadata(sink, topic)
        first = metadata.orig_broker_id  # -1: of one whose number was not known yet
        found = {p: led for p, led in _partitions(metadata, topic).items() if p in partitions}
        alone = {p: led.leader for p, led in found.items() if first in {led.leader, -1}}
        for number in sorted({number for p in alone for number in found[p].replicas} - {first}):
            leaders = _said_by(sink, metadata, number, topic)
            for partition in alone.keys() & leaders.keys():
                if (leader := leaders[partition].leader) != alone[partition]:
                    client.renew(sink)
                    both = {first: str(alone[partition]), number: str(leader)}
                    raise _disagree(sink, (topic, partition), both, "ends may be old")
                if number != leader:
                    del alone[partition]
            if not alone:
                break


def _disagree(
    sink: config.Sink, place: tuple[str, int], leaders: Mapping[int, str], why: str
) -> SinkError:
    words = ", ".join(f"broker {by} says {leader}" for by, leader in sorted(leaders.items()))
    return SinkError(
        "sink.unreachable",
        f"the brokers do not agree who leads {place[0]}[{place[1]}] ({words}); {why}",
        where=f"sink.bootstrap_servers = {sink.bootstrap_servers}",
        suggestion="look for a broker that is cut off from the others; publishing goes on when they"
        " agree",
        retriable=True,
    )


def _leaders(sink: config.Sink, topic: str, partition: int) -> dict[int, str]:
    """By each broker that has a copy of a partition: which one leads it.

    Raises:
        SinkError: `sink.unreachable`, ….
    """
    leaders: dict[int, str] = {}
    metadata = _metadata(sink, topic)
    found = _partitions(metadata, topic).get(partition)
    for number in () if found is None else found.replicas:
        led = _said_by(sink, metadata, number, topic).get(partition)
        leaders[number] = "nothing" if led is None else str(led.leader)
    return leaders


def _metadata(sink: config.Sink, topic: str) -> Any:
    admin, _ = client.admin(sink)
    try:
        return client.call(admin.list_topics, topic, REACH_TIMEOUT)
    except KafkaException as exception:
        error = faults.kafka_error(exception)
        client.renew(sink)
        raise faults.fault(error, "asking who leads", sink) from exception


def _said_by(sink: config.Sink, metadata: Any, number: int, topic: str) -> dict[int, Any]:
    """A topic's partitions as one broker knows them; none where it does not answer."""
    broker = metadata.brokers.get(number)
    if broker is None:
        return {}
    host = str(broker.host)
    host = f"[{host}]" if ":" in host else host
    with suppress(KafkaException):
        # its first question goes to the only broker that it knows
        alone, _ = client.admin_of(sink, f"{host}:{broker.port}")
        return _partitions(client.call(alone.list_topics, topic, _FIRST_PATIENCE), topic)
    return {}


def _partitions(metadata: Any, topic: str) -> dict[int, Any]:
    return metadata.topics[topic].partitions or {}


_NEEDED = {AclOperation.READ: "Read", AclOperation.WRITE: "Write"}


def missing_rights(
    sink: config.Sink, timeout: float = REACH_TIMEOUT, *, late: bool
) -> dict[str, list[str]]:
    """What this account may not do with its topics and has to: Describe, Read, Write.

    Of a topic that is not there nothing is known, nor where the broker does not say.

    Args:
        late: whether late events are diverted to ``<topic>.late``; else it is read only: an index
            that was lost is built again from what was diverted before, too.
    """
    admin, _ = client.admin(sink)
    futures = admin.describe_topics(
        TopicCollection(list(sink.topics)),
        include_authorized_operations=True,
        request_timeout=timeout,
    )
    lacking: dict[str, list[str]] = {}
    for topic, future in futures.items():
        needed = dict(_NEEDED)
        if topic == sink.late_topic and not late:
            del needed[AclOperation.WRITE]
        try:
            allowed = future.result(timeout + 5).authorized_operations
        except KafkaException as exception:
            if faults.kafka_error(exception).code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                lacking[topic] = ["Describe", *needed.values()]
            continue
        except TimeoutError:
            continue
        if allowed and (names := [name for op, name in needed.items() if op not in allowed]):
            lacking[topic] = names
    return lacking


def _serve(admin: Any) -> None:
    try:
        client.call(admin.poll, 0)
    except KafkaException:
        return


def create(
    sink: config.Sink,
    topic: str,
    partitions: int,
    timeout: float = REACH_TIMEOUT,
    *,
    is_compacted: bool = False,
) -> int:
    """Makes a topic, unless somebody else does; its number of partitions.

    Raises:
        SinkError: as `check_topics`.
    """
    _create(sink, [topic], partitions, timeout, "compact" if is_compacted else "delete")
    return _wait_for(sink, [topic], timeout)[topic]


def _create(
    sink: config.Sink, topics: list[str], partitions: int, timeout: float, policy: str = "delete"
) -> None:
    admin, _ = client.admin(sink)
    new = [
        NewTopic(
            topic,
            partitions,
            sink.replication_factor,
            # What is published is the truth; and records carry the time of their event, so that
            # a retention by time would delete an old store's events as soon as they arrive. What
            # is not said here, a broker's own default decides.
            config={"retention.ms": "-1", "retention.bytes": "-1", "cleanup.policy": policy},
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
                raise faults.rights_missing(sink, {topic: ["Create"]}) from exception
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


def list_offsets(  # noqa: PLR0913 (options, by keyword)
    sink: config.Sink,
    partitions: list[tuple[str, int]],
    end: End,
    *,
    committed: bool = False,
    optional: frozenset[str] = frozenset(),
    timeout: float = REACH_TIMEOUT,
) -> dict[tuple[str, int], int]:
    """The low or high watermark, or with `committed` the last stable offset, of each partition.

    Topics in `optional` may be missing; they are then left out of the answer. A consumer asks:
    librdkafka's admin client (up to 2.16) frees its question twice where what it knows of the
    topic changes meanwhile (docs/hazards.md, "A question for offsets").

    Raises:
        SinkError: as `check_topics`.
    """
    consumer, client_log = client.asking_consumer(sink, committed=committed)
    _serve(consumer)  # what it has logged since the last call
    client_log.forget()
    at = OFFSET_BEGINNING if end == "earliest" else OFFSET_END
    deadline = time.monotonic() + timeout
    patience = min(_FIRST_PATIENCE, timeout)
    offsets: dict[tuple[str, int], int] = {}
    asking = set(partitions)
    while asking:
        met: KafkaError | None = None
        missing: str | None = None
        for place, offset, error in _asked(sink, consumer, sorted(asking), at, patience):
            if error is None:
                if offset >= 0:  # else: the connection was lost before the answer
                    offsets[place] = offset
                    asking.discard(place)
            elif error.code() in faults.MISSING and place[0] in optional:
                asking.discard(place)
            elif error.code() in faults.MISSING:
                missing = place[0]  # or so new that this broker does not know of it
            elif error.code() not in faults.MOMENTARY | _NO_ANSWER:
                raise faults.fault(error, f"asking for the ends of {place[0]}", sink)
            else:
                met = error
        if not asking:
            break
        # A broker that answers nothing may lead no longer: a new client asks who does, also where
        # this one gives up, for whoever asks next.
        _serve(consumer)
        last_error = client_log.last_error
        client.renew(sink)
        left = deadline - time.monotonic()
        if left <= 0:
            if missing is not None:
                raise faults.topic_missing(sink, missing)
            raise faults.unreachable(sink, "asking for offsets", timeout, last_error or met)
        time.sleep(0.1)
        patience = min(2 * patience, max(left, _FIRST_PATIENCE))
        consumer, client_log = client.asking_consumer(sink, committed=committed)
    return offsets


def _asked(
    sink: config.Sink, consumer: Any, places: list[tuple[str, int]], at: int, patience: float
) -> Iterator[tuple[tuple[str, int], int, KafkaError | None]]:
    """The offset of each partition, below 0 where none was given, or why there is none."""
    try:
        asked = [TopicPartition(topic, number, at) for topic, number in places]
        for answer in client.call(consumer.offsets_for_times, asked, patience):
            yield (answer.topic, answer.partition), answer.offset, answer.error
    except KafkaException as exception:
        error = faults.kafka_error(exception)
        if error.code() != KafkaError._UNKNOWN_PARTITION:
            for place in places:
                yield place, OFFSET_INVALID, error
            return
        # it knows none of them, and does not say why
        why = _errors(sink, {topic for topic, _ in places}, patience)
        for place in places:
            yield place, OFFSET_INVALID, why.get(place[0], error)


def _errors(sink: config.Sink, names: Iterable[str], timeout: float) -> dict[str, KafkaError]:
    """What the broker says of topics that it does not show."""
    admin, _ = client.admin(sink)
    errors: dict[str, KafkaError] = {}
    described = admin.describe_topics(TopicCollection(sorted(names)), request_timeout=timeout)
    for name, future in described.items():
        try:
            future.result(timeout + 5)
        except TimeoutError:
            errors[name] = KafkaError(KafkaError._TIMED_OUT)
        except KafkaException as exception:
            errors[name] = faults.kafka_error(exception)
    return errors
