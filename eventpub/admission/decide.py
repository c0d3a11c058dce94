"""Which events may go out now: continuity, dedupe, holds and skips.

Pure: no I/O and no clock. A batch is decided in two steps, because what is missing must be looked
for in the store in between:

1. `plan` takes the window's rows and what the index knows, and says which versions to backtrack;
2. `Plan.decide` takes what the backtrack found, and says what is published and remembered.

For every aggregate, over all batches: versions are admitted in ascending order, each once, and
version ``v + 1`` only after ``v`` was admitted, skipped, or is baseline. An aggregate whose next
version is missing is held; the others never wait for it.

The common case (each aggregate contiguous, nothing repeated) is decided by NumPy for the whole
batch. Only the other aggregates are walked one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from eventpub.admission.model import SkippedGap, VersionRange, values
from eventpub.admission.state import Hold, Known, Versions, in_ranges, without

_NEVER_SEEN = np.iinfo(np.int64).min


@dataclass(frozen=True)
class Rules:
    """The configuration that admission depends on; durations in microseconds.

    Attributes:
        first_version: the version that an aggregate starts with, 0 or 1.
        max_backoff: attempts before a gap is skipped.
        backoff_base: wait before the first attempt; it doubles with each.
        late: what happens to an event of a skipped gap.
        backtrack: False admits whatever is above the last version: loses events, for measuring.
        fetch_limit: most rows that one backtracked range may bring at once.
        versions_are_unique: whether the table itself refuses a second row of one version.
    """

    first_version: int = 1
    max_backoff: int = 8
    backoff_base: int = 250_000
    late: Literal["publish", "divert", "drop"] = "publish"
    backtrack: bool = True
    fetch_limit: int = 10_000
    versions_are_unique: bool = True

    def next_attempt(self, now: int, attempts: int) -> int:
        """When a gap is looked for again after so many attempts in vain."""
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

    def add(self, other: Counts) -> None:
        """Add another batch's counts to these."""
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
        holds: holds that were opened or changed; None: closed.
        skipped: new skipped ranges per aggregate.
        refused: rows that are no event, for the topic of dead letters, with the reason of each.
        counts: for metrics.
    """

    events: pa.Table
    late: np.ndarray | None = None
    diverted: pa.Table | None = None
    gaps: list[SkippedGap] = field(default_factory=list)
    last: dict[str, int] = field(default_factory=dict)
    holds: dict[str, Hold | None] = field(default_factory=dict)
    skipped: dict[str, list[Versions]] = field(default_factory=dict)
    refused: tuple[pa.Table, list[str]] | None = None
    counts: Counts = field(default_factory=Counts)

    @property
    def publishes(self) -> bool:
        """Whether the topics change at all."""
        return bool(self.events.num_rows or self.gaps or self.refused or self.diverted is not None)


@dataclass
class _Walk:
    """One aggregate that is not plainly contiguous: the rows of the window that concern it."""

    aggregate_id: str
    last: int | None
    hold: Hold | None
    rows: dict[int, int]
    """version → row of the window, only above `last`"""
    seen: int
    since: int
    looked: bool
    """whether the store is asked for what is missing in this batch"""
    fetched: list[Versions] = field(default_factory=list)


class Plan:
    """A batch between its two steps. Made by `plan`; see there."""

    def __init__(
        self,
        rows: pa.Table,
        known: Known,
        rules: Rules,
        now: int,
        open_since: int | None = None,
        look_now: Collection[str] = (),
        skip_now: Collection[str] = (),
    ) -> None:
        self._rows = rows
        self._known = known
        self._rules = rules
        self._now = now
        self._open_since = open_since
        self._skip_now = skip_now
        self._look_now = {*look_now, *skip_now}
        self._refused: list[tuple[int, str]] = []
        self._counts = Counts(rows=rows.num_rows)
        self._last: dict[str, int] = {}
        self._skipped: dict[str, list[Versions]] = {}
        self._late: list[int] = []
        self._admitted: list[np.ndarray] = []
        self._order: list[np.ndarray] = []
        self._walks: list[_Walk] = []
        self.missing: list[VersionRange] = []
        """Versions to fetch by key, whatever their `create_time`."""
        self.first_sights: list[tuple[str, int]] = []
        """(aggregate, version) seen for the first time where a baseline exists: what lies below
        it tells where the baseline of this aggregate ends."""

    # -- first step ----------------------------------------------------------------------------

    def _split(self, due: Collection[str]) -> None:
        """Decide the contiguous aggregates in bulk and set the others apart."""
        holds = self._known.holds
        if self._rows.num_rows:
            self._bulk()
        present = {walk.aggregate_id for walk in self._walks}
        for aggregate_id in due:
            hold = holds.get(aggregate_id)
            if hold is not None and aggregate_id not in present:
                self._walks.append(
                    _Walk(
                        aggregate_id,
                        hold.first_missing - 1,
                        hold,
                        {},
                        hold.seen,
                        hold.since,
                        looked=hold.next_attempt <= self._now or aggregate_id in self._look_now,
                    )
                )
        for walk in self._walks:
            self._ask_for(walk)

    def _bulk(self) -> None:
        known, rules = self._known, self._rules
        encoded = self._rows.column("aggregate_id").combine_chunks().dictionary_encode()
        ids: list[Any] = encoded.dictionary.to_pylist()
        code = encoded.indices.to_numpy().astype(np.int64)
        version = self._rows.column("version").to_numpy()
        created = self._rows.column("create_time").to_numpy()

        last = np.fromiter(
            (known.last.get(a, _NEVER_SEEN) for a in ids), dtype=np.int64, count=len(ids)
        )
        fresh = last == _NEVER_SEEN
        apart = np.zeros(len(ids), dtype=bool)
        if known.baseline is not None and rules.backtrack:
            apart |= fresh
            apart[code[created <= known.baseline]] = True
        last[fresh] = rules.first_version - 1
        if known.holds and rules.backtrack:
            apart |= np.fromiter((a in known.holds for a in ids), dtype=bool, count=len(ids))

        order = np.lexsort((version, code))
        below = version[order] < rules.first_version
        if below.any():
            self._refuse_below(order[below], ids, code, version, created)
            order = order[~below]
        order = self._drop_known(order, ids, code, version, last)

        c, v, t = code[order], version[order], created[order]
        same = np.zeros(len(order), dtype=bool)
        same[1:] = c[1:] == c[:-1]
        before = np.where(same, np.roll(v, 1), last[c])
        if rules.backtrack:
            broken = v != before + 1
            apart[c[broken]] = True

        plain = ~apart[c]
        taken = order[plain]
        if len(taken):
            key = t[plain]
            inverted = same[plain] & (key < np.roll(key, 1))
            if inverted.any():
                key = _running_maximum(key, c[plain])
            self._admitted.append(taken)
            self._order.append(key)
            ends = np.flatnonzero(np.append(c[plain][1:] != c[plain][:-1], True))
            self._last.update(
                zip(
                    (ids[i] for i in c[plain][ends].tolist()),
                    v[plain][ends].tolist(),
                    strict=True,
                )
            )
        if not plain.all():
            self._set_apart(order[~plain], ids, code, version, created, known)

    def _refuse_below(
        self,
        order: np.ndarray,
        ids: list[str],
        code: np.ndarray,
        version: np.ndarray,
        created: np.ndarray,
    ) -> None:
        """Rows whose version lies below the first: each is refused once, unless it is baseline."""
        baseline = self._known.baseline
        refused = {a: set(versions) for a, versions in self._known.refused.items()}
        for row in order.tolist():
            if baseline is not None and created[row] <= baseline:
                self._counts.baseline += 1
                continue
            aggregate_id, number = ids[int(code[row])], int(version[row])
            of_aggregate = refused.setdefault(aggregate_id, set())
            if number in of_aggregate:
                self._counts.duplicates += 1
                continue
            of_aggregate.add(number)
            first = self._rules.first_version
            self._refused.append(
                (row, f"admission.version_below_first: versions begin with {first}")
            )

    def _drop_known(
        self,
        order: np.ndarray,
        ids: list[str],
        code: np.ndarray,
        version: np.ndarray,
        last: np.ndarray,
    ) -> np.ndarray:
        """Drop what is published already and what stands twice in the batch; find late events."""
        c, v = code[order], version[order]
        repeated = np.zeros(len(order), dtype=bool)
        repeated[1:] = (c[1:] == c[:-1]) & (v[1:] == v[:-1])
        old = v <= last[c]
        if old.any() and self._known.skipped:
            skips = np.fromiter((a in self._known.skipped for a in ids), dtype=bool, count=len(ids))
            may_be_late = old & ~repeated & skips[c]
            if self._known.baseline is not None:
                created = self._rows.column("create_time").to_numpy()[order]
                may_be_late &= created > self._known.baseline
            for i in np.flatnonzero(may_be_late).tolist():
                aggregate_id = ids[c[i]]
                ranges = self._skipped.get(aggregate_id, self._known.skipped[aggregate_id])
                if in_ranges(int(v[i]), ranges):
                    self._skipped[aggregate_id] = without(int(v[i]), ranges)
                    self._late.append(int(order[i]))
        dropped = old | repeated
        self._counts.duplicates += int(dropped.sum()) - len(self._late)
        if not self._rules.versions_are_unique:
            for row in order[repeated & ~old].tolist():
                reason = "admission.repeated_version: an earlier row has this version"
                self._refused.append((row, reason))
                self._counts.duplicates -= 1
        left: np.ndarray = order[~dropped]
        return left

    def _set_apart(
        self,
        order: np.ndarray,
        ids: list[str],
        code: np.ndarray,
        version: np.ndarray,
        created: np.ndarray,
        known: Known,
    ) -> None:
        walks: dict[int, _Walk] = {}
        for row in order.tolist():
            number = int(code[row])
            walk = walks.get(number)
            if walk is None:
                aggregate_id = ids[number]
                hold = known.holds.get(aggregate_id)
                last = known.last.get(aggregate_id)
                if last is None and known.baseline is None:
                    last = self._rules.first_version - 1
                walk = walks[number] = _Walk(
                    aggregate_id,
                    last,
                    hold,
                    {},
                    seen=hold.seen if hold else 0,
                    since=hold.since if hold else int(created[row]),
                    looked=hold is None
                    or hold.next_attempt <= self._now
                    or aggregate_id in self._look_now,
                )
                self._walks.append(walk)
            walk.rows[int(version[row])] = row
            walk.seen = max(walk.seen, int(version[row]))
            walk.since = min(walk.since, int(created[row]))

    def _ask_for(self, walk: _Walk) -> None:
        if walk.last is None:
            self.first_sights.append((walk.aggregate_id, min(walk.rows)))
            last = min(walk.rows) - 1
        else:
            last = walk.last
            if last + 1 in walk.rows:
                walk.looked = True
        if not walk.looked or not self._rules.backtrack:
            return
        walk.fetched = _holes(last, walk.seen, walk.rows)
        self.missing.extend(
            VersionRange(walk.aggregate_id, first, end) for first, end in walk.fetched
        )

    # -- second step ---------------------------------------------------------------------------

    def decide(self, found: pa.Table, below: pa.Table | None = None) -> Decision:
        """Decide the batch.

        Args:
            found: what the store has of `missing`, at most `Rules.fetch_limit` rows of each
                range, the lowest versions first.
            below: for each of `first_sights` rows with a smaller version, down to the first that
                is baseline where there is one.
        """
        decision = Decision(self._rows.slice(0, 0), counts=self._counts)
        offset = self._rows.num_rows
        tables = [self._rows, found]
        fetched = _by_aggregate(found, offset)
        lower: dict[str, dict[int, tuple[int, int]]] = {}
        if below is not None and below.num_rows:
            tables.append(below)
            lower = _by_aggregate(below, offset + found.num_rows)
        everything = pa.concat_tables(tables) if len(tables) > 1 else self._rows
        created = everything.column("create_time").to_numpy()

        for walk in self._walks:
            self._walk(
                walk,
                fetched.get(walk.aggregate_id, {}),
                lower.get(walk.aggregate_id, {}),
                created,
                decision,
            )
        self._order_events(everything, created, decision)
        if self._refused:
            rows = [row for row, _ in self._refused]
            decision.refused = everything.take(rows), [reason for _, reason in self._refused]
            self._counts.refused += len(rows)
        decision.last = self._last
        decision.skipped = self._skipped
        return decision

    def _walk(
        self,
        walk: _Walk,
        fetched: dict[int, tuple[int, int]],
        lower: dict[int, tuple[int, int]],
        created: np.ndarray,
        decision: Decision,
    ) -> None:
        rules, now, counts = self._rules, self._now, self._counts
        aggregate_id, hold = walk.aggregate_id, walk.hold
        available = {v: row for v, (row, _) in fetched.items()} | walk.rows
        last = walk.last
        if last is None:
            last = self._baseline_end(walk, lower)
            available |= {v: row for v, (row, _) in lower.items() if v > last}
        if not walk.looked:
            assert hold is not None
            counts.held += len(walk.rows)
            decision.holds[aggregate_id] = replace(hold, seen=walk.seen, since=walk.since)
            return

        reachable = self._reachable(walk, fetched)
        taken: list[int] = []
        gap: Hold | None = None
        version = last + 1
        while version <= walk.seen:
            row = available.get(version) if version <= reachable else None
            if row is not None:
                taken.append(row)
                version += 1
                continue
            since = min(
                (int(created[r]) for v, r in available.items() if v > version),
                default=walk.since,
            )
            if version > reachable:
                gap = Hold(aggregate_id, version, walk.seen, now, 0, now, since, catching_up=True)
                break
            waited = hold is not None and hold.first_missing == version and not hold.catching_up
            if not waited:
                counts.gaps_opened += 1
                gap = Hold(
                    aggregate_id,
                    version,
                    walk.seen,
                    now,
                    0,
                    rules.next_attempt(now, 0),
                    since,
                )
                break
            assert hold is not None
            asked = aggregate_id in self._skip_now
            if not asked and hold.next_attempt > now:  # looked for before its time
                gap = replace(hold, seen=walk.seen, since=min(since, hold.since))
                break
            attempts = hold.attempts + 1
            # A transaction that was open when the gap was seen may still fill it.
            alive = self._open_since is not None and self._open_since <= hold.first_seen
            if not asked and (attempts < rules.max_backoff or alive):
                gap = replace(
                    hold,
                    seen=walk.seen,
                    attempts=attempts,
                    next_attempt=rules.next_attempt(now, min(attempts, rules.max_backoff - 1)),
                    since=min(since, hold.since),
                )
                break
            following = min((v for v in available if v > version), default=None)
            if following is None:
                # What was seen above the gap is gone from the store: nothing waits any more.
                counts.gaps_vanished += 1
                break
            counts.gaps_skipped += 1
            decision.gaps.append(
                SkippedGap(
                    aggregate_id,
                    version,
                    following - 1,
                    hold.first_seen,
                    now,
                    attempts,
                    "requested" if asked else "max_backoff",
                )
            )
            before = self._known.skipped.get(aggregate_id, ())
            # none may be left of them: a late event of this batch was the last
            ranges = self._skipped.get(aggregate_id, before)
            self._skipped[aggregate_id] = [*ranges, (version, following - 1)]
            version = following
        if hold is None:
            at_once = sum(1 for _, end in walk.fetched if end < version)
            counts.gaps_opened += at_once
            counts.gaps_filled += at_once
        elif version > hold.first_missing and not hold.catching_up:
            skipped = decision.gaps and decision.gaps[-1].aggregate_id == aggregate_id
            counts.gaps_filled += not skipped
        if gap is not None or hold is not None:
            decision.holds[aggregate_id] = gap
        if version - 1 != walk.last:
            self._last[aggregate_id] = version - 1
        counts.held += sum(1 for v in walk.rows if v >= version)
        self._take(taken, created)

    def _reachable(self, walk: _Walk, fetched: dict[int, tuple[int, int]]) -> int:
        """The highest version up to which the store's answer is whole."""
        if not self._rules.backtrack:
            return walk.seen
        for first, end in walk.fetched:
            got = [v for v in fetched if first <= v <= end]
            if len(got) >= self._rules.fetch_limit and max(got) < end:
                return max(got)
        return walk.seen

    def _baseline_end(self, walk: _Walk, lower: dict[int, tuple[int, int]]) -> int:
        """The last version that counts as published before the start; see `first_sights`."""
        baseline = self._known.baseline
        assert baseline is not None
        old = [v for v, (_, created) in lower.items() if created <= baseline]
        return max(old, default=self._rules.first_version - 1)

    def _take(self, taken: list[int], created: np.ndarray) -> None:
        if not taken:
            return
        rows = np.array(taken, dtype=np.int64)
        baseline = self._known.baseline
        if baseline is not None:
            old = created[rows] <= baseline
            self._counts.baseline += int((old & (rows < self._rows.num_rows)).sum())
            rows = rows[~old]
            if not len(rows):
                return
        self._counts.backtracked += int((rows >= self._rows.num_rows).sum())
        self._admitted.append(rows)
        self._order.append(np.maximum.accumulate(created[rows]))

    def _order_events(self, everything: pa.Table, created: np.ndarray, decision: Decision) -> None:
        """Across aggregates by `create_time`, within one always by version."""
        counts = self._counts
        late = np.array(self._late, dtype=np.int64)
        counts.late += len(late)
        if len(late) and self._rules.late == "divert":
            decision.diverted = everything.take(late)
        if len(late) and self._rules.late == "publish":
            self._admitted.append(late)
            self._order.append(created[late])
        if not self._admitted:
            return
        rows = np.concatenate(self._admitted)
        key = np.concatenate(self._order)
        version = everything.column("version").to_numpy()[rows]
        rows = rows[np.lexsort((version, key))]
        counts.admitted += len(rows) - (len(late) if self._rules.late == "publish" else 0)
        in_place = len(rows) == self._rows.num_rows == everything.num_rows and bool(
            (rows == np.arange(len(rows))).all()
        )
        decision.events = everything if in_place else everything.take(rows)
        if len(late) and self._rules.late == "publish":
            decision.late = np.isin(rows, late)


