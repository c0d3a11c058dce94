"""The transactions of a load: which events each appends, in which steps, and how it ends."""

from __future__ import annotations

import random
from bisect import bisect
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from tests.servers.connections import (
    TEXT_SIZE,
    TYPES,
    WriterConnection,
    aggregate_name,
    quoted,
    text_of,
)
from tests.servers.load import Load

_PAIR_OPEN_SECONDS = (0.05, 1.0)

_BEGIN, _COMMIT, ROLLBACK = b"BEGIN", b"COMMIT", b"ROLLBACK"


@dataclass(eq=False, slots=True)
class Transaction:
    """One, from its first step to its end."""

    steps: deque[tuple[float, bytes]]  # seconds after the first one, statement
    versions: dict[int, range]  # by the aggregate's number
    held: bool = False
    commits: bool = True
    refused: bool = False
    follower: Transaction | None = None  # begins inside this one and must end before it
    leader: Transaction | None = None
    connection: WriterConnection | None = None
    began: float = 0.0
    waits: bool = False  # for its follower
    done: bool = False
    committed: bool = False

    @property
    def events(self) -> int:
        """How many it appends."""
        return sum(map(len, self.versions.values()))


class Maker:
    """Makes them. No two that are open append to one aggregate, but for pairs.

    Args:
        load: what is to be done.

    Attributes:
        random: of the load.
        names: of the aggregates.
        last: of each aggregate.
        busy: aggregates of open transactions.
    """

    def __init__(self, load: Load) -> None:
        self.load = load
        self.random = random.Random(load.seed)
        self._text = text_of(self.random)
        columns = "(aggregate_id,version,event_type,payload)"
        self._insert = f"INSERT INTO {quoted(load.table)} {columns} VALUES "  # noqa: S608
        self.names = [aggregate_name(load.prefix, number) for number in range(load.aggregates)]
        self._weights: list[float] | None = None
        if load.zipf:
            each = (1 / number**load.zipf for number in range(1, load.aggregates + 1))
            self._weights = list(accumulate(each))
        self.last = [0] * load.aggregates
        self.busy: set[int] = set()

    def next(self) -> Transaction | None:
        """The next one; None: too many aggregates are busy."""
        load, chance = self.load, self.random.random()
        if chance < load.gap_fraction + load.reversed_fraction:
            return self._pair(commits=chance >= load.gap_fraction)
        events = self.random.randint(
            (load.events_per_transaction + 1) // 2, load.events_per_transaction * 3 // 2
        )
        versions = self._take(events)
        if versions is None:
            return None
        commits = self.random.random() >= load.rollback_fraction
        held = self.random.random() < load.open_fraction
        rows = [(number, version) for number, those in versions.items() for version in those]
        steps: deque[tuple[float, bytes]]
        if held:
            seconds = self.random.uniform(*load.open_seconds)
            half = len(rows) // 2
            steps = deque([(0.0, _BEGIN), (0.0, self.statement(rows[: half or 1]))])
            if rows[half or 1 :]:
                at_end = self.random.random() < 0.5
                moment = seconds if at_end else self.random.uniform(0.0, seconds)
                steps.append((moment, self.statement(rows[half or 1 :])))
            steps.append((seconds, _COMMIT if commits else ROLLBACK))
        elif commits:  # autocommit: one statement is the transaction
            steps = deque([(0.0, self.statement(rows))])
        else:
            steps = deque([(0.0, _BEGIN), (0.0, self.statement(rows)), (0.0, ROLLBACK)])
        return Transaction(steps, versions, held=held, commits=commits)

    def _pair(self, *, commits: bool) -> Transaction | None:
        """Versions of one aggregate in a transaction that ends after the one with the next."""
        first = self._take(self.random.randint(1, 3), at_most=1)
        if first is None:
            return None
        ((number, versions),) = first.items()
        later = range(versions.stop, versions.stop + self.random.randint(1, 3))
        follower = Transaction(
            deque([(0.0, self.statement([(number, version) for version in later]))]),
            {number: later},
        )
        seconds = self.random.uniform(*_PAIR_OPEN_SECONDS)
        leader = Transaction(
            deque(
                [
                    (0.0, _BEGIN),
                    (0.0, self.statement([(number, version) for version in versions])),
                    (seconds, _COMMIT if commits else ROLLBACK),
                ]
            ),
            first,
            held=True,
            commits=commits,
            follower=follower,
        )
        follower.leader = leader
        return leader

    def _take(self, events: int, at_most: int | None = None) -> dict[int, range] | None:
        """The next versions of aggregates that nobody uses; None where hardly any are free."""
        taken: dict[int, range] = {}
        tries = 0
        while events > 0:
            number = self._choose()
            if number in self.busy or number in taken:
                tries += 1
                if tries > 100:
                    return None
                continue
            count = events if at_most == 1 else min(events, 1 + int(self.random.random() * 3))
            taken[number] = range(self.last[number] + 1, self.last[number] + 1 + count)
            events -= count
        self.busy.update(taken)
        return taken

    def _choose(self) -> int:
        if self._weights is None:
            return int(self.random.random() * self.load.aggregates)
        return bisect(self._weights, self.random.random() * self._weights[-1])

    def statement(self, rows: Iterable[tuple[int, int]]) -> bytes:
        """Appends events, by the aggregates' numbers and their versions."""
        text, size, names = self._text, max(0, self.load.payload_bytes - 60), self.names
        space = TEXT_SIZE - size
        values = []
        for number, version in rows:
            name = names[number]
            start = (number * 7919 + version * 104_729) % space
            values.append(
                f"('{name}',{version},'{TYPES[(number + version) % len(TYPES)]}',"
                f'\'{{"order":"{name}","version":{version},'
                f'"note":"{text[start : start + size]}"}}\')'
            )
        return (self._insert + ",".join(values)).encode()
