"""Admission along written time lines: what commits when, what is seen, what goes out.

Each test plays one story against a shard in memory: `World` holds what is committed, `see` is a
window that the reader passes, `later` lets the database's clock go on and tries what is due.
"""

from __future__ import annotations

import pyarrow as pa
import pytest

from eventpub import admission
from eventpub.admission import Rules
from eventpub.admission.model import CONFLICT, EVENTS, Hold, Known, VersionRange, values
from tests.admission.world import World, table


def test_contiguous_versions_go_out_at_once() -> None:
    world = World()
    world.commit("a", 1, at=10)
    world.commit("a", 2, at=20)
    world.commit("b", 1, at=15)
    world.see()
    assert world.topic == [("a", 1), ("b", 1), ("a", 2)]


def test_a_replayed_window_publishes_nothing_again() -> None:
    world = World()
    world.commit("a", 1, at=10)
    world.see()
    world.commit("b", 1, at=11)
    world.see(everything=True)
    assert world.topic == [("a", 1), ("b", 1)]
    assert world.counts.duplicates == 1


def test_a_version_that_committed_behind_the_window_is_backtracked() -> None:
    world = World()
    world.commit("a", 1, at=10)
    world.see()
    world.commit("a", 2, at=5)
    world.commit("a", 3, at=30)
    world.see(after=20)
    assert world.topic == [("a", 1), ("a", 2), ("a", 3)]
    assert (world.counts.gaps_opened, world.counts.gaps_filled) == (1, 1)


def test_a_missing_version_holds_its_aggregate_and_no_other() -> None:
    world = World()
    world.commit("a", 2, at=10)
    world.commit("b", 1, at=11)
    world.see()
    assert world.topic == [("b", 1)]
    assert world.holds["a"].first_missing == 1
    world.commit("a", 1, at=5)
    world.commit("a", 3, at=12)
    world.see(after=11)
    world.later(1_000_000)
    assert world.topic == [("b", 1), ("a", 1), ("a", 2), ("a", 3)]
    assert not world.holds


def test_the_missing_version_in_a_window_ends_the_hold_without_waiting() -> None:
    world = World()
    world.commit("a", 1, at=10)
    world.commit("a", 3, at=20)
    world.see()
    world.commit("a", 2, at=30)
    world.see(after=20)
    assert world.topic == [("a", 1), ("a", 2), ("a", 3)]


def test_attempts_back_off_and_end_in_a_skip_that_is_recorded_once() -> None:
    rules = Rules(max_backoff=3, backoff_base=100)
    world = World(rules)
    world.commit("a", 2, at=10)
    world.see(now=1000)
    tries = [hold.next_attempt for hold in world.holds.values()]
    for now in (1100, 1300):
        world.due(now)
        tries.append(world.holds["a"].next_attempt)
    assert tries == [1100, 1300, 1700]
    world.due(1700)
    assert world.topic == [("a", 2)]
    assert [(g.from_version, g.to_version, g.first_seen, g.attempts) for g in world.gaps] == [
        (1, 1, 1000, 3)
    ]
    assert rules.longest_hold == 1700 - 1000


def test_looking_too_early_counts_as_no_attempt() -> None:
    world = World(Rules(max_backoff=3, backoff_base=100))
    world.commit("a", 2, at=10)
    world.see(now=1000)
    world.commit("a", 3, at=20)
    world.see(after=15, now=1010)
    assert world.holds["a"].attempts == 0
    assert world.holds["a"].seen == 3


def test_a_skipped_version_that_comes_after_all_is_late() -> None:
    for late, published, diverted in (
        ("publish", [("a", 2), ("a", 1)], []),
        ("divert", [("a", 2)], [("a", 1)]),
        ("drop", [("a", 2)], []),
    ):
        world = World(Rules(max_backoff=1, backoff_base=1, late=late))  # type: ignore[arg-type]
        world.commit("a", 2, at=10)
        world.see(now=100)
        world.due(200)
        world.commit("a", 1, at=30)
        world.see(after=20)
        world.see(after=20)
        assert (world.topic, world.diverted) == (published, diverted)
        assert world.counts.late == 1
        assert world.late == ([("a", 1)] if late == "publish" else [])


