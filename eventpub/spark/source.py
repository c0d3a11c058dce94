"""The data source `eventstore`: the events of a table, complete, each once, in order per aggregate.

    eventpub.spark.register(spark)
    spark.readStream.format("eventstore").option("url", …).option("state", …).load()

A row is an event; see `rows.SCHEMA`. Options: the keys of `[store]`, `[read]`, `[gaps]` and
`[recount]` by the names that they have in `eventpub.toml`; `state`, the location that all executors
share; `shards` (default 1), the number of tasks of a batch; `partitions` (default: `shards`), what
aggregates are divided into; `state_dir`, a folder on each machine for the indexes; `rows` ("events"
or "all"); `maxRowsPerTrigger`. A batch (`spark.read`) takes `from` and `to` instead of `state`.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import structlog
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from eventpub.admission import Shard
from eventpub.errors import EventpubError, StateError, StoreError
from eventpub.sources.base import start_position
from eventpub.sources.mysql import EventStore, Layout
from eventpub.spark.journal import Journals
from eventpub.spark.options import SourceOptions, source_options
from eventpub.spark.place import Place
from eventpub.spark.planner import Plan, Planner
from eventpub.spark.rows import SCHEMA, SCHEMA_OF_ALL, batches, unpublished
from eventpub.spark.snapshots import prune
from eventpub.spark.task import Part, Task
from eventpub.state import StateDir

_PRUNED_EVERY = 60.0
_SAID_EVERY = 60.0
"""Seconds between two warnings that the database does not answer."""

Offset = dict[str, Any]

log: structlog.stdlib.BoundLogger = structlog.get_logger("eventpub")


class SourceError(RuntimeError):
    """Carries an `EventpubError` through Spark, which keeps only the text of an exception."""


class EventStoreDataSource(DataSource):
    """See the module."""

    @classmethod
    def name(cls) -> str:
        """`eventstore`"""
        return "eventstore"

    def schema(self) -> str:
        """Of the rows, by the option `rows`."""
        given = {k.lower(): v for k, v in self.options.items()}
        is_all = given.get("rows") == "all" or "publisher_secret" in given
        return SCHEMA_OF_ALL if is_all else SCHEMA

    def reader(self, schema: Any) -> EventStoreReader:
        """The reader of a batch: what the table has of a time."""
        with errors_through_spark():
            return EventStoreReader(source_options(self.options, is_stream=False))

    def streamReader(self, schema: Any) -> EventStoreStreamReader:  # noqa: N802 (Spark's name)
        """The reader of one streaming query."""
        with errors_through_spark():
            return EventStoreStreamReader(source_options(self.options))


class EventStoreStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans batches in Spark's driver, and does them in its tasks."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._until: int | None = None
        self._planner: Planner | None = None
        self._layout: Layout | None = None
        self._pruned_at, self._said_at = time.monotonic(), float("-inf")

    def __getstate__(self) -> dict[str, Any]:
        """What a task needs, which is sent a copy of this: nothing that is open here."""
        return {**self.__dict__, "_planner": None}

    # -- in the driver ----------------------------------------------------------------------------

    def initialOffset(self) -> Offset:  # noqa: N802
        """Where a query without a checkpoint starts."""
        with errors_through_spark():
            config, publisher = self._options.config, self._options.publisher
            if publisher is not None:
                return publisher.initial.to_offset()
            with EventStore(config.store, self._discovered()) as store:
                start = start_position(config.read, store.now)
            return Plan(secrets.token_hex(8), start=start or None, upto=start).to_offset()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Windows of `maxRowsPerTrigger` rows."""
        return ReadMaxRows(self._options.page_rows)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Everything that was created by now."""
        with (
            errors_through_spark(),
            EventStore(self._options.config.store, self._discovered()) as store,
        ):
            self._until = store.now()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """The next batch, or `start` where there is nothing to do."""
        del limit
        with errors_through_spark():
            last = Plan.from_offset(start)
            if self._planner is None:
                self._planner = self._new_planner(last)
            try:
                plan = self._planner.next(last)
            except StoreError as error:
                if self._until is not None or not error.retriable:
                    raise
                self._say(error)
                return start
            return start if plan is None else plan.to_offset()

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802
        """The boundary as it was polled last, for `lastProgress`."""
        if self._planner is None or not self._planner.upper:
            return None
        return Plan("", upto=self._planner.upper).to_offset()

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """One for each shard."""
        del start  # of a first batch that is repeated, it is another one than it was
        with errors_through_spark():
            plan, planner = Plan.from_offset(end), self._planner
            layout = self._discovered() if planner is None else planner.layout
            return [Part(plan, n, layout) for n in range(self._options.config.run.shards)]

    def commit(self, end: Offset) -> None:
        """A batch is committed: what no executor needs any more is removed now and then."""
        if time.monotonic() - self._pruned_at < _PRUNED_EVERY:
            return
        self._pruned_at = time.monotonic()
        plan, place = Plan.from_offset(end), Place(self._options.state)
        try:
            journals, shards = Journals(place, plan.query), self._options.config.run.shards
            prune(place, plan.query, journals, plan.batch, shards)
        except StateError as error:
            log.warning("journals were not pruned; the next time is soon", error=str(error))

    def stop(self) -> None:
        """Close the connections."""
        if self._planner is not None:
            self._planner.close()

    def _new_planner(self, last: Plan) -> Planner:
        options, place = self._options, Place(self._options.state)
        _require_own(options, place, last.query)
        state = None if options.publisher is None else StateDir(options.config.app.state_dir)
        return Planner(
            options.config,
            self._discovered(),
            Journals(place, last.query),
            options.page_rows,
            until=self._until,
            requests=(lambda: ()) if state is None else state.kept,
        )

    def _discovered(self) -> Layout:
        if self._layout is None:
            self._layout = EventStore.discover(self._options.config.store)
        return self._layout

    def _say(self, error: StoreError) -> None:
        if time.monotonic() - self._said_at > _SAID_EVERY:
            self._said_at = time.monotonic()
            log.warning("waiting for the database", code=error.code, error=error.message)

    # -- in a task --------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one shard's part of a batch, as Arrow batches."""
        assert isinstance(partition, Part)
        with errors_through_spark():
            yield from Task(self._options, partition).run()


