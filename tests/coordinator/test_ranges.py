"""Time buckets that are kept as ranges behave as a set of numbers does."""

from __future__ import annotations

import random

from eventpub.coordinator.recount import Buckets


def test_it_is_what_a_set_would_be() -> None:
    chance = random.Random(7)
    for _ in range(200):
        ranges, numbers = Buckets(), set[int]()
        for _ in range(30):
            first = chance.randrange(40)
            end = first + chance.randrange(-1, 12)
            if chance.random() < 0.5:
                ranges.add(first, end)
                numbers.update(range(first, end))
            else:
                ranges.discard(first)
                numbers.discard(first)
            assert len(ranges) == len(numbers)
            assert bool(ranges) == bool(numbers)
            assert ranges.least == min(numbers, default=None)
            assert {b for b in range(60) if b in ranges} == numbers
            some = [*ranges.from_both_ends(first, first + 20)]
            inside = sorted(b for b in numbers if first <= b < first + 20)
            assert sorted(some) == inside
            assert some[:2] == [*inside[-1:], *inside[:1]][: len(inside)]


def test_neighbours_become_one_range() -> None:
    ranges = Buckets()
    for bucket in (5, 3, 4, 9, 3):
        ranges.add(bucket, bucket + 1)
    assert (ranges._firsts, ranges._ends) == ([3, 9], [6, 10])
    ranges.clear()
    assert not ranges
