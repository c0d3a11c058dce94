"""The protocol `Encoder`: what the records of admitted rows are; and the one of CloudEvents.

What every implementation promises, and `tests/sink/test_encoder.py` checks: the same rows give the
same records, in the same order; a record's key is its aggregate, its partition the one it is given;
its headers tell the version; and a dead letter is bounded in size whatever its row is, since the
broker would refuse it as well.
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

Rows: TypeAlias = pa.Table | pa.RecordBatch
Placed: TypeAlias = npt.NDArray[np.int32]
Marks: TypeAlias = npt.NDArray[np.bool_] | None

_JSON_TYPE = ("content-type", "application/json")
_BYTES = ("content-type", "application/octet-stream")
_JSON_STARTS = frozenset({b"{", b"["})
_IS_LATE = (records.LATE, "1")
MOST_TEXT = 16 * 1024
"""Bytes of each other column's value that it takes along."""
MOST_PAYLOAD = 256 * 1024
"""Bytes of a payload that a dead letter takes along."""


class Encoder(Protocol):
    """Makes records; `limit`: of their timestamps, µs."""

    def events(self, rows: Rows, placed: Placed, late: Marks, limit: int) -> records.Columns:
        """Those of rows of `EVENTS`, one by one; some are marked as late."""

    def fixed(
        self, rows: Rows, placed: Placed, late: Marks, limit: int
    ) -> records.FixedEvents | None:
        """The same, to be handed over at once; None where their headers are not of one kind."""

    def gap(self, gap: SkippedGap, partitions: int, limit: int) -> Record:
        """That of a skip."""

    def dead(
        self, row: DeadRow, shard: tuple[int, int], limit: int, *, reduced: bool = False
    ) -> Record:
        """A dead letter, with `reduced` as small as it can be.

        Args:
            shard: the topic's partitions, and the one for rows without an aggregate.
        """


@dataclass(frozen=True)
class CloudEvents:
    """Events as of `records`; `source` is the application's id, `ce_source`."""

    source: str

    def events(
        self, rows: Rows, placed: Placed, late: Marks = None, limit: int = FAR_AHEAD
    ) -> records.Columns:
        common = self._common(rows, placed, limit)
        # The constant part of all headers by C iterators: this is the publisher's hottest line.
        columns: list[Iterable[Header]] = [
            repeat((name, value.decode()))
            if isinstance(value, bytes)
            else zip(repeat(name), records.as_bytes(value), strict=False)
            for name, value in common.headers
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
        """What metadata and lateness do not change."""
        ids, versions, types, values = (
            _whole(rows.column(name))
            for name in ("aggregate_id", "version", "event_type", "payload")
        )
        version_texts: Any = versions.cast(pa.string())
        micros: npt.NDArray[np.int64] = np.asarray(rows.column("create_time"))
        starts: Any = pc.binary_slice(values, 0, 1)
        is_json: Any = pc.is_in(starts, pa.array(sorted(_JSON_STARTS), values.type))
        content_type = np.where(np.asarray(is_json), 0, 1).astype(np.int8)
        content_type[np.asarray(values.is_null())] = -1
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
            ],
            content_types=[_JSON_TYPE[1].encode(), _BYTES[1].encode()],
            content_type=content_type,
        )

    def gap(self, gap: SkippedGap, partitions: int, limit: int = FAR_AHEAD) -> Record:
        """A record of ``<topic>.gaps``; its times are RFC 3339."""
        times = {name: _rfc3339(getattr(gap, name)) for name in ("first_seen", "skipped_at")}
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
        """A record of ``<topic>.dead``.

        The value is the payload's bytes, except where the broker has refused the record itself, or
        where there are more than `MOST_PAYLOAD`: then `eventpub_payload_bytes` tells their number.
        A type, metadata or reason of more than `MOST_TEXT` bytes is left out in the same way
        (`eventpub_type_bytes`, `eventpub_metadata_bytes`; a reason is cut): the row is in the
        store. `eventpub_conflict` has `row.published`, from which an index that was lost knows
        other rows of this kind again; see `read_conflict`. With `reduced`: key, version and reason
        alone.
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
        if row.aggregate_id is not None and not reduced:
            key = row.aggregate_id.encode()
            _add(headers, "ce_subject", "eventpub_subject_bytes", key)
            if row.version is not None:
                _add(headers, "ce_id", "eventpub_id_bytes", key + f"/{row.version}".encode())
        if row.create_time is not None:
            headers.append((records.TIME, _rfc3339(row.create_time)))
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
        value = row.payload
        if value is not None and (
            reduced or len(value) > MOST_PAYLOAD or row.reason.startswith(records.REFUSED)
        ):
            headers.append(("eventpub_payload_bytes", str(len(value))))
            value = None
        return Record(
            key=row.aggregate_id,
            value=value,
            partition=partition,
            # a broker may have refused the time, too
            timestamp=records.timestamp(limit if reduced else row.create_time or 0, limit),
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


def _rfc3339(micros: int) -> str:
    return records.format_times(np.array([micros], np.int64))[0].decode()


def read_gap(value: bytes) -> SkippedGap:
    """The skip that `CloudEvents.gap` wrote.

    Raises:
        ValueError: the value is no such record.
    """
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
    """Check that values of a record, which anybody may have written, are as ours would be."""
    if not all(type(n) is int and -(1 << 63) <= n < 1 << 63 for n in numbers):
        raise ValueError("not a 64-bit integer")
    if not all(isinstance(text, str) and text.encode() is not None for text in texts):
        raise ValueError("not a text")
    if not all(records.FIRST_TIME <= time <= records.LAST_TIME for time in times):
        raise ValueError("time out of range")


def read_conflict(headers: Mapping[str, Any]) -> tuple[int, int] | None:
    """`DeadRow.published` of a dead letter; None where it has none."""
    try:
        last, created = (int(text) for text in headers[records.CONFLICT].split())
        _require_types([last, created], [], [created])
        return last, created
    except (KeyError, ValueError, AttributeError):
        return None


def _add(
    headers: list[Header], name: str, name_of_size: str, value: bytes, most: int = MOST_TEXT
) -> None:
    """A header with the value; with its size instead, where that is more than `most` bytes."""
    is_small = len(value) <= most
    headers.append((name, value) if is_small else (name_of_size, str(len(value))))