def test_several_gaps_in_one_aggregate_are_waited_for_one_after_the_other() -> None:
    world = World(Rules(max_backoff=2, backoff_base=100))
    for version in (1, 3, 5):
        world.commit("a", version, at=version)
    world.see(now=1000)
    assert world.topic == [("a", 1)]
    world.commit("a", 2, at=2)
    world.due(1100)
    assert world.topic == [("a", 1), ("a", 2), ("a", 3)]
    assert (world.holds["a"].first_missing, world.holds["a"].first_seen) == (4, 1100)
    world.due(1200)
    world.due(1400)
    assert world.topic[-1] == ("a", 5)
    assert [(g.from_version, g.to_version) for g in world.gaps] == [(4, 4)]


def test_gaps_that_were_missed_together_are_skipped_together_but_by_request_one_by_one() -> None:
    """One after the other, ten gaps of a hot aggregate took ten minutes."""
    for by_request in (False, True):
        world = World(Rules(max_backoff=2, backoff_base=100))
        for version in range(1, 12, 2):
            world.commit("a", version, at=version)
        world.see(now=1000)
        if by_request:
            world.skip("a")
            assert world.topic[-1] == ("a", 3)
            assert world.holds["a"].first_missing == 4
        world.due(1100)
        world.commit("a", 13, at=1200)  # of a gap that is seen now, and waits from now on
        world.see(now=1250)
        world.due(1300)
        assert world.topic[-1] == ("a", 11)
        assert (world.holds["a"].first_missing, world.holds["a"].first_seen) == (12, 1300)
        assert {(g.first_seen, g.skipped_at) for g in world.gaps[by_request:]} == {(1000, 1300)}
        assert (world.counts.gaps_opened, world.counts.gaps_skipped) == (6, 5)


def test_while_missing_versions_keep_coming_the_others_are_waited_for() -> None:
    """A stray high version, while a writer goes on below it."""
    world = World(Rules(max_backoff=2, backoff_base=100))
    for version in (1, 1000):
        world.commit("a", version, at=version)
    world.see(now=1000)
    for version in range(2, 12):
        world.commit("a", version, at=1000 + 100 * version)
        world.due(1000 + 100 * version)
    assert [v for _, v in world.topic] == list(range(1, 12))
    assert not world.gaps


def test_a_gap_filled_in_two_parts_keeps_the_order() -> None:
    world = World(Rules(backoff_base=100))
    for version in (1, 5):
        world.commit("a", version, at=version)
    world.see(now=1000)
    world.commit("a", 3, at=3)
    world.due(1100)
    assert world.topic == [("a", 1)]
    world.commit("a", 2, at=2)
    world.commit("a", 4, at=4)
    world.due(1300)
    assert [v for _, v in world.topic] == [1, 2, 3, 4, 5]


def test_versions_and_times_in_opposite_order_go_out_by_version() -> None:
    world = World()
    world.commit("a", 1, at=30)
    world.commit("a", 2, at=20)
    world.commit("b", 1, at=25)
    world.see()
    assert world.topic == [("b", 1), ("a", 1), ("a", 2)]


def test_rows_of_one_instant_go_out_by_version() -> None:
    world = World()
    for version in (3, 1, 2):
        world.commit("a", version, at=10)
    world.see()
    assert [v for _, v in world.topic] == [1, 2, 3]


def test_a_start_makes_what_was_created_before_baseline() -> None:
    world = World(baseline=100)
    for version, at in ((1, 50), (2, 90), (3, 110), (4, 120)):
        world.commit("a", version, at=at)
    world.see(after=100)
    assert world.topic == [("a", 3), ("a", 4)]


def test_a_gap_directly_above_the_start_is_waited_for() -> None:
    world = World(Rules(backoff_base=100), baseline=100)
    for version, at in ((1, 50), (2, 90), (4, 120)):
        world.commit("a", version, at=at)
    world.see(after=100, now=1000)
    assert world.topic == []
    assert world.holds["a"].first_missing == 3
    world.commit("a", 3, at=110)
    world.due(1100)
    assert world.topic == [("a", 3), ("a", 4)]


