"""The driver's part in the recount: it counts in the database, and has the shards compare.

What is to be compared is one numbered comparison at a time; every shard reports the number of the
last one that it has done. The thread that runs micro-batches and the one that watches them both
come here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

import structlog

from eventpub.config import format_time
from eventpub.errors import EventpubError
from eventpub.spark.progress import ShardReport
from eventpub.spark.recount import Comparison, Recount, window_of
from eventpub.store import EventStore

_CLOCK_STEP = 1_000_000
"""µs by which the database's clock may go back without a word."""

_TAKEN_ON_WITHIN = 10.0
"""Seconds for tasks that follow the boundary to do a comparison; then another batch does it."""

_COUNTS_LATE = 0.5
"""Seconds of one look for what is counted out of turn."""

log: structlog.stdlib.BoundLogger = structlog.get_logger("eventpub")


class Recounting:
    """Which time buckets differ, and the comparison that is wanted now.

    Args:
        horizon, start, now, position, hidden_since: as of `Recount`.
    """

    def __init__(
        self,
        horizon: int,
        start: int,
        now: int = 0,
        position: int | None = None,
        hidden_since: int | None = None,
    ) -> None:
        self._recount = Recount(horizon, start, now, position, hidden_since)
        self._comparison = Comparison()
        self._wanted_since = 0.0
        self._looked_at = 0
        self._counts_everything = False
        self._lock = threading.Lock()

    @property
    def comparison(self) -> Comparison:
        """The one that is wanted now; without buckets where there is none."""
        return self._comparison

    def has_suspects(self) -> bool:
        """Whether there are buckets to compare."""
        return self._recount.has_suspects()

    def count_everything(self) -> None:
        """At the next time, count every second of the horizon, due or not."""
        self._counts_everything = True

    def note(self, buckets: Sequence[int]) -> None:
        """Rows have come there behind the windows: they are counted again."""
        with self._lock:
            self._recount.note(buckets)

    def has_late(self) -> bool:
        """Whether some of what was noted is not done yet."""
        return self._recount.has_late

    @property
    def uncounted_since(self) -> int | None:
        """As of `Recount`."""
        with self._lock:
            return self._recount.uncounted_since

    def told(self, passed: Mapping[tuple[int, int], int]) -> None:
        """As of `Recount`."""
        with self._lock:
            self._recount.told(passed)

    def read_before(self, reports: Sequence[ShardReport]) -> None:
        """Take over how far the shards of the former run had come."""
        before = max((r.read_before for r in reports if r.read_before is not None), default=None)
        if before is not None:
            with self._lock:
                self._recount.read_before(before)

    def next_comparison(self) -> Comparison:
        """What is to be compared now is a new comparison: the shards of a batch begin with it."""
        with self._lock:
            self._begin()
            return self._comparison

    def is_taken_on(self) -> bool:
        """Whether tasks that run may be waited for: they have, or get now, a comparison to do."""
        with self._lock:
            if not self._comparison.buckets:
                self._begin()
                return True
            return time.monotonic() - self._wanted_since <= _TAKEN_ON_WITHIN

    def _begin(self) -> None:
        buckets = tuple(self._recount.take())
        number = self._comparison.number + (1 if buckets else 0)
        self._comparison = Comparison(number, buckets)
        self._wanted_since = time.monotonic()

    def hear(self, reports: Sequence[ShardReport]) -> None:
        """Take over what all shards have accounted for and compared."""
        with self._lock:
            self._hear(reports)

    def _hear(self, reports: Sequence[ShardReport]) -> None:
        for report in reports:
            buckets = {int(b): rows for b, rows in report.buckets.items()}
            self._recount.heard(report.shard, buckets)
        comparison = self._comparison
        if not (reports and comparison.buckets):
            return
        if all(report.compared >= comparison.number for report in reports):
            unfinished = {b for report in reports for b in report.unfinished}
            again = min((r.next_due for r in reports if r.next_due is not None), default=0)
            self._recount.compared(comparison.buckets, unfinished, again)
            self._comparison = Comparison(comparison.number)

    def finds(
        self,
        store: EventStore,
        live: Sequence[ShardReport],
        stand: Callable[[], tuple[int, int, int | None]],
        *,
        is_told: bool,
        last: bool,
    ) -> bool:
        """Count what is due again; whether there are buckets that the shards have to compare.

        Args:
            live: as far as the shards are in the batch that runs.
            stand: up to where all shards have read, up to where any of them has, and since when
                open transactions hide something; µs.
            is_told: whether the shards have said what they had accounted for before.
            last: count everything within the horizon, due or not.

        Raises:
            StoreError: it is counted the next time.
        """
        with self._lock:
            recount = self._recount
            self._hear(live)
            if last and recount.has_suspects():
                return True
            now = store.now()
            position, reached, hidden_since = stand()
            if now < self._looked_at - _CLOCK_STEP:
                log.warning(
                    "the database's clock went back: what is created until it has caught up "
                    "lies behind the position, where the recount finds it",
                    seconds=round((self._looked_at - now) / 1e6, 3),
                    position=format_time(position),
                )
                recount.everything(now)
            self._looked_at = now
            if not is_told:
                return recount.has_suspects()
            if self._counts_everything:
                self._counts_everything = False
                recount.everything(now)
            if last:
                recount.not_counted(recount.due(now, position, reached, hidden_since))
                recount.everything(now)
            while buckets := recount.due(now, position, reached, hidden_since):
                self._count(store, now, buckets, position)
            began = time.monotonic()
            while buckets := recount.late(now, position):
                recount.counted(now, _counted(store, buckets, position), in_turn=False)
                if not last and time.monotonic() - began > _COUNTS_LATE:
                    break  # the others at the next look
            return recount.has_suspects()

    def _count(self, store: EventStore, now: int, buckets: Sequence[int], position: int) -> None:
        try:
            rows = _counted(store, buckets, position)
        except EventpubError:
            self._recount.not_counted(buckets)
            raise
        self._recount.counted(now, rows)


def _counted(store: EventStore, buckets: Sequence[int], position: int) -> dict[int, int]:
    rows = store.counts([window_of(bucket, position) for bucket in buckets])
    return dict(zip(buckets, rows, strict=True))
