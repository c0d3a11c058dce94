"""The protocol `Encoder`, which makes records of admitted rows, and its CloudEvents implementation.

Every implementation promises, and `tests/sink/test_encoder.py` checks: the same rows give the same
records, in the same order; the key is the aggregate; the partition is the given one; headers carry
the version; a dead letter is bounded in size, since the broker would refuse it as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import repeat
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from eventpub.admission.model import SkippedGap, topic_partition
from eventpub.sink import records
from eventpub.sink.records import FAR_AHEAD, DeadRow, Header, Record, parse_times
from eventpub.times import format_time

Rows: TypeAlias = pa.Table | pa.RecordBatch
Placed: TypeAlias = npt.NDArray[np.int32]
Marks: TypeAlias = npt.NDArray[np.bool_] | None

_JSON_TYPE = ("content-type", "application/json")
_BYTES = ("content-type", "application/octet-stream")
_JSON_STARTS = frozenset({b"{", b"["})
_IS_LATE = (records.LATE, "1")
MOST_TEXT = 16 * 1024
"""Largest type, metadata or reason in a dead letter, bytes."""
MOST_PAYLOAD = 256 * 1024
"""Largest payload in a dead letter, bytes."""


class Encoder(Protocol):
    """`limit` caps record timestamps, µs."""

    def events(self, rows: Rows, placed: Placed, late: Marks, limit: int) -> records.Columns:
        """Encode rows of `EVENTS` one by one."""

    def fixed(
        self, rows: Rows, placed: Placed, late: Marks, limit: int
    ) -> records.FixedEvents | None:
        """Encode rows in bulk; None if their headers are not uniform."""

    def gap(self, gap: SkippedGap, partitions: int, limit: int) -> Record:
        """Encode a skip."""

    def dead(
        self, row: DeadRow, shard: tuple[int, int], limit: int, *, reduced: bool = False
    ) -> Record:
        """Encode a dead letter; `shard`: partition count, and partition for rows without a key."""


@dataclass(frozen=True)
class CloudEvents:
    """Encodes as described in `records`; `source` becomes `ce_source`; `more` headers of events."""

    source: str
    more: tuple[tuple[str, bytes], ...] = ()

    def events(
        self, rows: Rows, placed: Placed, late: Marks = None, limit: int = FAR_AHEAD
    ) -> records.Columns:
        common = self._common(rows, placed, limit)
        # Constant headers by C iterators: this is the publisher's hottest line.
        columns: list[Iterable[Header]] = [
            repeat((name, value.decode()))
            if isinstance(value, bytes)
            else zip(repeat(name), records.as_bytes(value), strict=False)
            for name, value in common.headers[:-1]  # metadata may give another content type
        ]
        values = common.values.to_pylist()
        metadata: Iterable[bytes | None] = repeat(None)
        if rows.column("metadata").null_count < len(values):
            metadata = rows.column("metadata").to_pylist()
        late_flags: Iterable[bool] = repeat(False) if late is None else late.tolist()
        return records.Columns(
            keys=common.keys.to_pylist(),
            values=values,
            partitions=placed,
            timestamps=common.timestamps.tolist(),
            headers=_headers(zip(*columns, strict=False), values, metadata, late_flags),
        )

    def fixed(
        self, rows: Rows, placed: Placed, late: Marks = None, limit: int = FAR_AHEAD
    ) -> records.FixedEvents | None:
        if rows.column("metadata").null_count < len(rows) or (late is not None and late.any()):
            return None
        return self._common(rows, placed, limit)

    def _common(self, rows: Rows, placed: Placed, limit: int) -> records.FixedEvents:
        """The parts that do not depend on metadata or lateness."""
        ids, versions, types, values = (
            _whole(rows.column(name))
            for name in ("aggregate_id", "version", "event_type", "payload")
        )
        version_texts: Any = versions.cast(pa.string())
        micros: npt.NDArray[np.int64] = np.asarray(rows.column("create_time"))
        starts: Any = pc.binary_slice(values, 0, 1)
        is_json: Any = pc.is_in(starts, pa.array(sorted(_JSON_STARTS), values.type))
        content_types: Any = pc.if_else(is_json, _JSON_TYPE[1], _BYTES[1])
        return records.FixedEvents(
            keys=ids,
            values=values,
            partitions=placed,
            timestamps=records.timestamps(micros, limit),
            headers=[
                ("ce_specversion", b"1.0"),
                ("ce_id", pc.binary_join_element_wise(ids, version_texts, "/")),
                ("ce_source", self.source.encode()),
                ("ce_type", types),
                (records.TIME, records.time_texts(micros)),
                ("ce_subject", ids),
                (records.SEQUENCE, version_texts),
                *self.more,
                ("content-type", pc.if_else(values.is_valid(), content_types, None)),
            ],
        )

    def gap(self, gap: SkippedGap, partitions: int, limit: int = FAR_AHEAD) -> Record:
        """JSON with RFC 3339 times."""
        times = {name: format_time(getattr(gap, name)) for name in ("first_seen", "skipped_at")}
        value = {**asdict(gap), **times}
        return Record(
            key=gap.aggregate_id,
            value=records.encode_json(value).encode(),
            partition=topic_partition(gap.aggregate_id, partitions),
            timestamp=records.timestamp(gap.skipped_at, limit),
            headers=[(records.SOURCE, self.source), _JSON_TYPE],
        )

    def dead(
        self, row: DeadRow, shard: tuple[int, int], limit: int = FAR_AHEAD, *, reduced: bool = False
    ) -> Record:
        """A record of ``<topic>.dead``; `reduced`: no payload, type, metadata or large key.

        The value is the payload, unless the broker refused the record or it exceeds `MOST_PAYLOAD`:
        then `eventpub_payload_bytes` has its size. A type or metadata above `MOST_TEXT` is replaced
        by `eventpub_type_bytes` or `eventpub_metadata_bytes`, in a reduced one such a key by
        `eventpub_key_bytes`, and a longer reason is cut. From
        `eventpub_conflict` (`row.published`) a rebuilt index recognizes other rows of this kind.
        """
        reason = row.reason.encode(errors="replace")[: 1024 if reduced else MOST_TEXT]
        headers: list[Header] = [
            ("ce_specversion", "1.0"),
            (records.SOURCE, self.source),
            (records.REASON, reason.decode(errors="ignore").encode()),
        ]
        partitions, partition = shard
        if row.aggregate_id is not None:
            partition = topic_partition(row.aggregate_id, partitions)
        if row.version is not None:
            headers.append((records.SEQUENCE, str(row.version)))
        key, octets = row.aggregate_id, (row.aggregate_id or "").encode()
        if key is not None and not reduced:
            _add(headers, "ce_subject", "eventpub_subject_bytes", octets)
            if row.version is not None:
                _add(headers, "ce_id", "eventpub_id_bytes", octets + f"/{row.version}".encode())
        elif len(octets) > MOST_TEXT:
            headers.append(("eventpub_key_bytes", str(len(octets))))
            key = None
        if row.create_time is not None:
            headers.append((records.TIME, format_time(row.create_time)))
        if row.published is not None:
            headers.append((records.CONFLICT, f"{row.published[0]} {row.published[1]}"))
        keep = 0 if reduced else MOST_TEXT
        if row.content is not None:
            headers.append((records.CONTENT, row.content.hex()))
        if row.event_type is not None:
            encoded = row.event_type.encode(errors="replace")
            _add(headers, "ce_type", "eventpub_type_bytes", encoded, keep)
        if row.metadata is not None:
            _add(headers, "eventpub_metadata", "eventpub_metadata_bytes", row.metadata, keep)
        # the broker may have refused the row's time, too
        created = limit if reduced or row.create_time is None else row.create_time
        value = row.payload
        if value is not None and (
            reduced or len(value) > MOST_PAYLOAD or row.reason.startswith(records.REFUSED)
        ):
            headers.append(("eventpub_payload_bytes", str(len(value))))
            value = None
        return Record(
            key=key,
            value=value,
            partition=partition,
            timestamp=records.timestamp(created, limit),
            headers=headers,
        )


def _headers(
    fixed: Iterable[tuple[Header, ...]],
    values: list[bytes | None],
    metadata: Iterable[bytes | None],
    late: Iterable[bool],
) -> Iterator[list[Header]]:
    for head, value, text, is_late in zip(fixed, values, metadata, late, strict=False):
        headers = [*head]
        named = False
        if text:
            headers += records.metadata_headers(text)
            may_be_named = b"content-type" in text or b"\\u" in text
            named = may_be_named and "content-type" in dict(headers)
        if value is None:
            if named:
                headers = [header for header in headers if header[0] != "content-type"]
        elif not named:
            headers.append(_JSON_TYPE if value[:1] in _JSON_STARTS else _BYTES)
        if is_late:
            headers.append(_IS_LATE)
        yield headers


def _whole(column: Any) -> Any:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def read_gap(value: bytes) -> SkippedGap:
    """Decode a record of `CloudEvents.gap`; ValueError if it is none."""
    try:
        data = json.loads(value)
        found = {field.name: data[field.name] for field in fields(SkippedGap)}
        times = parse_times([found[name] for name in ("first_seen", "skipped_at")]).tolist()
        numbers = [found[name] for name in ("from_version", "to_version", "attempts")]
        _require_types(numbers, [found["aggregate_id"], found["reason"]], times)
    except (LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"no skip: {error}") from error
    return SkippedGap(**{**found, "first_seen": times[0], "skipped_at": times[1]})


def _require_types(numbers: list[Any], texts: list[Any], times: list[int]) -> None:
    """Reject values that ours cannot have: anyone may have written the record."""
    if not all(type(n) is int and -(1 << 63) <= n < 1 << 63 for n in numbers):
        raise ValueError("not a 64-bit integer")
    if not all(isinstance(text, str) and text.encode() is not None for text in texts):
        raise ValueError("not a text")
    if not all(records.FIRST_TIME <= time <= records.LAST_TIME for time in times):
        raise ValueError("time out of range")


def read_conflict(headers: Mapping[str, Any]) -> tuple[int, int] | None:
    """`DeadRow.published` from a dead letter's headers; None if missing or invalid."""
    try:
        last, created = (int(text) for text in headers[records.CONFLICT].split())
        _require_types([last, created], [], [created])
        return last, created
    except (KeyError, ValueError, AttributeError):
        return None


def _add(
    headers: list[Header], name: str, name_of_size: str, value: bytes, most: int = MOST_TEXT
) -> None:
    """Add a header with the value, or with its size if that exceeds `most` bytes."""
    is_small = len(value) <= most
    headers.append((name, value) if is_small else (name_of_size, str(len(value))))