def test_times_in_another_order_than_versions_around_the_start() -> None:
    world = World(baseline=100)
    for version, at in ((1, 50), (2, 105), (3, 95), (4, 120)):
        world.commit("a", version, at=at)
    world.see(after=100)
    assert world.topic == [("a", 2), ("a", 4)]


def test_what_was_created_before_the_start_is_not_late_where_it_was_skipped() -> None:
    world = World(Rules(max_backoff=1, backoff_base=100), baseline=100)
    world.commit("a", 2, at=120)
    world.see(after=100, now=1000)
    world.skip("a")
    world.commit("a", 1, at=90)
    world.see(everything=True)
    assert (world.topic, world.late) == ([("a", 2)], [])


def test_an_aggregate_without_any_old_event_begins_at_its_first_version() -> None:
    world = World(Rules(backoff_base=100), baseline=100)
    world.commit("a", 2, at=120)
    world.see(after=100, now=1000)
    assert world.holds["a"].first_missing == 1


def test_first_version_zero() -> None:
    world = World(Rules(first_version=0))
    world.commit("a", 0, at=1)
    world.commit("a", 1, at=2)
    world.see()
    assert world.topic == [("a", 0), ("a", 1)]


def test_a_version_below_the_first_is_refused_once() -> None:
    world = World()
    world.commit("a", 0, at=1)
    world.commit("a", -3, at=1)
    world.commit("a", 1, at=2)
    world.see()
    world.see(everything=True)
    assert world.topic == [("a", 1)]
    assert world.refused == [("a", -3), ("a", 0)]
    assert world.counts.refused == 2


def test_a_version_below_the_first_from_before_the_start_is_baseline() -> None:
    world = World(baseline=100)
    world.commit("a", 0, at=90)
    world.commit("a", 1, at=110)
    world.see(everything=True)
    assert (world.topic, world.refused, world.counts.baseline) == ([("a", 1)], [], 1)


def test_a_second_row_of_one_version_is_refused_where_the_table_allows_it() -> None:
    rows = table([("a", 1, 10), ("a", 1, 11), ("a", 2, 12)])

    def by_time(some: pa.Table) -> list[bytes]:
        return [str(created).encode() for created in values(some, "create_time")]

    def all_alike(some: pa.Table) -> list[bytes]:
        return [b"same"] * some.num_rows

    for contents_of, expected in ((None, None), (by_time, [11]), (all_alike, None)):
        rules = Rules(contents_of=contents_of)
        decision = admission.Plan(rows, Known(), rules, now=0).decide(table([]))
        assert values(decision.events, "create_time") == [10, 12]
        refused = decision.refused and values(decision.refused[0], "create_time")
        assert refused == expected
        assert decision.counts.duplicates == (expected is None)
        if decision.refused is not None:
            assert "the table has this version more than once" in decision.refused[1][0]


def test_a_row_of_a_version_that_was_published_may_be_the_only_one_that_the_table_has() -> None:
    """The published row was deleted, and another one inserted; or it was made anonymous."""
    rules = Rules(contents_of=lambda some: [b"another"] * some.num_rows)
    known = Known(last={"a": 1}, contents={("a", 1): {b"published"}}, times={"a": 10 << 1 | 1})
    for lone, created, refused in (((), 10, 1), ([("a", 1)], 11, 1), ([("a", 1)], 10, 0)):
        known.lone = lone
        rows = table([("a", 1, created)])
        decision = admission.Plan(rows, known, rules, now=0).decide(table([]))
        reasons = [] if decision.refused is None else decision.refused[1]
        assert len(reasons) == refused
        assert all("another event of this version was published before" in r for r in reasons)
        assert "more than once" not in str(reasons)
        assert decision.counts.duplicates == 1 - refused


def test_a_gap_is_not_skipped_while_a_transaction_that_was_open_then_is_open() -> None:
    world = World(Rules(max_backoff=2, backoff_base=100))
    world.commit("a", 2, at=10)
    world.see(now=1000)
    world.open_since = 900
    for _ in range(10):
        world.later(1000)
    assert not world.gaps
    world.open_since = 1100  # another one, which began after the gap was seen
    world.later(1000)
    assert [(g.from_version, g.to_version) for g in world.gaps] == [(1, 1)]
    assert world.topic == [("a", 2)]


