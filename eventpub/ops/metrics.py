"""The status as Prometheus metrics: one table, from which docs/metrics.md is generated, too."""

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

Status: TypeAlias = dict[str, Any]
"""As of `coordinator.status`."""
Samples: TypeAlias = list[tuple[list[str], Any]]
"""Values of the labels, and the number, or a histogram; without a number it is left out."""


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        name: as a scrape shows it.
        text: what it means, as Markdown.
        samples: takes them from a status.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    samples: Callable[[Status], Samples]
    labels: tuple[str, ...] = ()

    def family(self, status: Status) -> Any:
        """The metric as Prometheus' client knows it."""
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
    return Metric(name, "gauge", text, lambda status: [([], value(status))])


def _counter(name: str, key: str, text: str) -> Metric:
    """Args: key: of `counters` in the status."""
    return Metric(name, "counter", text, lambda status: [([], status["counters"].get(key, 0))])


def _by_shard(name: str, key: str, text: str) -> Metric:
    """Args: key: of each of `shards` in the status."""

    def samples(status: Status) -> Samples:
        return [([str(shard["shard"])], shard[key]) for shard in status["shards"]]

    return Metric(name, "gauge", text, samples, ("shard",))


def _up(status: Status) -> Samples:
    names = ("app", "topic", "version")
    return [([status[name] for name in names], float(status["is_alive"]))]


def _health(status: Status) -> Samples:
    numbers = {"ok": 1.0, "warn": 0.5, "error": 0.0}
    return [([check["name"]], numbers.get(check["state"])) for check in status["checks"]]


METRICS = (
    Metric(
        "eventpub_up",
        "gauge",
        "1 while the publisher works; 0: it hangs, its process answers but does nothing else",
        _up,
        ("app", "topic", "version"),
    ),
    Metric(
        "eventpub_health",
        "gauge",
        "1 where a check is ok, 0.5 where it warns, 0 where it"
        " [fails](operations.md#see-what-it-does). Checks: `database`, `boundary`, `publishing`,"
        " `shard 0` … , `index`, `broker`",
        _health,
        ("check",),
    ),
    _gauge("eventpub_paused", "1 after `eventpub pause`", lambda s: float(s["is_paused"])),
    _gauge(
        "eventpub_lag_seconds",
        "age below the boundary of the oldest event that is not published, held ones included; 0:"
        " all are. It grows while the database does not answer",
        lambda s: s["lag"]["seconds"],
    ),
    _gauge(
        "eventpub_lag_events",
        "events that are not read yet (at most 100,000 are counted), plus one for each aggregate"
        " that waits",
        lambda s: s["lag"]["events"],
    ),
    _gauge(
        "eventpub_last_poll_age_seconds",
        "seconds since the database answered a poll of the boundary, which is not polled while no"
        " shard is published; missing until the first answer",
        lambda s: s["poll_age_seconds"],
    ),
    _gauge(
        "eventpub_holds_open",
        "aggregates that wait for a missing version",
        lambda s: s["holds_open"],
    ),
    _counter("eventpub_rows_read_total", "rows_read", "rows of the event table that were read"),
    _counter("eventpub_events_published_total", "published", "events made visible on the topic"),
    _counter(
        "eventpub_duplicates_dropped_total",
        "duplicates",
        "rows that were read again and dropped: their events are on the topic already (after a"
        " restart, or where windows overlap); none is published twice",
    ),
    _counter("eventpub_gaps_opened_total", "gaps_opened", "aggregates found to miss a version"),
    _counter("eventpub_gaps_filled_total", "gaps_filled", "gaps whose missing versions came"),
    _counter(
        "eventpub_gaps_skipped_total",
        "gaps_skipped",
        "gaps that were skipped (one may be several versions); each is recorded on `<topic>.gaps`",
    ),
    _counter(
        "eventpub_gaps_vanished_total",
        "gaps_vanished",
        "gaps above which the events were deleted, so that nothing waits any longer",
    ),
    _counter(
        "eventpub_events_late_total",
        "late",
        "late events: they came after their version had been skipped; without those that"
        " `eventpub dead retry` publishes",
    ),
    _counter(
        "eventpub_events_dead_total",
        "dead",
        "dead letters: rows that were refused, and are on `<topic>.dead`",
    ),
    _counter(
        "eventpub_events_conflicting_total",
        "conflicts",
        "dead letters because another event had been published under the version",
    ),
    _counter(
        "eventpub_rows_in_past_total",
        "rows_in_past",
        "rows that were committed with times behind what had been read by more than the horizon",
    ),
    _gauge(
        "eventpub_rows_ahead",
        "rows whose `create_time` lies in the future: they are published when it has come; some"
        " 10,000 are counted at most",
        lambda s: s["lag"]["ahead_rows"],
    ),
    _counter(
        "eventpub_rows_without_identity_total",
        "without_identity",
        "rows without an aggregate or a version, read and passed over (`store.without_identity`)",
    ),
    _counter(
        "eventpub_recount_found_total",
        "recount_found",
        "events that only a recount has found: they were committed late",
    ),
    _counter(
        "eventpub_transactions_passed_total",
        "passed",
        "transactions that were open for longer than the boundary waits for one (`read.max_wait`)",
    ),
    _counter(
        "eventpub_log_lines_dropped_total",
        "log_lines_dropped",
        "log lines that were not written because stderr was not drained for too long (a log driver"
        " that blocks); publishing continues",
    ),
    _counter(
        "eventpub_producers_replaced_total",
        "replaced",
        "Kafka producers replaced after a transaction that was aborted (as where a record is"
        " refused), or whose answer left open whether it was committed",
    ),
    _by_shard("eventpub_shard_lag_seconds", "lag_seconds", "the lag of each shard"),
    _by_shard("eventpub_shard_holds_open", "holds", "aggregates of each shard that wait"),
    _by_shard(
        "eventpub_index_bytes", "index_bytes", "what the index of each shard takes on the disk"
    ),
    Metric(
        "eventpub_publish_latency_seconds",
        "histogram",
        "from `create_time` to the commit in Kafka, of each event",
        lambda status: [([], status["latency"])],
    ),
    Metric(
        "eventpub_batch_seconds",
        "histogram",
        "what each step of a transaction takes. Steps: `index` (reading and writing the index on"
        " disk), `admit` (deciding of each row: publish, hold, skip or refuse), `backtrack`"
        " (looking missing versions up in the database, by key), `publish` (the Kafka"
        " transaction), others that are rare, and `read`: the wait for rows, of the database while"
        " there are some, else for new events",
        lambda status: [([step], found) for step, found in sorted(status["steps"].items())],
        ("step",),
    ),
)


class _OfStatus(Collector):
    """Asks for the status at each scrape."""

    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status

    def collect(self) -> Iterator[Any]:
        status = self._status()
        for metric in METRICS:
            yield metric.family(status)


def exposition(status: Callable[[], Status]) -> bytes:
    """The text that Prometheus scrapes."""
    registry = CollectorRegistry()
    registry.register(_OfStatus(status))
    return generate_latest(registry)
