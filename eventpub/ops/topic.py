"""Reads a publisher's topics as columns, up to the currently committed end.

A partition that cannot be read to its end is an error. Records are parsed here; only the mapping of
metadata to headers is the sink's.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from eventpub import config
from eventpub.sink.client import Clients
from eventpub.sink.faults import topic_missing
from eventpub.sink.reading import Place, Reading
from eventpub.sink.records import metadata_headers
from eventpub.sink.topics import hanging, list_offsets, offsets_at, open_below, partition_counts
from eventpub.times import format_time

Message = Any  # its types say None where there is always a value

EVENT, LATE, DEAD, DIVERTED, GAP, FOREIGN = range(6)
"""Kinds of records; a foreign one was not written by a publisher of ours."""

NO_TIME = -(1 << 63)
"""µs in place of an unreadable time."""

BAD_ID, BAD_SUBJECT, BAD_TIMESTAMP, BAD_ENVELOPE = 1, 2, 4, 8
FAULTS = {
    BAD_ID: "ce_id",
    BAD_SUBJECT: "ce_subject",
    BAD_TIMESTAMP: "timestamp",
    BAD_ENVELOPE: "ce_specversion or ce_source",
}

LEFT_OUT = 2
"""In place of a hash: a dead letter left the value out because it was too large."""

_NUMBERS = (
    "version", "to_version", "kind", "partition", "offset", "faults", "crc", "create_time",
    "payload", "type", "metadata",
)  # fmt: skip
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_NULL = ("null",)  # hash(None) is not the same in all processes
_EMPTY_HASH = hash(frozenset())
_ENVELOPE = 7  # the headers that every event has
_CALL_SECONDS = 8.0
_STALL_SECONDS = 60.0
_CHUNK, _PORTION = 2_000, 20_000
"""Records parsed together: in larger chunks the headers take too much memory; and yielded."""
_MARGIN_MS = 60_000
"""Margin before the time from which a topic is read, if timestamps are not `create_time`."""
_YEAR_3000 = 32_503_680_000_000
"""Milliseconds; a record's writer may set any timestamp."""


