"""What `eventpub doctor` says about the broker and the topics. Nothing is changed.

A broker that cannot be reached is said once; what this account may not read is no error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from confluent_kafka import KafkaException
from confluent_kafka.admin import ConfigResource  # type: ignore[attr-defined]  # not in its stubs

from eventpub import config
from eventpub.config import format_duration
from eventpub.errors import Check, EventpubError
from eventpub.sink import client, owning
from eventpub.sink.faults import topic_missing
from eventpub.sink.topics import REACH_TIMEOUT, partition_counts

_VERIFICATION = "transaction.partition.verification.enable"


def checks(sink: config.Sink, app_id: str, shards: int, *, late: bool = False) -> list[Check]:
    """Every check of the sink, in the order in which somebody would mend what is wrong.

    Args:
        sink: the configuration.
        app_id: names the throw-away transactional id ``eventpub.<app_id>.doctor``.
        shards: of the publisher.
        late: True where late events are diverted to ``<topic>.late``.
    """
    try:
        found = partition_counts(sink)
    except EventpubError as error:
        return [_wrong("broker", error)]
    side = [sink.gaps_topic, sink.dead_topic, *([sink.late_topic] if late else [])]
    made = [Check("broker", "ok", f"reached at {sink.bootstrap_servers}")]
    made.append(_topic(sink, found, shards))
    made += [_side_topic(sink, found, topic) for topic in side]
    if sink.delivery == "exactly_once":
        made.append(_transactions(sink, app_id))
    if sink.topic in found:
        made += _topic_settings(sink, _settings(sink, "topic", sink.topic))
    made += _broker_settings(sink, _settings(sink, "broker", _a_broker(sink)))
    return made


def _wrong(name: str, error: EventpubError) -> Check:
    message = error.message if error.where is None else f"{error.message} ({error.where})"
    return Check(name, "wrong", message, error.suggestion, error.code)


def _missing(sink: config.Sink, name: str, topic: str, partitions: int | None) -> Check:
    if sink.create_topics:
        count = partitions or sink.partitions
        return Check(name, "ok", f"{topic} is not there yet; run creates it, {count} partitions")
    return _wrong(name, topic_missing(sink, topic, partitions))


def _topic(sink: config.Sink, found: Mapping[str, int], shards: int) -> Check:
    name = "topic"
    partitions = found.get(sink.topic, sink.partitions)
    if shards > partitions:
        return Check(
            name,
            "wrong",
            f"{shards} shards need at least {shards} partitions; {sink.topic} has {partitions}",
            f"set spark.shards to at most {partitions}",
            "sink.partition_count",
        )
    if sink.topic not in found:
        return _missing(sink, name, sink.topic, None)
    return Check(name, "ok", f"{sink.topic}, {partitions} partitions")


def _side_topic(sink: config.Sink, found: Mapping[str, int], topic: str) -> Check:
    name = f"side topic {topic.removeprefix(sink.topic)}"
    partitions = found.get(sink.topic)
    if topic not in found:
        return _missing(sink, name, topic, partitions)
    if partitions is not None and found[topic] != partitions:
        return Check(
            name,
            "wrong",
            f"{topic} has {found[topic]} partitions, {sink.topic} has {partitions}",
            f"kafka-topics.sh --bootstrap-server {sink.bootstrap_servers} --alter --topic {topic}"
            f" --partitions {partitions}"
            if found[topic] < partitions
            else f"delete {topic} if it is empty, and let it be created again",
            "sink.partition_count",
        )
    return Check(name, "ok", f"{topic}, {found[topic]} partitions")


def _transactions(sink: config.Sink, app_id: str) -> Check:
    name = "transactions"
    try:
        owning.try_transactions(sink, app_id)
    except EventpubError as error:
        return _wrong(name, error)
    timeout = format_duration(sink.transaction_timeout)
    return Check(name, "ok", f"this account may use them; timeout {timeout}")


def _settings(sink: config.Sink, kind: str, name: str | None) -> dict[str, str]:
    """The effective settings of a topic or broker; empty where they may not be read."""
    if name is None:
        return {}
    admin, _ = client.admin(sink)
    asked: dict[Any, Any] = admin.describe_configs(
        [ConfigResource(kind, name)], request_timeout=REACH_TIMEOUT
    )
    try:
        entries = next(iter(asked.values())).result(REACH_TIMEOUT + 5)
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


def _topic_settings(sink: config.Sink, settings: Mapping[str, str]) -> list[Check]:
    name = "topic settings"
    if not settings:
        return [Check(name, "ok", "this account may not read them (DescribeConfigs)")]
    alter = (
        f"kafka-configs.sh --bootstrap-server {sink.bootstrap_servers} --alter --entity-type topics"
        f" --entity-name {sink.topic} --add-config"
    )
    found = []
    if "compact" in settings.get("cleanup.policy", ""):
        found.append(
            Check(
                name,
                "warn",
                f"{sink.topic} is compacted: of each aggregate only its last event is kept",
                f"{alter} cleanup.policy=delete",
            )
        )
    retention = int(settings.get("retention.ms", -1))
    if retention >= 0:
        found.append(
            Check(
                name,
                "warn",
                f"{sink.topic} keeps events for {format_duration(retention * 1000)} after their"
                " create_time (retention.ms): of an older store most are removed as they arrive",
                f"{alter} retention.ms=-1",
            )
        )
    limit = int(settings.get("max.message.bytes", 1_048_588))
    batch = int(client.producer_settings(sink, None)["batch.size"])
    if limit < batch:
        found.append(
            Check(
                name,
                "warn",
                f"{sink.topic} takes {limit} bytes at once, batches may have {batch}: those that"
                " are refused are sent again record by record",
                f'"batch.size" = "{limit * 9 // 10}" in [sink.properties], or {alter}'
                f" max.message.bytes={batch * 12 // 10}",
            )
        )
    return found or [Check(name, "ok", f"kept for good, records up to {limit} bytes")]


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
