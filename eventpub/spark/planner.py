"""Plans micro-batches in the driver, from the database and the journals.

A plan is Spark's offset, so Spark's offset log makes it repeatable. All state between plans is in
the last plan and its batch's journals: a restarted driver continues from there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from eventpub.channel import Comparison, Report, Request
from eventpub.config import Config
from eventpub.coordinator.boundary import PollResult
from eventpub.coordinator.database_changes import DatabaseChanges
from eventpub.coordinator.events import Poll
from eventpub.coordinator.position import due_by
from eventpub.coordinator.recounting import Recounting
from eventpub.errors import StateError, StoreError, counted
from eventpub.publisher.workers import BoundaryWork, ChecksWork
from eventpub.shard.assignment import Assignment, real_parts
from eventpub.sources.mysql import Layout
from eventpub.spark.ahead import Ahead
from eventpub.spark.journal import Journals
from eventpub.spark.notes import of_one_batch
from eventpub.spark.options import LEAST_BYTES, Plan

if TYPE_CHECKING:
    from eventpub.spark.driver import Observed

_LONGEST_PAUSE = 0.5
"""Most seconds that a call waits for the next poll; Spark calls again at once."""

_FIRST_PAGE = 5_000
_MOST_PAGES = 4
_LARGEST_PAGE = 200_000
"""Window size in rows up to which shards read it without first splitting it."""

_MOST_BYTES, _MOST_OF_USERS = 64 << 20, 16 << 20
"""Of a task; a query of a user cannot be given a new checkpoint if its broker becomes slow."""
_SLOW, _GROWTH = 15.0, 4
"""Duration of a batch, s, above which the next gets half as many bytes, or a quarter of the
transaction's time-out; below a quarter of it, one of four times as many while there is a backlog. A
transaction longer than its time-out never succeeds, and a decided batch cannot be made
smaller."""

_KEPT_ANSWERED = 50
_SAMPLED_EVERY = 1.0
_CHECKED_EVERY = 60.0
"""Seconds between samples of the newest rows, and between checks of the table's layout."""


