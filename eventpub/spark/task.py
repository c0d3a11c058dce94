"""A task of the source: one shard's part of a micro-batch.

1. The journal of the batch exists: its rows are yielded again, read by their keys.
2. Otherwise the shard's index is brought to the batch before, and the step is done: the rows are
   yielded as they are decided. Then the journal is created, and the index written.
3. Where another attempt has created the journal meanwhile and had decided something else, the task
   fails, and Spark repeats it, which is case 1.

So whatever dies at whatever point, and whatever commits meanwhile, a batch that has ended once
always has the same rows. The journal exists before the last row of a batch reaches a sink.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import InputPartition

from eventpub.admission import EVENTS, VersionRange, topic_partition, values
from eventpub.channel import Comparison, Lease, Request, Window, request_of
from eventpub.errors import EventpubError, StateError, StoreError
from eventpub.failpoint import failpoint
from eventpub.index import Changes, Index, folder_for
from eventpub.shard import pace
from eventpub.shard.assignment import Assignment
from eventpub.shard.context import LeasedContext, ShardContext
from eventpub.shard.folding import Fold
from eventpub.shard.reading import chunks
from eventpub.shard.step import Step
from eventpub.sources.mysql import EventStore, Layout
from eventpub.spark.journal import Journal, Journals
from eventpub.spark.options import SourceOptions
from eventpub.spark.place import Place
from eventpub.spark.planner import Plan
from eventpub.spark.rows import JournalSink, are, batches, replayed
from eventpub.spark.snapshots import Snapshots

_REPLAYED_ROWS = 20_000


@dataclass
class Part(InputPartition):
    """One shard's part of a batch."""

    plan: Plan
    shard: int
    layout: Layout


class JournaledContext(ShardContext):
    """A shard whose step writes a journal.

    Args:
        assignment: of all shards.
        number: the shard's.
        index: up to date.
        plan: the batch.
    """

    def __init__(self, assignment: Assignment, number: int, index: Index, plan: Plan) -> None:
        super().__init__(assignment, number)
        self.journal_sink = JournalSink(has_contents=not assignment.layout.key_is_unique)
        self.sink = self.journal_sink
        try:
            self._begin(index)
            if index.is_new:
                index.begin(plan.start)
            self.look_at_clock()
            index.keep_times(assignment.layout.read_as, self.now)
            index.note_contents(self.rules.contents_of is not None)
            if index.undecided is not None:
                index.decide_baseline(None)
        except BaseException:
            self.close()
            raise
        window = Window(
            plan.batch,
            plan.upto,
            open_since=plan.open_since,
            hidden_since=plan.hidden_since,
            uncounted_since=plan.uncounted_since,
        )
        self.take_bounds(window)


