"""Encoding of the values of aggregates, time buckets and holds."""

from __future__ import annotations

import heapq
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from eventpub.admission.model import Hold
from eventpub.index.database import NUMBER, Batch, Database

LAST_SEEN = struct.Struct("<qq")
"""An aggregate's last version, and its packed `Seen`."""


def put_json(batch: Batch, letter: bytes, values: Mapping[str, Any]) -> None:
    """Put lists of aggregates into a batch; delete empty ones."""
    for aggregate_id, value in values.items():
        key = letter + aggregate_id.encode()
        batch[key] = json.dumps(value).encode() if value else None


def put_contents(batch: Batch, contents: Mapping[tuple[str, int], Iterable[bytes]]) -> None:
    for event, found in contents.items():
        batch[b"d" + of_version(event).encode()] = b"".join(sorted(found))


def of_version(event: tuple[str, int]) -> str:
    """A version in a key; see `index`."""
    aggregate_id, version = event
    return f"{version & (1 << 64) - 1:016x}{aggregate_id}"


_ROWS = struct.Struct("<q")


class BucketCounts:
    """Accounted rows by bucket number."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._pruned_below = 0

    def since(self, first: int) -> dict[int, int]:
        found = self._db.items(b"c", NUMBER.pack(max(first, 0)))
        return {NUMBER.unpack(key[1:])[0]: _ROWS.unpack(value)[0] for key, value in found}

    def of(self, bucket: int) -> int:
        found = self._db.get(b"c" + NUMBER.pack(bucket))
        return 0 if found is None else int(_ROWS.unpack(found)[0])

    def put(self, batch: Batch, bucket: int, rows: int) -> None:
        batch[b"c" + NUMBER.pack(bucket)] = _ROWS.pack(rows)

    def delete_since(self, batch: Batch, first: int) -> None:
        batch |= dict.fromkeys(b"c" + NUMBER.pack(bucket) for bucket in self.since(first))

    def prune(self, batch: Batch, forget_below: int) -> None:
        since = self._pruned_below  # do not iterate over earlier deletions again
        if forget_below <= since:
            return
        for key, _ in self._db.items(b"c", NUMBER.pack(since)):
            if NUMBER.unpack(key[1:])[0] >= forget_below:
                break
            batch[key] = None
        self._pruned_below = forget_below


_PACKED = struct.Struct("<qqqiqq?q")
"""A hold without its aggregate, in field order."""
_times_of = struct.Struct("<28xqq").unpack_from
"""`next_attempt` and `since` of a packed hold."""


def packed_hold(hold: Hold) -> bytes:
    _, *values = vars(hold).values()
    return _PACKED.pack(*values)


def unpacked_hold(aggregate_id: str, value: bytes) -> Hold:
    return Hold(aggregate_id, *_PACKED.unpack(value.ljust(_PACKED.size, b"\0")))


class Holds(Mapping[str, Hold]):
    """The open holds of a shard.

    There may be hundreds of thousands (an archived store, a wrong first version), and each window
    asks for the next one due. So they stay packed, and two heaps give the next due and the oldest
    event.
    """

    def __init__(self) -> None:
        self._packed: dict[str, bytes] = {}
        self._due = _Heap(self._packed, 0)
        self._since = _Heap(self._packed, 1)

    def __getitem__(self, aggregate_id: str) -> Hold:
        return unpacked_hold(aggregate_id, self._packed[aggregate_id])

    def __contains__(self, aggregate_id: object) -> bool:
        return aggregate_id in self._packed

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)

    def load(self, aggregate_id: str, value: bytes) -> None:
        """Add one as stored."""
        self._packed[aggregate_id] = value
        for heap in (self._due, self._since):
            heap.add(aggregate_id, value)

    def store(self, batch: Batch, changed: Mapping[str, Hold | None]) -> None:
        """Open, change or close (None) holds, here and in a batch."""
        for aggregate_id, hold in changed.items():
            key = b"h" + aggregate_id.encode()
            if hold is None:
                batch[key] = None
                self._packed.pop(aggregate_id, None)
            else:
                batch[key] = value = packed_hold(hold)
                self.load(aggregate_id, value)

    def due(self, now: int, most: int | None = None) -> list[str]:
        """Aggregates whose next attempt is due, longest overdue first."""
        taken: dict[tuple[int, str], None] = {}
        while (first := self._due.first()) and first[0] <= now and len(taken) != most:
            taken[first] = None
            self._due.drop()
        for _, aggregate_id in taken:
            self._due.add(aggregate_id, self._packed[aggregate_id])
        return [aggregate_id for _, aggregate_id in taken]

    def next_due(self) -> int | None:
        """When the next one is due, µs; None: nothing is held."""
        first = self._due.first()
        return first and first[0]

    def due_after(self, latest: int) -> list[Hold]:
        return [self[a] for a, value in self._packed.items() if _times_of(value)[0] > latest]

    def oldest(self) -> int | None:
        """Smallest `create_time` of the held events, µs; None: nothing is held."""
        first = self._since.first()
        return first and first[0]


class _Heap:
    """Holds by the `which`-th of `_times_of`; stale entries are skipped when read."""

    def __init__(self, packed: Mapping[str, bytes], which: int) -> None:
        self._packed = packed
        self._which = which
        self._entries: list[tuple[int, str]] = []

    def add(self, aggregate_id: str, value: bytes) -> None:
        heapq.heappush(self._entries, (_times_of(value)[self._which], aggregate_id))

    def first(self) -> tuple[int, str] | None:
        """Smallest time, and its aggregate."""
        if len(self._entries) > 2 * len(self._packed) + 1000:
            times = ((_times_of(value)[self._which], a) for a, value in self._packed.items())
            self._entries = sorted(times)
        while self._entries:
            at, aggregate_id = self._entries[0]
            value = self._packed.get(aggregate_id)
            if value is not None and _times_of(value)[self._which] == at:
                return at, aggregate_id
            self.drop()
        return None

    def drop(self) -> None:
        heapq.heappop(self._entries)
