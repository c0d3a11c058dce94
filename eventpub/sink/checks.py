"""What `eventpub doctor` says about the broker and the topics. Nothing is changed.

A broker that cannot be reached is said once; what this account may not read is no error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import KafkaException
from confluent_kafka.admin import ConfigResource  # type: ignore[attr-defined]  # not in its stubs

from eventpub import config
from eventpub.config import format_duration
from eventpub.errors import Check, EventpubError
from eventpub.sink import client, faults, fencing
from eventpub.sink.batch import AHEAD_OF_CLOCK
from eventpub.sink.faults import topic_gone, topic_missing
from eventpub.sink.missing_markers import PartitionId
from eventpub.sink.origin import Sources, check_sample, sources_of
from eventpub.sink.topics import (
    REACH_TIMEOUT,
    check_written,
    missing_rights,
    partition_counts,
    too_few_partitions,
    topic_ids,
)
from eventpub.words import counted

_LONGEST = (1 << 63) - 1
"""ms: no limit."""
_VERIFICATION = "transaction.partition.verification.enable"


@dataclass(frozen=True)
class Written:
    """What a publisher remembers of its topics: ids, next offsets, and the number of partitions."""

    ids: Mapping[str, str] = field(default_factory=dict)
    ends: Mapping[PartitionId, int] = field(default_factory=dict)
    partitions: int | None = None


def checks(  # noqa: PLR0913 (options, by keyword)
    sink: config.Sink,
    app_id: str,
    shards: int,
    *,
    late: bool = False,
    former_ids: Sequence[str] = (),
    written: Written = Written(),
) -> list[Check]:
    """Every check of the sink, in the order in which a user would fix what is wrong.

    Args:
        sink: the configuration.
        app_id: names the throw-away transactional id ``eventpub.<app_id>.doctor``.
        shards: of the publisher.
        late: True where late events are diverted to ``<topic>.late``.
        former_ids: application ids that the publisher had before.
        written: what it remembers of its topics.
    """
    try:
        found = partition_counts(sink)
    except EventpubError as error:
        return [_wrong("broker", error)]
    side = [sink.gaps_topic, sink.dead_topic, *([sink.late_topic] if late else [])]
    made = [Check("broker", "ok", f"reached at {sink.bootstrap_servers}")]
    made += _rights(sink, late)
    made.append(_topic(sink, found, shards, written))
    if sink.topic in found:
        made.append(_history(sink, sources_of(sink, app_id, former_ids), written))
    made += [_side_topic(sink, found, topic) for topic in side]
    if sink.delivery == "exactly_once":
        made.append(_transactions(sink, app_id))
    if sink.topic in found:
        made += _topic_settings(sink, _settings(sink, "topic", sink.topic))
    made += [
        check
        for topic in (sink.gaps_topic, sink.dead_topic)
        if topic in found
        for check in _side_settings(sink, topic, _settings(sink, "topic", topic))
    ]
    made += _broker_settings(sink, _settings(sink, "broker", _a_broker(sink)))
    return made


def _wrong(name: str, error: EventpubError) -> Check:
    message = error.message if error.where is None else f"{error.message} ({error.where})"
    return Check(name, "wrong", message, error.suggestion, error.code)


def _rights(sink: config.Sink, late: bool) -> list[Check]:
    lacking = missing_rights(sink, late=late)
    if not lacking:
        return []
    return [_wrong("rights", faults.rights_missing(sink, lacking))]


def _missing(sink: config.Sink, name: str, topic: str, partitions: int | None) -> Check:
    if sink.create_topics:
        count = partitions or sink.partitions
        said = f"{topic} is not there yet; run creates it, {counted(count, 'partition')}"
        return Check(name, "ok", said)
    return _wrong(name, topic_missing(sink, topic, partitions))


def _history(sink: config.Sink, sources: Sources, written: Written) -> Check:
    """Whether it is the topic that was written, and by this publisher alone."""
    name = "what stands on the topic"
    try:
        ids = topic_ids(sink, sink.topics)
        check_written(sink, ids, written.ids, written.ends)
        check_sample(sink, sources)
    except EventpubError as error:
        return _wrong(name, error)
    id_ = f"; its id is {ids[sink.topic]}" if sink.topic in ids else ""
    return Check(name, "ok", f"nothing of another publisher at the ends of its partitions{id_}")


def _topic(sink: config.Sink, found: Mapping[str, int], shards: int, written: Written) -> Check:
    name = "topic"
    partitions = found.get(sink.topic, sink.partitions)
    is_there = sink.topic in found
    if not is_there and any(t == sink.topic and end for (t, _), end in written.ends.items()):
        return _wrong(name, topic_gone(sink))
    if shards > partitions and (is_there or sink.create_topics):
        return _wrong(name, too_few_partitions(sink, shards, found.get(sink.topic)))
    if not is_there:
        return _missing(sink, name, sink.topic, None)
    if written.partitions not in {None, partitions}:
        return Check(
            name,
            "warn",
            f"{sink.topic} has {counted(partitions, 'partition')}, and had {written.partitions}"
            " when it was written last: events of one aggregate will stand in two of them; `run`"
            " reads all of them back once",
            "let consumers have read what is there before the publisher goes on, where they need"
            " each aggregate's order",
        )
    return Check(name, "ok", f"{sink.topic}, {counted(partitions, 'partition')}")


def _side_topic(sink: config.Sink, found: Mapping[str, int], topic: str) -> Check:
    name = f"side topic {topic.removeprefix(sink.topic)}"
    partitions = found.get(sink.topic)
    if topic not in found:
        return _missing(sink, name, topic, partitions)
    if partitions is not None and found[topic] != partitions:
        return Check(
            name,
            "wrong",
            f"{topic} has {counted(found[topic], 'partition')}, {sink.topic} has {partitions}",
            f"kafka-topics.sh --bootstrap-server {sink.bootstrap_servers} --alter --topic {topic}"
            f" --partitions {partitions}"
            if found[topic] < partitions
            else f"delete {topic} if it is empty, and let it be created again",
            "sink.partition_count",
        )
    return Check(name, "ok", f"{topic}, {counted(found[topic], 'partition')}")


def _transactions(sink: config.Sink, app_id: str) -> Check:
    name = "transactions"
    try:
        fencing.try_transactions(sink, app_id)
    except EventpubError as error:
        return _wrong(name, error)
    timeout = format_duration(sink.transaction_timeout)
    return Check(name, "ok", f"this account may use them; timeout {timeout}")


def _settings(sink: config.Sink, kind: str, name: str | None) -> dict[str, str]:
    """The effective settings of a topic or broker; empty where they may not be read."""
    if name is None:
        return {}
    admin, _ = client.admin(sink)
    futures: dict[Any, Any] = admin.describe_configs(
        [ConfigResource(kind, name)], request_timeout=REACH_TIMEOUT
    )
    try:
        entries = next(iter(futures.values())).result(REACH_TIMEOUT + 5)
    except (KafkaException, TimeoutError):
        return {}
    return {key: entry.value for key, entry in entries.items() if entry.value is not None}


def _a_broker(sink: config.Sink) -> str | None:
    admin, _ = client.admin(sink)
    try:
        brokers = client.call(admin.list_topics, sink.topic, REACH_TIMEOUT).brokers
    except KafkaException:
        return None
    return str(min(brokers)) if brokers else None


def _alter(sink: config.Sink, topic: str) -> str:
    return (
        f"kafka-configs.sh --bootstrap-server {sink.bootstrap_servers} --alter --entity-type topics"
        f" --entity-name {topic} --add-config"
    )


def _side_settings(sink: config.Sink, topic: str, settings: Mapping[str, str]) -> list[Check]:
    """Whether a side topic keeps what is written to it: a lost index is rebuilt from it, too."""
    forgets = {
        "cleanup.policy=delete": "compact" in settings.get("cleanup.policy", ""),
        "retention.ms=-1": int(settings.get("retention.ms", -1)) >= 0,
        "retention.bytes=-1": int(settings.get("retention.bytes", -1)) >= 0,
    }
    forgetting = [setting for setting, is_wanted in forgets.items() if is_wanted]
    if not forgetting:
        return []
    lost = (
        "with a lost index, an event of a gap whose record is gone counts as a duplicate, or as a"
        " conflict"
        if topic == sink.gaps_topic
        else "with a lost index, rows whose dead letter is gone are refused again"
    )
    return [
        Check(
            f"side topic {topic.removeprefix(sink.topic)} settings",
            "warn",
            f"{topic} does not keep all records ({', '.join(s.split('=')[0] for s in forgetting)}):"
            f" {lost}",
            f"{_alter(sink, topic)} {','.join(forgetting)}",
        )
    ]


_Fault = tuple[str, str]
"""What the topic does, and the fix: in it ``{alter}`` stands for the command up to the setting, and
``{delete}`` for the one that removes it."""


def _topic_settings(sink: config.Sink, settings: Mapping[str, str]) -> list[Check]:
    name = "topic settings"
    if not settings:
        return [Check(name, "ok", "this account may not read them (DescribeConfigs)")]
    limit = int(settings.get("max.message.bytes", 1_048_588))
    own = client.producer_settings(sink, None)
    found = [
        *_removed_events(settings),
        *_altered_times(settings),
        *_refused_batches(limit, int(own["batch.size"])),
        *_refused_by_client(limit, int(own["message.max.bytes"])),
    ]
    alter = _alter(sink, sink.topic)
    delete = alter.replace("--add-config", "--delete-config")
    return [
        Check(name, "warn", f"{sink.topic} {fault}", fix.format(alter=alter, delete=delete))
        for fault, fix in found
    ] or [Check(name, "ok", f"kept for good, records up to {limit} bytes")]


def _removed_events(settings: Mapping[str, str]) -> Iterator[_Fault]:
    """Settings by which events do not stay on the topic."""
    if "compact" in settings.get("cleanup.policy", ""):
        yield (
            "is compacted: of each aggregate only its last event is kept, and nothing of one whose"
            " last event has a NULL payload; with a lost index those are published again",
            "{alter} cleanup.policy=delete",
        )
    retention = int(settings.get("retention.ms", -1))
    if retention >= 0:
        yield (
            f"keeps events for {format_duration(retention * 1000)} after their create_time"
            " (retention.ms): of an older store most are removed as they arrive",
            "{alter} retention.ms=-1",
        )
    size = int(settings.get("retention.bytes", -1))
    if size >= 0:
        yield (
            f"keeps {size} bytes of each partition (retention.bytes): older events are removed,"
            " whether or not they were read",
            "{alter} retention.bytes=-1",
        )


def _altered_times(settings: Mapping[str, str]) -> Iterator[_Fault]:
    """Settings by which events are refused for their time, or get another one."""
    ahead = int(settings.get("message.timestamp.after.max.ms", 3_600_000))
    if ahead * 1000 < AHEAD_OF_CLOCK:
        yield (
            f"refuses records that are {format_duration(ahead * 1000)} ahead of the broker's clock"
            " (message.timestamp.after.max.ms), which a database's clock may be",
            "{alter} message.timestamp.after.max.ms=3600000",
        )
    behind = int(settings.get("message.timestamp.before.max.ms", _LONGEST))
    if behind < _LONGEST:
        yield (
            f"refuses records that are older than {format_duration(behind * 1000)}"
            " (message.timestamp.before.max.ms): older events become dead letters",
            "{delete} message.timestamp.before.max.ms",
        )
    if settings.get("message.timestamp.type", "CreateTime") != "CreateTime":
        yield (
            "gives records the broker's time (message.timestamp.type): create_time stands in"
            " ce_time only, and `verify` calls every record altered",
            "{alter} message.timestamp.type=CreateTime",
        )


def _refused_batches(limit: int, batch: int) -> Iterator[_Fault]:
    """Where what is sent at once may have more bytes than the topic takes."""
    if limit < batch:
        yield (
            f"takes {limit} bytes at once, batches may have {batch}: those that are refused are"
            " sent again record by record",
            f'"batch.size" = "{limit * 9 // 10}" in [sink.properties], or {{alter}}'
            f" max.message.bytes={batch * 12 // 10}",
        )


def _refused_by_client(limit: int, own: int) -> Iterator[_Fault]:
    """Where the client refuses what the topic would take."""
    if own < limit:
        yield (
            f"takes records up to {limit} bytes, the client up to {own} (message.max.bytes): larger"
            " ones become dead letters",
            f'"message.max.bytes" = "{limit}" in [sink.properties]',
        )


def _broker_settings(sink: config.Sink, settings: Mapping[str, str]) -> list[Check]:
    name = "broker settings"
    if sink.delivery != "exactly_once":
        return []
    if not settings:
        return [Check(name, "ok", "this account may not read them (DescribeConfigs)")]
    if settings.get(_VERIFICATION) == "true":
        return [Check(name, "ok", "a late record cannot enter an ended transaction")]
    old = _VERIFICATION not in settings
    return [
        Check(
            name,
            "warn",
            "the broker does not verify the partitions of a transaction"
            + (" (it is older than 3.6)" if old else f" ({_VERIFICATION}=false)")
            + ": a record that arrives late may leave a transaction open for ever",
            "use brokers 3.8 or newer" if old else f"set {_VERIFICATION}=true",
        )
    ]
