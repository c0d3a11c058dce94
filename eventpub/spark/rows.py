"""Rows as a shard's step decides them, as the source yields them, and as the sink takes them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from eventpub.admission.model import EVENTS, SkippedGap, values
from eventpub.private_apis.task_input import require_whole_input
from eventpub.sink.base import Content, CrashPoint, PublishedBatch, no_crash
from eventpub.sink.records import DeadRow, contents_of
from eventpub.sources.mysql.statements import lenient_text
from eventpub.spark.journal import KEYS
from eventpub.spark.source import GROUP

_BATCH_ROWS = 20_000
_GROUP_BYTES = 1 << 20
_PART_BYTES = 4 << 20
"""Bytes that a sink's task collects before it produces them. It waits for the broker's answer
before it produces the next ones: a group at a time cost the broker a third more CPU time.
"""
_ALIGNED = 64
"""Group sizes are a multiple of this, so that the next group's values are aligned."""
_PIECE_BYTES = 4 << 20
"""Most bytes of one of Spark's values, of which its JVM holds several copies: one of 200 MB took
all of its memory. A value of this size is continued by the next one.
"""

_DIGESTED = ("aggregate_id", "version", "kind", "key", "value", "headers", "topic", "partition")
"""Columns that identify a repeated batch; of the source's rows without the payloads."""

ROWS_IN = b"rows_in"
CLOCK = b"clock"
"""Names in a group's metadata."""

DECIDED: pa.Schema = pa.schema([*EVENTS, *(KEYS.field(n) for n in ("late", "kind", "reason"))])
DECIDED = DECIDED.append(KEYS.field("detail"))


class JournalSink:
    """A `Sink` that collects; `has_contents`: the table allows several rows per version."""

    needs_replacement = False

    def __init__(self, *, has_contents: bool) -> None:
        self._has_contents = has_contents
        self.size = 0
        self._tables: list[pa.Table] = []
        self._keys: list[pa.Table] = []

    def publish(self, content: Content, crash_point: CrashPoint = no_crash) -> PublishedBatch:
        crash_point("before_begin")
        skips, dead = map(_skip, content.gaps), map(_dead, content.dead)
        tables = [
            pa.Table.from_pylist([*skips], schema=DECIDED),
            _marked(content.events, content.late, "event"),
        ]
        if content.diverted is not None:
            tables.append(_marked(content.diverted, np.ones(len(content.diverted), bool), "late"))
        for table in [*tables, pa.Table.from_pylist([*dead], schema=DECIDED)]:
            if table.num_rows:
                self._tables.append(table)
                self.size += table.nbytes
                self._keys.append(self._key(table))
        return PublishedBatch(content.events.num_rows, {})

    def take(self) -> list[pa.Table]:
        """What was collected since the last call, schema `DECIDED`."""
        taken, self._tables = self._tables, []
        return taken

    def keys(self) -> pa.Table:
        """The keys of everything collected, schema `journal.KEYS`."""
        return pa.concat_tables(self._keys) if self._keys else KEYS.empty_table()

    def _key(self, table: pa.Table) -> pa.Table:
        contents = contents_of(table) if self._has_contents else [None] * table.num_rows
        columns = [table.column(n) for n in KEYS.names[:-1]]
        return pa.Table.from_arrays([*columns, pa.array(contents, pa.binary())], schema=KEYS)


def batches(tables: Sequence[pa.Table], *, all_rows: bool) -> Iterator[pa.RecordBatch]:
    """Decided rows for users' jobs; with skips and dead letters if `all_rows`."""
    for table in tables:
        kept = table if all_rows else table.filter(are("event", table))
        for batch in kept.combine_chunks().to_batches(max_chunksize=_BATCH_ROWS):
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            columns["metadata"] = lenient_text(columns["metadata"])
            columns["create_time"] = columns["create_time"].cast(pa.timestamp("us", tz="UTC"))
            if not all_rows:
                for name in ("kind", "reason", "detail"):
                    del columns[name]
            yield pa.RecordBatch.from_arrays([*columns.values()], [*columns])


