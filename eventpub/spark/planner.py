"""What a micro-batch does: planned in the driver from what the database and the journals say.

A plan is Spark's offset, so that Spark's offset log makes it repeatable. Between two plans the
planner remembers nothing that it cannot read from the last plan and the journals of its batch: a
driver that starts again goes on where the one before was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import structlog

from eventpub.admission.buckets import window_of
from eventpub.channel import Comparison, Report, Request
from eventpub.config import Config
from eventpub.coordinator.boundary import Boundary, PollResult
from eventpub.coordinator.events import Count, Counted
from eventpub.coordinator.newest import MOST, SAMPLE, NewestRows
from eventpub.coordinator.recounting import Recounting
from eventpub.errors import StateError, StoreError
from eventpub.sources.mysql import EventStore, Layout
from eventpub.spark.journal import Journals

_LONGEST_PAUSE = 0.5
"""Seconds that a call waits until the next poll is of use; Spark asks again at once."""

_SAMPLED_EVERY = 1.0
_CHECKED_EVERY = 60.0
"""Seconds between two samples of the newest rows, and two looks at the table's layout."""

log: structlog.stdlib.BoundLogger = structlog.get_logger("eventpub")


@dataclass(frozen=True)
class Plan:
    """One micro-batch, for all shards. Times are µs on the database's clock.

    Attributes:
        query: identity of the query's checkpoint; journals and indexes belong to it.
        batch: number of the batch; 0: nothing is planned yet.
        start: events created at or before are not published; None: all are.
        begin: a shard that has read nothing reads what was created after it.
        upto: events created at or before belong to this batch or to one before it.
        open_since, hidden_since, uncounted_since: as of `channel.Window`.
        unpublished_since: nothing that may be unpublished below `upto` was created at or before,
            but for holds; None: nothing is known to be.
        compare: number of the last comparison of the recount, and its buckets if it is to be done.
        compared: whether this batch does it.
        snapshot: whether the shards keep snapshots of their indexes.
        requests: what users ask for, by the fields of `channel.Request`.
    """

    query: str
    batch: int = 0
    start: int | None = None
    begin: int = 0
    upto: int = 0
    open_since: int | None = None
    hidden_since: int | None = None
    uncounted_since: int | None = None
    unpublished_since: int | None = None
    comparison: int = 0
    buckets: tuple[int, ...] = ()
    snapshot: bool = False
    requests: tuple[dict[str, Any], ...] = ()

    def to_offset(self) -> dict[str, Any]:
        """As Spark's offset."""
        return asdict(self)

    @classmethod
    def from_offset(cls, offset: dict[str, Any]) -> Plan:
        """The plan that `to_offset` wrote."""
        return cls(**offset | {n: tuple(offset.get(n, ())) for n in ("buckets", "requests")})


