"""A start: check everything that can be wrong, and find where to continue.

Part of the state may be lost after a power failure, or deleted. Where this publisher started is in
three files and in every index. Its position is in progress.json and, per shard, in the indexes; if
missing, it is the start, which costs reading but loses nothing: the topic says what was published.
What open transactions hid is in progress.json alone: without it, the day below the position is
counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog

from eventpub.channel import PartitionId
from eventpub.config import Config, format_time
from eventpub.coordinator.database_changes import last_of
from eventpub.coordinator.position import StartState
from eventpub.coordinator.recount import hidden_at_most
from eventpub.errors import ConfigError, StateError
from eventpub.index import Storage, Summary, of_another, summary
from eventpub.shard.assignment import Assignment, Parts, adopts, identity_of, threads_of
from eventpub.sink.client import Clients
from eventpub.sink.layout import check_age, check_topics, check_written
from eventpub.sink.numbered import NumberedSink, markers_of
from eventpub.sink.reading import check_sample, check_sides, has_written, oldest_events
from eventpub.sink.topics import partition_counts, topic_ids, visible_ends
from eventpub.sink.transaction import fence_all
from eventpub.sources.base import BEGINNING, Source, start_position
from eventpub.sources.mysql import EventStore, Layout
from eventpub.sources.mysql.server import UNGUARDED, Server
from eventpub.state import StateDir
from eventpub.times import ZONES_DIFFER

log: structlog.stdlib.BoundLogger = structlog.get_logger("eventpub")


@dataclass(frozen=True)
class Prepared:
    """What a start has found out; `topics`: their ids."""

    start_state: StartState
    assignment: Assignment
    topics: dict[str, str]


def prepare(config: Config, state: StateDir, parts: Parts, *, available_now: bool) -> Prepared:
    """Check database, broker and state; fence the previous publisher."""
    clients = parts.clients
    server = parts.stores.server(config.store)
    layout = _check_store(config, parts.stores, server)
    before = state.read(state.progress_file) or {}
    topics = _check_topics(config, clients, before)
    accepts_topic = require_own(config, state, parts)
    with parts.stores(config.store, layout) as store:
        started = find_start(config, state, parts, store.now)
        if state.read(state.start_file) != started:
            state.write(state.start_file, started, lasting=True)
        now = store.now()
        newest = (*last_of(store.newest(1), now), layout.sampled_by)
        start = int(started["position"])
        before = kept_progress(state, config.run.shards, start, parts.storage)
        check_backlog(config, clients, store, before.get("position"), start)
    pause = state.pause()
    if available_now and pause[0]:
        raise StateError(
            "run.paused",
            "the publisher is paused, so run --available-now would wait forever",
            where=str(state.root),
            suggestion="eventpub resume",
        )
    former = before.get("shards", config.run.shards)
    run = _begin_run(state, started, now)
    # the last run's number of shards may not have been written down
    writers = max(former, topics.partitions)
    has_markers = markers_of(config.sink) in partition_counts(clients)
    if has_markers and config.run.engine == "threads":
        NumberedSink(clients, config.app.id).take(threads_of(run), writers)
    fence_all(clients, config.app.id, writers)
    numbers, is_placed = _take_over(state, before, former, topics)
    if former != config.run.shards:
        # left by an earlier run with this number: the former run knows more
        state.forget_shards(config.run.shards)
    sampled = before.get("newest") or []
    low = before.get("low", start)
    if before.get("read_as", layout.read_as) != layout.read_as:  # rows may be below it now
        low = max(start, low - ZONES_DIFFER)
    start_state = StartState(
        run=run,
        now=now,
        layout=layout,
        partitions=topics.partitions,
        start=start,
        low=low,
        position=before.get("position"),
        hidden_since=before.get("hidden_since"),
        acknowledged=topics.acknowledged,
        is_placed=is_placed,
        former_shards=None if former == config.run.shards else former,
        former_indexes=tuple(str(folder) for folder in state.former_indexes()),
        # the former run's, unless sampled by another column
        newest=(sampled[0], sampled[1], newest[2]) if sampled[2:] == [newest[2]] else newest,
        server=before.get("server") or server.identity,
        until=now if available_now else None,
        pause=pause,
        kept={
            **{"topics": topics.ids, "numbers": numbers, "start": started},
            "read_as": layout.read_as,
        },
    )
    assignment = Assignment(
        config,
        layout,
        topics.partitions,
        None if start == BEGINNING else start,
        run,
        parts,
        accepts_topic=accepts_topic,
        start_id=str(started.get("id", "")),
    )
    return Prepared(start_state, assignment, topics.ids)


def check_backlog(
    config: Config, clients: Clients, store: Source, position: int | None, start: int
) -> None:
    """Check that the topic accepts and keeps the oldest event to be published.

    Without a `position`, µs, a topic written before passes: what is left to publish is known only
    after reading it back.

    Raises:
        SinkError: sink.backlog_too_old
    """
    if position is None and has_written(clients, config.app.id):
        return
    poll = store.poll(start if position is None else position, 0, 1)
    if poll.page_end is not None:
        check_age(clients, poll.page_end, poll.now)


def _check_store(config: Config, stores: type[EventStore], server: Server) -> Layout:
    """The event table's layout; logs what is not guaranteed with it."""
    if config.store.allow_replica and server.is_replica(config.store):
        log.warning(
            f"store.allow_replica = true: reading from a server that {server.what_it_is}",
            not_guaranteed=UNGUARDED,
        )
    layout = stores.discover(config.store)
    if layout.zone is not None and layout.id_index is None:
        log.warning(
            "writers in another time zone, or an import of old rows, would not be noticed:"
            " create_time is a DATETIME, and no numeric column `id` is indexed (`eventpub doctor`"
            " prints the fix)",
            time_zone=layout.zone.name,
        )
    return layout


