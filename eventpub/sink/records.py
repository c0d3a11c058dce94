"""Events as Kafka records, and how they are read back. No client, no clock.

CloudEvents 1.0 in Kafka's binary mode: the key is the aggregate's id, the value the payload, and
headers are `ce_*`. `(aggregate_id, version)` can be read back from every record (key and
`ce_sequence`), payload bytes are never touched, and no metadata crashes a batch or replaces one of
our headers.

Metadata (a flat JSON object): each key is a header; text as it is, numbers, booleans and nested
values as JSON, null as a null header. Keys that begin with ``ce_`` or ``eventpub_`` are renamed
``metadata_<key>``. NUL in a key becomes U+FFFD: the client would cut the name there. Metadata that
is no JSON object becomes one header `metadata`.

`content-type`: none with a NULL payload; else that of the metadata, else ``application/json`` if
the payload begins with ``{`` or ``[``, else ``application/octet-stream``.

Timestamp: `create_time` in ms, at least 1 (Kafka takes none before 1970), at most the time of
publication (brokers refuse more than an hour ahead). `ce_time` keeps the microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from eventpub.admission.model import topic_partitions

Header: TypeAlias = tuple[str, str | bytes | None]
PartitionId: TypeAlias = tuple[str, int]
"""Topic and partition number."""
Written: TypeAlias = tuple[int, int]
"""First offset that a transaction has written in a partition, and the next after its last one."""

SEQUENCE = "ce_sequence"
TIME = "ce_time"
LATE = "eventpub_late"
REASON = "eventpub_reason"
CONFLICT = "eventpub_conflict"
SOURCE = "ce_source"
CONTENT = "eventpub_content"
REFUSED = "sink.record_refused"

_NEAR = 1_000_000
"""Tolerance, µs, for rows created while the batch was made."""
FIRST_TIME, LAST_TIME = -62_135_596_800_000_000, 253_402_300_799_999_999
"""Years 1 to 9999, µs."""
FAR_AHEAD = 1 << 62
"""No limit of timestamps, µs."""

_decode = json.JSONDecoder().decode
encode_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_RESERVED = ("ce_", "eventpub_")
NO_NUL = "\ufffd"


@dataclass(frozen=True)
class Record:
    """A Kafka record to produce; `timestamp` in ms."""

    key: str | bytes | None
    value: bytes | None
    partition: int
    timestamp: int
    headers: list[Header]


def is_ours(headers: Mapping[str, Any], app_id: str) -> bool:
    """Whether the record's `ce_source` is this id."""
    source = headers.get(SOURCE)
    return (source.decode(errors="replace") if isinstance(source, bytes) else source) == app_id


