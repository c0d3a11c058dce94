"""Where a shard waits with one of its aggregates: what the hold begins with."""

from __future__ import annotations

from eventpub.admission.model import Decision, Hold
from eventpub.shard.publishing import with_unpublished
from tests.admission.world import World


def hold_of(whole: Decision, published: Decision) -> Hold:
    """What `a` waits for after a batch of which only the first rows go out."""
    hold = whole.holds["a"]
    assert hold is not None
    return with_unpublished(hold, whole, published)


def scene(baseline: int | None) -> World:
    """Version 4 is missing; 1 was created last, since the clock was set back after it."""
    world = World(baseline=baseline)
    for version, at in ((2, 50), (3, 60), (5, 61), (1, 90)):
        world.commit("a", version, at)
    return world


def test_a_hold_begins_with_what_lies_below_the_gap_and_is_not_out_yet() -> None:
    hold = hold_of(scene(None).see(), scene(None).see(upto=50))
    assert (hold.first_missing, hold.seen, hold.catching_up) == (3, 5, True)


def test_a_hold_does_not_wait_for_what_counts_as_baseline_below_what_goes_out() -> None:
    published = scene(50).see(after=50, upto=60)
    assert published.last == {"a": 3}
    hold = hold_of(scene(50).see(after=50), published)
    assert (hold.first_missing, hold.seen, hold.catching_up) == (4, 5, False)
