"""Walks one aggregate that is not plainly contiguous, version by version."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from eventpub.admission.bulk import Batch
from eventpub.admission.model import NO_TIME, Hold, Rewritten, Rules, Seen, SkippedGap, Versions


@dataclass
class Walk:
    """An aggregate that is not plainly contiguous.

    Attributes:
        last: None until `Plan.settle` if the aggregate is unknown and a baseline exists.
        asks_store: whether this batch looks missing versions up in the store.
        rows: version → row of the window or, if it has none, fetched; only above `last`.
        newest_below: newest known `create_time` of its baseline, µs.
        is_first_sight: nothing was known of it, and a baseline exists.
    """

    aggregate_id: str
    last: int | None
    hold: Hold | None
    seen: int
    since: int
    asks_store: bool
    rows: dict[int, int] = field(default_factory=dict)
    newest_below: int = NO_TIME >> 1
    is_first_sight: bool = False
    fetched: list[Versions] = field(default_factory=list)


class Walker:
    """Walks the aggregates of one batch; `everything` is its rows, followed by fetched rows."""

    def __init__(self, batch: Batch, everything: pa.Table) -> None:
        self._batch = batch
        self._created = everything.column("create_time").to_numpy()
        self._steady = batch.rules.steady(self._created)
        self._order: tuple[Walk, list[int], np.ndarray] | None = None

    def decide(self, walk: Walk, reachable: int) -> None:
        """Decide one aggregate, whose rows are complete up to `reachable`."""
        hold, last = walk.hold, walk.last
        assert last is not None, "settle was not called"
        if not walk.asks_store:
            assert hold is not None
            self._batch.decision.counts.held += len(walk.rows)
            waits = replace(hold, seen=walk.seen, since=walk.since)
            self._batch.decision.holds[walk.aggregate_id] = waits
            return

        available, own = walk.rows, self._batch.rows.num_rows
        taken: list[int] = []
        gap: Hold | None = None
        version = last + 1
        while version <= walk.seen:
            row = available.get(version) if version <= reachable else None
            if row is not None:
                taken.append(row)
                version += 1
                continue
            gap, behind = self._meet(walk, version, available, reachable)
            if behind is None:
                break
            version = behind
        self._note(walk, version, gap)
        if version - 1 != last or walk.is_first_sight:
            if hold is not None and not hold.catching_up:
                self._note_rewritten(hold, last, available)
            self._remember(walk, version - 1, available.get(version - 1), taken)
        held = sum(row < own and v >= version for v, row in available.items())
        self._batch.decision.counts.held += held
        self._take(taken)

    def _meet(
        self, walk: Walk, version: int, available: dict[int, int], reachable: int
    ) -> tuple[Hold | None, int | None]:
        """Handle a missing version: the hold that waits for it, or the version to continue with."""
        aggregate_id, hold = walk.aggregate_id, walk.hold
        rules, now, counts = self._batch.rules, self._batch.now, self._batch.decision.counts
        ordered, oldest = self._ordered(walk)
        at = bisect_right(ordered, version)
        behind = ordered[at] if at < len(ordered) else None
        since = walk.since if behind is None else int(oldest[at])
        if reachable < walk.seen:  # unread rows are held as well
            since = min(since, walk.since)
        if hold and version <= reachable and self._was_missed_too(hold, version):
            counts.gaps_opened += 1
            hold = replace(hold, first_missing=version)
        if hold is None or hold.first_missing != version or hold.catching_up:
            if version > reachable:
                new = Hold(aggregate_id, version, walk.seen, now, 0, now, since, catching_up=True)
            else:
                counts.gaps_opened += 1
                due = rules.next_attempt(now, 0)
                new = Hold(aggregate_id, version, walk.seen, now, 0, due, since)
                new = replace(new, missed_upto=walk.seen)
            return new, None
        requested = aggregate_id in self._batch.skip_now
        tried: Hold | None = None
        if version > reachable or (hold.next_attempt > now and not requested):
            tried = hold  # not looked up, or before its time: due as before
        elif not requested:
            tried = failed_attempt(hold, rules, now, self._batch.open_since)
        if tried is None and reachable < (walk.seen if behind is None else behind - 1):
            tried = hold  # the next version was not read: the gap's end is unknown
        if tried is not None:
            return replace(tried, seen=walk.seen, since=min(since, hold.since)), None
        if behind is None:
            # The rows above the gap are gone from the store: nothing is held any more.
            counts.gaps_vanished += 1
            return None, None
        self._skip(hold, version, behind, "requested" if requested else "max_backoff")
        return None, behind

    def _ordered(self, walk: Walk) -> tuple[list[int], np.ndarray]:
        """Its versions in order, and the smallest `create_time` of each and those above."""
        if self._order is None or self._order[0] is not walk:
            ordered = sorted(walk.rows)
            created = self._created[[walk.rows[version] for version in ordered]]
            self._order = walk, ordered, np.minimum.accumulate(created[::-1])[::-1]
        return self._order[1:]

    def _was_missed_too(self, hold: Hold, version: int) -> bool:
        """Whether a version was missed together with the one just skipped, so that it was looked up
        as often. After one that was found the wait begins again: its writer may be at work."""
        if version >= hold.missed_upto or not (gaps := self._batch.decision.gaps):
            return False
        return (gaps[-1].aggregate_id, gaps[-1].reason) == (hold.aggregate_id, "max_backoff")

    def _skip(self, hold: Hold, version: int, behind: int, reason: str) -> None:
        batch, aggregate_id = self._batch, hold.aggregate_id
        batch.decision.counts.gaps_skipped += 1
        at, attempts = batch.now, hold.attempts + 1
        batch.decision.gaps.append(
            SkippedGap(aggregate_id, version, behind - 1, hold.first_seen, at, attempts, reason)
        )
        before = batch.known.skipped.get(aggregate_id, ())
        # may be empty by now: a late event of this batch took the last range
        ranges = batch.decision.skipped.get(aggregate_id, before)
        batch.decision.skipped[aggregate_id] = [*ranges, (version, behind - 1)]

    def _note(self, walk: Walk, version: int, gap: Hold | None) -> None:
        """Record holds and filled gaps once everything below `version` is decided."""
        counts, gaps, hold = self._batch.decision.counts, self._batch.decision.gaps, walk.hold
        if hold is None:
            at_once = sum(1 for _, end in walk.fetched if end < version)
            counts.gaps_opened += at_once
            counts.gaps_filled += at_once
        elif version > hold.first_missing and not hold.catching_up:
            skipped = gaps and gaps[-1].aggregate_id == walk.aggregate_id
            counts.gaps_filled += not skipped
        if gap is not None or hold is not None:
            self._batch.decision.holds[walk.aggregate_id] = gap

    def _note_rewritten(self, hold: Hold, last: int, available: dict[int, int]) -> None:
        """If held rows are gone, the store was restored: published versions may be rewritten, and
        read only after newer ones, which are published now."""
        batch, a = self._batch, hold.aggregate_id
        before = batch.decision.rewritten.get(a)
        held = (int(self._created[r]) for v, r in available.items() if v > hold.first_missing)
        newest = batch.known.times.get(a, batch.unknown_time) >> 1
        if newest != NO_TIME >> 1 and min(held, default=hold.since + 1) > hold.since:
            since = max([newest, *self._steady[batch.late].tolist()])
            batch.decision.rewritten[a] = Rewritten(since, last, before.decided if before else ())

    def _remember(self, walk: Walk, last: int, row: int | None, taken: list[int]) -> None:
        """Record the last version and its `Seen`; `row` is the last version's."""
        batch, a = self._batch, walk.aggregate_id
        batch.decision.last[a] = last
        seen = batch.seen(a)
        newest = max([seen.newest, walk.newest_below, *self._steady[taken].tolist()])
        is_of_last = bool(taken) and row is not None and int(self._steady[row]) == newest
        batch.decision.times[a] = Seen(newest, is_of_last).packed()

    def _take(self, taken: list[int]) -> None:
        if not taken:
            return
        batch, own = self._batch, self._batch.rows.num_rows
        rows = np.array(taken, dtype=np.int64)
        if batch.known.baseline is not None:
            old = batch.rules.are_in(batch.known.baseline, self._created[rows])
            batch.decision.counts.baseline += int((old & (rows < own)).sum())
            rows = rows[~old]
            if not len(rows):
                return
        batch.decision.counts.backtracked += int((rows >= own).sum())
        batch.admitted.append((rows, np.maximum.accumulate(self._created[rows])))


def failed_attempt(hold: Hold, rules: Rules, now: int, open_since: int | None) -> Hold | None:
    """The hold after a due lookup did not find its version; None: its gap is skipped now."""
    attempts = hold.attempts + 1
    # A transaction that was open when the gap was seen may still fill it.
    alive = open_since is not None and open_since <= hold.first_seen
    if attempts >= rules.max_backoff and not alive:
        return None
    due = rules.next_attempt(now, min(attempts, rules.max_backoff - 1))
    return replace(hold, attempts=attempts, next_attempt=due)