def plan(
    rows: pa.Table,
    known: Known,
    rules: Rules,
    now: int,
    due: Collection[str] = (),
    *,
    open_since: int | None = None,
    look_now: Collection[str] = (),
    skip_now: Collection[str] = (),
) -> Plan:
    """First step: what of these rows is plain, and what must be looked for in the store.

    Args:
        rows: rows of a window, schema `EVENTS`, any order; rows may repeat what was seen before.
        known: what the index knows of the rows' aggregates, and all open holds.
        rules: the configuration.
        now: the database's time.
        due: held aggregates to try again although the window may show nothing of them.
        open_since: when the oldest transaction began that is open and may write, µs: a gap that
            was seen after it is not skipped. None: there is none, or nobody can tell.
        look_now: held aggregates to try although they are not due.
        skip_now: held aggregates whose gap somebody asked to skip.
    """
    made = Plan(rows, known, rules, now, open_since, look_now, skip_now)
    made._split({*due, *look_now, *skip_now})
    return made


def unknown(keys: pa.RecordBatch, known: Known, rules: Rules) -> list[VersionRange]:
    """Which of some rows of the store admission has not decided yet, or would publish as late.

    Args:
        keys: `aggregate_id`, `version` and `create_time` of rows, any order.
        known: what the index knows of their aggregates.
        rules: the configuration.
    """
    encoded: Any = keys.column("aggregate_id").dictionary_encode()
    ids: list[Any] = encoded.dictionary.to_pylist()
    code = encoded.indices.to_numpy().astype(np.int64)
    version = keys.column("version").to_numpy()
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
        fresh = keys.column("create_time").to_numpy() > known.baseline
    wanted = fresh & (version > decided[code])
    found: dict[str, list[int]] = {}
    for row in np.flatnonzero(wanted).tolist():
        found.setdefault(ids[int(code[row])], []).append(int(version[row]))
    if known.skipped:
        skips = np.fromiter((a in known.skipped for a in ids), bool, len(ids))
        for row in np.flatnonzero(fresh & skips[code] & ~wanted).tolist():
            aggregate_id = ids[int(code[row])]
            if in_ranges(int(version[row]), known.skipped[aggregate_id]):
                found.setdefault(aggregate_id, []).append(int(version[row]))
    return [
        VersionRange(aggregate_id, first, end)
        for aggregate_id, versions in found.items()
        for first, end in _runs(sorted(set(versions)))
    ]


