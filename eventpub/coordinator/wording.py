"""What the log says of shards' reports."""

from __future__ import annotations

from collections.abc import Iterator

from eventpub.channel import Report
from eventpub.config import Config, format_time
from eventpub.coordinator.events import Log
from eventpub.coordinator.progress import Progress

_TIMES = ("first_seen", "skipped_at")

_GAPS_A_MINUTE = 100
"""Skipped gaps that are named, each in a line of its own."""

_OPENED_EVERY = 60.0
"""Seconds between two lines about gaps that were found: late commits open and fill many."""

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
"""By counter of `Progress`: from which total on it is logged, and again each tenfold; as what."""


def warning(text: str, **facts: object) -> Log:
    return Log("warning", text, facts)


class ReportLog:
    """Pure: times are the machine's, s."""

    def __init__(self, config: Config) -> None:
        self._gaps_topic = config.sink.gaps_topic
        self._more = {"begin_above": {"first_version": config.store.first_version}}
        self._may_name, self._until = 0, float("-inf")
        self._warns_at = {name: least for name, (least, *_) in _GROWING.items()}
        self._opened, self._opened_at = 0, float("-inf")

    def lines(self, report: Report, progress: Progress, now: float) -> Iterator[Log]:
        """The lines for a report that the progress contains already."""
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
    """What a shard has found when it read its topic back."""
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
