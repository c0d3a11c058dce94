"""What the log says of shards' reports, without saying it a thousand times."""

from __future__ import annotations

from collections.abc import Iterator

from eventpub.channel import Report
from eventpub.config import Config
from eventpub.coordinator import wording
from eventpub.coordinator.events import Log
from eventpub.coordinator.progress import Progress

_MANY_BEGIN_ABOVE = 1_000
"""Aggregates without their first version from which on that is said."""


class ReportLog:
    """Pure: times are arguments, s."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._gaps_named = wording.Named()
        self._warns_at = _MANY_BEGIN_ABOVE
        self._warns_of_passed = 1

    def lines(self, report: Report, progress: Progress, now: float) -> Iterator[Log]:
        """What is to be said of a report.

        Args:
            progress: with this report.
        """
        named = self._gaps_named.take(len(report.skipped), now)
        yield from wording.of_report(report, self._config.sink.gaps_topic, named)
        begin_above, passed_over = progress.begin_above, progress.without_identity
        if begin_above >= self._warns_at:
            self._warns_at = 10 * begin_above
            yield wording.first_versions_missing(begin_above, self._config.store.first_version)
        if passed_over >= self._warns_of_passed:
            self._warns_of_passed = 10 * passed_over
            yield wording.warning(
                "rows without aggregate_id or version are passed over, as store.without_identity"
                " says",
                rows=passed_over,
            )
