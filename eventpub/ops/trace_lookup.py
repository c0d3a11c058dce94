"""What is known of an aggregate: by the publisher, in the store, on the topics."""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from eventpub.admission import Hold, SkippedGap, VersionRange, topic_partition
from eventpub.config import Config
from eventpub.ops.asking import ask_running
from eventpub.ops.gaps import pending
from eventpub.ops.own_topics import OwnTopics
from eventpub.sink import records
from eventpub.sink.encoder import read_gap
from eventpub.sink.reading import Message, Place
from eventpub.sources.mysql import EventStore
from eventpub.state import StateDir
from eventpub.times import format_time, parse_time

LOWEST, HIGHEST = -(2**63), 2**63 - 1
_YEAR_3000 = 32_503_680_000_000


@dataclass(frozen=True)
class Publisher:
    """What the publisher says, or its state where none runs."""

    is_running: bool
    position: int | None
    start: int
    hold: Hold | None
    skipped: list[tuple[int, int]]


def ask_publisher(config: Config, aggregate_id: str, partitions: int) -> Publisher:
    """Ask the running publisher, or read its state where none runs.

    Args:
        partitions: of the topic; 0: there is no topic yet.

    Raises:
        StateError: the state cannot be read.
    """
    state = StateDir(config.app.state_dir)
    is_running = state.is_running()
    kept = (state.read(state.progress_file) if is_running else state.read_progress()) or {}
    start = (state.read(state.start_file) or {}).get("position")
    if start is None and config.read.start not in {"beginning", "now"}:
        start = parse_time(config.read.start)
    position = kept.get("position")
    status = ask_running(state, "status")
    if status is not None and status["shards"] and partitions:
        shards = {shard["shard"]: shard["position"] for shard in status["shards"]}
        own = topic_partition(aggregate_id, partitions) % len(shards)
        position = shards.get(own) or position
    found, _ = pending(config, state, 0, (aggregate_id,))
    hold, skipped = next(iter(found.holds), None), found.skipped.get(aggregate_id, [])
    return Publisher(status is not None, position, int(start or 0), hold, skipped)


@dataclass(frozen=True)
class Stored:
    """A row of the event table.

    Attributes:
        create_time: µs; None: it has none, or one that is no time.
        payload_bytes: size of its payload; None: it is NULL.
        others: further rows of its version.
    """

    create_time: int | None
    event_type: str
    payload_bytes: int | None
    others: tuple[Stored, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        created = None if self.create_time is None else format_time(self.create_time)
        others = [other.to_dict() for other in self.others]
        return asdict(self) | {"create_time": created, "others": others}


def stored_rows(
    store: EventStore, aggregate_id: str, versions: list[int]
) -> tuple[dict[int, Stored], int | None]:
    """The rows of some versions, and the creation time of the oldest of them and the one below.

    The time is None where neither is there, or one has none.
    """
    if not versions:
        return {}, None
    rows = store.seen(VersionRange(aggregate_id, versions[0], versions[-1]))
    stored: dict[int, Stored] = {}
    for r in rows:
        row, first = Stored(r.create_time, r.event_type, r.payload_bytes), stored.get(r.version)
        stored[r.version] = row if first is None else replace(first, others=(*first.others, row))
    if len(stored) < len(versions):
        below = VersionRange(aggregate_id, LOWEST, versions[0] - 1)
        for version in store.versions(below, 1, highest=True):
            rows += store.seen(VersionRange(aggregate_id, version, version))
    times = [row.create_time for row in rows if row.create_time is not None]
    return stored, min(times) if times and len(times) == len(rows) else None


@dataclass(frozen=True)
class Found:
    """A record of one of the publisher's topics."""

    topic: str
    partition: int
    offset: int
    timestamp: int
    is_late: bool = False
    reason: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Without a timestamp, if it has none that a calendar knows."""
        is_known = 0 <= self.timestamp < _YEAR_3000
        timestamp = format_time(self.timestamp * 1000) if is_known else None
        return asdict(self) | {"timestamp": timestamp}


class Topics:
    """What the topics have of an aggregate, as far as that was found in a limited time.

    Attributes:
        own: the topics.
        partitions: how many the topic itself has; 0: there is no topic yet.
        by_version: dead letters, then events.
    """

    def __init__(self, config: Config, aggregate_id: str, timeout: float) -> None:
        self.own = OwnTopics(config, time.monotonic() + timeout)
        self.partitions = len(self.own.places(config.sink.topic))
        self.by_version: dict[int, list[Found]] = {}
        self.skips: list[SkippedGap] = []
        self._sink = config.sink
        self._aggregate_id = aggregate_id
        self._starts: dict[Place, int] = {}

    def read_sides(self) -> None:
        """Read its skips and dead letters, of each version the newest last."""
        places = self.own.places(self._sink.gaps_topic, self._sink.dead_topic)
        self._read(dict.fromkeys(places, 0))
        for letters in self.by_version.values():
            letters.sort(key=lambda letter: letter.timestamp)

    def read_events(self, wanted: Collection[int] | None, oldest: int | None) -> None:
        """Read its events.

        Args:
            wanted: versions; it ends when all are found. None: all that there are.
            oldest: no record of them should be older, µs; None: not known.
        """
        places = self.own.places(self._sink.topic, self._sink.late_topic)
        self._starts = self.own.starts(places, oldest and records.timestamp(oldest))
        self._read(self._starts, wanted)

    def read_older_events(self, wanted: Collection[int]) -> None:
        """Read what is older than it should be, as of an event whose time was another one."""
        before = {place: end for place, end in self._starts.items() if end}
        if wanted and before:
            self._read(dict.fromkeys(before, 0), wanted, before)

    def has_event(self, version: int) -> bool:
        """Whether an event was found, and not only a dead letter."""
        return any(f.topic != self._sink.dead_topic for f in self.by_version.get(version, ()))

    def _read(
        self,
        starts: dict[Place, int],
        wanted: Collection[int] | None = None,
        ends: dict[Place, int] | None = None,
    ) -> None:
        left = {version for version in wanted or () if not self.has_event(version)}
        with closing(self.own.read(starts, ends=ends, keys=[self._aggregate_id])) as found:
            for message, headers in found:
                with suppress(KeyError, TypeError, ValueError):
                    left.discard(self._take(message, headers, wanted))
                if wanted is not None and not left:
                    return

    def _take(
        self, message: Message, headers: dict[str, Any], wanted: Collection[int] | None
    ) -> int | None:
        """Note a record, if it is of a version that counts; returns this version."""
        if message.topic() == self._sink.gaps_topic:
            self.skips.append(read_gap(message.value() or b""))
            return None
        version = int(headers[records.SEQUENCE])
        if wanted is not None and version not in wanted:
            return None
        is_dead = message.topic() == self._sink.dead_topic
        reason = headers.get(records.REASON) if is_dead else None
        found = Found(
            message.topic(),
            message.partition(),
            message.offset(),
            message.timestamp()[1],
            records.LATE in headers,
            None if reason is None else reason.decode(errors="replace"),
        )
        self.by_version.setdefault(version, []).append(found)
        return version
