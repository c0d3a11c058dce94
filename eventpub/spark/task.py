"""A task of the source: one shard's part of a micro-batch.

1. If the batch's journal exists, its rows are yielded again, read by their keys.
2. Otherwise the shard's index is brought to the previous batch, and rows are yielded as they are
   decided. Then the journal is created, and the index written.
3. If another attempt has created a different journal meanwhile, the task fails, and Spark repeats
   it: case 1.

So a completed batch always has the same rows, whatever dies or commits meanwhile. The journal
exists before the last row reaches a sink.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import InputPartition

from eventpub.admission.model import EVENTS, Shard, topic_partition, values, version_ranges
from eventpub.channel import Beginning, Comparison, Lane, Window, request_of
from eventpub.errors import StateError, StoreError
from eventpub.failpoint import failpoint
from eventpub.index import Changes, Facts, Index, corrupt, folder_for
from eventpub.shard.assignment import Assignment, real_parts
from eventpub.shard.context import PublishingContext, ShardContext
from eventpub.shard.folding import Fold
from eventpub.shard.pace import chunks
from eventpub.shard.step import Step
from eventpub.sink.layout import check_leaders
from eventpub.sink.topics import list_offsets
from eventpub.sources.mysql import EventStore, Layout
from eventpub.spark.ahead import page
from eventpub.spark.journal import Journal, Journals, Snapshots, remove_unused
from eventpub.spark.options import Plan, SourceOptions
from eventpub.spark.place import IDENTITY, Place
from eventpub.spark.rows import JournalSink, are, batches, grouped, replayed, unpublished
from eventpub.times import Patience

_REPLAYED_ROWS = 20_000
_OF_FOLD = (
    "folded", "restored", "replaced", "not_ours", "jumps", "made_again", "is_placed", "baseline",
    "repeats_after", "rebuilt",
)  # fmt: skip
"""Fields of a fold's report copied to the batch's."""


@dataclass
class Part(InputPartition):
    plan: Plan
    shard: int
    layout: Layout
    of_run_with_end: bool = False
    """The run may be over before a snapshot that is uploaded beside it."""


class JournaledContext(ShardContext):
    """A shard whose step writes a journal, with an up-to-date index."""

    def __init__(self, assignment: Assignment, number: int, index: Index, plan: Plan) -> None:
        super().__init__(assignment, number)
        self.journal_sink = JournalSink(has_contents=not assignment.layout.key_is_unique)
        self.sink = self.journal_sink
        self._most_bytes, self.may_stop = plan.most_bytes, False  # requests are answered whole
        try:
            self._begin(index)
            if index.is_new:
                index.begin(plan.start)
            self.look_at_clock()
            layout = assignment.layout
            index.keep_times(layout.read_as, self.now)
            index.keep_ids(layout.ids_as, layout.columns, self.lookup.existing)
            if plan.batch == 1 and (index.position or 0) > plan.begin:
                index.go_back((index.position or 0) - plan.begin)  # to what may be hidden
            index.note(has_contents=self.rules.contents_of is not None)
            if index.undecided is not None:
                index.decide_baseline(None)
        except BaseException:
            self.close()
            raise
        self.window = Window(
            plan.batch,
            plan.upto,
            open_since=plan.open_since,
            hidden_since=plan.hidden_since,
            uncounted_since=plan.uncounted_since,
        )

    @property
    def is_stopping(self) -> bool:  # type: ignore[override]
        """Whether the batch has reached `most_bytes`: once decided it cannot be made smaller."""
        return self.may_stop and self.journal_sink.size > self._most_bytes

    def committed(self, created: Any) -> None:
        """See the base class: only the sink knows when events become visible."""

    def known_upto(self, place: tuple[str, int]) -> int:
        """See the base class: earlier batches are on the topic, nothing of this one is yet."""
        return list_offsets(self.parts.clients, [place], "latest")[place]


@cache
def require_shared(location: str, query: str) -> None:
    """Raise state.not_shared unless the driver's `IDENTITY` of the query is there; checked once by
    each process."""
    if Place(location).read(f"{query}/{IDENTITY}") is None:
        raise StateError(
            "state.not_shared",
            f"the executor on {socket.gethostname()} does not see what the driver wrote there",
            where=f"state = {location}",
            suggestion="set it to a bucket, or the absolute path of a folder (NFS) that all"
            " machines mount, the driver's and the executors'; if it was emptied, start again",
        )


class Task:
    def __init__(self, options: SourceOptions, part: Part) -> None:
        self._options = options
        self._plan = part.plan
        self._number = part.shard
        self._layout = part.layout
        self._waits = part.of_run_with_end
        self._rows_in = part.plan.rows_in[part.shard] if part.plan.rows_in else 0
        self._follows = part.plan.journals[part.shard] if part.plan.journals else ""
        parts = real_parts(options.config)
        first, most = (min(n, self._plan.most_bytes) for n in (parts.sizes.first, parts.sizes.most))
        self._parts = replace(parts, sizes=replace(parts.sizes, first=first, most=most))
        self._clock = 0
        self._folder = Path(options.state_dir) / "query" / part.plan.query / str(part.shard)

    @cached_property
    def _place(self) -> Place:
        return Place(self._options.state)

    @cached_property
    def _journals(self) -> Journals:
        return Journals(self._place, self._plan.query)

    def run(self) -> Iterator[pa.RecordBatch]:
        """Yield the batch's rows. In a user's query, wait for database and location before the
        first of them; `eventpub run` has Spark repeat the task, and reports why."""
        patience = Patience(f"reading batch {self._plan.batch}, shard {self._number}")
        is_begun = self._options.publisher is not None
        while True:
            try:
                for rows in self._attempt():
                    is_begun = True
                    yield rows
                return
            except (StoreError, StateError) as error:
                if is_begun or not error.retriable:
                    raise
                patience.wait(error)

    def _attempt(self) -> Iterator[pa.RecordBatch]:
        require_shared(self._options.state, self._plan.query)
        had_index = self._folder.exists()
        try:
            yield from self._replay() or self._decide()
        except StateError as error:
            if error.code in {"state.journal_missing", "index.locked"} and (rows := self._replay()):
                yield from rows  # another attempt on this machine was faster
                return
            # journals missed by a long absent executor may have been pruned; or the index is of
            # another history: of a checkpoint and state that were copied or restored
            is_old = error.code == "state.journal_missing" and had_index
            if error.code == "index.corrupt" or is_old:
                # at once, or what is left counts as an index; the next attempt uses a snapshot
                shutil.rmtree(self._parts.storage.set_aside(self._folder), ignore_errors=True)
                error.retriable = True
            raise

    def _yielded(self, tables: Sequence[pa.Table]) -> Iterator[pa.RecordBatch]:
        if self._options.publisher is not None:
            return grouped(tables, self._rows_in, self._clock)
        return batches(tables, all_rows=self._options.all_rows)

    # -- the first attempt ------------------------------------------------------------------------

    def _decide(self) -> Iterator[pa.RecordBatch]:
        plan, began = self._plan, time.monotonic()
        snapshots = Snapshots(self._place, plan.query, self._number)
        options, publisher = self._options, self._options.publisher
        assignment = Assignment(
            options.config,
            self._layout,
            options.partitions,
            plan.start,
            0,
            self._parts,
            accepts_topic=publisher is not None and publisher.accepts_topic,
            start_id="" if publisher is None else publisher.start_id,
        )
        if is_new := not self._folder.exists():
            remove_unused(self._folder.parent)
        if is_new and (plan.batch > 1 or publisher is not None):
            found = snapshots.fetch(self._folder, plan.batch - 1)
            if found is None and publisher is not None:
                beginning = publisher.beginning
                if plan.batch == 1:  # events that brokers have hidden may be older
                    low = plan.begin + options.config.recount.horizon
                    beginning = replace(beginning, low=min(low, beginning.low))
                recover(assignment, self._number, beginning, self._folder, snapshots)
        identity = {"query": plan.query}
        index = Index(self._folder, identity, adopts=lambda _: True, redo=self._redo)
        with closing(JournaledContext(assignment, self._number, index, plan)) as context:
            if plan.batch == 1:
                vars(context.report).update(index.fold)
            self._clock = int(context.now - time.time() * 1e6)
            failpoint("before_step")
            for _ in self._step(context):
                yield from self._yielded(context.journal_sink.take())
                failpoint("during_step")
            report = context.take_report()
            counts = index.counts.since(context.oldest_bucket())
            keys = context.journal_sink.keys()
            published: Any = keys.filter(pc.invert(are("skip", keys)))["create_time"]
            oldest = pc.min(published).as_py()
            rows_in = plan.batch if keys.num_rows else self._rows_in
            report = replace(report, buckets=counts, done=plan.batch)
            report = replace(report, oldest=oldest, rows_in=rows_in, follows=index.journal)
            report = replace(report, journal=secrets.token_hex(8), took=time.monotonic() - began)
            journal = Journal(report, keys, index.end_batch(plan.batch, report.journal))
            failpoint("before_journal")
            if self._journals.create(plan.batch, self._number, journal):
                failpoint("after_journal")
                index.flush()
                failpoint("after_index")
                if plan.snapshot:
                    uploading = snapshots.begin(index, plan.batch)
                    if uploading and (self._waits or not os.environ.get("SPARK_REUSE_WORKER")):
                        of_transaction = options.config.sink.transaction_timeout / 1e6  # it is open
                        uploading.join(of_transaction / 4 if publisher else None)
                return
        head = self._journals.head(plan.batch, self._number)
        if head is None or head["digest"] != journal.digest:
            raise StateError(
                "state.other_attempt",
                f"another attempt has meanwhile decided batch {plan.batch} of shard {self._number}"
                " differently",
                suggestion="nothing to do: Spark repeats the task, which yields that attempt's"
                " rows. If this repeats, set spark.speculation = false",
                retriable=True,
            )

    def _redo(self, known: Facts) -> Iterator[Changes]:
        if known.is_new and self._options.publisher is not None:
            # another attempt has moved the full one away; journals lack what a fold knew
            raise corrupt("it is empty", self._folder)
        last, batch = self._plan.batch - 1, known.batch or 0
        if batch > last or (batch == last and known.journal != self._follows):
            raise self._journals.missing(batch)
        return self._journals.changes(self._number, known, last)

    def _step(self, context: JournaledContext) -> Iterator[None]:
        """The step in parts: take what was decided after each."""

        def never() -> None:
            raise AssertionError("a journal is never in doubt")

        plan, step, index = self._plan, Step(context, never), context.index
        # first: the first row begins the sink's transaction, past which nothing is read
        own, partitions = context.shard.topic_partitions(), self._options.partitions
        for request in map(request_of, plan.requests):
            if request.action == "list" or topic_partition(request.aggregate_id, partitions) in own:
                # the plan is fixed: an error would recur in each attempt
                step.answering.answer(request, gives_up=True)
                yield
        context.may_stop = True
        after = max(plan.start or 0, plan.begin if index.position is None else index.position)
        had_rows = waits = False
        if self._options.config.gaps.policy == "hold_shard" and index.holds:
            step.end(None)
            yield
            waits = bool(index.holds)
        if after < plan.upto and not waits:
            shard, sizes, ahead = context.shard, context.parts.sizes, context.parts.read_ahead
            is_page = plan.after is not None and after >= plan.after
            found = None
            if self._options.publisher is not None:
                found = page(self._options.config, after, plan.upto, self._number)
            window = partial(context.reader.window, after, plan.upto, shard, is_page=is_page)
            with ahead(lambda: chunks(window() if found is None else iter(found), sizes)) as parts:
                for rows in context.each_read(parts):
                    had_rows, waits = True, context.is_stopping or not step.rows(rows)
                    if waits:
                        break
                    yield
        step.end(None if waits else plan.upto, had_rows=had_rows)
        yield
        if plan.buckets:
            try:
                step.comparing.begin(Comparison(plan.comparison, plan.buckets))
                while step.comparing.is_under_way:
                    if context.is_stopping:
                        step.comparing.leave_rest()
                    step.comparing.go_on(waits=True)
                    yield
            finally:
                step.comparing.close()

    # -- a batch that is repeated -----------------------------------------------------------------

    def _replay(self) -> Iterator[pa.RecordBatch] | None:
        """The rows as they were decided; None: they were not."""
        journal = self._journals.read(self._plan.batch, self._number)
        if journal is None:
            return None
        failpoint("before_replay")
        return self._replayed(journal.keys)

    def _replayed(self, keys: pa.Table) -> Iterator[pa.RecordBatch]:
        if self._options.publisher is None and not self._options.all_rows:
            keys = keys.filter(are("event", keys))  # the others may be gone
        with EventStore(self._options.config.store, self._layout) as store:
            self._clock = int(store.now() - time.time() * 1e6)
            for begin in range(0, keys.num_rows, _REPLAYED_ROWS):
                some = keys.slice(begin, _REPLAYED_ROWS)
                try:
                    rows = replayed(some, self._rows(store, some))
                except KeyError as missing:
                    aggregate_id, version, _ = missing.args[0]
                    raise StoreError(
                        "store.rows_gone",
                        f"batch {self._plan.batch} is to be repeated, but the table no longer has"
                        f" version {version} of {aggregate_id!r}",
                        where=self._layout.where,
                        suggestion="restore the row until the batch is done; rows may be archived"
                        " once a later batch has been committed",
                    ) from missing
                yield from self._yielded([rows])

    def _rows(self, store: EventStore, keys: pa.Table) -> pa.Table:
        keys = keys.filter(pc.invert(are("skip", keys)))
        ids, versions = values(keys, "aggregate_id"), values(keys, "version")
        ranges = version_ranges(zip(ids, versions, strict=True))
        sizes, tables = self._parts.sizes, list[pa.Table]()
        while ranges:
            table, ranges = store.fetch(ranges, sizes.rows, sizes.most)
            tables.append(table)
        return pa.concat_tables(tables) if tables else EVENTS.empty_table()


def rows_of_time(options: SourceOptions, part: Part) -> Iterator[pa.RecordBatch]:
    plan = part.plan
    with EventStore(options.config.store, part.layout) as store:
        shard = Shard(part.shard, options.config.run.shards, options.partitions)
        for batch in store.window(max(plan.begin, 0), plan.upto, shard):
            rows = unpublished(pa.Table.from_batches([batch]))
            yield from batches([rows], all_rows=options.all_rows)


def recover(  # noqa: PLR0913, PLR0917 (from where to where)
    assignment: Assignment,
    number: int,
    beginning: Beginning,
    folder: Path,
    snapshots: Snapshots,
    damage: str = "",
) -> None:
    """Bring the index of the engine `threads`, or a new one, up to the topic, and copy it with the
    fold's report to snapshot 0 and a new folder. A damaged one is set aside (`damage`)."""
    try:
        publishing = PublishingContext(assignment, number, beginning, Lane(), lambda _: None)
        with closing(publishing) as context:
            context.report.rebuilt = damage or context.report.rebuilt
            Fold(context).run()
            # a leader cut off from the others lacks the last records, and would have them repeated
            topic = assignment.config.sink.topic
            own = [place for place in context.own_places() if place[0] == topic]
            check_leaders(assignment.parts.clients, own)
            folder.parent.mkdir(parents=True, exist_ok=True)
            copy = folder_for(folder)
            context.index.note(fold={name: getattr(context.report, name) for name in _OF_FOLD})
            context.index.copy_to(copy)
    except StateError as error:
        if error.code != "index.corrupt" or damage:
            raise
        moved_to = assignment.parts.storage.set_aside(assignment.index(number))
        damage = f"{error.message}; it was moved to {moved_to}"
        recover(assignment, number, beginning, folder, snapshots, damage)
        return
    snapshots.keep(copy, 0)
    copy.rename(folder)
