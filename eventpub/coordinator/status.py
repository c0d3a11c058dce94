"""The publisher's status as one document, from which everything shown is derived."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from eventpub.coordinator.coordinator import Coordinator
from eventpub.coordinator.health import STALLED_AFTER, NamedCheck
from eventpub.coordinator.progress import Rate, ShownLag
from eventpub.coordinator.shards import Shard
from eventpub.log import dropped

_BUSY_FOR = 4.0
"""Seconds without an answer after which it is reported."""


def status(coordinator: Coordinator, now: float) -> dict[str, Any]:
    """The status document; call in the coordinator's thread.

    Returns:
        JSON-serializable. Times that end in ``_at``, ``since`` and ``last_ok`` are Unix times in s,
        positions µs on the database's clock. ``lag.seconds`` is the age below the boundary of the
        oldest unpublished event; it grows while the database does not answer. ``lag.events`` counts
        unread events, at most `workers.MOST_EVENTS`, plus one per held aggregate; null: unknown.
        Rates are events per second.
    """
    is_paused, paused_by = coordinator.pauses.is_paused, coordinator.pauses.paused_by
    unread = coordinator.lag.unread_seconds(now)
    checks = coordinator.health.checks(now, unread, paused_by=paused_by if is_paused else None)
    shards: list[dict[str, Any]] = []
    for shard in coordinator.shards:
        error = coordinator.health.errors.get(shard.number)
        at = None if error is None else unix(error.at, now)
        shards.append(
            {
                "lag_seconds": lag_seconds(coordinator, now, shard),
                "is_running": shard.lane is not None,
                "in_work": coordinator.in_work(shard),
                "last_error": None if error is None else asdict(error) | {"at": at},
            }
        )
    low, seen_at = coordinator.durable.low, coordinator.changes.seen_at
    return document(
        coordinator.lag, coordinator.rate, low, checks=checks, shards=shards, now=now
    ) | {
        "state": _state(coordinator),
        "is_paused": is_paused,
        "paused_by": paused_by,
        "is_alive": now - coordinator.seen_at < STALLED_AFTER,
        "poll_age_seconds": None if seen_at is None else round(now - seen_at, 3),
    }


def document(  # noqa: PLR0913 (what all of it is made of)
    lag: ShownLag,
    rate: Rate,
    low: int,
    *,
    checks: Iterable[NamedCheck],
    shards: Iterable[dict[str, Any]],
    now: float,
) -> dict[str, Any]:
    """What both engines show; everything created up to `low`, µs, is published."""
    progress = lag.progress

    def of_check(check: NamedCheck) -> dict[str, Any]:
        times = {"since": unix(check.since, now), "last_ok": unix(check.last_ok, now)}
        return asdict(check) | times

    def of_shard(number: int, facts: dict[str, Any]) -> dict[str, Any]:
        known = progress.per_shard.get(number, {})
        shown = {name: known.get(name) for name in ("position", "next_due", "index_bytes")}
        shown |= {name: known.get(name, 0) for name in ("holds", "published")}
        return {"shard": number, "where": known.get("where", "")} | shown | facts

    return {
        "at": round(time.time(), 3),
        "position": progress.position,
        "database_time": progress.time,
        "lag": {
            "seconds": round(lag.seconds(low, now), 3),
            "events": lag.events(now),
            "ahead_seconds": round(progress.ahead_seconds, 3),
            "ahead_rows": progress.rows_ahead,
        },
        "rates": {"published": round(rate.at(now), 1)},
        "watermark": progress.watermark,
        "counters": progress.counters() | {"log_lines_dropped": dropped()},
        "holds_open": progress.holds_open,
        "latency": asdict(progress.latency),
        "steps": {step: asdict(found) for step, found in progress.steps.items()},
        "last_error": progress.last_error,
        "checks": [of_check(check) for check in checks],
        "shards": [of_shard(number, facts) for number, facts in enumerate(shards)],
    }


def unix(at: float | None, now: float) -> float | None:
    """Convert monotonic time to Unix time, s."""
    return None if at is None else round(time.time() - (now - at), 3)


def _state(coordinator: Coordinator) -> str:
    if coordinator.runners.is_stopping:
        return "stopping"
    if any(shard.report is None for shard in coordinator.shards):
        return "starting"
    return "paused" if coordinator.pauses.is_paused else "running"


def lag_seconds(coordinator: Coordinator, now: float, shard: Shard | None = None) -> float:
    """Age below the boundary of the oldest unpublished event, held ones included."""
    shown = coordinator.lag
    lag = shown.seconds(coordinator.durable.low, now)
    report = None if shard is None else shard.report
    if shard is None or report is None or not lag or not shown.is_known(now):
        return lag
    if shard.sent or report.holds or report.position < coordinator.windows.planned:
        return min(lag, max(0.0, shown.below(report.low)))
    # nothing is planned: the next rows may be this shard's
    is_published = shard.lane is not None and not coordinator.pauses.is_paused
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
