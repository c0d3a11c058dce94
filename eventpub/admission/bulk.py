"""Decides many rows with NumPy: duplicates, contiguous versions, conflicts, undecided rows."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from eventpub.admission.model import (
    CONFLICT,
    NO_TIME,
    Decision,
    Known,
    Rewritten,
    Rules,
    Seen,
    VersionRange,
    in_ranges,
    numbers_of,
    version_ranges,
    without,
)
from eventpub.config import format_time

NEVER_SEEN = np.iinfo(np.int64).min


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
    """A batch while it is decided.

    Attributes:
        refused: rows and reasons.
        second: rows of a version that has another row, or whose contents are known, and the row
            that is decided in this batch, if any; empty if the table's key is unique.
        admitted: rows and sort keys.
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
    second: list[tuple[int, int | None]] = field(default_factory=list)
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

    def contents(self, rows: pa.Table, row: int) -> set[bytes]:
        """Content hash of one row; empty if the table's key is unique."""
        of = self.rules.contents_of
        return set() if of is None else {*of(rows.slice(row, 1))}

    def raise_time(self, aggregate_id: str, created: int) -> None:
        """Record the time of a decided row that leaves the last version unchanged."""
        self.decision.times[aggregate_id] = self.seen(aggregate_id).raised(created).packed()


