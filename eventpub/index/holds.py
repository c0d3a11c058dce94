"""The open holds of a shard: as they are stored, and those that are due, without looking at all.

There may be hundreds of thousands (an archived store, a wrong first version), and each window asks
when the next one is due. So they stay packed in memory until somebody asks for one, and two heaps
give the next that is due and the oldest event that is held.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Iterator, Mapping

from eventpub.admission import Hold

_PACKED = struct.Struct("<qqqiqq?")
"""A hold without its aggregate, in the order of its fields."""
_TIMES = struct.Struct("<28xqqx")
"""Of one that is packed, when it is tried next and its oldest event."""


def packed(hold: Hold) -> bytes:
    """A hold as it is stored; its aggregate is the key."""
    return _PACKED.pack(
        hold.first_missing,
        hold.seen,
        hold.first_seen,
        hold.attempts,
        hold.next_attempt,
        hold.since,
        hold.catching_up,
    )


def unpacked(aggregate_id: str, value: bytes) -> Hold:
    """The hold that `packed` wrote."""
    return Hold(aggregate_id, *_PACKED.unpack(value))


class Holds(Mapping[str, Hold]):
    """Open holds by aggregate."""

    def __init__(self) -> None:
        self._packed: dict[str, bytes] = {}
        self._due: list[tuple[int, str]] | None = None
        self._since: list[tuple[int, str]] | None = None

    def __getitem__(self, aggregate_id: str) -> Hold:
        return unpacked(aggregate_id, self._packed[aggregate_id])

    def __contains__(self, aggregate_id: object) -> bool:
        return aggregate_id in self._packed

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)

    def load(self, aggregate_id: str, value: bytes) -> None:
        """Take over one as it is stored."""
        self._packed[aggregate_id] = value
        self._due = self._since = None

    def put(self, hold: Hold) -> bytes:
        """Open a hold or change it; returns what is to be stored."""
        value = self._packed[hold.aggregate_id] = packed(hold)
        if self._due is not None:
            heapq.heappush(self._due, (hold.next_attempt, hold.aggregate_id))
        if self._since is not None:
            heapq.heappush(self._since, (hold.since, hold.aggregate_id))
        return value

    def remove(self, aggregate_id: str) -> None:
        """Close a hold, where there is one."""
        self._packed.pop(aggregate_id, None)

    def due(self, now: int, most: int | None = None) -> list[str]:
        """The aggregates whose next attempt is due, longest first; at most so many."""
        heap = self._by_due()
        taken: list[tuple[int, str]] = []
        while heap and heap[0][0] <= now and (most is None or len(taken) < most):
            entry = heapq.heappop(heap)
            if self._is_due_at(entry) and (not taken or taken[-1] != entry):
                taken.append(entry)
        for entry in taken:
            heapq.heappush(heap, entry)
        return [aggregate_id for _, aggregate_id in taken]

    def next_due(self) -> int | None:
        """When the next one is due, µs; None: nothing is held."""
        heap = self._by_due()
        while heap and not self._is_due_at(heap[0]):
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def due_after(self, latest: int) -> list[Hold]:
        """Those whose next attempt is later than that, µs."""
        return [self[a] for a, (at, _) in self._times() if at > latest]

    def oldest(self) -> int | None:
        """The smallest `create_time` among the events held, µs; None: nothing is held."""
        if self._since is None or len(self._since) > 2 * len(self._packed) + 1000:
            self._since = [(since, a) for a, (_, since) in self._times()]
            heapq.heapify(self._since)
        heap = self._since
        while heap:
            since, aggregate_id = heap[0]
            value = self._packed.get(aggregate_id)
            if value is not None and _times(value)[1] == since:
                return since
            heapq.heappop(heap)
        return None

    def _by_due(self) -> list[tuple[int, str]]:
        if self._due is None or len(self._due) > 2 * len(self._packed) + 1000:
            self._due = [(at, a) for a, (at, _) in self._times()]
            heapq.heapify(self._due)
        return self._due

    def _times(self) -> Iterator[tuple[str, tuple[int, int]]]:
        for aggregate_id, value in self._packed.items():
            yield aggregate_id, _times(value)

    def _is_due_at(self, entry: tuple[int, str]) -> bool:
        at, aggregate_id = entry
        value = self._packed.get(aggregate_id)
        return value is not None and _times(value)[0] == at


def _times(value: bytes) -> tuple[int, int]:
    """When a stored hold is tried next, and its oldest event: a fifth of unpacking all of it."""
    next_attempt, since = _TIMES.unpack(value)
    return next_attempt, since
