"""A batch while it is decided: its rows, what is known of them, and what is decided so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from eventpub.admission.rules import CONFLICT, Counts, Rules
from eventpub.admission.state import NO_TIME, Known, Rewritten, Seen, Versions

_SECOND_ROW = f"{CONFLICT}: %s, and this row has another event type, payload or metadata"
_BEFORE = "another event of this version was published before"
_BOTH = "the table has this version more than once, another row is published"
NEVER_SEEN = np.iinfo(np.int64).min


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
        """Of rows of `EVENTS`, or of their keys and times."""
        column = rows.column("aggregate_id")
        if isinstance(column, pa.ChunkedArray):
            column = column.combine_chunks()
        encoded: Any = column.dictionary_encode()
        ids: list[Any] = encoded.dictionary.to_pylist()
        code = encoded.indices.to_numpy().astype(np.int64)
        created = rows.column("create_time").to_numpy()
        return cls(ids, code, rows.column("version").to_numpy(), created, rules.steady(created))

    def at(self, row: int) -> tuple[str, int, int]:
        """Aggregate, version and steady time of one."""
        return self.ids[int(self.code[row])], int(self.version[row]), int(self.steady[row])


@dataclass
class Batch:
    """See the module.

    Attributes:
        rows: of the window.
        known: what the index knows of their aggregates.
        rules: the configuration.
        now: the database's time, µs.
        counts: of what became of the rows.
        last, times, skipped, rewritten: as of `Decision`.
        refused: rows that are no event, with the reason of each.
        late: rows of versions that were skipped.
        admitted: rows that are published, and by what they are ordered across aggregates.
    """

    rows: pa.Table
    known: Known
    rules: Rules
    now: int
    counts: Counts = field(default_factory=Counts)
    last: dict[str, int] = field(default_factory=dict)
    times: dict[str, int] = field(default_factory=dict)
    skipped: dict[str, list[Versions]] = field(default_factory=dict)
    rewritten: dict[str, Rewritten] = field(default_factory=dict)
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
        return Seen.unpacked(self.times.get(aggregate_id, known))

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
        self.counts.conflicts += 1
        created = self.rules.steady(rows.column("create_time")[row : row + 1].to_numpy())
        self.raise_time(aggregate_id, int(created[0]))
        return True

    def raise_time(self, aggregate_id: str, created: int) -> None:
        """Note a row that is decided and leaves the last version as it is."""
        self.times[aggregate_id] = self.seen(aggregate_id).raised(created).packed()