class Contiguous:
    """Drops duplicates, admits contiguous versions, and sets the other aggregates apart.

    Attributes:
        apart: rows of aggregates to be walked one by one, by aggregate and version.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self.columns = Columns.of(batch.rows, batch.rules)
        self.apart: np.ndarray = np.zeros(0, np.int64)
        self._decide()

    def _decide(self) -> None:
        batch = self._batch
        ids, code, version, created, steady = self.columns
        last, apart = self._last_and_apart()
        order = np.lexsort((version, code))
        below = version[order] < batch.rules.first_version
        if below.any():
            self._refuse_below(order[below])
            order = order[~below]
        order = self._drop_known(order, last)

        c, v, t = code[order], version[order], created[order]
        same = np.zeros(len(order), dtype=bool)
        same[1:] = c[1:] == c[:-1]
        before = np.where(same, np.roll(v, 1), last[c])
        apart[c[v != before + 1]] = True

        plain = ~apart[c]
        taken = order[plain]
        if len(taken):
            key = t[plain]
            inverted = same[plain] & (key < np.roll(key, 1))
            if inverted.any():
                key = _running_maximum(key, c[plain])
            batch.admitted.append((taken, key))
            ends = np.flatnonzero(np.append(c[plain][1:] != c[plain][:-1], True))
            names = ids
            if len(ends) < len(ids):
                names = [ids[i] for i in c[plain][ends].tolist()]
            times = self._newest(names, steady[taken], ends)
            batch.decision.last.update(zip(names, v[plain][ends].tolist(), strict=True))
            batch.decision.times.update(zip(names, times.tolist(), strict=True))
        self.apart = order[~plain]

    def _last_and_apart(self) -> tuple[np.ndarray, np.ndarray]:
        known, rules = self._batch.known, self._batch.rules
        ids, code, _, created, _ = self.columns
        last = numbers_of(ids, known.last, NEVER_SEEN)
        fresh = last == NEVER_SEEN
        apart = np.zeros(len(ids), dtype=bool)
        if known.baseline is not None:
            apart |= fresh
            apart[code[rules.are_in(known.baseline, created)]] = True
        last[fresh] = rules.first_version - 1
        if known.holds:
            apart |= _are_in(known.holds, ids)
        return last, apart

    def _newest(self, names: list[str], created: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Packed `Seen` per aggregate, including these rows."""
        batch, known = self._batch, self._batch.known.times
        if batch.decision.times:
            known = {**known, **batch.decision.times}
        before = numbers_of(names, known, batch.unknown_time)
        starts = np.append(0, ends[:-1] + 1)
        newest = np.maximum(before >> 1, np.maximum.reduceat(created, starts))
        packed: np.ndarray = newest << 1 | (created[ends] == newest)
        return packed

    def _refuse_below(self, order: np.ndarray) -> None:
        """Refuse rows below the first version, each once; baseline rows are only counted."""
        ids, code, version, created, _ = self.columns
        known = self._batch.known
        are_old = self._batch.rules.are_in(known.baseline, created)
        refused = {a: set(versions) for a, versions in known.refused.items()}
        contents: dict[tuple[str, int], set[bytes]] = {}
        for row in order.tolist():
            if are_old[row]:
                self._batch.decision.counts.baseline += 1
                continue
            aggregate_id, number = ids[int(code[row])], int(version[row])
            of_aggregate, event = refused.setdefault(aggregate_id, set()), (aggregate_id, number)
            content = self._batch.contents(self._batch.rows, row)
            before = contents.setdefault(event, set(known.contents.get(event, ())))
            is_compared = before and event not in known.lone
            if number in of_aggregate and (not is_compared or content <= before):
                self._batch.decision.counts.duplicates += 1
                continue
            before |= content
            of_aggregate.add(number)
            first = self._batch.rules.first_version
            self._batch.refused.append(
                (row, f"admission.version_below_first: versions begin with {first}")
            )

    def _drop_known(self, order: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Drop duplicates; find late events, and conflicts with published versions."""
        batch = self._batch
        ids, code, version, created, steady = self.columns
        c, v = code[order], version[order]
        repeated = np.zeros(len(order), dtype=bool)
        repeated[1:] = (c[1:] == c[:-1]) & (v[1:] == v[:-1])
        old = v <= last[c]
        skipped = batch.known.skipped
        if old.any() and skipped:
            may_be_late = old & ~repeated & _are_in(skipped, ids)[c]
            may_be_late &= ~batch.rules.are_in(batch.known.baseline, created[order])
            for i in np.flatnonzero(may_be_late).tolist():
                aggregate_id = ids[c[i]]
                ranges = batch.decision.skipped.get(aggregate_id, skipped[aggregate_id])
                if in_ranges(int(v[i]), ranges):
                    batch.decision.skipped[aggregate_id] = without(int(v[i]), ranges)
                    batch.late.append(int(order[i]))
                    batch.raise_time(aggregate_id, int(steady[order[i]]))
        published = order[old]
        if batch.rules.contents_of is not None:
            self._note_second(order, old, repeated)
            compared = {row for row, _ in batch.second}
            published = published[[row not in compared for row in published.tolist()]]
        if len(published) and batch.rules.times_last:
            refuse_conflicts(batch, self.columns, published, last)
        dropped = old | repeated
        others = len(batch.late) + len(batch.second)
        batch.decision.counts.duplicates += int(dropped.sum()) - others
        left: np.ndarray = order[~dropped]
        return left

    def _note_second(self, order: np.ndarray, old: np.ndarray, repeated: np.ndarray) -> None:
        """Set aside the window's rows that may differ from others of their version."""
        batch, late = self._batch, set(self._batch.late)
        first = order[np.maximum.accumulate(np.where(repeated, 0, np.arange(len(order))))]
        for i in np.flatnonzero(old | repeated).tolist():
            row, of_version = int(order[i]), int(first[i])
            decided = of_version if of_version in late or not old[i] else None
            event, known = self.columns.at(row)[:2], batch.known
            is_compared = event in known.contents and event not in known.lone
            if (decided is not None or is_compared) and row not in late:
                batch.second.append((row, decided))


def _running_maximum(times: np.ndarray, groups: np.ndarray) -> np.ndarray:
    result = times.copy()
    starts = np.flatnonzero(np.append(True, groups[1:] != groups[:-1]))
    for start, end in zip(starts, np.append(starts[1:], len(times)), strict=True):
        np.maximum.accumulate(times[start:end], out=result[start:end])
    return result


def refuse_conflicts(batch: Batch, columns: Columns, rows: np.ndarray, last: np.ndarray) -> None:
    """Refuse rows of published versions whose times show that they are other events."""
    ids, code, version, created, steady = columns
    known = batch.known
    some = Columns(ids, code[rows], version[rows], created[rows], steady[rows])
    found = other_events(some, last, known)
    found &= ~batch.rules.are_in(known.baseline, some.created)
    late = set(batch.late)
    conflicts = [row for row in rows[found].tolist() if row not in late]
    for row in conflicts:
        aggregate_id, number, at = columns.at(row)
        of_last = int(last[code[row]])
        before = Seen.unpacked(known.times.get(aggregate_id, batch.unknown_time))
        rewritten = known.rewritten.get(aggregate_id)
        if rewritten is None or not rewritten.differs(number, at):
            batch.decision.rewritten[aggregate_id] = Rewritten(before.newest, of_last)
        else:
            batch.decision.rewritten.setdefault(aggregate_id, rewritten)
        seen = batch.seen(aggregate_id)
        # two rows of the last version: clear the flag, so that a replay takes both for duplicates
        is_of_last = seen.is_of_last and number != of_last and at <= seen.newest
        batch.decision.times[aggregate_id] = Seen(max(at, seen.newest), is_of_last).packed()
        is_of_it = before.is_of_last and number == of_last
        which = "this version" if is_of_it else "versions up to a higher one"
        since = format_time(batch.decision.rewritten[aggregate_id].since)
        reason = (
            f"{CONFLICT}: another event of this version was published before; {which} had been"
            f" created by {since}, this row at {format_time(int(created[row]))}"
        )
        batch.refused.append((row, reason))
        batch.decision.counts.conflicts += 1
        batch.decision.counts.duplicates -= 1
    note_decided(batch, columns, conflicts)
    note_decided(batch, columns, batch.late)


def note_decided(batch: Batch, columns: Columns, rows: Iterable[int]) -> None:
    """Record decided rows of rewritten versions, so that a replay of them is dropped."""
    for row in rows:
        aggregate_id, number, at = columns.at(row)
        of = batch.decision.rewritten.get(aggregate_id) or batch.known.rewritten.get(aggregate_id)
        if of is not None and of.differs(number, at):
            batch.decision.rewritten[aggregate_id] = of.plus(number, at)


def unknown(keys: pa.RecordBatch, known: Known, rules: Rules) -> list[VersionRange]:
    """Versions of stored keys that admission has not decided, or would publish late or refuse."""
    columns = Columns.of(keys, rules)
    ids, code, version, created, _ = columns
    last = numbers_of(ids, known.last, NEVER_SEEN)
    decided = np.maximum(last, rules.first_version - 1)
    for number, aggregate_id in enumerate(ids):
        if aggregate_id in known.holds:
            decided[number] = max(decided[number], known.holds[aggregate_id].seen)
    published = version <= last[code]
    missing = version > decided[code]
    for row in np.flatnonzero(version < rules.first_version).tolist():
        missing[row] = int(version[row]) not in known.refused.get(ids[int(code[row])], ())
    if rules.contents_of is not None:  # keys alone cannot show a conflict
        missing |= published | (version < rules.first_version)
    if rules.times_last and (known.times or known.times_since is not None):
        missing |= published & other_events(columns, last, known)
    if known.skipped:
        for row in np.flatnonzero(_are_in(known.skipped, ids)[code] & ~missing).tolist():
            missing[row] = in_ranges(int(version[row]), known.skipped[ids[int(code[row])]])
    missing &= ~rules.are_in(known.baseline, created)
    rows = np.flatnonzero(missing).tolist()
    return version_ranges((ids[int(code[row])], int(version[row])) for row in rows)


def other_events(columns: Columns, last: np.ndarray, known: Known) -> np.ndarray:
    """Mask of rows, of versions up to the last, that are not the published event.

    No decided row is newer than `Seen.newest`. An older row may be any of them, unless it has the
    last version and that one's time is known.
    """
    ids, code, version, _, created = columns
    since = known.times_since
    never = np.iinfo(np.int64).max - 1  # unknown: no row is newer
    unknown = never if since is None else since << 1
    packed = numbers_of(ids, known.times, unknown)[code]
    newest = packed >> 1
    # NO_TIME: the last version was skipped, so there is no row to compare with
    found: np.ndarray = (created > newest) & (newest != NO_TIME >> 1)
    found |= (packed & 1 == 1) & (version == last[code]) & (created != newest)
    if known.rewritten:
        for row in np.flatnonzero(_are_in(known.rewritten, ids)[code] & ~found).tolist():
            of = known.rewritten[ids[int(code[row])]]
            found[row] = of.differs(int(version[row]), int(created[row]))
    if since is not None:
        found &= created > since
    return found


def _are_in(some: Container[str], ids: list[str]) -> np.ndarray:
    return np.fromiter((a in some for a in ids), bool, len(ids))
