"""Values shared by all packages: events, shards, and what a shard knows of its aggregates.

Times are UTC microseconds since 1970 on the database's clock. The topic is the truth, and what the
index keeps is a cache of it. Rows are counted by bucket: one second of `create_time`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any, Literal

import numpy as np
import pyarrow as pa

_FIELDS: list[pa.Field[Any]] = [
    pa.field("aggregate_id", pa.string(), nullable=False),
    pa.field("version", pa.int64(), nullable=False),
    pa.field("event_type", pa.string(), nullable=False),
    pa.field("payload", pa.binary(), nullable=True),
    pa.field("metadata", pa.binary(), nullable=True),
    pa.field("create_time", pa.int64(), nullable=False),
]

EVENTS: pa.Schema = pa.schema(_FIELDS)
"""Rows of the event table: `metadata` as stored, `create_time` in UTC microseconds."""

CONFLICT = "admission.version_conflict"
"""Prefix of the reason of a row whose version was published as another event."""

CLOCK_STEP = 1_000_000
"""Backward step of the database's clock that is tolerated, µs."""


@dataclass(frozen=True)
class Shard:
    """One writer's part of the topic: the partitions `p` with ``p % shards == number``."""

    number: int
    shards: int
    partitions: int

    def topic_partitions(self) -> list[int]:
        return list(range(self.number, self.partitions, self.shards))


@dataclass(frozen=True)
class VersionRange:
    """Versions `first` to `last` of one aggregate, inclusive."""

    aggregate_id: str
    first: int
    last: int


@dataclass(frozen=True)
class SkippedGap:
    """A gap that was given up, recorded on ``<topic>.gaps``. Times in µs."""

    aggregate_id: str
    from_version: int
    to_version: int
    first_seen: int
    skipped_at: int
    attempts: int
    reason: str


def values(rows: pa.Table | pa.RecordBatch, column: str) -> list[Any]:
    found: list[Any] = rows.column(column).to_pylist()
    return found


def topic_partition(aggregate_id: str, partitions: int) -> int:
    """``CRC32(UTF-8) % partitions``, like MySQL's ``CRC32()`` and librdkafka's ``consistent``."""
    return zlib.crc32(aggregate_id.encode()) % partitions


def topic_partitions(aggregate_ids: list[str], partitions: int) -> np.ndarray:
    crc = zlib.crc32
    return np.fromiter(
        (crc(a.encode()) % partitions for a in aggregate_ids), np.int32, len(aggregate_ids)
    )


WIDTH = 1_000_000
"""Bucket width, µs: bucket b has the rows of ``b * WIDTH < create_time <= (b + 1) * WIDTH``."""

KEPT = 86_400
"""Buckets kept below the horizon (one day); older ones, if counted, are compared by key."""


def bucket_of(create_time: int) -> int:
    return (create_time - 1) // WIDTH


def window_of(bucket: int, position: int) -> tuple[int, int]:
    """The part ``(after, upto]`` of a bucket up to a position, µs."""
    after = bucket * WIDTH
    return after, max(after, min(after + WIDTH, position))


def oldest_needed(now: int, horizon: int, *since: int | None) -> int:
    """Oldest bucket whose count may be needed; `since`: times from which rows may be hidden."""
    oldest = bucket_of(min([now - horizon, *(at for at in since if at is not None)]))
    return max(oldest, bucket_of(now - horizon) - KEPT)


Versions = tuple[int, int]
"""First and last version of a run, inclusive."""


@dataclass(frozen=True)
class Hold:
    """An aggregate that waits for a version that is not visible yet. Times in µs.

    Attributes:
        first_missing: the version it waits for, one above the last published.
        seen: the highest version read so far.
        first_seen: when the gap was first seen; the wait starts here.
        attempts: failed lookups of the missing version.
        since: smallest `create_time` held; without an index, reading from here finds the hold
            again.
        catching_up: nothing is missing, there was more to fetch than fits in one batch.
        missed_upto: the highest version read when the gap was first seen: if it is skipped, so is
            what else is missing below, which was looked up as often.
    """

    aggregate_id: str
    first_missing: int
    seen: int
    first_seen: int
    attempts: int
    next_attempt: int
    since: int
    catching_up: bool = False
    missed_upto: int = 0


