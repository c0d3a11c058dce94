"""Taking the records of a publisher's topics apart, into columns that can be compared.

Shares no code with the sink: what is said about the topic must not depend on the code that wrote
it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Message = Any  # its types say None where there is always a value
Place = tuple[str, int]
"""A topic and one of its partitions."""

EVENT, LATE, DEAD, DIVERTED, GAP = range(5)

BAD_ID, BAD_SUBJECT, BAD_TIMESTAMP, BAD_ENVELOPE = 1, 2, 4, 8
FAULTS = {
    BAD_ID: "ce_id",
    BAD_SUBJECT: "ce_subject",
    BAD_TIMESTAMP: "timestamp",
    BAD_ENVELOPE: "ce_specversion or ce_source",
}

NO_TIME = np.iinfo(np.int64).min
LEFT_OUT = 2
"""Instead of the hash of what a dead letter has left out, since it was too large."""


@dataclass
class Records:
    """Records of all topics, as columns; the i-th of each belongs to one record.

    `kind` is one of EVENT, LATE, DEAD, DIVERTED and GAP. Of a gap, `version` and `to_version` are
    its first and last one. `payload`, `type` and `metadata` are Python's hashes: equal in all
    processes that have the same PYTHONHASHSEED.

    Attributes:
        ids: strings.
        reached: the next offset of each partition that these records are from.
    """

    ids: pa.Array[Any]
    columns: dict[str, npt.NDArray[Any]]
    reached: dict[Place, int] = field(default_factory=dict)

    def only(self, wanted: Sequence[bool] | npt.NDArray[np.bool_]) -> Records:
        """Those that are wanted; without `reached`."""
        kept = np.flatnonzero(np.asarray(wanted, np.bool_))
        columns = {name: column[kept] for name, column in self.columns.items()}
        return Records(self.ids.take(pa.array(kept)), columns)  # type: ignore[arg-type]


@dataclass
class Foreign:
    """A record that no publisher of ours can have written.

    Attributes:
        timestamp: Kafka's, ms; 0: it has none.
    """

    topic: str
    partition: int
    offset: int
    key: str
    reason: str
    timestamp: int = 0


class Parser:
    """Takes records apart.

    Args:
        sources: the application's ids, now and before, one of which every event names.
        found_foreign: is called with each record that is not ours.
    """

    def __init__(
        self,
        sources: Collection[str],
        found_foreign: Callable[[Foreign], None],
    ) -> None:
        self._sources = frozenset(source.encode() for source in sources)
        self._found_foreign = found_foreign

    def parse(
        self,
        messages: Sequence[Message],
        kind: int,
        partitions: npt.NDArray[np.int32],
        offsets: npt.NDArray[np.int64],
    ) -> Records:
        """Messages of one topic as columns.

        Args:
            kind: EVENT, or that of the side topic.
            partitions, offsets: of each message.
        """
        records = None
        if kind == EVENT and messages:
            records = self._standard(messages, partitions, offsets)
        return self._one_by_one(messages, kind) if records is None else records

    def _one_by_one(self, messages: Sequence[Message], kind: int) -> Records:
        """Any records whatever."""
        rows = _Rows()
        for message in messages:
            partition, offset = message.partition(), message.offset()
            problem = (
                rows.add_gap(message)
                if kind == GAP
                else rows.add(message, kind, partition, offset, self._sources)
            )
            if problem:
                key = (message.key() or b"").decode(errors="replace")
                timestamp = max(0, message.timestamp()[1])
                self._found_foreign(
                    Foreign(message.topic(), partition, offset, key, problem, timestamp)
                )
        return rows.records()

    def _standard(
        self,
        messages: Sequence[Message],
        partitions: npt.NDArray[np.int32],
        offsets: npt.NDArray[np.int64],
    ) -> Records | None:
        """As `_one_by_one`, but all at once: records with the usual headers in the usual order.

        None where any of them has a header missing, or what cannot be read.
        """
        headers = [message.headers() or () for message in messages]
        shortest, longest = min(map(len, headers)), max(map(len, headers))
        if shortest < len(_USUAL):
            return self._divided(messages, headers)
        metadata = np.full(len(messages), _EMPTY_HASH, np.int64)
        if longest > len(_USUAL):
            for at, row in enumerate(headers):
                if len(row) > len(_USUAL):
                    more = row[len(_USUAL) :]
                    if any(name.startswith(_RESERVED) for name, _ in more):
                        return self._divided(messages, headers)
                    metadata[at] = _hash_of_pairs(more)
            headers = [row[: len(_USUAL)] for row in headers]
        values: list[tuple[bytes | None, ...]] = []
        for usual, column in zip(_USUAL, zip(*headers, strict=True), strict=True):
            names, of_each = zip(*column, strict=True)
            if names.count(usual) != len(names):
                return None
            values.append(of_each)
        specversions, ids, sources, types, times, subjects, sequences, _ = values
        keys = tuple(message.key() for message in messages)
        try:
            versions = np.array(list(map(int, sequences)), np.int64)  # type: ignore[arg-type]
            text = pa.array(keys, pa.binary()).cast(pa.string())
            created = _micros(times)
        except (ValueError, TypeError, OverflowError, pa.ArrowInvalid):
            return None
        if text.null_count:
            return None
        faults = np.zeros(len(messages), np.int8)
        wanted = [k + b"/" + s for k, s in zip(keys, sequences, strict=True)]
        faults |= BAD_ID * _differ(ids, wanted)
        faults |= BAD_SUBJECT * _differ(subjects, keys)
        if specversions.count(b"1.0") != len(keys) or not self._sources.issuperset(sources):
            for at, (version, source) in enumerate(zip(specversions, sources, strict=True)):
                if version != b"1.0" or source not in self._sources:
                    faults[at] |= BAD_ENVELOPE
        stamped = np.fromiter((m.timestamp()[1] for m in messages), np.int64, len(messages))
        nothing = np.zeros(len(messages), np.int64)
        columns: dict[str, npt.NDArray[Any]] = {
            "version": versions,
            "to_version": nothing,
            "kind": nothing,
            "partition": partitions,
            "offset": offsets,
            "faults": faults | _bad_timestamps(created, stamped),
            "payload": hashes([message.value() for message in messages]),
            "type": hashes(types),
            "metadata": metadata,
            "create_time": created,
        }
        return Records(text, columns)

    def _divided(self, messages: Sequence[Message], headers: Sequence[Any]) -> Records | None:
        """The unusual ones apart from the others; None where there are no others."""
        is_usual = np.array(
            [
                len(row) >= len(_USUAL)
                and not any(name.startswith(_RESERVED) for name, _ in row[len(_USUAL) :])
                for row in headers
            ]
        )
        if not is_usual.any():
            return None
        usual = [messages[at] for at in np.flatnonzero(is_usual).tolist()]
        others = [messages[at] for at in np.flatnonzero(~is_usual).tolist()]
        found = self._standard(
            usual,
            np.array([m.partition() for m in usual], np.int32),
            np.array([m.offset() for m in usual], np.int64),
        )
        if found is None:
            return None
        rest = self._one_by_one(others, EVENT)
        columns = {n: np.concatenate([c, rest.columns[n]]) for n, c in found.columns.items()}
        order = np.lexsort((columns["offset"], columns["partition"]))
        ids: Any = pa.concat_arrays([found.ids, rest.ids])
        return Records(ids.take(pa.array(order)), {n: c[order] for n, c in columns.items()})


_USUAL = (
    "ce_specversion", "ce_id", "ce_source", "ce_type", "ce_time", "ce_subject", "ce_sequence",
    "content-type",
)  # fmt: skip
_RESERVED = ("ce_", "eventpub_", "content-type")
_NOTHING = object()
_NULL = ("null",)  # hash(None) is not the same in all processes
_EMPTY_HASH = hash(frozenset())
_ENVELOPE = 7  # the headers that every event has


def hashes(values: Sequence[bytes | None]) -> npt.NDArray[np.int64]:
    """Of each value; of a NULL another than of any value."""
    if None in values:
        return np.fromiter((1 if v is None else hash(v) for v in values), np.int64, len(values))
    return np.fromiter(map(hash, values), np.int64, len(values))


def _micros(times: Sequence[bytes | None]) -> npt.NDArray[np.int64]:
    """Of RFC 3339 in UTC with microseconds; raises ArrowInvalid or ValueError for all else."""
    texts: Any = pa.array(times, pa.binary()).cast(pa.string())
    lengths = pc.binary_length(texts).to_numpy(zero_copy_only=False)
    if texts.null_count or (lengths != 27).any():
        raise ValueError
    if not pc.all(pc.ends_with(texts, "Z")).as_py():
        raise ValueError
    plain = pc.utf8_slice_codeunits(texts, 0, 26).cast(pa.timestamp("us")).cast(pa.int64())
    return np.asarray(plain.to_numpy(zero_copy_only=False), np.int64)


def _differ(found: Sequence[Any], wanted: Sequence[Any]) -> npt.NDArray[np.int8]:
    if tuple(found) == tuple(wanted):
        return np.zeros(len(found), np.int8)
    return np.array([f != w for f, w in zip(found, wanted, strict=True)], np.int8)


def _bad_timestamps(
    created: npt.NDArray[np.int64], stamped: npt.NDArray[np.int64]
) -> npt.NDArray[np.int8]:
    # what lay in the future has the time of its publication
    latest = np.maximum(created // 1000, 1)
    right = (created == NO_TIME) | (stamped == latest) | ((stamped > 0) & (stamped < latest))
    return np.where(right, 0, BAD_TIMESTAMP).astype(np.int8)


class _Rows:
    """Rows as they come; `records` turns them into columns."""

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._numbers: list[tuple[int, ...]] = []
        self._times: list[int] = []

    def add(
        self,
        message: Message,
        kind: int,
        partition: int,
        offset: int,
        sources: frozenset[bytes],
    ) -> str | None:
        """Take an event, or a row on a side topic; says why where it is no such record."""
        headers = message.headers() or []
        by_name: dict[str, bytes | None] = dict(headers)
        key = message.key()
        sequence = by_name.get("ce_sequence")
        created = by_name.get("ce_time")
        if key is None or sequence is None:
            if kind == DEAD:  # a row without identity: there is nothing to compare it with
                return None
            return "it has no key" if key is None else "it has no header ce_sequence"
        try:
            version = int(sequence)
            aggregate_id = key.decode()
        except ValueError:
            return "its key is not UTF-8 or its ce_sequence is not a number"
        if not -(1 << 63) <= version < 1 << 63:
            return "its ce_sequence is out of range"
        micros = NO_TIME
        try:
            if created is None or len(created) != 27 or not created.endswith(b"Z"):
                raise ValueError
            micros = int(np.datetime64(created[:-1].decode(), "us").astype(np.int64))
        except ValueError:
            if kind != DEAD:
                return "its ce_time is not RFC 3339 in UTC with microseconds"
        faults = 0
        if by_name.get("ce_id") != key + b"/" + sequence:
            faults |= BAD_ID
        if by_name.get("ce_subject") != key:
            faults |= BAD_SUBJECT
        if by_name.get("ce_source") not in sources or by_name.get("ce_specversion") != b"1.0":
            faults |= BAD_ENVELOPE
        if "eventpub_late" in by_name and kind == EVENT:
            kind = LATE
        plain = _ENVELOPE + ("content-type" in by_name) + (kind == LATE)
        metadata = _EMPTY_HASH if len(headers) == plain else _hash_of_metadata(headers)
        value = message.value()
        payload, type_ = 1 if value is None else hash(value), hash(by_name.get("ce_type") or b"")
        if kind == DEAD:
            metadata = hash_of_metadata(by_name.get("eventpub_metadata"))
            payload, type_, metadata = (
                LEFT_OUT if f"eventpub_{name}_bytes" in by_name else known
                for name, known in (("payload", payload), ("type", type_), ("metadata", metadata))
            )
        self._ids.append(aggregate_id)
        self._times.append(micros)
        self._numbers.append(
            (
                version, 0, kind, partition, offset, faults, message.timestamp()[1],
                payload, type_, metadata,
            )
        )  # fmt: skip
        return None

    def add_gap(self, message: Message) -> str | None:
        """Take a recorded skip; says why where it is none."""
        try:
            gap = json.loads(message.value() or b"")
            row = (int(gap["from_version"]), int(gap["to_version"]), GAP)
            np.array(row, np.int64)
            aggregate_id = str(gap["aggregate_id"])
            aggregate_id.encode()
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
            return "it is not a recorded skip"
        self._ids.append(aggregate_id)
        self._times.append(NO_TIME)
        self._numbers.append((*row, message.partition(), message.offset(), 0, 0, 0, 0, 0))
        return None

    def records(self) -> Records:
        """All rows that were taken."""
        table = np.array(self._numbers, np.int64).reshape(-1, 10).T
        names = (
            "version", "to_version", "kind", "partition", "offset", "faults", "timestamp",
            "payload", "type", "metadata",
        )  # fmt: skip
        columns: dict[str, npt.NDArray[Any]] = dict(zip(names, table, strict=True))
        times = np.array(self._times, np.int64)
        columns["create_time"] = times
        columns["faults"] = columns["faults"] | _bad_timestamps(times, columns.pop("timestamp"))
        return Records(pa.array(self._ids, pa.string()), columns)


def _hash_of_metadata(headers: Sequence[tuple[str, bytes | None]]) -> int:
    """Of the headers that come from a row's metadata; names of ours are all others."""
    return _hash_of_pairs([(n, v) for n, v in headers if not _is_reserved(n)])


