"""A batch: its rules, its state while it is decided, and the decision."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa

from eventpub.admission.model import NO_TIME, Hold, Known, Rewritten, Seen, SkippedGap, Versions

CONFLICT = "admission.version_conflict"
"""Prefix of the reason of a row whose version was published as another event."""

_SECOND_ROW = f"{CONFLICT}: %s, and this row has another event type, payload or metadata"
_BEFORE = "another event of this version was published before"
_BOTH = "the table has this version more than once, another row is published"
NEVER_SEEN = np.iinfo(np.int64).min


@dataclass(frozen=True)
class Rules:
    """The configuration that admission depends on. Durations in microseconds.

    Attributes:
        max_backoff: failed lookups before a gap is skipped.
        backoff_base: wait before the first lookup; doubles after each.
        backtrack: False publishes any version above the last and loses events; for benchmarks.
        contents_of: hashes rows, to compare rows of one version; None: the table's key is unique.
        times_last: rows keep their `create_time`, so another time means another event.
        repeated: ambiguous local hours: when the clocks went back, and by how much, µs.
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
        """Map ambiguous local hours to their first pass: which is read depends on the window."""
        if self.repeated and len(created):
            low, high = created.min(), created.max()
            for change, back in self.repeated:
                if change <= high and low < change + back:
                    again = (created >= change) & (created < change + back)
                    created = np.where(again, created - back, created)
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


class Columns(NamedTuple):
    """Key columns of rows: `code` indexes `ids`; `steady` is `created` after `Rules.steady`."""

    ids: list[str]
    code: np.ndarray
    version: np.ndarray
    created: np.ndarray
    steady: np.ndarray

    @classmethod
    def of(cls, rows: pa.Table | pa.RecordBatch, rules: Rules) -> Columns:
        column = rows.column("aggregate_id")
        if isinstance(column, pa.ChunkedArray):
            column = column.combine_chunks()
        encoded: Any = column.dictionary_encode()
        ids: list[Any] = encoded.dictionary.to_pylist()
        code = encoded.indices.to_numpy().astype(np.int64)
        created = rows.column("create_time").to_numpy()
        return cls(ids, code, rows.column("version").to_numpy(), created, rules.steady(created))

    def at(self, row: int) -> tuple[str, int, int]:
        return self.ids[int(self.code[row])], int(self.version[row]), int(self.steady[row])


@dataclass
class Batch:
    """A batch while it is decided; `refused`: rows and reasons, `admitted`: rows and sort keys."""

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
        """Packed `Seen` of an aggregate missing from `Known.times`."""
        since = self.known.times_since
        return NO_TIME if since is None else since << 1

    def seen(self, aggregate_id: str) -> Seen:
        """`Seen` of an aggregate, including what this batch has decided."""
        known = self.known.times.get(aggregate_id, self.unknown_time)
        return Seen.unpacked(self.decision.times.get(aggregate_id, known))

    def contents(self, row: int) -> list[bytes]:
        """Content hash of one row; empty if the table's key is unique."""
        of = self.rules.contents_of
        return [] if of is None else of(self.rows.slice(row, 1))

    def refuse_second(self, rows: pa.Table, row: int, contents: set[bytes]) -> bool:
        """Refuse a row unless its hash is in `contents`, to which it is added; whether it was
        refused."""
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
        """Record the time of a decided row that leaves the last version unchanged."""
        self.decision.times[aggregate_id] = self.seen(aggregate_id).raised(created).packed()
