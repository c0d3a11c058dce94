"""The protocol `Sink`: where a shard's step publishes, and how it learns what is published.

Every implementation promises, and `tests/sink/contract.py` checks: a batch becomes visible whole or
not at all, whatever crashes; recovery finds exactly what is visible; an older owner publishes
nothing; refused rows are named, and the others can be published; offsets only grow; rows of a key
keep their order; an indefinite answer is an error. The in-memory twin is `tests/twins/sink.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from eventpub import config
from eventpub.admission.model import SkippedGap
from eventpub.errors import SinkError, counted
from eventpub.sink.records import DeadRow, PartitionId, Written

CrashPoint: TypeAlias = Callable[[str], None]
"""Called with the name of each step; tests crash there."""


def no_crash(_point: str) -> None:
    """The default crash point."""


@dataclass(frozen=True)
class Content:
    """The content of one batch: `events`, `gaps`, `dead` and `diverted` go to a topic each.

    `late` marks events for the header `eventpub_late`; `now` (database time, µs) limits the
    records' timestamps.
    """

    events: pa.Table
    late: npt.NDArray[np.bool_] | None = None
    gaps: Sequence[SkippedGap] = ()
    dead: Sequence[DeadRow] = ()
    diverted: pa.Table | None = None
    now: int | None = None

    @property
    def is_empty(self) -> bool:
        is_diverted = self.diverted is not None and len(self.diverted)
        return not (len(self.events) or self.gaps or self.dead or is_diverted)


@dataclass(frozen=True)
class PublishedBatch:
    """What became visible. `events` does not count gaps, dead or diverted rows.

    `next_offsets`: per partition, the offset after the last record and its transaction marker.
    `written`: offsets of the records, if a marker follows.
    `lost`: events not delivered (only at most once).
    """

    events: int
    next_offsets: dict[PartitionId, int]
    written: dict[PartitionId, Written] = field(default_factory=dict)
    lost: int = 0


Refused = dict[str, dict[int, str]]
"""Per topic, the refused rows and why."""


class RecordRefusedError(SinkError):
    """Records that can never be published; nothing was."""

    def __init__(self, by_topic: Refused) -> None:
        self.by_topic = by_topic
        self.rows = [row for rows in by_topic.values() for row in rows]
        self.reason = next(iter(by_topic.values()))[self.rows[0]]
        super().__init__(
            "sink.record_refused",
            f"{counted(len(self.rows), 'record')} can never be published: {self.reason}",
            where=f"topic {next(iter(by_topic))}",
            suggestion="if the size is the reason, raise the topic's max.message.bytes and, in"
            " [sink.properties], message.max.bytes",
            retriable=True,
        )

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "type": SinkError.__name__}


class Refusals:
    """Refused rows by part of a task; `before`: those in a row at the end of the last batch."""

    def __init__(self, sink: config.Sink) -> None:
        self._sink = sink
        self._parts: dict[int, Refused] = {}
        self._rows: dict[int, dict[str, int]] = {}
        self._part = 0
        self.before = 0
        self.has_new = False  # in this attempt

    def begin(self, part: int) -> Refused:
        """Start a part; returns its rows already known as refused."""
        self._part = part
        self.has_new = self.has_new and part > 0
        return self._parts.setdefault(part, {})

    def made(self, kept: Mapping[str, int]) -> None:
        """Record how many rows of the current part were produced, by topic."""
        part = self._parts[self._part]
        topics = dict.fromkeys([*kept, *part])
        self._rows[self._part] = {t: kept.get(t, 0) + len(part.get(t, {})) for t in topics}

    def take(self, refusal: RecordRefusedError) -> None:
        """Record a refusal in the current part; raises sink.too_many_refused, or one not new."""
        part = self._parts[self._part]
        before = sum(map(len, part.values()))
        for topic, rows in refusal.by_topic.items():
            known = part.setdefault(topic, {})
            among_all = {_among_all(row, known): reason for row, reason in rows.items()}
            known |= {row: f"{refusal.code}: {reason}" for row, reason in among_all.items()}
        if sum(map(len, part.values())) == before:
            raise refusal
        self.has_new = True
        if self.in_a_row()[0] > self._sink.dead_limit:
            raise SinkError(
                "sink.too_many_refused",
                f"the broker refuses more than {self._sink.dead_limit} rows of a task in a row:"
                f" {refusal.reason}",
                where=f"topic {self._sink.topic}",
                suggestion="if the topic's or the client's limits are too low, raise them"
                " (max.message.bytes; the option kafka.message.max.bytes); if these rows should"
                " become dead letters, raise the option dead_limit. Nothing of them was published",
            ) from refusal

    def in_a_row(self) -> tuple[int, int]:
        """Longest run of refused rows, and the run at the end of what was produced so far."""
        longest, run = 0, self.before
        for number, topics in self._rows.items():
            for topic, rows in topics.items():
                last = -1
                for row in sorted(self._parts[number].get(topic, ())):
                    run = run + 1 if row == last + 1 else 1
                    longest, last = max(longest, run), row
                run = run if last == rows - 1 else 0
        return longest, run


def _among_all(row: int, refused: Mapping[int, str]) -> int:
    """Convert an index among the rows not refused to one among all rows."""
    for each in sorted(refused):
        row += each <= row
    return row


REDO = frozenset({"sink.aborted", "sink.delivery_lost", "sink.fatal", "sink.indefinite"})
"""After these codes, retry the same batch with a recovered sink."""


class Sink(Protocol):
    @property
    def needs_replacement(self) -> bool:
        """If True, close this sink, create a new one, recover and continue."""

    def publish(self, content: Content, crash_point: CrashPoint = no_crash) -> PublishedBatch:
        """Make the content visible atomically, in the given order.

        Raises:
            RecordRefusedError: nothing was published; retry, with the refused rows as `dead`.
            SinkError: `sink.aborted` (nothing was published; retry), `sink.fenced`,
                `sink.side_record_refused`, `sink.topic_recreated`, `sink.other_publisher`,
                `sink.indefinite`, `sink.unreachable`, `sink.fatal`, `sink.wrong_partition`, ….
                Check `needs_replacement` before the next call.
        """
