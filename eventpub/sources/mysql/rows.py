"""Rows as the database sends them, as Arrow: events, with each time as an instant.

What cannot be an event is an error that names the row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta
from tempfile import SpooledTemporaryFile
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from eventpub.admission.model import EVENTS
from eventpub.errors import StoreError
from eventpub.private_apis.packets import Columns
from eventpub.sources.base import RowSeen
from eventpub.sources.mysql.layout import Layout

_EPOCH = datetime(1970, 1, 1)


def keys_batch(
    layout: Layout, columns: Columns, after: int | None, upto: int | None
) -> pa.RecordBatch:
    """As `record_batch`, of the columns `aggregate_id`, `version` and `create_time` alone."""
    ids, versions, times = columns
    nothing = pa.nulls(len(ids), pa.binary())
    rows = [ids, versions, nothing, nothing, nothing, times]
    batch = record_batch(layout, rows, after, upto)
    return batch.select(["aggregate_id", "version", "create_time"])


def spooled(batches: Iterable[pa.RecordBatch], most: int) -> Iterator[pa.RecordBatch]:
    """The same, when all have come: of more than so many bytes on the disk, in `TMPDIR`."""
    with SpooledTemporaryFile(most) as file:
        writer: Any = None
        for batch in batches:
            writer = writer or pa.ipc.new_stream(file, batch.schema)
            writer.write_batch(batch)
        if writer is not None:
            writer.close()
            file.seek(0)
            yield from pa.ipc.open_stream(file)


def record_batch(
    layout: Layout, columns: Columns, after: int | None, upto: int | None
) -> pa.RecordBatch:
    """A block of rows as Arrow, schema `EVENTS`; those of a window where one is given.

    Raises:
        StoreError: store.row_invalid, naming the row
    """
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
    instants = pa.array(layout.instants(local, after, upto))
    type_text = lenient_text(types).fill_null("")
    return pa.RecordBatch.from_arrays(
        [id_text, numbers, type_text, payloads, metadata, instants], schema=EVENTS
    )


def with_identity(columns: Columns) -> Columns:
    """The rows of a block that say which event of which aggregate they are."""
    ids, versions, *_ = columns
    if not (ids.null_count or versions.null_count):
        return columns
    kept = pc.and_(ids.is_valid(), versions.is_valid())
    return [column.filter(kept) for column in columns]


def rows_seen(layout: Layout, columns: Columns) -> list[RowSeen]:
    """A block of rows that have an aggregate and a version."""
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


def micros(time: datetime) -> int:
    """Local µs of a time as PyMySQL reads it."""
    return (time - _EPOCH) // timedelta(microseconds=1)


def local_times(column: pa.Array[Any]) -> npt.NDArray[np.int64]:
    """Local µs of times as the server writes them."""
    micros = column.cast(pa.string()).cast(pa.timestamp("us")).cast(pa.int64())
    return np.asarray(micros.to_numpy(zero_copy_only=False), np.int64)


def lenient_text(column: pa.Array[Any]) -> pa.Array[Any]:
    """Text of a column that may hold bytes; what is not UTF-8 is replaced, not refused."""
    try:
        text: pa.Array[Any] = column.cast(pa.string())
        return text
    except pa.ArrowInvalid:
        return pa.array(
            [v if v is None else v.decode(errors="replace") for v in column.to_pylist()],
            pa.string(),
        )


_PASS_OVER = (
    '. If rows without an aggregate or a version are not events: store.without_identity = "skip"'
    " counts and skips them"
)


def _invalid_row(layout: Layout, columns: Columns) -> StoreError:
    """The error of the first row that cannot be an event."""
    for aggregate_id, version, _, _, _, time in zip(
        *(column.to_pylist() for column in columns), strict=True
    ):
        reason = None
        if aggregate_id is None:
            reason = "has no aggregate_id"
        elif version is None:
            reason = "has no version"
        elif int(version) >= 2**63:
            reason = "has a version beyond 2^63 - 1"
        elif time is None or time.startswith(b"0000"):
            reason = "has no create_time"
        elif aggregate_id.decode(errors="replace").encode() != aggregate_id:
            reason = "has an aggregate_id that is not UTF-8"
        if reason:
            shown = "NULL" if aggregate_id is None else repr(aggregate_id.decode(errors="replace"))
            number, at = ((v or b"NULL").decode() for v in (version, time))
            return StoreError(
                "store.row_invalid",
                f"a row {reason}: aggregate_id {shown}, version {number}, create_time {at}",
                where=layout.where,
                suggestion="correct or remove the row, then start again; no event was skipped"
                + (_PASS_OVER if aggregate_id is None or version is None else ""),
            )
    return StoreError("store.row_invalid", "a row cannot be read as an event", where=layout.where)
