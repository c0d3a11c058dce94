"""What admission is configured by, what it decides, and what it counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pyarrow as pa

from eventpub.admission.model import SkippedGap
from eventpub.admission.state import Hold, Rewritten, Versions

CONFLICT = "admission.version_conflict"
"""Begins the reason of a row whose version was published as another event."""


CLOCK_STEP = 1_000_000
"""µs by which the database's clock may go back without a word."""


@dataclass(frozen=True)
class Rules:
    """The configuration that admission depends on; durations in microseconds.

    Attributes:
        first_version: the version that an aggregate starts with, 0 or 1.
        max_backoff: attempts before a gap is skipped.
        backoff_base: wait before the first attempt; it doubles with each.
        late: what happens to an event of a skipped gap.
        backtrack: False admits whatever is above the last version: loses events, for measuring.
        contents_of: of each of some rows what tells it from another of its version; None: the event
            table itself refuses a second row of one version.
        times_last: whether a row keeps its `create_time`: then one of a published version with
            another time is another event.
        repeated: where local times are lived twice: from which instant on, and by how much the
            clocks went back there, µs.
    """

    first_version: int = 1
    max_backoff: int = 8
    backoff_base: int = 250_000
    late: Literal["publish", "divert", "drop"] = "publish"
    backtrack: bool = True
    contents_of: Callable[[pa.Table], list[bytes]] | None = None
    times_last: bool = True
    repeated: tuple[tuple[int, int], ...] = ()

    def steady(self, created: np.ndarray) -> np.ndarray:
        """Times that do not depend on the window in which a row was read.

        A local time that is lived twice is read as the first or the second: here as the first.
        """
        if self.repeated and len(created):
            low, high = created.min(), created.max()
            for change, back in self.repeated:
                if change <= high and low < change + back:
                    again = (created >= change) & (created < change + back)
                    created = np.where(again, created - back, created)
        return created

    def next_attempt(self, now: int, attempts: int) -> int:
        """When a gap is looked for again after so many attempts in vain."""
        return now + (self.backoff_base << attempts)

    @property
    def longest_hold(self) -> int:
        """From the first sight of a gap to its skip."""
        return self.backoff_base * ((1 << self.max_backoff) - 1)


@dataclass
class Counts:
    """What happened to the rows of a batch; each row counts once in one of the first group."""

    rows: int = 0
    admitted: int = 0
    duplicates: int = 0
    held: int = 0
    baseline: int = 0
    refused: int = 0
    late: int = 0

    backtracked: int = 0
    gaps_opened: int = 0
    gaps_filled: int = 0
    gaps_skipped: int = 0
    gaps_vanished: int = 0
    conflicts: int = 0
    without_identity: int = 0
    """Rows that are no event, and of no aggregate: passed over when they were read."""

    def add(self, other: Counts) -> None:
        """Add another batch's counts to these."""
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass
class Decision:
    """What is published, and what is remembered once it is.

    Attributes:
        events: the admitted events in the order of publishing.
        late: which of `events` belong to a gap that was skipped before; None: none does.
        diverted: late events for the topic of late events, where the configuration says so.
        gaps: gaps that are given up with this batch.
        last: new last version per aggregate.
        times: per aggregate of `last`, when its rows were created; see `Known`.
        holds: holds that were opened or changed; None: closed.
        skipped: new skipped ranges per aggregate.
        rewritten: per aggregate what is known after it of versions that were written anew.
        refused: rows that are no event, for the topic of dead letters, with the reason of each.
        counts: for metrics.
    """

    events: pa.Table
    late: np.ndarray | None = None
    diverted: pa.Table | None = None
    gaps: list[SkippedGap] = field(default_factory=list)
    last: Mapping[str, int] = field(default_factory=dict)
    times: Mapping[str, int] = field(default_factory=dict)
    holds: dict[str, Hold | None] = field(default_factory=dict)
    skipped: dict[str, list[Versions]] = field(default_factory=dict)
    rewritten: dict[str, Rewritten] = field(default_factory=dict)
    refused: tuple[pa.Table, list[str]] | None = None
    counts: Counts = field(default_factory=Counts)

    @property
    def publishes(self) -> bool:
        """Whether the topics change at all."""
        return bool(self.events.num_rows or self.gaps or self.refused or self.diverted is not None)