class Planner:
    """Plans the batches of one query; used by one thread.

    Args:
        config: `store`, `read`, `gaps`, `recount` and the number of shards are used.
        layout: of the event table.
        journals: of the query.
        page_rows: most rows of a window.
        until: nothing created after it is read, µs; None: there is no end.
        requests: those that wait.
        clock: seconds that only grow.
    """

    def __init__(  # noqa: PLR0913 (options, by keyword)
        self,
        config: Config,
        layout: Layout,
        journals: Journals,
        page_rows: int,
        *,
        until: int | None = None,
        requests: Callable[[], Sequence[Request]] = lambda: (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._layout = layout
        self._journals = journals
        self._read = config.read.model_copy(update={"page_rows": page_rows})
        self._until = until
        self._clock = clock
        self._requests = requests
        self._requested: set[str] = set()
        self._store = EventStore(config.store, layout)
        self._boundary: Boundary | None = None
        self._recounting: Recounting | None = None
        self._newest: NewestRows | None = None
        self._reports: list[Report] = []
        self._taken = -1
        self._server = ""
        self._poll_at = self._second_at = self._snapshot_at = 0.0
        self._table_at = clock() + _CHECKED_EVERY
        self.upper = 0

    def close(self) -> None:
        """Close the connections."""
        self._store.close()
        if self._boundary is not None:
            self._boundary.close()

    @property
    def layout(self) -> Layout:
        """Of the event table, as it was looked at last."""
        return self._layout

    def next(self, last: Plan) -> Plan | None:
        """The batch that follows a batch that is done; None: there is nothing to do.

        Waits until the database is to be polled. A run that ends by itself also waits for holds and
        for the last count: None means that it is over.

        Args:
            last: its journals are there.

        Raises:
            StoreError: nothing is planned; try again if it is retriable.
            StateError: state.…
        """
        while True:
            time.sleep(max(0.0, min(_LONGEST_PAUSE, self._poll_at - self._clock())))
            plan = self._next(last)
            if plan is not None or self._until is None:
                return plan
            if self._is_over(last):
                return None

    def _next(self, last: Plan) -> Plan | None:
        recounting = self._begin(last)
        result = self._poll(last, recounting)
        self._count(last, recounting, result)
        comparison = recounting.next_comparison()
        requests = [r for r in self._requests() if r.id not in self._requested]
        is_idle = result.end is None and not result.is_due and comparison is None
        if is_idle and not requests and last.batch:
            return None
        self._requested.update(request.id for request in requests)
        now = self._clock()
        snapshot = now >= self._snapshot_at
        if snapshot:
            self._snapshot_at = now + self._config.state.snapshot_every / 1e6
        uncounted = recounting.uncounted_since
        behind = recounting.behind_since(last.upto)
        unpublished = [result.hidden_since, uncounted, behind]
        return replace(
            last,
            batch=last.batch + 1,
            upto=last.upto if result.end is None else max(result.end, last.upto),
            open_since=result.now if result.open_since is None else result.open_since,
            hidden_since=result.hidden_since,
            uncounted_since=uncounted,
            unpublished_since=min((at for at in unpublished if at is not None), default=None),
            comparison=recounting.comparison.number,
            buckets=() if comparison is None else comparison.buckets,
            snapshot=snapshot,
            requests=tuple(asdict(request) for request in requests),
        )

    # -- what is known ----------------------------------------------------------------------------

    def _begin(self, last: Plan) -> Recounting:
        """Take over what the last batch did."""
        if last.batch and self._taken != last.batch:
            shards = range(self._config.run.shards)
            heads = [self._journals.head(last.batch, shard) for shard in shards]
            if any(head is None for head in heads):
                raise _no_journal(last)
            self._reports = [head["report"] for head in heads if head is not None]
        if self._recounting is None:
            self._recounting = Recounting(
                self._config.recount.horizon,
                last.start or 0,
                self._store.now(),
                last.upto if last.batch or last.upto > (last.start or 0) else None,
                last.unpublished_since,
            )
            self._recounting.comparison = Comparison(last.comparison)
            self._newest = NewestRows(self._config.recount.horizon, last.start or 0)
        if self._taken != last.batch:
            self._taken = last.batch
            for report in self._reports:
                self._recounting.account(report)
            self._recounting.compared(self._reports)
        return self._recounting

    @property
    def _next_due(self) -> int | None:
        return min((r.next_due for r in self._reports if r.next_due is not None), default=None)

    def _poll(self, last: Plan, recounting: Recounting) -> PollResult:
        """Poll the boundary, and take over what that shows of the database."""
        now = self._clock()
        if now >= self._table_at:
            self._table_at = now + _CHECKED_EVERY
            self._check_table()
        if self._boundary is None:
            self._boundary = Boundary(
                self._config.store,
                self._layout,
                self._read,
                horizon=self._config.recount.horizon,
                until=self._until,
                hidden_since=last.unpublished_since,
                every=self._config.run.trigger / 1e6,
            )
        try:
            result = self._boundary.poll(last.upto, self._next_due)
        except StoreError as error:
            self._boundary.close()
            self._boundary = None
            if error.code == "store.moved":  # the next poll connects to the other server
                self._server = ""
                recounting.everything(self._store.now())
            raise
        self.upper = result.upper
        self._poll_at = self._clock() + (0.0 if result.is_page else result.pause)
        if result.server != self._server:
            if self._server:
                log.warning("another database server answers", now=result.server)
                recounting.everything(result.now)
            self._server = result.server
        recounting.ended(result.ended)
        recounting.clock_stepped(result.now, self._clock())
        return result

    def _check_table(self) -> None:
        layout = EventStore.discover(self._config.store)
        if layout != self._layout:
            log.warning("the event table was altered", table=layout.table)
            self.close()
            self._layout, self._boundary = layout, None
            self._store = EventStore(self._config.store, layout)

    # -- recount ----------------------------------------------------------------------------------

    def _count(self, last: Plan, recounting: Recounting, result: PollResult) -> None:
        """Count buckets again that are due, and sample the newest rows; some, each time."""
        if not self._reports:
            return
        now = self._clock()
        if now >= self._second_at:
            self._second_at = now + _SAMPLED_EVERY
            recounting.second(now)
            self._sample(result.now, last, recounting)
        positions = [report.position for report in self._reports]
        position, reached = min(positions), max(*positions, last.upto)
        hidden = last.unpublished_since
        count = recounting.next_count(result.now, position, reached, hidden, now)
        if count is not None:
            try:
                recounting.counted(self._counted(count))
            except StoreError:
                recounting.not_counted(count)
                raise

    def _counted(self, count: Count) -> Counted:
        now = self._store.now()
        windows = [window_of(bucket, count.position) for bucket in count.buckets]
        rows = dict(zip(count.buckets, self._store.counts(windows), strict=True))
        return Counted(now, rows, count.expected, count.in_turn)

    def _sample(self, now: int, last: Plan, recounting: Recounting) -> None:
        """Rows that are inserted with times long past are counted again."""
        assert self._newest is not None
        rows, above = self._store.newest(SAMPLE), None
        if (more := self._newest.wants_more(rows)) is not None:
            rows, above = self._store.newest(MOST, more), more
        found = self._newest.sample(now, last.upto, rows, (), above)
        if found:
            log.warning("rows were committed with a create_time long past", rows=len(found))
            recounting.note([(row.created - 1) // 1_000_000 for row in found])

    # -- a run that ends by itself ----------------------------------------------------------------

    def _is_over(self, last: Plan) -> bool:
        assert self._recounting is not None
        if self._until is None or not self._reports or last.upto < self._until:
            return False
        if any(report.holds or report.position < self._until for report in self._reports):
            return False
        position = min(report.position for report in self._reports)
        now = self._store.now()
        self._recounting.begin_last(now, position, position, last.unpublished_since)
        count = self._recounting.next_count(
            now, position, position, last.unpublished_since, self._clock()
        )
        if count is not None:
            self._recounting.counted(self._counted(count))
        return self._recounting.is_over()


def _no_journal(last: Plan) -> StateError:
    return StateError(
        "state.journal_missing",
        f"the checkpoint is at batch {last.batch}, whose journals are missing",
        where=f"query {last.query}",
        suggestion="the checkpoint and the state belong together: set the state that this"
        " checkpoint was used with, or start with a new checkpoint",
    )
