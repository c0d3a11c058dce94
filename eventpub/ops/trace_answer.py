"""What is said of a traced event: its row, its records, the verdict and its reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from eventpub.admission import Hold, SkippedGap
from eventpub.ops.gaps import with_times
from eventpub.terminal import named_versions
from eventpub.times import format_time

Verdict: TypeAlias = Literal[
    "published",
    "held",
    "waiting",
    "skipped",
    "late",
    "dead",
    "baseline",
    "invalid",
    "missing",
    "unknown",
]
"""published: on the topic. late: published, diverted or dropped after its version was skipped.
dead: a dead letter. skipped: given up. baseline: created before the start, never published.
invalid: its row has no time by which it could be read. held: its aggregate waits for a version.
waiting: younger than what is read so far. missing: it is not where it should be. unknown: nothing
is known of it, or the time did not suffice."""

_ANSWERED = frozenset({"published", "late", "baseline"})
_YEAR_3000 = 32_503_680_000_000


@dataclass(frozen=True)
class Stored:
    """A row of the event table.

    Attributes:
        create_time: µs; None: it has none, or one that is no time.
        event_type: of the event.
        payload_bytes: size of its payload; None: it is NULL.
        others: further rows of its version.
    """

    create_time: int | None
    event_type: str
    payload_bytes: int | None
    others: tuple[Stored, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON-serializable; times are RFC 3339."""
        created = None if self.create_time is None else format_time(self.create_time)
        others = [other.to_dict() for other in self.others]
        return asdict(self) | {"create_time": created, "others": others}


@dataclass(frozen=True)
class Found:
    """A record of one of the publisher's topics.

    Attributes:
        topic, partition, offset: where it is.
        timestamp: of the record, ms.
        is_late: whether it is marked as late.
        reason: of a dead letter.
    """

    topic: str
    partition: int
    offset: int
    timestamp: int
    is_late: bool = False
    reason: str | None = None


@dataclass(frozen=True)
class Traced:
    """One version.

    Attributes:
        version: its number.
        verdict: where it is, in a word.
        note: the same in a sentence, where the word does not say all.
        stored: its row; None: the store has none.
        found: its records, in the order of the topics.
        hold: the hold of its aggregate, if this version waits or is waited for.
        skip: the recorded skip that it belongs to.
    """

    version: int
    verdict: Verdict
    note: str = ""
    stored: Stored | None = None
    found: tuple[Found, ...] = ()
    hold: Hold | None = None
    skip: SkippedGap | None = None

    @property
    def is_accounted_for(self) -> bool:
        """Whether nothing is left to be done: published, or not there, or not to be published."""
        return self.verdict in _ANSWERED or (self.verdict == "skipped" and self.stored is None)

    def to_dict(self) -> dict[str, Any]:
        """JSON-serializable; times are RFC 3339."""
        stored = None if self.stored is None else self.stored.to_dict()
        return {
            "version": self.version,
            "verdict": self.verdict,
            "note": self.note,
            "stored": stored,
            "records": [place(f) for f in self.found],
            "hold": None if self.hold is None else with_times(self.hold),
            "skip": None if self.skip is None else with_times(self.skip),
        }


def place(found: Found) -> dict[str, Any]:
    """A record as JSON shows it; without a timestamp, if it has none that a calendar knows."""
    is_known = 0 <= found.timestamp < _YEAR_3000
    timestamp = format_time(found.timestamp * 1000) if is_known else None
    return asdict(found) | {"timestamp": timestamp}


@dataclass(frozen=True)
class Trace:
    """What was found of an aggregate.

    Attributes:
        aggregate_id: whose versions.
        versions: ascending.
        is_running: whether a publisher runs on the state directory, and answered.
        position: everything created at or before is accounted for, µs; None: not known.
        notes: what else is to be said.
        total: how many versions there are, of which `versions` are the last; None: not known.
        waits_for: the first and the last of the versions that the aggregate waits for.
        is_whole: whether the topics were read as far as was needed.
    """

    aggregate_id: str
    versions: list[Traced]
    is_running: bool
    position: int | None
    notes: list[str] = field(default_factory=list)
    total: int | None = None
    waits_for: tuple[int, int] | None = None
    is_whole: bool = True

    @property
    def ok(self) -> bool:
        """Whether there is any version, and all are accounted for."""
        return bool(self.versions) and all(v.is_accounted_for for v in self.versions)

    def summary(self, version: int | None = None) -> str:
        """One line. Args: version: the one that was asked for; None: the last ones were."""
        if not self.versions:
            nothing = "not in the store; the topics were not read to their ends"
            if self.is_whole:
                nothing = "nothing is known of it, in the store or on the topics"
            return f"{self.aggregate_id}: {nothing}"
        if version is not None:
            return f"{self.aggregate_id}/{version}: {self.versions[0].verdict}"
        text = ", ".join(f"{count} {word}" for word, count in words(self.versions).items())
        shown, total = len(self.versions), self.total
        if total is None or total > shown:
            of = "" if total is None else f" of {total:,}"
            text = f"the last {shown}{of} versions: {text}"
        if self.waits_for is not None:
            text += f"; waits for {named_versions(*self.waits_for)}"
        return f"{self.aggregate_id}: {text}"

    def to_dict(self) -> dict[str, Any]:
        """As `trace` and the dashboard show it; JSON-serializable, times are RFC 3339."""
        gap = self.waits_for
        return {
            "aggregate_id": self.aggregate_id,
            "versions": [traced.to_dict() for traced in self.versions],
            "counts": words(self.versions),
            "total": self.total,
            "waits_for": gap and {"from_version": gap[0], "to_version": gap[1]},
            "publisher_is_running": self.is_running,
            "position": None if self.position is None else format_time(self.position),
            "notes": self.notes,
        }


def words(versions: Iterable[Traced]) -> dict[str, int]:
    """How many versions have each verdict."""
    counts: dict[str, int] = {}
    for traced in versions:
        counts[traced.verdict] = counts.get(traced.verdict, 0) + 1
    return counts
