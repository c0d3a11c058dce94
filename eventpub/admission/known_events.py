"""Which rows of the store are other events than those that were published, or not decided yet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa

from eventpub.admission.batch import NEVER_SEEN, Batch, Columns
from eventpub.admission.model import VersionRange
from eventpub.admission.rules import CONFLICT, Rules
from eventpub.admission.state import (
    NO_TIME,
    Known,
    Rewritten,
    Seen,
    Versions,
    in_ranges,
    numbers_of,
)
from eventpub.config import format_time


def refuse_conflicts(batch: Batch, columns: Columns, rows: np.ndarray, last: np.ndarray) -> None:
    """Refuse rows of versions up to the last that are not those which were published."""
    ids, code, version, created, steady = columns
    known = batch.known
    some = Columns(ids, code[rows], version[rows], created[rows], steady[rows])
    found = other_events(some, last, known)
    if known.baseline is not None:
        found &= some.created > known.baseline
    late = set(batch.late)
    conflicts = [row for row in rows[found].tolist() if row not in late]
    for row in conflicts:
        aggregate_id, number, at = columns.at(row)
        before = Seen.unpacked(known.times.get(aggregate_id, batch.unknown_time))
        is_last = number == int(last[code[row]])
        rewritten = known.rewritten.get(aggregate_id)
        if rewritten is None or not rewritten.differs(number, at):
            begun = Rewritten(before.newest, int(last[code[row]]))
            batch.rewritten[aggregate_id] = begun
        else:
            batch.rewritten.setdefault(aggregate_id, rewritten)
        seen = batch.seen(aggregate_id)
        # of the last version, the next time both are duplicates: nothing tells which it is
        is_of_last = seen.is_of_last and not is_last and at <= seen.newest
        batch.times[aggregate_id] = Seen(max(at, seen.newest), is_of_last).packed()
    for row in conflicts:
        aggregate_id, number, _ = columns.at(row)
        since = batch.rewritten[aggregate_id].since
        before = Seen.unpacked(known.times.get(aggregate_id, batch.unknown_time))
        is_of_it = before.is_of_last and number == int(last[code[row]])
        which = "this version" if is_of_it else "versions up to a higher one"
        reason = (
            f"{CONFLICT}: another event of this version was published before; {which} had"
            f" been created by {format_time(since)}, this row at"
            f" {format_time(int(created[row]))}"
        )
        batch.refused.append((row, reason))
        batch.counts.conflicts += 1
        batch.counts.duplicates -= 1
    note_decided(batch, columns, conflicts)
    note_decided(batch, columns, batch.late)


def refuse_second_rows(batch: Batch, columns: Columns, rows: np.ndarray) -> set[int]:
    """Refuse rows of versions up to the last whose contents are not those that were decided.

    Args:
        rows: in the order of their versions.

    Returns:
        Those that were compared: of the others' versions no contents are known.
    """
    compared: set[int] = set()
    late, baseline = set(batch.late), batch.known.baseline
    contents: dict[tuple[str, int], set[bytes]] = {}
    for row in rows.tolist():
        aggregate_id, number, _ = columns.at(row)
        known = batch.known.contents.get((aggregate_id, number), ())
        of_version = contents.setdefault((aggregate_id, number), set(known))
        if row in late:
            of_version |= set(batch.contents(row))
        elif of_version and (baseline is None or columns.created[row] > baseline):
            compared.add(row)
            batch.counts.duplicates -= batch.refuse_second(batch.rows, row, of_version)
    return compared


def note_decided(batch: Batch, columns: Columns, rows: Iterable[int]) -> None:
    """Rows of versions up to the last that are not dropped: a replay of them is."""
    for row in rows:
        aggregate_id, number, at = columns.at(row)
        of = batch.rewritten.get(aggregate_id) or batch.known.rewritten.get(aggregate_id)
        if of is not None and of.differs(number, at):
            batch.rewritten[aggregate_id] = of.plus(number, at)


def unknown(keys: pa.RecordBatch, known: Known, rules: Rules) -> list[VersionRange]:
    """Which of some rows of the store admission has not decided yet, or would publish as late.

    Those are among them whose version was published as another event.

    Args:
        keys: `aggregate_id`, `version` and `create_time` of rows, any order.
        known: what the index knows of their aggregates.
        rules: the configuration.
    """
    columns = Columns.of(keys, rules)
    ids, code, version, created, _ = columns
    decided = np.fromiter(
        (
            max(
                known.last.get(a, rules.first_version - 1),
                known.holds[a].seen if a in known.holds else rules.first_version - 1,
            )
            for a in ids
        ),
        np.int64,
        len(ids),
    )
    fresh = np.ones(len(version), bool)
    if known.baseline is not None:
        fresh = created > known.baseline
    missing = fresh & (version > decided[code])
    for row in np.flatnonzero(fresh & (version < rules.first_version)).tolist():
        refused = known.refused.get(ids[int(code[row])], ())
        missing[row] = rules.contents_of is not None or int(version[row]) not in refused
    if rules.contents_of is not None:  # keys do not say whether a row is what was published
        missing |= fresh & (version <= numbers_of(ids, known.last, NEVER_SEEN)[code])
    if rules.times_last and (known.times or known.times_since is not None):
        last = numbers_of(ids, known.last, NEVER_SEEN)
        others = other_events(columns, last, known)
        missing |= fresh & (version <= last[code]) & others
    found: dict[str, list[int]] = {}
    for row in np.flatnonzero(missing).tolist():
        found.setdefault(ids[int(code[row])], []).append(int(version[row]))
    if known.skipped:
        skips = np.fromiter((a in known.skipped for a in ids), bool, len(ids))
        for row in np.flatnonzero(fresh & skips[code] & ~missing).tolist():
            aggregate_id = ids[int(code[row])]
            if in_ranges(int(version[row]), known.skipped[aggregate_id]):
                found.setdefault(aggregate_id, []).append(int(version[row]))
    return [
        VersionRange(aggregate_id, first, end)
        for aggregate_id, versions in found.items()
        for first, end in _runs(sorted(set(versions)))
    ]


def other_events(columns: Columns, last: np.ndarray, known: Known) -> np.ndarray:
    """Which of some rows, whose versions are at most the last, are not what was published.

    Args:
        columns: of the rows.
        last: of each aggregate.
        known: what the index knows of these aggregates; see `Seen.differs`.
    """
    ids, code, version, _, created = columns
    since = known.times_since
    never = np.iinfo(np.int64).max - 1  # not known: no row lies above it
    unknown = never if since is None else since << 1
    packed = numbers_of(ids, known.times, unknown)[code]
    newest = packed >> 1
    # a skip alone says nothing of what was published below it
    found: np.ndarray = (created > newest) & (newest != NO_TIME >> 1)
    found |= (packed & 1 == 1) & (version == last[code]) & (created != newest)
    if known.rewritten:
        of_each = [known.rewritten.get(a) for a in ids]
        are = np.fromiter((of is not None for of in of_each), bool, len(ids))
        for row in np.flatnonzero(are[code] & ~found).tolist():
            of = of_each[int(code[row])]
            found[row] = of is not None and of.differs(int(version[row]), int(created[row]))
    if since is not None:
        found &= created > since
    return found


def _runs(versions: Sequence[int]) -> list[Versions]:
    """Ascending versions as runs without holes."""
    runs: list[Versions] = []
    for version in versions:
        if runs and runs[-1][1] == version - 1:
            runs[-1] = (runs[-1][0], version)
        else:
            runs.append((version, version))
    return runs