def test_a_late_event_in_the_batch_of_another_skip_is_late_once() -> None:
    world = World(Rules(max_backoff=1, backoff_base=100))
    world.commit("a", 2, at=10)
    world.commit("a", 4, at=11)
    world.see(now=1000)
    world.later(100)  # 1 is skipped, 3 is held
    world.commit("a", 1, at=50)
    world.commit("a", 5, at=51)
    world.see(after=20, now=2000)  # 1 is late, 3 is skipped
    assert world.late == [("a", 1)]
    assert world.skipped["a"] == [(3, 3)]
    world.see(everything=True, now=3000)
    assert world.late == [("a", 1)]


def test_a_look_before_its_time_finds_what_is_there_and_costs_no_attempt() -> None:
    world = World(Rules(max_backoff=1, backoff_base=1000))
    world.commit("a", 2, at=10)
    world.see(now=1000)
    world.look("a")
    assert world.holds["a"].attempts == 0
    assert not world.gaps
    world.commit("a", 1, at=5)
    world.look("a")
    assert world.topic == [("a", 1), ("a", 2)]
    assert not world.holds


def test_a_gap_is_given_up_when_somebody_asks_for_it() -> None:
    world = World()
    world.commit("a", 1, at=9)
    world.commit("a", 4, at=10)
    world.see(now=1000)
    world.skip("a")
    (gap,) = world.gaps
    assert (gap.from_version, gap.to_version, gap.reason) == (2, 3, "requested")
    assert world.topic == [("a", 1), ("a", 4)]


def test_what_a_recount_does_not_know_is_what_was_never_decided() -> None:
    world = World(Rules(max_backoff=1, backoff_base=100), baseline=5)
    world.commit("old", 1, at=4)
    world.commit("a", 1, at=10)
    world.commit("held", 2, at=10)
    world.commit("skipped", 2, at=10)
    world.commit("refused", 0, at=10)
    world.see(now=1000)
    world.skip("skipped")
    keys = [
        ("old", 1, 4),
        ("a", 1, 10),
        ("a", 2, 11),
        ("a", 3, 12),
        ("a", 5, 12),
        ("held", 2, 10),
        ("held", 3, 11),
        ("new", 1, 11),
        ("skipped", 1, 9),
        ("skipped", 2, 10),
        ("zero", 0, 10),
        ("refused", 0, 10),
    ]
    (batch,) = table(keys).select(["aggregate_id", "version", "create_time"]).to_batches()
    found = admission.unknown(batch, world.known(), world.rules)
    assert {(r.aggregate_id, r.first, r.last) for r in found} == {
        ("a", 2, 3),
        ("a", 5, 5),
        ("held", 3, 3),
        ("new", 1, 1),
        ("skipped", 1, 1),
        ("zero", 0, 0),
    }


def test_more_events_than_one_batch_may_fetch_come_in_several() -> None:
    world = World(Rules(backoff_base=100), fetch_rows=10)
    world.commit("a", 1, at=1)
    for version in range(3, 40):
        world.commit("a", version, at=version)
    world.see(now=1000)
    world.commit("a", 2, at=2)
    now = 1100
    while world.holds:
        world.due(now)
        now += 1
    assert [v for _, v in world.topic] == list(range(1, 40))
    assert world.counts.gaps_opened == 1


def test_what_was_seen_above_a_gap_and_is_gone_ends_the_hold() -> None:
    world = World(Rules(max_backoff=1, backoff_base=100))
    world.commit("a", 2, at=10)
    world.see(now=1000)
    world.delete("a", 2)
    world.due(1100)
    assert not world.holds
    assert world.counts.gaps_vanished == 1


def test_nothing_is_decided_for_no_rows() -> None:
    empty = EVENTS.empty_table()
    decision = admission.Plan(empty, Known(), Rules(), now=0).decide(empty)
    assert not decision.publishes
    assert isinstance(decision.events, pa.Table)


