"""The data sink `eventpub`: exactly once to Kafka, from any streaming query.

    df.writeStream.format("eventpub").option("id", "orders").option("topic", …)
      .option("kafka.bootstrap.servers", …).option("checkpointLocation", …).start()

Rows are those of the source `eventstore`, or have Spark's Kafka columns: `key`, `value`, `headers`,
`topic`, `partition`, of which only `value` is required. Each task publishes its rows in one
transaction; see `sink.numbered`.

Options: `id`, for transactional ids and `ce_source`; `topic`; `kafka.…`, properties of librdkafka;
`create_topics`, `partitions`, `replication_factor`, `dead_limit`, `transaction_timeout` as in
`[sink]`; `after_query`, the query that this one follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from eventpub.errors import ConfigError
from eventpub.failpoint import failpoint
from eventpub.spark import collect_no_imports, errors_through_spark
from eventpub.spark.source import GROUP

if TYPE_CHECKING:
    from eventpub.spark.options import SinkOptions

_OF_SOURCE = {"aggregate_id", "version", "event_type", "payload", "metadata", "create_time"}
_OF_KAFKA = {"key", "value", "headers", "topic", "partition"}
_TYPES = {
    "key": "string or binary", "value": "string or binary", "topic": "string",
    "partition": "int or bigint", "headers": "array<struct<key:string,value:binary>>",
    "aggregate_id": "string", "version": "bigint or int", "event_type": "string",
    "payload": "binary or string", "metadata": "string", "create_time": "timestamp",
    "late": "boolean", "kind": "string", "reason": "string", "detail": "string",
}  # fmt: skip

NEVER_NULL = {"aggregate_id", "version", "event_type", "create_time"}


class EventpubSink(DataSource):
    @classmethod
    def name(cls) -> str:
        return "eventpub"

    def streamWriter(self, schema: Any, overwrite: bool) -> Writer:  # noqa: N802 (Spark's name)
        del overwrite
        with errors_through_spark():
            names = set(schema.names)
            is_grouped = names == {GROUP}
            is_source = names >= _OF_SOURCE or is_grouped
            # a column that is not read would be published elsewhere, or not at all
            left_out = names & _OF_KAFKA if is_source else names - _OF_KAFKA
            left_out |= {"detail"} - names if "kind" in names else set()
            if left_out or not (is_source or "value" in names):
                raise ConfigError(
                    "config.invalid_value",
                    f"the rows cannot be published with the columns {', '.join(schema.names)}",
                    where="the query that is written",
                    suggestion="select key, value, headers, topic, partition (only value is"
                    " required), or the columns of the source eventstore (detail goes with kind),"
                    " not both",
                )
            writer = Writer(self.options, is_source=is_source, is_grouped=is_grouped)
            if not is_grouped:
                _require_types(schema)
                options = writer.options  # what is wrong with them is said now
            if not (is_grouped or "topic" in names or options.has_topic):
                raise ConfigError(
                    "config.missing_key",
                    "neither the rows nor the options name a topic",
                    where="option topic",
                    suggestion="set the option topic, or select a column topic",
                )
            collect_no_imports()
            return writer


def _require_types(schema: Any) -> None:
    for column in schema.fields:
        name, found = column.name, column.dataType.simpleString()
        types = _TYPES.get(name, found)
        is_null = found == "void" and name not in NEVER_NULL
        if not is_null and found.partition(" collate ")[0] not in types.split(" or "):
            raise ConfigError(
                "config.invalid_value",
                f"column {name} has the type {found}; it must be {types}",
                where=f"column {name} of the query that is written",
                suggestion=f"cast it, as by CAST({name} AS {types.partition(' or ')[0]})",
            )


Refusal = tuple[str, int, str]
"""Aggregate, version and reason of an event refused by the broker."""


@dataclass
class Published(WriterCommitMessage):
    """A task's outcome.

    `how`: `refused` events, now dead letters; `seconds` from the last row to the commit;
    `latency` and `latency_sum`, see `channel.Report`.
    """

    rows: int
    is_new: bool
    task: int = 0
    marker: dict[str, Any] | None = None
    how: dict[str, Any] = field(default_factory=dict)


class Writer(DataSourceStreamArrowWriter):
    """Publishes a task's rows; `is_grouped`: see `source.GROUP`."""

    def __init__(self, given: Mapping[str, str], *, is_source: bool, is_grouped: bool) -> None:
        self._given = dict(given)
        self._is_source = is_source
        self._is_grouped = is_grouped

    @property
    def options(self) -> SinkOptions:
        from eventpub.spark.options import sink_options

        return sink_options(self._given)

    def write(self, iterator: Any) -> Published:
        from eventpub.spark.rows import ungrouped
        from eventpub.spark.sink_task import publish

        with errors_through_spark():
            rows = ungrouped(iterator) if self._is_grouped else iterator
            done = publish(rows, self.options, is_source=self._is_source)
        collect_no_imports()
        return done

    def commit(self, messages: Any, batchId: int) -> None:  # noqa: N803 (Spark's name)
        """All tasks have committed: tell the publisher, or republish what a broker left open."""
        done = [each for each in messages if each]
        failpoint("before_settle")
        with errors_through_spark():
            if (folder := self.options.state_dir) is None:
                from eventpub.spark.sink_task import numbered_sink

                published = {each.task: each.marker for each in done if each.marker}
                repeated = [each.task for each in done if each.marker and not each.is_new]
                numbered_sink(self.options).settle(published, repeated)
            elif published := {each.task: each.how for each in done if each.is_new}:
                from eventpub.spark.notes import Notes
                from eventpub.state import StateDir

                Notes(StateDir(folder)).put({"batch": batchId, "published": published})
        failpoint("after_settle")
        collect_no_imports()

    def abort(self, messages: Any, batchId: int) -> None:  # noqa: N803 (Spark's name)
        """Published rows stay, and are recognised when the batch is repeated."""
