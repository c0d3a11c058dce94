"""What the bench counts as lost, repeated and out of order, and how it counts time."""

from __future__ import annotations

import random

import numpy as np
import pytest

from bench.compare import (
    Records,
    Verdict,
    caught_up,
    codes,
    compare,
    over_time,
    spread,
    stored_codes,
)
from bench.load import commit_times


def records(
    *read: tuple[str, int], late: tuple[int, ...] = (), arrived: tuple[int, ...] = ()
) -> Records:
    """Records in the consumer's order; `late` are positions."""
    names = list(dict.fromkeys(name for name, _ in read))
    return Records(
        names=names,
        keys=np.array([names.index(name) for name, _ in read], np.int64),
        versions=np.array([version for _, version in read], np.int64),
        created=np.zeros(len(read), np.int64),
        arrived=np.array(arrived or [0] * len(read), np.int64),
        late=np.array([n in late for n in range(len(read))], np.bool_),
    )


def verdict(stored: list[tuple[str, int]], read: Records) -> Verdict:
    return compare(stored_codes(stored, read.names), read)


def test_what_was_read_once_and_in_order_is_right() -> None:
    events = [("a", 1), ("b", 1), ("a", 2), ("a", 3), ("b", 2)]
    assert verdict(events, records(*events)) == Verdict(5, 5, 0, 0, 0, 0)


def test_an_event_that_never_comes_is_lost_even_of_an_aggregate_that_was_never_seen() -> None:
    found = verdict([("a", 1), ("a", 2), ("b", 1)], records(("a", 1)))
    assert (found.lost, found.repeated, found.out_of_order) == (2, 0, 0)


def test_each_further_copy_is_a_repetition_and_nothing_else() -> None:
    found = verdict([("a", 1), ("a", 2)], records(("a", 1), ("a", 2), ("a", 1), ("a", 1)))
    assert (found.lost, found.repeated, found.out_of_order) == (0, 2, 0)


def test_an_event_behind_a_later_one_of_its_aggregate_is_out_of_order() -> None:
    events = [("a", 1), ("a", 3), ("b", 1), ("a", 2)]
    found = verdict(events, records(*events))
    assert (found.lost, found.repeated, found.out_of_order) == (0, 0, 1)


def test_an_event_that_is_marked_as_late_may_stand_anywhere() -> None:
    events = [("a", 1), ("a", 3), ("a", 2), ("a", 4)]
    assert verdict(events, records(*events, late=(2,))).out_of_order == 0


def test_a_record_that_the_store_does_not_have_is_unknown() -> None:
    assert verdict([("a", 1)], records(("a", 1), ("z", 7))).unknown == 1


def test_nothing_stored_and_nothing_read_is_right() -> None:
    assert verdict([], records()) == Verdict(0, 0, 0, 0, 0, 0)


@pytest.mark.parametrize("seed", range(20))
def test_counts_are_those_of_a_slow_reading_of_the_rules(seed: int) -> None:
    dice = random.Random(seed)
    stored = [(f"a{n % 7}", n // 7 + 1) for n in range(100)]
    read = [dice.choice(stored) for _ in range(120)]
    found = verdict(stored, records(*read))
    seen: set[tuple[str, int]] = set()
    last: dict[str, int] = {}
    repeated = out_of_order = 0
    for name, version in read:
        if (name, version) in seen:
            repeated += 1
            continue
        seen.add((name, version))
        out_of_order += version < last.get(name, 0)
        last[name] = max(version, last.get(name, 0))
    assert found == Verdict(100, 120, 100 - len(seen), repeated, out_of_order, 0)


def test_a_percentile_is_a_value_that_occurred() -> None:
    waited = np.arange(1, 101, dtype=np.int64) * 1_000_000
    assert spread(waited) == {"count": 100, "p50": 50.0, "p99": 99.0, "max": 100.0}
    assert spread(waited[:0]) == {"count": 0}


def test_latency_over_time_is_by_the_second_of_creation() -> None:
    created = np.array([2_100_000, 0, 900_000, 2_200_000], np.int64)
    waited = np.array([4_000_000, 1_000_000, 3_000_000, 2_000_000], np.int64)
    assert over_time(created, waited, 0) == {
        "seconds": [0.0, 2.0],
        "events": [2, 2],
        "p50": [1.0, 2.0],
        "p99": [3.0, 4.0],
        "max": [3.0, 4.0],
    }


def test_caught_up_is_when_the_last_old_event_has_arrived() -> None:
    second = 1_000_000
    ages = [(1, 1), (12, 10), (13, 8), (14, 3), (15, 1), (16, 1)]  # arrived at, seconds old
    read = records(*[("a", n) for n in range(len(ages))])
    arrived = np.array([at * second for at, _ in ages], np.int64)
    created = arrived - np.array([age * second for _, age in ages], np.int64)
    made = Records(read.names, read.keys, read.versions, created, arrived, read.late)
    assert caught_up(made, 5 * second, normal=2.0) == 9.0
    assert caught_up(made, 5 * second, normal=0.5) is None


def test_only_events_of_transactions_that_were_held_open_have_a_commit_time() -> None:
    read = records(("order-1", 1), ("order-1", 2), ("order-2", 1), ("order-1", 3))
    held = [("order-1", 2, 3, 77), ("order-9", 1, 1, 5)]
    assert commit_times(read, held).tolist() == [0, 77, 0, 77]


def test_codes_keep_aggregates_and_versions_apart() -> None:
    keys, versions = np.array([0, 1, 1]), np.array([2**39, 0, 1])
    assert len(set(codes(keys, versions).tolist())) == 3
