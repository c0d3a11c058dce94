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
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from eventpub import admission
from eventpub.admission import (
    EVENTS,
    Decision,
    Hold,
    Known,
    Rewritten,
    Seen,
    Shard,
    numbers_of,
    values,
)
from eventpub.config import Config
from eventpub.errors import SinkError, StateError
from eventpub.index import Index, set_aside
from eventpub.sink import (
    Folded,
    RecordRefusedError,
    ShardSink,
    UnmarkedError,
    first_offsets,
    topic_ids,
    topic_remade,
)
from eventpub.spark import pace
from eventpub.spark.ahead import read_ahead
from eventpub.spark.boundary import Bounds, following
from eventpub.spark.compare import KeysAhead
from eventpub.spark.failpoint import failpoint
from eventpub.spark.hold_shard import at_first_row, with_unpublished
from eventpub.spark.jumps import Jumps
from eventpub.spark.letters import Refusals, dead_rows
from eventpub.spark.pace import Pace, portions, rows_within
from eventpub.spark.page_files import PageFiles
from eventpub.spark.progress import ShardReport
from eventpub.spark.recount import WIDTH, Comparison, oldest_needed, window_of
from eventpub.spark.state import Request, StateDir
from eventpub.store import EventStore, Layout

_TOLD_ROWS = 10_000
"""Events of a transaction that is reported to the driver at once; smaller ones once a window."""

_TOLD_EVERY = 1.0
"""Seconds after which smaller ones are reported, too, where a window takes long."""

_BELOW = 16, 10_000
"""Rows looked at below a first sight, at first and where those do not tell; the first is enough
wherever versions and times of an aggregate differ in order by fewer."""

_DUE_AT_ONCE = 100, 500
_HOLDS_TURN = 0.1
_HOLDS_SHARE = 4
"""Holds that are tried in one transaction, seconds for those that are due after each window, and of
which part of all time that may be while there are rows: where there are very many, the others'
events do not wait for all of them, and still get most of the machine."""

_FETCH_TURN = 0.3
"""Seconds in which the versions missing in a chunk are looked for; others wait their turn."""

_MOST_SHOWN = 100
"""Skipped gaps that a report names; it is written many times, and all are on their topic."""

_COUNTED_LATE = 10_000_000
"""µs behind the horizon at which a bucket may still be counted, by a driver that is slow."""

