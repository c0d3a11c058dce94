"""A shard in memory: a store, a topic and an index that admission works between."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from eventpub import admission
from eventpub.admission.model import (
    EVENTS,
    Counts,
    Decision,
    Hold,
    Known,
    Rewritten,
    Rules,
    SkippedGap,
    VersionRange,
    Versions,
    values,
)

Key = tuple[str, int]


def table(rows: list[tuple[str, int, int]]) -> pa.Table:
    """Events of (aggregate, version, create_time)."""
    return pa.table(
        {
            "aggregate_id": [r[0] for r in rows],
            "version": [r[1] for r in rows],
            "event_type": ["happened" for _ in rows],
            "payload": [b"{}" for _ in rows],
            "metadata": [None for _ in rows],
            "create_time": [r[2] for r in rows],
        },
        schema=EVENTS,
    )


@dataclass
class World:
    """See the module. `store` is what is committed: (aggregate, version) → create_time."""

    rules: Rules = field(default_factory=Rules)
    baseline: int | None = None
    store: dict[Key, int] = field(default_factory=dict)
    topic: list[Key] = field(default_factory=list)
    late: list[Key] = field(default_factory=list)
    diverted: list[Key] = field(default_factory=list)
    gaps: list[SkippedGap] = field(default_factory=list)
    last: dict[str, int] = field(default_factory=dict)
    holds: dict[str, Hold] = field(default_factory=dict)
    skipped: dict[str, list[Versions]] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    refused: list[Key] = field(default_factory=list)
    times: dict[str, int] = field(default_factory=dict)
    rewritten: dict[str, Rewritten] = field(default_factory=dict)
    open_since: int | None = None
    now: int = 0
    fetch_rows: int = 10_000

    def commit(self, aggregate_id: str, version: int, at: int) -> None:
        """A transaction becomes visible whose row says that it was created at `at`."""
        self.store[aggregate_id, version] = at

    def delete(self, aggregate_id: str, version: int) -> None:
        """Somebody archives an event."""
        del self.store[aggregate_id, version]

    def see(
        self, *, after: int = -1, upto: int = 1 << 60, now: int = 0, everything: bool = False
    ) -> Decision:
        """The reader passes a window."""
        after = -1 if everything else after
        rows = sorted(
            (at, aggregate_id, version)
            for (aggregate_id, version), at in self.store.items()
            if after < at <= upto
        )
        return self._step(table([(a, v, at) for at, a, v in rows]), now)

    def due(self, now: int) -> Decision:
        """A batch without rows tries the holds that are due."""
        return self._step(EVENTS.empty_table(), now)

    def later(self, micros: int) -> Decision:
        """The clock goes on, then `due`."""
        return self.due(self.now + micros)

    def look(self, *aggregate_ids: str) -> Decision:
        """Somebody asks to look for what these miss."""
        return self._step(EVENTS.empty_table(), self.now, retry_now=aggregate_ids)

    def skip(self, *aggregate_ids: str) -> Decision:
        """Somebody asks to give their gaps up."""
        return self._step(EVENTS.empty_table(), self.now, skip_now=aggregate_ids)

    def known(self, aggregate_ids: list[str] | None = None) -> Known:
        """What the index would answer; about all where none are named."""
        if aggregate_ids is None:
            aggregate_ids = sorted({*self.last, *self.times})
        refused: dict[str, list[int]] = {}
        for aggregate_id, version in self.refused:
            refused.setdefault(aggregate_id, []).append(version)
        last, times = (
            {a: known[a] for a in aggregate_ids if a in known} for known in (self.last, self.times)
        )
        return Known(
            last, self.holds, self.skipped, self.baseline, refused, times, rewritten=self.rewritten
        )

    def _step(
        self,
        rows: pa.Table,
        now: int,
        retry_now: tuple[str, ...] = (),
        skip_now: tuple[str, ...] = (),
    ) -> Decision:
        self.now = max(self.now, now)
        due = [a for a, hold in self.holds.items() if hold.next_attempt <= self.now]
        ids: list[Any] = rows.column("aggregate_id").unique().to_pylist()
        plan = admission.Plan(
            rows,
            self.known(list(dict.fromkeys([*ids, *due, *retry_now, *skip_now]))),
            self.rules,
            self.now,
            [*due, *retry_now],
            open_since=self.open_since,
            skip_now=skip_now,
        )
        plan.settle(self.baseline_ends(plan.first_sights))
        decision = plan.decide(*self.fetch(plan.missing))
        self.record(decision)
        return decision

    def fetch(self, ranges: list[VersionRange]) -> tuple[pa.Table, list[VersionRange]]:
        """What a backtrack finds: at most `fetch_rows` in all, and what it did not read."""
        found: list[tuple[str, int, int]] = []
        rest: list[VersionRange] = []
        for wanted in ranges:
            for version in range(wanted.first, wanted.last + 1):
                if len(found) >= self.fetch_rows:
                    rest.append(replace(wanted, first=version))
                    break
                if (wanted.aggregate_id, version) in self.store:
                    at = self.store[wanted.aggregate_id, version]
                    found.append((wanted.aggregate_id, version, at))
        return table(found), rest

    def baseline_ends(self, first_sights: list[Key]) -> dict[str, tuple[int, int]]:
        """As of `Plan.settle`."""
        baseline = self.baseline or 0
        ends: dict[str, tuple[int, int]] = {}
        for aggregate_id, version in first_sights:
            below = {
                v: at for (a, v), at in self.store.items() if a == aggregate_id and v < version
            }
            old = [v for v, at in below.items() if at <= baseline]
            if old:
                ends[aggregate_id] = max(old), max(below.values())
        return ends

    def record(self, decision: Decision) -> None:
        """What the topic shows and the index keeps after a batch."""
        keys = _keys(decision.events)
        self.topic += keys
        if decision.late is not None:
            self.late += [k for k, late in zip(keys, decision.late, strict=True) if late]
        if decision.diverted is not None:
            self.diverted += _keys(decision.diverted)
        self.gaps += decision.gaps
        if decision.refused is not None:
            self.refused += _keys(decision.refused[0])
        self.last |= decision.last
        self.times |= decision.times
        self.rewritten |= decision.rewritten
        self.skipped |= decision.skipped
        for aggregate_id, hold in decision.holds.items():
            if hold is None:
                self.holds.pop(aggregate_id, None)
            else:
                self.holds[aggregate_id] = hold
        self.counts.add(decision.counts)


def _keys(events: pa.Table) -> list[Key]:
    return list(
        zip(
            values(events, "aggregate_id"),
            values(events, "version"),
            strict=True,
        )
    )
