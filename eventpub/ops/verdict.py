"""What a comparison of the event table with the topic found."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from eventpub.admission.model import Shard
from eventpub.config import format_time
from eventpub.ops.records import NO_TIME
from eventpub.ops.status import Behind

SHOWN = 20
"""Differences of a kind that are listed one by one."""

KINDS = ("missing", "repeated", "out_of_order", "altered", "extra", "doubled", "held")
"""What is counted. Events that are held are no difference: they wait for a version that is not in
the store, and no longer than the publisher does."""

_RESIDUES = 1_000_003
"""A prime: what is chosen by it does not depend on partitions and shards."""


@dataclass(frozen=True)
class Difference:
    """One event about which store and topic do not agree.

    Args:
        version: None for a record without a version that can be read.
        create_time: µs, or NO_TIME.
        partition, offset: where it is on the topic; None where it is not.
    """

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
class Sample:
    """One aggregate in `one_in`, chosen by hash, with all its rows and records."""

    one_in: int

    @property
    def share(self) -> float:
        return -(-_RESIDUES // self.one_in) / _RESIDUES

    @property
    def may_have_missed(self) -> int:
        """With this many faulty aggregates or fewer, it may be (by more than 5%) that none was
        compared; of more, at least one is with a confidence of 95%."""
        return math.floor(math.log(0.05) / math.log1p(-self.share))

    def chooses(self, key: bytes) -> bool:
        """Whether an aggregate is compared; the store computes the same (`shard`)."""
        return zlib.crc32(key) % _RESIDUES % self.one_in == 0

    @property
    def shard(self) -> Shard:
        """The same aggregates as a condition of the store's."""
        return Shard(0, self.one_in, _RESIDUES)

    def to_dict(self) -> dict[str, Any]:
        return {
            "one_in": self.one_in,
            "share": round(self.share, 6),
            "may_have_missed": self.may_have_missed,
            "confidence": 0.95,
        }


@dataclass
class Verdict:
    """What the comparison found.

    Attributes:
        first, last: the range of `create_time` that was compared, both included, µs.
        events: rows of the store in the range.
        records: records of events on the topic in the range, those marked late included.
        accounted: rows that are not on the topic for a recorded reason, and records exempt from
            the order: "late", "dead", "diverted", "dropped" (late events, by configuration),
            "arrived" (committed, or published, while we looked), "without_identity" (rows without
            an aggregate or a version, which are passed over).
        behind: what the publisher has not published yet; None where an end of the range was asked
            for, or there is no publisher's state.
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
    sample: Sample | None = None
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
            "sample": None if self.sample is None else self.sample.to_dict(),
            "behind": None if self.behind is None else self.behind.to_dict(),
        }


@dataclass(frozen=True)
class Progress:
    """How far a comparison is.

    Args:
        done: the part of the whole work, 0 to 1.
    """

    doing: str
    rows: int
    records: int
    done: float
