"""What is known of an aggregate: by the publisher, in the store, on the topics."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from eventpub.admission import Hold, SkippedGap, VersionRange, topic_partition
from eventpub.config import Config
from eventpub.ops.asking import ask_running
from eventpub.ops.gaps import pending
from eventpub.ops.trace_answer import Found, Stored
from eventpub.sink import records
from eventpub.sink.reading import Message, Place, offsets_at, own_records, read_committed
from eventpub.sink.topics import list_offsets
from eventpub.sources.mysql import EventStore
from eventpub.state import StateDir
from eventpub.times import parse_time

_LOWEST, _HIGHEST = -(2**63), 2**63 - 1


# -- the publisher -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Publisher:
    """What the publisher says, or its state where none runs."""

    is_running: bool
    position: int | None
    start: int
    hold: Hold | None
    skipped: Sequence[tuple[int, int]]


def ask_publisher(config: Config, aggregate_id: str, partition: int | None) -> Publisher:
    """What the running publisher answers, or what its state has where none runs.

    Args:
        partition: of the topic, the aggregate's; None: there is no topic yet.

    Raises:
        StateError: the state cannot be read.
    """
    state = StateDir(config.app.state_dir)
    is_running = state.is_running()
    kept = (state.read(state.progress_file) if is_running else state.read_progress()) or {}
    start = (state.read(state.start_file) or {}).get("position")
    if start is None and config.read.start not in {"beginning", "now"}:
        start = parse_time(config.read.start)
    status = ask_running(state, "status")
    if status is not None:
        shards = {shard["shard"]: shard for shard in status["shards"]}
        own = {} if partition is None or not shards else shards.get(partition % len(shards), {})
        position = own.get("position") or kept.get("position")
    else:
        position = kept.get("position")
    found, _ = pending(config, state, 0, (aggregate_id,))
    hold, skipped = next(iter(found.holds), None), found.skipped.get(aggregate_id, [])
    return Publisher(status is not None, position, int(start or 0), hold, skipped)


# -- the store ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Versions:
    """The versions that an aggregate has, of which the last are shown.

    Args:
        span: from the first one that an aggregate may have to the highest that is known of.
        apart: others, refused or deleted since.
        is_whole: whether these are all.
    """

    span: range
    apart: frozenset[int] = frozenset()
    is_whole: bool = True

    def last(self, limit: int) -> list[int]:
        """The highest so many, ascending."""
        return sorted({*self.span[-limit:], *sorted(self.apart)[-limit:]})[-limit:]

    def and_of(self, more: Collection[int]) -> Versions:
        """With others, which may be among them."""
        apart = self.apart.union(v for v in more if v not in self.span)
        return replace(self, apart=apart)

    @property
    def total(self) -> int | None:
        """How many there are; None: not known."""
        # len() is for less than 2^63
        return self.span.stop - self.span.start + len(self.apart) if self.is_whole else None


def all_versions(
    config: Config, store: EventStore, aggregate_id: str, hold: Hold | None, limit: int
) -> Versions:
    """Those that the store or the publisher knows of; below the first one the highest alone."""
    newest = store.versions(VersionRange(aggregate_id, _LOWEST, _HIGHEST), 1, highest=True)
    if hold is not None:
        newest.append(hold.seen)
    if not newest:
        return Versions(range(0))
    first = config.store.first_version
    # those below the first one are no events; they are dead letters
    below = VersionRange(aggregate_id, _LOWEST, first - 1)
    refused = store.versions(below, limit + 1, highest=True)
    span = range(first, max(first, max(newest) + 1))
    return Versions(span, frozenset(refused), len(refused) <= limit)


def missing_of(store: EventStore, hold: Hold | None) -> tuple[int, int] | None:
    """The first and the last version of the gap that a hold waits for."""
    if hold is None or hold.catching_up:
        return None
    above = VersionRange(hold.aggregate_id, hold.first_missing + 1, hold.seen)
    there = store.versions(above, 1)
    return hold.first_missing, min(there, default=hold.seen) - 1


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
        below = VersionRange(aggregate_id, _LOWEST, versions[0] - 1)
        for version in store.versions(below, 1, highest=True):
            rows += store.seen(VersionRange(aggregate_id, version, version))
    times = [row.create_time for row in rows if row.create_time is not None]
    return stored, min(times) if times and len(times) == len(rows) else None


# -- the topics --------------------------------------------------------------------------------


class Topics:
    """What the topics have of an aggregate, as far as that was found in a limited time.

    Attributes:
        by_version: events and dead letters.
        skips: of any of its versions.
        unread: partitions that were not read to their ends.
        is_cut: whether retention has removed records that might have been its own.
    """

    def __init__(
        self, config: Config, aggregate_id: str, partitions: dict[str, int], timeout: float
    ) -> None:
        self.by_version: dict[int, list[Found]] = {}
        self.skips: list[SkippedGap] = []
        self.unread: set[Place] = set()
        self.is_cut = False
        self._sink = config.sink
        self._ids = {config.app.id, *config.app.former_ids}
        self._aggregate_id = aggregate_id
        self._partitions = partitions
        self._until = time.monotonic() + timeout
        self._starts: dict[Place, int] = {}

    def _own(self, topics: Iterable[str]) -> list[Place]:
        """Where the aggregate's records are by rights."""
        return [
            (topic, topic_partition(self._aggregate_id, self._partitions[topic]))
            for topic in topics
            if topic in self._partitions
        ]

    def _all(self, topics: Iterable[str]) -> list[Place]:
        """All partitions of some topics."""
        return [(t, number) for t in topics for number in range(self._partitions.get(t, 0))]

    def is_moved(self, found: Found) -> bool:
        """Whether a record stands where it would not be written to today: partitions were added."""
        return (found.topic, found.partition) not in self._own([found.topic])

    def read_sides(self) -> None:
        """Read its skips and dead letters; of each version, those of its own partition last.

        Few stand on these topics, and they may be of versions whose time nobody knows. All
        partitions are read: what was written before some were added stands in another one.
        """
        sides = [self._sink.gaps_topic, self._sink.dead_topic]
        self._read(dict.fromkeys(self._all(sides), 0), None)
        own = set(self._own(sides))
        for found in self.by_version.values():
            found.sort(key=lambda record: (record.topic, record.partition) in own)

    def run(self, wanted: Collection[int] | None, oldest: int | None) -> None:
        """Look where the records are by rights.

        Args:
            wanted: versions; it ends when all are found. None: all that there are.
            oldest: no record of them is older, µs; None: not known.
        """
        sink = self._sink
        events = self._own([sink.topic, sink.late_topic])
        self._starts = self._from(events, oldest)
        first = list_offsets(sink, [p for p in events if p[0] == sink.topic], "earliest")
        self.is_cut = any(self._starts[p] <= low and low for p, low in first.items())
        self._read(self._starts, wanted)

    def look_elsewhere(self, wanted: Collection[int] | None, oldest: int | None) -> None:
        """Look where the records are if partitions were added since, if a time lay in the future or
        was another one.

        Args:
            wanted: versions; none: nothing is to be done. None: all that there are.
        """
        if wanted is not None and not wanted:
            return
        sink = self._sink
        others = [p for p in self._all([sink.topic, sink.late_topic]) if p not in self._starts]
        before = {place: end for place, end in self._starts.items() if end}
        self._read(dict.fromkeys(before, 0), wanted, before)
        self._read(self._from(others, oldest), wanted)

    def _from(self, places: list[Place], oldest: int | None) -> dict[Place, int]:
        if oldest is None:
            return dict.fromkeys(places, 0)
        return offsets_at(self._sink, places, records.timestamp(oldest))

    def _read(
        self,
        starts: dict[Place, int],
        wanted: Collection[int] | None,
        ends: dict[Place, int] | None = None,
    ) -> None:
        events = {self._sink.topic, self._sink.late_topic}
        left = set(wanted or ())
        for version, found in self.by_version.items():
            if any(f.topic in events for f in found):  # a dead letter may be published since
                left.discard(version)
        if not starts or (wanted is not None and not left):
            return
        reading = read_committed(self._sink, starts, self._until, ends)
        try:
            for message, headers in own_records(reading, self._ids, {self._aggregate_id.encode()}):
                self._take(message, headers, wanted, left)
                if wanted is not None and not left:
                    return
        finally:
            reading.close()
        self.unread |= reading.unread

    def _take(
        self,
        message: Message,
        headers: dict[str, Any],
        wanted: Collection[int] | None,
        left: set[int],
    ) -> None:
        """Note a record of the aggregate, if it is of a version that counts."""
        sink = self._sink
        with suppress(KeyError, TypeError, ValueError):
            if message.topic() == sink.gaps_topic:
                self.skips.append(records.read_gap(message.value() or b""))
                return
            version = int(headers[records.SEQUENCE])
            if wanted is not None and version not in wanted:
                return
            is_dead = message.topic() == sink.dead_topic
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
            if not is_dead:
                left.discard(version)