@dataclass(frozen=True)
class DeadRow:
    """A row that cannot be published; `reason` begins with an error code.

    `aggregate_id`, `version` and `create_time` (µs) are None if unusable. `published`, of a version
    published as another event: the last version published before the first such row, and a time
    (µs) by which those were created. `content`: see `contents_of`.
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


def time_texts(micros: npt.NDArray[np.int64]) -> Any:
    """RFC 3339 in UTC with microseconds, as in `ce_time`."""
    text: Any = pa.array(micros).cast(pa.timestamp("us")).cast(pa.string())
    text = pc.replace_substring(text, " ", "T")
    return pc.binary_join_element_wise(text, "Z", "")


def as_bytes(strings: Any) -> list[bytes]:
    # As text, the client would cut a value at a NUL.
    return strings.cast(pa.binary()).to_pylist()  # type: ignore[no-any-return]


def parse_times(texts: Sequence[str]) -> npt.NDArray[np.int64]:
    """Parse the output of `time_texts`; µs. ValueError if a text is no such time."""
    plain = [t.removesuffix("Z") for t in texts]
    return np.array(plain, dtype="datetime64[us]").astype(np.int64)


def time_of(text: str) -> int:
    """`ce_time` in µs; 0 if it is invalid."""
    try:
        return int(parse_times([text])[0])
    except ValueError:
        return 0


def timestamps(micros: npt.NDArray[np.int64], limit: int = FAR_AHEAD) -> npt.NDArray[np.int64]:
    """Record timestamps, ms; those more than 1 s above `limit` (µs) become `limit`."""
    limited: npt.NDArray[np.int64] = np.where(micros > limit + _NEAR, limit, micros)
    return np.maximum(limited // 1000, 1)


def timestamp(micros: int, limit: int = FAR_AHEAD) -> int:
    return max(1, (limit if micros > limit + _NEAR else micros) // 1000)


def contents_of(rows: pa.Table) -> list[bytes]:
    """Per row, an 8-byte hash of event type, payload and metadata."""
    columns = (rows.column(n).to_pylist() for n in ("event_type", "payload", "metadata"))
    return [
        _content((event_type or "").encode(), payload, metadata_headers(text) if text else ())
        for event_type, payload, text in zip(*columns, strict=True)
    ]


def content_of_record(headers: Mapping[str, Any], value: bytes | None) -> bytes:
    """The same hash from an event's record, or from a dead letter's header."""
    if CONTENT in headers:
        return bytes.fromhex(headers[CONTENT].decode())
    own = ((n, v) for n, v in headers.items() if not n.startswith(_RESERVED))
    return _content(headers.get("ce_type") or b"", value, own)


def _content(event_type: bytes, payload: bytes | None, headers: Iterable[Header]) -> bytes:
    digest = blake2b(event_type, digest_size=8)
    # content-type follows from the payload, or is metadata that a NULL payload loses
    named = sorted({n: v for n, v in headers if n != "content-type"}.items())
    for text in [payload, *(part for header in named for part in header)]:
        octets = text.encode() if isinstance(text, str) else text
        digest.update(b"\0" if octets is None else b"\1%d:" % len(octets))
        digest.update(octets or b"")
    return digest.digest()


def metadata_headers(octets: bytes) -> list[Header]:
    """Headers of one row's metadata, by the module's rules."""
    try:
        data = _decode(octets.decode())
        if not isinstance(data, dict):
            return [] if data is None else [("metadata", octets)]
        headers: list[Header] = [
            (
                f"metadata_{key}" if key.startswith(_RESERVED) else key,
                # An escape can be half of a surrogate pair: valid JSON, invalid UTF-8.
                None if value is None else _text(value).encode(errors="replace"),
            )
            for key, value in data.items()
        ]
    except (ValueError, RecursionError):
        return [("metadata", octets)]
    if b"\\u" in octets:
        headers = [
            (name.encode(errors="replace").decode().replace("\0", NO_NUL), value)
            for name, value in headers
        ]
    return headers


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return str(value) if type(value) is int else encode_json(value)


@dataclass(frozen=True)
class Columns:
    """Events as columns for a tight loop: the i-th of each make the i-th record."""

    keys: Sequence[str | bytes | None]
    values: list[bytes | None]
    partitions: npt.NDArray[np.int32]
    timestamps: list[int]
    headers: Iterable[list[Header]]


def columns_of(some: Sequence[Record]) -> Columns:
    return Columns(
        keys=[r.key for r in some],
        values=[r.value for r in some],
        partitions=np.array([r.partition for r in some], np.int32),
        timestamps=[r.timestamp for r in some],
        headers=[r.headers for r in some],
    )


def partitions_of(events: pa.Table | pa.RecordBatch, partitions: int) -> npt.NDArray[np.int32]:
    encoded: Any = events.column("aggregate_id").dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.unify_dictionaries().combine_chunks()
    of_each = topic_partitions(encoded.dictionary.to_pylist(), partitions)
    placed: npt.NDArray[np.int32] = of_each[np.asarray(encoded.indices)]
    return placed


@dataclass(frozen=True)
class FixedEvents:
    """What records have in common, as Arrow columns; see `CloudEvents.fixed`.

    A header's value is bytes for all, or an array with one for each. Where the last header, an
    array, is null, the record lacks it.
    """

    keys: Any
    values: Any
    partitions: npt.NDArray[np.int32]
    timestamps: npt.NDArray[np.int64]
    headers: list[tuple[str, Any]]
