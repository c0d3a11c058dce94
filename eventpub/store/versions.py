"""What the versions of some rows say of how a table counts them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Versions:
    """Figures of some rows.

    Attributes:
        rows: how many have an aggregate and a version.
        without_identity: how many have none.
        lowest: of each aggregate.
        with_several: aggregates with several versions.
        with_holes: of these, those whose versions do not follow each other.
        are_distinct: whether no two aggregates have a version in common.
        are_whole: whether, of all aggregates together, none is left out between two.
    """

    rows: int
    without_identity: int
    lowest: list[int]
    with_several: int
    with_holes: int
    are_distinct: bool
    are_whole: bool

    @property
    def count_all_rows(self) -> bool:
        """Whether they number the rows of the table, not those of an aggregate."""
        aggregates = len(self.lowest)
        begin_later = sum(version > min(self.lowest) for version in self.lowest)
        is_sure = aggregates > 2 or (aggregates == 2 and self.are_whole)
        return is_sure and self.are_distinct and begin_later == aggregates - 1


def versions_of(rows: Iterable[Sequence[Any]]) -> Versions:
    """The figures of rows of an aggregate's columns and, last, the version."""
    found: dict[tuple[Any, ...], set[int]] = defaultdict(set)
    count = without = 0
    for *identity, version in rows:
        count += 1
        if version is None or None in identity:
            without += 1
        else:
            found[*identity,].add(int(version))
    several = [v for v in found.values() if len(v) > 1]
    every: set[int] = set().union(*found.values())
    return Versions(
        count - without,
        without,
        [min(v) for v in found.values()],
        len(several),
        sum(max(v) - min(v) + 1 != len(v) for v in several),
        len(every) == sum(map(len, found.values())),
        bool(every) and max(every) - min(every) + 1 == len(every),
    )
