"""What is known of a publisher, whichever its engine, and its status as one document, from which
everything shown is derived."""

from __future__ import annotations

import re
import time
from dataclasses import asdict, replace
from typing import Any

from eventpub.channel import Ended, Report
from eventpub.config import Config
from eventpub.coordinator import events as e
from eventpub.coordinator.database_changes import Newest
from eventpub.coordinator.health import HERE, STALLED_AFTER, Health, NamedCheck, Schedule
from eventpub.coordinator.position import DurableState, StartState
from eventpub.coordinator.progress import (
    COUNTERS,
    PER_SHARD,
    Progress,
    Rate,
    ReportLog,
    ShownLag,
)
from eventpub.coordinator.requests import Requests
from eventpub.coordinator.shards import FROZEN_AFTER, Failures, Shard, has_got_on
from eventpub.log import dropped

_BUSY_FOR = 4.0
"""Seconds without an answer after which it is reported."""


class Overview:
    """What both engines know of their shards, show, and remember. Times are monotonic s.

    Attributes:
        seen_at: when something last happened in the engine's loop.
        polled_at: when the database last answered a poll of the boundary.
    """

    where = HERE
    gives_up = True
    """Whether a request may make a runner fail, and is given up after two."""

    def __init__(self, config: Config, begin: StartState, do: e.Do) -> None:
        self._do = do
        self.seen_at = float("-inf")
        self.polled_at: float | None = None
        self.shards = [Shard(number) for number in range(config.run.shards)]
        self.progress = Progress(server=begin.server)
        self.durable = DurableState(begin)
        self.progress.position = self.durable.position
        self.health = Health(self.shards, do)
        self.lag = ShownLag(self.progress)
        self.rate = Rate()
        self.is_paused, self.paused_by = begin.pause
        self.requests = Requests(self.shards, begin.partitions, do)
        for request, reply in begin.requests:
            self.requests.receive(request, reply, is_kept=True)
        self.failures = Failures(config)
        self.schedule = Schedule(config.sink.delivery == "exactly_once")
        self._report_log = ReportLog(config)

    @property
    def is_stopping(self) -> bool:
        return False

    @property
    def planned(self) -> int:
        """Everything created up to here is to be published, µs."""
        return self.lag.boundary

    def in_work(self, shard: Shard) -> int:
        compares = shard.compares_since is not None
        return len(shard.sent) + self.requests.under_way(shard) + compares

    def see(self, event: e.Event, now: float) -> None:
        """Note what an event says of the publisher's health, and of what is in flight."""
        if self.seen_at < 0:
            self.lag.begin(now)
            self.rate.add(now, 0)
        elif now - self.seen_at > FROZEN_AFTER:
            self.failures.woke_at = now
        self.seen_at = now
        self.health.observe(event, now)
        if isinstance(event, e.Done) and not isinstance(event.command, e.Sample):  # may take two
            self.schedule.is_done(type(event.command))
            self.failures.is_done(type(event.command))
            if isinstance(event.command, e.MeasureLag):
                self.lag.measured(event.result, self.durable.position, now)
        if isinstance(event, e.RequestReceived):
            self.requests.receive(event.request, event.reply)
        elif isinstance(event, e.Withdrawn):
            self.requests.withdraw(event.id)
        elif isinstance(event, e.Done) and isinstance(event.command, e.Remember):
            self.health.written(now)
        elif isinstance(event, e.Failed):
            command = event.command
            self.schedule.is_done(type(command))
            if isinstance(command, e.Remember):
                self.durable.is_not_written(command)
            self.schedule.met(event.error, now)
        elif isinstance(event, Ended) and event.error is not None:
            if self.gives_up:
                self.requests.runner_failed(self.shards[event.shard], event.error)
            self.schedule.met(event.error, now)

    def take_pause(self, event: e.PauseAsked) -> None:
        if event.is_paused != self.is_paused:
            text = "paused: run `eventpub resume` to publish again"
            self._do(e.Log("info", text if event.is_paused else "resumed", {"by": event.by}))
        self.is_paused, self.paused_by = event.is_paused, event.by

    def account(self, report: Report, uncounted_since: int | None, now: float) -> None:
        """Add a report that its shard has taken to what is remembered, shown and answered."""
        self.durable.take(self.shards, report, uncounted_since)
        # a paused runner gets no windows
        is_well = has_got_on(report) or self.is_paused
        self.failures.is_well(report.shard, now, has_progressed=is_well)
        if report.counts.rows or report.published:
            self.schedule.had_rows(now)
        self.progress.add(report, self.where)
        self.progress.position = self.durable.position
        for line in self._report_log.lines(report, self.progress, now):
            self._do(line)
        for request_id, answer in report.answers.items():
            self.requests.answered(request_id, report.shard, answer)

    def write(self, hidden_since: int | None, newest: Newest | None, **where: Any) -> None:
        """Write what must survive the process, if it has changed.

        `hidden_since`: rows below the position that may be unpublished were created after this, µs.
        """
        what = self.durable.document(len(self.shards), self.progress) | where
        what["hidden_since"] = hidden_since
        what["newest"] = newest and [*newest]
        self.durable.write(what, self._do)


