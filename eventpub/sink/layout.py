"""The topic and its side topics: do they fit together, and do they keep what is published?

What must hold before anything is published: the topic exists, and is the one that was written;
`<topic>.gaps`, `<topic>.dead` (and `<topic>.late` where late events are diverted) exist with the
same number of partitions; there are at least as many partitions as shards.

Of the topic's settings, most are only said by `eventpub doctor`. A topic that would remove or
refuse what is about to be published, for its age, stops `run` as well: it would be gone at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaException
from confluent_kafka.admin import ConfigResource  # type: ignore[attr-defined]  # not in its stubs

from eventpub import config
from eventpub.config import format_duration, format_time
from eventpub.errors import SinkError
from eventpub.sink import client_settings, faults
from eventpub.sink.batch import AHEAD_OF_CLOCK
from eventpub.sink.client import Clients
from eventpub.sink.leaders import tail_gone
from eventpub.sink.topics import (
    REACH_TIMEOUT,
    create,
    list_offsets,
    missing_rights,
    partition_counts,
)
from eventpub.terminal import counted

_KNOWN_WITHIN = 5.0
"""Seconds in which a broker that has just started knows of the topics that are there."""

_LONGEST = (1 << 63) - 1
"""ms: no limit."""


@dataclass(frozen=True)
class TopicLayout:
    """What was found: `created` are the topics that were missing."""

    topic: str
    partitions: int
    created: tuple[str, ...]


def check_topics(
    clients: Clients,
    *,
    shards: int = 1,
    late: bool = False,
    was_written: bool = False,
    timeout: float = REACH_TIMEOUT,
) -> TopicLayout:
    """The topic's layout; what is missing is created where `create_topics` allows it.

    Args:
        shards: of the publisher; at most the topic's partitions.
        late: True where late events are diverted to ``<topic>.late``.
        was_written: this publisher has written to the topic before: it is not created again.

    Raises:
        SinkError: `sink.unreachable`, `sink.auth_failed`, `sink.not_authorized`,
            `sink.topic_missing`, `sink.partition_count`.
    """
    sink = clients.sink
    side = (sink.gaps_topic, sink.dead_topic, *((sink.late_topic,) if late else ()))
    found = partition_counts(clients, timeout)
    deadline = clients.clock.monotonic() + _KNOWN_WITHIN
    while was_written and sink.topic not in found and clients.clock.monotonic() < deadline:
        clients.clock.sleep(0.2)
        found = partition_counts(clients, timeout)
    if lacking := missing_rights(clients, timeout, late=late):
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
        found = create(clients, missing, partitions, timeout)
        partitions = found[sink.topic]
    for topic in side:
        if found[topic] != partitions:
            raise unequal_partitions(sink, topic, found)
    return TopicLayout(sink.topic, partitions, tuple(missing))


def unequal_partitions(sink: config.Sink, topic: str, counts: Mapping[str, int]) -> SinkError:
    """The error of a side topic that has not as many partitions as the topic."""
    count, partitions = counts[topic], counts[sink.topic]
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


def check_written(
    clients: Clients,
    ids: Mapping[str, str],
    known: Mapping[str, str],
    ends: Mapping[tuple[str, int], int],
) -> dict[tuple[str, int], int]:
    """Whether the topic is still the one that was written, to where it was written.

    Args:
        ids: of the topics that are there.
        known: of those that were written.
        ends: next offsets that were reached.

    Returns:
        Those of them that still mean something.

    Raises:
        SinkError: `sink.topic_recreated`, or as `check_topics`.
    """
    sink = clients.sink
    made_again = {name for name, id_ in ids.items() if known.get(name, id_) != id_}
    if sink.topic in made_again:
        if ids[sink.topic] != sink.accept_topic_id:
            raise faults.topic_remade(sink, ids[sink.topic])
        made_again = set(sink.topics)
    kept = {place: end for place, end in ends.items() if place[0] in set(sink.topics) - made_again}
    found = list_offsets(clients, list(kept), "latest", optional=frozenset(sink.topics[1:]))
    marker = 1 if sink.delivery == "exactly_once" else 0
    for place, end in found.items():
        if end < kept[place] - marker:  # one offset less: a marker is missing, a fold sees to it
            raise tail_gone(clients, place, kept[place], end)
    return {place: kept[place] for place in found}


def describe(clients: Clients, kind: str, name: str) -> dict[str, str]:
    """The effective settings of a topic or broker; empty where they may not be read."""
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
    """The command that sets what follows it for a topic; a shell's variable, too."""
    return (
        f"kafka-configs.sh --bootstrap-server {sink.bootstrap_servers} --alter --entity-type topics"
        f" --entity-name {topic} --add-config"
    )


