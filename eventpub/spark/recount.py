"""Recount: rows that commit behind the reader, with no later version that would show a gap.

An aggregate's last event, or its only one, may commit after its window was read. So the rows of
each second (a time bucket) are counted again in the database at growing ages (2, 4, 8, … s, up to
the horizon) and compared with how many the shards have accounted for. Where the source has seen a
transaction end that the boundary had passed by, the seconds in which it wrote are counted out of
turn, however old they are. Where the numbers differ, the shards compare the bucket's keys with
their index, and what they do not know goes through admission. The cost of a row is one index entry
counted per age: it grows with log(horizon).

A number that is wrong costs a comparison and nothing else: the comparison sets it right. It must
never be too high, since that would hide a row, and so rows count when a window shows them for the
first time, and not when they come by another way.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

WIDTH = 1_000_000
"""µs of a time bucket: bucket b has the rows of ``b * WIDTH < create_time <= (b + 1) * WIDTH``."""

_FIRST_AGE = 2_000_000
_REST = 2_000_000
"""µs between two counts of a bucket in which transactions wrote that end one after the other."""

_MOST_ROWS = 200_000
_MOST_BUCKETS = 600


def bucket_of(create_time: int) -> int:
    """The number of a row's bucket."""
    return (create_time - 1) // WIDTH


def window_of(bucket: int, position: int) -> tuple[int, int]:
    """What of a bucket lies up to a position: ``(after, upto]``, µs."""
    after = bucket * WIDTH
    return after, max(after, min(after + WIDTH, position))


@dataclass(frozen=True)
class Comparison:
    """Time buckets whose keys all shards compare with their indexes.

    Attributes:
        number: grows; a shard reports which it has done last.
        buckets: their numbers; none where there is nothing to compare.
    """

    number: int = 0
    buckets: tuple[int, ...] = ()


class Recount:
    """When each bucket is counted, and which buckets to compare. Pure: times are arguments, µs.

    Args:
        horizon: how old a bucket may be and still be counted; 0: none ever is.
        start: nothing at or before is of interest.
    """

    def __init__(self, horizon: int, start: int) -> None:
        self._horizon = horizon
        self._next = bucket_of(start + 1)
        self._first_look = True
        self._waiting: deque[int] = deque()
        self._due: list[tuple[int, int]] = []
        self._accounted: dict[int, dict[int, int]] = {}
        self._suspects: dict[int, int] = {}
        self._start = self._next
        self._told: Mapping[tuple[int, int], int] = {}
        self._late: set[int] = set()
        self._counted_at: dict[int, int] = {}

    def heard(self, shard: int, buckets: Mapping[int, int]) -> None:
        """Take over a shard's numbers of rows, per bucket that has changed."""
        self._accounted.setdefault(shard, {}).update(buckets)

    def told(self, passed: Mapping[tuple[int, int], int]) -> None:
        """Rows may have come behind the windows; see `late`.

        Args:
            passed: by first and last bucket, a number that changes when rows may have come there.
        """
        for (first, last), number in passed.items():
            if self._told.get((first, last)) != number:
                self._late.update(range(max(first, self._start), last + 1))
        self._told = passed

    def late(self, now: int, position: int) -> list[int]:
        """Buckets to count out of turn, as of `due`: some, so that a look does not take long."""
        end = min(self._next, bucket_of(position) + 1) if self._horizon else 0
        ready = (b for b in sorted(self._late) if b < end and not self._rests(b, now))
        return list(islice(ready, _MOST_BUCKETS))

    def _rests(self, bucket: int, now: int) -> bool:
        counted_at = self._counted_at.get(bucket)
        return counted_at is not None and 0 <= now - counted_at < _REST

    def due(self, now: int, position: int, reached: int | None = None) -> list[int]:
        """The buckets to count now, each as far as it lies up to the position.

        Args:
            now: the database's time.
            position: up to where all shards have read.
            reached: up to where any of them has; None: the same. Where a shard waits for longer
                than the horizon, what the others have passed meanwhile is still counted once.
        """
        if not self._horizon:
            return []
        oldest = bucket_of(now - self._horizon)
        self._forget(oldest)
        # the position's own bucket, too: an idle reader stays within it
        aged = bucket_of(now - _FIRST_AGE)
        end = min(bucket_of(position if reached is None else reached), aged) + 1
        self._waiting.extend(range(max(self._next, oldest), end))
        self._next = max(self._next, end)
        while self._waiting and self._waiting[0] <= min(bucket_of(position), aged):
            bucket = self._waiting.popleft()
            # after a start nobody knows what has come in the meantime
            due = now if self._first_look else (bucket + 1) * WIDTH + _FIRST_AGE
            heapq.heappush(self._due, (due, bucket))
        self._first_look = False
        found: set[int] = set()
        while self._due and self._due[0][0] <= now and len(found) < _MOST_BUCKETS:
            found.add(heapq.heappop(self._due)[1])
        return sorted(found)

    def not_counted(self, buckets: Iterable[int]) -> None:
        """What was due could not be counted: it is due again."""
        for bucket in buckets:
            heapq.heappush(self._due, (0, bucket))

    def counted(self, now: int, rows: Mapping[int, int], *, in_turn: bool = True) -> None:
        """Compare the database's numbers of rows with what was accounted for.

        Args:
            in_turn: these were `due`, and are again.
        """
        self._late -= rows.keys()
        kept = {b: at for b, at in self._counted_at.items() if 0 <= now - at < _REST}
        self._counted_at = kept | dict.fromkeys(rows, now)
        for bucket, count in rows.items():
            if count != sum(of.get(bucket, 0) for of in self._accounted.values()):
                self._suspects[bucket] = count
            end = (bucket + 1) * WIDTH
            age = _FIRST_AGE
            while end + age <= now:
                age *= 2
            last = end + self._horizon
            if now < last and in_turn:
                heapq.heappush(self._due, (min(end + age, last), bucket))

    def everything(self, now: int) -> None:
        """Count every bucket of the horizon again, now: the clock was set, or it is the end."""
        oldest = bucket_of(now - self._horizon)
        end = self._waiting[0] if self._waiting else self._next
        self._counted_at = {}
        self._due = [(now, bucket) for bucket in range(oldest, end)] if self._horizon else []

    def has_suspects(self) -> bool:
        """Whether there are buckets to compare."""
        return bool(self._suspects)

    def take(self) -> list[int]:
        """The next buckets to compare: some, so that events do not wait long. See `compared`."""
        taken: list[int] = []
        rows = 0
        for bucket, count in sorted(self._suspects.items()):
            if taken and rows + count > _MOST_ROWS:
                break
            taken.append(bucket)
            rows += count
        return taken

    def compared(
        self, buckets: Iterable[int], unfinished: Iterable[int] = (), again: int = 0
    ) -> None:
        """All shards have compared these.

        Args:
            buckets: which were compared.
            unfinished: those of which a shard that waits has left something.
            again: when these are counted again, µs, however old they are then.
        """
        for bucket in buckets:
            self._suspects.pop(bucket, None)
        for bucket in unfinished:
            heapq.heappush(self._due, (again, bucket))

    def _forget(self, oldest: int) -> None:
        for of in self._accounted.values():
            for bucket in [b for b in of if b < oldest]:
                del of[bucket]