class BatchSize:
    """How much the next batch holds: rows of its window, and bytes of each task.

    Args:
        most_rows: of a window; None: `read.page_rows`, growing to four times that, since a batch
            costs a quarter of a second whatever its size.
    """

    def __init__(self, config: Config, most_rows: int | None, *, is_of_publisher: bool) -> None:
        rows = most_rows or config.read.page_rows
        self._most_rows = most_rows or _MOST_PAGES * rows
        self._next_rows, self.rows = rows, min(_FIRST_PAGE, rows)
        self.is_page = self._most_rows <= _LARGEST_PAGE
        self._most_bytes = _MOST_BYTES if is_of_publisher else _MOST_OF_USERS
        self._slow = min(_SLOW, config.sink.transaction_timeout / 4e6)
        # a user's own trigger is unknown here
        self._trigger = config.batch_trigger / 1e6 if is_of_publisher else math.inf
        self._planned_at = self._took = 0.0

    def asked(self, now: float) -> None:
        """The last batch is done; later calls add only idle time."""
        if self._planned_at:
            self._took = self._took or now - self._planned_at

    def grow_rows(self) -> None:
        self.rows = self._next_rows
        self._next_rows = min(2 * self.rows, self._most_rows)

    def next_bytes(
        self, last: int, reports: Sequence[Report], now: float, *, is_behind: bool
    ) -> int:
        took, self._took, self._planned_at = self._took, 0.0, now
        slow = self._slow
        if slow / _GROWTH < took < self._trigger + 1:  # may include the wait for Spark's trigger
            took = max((report.took for report in reports), default=0.0)
        if took > slow:
            return max(last // 2, LEAST_BYTES)
        if is_behind and 0 < took < slow / _GROWTH:
            return min(_GROWTH * last, self._most_bytes)
        return last


class Planner:
    """Plans the batches of one query; used by one thread.

    Args:
        most_rows: see `BatchSize`.
        until: nothing created later is read, µs; None: no end.
        requests: returns those pending.
        clock: monotonic, s.
    """

    def __init__(  # noqa: PLR0913 (options, by keyword)
        self,
        config: Config,
        layout: Layout,
        partitions: int,
        journals: Journals,
        most_rows: int | None,
        *,
        until: int | None = None,
        requests: Callable[[], Sequence[Request]] = lambda: (),
        observed: Observed,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        parts = real_parts(config)
        self._of = Assignment(config, layout, partitions, None, 0, parts)
        self._polls, self._checks = BoundaryWork(self._of, until), ChecksWork(self._of)
        self._ahead: Ahead | None = None
        if observed.is_of_publisher and config.spark.master.startswith("local"):
            self._ahead = Ahead(config, self._polls.do)
        self._journals = journals
        self._size = BatchSize(config, most_rows, is_of_publisher=observed.is_of_publisher)
        self._until = until
        self._clock = clock
        self._requests = requests
        self._observed = observed
        self._reports: list[Report] = []
        self._taken = -1
        self._poll_at = self._second_at = self._snapshot_at = self._table_at = 0.0
        self.polled: PollResult | None = None
        self._recounting: Recounting
        self._changes: DatabaseChanges

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.forget()
        self._polls.close()
        self._checks.close()

    @property
    def layout(self) -> Layout:
        return self._of.layout

    def reconnect(self, layout: Layout | None = None) -> None:
        """Reconnect; `layout`: of an altered table."""
        self._of = replace(self._of, layout=layout or self._of.layout)
        if self._ahead is not None:
            self._ahead.forget()
        self._polls.close()
        self._polls.use(self._of)
        self._checks.use(self._of)

    def next(self, last: Plan, *, is_ours: bool = False) -> Plan | None:
        """The batch after `last`, whose journals exist; None: nothing to do.

        Waits until the next poll is due. A run with an end also waits for holds and for the last
        count: None means that it is over. `is_ours`: this process has handed out the tasks of
        `last`.

        Raises:
            StoreError: nothing is planned; try again if retriable.
            StateError: from a journal or a check.
        """
        self._size.asked(self._clock())
        while True:
            time.sleep(max(0.0, min(_LONGEST_PAUSE, self._poll_at - self._clock())))
            plan = self._next(last, is_ours=is_ours)
            if plan is not None or self._until is None:
                return plan
            if self._is_over(last):
                return None

    def _next(self, last: Plan, *, is_ours: bool) -> Plan | None:
        self._begin(last, is_ours=is_ours)
        recounting, is_cut = self._recounting, self._is_cut(last)
        result = self._poll(last, is_cut=is_cut)
        self._count(last, result)
        self._observed.progress.comparisons += recounting.next_comparison() is not None
        # the previous one again, as long as a shard has not done it
        comparison = recounting.comparison
        self._observed.polled(self._clock())
        answered = [*last.answered, *(each["id"] for each in last.requests)]
        requests = of_one_batch([r for r in self._requests() if r.id not in answered])
        end = None if is_cut else result.end
        has_times = last.read_as in {"", self.layout.read_as}  # else rows may be below `upto` now
        is_idle = end is None and not (is_cut or result.is_due or comparison.buckets or requests)
        if is_idle and has_times and last.batch:
            return None
        now = self._clock()
        is_behind = is_cut or result.is_page
        most_bytes = self._size.next_bytes(last.most_bytes, self._reports, now, is_behind=is_behind)
        snapshot = now >= self._snapshot_at
        if snapshot:
            self._snapshot_at = now + self._config.state.snapshot_every / 1e6
        uncounted = recounting.uncounted_since
        unpublished = [result.hidden_since, uncounted, recounting.behind_since(last.upto)]
        return replace(
            last,
            batch=last.batch + 1,
            upto=last.upto if end is None else max(end, last.upto),
            after=last.after if end is None else last.upto if self._size.is_page else end,
            open_since=result.now if result.open_since is None else result.open_since,
            hidden_since=result.hidden_since,
            uncounted_since=uncounted,
            unpublished_since=min((at for at in unpublished if at is not None), default=None),
            comparison=comparison.number,
            buckets=comparison.buckets,
            newest=self._changes.newest,
            server=self._observed.progress.server,
            read_as=self.layout.read_as,
            most_bytes=most_bytes,
            rows_in=tuple(report.rows_in for report in self._reports),
            journals=tuple(report.journal for report in self._reports),
            snapshot=snapshot,
            requests=tuple(asdict(request) for request in requests),
            answered=tuple(answered[-_KEPT_ANSWERED:]),
        )

    # -- what is known ----------------------------------------------------------------------------

    def _begin(self, last: Plan, *, is_ours: bool) -> None:
        if last.batch and self._taken != last.batch:
            # the publisher's own sink reads everything
            may_be_unread = is_ours and self._until is None and not self._observed.is_of_publisher
            self._reports = [
                self._journals.report(last, shard, may_be_unread=may_be_unread)
                for shard in range(self._config.run.shards)
            ]
        if self._taken < 0:
            self._recounting = Recounting(
                self._config.recount.horizon,
                last.start or 0,
                self._checks.store.now(),
                last.upto if last.batch or last.upto > (last.start or 0) else None,
                last.unpublished_since,
            )
            self._recounting.comparison = Comparison(last.comparison)
            self._observed.progress.server = last.server
            self._changes = DatabaseChanges(
                self._config,
                last.start or 0,
                last.newest,
                self.layout,
                recounting=self._recounting,
                progress=self._observed.progress,
                do=self._observed.do,
            )
        if self._taken != last.batch:
            self._taken = last.batch
            for report in self._reports:
                self._recounting.recount.account(report.shard, report.buckets)
                self._observed.decided(report)
            self._recounting.compared(self._reports)

    def _is_cut(self, last: Plan) -> bool:
        """Whether a task stopped at its byte limit, below the end of the last window."""
        waits = self._config.gaps.policy == "hold_shard"
        return any(r.position < last.upto and not (waits and r.holds) for r in self._reports)

    @property
    def _next_due(self) -> int | None:
        due = min((r.next_due for r in self._reports if r.next_due is not None), default=None)
        time = 0 if self.polled is None else self.polled.now
        return due_by(time, due, self._config.gaps.longest_wait) if time else due

    def _poll(self, last: Plan, *, is_cut: bool) -> PollResult:
        now = self._clock()
        if now >= self._table_at:
            self._table_at = now + _CHECKED_EVERY
            self._check_table()
        due, rows = self._next_due, 1 if is_cut else self._size.rows
        command = Poll(last.upto, due, False, hidden_since=last.unpublished_since, page_rows=rows)
        result = self._polled_ahead(last, is_cut=is_cut) or self._polls.do(command)
        self.polled = result
        if result.is_page and not is_cut:
            self._size.grow_rows()
            if self._ahead is not None and result.end is not None:
                after = max(result.end, last.upto)
                self._ahead.begin(replace(command, after=after, page_rows=self._size.rows))
        self._poll_at = self._clock() + (0.0 if result.is_page else result.pause)
        self._observed.progress.position = last.upto
        self._observed.progress.without_identity += result.without_identity
        self._changes.polled(result, self._clock())
        return result

    def _polled_ahead(self, last: Plan, *, is_cut: bool) -> PollResult | None:
        """The poll after `last` if it was done during its batch."""
        polled = None if self._ahead is None else self._ahead.take()
        if polled is None:
            return None
        after, result = polled
        if after == last.upto and not is_cut:
            return result
        # later it would be too old; but transactions have ended
        if self._ahead is not None and result.end not in {None, last.upto}:
            self._ahead.drop(result.end)
        self._changes.polled(result, self._clock())
        return None

    def _check_table(self) -> None:
        was_unique = self.layout.key_is_unique
        with suppress(StoreError):  # readers will meet it too
            checked = self._checks.table()
            if self._changes.altered(checked) is not None:
                self.reconnect(checked.layout)
        if was_unique and self._observed.is_of_publisher and not self.layout.key_is_unique:
            self._observed.polled(self._clock())
            raise StateError(
                "state.second_rows",
                "the event table now allows several rows per version, which the indexes cannot tell"
                " apart: they were built while it allowed one",
                where=self.layout.where,
                suggestion="restart the publisher: it reads the topic back first",
            )

    # -- recount ----------------------------------------------------------------------------------

    def _count(self, last: Plan, result: PollResult) -> None:
        if not self._reports:
            return
        now = self._clock()
        if now >= self._second_at:
            self._second_at = now + _SAMPLED_EVERY
            self._recounting.second(now)
            # a page may have been read ahead
            self._sample(max(last.upto, result.end or 0))
        positions = [report.position for report in self._reports]
        read = min(positions), max(*positions, last.upto)
        # late buckets are counted only if no other is due, and the next plan may be far away
        self._count_due(last, result.now, read, now + _LONGEST_PAUSE)

    def _count_due(self, last: Plan, now: int, read: tuple[int, int], until: float) -> bool:
        """Have the database count; False: it failed, and fewer buckets are next.

        `read`: up to where all shards have read, and any of them."""
        recounting, hidden = self._recounting, last.unpublished_since
        while count := recounting.next_count(now, *read, hidden, self._clock()):
            try:
                recounting.counted(count, self._checks.count(count))
            except StoreError as error:
                recounting.not_counted(count)
                if not error.retriable:
                    raise
                size = counted(len(count.buckets), "bucket")
                text = f"{size} could not be counted, trying fewer; {error.code}: {error.message}"
                self._observed.mark("recount", text)
                return False
            self._observed.mark("recount", "")
            if self._clock() > until:
                break
        return True

    def _sample(self, upto: int) -> None:
        sampled = self._checks.sample()
        if (above := self._changes.wants_more(sampled.rows)) is not None:
            sampled = self._checks.sample(above)
        error = self._changes.sampled(sampled, upto, self._clock())
        self._observed.mark("times", self._changes.odd_times(self._clock()))
        if self._changes.doubts:
            self._table_at = 0.0
        if error is not None:
            raise error

    # -- a run that ends by itself ----------------------------------------------------------------

    def _is_over(self, last: Plan) -> bool:
        if self._until is None or not self._reports or last.upto < self._until:
            return False
        if any(report.holds or report.position < self._until for report in self._reports):
            return False
        position = min(report.position for report in self._reports)
        now, read = self._checks.store.now(), (position, position)
        self._recounting.begin_last(now, *read, last.unpublished_since)
        return self._count_due(last, now, read, math.inf) and self._recounting.is_over()
