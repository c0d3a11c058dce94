"""How versions, times and partitions are written."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from eventpub.admission import NO_TIME, Numbers

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
