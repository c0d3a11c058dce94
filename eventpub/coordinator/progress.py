"""Counters and state of the publisher: for terminal, logs and status."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from eventpub.channel import LATENCY_BOUNDS, Report
from eventpub.config import Config, format_time
from eventpub.coordinator.events import LagMeasured, Log, warning

STEP_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Seconds, of one step of one transaction."""

_LAG_IS_OLD = 5.0
"""Age in seconds from which a measured lag grows with time; it is measured every second."""

_LAST = ("holds", "low", "next_due", "position")
PER_SHARD = ("published", "gaps_skipped", "late")
"""Counters that each shard has, too."""


@dataclass
class Histogram:
    """Durations by upper bound, s; one more count for all above. Not cumulative."""

    bounds: Sequence[float]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds

    def add(self, counts: Sequence[int], total: float) -> None:
        if len(counts) == len(self.counts):
            self.counts = [a + b for a, b in zip(self.counts, counts, strict=True)]
            self.sum += total


def _counter(metric: str = "", meaning: str = "") -> Any:
    """A total since the process started; a report's field of the same name is added to it."""
    return field(default=0, metadata={"metric": metric, "meaning": meaning})


@dataclass
class Progress:
    """The publisher's counters, shown and served as metrics, and its position.

    Attributes:
        time: the database's time of the last poll, µs.
        position: everything created up to here is accounted for, µs.
        lag_seconds, lag_events: age of the oldest unread event below the boundary, and the number
            of those, at most `workers.MOST_EVENTS`.
        ahead_seconds, rows_ahead: how far the newest event lies in the future; number of such rows.
        holds_open: aggregates that wait for a version.
        latency: from `create_time` to commit, of each published event.
        last_error: the last error that was waited out.
        stopped_by: number of the signal, if any.
    """

    rows_read: int = _counter("rows_read", "rows of the event table that were read")
    published: int = _counter("events_published", "events made visible on the topic")
    duplicates: int = _counter(
        "duplicates_dropped", "rows read again and dropped: already published"
    )
    backtracked: int = _counter()
    gaps_opened: int = _counter("gaps_opened", "aggregates found with a version missing")
    gaps_filled: int = _counter("gaps_filled", "gaps whose missing versions arrived")
    gaps_skipped: int = _counter(
        "gaps_skipped", "gaps that were skipped, recorded on `<topic>.gaps`"
    )
    gaps_vanished: int = _counter("gaps_vanished", "gaps above which the events were deleted")
    late: int = _counter(
        "events_late",
        "events that came after their version had been skipped; without those of"
        " `eventpub dead retry`",
    )
    dead: int = _counter("events_dead", "rows that were refused, recorded on `<topic>.dead`")
    conflicts: int = _counter(
        "events_conflicting",
        "dead letters because another event had been published under the version",
    )
    rows_in_past: int = _counter(
        "rows_in_past",
        "rows committed with times more than the horizon behind what had been read",
    )
    without_identity: int = _counter(
        "rows_without_identity",
        "rows without an aggregate or a version, skipped (`store.without_identity`)",
    )
    recount_found: int = _counter("recount_found", "events that only a recount has found")
    comparisons: int = _counter()
    passed: int = _counter(
        "transactions_passed",
        "transactions open for longer than the boundary waits for one (`read.max_wait`)",
    )
    begin_above: int = _counter()
    replaced: int = _counter(
        "producers_replaced",
        "Kafka producers replaced after an abort, or an answer that left open whether it was"
        " committed",
    )

    time: int = 0
    position: int = 0
    lag_seconds: float = 0.0
    lag_events: int = 0
    ahead_seconds: float = 0.0
    rows_ahead: int = 0
    watermark: str = "off"
    holds_open: int = 0
    per_shard: dict[int, dict[str, Any]] = field(default_factory=dict)
    latency: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS))
    steps: dict[str, Histogram] = field(default_factory=dict)
    server: str = ""
    last_error: str | None = None
    stopped_by: int | None = None
    spark_ui: str = ""

    def add(self, report: Report, where: str = "") -> None:
        more = {**vars(report), **vars(report.counts)}
        more |= {"rows_read": report.counts.rows, "dead": len(report.dead)}
        for counter in COUNTERS:
            setattr(self, counter.name, getattr(self, counter.name) + more.get(counter.name, 0))
        if report.counts.rows or report.published:
            for step, seconds in report.seconds.items():
                self.steps.setdefault(step, Histogram(STEP_BOUNDS)).observe(seconds)
        self.latency.add(report.latency, report.latency_sum)
        before = self.per_shard.get(report.shard, {})
        shown = {name: getattr(report, name) for name in _LAST}
        for name in PER_SHARD:
            shown[name] = before.get(name, 0) + more.get(name, 0)
        shown["where"] = where
        shown["index_bytes"] = report.index_bytes or before.get("index_bytes")
        self.per_shard[report.shard] = shown
        self.holds_open = sum(int(shard["holds"]) for shard in self.per_shard.values())


COUNTERS = tuple(each for each in fields(Progress) if each.metadata)


_SECONDS = 5.0


class Rate:
    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def add(self, at: float, total: int) -> None:
        self._seen.append((at, total))
        while len(self._seen) > 2 and self._seen[1][0] <= at - _SECONDS:
            self._seen.popleft()

    def at(self, now: float) -> float:
        """Events per second; falls while none are published."""
        if not self._seen:
            return 0.0
        (start, first), (_, last) = self._seen[0], self._seen[-1]
        return max(0, last - first) / max(now - start, 0.001)


