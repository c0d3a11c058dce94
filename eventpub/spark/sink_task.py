"""A task of the sink `eventpub`: publishes its rows in one transaction as they arrive."""

from __future__ import annotations

import json
import re
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext

from eventpub import config
from eventpub.admission.model import EVENTS, Shard, SkippedGap
from eventpub.channel import latencies
from eventpub.config_values import TOPIC
from eventpub.errors import ConfigError, SinkError, counted
from eventpub.sink.base import Content, Refused
from eventpub.sink.batch import Batch, batch_of
from eventpub.sink.client import Clients
from eventpub.sink.encoder import CloudEvents
from eventpub.sink.layout import check_topics
from eventpub.sink.markers import Numbered
from eventpub.sink.numbered import NumberedSink, markers_of
from eventpub.sink.records import NO_NUL, Columns, DeadRow, contents_of
from eventpub.spark.options import SinkOptions
from eventpub.spark.rows import CLOCK, ROWS_IN, InputRows
from eventpub.spark.sink import NEVER_NULL, Published, Refusal

_first_batches: dict[tuple[str, str], tuple[str, int]] = {}
"""By id and query: its run, and the run's first batch seen by this process."""


def publish(
    batches: Iterator[pa.RecordBatch], options: SinkOptions, *, is_source: bool
) -> Published:
    """Publish the rows of a task in one transaction, unless another attempt has."""
    numbered, sink = _numbered(options), numbered_sink(options)
    parts = _Parts(batches, options, sink, is_source=is_source, has_written=numbered.batch > 0)
    if not (parts.has_rows or numbered.is_repeated) and (numbered.batch or numbered.task):
        return Published(0, False, numbered.task)
    done = sink.publish(replace(numbered, after=parts.metadata(ROWS_IN) - 1), parts)
    how = parts.published() if done.is_new else {}
    return Published(parts.rows, done.is_new, done.number, done.marker, how)


def numbered_sink(options: SinkOptions) -> NumberedSink:
    return NumberedSink(Clients(options.sink), options.id, at_start=options.partitions)


def _require_topics(
    section: config.Sink, sink: NumberedSink, *sides: str, was_written: bool = False
) -> None:
    """Create missing topics, that of the events only with the first batch. Side topics that are
    written must have as many partitions as it."""
    counts = {sink.partitions.get(topic) for topic in (section.topic, *sides)}
    if None in counts or len(counts) > 1:
        clients = Clients(section)
        check_topics(clients, late=section.late_topic in sides, was_written=was_written)
        sink.partitions |= sink.count_partitions()


def _numbered(options: SinkOptions) -> Numbered:
    context = TaskContext.get()
    assert context is not None, "a writer runs in a task"
    query = options.query or context.getLocalProperty("sql.streaming.queryId")
    number = context.getLocalProperty("streaming.sql.batchId")
    if not query or number is None:
        raise SinkError(
            "sink.not_streaming",
            "the sink eventpub is used outside a streaming query, so its batches are not numbered",
            suggestion='write with df.writeStream.format("eventpub"); to publish a table once, read'
            " it as a stream with trigger(availableNow=True)",
        )
    batch, is_repeated, run = int(number), context.attemptNumber() > 0, ""
    if not options.query:
        # A query's job group is its run id. Only a run's first batch may have been begun by another
        # run.
        run = context.getLocalProperty("spark.jobGroup.id") or ""
        key = options.id, query
        if _first_batches.get(key, ("", -1))[0] != run or not run:
            _first_batches[key] = run, batch
        is_repeated = is_repeated or _first_batches[key] == (run, batch)
    task, after_query = context.partitionId(), options.after_query
    return Numbered(query, batch, task, is_repeated, run, -1, after_query, options.owner)


class _Parts(InputRows):
    """A task's rows, one part per record batch."""

    def __init__(
        self,
        batches: Iterator[pa.RecordBatch],
        options: SinkOptions,
        sink: NumberedSink,
        *,
        is_source: bool,
        has_written: bool,
    ) -> None:
        super().__init__(batches)
        self._options, self._sink = options, sink
        self._is_source, self._has_written = is_source, has_written
        self._made: dict[int, _EventRows] = {}
        self._whole_at = 0.0

    def __iter__(self) -> Iterator[Callable[[Refused, bool], Batch]]:
        if self._is_source and not self.has_rows:
            _require_topics(self._options.sink, self._sink)
        make = _EventRows if self._is_source else _PlainRows
        for number in count():
            if (rows := self.part(number)) is None:
                self._whole_at = self._whole_at or time.monotonic()
                if self._is_source and self._kept and not self._in_order:  # `grouped` rows are
                    _require_order(self._kept)
                return
            made = make(rows, self._options, self._sink, self._has_written)
            if isinstance(made, _EventRows):
                self._made[number] = made
            yield made.batch

    def published(self) -> dict[str, Any]:
        """See `sink.Published`; call after the commit."""
        made = [*self._made.values()]
        how: dict[str, Any] = {"seconds": {"publish": time.monotonic() - self._whole_at}}
        how["refused"] = [each for rows in made for each in rows.refused]
        if clock := self.metadata(CLOCK):  # of the publisher's own rows
            created = np.concatenate([rows.created for rows in made])
            now = time.time() * 1e6 + clock
            how["latency"], how["latency_sum"] = latencies(created, now)
        return how


