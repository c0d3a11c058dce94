"""What the versions of some rows say of how a table counts them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any


class Versions:
    """Figures of rows of an aggregate's columns and, last, the version.

    Attributes:
        without_identity: rows that have no aggregate or no version.
        lowest: of each aggregate.
        with_several: aggregates with several versions.
        with_holes: of these, those whose versions do not follow each other.
        count_all_rows: whether they number the rows of the table, not those of an aggregate.
    """

    def __init__(self, rows: Iterable[Sequence[Any]]) -> None:
        self.without_identity = 0
        found: dict[tuple[Any, ...], set[int]] = defaultdict(set)
        for row in rows:
            if None in row:
                self.without_identity += 1
            else:
                found[tuple(row[:-1])].add(int(row[-1]))
        every: set[int] = set().union(*found.values())
        several = [v for v in found.values() if len(v) > 1]
        self.lowest = [min(v) for v in found.values()]
        self.with_several = len(several)
        self.with_holes = sum(max(v) - min(v) + 1 != len(v) for v in several)
        are_distinct = len(every) == sum(map(len, found.values()))
        begin_later = sum(version > min(every) for version in self.lowest)
        # of two alone it is sure if none is left out between all of them
        is_sure = len(found) > 2 or (len(found) == 2 and max(every) - min(every) < len(every))
        self.count_all_rows = is_sure and are_distinct and begin_later == len(found) - 1