def numbers_of(names: list[str], known: Mapping[str, int], otherwise: int) -> np.ndarray:
    return np.fromiter(map(known.get, names, repeat(otherwise)), np.int64, len(names))


@dataclass
class Known:
    """What the index knows of some aggregates; what is absent is unknown.

    Attributes:
        last: last version published, skipped or in the baseline; absent: never seen.
        holds: all open holds.
        skipped: skipped versions that have not turned up since.
        baseline: events created up to here count as published, µs; None: no baseline.
        refused: dead-lettered versions below the first version.
        times: packed `Seen`.
        contents: hashes of decided rows by version, see `Rules.contents_of`.
        lone: those of them whose only row has other contents now: judged by its time, as it may
            have been made anonymous.
        times_since: rows created up to here are never conflicts, as older times were not kept or
            were read differently, µs; None: all were kept.
    """

    last: Mapping[str, int] = field(default_factory=dict)
    holds: Mapping[str, Hold] = field(default_factory=dict)
    skipped: Mapping[str, Sequence[Versions]] = field(default_factory=dict)
    baseline: int | None = None
    refused: Mapping[str, Sequence[int]] = field(default_factory=dict)
    times: Mapping[str, int] = field(default_factory=dict)
    times_since: int | None = None
    rewritten: Mapping[str, Rewritten] = field(default_factory=dict)
    contents: Mapping[tuple[str, int], set[bytes]] = field(default_factory=dict)
    lone: Collection[tuple[str, int]] = ()


NO_TIME = -(1 << 63)
"""`Seen.packed` of an aggregate without a decided row."""


@dataclass(frozen=True)
class Seen:
    """An aggregate's newest decided row: tells two events of one version apart.

    Attributes:
        newest: highest `create_time` of published or dead-lettered rows, µs.
        is_of_last: whether that row has the last version.
    """

    newest: int
    is_of_last: bool

    def packed(self) -> int:
        """One integer: a batch has one for each of its aggregates."""
        return self.newest << 1 | self.is_of_last

    @staticmethod
    def unpacked(packed: int) -> Seen:
        return Seen(packed >> 1, bool(packed & 1))

    def raised(self, created: int) -> Seen:
        """After another decided row, which does not have the last version."""
        return Seen(created, False) if created > self.newest else self


@dataclass(frozen=True)
class Rewritten:
    """Published versions of an aggregate rewritten since its newest known conflict.

    `Seen` alone would miss the second of two such rows with equal `create_time`, and any row read
    after a newer one.

    Attributes:
        since: highest `create_time` decided before that conflict, µs.
        last: the last version at that time.
        decided: versions up to `last` with a decided row created after `since`.
    """

    since: int
    last: int
    decided: tuple[Versions, ...] = ()

    def differs(self, version: int, created: int) -> bool:
        """Whether a row is not the published one: none up to `last` was created after `since`."""
        is_concerned = version <= self.last and created > self.since
        return is_concerned and not in_ranges(version, self.decided)

    def plus(self, version: int, created: int) -> Rewritten:
        if not self.differs(version, created):
            return self
        return replace(self, decided=tuple(runs_of([*self.decided, (version, version)])))


@dataclass(frozen=True)
class Rules:
    """The configuration that admission depends on. Durations in microseconds.

    Attributes:
        max_backoff: failed lookups before a gap is skipped.
        backoff_base: wait before the first lookup; doubles after each.
        contents_of: hashes rows, to compare rows of one version; None: the table's key is unique.
        times_last: rows keep their `create_time`, so another time means another event.
        repeated: ambiguous local hours: when the clocks went back, and by how much, µs.
    """

    first_version: int = 1
    max_backoff: int = 8
    backoff_base: int = 250_000
    late: Literal["publish", "divert", "drop"] = "publish"
    contents_of: Callable[[pa.Table], list[bytes]] | None = None
    times_last: bool = True
    repeated: tuple[tuple[int, int], ...] = ()

    def steady(self, created: np.ndarray) -> np.ndarray:
        """Map ambiguous local hours to their first pass: which is read depends on the window."""
        return self._in_pass(1, created)

    def are_in(self, baseline: int | None, created: np.ndarray) -> np.ndarray:
        """Mask of rows that a baseline covers. An ambiguous hour counts as its second pass: a row
        read by its key has the time of the first."""
        if baseline is None:
            return np.zeros(len(created), bool)
        found: np.ndarray = self._in_pass(2, created) <= baseline
        return found

    def _in_pass(self, number: int, created: np.ndarray) -> np.ndarray:
        if self.repeated and len(created):
            low, high = created.min(), created.max()
            for change, back in self.repeated:
                # the other pass: from the change on, or the same time before it
                first, by = (change, -back) if number == 1 else (change - back, back)
                if first <= high and low < first + back:
                    here = (created >= first) & (created < first + back)
                    created = np.where(here, created + by, created)
        return created

    def next_attempt(self, now: int, attempts: int) -> int:
        return now + (self.backoff_base << attempts)

    @property
    def longest_hold(self) -> int:
        """Time from the first sight of a gap to its skip, µs."""
        return self.backoff_base * ((1 << self.max_backoff) - 1)