def faults_of(sink: config.Sink, settings: Mapping[str, str]) -> list[tuple[str, str]]:
    """Settings of the topic that break the guarantees, each with the fix."""
    own = client_settings.producer_settings(sink, None)
    limit = largest_record(settings)
    batch, most = int(own["batch.size"]), int(own["message.max.bytes"])
    add = alter(sink, sink.topic)
    delete = add.replace("--add-config", "--delete-config")
    retention, size = (int(settings.get(f"retention.{name}", -1)) for name in ("ms", "bytes"))
    ahead = 1000 * int(settings.get("message.timestamp.after.max.ms", 3_600_000))
    taken = _longest_taken(settings)
    by_age = " after their create_time: older ones are removed as they arrive"
    found = [
        (
            "compact" in settings.get("cleanup.policy", ""),
            "is compacted: of each aggregate only its last event is kept, and nothing of one whose"
            " last event has a NULL payload; with a lost index those are published again",
            f"{add} cleanup.policy=delete",
        ),
        (
            retention >= 0,
            f"keeps events for {format_duration(max(0, retention) * 1000)} (retention.ms)"
            + by_age * (_longest_kept(settings) is not None),
            f"{add} retention.ms=-1",
        ),
        (
            size >= 0,
            f"keeps {size} bytes of each partition (retention.bytes): older events are removed,"
            " whether or not they were read",
            f"{add} retention.bytes=-1",
        ),
        (
            ahead < AHEAD_OF_CLOCK,
            f"refuses records that are {format_duration(ahead)} ahead of the broker's clock"
            " (message.timestamp.after.max.ms), which a database's clock may be",
            f"{add} message.timestamp.after.max.ms=3600000",
        ),
        (
            taken is not None,
            f"refuses records that are older than {format_duration((taken or 0) * 1000)}"
            " (message.timestamp.before.max.ms): older events become dead letters",
            f"{delete} message.timestamp.before.max.ms",
        ),
        (
            settings.get("message.timestamp.type", "CreateTime") != "CreateTime",
            "gives records the broker's time (message.timestamp.type): create_time is in"
            " ce_time only, and `verify` calls every record altered",
            f"{add} message.timestamp.type=CreateTime",
        ),
        (
            limit < batch,
            f"takes {limit} bytes at once, but batches may have {batch}: refused ones are sent"
            " again record by record",
            f'"batch.size" = "{limit * 9 // 10}" in [sink.properties], or {add}'
            f" max.message.bytes={batch * 12 // 10}",
        ),
        (
            most < limit,
            f"takes records up to {limit} bytes, the client up to {most} (message.max.bytes):"
            " larger ones become dead letters",
            f'"message.max.bytes" = "{limit}" in [sink.properties]',
        ),
    ]
    return [(fault, fix) for is_so, fault, fix in found if is_so]


def largest_record(settings: Mapping[str, str]) -> int:
    """Bytes that the topic takes at once."""
    return int(settings.get("max.message.bytes", 1_048_588))


def _longest_kept(settings: Mapping[str, str]) -> int | None:
    """Age of an event at which it is removed, ms; None: it is not, for its age."""
    kept = int(settings.get("retention.ms", -1))
    by_create_time = settings.get("message.timestamp.type", "CreateTime") == "CreateTime"
    deletes = "delete" in settings.get("cleanup.policy", "delete")
    return kept if kept >= 0 and by_create_time and deletes else None


def _longest_taken(settings: Mapping[str, str]) -> int | None:
    """Age of an event from which on it is refused, ms; None: none is."""
    taken = int(settings.get("message.timestamp.before.max.ms", _LONGEST))
    return taken if taken < _LONGEST else None


def check_age(clients: Clients, oldest: int, now: int) -> None:
    """Whether the topic takes and keeps events that are so old, as far as that may be read.

    Args:
        oldest: `create_time` of the oldest event that is to be published, µs.
        now: the database's time, µs.

    Raises:
        SinkError: `sink.backlog_too_old`.
    """
    sink = clients.sink
    settings = describe(clients, "topic", sink.topic)
    age = (now - oldest) // 1000
    kept, taken = _longest_kept(settings), _longest_taken(settings)
    command = alter(sink, sink.topic)
    if kept is not None and age > kept:
        does = (
            f"removes events {format_duration(kept * 1000)} after their create_time (retention.ms)"
        )
        fix = f"{command} retention.ms=-1"
    elif taken is not None and age > taken:
        does = (
            f"refuses events older than {format_duration(taken * 1000)}"
            " (message.timestamp.before.max.ms)"
        )
        fix = f"{command.replace('--add-', '--delete-')} message.timestamp.before.max.ms"
    else:
        return
    raise SinkError(
        "sink.backlog_too_old",
        f"{sink.topic} {does}: the oldest event to publish, of {format_time(oldest)}, would not"
        " stay on it",
        where=f"topic {sink.topic}",
        suggestion=f"{fix}  (set it again once consumers have read the backlog)",
    )
