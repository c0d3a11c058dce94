"""The `eventstore` source for Spark Structured Streaming: for a job of one's own.

    spark.dataSource.register(EventStoreDataSource)
    spark.readStream.format("eventstore").option("url", "mysql+pymysql://…").load()

One row an event: `aggregate_id string, version bigint, event_type string, payload binary, metadata
string, create_time timestamp`, in windows of `create_time` that end at *database now − delay*, or
at the `page_rows`-th row while there is a backlog. Rows that commit behind the window are not seen
by this source: the publisher finds them by their versions.

Options: the keys of `[store]` (`url`, `password`, `password_file`, `table`, `first_version`,
`time_zone`, `columns.aggregate_id` …) and of `[read]` (`start`, `delay`, `page_rows`, `watermark`,
`max_wait`), by the names that they have in `eventpub.toml`, and `shards` (default 1), the number of
Spark partitions; `partitions` (default: `shards`) is the number of Kafka partitions that they are
shards of.

The offset is ``{"position": µs}``: the upper bound of the last window in database time, UTC.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from eventpub.admission import Shard
from eventpub.config import Read, Store
from eventpub.coordinator.boundary import Boundary
from eventpub.errors import ConfigError, EventpubError
from eventpub.publisher.prepare import start_position
from eventpub.store import EventStore
from eventpub.store.rows import lenient_text

ROWS = (
    "aggregate_id string, version bigint, event_type string, payload binary, metadata string, "
    "create_time timestamp"
)

Offset = dict[str, int]


class SourceError(RuntimeError):
    """Carries an `EventpubError` through Spark, which keeps only the text of an exception."""


@dataclass
class Window(InputPartition):
    """One shard's part of a window: ``after < create_time <= upto``, in µs."""

    shard: int
    after: int
    upto: int


class EventStoreDataSource(DataSource):
    """See the module."""

    @classmethod
    def name(cls) -> str:
        """`eventstore`"""
        return "eventstore"

    def schema(self) -> str:
        """Rows of events."""
        return ROWS

    def streamReader(self, schema: Any) -> EventStoreStreamReader:  # noqa: N802 (Spark's name)
        """The reader of one streaming query."""
        return EventStoreStreamReader(dict(self.options))


class EventStoreStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans windows in Spark's driver and reads them in its tasks."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._store, self._read = _parse(options)
        self._shards = int(options.get("shards", "1"))
        self._partitions = int(options.get("partitions", str(self._shards)))
        self._until: int | None = None
        self._boundary: Boundary | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What a task needs, which is sent a copy of this: nothing that is open here."""
        return self.__dict__ | {"_boundary": None}

    def _now(self) -> int:
        with EventStore(self._store, EventStore.discover(self._store)) as store:
            return store.now()

    def initialOffset(self) -> Offset:  # noqa: N802
        """Where a query without a checkpoint starts."""
        with _errors_through_spark():
            return {"position": start_position(self._read, self._now)}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Pages of `page_rows`."""
        return ReadMaxRows(self._read.page_rows)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Everything up to the boundary as it is now."""
        with _errors_through_spark():
            self._until = self._now() - self._read.delay

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """The end of the next window, or `start` where there are no new rows."""
        with _errors_through_spark():
            rows = limit.max_rows if isinstance(limit, ReadMaxRows) else self._read.page_rows
            if self._boundary is None:
                layout = EventStore.discover(self._store)
                read = self._read.model_copy(update={"page_rows": rows})
                self._boundary = Boundary(self._store, layout, read, until=self._until)
            end = self._boundary.poll(start["position"]).end
            return start if end is None else {"position": end}

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """One per shard, even of a window that holds nothing."""
        return [Window(n, start["position"], end["position"]) for n in range(self._shards)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one shard's window, as Arrow batches."""
        assert isinstance(partition, Window)
        with (
            _errors_through_spark(),
            EventStore(self._store, EventStore.discover(self._store)) as store,
        ):
            shard = Shard(partition.shard, self._shards, self._partitions)
            for batch in store.window(partition.after, partition.upto, shard):
                *others, metadata, created = batch.columns
                times = created.cast(pa.timestamp("us", tz="UTC"))
                # Named anew: Spark wants every column nullable.
                yield pa.RecordBatch.from_arrays(
                    [*others, lenient_text(metadata), times], batch.schema.names
                )

    def commit(self, end: Offset) -> None:
        """Spark has committed everything up to `end`; nothing to do."""

    def stop(self) -> None:
        """Close the connections."""
        if self._boundary is not None:
            self._boundary.close()


@contextmanager
def _errors_through_spark() -> Iterator[None]:
    try:
        yield
    except EventpubError as error:
        raise SourceError(error.marked()) from error


def _parse(options: Mapping[str, str]) -> tuple[Store, Read]:
    """The sections `[store]` and `[read]` of flat options."""
    store: dict[str, Any] = {}
    read: dict[str, Any] = {}
    columns: dict[str, Any] = {}
    for key, value in options.items():
        if key in Store.model_fields and key != "columns":
            store[key] = value
        elif key.startswith("columns."):
            columns[key.removeprefix("columns.")] = value
        elif key in Read.model_fields:
            read[key] = value
        elif key not in {"shards", "partitions", "path"}:
            raise ConfigError(
                "config.unknown_key",
                f"the eventstore source has no option '{key}'",
                where=f"option {key}",
                suggestion="the options are the keys of [store] and [read]",
            )
    if columns:
        store["columns"] = columns
    return Store(**store), Read(**read)
