"""What a start makes of a state of which a part was lost: cut by a power failure, or deleted.

Where this publisher started stands in three files and, as the baseline, in every index. Where it is
stands in progress.json and, per shard, in the indexes; what none of them says is taken from the
start, which costs reading and loses nothing, since the topic says what was published. What open
transactions hid stands in progress.json alone: without it, the day below the position is counted.
"""

from __future__ import annotations

from typing import Any

import structlog

from eventpub.config import Config
from eventpub.coordinator.recount import hidden_at_most
from eventpub.errors import StateError
from eventpub.index import Storage, Summary, of_another, summary
from eventpub.parts import Parts
from eventpub.shard.assignment import adopts, identity_of
from eventpub.sink.origin import check_sides, sources_of
from eventpub.sink.reading import oldest_events
from eventpub.sink.topics import topic_ids, visible_ends
from eventpub.sources.base import BEGINNING
from eventpub.state import StateDir

"""The position before every event: 1970."""

log: structlog.stdlib.BoundLogger = structlog.get_logger("eventpub")


def kept_start(state: StateDir, configured: str, storage: Storage) -> dict[str, Any] | None:
    """Where this publisher started, as any file or index says: `configured`, `position` in µs.

    None where it never did, or where it started at a time that is configured.

    Args:
        configured: `read.start`.

    Raises:
        StateError: state.start_lost.
    """
    kept = _start_in(state.read(state.start_file))
    if kept is not None:
        return kept
    for file in (state.run_file, state.progress_file):
        kept = _start_in((state.read(file) or {}).get("start"))
        if kept is not None:
            log.warning(
                "start.json was lost; the start was taken from another file", file=file.name
            )
            return kept
    indexes = [s for count in state.indexed() for s in _summaries(state, count, storage)]
    found = [s.baseline or BEGINNING for s in indexes if s is not None]
    if found:
        log.warning("start.json was lost; the start is taken from the index", start=min(found))
        return {"configured": configured, "position": min(found)}
    if configured == "now" and (
        state.start_file.exists() or state.run_file.exists() or state.indexed()
    ):
        raise start_lost(state)
    return None


def require_own(config: Config, state: StateDir, parts: Parts) -> bool:
    """Whether all of the state is this publisher's: another's would make this topic lose events.

    Returns:
        Whether the topic is the one of `sink.accept_topic_id`.

    Raises:
        StateError: state.foreign
        SinkError: as of `sink.topic_ids`.
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
    """Whether state or topic say what was published: retention may have removed what would, or
    side topics may be of a former topic.

    Raises:
        StateError: state.start_lost
        SinkError: sink.side_topics_left, or as of `sink.oldest_events`.
    """
    if not (state.identities() or state.indexed()):
        check_sides(parts.clients, sources_of(config.app.id, config.app.former_ids))
    indexes = (_summaries(state, count, parts.storage) for count in state.indexed())
    is_whole = any(all(s and s.position is not None for s in each) for each in indexes)
    if is_whole or state.read(state.progress_file) or config.read.start not in {"beginning", "now"}:
        return
    clients, ids = parts.clients, (config.app.id, *config.app.former_ids)
    if None in oldest_events(clients, [*visible_ends(clients)], ids).values():
        raise start_lost(state)


def start_lost(state: StateDir) -> StateError:
    """This publisher was started before, and its start and what it has published are unknown."""
    return StateError(
        "state.start_lost",
        "this publisher's state is lost, and the topic does not show what was published",
        where=str(state.start_file),
        suggestion="remove what is left of app.state_dir, and set read.start to a time (RFC 3339)"
        " at or before the oldest event to publish: from then on, events missing from the topic are"
        " published, others are not repeated",
    )


def _start_in(data: Any) -> dict[str, Any] | None:
    valid = isinstance(data, dict) and isinstance(data.get("position"), int)
    return {"configured": "", **data} if valid else None


def kept_progress(state: StateDir, shards: int, start: int, storage: Storage) -> dict[str, Any]:
    """What progress.json says; where it was lost, what the indexes say of `position`, `low` and
    `shards`, and for `hidden_since` a day; nothing where there are none.

    Args:
        shards: how many are configured.
        start: where this publisher started, µs.
    """
    known = state.read(state.progress_file)
    if known is not None:
        return known
    counts = state.indexed()
    if not counts:
        return {}
    # the configured number first: the run before had it, unless not all of its indexes are there
    counts.sort(key=lambda count: count != shards)
    indexes = {count: _summaries(state, count, storage) for count in counts}
    count = next((count for count in counts if None not in indexes[count]), counts[0])
    positions = [s.position for s in indexes[count] if s is not None and s.position is not None]
    lows = [s.low for s in indexes[count] if s is not None and s.low is not None]
    # how far an index was that is gone is unknown
    is_whole = len(lows) == count
    if state.progress_file.exists():
        log.warning(
            "progress.json cannot be read; taking the position from the index and recounting the"
            " day before it"
            if is_whole
            else "neither progress.json nor an index can be read: reading the store again from the"
            " start"
        )
    else:  # as after a kill in the first second of all
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
