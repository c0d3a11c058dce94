"""What an event, a skip and a refused row look like as Kafka records. Pure: no client, no clock.

An event is CloudEvents 1.0 in Kafka's binary mode: key the aggregate's id, value the payload's
bytes, headers `ce_*`. What must hold: `(aggregate_id, version)` can be read back from every record
(the key and `ce_sequence`), bytes of payloads are never touched, and no metadata can crash a batch
or take the place of a header of ours.

Rules for metadata (a flat JSON object): each key is a header; text as it is, numbers, booleans and
nested values as JSON text, null as a null header. Keys that begin with ``ce_`` or ``eventpub_``
are CloudEvents' and ours: they are renamed ``metadata_<key>``. A NUL in a key becomes U+FFFD, since
the client would cut the header's name there. A NULL payload has no
`content-type`, whatever the metadata say; of any other, that in the metadata wins, and without it a
payload that begins with ``{`` or ``[`` is ``application/json``, any other
``application/octet-stream``. Metadata that is no JSON object becomes
one header `metadata` with its bytes as they are.

The record's timestamp is `create_time` in whole milliseconds, at least 1 (Kafka takes none before
1970) and at most the time of the publication (brokers refuse what lies more than an hour ahead of
their clock); `ce_time` has `create_time` as it is, with its microseconds.

A dead letter is bounded in size whatever the row is, since the broker would refuse it as well: see
`dead_record`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import repeat
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from eventpub.admission.model import SkippedGap, topic_partition, topic_partitions

Header: TypeAlias = tuple[str, str | bytes | None]

SEQUENCE = "ce_sequence"
TIME = "ce_time"
LATE = "eventpub_late"
REASON = "eventpub_reason"
CONFLICT = "eventpub_conflict"
SOURCE = "ce_source"
CONTENT = "eventpub_content"
REFUSED = "sink.record_refused"

MOST_PAYLOAD = 256 * 1024
"""Bytes of a payload that a dead letter takes along."""
MOST_TEXT = 16 * 1024
"""Bytes of each other column's value that it takes along."""
_NEAR = 1_000_000
"""µs after which a row may have been created while the batch was made."""
FIRST_TIME, LAST_TIME = -62_135_596_800_000_000, 253_402_300_799_999_999
"""The years 1 to 9999, µs."""
_BEYOND = 1 << 63
FAR_AHEAD = 1 << 62
"""No limit of record timestamps, µs."""

_JSON = ("content-type", "application/json")
_BYTES = ("content-type", "application/octet-stream")
_JSON_STARTS = frozenset({b"{", b"["})
_IS_LATE = (LATE, "1")
_decode = json.JSONDecoder().decode
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_RESERVED = ("ce_", "eventpub_")
_NO_NUL = "\ufffd"


@dataclass(frozen=True)
class Record:
    """One Kafka record as it is produced; `timestamp` in milliseconds."""

    key: str | None
    value: bytes | None
    partition: int
    timestamp: int
    headers: list[Header]


def is_ours(headers: Iterable[tuple[str, Any]] | None, app_ids: Collection[str]) -> bool:
    """Whether a record was written by a publisher of these ids."""
    source = dict(headers or ()).get(SOURCE)
    return (source.decode(errors="replace") if isinstance(source, bytes) else source) in app_ids


@dataclass(frozen=True)
class DeadRow:
    """A row that cannot be published, on its way to ``<topic>.dead``.

    `reason` begins with an error code (``sink.record_refused: …``). `aggregate_id`, `version` and
    `create_time` (µs) are None where the row has none that can be used. `published`, of a version
    that was published as another event: the last version that was before the first such row, and
    by when these had been created (µs). `content`: as of `contents_of`.
    """

    aggregate_id: str | None
    version: int | None
    reason: str
    payload: bytes | None = None
    event_type: str | None = None
    metadata: bytes | None = None
    create_time: int | None = None
    published: tuple[int, int] | None = None
    content: bytes | None = None