class _EventRows:
    """Rows of the source, as records like the publisher's."""

    def __init__(
        self, rows: pa.Table, options: SinkOptions, sink: NumberedSink, has_written: bool
    ) -> None:
        self._options = options
        self.refused: list[Refusal] = []
        self.created = np.zeros(0, np.int64)
        self._at = _rows_by_kind(rows)
        of = options.sink
        sides = {"skip": of.gaps_topic, "dead": of.dead_topic, "late": of.late_topic}
        written = [topic for kind, topic in sides.items() if len(self._at[kind])]
        _require_topics(of, sink, *written, was_written=has_written)
        self._sink = sink
        self._partitions = sink.partitions[options.sink.topic]
        _require_values(rows, np.concatenate([self._at["event"], self._at["late"]]))
        columns: dict[str, Any] = {name: rows[name] for name in EVENTS.names}
        columns["create_time"] = columns["create_time"].cast(pa.timestamp("us", tz="UTC"))
        arrays = [columns[field.name].cast(field.type) for field in EVENTS]
        self._rows = pa.Table.from_arrays(arrays, schema=EVENTS)
        self._late = np.array(_values(rows, "late"), bool)  # None: not late
        self._reasons, self._details = _values(rows, "reason"), _values(rows, "detail")

    def batch(self, refused: Refused, reduced: bool) -> Batch:
        topic = self._options.sink.topic
        dead: list[DeadRow] = []
        for row in self._at["dead"].tolist():
            details = json.loads(self._details[row] or "{}")
            dead.append(self._dead(row, self._reasons[row], details.get("published")))
        kept, self.refused = {}, []
        for kind, name in (("event", topic), ("late", self._options.sink.late_topic)):
            at = self._at[kind]
            if reasons := refused.get(name, {}):
                _require_topics(self._options.sink, self._sink, self._options.sink.dead_topic)
            for number, reason in reasons.items():
                row = int(at[number])
                dead.append(self._dead(row, reason, None))
                id_, version = (self._rows[n][row].as_py() for n in ("aggregate_id", "version"))
                self.refused.append((id_, version, reason))
            kept[kind] = np.delete(at, list(reasons))
        gaps = [SkippedGap(**json.loads(self._details[row])) for row in self._at["skip"].tolist()]
        diverted = self._rows.take(kept["late"]) if len(kept["late"]) else None
        is_whole = len(kept["event"]) == self._rows.num_rows
        content = Content(
            self._rows if is_whole else self._rows.take(kept["event"]),
            self._late[kept["event"]],
            gaps,
            dead,
            diverted,
            int(time.time() * 1e6),
        )
        self.created = content.events["create_time"].to_numpy()
        shard = Shard(0, 1, self._partitions)
        encoder = CloudEvents(self._options.id)
        return batch_of(self._options.sink, encoder, shard, content, reduced=reduced)

    def _dead(self, row: int, reason: str, published: list[int] | None) -> DeadRow:
        rows = self._rows.slice(row, 1)
        [values], [content] = rows.to_pylist(), contents_of(rows)
        pair = None if published is None else (published[0], published[1])
        return DeadRow(reason=reason, published=pair, content=content, **values)


def _rows_by_kind(rows: pa.Table) -> dict[str, npt.NDArray[np.int64]]:
    """Row numbers by kind; rows without one are events."""
    if "kind" not in rows.schema.names:
        found = dict.fromkeys(("late", "skip", "dead"), np.zeros(0, np.int64))
        return found | {"event": np.arange(rows.num_rows)}
    column: Any = rows["kind"]
    kinds: Any = pc.fill_null(column, "event")
    found = {
        kind: np.flatnonzero(np.asarray(pc.equal(kinds, pa.scalar(kind))))
        for kind in ("event", "late", "skip", "dead")
    }
    if sum(map(len, found.values())) < rows.num_rows:
        others = sorted({*kinds.unique().to_pylist()} - {*found})
        raise _invalid(
            "config.invalid_value",
            f"rows have the kind {', '.join(map(repr, others[:3]))}",
            "kind",
            suggestion="the column is that of the source with rows = all; drop or rename another",
        )
    return found


def _require_values(rows: pa.Table, at: npt.NDArray[np.int64]) -> None:
    for name in sorted(NEVER_NULL):
        if rows[name].null_count and (nulls := rows[name].take(at).null_count):
            raise _invalid(
                "config.invalid_value",
                f"column {name} is NULL in {counted(nulls, 'row')}",
                name,
                suggestion=f"leave such rows out, as by .where('{name} IS NOT NULL')",
            )