def test_a_version_written_anew_is_refused_once_and_what_follows_it_flows() -> None:
    world = World()
    for version in (1, 2, 3):
        world.commit("a", version, at=version)
    world.see()
    world.commit("a", 2, at=10)
    world.commit("a", 3, at=11)
    decision = world.see(after=5)
    assert decision.counts.conflicts == decision.counts.refused == 2
    assert decision.counts.duplicates == 0
    assert decision.refused is not None
    reasons = decision.refused[1]
    assert all(reason.startswith(f"{CONFLICT}: ") for reason in reasons)
    assert all("1970-01-01T00:00:00.000003Z" in reason for reason in reasons)
    world.commit("a", 4, at=12)
    world.see()
    assert world.counts.conflicts == 2
    assert world.topic == [("a", 1), ("a", 2), ("a", 3), ("a", 4)]


def test_the_last_version_written_anew_with_an_earlier_time_is_refused_once() -> None:
    world = World()
    for version in (1, 2, 3):
        world.commit("a", version, at=version * 10)
    world.see()
    world.commit("a", 3, at=25)
    world.see()
    world.see()
    assert world.counts.conflicts == 1
    assert world.refused == [("a", 3)]


def rewritten_world() -> World:
    """Versions 1 to 5 are published, the last at 5; the store was restored to version 2."""
    world = World()
    for version in range(1, 6):
        world.commit("a", version, at=version)
    world.see()
    for version in (3, 4, 5):
        world.delete("a", version)
    return world


def test_two_versions_written_anew_at_one_time_are_refused_on_both_sides_of_a_transaction() -> None:
    world = rewritten_world()
    world.commit("a", 4, at=10)
    world.see(after=5)
    world.commit("a", 5, at=10)
    world.see(after=5)
    world.see(after=5)
    assert world.refused == [("a", 4), ("a", 5)]
    assert world.counts.conflicts == 2


def test_a_version_written_anew_is_refused_though_newer_ones_were_read_before() -> None:
    world = rewritten_world()
    world.commit("a", 5, at=12)
    world.see(after=5)
    world.commit("a", 6, at=13)
    world.see(after=5)
    world.commit("a", 3, at=10)
    world.commit("a", 4, at=11)
    keys = [("a", 3, 10), ("a", 4, 11), ("a", 5, 12), ("a", 6, 13), ("a", 2, 2)]
    (batch,) = table(keys).select(["aggregate_id", "version", "create_time"]).to_batches()
    found = admission.unknown(batch, world.known(), world.rules)
    assert [(r.first, r.last) for r in found] == [(3, 4)]
    for _ in range(2):
        world.see(everything=True)
    assert world.refused == [("a", 5), ("a", 3), ("a", 4)]
    assert world.topic[-1] == ("a", 6)


def test_a_late_event_beside_versions_written_anew_is_published_once() -> None:
    world = World(Rules(max_backoff=1, backoff_base=10))
    for version in (1, 3, 4):
        world.commit("a", version, at=version)
    world.see(now=100)
    world.later(1000)
    world.commit("a", 4, at=10)
    world.see(now=2000)
    world.commit("a", 2, at=12)
    for _ in range(2):
        world.see(now=2000)
    assert world.late == [("a", 2)]
    assert world.refused == [("a", 4)]


def test_a_version_is_refused_again_after_the_store_was_restored_again() -> None:
    world = rewritten_world()
    for at in (10, 20):
        for version in (4, 5):
            world.commit("a", version, at=at)
            world.see(after=5)
            world.see(after=5)
    assert world.refused == [("a", 4), ("a", 5)] * 2


def test_a_version_written_anew_is_refused_behind_newer_ones_that_an_old_hold_fetched() -> None:
    """Version 3 waited when the store was restored, and nothing else tells that it was."""
    world = World(Rules(backoff_base=10))
    world.commit("a", 1, at=1)
    world.commit("a", 3, at=3)
    world.see(now=5)
    world.store.clear()
    for version in (1, 2):
        world.commit("a", version, at=version + 20)
    world.later(1000)
    for _ in range(2):
        world.see(after=5)
    assert world.topic == [("a", 1), ("a", 2)]
    assert world.refused == [("a", 1)]