class Task:
    """See the module.

    Args:
        options: of the source.
        part: what to do.
    """

    def __init__(self, options: SourceOptions, part: Part) -> None:
        self._options = options
        self._plan = part.plan
        self._number = part.shard
        self._layout = part.layout
        self._place = Place(options.state)
        self._journals = Journals(self._place, part.plan.query)
        self._folder = options.state_dir / "query" / part.plan.query / str(part.shard)

    def run(self) -> Iterator[pa.RecordBatch]:
        """The rows of the batch.

        Raises:
            StoreError, StateError: Spark repeats the task.
        """
        journal = self._journals.read(self._plan.batch, self._number)
        if journal is not None:
            yield from self._replay(journal)
            return
        try:
            yield from self._decide()
        except StateError as error:
            if error.code != "index.corrupt":
                raise
            shutil.rmtree(self._folder, ignore_errors=True)  # the next attempt fetches a snapshot
            raise

    # -- the first attempt ------------------------------------------------------------------------

    def _decide(self) -> Iterator[pa.RecordBatch]:
        plan, all_rows = self._plan, self._options.all_rows
        snapshots = Snapshots(self._place, plan.query, self._number)
        assignment = Assignment(
            self._options.config, self._layout, self._options.partitions, plan.start, run=0
        )
        publisher = self._options.publisher
        if not self._folder.exists() and (plan.batch > 1 or publisher is not None):
            found = snapshots.fetch(self._folder, plan.batch - 1)
            if found is None and publisher is not None:
                recover(assignment, self._number, publisher.lease, self._folder)
                snapshots.keep(self._folder, 0)
        identity = {"query": plan.query}
        index = Index(self._folder, identity, adopts=lambda _: True, redo=self._redo)
        with JournaledContext(assignment, self._number, index, plan) as context:
            failpoint("before_step")
            for _ in self._step(context):
                yield from batches(context.journal_sink.take(), all_rows=all_rows)
                failpoint("during_step")
            report = context.take_report()
            counts = index.counts.since(context.oldest_bucket())
            report = replace(report, buckets=counts, done=plan.batch)
            journal = Journal(report, context.journal_sink.keys(), index.end_batch(plan.batch))
            failpoint("before_journal")
            if self._journals.create(plan.batch, self._number, journal):
                failpoint("after_journal")
                index.flush()
                failpoint("after_index")
                if plan.snapshot:
                    snapshots.begin(index, plan.batch)
                return
        self._require_same(journal)

    def _redo(self, known: int | None) -> Iterator[Changes]:
        """The changes that the index lacks."""
        last = self._plan.batch - 1
        if (known or 0) > last:
            raise StateError(
                "state.ahead",
                f"the index of shard {self._number} contains batch {known}, and the checkpoint is"
                f" at batch {last}",
                where=str(self._folder),
                suggestion="if the checkpoint was restored from a backup, restore the state that"
                " was saved with it; or start with a new checkpoint and a new state",
            )
        return self._journals.changes(self._number, known or 0, last)

    def _step(self, context: JournaledContext) -> Iterator[None]:
        """The step, in parts: between two, what was decided is to be taken."""

        def never() -> None:
            raise AssertionError("a journal is never in doubt")

        plan, step, index = self._plan, Step(context, never), context.index
        after = max(plan.start or 0, plan.begin, index.position or 0)
        had_rows = waits = False
        if self._options.config.gaps.policy == "hold_shard" and index.holds:
            step.end(None)
            yield
            waits = bool(index.holds)
        if after < plan.upto and not waits:
            for rows in chunks(context.reader.window(after, plan.upto, context.shard)):
                had_rows = True
                if not step.rows(rows):
                    waits = True
                    break
                yield
        step.end(None if waits else plan.upto, had_rows=had_rows)
        yield
        if plan.buckets:
            try:
                step.comparing.begin(Comparison(plan.comparison, plan.buckets))
                step.comparing.go_on(finish=True)
            finally:
                step.comparing.close()
            yield

        for each in plan.requests:
            request = request_of(each)
            if self._is_for(request):
                step.answering.answer(request)
                yield

    def _is_for(self, request: Request) -> bool:
        """Whether this shard has the request's aggregate, or all have."""
        options = self._options
        if request.action == "list" and not request.aggregate_id:
            return True
        partition = topic_partition(request.aggregate_id, options.partitions)
        return partition % options.config.run.shards == self._number

    def _require_same(self, journal: Journal) -> None:
        head = self._journals.head(self._plan.batch, self._number)
        if head is None or head["digest"] != journal.digest:
            raise StateError(
                "state.other_attempt",
                f"another attempt has decided batch {self._plan.batch} of shard {self._number}"
                " meanwhile, and differently",
                suggestion="nothing to do: Spark repeats the task, which yields that attempt's"
                " rows. If it is seen often, set spark.speculation = false",
                retriable=True,
            )

    # -- a batch that is repeated -----------------------------------------------------------------

    def _replay(self, journal: Journal) -> Iterator[pa.RecordBatch]:
        keys, all_rows = journal.keys, self._options.all_rows
        with EventStore(self._options.config.store, self._layout) as store:
            for begin in range(0, keys.num_rows, _REPLAYED_ROWS):
                some = keys.slice(begin, _REPLAYED_ROWS)
                try:
                    rows = replayed(some, self._rows(store, some))
                except KeyError as missing:
                    raise self._gone(missing) from missing
                yield from batches([rows], all_rows=all_rows)

    def _rows(self, store: EventStore, keys: pa.Table) -> pa.Table:
        keys = keys.filter(pc.invert(are("skip", keys)))
        ids, versions = values(keys, "aggregate_id"), values(keys, "version")
        ranges = _ranges(zip(ids, versions, strict=True))
        tables: list[pa.Table] = []
        while ranges:
            table, ranges = store.fetch(ranges, pace.CHUNK_ROWS, pace.CHUNK_BYTES)
            tables.append(table)
        return pa.concat_tables(tables) if tables else EVENTS.empty_table()

    def _gone(self, missing: KeyError) -> EventpubError:
        aggregate_id, version, _ = missing.args[0]
        return StoreError(
            "store.rows_gone",
            f"batch {self._plan.batch} is to be repeated, and the table no longer has version"
            f" {version} of {aggregate_id!r}",
            where=self._layout.where,
            suggestion="restore the row until the batch is done; rows may be archived when a later"
            " batch has been committed",
        )


def _ranges(events: Iterator[tuple[str, int]]) -> list[VersionRange]:
    """Events as ranges of versions, each version once."""
    versions: dict[str, list[int]] = {}
    for aggregate_id, version in dict.fromkeys(events):
        versions.setdefault(aggregate_id, []).append(version)
    found = []
    for aggregate_id, each in versions.items():
        each.sort()
        first = last = each[0]
        for version in each[1:]:
            if version != last + 1:
                found.append(VersionRange(aggregate_id, first, last))
                first = version
            last = version
        found.append(VersionRange(aggregate_id, first, last))
    return found


class _NoLink:
    """The link of a shard that cannot be stopped, and that has no lease to lose."""

    is_stopping = False

    def lease(self) -> Lease | None:
        return None

    def confirm(self) -> None:
        """It cannot be lost."""

    def send(self, message: object) -> None:
        """Answers go into the journal."""


def recover(assignment: Assignment, number: int, lease: Lease, folder: Path) -> None:
    """Bring the index of the engine `threads`, or a new one, up to the topic; a copy of it is kept
    in a folder.

    Args:
        assignment: of all shards.
        number: the shard's.
        lease: what is known of what was published before.
        folder: does not exist.

    Raises:
        SinkError, StateError: as of `Fold.run`.
    """
    link: object = _NoLink()
    with LeasedContext(assignment, number, lease, link) as context:  # type: ignore[arg-type]
        Fold(context).run()
        folder.parent.mkdir(parents=True, exist_ok=True)
        copy = folder_for(folder)
        context.index.copy_to(copy)
    copy.rename(folder)
