"""How versions, times and partitions are written."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from eventpub.admission import NO_TIME, Numbers
from eventpub.index.database import NUMBER, Database, Overlay

LAST_SEEN = struct.Struct("<qq")
_NEITHER = bytes(LAST_SEEN.size)

Partition = tuple[str, int]
"""A topic and the number of one of its partitions."""
Offsets = dict[Partition, int]
"""The offset of the next record."""

MISSING_MARKERS = "unmarked"
"""The name of this fact on the disk, as it has always been."""


def packed(last: Mapping[str, int], times: Mapping[str, int]) -> Iterable[tuple[str, bytes]]:
    """The values to be stored of each aggregate of `last`."""
    if isinstance(last, Numbers) and isinstance(times, Numbers) and last.names is times.names:
        together = np.stack([last.numbers, times.numbers], 1).astype("<i8", copy=False).tobytes()
        ends = range(0, len(together), LAST_SEEN.size)
        values = (together[at : at + LAST_SEEN.size] for at in ends)
        return zip(last.names, values, strict=True)
    pack = LAST_SEEN.pack
    return ((a, pack(version, times.get(a, NO_TIME))) for a, version in last.items())


def last_and_times(
    aggregate_ids: list[str], found: list[bytes | None]
) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """The last version of the aggregates that have one, and when their rows were created."""
    missing = None in found
    together = b"".join(value or _NEITHER for value in found) if missing else b"".join(found)  # type: ignore[arg-type]
    numbers = np.frombuffer(together, "<i8").reshape(-1, 2)
    there = None
    if missing:
        there = np.fromiter((value is not None for value in found), bool, len(found))
    last = Numbers(aggregate_ids, numbers[:, 0], there)
    return last, Numbers(aggregate_ids, numbers[:, 1], there)


def nested_of(by_partition: Mapping[Partition, Any]) -> dict[str, dict[str, Any]]:
    """By topic and then by partition, as JSON can have it."""
    nested: dict[str, dict[str, Any]] = {}
    for (topic, partition), value in by_partition.items():
        nested.setdefault(topic, {})[str(partition)] = value
    return nested


def flat_of(nested: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[Partition, Any]]:
    """What `nested_of` was given."""
    for topic, partitions in nested.items():
        for partition, value in partitions.items():
            yield (topic, int(partition)), value


_ROWS = struct.Struct("<q")


class BucketCounts:
    """By the bucket's number.

    Args:
        database: of the index.
    """

    def __init__(self, database: Database | Overlay) -> None:
        self._db = database
        self._pruned_below = 0

    def since(self, first: int) -> dict[int, int]:
        """Of the buckets from one on."""
        found = self._db.items(b"c", NUMBER.pack(max(first, 0)))
        return {NUMBER.unpack(key[1:])[0]: _ROWS.unpack(value)[0] for key, value in found}

    def of(self, bucket: int) -> int:
        found = self._db.get(b"c" + NUMBER.pack(bucket))
        return 0 if found is None else int(_ROWS.unpack(found)[0])

    def put(self, batch: Any, bucket: int, rows: int) -> None:
        batch.put(b"c" + NUMBER.pack(bucket), _ROWS.pack(rows))

    def delete_since(self, batch: Any, first: int) -> None:
        """Delete buckets from one on."""
        for bucket in self.since(first):
            batch.delete(b"c" + NUMBER.pack(bucket))

    def prune(self, batch: Any, forget_below: int) -> None:
        since = self._pruned_below  # what was deleted before is not passed over again
        if forget_below <= since:
            return
        for key, _ in self._db.items(b"c", NUMBER.pack(since)):
            if NUMBER.unpack(key[1:])[0] >= forget_below:
                break
            batch.delete(key)
        self._pruned_below = forget_below


_MOST = 100_000
"""Aggregates; about 25 MB."""


class Recent:
    """Values by aggregate, as they are on the disk.

    Right only if whatever writes other values goes through `replaced_by`, or calls `forget`.
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def values_of(
        self,
        aggregate_ids: list[str],
        read: Callable[[list[str]], list[bytes | None]],
    ) -> list[bytes | None]:
        """The values of some aggregates; what is not kept is read."""
        if not self._values:
            return read(aggregate_ids)
        found = list(map(self._values.get, aggregate_ids))
        if None in found:
            missing = [a for a, v in zip(aggregate_ids, found, strict=True) if v is None]
            others = iter(read(missing))
            found = [next(others) if value is None else value for value in found]
        return found

    @contextmanager
    def replaced_by(self, values: Mapping[str, bytes]) -> Iterator[None]:
        """The block writes these values, and no others; what it fails at is forgotten."""
        kept, self._values = self._values, {}
        yield
        if len(kept) + len(values) > _MOST:
            kept.clear()
        kept.update(values)
        self._values = kept

    def forget(self) -> None:
        """Anything may have been written."""
        self._values = {}
