"""A shard in memory: a store, a topic and an index that admission works between."""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa

from eventpub import admission
from eventpub.admission import (
    EVENTS,
    Counts,
    Decision,
    Hold,
    Known,
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
    open_since: int | None = None
    now: int = 0

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
        return self._step(EVENTS.empty_table(), self.now, look_now=aggregate_ids)

    def skip(self, *aggregate_ids: str) -> Decision:
        """Somebody asks to give their gaps up."""
        return self._step(EVENTS.empty_table(), self.now, skip_now=aggregate_ids)

    def known(self) -> Known:
        """What the index would answer."""
        refused: dict[str, list[int]] = {}
        for aggregate_id, version in self.refused:
            refused.setdefault(aggregate_id, []).append(version)
        return Known(self.last, self.holds, self.skipped, self.baseline, refused)

    def _step(
        self,
        rows: pa.Table,
        now: int,
        look_now: tuple[str, ...] = (),
        skip_now: tuple[str, ...] = (),
    ) -> Decision:
        self.now = max(self.now, now)
        due = [a for a, hold in self.holds.items() if hold.next_attempt <= self.now]
        plan = admission.plan(
            rows,
            self.known(),
            self.rules,
            self.now,
            due,
            open_since=self.open_since,
            look_now=look_now,
            skip_now=skip_now,
        )
        decision = plan.decide(self.fetch(plan.missing), self.below(plan.first_sights))
        self.record(decision)
        return decision

    def fetch(self, ranges: list[VersionRange]) -> pa.Table:
        """What a backtrack finds: each range's lowest versions, at most `fetch_limit`."""
        found: list[tuple[str, int, int]] = []
        for wanted in ranges:
            versions = sorted(
                v
                for a, v in self.store
                if a == wanted.aggregate_id and wanted.first <= v <= wanted.last
            )
            found += [
                (wanted.aggregate_id, v, self.store[wanted.aggregate_id, v])
                for v in versions[: self.rules.fetch_limit]
            ]
        return table(found)

    def below(self, first_sights: list[Key]) -> pa.Table:
        """All rows with a smaller version."""
        return table(
            [
                (a, v, at)
                for aggregate_id, version in first_sights
                for (a, v), at in sorted(self.store.items(), reverse=True)
                if a == aggregate_id and v < version
            ]
        )

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
