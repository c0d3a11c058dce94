"""One shard's way through one window: fold, read, admit, backtrack, publish, remember.

This runs in a task of Spark, in whichever worker process it lands, and relies on nothing that an
earlier task left in memory: the index is opened here and the producer made here, which fences every
older one. At any point the process may die. What is visible on the topic then is what the fold of
the next task reads back, before it decides anything.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from eventpub import admission
from eventpub.admission import EVENTS, Decision, Known, Shard, values
from eventpub.config import Config
from eventpub.errors import SinkError, StateError
from eventpub.index import Index
from eventpub.sink import ShardSink
from eventpub.spark.failpoint import failpoint
from eventpub.spark.progress import ShardReport
from eventpub.spark.state import StateDir
from eventpub.store import EventStore, Layout

CHUNK_ROWS = 25_000
"""Rows of one transaction: what a shard holds in memory at a time."""

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
    """What a shard's task needs to know; made once by the driver, pickled with every task.

    Attributes:
        start: events created at or before are not published, µs; None: all are.
        low: from where a shard without an index reads again, µs.
        ends: by shard, where its last batch left its partitions; empty after anything went wrong.
    """

    config: Config
    layout: Layout
    partitions: int
    start: int | None
    low: int
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
        )


def publish_window(job: Job, number: int, after: int, upto: int) -> ShardReport:
    """Publish one shard's part of the window ``after < create_time <= upto``.

    Raises:
        StoreError, SinkError, StateError: nothing was half done; the call may be repeated.
    """
    with _ShardTask(job, number) as task:
        task.fold()
        task.look_for_others()
        for rows in task.rows(after, upto):
            task.step(rows, position=rows.column("create_time")[-1].as_py() - 1)
        task.step(_NOTHING, position=upto, due=True)
        return task.report(upto)


class _ShardTask:
    def __init__(self, job: Job, number: int) -> None:
        config = job.config
        self._job = job
        self._shard = Shard(number, config.spark.shards, job.partitions)
        self._rules = job.rules()
        self._report = ShardReport(number)
        self._counts = admission.Counts()
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
        self._sink.close()
        self._open.close()

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
            was_new = self._index.is_new
            if was_new:
                self._index.begin(self._job.start)
            now = self._lookup.now()
            newest = 0
            for part in self._sink.fold(self._index.offsets):
                if part.kind == "gaps":
                    self._index.fold_gaps(part.gaps, part.offsets, now)
                    continue
                self._report.folded += len(part.aggregate_ids)
                newest = max(newest, int(part.create_times.max(initial=0)))
                versions: dict[str, list[int]] = {}
                pairs = zip(part.aggregate_ids, part.versions.tolist(), strict=True)
                for aggregate_id, version in pairs:
                    versions.setdefault(aggregate_id, []).append(version)
                last = {a: max(v) for a, v in versions.items()}
                self._index.fold_events(last, versions, part.offsets, now)
            if self._sink.offsets != self._index.offsets:
                self._index.moved_to(self._sink.offsets)
            if was_new and self._sink.truncated:
                self._report.baseline = self._lost_baseline(newest)
                self._index.set_baseline(self._report.baseline)

    def look_for_others(self) -> None:
        """Whether the first fold has read what this publisher has not written.

        Only a transaction's offsets are known for sure, so only with them can that be told.
        """
        ends = self._job.ends.get(self._shard.number)
        self._report.foreign = (
            ends is not None
            and self._job.config.sink.delivery == "exactly_once"
            and self._report.folded > 0
            and any(self._sink.offsets.get(place, 0) > end for place, end in ends.items())
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

    def rows(self, after: int, upto: int) -> Iterator[pa.Table]:
        """The window, and what lies between it and where this index was last, in chunks."""
        known_to = self._index.position
        start = min(after, self._job.low if known_to is None else known_to)
        batches = self._reader.window(start, upto, self._shard)
        chunk: list[pa.RecordBatch] = []
        size = 0
        while True:
            with self._timed("read"):
                batch = next(batches, None)
            if batch is None:
                break
            chunk.append(batch)
            size += batch.num_rows
            if size >= CHUNK_ROWS:
                yield pa.Table.from_batches(chunk)
                chunk, size = [], 0
        if chunk:
            yield pa.Table.from_batches(chunk)

    # -- admit, backtrack, publish, remember -----------------------------------------------------

    def step(self, rows: pa.Table, position: int, *, due: bool = False) -> None:
        """Decide and publish one chunk.

        Args:
            rows: of the window.
            position: what the index has accounted for after it.
            due: also try the holds that are due.
        """
        for _ in range(_MOST_REDOS):
            if self._sink.needs_replacement:
                self._replace_sink()
            try:
                self._attempt(rows, position, due=due)
            except SinkError as error:
                if error.code not in _REDO:
                    raise
                last_error = error
                continue
            return
        raise last_error

    def _replace_sink(self) -> None:
        self._report.replaced += 1
        self._sink.close()
        self._sink = self._new_sink()
        self.fold()

    def _attempt(self, rows: pa.Table, position: int, *, due: bool) -> None:
        now = self._lookup.now()
        with self._timed("index"):
            ids: list[Any] = rows.column("aggregate_id").unique().to_pylist()
            known = self._index.known(ids)
            waiting = self._index.due(now) if due else []
        with self._timed("admit"):
            plan = admission.plan(rows, known, self._rules, now, waiting)
        with self._timed("backtrack"):
            found, below = self._backtrack(plan, known)
        with self._timed("admit"):
            decision = plan.decide(found, below)
            _assert_order(decision, known)
        offsets: dict[tuple[str, int], int] = {}
        if decision.publishes:
            with self._timed("publish"):
                published = self._sink.publish(
                    decision.events,
                    late=decision.late,
                    gaps=decision.gaps,
                    diverted=decision.diverted,
                    crash_point=failpoint,
                )
            offsets = published.next_offsets
            self._report.published += published.events
            self._report.skipped.extend(asdict(gap) for gap in decision.gaps)
        failpoint("before_index")
        with self._timed("index"):
            self._index.record(decision, offsets, position)
        failpoint("after_index")
        self._counts.add(decision.counts)

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

    def report(self, upto: int) -> ShardReport:
        """What was done, and what is pending."""
        holds = self._index.holds.values()
        report = self._report
        report.counts = vars(self._counts)
        report.position = upto
        report.low = min([upto, *(hold.since - 1 for hold in holds)])
        report.offsets = [(*place, offset) for place, offset in self._index.offsets.items()]
        report.holds = len(holds)
        report.next_due = min((hold.next_attempt for hold in holds), default=None)
        return report


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
