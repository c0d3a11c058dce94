"""Reads a publisher's topics as columns, up to the currently committed end.

A partition that cannot be read to its end is an error. Records are parsed here; only the mapping of
metadata to headers is the sink's.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from eventpub import config
from eventpub.sink.client import Clients
from eventpub.sink.faults import topic_missing
from eventpub.sink.reading import Message, Place, iter_chunks
from eventpub.sink.records import metadata_headers
from eventpub.sink.topics import hanging, list_offsets, offsets_at, open_below, partition_counts
from eventpub.times import format_time

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

_NULL = ("null",)  # hash(None) is not the same in all processes
_EMPTY_HASH = hash(frozenset())
_ENVELOPE = 7  # the headers that every event has
_CALL_SECONDS = 8.0
_STALL_SECONDS = 60.0
_SETTLED_WITHIN = 15.0
"""Seconds to wait for open transactions."""
_CHUNK, PORTION = 2_000, 30_000
"""Records parsed together: in larger chunks the headers take too much memory; and yielded."""
_MARGIN_MS = 60_000
"""Margin before the time from which a topic is read, if timestamps are not `create_time`."""
_YEAR_3000 = 32_503_680_000_000
"""Milliseconds; a record's writer may set any timestamp."""


@dataclass
class TopicReader:
    """Reads a publisher's topics once, up to their current ends.

    Args:
        app_id: the application's; every event names it.
        first: µs: lowest `create_time` of events and timestamp of foreign records that count; the
            topic is read from there; None: from its first record.
        last: highest timestamp of foreign records that count, µs; None: no bound.

    Attributes:
        truncated: partitions whose first records are gone, possibly some of the range.
    """

    sink: config.Sink
    app_id: str
    first: int | None = None
    last: int | None = None
    partitions: int = 0
    truncated: set[int] = field(default_factory=set)
    records: int = 0

    def __post_init__(self) -> None:
        sink = self.sink
        self._clients = Clients(sink)
        self._kinds = {
            sink.topic: EVENT,
            sink.dead_topic: DEAD,
            sink.late_topic: DIVERTED,
            sink.gaps_topic: GAP,
        }

    def spans(self) -> dict[Place, tuple[int, int]]:
        """Start and end offset of each partition, once no transaction is open below the end.

        Raises:
            SinkError: sink.hanging_transaction; others of `sink.check_topics`
        """
        sink, clients = self.sink, self._clients
        counts = partition_counts(clients, _CALL_SECONDS)
        self.partitions = counts.get(sink.topic, 0)
        if not self.partitions:
            raise topic_missing(sink, sink.topic)
        places = [(name, n) for name in self._kinds for n in range(counts.get(name, 0))]
        kept = list_offsets(clients, places, "earliest", timeout=_CALL_SECONDS)
        ends = committed_ends(clients, places, _SETTLED_WITHIN)
        starts = kept
        if self.first is not None and (since := self.first // 1000 - _MARGIN_MS) > 0:
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
            portion: list[pa.Table] = []
            for chunk in iter_chunks(
                self._clients, ranges, most=_CHUNK, timeout=_STALL_SECONDS, meanwhile=meanwhile
            ):
                self.records += len(chunk)
                table, others = columns_of(chunk, kind, self.app_id)
                portion.append(table)
                others = [o for o in others if self._is_in_range(o[0].timestamp()[1] * 1000)]
                if others:
                    yield _foreign(others)
                if sum(map(len, portion)) >= PORTION:
                    yield pa.concat_tables(portion)
                    portion.clear()
            if portion:
                yield pa.concat_tables(portion)

    def _is_in_range(self, timestamp: int) -> bool:
        is_before = self.first is not None and timestamp + 999 < self.first
        is_after = self.last is not None and timestamp > self.last
        return timestamp <= 0 or not (is_before or is_after)


def committed_ends(clients: Clients, places: list[Place], patience: float) -> dict[Place, int]:
    """The ends of partitions, once no transaction is open below them.

    Raises sink.hanging_transaction after `patience` seconds.
    """
    ends = list_offsets(clients, places, "latest", timeout=_CALL_SECONDS)
    for place, stable in open_below(clients, ends, patience, timeout=_CALL_SECONDS).items():
        raise hanging(clients.sink, place, stable, ends[place], patience)
    return ends


def columns_of(
    messages: Sequence[Message], kind: int, app_id: str
) -> tuple[pa.Table, list[tuple[Message, str]]]:
    """A topic's records as columns; and those that no publisher of ours has written, with why.

    `payload`, `type` and `metadata` are Python's hashes, equal only in processes with the same
    PYTHONHASHSEED. Every event names `app_id` as its source.
    """
    if kind == GAP:
        return _gaps(messages)
    headers = [message.headers() or () for message in messages]
    named: list[dict[str, bytes | None]] = [dict(each) for each in headers]

    def header(name: str) -> Any:
        return pa.array([each.get(name) for each in named], pa.binary())

    keys: Any = pa.array([message.key() for message in messages], pa.binary())
    sequences, times = header("ce_sequence"), header("ce_time")
    lengths: Any = pc.binary_length(times)
    is_time: Any = pc.and_(pc.equal(lengths, pa.scalar(27)), pc.ends_with(times, "Z"))
    times = pc.if_else(is_time, times, None)
    ids, versions = _parsed(keys, pa.string()), _parsed(sequences, pa.string(), pa.int64())
    created = _parsed(times, pa.string(), pa.timestamp("us", "UTC"), pa.int64())
    whys: Any = pc.case_when(
        pc.make_struct(
            keys.is_null(),
            sequences.is_null(),
            pc.or_(ids.is_null(), versions.is_null()),
            pc.and_(created.is_null(), pa.scalar(kind != DEAD)),
        ),
        "" if kind == DEAD else "it has no key",  # a row without identity has no counterpart
        "" if kind == DEAD else "it has no header ce_sequence",
        "its key is not UTF-8, or its ce_sequence is not a 64-bit number",
        "its ce_time is not RFC 3339 in UTC with microseconds",
    )
    if whys.null_count < len(whys):
        judged = [*zip(messages, whys.to_pylist(), strict=True)]
        table, _ = columns_of([message for message, why in judged if why is None], kind, app_id)
        return table, [(message, why) for message, why in judged if why]
    created = np.asarray(created.fill_null(NO_TIME))
    stamps = np.array([message.timestamp()[1] for message in messages], np.int64)
    is_late = np.array([kind == EVENT and "eventpub_late" in each for each in named], bool)
    types, distinct = header("ce_type").fill_null(b"").dictionary_encode(), keys.dictionary_encode()
    crcs = np.array([zlib.crc32(key) for key in distinct.dictionary.to_pylist()], np.uint32)
    values = {
        "payload": hashes([message.value() for message in messages]),
        "type": hashes(types.dictionary.to_pylist())[np.asarray(types.indices)],
        "metadata": np.array([*map(_hash_of_metadata_in, headers, named)], np.int64),
    }
    if kind == DEAD:
        values["metadata"] = hashes_of_metadata([n.get("eventpub_metadata") for n in named])
        for name, known in values.items():
            is_left_out = [f"eventpub_{name}_bytes" in each for each in named]
            values[name] = np.where(is_left_out, LEFT_OUT, known)
    columns = values | {
        "id": ids,
        "version": versions,
        "create_time": created,
        "kind": np.where(is_late, LATE, kind).astype(np.int8),
        "faults": _differ(header("ce_id"), pc.binary_join_element_wise(keys, sequences, b"/"))
        * BAD_ID
        + _differ(header("ce_subject"), keys) * BAD_SUBJECT
        # an event with a future time gets the time of its publication
        + ((created != NO_TIME) & ((stamps < 1) | (stamps > np.maximum(created // 1000, 1))))
        * BAD_TIMESTAMP
        + (
            _differ(header("ce_specversion"), b"1.0")
            | _differ(header("ce_source"), app_id.encode())
        )
        * BAD_ENVELOPE,
        "crc": crcs[np.asarray(distinct.indices)],
    }
    return pa.table(columns | _places(messages)), []


def _parsed(values: Any, *types: pa.DataType) -> Any:
    """Values, cast to one type after the other; null where one cannot be."""
    try:
        cast = values
        for each in types:
            cast = cast.cast(each)
    except pa.ArrowInvalid:
        half = len(values) // 2
        if not half:
            return pa.array([None], types[-1])
        return pa.concat_arrays([_parsed(values[:half], *types), _parsed(values[half:], *types)])
    return cast


def _differ(values: Any, expected: Any) -> npt.NDArray[np.int8]:
    differ: Any = pc.not_equal(values, expected)
    return np.asarray(differ.fill_null(True).cast(pa.int8()))


def _places(messages: Sequence[Message]) -> dict[str, npt.NDArray[np.int64]]:
    return {
        "partition": np.array([message.partition() for message in messages], np.int64),
        "offset": np.array([message.offset() for message in messages], np.int64),
    }


def _gaps(messages: Sequence[Message]) -> tuple[pa.Table, list[tuple[Message, str]]]:
    ours, found, others = [], [], []
    for message in messages:
        try:
            gap = json.loads(message.value() or b"")
            versions = (int(gap["from_version"]), int(gap["to_version"]))
            np.array(versions, np.int64)
            aggregate_id = str(gap["aggregate_id"])
            aggregate_id.encode()
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
            others.append((message, "it is not a recorded skip"))
        else:
            ours.append(message)
            found.append((aggregate_id, *versions))
    ids, firsts, lasts = zip(*found, strict=True) if found else ((), (), ())
    columns = {
        "id": pa.array(ids, pa.string()),
        "version": pa.array(firsts, pa.int64()),
        "to_version": pa.array(lasts, pa.int64()),
        "create_time": np.full(len(ours), NO_TIME),
        "kind": np.full(len(ours), GAP, np.int8),
    }
    return pa.table(columns | _places(ours)), others


def _foreign(others: Sequence[tuple[Message, str]]) -> pa.Table:
    notes = []
    for message, why in others:
        notes.append(f"{message.topic()}: {why}")
        if 0 < (timestamp := message.timestamp()[1]) < _YEAR_3000:
            notes[-1] += f"; its timestamp is {format_time(timestamp * 1000)}"
    messages = [message for message, _ in others]
    columns = {
        "id": [(message.key() or b"").decode(errors="replace") for message in messages],
        "create_time": np.full(len(others), NO_TIME),
        "kind": np.full(len(others), FOREIGN, np.int8),
        "note": notes,
    }
    return pa.table(columns | _places(messages))


def hashes(values: Sequence[bytes | None]) -> npt.NDArray[np.int64]:
    """The hash of each value; NULL's differs from that of every value."""
    return np.fromiter((1 if v is None else hash(v) for v in values), np.int64, len(values))


def _hash_of_headers(headers: Iterable[tuple[str, str | bytes | None]]) -> int:
    own = (
        (name, _NULL if value is None else value)
        for name, value in headers
        if name != "content-type" and not name.startswith(("ce_", "eventpub_"))
    )
    return hash(frozenset(own))


def _hash_of_metadata_in(
    headers: Sequence[tuple[str, bytes | None]], named: Mapping[str, bytes | None]
) -> int:
    fixed = _ENVELOPE + ("content-type" in named) + ("eventpub_late" in named)
    return _EMPTY_HASH if len(headers) == fixed else _hash_of_headers(headers)


def hashes_of_metadata(values: Sequence[bytes | None]) -> npt.NDArray[np.int64]:
    """As those of the headers that the publisher makes of each row's metadata."""
    found = (_hash_of_headers(metadata_headers(v)) if v else _EMPTY_HASH for v in values)
    return np.fromiter(found, np.int64, len(values))