@dataclass(frozen=True)
class _Topics:
    """What a start has found out about the topics; `acknowledged`: offsets reached."""

    partitions: int
    ids: dict[str, str]
    acknowledged: dict[PartitionId, int]
    is_placed: bool


def _check_topics(config: Config, clients: Clients, before: dict[str, Any]) -> _Topics:
    """Check that the topics exist, are those written before, and are this publisher's."""
    ends: dict[PartitionId, int] = {(t, p): end for t, p, end in before.get("ends", ())}
    partitions = check_topics(
        clients,
        shards=config.run.shards,
        late=config.gaps.late == "divert",
        was_written=any(t == config.sink.topic and end > 0 for (t, _), end in ends.items()),
    )
    ids = topic_ids(clients, config.sink.topics)
    acknowledged = check_written(clients, ids, before.get("topics", {}), ends)
    is_placed = _is_placed(clients, before, ids)
    check_sample(clients, config.app.id)
    return _Topics(partitions, ids, acknowledged, is_placed)


def _is_placed(clients: Clients, before: dict[str, Any], ids: dict[str, str]) -> bool:
    """Whether everything on the topic was written with its current number of partitions."""
    known = before.get("topics", {})
    is_same = ids.get(clients.sink.topic) == known.get(clients.sink.topic)
    if before and is_same and known:
        return bool(before.get("placed", False))
    return not any(visible_ends(clients).values())  # an empty topic is always placed


def _take_over(
    state: StateDir, before: dict[str, Any], shards: int, topics: _Topics
) -> tuple[list[int], bool]:
    """Set indexes aside for a takeover if partitions were added."""
    now = topics.partitions
    former = before.get("partitions", now)
    numbers: list[int] = before.get("numbers", [])
    if former == now:
        return numbers, topics.is_placed
    state.set_aside(shards, former)
    log.warning(
        "the topic's number of partitions has changed: new events of an aggregate may go to"
        " another partition than before; all partitions are read back once",
        before=former,
        now=now,
    )
    return [*(n for n in numbers if n != former), former], False


def _begin_run(state: StateDir, started: dict[str, Any], now: int) -> int:
    before = (state.read(state.run_file) or {}).get("run", 0)
    progress = state.read(state.progress_file) or {}
    run: int = max(now, before + 1, progress.get("run", 0) + 1)
    state.write(state.run_file, {"run": run, "start": started}, lasting=True)
    return run


def find_start(
    config: Config, state: StateDir, parts: Parts, now: Callable[[], int]
) -> dict[str, Any]:
    """Where this publisher started, or starts; raises state.start_lost, config.invalid_value."""
    configured = config.read.start
    require_known(config, state, parts)
    kept = kept_start(state, configured, parts.storage)
    if kept is not None and kept["configured"] != configured:
        log.warning(
            "read.start changed; the first start stays in force",
            configured=configured,
            first=kept["configured"],
        )
    if kept is None:
        if configured == "now" and has_written(parts.clients, config.app.id):
            raise start_lost(state)  # e.g. a container whose volume is gone
        position = start_position(config.read, now)
        if position > now():
            raise ConfigError(
                "config.invalid_value",
                f"read.start = {configured} is in the future, and nothing before it would be"
                " published",
                where="read.start",
                suggestion="set it to a time of the past, or to 'now'",
            )
        kept = {"configured": configured, "position": position, "time": format_time(position)}
        kept["id"] = str(now())
    return {**kept, "of": identity_of(config)}