def _require_order(parts: list[pa.Table]) -> None:
    """Refuse events that are no longer in the source's order, in which only `late` ones descend."""
    names = [n for n in ("aggregate_id", "version", "late", "kind") if n in parts[0].schema.names]
    if "late" not in names:
        return
    rows = pa.concat_tables([part.select(names) for part in parts])
    rows = rows.take(_rows_by_kind(rows)["event"])
    late: Any = rows["late"]
    rows = rows.filter(pc.equal(late, pa.scalar(False)))
    ids: Any = rows["aggregate_id"].combine_chunks()
    code, version = ids.dictionary_encode().indices.to_numpy(), rows["version"].to_numpy()
    order = np.argsort(code, kind="stable")
    c, v = code[order], version[order]
    descends = np.flatnonzero((c[1:] == c[:-1]) & (v[1:] < v[:-1]))
    if len(descends):
        first, second = order[descends[0] :][:2].tolist()
        raise _invalid(
            "config.invalid_value",
            f"version {version[second]} of {ids[second].as_py()!r} comes after version"
            f" {version[first]}: between source and sink the rows have lost their order",
            "version",
            suggestion="use only narrow operations there (as select or where), coalesce(n) or"
            ' repartition(n, "aggregate_id"); repartition(n) and sort divide an aggregate',
        )


def _invalid(code: str, what: str, column: str, *, suggestion: str) -> ConfigError:
    where = f"column {column} of the query that is written"
    return ConfigError(code, f"{what}; nothing was published", where=where, suggestion=suggestion)


class _PlainRows:
    """Rows with Spark's Kafka columns."""

    def __init__(
        self, rows: pa.Table, options: SinkOptions, sink: NumberedSink, has_written: bool
    ) -> None:
        self._options = options
        self._keys = _values(rows, "key")
        self._values = [_bytes(value) for value in _values(rows, "value")]
        self._headers = [[h for h in of or () if h is not None] for of in _values(rows, "headers")]
        if any(h["key"] is None for of in self._headers for h in of):
            raise _invalid(
                "config.invalid_value",
                "a row has a header whose key is NULL",
                "headers",
                suggestion="leave it out, as by filter(headers, h -> h.key IS NOT NULL)",
            )
        default, own = options.sink.topic if options.has_topic else None, markers_of(options.sink)
        self._topics = [topic or default for topic in _values(rows, "topic")]
        self._sink, self._counts = sink, sink.partitions
        for topic in {topic or "" for topic in self._topics}:
            if topic == own or not (topic in self._counts or re.fullmatch(TOPIC, topic)):
                raise _invalid(
                    "config.invalid_value",
                    f"a row names {f'the topic {topic[:250]!r}' if topic else 'no topic'}",
                    "topic",
                    suggestion="give one that matches [A-Za-z0-9._-]{1,240}"
                    f" and is not {own}, or set the option topic",
                )
            self._require(topic, topic)
        self._partitions = [
            _partition(number, key, row, self._counts[str(topic)])
            for row, (number, key, topic) in enumerate(
                zip(_values(rows, "partition"), self._keys, self._topics, strict=True)
            )
        ]

    def _require(self, name: str, topic: str) -> None:
        if name not in self._counts:
            section = self._options.sink.model_copy(update={"topic": topic})
            _require_topics(section, self._sink, name)

    def batch(self, refused: Refused, reduced: bool) -> Batch:
        rows: dict[str, list[int]] = {}
        for row, topic in enumerate(self._topics):
            rows.setdefault(str(topic), []).append(row)
        side: list[tuple[str, Any]] = []
        events: dict[str, Columns] = {}
        for topic, of_topic in rows.items():
            if reasons := refused.get(topic, {}):
                self._require(f"{topic}.dead", topic)
            dead = [(of_topic[at], why) for at, why in reasons.items()]
            side += [(f"{topic}.dead", self._dead(topic, row, why, reduced)) for row, why in dead]
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
            headers=[
                [(h["key"].replace("\0", NO_NUL), h["value"]) for h in self._headers[row]]
                for row in rows
            ],
        )

    def _dead(self, topic: str, row: int, reason: str, reduced: bool) -> Any:
        key = self._keys[row]
        text = key.decode(errors="replace") if isinstance(key, bytes) else key
        dead = DeadRow(text, None, reason, payload=self._values[row])
        shard = self._counts[f"{topic}.dead"], 0
        now = int(time.time() * 1e6)
        return CloudEvents(self._options.id).dead(dead, shard, now, reduced=reduced)


def _values(rows: pa.Table, name: str) -> list[Any]:
    """A column's values; None where the rows lack the column."""
    has_it = name in rows.schema.names
    return rows[name].to_pylist() if has_it else [None] * rows.num_rows


def _bytes(value: Any) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


def _partition(number: int | None, key: Any, row: int, partitions: int) -> int:
    if number is not None:
        if not 0 <= number < partitions:
            raise _invalid(
                "config.invalid_value",
                f"a row names partition {number}, and its topic has {partitions}",
                "partition",
                suggestion=f"name one of 0 to {partitions - 1}, or none, to partition by key",
            )
        return int(number)
    if key is None:
        return row % partitions
    return zlib.crc32(_bytes(key) or b"") % partitions