class EventStoreReader(DataSourceReader):
    """Reads the rows of a time as they are, in order of `create_time` within a task."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        """One for each shard, all with the same end."""
        with errors_through_spark():
            config, options = self._options.config, self._options
            layout = EventStore.discover(config.store)
            with EventStore(config.store, layout) as store:
                until = store.now() - config.read.delay if options.to is None else options.to
            plan = Plan("", begin=options.from_ - 1, upto=until)
            return [Part(plan, n, layout) for n in range(config.run.shards)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one shard, as Arrow batches."""
        assert isinstance(partition, Part)
        options, plan = self._options, partition.plan
        with (
            errors_through_spark(),
            EventStore(options.config.store, partition.layout) as store,
        ):
            shard = Shard(partition.shard, options.config.run.shards, options.partitions)
            for batch in store.window(max(plan.begin, 0), plan.upto, shard):
                rows = unpublished(pa.Table.from_batches([batch]))
                yield from batches([rows], all_rows=options.all_rows)


def _require_own(options: SourceOptions, place: Place, query: str) -> None:
    """Check that the state belongs to this table and these shards; a new one is begun.

    Raises:
        StateError: state.foreign, state.not_exclusive, state.unreachable
    """
    name, identity = f"{query}/identity.json", options.identity
    found = place.read(name)
    if found is None:
        place.require_exclusive(query)
        if place.create(name, json.dumps(identity).encode()):
            return
        found = place.read(name)
    theirs: dict[str, Any] = json.loads(found or b"{}")
    different = [key for key in identity if theirs.get(key) != identity[key]]
    if different:
        key = different[0]
        raise StateError(
            "state.foreign",
            f"the checkpoint and its state belong to {key} {theirs.get(key)!r}, and the option is"
            f" {identity[key]!r}",
            where=f"{place.location}/{name}",
            suggestion=f"set {key} as it was; or use a new checkpoint, which reads the table from"
            " read.start",
        )


@contextmanager
def errors_through_spark() -> Iterator[None]:
    """Raise errors of ours as Spark can pass them on."""
    try:
        yield
    except EventpubError as error:
        raise SourceError(error.marked()) from error
