"""What a comparison of the event table with the topic found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from eventpub.config import Read, format_time
from eventpub.publisher.workers import MOST_EVENTS

if TYPE_CHECKING:
    from eventpub.sources.mysql import EventStore

NO_TIME = -(1 << 63)
"""µs in place of an unreadable time."""

SHOWN = 20

KINDS = ("missing", "repeated", "out_of_order", "altered", "extra", "doubled", "held")
"""Kinds of findings. "held" is no difference: such events wait for a version that is not in the
store, and no longer than the publisher does.
"""

GRACE = 10_000_000
"""µs that an event may wait beyond `read.delay` and `read.max_wait`."""


@dataclass(frozen=True)
class Difference:
    """One event that differs between store and topic; `create_time` is µs, or NO_TIME."""

    aggregate_id: str
    version: int | None
    create_time: int
    partition: int | None = None
    offset: int | None = None
    note: str = ""

    @property
    def name(self) -> str:
        if self.version is None:
            return self.aggregate_id or "a record without a key"
        return f"{self.aggregate_id}/{self.version}"

    def to_dict(self) -> dict[str, Any]:
        time = None if self.create_time == NO_TIME else format_time(self.create_time)
        return vars(self) | {"create_time": time}


@dataclass(frozen=True)
class Behind:
    """Events after the publisher's position that are due; `seconds`: age of the oldest, or 0."""

    events: int = 0
    has_more: bool = False
    seconds: float = 0.0
    is_paused: bool = False

    @property
    def count(self) -> str:
        return f"more than {self.events:,}" if self.has_more else f"{self.events:,}"

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {"seconds": round(self.seconds, 1)}


@dataclass
class Verdict:
    """The result of a comparison.

    Attributes:
        first, last: the compared range of `create_time`, both inclusive, µs.
        events: rows of the store in the range.
        records: records of events in the range, including late ones.
        accounted: rows absent from the topic for a recorded reason, and records exempt from the
            order: "late", "dead", "diverted", "dropped" (late events, by configuration), "arrived"
            (committed or published during the comparison), "without_identity" (rows without
            aggregate or version, which are passed over).
        behind: what is due; None: an end of the range was given, or there is no state.
    """

    first: int
    last: int
    events: int = 0
    records: int = 0
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    examples: dict[str, list[Difference]] = field(default_factory=lambda: {k: [] for k in KINDS})
    accounted: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("late", "dead", "diverted", "dropped", "arrived", "without_identity"), 0
        )
    )
    skips: int = 0
    notes: list[str] = field(default_factory=list)
    behind: Behind | None = None

    @property
    def is_equal(self) -> bool:
        return not any(count for kind, count in self.counts.items() if kind != "held")

    @property
    def absent(self) -> int:
        sides = sum(self.accounted[name] for name in ("dead", "diverted", "dropped"))
        return self.counts["missing"] + sides

    @property
    def is_behind(self) -> bool:
        return self.behind is not None and self.behind.events > 0

    @property
    def ok(self) -> bool:
        return self.is_equal and not self.is_behind

    def found(self, kind: str, count: int, examples: Sequence[Difference]) -> None:
        self.counts[kind] += count
        if examples:
            known = [*self.examples[kind], *examples]
            known.sort(key=lambda d: (d.create_time, d.aggregate_id, d.version or 0))
            self.examples[kind] = known[:SHOWN]

    def to_dict(self) -> dict[str, Any]:
        return {
            "from": format_time(self.first) if self.first > 0 else None,
            "to": format_time(self.last),
            "events": self.events,
            "records": self.records,
            **self.counts,
            "accounted": self.accounted,
            "skips": self.skips,
            "examples": {k: [d.to_dict() for d in v] for k, v in self.examples.items()},
            "notes": self.notes,
            "behind": None if self.behind is None else self.behind.to_dict(),
        }


@dataclass(frozen=True)
class Progress:
    doing: str
    rows: int
    records: int
    done: float


def measure(
    store: EventStore, read: Read, progress: Mapping[str, Any], compared: int
) -> Behind | None:
    """The events that are due by now, after `compared`, µs; None if the state has no position."""
    if "position" not in progress:
        return None
    after, now = max(int(progress["position"]), compared), store.now()
    upto = now - read.delay - read.max_wait - GRACE
    events, oldest = 0, now
    # loops only where the clocks go back: a poll does not cross that
    while events <= MOST_EVENTS:
        poll = store.poll(after, 0, 1, at_most=upto)
        if poll.page_end is None:
            break
        events += store.counts([(after, poll.upper)], MOST_EVENTS + 1 - events)[0]
        oldest, after = min(oldest, poll.page_end), poll.upper
    return Behind(
        min(events, MOST_EVENTS),
        events > MOST_EVENTS,
        (now - oldest) / 1e6,
        bool(progress.get("is_paused")),
    )
