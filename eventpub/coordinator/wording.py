"""What the log says of shards' reports, and of how far they have read back: no decisions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from eventpub.channel import Folding, Report
from eventpub.config import Config, format_time
from eventpub.coordinator.events import Log
from eventpub.coordinator.progress import Progress
from eventpub.sources.mysql.values import writers_zone

_TIMES = ("first_seen", "skipped_at")


def warning(text: str, **facts: object) -> Log:
    return Log("warning", text, facts)


def of_report(report: Report, gaps_topic: str, named: int) -> Iterator[Log]:
    """What of a report is more than numbers; so many of the skipped gaps are named."""
    for gap in report.skipped[:named]:
        times = {name: format_time(gap[name]) for name in _TIMES if name in gap}
        yield warning("gap skipped", **gap | times)
    unnamed = report.counts.gaps_skipped - min(named, len(report.skipped))
    if unnamed > 0:
        yield warning("more gaps skipped; all are on the topic", count=unnamed, topic=gaps_topic)
    for row in report.dead:
        yield warning("row refused, written to the dead-letter topic", **row)
    for jump in report.jumps:
        text = "unexpected version on the topic: from another process, or earlier ones are missing"
        yield warning(text, **jump)
    for topic in report.made_again:
        yield warning("the topic was deleted and created again; its records are lost", topic=topic)
    if report.not_ours:
        text = "ignored records that other programs wrote to the topics"
        yield warning(text, records=report.not_ours)
    if report.restored:
        text = "republished records of committed transactions that the broker had left open"
        yield warning(text, records=report.restored)
    shard = {"shard": report.shard}
    if report.rebuilt is not None:
        yield warning("rebuilding the index from the topic", reason=report.rebuilt, **shard)
    if report.baseline is not None:
        text = "retention removed unread records: events created earlier count as published"
        yield warning(text, before=format_time(report.baseline), **shard)
    if report.repeats_after is not None:
        text = "retention removed unread records: events created later may be published again"
        yield warning(text, after=format_time(report.repeats_after), **shard)
    if count := report.counts.gaps_vanished:
        yield warning("holds ended: the events above the gap were deleted", count=count)


def rows_of_the_past(rows: int, oldest: int, now: int, watermark: str, zone: str | None) -> Log:
    """Rows are committed that were created before the horizon."""
    text = (
        "rows older than recount.horizon have just been committed; those with the newest ids are"
        f" published, others may be missed: {writers_zone(zone)}; if transactions last that long,"
        " raise recount.horizon"
    ) + ", or GRANT PROCESS" * (watermark == "denied")
    seconds = round((now - oldest) / 1e6)
    facts = {"rows": rows, "oldest": format_time(oldest), "seconds": seconds}
    return warning(text, code="store.rows_in_past", **facts)


def rows_of_the_future(rows: int, seconds: float, zone: str | None) -> Log:
    """The newest row lies in the future."""
    text = "the newest event lies in the future and is published when its time comes; "
    text += writers_zone(zone)
    return warning(text, code="store.rows_in_future", rows=rows, seconds=round(seconds))


_MANY_BEGIN_ABOVE = 1_000
"""Aggregates without their first version from which on that is said."""

_GAPS_A_MINUTE = 100
"""Skipped gaps that are named, each in a line of its own."""

_OPENED_EVERY = 60.0
"""Seconds between two lines about gaps that were found: late commits open and fill many."""


class ReportLog:
    """Pure: times are arguments, s."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._may_name, self._until = 0, float("-inf")
        self._warns_at = _MANY_BEGIN_ABOVE
        self._warns_of_passed = 1
        self._opened = 0
        self._opened_at = float("-inf")

    def lines(self, report: Report, progress: Progress, now: float) -> Iterator[Log]:
        """What is to be said of a report, which is in the progress already."""
        if now >= self._until:
            self._may_name, self._until = _GAPS_A_MINUTE, now + 60.0
        named = min(len(report.skipped), self._may_name)
        self._may_name -= named
        yield from of_report(report, self._config.sink.gaps_topic, named)
        self._opened += report.counts.gaps_opened
        if self._opened and now - self._opened_at >= _OPENED_EVERY:
            text = "aggregates lack a version and are held; `eventpub gaps list` shows them"
            yield Log("info", text, {"opened": self._opened, "shard": report.shard})
            self._opened, self._opened_at = 0, now
        begin_above, passed_over = progress.begin_above, progress.without_identity
        if begin_above >= self._warns_at:
            self._warns_at = 10 * begin_above
            text = (
                "very many aggregates begin above the first version and wait for it: either"
                " store.first_version is wrong, or the first events were archived (read.start"
                " excludes events created before a time)"
            )
            first = self._config.store.first_version
            yield warning(text, aggregates=begin_above, first_version=first)
        if passed_over >= self._warns_of_passed:
            self._warns_of_passed = 10 * passed_over
            text = "rows without aggregate_id or version are skipped (store.without_identity)"
            yield warning(text, rows=passed_over)


_FOLDING_EVERY = 10.0


class FoldLog:
    """Says every 10 s how far it is, and when it may end."""

    def __init__(self) -> None:
        self._began: tuple[float, int] | None = None
        self._said = 0.0

    def line(self, foldings: Sequence[Folding], now: float) -> Log | None:
        """The line to log now, if any; seconds."""
        read = sum(folding.read for folding in foldings)
        left = sum(folding.left for folding in foldings)
        if not (read or left):
            self._began = None
            return None
        if self._began is None:
            self._began, self._said = (now, left), now - _FOLDING_EVERY
        if now - self._said < _FOLDING_EVERY:
            return None
        self._said = now
        began, left_then = self._began
        rate = (left_then - left) / (now - began) if now > began else 0.0
        facts = {
            "records": read,
            "left": left,
            "seconds_left": round(left / rate) if rate > 0 else None,
        }
        text = "reading the topic back into the index before publishing starts"
        return Log("info", text, facts)
