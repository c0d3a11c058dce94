"""Decides which events may be published now: continuity, deduplication, holds and skips.

Pure: no I/O and no clock. Missing versions are looked up in the store, hence two steps:

1. `Plan` takes a window's rows and what the index knows, and lists the versions to backtrack;
2. `Plan.decide` takes what the backtrack found, and decides what to publish and record.

Per aggregate, over all batches: versions are admitted in ascending order, each once, and ``v + 1``
only after ``v`` was admitted, skipped, or is baseline. An aggregate whose next version is missing
is held; the others never wait for it.

Contiguous aggregates, the common case, are decided by NumPy for the whole batch in `bulk`; only the
others are walked one by one, in `walk`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np
import pyarrow as pa

from eventpub.admission.bulk import Batch, Columns, Contiguous
from eventpub.admission.model import (
    CONFLICT,
    NO_TIME,
    Counts,
    Decision,
    Known,
    Rules,
    VersionRange,
    Versions,
    values,
)
from eventpub.admission.walk import Walk, Walker

_SECOND_ROW = f"{CONFLICT}: %s, and this row has another event type, payload or metadata"
_BEFORE = "another event of this version was published before"
_BOTH = "the table has this version more than once, another row is published"


class Plan:
    """A batch between its two steps.

    Args:
        rows: a window's rows, schema `EVENTS`, in any order; may repeat earlier rows.
        retry: held aggregates to look up, due or not; rows of other held ones only extend the
            hold, unless they include the missing version.
        open_since: start of the oldest open transaction, µs: a gap seen after it is not skipped.
            None: none, or unknown.
        skip_now: held aggregates whose gap the operator asked to skip.

    Attributes:
        missing: versions to fetch by key, regardless of `create_time`.
        first_sights: (aggregate, version) first seen while a baseline exists; see `settle`.
    """

    def __init__(  # noqa: PLR0913 (options, by keyword)
        self,
        rows: pa.Table,
        known: Known,
        rules: Rules,
        now: int,
        retry: Collection[str] = (),
        *,
        open_since: int | None = None,
        skip_now: Collection[str] = (),
    ) -> None:
        decision = Decision(rows.slice(0, 0), counts=Counts(rows=rows.num_rows))
        self._batch = Batch(rows, known, rules, now, open_since, skip_now, decision)
        self._retry = {*retry, *skip_now}
        self._walks: list[Walk] = []
        self.missing: list[VersionRange] = []
        self.first_sights: list[tuple[str, int]] = []
        if rows.num_rows:
            contiguous = Contiguous(self._batch)
            if len(contiguous.apart):
                self._set_apart(contiguous.apart, contiguous.columns)
        for aggregate_id in self._retry - {walk.aggregate_id for walk in self._walks}:
            hold = known.holds.get(aggregate_id)
            if hold is not None:
                self._begin(aggregate_id, hold.first_missing - 1, hold.since)
        for walk in self._walks:
            self._ask_for(walk)

    def _set_apart(self, order: np.ndarray, columns: Columns) -> None:
        ids, code, version, created, _ = columns
        known = self._batch.known
        unknown = self._batch.rules.first_version - 1 if known.baseline is None else None
        walks: dict[int, Walk] = {}
        for row in order.tolist():
            number = int(code[row])
            if number not in walks:
                last = known.last.get(ids[number], unknown)
                walks[number] = self._begin(ids[number], last, int(created[row]))
            walk = walks[number]
            walk.rows[int(version[row])] = row
            walk.seen = max(walk.seen, int(version[row]))
            walk.since = min(walk.since, int(created[row]))

    def _begin(self, aggregate_id: str, last: int | None, since: int) -> Walk:
        hold = self._batch.known.holds.get(aggregate_id)
        walk = Walk(
            aggregate_id,
            last,
            hold,
            seen=hold.seen if hold else 0,
            since=hold.since if hold else since,
            asks_store=hold is None or aggregate_id in self._retry,
        )
        self._walks.append(walk)
        return walk

    def _ask_for(self, walk: Walk) -> None:
        if walk.last is None:
            self.first_sights.append((walk.aggregate_id, min(walk.rows)))
            return
        if walk.last + 1 in walk.rows:
            walk.asks_store = True
        if not walk.asks_store:
            return
        present = [*walk.rows]
        if walk.hold is not None and self._batch.rules.contents_of is not None:
            # fetch held versions again: earlier windows may have had other rows of them
            present = [version for version in present if version > walk.hold.seen]
        walk.fetched = _holes(walk.last, walk.seen, present)
        self.missing.extend(
            VersionRange(walk.aggregate_id, first, end) for first, end in walk.fetched
        )

    def settle(self, ends: Mapping[str, tuple[int, int]]) -> None:
        """Set the baseline's last version and newest `create_time` per first sight; extends
        `missing`."""
        none = (self._batch.rules.first_version - 1, NO_TIME >> 1)
        for walk in self._walks:
            if walk.last is None:
                walk.last, walk.newest_below = ends.get(walk.aggregate_id, none)
                walk.is_first_sight = True
                self._ask_for(walk)

    # -- second step ---------------------------------------------------------------------------

    def decide(self, found: pa.Table, rest: Iterable[VersionRange] = ()) -> Decision:
        """Decide the batch; call `settle` first if there are `first_sights`.

        Args:
            found: stored rows of `missing`, as many as one batch may hold.
            rest: versions of `missing` not read; within an aggregate, everything below them was.
        """
        batch, decision = self._batch, self._batch.decision
        everything = pa.concat_tables([batch.rows, found]) if found.num_rows else batch.rows
        walks = {walk.aggregate_id: walk for walk in self._walks}
        rows_found = zip(values(found, "aggregate_id"), values(found, "version"), strict=True)
        for row, (a, version) in enumerate(rows_found, batch.rows.num_rows):
            if a in walks and (first := walks[a].rows.setdefault(version, row)) != row:
                batch.second.append((row, first))
        unread: dict[str, int] = {}
        for left in rest:
            unread[left.aggregate_id] = min(left.first, unread.get(left.aggregate_id, left.first))
        walker = Walker(batch, everything)
        for walk in self._walks:
            a = walk.aggregate_id
            walker.decide(walk, min(walk.seen, unread.get(a, walk.seen + 1) - 1))
        if batch.second:
            self._compare_second_rows(everything)
        for a in decision.times.keys() - decision.last.keys():
            decision.last[a] = batch.known.last.get(a, batch.rules.first_version - 1)
        if batch.refused:
            rows, reasons = zip(*batch.refused, strict=True)
            decision.refused = everything.take(list(rows)), list(reasons)
            decision.counts.refused += len(rows)
        self._order_events(everything)
        return decision

    def _compare_second_rows(self, everything: pa.Table) -> None:
        """Refuse rows of decided versions that have other contents than the rows decided."""
        batch, known, counts = self._batch, self._batch.known, self._batch.decision.counts
        created = everything.column("create_time").to_numpy()
        steady = batch.rules.steady(created)
        are_old = batch.rules.are_in(known.baseline, created)
        contents: dict[tuple[str, int], set[bytes]] = {}
        none = batch.rules.first_version - 1
        for row, decided in batch.second:
            a, version = (everything.column(n)[row].as_py() for n in ("aggregate_id", "version"))
            is_own = row < batch.rows.num_rows
            if version > batch.decision.last.get(a, known.last.get(a, none)):
                counts.held += is_own  # read again with the hold
                continue
            if (a, version) not in contents:
                contents[a, version] = set(known.contents.get((a, version), ()))
                if decided is not None:
                    contents[a, version] |= batch.contents(everything, decided)
            before, content = contents[a, version], batch.contents(everything, row)
            if are_old[row] or content <= before:
                counts.duplicates += is_own
                continue
            before |= content
            counts.conflicts += 1
            was_known = (a, version) in known.contents  # its row may be gone by now
            batch.refused.append((row, _SECOND_ROW % (_BEFORE if was_known else _BOTH)))
            batch.raise_time(a, int(steady[row]))

    def _order_events(self, everything: pa.Table) -> None:
        """Order events by `create_time` across aggregates, by version within each."""
        batch, decision = self._batch, self._batch.decision
        late = np.array(batch.late, dtype=np.int64)
        decision.counts.late += len(late)
        decision.counts.admitted += sum(len(rows) for rows, _ in batch.admitted)
        if len(late) and batch.rules.late == "divert":
            decision.diverted = everything.take(late)
        publishes_late = len(late) > 0 and batch.rules.late == "publish"
        if publishes_late:
            created = everything.column("create_time").to_numpy()
            batch.admitted.append((late, created[late]))
        if not batch.admitted:
            return
        rows = np.concatenate([rows for rows, _ in batch.admitted])
        key = np.concatenate([key for _, key in batch.admitted])
        version = everything.column("version").to_numpy()[rows]
        rows = rows[np.lexsort((version, key))]
        in_place = len(rows) == everything.num_rows and bool((rows == np.arange(len(rows))).all())
        decision.events = everything if in_place else everything.take(rows)
        if publishes_late:
            decision.late = np.isin(rows, late)


def _holes(last: int, seen: int, present: Iterable[int]) -> list[Versions]:
    holes: list[Versions] = []
    expected = last + 1
    for version in sorted(present):
        if version > expected:
            holes.append((expected, version - 1))
        expected = max(expected, version + 1)
    if expected <= seen:
        holes.append((expected, seen))
    return holes
