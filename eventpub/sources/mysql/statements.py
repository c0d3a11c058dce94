"""The SELECTs that read events, and their rows as Arrow.

Each names its index: for a page of a table far behind, the optimizer would choose a table scan and
a sort. Values are numbers, times made here, or hexadecimal strings; names come quoted from the
layout.
"""

# ruff: noqa: S608 (nothing in here comes from outside but through `quote` and `literal`)

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from tempfile import SpooledTemporaryFile
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from eventpub.admission.model import EVENTS, Shard, VersionRange
from eventpub.errors import StateError, StoreError
from eventpub.private_apis.packets import Columns
from eventpub.sources.base import RowSeen
from eventpub.sources.mysql.layout import Layout
from eventpub.sources.mysql.table import SLICES

_EPOCH = datetime(1970, 1, 1)
_DATETIMES = -30_610_224_000_000_000, 253_402_300_799_999_999  # 1000-01-01 to 9999-12-31
# a bound outside of TIMESTAMP's range makes MySQL scan the whole index
_TIMESTAMPS = 1_000_000, 2_147_483_647_999_999  # 1970-01-01 00:00:01 to 2038-01-19 03:14:07.999999

_NOW = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
NOW = f"SELECT {_NOW}"

_FEW = 10
"""Most versions of a range that are listed individually."""


def _select(
    what: str, rows: str, condition: str = "", order: str = "", most: int | None = None
) -> str:
    parts = [f"SELECT {what} FROM {rows}"]
    parts += [f"WHERE {condition}"] * bool(condition) + [f"ORDER BY {order}"] * bool(order)
    return " ".join(parts + ([] if most is None else [f"LIMIT {most:d}"]))


def columns(layout: Layout) -> str:
    names = layout.version, layout.event_type, layout.payload, layout.metadata or "NULL"
    return ", ".join([layout.identity.selected, *names, layout.create_time])


def window(
    layout: Layout, first: int, last: int, shard: Shard | None, most: int | None = None
) -> str:
    condition = between(layout, first, last) + in_shard(layout, shard)
    return _select(columns(layout), layout.by_time, condition, layout.create_time, most)


def keys(layout: Layout, first: int, last: int, shard: Shard | None) -> str:
    condition = between(layout, first, last) + in_shard(layout, shard) + _with_identity(layout)
    return _select(f"{_key(layout)}, {layout.create_time}", layout.by_time, condition)


def _key(layout: Layout) -> str:
    return f"{layout.identity.selected}, {layout.version}"


def counts(
    layout: Layout, ranges: Sequence[tuple[int, tuple[int, int]]], most: int | None = None
) -> str:
    def count(number: int, first: int, last: int) -> str:
        what, condition = f"{number}, COUNT(*)", between(layout, first, last)
        condition += _with_identity(layout)
        if most is None:
            return _select(what, layout.by_time, condition)
        return _select(what, f"({_select('1', layout.by_time, condition, most=most)}) AS t")

    return " UNION ALL ".join(count(number, *values) for number, values in ranges)


def nth_time(layout: Layout, first: int, last: int, n: int) -> str:
    """The `create_time` of the n-th row (from 1) of a range, from the index alone."""
    time = layout.create_time
    return f"{_select(time, layout.by_time, between(layout, first, last), time, 1)} OFFSET {n - 1}"


def now_and_first_time(layout: Layout, after: int, upto: int) -> str:
    values = local_range(layout, after, upto)
    first = "NULL" if values is None else f"({nth_time(layout, *values, 1)})"
    return f"{_NOW}, {first}"


def now_and_newest_time(layout: Layout) -> str:
    time = layout.create_time
    return f"SELECT {_NOW}, ({_select(time, layout.by_time, order=f'{time} DESC', most=1)})"


def newest(layout: Layout, above: int | None, last: int | None, most: int) -> str:
    """Id and `create_time` of the rows with the highest ids, or the lowest above one.

    With `last`, the local `create_time` serves as the id, of rows up to this one.
    """
    time, number, rows = layout.create_time, layout.id, layout.by_id
    condition = "" if above is None else f"{number} > {above:d}"
    if last is not None:
        number, rows = f"TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {time})", layout.by_time
        first = (_DATETIMES if layout.zone else _TIMESTAMPS)[0]
        first = first if above is None else max(above + 1, first)
        condition = between(layout, first, last)
    order = f"{layout.sampled_by} {'DESC' if above is None else 'ASC'}"
    return _select(f"{number}, {time}", rows, condition, order, most)


def without_time(layout: Layout, most: int) -> str:
    """Number of unreadable rows, up to `most`: with no time, a zero date, or before 1970 in UTC."""
    first, _ = local_range(layout, 0, _TIMESTAMPS[1]) or _TIMESTAMPS
    nothing = f"{layout.create_time} < {_time(first)} OR {layout.create_time} IS NULL"
    return f"SELECT COUNT(*) FROM ({_select('1', layout.by_time, nothing, most=most)}) AS t"


