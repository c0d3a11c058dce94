"""Admission under any order of commits, windows, replays and waits.

The theorem: whatever commits late and however windows repeat, each aggregate's events come out in
ascending order, each once, and once nothing is held any more every version up to the highest that a
window has shown is on the topic, recorded as skipped, or was never committed.
"""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from eventpub.admission import Rules
from eventpub.admission.model import in_ranges
from tests.admission.world import World

_EVENTS = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.integers(1, 8),
        st.integers(1, 60),  # create_time
        st.integers(0, 80),  # when the transaction commits, in steps; late where it is large
    ),
    max_size=24,
    unique_by=lambda e: (e[0], e[1]),
)


@settings(max_examples=400)
@given(
    events=_EVENTS,
    windows=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    replays=st.sets(st.integers(0, 7)),
    max_backoff=st.integers(1, 4),
    fetch_rows=st.integers(1, 5),
)
def test_in_order_once_and_complete(
    events: list[tuple[str, int, int, int]],
    windows: list[int],
    replays: set[int],
    max_backoff: int,
    fetch_rows: int,
) -> None:
    world = World(Rules(max_backoff=max_backoff, backoff_base=5), fetch_rows=fetch_rows)
    waiting = sorted(events, key=lambda e: e[3])
    position, clock = 0, 0
    shown: dict[str, int] = defaultdict(int)

    def commit_until(time: int) -> None:
        while waiting and waiting[0][3] <= time:
            aggregate, version, created, _ = waiting.pop(0)
            world.commit(aggregate, version, created)

    def show(after: int, upto: int) -> None:
        for (aggregate, version), created in world.store.items():
            if after < created <= upto:
                shown[aggregate] = max(shown[aggregate], version)
        world.see(after=after, upto=upto, now=clock)

    for number, width in enumerate(windows):
        clock += width
        commit_until(clock)
        show(position, position + width)
        if number in replays:
            show(0, position + width)
        position += width
    commit_until(1 << 60)
    for _ in range(200):
        if not world.holds:
            break
        clock = max(clock, min(h.next_attempt for h in world.holds.values()))
        world.due(clock)
    assert not world.holds

    assert len(world.topic) == len(set(world.topic))
    assert world.counts.conflicts == 0
    assert set(world.topic) <= set(world.store)
    in_order = [key for key in world.topic if key not in world.late]
    for aggregate in "abc":
        versions = [v for a, v in in_order if a == aggregate]
        assert versions == sorted(versions)
        for version in range(1, shown[aggregate] + 1):
            published = (aggregate, version) in world.topic
            skipped = in_ranges(version, world.skipped.get(aggregate, []))
            assert published or skipped
    recorded = {(g.aggregate_id, g.from_version) for g in world.gaps}
    assert len(recorded) == len(world.gaps)
