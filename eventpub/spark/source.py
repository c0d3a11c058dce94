"""The data source `eventstore`: the events of a table, complete, each once, in order per aggregate.

    eventpub.spark.register(spark)
    spark.readStream.format("eventstore").option("url", …).option("state", …).load()

A row is an event; see `SCHEMA`. Options: the keys of `[store]`, `[read]`, `[gaps]` and
`[recount]` by the names that they have in `eventpub.toml`; `state`, the location that all executors
share; `shards` (default 1), the number of tasks of a batch; `partitions` (default: `shards`), what
aggregates are divided into; `state_dir`, a folder on each machine for the indexes; `rows` ("events"
or "all"); `maxRowsPerTrigger`. A batch (`spark.read`) takes `from` and `to` instead of `state`.

Spark makes these objects in several processes of its own, most of which ask for a schema or pass
them on: what the work needs is imported where it is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from eventpub.spark import collect_no_imports, errors_through_spark

if TYPE_CHECKING:
    import pyarrow as pa

    from eventpub.spark.driver import Driver
    from eventpub.spark.options import SourceOptions

SCHEMA = (
    "aggregate_id string, version bigint, event_type string, payload binary, metadata string, "
    "create_time timestamp, late boolean"
)
"""Schema of the rows that the source yields."""

SCHEMA_OF_ALL = f"{SCHEMA}, kind string, reason string, detail string"
"""With `rows` = "all". `kind` is "event", "late" (where late events are diverted), "skip" or
"dead"; `reason` is that of a skip or a dead letter, `detail` a JSON object with the rest of it."""

GROUP = "eventpub_group"
"""The column of what `eventpub run` reads for its own sink: the first row of a group holds all rows
of it, as a stream of Arrow IPC; in the others it is null. So Spark counts events, and copies few
values."""

Offset = dict[str, Any]


class EventStoreDataSource(DataSource):
    """See the module."""

    @classmethod
    def name(cls) -> str:
        """`eventstore`"""
        return "eventstore"

    def schema(self) -> str:
        """Schema of the rows, by the option `rows`."""
        given = {k.lower(): v for k, v in self.options.items()}
        if "publisher_secret" in given:
            return f"{GROUP} binary"
        return SCHEMA_OF_ALL if given.get("rows") == "all" else SCHEMA

    def reader(self, schema: Any) -> EventStoreReader:
        """The reader of a batch: the rows of a range of `create_time`."""
        with errors_through_spark():
            return EventStoreReader(_options(self.options, is_stream=False))

    def streamReader(self, schema: Any) -> EventStoreStreamReader:  # noqa: N802 (Spark's name)
        """The reader of one streaming query."""
        with errors_through_spark():
            if "publisher_secret" not in self.options:
                _options(self.options)  # what is wrong with them is said now
            return EventStoreStreamReader(self.options)


class EventStoreStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans batches in Spark's driver, and does them in its tasks."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = dict(given)
        self._made: Driver | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What a task needs: it is sent a copy, without what is open here."""
        return {"_given": self._given, "_made": None}

    @property
    def _driver(self) -> Driver:
        from eventpub.spark.driver import Driver

        if self._made is None:
            self._made = Driver(_options(self._given))
        return self._made

    # -- in the driver ----------------------------------------------------------------------------

    def initialOffset(self) -> Offset:  # noqa: N802
        """Where a query without a checkpoint starts."""
        with errors_through_spark():
            return self._driver.initial()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Windows of `maxRowsPerTrigger` rows, where that is given."""
        with errors_through_spark():
            most = self._driver.options.most_rows
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Everything that was created by now."""
        with errors_through_spark():
            self._driver.end_now()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """The next batch, or `start` where there is nothing to do."""
        del limit
        with errors_through_spark():
            return self._driver.latest(start)

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802
        """The boundary as it was polled last, which `lastProgress` shows."""
        return self._driver.reported()

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """One for each shard."""
        del start  # of a first batch that is repeated, it is another one than it was
        with errors_through_spark():
            return self._driver.parts(end)

    def commit(self, end: Offset) -> None:
        """A batch is committed: what no executor needs any more is removed now and then."""
        self._driver.committed(end)

    def stop(self) -> None:
        """Close the connections."""
        if self._made is not None:
            self._made.close()

    # -- in a task --------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one shard's part of a batch, as Arrow batches."""
        from eventpub.spark.task import Part, Task

        assert isinstance(partition, Part)
        with errors_through_spark():
            yield from Task(_options(self._given), partition).run()
        collect_no_imports()


class EventStoreReader(DataSourceReader):
    """Reads a range of `create_time` as it is, in that order within a task."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        """One for each shard, all with the same end."""
        from eventpub.spark.driver import parts_of_time

        with errors_through_spark():
            return parts_of_time(self._options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one shard, as Arrow batches."""
        from eventpub.spark.task import Part, rows_of_time

        assert isinstance(partition, Part)
        with errors_through_spark():
            yield from rows_of_time(self._options, partition)


def _options(given: Mapping[str, str], *, is_stream: bool = True) -> SourceOptions:
    from eventpub.spark.options import source_options

    return source_options(given, is_stream=is_stream)
