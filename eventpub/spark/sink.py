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

import hashlib
import json
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import ValidationError
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from eventpub.admission import EVENTS, Shard, SkippedGap
from eventpub.config import Sink
from eventpub.errors import ConfigError, SinkError
from eventpub.sink.batch import Batch, Content, batch_of
from eventpub.sink.numbered import Numbered, NumberedSink, markers_of
from eventpub.sink.records import Columns, DeadRow, dead_record
from eventpub.sink.topics import check_topics, partition_counts
from eventpub.spark.options import Publisher
from eventpub.spark.source import errors_through_spark

_KEYS = ("create_topics", "partitions", "replication_factor", "dead_limit", "transaction_timeout")
_OTHERS = ("id", "topic", "after_query", "checkpointlocation", "path")
_DIGESTED = ("aggregate_id", "version", "kind", "key", "value", "topic", "partition")
"""What tells a repeated batch from another one; of the source's rows without the payloads."""
_COLUMNS = {"key", "value", "headers", "topic", "partition"}


@dataclass(frozen=True)
class SinkOptions:
    """What the sink is given.

    Attributes:
        id: names what publishes.
        sink: as of `[sink]`; the topic is that of rows that do not name one.
        has_topic: whether there is such a topic.
        after_query: the query that this one follows; "": none.
        query: names the query; "": Spark's own id of it does.
    """

    id: str
    sink: Sink
    has_topic: bool
    after_query: str
    query: str = ""


def sink_options(given: Mapping[str, str]) -> SinkOptions:
    """The options of the sink `eventpub`.

    Raises:
        ConfigError: config.unknown_key, config.missing_key, config.invalid_value
    """
    if (packed := given.get("publisher_secret")) is not None:
        publisher, config = Publisher.unpacked(packed)
        return SinkOptions(config.app.id, config.sink, True, "", publisher.query)
    fields: dict[str, Any] = {}
    properties: dict[str, str] = {}
    others: dict[str, str] = {}
    for key, value in given.items():
        name = key.lower()
        if name.startswith("kafka."):
            properties[name.removeprefix("kafka.")] = value
        elif name in _KEYS:
            fields[name] = value
        elif name in _OTHERS:
            others[name] = value
        else:
            near = get_close_matches(name, [*_KEYS, *_OTHERS, "kafka.bootstrap.servers"], 1)
            raise ConfigError(
                "config.unknown_key",
                f"the sink eventpub has no option '{key}'",
                where=f"option {key}",
                suggestion=f"did you mean '{near[0]}'?"
                if near
                else "properties of librdkafka begin with kafka.",
            )
    servers = properties.pop("bootstrap.servers", "")
    for required, value in (("id", others.get("id", "")), ("kafka.bootstrap.servers", servers)):
        if not value:
            raise ConfigError(
                "config.missing_key",
                f"the sink eventpub needs the option '{required}'",
                where=f"option {required}",
                suggestion="set it to a name for what publishes, which stays the same"
                if required == "id"
                else "set it to the brokers, host:port, with commas between",
            )
    topic = others.get("topic", "")
    try:
        sink = Sink(
            topic=topic or others["id"],
            bootstrap_servers=servers,
            properties=properties,
            **fields,
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(
            "config.invalid_value",
            f"option {'.'.join(map(str, first['loc']))}: {first['msg']}",
            where="options of the sink eventpub",
            suggestion="correct the option",
        ) from None
    return SinkOptions(others["id"], sink, bool(topic), others.get("after_query", ""))


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
            options, names = sink_options(self.options), set(schema.names)
            is_source = set(EVENTS.names) <= names
            if not is_source and ("value" not in names or names - _COLUMNS):
                raise ConfigError(
                    "config.invalid_value",
                    f"the rows have the columns {', '.join(schema.names)}",
                    where="the query that is written",
                    suggestion="select key, value, headers, topic, partition (only value is"
                    " required), or the columns of the source eventstore",
                )
            if not is_source and "topic" not in names and not options.has_topic:
                raise ConfigError(
                    "config.missing_key",
                    "neither the rows nor the options name a topic",
                    where="option topic",
                    suggestion="set the option topic, or select a column topic",
                )
            return Writer(options, is_source=is_source)


@dataclass
class Published(WriterCommitMessage):
    """What a task has done.

    Attributes:
        rows: of the task.
        is_new: whether they were published by this attempt.
    """

    rows: int
    is_new: bool


class Writer(DataSourceStreamArrowWriter):
    """Publishes the rows of a task.

    Args:
        options: of the sink.
        is_source: whether the rows are those of the source `eventstore`.
    """

    def __init__(self, options: SinkOptions, *, is_source: bool) -> None:
        self._options = options
        self._is_source = is_source

    def write(self, iterator: Any) -> Published:
        """Publish the rows in one transaction, unless another attempt has."""
        batches = [batch for batch in iterator if batch.num_rows]
        if not batches:
            return Published(0, False)
        with errors_through_spark():
            rows = pa.Table.from_batches(batches).combine_chunks()
            options = self._options
            numbered = _numbered(rows, options.query)
            sink = NumberedSink(
                options.sink, options.id, markers_of(options.sink), after_query=options.after_query
            )
            make = _EventRows if self._is_source else _PlainRows
            is_new = sink.publish(numbered, make(rows, options, sink).batch)
            return Published(rows.num_rows, is_new)

    def commit(self, messages: Any, batchId: int) -> None:  # noqa: N803 (Spark's name)
        """Every task has committed its own transaction."""

    def abort(self, messages: Any, batchId: int) -> None:  # noqa: N803 (Spark's name)
        """What tasks have published stays, and is recognised when the batch is repeated."""


def _numbered(rows: pa.Table, query: str | None) -> Numbered:
    """Which part of which batch this task has."""
    context = TaskContext.get()
    assert context is not None, "a writer runs in a task"
    query = query or context.getLocalProperty("sql.streaming.queryId")
    batch = context.getLocalProperty("streaming.sql.batchId")
    if not query or batch is None:
        raise SinkError(
            "sink.not_streaming",
            "the sink eventpub is used outside a streaming query, so that nothing numbers its"
            " batches",
            suggestion='write with df.writeStream.format("eventpub"); to publish a table once, read'
            " it as a stream with trigger(availableNow=True)",
        )
    identity = rows.select([name for name in _DIGESTED if name in rows.schema.names])
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, identity.schema) as writer:
        writer.write_table(identity)
    digest = hashlib.blake2b(memoryview(out.getvalue()), digest_size=16).hexdigest()
    return Numbered(query, int(batch), context.partitionId(), digest)


