"""Recount: rows that commit below the position, with no later version that would show a gap.

An aggregate's last event, or its only one, may commit after its window was read. So the rows of
each second (a time bucket) are counted again in the database at growing ages (2, 4, 8, … s, up to
the horizon) and compared with how many the shards have accounted for. Where the watermark saw a
transaction end that the boundary no longer waited for, its seconds are counted out of turn, however
old they are. Where the numbers differ, the shards compare the bucket's keys with their indexes, and
what they do not know goes through admission. Cost grows with log(horizon).

A wrong number costs a comparison, which sets it right. But it must never be too high, since that
would hide a row: rows count only when a window shows them for the first time.
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
"""µs between two counts of a bucket in which transactions wrote that end one after the other."""

_MOST_ROWS = 200_000
MOST_BUCKETS = 600
_MOST_LATE = 60
_MOST_HIDDEN = 30 * 86_400
"""Buckets, at most, that one transaction or one downtime may have hidden, or that the clock may
have passed at once: a month."""


def hidden_at_most(position: int) -> int:
    """From where on a start counts again that does not know what was hidden below a time: a day, as
    far as numbers are kept. Rows of transactions that were open for longer are not found."""
    return position - KEPT * WIDTH


class Recount:
    """When each bucket is counted, and which buckets to compare. Pure: times are arguments, µs.

    Args:
        horizon: how old a bucket may be and still be counted in turn; 0: none ever is.
        start: nothing at or before is of interest.
        now: the database's time.
        position: up to where a former run has read; None: there was none.
        hidden_since: nothing that it passed and did not count since was created at or before.
    """

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
        """Transactions that a former run stopped waiting for may have ended in the meantime."""
        since = min(now, position) - self._horizon
        if position > now + CLOCK_STEP:  # unknown: since when the clock has been behind
            since = min(since, hidden_at_most(now))
        since = since if hidden_since is None else min(since, hidden_since)
        young = bucket_of(now - self._horizon)
        first = max(bucket_of(since + 1), self._start, self._next - _MOST_HIDDEN)
        if self._horizon:
            self._note(first, min(young, self._next))
            self._due = [(0, b) for b in range(max(first, young), self._next)]

    def read_before(self, position: int, known: int | None) -> None:
        """A shard's index is ahead of the kept position: the buckets between are counted again.

        Args:
            known: up to where this run has read the shard, µs; None: it has not.
        """
        since = max((at for at in (known, self._former) if at is not None), default=None)
        if not self._horizon or (since is not None and position <= since):
            return
        last = bucket_of(position)
        first = bucket_of(hidden_at_most(position) if since is None else since)
        self._note(max(first, self._start, last - KEPT), last + 1)

    @property
    def uncounted_since(self) -> int | None:
        """Nothing that is to be counted out of turn or compared was created at or before, µs."""
        others = (self._mismatched, self._late_mismatched, self._unfinished)
        oldest = [min(some) for some in others if some]
        if (least := self._late.least) is not None:
            oldest.append(least)
        return min(oldest) * WIDTH if oldest else None

    def account(self, shard: int, buckets: Mapping[int, int], *, anew: bool = False) -> None:
        """Take over a shard's numbers of rows, per bucket that has changed.

        Args:
            anew: these are all, perhaps of another index: where it knows of fewer rows than the one
                before, they are looked for again.
        """
        known = self._accounted.setdefault(shard, {})
        if anew:
            self.note([bucket for bucket, rows in known.items() if buckets.get(bucket, 0) < rows])
            known.clear()
        known.update(buckets)

    def ask(self, buckets: Iterable[int]) -> dict[int, int]:
        """How many rows the shards have accounted for in each of these, counted from now on."""
        self._noted_meanwhile.clear()
        return {b: sum(of.get(b, 0) for of in self._accounted.values()) for b in buckets}

    def ended(self, after: int, upto: int) -> None:
        """A transaction that wrote in ``(after, upto]``, µs, has ended behind the windows."""
        first, last = bucket_of(after + 1), bucket_of(upto)
        if self._horizon:
            self._note(max(first, self._start, last + 1 - _MOST_HIDDEN), last + 1)

    def note(self, buckets: Iterable[int]) -> None:
        """Rows have come there behind the windows: count them out of turn."""
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
        """Buckets to count out of turn: a few at a time.

        Taken from both ends, so that neither what ends now nor what a start has to count waits for
        the other. None that are still to be compared: what came after the comparison has read them
        would be forgotten when it ends.
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
        """The buckets to count now, each as far as it lies up to the position.

        Every bucket that was younger than the horizon when it was read is counted at least once.

        Args:
            now: the database's time.
            position: up to where all shards have read.
            reached: up to where any of them has, or the database was asked for their rows.
            hidden_since: nothing that open transactions hide was created at or before, µs.
        """
        if not self._horizon:
            return []
        self._forget(oldest_needed(now, self._horizon, hidden_since, self.uncounted_since))
        # what is read now was read after the last call, however long ago that was
        oldest = bucket_of(min(now, self._last_time or now) - self._horizon)
        self._last_time = now
        # the position's own bucket, too: an idle reader stays within it
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
        """Buckets that were `due`, or `late`, are due again after the pause, a range of µs."""
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
        """Compare the database's numbers of rows with what was accounted for.

        Args:
            expected: as of `ask`.
            in_turn: these were `due`, and are again.
            upto: what is above it was not counted, µs; None: all was.
        """
        if upto is not None:
            self._in_part |= {bucket: upto for bucket in rows if (bucket + 1) * WIDTH > upto}
        for bucket in rows:
            # what came after a running comparison has read them is counted when that has ended, and
            # what was noted since they were asked for may have come after they were counted
            if bucket in self._mismatched or bucket in self._late_mismatched:
                self._late.add(bucket, bucket + 1)
            elif bucket not in self._noted_meanwhile:
                self._late.discard(bucket)
        self._unfinished -= rows.keys()
        kept = {b: pause for b, pause in self._paused.items() if now in pause}
        self._paused = kept | dict.fromkeys(rows, range(now, now + _RECOUNT_PAUSE))
        for bucket, count in rows.items():
            if count != expected.get(bucket, 0):
                (self._mismatched if in_turn else self._late_mismatched)[bucket] = count
            end = (bucket + 1) * WIDTH + sum(by for before, by in self._steps if bucket <= before)
            age = _FIRST_AGE
            while end + age <= now:
                age *= 2
            last = end + self._horizon
            if now < last and in_turn:
                heapq.heappush(self._due, (min(end + age, last), bucket))

    def clock_went_ahead(self, now: int, by: int) -> None:
        """What it has passed is counted as long as without that."""
        self._steps = [(bucket_of(now - by), by), *self._steps[:9]]
        self.everything(now - by)

    def clock_went_back(self, now: int) -> None:
        """Count everything again, and what the clock had passed when it comes to that again."""
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
        # rows come where the clock is now
        end = min(end, oldest + _MOST_HIDDEN)
        pending = {bucket for _, bucket in self._due} | {*range(oldest, end)}
        self._due = [(0, bucket) for bucket in sorted(pending)]

    def has_mismatches(self) -> bool:
        return bool(self._mismatched or self._late_mismatched)

    def take(self) -> list[int]:
        """The next buckets to compare: first those counted in turn, and at least one of the
        others."""
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
        """All shards have compared these.

        Args:
            unfinished: those of which a shard that waits has left something.
            again: when these are counted again, µs.
        """
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
    """A set of numbers, kept as ranges that do not touch."""

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._ends: list[int] = []

    def add(self, first: int, end: int) -> None:
        """Add ``first <= bucket < end``."""
        if first >= end:
            return
        low, high = bisect_left(self._ends, first), bisect_right(self._firsts, end)
        if low < high:
            first, end = min(first, self._firsts[low]), max(end, self._ends[high - 1])
        self._firsts[low:high], self._ends[low:high] = [first], [end]

    def discard(self, bucket: int) -> None:
        """Remove one, if it is there."""
        at = bisect_right(self._firsts, bucket) - 1
        if at < 0 or bucket >= self._ends[at]:
            return
        first, end = self._firsts[at], self._ends[at]
        left = [(a, b) for a, b in ((first, bucket), (bucket + 1, end)) if a < b]
        self._firsts[at : at + 1] = [a for a, _ in left]
        self._ends[at : at + 1] = [b for _, b in left]

    def clear(self) -> None:
        self._firsts, self._ends = [], []

    def from_both_ends(self, first: int, end: int) -> Iterator[int]:
        """Those of ``first <= bucket < end``: the last, the first, the last but one …"""
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
        """The lowest; None: there is none."""
        return self._firsts[0] if self._firsts else None

    def __contains__(self, bucket: int) -> bool:
        at = bisect_right(self._firsts, bucket) - 1
        return at >= 0 and bucket < self._ends[at]

    def __len__(self) -> int:
        return sum(b - a for a, b in zip(self._firsts, self._ends, strict=True))

    def __bool__(self) -> bool:
        return bool(self._firsts)
