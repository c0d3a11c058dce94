"""Rows that are not on the topic: which, and having them published all the same.

To publish a row is the running publisher's work, since nobody else writes its partitions: it is
asked, and told how far the topic was searched for the row, so that what was published meanwhile, or
is asked for twice, is published once.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import TypeAlias

from eventpub.channel import Request
from eventpub.config import Config
from eventpub.ops.asking import ask_shards
from eventpub.sink import records
from eventpub.sink.reading import Place, offsets_at, own_records, read_committed
from eventpub.sink.topics import list_offsets, partition_counts
from eventpub.sources.mysql import EventStore
from eventpub.state import StateDir

Key: TypeAlias = tuple[str, int]
"""Aggregate and version."""
Event: TypeAlias = tuple[str | int | None, ...]
"""The same, and time and contents where these tell rows of one version apart."""

_MOST_ROWS = 1_000
_ABOVE_ALL = 2**63 - 1


@dataclass(frozen=True)
class Unpublished:
    """Rows of an aggregate that are not on the topic.

    Attributes:
        outcome: why none may be published, as `cli.dead` explains it; "": they may.
        versions: ascending.
        searched: by partition of the topic, up to which offset it has none of them.
    """

    outcome: str
    versions: tuple[int, ...] = ()
    searched: tuple[int, ...] = ()


def unpublished(
    config: Config,
    aggregate_id: str,
    version: int | None,
    *,
    since: int | None = None,
    timeout: float = 60.0,
) -> Unpublished:
    """Which of an aggregate's rows are not on the topic.

    Args:
        version: this one alone; None: of the last 1,000.
        since: there are no records of earlier timestamps, ms; None: than when they were created,
            as far as retention has left the topic.
        timeout: seconds for searching the topic.

    Raises:
        StoreError, SinkError: the store or the topic cannot be read.
    """
    bound, most = (_ABOVE_ALL, _MOST_ROWS) if version is None else (version + 1, 1)
    with readable_store(config) as store:
        keys = [r for b in store.below([(aggregate_id, bound)], most) for r in b.to_pylist()]
    rows = {row["version"]: row["create_time"] for row in keys if version in {None, row["version"]}}
    if not rows:
        return Unpublished("not in the store")
    first = max(0, min([*rows.values(), *([] if since is None else [since * 1000])]) // 1000)
    wanted = {(aggregate_id, number) for number in rows}
    search = search_topic(config, wanted, first, time.monotonic() + timeout)
    left = tuple(sorted(number for _, number in wanted - search.found.keys()))
    if not left:
        return Unpublished("published before")
    if not search.is_whole:
        return Unpublished("not searched")
    is_unknown = search.is_cut and since is None
    return Unpublished("not known" if is_unknown else "", left, search.searched)


def publish(
    config: Config, aggregate_id: str, rows: Unpublished, *, timeout: float = 60.0
) -> tuple[int, str]:
    """Have rows published, the lowest version first, until one is not.

    Args:
        timeout: seconds to wait for the publisher's answer, for each.

    Returns:
        How many were published, and what came of the last, as of `Retried`.

    Raises:
        StateError: run.paused, run.request_failed.
    """
    state, done, outcome = StateDir(config.app.state_dir), 0, "not running"
    for version in rows.versions if state.is_running() else ():
        request = Request(
            secrets.token_hex(8), "publish", aggregate_id, version, searched=rows.searched
        )
        answers = ask_shards(state, request, timeout)
        outcome = "no answer" if answers is None else next(iter(answers.values()))
        if outcome not in {"published", "published before"}:
            break
        done += outcome == "published"
    return done, outcome


def readable_store(config: Config) -> EventStore:
    """A replica, too: what it has not applied yet is shown as what it is."""
    readable = config.store.model_copy(update={"allow_replica": True})
    return EventStore(readable, EventStore.discover(config.store))


@dataclass
class TopicSearch:
    """Events that were looked for on the topic.

    Attributes:
        found: partition and offset of each that is there, by its key, and with its contents.
        searched: by partition, up to which offset.
        is_whole: whether it was read that far.
        is_cut: whether retention has removed what might have been there.
    """

    found: dict[Event, tuple[int, int]]
    searched: tuple[int, ...]
    is_whole: bool
    is_cut: bool = False


def search_topic(config: Config, wanted: Collection[Key], since: int, until: float) -> TopicSearch:
    """Look for events on the topic, in all partitions: some may have been added.

    Args:
        since: their records' timestamps are at or after, ms.
    """
    sink = config.sink
    count = partition_counts(sink).get(sink.topic, 0)
    places: list[Place] = [(sink.topic, number) for number in range(count)]
    if not places:
        return TopicSearch({}, (), True)
    ends = list_offsets(sink, places, "latest", committed=True)
    starts = {p: min(at, ends[p]) for p, at in offsets_at(sink, places, since).items()}
    keys = {aggregate_id.encode() for aggregate_id, _ in wanted}
    search = TopicSearch({}, tuple(ends[place] for place in places), False)
    reading = read_committed(sink, starts, until, ends)
    for message, headers in own_records(reading, {config.app.id, *config.app.former_ids}, keys):
        sequence = headers.get(records.SEQUENCE) or b""
        key = (message.key().decode(), int(sequence) if sequence.isdigit() else -1)
        if key in wanted:
            content = records.content_of_record(headers, message.value()).hex()
            event = *key, (headers.get(records.TIME) or b"").decode(errors="replace"), content
            search.found[key] = search.found[event] = message.partition(), message.offset()
    search.is_whole = not reading.unread
    first = list_offsets(sink, places, "earliest")
    search.is_cut = any(0 < first[place] >= starts[place] for place in places)
    return search