# -- a state of which a part was lost -----------------------------------------------------------


def kept_start(state: StateDir, configured: str, storage: Storage) -> dict[str, Any] | None:
    """Where this publisher started, from any file or index: `configured`, `position` in µs.

    None if it never did, or if the start is a configured time. Raises state.start_lost.
    """
    for file in (state.start_file, state.run_file, state.progress_file):
        is_first = file is state.start_file
        kept: Any = state.read(file)
        if kept and not is_first:
            kept = kept.get("start")
        if isinstance(kept, dict) and isinstance(kept.get("position"), int):
            if not is_first:
                text = "start.json was lost; the start was taken from another file"
                log.warning(text, file=file.name)
            return {"configured": "", **kept}
    indexes = [s for count in state.indexed() for s in _summaries(state, count, storage)]
    found = [s.baseline or BEGINNING for s in indexes if s is not None]
    if found:
        log.warning("start.json was lost; the start is taken from the index", start=min(found))
        ids = {str(s.identity.get("start", "")) for s in indexes if s is not None}
        return {"configured": configured, "position": min(found), "id": max(ids)}
    if configured == "now" and (
        state.start_file.exists() or state.run_file.exists() or state.indexed()
    ):
        raise start_lost(state)
    return None


def require_own(config: Config, state: StateDir, parts: Parts) -> bool:
    """Whether the topic is that of `sink.accept_topic_id`; all state must be this publisher's.

    Raises:
        StateError: state.foreign
    """
    topic, accepted = config.sink.topic, config.sink.accept_topic_id
    accepts_topic = bool(accepted) and topic_ids(parts.clients, [topic]).get(topic) == accepted
    of_indexes = [s for count in state.indexed() for s in _summaries(state, count, parts.storage)]
    found = state.identities() or [s.identity for s in of_indexes if s is not None]
    own = identity_of(config)
    for identity in found:
        if not adopts(config, identity, accepts_topic=accepts_topic):
            theirs = {name: identity.get(name) for name in own}
            raise of_another(theirs, own, state.root)
    return accepts_topic


def require_known(config: Config, state: StateDir, parts: Parts) -> None:
    """Check that state or topic show what was published, though retention may have removed a part.

    Raises:
        StateError: state.start_lost
        SinkError: sink.side_topics_left, or from `oldest_events`.
    """
    if not (state.identities() or state.indexed()):
        check_sides(parts.clients, config.app.id)
    indexes = (_summaries(state, count, parts.storage) for count in state.indexed())
    is_whole = any(all(s and s.position is not None for s in each) for each in indexes)
    if is_whole or state.read(state.progress_file) or config.read.start not in {"beginning", "now"}:
        return
    clients = parts.clients
    if None in oldest_events(clients, [*visible_ends(clients)], config.app.id).values():
        raise start_lost(state)


def start_lost(state: StateDir) -> StateError:
    return StateError(
        "state.start_lost",
        "this publisher's state is lost, and the topic does not show what was published",
        where=str(state.start_file),
        suggestion="remove what is left of app.state_dir, and set read.start to a time (RFC 3339)"
        " at or before the oldest event to publish: from then on, events missing from the topic are"
        " published, others are not repeated",
    )


def kept_progress(state: StateDir, shards: int, start: int, storage: Storage) -> dict[str, Any]:
    """What progress.json says; if lost, what the indexes say, with a day counted as hidden."""
    known = state.read(state.progress_file)
    if known is not None:
        return known
    counts = state.indexed()
    if not counts:
        return {}
    # the configured number first: the last run had it, unless some of its indexes are missing
    counts.sort(key=lambda count: count != shards)
    indexes = {count: _summaries(state, count, storage) for count in counts}
    count = next((count for count in counts if None not in indexes[count]), counts[0])
    positions = [s.position for s in indexes[count] if s is not None and s.position is not None]
    lows = [s.low for s in indexes[count] if s is not None and s.low is not None]
    # the position of a missing index is unknown
    is_whole = len(lows) == count
    if state.progress_file.exists():
        log.warning(
            "progress.json cannot be read; taking the position from the index and recounting the"
            " day before it"
            if is_whole
            else "neither progress.json nor an index can be read: reading the store again from the"
            " start"
        )
    else:  # e.g. killed in its first second
        log.info("there is no progress.json", position="index" if is_whole else "start")
    position = min(positions) if is_whole else start
    return {
        "shards": count,
        "position": position,
        "low": min(lows) if is_whole else start,
        "hidden_since": hidden_at_most(position),
    }


def _summaries(state: StateDir, shards: int, storage: Storage) -> list[Summary | None]:
    return [summary(state.shard_index(shards, number), storage) for number in range(shards)]