def _is_reserved(name: str) -> bool:
    return name == "content-type" or name.startswith(("ce_", "eventpub_"))


def _hash_of_pairs(pairs: Collection[tuple[str, bytes | None]]) -> int:
    return hash(frozenset((name, _NULL if value is None else value) for name, value in pairs))


def hash_of_metadata(octets: bytes | None) -> int:
    """Of a row's metadata, by the documented rules of how they become headers."""
    if not octets:
        return _EMPTY_HASH
    try:
        data = json.loads(octets.decode())
    except (ValueError, RecursionError):
        data = _NOTHING
    if data is None:
        return _EMPTY_HASH
    if not isinstance(data, Mapping):
        return _hash_of_pairs([("metadata", octets)])
    pairs: list[tuple[str, bytes | None]] = []
    for name, value in data.items():
        if name == "content-type":
            continue
        renamed = f"metadata_{name}" if name.startswith(("ce_", "eventpub_")) else name
        sent = renamed.replace("\x00", "\N{REPLACEMENT CHARACTER}").encode(errors="replace")
        pairs.append((sent.decode(), _header_bytes(value)))
    return _hash_of_pairs(pairs)


def _header_bytes(value: Any) -> bytes | None:
    if value is None:
        return None
    if not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return str(value).encode(errors="replace")
