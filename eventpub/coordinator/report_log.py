"""What the log says of shards' reports, without saying it a thousand times."""

from __future__ import annotations

from collections.abc import Iterator

from eventpub.channel import Report
from eventpub.config import Config
from eventpub.coordinator import wording
from eventpub.coordinator.events import Log

_MANY_BEGIN_ABOVE = 1_000
"""Aggregates without their first version from which on that is said."""

_OPENED_EVERY = 60.0
"""Seconds between two lines about gaps that were found: late commits open and fill many."""


class ReportLog:
    """Pure: times are arguments, s."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._gaps_named = wording.Named()
        self._warns_at = _MANY_BEGIN_ABOVE
        self._opened = 0
        self._opened_at = float("-inf")

    def lines(self, report: Report, begin_above: int, now: float) -> Iterator[Log]:
        """What is to be said of a report.

        Args:
            begin_above: as of `Progress`, with this report.
        """
        named = self._gaps_named.take(len(report.skipped), now)
        yield from wording.of_report(report, self._config.sink.gaps_topic, named)
        self._opened += report.counts.gaps_opened
        if self._opened and now - self._opened_at >= _OPENED_EVERY:
            text = "aggregates miss a version and are held: eventpub gaps list shows them"
            yield Log("info", text, {"opened": self._opened, "shard": report.shard})
            self._opened, self._opened_at = 0, now
        if begin_above >= self._warns_at:
            self._warns_at = 10 * begin_above
            yield wording.first_versions_missing(begin_above, self._config.store.first_version)