def without_identity(layout: Layout, most: int) -> str:
    what, order = f"{_has_no_identity(layout)} AS has_none", f"{layout.create_time} DESC"
    newest = _select(what, layout.by_time, order=order, most=most)
    return f"SELECT COALESCE(SUM(has_none), 0) FROM ({newest}) AS newest"


def _has_no_identity(layout: Layout) -> str:
    columns = [*layout.identity.names, layout.version]
    return f"({' OR '.join(f'{column} IS NULL' for column in columns)})"


def _with_identity(layout: Layout) -> str:
    return f" AND NOT {_has_no_identity(layout)}" if layout.skips_nulls else ""


def local_range(layout: Layout, after: int, upto: int) -> tuple[int, int] | None:
    """The values ``first ≤ value ≤ last`` that the column can hold for ``after < t ≤ upto``."""
    unit, (first, last) = layout.unit, layout.clock.local_range(after, upto)
    earliest, latest = _DATETIMES if layout.zone else _TIMESTAMPS
    first = -(-max(first, earliest) // unit) * unit
    last = min(last, latest) // unit * unit
    return (first, last) if first <= last else None


def between(layout: Layout, first: int, last: int) -> str:
    return f"{layout.create_time} BETWEEN {_time(first)} AND {_time(last)}"


def in_shard(layout: Layout, shard: Shard | None) -> str:
    """The condition for the shard's rows, using the slice column where possible."""
    if shard is None or shard.shards == 1:
        return ""
    if layout.slice and SLICES % shard.partitions == 0:
        number = layout.slice
    else:
        number = f"CRC32({layout.identity.utf8})"
    condition = f"{number} % {shard.partitions} % {shard.shards} = {shard.number}"
    if layout.id_is_nullable and shard.number == 0:
        # such a row belongs to no shard; it is read so that it can be refused
        condition = f"({condition} OR {layout.identity.selected} IS NULL)"
    return f" AND {condition}"


def versions_by_key(
    layout: Layout, ranges: Sequence[VersionRange], *, only_keys: bool = False
) -> str:
    condition = " OR ".join(f"({_in_range(layout, r)})" for r in ranges)
    what = _key(layout) if only_keys else columns(layout)
    # in index order, so that nothing is sorted and the first row comes at once
    return _select(what, layout.by_key, condition, ", ".join(layout.key_columns))


def version_numbers(layout: Layout, r: VersionRange, most: int, *, highest: bool) -> str:
    order = f"{layout.version} {'DESC' if highest else 'ASC'}"
    return _select(layout.version, layout.by_key, _in_range(layout, r), order, most)


def some_keys(layout: Layout, most: int) -> str:
    what, order = [*layout.identity.names, layout.version], ", ".join(layout.key_columns)
    return _select(", ".join(what), layout.by_key, order=order, most=most)


def repeated(layout: Layout) -> str:
    key = ", ".join([*layout.identity.names, layout.version])
    by = ", ".join([*(part.grouped for part in layout.identity.parts), layout.version])
    return f"SELECT {key} FROM {layout.table} GROUP BY {by} HAVING COUNT(*) > 1"


def lower_versions(layout: Layout, bounds: Sequence[tuple[str, int]], limit: int) -> str:
    """Keys and times of the highest versions below each bound, at most `limit` of each."""
    what, order = f"{_key(layout)}, {layout.create_time}", f"{layout.version} DESC"
    conditions = (f"{layout.identity.equals(a)} AND {layout.version} < {v:d}" for a, v in bounds)
    return " UNION ALL ".join(
        f"({_select(what, layout.by_key, condition, order, limit)})" for condition in conditions
    )


def _in_range(layout: Layout, r: VersionRange) -> str:
    versions = f"BETWEEN {r.first:d} AND {r.last:d}"
    if layout.key_columns[-1] != layout.version and r.last - r.first < _FEW:
        # an index uses the columns after the version only with IN
        versions = f"IN ({', '.join(str(v) for v in range(r.first, r.last + 1)) or 'NULL'})"
    return f"{layout.identity.equals(r.aggregate_id)} AND {layout.version} {versions}"


def _time(local: int) -> str:
    return f"'{(_EPOCH + timedelta(microseconds=local)).isoformat(' ', 'microseconds')}'"


# -- their rows --------------------------------------------------------------------------------


def keys_batch(
    layout: Layout, columns: Columns, after: int | None, upto: int | None
) -> pa.RecordBatch:
    ids, versions, times = columns
    nothing = pa.nulls(len(ids), pa.binary())
    rows = [ids, versions, nothing, nothing, nothing, times]
    batch = record_batch(layout, rows, after, upto)
    return batch.select(["aggregate_id", "version", "create_time"])


def spooled(batches: Iterable[pa.RecordBatch], most: int) -> Iterator[pa.RecordBatch]:
    """The same batches once all have arrived; above `most` bytes on disk (in `TMPDIR`)."""
    with SpooledTemporaryFile(most) as file:
        writer: Any = None
        try:
            for batch in batches:
                writer = writer or pa.ipc.new_stream(file, batch.schema)
                writer.write_batch(batch)
            if writer is None:
                return
            writer.close()
            file.seek(0)
        except OSError as error:  # of the file: the database's are StoreErrors
            raise StateError(
                "state.no_temporary_file",
                f"rows that do not fit into memory cannot be written to a temporary file: {error}",
                where="TMPDIR",
                suggestion="free space in the folder for temporary files, or set TMPDIR to another"
                " one that the publisher's user may write",
                retriable=True,
            ) from error
        yield from pa.ipc.open_stream(file)


def record_batch(
    layout: Layout, columns: Columns, after: int | None, upto: int | None
) -> pa.RecordBatch:
    """A block of rows as Arrow, schema `EVENTS`; raises store.row_invalid, naming the row."""
    ids, versions, types, payloads, metadata, times = columns
    try:
        for required in (ids, versions, times):
            if required.null_count:
                raise pa.ArrowInvalid("NULL")
        local = local_times(times)
        id_text = ids.cast(pa.string())
        numbers = versions.cast(pa.string()).cast(pa.int64())
    except pa.ArrowInvalid as error:
        raise _invalid_row(layout, columns) from error
    instants = pa.array(layout.clock.utc(local, after, upto))
    type_text = lenient_text(types).fill_null("")
    return pa.RecordBatch.from_arrays(
        [id_text, numbers, type_text, payloads, metadata, instants], schema=EVENTS
    )


def with_identity(columns: Columns) -> Columns:
    ids, versions, *_ = columns
    if not (ids.null_count or versions.null_count):
        return columns
    kept = pc.and_(ids.is_valid(), versions.is_valid())
    return [column.filter(kept) for column in columns]


def rows_seen(layout: Layout, columns: Columns) -> list[RowSeen]:
    _, versions, types, payloads, _, times = columns
    seen = []
    for at, text in enumerate(lenient_text(types).fill_null("").to_pylist()):
        payload, created = payloads[at].as_py(), None
        if times[at].is_valid:
            with suppress(pa.ArrowInvalid):
                created = layout.instant(int(local_times(times.slice(at, 1))[0]))
        size = None if payload is None else len(payload)
        seen.append(RowSeen(int(versions[at].as_py()), created, str(text), size))
    return seen


def micros(time: object) -> int:
    """Raises store.row_invalid: a writer may be allowed dates that do not exist."""
    if not isinstance(time, datetime):
        raise StoreError(
            "store.row_invalid",
            f"a row has the time {time!r}, which does not exist",
            where="store.columns.create_time",
            suggestion="correct or remove the row, then start again; no event was skipped",
        )
    return (time - _EPOCH) // timedelta(microseconds=1)


def local_times(column: pa.Array[Any]) -> npt.NDArray[np.int64]:
    micros = column.cast(pa.string()).cast(pa.timestamp("us")).cast(pa.int64())
    return np.asarray(micros.to_numpy(zero_copy_only=False), np.int64)


def lenient_text(column: pa.Array[Any]) -> pa.Array[Any]:
    """Text of a column that may hold bytes; invalid UTF-8 is replaced."""
    try:
        text: pa.Array[Any] = column.cast(pa.string())
        return text
    except pa.ArrowInvalid:
        return pa.array(
            [v if v is None else v.decode(errors="replace") for v in column.to_pylist()],
            pa.string(),
        )


def _invalid_row(layout: Layout, columns: Columns) -> StoreError:
    for aggregate_id, version, _, _, _, time in zip(
        *(column.to_pylist() for column in columns), strict=True
    ):
        text = (aggregate_id or b"").decode(errors="replace")
        reasons = {
            "has no aggregate_id": aggregate_id is None,
            "has no version": version is None,
            "has a version beyond 2^63 - 1": int(version or 0) >= 2**63,
            "has no create_time": time is None or time.startswith(b"0000"),
            "has an aggregate_id that is not UTF-8": text.encode() != (aggregate_id or b""),
        }
        if reason := next((reason for reason, is_so in reasons.items() if is_so), None):
            shown = "NULL" if aggregate_id is None else repr(text)
            number, at = ((v or b"NULL").decode() for v in (version, time))
            left_out = (
                ". If rows without an aggregate or a version are not events:"
                ' store.without_identity = "skip"'
            )
            return StoreError(
                "store.row_invalid",
                f"a row {reason}: aggregate_id {shown}, version {number}, create_time {at}",
                where=layout.where,
                suggestion="correct or remove the row, then start again; no event was skipped"
                + (left_out if aggregate_id is None or version is None else ""),
            )
    return StoreError("store.row_invalid", "a row cannot be read as an event", where=layout.where)
