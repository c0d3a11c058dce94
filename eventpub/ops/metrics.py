"""The status as Prometheus metrics. Names and labels: docs/metrics.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

_COUNTERS = {
    "eventpub_rows_read": ("rows_read", "Rows of the event table that were read"),
    "eventpub_events_published": ("published", "Events made visible on the topic"),
    "eventpub_duplicates_dropped": (
        "duplicates",
        "Rows that were read again, and dropped: they are published",
    ),
    "eventpub_gaps_opened": ("gaps_opened", "Gaps: aggregates found to miss a version"),
    "eventpub_gaps_filled": ("gaps_filled", "Gaps whose missing versions came"),
    "eventpub_gaps_skipped": ("gaps_skipped", "Gaps that were given up, recorded on <topic>.gaps"),
    "eventpub_gaps_vanished": ("gaps_vanished", "Gaps above which the events were deleted"),
    "eventpub_events_late": (
        "late",
        "Events that came after their gap was skipped, without those of dead retry",
    ),
    "eventpub_events_dead": ("dead", "Rows that were refused, recorded on <topic>.dead"),
    "eventpub_events_conflicting": ("conflicts", "Dead letters that differ from what is published"),
    "eventpub_rows_without_identity": (
        "without_identity",
        "Rows without an aggregate or a version, passed over",
    ),
    "eventpub_recount_found": ("recount_found", "Events that only a recount has found"),
    "eventpub_rows_in_past": ("rows_in_past", "Rows that came with times behind what was read"),
    "eventpub_transactions_passed": ("passed", "Transactions that were not waited for any longer"),
    "eventpub_log_lines_dropped": (
        "log_lines_dropped",
        "Log lines that were not written: stderr was not drained",
    ),
    "eventpub_producers_replaced": (
        "replaced",
        "Producers replaced after an abort or an indefinite answer",
    ),
}
"""Name without ``_total`` → name in the status, help."""


class _OfStatus(Collector):
    """Asks for the status at each scrape."""

    def __init__(self, status: Callable[[], dict[str, Any]]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        yield from families(self._status())


def families(status: dict[str, Any]) -> Iterator[Metric]:
    """The metrics of a status document, see `coordinator.status`."""
    up = GaugeMetricFamily(
        "eventpub_up", "1 while the publisher's loop turns", labels=["app", "topic", "version"]
    )
    up.add_metric([status["app"], status["topic"], status["version"]], float(status["is_alive"]))
    yield up
    for name, (key, text) in _COUNTERS.items():
        yield CounterMetricFamily(name, text, value=status["counters"].get(key, 0))
    for name, text, value in (
        ("eventpub_holds_open", "Aggregates that wait for a missing version", status["holds_open"]),
        (
            "eventpub_lag_seconds",
            "Age below the boundary of the oldest event that is not published; 0: none is",
            status["lag"]["seconds"],
        ),
        (
            "eventpub_lag_events",
            "Events below the boundary that are not read yet (100000: that many or more), and"
            " aggregates that wait for a missing version",
            status["lag"]["events"],
        ),
        (
            "eventpub_rows_ahead",
            "Events of the future, held until their time has come (10000: that many or more)",
            status["lag"]["ahead_rows"],
        ),
        ("eventpub_paused", "1 while the publisher is paused", float(status["is_paused"])),
        (
            "eventpub_last_poll_age_seconds",
            "Seconds since the database answered a poll of the boundary",
            status["poll_age_seconds"],
        ),
    ):
        if value is not None:
            yield GaugeMetricFamily(name, text, value=value)
    yield _by_shard(status, "eventpub_shard_lag_seconds", "The lag of each shard, s", "lag_seconds")
    yield _by_shard(
        status, "eventpub_index_bytes", "What the index of a shard takes, bytes", "index_bytes"
    )
    yield _by_shard(status, "eventpub_shard_holds_open", "Aggregates of a shard that wait", "holds")
    health = GaugeMetricFamily(
        "eventpub_health", "1 where a check is ok, 0.5 where it warns, 0: wrong", labels=["check"]
    )
    for check in status["checks"]:
        if check["state"] != "unknown":
            health.add_metric([check["name"]], {"ok": 1.0, "warn": 0.5}.get(check["state"], 0.0))
    yield health
    latency = HistogramMetricFamily(
        "eventpub_publish_latency_seconds", "From create_time to the commit in Kafka, of each event"
    )
    _add(latency, [], status["latency"])
    yield latency
    steps = HistogramMetricFamily(
        "eventpub_batch_seconds", "What each step of a transaction takes", labels=["step"]
    )
    for step, found in sorted(status["steps"].items()):
        _add(steps, [step], found)
    yield steps


def _by_shard(status: dict[str, Any], name: str, text: str, key: str) -> Metric:
    family = GaugeMetricFamily(name, text, labels=["shard"])
    for shard in status["shards"]:
        if shard[key] is not None:
            family.add_metric([str(shard["shard"])], shard[key])
    return family


def _add(family: HistogramMetricFamily, labels: list[str], found: dict[str, Any]) -> None:
    below, buckets = 0, []
    for bound, count in zip([*found["bounds"], "+Inf"], found["counts"], strict=True):
        below += count
        buckets.append((str(bound), float(below)))
    family.add_metric(labels, buckets, found["sum"])


def exposition(status: Callable[[], dict[str, Any]]) -> bytes:
    """The text that Prometheus scrapes."""
    registry = CollectorRegistry()
    registry.register(_OfStatus(status))
    return generate_latest(registry)
