"""The data sink `eventpub`: exactly once to Kafka, from any streaming query.

    df.writeStream.format("eventpub").option("id", "orders").option("topic", …)
      .option("kafka.bootstrap.servers", …).option("checkpointLocation", …).start()

Rows are those of the source `eventstore`, or have Spark's Kafka columns: `key`, `value`, `headers`,
`topic`, `partition`, of which only `value` is required. Each task publishes its rows in one
transaction; see `sink.numbered`.

Options: `id` names what publishes, for transactional ids and `ce_source`; `topic`; `kafka.…`,
properties of librdkafka; `create_topics`, `partitions`, `replication_factor`, `dead_limit`,
`transaction_timeout` as in `[sink]`; `after_query`, the query that this one follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from eventpub.errors import ConfigError
from eventpub.spark.process import collect_no_imports, errors_through_spark
from eventpub.spark.source import GROUP

if TYPE_CHECKING:
    from eventpub.spark.options import SinkOptions

_OF_SOURCE = {"aggregate_id", "version", "event_type", "payload", "metadata", "create_time"}
_OF_KAFKA = {"key", "value", "headers", "topic", "partition"}


class EventpubSink(DataSource):
    """See the module."""

    @classmethod
    def name(cls) -> str:
        """`eventpub`"""
        return "eventpub"

    def streamWriter(self, schema: Any, overwrite: bool) -> Writer:  # noqa: N802 (Spark's name)
        """The writer of a micro-batch."""
        del overwrite
        with errors_through_spark():
            names = set(schema.names)
            is_source = names >= _OF_SOURCE or names == {GROUP}
            if not is_source and ("value" not in names or names - _OF_KAFKA):
                raise ConfigError(
                    "config.invalid_value",
                    f"the rows have the columns {', '.join(schema.names)}",
                    where="the query that is written",
                    suggestion="select key, value, headers, topic, partition (only value is"
                    " required), or the columns of the source eventstore",
                )
            writer = Writer(self.options, is_source=is_source, is_grouped=names == {GROUP})
            if not is_source and "topic" not in names and not writer.options.has_topic:
                raise ConfigError(
                    "config.missing_key",
                    "neither the rows nor the options name a topic",
                    where="option topic",
                    suggestion="set the option topic, or select a column topic",
                )
            if not is_source:
                writer.options  # noqa: B018 (what is wrong with them is said now)
            collect_no_imports()
            return writer


@dataclass
class Published(WriterCommitMessage):
    """What a task has done.

    Attributes:
        rows: of the task.
        is_new: whether they were published by this attempt.
        task: its number.
        refused: the events that the broker refused, which are dead letters: aggregate, version and
            reason of each.
    """

    rows: int
    is_new: bool
    task: int = 0
    refused: tuple[tuple[str, int, str], ...] = ()


class Writer(DataSourceStreamArrowWriter):
    """Publishes the rows of a task.

    Args:
        given: the options of the sink.
        is_source: whether the rows are those of the source `eventstore`.
        is_grouped: whether they come in groups; see `source.GROUP`.
    """

    def __init__(self, given: Mapping[str, str], *, is_source: bool, is_grouped: bool) -> None:
        self._given = dict(given)
        self._is_source = is_source
        self._is_grouped = is_grouped

    @property
    def options(self) -> SinkOptions:
        """Those that were given.

        Raises:
            ConfigError: as of `sink_options`.
        """
        from eventpub.spark.options import sink_options

        return sink_options(self._given)

    def write(self, iterator: Any) -> Published:
        """Publish the rows in one transaction, unless another attempt has."""
        from eventpub.spark.rows import ungrouped
        from eventpub.spark.sink_task import publish

        with errors_through_spark():
            rows = ungrouped(iterator) if self._is_grouped else iterator
            found = publish(rows, self.options, is_source=self._is_source)
        collect_no_imports()
        return Published(*found)

    def commit(self, messages: Any, batchId: int) -> None:  # noqa: N803 (Spark's name)
        """Every task has committed its own transaction: what was refused is noted."""
        refused = {each.task: each.refused for each in messages if each and each.refused}
        if refused and (folder := self.options.state_dir) is not None:
            from eventpub.spark.notes import Notes
            from eventpub.state import StateDir

            Notes(StateDir(folder)).put({"batch": batchId, "refused": refused})
        collect_no_imports()

    def abort(self, messages: Any, batchId: int) -> None:  # noqa: N803 (Spark's name)
        """What tasks have published stays, and is recognised when the batch is repeated."""
