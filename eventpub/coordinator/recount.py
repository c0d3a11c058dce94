"""Recount: find rows that commit below the position, with no later version that would show a gap.

The rows of each second (a time bucket) are counted again in the database at growing ages (2, 4, 8,
… s, up to the horizon) and compared with what the shards have accounted for. When a timed-out
transaction ends, its seconds are counted out of turn, however old. If the numbers differ, or equal
ones prove nothing, as beyond the horizon, the shards compare its keys with their indexes, and
unknown rows go through admission. Cost grows with log(horizon).

An accounted number that is too low costs a comparison, which corrects it. One too high would hide a
row: rows count only when a window first shows them.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice

from eventpub.admission.model import CLOCK_STEP, KEPT, WIDTH, bucket_of, oldest_needed

_FIRST_AGE = 2_000_000
_RECOUNT_PAUSE = 2_000_000
"""µs between two counts of a bucket whose transactions end one after the other."""

_MOST_ROWS = 200_000
MOST_BUCKETS = 600
_MOST_LATE = 60
_MOST_HIDDEN = 30 * 86_400
"""Most buckets that one transaction, downtime or clock step may have hidden: a month."""


def hidden_at_most(position: int) -> int:
    """Where to recount from if it is unknown what was hidden: a day back, as far as row counts are
    kept. Rows of longer transactions are not found."""
    return position - KEPT * WIDTH


class Recount:
    """When each bucket is counted, and which to compare. Pure: times are arguments, µs.

    Args:
        horizon: maximum age of a bucket counted in turn; 0: no recount.
        start: nothing created up to here is of interest.
        position: where the previous run had read to; None: there was none.
        hidden_since: rows that it passed and has not counted since were created after this.
    """

    trusts_counts = True
    """No update moves a row to another bucket, where it would make up for one that came late."""

    def __init__(
        self,
        horizon: int,
        start: int,
        now: int = 0,
        position: int | None = None,
        hidden_since: int | None = None,
    ) -> None:
        self._horizon = horizon
        self._start = self._next = bucket_of(start + 1)
        self._former = position
        self._last_time = now
        self._steps: list[tuple[int, int]] = []
        self._waiting: deque[int] = deque()
        self._due: list[tuple[int, int]] = []
        self._accounted: dict[int, dict[int, int]] = {}
        self._mismatched: dict[int, int] = {}
        self._late_mismatched: dict[int, int] = {}
        self._late = Buckets()
        self._noted_meanwhile = Buckets()
        self._unfinished: set[int] = set()
        self._in_part: dict[int, int] = {}
        self._paused: dict[int, range] = {}
        if position is not None:
            self._next = max(self._start, bucket_of(min(now, position)) + 1)
            self._count_again(now, position, hidden_since)

    def _count_again(self, now: int, position: int, hidden_since: int | None) -> None:
        since = min(now, position) - self._horizon
        if position > now + CLOCK_STEP:  # unknown how long the clock has been behind
            since = min(since, hidden_at_most(now))
        since = since if hidden_since is None else min(since, hidden_since)
        young = bucket_of(now - self._horizon)
        first = max(bucket_of(since + 1), self._start, self._next - _MOST_HIDDEN)
        if self._horizon:
            self._note(first, min(young, self._next))
            self._due = [(0, b) for b in range(max(first, young), self._next)]

    def read_before(self, position: int, known: int | None) -> None:
        """Recount the buckets up to the position of an index that is ahead of the stored one.

        `known`: how far this run has read the shard, µs; None: not at all.
        """
        since = max((at for at in (known, self._former) if at is not None), default=None)
        if not self._horizon or (since is not None and position <= since):
            return
        last = bucket_of(position)
        first = bucket_of(hidden_at_most(position) if since is None else since)
        self._note(max(first, self._start, last - KEPT), last + 1)

    @property
    def uncounted_since(self) -> int | None:
        """Rows still to be compared or counted out of turn were created after this, µs."""
        others = (self._mismatched, self._late_mismatched, self._unfinished)
        oldest = [min(some) for some in others if some]
        if (least := self._late.least) is not None:
            oldest.append(least)
        return min(oldest) * WIDTH if oldest else None

    def account(self, shard: int, buckets: Mapping[int, int], *, of_all: bool = False) -> None:
        """Take over row counts of changed buckets, or `of_all`, perhaps from an older index."""
        known = self._accounted.setdefault(shard, {})
        if of_all:
            self.note([bucket for bucket, rows in known.items() if buckets.get(bucket, 0) < rows])
            known.clear()
        known.update(buckets)

    def ask(self, buckets: Iterable[int]) -> dict[int, int]:
        """Expected rows by bucket, for a count that starts now."""
        self._noted_meanwhile.clear()
        return {b: sum(of.get(b, 0) for of in self._accounted.values()) for b in buckets}

    def ended(self, after: int, upto: int) -> None:
        """A transaction that wrote in ``(after, upto]``, µs, has ended after its windows."""
        first, last = bucket_of(after + 1), bucket_of(upto)
        if self._horizon:
            self._note(max(first, self._start, last + 1 - _MOST_HIDDEN), last + 1)

    def note(self, buckets: Iterable[int]) -> None:
        """Count buckets out of turn: rows have arrived there after their windows."""
        if self._horizon:
            for bucket in (b for b in buckets if b >= self._start):
                self._note(bucket, bucket + 1)

    def _note(self, first: int, end: int) -> None:
        self._late.add(first, end)
        self._noted_meanwhile.add(first, end)

    @property
    def has_late(self) -> bool:
        return bool(self._late or self._mismatched or self._late_mismatched)

    def late(self, now: int, position: int) -> list[int]:
        """A few buckets to count out of turn, from both ends: neither new nor old ones starve.

        Not those being compared: rows arriving after their comparison would be forgotten.
        """
        late = self._late_mismatched
        if len(late) >= MOST_BUCKETS:
            return []
        oldest = max(late) if sum(late.values()) >= _MOST_ROWS else -1
        end = min(self._next, bucket_of(position) + 1) if self._horizon else 0
        waiting = self._late.from_both_ends(oldest + 1, end)
        open_ones = (b for b in waiting if not (b in self._mismatched or b in late))
        ready = (b for b in open_ones if now not in self._paused.get(b, ()))
        return sorted(islice(ready, _MOST_LATE))

    def due(
        self,
        now: int,
        position: int,
        reached: int | None = None,
        hidden_since: int | None = None,
    ) -> list[int]:
        """The buckets to count now, each up to the position.

        Every bucket younger than the horizon when it was read is counted at least once. `reached`:
        any shard has read up to here, and all up to `position`, µs.
        """
        if not self._horizon:
            return []
        self._forget(oldest_needed(now, self._horizon, hidden_since, self.uncounted_since))
        # rows read now were read after the last call, however long ago that was
        oldest = bucket_of(min(now, self._last_time or now) - self._horizon)
        self._last_time = now
        # including the position's own bucket: an idle reader stays within it
        aged = bucket_of(now - _FIRST_AGE)
        end = min(bucket_of(position if reached is None else reached), aged) + 1
        self._waiting.extend(range(max(self._next, oldest, end - _MOST_HIDDEN), end))
        self._next = max(self._next, end)
        for bucket, upto in [*self._in_part.items()]:
            if position > upto and now not in self._paused.get(bucket, ()):
                del self._in_part[bucket]
                heapq.heappush(self._due, (0, bucket))
        while self._waiting and self._waiting[0] <= min(bucket_of(position), aged):
            bucket = self._waiting.popleft()
            heapq.heappush(self._due, ((bucket + 1) * WIDTH + _FIRST_AGE, bucket))
        found: set[int] = set()
        while self._due and self._due[0][0] <= now and len(found) < MOST_BUCKETS:
            found.add(heapq.heappop(self._due)[1])
        return sorted(found)

    def not_counted(
        self, buckets: Iterable[int], pause: range = range(0), *, in_turn: bool = True
    ) -> None:
        for bucket in buckets:
            self._paused[bucket] = pause
            if in_turn:
                heapq.heappush(self._due, (pause.stop, bucket))

    def counted(
        self,
        now: int,
        rows: Mapping[int, int],
        expected: Mapping[int, int],
        *,
        in_turn: bool = True,
        upto: int | None = None,
    ) -> None:
        """Compare the database's row counts with `expected`, from `ask`.

        `in_turn`: these were `due`, and will be again. `upto`: rows above it were not counted, µs.
        """
        if upto is not None:
            self._in_part |= {bucket: upto for bucket in rows if (bucket + 1) * WIDTH > upto}
        extra = {*rows} if not in_turn else self._unfinished & rows.keys()
        for bucket in rows:
            # rows that arrived after a running comparison read the bucket are counted when it has
            # ended; those noted since the request may have arrived after the count
            if bucket in self._mismatched or bucket in self._late_mismatched:
                self._late.add(bucket, bucket + 1)
            elif bucket not in self._noted_meanwhile and (self.trusts_counts or not in_turn):
                extra |= {bucket} if self._late.discard(bucket) else set()
        self._unfinished -= rows.keys()
        kept = {b: pause for b, pause in self._paused.items() if now in pause}
        self._paused = kept | dict.fromkeys(rows, range(now, now + _RECOUNT_PAUSE))
        for bucket, count in rows.items():
            end = (bucket + 1) * WIDTH
            # as many rows as came late may have left: been deleted, beyond the horizon, or updated
            reasons = (bucket in extra) + (end + self._horizon <= now) + (not self.trusts_counts)
            if count != expected.get(bucket, 0) or (count and reasons > 1):
                (self._mismatched if in_turn else self._late_mismatched)[bucket] = count
            end += sum(by for before, by in self._steps if bucket <= before)
            age = _FIRST_AGE
            while end + age <= now:
                age *= 2
            last = end + self._horizon
            if now < last and in_turn:
                heapq.heappush(self._due, (min(end + age, last), bucket))

    def clock_went_ahead(self, now: int, by: int) -> None:
        """The step does not add to the age of earlier buckets."""
        self._steps = [(bucket_of(now - by), by), *self._steps[:9]]
        self.everything(now - by)

    def clock_went_back(self, now: int) -> None:
        """Count everything again, including what the clock will pass a second time."""
        self._steps = []
        here = bucket_of(now) + 1
        self._next = min(self._next, here)
        self._waiting = deque(bucket for bucket in self._waiting if bucket < here)
        self._due = [(at, bucket) for at, bucket in self._due if bucket < here]
        self.everything(now)

    def everything(self, now: int) -> None:
        """Count every bucket of the horizon again."""
        self._paused = {}
        if not self._horizon:
            return
        oldest = max(bucket_of(now - self._horizon), self._start)
        end = self._waiting[0] if self._waiting else self._next
        # new rows arrive at the clock's current time
        end = min(end, oldest + _MOST_HIDDEN)
        pending = {bucket for _, bucket in self._due} | {*range(oldest, end)}
        self._due = [(0, bucket) for bucket in sorted(pending)]

    def has_mismatches(self) -> bool:
        return bool(self._mismatched or self._late_mismatched)

    def take(self) -> list[int]:
        """In-turn buckets first, and at least one other."""
        taken: list[int] = []
        rows = 0
        late = sorted(self._late_mismatched.items())
        from_both_ends = chain.from_iterable(zip(reversed(late), late, strict=True))
        for mismatched in sorted(self._mismatched.items()), from_both_ends:
            for number, (bucket, count) in enumerate(mismatched):
                if taken and number and rows + count > _MOST_ROWS:
                    break
                if bucket not in taken:
                    taken.append(bucket)
                    rows += count
        return taken

    def compared(
        self, buckets: Iterable[int], unfinished: Iterable[int] = (), again: int = 0
    ) -> None:
        """All shards have compared these; `unfinished` buckets are due again at `again`, µs."""
        for bucket in buckets:
            self._mismatched.pop(bucket, None)
            self._late_mismatched.pop(bucket, None)
        for bucket in unfinished:
            self._unfinished.add(bucket)
            heapq.heappush(self._due, (again, bucket))

    def _forget(self, oldest: int) -> None:
        for of in self._accounted.values():
            for bucket in [b for b in of if b < oldest]:
                del of[bucket]


class Buckets:
    """A set of integers, stored as disjoint, non-adjacent ranges."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._ends: list[int] = []

    def add(self, first: int, end: int) -> None:
        if first >= end:
            return
        low, high = bisect_left(self._ends, first), bisect_right(self._firsts, end)
        if low < high:
            first, end = min(first, self._firsts[low]), max(end, self._ends[high - 1])
        self._firsts[low:high], self._ends[low:high] = [first], [end]

    def discard(self, bucket: int) -> bool:
        """Whether it was there."""
        at = bisect_right(self._firsts, bucket) - 1
        if at < 0 or bucket >= self._ends[at]:
            return False
        first, end = self._firsts[at], self._ends[at]
        left = [(a, b) for a, b in ((first, bucket), (bucket + 1, end)) if a < b]
        self._firsts[at : at + 1] = [a for a, _ in left]
        self._ends[at : at + 1] = [b for _, b in left]
        return True

    def clear(self) -> None:
        self._firsts, self._ends = [], []

    def from_both_ends(self, first: int, end: int) -> Iterator[int]:
        """Members of ``first <= bucket < end``: the last, the first, the last but one …"""
        ranges = [
            range(max(a, first), min(b, end))
            for a, b in zip(self._firsts, self._ends, strict=True)
            if a < end and b > first
        ]
        up = chain.from_iterable(ranges)
        down = chain.from_iterable(reversed(some) for some in reversed(ranges))
        for number in range(sum(map(len, ranges))):
            yield next(up if number % 2 else down)

    @property
    def least(self) -> int | None:
        return self._firsts[0] if self._firsts else None

    def __contains__(self, bucket: int) -> bool:
        at = bisect_right(self._firsts, bucket) - 1
        return at >= 0 and bucket < self._ends[at]

    def __len__(self) -> int:
        return sum(b - a for a, b in zip(self._firsts, self._ends, strict=True))

    def __bool__(self) -> bool:
        return bool(self._firsts)