def format_times(micros: npt.NDArray[np.int64]) -> list[bytes]:
    """RFC 3339 in UTC with microseconds, as `ce_time` has it."""
    return _bytes(_time_texts(micros))


def _time_texts(micros: npt.NDArray[np.int64]) -> Any:
    text: Any = pa.array(micros).cast(pa.timestamp("us")).cast(pa.string())
    text = pc.replace_substring(text, " ", "T")
    return pc.binary_join_element_wise(text, "Z", "")


def _bytes(strings: Any) -> list[bytes]:
    # The client cuts a header's value at a NUL if it is given as text, not if it is bytes.
    return strings.cast(pa.binary()).to_pylist()  # type: ignore[no-any-return]


def parse_times(texts: Sequence[str]) -> npt.NDArray[np.int64]:
    """The microseconds that `format_times` wrote.

    Raises:
        ValueError: a text is no such time.
    """
    plain = [t.removesuffix("Z") for t in texts]
    return np.array(plain, dtype="datetime64[us]").astype(np.int64)


def timestamps(micros: npt.NDArray[np.int64], limit: int = FAR_AHEAD) -> npt.NDArray[np.int64]:
    """Record timestamps, milliseconds; `limit` (µs) for what lies more than a second above it."""
    limited: npt.NDArray[np.int64] = np.where(micros > limit + _NEAR, limit, micros)
    return np.maximum(limited // 1000, 1)


def timestamp(micros: int, limit: int = FAR_AHEAD) -> int:
    """The same of one."""
    return max(1, (limit if micros > limit + _NEAR else micros) // 1000)


def contents_of(rows: pa.Table) -> list[bytes]:
    """Of each row 8 bytes that are the same for rows of one event type, payload and metadata.

    Args:
        rows: schema `EVENTS`.
    """
    columns = (rows.column(n).to_pylist() for n in ("event_type", "payload", "metadata"))
    return [
        _content((event_type or "").encode(), payload, metadata_headers(text) if text else ())
        for event_type, payload, text in zip(*columns, strict=True)
    ]


def content_of_record(headers: Mapping[str, Any], value: bytes | None) -> bytes:
    """The same of the record of an event; of a dead letter it is in its header."""
    if CONTENT in headers:
        return bytes.fromhex(headers[CONTENT].decode())
    own = ((n, v) for n, v in headers.items() if not n.startswith(_RESERVED))
    return _content(headers.get("ce_type") or b"", value, own)


def _content(event_type: bytes, payload: bytes | None, headers: Iterable[Header]) -> bytes:
    digest = blake2b(event_type, digest_size=8)
    # what a payload's type is follows from the payload, or is metadata that a NULL one lacks
    named = sorted({n: v for n, v in headers if n != "content-type"}.items())
    for text in [payload, *(part for header in named for part in header)]:
        octets = text.encode() if isinstance(text, str) else text
        digest.update(b"\0" if octets is None else b"\1%d:" % len(octets))
        digest.update(octets or b"")
    return digest.digest()


def metadata_headers(octets: bytes) -> list[Header]:
    """The headers of one row's metadata (see the module's rules)."""
    try:
        data = _decode(octets.decode())
    except (ValueError, RecursionError):
        return [("metadata", octets)]
    if not isinstance(data, dict):
        return [] if data is None else [("metadata", octets)]
    headers: list[Header] = [
        (
            f"metadata_{key}" if key.startswith(_RESERVED) else key,
            # An escape can make half of a surrogate pair: valid JSON, and no valid UTF-8.
            None if value is None else _text(value).encode(errors="replace"),
        )
        for key, value in data.items()
    ]
    if b"\\u" in octets:
        headers = [
            (name.encode(errors="replace").decode().replace("\0", _NO_NUL), value)
            for name, value in headers
        ]
    return headers


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return str(value) if type(value) is int else _encode(value)


@dataclass(frozen=True)
class Columns:
    """Events as columns, ready for a tight loop: the i-th of each makes the i-th record."""

    keys: list[str]
    values: list[bytes | None]
    partitions: npt.NDArray[np.int32]
    timestamps: list[int]
    headers: Iterable[list[Header]]

    def records(self) -> list[Record]:
        """The records one by one (for tests and tools; publishing loops over the columns)."""
        return [
            Record(k, v, int(p), t, h)
            for k, v, p, t, h in zip(
                self.keys,
                self.values,
                self.partitions,
                self.timestamps,
                self.headers,
                strict=True,
            )
        ]


def partitions_of(events: pa.Table | pa.RecordBatch, partitions: int) -> npt.NDArray[np.int32]:
    """The partition of each event."""
    encoded: Any = events.column("aggregate_id").dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.unify_dictionaries().combine_chunks()
    of_each = topic_partitions(encoded.dictionary.to_pylist(), partitions)
    placed: npt.NDArray[np.int32] = of_each[np.asarray(encoded.indices)]
    return placed


def event_columns(  # noqa: PLR0913 (options, by keyword)
    events: pa.Table | pa.RecordBatch,
    source: str,
    partitions: int,
    late: npt.NDArray[np.bool_] | None = None,
    *,
    placed: npt.NDArray[np.int32] | None = None,
    limit: int = FAR_AHEAD,
) -> Columns:
    """Events (schema `EVENTS`) as records' columns.

    Args:
        events: the rows, in the order in which they shall stand in the topic.
        source: the application's id, `ce_source`.
        partitions: of the topic.
        late: marks the rows that get the header `eventpub_late`.
        placed: what `partitions_of` says, where that is known already.
        limit: of the records' timestamps, µs.
    """
    ids_column: Any = events.column("aggregate_id")
    versions_column: Any = events.column("version").cast(pa.string())
    metadata_column = events.column("metadata")
    micros: npt.NDArray[np.int64] = np.asarray(events.column("create_time"))
    ids: list[str] = ids_column.to_pylist()
    values: list[Any] = events.column("payload").to_pylist()
    types = _bytes(events.column("event_type"))
    specversion, ce_source = ("ce_specversion", "1.0"), ("ce_source", source)
    type_headers = {t: ("ce_type", t) for t in set(types)}
    # The constant part of all headers by C iterators: this is the publisher's hottest line.
    fixed: Iterable[tuple[Header, ...]] = zip(
        repeat(specversion),
        zip(
            repeat("ce_id"),
            _bytes(pc.binary_join_element_wise(ids_column, versions_column, "/")),
            strict=False,
        ),
        repeat(ce_source),
        map(type_headers.__getitem__, types),
        zip(repeat(TIME), format_times(micros), strict=False),
        zip(repeat("ce_subject"), _bytes(ids_column), strict=False),
        zip(repeat(SEQUENCE), _bytes(versions_column), strict=False),
        strict=False,
    )
    metadata: Iterable[bytes | None] = repeat(None)
    if metadata_column.null_count < len(ids):
        metadata = metadata_column.to_pylist()
    late_flags: Iterable[bool] = repeat(False) if late is None else late.tolist()
    return Columns(
        keys=ids,
        values=values,
        partitions=partitions_of(events, partitions) if placed is None else placed,
        timestamps=timestamps(micros, limit).tolist(),
        headers=_headers(fixed, values, metadata, late_flags),
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
            headers += metadata_headers(text)
            may_be_named = b"content-type" in text or b"\\u" in text
            named = may_be_named and "content-type" in dict(headers)
        if value is None:
            if named:
                headers = [header for header in headers if header[0] != "content-type"]
        elif not named:
            headers.append(_JSON if value[:1] in _JSON_STARTS else _BYTES)
        if is_late:
            headers.append(_IS_LATE)
        yield headers


@dataclass(frozen=True)
class FixedEvents:
    """Events whose records have the same headers, as Arrow's columns; see `fixed_events`.

    Attributes:
        keys: an array of text.
        values: one of bytes.
        headers: name, and value: bytes for all, or an array with one for each.
        content_types: what the header after these may say.
        content_type: which of them a record has; -1: no such header.
    """

    keys: Any
    values: Any
    partitions: npt.NDArray[np.int32]
    timestamps: npt.NDArray[np.int64]
    headers: list[tuple[str, Any]]
    content_types: list[bytes]
    content_type: npt.NDArray[np.int8]


def have_fixed_headers(
    events: pa.Table | pa.RecordBatch, late: npt.NDArray[np.bool_] | None
) -> bool:
    """Whether `fixed_events` can tell all of these events' headers: no metadata, nothing late."""
    return events.column("metadata").null_count == len(events) and (late is None or not late.any())


def fixed_events(
    events: pa.Table | pa.RecordBatch,
    source: str,
    partitions: npt.NDArray[np.int32],
    limit: int = FAR_AHEAD,
) -> FixedEvents:
    """The same records as those of `event_columns`, of events that `have_fixed_headers`.

    Args:
        events: the rows.
        source: the application's id, `ce_source`.
        partitions: of each row.
        limit: of the records' timestamps, µs.
    """
    ids, versions, types, values = (
        _whole(events.column(name)) for name in ("aggregate_id", "version", "event_type", "payload")
    )
    version_texts: Any = versions.cast(pa.string())
    micros: npt.NDArray[np.int64] = np.asarray(events.column("create_time"))
    starts: Any = pc.binary_slice(values, 0, 1)
    is_json: Any = pc.is_in(starts, pa.array(sorted(_JSON_STARTS), values.type))
    content_type = np.where(np.asarray(is_json), 0, 1).astype(np.int8)
    content_type[np.asarray(values.is_null())] = -1
    return FixedEvents(
        keys=ids,
        values=values,
        partitions=partitions,
        timestamps=timestamps(micros, limit),
        headers=[
            ("ce_specversion", b"1.0"),
            ("ce_id", pc.binary_join_element_wise(ids, version_texts, "/")),
            ("ce_source", source.encode()),
            ("ce_type", types),
            (TIME, _time_texts(micros)),
            ("ce_subject", ids),
            (SEQUENCE, version_texts),
        ],
        content_types=[_JSON[1].encode(), _BYTES[1].encode()],
        content_type=content_type,
    )


def _whole(column: Any) -> Any:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def _rfc3339(micros: int) -> str:
    return format_times(np.array([micros], np.int64))[0].decode()


def gap_record(gap: SkippedGap, source: str, partitions: int, limit: int = FAR_AHEAD) -> Record:
    """A skip as a record of ``<topic>.gaps``; its times are RFC 3339."""
    value = {
        "aggregate_id": gap.aggregate_id,
        "from_version": gap.from_version,
        "to_version": gap.to_version,
        "first_seen": _rfc3339(gap.first_seen),
        "skipped_at": _rfc3339(gap.skipped_at),
        "attempts": gap.attempts,
        "reason": gap.reason,
    }
    return Record(
        key=gap.aggregate_id,
        value=_encode(value).encode(),
        partition=topic_partition(gap.aggregate_id, partitions),
        timestamp=timestamp(gap.skipped_at, limit),
        headers=[(SOURCE, source), _JSON],
    )


def read_gap(value: bytes) -> SkippedGap:
    """The skip that `gap_record` wrote.

    Raises:
        ValueError: the value is no such record.
    """
    try:
        data = json.loads(value)
        first_seen, skipped_at = parse_times([data["first_seen"], data["skipped_at"]]).tolist()
        numbers = [data[name] for name in ("from_version", "to_version", "attempts")]
        texts = [data[name] for name in ("aggregate_id", "reason")]
        _require_types(numbers, texts, [first_seen, skipped_at])
    except (LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"no skip: {error}") from error
    return SkippedGap(
        aggregate_id=texts[0],
        from_version=numbers[0],
        to_version=numbers[1],
        first_seen=first_seen,
        skipped_at=skipped_at,
        attempts=numbers[2],
        reason=texts[1],
    )


def _require_types(numbers: list[Any], texts: list[Any], times: list[int]) -> None:
    """Check that values of a record, which anybody may have written, are as ours would be.

    Raises:
        ValueError: a number is no 64-bit integer, a text no UTF-8, or a time out of range.
    """
    if not all(type(n) is int and -_BEYOND <= n < _BEYOND for n in numbers):
        raise ValueError("not a 64-bit integer")
    if not all(isinstance(text, str) and text.encode() is not None for text in texts):
        raise ValueError("not a text")
    if not all(FIRST_TIME <= time <= LAST_TIME for time in times):
        raise ValueError("time out of range")


def dead_record(  # noqa: PLR0913 (options, by keyword)
    row: DeadRow,
    source: str,
    partitions: int,
    fallback_partition: int,
    limit: int = FAR_AHEAD,
    *,
    reduced: bool = False,
) -> Record:
    """A refused row as a record of ``<topic>.dead``.

    The value is the payload's bytes, except where the broker has refused the record itself, or
    where there are more than `MOST_PAYLOAD`: then `eventpub_payload_bytes` tells their number. A
    type, metadata or reason of more than `MOST_TEXT` bytes is left out in the same way
    (`eventpub_type_bytes`, `eventpub_metadata_bytes`; a reason is cut): the row is in the store. A
    row without an aggregate goes to `fallback_partition`. `eventpub_conflict` has `row.published`,
    from which an index that was lost knows other rows of this kind again; see `read_conflict`.

    Args:
        row: what was refused.
        source: the application's id, `ce_source`.
        partitions: of the topic.
        fallback_partition: see above.
        limit: of the record's timestamp, µs.
        reduced: key, version and reason alone.
    """
    reason = row.reason.encode(errors="replace")
    headers: list[Header] = [
        ("ce_specversion", "1.0"),
        (SOURCE, source),
        (REASON, reason[: 1024 if reduced else MOST_TEXT].decode(errors="ignore").encode()),
    ]
    key = None if row.aggregate_id is None else row.aggregate_id.encode()
    if row.version is not None:
        headers.append((SEQUENCE, str(row.version)))
    if key is not None and not reduced:
        _add(headers, "ce_subject", "eventpub_subject_bytes", key)
        if row.version is not None:
            _add(headers, "ce_id", "eventpub_id_bytes", key + f"/{row.version}".encode())
    if row.create_time is not None:
        headers.append((TIME, _rfc3339(row.create_time)))
    if row.published is not None:
        headers.append((CONFLICT, f"{row.published[0]} {row.published[1]}"))
    keep = 0 if reduced else MOST_TEXT
    if row.content is not None:
        headers.append((CONTENT, row.content.hex()))
    if row.event_type is not None:
        encoded = row.event_type.encode(errors="replace")
        _add(headers, "ce_type", "eventpub_type_bytes", encoded, keep)
    if row.metadata is not None:
        _add(headers, "eventpub_metadata", "eventpub_metadata_bytes", row.metadata, keep)
    value = row.payload
    if value is not None and (
        reduced or len(value) > MOST_PAYLOAD or row.reason.startswith(REFUSED)
    ):
        headers.append(("eventpub_payload_bytes", str(len(value))))
        value = None
    return Record(
        key=row.aggregate_id,
        value=value,
        partition=(
            fallback_partition
            if row.aggregate_id is None
            else topic_partition(row.aggregate_id, partitions)
        ),
        # a broker may have refused the time, too
        timestamp=timestamp(limit if reduced else row.create_time or 0, limit),
        headers=headers,
    )


def read_conflict(headers: Mapping[str, Any]) -> tuple[int, int] | None:
    """`DeadRow.published` of a dead letter; None where it has none."""
    try:
        last, created = (int(text) for text in headers[CONFLICT].split())
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
