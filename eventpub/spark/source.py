"""The data source `eventstore`: a table's events, complete, each once, in order per aggregate.

    eventpub.spark.register(spark)
    spark.readStream.format("eventstore").option("url", …).option("state", …).load()

A row is an event; see `SCHEMA`. Options: the keys of `[store]`, `[read]`, `[gaps]` and `[recount]`,
named as in `eventpub.toml`; `state`, the location that all executors share; `shards` (default 1),
the number of tasks of a batch; `partitions` (default: `shards`) of aggregates; `state_dir`, a
folder on each machine for the indexes; `rows` ("events" or "all"); `maxRowsPerTrigger`. A batch
(`spark.read`) takes `from` and `to` instead of `state`.

Imports are local: most of Spark's processes that create these objects only pass them on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow

from eventpub.spark import collect_no_imports, errors_through_spark

if TYPE_CHECKING:
    import pyarrow as pa

    from eventpub.spark.driver import Driver
    from eventpub.spark.options import SourceOptions

SCHEMA = (
    "aggregate_id string, version bigint, event_type string, payload binary, metadata string, "
    "create_time timestamp_ltz, late boolean"
)

SCHEMA_OF_ALL = f"{SCHEMA}, kind string, reason string, detail string"
"""With `rows` = "all": `kind` is "event", "late", "skip" or "dead"; `detail` is JSON."""

GROUP = "eventpub_group"
"""For the publisher's own sink: a group's first row has all of its rows as an Arrow IPC stream, the
others null. So Spark counts events, but copies few values. A large stream is cut into several rows.
"""

Offset = dict[str, Any]


class EventStoreDataSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "eventstore"

    def schema(self) -> str:
        given = {k.lower(): v for k, v in self.options.items()}
        if "publisher_secret" in given:
            return f"{GROUP} binary"
        return SCHEMA_OF_ALL if given.get("rows") == "all" else SCHEMA

    def reader(self, schema: Any) -> EventStoreReader:
        with errors_through_spark():
            return EventStoreReader(_options(self.options, is_stream=False))

    def streamReader(self, schema: Any) -> EventStoreStreamReader:  # noqa: N802 (Spark's name)
        with errors_through_spark():
            if "publisher_secret" not in self.options:
                _options(self.options)  # report errors now
            return EventStoreStreamReader(self.options)


class EventStoreStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = dict(given)

    def __getstate__(self) -> dict[str, Any]:
        """Tasks get a copy without open connections."""
        return {"_given": self._given}

    @cached_property
    def _driver(self) -> Driver:
        from eventpub.spark.driver import Driver

        return Driver(_options(self._given))

    # -- in the driver ----------------------------------------------------------------------------

    def initialOffset(self) -> Offset:  # noqa: N802
        with errors_through_spark():
            return self._driver.initial()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        with errors_through_spark():
            self._driver.end_now()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        del limit  # the option maxRowsPerTrigger is the planner's
        with errors_through_spark():
            return self._driver.latest(start)

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802
        """The last polled boundary, shown by `lastProgress`."""
        return self._driver.reported()

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        del start  # a repeated first batch may have another start
        with errors_through_spark():
            return self._driver.parts(end)

    def commit(self, end: Offset) -> None:
        self._driver.committed(end)

    def stop(self) -> None:
        if "_driver" in vars(self):
            self._driver.close()

    # -- in a task --------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
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
        from eventpub.spark.driver import parts_of_time

        with errors_through_spark():
            return parts_of_time(self._options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from eventpub.spark.task import Part, rows_of_time

        assert isinstance(partition, Part)
        with errors_through_spark():
            yield from rows_of_time(self._options, partition)


def _options(given: Mapping[str, str], *, is_stream: bool = True) -> SourceOptions:
    from eventpub.spark.options import source_options

    return source_options(given, is_stream=is_stream)
