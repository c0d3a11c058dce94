"""What a fold finds that nobody can have published in order."""

from __future__ import annotations

from eventpub.shard.folding import jumps


def test_a16_a_version_far_above_the_last_is_said() -> None:
    found = jumps({"a": 3, "b": 3}, {"a": [4, 999], "b": [5, 4]})
    assert found == [{"aggregate_id": "a", "known": 4, "found": 999}]


def test_repeats_and_aggregates_that_were_unknown_are_no_jumps() -> None:
    assert jumps({"a": 3, "b": 3}, {"a": [1, 3, 4], "b": [2], "new": [7]}) == []


def test_a_forged_version_of_any_size_costs_nothing() -> None:
    [found] = jumps({"a": 3}, {"a": [2**62]})
    assert found["found"] == 2**62
