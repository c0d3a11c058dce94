"""What the publisher has done and where it is: for the terminal, logs and status."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from eventpub.admission import Counts

_NOT_SHOWN = {
    "buckets",
    "compared",
    "unfinished",
    "answers",
    "read_before",
    "hidden_since",
    "is_placed",
}


@dataclass
class ShardReport:
    """What one shard did in one micro-batch; a task returns it as JSON.

    Attributes:
        shard: its number.
        counts: of the batch, by the names of `admission.Counts`.
        published: records of events made visible.
        position: everything created at or before is accounted for, µs.
        low: from where a reader without an index must read again, µs.
        read_before: up to where the index had accounted for everything when the first batch of a
            start began, µs; None: another batch, or a new index.
        hidden_since: as of `boundary.Bounds`, of the last window.
        holds: open holds.
        next_due: when the next hold is due, µs; None: nothing is held.
        folded: records that another process, or an earlier one, had published and this one read
            back into the index.
        replaced: producers that were given up after an indefinite answer or an abort.
        restored: records that were committed and got lost with their transaction's marker, and were
            published again.
        skipped: gaps that were given up, by the fields of `admission.SkippedGap`; not all where
            they are very many.
        dead: refused rows that were dead-lettered, by `aggregate_id`, `version`, `reason`.
        recount_found: events published that only a recount has found.
        begin_above: aggregates seen for the first time, whose first version is missing.
        buckets: rows of time buckets that were accounted for, where the number has changed.
        compared: the last `recount.Comparison` that was done.
        unfinished: its buckets of which something was left.
        answers: what came of requests, by their ids.
        watermark: as `store.Watermark.state`.
        passed: transactions that the watermark did not wait for any longer.
        offsets: [topic, partition, next offset] of the shard's partitions after the batch.
        not_ours: by origin, records of the topics that this publisher has not written.
        jumps: versions on the topic that nobody can have published there in order; see `jumps`.
        made_again: topics that were deleted and created again since the index was written.
        is_placed: whether it has read all partitions from their beginnings and found everything
            where it would be written today.
        foreign: whether somebody has published behind `offsets` of the batch before.
        baseline: events created at or before count as published, since index and topic have both
            forgotten them, µs; None: nothing was forgotten.
        repeats_after: events created later, µs, may be published again where retention has removed
            them, since neither index nor topic knows them; None: none may.
        rebuilt: what was wrong with its index, which is rebuilt from the topic; None: nothing was.
        seconds: by step.
    """

    shard: int
    counts: dict[str, int] = field(default_factory=dict)
    published: int = 0
    position: int = 0
    low: int = 0
    read_before: int | None = None
    hidden_since: int | None = None
    holds: int = 0
    next_due: int | None = None
    folded: int = 0
    replaced: int = 0
    restored: int = 0
    skipped: list[dict[str, Any]] = field(default_factory=list)
    dead: list[dict[str, Any]] = field(default_factory=list)
    recount_found: int = 0
    begin_above: int = 0
    buckets: dict[int, int] = field(default_factory=dict)
    compared: int = 0
    unfinished: list[int] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)
    watermark: str = "off"
    passed: int = 0
    offsets: list[tuple[str, int, int]] = field(default_factory=list)
    not_ours: dict[str, int] = field(default_factory=dict)
    jumps: list[dict[str, Any]] = field(default_factory=list)
    made_again: list[str] = field(default_factory=list)
    is_placed: bool = False
    foreign: bool = False
    baseline: int | None = None
    repeats_after: int | None = None
    rebuilt: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def has_news(self) -> bool:
        """Whether it has more to say than numbers, which is said at the end of the batch."""
        vanished = self.counts.get("gaps_vanished", 0)
        return bool(
            self.skipped
            or self.dead
            or self.restored
            or self.baseline is not None
            or self.repeats_after is not None
            or self.rebuilt
            or vanished
            or self.jumps
            or self.made_again
        )


@dataclass
class Progress:
    """The publisher as a whole. Counters are totals since the start of the process.

    Attributes:
        time: the database's time of the last look, µs.
        position: everything created at or before is accounted for, µs.
        lag_seconds: age of the oldest event below the boundary that is not read yet; 0: none is.
        ahead_seconds: by how much the newest event lies in the future; it is published when its
            time has come.
        lag_events: how many there are; at most `lag.MOST_EVENTS`.
        rows_read: rows of windows.
        published: events made visible on the topic.
        dead: refused rows, dead-lettered.
        recount_found: events that only a recount has found.
        begin_above: aggregates seen for the first time, whose first version was missing.
        watermark: as `store.Watermark.state`.
        passed: transactions that were open for longer than the watermark waits.
        passed_by_reader: the same, since the last start of the source.
        holds_open: aggregates that wait for a version.
        gaps_vanished: holds that ended because the events above the gap were deleted.
        batch_seconds: the last micro-batch, by step, of the slowest shard; `total` is the whole,
            `read` the wait for rows, that for the next window included.
        per_shard: the last report of each shard, with its totals.
        conflicts: rows whose version was published as another event, dead-lettered.
        server: identity of the database server that is read.
        last_error: the last error that was met and waited out.
        stopped_by: number of the signal that ended it; None: it ended by itself or runs.
    """

    time: int = 0
    position: int = 0
    lag_seconds: float = 0.0
    lag_events: int = 0
    ahead_seconds: float = 0.0
    rows_read: int = 0
    published: int = 0
    duplicates: int = 0
    backtracked: int = 0
    gaps_opened: int = 0
    gaps_filled: int = 0
    gaps_skipped: int = 0
    gaps_vanished: int = 0
    late: int = 0
    dead: int = 0
    conflicts: int = 0
    recount_found: int = 0
    begin_above: int = 0
    watermark: str = "off"
    passed: int = 0
    passed_by_reader: int = 0
    folded: int = 0
    replaced: int = 0
    restored: int = 0
    batches: int = 0
    holds_open: int = 0
    batch_seconds: dict[str, float] = field(default_factory=dict)
    per_shard: list[dict[str, Any]] = field(default_factory=list)
    server: str = ""
    last_error: str | None = None
    stopped_by: int | None = None

    def add(self, reports: list[ShardReport], total_seconds: float) -> None:
        """Take over the reports of one micro-batch."""
        counts = Counts()
        for report in reports:
            counts.add(Counts(**report.counts))
            self.published += report.published
            self.folded += report.folded
            self.begin_above += report.begin_above
            self.replaced += report.replaced
            self.restored += report.restored
        self.batches += 1
        self.rows_read += counts.rows
        self.duplicates += counts.duplicates
        self.backtracked += counts.backtracked
        self.gaps_opened += counts.gaps_opened
        self.gaps_filled += counts.gaps_filled
        self.gaps_skipped += counts.gaps_skipped
        self.gaps_vanished += counts.gaps_vanished
        self.late += counts.late
        self.conflicts += counts.conflicts
        self.dead += sum(len(r.dead) for r in reports)
        self.recount_found += sum(r.recount_found for r in reports)
        self.watermark = reports[0].watermark
        passed = max(r.passed for r in reports)  # of this reader, which counts from its own start
        self.passed += passed - self.passed_by_reader if passed >= self.passed_by_reader else passed
        self.passed_by_reader = passed
        self.position = min(r.position for r in reports)
        self.holds_open = sum(r.holds for r in reports)
        slowest = max(reports, key=lambda r: sum(r.seconds.values()))
        self.batch_seconds = {**slowest.seconds, "total": total_seconds}
        published = {s["shard"]: s["published_total"] for s in self.per_shard}
        self.per_shard = [
            {
                **{k: v for k, v in vars(r).items() if k not in _NOT_SHOWN},
                "published_total": published.get(r.shard, 0) + r.published,
            }
            for r in sorted(reports, key=lambda r: r.shard)
        ]