_SHOWN_EVERY = 1.0
"""Seconds between two reports of how far a fold is."""

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
        position: up to where all shards have accounted for everything, µs.
        run: which start of the publisher this is of; it grows.
        batch: the micro-batch's number.
        goes_on: counts that the previous attempt of this batch reported are kept; the driver has
            not added them yet.
        takes_over: the same of another batch, which was begun and is not tried again.
        wanted: how many batches the driver has wanted so far; for one more, a task stops following.
        comparison: what the recount wants compared with the index.
        all_buckets: report what was accounted for in all of them, not only in those that change:
            the first batch of a start, which follows the boundary only through a backlog.
        requests: what users ask for.
        accepts_topic: whether the topic is the one of `sink.accept_topic_id`.
        former_shards: how many shards the run before had, where it was another number.
        former_indexes: those of another number of partitions, where it has changed.
        is_placed: whether all that is on the topic was written with this number of partitions.
        pages: where the source leaves pages for tasks of this machine; see `page_files`.
        follows: seconds for which a task goes on as the boundary moves; see `boundary`.
        acknowledged: by topic and partition, up to where shards have ever reported to be.
        ends: by shard, where its last batch left its partitions; empty after anything went wrong.
        uncounted_since: nothing that is to be counted again out of turn was created at or before,
            µs; None: nothing is.
    """

    config: Config
    layout: Layout
    partitions: int
    start: int | None
    low: int
    run: int
    position: int = 0
    batch: int = 0
    goes_on: bool = False
    takes_over: int | None = None
    wanted: int = 0
    comparison: Comparison = field(default_factory=Comparison)
    all_buckets: bool = False
    requests: tuple[Request, ...] = ()
    accepts_topic: bool = False
    former_shards: int | None = None
    former_indexes: tuple[Path, ...] = ()
    is_placed: bool = False
    pages: Path | None = None
    follows: float = 0.0
    acknowledged: dict[tuple[str, int], int] = field(default_factory=dict)
    ends: dict[int, dict[tuple[str, int], int]] = field(default_factory=dict)
    uncounted_since: int | None = None

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
            times_last=self.layout.times_last,
            repeated=self.layout.repeated,
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

    def publish(damage: str | None = None) -> ShardReport:
        with _without_collector(), _ShardTask(job, number, window, damage) as task:
            task.fold()
            task.look_for_others()
            task.answer_requests()
            task.publish(chain([window], task.following(window) if follows else ()))
            if not task.is_stopping:
                task.compare(finish=True)
            return task.report(after)

    try:
        try:
            return publish()
        except StateError as error:
            if error.code != "index.corrupt":
                raise
            aside = set_aside(_index_of(job, number))
            return publish(f"{error.message}; it was moved to {aside}")
    finally:
        if follows:  # what comes now waits for the next batch: no other shard shall go on for long
            StateDir(job.config.app.state_dir).end_batch(job.run, job.batch)


def _index_of(job: Job, number: int) -> Path:
    return StateDir(job.config.app.state_dir).shard_index(job.config.spark.shards, number)


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
    def __init__(self, job: Job, number: int, window: Bounds, damage: str | None = None) -> None:
        config = job.config
        self._open_since = window.open_since
        self._hidden_since = window.hidden_since
        self._holds_shard = config.gaps.policy == "hold_shard"
        self._refusals = Refusals(config.sink)
        self._comparing: KeysAhead | None = None
        self._leaves = False
        self._reads_all = False
        self._uncounted = np.empty(0, np.int64)
        self._now = 0
        self._holds_turn = 0.0
        self._due_at_once = max(_DUE_AT_ONCE)
        self._had_rows = False
        self._told_at = time.monotonic()
        self._job = job
        self._state = StateDir(config.app.state_dir)
        progress = self._state.read(self._state.progress_file) or {}
        self._uncounted_since: int | None = progress.get("hidden_since")
        self._shard = Shard(number, config.spark.shards, job.partitions)
        self._rules = job.rules()
        self._report = self._begin_report()
        self._report.rebuilt = damage or self._report.rebuilt
        self._counts = admission.Counts(**self._report.counts)
        self._open = ExitStack()
        self._sink = self._new_sink()
        try:
            self._index = self._open.enter_context(
                Index(
                    _index_of(job, number),
                    {
                        "app": config.app.id,
                        "topic": config.sink.topic,
                        "partitions": job.partitions,
                        "shard": [number, config.spark.shards],
                    },
                    adopts=self._adopts,
                )
            )
            self._pace = Pace(config.sink.transaction_timeout / 1e6, self._index.chunk_bytes)
            self._reader = self._open.enter_context(EventStore(config.store, job.layout))
            self._lookup = self._open.enter_context(EventStore(config.store, job.layout))
        except BaseException:
            self.__exit__()
            raise
        if job.all_buckets and self._report.read_before is None:
            self._report.read_before = self._index.position

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
        app = self._job.config.app
        return ShardSink(self._job.config.sink, app.id, self._shard, app.former_ids)

    def _adopts(self, identity: Mapping[str, Any]) -> bool:
        """Whether an index was this one before application or topic were renamed."""
        config, shard = self._job.config, self._shard
        app, topic = identity["app"], identity["topic"]
        former = {
            "app": app if app in config.app.former_ids else config.app.id,
            "topic": topic if self._job.accepts_topic else config.sink.topic,
            "partitions": shard.partitions,
            "shard": [shard.number, shard.shards],
        }
        return dict(identity) == {**identity, **former}

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
        """Bring the index up to the topic; afterwards nobody else writes this shard.

        Raises:
            StateError: run.stopping
        """
        with self._timed("fold"):
            self._sink.ready()
            self._give_way()
            if self._index.is_new:
                self._begin_index()
                self._reads_all = self._index.reads_everywhere and not self._index.offsets
            self._check_topics()
            self._now = self._lookup.now()
            self._index.keep_times(self._job.layout.read_as, self._now)
            jumps = Jumps(self._index.known) if self._index.undecided is None else None
            try:
                self._fold_parts(jumps)
            finally:
                self._state.forget_fold(self._shard.number)
            self._index.settle_unsigned()
            # before the offsets move on: also where nothing was left to be read
            self._index.note_truncated(self._sink.truncated, 0)
            if self._sink.offsets != self._index.offsets:
                self._index.moved_to(self._sink.offsets)
            if self._index.reads_everywhere:
                self._index.has_read_everywhere(self._own_places())
            if self._reads_all:
                self._report.is_placed = not self._sink.misplaced
                self._reads_all = False
            for origin, count in self._sink.not_ours.items():
                before = self._report.not_ours.get(origin, 0)
                self._report.not_ours[origin] = before + count
            if jumps is not None:
                self._report.jumps += jumps.found()
            self._decide_baseline()

    def _fold_parts(self, jumps: Jumps | None) -> None:
        shown = time.monotonic()
        for part in self._visible():
            self._fold_part(part, self._now, jumps)
            failpoint("during_fold")
            self._require_going_on()
            if time.monotonic() - shown > _SHOWN_EVERY:
                shown = time.monotonic()
                run, number = self._job.run, self._shard.number
                self._state.tell_fold(run, number, self._report.folded, self._sink.unread)

    def _require_going_on(self) -> None:
        if self.is_stopping:
            raise StateError("run.stopping", "stopped while it read the topic back", retriable=True)

    def _fold_part(self, part: Folded, now: int, jumps: Jumps | None) -> None:
        self._index.note_truncated(self._sink.truncated, int(part.create_times.max(initial=0)))
        if part.kind == "gaps":
            if part.unsigned:
                self._index.fold_unsigned(part.unsigned)
            self._index.fold_gaps(part.gaps, part.offsets, now)
            return
        self._report.folded += len(part.aggregate_ids)
        first_version = self._rules.first_version
        versions: dict[str, list[int]] = {}
        below: dict[str, list[int]] = {}
        for aggregate_id, version in zip(part.aggregate_ids, part.versions.tolist(), strict=True):
            of = versions if version >= first_version else below
            of.setdefault(aggregate_id, []).append(version)
        if jumps is not None:
            jumps.add(part.kind, versions)
        last = {a: max(v) for a, v in versions.items()}
        created = self._rules.steady(part.create_times)
        created = np.where(created > 0, created, now)  # a record that does not say
        times = _times(part, last, created)
        rewritten = self._rewritten(part, [*versions], created)
        self._index.fold_events(last, versions, part.offsets, now, below, times, rewritten)

    def _rewritten(self, part: Folded, ids: list[str], created: np.ndarray) -> dict[str, Rewritten]:
        """What is known of versions that were written anew, with the rows of a chunk."""
        found = self._index.rewritten(ids)
        if not (found or part.published):
            return {}
        rows = zip(part.aggregate_ids, part.versions.tolist(), created.tolist(), strict=True)
        for number, (aggregate_id, version, at) in enumerate(rows):
            if number in part.published:
                last, since = part.published[number]
                known = found.get(aggregate_id)
                if known is None or (known.since, known.last) < (since, last):
                    found[aggregate_id] = Rewritten(since, last)
            if aggregate_id in found:
                found[aggregate_id] = found[aggregate_id].plus(version, at)
        return found

    def _decide_baseline(self) -> None:
        """At the end of a first fold, or of one that was cut, whatever tries of it came before.

        Cut above what the index knows: the index is older than progress.json, or the whole state is
        older than the topic, or what was published last was noted nowhere before it was cut.
        """
        index = self._index
        if index.undecided is None:
            return
        truncated, newest = index.undecided
        baseline, known_to, low = None, index.position, self._job.low
        is_older = known_to is None or known_to < low
        if truncated and (is_older or self._is_of_older_state()):
            baseline = self._report.baseline = self._lost_baseline(newest)
            baseline = max(baseline, index.baseline or 0)
            index.forget_times(self._now)
            # a hold: what was published meanwhile may be cut; with hold_shard, by other shards
            if low < self._job.position or self._holds_shard:
                self._report.repeats_after = low
        elif truncated and known_to is not None:
            # what it held, or the recount had found, is older than the position
            horizon = self._job.config.recount.horizon
            self._report.repeats_after = self._low(known_to) - horizon
        index.decide_baseline(baseline)

    @property
    def is_stopping(self) -> bool:
        """Whether the publisher is to stop; asked wherever something may take long."""
        return self._state.is_stopping(self._job.run)

    def _visible(self) -> Iterator[Folded]:
        """What of the topic the index does not know; all that it knows is visible at the end."""
        while True:
            if self._index.unmarked:
                self._report.restored += self._sink.restore(self._index.unmarked)
                self._index.restored()
            index = self._index
            try:
                yield from self._sink.fold(
                    index.offsets,
                    index.written,
                    acknowledged=self._job.acknowledged,
                    everywhere=index.reads_everywhere,
                    meanwhile=self._require_going_on,
                )
            except UnmarkedError as lost:
                self._reads_all = False  # the next one goes on where this one has come to
                self._index.note_unmarked(lost.written)
            else:
                return

    def _give_way(self) -> None:
        """Stop where the publisher was started again: a shard of its number may be another one.

        Only now that the sink has taken the shard: had it done so before that start, it would be
        fenced by it. On a disk that the start has not written to, it cannot know.
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

        Only a transaction's offsets are known for sure, so only with them can it be decided.
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
        state = StateDir(job.config.app.state_dir)
        directories = list(job.former_indexes)
        if former is not None and not directories:
            directories = [state.shard_index(former, number) for number in range(former)]
        # Partitions were added, or nobody remembers that none were: what was written before stands
        # where another shard writes now.
        everywhere = bool(job.former_indexes) or not job.is_placed
        if not directories:
            self._index.begin(job.start, everywhere=everywhere)
            return
        own = shard.topic_partitions()
        every = [(t, p) for t in job.config.sink.topics for p in range(job.partitions)]
        self._index.move_from(
            directories,
            lambda aggregate_id: admission.topic_partition(aggregate_id, job.partitions) in own,
            every if everywhere else self._own_places(),
            job.start,
            everywhere=everywhere,
        )

    def _own_places(self) -> set[tuple[str, int]]:
        topics, own = self._job.config.sink.topics, self._shard.topic_partitions()
        return {(topic, partition) for topic in topics for partition in own}

    def _check_topics(self) -> None:
        """Whether the topics are those that the offsets of the index belong to.

        One beside the topic that was made again is empty, and that is all.
        """
        sink, index = self._job.config.sink, self._index
        ids = topic_ids(sink, sink.topics)
        known = index.topics
        made_again = {topic for topic, id_ in ids.items() if known.get(topic, id_) != id_}
        if sink.topic in made_again:
            if ids[sink.topic] != sink.accept_topic_id:
                raise topic_remade(sink, ids[sink.topic])
            made_again = set(sink.topics)
        if made_again or ids.items() - known.items():
            index.note_topics(ids, made_again)
        self._report.made_again += sorted(made_again)

    def _lost_baseline(self, newest: int) -> int:
        """Up to where events count as published when both index and topic have forgotten them.

        Args:
            newest: `create_time` of the newest event that was read back from the topic, µs.
        """
        low = self._job.low
        start = self._job.start or 0
        if low > start and not self._is_of_older_state():
            return low
        kept = newest - self._job.config.recount.horizon - self._rules.longest_hold
        return max(start, low, kept)

    def _is_of_older_state(self) -> bool:
        """Whether the driver does not know either what was cut off the topic."""
        topic, known = self._job.config.sink.topic, self._job.acknowledged
        own = [(topic, p) for p in self._shard.topic_partitions()]
        lows = first_offsets(self._job.config.sink, own)
        return any(known.get(place, 0) < low for place, low in lows.items())

    # -- read ------------------------------------------------------------------------------------

    def publish(self, windows: Iterable[Bounds]) -> None:
        """What lies between where this index was last and the end of each window, and holds due.

        Args:
            windows: iterated in the thread that reads ahead.
        """
        if self._holds_shard:
            self._try_holds(None)
            if self._index.holds:
                return  # the whole shard waits
        with closing(self.rows(windows)) as chunks:
            for window, rows in chunks:
                self._open_since = window.open_since
                self._hidden_since = window.hidden_since
                if self.is_stopping:
                    return
                if rows is None:
                    self._pass(window.upto)
                    self.compare()
                elif not self.step(rows, rows.column("create_time")[-1].as_py() - 1):
                    return
                else:
                    self._had_rows = True
                if (
                    rows is None
                    or rows.num_rows >= _TOLD_ROWS
                    or time.monotonic() - self._told_at > _TOLD_EVERY
                ):
                    self._tell()

    def _pass(self, upto: int) -> None:
        """A window is done: note it, and try the holds that are due."""
        if self._holds_shard or time.monotonic() < self._holds_turn:
            self.step(_NOTHING, upto)
        else:
            self._try_holds(upto)

    def _try_holds(self, position: int | None) -> None:
        """Try holds that are due, in portions, and where there are more for a part of the time."""
        began = now = time.monotonic()
        while now - began < _HOLDS_TURN:
            self.step(_NOTHING, position, due=True)
            due = self._index.holds.next_due()
            if due is None or due > self._now or self.is_stopping:
                return
            took, now = time.monotonic() - now, time.monotonic()
            least, most = _DUE_AT_ONCE
            if took > _HOLDS_TURN:
                self._due_at_once = max(least, self._due_at_once // 2)
            elif took < _HOLDS_TURN / 4:
                self._due_at_once = min(most, 2 * self._due_at_once)
        if self._had_rows:
            self._holds_turn = now + (_HOLDS_SHARE - 1) * (now - began)
        self._had_rows = False

    def following(self, last: Bounds) -> Iterator[Bounds]:
        """The windows behind one, as long as this batch may go on, and this task does."""
        job = self._job
        state = StateDir(job.config.app.state_dir)
        return following(
            state,
            last,
            job.follows,
            job.wanted,
            lambda: self._leaves or state.has_ended(job.run, job.batch),
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
        began = self._now

        def counts_from(window: Bounds) -> int:
            """What is older when it is read is counted again only where something hides there."""
            since = began - horizon
            hidden = since if window.hidden_since is None else window.hidden_since
            return max(start, min(since, hidden))

        def read(after: int) -> Iterator[tuple[Bounds, pa.Table | None]]:
            for window in windows:
                for chunk in self._window(after, window.upto):
                    yield window, chunk
                yield window, None
                after = max(after, window.upto)

        with read_ahead(lambda: read(start)) as items:
            try:
                while True:
                    with self._timed("read"):
                        item = next(items, None)
                    if item is None:
                        return
                    if item[1] is not None and horizon:
                        times = item[1].column("create_time").to_numpy()
                        if times[-1] > (counted_from := counts_from(item[0])):
                            late = times[times > counted_from]
                            self._uncounted = np.append(self._uncounted, late)
                    yield item
            finally:
                self._leaves = True  # who follows the boundary in the other thread ends, too

    def _window(self, after: int, upto: int) -> Iterator[pa.Table]:
        """The rows of a window in chunks: pages that the source has read, and what is behind."""
        job, shard = self._job, self._shard
        if job.pages is not None:
            files = PageFiles(job.pages, shard.shards, shard.partitions)
            while (page := files.take(after, upto, shard.number)) is not None:
                after, rows = page
                yield from portions(rows)
        if after < upto:
            yield from _chunks(self._reader.window(after, upto, shard))

    def _tell(self) -> None:
        """Let the driver, and the source, know how far this is."""
        job = self._job
        state = StateDir(job.config.app.state_dir)
        self._told_at = time.monotonic()
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
                rows = {bucket: comparing.rows[bucket]}
                self._index.set_buckets(rows, self._oldest_bucket())
                self._report.buckets[bucket] = comparing.rows[bucket]

    def _oldest_bucket(self) -> int:
        """The first whose number of rows may still be of use."""
        horizon = self._job.config.recount.horizon + _COUNTED_LATE
        since = self._hidden_since, self._uncounted_since, self._job.uncounted_since
        return oldest_needed(self._now, horizon, *since)

    def _begin_comparison(self) -> None:
        """Since the start of the batch one is wanted, or meanwhile."""
        job = self._job
        state = StateDir(job.config.app.state_dir)
        known = state.read(state.progress_file) or {}
        self._uncounted_since = known.get("hidden_since")
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
        whole = True
        while ranges and whole:
            rows, ranges = self._lookup.fetch(ranges, pace.CHUNK_ROWS, pace.CHUNK_BYTES)
            whole = self.step(rows.sort_by("create_time"), None)
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
            return "nothing is held"  # as far as who asked could see
        if hold is not None and version in {None, hold.first_missing}:
            version = hold.first_missing
            if request.to_version is not None and self._is_larger(hold, request.to_version):
                return "changed"
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
            found = False
            while ranges:
                rows, ranges = self._lookup.fetch(ranges, pace.CHUNK_ROWS, pace.CHUNK_BYTES)
                found = found or rows.num_rows > 0
                self.step(rows, None)
            return "found" if found else "still missing"
        return "nothing is held" if request.action == "skip" else "nothing is missing"

    def _is_larger(self, hold: admission.Hold, last: int) -> bool:
        """Whether more is missing than up to a version: what was above it was deleted since."""
        above = admission.VersionRange(hold.aggregate_id, hold.first_missing + 1, hold.seen)
        there = values(self._lookup.backtrack([above], 1), "version")
        return bool(there) and min(there) - 1 > last

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
        """Decide and publish one chunk, in as many transactions as it takes.

        Args:
            rows: of the window.
            position: what the index has accounted for after it; None: as before.
            due: also try some of the holds that are due.
            look_now, skip_now: as in `admission.plan`.

        Returns:
            False where the shard waits for a gap, or stops, and the rest of the chunk with it.
        """
        begin = redos = 0
        while True:
            if self._sink.needs_replacement:
                self._replace_sink()
            end = begin + rows_within(rows, begin, self._pace.size)
            part, upto = rows.slice(begin, end - begin), position
            if end < rows.num_rows and position is not None:
                upto = part.column("create_time")[-1].as_py() - 1
            try:
                whole = self._attempt(part, upto, due, look_now, skip_now)
            except RecordRefusedError:
                continue  # its rows are dead letters now
            except SinkError as error:
                redos += 1
                if error.code not in _REDO or redos == _MOST_REDOS:
                    raise
                continue
            if not whole or end >= rows.num_rows:
                return whole
            if self.is_stopping:
                return False
            begin, redos = end, 0

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
        self._now = now = self._lookup.now()
        waiting, due_now = self._still_missing(now) if due else ({}, [])
        with self._timed("index"):
            ids: list[Any] = rows.column("aggregate_id").unique().to_pylist()
            if not (ids or due_now or look_now or skip_now):
                self._publish(Decision(_NOTHING, holds=waiting), Known(), position, now)
                return True
            # of those that wait, too: what was skipped of them before stays skipped
            known = self._index.known(list(dict.fromkeys([*ids, *due_now, *look_now, *skip_now])))

        def decide(some: pa.Table) -> Decision:
            with self._timed("admit"):
                plan = admission.plan(
                    some,
                    known,
                    self._rules,
                    now,
                    due_now,
                    open_since=self._open_since,
                    look_now=look_now,
                    skip_now=skip_now,
                )
            with self._timed("backtrack"):
                found, rest = self._backtrack(plan, known)
            with self._timed("admit"):
                decided = plan.decide(found, rest)
                decided.holds |= waiting
                return decided

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
        self._publish(decision, known, position, now)
        return whole

    def _publish(self, decision: Decision, known: Known, position: int | None, now: int) -> None:
        report, index = self._report, self._index
        kept = self._refusals.without(decision, index.dead_run, self._job.layout.where)
        events, late, dead = kept.events, kept.late, [*kept.letters]
        diverted = decision.diverted
        if diverted is not None:
            diverted, _, dead_late = self._refusals.split(diverted)
            dead += dead_late
        refused: dict[str, list[int]] = {}
        if decision.refused is not None:
            table, reasons = decision.refused
            dead += dead_rows(table, reasons, decision.rewritten)
            for a, v in zip(values(table, "aggregate_id"), values(table, "version"), strict=True):
                if v < self._rules.first_version:
                    refused.setdefault(a, list(known.refused.get(a, ()))).append(v)
        offsets: dict[tuple[str, int], int] = {}
        written: dict[tuple[str, int], tuple[int, int]] = {}
        if decision.publishes:
            size = events.nbytes + (0 if diverted is None else diverted.nbytes)
            began = time.monotonic()
            try:
                with self._timed("publish"):
                    published = self._sink.publish(
                        events,
                        late=late,
                        gaps=decision.gaps,
                        dead=dead,
                        diverted=diverted,
                        now=now,
                        crash_point=failpoint,
                    )
            except RecordRefusedError as refusal:
                self._refusals.note(refusal, events, diverted)
                raise
            except SinkError:
                self._pace.failed(size)
                index.note_chunk_bytes(self._pace.size)
                raise
            self._pace.published(size, time.monotonic() - began)
            if self._pace.is_full:
                index.note_chunk_bytes(None)
            offsets, written = published.next_offsets, published.written
            report.published += published.events
            some = decision.gaps[: max(0, _MOST_SHOWN - len(report.skipped))]
            report.skipped.extend(asdict(gap) for gap in some)
            report.dead.extend(
                {"aggregate_id": d.aggregate_id, "version": d.version, "reason": d.reason}
                for d in dead
            )
            failpoint("before_index")
        first = self._rules.first_version
        report.begin_above += sum(
            hold is not None
            and (hold.first_missing, hold.first_seen, hold.attempts) == (first, self._now, 0)
            and not hold.catching_up
            and a not in known.last
            for a, hold in decision.holds.items()
        )
        counted, oldest = self._take_counted(position), self._oldest_bucket()
        with self._timed("index"):
            index.record(
                decision,
                offsets,
                position,
                written=written,
                refused=refused,
                dead_run=kept.run,
                counted=counted,
                forget_below=oldest,
            )
        if decision.publishes:
            failpoint("after_index")
            self._sink.check_between()
        for bucket in (b for b in counted if b >= oldest):
            report.buckets[bucket] = index.rows_of(bucket)
        self._counts.add(decision.counts)

    # -- backtrack -------------------------------------------------------------------------------

    def _still_missing(self, now: int) -> tuple[dict[str, Hold | None], list[str]]:
        """Some of the holds that are due: those that wait on, and those to be looked after.

        While a hold waits, nothing but the version that it waits for is looked for, by its key.
        """
        holds = [self._index.holds[a] for a in self._index.holds.due(now, self._due_at_once)]
        missing = [(h.aggregate_id, h.first_missing) for h in holds if not h.catching_up]
        with self._timed("backtrack"):
            there = self._lookup.existing(missing) if missing else set()
        waiting: dict[str, Hold | None] = {}
        for hold in holds:
            if not hold.catching_up and (hold.aggregate_id, hold.first_missing) not in there:
                tried = admission.tried_in_vain(hold, self._rules, now, self._open_since)
                if tried is not None:
                    waiting[hold.aggregate_id] = tried
        return waiting, [h.aggregate_id for h in holds if h.aggregate_id not in waiting]

    def _backtrack(
        self, plan: admission.Plan, known: Known
    ) -> tuple[pa.Table, list[admission.VersionRange]]:
        """What is missing, as far as one transaction may hold it, and what of it was not read."""
        if plan.first_sights:
            assert known.baseline is not None
            plan.settle(self._baseline_ends(plan.first_sights, known.baseline))
        if not plan.missing:
            return _NOTHING, []
        seconds = None if self._holds_shard else _FETCH_TURN
        return self._lookup.fetch(plan.missing, pace.CHUNK_ROWS, self._pace.size, seconds)

    def _baseline_ends(
        self, sights: list[tuple[str, int]], baseline: int
    ) -> dict[str, tuple[int, int]]:
        """As of `admission.Plan.settle`."""
        ends: dict[str, int] = {}
        newest: dict[str, int] = {}
        for limit in _BELOW:
            rows: Counter[str] = Counter()
            for keys in self._lookup.below(sights, limit):
                columns = (values(keys, n) for n in ("aggregate_id", "version", "create_time"))
                for aggregate_id, version, created in zip(*columns, strict=True):
                    rows[aggregate_id] += 1
                    newest[aggregate_id] = max(created, newest.get(aggregate_id, created))
                    if created <= baseline:
                        ends[aggregate_id] = max(version, ends.get(aggregate_id, version))
            sights = [(a, v) for a, v in sights if rows[a] >= limit and a not in ends]
            if not sights:
                break
        return {aggregate_id: (end, newest[aggregate_id]) for aggregate_id, end in ends.items()}

    # -- report ----------------------------------------------------------------------------------

    def _low(self, position: int) -> int:
        """Up to where everything is published or skipped: below the position where any waits."""
        oldest = self._index.holds.oldest()
        return position if oldest is None else min(position, oldest - 1)

    def report(self, after: int) -> ShardReport:
        """What was done, and what is pending."""
        holds = self._index.holds
        report = self._report
        report.counts = dict(vars(self._counts))
        known_to = self._index.position
        position = after if known_to is None else known_to  # a new index of a shard that waits
        if self._job.all_buckets:
            report.buckets = self._index.buckets_from(self._oldest_bucket())
        report.position = position
        report.hidden_since = self._hidden_since
        report.low = self._low(position)
        report.offsets = [(*place, offset) for place, offset in self._index.offsets.items()]
        report.holds = len(holds)
        report.next_due = holds.next_due()
        return report


def _chunks(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Batches of rows, put together to what one transaction takes."""
    chunk: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        chunk.append(batch)
        rows += batch.num_rows
        size += batch.nbytes
        if rows >= pace.CHUNK_ROWS or size >= pace.CHUNK_BYTES:
            yield pa.Table.from_batches(chunk)
            chunk, rows, size = [], 0, 0
    if chunk:
        yield pa.Table.from_batches(chunk)


def _times(part: Folded, last: Mapping[str, int], created: np.ndarray) -> dict[str, Seen]:
    """When the rows of a chunk were created, by aggregate."""
    newest: dict[str, int] = {}
    of_last: dict[str, int] = {}
    rows = zip(part.aggregate_ids, part.versions.tolist(), created.tolist(), strict=True)
    for aggregate_id, version, at in rows:
        if at > newest.get(aggregate_id, at - 1):
            newest[aggregate_id] = at
        if version == last.get(aggregate_id):
            of_last[aggregate_id] = at
    is_event = part.kind == "events"
    return {a: Seen(newest[a], is_event and of_last[a] == newest[a]) for a in last}


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
    ids: list[Any] = encoded.dictionary.to_pylist()
    last = numbers_of(ids, known.last, np.iinfo(np.int64).min)
    fresh = bool((v[first] > last[c[first]]).all())
    if not (ascending and fresh):
        raise StateError(
            "publish.order_violated",
            "a batch would have published a version twice or out of order; nothing was published",
            suggestion="please report this: it is a defect of eventpub",
        )
