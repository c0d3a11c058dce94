"""A batch: the rules by which it is decided, what is decided so far, and the decision."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from eventpub.admission.model import NO_TIME, Hold, Known, Rewritten, Seen, SkippedGap, Versions

CONFLICT = "admission.version_conflict"
"""Begins the reason of a row whose version was published as another event."""

_SECOND_ROW = f"{CONFLICT}: %s, and this row has another event type, payload or metadata"
_BEFORE = "another event of this version was published before"
_BOTH = "the table has this version more than once, another row is published"
NEVER_SEEN = np.iinfo(np.int64).min


@dataclass(frozen=True)
class Rules:
    """The configuration that admission depends on; durations in microseconds.

    Attributes:
        first_version: the version that an aggregate starts with, 0 or 1.
        max_backoff: attempts before a gap is skipped.
        backoff_base: wait before the first attempt; it doubles with each.
        late: what happens to an event of a skipped gap.
        backtrack: False admits whatever is above the last version: loses events, for measuring.
        contents_of: of each of some rows what tells it from another of its version; None: the event
            table itself refuses a second row of one version.
        times_last: whether a row keeps its `create_time`: then one of a published version with
            another time is another event.
        repeated: where local times are lived twice: from which instant on, and by how much the
            clocks went back there, µs.
    """

    first_version: int = 1
    max_backoff: int = 8
    backoff_base: int = 250_000
    late: Literal["publish", "divert", "drop"] = "publish"
    backtrack: bool = True
    contents_of: Callable[[pa.Table], list[bytes]] | None = None
    times_last: bool = True
    repeated: tuple[tuple[int, int], ...] = ()

    def steady(self, created: np.ndarray) -> np.ndarray:
        """Times that do not depend on the window in which a row was read.

        A local time that is lived twice is read as the first or the second: here as the first.
        """
        if self.repeated and len(created):
            low, high = created.min(), created.max()
            for change, back in self.repeated:
                if change <= high and low < change + back:
                    again = (created >= change) & (created < change + back)
                    created = np.where(again, created - back, created)
        return created

    def next_attempt(self, now: int, attempts: int) -> int:
        """When a gap is looked up again after so many failed attempts."""
        return now + (self.backoff_base << attempts)

    @property
    def longest_hold(self) -> int:
        """From the first sight of a gap to its skip."""
        return self.backoff_base * ((1 << self.max_backoff) - 1)


@dataclass
class Counts:
    """What happened to the rows of a batch; each row counts once in one of the first group."""

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
    """Rows that are no event, and of no aggregate: passed over when they were read."""

    def add(self, other: Counts) -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass
class Decision:
    """What is published, and what is remembered once it is.

    Attributes:
        events: the admitted events in the order of publishing.
        late: which of `events` belong to a gap that was skipped before; None: none does.
        diverted: late events for the topic of late events, where the configuration says so.
        gaps: gaps that are given up with this batch.
        last: new last version per aggregate.
        times: per aggregate of `last`, when its rows were created; see `Known`.
        holds: holds that were opened or changed; None: closed.
        skipped: new skipped ranges per aggregate.
        rewritten: per aggregate what is known after it of rewritten versions.
        refused: rows that are no event, for the topic of dead letters, with the reason of each.
        counts: for metrics.
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
        """Whether the topics change at all."""
        return bool(self.events.num_rows or self.gaps or self.refused or self.diverted is not None)


class Columns(NamedTuple):
    """Some rows, column by column.

    Attributes:
        ids: of the aggregates.
        code: of each row, which of them it is of.
        version, created: of each row.
        steady: when it was created, whatever window it was read in; see `Rules.steady`.
    """

    ids: list[str]
    code: np.ndarray
    version: np.ndarray
    created: np.ndarray
    steady: np.ndarray

    @classmethod
    def of(cls, rows: pa.Table | pa.RecordBatch, rules: Rules) -> Columns:
        """From rows of `EVENTS`, or from their keys and times."""
        column = rows.column("aggregate_id")
        if isinstance(column, pa.ChunkedArray):
            column = column.combine_chunks()
        encoded: Any = column.dictionary_encode()
        ids: list[Any] = encoded.dictionary.to_pylist()
        code = encoded.indices.to_numpy().astype(np.int64)
        created = rows.column("create_time").to_numpy()
        return cls(ids, code, rows.column("version").to_numpy(), created, rules.steady(created))

    def at(self, row: int) -> tuple[str, int, int]:
        """Aggregate, version and steady time of one row."""
        return self.ids[int(self.code[row])], int(self.version[row]), int(self.steady[row])


@dataclass
class Batch:
    """A batch while it is decided.

    Attributes:
        rows, known, rules, now, open_since, skip_now: as of `Plan`.
        decision: what is decided so far; its rows are added at the end.
        refused: rows that are no event, with the reason of each.
        late: rows of versions that were skipped.
        admitted: rows that are published, and by what they are ordered across aggregates.
    """

    rows: pa.Table
    known: Known
    rules: Rules
    now: int
    open_since: int | None
    skip_now: Collection[str]
    decision: Decision
    refused: list[tuple[int, str]] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    admitted: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    @property
    def unknown_time(self) -> int:
        """What `Known.times` would say of an aggregate of which it says nothing."""
        since = self.known.times_since
        return NO_TIME if since is None else since << 1

    def seen(self, aggregate_id: str) -> Seen:
        """When the rows of an aggregate were created, with what is decided so far."""
        known = self.known.times.get(aggregate_id, self.unknown_time)
        return Seen.unpacked(self.decision.times.get(aggregate_id, known))

    def contents(self, row: int) -> list[bytes]:
        """What tells one of the rows from others of its version; none where that is not asked."""
        of = self.rules.contents_of
        return [] if of is None else of(self.rows.slice(row, 1))

    def refuse_second(self, rows: pa.Table, row: int, contents: set[bytes]) -> bool:
        """Refuse a row of a version of which others were decided, unless it is one of these.

        Args:
            rows: the batch's, and those that were fetched.
            row: which of them.
            contents: of the others; with this one afterwards.
        """
        assert self.rules.contents_of is not None
        [content] = self.rules.contents_of(rows.slice(row, 1))
        if content in contents:
            return False
        contents.add(content)
        aggregate_id, version = (rows.column(n)[row].as_py() for n in ("aggregate_id", "version"))
        was_known = (aggregate_id, version) in self.known.contents  # its row may be gone by now
        self.refused.append((row, _SECOND_ROW % (_BEFORE if was_known else _BOTH)))
        self.decision.counts.conflicts += 1
        created = self.rules.steady(rows.column("create_time")[row : row + 1].to_numpy())
        self.raise_time(aggregate_id, int(created[0]))
        return True

    def raise_time(self, aggregate_id: str, created: int) -> None:
        """Note a row that is decided and leaves the last version as it is."""
        self.decision.times[aggregate_id] = self.seen(aggregate_id).raised(created).packed()
