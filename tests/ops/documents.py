"""Status documents of publishers that never ran: made by a coordinator, as real ones are."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Any

from eventpub import __version__
from eventpub.admission.model import Hold
from eventpub.channel import LATENCY_BOUNDS
from eventpub.coordinator import events as e
from eventpub.coordinator.status import status
from tests.coordinator.life import SECOND, at, some_rows, streaming

IDENTITY = {
    "version": __version__,
    "app": "orders",
    "table": "events",
    "topic": "orders.events",
    "pid": 4242,
    "host": "db-host",
    "run": 7,
    "started_at": round(time.time() - 5_400, 3),
}

_STEPS = {"read": 0.011, "index": 0.006, "backtrack": 0.002, "admit": 0.004, "publish": 0.047}


def document() -> dict[str, Any]:
    """Of a publisher with two shards that works, and has published."""
    life, lanes = streaming()
    for shard, lane in enumerate(lanes):
        counts = [0] * (len(LATENCY_BOUNDS) + 1)
        counts[5:7] = [900, 100]
        life.reports(
            lane,
            position=at(2_000),
            low=at(2_000),
            published=1_000,
            counts=some_rows(1_000),
            seconds=dict(_STEPS),
            latency=counts,
            latency_sum=930.0,
            index_bytes=(shard + 3) << 20,
        )
    life.on(e.Done(e.CheckTopic({})))
    life.on(e.Done(e.MeasureLag(at(2_000)), e.LagMeasured(at(2_000), at(2_000), 0.0, 0)))
    life.coordinator.health.written(life.now)
    made: dict[str, Any] = json.loads(json.dumps(IDENTITY | status(life.coordinator, life.now)))
    return made


def hold(aggregate_id: str, first_missing: int, seen: int, *, now: int, **changes: Any) -> Any:
    """An open gap as `/gaps` shows it, 90 s old."""
    usual: dict[str, Any] = {"attempts": 5, "next_attempt": now + 12 * SECOND}
    given = {"first_seen": now - 90 * SECOND, "since": now - 91 * SECOND} | usual | changes
    return asdict(Hold(aggregate_id, first_missing, seen, **given))
