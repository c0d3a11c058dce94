"""What a shard remembers of its aggregates, as plain values.

The `index` package keeps these in RocksDB, `admission` decides on them, and both must agree with
what stands on the topic: the topic is the truth, these are a cache of it. All times are UTC
microseconds on the database's clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat

import numpy as np

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


class Numbers(Mapping[str, int]):
    """A number of each of many aggregates, as arrays: a dictionary only where one is asked for.

    There are as many as a transaction has rows, and nearly all are wanted together.

    Args:
        names: the aggregates, each once.
        numbers: of each, int64.
        there: which of them have one; None: all have.
    """

    def __init__(
        self, names: list[str], numbers: np.ndarray, there: np.ndarray | None = None
    ) -> None:
        self.names = names
        self.numbers = numbers
        self._there = there
        self._dictionary: dict[str, int] | None = None

    def of(self, names: list[str], otherwise: int) -> np.ndarray:
        """The number of each of some aggregates, in a new array: fast for the first of `names`."""
        count = len(names)
        if self.names is not names and self.names[:count] != names:
            return _looked_up(names, self._found, otherwise)
        found: np.ndarray = self.numbers[:count].copy()
        if self._there is not None:
            found[~self._there[:count]] = otherwise
        return found

    @property
    def _found(self) -> dict[str, int]:
        if self._dictionary is None:
            found = dict(zip(self.names, self.numbers.tolist(), strict=True))
            if self._there is not None:
                for number in np.flatnonzero(~self._there).tolist():
                    del found[self.names[number]]
            self._dictionary = found
        return self._dictionary

    def __getitem__(self, aggregate_id: str) -> int:
        return self._found[aggregate_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def numbers_of(names: list[str], known: Mapping[str, int], otherwise: int) -> np.ndarray:
    """The number of each of some aggregates, in a new array."""
    if isinstance(known, Numbers):
        return known.of(names, otherwise)
    return _looked_up(names, known, otherwise)


def _looked_up(names: list[str], known: Mapping[str, int], otherwise: int) -> np.ndarray:
    return np.fromiter(map(known.get, names, repeat(otherwise)), np.int64, len(names))


@dataclass
class Known:
    """The index's answer for some aggregates.

    Attributes:
        last: the last version that was published, skipped or is baseline; absent: never seen.
        holds: the open holds.
        skipped: per aggregate the skipped versions that have not turned up since.
        baseline: events created at or before this time count as published; None: there are none.
        refused: per aggregate the versions below the first that were dead-lettered already.
        times: per aggregate the highest `create_time` of the rows that were decided, as `Seen`
            packs it; absent: not known.
        rewritten: per aggregate what was written anew; absent: nothing that is known.
        contents: of some versions up to the last, what tells the rows that were published or
            dead-lettered from others, see `Rules.contents_of`; absent: not known.
        times_since: rows created at or before, µs, are never taken for other events of versions
            that were published: their times were not kept, or were read in another way. None:
            all were.
    """

    last: Mapping[str, int] = field(default_factory=dict)
    holds: Mapping[str, Hold] = field(default_factory=dict)
    skipped: Mapping[str, Sequence[Versions]] = field(default_factory=dict)
    baseline: int | None = None
    refused: Mapping[str, Sequence[int]] = field(default_factory=dict)
    times: Mapping[str, int] = field(default_factory=dict)
    times_since: int | None = None
    rewritten: Mapping[str, Rewritten] = field(default_factory=dict)
    contents: Mapping[tuple[str, int], set[bytes]] = field(default_factory=dict)


NO_TIME = -(1 << 63)
"""`Seen.packed` of an aggregate of which no row was decided."""


@dataclass(frozen=True)
class Seen:
    """What tells two events of one version apart: when an aggregate's rows were created.

    Packed into one integer, since there is one for each aggregate of a batch.

    Attributes:
        newest: the highest `create_time` of the rows that were published or dead-lettered, µs.
        is_of_last: whether that is the row of the aggregate's last version.
    """

    newest: int
    is_of_last: bool

    def packed(self) -> int:
        """As one integer."""
        return self.newest << 1 | self.is_of_last

    @staticmethod
    def unpacked(packed: int) -> Seen:
        """What `packed` made."""
        return Seen(packed >> 1, bool(packed & 1))

    def raised(self, created: int) -> Seen:
        """After another row, which is not that of the last version."""
        return Seen(created, False) if created > self.newest else self

    def differs(self, created: int, *, is_last: bool) -> bool:
        """Whether a row of a version up to the last is not the one that was published.

        All rows that were decided were created by `newest`; a row that was created before may be
        any of them, unless its version is the one whose time is known.
        """
        return created > self.newest or (is_last and self.is_of_last and created != self.newest)


@dataclass(frozen=True)
class Rewritten:
    """Published versions of an aggregate that are written anew, since its newest known conflict.

    `Seen` alone would miss the second of two such rows with one `create_time`, and each that is
    read after a newer one.

    Attributes:
        since: the highest `create_time` of the rows that were decided before that conflict, µs.
        last: the last version then.
        decided: those up to `last` of which a row that was created after `since` was decided.
    """

    since: int
    last: int
    decided: tuple[Versions, ...] = ()

    def differs(self, version: int, created: int) -> bool:
        """Whether a row is not the one that was published: none up to `last` is so new."""
        return self.concerns(version, created) and not in_ranges(version, self.decided)

    def concerns(self, version: int, created: int) -> bool:
        """Whether a row, once it is decided, belongs to `decided`."""
        return version <= self.last and created > self.since

    def plus(self, version: int, created: int) -> Rewritten:
        """After another row was decided."""
        if not self.differs(version, created):
            return self
        joined: list[Versions] = []
        for first, last in sorted([*self.decided, (version, version)]):
            if joined and first == joined[-1][1] + 1:
                joined[-1] = joined[-1][0], last
            else:
                joined.append((first, last))
        return replace(self, decided=tuple(joined))


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