def _runs(versions: Sequence[int]) -> list[Versions]:
    """Ascending versions as runs without holes."""
    runs: list[Versions] = []
    for version in versions:
        if runs and runs[-1][1] == version - 1:
            runs[-1] = (runs[-1][0], version)
        else:
            runs.append((version, version))
    return runs


def first_sight_is_decided(below: Sequence[tuple[int, int]], baseline: int, limit: int) -> bool:
    """Whether rows below a first sight suffice to tell where the baseline ends.

    Args:
        below: (version, create_time) of the rows that were fetched.
        baseline: see `Known`.
        limit: how many rows were asked for at most.
    """
    return len(below) < limit or any(created <= baseline for _, created in below)


def _holes(last: int, seen: int, present: Iterable[int]) -> list[Versions]:
    """The runs of versions above `last` and up to `seen` that are not present."""
    holes: list[Versions] = []
    expected = last + 1
    for version in sorted(present):
        if version > expected:
            holes.append((expected, version - 1))
        expected = max(expected, version + 1)
    if expected <= seen:
        holes.append((expected, seen))
    return holes


def _by_aggregate(table: pa.Table, offset: int) -> dict[str, dict[int, tuple[int, int]]]:
    """aggregate → version → (row, create_time), rows counted from `offset`."""
    result: dict[str, dict[int, tuple[int, int]]] = {}
    rows = zip(
        values(table, "aggregate_id"),
        values(table, "version"),
        values(table, "create_time"),
        strict=True,
    )
    for number, (aggregate_id, version, created) in enumerate(rows, offset):
        result.setdefault(aggregate_id, {}).setdefault(version, (number, created))
    return result


def _running_maximum(times: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """The running maximum of `times` within each run of equal `groups`."""
    result = times.copy()
    starts = np.flatnonzero(np.append(True, groups[1:] != groups[:-1]))
    for start, end in zip(starts, np.append(starts[1:], len(times)), strict=True):
        np.maximum.accumulate(times[start:end], out=result[start:end])
    return result