class TopicReader:
    """Reads a publisher's topics once, up to their current ends.

    Args:
        app_id: the application's; every event names it.
        patience: seconds to wait for open transactions.
        first: µs: lowest `create_time` of events and timestamp of foreign records that count; the
            topic is read from there; None: from its first record.
        last: highest timestamp of foreign records that count, µs; None: no bound.

    Attributes:
        truncated: partitions whose first records are gone, possibly some of the range.
    """

    def __init__(
        self,
        sink: config.Sink,
        app_id: str,
        patience: float = 15.0,
        *,
        first: int | None = None,
        last: int | None = None,
    ) -> None:
        self._clients, self._sink = Clients(sink), sink
        self._patience = patience
        self._first, self._last = first, last
        self._app_id = app_id
        self._kinds = {
            sink.topic: EVENT,
            sink.dead_topic: DEAD,
            sink.late_topic: DIVERTED,
            sink.gaps_topic: GAP,
        }
        self.partitions = 0
        self.truncated: set[int] = set()
        self.records = 0

    def spans(self) -> dict[Place, tuple[int, int]]:
        """Start and end offset of each partition, once no transaction is open below the end.

        Raises:
            SinkError: sink.hanging_transaction; others of `sink.check_topics`
        """
        sink, clients = self._sink, self._clients
        counts = partition_counts(clients, _CALL_SECONDS)
        self.partitions = counts.get(sink.topic, 0)
        if not self.partitions:
            raise topic_missing(sink, sink.topic)
        places = [(name, n) for name in self._kinds for n in range(counts.get(name, 0))]
        kept = list_offsets(clients, places, "earliest", timeout=_CALL_SECONDS)
        ends = committed_ends(clients, places, self._patience)
        starts = kept
        if self._first is not None and (since := self._first // 1000 - _MARGIN_MS) > 0:
            # A record's timestamp is the `create_time` of its event. Side topics are read whole:
            # their records have the time at which they were written.
            events = [place for place in places if place[0] == sink.topic]
            starts = kept | offsets_at(clients, events, since)
        self.truncated |= {
            number
            for (name, number), at in starts.items()
            if name == sink.topic and 0 < at == kept[name, number]
        }
        return {place: (min(starts[place], end), end) for place, end in ends.items()}

    def read(
        self,
        spans: Mapping[Place, tuple[int, int]],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Iterator[pa.Table]:
        """Records between two offsets of some partitions, in chunks.

        `meanwhile` is called repeatedly; an exception from it ends the reading. Raises
        sink.unreachable also after a minute without records.
        """
        for name, kind in self._kinds.items():
            ranges = {place: span for place, span in spans.items() if place[0] == name}
            reading = Reading(
                self._clients, ranges, chunk=_CHUNK, patience=_STALL_SECONDS, meanwhile=meanwhile
            )
            rows = Rows(self._app_id)
            for chunk in reading:
                self.records += len(chunk)
                for message in chunk:
                    problem = rows.add(message, kind)
                    if problem is not None and self._is_in_range(message.timestamp()[1] * 1000):
                        rows.add_foreign(message, problem)
                if len(rows) >= _PORTION:
                    yield rows.table()
                    rows = Rows(self._app_id)
            yield rows.table()

    def _is_in_range(self, timestamp: int) -> bool:
        is_before = self._first is not None and timestamp + 999 < self._first
        is_after = self._last is not None and timestamp > self._last
        return timestamp <= 0 or not (is_before or is_after)


def committed_ends(clients: Clients, places: list[Place], patience: float) -> dict[Place, int]:
    """The ends of partitions, once no transaction is open below them.

    Raises sink.hanging_transaction after `patience` seconds.
    """
    ends = list_offsets(clients, places, "latest", timeout=_CALL_SECONDS)
    for place, stable in open_below(clients, ends, patience, timeout=_CALL_SECONDS).items():
        raise hanging(clients.sink, place, stable, ends[place], patience)
    return ends


class Rows:
    """Collects records as columns.

    `payload`, `type` and `metadata` are Python's hashes, equal only in processes with the same
    PYTHONHASHSEED. Every event names `app_id` as its source.
    """

    def __init__(self, app_id: str) -> None:
        self._source = app_id.encode()
        self._ids: list[str] = []
        self._numbers: list[tuple[int, ...]] = []
        self._notes: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, message: Message, kind: int) -> str | None:
        """Add a record; returns why no publisher of ours can have written it, or None."""
        return self._add_gap(message) if kind == GAP else self._add_event(message, kind)

    def _add_event(self, message: Message, kind: int) -> str | None:
        headers = message.headers() or []
        by_name: dict[str, bytes | None] = dict(headers)
        key = message.key()
        sequence = by_name.get("ce_sequence")
        if key is None or sequence is None:
            if kind == DEAD:  # a row without identity has no counterpart
                return None
            return "it has no key" if key is None else "it has no header ce_sequence"
        try:
            version = int(sequence)
            aggregate_id = key.decode()
        except ValueError:
            return "its key is not UTF-8 or its ce_sequence is not a number"
        if not -(1 << 63) <= version < 1 << 63:
            return "its ce_sequence is out of range"
        created = _micros(by_name.get("ce_time"))
        if created == NO_TIME and kind != DEAD:
            return "its ce_time is not RFC 3339 in UTC with microseconds"
        faults = 0
        if by_name.get("ce_id") != key + b"/" + sequence:
            faults |= BAD_ID
        if by_name.get("ce_subject") != key:
            faults |= BAD_SUBJECT
        if by_name.get("ce_specversion") != b"1.0" or by_name.get("ce_source") != self._source:
            faults |= BAD_ENVELOPE
        if created != NO_TIME and not _is_stamped(message.timestamp()[1], created):
            faults |= BAD_TIMESTAMP
        if "eventpub_late" in by_name and kind == EVENT:
            kind = LATE
        plain = _ENVELOPE + ("content-type" in by_name) + (kind == LATE)
        metadata = _EMPTY_HASH if len(headers) == plain else _hash_of_headers(headers)
        value = message.value()
        payload, type_ = 1 if value is None else hash(value), hash(by_name.get("ce_type") or b"")
        if kind == DEAD:
            metadata = hash_of_metadata(by_name.get("eventpub_metadata"))
            payload, type_, metadata = (
                LEFT_OUT if f"eventpub_{name}_bytes" in by_name else known
                for name, known in (("payload", payload), ("type", type_), ("metadata", metadata))
            )
        self._ids.append(aggregate_id)
        self._numbers.append(
            (
                version, 0, kind, message.partition(), message.offset(), faults, zlib.crc32(key),
                created, payload, type_, metadata,
            )
        )  # fmt: skip
        return None

    def _add_gap(self, message: Message) -> str | None:
        try:
            gap = json.loads(message.value() or b"")
            versions = (int(gap["from_version"]), int(gap["to_version"]))
            np.array(versions, np.int64)
            aggregate_id = str(gap["aggregate_id"])
            aggregate_id.encode()
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
            return "it is not a recorded skip"
        self._ids.append(aggregate_id)
        place = (message.partition(), message.offset())
        self._numbers.append((*versions, GAP, *place, 0, 0, NO_TIME, 0, 0, 0))
        return None

    def add_foreign(self, message: Message, reason: str) -> None:
        note, timestamp = f"{message.topic()}: {reason}", message.timestamp()[1]
        if 0 < timestamp < _YEAR_3000:
            note += f"; its timestamp is {format_time(timestamp * 1000)}"
        self._notes[len(self._ids)] = note
        self._ids.append((message.key() or b"").decode(errors="replace"))
        place = (message.partition(), message.offset())
        self._numbers.append((0, 0, FOREIGN, *place, 0, 0, NO_TIME, 0, 0, 0))

    def table(self) -> pa.Table:
        columns = np.array(self._numbers, np.int64).reshape(-1, len(_NUMBERS)).T
        ids = pa.array(self._ids, pa.string())
        notes = pa.array([*map(self._notes.get, range(len(self._ids)))], pa.string())
        return pa.table({"id": ids, "note": notes} | dict(zip(_NUMBERS, columns, strict=True)))


def _micros(time: bytes | None) -> int:
    """µs of an RFC 3339 time in UTC with six decimals; else NO_TIME."""
    if time is None or len(time) != 27 or not time.endswith(b"Z"):
        return NO_TIME
    try:
        return (datetime.fromisoformat(time.decode()) - _EPOCH) // _MICROSECOND
    except ValueError:
        return NO_TIME


def _is_stamped(timestamp: int, created: int) -> bool:
    latest = max(created // 1000, 1)
    # an event with a future time gets the time of its publication
    return timestamp == latest or 0 < timestamp < latest


def hashes(values: Sequence[bytes | None]) -> npt.NDArray[np.int64]:
    """The hash of each value; NULL's differs from that of every value."""
    return np.fromiter((1 if v is None else hash(v) for v in values), np.int64, len(values))


def _is_reserved(name: str) -> bool:
    return name == "content-type" or name.startswith(("ce_", "eventpub_"))


def _hash_of_headers(headers: Iterable[tuple[str, str | bytes | None]]) -> int:
    own = ((name, value) for name, value in headers if not _is_reserved(name))
    return hash(frozenset((name, _NULL if value is None else value) for name, value in own))


def hash_of_metadata(octets: bytes | None) -> int:
    return _hash_of_headers(metadata_headers(octets)) if octets else _EMPTY_HASH
