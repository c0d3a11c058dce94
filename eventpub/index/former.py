"""What the indexes of another number of shards or partitions have known, put together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from eventpub.index.values import MISSING_MARKERS, Partition, flat_of, nested_of

_FLAGS = ("skips", "refusals", "rewrites")


def merged(
    former: Sequence[Mapping[str, Any] | None],
    own: Collection[Partition],
    baseline: int | None,
    settled: Callable[[int | None, int], int],
) -> dict[str, Any]:
    """The facts of an index that takes over what all of these know of its shard.

    Args:
        former: the facts of each; None: it is gone, and what it knew is read back from the topic.
        own: partitions that are the shard's.
        baseline: of a new index.
        settled: asked where some have forgotten more than others, with the position and the highest
            baseline: up to when all of them have published everything, µs.
    """
    there = [facts for facts in former if facts is not None]
    moved: dict[str, Any] = {}
    for name in ("offsets", "written", MISSING_MARKERS):
        found = (item for facts in there for item in flat_of(facts.get(name, {})))
        moved[name] = nested_of(
            {partition: known for partition, known in found if partition in own}
        )
    topics = [facts["topics"] for facts in there if "topics" in facts]
    if topics:
        moved["topics"] = {name: known for of in topics for name, known in of.items()}
    for name in _FLAGS:
        said = [facts[name] for facts in there if name in facts]
        if said:
            moved[name] = any(said)
    moved["contents"] = all(facts is not None and facts.get("contents") for facts in former)
    positions = [None if facts is None else facts.get("position") for facts in former]
    known = [position for position in positions if position is not None]
    if known and len(known) == len(positions):
        moved["position"] = min(known)
    of_each = [(facts or {}).get("baseline") or baseline or 0 for facts in former]
    lowest, highest = min(of_each, default=baseline or 0), max(of_each, default=baseline or 0)
    if lowest < highest:
        highest = max(lowest, min(highest, settled(moved.get("position"), highest)))
        moved["forgotten"] = of_each
    moved |= {"baseline": highest or None, "undecided": [False, 0, False]}
    return moved | {"times": _times(there)}


def _times(there: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Since when times are kept, and how they are read."""
    kept_by = [facts["times"] for facts in there if facts]  # else nothing was written there yet
    since = [t["since"] for t in kept_by if t["since"] is not None]
    read_as = {t["read_as"] for t in kept_by} or {None}
    return {
        "read_as": read_as.pop() if len(read_as) == 1 else "several",
        "since": max(since, default=None),
    }