@dataclass
class Counts:
    """Counts of one batch; each row counts once in one of the first group."""

    rows: int = 0
    admitted: int = 0
    duplicates: int = 0
    held: int = 0
    baseline: int = 0
    refused: int = 0
    late: int = 0

    backtracked: int = 0
    gaps_opened: int = 0
    gaps_filled: int = 0
    gaps_skipped: int = 0
    gaps_vanished: int = 0
    conflicts: int = 0
    without_identity: int = 0
    """Rows without aggregate id or version, skipped on reading."""

    def add(self, other: Counts) -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass
class Decision:
    """What to publish, and what to record once it is published.

    Attributes:
        events: in publishing order.
        late: mask of `events` that belong to a gap skipped earlier; None: none do.
        diverted: late events for the late topic, if so configured.
        times: packed `Seen` per aggregate of `last`.
        holds: opened or changed holds; None: closed.
        skipped, rewritten: the new state of aggregates where it changed.
        refused: rows for the dead-letter topic, with a reason each.
    """

    events: pa.Table
    late: np.ndarray | None = None
    diverted: pa.Table | None = None
    gaps: list[SkippedGap] = field(default_factory=list)
    last: dict[str, int] = field(default_factory=dict)
    times: dict[str, int] = field(default_factory=dict)
    holds: dict[str, Hold | None] = field(default_factory=dict)
    skipped: dict[str, list[Versions]] = field(default_factory=dict)
    rewritten: dict[str, Rewritten] = field(default_factory=dict)
    refused: tuple[pa.Table, list[str]] | None = None
    counts: Counts = field(default_factory=Counts)

    @property
    def publishes(self) -> bool:
        """Whether anything is written to the topics."""
        return bool(self.events.num_rows or self.gaps or self.refused or self.diverted is not None)


def in_ranges(version: int, ranges: Iterable[Versions]) -> bool:
    return any(first <= version <= last for first, last in ranges)


def runs_of(ranges: Iterable[Versions]) -> list[Versions]:
    """Sort ranges that do not overlap, and merge adjoining ones."""
    runs: list[Versions] = []
    for first, last in sorted(ranges):
        if runs and first == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], last)
        else:
            runs.append((first, last))
    return runs


def version_ranges(events: Iterable[tuple[str, int]]) -> list[VersionRange]:
    found: dict[str, set[int]] = {}
    for aggregate_id, version in events:
        found.setdefault(aggregate_id, set()).add(version)
    return [
        VersionRange(aggregate_id, first, last)
        for aggregate_id, versions in found.items()
        for first, last in runs_of((version, version) for version in versions)
    ]


def without(version: int, ranges: Iterable[Versions]) -> list[Versions]:
    left: list[Versions] = []
    for first, last in ranges:
        if not first <= version <= last:
            left.append((first, last))
            continue
        if first < version:
            left.append((first, version - 1))
        if version < last:
            left.append((version + 1, last))
    return left


def after_fold(hold: Hold, last: int, now: int) -> Hold | None:
    """The hold once the topic shows `last` as published; None: nothing is left to wait for."""
    if last < hold.first_missing:
        return hold
    if last >= hold.seen:
        return None
    return replace(
        hold,
        first_missing=last + 1,
        first_seen=now,
        attempts=0,
        next_attempt=now,
        catching_up=True,
    )
