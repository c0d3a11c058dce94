"""The one document of how a publisher stands: all that is shown anywhere is made of it.

`eventpub status`, `/status`, `/metrics`, the dashboard and what a stopped publisher leaves behind
show the same numbers, since they are taken here, once.
"""

from __future__ import annotations

import re
import time
from dataclasses import asdict
from typing import Any

from eventpub.coordinator.coordinator import Coordinator
from eventpub.coordinator.health import STALLED_AFTER, Check

_BUSY_FOR = 4.0
"""Seconds without an answer after which it is reported: with the question, less than 10 s."""


def status(coordinator: Coordinator, now: float) -> dict[str, Any]:
    """The document; to be made where the coordinator is changed, in its loop's thread.

    Args:
        now: the machine's monotonic time, s.

    Returns:
        JSON-serializable. Times that end in ``_at``, ``since`` and ``last_ok`` are Unix times in s,
        positions µs on the database's clock. ``lag.seconds`` is the age below the boundary of the
        oldest event that is not published, held ones included; while the database does not answer
        it grows by the time since its last answer. ``lag.events`` is of those not read yet, at most
        `lag.MOST_EVENTS`, and one for each aggregate that waits; null: not known, as while the
        database does not answer. Rates are events a second.
    """
    wall, progress = time.time(), coordinator.progress
    lag = coordinator.lag_seconds(now)
    is_paused = coordinator.is_paused
    unread = coordinator.unread_seconds(now)
    paused_by = coordinator.paused_by if is_paused else None
    checks = coordinator.health.checks(now, unread, paused_by=paused_by)
    seen_at = coordinator.database_seen_at

    def unix(at: float | None) -> float | None:
        return None if at is None else round(wall - (now - at), 3)

    def of_check(check: Check) -> dict[str, Any]:
        times = {"since": unix(check.since), "last_ok": unix(check.last_ok)}
        return asdict(check) | times

    shards = []
    for shard in coordinator.shards:
        known = progress.per_shard.get(shard.number, {})
        error = coordinator.health.errors.get(shard.number)
        shards.append(
            {
                "shard": shard.number,
                "where": known.get("where", ""),
                "position": known.get("position"),
                "lag_seconds": coordinator.shard_lag_seconds(shard, now),
                "holds": known.get("holds", 0),
                "next_due": known.get("next_due"),
                "published": known.get("published", 0),
                "index_bytes": known.get("index_bytes"),
                "lease": shard.lease,
                "is_running": shard.lane is not None,
                "in_work": coordinator.in_work(shard),
                "last_error": None if error is None else asdict(error) | {"at": unix(error.at)},
            }
        )
    return {
        "state": coordinator.state,
        "at": round(wall, 3),
        "is_paused": is_paused,
        "paused_by": coordinator.paused_by,
        "is_alive": now - coordinator.seen_at < STALLED_AFTER,
        "position": progress.position,
        "database_time": progress.time,
        "lag": {
            "seconds": round(lag, 3),
            "events": coordinator.lag_events(now),
            "ahead_seconds": round(progress.ahead_seconds, 3),
            "ahead_rows": progress.rows_ahead,
        },
        "rates": {"published": round(coordinator.published_per_second(now), 1)},
        "poll_age_seconds": None if seen_at is None else round(now - seen_at, 3),
        "watermark": progress.watermark,
        "counters": progress.counters(),
        "holds_open": progress.holds_open,
        "latency": asdict(progress.latency),
        "steps": {step: asdict(found) for step, found in progress.steps.items()},
        "last_error": progress.last_error,
        "checks": [of_check(check) for check in checks],
        "shards": shards,
    }


def unanswered(document: dict[str, Any], since: float, now: float) -> dict[str, Any]:
    """The last document of a publisher that does not answer: what was ok then is unknown now.

    For some seconds it may merely be busy, and the document is as it was.

    Args:
        since: when its loop was last seen to turn, Unix time in s.
        now: Unix time, s.
    """
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
    """Whether no check is wrong; one that only warns is not."""
    return all(check["state"] != "error" for check in document["checks"])


def notable(document: dict[str, Any]) -> list[tuple[str, str, str]]:
    """What is written down at once when it changes: the checks, without how long ago it was."""
    return [
        (check["name"], check["state"], re.sub(r"\b\d+ s\b", "", check["message"]))
        for check in document["checks"]
    ]
