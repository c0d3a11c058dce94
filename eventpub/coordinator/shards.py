"""Each shard's state, its runner, and which failures stop the publisher.

The next runner starts after the last has ended, so a shard has one in this process. Kafka fences
producers of other processes, and their records are read back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from eventpub.channel import Comparison, Ended, Lane, Report, Stop, Window
from eventpub.config import Config
from eventpub.coordinator.events import (
    CheckOpen,
    CheckTable,
    CheckTopic,
    Command,
    Do,
    Finish,
    Show,
)
from eventpub.coordinator.progress import Progress
from eventpub.errors import EventpubError, SinkError

MOST_PAGES = 4
"""Full pages in flight to a shard."""

MOST_WINDOWS = 16
"""Windows in flight to a shard; later ones become one window when these are done."""

_STALLED = 5.0
"""Seconds after which a full shard that makes no progress no longer delays polls."""

_FIRST_WAIT = 0.25
_LONGEST_WAIT = 10.0
"""Backoff in seconds, doubling, up to librdkafka's longest reconnect backoff."""

_STOPS_WITHIN = 1.2
"""Seconds that runners have to finish when the publisher stops."""


@dataclass
class Sent:
    number: int
    is_page: bool
    at: float


@dataclass
class Shard:
    """One shard, from a run's start to its end. Times are monotonic s.

    Attributes:
        lane: its runner's; None: it has none.
        has_begun: the runner has reported, so has read the topic back.
        is_behind: a window was left out, so that one is due after those sent.
        window, comparison: numbers of the last ones sent to its runner.
        compares_since: when the comparison in flight was sent; None: none is.
        due_sent_for: the last report when a window for due holds was sent.
        start_at, wait: when the next runner starts, and the backoff after the next failure.
        failures: consecutive failed runners.
    """

    number: int
    lane: Lane | None = None
    has_begun: bool = False
    sent: deque[Sent] = field(default_factory=deque)
    is_behind: bool = False
    window: int = 0
    report: Report | None = None
    comparison: int = 0
    compares_since: float | None = None
    due_sent_for: Report | None = None
    start_at: float = 0.0
    wait: float = _FIRST_WAIT
    failures: int = 0

    # -- its runner -------------------------------------------------------------------------------

    def begin(self, lane: Lane) -> None:
        self.lane, self.window = lane, 0

    def end(self) -> None:
        self.lane, self.has_begun = None, False
        self.sent.clear()
        self.is_behind = False
        self.compares_since = None

    def failed(self, now: float, *, at_once: bool = False) -> None:
        """Restart after a backoff, or `at_once` unless one failed before."""
        self.start_at = now if at_once and self.failures == 0 else now + self.wait
        self.wait = min(2 * self.wait, _LONGEST_WAIT)
        self.failures += 1

    # -- what it is sent --------------------------------------------------------------------------

    def send(
        self, window: Window, now: float, *, rows: pa.Table | None = None, is_page: bool = False
    ) -> None:
        if self.lane is None:
            return  # the next runner begins with the last window planned by then
        is_full = self.pages >= MOST_PAGES if is_page else len(self.sent) >= MOST_WINDOWS
        if is_full or (self.is_behind and self.sent):
            self.is_behind = True
            return
        self.window += 1
        self.is_behind = False
        self.sent.append(Sent(self.window, is_page, now))
        self.lane.send(replace(window, number=self.window, rows=rows))

    def compare(self, comparison: Comparison, now: float) -> None:
        is_done = self.report and self.has_begun and self.report.compared >= comparison.number
        if self.lane is not None and comparison.buckets and not is_done:
            self.lane.send(comparison)
            self.comparison = comparison.number
            self.compares_since = now

    @property
    def pages(self) -> int:
        return sum(sent.is_page for sent in self.sent)

    def is_full(self, now: float) -> bool:
        if self.pages < MOST_PAGES or self.is_behind:
            return False
        return now - self.sent[0].at < _STALLED

    @property
    def works_since(self) -> float | None:
        """When the oldest unfinished work was sent."""
        since = [*(sent.at for sent in self.sent), self.compares_since]
        return min((at for at in since if at is not None), default=None)

    def is_idle(self) -> bool:
        return self.lane is not None and not self.sent and self.report is not None

    # -- what it says -----------------------------------------------------------------------------

    def take_report(self, report: Report) -> None:
        while self.sent and self.sent[0].number <= report.done:
            self.sent.popleft()
        if report.compared >= self.comparison:
            self.compares_since = None
        self.report = report
        self.has_begun = True
        if has_got_on(report):
            self.failures, self.wait = 0, _FIRST_WAIT

    def next_due(self) -> int | None:
        """When its next hold is due, µs, if it is idle and no window was sent for that."""
        if self.lane is None or self.report is None or self.report is self.due_sent_for:
            return None
        return None if self.sent else self.report.next_due


def has_got_on(report: Report) -> bool:
    return bool(report.done or report.published)


MOST_FAILURES = 5
"""Consecutive unexplained failures of a shard before the publisher gives up."""

_TAKEOVER = 20.0
"""Seconds after the first report in which a publisher leaves it to an older one to stop."""

_SIGHTINGS = {"sink.fenced": 10, "sink.own_request_late": 1}
_MOST_SIGHTINGS = 30
_SIGHTINGS_WITHIN = 3600.0
"""Stop when a shard was fenced three times within an hour; thirty times if it may be its own late
request. A frozen process causes one, and twice as many count for it once it wakes; two publishers
of one id with little to do cause one in minutes."""