def status(overview: Overview, now: float) -> dict[str, Any]:
    """The status document; call in the thread of the engine's loop.

    Returns:
        JSON-serializable. Times that end in ``_at``, ``since`` and ``last_ok`` are Unix times in s,
        positions µs on the database's clock. ``lag.seconds`` is the age below the boundary of the
        oldest unpublished event; it grows while the database does not answer. ``lag.events`` counts
        unread events, at most `workers.MOST_EVENTS`, plus one per held aggregate; null: unknown.
        Rates are events per second.
    """
    is_paused, paused_by = overview.is_paused, overview.paused_by
    progress, lag = overview.progress, overview.lag
    unread = lag.unread_seconds(now)
    checks = overview.health.checks(now, unread, paused_by=paused_by if is_paused else None)
    polled_at = overview.polled_at
    return {
        "at": round(time.time(), 3),
        "state": _state(overview),
        "is_paused": is_paused,
        "paused_by": paused_by if is_paused else "",
        "is_alive": now - overview.seen_at < STALLED_AFTER,
        "poll_age_seconds": None if polled_at is None else round(now - polled_at, 3),
        "position": progress.position,
        "database_time": progress.time,
        "lag": {
            "seconds": round(lag_seconds(overview, now), 3),
            "events": lag.events(now),
            "ahead_seconds": round(progress.ahead_seconds, 3),
            "ahead_rows": progress.rows_ahead,
        },
        "rates": {"published": round(overview.rate.at(now), 1)},
        "watermark": progress.watermark,
        "counters": {each.name: getattr(progress, each.name) for each in COUNTERS}
        | {"log_lines_dropped": dropped()},
        "holds_open": progress.holds_open,
        "latency": asdict(progress.latency),
        "steps": {step: asdict(found) for step, found in progress.steps.items()},
        "last_error": progress.last_error,
        "checks": [_of_check(check, now) for check in checks],
        "shards": [_of_shard(overview, shard, now) for shard in overview.shards],
    }


def _of_check(check: NamedCheck, now: float) -> dict[str, Any]:
    return asdict(check) | {"since": unix(check.since, now), "last_ok": unix(check.last_ok, now)}


def _of_shard(overview: Overview, shard: Shard, now: float) -> dict[str, Any]:
    known = overview.progress.per_shard.get(shard.number, {})
    error = overview.health.errors.get(shard.number)
    return {
        "shard": shard.number,
        "where": known.get("where", ""),
        **{name: known.get(name) for name in ("position", "next_due", "index_bytes")},
        **{name: known.get(name, 0) for name in ("holds", *PER_SHARD)},
        "lag_seconds": lag_seconds(overview, now, shard),
        "is_running": shard.lane is not None,
        "in_work": overview.in_work(shard),
        "last_error": error and {**error, "at": unix(error["at"], now)},
    }


def unix(at: float | None, now: float) -> float | None:
    """Convert monotonic time to Unix time, s."""
    return None if at is None else round(time.time() - (now - at), 3)


def _state(overview: Overview) -> str:
    if overview.is_stopping:
        return "stopping"
    if overview.is_paused:
        return "paused"
    has_begun = all(shard.report is not None for shard in overview.shards)
    return "running" if has_begun else "starting"


def shown(overview: Overview, now: float) -> Progress:
    """The progress with the lag as shown everywhere, held events included."""
    events = overview.lag.events(now)
    return replace(
        overview.progress,
        lag_seconds=lag_seconds(overview, now),
        lag_events=-1 if events is None else events,
    )


def lag_seconds(overview: Overview, now: float, shard: Shard | None = None) -> float:
    """Age below the boundary of the oldest unpublished event, held ones included."""
    shown = overview.lag
    lag = shown.seconds(overview.durable.low, now)
    report = None if shard is None else shard.report
    if shard is None or report is None or not lag or not shown.is_known(now):
        return lag
    if shard.sent or report.holds or report.position < overview.planned:
        return min(lag, max(0.0, shown.below(report.low)))
    # nothing is planned: the next rows may be this shard's
    is_published = shard.lane is not None and not overview.is_paused
    return 0.0 if is_published else shown.unread_seconds(now)


def unanswered(document: dict[str, Any], since: float, now: float) -> dict[str, Any]:
    """Status of a publisher silent since `since`, Unix s: checks that were ok are unknown."""
    seconds = now - since
    if seconds < _BUSY_FOR:
        return document
    text = f"no answer for {seconds:.0f} s: its process is frozen, or waits for a disk or for CPU"
    process = {"name": "process", "state": "error", "message": text, "since": since}
    checks = [
        check | ({"state": "unknown", "since": since} if check["state"] == "ok" else {})
        for check in document["checks"]
    ]
    lag = document["lag"]
    return document | {
        "state": "not answering",
        "is_alive": seconds < STALLED_AFTER,
        "lag": lag | {"seconds": round(lag["seconds"] + seconds, 3), "events": None},
        "rates": {"published": None},
        "checks": [process | {"last_ok": since}, *checks],
    }


def is_ready(document: dict[str, Any]) -> bool:
    return all(check["state"] != "error" for check in document["checks"])


def notable(document: dict[str, Any]) -> list[tuple[str, str, str]]:
    """The checks without their durations: a change is written down at once."""
    return [
        (check["name"], check["state"], re.sub(r"\b\d+ s\b", "", check["message"]))
        for check in document["checks"]
    ]
