"""The status as Prometheus metrics, from one table that also generates docs/metrics.md."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

from eventpub.coordinator.progress import COUNTERS

Status: TypeAlias = dict[str, Any]
Samples: TypeAlias = list[tuple[list[str], Any]]
"""Label values with a number or a histogram; samples without a number are left out."""


@dataclass(frozen=True)
class Metric:
    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    samples: Callable[[Status], Samples]
    labels: tuple[str, ...] = ()

    def family(self, status: Status) -> Any:
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", self.text).replace("`", "")
        samples = [(labels, value) for labels, value in self.samples(status) if value is not None]
        if self.kind == "histogram":
            histogram = HistogramMetricFamily(self.name, plain, labels=self.labels)
            for labels, found in samples:
                histogram.add_metric(labels, _buckets(found), found["sum"])
            return histogram
        kind = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family: Any = kind(self.name, plain, labels=self.labels)
        for labels, value in samples:
            family.add_metric(labels, value)
        return family


def _buckets(found: dict[str, Any]) -> list[tuple[str, float]]:
    below, buckets = 0, []
    for bound, count in zip([*found["bounds"], "+Inf"], found["counts"], strict=True):
        below += count
        buckets.append((str(bound), float(below)))
    return buckets


def _gauge(name: str, text: str, value: Callable[[Status], Any]) -> Metric:
    return Metric(f"eventpub_{name}", "gauge", text, lambda status: [([], value(status))])


def _counter(name: str, key: str, text: str) -> Metric:
    name = f"eventpub_{name}_total"
    return Metric(name, "counter", text, lambda status: [([], status["counters"].get(key, 0))])


def _by_shard(name: str, key: str, text: str) -> Metric:

    def samples(status: Status) -> Samples:
        return [([str(shard["shard"])], shard[key]) for shard in status["shards"]]

    return Metric(f"eventpub_{name}", "gauge", text, samples, ("shard",))


_IDENTITY = ("app", "topic", "version")
_HEALTH = {"ok": 1.0, "warn": 0.5, "error": 0.0}

METRICS = (
    Metric(
        "eventpub_up",
        "gauge",
        "1 while the publisher's loop is running",
        lambda s: [([s[name] for name in _IDENTITY], float(s["is_alive"]))],
        _IDENTITY,
    ),
    Metric(
        "eventpub_health",
        "gauge",
        "1 where a check is ok, 0.5 where it warns, 0 where it"
        " [fails](operations.md#see-what-it-does)",
        lambda s: [([check["name"]], _HEALTH.get(check["state"])) for check in s["checks"]],
        ("check",),
    ),
    _gauge("paused", "1 after `eventpub pause`", lambda s: float(s["is_paused"])),
    _gauge(
        "lag_seconds",
        "age below the boundary of the oldest event that is not published, held ones included; 0:"
        " all are. It grows while the database does not answer",
        lambda s: s["lag"]["seconds"],
    ),
    _gauge(
        "lag_events",
        "events that are not read yet (at most 20,000 are counted), plus one for each aggregate"
        " that waits",
        lambda s: s["lag"]["events"],
    ),
    _gauge(
        "last_poll_age_seconds",
        "seconds since the database answered a poll of the boundary, which the engine threads does"
        " not make while no shard is published",
        lambda s: s["poll_age_seconds"],
    ),
    _gauge("holds_open", "aggregates that wait for a missing version", lambda s: s["holds_open"]),
    *(
        _counter(counter.metadata["metric"], counter.name, counter.metadata["meaning"])
        for counter in COUNTERS
        if counter.metadata["metric"]
    ),
    _counter(
        "log_lines_dropped",
        "log_lines_dropped",
        "log lines not written because stderr was not drained for too long",
    ),
    _gauge(
        "rows_ahead",
        "rows with a `create_time` in the future, published when that time comes; some 10,000 are"
        " counted at most",
        lambda s: s["lag"]["ahead_rows"],
    ),
    _by_shard("shard_lag_seconds", "lag_seconds", "the lag of each shard"),
    _by_shard("shard_holds_open", "holds", "aggregates of each shard that wait"),
    _by_shard("index_bytes", "index_bytes", "size of each shard's index on disk"),
    Metric(
        "eventpub_publish_latency_seconds",
        "histogram",
        "from `create_time` to the commit in Kafka, of each event",
        lambda status: [([], status["latency"])],
    ),
    Metric(
        "eventpub_batch_seconds",
        "histogram",
        "what each step of a transaction takes: `read` (waiting for rows), `index` (reading and"
        " writing the index), `admit`, `backtrack` (looking up missing versions), `publish`",
        lambda status: [([step], found) for step, found in sorted(status["steps"].items())],
        ("step",),
    ),
)


class _OfStatus(Collector):
    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status

    def collect(self) -> Iterator[Any]:
        status = self._status()
        for metric in METRICS:
            yield metric.family(status)


def exposition(status: Callable[[], Status]) -> bytes:
    registry = CollectorRegistry()
    registry.register(_OfStatus(status))
    return generate_latest(registry)
