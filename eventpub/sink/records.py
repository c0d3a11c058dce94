"""What an event looks like as a Kafka record, as `encoder` makes it; and how it is read back.

Pure: no client, no clock.

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
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
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
"""A topic and the number of one of its partitions."""
Written: TypeAlias = tuple[int, int]
"""The first offset that one transaction has written to a partition, and the next after its last."""

SEQUENCE = "ce_sequence"
TIME = "ce_time"
LATE = "eventpub_late"
REASON = "eventpub_reason"
CONFLICT = "eventpub_conflict"
SOURCE = "ce_source"
CONTENT = "eventpub_content"
REFUSED = "sink.record_refused"

_NEAR = 1_000_000
"""µs after which a row may have been created while the batch was made."""
FIRST_TIME, LAST_TIME = -62_135_596_800_000_000, 253_402_300_799_999_999
"""The years 1 to 9999, µs."""
FAR_AHEAD = 1 << 62
"""No limit of record timestamps, µs."""

_decode = json.JSONDecoder().decode
encode_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_RESERVED = ("ce_", "eventpub_")
_NO_NUL = "\ufffd"


@dataclass(frozen=True)
class Record:
    """One Kafka record as it is produced; `timestamp` in milliseconds."""

    key: str | bytes | None
    value: bytes | None
    partition: int
    timestamp: int
    headers: list[Header]


def is_ours(headers: Mapping[str, Any], app_ids: Collection[str]) -> bool:
    """Whether a record was written by a publisher of these ids."""
    source = headers.get(SOURCE)
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
    return as_bytes(time_texts(micros))


def time_texts(micros: npt.NDArray[np.int64]) -> Any:
    text: Any = pa.array(micros).cast(pa.timestamp("us")).cast(pa.string())
    text = pc.replace_substring(text, " ", "T")
    return pc.binary_join_element_wise(text, "Z", "")


def as_bytes(strings: Any) -> list[bytes]:
    # The client cuts a header's value at a NUL if it is given as text, not if it is bytes.
    return strings.cast(pa.binary()).to_pylist()  # type: ignore[no-any-return]


def parse_times(texts: Sequence[str]) -> npt.NDArray[np.int64]:
    """The microseconds that `format_times` wrote.

    Raises:
        ValueError: a text is no such time.
    """
    plain = [t.removesuffix("Z") for t in texts]
    return np.array(plain, dtype="datetime64[us]").astype(np.int64)


def time_of(text: str) -> int:
    """µs of what `ce_time` says; 0: it says nothing."""
    try:
        return int(parse_times([text])[0])
    except ValueError:
        return 0


def timestamps(micros: npt.NDArray[np.int64], limit: int = FAR_AHEAD) -> npt.NDArray[np.int64]:
    """Record timestamps, milliseconds; `limit` (µs) for what lies more than a second above it."""
    limited: npt.NDArray[np.int64] = np.where(micros > limit + _NEAR, limit, micros)
    return np.maximum(limited // 1000, 1)


def timestamp(micros: int, limit: int = FAR_AHEAD) -> int:
    """The record's timestamp of one `create_time`, ms."""
    return max(1, (limit if micros > limit + _NEAR else micros) // 1000)


def contents_of(rows: pa.Table) -> list[bytes]:
    """A hash of 8 bytes per row, over event type, payload and metadata."""
    columns = (rows.column(n).to_pylist() for n in ("event_type", "payload", "metadata"))
    return [
        _content((event_type or "").encode(), payload, metadata_headers(text) if text else ())
        for event_type, payload, text in zip(*columns, strict=True)
    ]


def content_of_record(headers: Mapping[str, Any], value: bytes | None) -> bytes:
    """The same hash of an event's record; a dead letter has it in a header."""
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
    return str(value) if type(value) is int else encode_json(value)


@dataclass(frozen=True)
class Columns:
    """Events as columns, ready for a tight loop: the i-th of each makes the i-th record."""

    keys: Sequence[str | bytes | None]
    values: list[bytes | None]
    partitions: npt.NDArray[np.int32]
    timestamps: list[int]
    headers: Iterable[list[Header]]


def columns_of(some: Sequence[Record]) -> Columns:
    """Records as columns."""
    return Columns(
        keys=[r.key for r in some],
        values=[r.value for r in some],
        partitions=np.array([r.partition for r in some], np.int32),
        timestamps=[r.timestamp for r in some],
        headers=[r.headers for r in some],
    )


def partitions_of(events: pa.Table | pa.RecordBatch, partitions: int) -> npt.NDArray[np.int32]:
    """The partition of each event."""
    encoded: Any = events.column("aggregate_id").dictionary_encode()
    if isinstance(encoded, pa.ChunkedArray):
        encoded = encoded.unify_dictionaries().combine_chunks()
    of_each = topic_partitions(encoded.dictionary.to_pylist(), partitions)
    placed: npt.NDArray[np.int32] = of_each[np.asarray(encoded.indices)]
    return placed


@dataclass(frozen=True)
class FixedEvents:
    """What the records of events have in common, as Arrow's columns; see `CloudEvents.fixed`.

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