class _EventRows:
    """Rows of the source, as records like those that the publisher writes."""

    def __init__(self, rows: pa.Table, options: SinkOptions, sink: NumberedSink) -> None:
        self._options = options
        self._limit = options.sink.dead_limit
        late = options.sink.late_topic in sink.partitions
        kinds = rows["kind"].to_pylist() if "kind" in rows.schema.names else None
        has_late = kinds is not None and "late" in kinds
        if options.sink.topic not in sink.partitions or (has_late and not late):
            check_topics(options.sink, late=has_late)
            sink.partitions |= partition_counts(options.sink)
        self._partitions = sink.partitions[options.sink.topic]
        self._kinds: list[Any] = kinds or ["event"] * rows.num_rows
        columns = [_column(rows, field) for field in EVENTS]
        self._rows = pa.Table.from_arrays(columns, schema=EVENTS)
        self._late = np.asarray(_flags(rows))
        names = rows.schema.names
        self._reasons: list[Any] = rows["reason"].to_pylist() if "reason" in names else []
        self._details: list[Any] = rows["detail"].to_pylist() if "detail" in names else []

    def batch(self, refused: dict[str, dict[int, str]]) -> Batch:
        """The records; what is refused are dead letters."""
        topic = self._options.sink.topic
        of_kind: dict[str, list[int]] = {"event": [], "late": [], "skip": [], "dead": []}
        for row, kind in enumerate(self._kinds):
            of_kind[kind].append(row)
        dead: list[DeadRow] = []
        for row in of_kind["dead"]:
            details = json.loads(self._details[row]) if self._details else {}
            dead.append(self._dead(row, self._reasons[row], details.get("published")))
        kept = {"event": of_kind["event"], "late": of_kind["late"]}
        for kind, name in (("event", topic), ("late", self._options.sink.late_topic)):
            reasons = refused.get(name, {})
            _require_few(self._options, reasons)
            dead += [self._dead(of_kind[kind][at], why, None) for at, why in reasons.items()]
            kept[kind] = [row for at, row in enumerate(of_kind[kind]) if at not in reasons]
        gaps = [SkippedGap(**json.loads(self._details[row])) for row in of_kind["skip"]]
        diverted = self._rows.take(kept["late"]) if kept["late"] else None
        content = Content(
            self._rows.take(kept["event"]),
            self._late[kept["event"]],
            gaps,
            dead,
            diverted,
            int(time.time() * 1e6),
        )
        shard = Shard(0, 1, self._partitions)
        return batch_of(self._options.sink, self._options.id, shard, content)

    def _dead(self, row: int, reason: str, published: list[int] | None) -> DeadRow:
        [values] = self._rows.slice(row, 1).to_pylist()
        pair = None if published is None else (published[0], published[1])
        return DeadRow(reason=reason, published=pair, **values)


