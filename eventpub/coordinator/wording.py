"""What the log says of a shard's report and of the boundary: lines, not decisions."""

from __future__ import annotations

from collections.abc import Iterator

from eventpub.channel import Report
from eventpub.config import format_time
from eventpub.coordinator.events import Log

WATERMARK = {
    "denied": "the account may not see open transactions, so the boundary is the database's time"
    " less read.delay; late commits are still found (GRANT PROCESS ON *.* lets it see them)",
    "stale": "no fresh answer about open transactions, since something else reads"
    " information_schema.innodb_trx too often; the boundary is the database's time less"
    " read.delay, late commits are still found",
}
"""By state of the watermark, where it cannot see."""


_TIMES = ("first_seen", "skipped_at")


def warning(text: str, **facts: object) -> Log:
    """A line that somebody should read."""
    return Log("warning", text, facts)


class Named:
    """How many lines of one kind are still written in this minute: thousands help nobody."""

    def __init__(self, most: int = 100, seconds: float = 60.0) -> None:
        self._most = most
        self._seconds = seconds
        self._left = most
        self._until = float("-inf")

    def take(self, wanted: int, now: float) -> int:
        """How many of those that are wanted may be written now; seconds."""
        if now >= self._until:
            self._left, self._until = self._most, now + self._seconds
        taken = min(wanted, self._left)
        self._left -= taken
        return taken


def of_report(report: Report, gaps_topic: str, named: int) -> Iterator[Log]:
    """What of a report is more than numbers.

    Args:
        named: so many of the skipped gaps are named.
    """
    for gap in report.skipped[:named]:
        times = {name: format_time(gap[name]) for name in _TIMES if name in gap}
        yield warning("gap skipped", **gap | times)
    unnamed = report.counts.gaps_skipped - min(named, len(report.skipped))
    if unnamed > 0:
        yield warning(
            "more gaps skipped; each is on the topic of gaps", count=unnamed, topic=gaps_topic
        )
    for row in report.dead:
        yield warning("refused, written to the topic of dead letters", **row)
    for jump in report.jumps:
        yield warning(
            "unexpected version of this application on the topic: another process wrote it, or"
            " versions before it are missing",
            **jump,
        )
    for topic in report.made_again:
        yield warning("the topic was deleted and created again; its records are lost", topic=topic)
    if count := report.not_ours.get("unrecognised", 0):
        yield warning(
            "records on the topics were not written by this publisher; they are ignored",
            records=count,
        )
    if report.restored:
        yield warning(
            "the broker had left committed transactions open; their records were published"
            " again, before anything after them",
            records=report.restored,
        )
    if report.rebuilt is not None:
        yield warning(
            "an index was damaged, and is rebuilt from the topic",
            shard=report.shard,
            damage=report.rebuilt,
        )
    if report.copied_from is not None:
        yield Log(
            "info",
            "this machine had no index of the shard: a copy was fetched, and what is newer was read"
            " back from the topic",
            {"shard": report.shard, "copy": report.copied_from, "records": report.folded},
        )
    if report.baseline is not None:
        yield warning(
            "the topic was cut by retention and the index is new, or older than what was"
            " cut: events created before count as published",
            shard=report.shard,
            before=format_time(report.baseline),
        )
    if report.repeats_after is not None:
        yield warning(
            "retention has removed records from the topic that the index has not read:"
            " events among them that were created later than this are published again",
            shard=report.shard,
            after=format_time(report.repeats_after),
        )
    if report.counts.gaps_vanished:
        yield warning(
            "holds ended: the events above the gap were deleted", count=report.counts.gaps_vanished
        )


def another_server(before: str, now: str) -> Log:
    """The address leads to another database server."""
    return warning(
        "another database server answers than before: a failover, a restored copy, or"
        " another store. What it has and the former had not is published; events that are"
        " missing on it stay on the topic; an event that it has under a version that was"
        " published as another event becomes a dead letter (admission.version_conflict)."
        " `eventpub verify` compares the whole",
        before=before,
        now=now,
    )


def clock_went_back(seconds: float, position: int) -> Log:
    """The database's clock was set."""
    return warning(
        "the database's clock went back: what is created until it has caught up "
        "lies below the position, where the recount finds it",
        seconds=round(seconds, 3),
        position=format_time(position),
    )


def first_versions_missing(aggregates: int, first_version: int) -> Log:
    """Very many aggregates begin above the first version."""
    return warning(
        "very many aggregates begin above the first version and wait for it, until their gaps"
        " are skipped: is store.first_version wrong, or were the first events archived?"
        " read.start leaves out what was created before a time",
        aggregates=aggregates,
        first_version=first_version,
    )


def rows_of_the_past(rows: int, oldest: int, now: int) -> Log:
    """Rows are committed that were created before the horizon."""
    return warning(
        "rows were committed now that were created before the horizon of the recount; their"
        " buckets are counted again, which publishes them. Only the newest ids are sampled: no"
        " such row is missed with a recount.horizon above that age, or GRANT PROCESS",
        code="store.rows_in_past",
        rows=rows,
        oldest=format_time(oldest),
        seconds=round((now - oldest) / 1e6),
    )


def rows_of_the_future(seconds: float) -> Log:
    """The newest row lies in the future."""
    return warning(
        "the newest event lies in the future, and is published when its time has come; if"
        " writers' sessions keep another time zone, set store.time_zone to theirs",
        code="store.rows_in_future",
        seconds=round(seconds),
    )