def grouped(tables: Sequence[pa.Table], rows_in: int, clock: int = 0) -> Iterator[pa.RecordBatch]:
    """Decided rows for the publisher's own sink, in groups; see `source.GROUP`.

    `rows_in`: the shard's last batch before with rows, which must still be visible; `clock`: by how
    much the database's clock is ahead of this machine's, µs.

    Between source and sink Spark copies each value. With ten columns its JVM took 5.9 CPU s per
    million events; with one that is nearly always null, 3.3.
    """
    for table in tables:
        size = max(1, _GROUP_BYTES // max(1, table.nbytes // max(1, table.num_rows)))
        for batch in table.combine_chunks().to_batches(max_chunksize=min(size, _BATCH_ROWS)):
            out = pa.BufferOutputStream()
            schema = batch.schema.with_metadata({ROWS_IN: str(rows_in), CLOCK: str(clock)})
            with pa.ipc.new_stream(out, schema) as writer:
                writer.write_batch(batch.replace_schema_metadata(schema.metadata))
            out.write(bytes(-out.tell() % _ALIGNED))
            rows, value = batch.num_rows, out.getvalue()
            for begin in range(0, value.size + 1, _PIECE_BYTES):  # the last piece may be empty
                piece = _first_of(rows, value.slice(begin, min(_PIECE_BYTES, value.size - begin)))
                yield pa.RecordBatch.from_arrays([piece], [GROUP])
                rows = 1


def ungrouped(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Inverse of `grouped`, schema `DECIDED`."""
    begun = bytearray()
    for batch in rows:
        column = batch.column(GROUP)
        for first in np.flatnonzero(np.asarray(column.is_valid())).tolist():
            piece = column[first].as_buffer()
            if begun or piece.size == _PIECE_BYTES:
                begun += piece
            if piece.size < _PIECE_BYTES:
                yield from pa.ipc.open_stream(pa.py_buffer(begun) if begun else piece)
                begun = bytearray()


def _first_of(rows: int, value: pa.Buffer) -> pa.Array[Any]:
    """Only the first row has a value, which is not copied."""
    is_valid = (1).to_bytes(-(-rows // 8), "little")
    ends = np.full(rows + 1, value.size, np.int32)
    ends[0] = 0
    buffers: list[Any] = [pa.py_buffer(is_valid), pa.py_buffer(ends.tobytes()), value]
    return pa.Array.from_buffers(pa.binary(), rows, buffers)


def unpublished(rows: pa.Table) -> pa.Table:
    return _marked(rows, None, "event")


def replayed(keys: pa.Table, rows: pa.Table) -> pa.Table:
    """The rows of a part of a journal, in its order; schema `DECIDED`.

    Args:
        keys: schema `journal.KEYS`.
        rows: the table's rows of these versions, schema `EVENTS`, in any order.

    Raises:
        KeyError: the table no longer has a row; its argument is the row's key.
    """
    contents = values(keys, "content")
    has_contents = any(content is not None for content in contents)
    found = contents_of(rows) if has_contents else [None] * rows.num_rows
    at = {key: row for row, key in enumerate(_keys(rows, found))}
    is_skip = are("skip", keys).to_pylist()
    places = zip(_keys(keys, contents), is_skip, strict=True)
    taken = rows.take(pa.array([None if skip else at[key] for key, skip in places], pa.int64()))
    taken_types: Any = taken["event_type"]
    types: Any = pc.fill_null(taken_types, "")
    columns = {"event_type": types, "payload": taken["payload"], "metadata": taken["metadata"]}
    columns |= {name: keys[name] for name in KEYS.names if name != "content"}
    return pa.Table.from_arrays([columns[name] for name in DECIDED.names], schema=DECIDED)


def are(kind: str, table: pa.Table) -> Any:
    column: Any = table["kind"]
    return pc.equal(column, pa.scalar(kind))


def _keys(rows: pa.Table, contents: list[Any]) -> Iterator[tuple[Any, ...]]:
    return zip(values(rows, "aggregate_id"), values(rows, "version"), contents, strict=True)


def _marked(rows: pa.Table, late: npt.NDArray[np.bool_] | None, kind: str) -> pa.Table:
    count = rows.num_rows
    nothing = pa.nulls(count, pa.string())
    marks = pa.repeat(False, count) if late is None else pa.array(late)
    columns: list[Any] = [rows.column(name) for name in EVENTS.names]
    columns += [marks, pa.repeat(kind, count)]
    return pa.Table.from_arrays([*columns, nothing, nothing], schema=DECIDED)


def _skip(gap: SkippedGap) -> dict[str, Any]:
    return {
        "aggregate_id": gap.aggregate_id,
        "version": gap.from_version,
        "event_type": "",
        "create_time": gap.first_seen,
        "late": False,
        "kind": "skip",
        "reason": gap.reason,
        "detail": json.dumps(asdict(gap)),
    }


def _dead(row: DeadRow) -> dict[str, Any]:
    detail = json.dumps({"published": row.published})
    of_row = {name: getattr(row, name) for name in EVENTS.names}
    return of_row | {"late": False, "kind": "dead", "reason": row.reason, "detail": detail}


class InputRows:
    """A sink task's rows, kept as they arrive for retries."""

    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._coming = (batch for batch in batches if batch.num_rows)
        self._kept: list[pa.Table] = []
        self._sums = np.zeros(2, np.uint64)
        self._in_order: dict[str, Any] = {}
        self.rows = 0

    @property
    def has_rows(self) -> bool:
        return self.part(0) is not None

    def part(self, number: int) -> pa.Table | None:
        """Some rows, in the order of their arrival; None after the last."""
        while number >= len(self._kept):
            some: list[pa.RecordBatch] = []
            size = 0
            while size < _PART_BYTES and (batch := next(self._coming, None)) is not None:
                some.append(batch)
                size += batch.nbytes
                if ROWS_IN in (batch.schema.metadata or {}):
                    _hash_in_order(batch, self._in_order)
                else:
                    self._sums += _sums_of_hashes(batch)
            if not some:
                require_whole_input()
                return None
            self._kept.append(pa.Table.from_batches(some).combine_chunks())
            self.rows += self._kept[-1].num_rows
        return self._kept[number]

    def metadata(self, name: bytes) -> int:
        """`ROWS_IN` or `CLOCK`, of rows from `grouped`; 0: unknown."""
        first = self.part(0)
        return int(((first and first.schema.metadata) or {}).get(name, 0))

    def topics(self) -> set[str]:
        """Topics that a column names; waits for the last row."""
        self.digest()
        named = [each.column("topic") for each in self._kept if "topic" in each.schema.names]
        return {topic for column in named for topic in column.unique().to_pylist() if topic}

    def digest(self) -> str:
        """Hash of the set of rows, or of grouped rows in their order, which is the same in a
        repeated batch; waits for the last row."""
        while self.part(len(self._kept)) is not None:
            pass
        columns = b"".join(each.digest() for each in self._in_order.values())
        return hashlib.blake2b(self._sums.tobytes() + columns, digest_size=16).hexdigest()


def _hash_in_order(batch: pa.RecordBatch, hashes: dict[str, Any]) -> None:
    """Add the rows to a hash of lengths and one of values for each column, however they are divided
    into batches: a fifth of the time of `_sums_of_hashes`."""
    for name in _DIGESTED:
        if name in batch.schema.names:
            column = _octets(batch.column(name))
            lengths = np.asarray(pc.fill_null(pc.binary_length(column), -1))
            _, ends, octets = pc.fill_null(column, b"").buffers()
            first, last = np.frombuffer(ends, np.int64)[column.offset :][[0, len(column)]]
            for what, values in (("lengths", lengths), ("values", octets[first:last])):
                key = f"{name} {what}"
                hashes.setdefault(key, hashlib.blake2b(digest_size=16)).update(values)


def _sums_of_hashes(batch: pa.RecordBatch) -> Any:
    """Sums modulo 2^64 of both halves of each row's hash: 0.6 µs per row of a source."""
    names = [name for name in _DIGESTED if name in batch.schema.names]
    columns: list[Any] = [_octets(batch.column(name)) for name in names]
    lengths = [np.asarray(pc.fill_null(pc.binary_length(each), -1)) for each in columns]
    heads = np.stack(lengths, axis=1).astype(np.int64)
    buffers: list[Any] = [None, pa.py_buffer(heads.tobytes())]
    fixed: Any = pa.Array.from_buffers(pa.binary(heads[0].nbytes), batch.num_rows, buffers)
    parts: list[Any] = [fixed.cast(pa.large_binary()), *(pc.fill_null(c, b"") for c in columns)]
    rows: Any = pc.binary_join_element_wise(*parts, pa.scalar(b"", pa.large_binary()))
    hashes = b"".join(hashlib.blake2b(row, digest_size=16).digest() for row in rows.to_pylist())
    return np.frombuffer(hashes, np.uint64).reshape(-1, 2).sum(axis=0, dtype=np.uint64)


def _octets(column: Any) -> Any:
    if pa.types.is_list(column.type):
        texts = [None if row is None else repr(row).encode() for row in column.to_pylist()]
        return pa.array(texts, pa.large_binary())
    if pa.types.is_integer(column.type):
        column = column.cast(pa.string())
    return column.cast(pa.large_binary())
