"""The common case, decided by NumPy at once: each aggregate contiguous, nothing repeated."""

from __future__ import annotations

import numpy as np

from eventpub.admission.batch import NEVER_SEEN, Batch, Columns
from eventpub.admission.known_events import refuse_conflicts, refuse_second_rows
from eventpub.admission.state import Numbers, in_ranges, numbers_of, without


class Contiguous:
    """Drops what is published, admits what follows on it, and leaves the other aggregates.

    Args:
        batch: with at least one row.

    Attributes:
        columns: of the batch's rows.
        apart: rows of the aggregates that must be walked one by one, by aggregate and version.
        second: where the table allows them, rows of versions that another row of `apart` has, and
            that one.
        plain: last versions and times of the aggregates that are decided; None: none is.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self.columns = Columns.of(batch.rows, batch.rules)
        self.apart: np.ndarray = np.zeros(0, np.int64)
        self.second: tuple[np.ndarray, np.ndarray] = (self.apart, self.apart)
        self.plain: tuple[Numbers, Numbers] | None = None
        self._decide()

    def _decide(self) -> None:
        ids, code, version, created, steady = self.columns
        last, apart = self._last_and_apart()
        order = np.lexsort((version, code))
        below = version[order] < self._batch.rules.first_version
        if below.any():
            self._refuse_below(order[below])
            order = order[~below]
        order = self._drop_known(order, last)

        c, v, t = code[order], version[order], created[order]
        same = np.zeros(len(order), dtype=bool)
        same[1:] = c[1:] == c[:-1]
        before = np.where(same, np.roll(v, 1), last[c])
        if self._batch.rules.backtrack:
            broken = v != before + 1
            apart[c[broken]] = True

        self._refuse_second(apart)
        plain = ~apart[c]
        taken = order[plain]
        if len(taken):
            key = t[plain]
            inverted = same[plain] & (key < np.roll(key, 1))
            if inverted.any():
                key = _running_maximum(key, c[plain])
            self._batch.admitted.append((taken, key))
            ends = np.flatnonzero(np.append(c[plain][1:] != c[plain][:-1], True))
            names = ids
            if len(ends) < len(ids):
                names = [ids[i] for i in c[plain][ends].tolist()]
            times = self._newest(names, steady[taken], ends)
            self.plain = Numbers(names, v[plain][ends]), Numbers(names, times)
        self.apart = order[~plain]

    def _last_and_apart(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each aggregate, its last version, and whether it must be walked whatever its rows."""
        known, rules = self._batch.known, self._batch.rules
        ids, code, _, created, _ = self.columns
        last = numbers_of(ids, known.last, NEVER_SEEN)
        fresh = last == NEVER_SEEN
        apart = np.zeros(len(ids), dtype=bool)
        if known.baseline is not None and rules.backtrack:
            apart |= fresh
            apart[code[created <= known.baseline]] = True
        last[fresh] = rules.first_version - 1
        if known.holds and rules.backtrack:
            apart |= np.fromiter((a in known.holds for a in ids), dtype=bool, count=len(ids))
        return last, apart

    def _newest(self, names: list[str], created: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """When the rows of some aggregates were created, by aggregate and version, packed."""
        before = numbers_of(names, self._batch.known.times, self._batch.unknown_time)
        if self._batch.times:
            before = numbers_of(
                names, dict(zip(names, before.tolist(), strict=True)) | self._batch.times, 0
            )
        starts = np.append(0, ends[:-1] + 1)
        newest = np.maximum(before >> 1, np.maximum.reduceat(created, starts))
        packed: np.ndarray = newest << 1 | (created[ends] == newest)
        return packed

    def _refuse_below(self, order: np.ndarray) -> None:
        """Rows whose version lies below the first: each is refused once, unless it is baseline."""
        ids, code, version, created, _ = self.columns
        known = self._batch.known
        baseline = known.baseline
        refused = {a: set(versions) for a, versions in known.refused.items()}
        contents: dict[tuple[str, int], set[bytes]] = {}
        for row in order.tolist():
            if baseline is not None and created[row] <= baseline:
                self._batch.counts.baseline += 1
                continue
            aggregate_id, number = ids[int(code[row])], int(version[row])
            of_aggregate, event = refused.setdefault(aggregate_id, set()), (aggregate_id, number)
            content = set(self._batch.contents(row))
            before = contents.setdefault(event, set(known.contents.get(event, ())))
            if number in of_aggregate and (not before or content <= before):
                self._batch.counts.duplicates += 1
                continue
            before |= content
            of_aggregate.add(number)
            first = self._batch.rules.first_version
            self._batch.refused.append(
                (row, f"admission.version_below_first: versions begin with {first}")
            )

    def _drop_known(self, order: np.ndarray, last: np.ndarray) -> np.ndarray:
        """Drop what is published already and what stands twice in the batch.

        Find late events, and other events of versions that were published.
        """
        ids, code, version, created, steady = self.columns
        c, v = code[order], version[order]
        repeated = np.zeros(len(order), dtype=bool)
        repeated[1:] = (c[1:] == c[:-1]) & (v[1:] == v[:-1])
        old = v <= last[c]
        if old.any() and self._batch.known.skipped:
            skips = np.fromiter(
                (a in self._batch.known.skipped for a in ids), dtype=bool, count=len(ids)
            )
            may_be_late = old & ~repeated & skips[c]
            if self._batch.known.baseline is not None:
                may_be_late &= created[order] > self._batch.known.baseline
            for i in np.flatnonzero(may_be_late).tolist():
                aggregate_id = ids[c[i]]
                ranges = self._batch.skipped.get(
                    aggregate_id, self._batch.known.skipped[aggregate_id]
                )
                if in_ranges(int(v[i]), ranges):
                    self._batch.skipped[aggregate_id] = without(int(v[i]), ranges)
                    self._batch.late.append(int(order[i]))
                    self._batch.raise_time(aggregate_id, int(steady[order[i]]))
        published = order[old]
        if len(published) and self._batch.rules.contents_of is not None:
            compared = refuse_second_rows(self._batch, self.columns, published)
            published = published[[row not in compared for row in published.tolist()]]
        if len(published) and self._batch.rules.times_last:
            refuse_conflicts(self._batch, self.columns, published, last)
        dropped = old | repeated
        self._batch.counts.duplicates += int(dropped.sum()) - len(self._batch.late)
        if self._batch.rules.contents_of is not None:
            second = repeated & ~old
            first_of_version = np.maximum.accumulate(np.where(repeated, 0, np.arange(len(order))))
            self.second = order[second], order[first_of_version[second]]
        left: np.ndarray = order[~dropped]
        return left

    def _refuse_second(self, apart: np.ndarray) -> None:
        """Second rows of versions that are admitted; those set apart wait for their aggregates."""
        contents: dict[int, set[bytes]] = {}
        rows, firsts = self.second
        waits = apart[self.columns.code[rows]]
        for row, first in zip(rows[~waits].tolist(), firsts[~waits].tolist(), strict=True):
            of_version = contents.setdefault(first, set(self._batch.contents(first)))
            refused = self._batch.refuse_second(self._batch.rows, row, of_version)
            self._batch.counts.duplicates -= refused
        self._batch.counts.duplicates -= int(waits.sum())
        self.second = rows[waits], firsts[waits]


def _running_maximum(times: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """The running maximum of `times` within each run of equal `groups`."""
    result = times.copy()
    starts = np.flatnonzero(np.append(True, groups[1:] != groups[:-1]))
    for start, end in zip(starts, np.append(starts[1:], len(times)), strict=True):
        np.maximum.accumulate(times[start:end], out=result[start:end])
    return result