def test_the_same_rows_in_any_order_of_times_are_never_conflicts() -> None:
    """Commits in reverse order, a skipped gap whose event turns up, a baseline."""
    world = World(Rules(max_backoff=1, backoff_base=10), baseline=5)
    world.commit("reversed", 2, at=10)
    world.commit("reversed", 1, at=20)
    world.commit("skipped", 1, at=10)
    world.commit("skipped", 3, at=12)
    world.commit("old", 1, at=7)
    world.commit("old", 2, at=4)
    world.see(now=100)
    world.later(1000)
    world.commit("skipped", 2, at=50)
    for _ in range(2):
        world.see(now=2000)
    assert ("skipped", 2) in world.late
    assert world.counts.conflicts == 0


def test_a_recount_finds_the_conflicts_and_no_duplicates() -> None:
    world = World()
    for version in (1, 2):
        world.commit("a", version, at=version)
    world.see()
    keys = [("a", 1, 1), ("a", 2, 9), ("a", 1, 8)]
    (batch,) = table(keys).select(["aggregate_id", "version", "create_time"]).to_batches()
    found = admission.unknown(batch, world.known(), world.rules)
    assert [(r.first, r.last) for r in found] == [(1, 2)]
    (batch,) = table(keys[:1]).select(["aggregate_id", "version", "create_time"]).to_batches()
    assert admission.unknown(batch, world.known(), world.rules) == []


def test_an_hour_that_is_lived_twice_makes_no_conflict() -> None:
    """The row is read as of the second time, an hour after the first."""
    world = World(Rules(repeated=((10_000, 3_600),)))
    world.commit("a", 1, at=9_000)
    world.see()
    world.commit("a", 1, at=12_600)
    world.see()
    assert world.counts.conflicts == 0
    assert world.counts.duplicates == 1
    world.commit("a", 1, at=13_601)
    world.see()
    assert world.counts.conflicts == 1


@pytest.mark.parametrize("start", [9_000, 12_000])
def test_a_row_of_an_hour_lived_twice_is_not_before_the_start(start: int) -> None:
    """Read by its key it has the time of the first pass, and was dropped as older than the start:
    by the backtrack for ever, and by the recount, which counted it."""
    rules = Rules(repeated=((10_000, 3_600),))
    known = Known(last={"a": 1}, baseline=start)
    plan = admission.Plan(table([("a", 3, 13_500)]), known, rules, now=0)
    first_pass = 13_000 - 3_600
    of_backtrack = plan.decide(table([("a", 2, first_pass)])).events
    assert of_backtrack.column("version").to_pylist() == [2, 3]
    (keys,) = table([("a", 2, 13_000)]).to_batches()
    assert admission.unknown(keys, known, rules) == [VersionRange("a", 2, 2)]
    plan = admission.Plan(table([("a", 2, first_pass)]), known, rules, now=0)
    assert plan.decide(table([])).events.num_rows == 1


def test_rows_of_a_time_that_was_not_kept_are_no_conflicts() -> None:
    rows, empty = table([("a", 1, 10), ("a", 2, 30)]), table([])
    known = Known(last={"a": 5})
    decided = admission.Plan(rows, known, Rules(), now=0).decide(empty)
    assert decided.counts.conflicts == 0
    known = Known(last={"a": 5}, times_since=20)
    decided = admission.Plan(rows, known, Rules(), now=0).decide(empty)
    assert decided.counts.conflicts == 1
    without = Rules(times_last=False)
    decided = admission.Plan(rows, known, without, now=0).decide(empty)
    assert decided.counts.conflicts == 0


@pytest.mark.parametrize(
    ("rows", "rest"),
    [
        ([], [VersionRange("a", 2, 3)]),  # of nothing above the gap is known whether it is there
        ([("a", 4, 9)], [VersionRange("a", 2, 3)]),  # nor what lies between
    ],
)
def test_how_far_a_gap_goes_is_not_known_while_what_follows_was_not_read(
    rows: list[tuple[str, int, int]], rest: list[VersionRange]
) -> None:
    """It was forgotten with the versions above it, or skipped together with some of them."""
    rules = Rules(max_backoff=1)
    hold = Hold("a", 1, 4, first_seen=5, attempts=9, next_attempt=5, since=5)
    known = Known(holds={"a": hold})
    planned = admission.Plan(table(rows), known, rules, 1_000_000_000, retry=["a"])
    decision = planned.decide(EVENTS.empty_table(), rest)
    assert decision.holds == {"a": hold}
    assert not decision.gaps
    assert decision.counts.gaps_vanished == 0
