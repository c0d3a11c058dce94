"""What a topic's settings do to the events that are published to it.

Most are only said by `eventpub doctor`. A topic that would remove or refuse what is about to be
published, for its age, stops `run` as well: it would be published, and be gone at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from confluent_kafka import KafkaException
from confluent_kafka.admin import ConfigResource  # type: ignore[attr-defined]  # not in its stubs

from eventpub import config
from eventpub.config import format_duration, format_time
from eventpub.errors import SinkError
from eventpub.sink import client
from eventpub.sink.batch import AHEAD_OF_CLOCK
from eventpub.sink.topics import REACH_TIMEOUT

_LONGEST = (1 << 63) - 1
"""ms: no limit."""


_Fault = tuple[str, str]
"""What the topic does, and the fix: in it ``{alter}`` stands for the command up to the setting, and
``{delete}`` for the one that removes it."""


def describe(sink: config.Sink, kind: str, name: str) -> dict[str, str]:
    """The effective settings of a topic or broker; empty where they may not be read."""
    admin, _ = client.admin(sink)
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
    limit = largest_record(settings)
    own = client.producer_settings(sink, None)
    add = alter(sink, sink.topic)
    delete = add.replace("--add-config", "--delete-config")
    found = [
        *_removed_events(settings),
        *_altered_times(settings),
        *_refused_batches(limit, int(own["batch.size"])),
        *_refused_by_client(limit, int(own["message.max.bytes"])),
    ]
    return [(fault, fix.format(alter=add, delete=delete)) for fault, fix in found]


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


def check_age(sink: config.Sink, oldest: int, now: int) -> None:
    """Whether the topic takes and keeps events that are so old, as far as that may be read.

    Args:
        oldest: `create_time` of the oldest event that is to be published, µs.
        now: the database's time, µs.

    Raises:
        SinkError: `sink.backlog_too_old`.
    """
    settings = describe(sink, "topic", sink.topic)
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
        by_create_time = _longest_kept(settings) is not None
        yield (
            f"keeps events for {format_duration(retention * 1000)} (retention.ms)"
            + (" after their create_time: older ones are removed as they arrive" * by_create_time),
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
    if (taken := _longest_taken(settings)) is not None:
        yield (
            f"refuses records that are older than {format_duration(taken * 1000)}"
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
