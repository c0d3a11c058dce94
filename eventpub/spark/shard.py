"""One shard's way through one window: fold, read, admit, backtrack, publish, remember.

This runs in a task of Spark, in whichever worker process it lands, and relies on nothing that an
earlier task left in memory: the index is opened here and the producer made here, which fences every
older one. At any point the process may die. What is visible on the topic then is what the fold of
the next task reads back, before it decides anything.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from eventpub import admission
from eventpub.admission import EVENTS, Decision, Known, Shard, values
from eventpub.config import Config
from eventpub.errors import SinkError, StateError
from eventpub.index import Index
from eventpub.sink import Folded, RecordRefusedError, ShardSink, UnmarkedError
from eventpub.spark.ahead import read_ahead
from eventpub.spark.boundary import Bounds, following
from eventpub.spark.compare import KeysAhead
from eventpub.spark.failpoint import failpoint
from eventpub.spark.hold_shard import at_first_row, with_unpublished
from eventpub.spark.letters import Refusals, dead_rows
from eventpub.spark.page_files import PageFiles
from eventpub.spark.progress import ShardReport
from eventpub.spark.recount import WIDTH, Comparison, bucket_of, window_of
from eventpub.spark.state import Request, StateDir
from eventpub.store import EventStore, Layout

CHUNK_ROWS = 25_000
"""Rows of one transaction: what a shard holds in memory at a time."""

_TOLD_ROWS = 10_000
"""From so many in a transaction on, the driver hears of each; of smaller ones once a window."""

_BELOW = 16
"""Rows looked at below a first sight; enough wherever versions and times of an aggregate differ in
order by fewer."""

_REDO = {
    "sink.aborted",
    "sink.delivery_lost",
    "sink.fatal",
    "sink.indefinite",
}
_MOST_REDOS = 5
_NOTHING = EVENTS.empty_table()


@dataclass(frozen=True)
class Job:
    """What a shard's task needs to know; made by the driver, pickled with every task.

    Attributes:
        start: events created at or before are not published, µs; None: all are.
        low: from where a shard without an index reads again, µs.
        run: which start of the publisher this is of; it grows.
        batch: the micro-batch's number.
        goes_on: what a former try of this batch has told of counts; the driver has not added it.
        takes_over: the same of another batch, which was begun and is not tried again.
        wanted: how many batches the driver has wanted so far; for one more, a task stops following.
        comparison: what the recount wants compared with the index.
        all_buckets: report what was accounted for in all of them, not only in those that change:
            the first batch of a start, which follows the boundary only through a backlog.
        requests: what users ask for.
        former_shards: how many shards the run before had, where it was another number.
        pages: where the source leaves pages for tasks of this machine; see `page_files`.
        follows: seconds for which a task goes on as the boundary moves; see `boundary`.
        acknowledged: by topic and partition, up to where shards have ever reported to be.
        ends: by shard, where its last batch left its partitions; empty after anything went wrong.
    """

    config: Config
    layout: Layout
    partitions: int
    start: int | None
    low: int
    run: int
    batch: int = 0
    goes_on: bool = False
    takes_over: int | None = None
    wanted: int = 0
    comparison: Comparison = field(default_factory=Comparison)
    all_buckets: bool = False
    requests: tuple[Request, ...] = ()
    former_shards: int | None = None
    pages: Path | None = None
    follows: float = 0.0
    acknowledged: dict[tuple[str, int], int] = field(default_factory=dict)
    ends: dict[int, dict[tuple[str, int], int]] = field(default_factory=dict)

    def rules(self) -> admission.Rules:
        """What admission needs of the configuration."""
        gaps = self.config.gaps
        return admission.Rules(
            first_version=self.config.store.first_version,
            max_backoff=gaps.max_backoff,
            backoff_base=gaps.backoff_base,
            late=gaps.late,
            backtrack=gaps.backtrack,
            versions_are_unique=self.layout.key_is_unique,
        )


def publish_window(
    job: Job, number: int, after: int, window: Bounds, *, moves: bool = False
) -> ShardReport:
    """Publish one shard's part of a window, and of those that follow it.

    Args:
        number: the shard's.
        after: where the window begins, µs, for all shards; this one's index may stand elsewhere.
        window: its end.
        moves: whether the boundary moves on meanwhile, and may be followed.

    Raises:
        StoreError, SinkError, StateError: nothing was half done; the call may be repeated.
    """
    follows = moves and job.follows > 0
    try:
        with _without_collector(), _ShardTask(job, number, window.open_since) as task:
            task.fold()
            task.look_for_others()
            task.answer_requests()
            task.publish(chain([window], task.following(window) if follows else ()))
            task.compare(finish=True)
            return task.report(after)
    finally:
        if follows:  # what comes now waits for the next batch: no other shard shall go on for long
            StateDir(job.config.app.state_dir).end_batch(job.run, job.batch)


@contextmanager
def _without_collector() -> Iterator[None]:
    """Leaves out the search for cycles: a window makes none, and is a tenth slower with it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _ShardTask:
    def __init__(self, job: Job, number: int, open_since: int | None) -> None:
        config = job.config
        self._open_since = open_since
        self._holds_shard = config.gaps.policy == "hold_shard"
        self._refusals = Refusals(config.sink)
        self._comparing: KeysAhead | None = None
        self._uncounted = np.empty(0, np.int64)
        self._now = 0
        self._job = job
        self._shard = Shard(number, config.spark.shards, job.partitions)
        self._rules = job.rules()
        self._report = self._begin_report()
        self._counts = admission.Counts(**self._report.counts)
        self._open = ExitStack()
        self._sink = self._new_sink()
        try:
            self._index = self._open.enter_context(
                Index(
                    StateDir(config.app.state_dir).shard_index(config.spark.shards, number),
                    {
                        "app": config.app.id,
                        "topic": config.sink.topic,
                        "partitions": job.partitions,
                        "shard": [number, config.spark.shards],
                    },
                )
            )
            self._reader = self._open.enter_context(EventStore(config.store, job.layout))
            self._lookup = self._open.enter_context(EventStore(config.store, job.layout))
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> _ShardTask:
        return self

    def __exit__(self, *_: object) -> None:
        if self._comparing is not None:
            self._comparing.close()
        self._sink.close()
        self._open.close()

    def _begin_report(self) -> ShardReport:
        """With what a try of this task before has published, found and given up."""
        job, number = self._job, self._shard.number
        state = StateDir(job.config.app.state_dir)
        told = state.told_by(job.run, job.batch, number) if job.goes_on else None
        if told is None and job.takes_over is not None:
            told = state.told_by(job.run, job.takes_over, number)
        if told is None:
            return ShardReport(number)
        buckets = {int(bucket): rows for bucket, rows in told["buckets"].items()}
        return ShardReport(**{**told, "buckets": buckets, "foreign": False})

    def _new_sink(self) -> ShardSink:
        return ShardSink(self._job.config.sink, self._job.config.app.id, self._shard)

    @contextmanager
    def _timed(self, step: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = self._report.seconds
            seconds[step] = seconds.get(step, 0.0) + time.perf_counter() - start

    # -- fold ------------------------------------------------------------------------------------

    def fold(self) -> None:
        """Bring the index up to the topic; afterwards nobody else writes this shard."""
        with self._timed("fold"):
            self._sink.ready()
            self._give_way()
            was_new = self._index.is_new
            if was_new:
                self._begin_index()
            self._now = now = self._lookup.now()
            newest = 0
            first_version = self._rules.first_version
            for part in self._visible():
                if part.kind == "gaps":
                    self._index.fold_gaps(part.gaps, part.offsets, now)
                    continue
                self._report.folded += len(part.aggregate_ids)
                newest = max(newest, int(part.create_times.max(initial=0)))
                versions: dict[str, list[int]] = {}
                below: dict[str, list[int]] = {}
                pairs = zip(part.aggregate_ids, part.versions.tolist(), strict=True)
                for aggregate_id, version in pairs:
                    of = versions if version >= first_version else below
                    of.setdefault(aggregate_id, []).append(version)
                last = {a: max(v) for a, v in versions.items()}
                self._index.fold_events(last, versions, part.offsets, now, below)
            if self._sink.offsets != self._index.offsets:
                self._index.moved_to(self._sink.offsets)
            if was_new and self._sink.truncated and self._index.position is None:
                self._report.baseline = self._lost_baseline(newest)
                self._index.set_baseline(self._report.baseline)

    def _visible(self) -> Iterator[Folded]:
        """What of the topic the index does not know; all that it knows is visible at the end."""
        while True:
            if self._index.unmarked:
                self._report.restored += self._sink.restore(self._index.unmarked)
                self._index.restored()
            index = self._index
            try:
                yield from self._sink.fold(
                    index.offsets, index.written, acknowledged=self._job.acknowledged
                )
            except UnmarkedError as lost:
                self._index.note_unmarked(lost.written)
            else:
                return

    def _give_way(self) -> None:
        """Stop where the publisher was started again: a shard of its number may be another one.

        Only now that the sink has taken the shard: had it done so before that start, it would be
        fenced by it. On a disk that the start has not written to, nothing can be told.
        """
        state = StateDir(self._job.config.app.state_dir)
        newest = state.read(state.run_file)
        if newest is not None and newest["run"] > self._job.run:
            raise StateError(
                "run.superseded",
                "the publisher was started again while this task of a former run stalled",
                where=f"app.state_dir = {self._job.config.app.state_dir}",
                suggestion="nothing to do: this task publishes nothing more, the newer run goes on",
                retriable=True,
            )

    def look_for_others(self) -> None:
        """Whether the first fold has read what this publisher has not written.

        Only a transaction's offsets are known for sure, so only with them can that be told.
        """
        ends = self._job.ends.get(self._shard.number)
        self._report.foreign = (
            ends is not None
            and self._job.config.sink.delivery == "exactly_once"
            and self._report.folded > 0
            and not self._report.restored
            and any(self._sink.offsets.get(place, 0) > end for place, end in ends.items())
        )

    def _begin_index(self) -> None:
        """A new index, from those of another number of shards where there are any."""
        job, shard = self._job, self._shard
        former = job.former_shards
        if former is None:
            self._index.begin(job.start)
            return
        state = StateDir(job.config.app.state_dir)
        own = shard.topic_partitions()
        sink = job.config.sink
        topics = (sink.topic, sink.gaps_topic, sink.dead_topic, sink.late_topic)
        self._index.move_from(
            [state.shard_index(former, number) for number in range(former)],
            lambda aggregate_id: admission.topic_partition(aggregate_id, job.partitions) in own,
            [(topic, partition) for topic in topics for partition in own],
            job.start,
        )

    def _lost_baseline(self, newest: int) -> int:
        """Up to where events count as published when both index and topic have forgotten them.

        Args:
            newest: `create_time` of the newest event that is still on the topic, µs.
        """
        start = self._job.start or 0
        if self._job.low > start:
            return self._job.low
        return max(start, newest - self._job.config.recount.horizon - self._rules.longest_hold)

    # -- read ------------------------------------------------------------------------------------

    def publish(self, windows: Iterable[Bounds]) -> None:
        """What lies between where this index was last and the end of each window, and holds due.

        Args:
            windows: iterated in the thread that reads ahead.
        """
        if self._holds_shard:
            self.step(_NOTHING, None, due=True)
            if self._index.holds:
                return  # the whole shard waits
        with closing(self.rows(windows)) as chunks:
            for window, rows in chunks:
                self._open_since = window.open_since
                if rows is None:
                    self.step(_NOTHING, window.upto, due=not self._holds_shard)
                    self.compare()
                elif not self.step(rows, rows.column("create_time")[-1].as_py() - 1):
                    return
                if rows is None or rows.num_rows >= _TOLD_ROWS:
                    self._tell()

    def following(self, last: Bounds) -> Iterator[Bounds]:
        """The windows behind one, as long as this batch may go on."""
        job = self._job
        state = StateDir(job.config.app.state_dir)
        return following(
            state,
            last,
            job.follows,
            job.wanted,
            lambda: state.has_ended(job.run, job.batch),
            only_more=job.all_buckets,
        )

    def rows(
        self, windows: Iterable[Bounds]
    ) -> Generator[tuple[Bounds, pa.Table | None], None, None]:
        """What lies between the position of this index and the windows' ends, in chunks.

        None follows the last chunk of each window.
        """
        start = self._index.position
        horizon = self._job.config.recount.horizon
        if start is None:
            start = max(self._job.start or 0, self._job.low - horizon)
        counted_from = max(start, self._now - horizon) if horizon else None

        def read(after: int) -> Iterator[tuple[Bounds, pa.Table | None]]:
            for window in windows:
                for chunk in self._window(after, window.upto):
                    yield window, chunk
                yield window, None
                after = max(after, window.upto)

        with read_ahead(lambda: read(start)) as items:
            while True:
                with self._timed("read"):
                    item = next(items, None)
                if item is None:
                    return
                if item[1] is not None and counted_from is not None:
                    times = item[1].column("create_time").to_numpy()
                    if times[-1] > counted_from:
                        self._uncounted = np.append(self._uncounted, times[times > counted_from])
                yield item

    def _window(self, after: int, upto: int) -> Iterator[pa.Table]:
        """The rows of a window in chunks: pages that the source has read, and what is behind."""
        job, shard = self._job, self._shard
        if job.pages is not None:
            files = PageFiles(job.pages, shard.shards, shard.partitions)
            while (page := files.take(after, upto, shard.number)) is not None:
                after, rows = page
                yield from _parts(rows)
        if after < upto:
            yield from _chunks(self._reader.window(after, upto, shard))

    def _tell(self) -> None:
        """Let the driver, and the source, know how far this is."""
        job = self._job
        state = StateDir(job.config.app.state_dir)
        state.tell(job.run, job.batch, self._shard.number, vars(self.report(0)))

    def _take_counted(self, position: int | None) -> dict[int, int]:
        """Rows per time bucket up to a position that are accounted for with it."""
        if position is None or not len(self._uncounted):
            return {}
        ready = self._uncounted <= position
        counted = Counter(((self._uncounted[ready] - 1) // WIDTH).tolist())
        self._uncounted = self._uncounted[~ready]
        return counted

    # -- recount, requests -----------------------------------------------------------------------

    def compare(self, *, finish: bool = False) -> None:
        """Go on with the comparison that the driver wants, with keys that were read meanwhile.

        Args:
            finish: wait for all of them.
        """
        if self._comparing is None:
            self._begin_comparison()
        comparing = self._comparing
        while comparing is not None and (finish or comparing.are_ready):
            found = comparing.take()
            if found is None:
                self._report.unfinished = sorted(comparing.unfinished)
                self._report.compared = comparing.comparison.number
                comparing.close()
                self._comparing = comparing = None
                continue
            bucket, keys = found
            if keys is not None:
                comparing.rows[bucket] += keys.num_rows
                if not self._admit_unknown(keys):
                    comparing.unfinished.add(bucket)
                if not finish:
                    return  # the next window does not wait for more
            elif bucket not in comparing.unfinished:
                oldest = bucket_of(self._now - self._job.config.recount.horizon)
                self._index.set_buckets({bucket: comparing.rows[bucket]}, oldest)
                self._report.buckets[bucket] = comparing.rows[bucket]

    def _begin_comparison(self) -> None:
        """Since the start of the batch one is wanted, or meanwhile."""
        job = self._job
        state = StateDir(job.config.app.state_dir)
        known = state.read(state.progress_file) or {}
        newest = known.get("comparison", {"run": None})
        comparison = job.comparison
        if newest["run"] == job.run and newest["number"] > comparison.number:
            comparison = Comparison(newest["number"], tuple(newest["buckets"]))
        if comparison.number <= self._report.compared:
            return
        position = self._index.position
        # none: a new index of a shard that waits, nothing is read yet
        if position is None or not comparison.buckets:
            self._report.unfinished = [*comparison.buckets]
            self._report.compared = comparison.number
            return
        lookup, shard = self._lookup, self._shard
        self._comparing = KeysAhead(
            comparison, lambda bucket: lookup.keys(*window_of(bucket, position), shard)
        )

    def _admit_unknown(self, keys: pa.RecordBatch) -> bool:
        """Publish the rows of which the index does not know; False where the shard waits."""
        ids: list[Any] = keys.column("aggregate_id").unique().to_pylist()
        ranges = admission.unknown(keys, self._index.known(ids), self._rules)
        if not ranges:
            return True
        before = self._counts.admitted + self._counts.late
        rows = self._lookup.backtrack(ranges).sort_by("create_time")
        whole = self.step(rows, None)
        self._report.recount_found += self._counts.admitted + self._counts.late - before
        return whole

    def answer_requests(self) -> None:
        """Do what users ask for, with the aggregates of this shard."""
        own = self._shard.topic_partitions()
        for request in self._job.requests:
            a = request.aggregate_id
            if admission.topic_partition(a, self._shard.partitions) in own:
                self._report.answers[request.id] = self._answer(request)

    def _answer(self, request: Request) -> str:
        index, a, version = self._index, request.aggregate_id, request.version
        hold = index.holds.get(a)
        if request.action == "skip" and version is None:
            version = index.resolved(request.id)
            if version is None and hold is not None:
                version = hold.first_missing
                index.resolve(request.id, version, [r.id for r in self._job.requests])
        if hold is not None and version in {None, hold.first_missing}:
            version = hold.first_missing
            if request.action == "skip":
                self.step(_NOTHING, None, skip_now=[a])
            else:
                self.step(_NOTHING, None, look_now=[a])
            hold = index.holds.get(a)
            if hold is not None and hold.first_missing <= version:
                return "still missing"
        known = index.known([a])
        skipped = known.skipped.get(a, ())
        if version is not None and version <= known.last.get(a, version - 1):
            # now, or in a batch that failed before it was answered: no other gap is given up for it
            return "skipped" if admission.in_ranges(version, skipped) else "found"
        if request.action == "retry" and skipped:
            ranges = [admission.VersionRange(a, first, last) for first, last in skipped]
            rows = self._lookup.backtrack(ranges, self._rules.fetch_limit)
            self.step(rows, None)
            return "found" if rows.num_rows else "still missing"
        return "nothing is held" if request.action == "skip" else "nothing is missing"

    # -- admit, backtrack, publish, remember -----------------------------------------------------

    def step(
        self,
        rows: pa.Table,
        position: int | None,
        *,
        due: bool = False,
        look_now: Sequence[str] = (),
        skip_now: Sequence[str] = (),
    ) -> bool:
        """Decide and publish one chunk.

        Args:
            rows: of the window.
            position: what the index has accounted for after it; None: as before.
            due: also try the holds that are due.
            look_now, skip_now: as in `admission.plan`.

        Returns:
            False where the shard waits for a gap, and the rest of the chunk with it.
        """
        redos = 0
        while True:
            if self._sink.needs_replacement:
                self._replace_sink()
            try:
                return self._attempt(rows, position, due, look_now, skip_now)
            except RecordRefusedError:
                continue  # its rows are dead letters now
            except SinkError as error:
                redos += 1
                if error.code not in _REDO or redos == _MOST_REDOS:
                    raise

    def _replace_sink(self) -> None:
        self._report.replaced += 1
        self._sink.close()
        self._sink = self._new_sink()
        self.fold()

    def _attempt(
        self,
        rows: pa.Table,
        position: int | None,
        due: bool,
        look_now: Sequence[str],
        skip_now: Sequence[str],
    ) -> bool:
        now = self._lookup.now()
        with self._timed("index"):
            ids: list[Any] = rows.column("aggregate_id").unique().to_pylist()
            waiting = self._index.due(now) if due else []
            if not (ids or waiting or look_now or skip_now):
                self._publish(Decision(_NOTHING), Known(), position)
                return True
            # of those that wait, too: what was skipped of them before stays skipped
            known = self._index.known(list(dict.fromkeys([*ids, *waiting, *look_now, *skip_now])))

        def decide(some: pa.Table) -> Decision:
            with self._timed("admit"):
                plan = admission.plan(
                    some,
                    known,
                    self._rules,
                    now,
                    waiting,
                    open_since=self._open_since,
                    look_now=look_now,
                    skip_now=skip_now,
                )
            with self._timed("backtrack"):
                found, below = self._backtrack(plan, known)
            with self._timed("admit"):
                return plan.decide(found, below)

        decision = decide(rows)
        whole = True
        if self._holds_shard and rows.num_rows:
            hold = min(filter(None, decision.holds.values()), key=attrgetter("since"), default=None)
            if hold is not None:
                whole = False
                position = None if position is None else hold.since - 1
                created = rows.column("create_time").to_numpy()
                waits = rows.filter(pa.array(created == hold.since))
                hold, whole_decision = at_first_row(hold, waits), decision
                decision = decide(rows.filter(pa.array(created < hold.since)))
                hold = with_unpublished(hold, whole_decision, decision)
                decision.holds[hold.aggregate_id] = hold
                decision.counts.gaps_opened += 1
        _assert_order(decision, known)
        self._publish(decision, known, position)
        return whole

    def _publish(self, decision: Decision, known: Known, position: int | None) -> None:
        report, index = self._report, self._index
        kept = self._refusals.without(decision, index.dead_run)
        events, late, dead = kept.events, kept.late, [*kept.letters]
        diverted = decision.diverted
        if diverted is not None:
            diverted, _, dead_late = self._refusals.split(diverted)
            dead += dead_late
        refused: dict[str, list[int]] = {}
        if decision.refused is not None:
            table, reasons = decision.refused
            dead += dead_rows(table, reasons)
            for a, v in zip(values(table, "aggregate_id"), values(table, "version"), strict=True):
                if v < self._rules.first_version:
                    refused.setdefault(a, list(known.refused.get(a, ()))).append(v)
        offsets: dict[tuple[str, int], int] = {}
        written: dict[tuple[str, int], tuple[int, int]] = {}
        if decision.publishes:
            try:
                with self._timed("publish"):
                    published = self._sink.publish(
                        events,
                        late=late,
                        gaps=decision.gaps,
                        dead=dead,
                        diverted=diverted,
                        crash_point=failpoint,
                    )
            except RecordRefusedError as refusal:
                self._refusals.note(refusal, events, diverted)
                raise
            offsets, written = published.next_offsets, published.written
            report.published += published.events
            report.skipped.extend(asdict(gap) for gap in decision.gaps)
            report.dead.extend(
                {"aggregate_id": d.aggregate_id, "version": d.version, "reason": d.reason}
                for d in dead
            )
            failpoint("before_index")
        counted = self._take_counted(position)
        with self._timed("index"):
            index.record(
                decision,
                offsets,
                position,
                written=written,
                refused=refused,
                dead_run=kept.run,
                counted=counted,
            )
        if decision.publishes:
            failpoint("after_index")
        for bucket in counted:
            report.buckets[bucket] = index.rows_of(bucket)
        self._counts.add(decision.counts)

    # -- backtrack -------------------------------------------------------------------------------

    def _backtrack(self, plan: admission.Plan, known: Known) -> tuple[pa.Table, pa.Table]:
        found = below = _NOTHING
        if plan.missing:
            found = self._lookup.backtrack(plan.missing, self._rules.fetch_limit)
        if plan.first_sights:
            assert known.baseline is not None
            below = self._lookup.below(plan.first_sights, _BELOW)
            by_aggregate: dict[str, list[tuple[int, int]]] = {a: [] for a, _ in plan.first_sights}
            pairs = zip(
                values(below, "aggregate_id"),
                values(below, "version"),
                values(below, "create_time"),
                strict=True,
            )
            for aggregate_id, version, created in pairs:
                by_aggregate[aggregate_id].append((version, created))
            undecided = [
                (aggregate_id, version)
                for aggregate_id, version in plan.first_sights
                if not admission.first_sight_is_decided(
                    by_aggregate[aggregate_id], known.baseline, _BELOW
                )
            ]
            if undecided:
                whole = self._lookup.below(undecided, self._rules.fetch_limit)
                below = pa.concat_tables([below, whole])
        return found, below

    # -- report ----------------------------------------------------------------------------------

    def report(self, after: int) -> ShardReport:
        """What was done, and what is pending."""
        holds = self._index.holds.values()
        report = self._report
        report.counts = dict(vars(self._counts))
        known_to = self._index.position
        position = after if known_to is None else known_to  # a new index of a shard that waits
        if self._job.all_buckets:
            report.buckets = self._index.buckets
        report.position = position
        report.low = min([position, *(hold.since - 1 for hold in holds)])
        report.offsets = [(*place, offset) for place, offset in self._index.offsets.items()]
        report.holds = len(holds)
        report.next_due = min((hold.next_attempt for hold in holds), default=None)
        return report


def _parts(rows: pa.Table) -> Iterator[pa.Table]:
    """A page in equal parts of about what one transaction takes."""
    if rows.num_rows:
        parts = max(1, round(rows.num_rows / CHUNK_ROWS))
        size = -(-rows.num_rows // parts)
        for at in range(0, rows.num_rows, size):
            yield rows.slice(at, size)


def _chunks(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Batches of rows, put together to what one transaction takes."""
    chunk: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        chunk.append(batch)
        size += batch.num_rows
        if size >= CHUNK_ROWS:
            yield pa.Table.from_batches(chunk)
            chunk, size = [], 0
    if chunk:
        yield pa.Table.from_batches(chunk)


def _assert_order(decision: Decision, known: Known) -> None:
    """Refuse to publish what must never be: asked of the result, not of the way it was made."""
    events = decision.events
    if decision.late is not None:
        events = events.filter(pa.array(~decision.late))
    encoded = events.column("aggregate_id").combine_chunks().dictionary_encode()
    code = encoded.indices.to_numpy()
    version = events.column("version").to_numpy()
    order = np.argsort(code, kind="stable")
    c, v = code[order], version[order]
    first = np.append(True, c[1:] != c[:-1]) if len(c) else np.zeros(0, dtype=bool)
    ascending = bool((first[1:] | (v[1:] > v[:-1])).all())
    ids = encoded.dictionary.to_pylist()
    fresh = all(
        version > known.last.get(ids[number], version - 1)
        for number, version in zip(c[first].tolist(), v[first].tolist(), strict=True)
    )
    if not (ascending and fresh):
        raise StateError(
            "publish.order_violated",
            "a batch would have published a version twice or out of order; nothing was published",
            suggestion="please report this: it is a defect of eventpub",
        )