def _column(rows: pa.Table, field: pa.Field[Any]) -> Any:
    column: Any = rows[field.name]
    if field.name == "create_time":
        column = column.cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())
    return column.cast(field.type)


def _flags(rows: pa.Table) -> Any:
    if "late" not in rows.schema.names:
        return np.zeros(rows.num_rows, bool)
    return np.array([bool(late) for late in rows["late"].to_pylist()], bool)


class _PlainRows:
    """Rows with Spark's Kafka columns."""

    def __init__(self, rows: pa.Table, options: SinkOptions, sink: NumberedSink) -> None:
        self._options = options
        names = rows.schema.names
        count = rows.num_rows
        self._keys: list[Any] = rows["key"].to_pylist() if "key" in names else [None] * count
        self._values = [_bytes(value) for value in rows["value"].to_pylist()]
        self._headers = rows["headers"].to_pylist() if "headers" in names else [None] * count
        default = options.sink.topic if options.has_topic else None
        topics = rows["topic"].to_pylist() if "topic" in names else [default] * count
        self._topics = [topic or default for topic in topics]
        given = rows["partition"].to_pylist() if "partition" in names else [None] * count
        self._counts = sink.partitions
        self._require_topics(sink)
        self._partitions = [
            _partition(number, key, row, self._counts[str(topic)])
            for row, (number, key, topic) in enumerate(
                zip(given, self._keys, self._topics, strict=True)
            )
        ]

    def _require_topics(self, sink: NumberedSink) -> None:
        options = self._options
        for topic in {*self._topics}:
            if topic is None:
                raise SinkError(
                    "sink.topic_missing",
                    "a row names no topic, and there is no option topic",
                    where="column topic",
                    suggestion="set the option topic, or fill the column",
                )
            if topic not in sink.partitions:
                named = options.sink.model_copy(update={"topic": topic})
                check_topics(named)
                sink.partitions |= partition_counts(options.sink)

    def batch(self, refused: dict[str, dict[int, str]]) -> Batch:
        """The records; what is refused are dead letters."""
        rows: dict[str, list[int]] = {}
        for row, topic in enumerate(self._topics):
            rows.setdefault(str(topic), []).append(row)
        side: list[tuple[str, Any]] = []
        events: dict[str, Columns] = {}
        for topic, of_topic in rows.items():
            reasons = refused.get(topic, {})
            _require_few(self._options, reasons)
            dead = [(of_topic[at], why) for at, why in reasons.items()]
            side += [(f"{topic}.dead", self._dead(topic, row, why)) for row, why in dead]
            kept = [row for at, row in enumerate(of_topic) if at not in reasons]
            events[topic] = self._columns(kept)
        return Batch(events, side)

    def _columns(self, rows: list[int]) -> Columns:
        now = int(time.time() * 1000)
        return Columns(
            keys=[self._keys[row] for row in rows],
            values=[self._values[row] for row in rows],
            partitions=np.array([self._partitions[row] for row in rows], np.int32),
            timestamps=[now] * len(rows),
            headers=[[(h["key"], h["value"]) for h in self._headers[row] or ()] for row in rows],
        )

    def _dead(self, topic: str, row: int, reason: str) -> Any:
        key = self._keys[row]
        text = key.decode(errors="replace") if isinstance(key, bytes) else key
        dead = DeadRow(text, None, reason, payload=self._values[row])
        return dead_record(dead, self._options.id, self._counts.get(f"{topic}.dead", 1), 0)


def _bytes(value: Any) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


def _partition(number: int | None, key: Any, row: int, partitions: int) -> int:
    if number is not None:
        return int(number)
    if key is None:
        return row % partitions
    return zlib.crc32(_bytes(key) or b"") % partitions


def _require_few(options: SinkOptions, reasons: Mapping[int, str]) -> None:
    if len(reasons) > options.sink.dead_limit:
        raise SinkError(
            "sink.too_many_refused",
            f"the broker refuses more than {options.sink.dead_limit} rows of a task:"
            f" {next(iter(reasons.values()))}",
            where=f"topic {options.sink.topic}",
            suggestion="if the topic's or the client's limits are too low, raise them"
            " (max.message.bytes; the option kafka.message.max.bytes); if these rows shall be dead"
            " letters, raise the option dead_limit. Nothing of them was published",
        )
