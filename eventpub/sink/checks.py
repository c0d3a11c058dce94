"""Broker and topic checks of `eventpub doctor`; settings this account may not read are no error."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from eventpub import config
from eventpub.config import format_duration
from eventpub.errors import Check, EventpubError, counted
from eventpub.sink import faults
from eventpub.sink.batch import AHEAD_OF_CLOCK
from eventpub.sink.client import Clients
from eventpub.sink.client_settings import producer_settings
from eventpub.sink.layout import (
    alter,
    check_written,
    describe,
    limits_of_age,
    missing_rights,
    written_topics,
    wrong_topics,
)
from eventpub.sink.markers import topic_missing
from eventpub.sink.numbered import markers_of
from eventpub.sink.reading import check_sample
from eventpub.sink.records import PartitionId
from eventpub.sink.topics import counts_of, metadata, topic_ids
from eventpub.sink.transaction import fence

Weakness = tuple[Literal["warn", "wrong"], str, str | None]
"""Status, meaning, and the better setting; None: add replicas."""
_TRANSACTIONS = "__transaction_state"
_VERIFICATION = "transaction.partition.verification.enable"


@dataclass(frozen=True)
class Written:
    """What a publisher remembers of its topics: ids, next offsets, and the partition count."""

    ids: Mapping[str, str] = field(default_factory=dict)
    ends: Mapping[PartitionId, int] = field(default_factory=dict)
    partitions: int | None = None


def checks(  # noqa: PLR0913 (options, by keyword)
    clients: Clients,
    app_id: str,
    shards: int,
    *,
    late: bool = False,
    written: Written = Written(),
    is_numbered: bool = False,
) -> list[Check]:
    """Every check of the sink, in the order in which to fix problems."""
    sink = clients.sink
    try:
        cluster = metadata(clients)
    except EventpubError as error:
        return [Check.wrong("broker", error)]
    found = counts_of(cluster)
    made = [Check("broker", "ok", f"reached at {sink.bootstrap_servers}")]
    if lacking := missing_rights(clients, late=late):
        made.append(Check.wrong("rights", faults.rights_missing(sink, lacking)))
    of_topic, *of_side = _topics(sink, found, shards, written, late=late).values()
    made.append(of_topic)
    if sink.topic in found:
        made.append(_history(clients, app_id, written))
    made += of_side
    markers = markers_of(sink)
    if is_numbered and not sink.create_topics and markers not in found:
        made.append(Check.wrong("side topic .batches", topic_missing(sink, markers)))
    if sink.delivery == "exactly_once":
        made.append(_transactions(clients, app_id))
    if sink.topic in found:
        made += _topic_settings(sink, describe(clients, "topic", sink.topic))
    for topic in (t for t in (sink.gaps_topic, sink.dead_topic) if t in found):
        made += _kept(sink, topic, describe(clients, "topic", topic))
    made += _replication(clients, cluster, written_topics(sink, late=late))
    if sink.delivery == "exactly_once":
        broker = describe(clients, "broker", str(min(cluster.brokers)))
        made.append(_broker_settings(sink, broker))
    return made


def _history(clients: Clients, app_id: str, written: Written) -> Check:
    """Whether this is the topic written before, by this publisher only."""
    name = "records on the topic"
    try:
        ids = topic_ids(clients, clients.sink.topics)
        check_written(clients, ids, written.ids, written.ends)
        check_sample(clients, app_id)
    except EventpubError as error:
        return Check.wrong(name, error)
    id_ = f"; its id is {ids[clients.sink.topic]}" if clients.sink.topic in ids else ""
    return Check(name, "ok", f"nothing of another publisher at the ends of its partitions{id_}")


def _topics(
    sink: config.Sink, found: Mapping[str, int], shards: int, written: Written, *, late: bool
) -> dict[str, Check]:
    was_written = any(topic == sink.topic and end for (topic, _), end in written.ends.items())
    wrong = wrong_topics(sink, found, shards=shards, late=late, was_written=was_written)
    partitions = found.get(sink.topic, sink.partitions)
    checks = {}
    for topic in written_topics(sink, late=late):
        name = "topic" if topic == sink.topic else f"side topic {topic.removeprefix(sink.topic)}"
        count = counted(partitions, "partition")
        if topic in wrong:
            checks[topic] = Check.wrong(name, wrong[topic])
        elif topic not in found:
            said = f"{topic} is not there yet; run creates it, {count}"
            checks[topic] = Check(name, "ok", said)
        elif topic == sink.topic and written.partitions not in {None, partitions}:
            checks[topic] = Check(
                name,
                "warn",
                f"{topic} has {count}, but had {written.partitions} when it was last written: an"
                " aggregate's events may be in two partitions; `run` reads all of them back once",
                "if consumers need each aggregate's order, let them catch up before you restart the"
                " publisher",
            )
        else:
            checks[topic] = Check(name, "ok", f"{topic}, {count}")
    return checks


def _transactions(clients: Clients, app_id: str) -> Check:
    name = "transactions"
    try:
        fence(clients, app_id, "doctor")  # an id that no shard has
    except EventpubError as error:
        return Check.wrong(name, error)
    timeout = format_duration(clients.sink.transaction_timeout)
    return Check(name, "ok", f"this account may use them; timeout {timeout}")


def _kept(sink: config.Sink, topic: str, settings: Mapping[str, str]) -> list[Check]:
    """Side topics must keep every record: a lost index is rebuilt from them, too."""
    fixes = [
        setting
        for setting, is_wrong in (
            ("cleanup.policy=delete", "compact" in settings.get("cleanup.policy", "")),
            ("retention.ms=-1", int(settings.get("retention.ms", -1)) >= 0),
            ("retention.bytes=-1", int(settings.get("retention.bytes", -1)) >= 0),
        )
        if is_wrong
    ]
    said = (
        f"{topic} does not keep all records ({', '.join(s.split('=')[0] for s in fixes)}): with a"
        " lost index, what it no longer has is decided again"
    )
    name = f"side topic {topic.removeprefix(sink.topic)} settings"
    return [Check(name, "warn", said, f"{alter(sink, topic)} {','.join(fixes)}")] if fixes else []


def _topic_settings(sink: config.Sink, settings: Mapping[str, str]) -> list[Check]:
    name = "topic settings"
    if not settings:
        return [Check(name, "ok", "this account may not read them (DescribeConfigs)")]
    own = producer_settings(sink, None)
    batch, most = int(own["batch.size"]), int(own["message.max.bytes"])
    limit = int(settings.get("max.message.bytes", 1_048_588))
    retention, size = (int(settings.get(f"retention.{name}", -1)) for name in ("ms", "bytes"))
    ahead = 1000 * int(settings.get("message.timestamp.after.max.ms", 3_600_000))
    add, aged = alter(sink, sink.topic), limits_of_age(sink, settings)
    found = [(does, fix) for _, does, fix in aged]
    if "compact" in settings.get("cleanup.policy", ""):
        does = "is compacted: of each aggregate only its last event is kept, and nothing of one"
        does += " whose last event has a NULL payload; with a lost index those are published again"
        found.append((does, f"{add} cleanup.policy=delete"))
    if retention >= 0 and not any("retention.ms" in does for _, does, _ in aged):
        does = f"keeps events for {format_duration(retention * 1000)} (retention.ms)"
        found.append((does, f"{add} retention.ms=-1"))
    if size >= 0:
        does = f"keeps {size} bytes of each partition (retention.bytes), whether or not events"
        found.append((f"{does} were read", f"{add} retention.bytes=-1"))
    if ahead < AHEAD_OF_CLOCK:
        does = f"refuses records that are {format_duration(ahead)} ahead of the broker's clock"
        does += " (message.timestamp.after.max.ms), which a database's clock may be"
        found.append((does, f"{add} message.timestamp.after.max.ms=3600000"))
    if settings.get("message.timestamp.type", "CreateTime") != "CreateTime":
        does = "gives records the broker's time (message.timestamp.type): create_time is in"
        does += " ce_time only, and `verify` calls every record altered"
        found.append((does, f"{add} message.timestamp.type=CreateTime"))
    if limit < batch:
        does = f"takes {limit} bytes at once, but batches may have {batch}: refused ones are sent"
        fix = f'"batch.size" = "{limit * 9 // 10}" in [sink.properties], or {add}'
        found.append(
            (f"{does} again record by record", f"{fix} max.message.bytes={batch * 12 // 10}")
        )
    if most < limit:
        does = f"takes records up to {limit} bytes, the client up to {most} (message.max.bytes):"
        fix = f'"message.max.bytes" = "{limit}" in [sink.properties]'
        found.append((f"{does} larger ones become dead letters", fix))
    return [Check(name, "warn", f"{sink.topic} {does}", fix) for does, fix in found] or [
        Check(name, "ok", f"kept for good, records up to {limit} bytes")
    ]


def _broker_settings(sink: config.Sink, settings: Mapping[str, str]) -> Check:
    name = "broker settings"
    if settings.get(_VERIFICATION) != "false":
        return Check(name, "ok", "a late record cannot enter an ended transaction")
    return Check(
        name,
        "warn",
        f"the broker does not verify the partitions of a transaction ({_VERIFICATION}=false): a"
        " record that arrives late may leave a transaction open for ever",
        f"kafka-configs.sh --bootstrap-server {sink.bootstrap_servers} --alter --entity-type"
        f" brokers --entity-default --add-config {_VERIFICATION}=true",
    )


def _replication(clients: Clients, cluster: Any, topics: Sequence[str]) -> list[Check]:
    sink = clients.sink
    name, brokers = "replication", counted(len(cluster.brokers), "broker")
    written = [*topics, *([_TRANSACTIONS] if sink.delivery == "exactly_once" else [])]
    weak: dict[Weakness, list[str]] = {}
    for topic in (each for each in written if each in cluster.topics):
        replicas = (len(p.replicas) for p in cluster.topics[topic].partitions.values())
        copies, settings = min(replicas, default=0), describe(clients, "topic", topic)
        for weakness in _weaknesses(copies, min(3, len(cluster.brokers)), settings):
            weak.setdefault(weakness, []).append(topic)
    made = [
        Check(name, status, f"{', '.join(found)}: {text}", _alter_all(sink, found, setting))
        for (status, text, setting), found in weak.items()
    ]
    is_missing = not set(topics) <= cluster.topics.keys()
    if sink.create_topics and is_missing and sink.replication_factor > len(cluster.brokers):
        made.append(
            Check(
                name,
                "wrong",
                f"{brokers} cannot keep {sink.replication_factor} copies of the topics that run"
                " creates",
                f"set sink.replication_factor = {min(3, len(cluster.brokers))}, or create the"
                " topics yourself",
                "sink.too_few_brokers",
            )
        )
    return made or [Check(name, "ok", f"as many copies as {brokers} can keep, or 3")]


def _weaknesses(copies: int, wanted: int, settings: Mapping[str, str]) -> Iterator[Weakness]:
    in_sync = int(settings.get("min.insync.replicas", max(1, copies - 1)))
    better = f"min.insync.replicas={max(1, copies - 1)}"
    if in_sync > copies:
        said = f"can never take a record: min.insync.replicas is {in_sync}, and copies are {copies}"
        yield "wrong", said, better
    elif copies > 2 and in_sync == copies:
        said = "nothing is published while one broker is away (min.insync.replicas)"
        yield "warn", said, better
    elif copies > 2 and in_sync < 2:
        said = "what is committed may be on one broker only, and lost with it (min.insync.replicas)"
        yield "warn", said, "min.insync.replicas=2"
    if copies > 1 and settings.get("unclean.leader.election.enable") == "true":
        said = "a broker that lacks committed records may become the leader, and they are lost"
        setting = "unclean.leader.election.enable"
        yield "warn", f"{said} ({setting})", f"{setting}=false"
    if copies < wanted:
        said = f"fewer than {counted(wanted, 'copy', 'copies')}: what a broker's disk loses may be"
        yield "warn", f"{said} gone", None


def _alter_all(sink: config.Sink, topics: Sequence[str], setting: str | None) -> str:
    """The command that applies `setting` to the topics; None: they lack replicas."""
    if setting is None:
        return "add replicas to the partitions with kafka-reassign-partitions.sh"
    if len(topics) == 1:
        return f"{alter(sink, topics[0])} {setting}"
    return f"for topic in {' '.join(topics)}; do {alter(sink, '$topic')} {setting}; done"
