"""What a shard's index knows of aggregates; one write batch per publication or fold chunk."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any

import numpy as np

from eventpub.admission.model import (
    EVENTS,
    NO_TIME,
    Decision,
    Known,
    Rewritten,
    Seen,
    SkippedGap,
    after_fold,
    without,
)
from eventpub.index.database import Batch, Database
from eventpub.index.facts import FLAGS, OpenFacts, Partition, Range
from eventpub.index.values import (
    LAST_SEEN,
    BucketCounts,
    Holds,
    of_version,
    put_contents,
    put_json,
)

_MOST_RECENT = 100_000
"""Aggregates cached in memory; about 25 MB."""


class Aggregates(OpenFacts):
    """The aggregates of an open index; `counts` has the accounted rows per time bucket."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.counts = BucketCounts(database)
        self.holds = Holds()
        self._recent: dict[str, bytes] = {}
        for key, value in database.items(b"h"):
            self.holds.load(key[1:].decode(), value)

    def known(self, aggregate_ids: list[str]) -> Known:
        found = list(map(self._recent.get, aggregate_ids))
        if missing := [a for a, value in zip(aggregate_ids, found, strict=True) if value is None]:
            others = iter(self._values(b"v", missing))
            found = [next(others) if value is None else value for value in found]
        there = [a for a, value in zip(aggregate_ids, found, strict=True) if value is not None]
        last, times = np.frombuffer(b"".join(filter(None, found)), "<i8").reshape(-1, 2).T.tolist()
        of_skips = self._lists(self.has_skips, b"s", aggregate_ids).items()
        skipped = {a: [(first, end) for first, end in ranges] for a, ranges in of_skips}
        refused = self._lists(self.has_refusals, b"r", aggregate_ids)
        rewritten = self.rewritten(aggregate_ids)
        return Known(
            dict(zip(there, last, strict=True)),
            self.holds,
            skipped,
            self.baseline,
            refused,
            dict(zip(there, times, strict=True)),
            self.times_since,
            rewritten,
        )

    def contents(self, events: Sequence[tuple[str, int]]) -> dict[tuple[str, int], set[bytes]]:
        """Hashes of decided rows of these versions, see `Known`; absent: unknown."""
        found = self._values(b"d", [of_version(event) for event in events])
        return {
            event: {value[at : at + 8] for at in range(0, len(value), 8)}
            for event, value in zip(events, found, strict=True)
            if value is not None
        }

    def rewritten(self, aggregate_ids: list[str]) -> dict[str, Rewritten]:
        read = self._lists(self.has_rewrites, b"x", aggregate_ids)
        return {
            a: Rewritten(since, last, tuple((first, end) for first, end in decided))
            for a, (since, last, decided) in read.items()
        }

    def _lists(
        self, has_any: bool, letter: bytes, aggregate_ids: list[str]
    ) -> dict[str, list[Any]]:
        """JSON values of these aggregates; no read unless there are any."""
        if not has_any:
            return {}
        found = zip(aggregate_ids, self._values(letter, aggregate_ids), strict=True)
        return {a: json.loads(value) for a, value in found if value is not None}

    def _values(self, letter: bytes, aggregate_ids: list[str]) -> list[bytes | None]:
        """One multi-get."""
        keys = [letter + aggregate_id.encode() for aggregate_id in aggregate_ids]
        return list(self._db.get(keys)) if keys else []

    # -- writes ----------------------------------------------------------------------------------

    def record(  # noqa: PLR0913 (all that one write batch changes)
        self,
        decision: Decision,
        next_offsets: Mapping[Partition, int],
        position: int | None,
        *,
        written: Mapping[Partition, Range] | None = None,
        refused: Mapping[str, Sequence[int]] | None = None,
        dead_run: int | None = None,
        contents: Mapping[tuple[str, int], Iterable[bytes]] | None = None,
        counted: Mapping[int, int] | None = None,
        forget_below: int | None = None,
    ) -> None:
        """Record a published decision in one write batch.

        Args:
            position: a lower one than before is ignored.
            refused: all refused versions of the aggregates that have new ones.
            dead_run: see the property; None: nothing was published.
            contents: all known hashes of each version.
            counted: rows per bucket accounted for since the last call.
            forget_below: smaller buckets are deleted.
        """
        batch: Batch = {}
        if counted and forget_below is not None:
            self.counts.prune(batch, forget_below)
        for bucket, more in (counted or {}).items():
            if forget_below is not None and bucket < forget_below:
                continue
            self.counts.put(batch, bucket, self.counts.of(bucket) + more)
        pack, times = LAST_SEEN.pack, decision.times
        values = {a: pack(version, times.get(a, NO_TIME)) for a, version in decision.last.items()}
        batch |= {b"v" + aggregate_id.encode(): value for aggregate_id, value in values.items()}
        self.holds.store(batch, decision.holds)
        put_json(batch, b"s", decision.skipped)
        put_json(batch, b"r", {a: sorted(versions) for a, versions in (refused or {}).items()})
        put_json(batch, b"x", {a: astuple(of) for a, of in decision.rewritten.items()})
        put_contents(batch, contents or {})
        there = (decision.skipped, refused, decision.rewritten)
        facts: dict[str, Any] = {fact: True for fact, of in zip(FLAGS, there, strict=True) if of}
        if next_offsets:
            facts |= self._moved(next_offsets, written)
        if position is not None and (self.position is None or position > self.position):
            facts["position"] = position
        if dead_run not in {None, self.dead_run}:
            facts["dead_run"] = dead_run
        recent, self._recent = self._recent, {}  # a failed write may have changed some
        self._write(batch, facts)
        if len(recent) + len(values) > _MOST_RECENT:
            recent.clear()
        recent.update(values)
        self._recent = recent

    def note_skipped(self, aggregate_id: str, ranges: Sequence[tuple[int, int]]) -> None:
        """Replace the skipped ranges, whose versions are late events if they turn up."""
        batch: Batch = {}
        put_json(batch, b"s", {aggregate_id: list(ranges)})
        self._write(batch, {"has_skips": True})

    def fold_events(  # noqa: PLR0913 (all that one write batch changes)
        self,
        last: Mapping[str, int],
        versions: Mapping[str, Iterable[int]],
        offsets: Mapping[Partition, int],
        now: int,
        *,
        times: Mapping[str, Seen],
        refused: Mapping[str, Iterable[int]] | None = None,
        rewritten: Mapping[str, Rewritten] | None = None,
        contents: Mapping[tuple[str, int], set[bytes]] | None = None,
    ) -> None:
        """Add published events that were read back from the topic.

        Args:
            versions: all versions read, per aggregate; they may fill a skipped gap.
            times: of the rows read; `is_of_last` refers to the highest version read.
            refused: dead letters below the first version, per aggregate.
            rewritten: new state per aggregate, where it changed.
            contents: hashes of the versions read, if needed.
        """
        known = self.known([*{**last, **(refused or {})}])
        skipped: dict[str, list[tuple[int, int]]] = {}
        for aggregate_id, ranges in known.skipped.items():
            left = list(ranges)
            for version in versions.get(aggregate_id, ()):
                left = without(version, left)
            if left != list(ranges):
                skipped[aggregate_id] = left
        raised = {a: v for a, v in last.items() if v > known.last.get(a, v - 1)}
        seen: dict[str, int] = {}
        for aggregate_id, read in times.items():
            packed = known.times.get(aggregate_id)
            after = read if packed is None else Seen.unpacked(packed).raised(read.newest)
            if aggregate_id in raised and after.newest == read.newest:
                after = read
            elif aggregate_id in raised or (
                last[aggregate_id] == known.last.get(aggregate_id) and not read.is_of_last
            ):
                after = Seen(after.newest, False)
            if after.packed() != packed or aggregate_id in raised:
                seen[aggregate_id] = after.packed()
        for aggregate_id in seen.keys() - raised.keys():
            raised[aggregate_id] = known.last[aggregate_id]
        self._record_folded(
            Decision(
                EVENTS.empty_table(),
                last=raised,
                times=seen,
                skipped=skipped,
                rewritten=dict(rewritten or {}),
            ),
            offsets,
            now,
            refused={
                a: sorted({*known.refused.get(a, ()), *more}) for a, more in (refused or {}).items()
            },
            contents=self._with_known(contents or {}),
        )

    def fold_gaps(
        self,
        gaps: Iterable[SkippedGap],
        offsets: Mapping[Partition, int],
        now: int,
    ) -> None:
        """Add skips that were read back from the topic of gaps.

        Call before the events of the same fold: once events above a skip have raised the last
        version, a skip below it looks like one that was filled.
        """
        raised: dict[str, int] = {}
        skipped: dict[str, list[tuple[int, int]]] = {}
        gaps = list(gaps)
        known = self.known(sorted({g.aggregate_id for g in gaps}))
        for gap in gaps:
            a, run = gap.aggregate_id, (gap.from_version, gap.to_version)
            if run[1] > known.last.get(a, run[1] - 1):
                raised[a] = max(run[1], raised.get(a, run[1]))
                skipped.setdefault(a, list(known.skipped.get(a, ())))
                if run not in skipped[a]:
                    skipped[a].append(run)
        # what was skipped has no row
        times = {a: known.times.get(a, NO_TIME) & ~1 for a in raised}
        decision = Decision(EVENTS.empty_table(), last=raised, times=times, skipped=skipped)
        self._record_folded(decision, offsets, now)

    def add_contents(self, contents: Mapping[tuple[str, int], set[bytes]]) -> None:
        batch: Batch = {}
        put_contents(batch, self._with_known(contents))
        self._write(batch, {})

    def restart_holds(self, latest: int, now: int, due: int) -> None:
        """Restart holds due after `latest`, seen by a wrong clock, as if first seen `now`."""
        rewritten = {
            hold.aggregate_id: replace(hold, first_seen=now, attempts=0, next_attempt=due)
            for hold in self.holds.due_after(latest)
        }
        if rewritten:
            batch: Batch = {}
            self.holds.store(batch, rewritten)
            self._write(batch, {})

    # -- inside ----------------------------------------------------------------------------------

    def _record_folded(
        self, decision: Decision, offsets: Mapping[Partition, int], now: int, **more: Any
    ) -> None:
        for aggregate_id, last in decision.last.items():
            if (hold := self.holds.get(aggregate_id)) is not None:
                decision.holds[aggregate_id] = after_fold(hold, last, now)
        self.record(decision, offsets, None, **more)

    def _with_known(
        self, contents: Mapping[tuple[str, int], set[bytes]]
    ) -> dict[tuple[str, int], set[bytes]]:
        known = self.contents([*contents])
        return {event: found | known.get(event, set()) for event, found in contents.items()}
