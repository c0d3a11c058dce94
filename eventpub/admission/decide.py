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

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from eventpub.admission.model import SkippedGap, VersionRange, values
from eventpub.admission.state import (
    NO_TIME,
    Hold,
    Known,
    Numbers,
    Rewritten,
    Seen,
    Versions,
    in_ranges,
    numbers_of,
    without,
)
from eventpub.config import format_time

_NEVER_SEEN = np.iinfo(np.int64).min

CONFLICT = "admission.version_conflict"
"""Begins the reason of a row whose version was published as another event."""


@dataclass(frozen=True)
class Rules:
    """The configuration that admission depends on; durations in microseconds.

    Attributes:
        first_version: the version that an aggregate starts with, 0 or 1.
        max_backoff: attempts before a gap is skipped.
        backoff_base: wait before the first attempt; it doubles with each.
        late: what happens to an event of a skipped gap.
        backtrack: False admits whatever is above the last version: loses events, for measuring.
        versions_are_unique: whether the table itself refuses a second row of one version.
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
    versions_are_unique: bool = True
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
    conflicts: int = 0

    def add(self, other: Counts) -> None:
        """Add another batch's counts to these."""
        for name, count in vars(other).items():
            if count:
                setattr(self, name, getattr(self, name) + count)


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
        rewritten: per aggregate what is known after it of versions that were written anew.
        refused: rows that are no event, for the topic of dead letters, with the reason of each.
        counts: for metrics.
    """

    events: pa.Table
    late: np.ndarray | None = None
    diverted: pa.Table | None = None
    gaps: list[SkippedGap] = field(default_factory=list)
    last: Mapping[str, int] = field(default_factory=dict)
    times: Mapping[str, int] = field(default_factory=dict)
    holds: dict[str, Hold | None] = field(default_factory=dict)
    skipped: dict[str, list[Versions]] = field(default_factory=dict)
    rewritten: dict[str, Rewritten] = field(default_factory=dict)
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
    asks_store: bool
    """whether the store is asked for what is missing in this batch"""
    is_first_sight: bool = False
    """whether nothing is known of it where a baseline exists"""
    newest_below: int = NO_TIME >> 1
    """the newest `create_time` known of what is baseline of it, µs"""
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
        retry_now: Collection[str] = (),
        skip_now: Collection[str] = (),
    ) -> None:
        self._rows = rows
        self._known = known
        self._rules = rules
        self._now = now
        self._open_since = open_since
        self._skip_now = skip_now
        self._retry_now = {*retry_now, *skip_now}
        self._due: Collection[str] = ()
        self._refused: list[tuple[int, str]] = []
        self._counts = Counts(rows=rows.num_rows)
        self._last: dict[str, int] = {}
        self._times: dict[str, int] = {}
        self._plain: tuple[Numbers, Numbers] | None = None  # last and times, decided in bulk
        self._unknown = NO_TIME if known.times_since is None else known.times_since << 1
        self._skipped: dict[str, list[Versions]] = {}
        self._rewritten: dict[str, Rewritten] = {}
        self._late: list[int] = []
        self._admitted: list[np.ndarray] = []
        self._order: list[np.ndarray] = []
        self._walks: list[_Walk] = []
        self.missing: list[VersionRange] = []
        """Versions to fetch by key, whatever their `create_time`."""
        self.first_sights: list[tuple[str, int]] = []
        """(aggregate, version) seen for the first time where a baseline exists: what lies below
        it tells where the baseline of this aggregate ends; see `settle`."""

    # -- first step ----------------------------------------------------------------------------

    def _split(self, due: Collection[str]) -> None:
        """Decide the contiguous aggregates in bulk and set the others apart."""
        holds = self._known.holds
        self._due = {*due}
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
                        asks_store=hold.next_attempt <= self._now
                        or aggregate_id in self._retry_now,
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

        last = numbers_of(ids, known.last, _NEVER_SEEN)
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
        steady = rules.steady(created)
        order = self._drop_known(order, ids, code, version, last, steady)

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
            names = ids
            if len(ends) < len(ids):
                names = [ids[i] for i in c[plain][ends].tolist()]
            times = self._newest(names, steady[taken], ends)
            self._plain = Numbers(names, v[plain][ends]), Numbers(names, times)
        if not plain.all():
            self._set_apart(order[~plain], ids, code, version, created, known)

    def _newest(self, names: list[str], created: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """When the rows of some aggregates were created, by aggregate and version, packed."""
        before = numbers_of(names, self._known.times, self._unknown)
        if self._times:
            before = numbers_of(
                names, dict(zip(names, before.tolist(), strict=True)) | self._times, 0
            )
        starts = np.append(0, ends[:-1] + 1)
        newest = np.maximum(before >> 1, np.maximum.reduceat(created, starts))
        packed: np.ndarray = newest << 1 | (created[ends] == newest)
        return packed

    def _seen(self, aggregate_id: str) -> Seen:
        known = self._known.times.get(aggregate_id, self._unknown)
        return Seen.unpacked(self._times.get(aggregate_id, known))

    def _raise(self, aggregate_id: str, created: int) -> None:
        """Note a row that is decided and leaves the last version as it is."""
        self._times[aggregate_id] = self._seen(aggregate_id).raised(created).packed()

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
        steady: np.ndarray,
    ) -> np.ndarray:
        """Drop what is published already and what stands twice in the batch.

        Find late events, and other events of versions that were published.
        """
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
                    self._raise(aggregate_id, int(steady[order[i]]))
        if old.any() and self._rules.times_last:
            self._refuse_conflicts(order[old], ids, code, version, last, steady)
            self._note_decided(self._late, ids, code, version, steady)
        dropped = old | repeated
        self._counts.duplicates += int(dropped.sum()) - len(self._late)
        if not self._rules.versions_are_unique:
            for row in order[repeated & ~old].tolist():
                reason = "admission.repeated_version: an earlier row has this version"
                self._refused.append((row, reason))
                self._raise(ids[int(code[row])], int(steady[row]))
                self._counts.duplicates -= 1
        left: np.ndarray = order[~dropped]
        return left

    def _refuse_conflicts(
        self,
        rows: np.ndarray,
        ids: list[str],
        code: np.ndarray,
        version: np.ndarray,
        last: np.ndarray,
        steady: np.ndarray,
    ) -> None:
        """Rows of versions up to the last that are not those which were published."""
        created = self._rows.column("create_time").to_numpy()
        found = _other_events(ids, code[rows], version[rows], steady[rows], last, self._known)
        if self._known.baseline is not None:
            found &= created[rows] > self._known.baseline
        late = set(self._late)
        conflicts = [row for row in rows[found].tolist() if row not in late]
        for row in conflicts:
            aggregate_id, number, at = ids[int(code[row])], int(version[row]), int(steady[row])
            known = self._known.rewritten.get(aggregate_id)
            before = Seen.unpacked(self._known.times.get(aggregate_id, self._unknown))
            is_last = number == int(last[code[row]])
            if known is None or not known.differs(number, at):
                begun = Rewritten(before.newest, int(last[code[row]]))
                self._rewritten[aggregate_id] = begun
            else:
                self._rewritten.setdefault(aggregate_id, known)
            seen = self._seen(aggregate_id)
            # of the last version, the next time both are duplicates: nothing tells which it is
            is_of_last = seen.is_of_last and not is_last and at <= seen.newest
            self._times[aggregate_id] = Seen(max(at, seen.newest), is_of_last).packed()
        for row in conflicts:
            aggregate_id, number, at = ids[int(code[row])], int(version[row]), int(steady[row])
            since = self._rewritten[aggregate_id].since
            before = Seen.unpacked(self._known.times.get(aggregate_id, self._unknown))
            is_of_it = before.is_of_last and number == int(last[code[row]])
            which = "this version" if is_of_it else "versions up to a higher one"
            self._refused.append(
                (
                    row,
                    f"{CONFLICT}: another event of this version was published before; {which} had"
                    f" been created by {format_time(since)}, this row at"
                    f" {format_time(int(created[row]))}",
                )
            )
            self._counts.conflicts += 1
            self._counts.duplicates -= 1
        self._note_decided(conflicts, ids, code, version, steady)

    def _note_decided(
        self,
        rows: Iterable[int],
        ids: list[str],
        code: np.ndarray,
        version: np.ndarray,
        steady: np.ndarray,
    ) -> None:
        """Rows of versions up to the last that are not dropped: a replay of them is."""
        for row in rows:
            aggregate_id, number, at = ids[int(code[row])], int(version[row]), int(steady[row])
            of = self._rewritten.get(aggregate_id) or self._known.rewritten.get(aggregate_id)
            if of is not None and of.differs(number, at):
                self._rewritten[aggregate_id] = of.plus(number, at)

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
                    asks_store=hold is None
                    or (aggregate_id in self._due and hold.next_attempt <= self._now)
                    or aggregate_id in self._retry_now,
                    is_first_sight=last is None,
                )
                self._walks.append(walk)
            walk.rows[int(version[row])] = row
            walk.seen = max(walk.seen, int(version[row]))
            walk.since = min(walk.since, int(created[row]))

    def _ask_for(self, walk: _Walk) -> None:
        if walk.last is None:
            self.first_sights.append((walk.aggregate_id, min(walk.rows)))
            return
        if walk.last + 1 in walk.rows:
            walk.asks_store = True
        if not walk.asks_store or not self._rules.backtrack:
            return
        walk.fetched = _holes(walk.last, walk.seen, walk.rows)
        self.missing.extend(
            VersionRange(walk.aggregate_id, first, end) for first, end in walk.fetched
        )

    def settle(self, ends: Mapping[str, tuple[int, int]]) -> None:
        """Take over where the baseline of each of `first_sights` ends; adds to `missing`.

        Args:
            ends: the highest version below the sight whose event is baseline, and the newest
                `create_time` known of the versions up to it, µs; absent: there is none.
        """
        none = (self._rules.first_version - 1, NO_TIME >> 1)
        for walk in self._walks:
            if walk.last is None:
                walk.last, walk.newest_below = ends.get(walk.aggregate_id, none)
                self._ask_for(walk)

    # -- second step ---------------------------------------------------------------------------

    def decide(self, found: pa.Table, rest: Iterable[VersionRange] = ()) -> Decision:
        """Decide the batch, after `settle` where there are `first_sights`.

        Args:
            found: what the store has of `missing`, or as much of it as one batch may hold.
            rest: what of `missing` was not read; of each aggregate, what lies below it was.
        """
        decision = Decision(self._rows.slice(0, 0), counts=self._counts)
        fetched = _by_aggregate(found, self._rows.num_rows)
        everything = pa.concat_tables([self._rows, found]) if found.num_rows else self._rows
        created = everything.column("create_time").to_numpy()
        steady = self._rules.steady(created)
        unread: dict[str, int] = {}
        for left in rest:
            unread[left.aggregate_id] = min(left.first, unread.get(left.aggregate_id, left.first))

        for walk in self._walks:
            a = walk.aggregate_id
            reachable = min(walk.seen, unread.get(a, walk.seen + 1) - 1)
            self._walk(walk, fetched.get(a, {}), reachable, created, steady, decision)
        self._order_events(everything, created, decision)
        if self._refused:
            rows = [row for row, _ in self._refused]
            decision.refused = everything.take(rows), [reason for _, reason in self._refused]
            self._counts.refused += len(rows)
        decision.last, decision.times = self._remembered()
        decision.rewritten = self._rewritten
        decision.skipped = self._skipped
        return decision

    def _remembered(self) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """`Decision.last` and `Decision.times`."""
        if self._plain is not None and not (self._last or self._times):
            return self._plain
        last, times = {**self._last}, {**self._times}
        if self._plain is not None:
            last.update(self._plain[0])
            times.update(self._plain[1])
        for a in times.keys() - last.keys():
            last[a] = self._known.last.get(a, self._rules.first_version - 1)
        return last, times

    def _walk(  # noqa: PLR0912, PLR0915 (one pass over a batch, in the order of the rules)
        self,
        walk: _Walk,
        fetched: dict[int, tuple[int, int]],
        reachable: int,
        created: np.ndarray,
        steady: np.ndarray,
        decision: Decision,
    ) -> None:
        """Decide one aggregate; `reachable`: up to which version the store's answer is whole."""
        rules, now, counts = self._rules, self._now, self._counts
        aggregate_id, hold = walk.aggregate_id, walk.hold
        available = {v: row for v, (row, _) in fetched.items()} | walk.rows
        last = walk.last
        assert last is not None, "settle was not called"
        if not walk.asks_store:
            assert hold is not None
            counts.held += len(walk.rows)
            decision.holds[aggregate_id] = replace(hold, seen=walk.seen, since=walk.since)
            return

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
            waited = hold is not None and hold.first_missing == version and not hold.catching_up
            if version > reachable:
                gap = Hold(aggregate_id, version, walk.seen, now, 0, now, since, catching_up=True)
                if waited and hold is not None:  # it is due as before
                    gap = replace(hold, seen=walk.seen, since=min(since, hold.since))
                break
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
            requested = aggregate_id in self._skip_now
            if not requested and hold.next_attempt > now:  # looked for before its time
                gap = replace(hold, seen=walk.seen, since=min(since, hold.since))
                break
            tried = tried_in_vain(hold, rules, now, self._open_since)
            if not requested and tried is not None:
                gap = replace(tried, seen=walk.seen, since=min(since, hold.since))
                break
            next_there = min((v for v in available if v > version), default=None)
            if reachable < (walk.seen if next_there is None else next_there - 1):
                # some of what follows was not read: how far the gap goes is not known yet
                gap = replace(hold, seen=walk.seen, since=min(since, hold.since))
                break
            if next_there is None:
                # What was seen above the gap is gone from the store: nothing waits any more.
                counts.gaps_vanished += 1
                break
            counts.gaps_skipped += 1
            decision.gaps.append(
                SkippedGap(
                    aggregate_id,
                    version,
                    next_there - 1,
                    hold.first_seen,
                    now,
                    hold.attempts + 1,
                    "requested" if requested else "max_backoff",
                )
            )
            before = self._known.skipped.get(aggregate_id, ())
            # none may be left of them: a late event of this batch was the last
            ranges = self._skipped.get(aggregate_id, before)
            self._skipped[aggregate_id] = [*ranges, (version, next_there - 1)]
            version = next_there
        if hold is None:
            at_once = sum(1 for _, end in walk.fetched if end < version)
            counts.gaps_opened += at_once
            counts.gaps_filled += at_once
        elif version > hold.first_missing and not hold.catching_up:
            skipped = decision.gaps and decision.gaps[-1].aggregate_id == aggregate_id
            counts.gaps_filled += not skipped
        if gap is not None or hold is not None:
            decision.holds[aggregate_id] = gap
        if version - 1 != walk.last or walk.is_first_sight:
            self._last[aggregate_id] = version - 1
            seen = self._seen(aggregate_id)
            newest = max([seen.newest, walk.newest_below, *steady[taken].tolist()])
            of_last = available.get(version - 1) if taken else None
            is_of_last = of_last is not None and int(steady[of_last]) == newest
            self._times[aggregate_id] = Seen(newest, is_of_last).packed()
        counts.held += sum(1 for v in walk.rows if v >= version)
        self._take(taken, created)

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


