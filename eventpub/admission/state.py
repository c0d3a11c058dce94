"""What a shard remembers of its aggregates, as plain values.

The `index` room keeps these in RocksDB, `admission` decides on them, and both must agree with what
stands on the topic: the topic is the truth, these are a cache of it. All times are UTC
microseconds on the database's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

Versions = tuple[int, int]
"""First and last version of a run, both included."""


@dataclass(frozen=True)
class Hold:
    """One aggregate that waits for a version that is not visible yet.

    Attributes:
        aggregate_id: the aggregate; no other waits for it.
        first_missing: the version it waits for, one above the last that was published.
        seen: the highest version that a window has shown; nothing above it is published.
        first_seen: when the gap was first seen. The wait is measured from here.
        attempts: how often the missing version was looked for again, in vain.
        next_attempt: when it is looked for next.
        since: the smallest `create_time` among the events held: a reader that has lost its
            index finds the hold again by reading the store from just before here.
        catching_up: nothing is missing; more events were waiting than one batch may fetch.
    """

    aggregate_id: str
    first_missing: int
    seen: int
    first_seen: int
    attempts: int
    next_attempt: int
    since: int
    catching_up: bool = False


@dataclass
class Known:
    """The index's answer for some aggregates.

    Attributes:
        last: the last version that was published, skipped or is baseline; absent: never seen.
        holds: the open holds.
        skipped: per aggregate the skipped versions that have not turned up since.
        baseline: events created at or before this time count as published; None: there are none.
        refused: per aggregate the versions below the first that were dead-lettered already.
    """

    last: Mapping[str, int] = field(default_factory=dict)
    holds: Mapping[str, Hold] = field(default_factory=dict)
    skipped: Mapping[str, Sequence[Versions]] = field(default_factory=dict)
    baseline: int | None = None
    refused: Mapping[str, Sequence[int]] = field(default_factory=dict)


def in_ranges(version: int, ranges: Iterable[Versions]) -> bool:
    """Whether a version lies in one of the ranges."""
    return any(first <= version <= last for first, last in ranges)


def without(version: int, ranges: Iterable[Versions]) -> list[Versions]:
    """The ranges less one version."""
    left: list[Versions] = []
    for first, last in ranges:
        if not first <= version <= last:
            left.append((first, last))
            continue
        if first < version:
            left.append((first, version - 1))
        if version < last:
            left.append((version + 1, last))
    return left


def after_fold(hold: Hold, last: int, now: int) -> Hold | None:
    """A hold after the topic has shown that `last` is published already.

    Returns None when nothing is left to wait for.
    """
    if last < hold.first_missing:
        return hold
    if last >= hold.seen:
        return None
    return replace(
        hold,
        first_missing=last + 1,
        first_seen=now,
        attempts=0,
        next_attempt=now,
        catching_up=True,
    )
