"""Do the topic and its side topics fit together, and who leads their partitions?

Required before publishing: the topic exists and is the one written before; `<topic>.gaps`,
`<topic>.dead` (and `<topic>.late` where late events are diverted) have as many partitions; there is
a partition for each shard. A topic that would remove or refuse events for their age stops `run`;
its other settings are only reported by `eventpub doctor`.

A broker cut off from the others keeps answering with old ends for partitions that it led. So an end
that has fallen, or not grown, is not believed from one broker alone if another one answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AclOperation, ConfigResource  # type: ignore[attr-defined]  # not in its stubs

from eventpub import config
from eventpub.config import format_duration, format_time
from eventpub.errors import SinkError, counted
from eventpub.sink import client, faults
from eventpub.sink.client import Clients
from eventpub.sink.topics import (
    REACH_TIMEOUT,
    create,
    described,
    list_offsets,
    metadata,
    partition_counts,
)

_KNOWN_WITHIN = 5.0
"""Seconds until a broker that has just started knows the existing topics."""
_NO_LIMIT = (1 << 63) - 1
"""ms."""
_PATIENCE = 2.0
"""Seconds for one broker to answer who leads a partition."""


def check_topics(
    clients: Clients,
    *,
    shards: int = 1,
    late: bool = False,
    was_written: bool = False,
) -> int:
    """The topic's partition count; creates missing topics if `create_topics` allows it.

    A topic that `was_written` before is not created again.

    Raises:
        SinkError: `sink.unreachable`, `sink.auth_failed`, `sink.not_authorized`,
            `sink.topic_missing`, `sink.partition_count`.
    """
    sink = clients.sink
    found = partition_counts(clients)
    deadline = clients.clock.monotonic() + _KNOWN_WITHIN
    while was_written and sink.topic not in found and clients.clock.monotonic() < deadline:
        clients.clock.sleep(0.2)
        found = partition_counts(clients)
    if lacking := missing_rights(clients, late=late):
        raise faults.rights_missing(sink, lacking)
    while True:
        for error in wrong_topics(
            sink, found, shards=shards, late=late, was_written=was_written
        ).values():
            raise error
        missing = [topic for topic in written_topics(sink, late=late) if topic not in found]
        if not missing:
            return found[sink.topic]
        found = create(clients, missing, found.get(sink.topic, sink.partitions))


_NEEDED = {AclOperation.READ: "Read", AclOperation.WRITE: "Write"}


def missing_rights(clients: Clients, *, late: bool) -> dict[str, list[str]]:
    """By topic, the operations that this account lacks: Describe, Read, Write.

    Missing topics, and brokers that do not report rights, are left out. Unless `late`, ``.late``
    is read only: a lost index is also rebuilt from events diverted before.
    """
    lacking: dict[str, list[str]] = {}
    answers = described(clients, clients.sink.topics, REACH_TIMEOUT, with_rights=True)
    for topic, answer in answers.items():
        needed = dict(_NEEDED)
        if topic == clients.sink.late_topic and not late:
            del needed[AclOperation.WRITE]
        if isinstance(answer, KafkaError):
            if answer.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                lacking[topic] = ["Describe", *needed.values()]
            continue
        allowed = answer.authorized_operations
        if allowed and (names := [name for op, name in needed.items() if op not in allowed]):
            lacking[topic] = names
    return lacking


def written_topics(sink: config.Sink, *, late: bool) -> list[str]:
    """The topic and the side topics that are written; with `late`, including ``<topic>.late``."""
    return [sink.topic, sink.gaps_topic, sink.dead_topic, *([sink.late_topic] if late else [])]


def wrong_topics(
    sink: config.Sink,
    found: Mapping[str, int],
    *,
    shards: int,
    late: bool,
    was_written: bool,
) -> dict[str, SinkError]:
    """By topic, why it can be neither written nor created; `found`: existing partition counts."""
    partitions = found.get(sink.topic, sink.partitions)
    wrong: dict[str, SinkError] = {}
    for topic in written_topics(sink, late=late):
        if topic not in found and topic == sink.topic and was_written:
            wrong[topic] = faults.topic_gone(sink, found.get(sink.gaps_topic, sink.partitions))
        elif topic not in found and not sink.create_topics:
            wrong[topic] = faults.topic_missing(sink, topic, partitions)
        elif topic == sink.topic and shards > partitions:
            wrong[topic] = _too_few_partitions(sink, shards, found.get(sink.topic))
        elif found.get(topic, partitions) != partitions:
            wrong[topic] = _unequal_partitions(sink, topic, found[topic], partitions)
    return wrong


def _unequal_partitions(sink: config.Sink, topic: str, count: int, partitions: int) -> SinkError:
    return SinkError(
        "sink.partition_count",
        f"{topic} has {counted(count, 'partition')}, {sink.topic} has {partitions};"
        " they must be equal",
        where=f"topic {topic}",
        suggestion=f"kafka-topics.sh --bootstrap-server {sink.bootstrap_servers} --alter"
        f" --topic {topic} --partitions {partitions}"
        if count < partitions
        else f"delete {topic} if it is empty; it is created again",
    )


def _too_few_partitions(sink: config.Sink, shards: int, partitions: int | None) -> SinkError:
    has, fix = f"has {partitions}", ""
    if partitions is None:
        has = f"is not there yet, and would be created with {sink.partitions}"
        fix = f"sink.partitions to at least {shards}, or "
    return SinkError(
        "sink.partition_count",
        f"{shards} shards need at least {shards} partitions; {sink.topic} {has}",
        where="run.shards",
        suggestion=f"set {fix}run.shards to at most {partitions or sink.partitions}",
    )


def recreated(sink: config.Sink, ids: Mapping[str, str], known: Mapping[str, str]) -> set[str]:
    """Topics with another id than known: all, if that of the events is one that is accepted.

    Raises `sink.topic_recreated` if it is not accepted.
    """
    found = {name for name, id_ in ids.items() if known.get(name, id_) != id_}
    if sink.topic not in found:
        return found
    if ids[sink.topic] != sink.accept_topic_id:
        raise faults.topic_remade(sink, ids[sink.topic])
    return set(sink.topics)


def check_written(
    clients: Clients,
    ids: Mapping[str, str],
    known: Mapping[str, str],
    ends: Mapping[tuple[str, int], int],
) -> dict[tuple[str, int], int]:
    """Check that the topic is the one written before, by its id, and reaches the `ends` written.

    Returns the `ends` that are still valid; raises `sink.topic_recreated`.
    """
    sink, made_again = clients.sink, recreated(clients.sink, ids, known)
    kept = {place: end for place, end in ends.items() if place[0] in set(sink.topics) - made_again}
    found = list_offsets(clients, list(kept), "latest", optional=frozenset(sink.topics[1:]))
    marker = 1 if sink.delivery == "exactly_once" else 0
    for place, end in found.items():
        if end < kept[place] - marker:  # a missing marker is one offset: the fold handles it
            raise tail_gone(clients, place, kept[place], end)
    return {place: kept[place] for place in found}


def describe(clients: Clients, kind: str, name: str) -> dict[str, str]:
    """Effective settings of a topic or broker; empty if they may not be read."""
    admin, _ = clients.admin()
    futures: dict[Any, Any] = admin.describe_configs(
        [ConfigResource(kind, name)], request_timeout=REACH_TIMEOUT
    )
    try:
        entries = next(iter(futures.values())).result(REACH_TIMEOUT + 5)
    except (KafkaException, TimeoutError):
        return {}
    return {key: entry.value for key, entry in entries.items() if entry.value is not None}


def alter(sink: config.Sink, topic: str) -> str:
    """The command that alters a topic, without the setting; `topic` may be a shell variable."""
    return (
        f"kafka-configs.sh --bootstrap-server {sink.bootstrap_servers} --alter --entity-type topics"
        f" --entity-name {topic} --add-config"
    )


def limits_of_age(sink: config.Sink, settings: Mapping[str, str]) -> list[tuple[int, str, str]]:
    """Event ages, ms, above which the topic keeps no event; with what it does, and the fix."""
    command, limits = alter(sink, sink.topic), []
    kept = int(settings.get("retention.ms", -1))
    by_create_time = settings.get("message.timestamp.type", "CreateTime") == "CreateTime"
    if kept >= 0 and by_create_time and "delete" in settings.get("cleanup.policy", "delete"):
        does = f"removes events {format_duration(kept * 1000)} after their create_time"
        limits.append((kept, f"{does} (retention.ms)", f"{command} retention.ms=-1"))
    taken = int(settings.get("message.timestamp.before.max.ms", _NO_LIMIT))
    if taken < _NO_LIMIT:
        does = f"refuses events older than {format_duration(taken * 1000)}"
        fix = f"{command.replace('--add-', '--delete-')} message.timestamp.before.max.ms"
        limits.append((taken, f"{does} (message.timestamp.before.max.ms)", fix))
    return limits


def check_age(clients: Clients, oldest: int, now: int) -> None:
    """Raise `sink.backlog_too_old` if the topic keeps no event of `oldest`; times in µs."""
    sink = clients.sink
    for limit, does, fix in limits_of_age(sink, describe(clients, "topic", sink.topic)):
        if (now - oldest) // 1000 > limit:
            raise SinkError(
                "sink.backlog_too_old",
                f"{sink.topic} {does}: the oldest event to publish, of {format_time(oldest)},"
                " would not stay on it",
                where=f"topic {sink.topic}",
                suggestion=f"{fix}  (set it again once consumers have read the backlog)",
            )


def tail_gone(clients: Clients, place: tuple[str, int], saved: int, end: int) -> SinkError:
    """The error for a partition that lost its end, or whose leader the brokers disagree on."""
    topic, partition = place
    cluster = metadata(clients, topic)
    found = _partitions(cluster, topic).get(partition)
    by_broker = {
        number: _partitions_said_by(clients, cluster, number, topic).get(partition)
        for number in (() if found is None else found.replicas)
    }
    leaders = {n: None if said is None else said.leader for n, said in by_broker.items()}
    if len(set(leaders.values())) < 2:
        return faults.records_gone(clients.sink, place, saved, end)
    why = f"one has answered with the end {end}, but {saved} was reached before"
    return _disagree(clients, place, leaders, why)


def check_leaders(clients: Clients, places: Iterable[tuple[str, int]]) -> None:
    """Raise `sink.unreachable` if a second broker answers and names other leaders."""
    numbers: dict[str, set[int]] = {}
    for topic, partition in places:
        numbers.setdefault(topic, set()).add(partition)
    for topic, partitions in numbers.items():
        cluster = metadata(clients, topic)
        first = cluster.orig_broker_id  # -1: its number was not known yet
        found = {p: led for p, led in _partitions(cluster, topic).items() if p in partitions}
        alone = {p: led.leader for p, led in found.items() if first in {led.leader, -1}}
        for number in sorted({number for p in alone for number in found[p].replicas} - {first}):
            said = _partitions_said_by(clients, cluster, number, topic)
            for partition in alone.keys() & said.keys():
                if (leader := said[partition].leader) != alone[partition]:
                    both = {first: alone[partition], number: leader}
                    raise _disagree(clients, (topic, partition), both, "ends may be old")
                if number != leader:
                    del alone[partition]
            if not alone:
                break


def _disagree(
    clients: Clients, place: tuple[str, int], leaders: Mapping[int, int | None], why: str
) -> SinkError:
    clients.renew()  # the old ones may ask the wrong broker for 15 minutes
    words = ", ".join(
        f"broker {number} {'does not answer' if leader is None else f'says {leader}'}"
        for number, leader in sorted(leaders.items())
    )
    return SinkError(
        "sink.unreachable",
        f"the brokers disagree about the leader of {place[0]}[{place[1]}] ({words}); {why}",
        where=f"sink.bootstrap_servers = {clients.sink.bootstrap_servers}",
        suggestion="look for a broker that is cut off from the others; publishing resumes when they"
        " agree",
        retriable=True,
    )


def _partitions_said_by(clients: Clients, cluster: Any, number: int, topic: str) -> dict[int, Any]:
    """A topic's partitions according to one broker; empty if it does not answer."""
    broker = cluster.brokers.get(number)
    if broker is None:
        return {}
    host = f"[{broker.host}]" if ":" in broker.host else broker.host
    with suppress(KafkaException):
        # its first request goes to the only broker it knows
        alone, _ = clients.admin_of(f"{host}:{broker.port}")
        return _partitions(client.call(alone.list_topics, topic, _PATIENCE), topic)
    return {}


def _partitions(cluster: Any, topic: str) -> dict[int, Any]:
    return cluster.topics[topic].partitions or {}
