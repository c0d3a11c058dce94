"""What a fold finds that nobody can have published in order."""

from __future__ import annotations

from eventpub.admission.model import Known
from eventpub.shard.folding import Jumps


def jumps(**skipped: list[tuple[int, int]]) -> Jumps:
    return Jumps(lambda ids: Known(dict.fromkeys(ids, 3), {}, dict(skipped), None, {}))


def test_a16_a_version_far_above_the_last_is_said() -> None:
    found = jumps()
    found.add("events", {"a": [4, 999], "b": [4, 5]})
    assert found.found() == [{"aggregate_id": "a", "known": 4, "found": 999}]


def test_skips_and_dead_letters_are_no_jumps() -> None:
    found = jumps(a=[(4, 6)])
    found.add("events", {"a": [7, 8], "b": [6]})
    found.add("dead", {"b": [4, 5]})
    assert found.found() == []


def test_late_events_and_repeats_are_no_jumps() -> None:
    found = jumps()
    found.add("events", {"a": [1, 3]})
    found.add("late", {"a": [2]})
    assert found.found() == []


def test_a_forged_version_of_any_size_costs_nothing() -> None:
    found = jumps()
    found.add("events", {"a": [2**62]})
    assert found.found()[0]["found"] == 2**62