def tried_in_vain(hold: Hold, rules: Rules, now: int, open_since: int | None) -> Hold | None:
    """A hold after its missing version was looked for when it was due, and is not there.

    Returns:
        None where its gap is given up now: what waits above it is to be published.
    """
    attempts = hold.attempts + 1
    # A transaction that was open when the gap was seen may still fill it.
    alive = open_since is not None and open_since <= hold.first_seen
    if attempts >= rules.max_backoff and not alive:
        return None
    due = rules.next_attempt(now, min(attempts, rules.max_backoff - 1))
    return Hold(  # `replace` takes three times as long, and there may be hundreds of thousands
        hold.aggregate_id,
        hold.first_missing,
        hold.seen,
        hold.first_seen,
        attempts,
        due,
        hold.since,
        hold.catching_up,
    )


def plan(
    rows: pa.Table,
    known: Known,
    rules: Rules,
    now: int,
    due: Collection[str] = (),
    *,
    open_since: int | None = None,
    retry_now: Collection[str] = (),
    skip_now: Collection[str] = (),
) -> Plan:
    """First step: what of these rows is plain, and what must be looked for in the store.

    Args:
        rows: rows of a window, schema `EVENTS`, any order; rows may repeat what was seen before.
        known: what the index knows of the rows' aggregates, and all open holds.
        rules: the configuration.
        now: the database's time.
        due: held aggregates to try again; of the others the rows only tell what waits, unless the
            missing version is among them.
        open_since: when the oldest transaction began that is open and may write, µs: a gap that
            was seen after it is not skipped. None: there is none, or nobody can tell.
        retry_now: held aggregates to try although they are not due.
        skip_now: held aggregates whose gap somebody asked to skip.
    """
    made = Plan(rows, known, rules, now, open_since, retry_now, skip_now)
    made._split({*due, *retry_now, *skip_now})
    return made


def unknown(keys: pa.RecordBatch, known: Known, rules: Rules) -> list[VersionRange]:
    """Which of some rows of the store admission has not decided yet, or would publish as late.

    Those are among them whose version was published as another event.

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
    if rules.times_last and (known.times or known.times_since is not None):
        last = numbers_of(ids, known.last, _NEVER_SEEN)
        created = rules.steady(keys.column("create_time").to_numpy())
        others = _other_events(ids, code, version, created, last, known)
        wanted |= fresh & (version <= last[code]) & others
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


def _other_events(
    ids: list[str],
    code: np.ndarray,
    version: np.ndarray,
    created: np.ndarray,
    last: np.ndarray,
    known: Known,
) -> np.ndarray:
    """Which of some rows, whose versions are at most the last, are not what was published.

    Args:
        ids: of the aggregates.
        code, version, created: of each row; `code` is the number of its aggregate.
        last: of each aggregate.
        known: what the index knows of these aggregates; see `Seen.differs`.
    """
    since = known.times_since
    never = np.iinfo(np.int64).max - 1  # not known: no row lies above it
    unknown = never if since is None else since << 1
    packed = numbers_of(ids, known.times, unknown)[code]
    newest = packed >> 1
    found: np.ndarray = created > newest
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