class ShownLag:
    """The lag as shown: it grows while it cannot be measured. Times are monotonic s."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self._at: float | None = None
        self._is_measured = False
        self.boundary = 0

    def begin(self, now: float) -> None:
        self._at = now if self._at is None else self._at

    def measured(self, event: LagMeasured, position: int, now: float) -> None:
        self.boundary = max(self.boundary, event.upper)
        self._at, self._is_measured = now, True
        seconds, events = event.seconds, event.events
        if seconds and event.position < position:
            # the position has moved meanwhile: what is left is younger
            left = max(0.0, (event.upper - position) / 1e6)
            seconds, events = min(seconds, left), events if left else 0
        self.progress.lag_seconds, self.progress.lag_events = seconds, events

    def is_none(self, seen_at: float) -> None:
        """Everything up to the boundary polled at `seen_at` is published."""
        self.progress.lag_seconds, self.progress.lag_events = 0.0, 0
        self._at, self._is_measured = max(seen_at, self._at or seen_at), True

    def is_known(self, now: float) -> bool:
        return self._is_measured and self._at is not None and now - self._at <= _LAG_IS_OLD

    def unread_seconds(self, now: float) -> float:
        lag, at = self.progress.lag_seconds, self._at
        return lag if self.is_known(now) or at is None else lag + now - at

    def seconds(self, low: int, now: float) -> float:
        """Lag of unpublished events, held ones included; `low`: published up to here, µs."""
        lag = self.unread_seconds(now)
        if self.progress.holds_open and self.boundary:
            lag = max(lag, self.below(low))
        return lag

    def below(self, low: int) -> float:
        """Seconds from a time on the database's clock, µs, to the boundary."""
        return (self.boundary - low) / 1e6

    def events(self, now: float) -> int | None:
        """Unread events below the boundary plus held aggregates; None: not known."""
        progress = self.progress
        return progress.lag_events + progress.holds_open if self.is_known(now) else None


_TIMES = ("first_seen", "skipped_at")

_GAPS_A_MINUTE = 100
"""Skipped gaps logged one by one per minute."""

_OPENED_EVERY = 60.0
"""Seconds between log lines on gaps found."""

_GROWING = {
    "begin_above": (
        1_000,
        "aggregates",
        "very many aggregates begin above the first version and wait for it: either"
        " store.first_version is wrong, or the first events were archived (read.start"
        " excludes events created before a time)",
    ),
    "without_identity": (
        1,
        "rows",
        "rows without aggregate_id or version are skipped (store.without_identity)",
    ),
}
"""By counter: total from which it is logged, and again at each tenfold; its label; the text."""


class ReportLog:
    def __init__(self, config: Config) -> None:
        self._gaps_topic = config.sink.gaps_topic
        self._more = {"begin_above": {"first_version": config.store.first_version}}
        self._may_name, self._until = 0, float("-inf")
        self._warns_at = {name: least for name, (least, *_) in _GROWING.items()}
        self._opened, self._opened_at = 0, float("-inf")

    def lines(self, report: Report, progress: Progress, now: float) -> Iterator[Log]:
        yield from self._skipped(report, now)
        for row in report.dead:
            yield warning("row refused, written to the dead-letter topic", **row)
        for jump in report.jumps:
            text = "unexpected version on the topic: from another process, or earlier ones are"
            yield warning(text + " missing", **jump)
        for topic in report.made_again:
            text = "the topic was deleted and created again; its records are lost"
            yield warning(text, topic=topic)
        yield from _of_the_topic(report)
        if count := report.counts.gaps_vanished:
            yield warning("holds ended: the events above the gap were deleted", count=count)
        self._opened += report.counts.gaps_opened
        if self._opened and now - self._opened_at >= _OPENED_EVERY:
            text = "aggregates lack a version and are held; `eventpub gaps list` shows them"
            yield Log("info", text, {"opened": self._opened, "shard": report.shard})
            self._opened, self._opened_at = 0, now
        for name, (_, what, text) in _GROWING.items():
            if (total := getattr(progress, name)) >= self._warns_at[name]:
                self._warns_at[name] = 10 * total
                yield warning(text, **{what: total}, **self._more.get(name, {}))

    def _skipped(self, report: Report, now: float) -> Iterator[Log]:
        if now >= self._until:
            self._may_name, self._until = _GAPS_A_MINUTE, now + 60.0
        named = report.skipped[: self._may_name]
        self._may_name -= len(named)
        for gap in named:
            times = {name: format_time(gap[name]) for name in _TIMES if name in gap}
            yield warning("gap skipped", **gap | times)
        if (rest := report.counts.gaps_skipped - len(named)) > 0:
            text = "more gaps skipped; all are on the topic"
            yield warning(text, count=rest, topic=self._gaps_topic)


def _of_the_topic(report: Report) -> Iterator[Log]:
    shard = {"shard": report.shard}
    if report.not_ours:
        text = "ignored records that other programs wrote to the topics"
        yield warning(text, records=report.not_ours)
    if report.restored:
        text = "republished records of committed transactions that the broker had left open"
        yield warning(text, records=report.restored)
    if report.rebuilt is not None:
        yield warning("rebuilding the index from the topic", reason=report.rebuilt, **shard)
    lost = "retention removed unread records: events created"
    if report.baseline is not None:
        text = f"{lost} earlier count as published"
        yield warning(text, before=format_time(report.baseline), **shard)
    if report.repeats_after is not None:
        text = f"{lost} later may be published again"
        yield warning(text, after=format_time(report.repeats_after), **shard)