FROZEN_AFTER = 10.0
"""Seconds without an event, in a loop that has one every second, after which it was frozen."""

_ROTATED_WITHIN = 120.0
"""Seconds for a new password or certificate to reach its file: in Kubernetes up to 90."""

_PASSES_WITHIN = {
    **dict.fromkeys(("config.password_file", "config.sink_property"), _ROTATED_WITHIN),
    **dict.fromkeys(("sink.auth_failed", "store.auth_failed"), _ROTATED_WITHIN),
    **dict.fromkeys(("store.tls_failed", "store.privilege_missing"), _ROTATED_WITHIN),
    "sink.not_authorized": _ROTATED_WITHIN,
    **dict.fromkeys(("store.database_missing", "store.table_missing"), 60.0),
    **dict.fromkeys(("store.column_missing", "store.index_missing"), 60.0),
    **{"store.query_failed": 60.0, "sink.topic_missing": 30.0},
}
"""Seconds for which an error is tolerated while running: starting brokers know of no topic, a
migration drops a table or an index for a moment."""

_FATAL_CHECKS = {"sink.other_publisher", "sink.topic_recreated"}


class Failures:
    """Decides which failures are fatal. Pure: times are arguments, s."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._well_since: float | None = None
        self._wrong_since: dict[str, float] = {}
        self._sightings: dict[int, list[float]] = {}
        self.woke_at = float("-inf")
        """When the process was last frozen: another publisher may have taken over, and is not to
        stop."""

    def is_well(self, shard: int, now: float, *, has_progressed: bool) -> None:
        if self._well_since is None:
            self._well_since = now
        if has_progressed:
            self._wrong_since.pop(f"shard {shard}", None)

    def is_done(self, command: type[Command]) -> None:
        self._wrong_since.pop(command.__name__, None)

    def of_shard(
        self, shard: int, error: EventpubError, in_a_row: int, now: float
    ) -> EventpubError | None:
        """The error to stop with, or None; `in_a_row`: the shard's consecutive failures."""
        if error.code in _SIGHTINGS:
            return self._another_publisher(shard, error, now)
        if error.code == "shard.failed":
            return error if in_a_row > MOST_FAILURES else None
        return (
            None if error.retriable or self._may_pass(f"shard {shard}", error.code, now) else error
        )

    def of_command(
        self, command: Command, error: EventpubError, now: float
    ) -> EventpubError | None:
        if isinstance(command, CheckTopic):
            return error if error.code in _FATAL_CHECKS else None
        if isinstance(command, (CheckTable, CheckOpen)):
            return None  # readers or runners will meet it too
        who = type(command).__name__
        return None if error.retriable or self._may_pass(who, error.code, now) else error

    def _may_pass(self, who: str, code: str, now: float) -> bool:
        if code not in _PASSES_WITHIN:
            return False
        return now - self._wrong_since.setdefault(who, now) < _PASSES_WITHIN[code]

    def _another_publisher(
        self, shard: int, error: EventpubError, now: float
    ) -> EventpubError | None:
        """Note a fencing; the error to stop with after too many."""
        if self._well_since is None or now - self._well_since < _TAKEOVER:
            return None
        before = self._sightings.get(shard, [])
        recent = [seen for seen in before if now - seen < _SIGHTINGS_WITHIN]
        was_away = now - self.woke_at < _TAKEOVER
        recent += [now] * (_SIGHTINGS[error.code] << was_away)
        self._sightings[shard] = recent
        if len(recent) < _MOST_SIGHTINGS:
            return None
        return SinkError(
            "sink.fenced",
            "another publisher with the same app.id is publishing to this topic; nothing was lost"
            " or repeated, and this one stops",
            where=f"app.id = {self._config.app.id}, topic {self._config.sink.topic}",
            suggestion="let only one publisher run for an app.id",
        )


class Runners:
    """Times are arguments, monotonic s. Runners are not waited for beyond `stop_by`."""

    def __init__(
        self, shards: Sequence[Shard], failures: Failures, progress: Progress, do: Do
    ) -> None:
        self._shards = shards
        self._failures = failures
        self._progress = progress
        self._do = do
        self._error: EventpubError | None = None
        self.is_stopping = False
        self.stop_by = 0.0
        self.is_over = False

    # -- runners come and go ----------------------------------------------------------------------

    def ended(self, event: Ended, now: float) -> None:
        shard, error = self._shards[event.shard], event.error
        shard.end()
        if error is None:
            if not self.is_stopping:
                shard.failed(now, at_once=True)
            return
        shard.failed(now)
        final = self._failures.of_shard(shard.number, error, shard.failures, now)
        if final is not None:
            self.stop(final, now)
        elif not self.is_stopping:
            self.wait_out(error)

    def end_all(self, now: float) -> None:
        for shard in self._shards:
            shard.start_at = now
        self._stop_all()

    def _stop_all(self) -> None:
        for shard in self._shards:
            if shard.lane is not None:
                shard.lane.send(Stop())

    # -- the end ----------------------------------------------------------------------------------

    def wait_out(self, error: EventpubError) -> None:
        self._progress.last_error = str(error)
        self._do(Show())

    def stop(self, error: EventpubError | None, now: float) -> None:
        if self.is_stopping:
            return
        self.is_stopping, self._error = True, error
        self.stop_by = now + _STOPS_WITHIN
        self._stop_all()

    def finish(self) -> None:
        self.is_over = True
        self._do(Show())
        self._do(Finish(self._error))
