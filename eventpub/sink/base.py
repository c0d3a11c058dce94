"""The protocol `Sink`: where a shard's step publishes, and how it learns what is published.

What every implementation promises, and `tests/sink/contract.py` checks: a batch becomes visible
whole or not at all, whatever dies at whatever step; what is recovered is what is visible; an older
owner publishes nothing; rows that are refused are named, and the others can go; offsets only grow;
the rows of a key stay in their order; and an answer that leaves a doubt is an error. The twin in
memory is `tests/twins/sink.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from eventpub.admission.model import SkippedGap
from eventpub.errors import SinkError
from eventpub.sink.records import DeadRow, Header, PartitionId, Written
from eventpub.terminal import counted

CrashPoint: TypeAlias = Callable[[str], None]
"""Called with the name of each step, for tests that die there."""


def no_crash(_point: str) -> None:
    """Nothing happens."""


@dataclass(frozen=True)
class Content:
    """What is published together.

    Attributes:
        events: rows of `EVENTS`, to the topic.
        late: marks the events that get the header `eventpub_late`.
        gaps: skips, to ``<topic>.gaps``.
        dead: refused rows, to ``<topic>.dead``.
        diverted: late rows of `EVENTS`, to ``<topic>.late``.
        now: the database's time, µs; no record's timestamp is later.
        marks: more headers of each event.
    """

    events: pa.Table
    late: npt.NDArray[np.bool_] | None = None
    gaps: Sequence[SkippedGap] = ()
    dead: Sequence[DeadRow] = ()
    diverted: pa.Table | None = None
    now: int | None = None
    marks: Sequence[Sequence[Header]] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to publish."""
        is_diverted = self.diverted is not None and len(self.diverted)
        return not (len(self.events) or self.gaps or self.dead or is_diverted)


@dataclass(frozen=True)
class PublishedBatch:
    """What became visible. `events` counts the events only, not gaps, dead or diverted rows.

    `next_offsets`: of every partition touched, the offset after the last record and its
    transaction's marker. `written`: what of them are the records, where a marker follows. `lost`:
    events that were not delivered (only at most once).
    """

    events: int
    next_offsets: dict[PartitionId, int]
    written: dict[PartitionId, Written] = field(default_factory=dict)
    lost: int = 0


class RecordRefusedError(SinkError):
    """The broker or the client will never take some records; nothing of the batch was published.

    Args:
        by_topic: of each topic, indices into the rows given to it.
        reason: what the refusal said.

    Attributes:
        rows: all of them.
    """

    def __init__(self, by_topic: Mapping[str, Sequence[int]], reason: str) -> None:
        self.by_topic, self.reason = by_topic, reason
        self.rows = [row for rows in by_topic.values() for row in rows]
        super().__init__(
            "sink.record_refused",
            f"{counted(len(self.rows), 'record')} can never be published: {reason}",
            where=f"topic {next(iter(by_topic))}",
            suggestion="if the size is the reason, raise the topic's max.message.bytes and, in"
            " [sink.properties], message.max.bytes",
            retriable=True,
        )

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "type": SinkError.__name__}


Refused = dict[str, dict[int, str]]
"""By topic, the rows that the broker refuses, and why."""


class Refusals:
    """The rows that the broker has refused, for each part of a task.

    Attributes:
        before: how many in a row at the end of the task's last batch.
    """

    def __init__(self) -> None:
        self._parts: dict[int, Refused] = {}
        self._rows: dict[int, dict[str, int]] = {}
        self._part = 0
        self.before = 0

    def begin(self, part: int) -> Refused:
        """A part is produced; the rows of it that are known to be refused."""
        self._part = part
        return self._parts.setdefault(part, {})

    def made(self, kept: Mapping[str, int]) -> None:
        """How many rows of the part in work are produced, by topic."""
        part = self._parts[self._part]
        topics = dict.fromkeys([*kept, *part])
        self._rows[self._part] = {t: kept.get(t, 0) + len(part.get(t, {})) for t in topics}

    def take(self, refusal: RecordRefusedError) -> bool:
        """Note what was refused of the part in work; False where nothing of it is new."""
        part = self._parts[self._part]
        before = sum(map(len, part.values()))
        for topic, rows in refusal.by_topic.items():
            known = part.setdefault(topic, {})
            numbers = [_among_all(row, known) for row in rows]
            known |= dict.fromkeys(numbers, f"{refusal.code}: {refusal.reason}")
        return sum(map(len, part.values())) > before

    def in_a_row(self) -> tuple[int, int]:
        """How many at most, and how many up to the last row of the parts that were produced."""
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
    """The number that a row has among all, which it has among those that are not refused."""
    for each in sorted(refused):
        row += each <= row
    return row


REDO = frozenset({"sink.aborted", "sink.delivery_lost", "sink.fatal", "sink.indefinite"})
"""Codes after which the same batch is tried again, by a sink that has recovered."""


class Sink(Protocol):
    """Where a step publishes."""

    @property
    def needs_replacement(self) -> bool:
        """True when it must not be used again: close it, make a new one, recover, go on."""

    def publish(self, content: Content, crash_point: CrashPoint = no_crash) -> PublishedBatch:
        """Makes all of it visible at once, in the given order.

        Raises:
            RecordRefusedError: some rows can never be published; nothing was. Name them dead, redo.
            SinkError: `sink.aborted` (nothing was published; redo), `sink.fenced`,
                `sink.side_record_refused`, `sink.topic_recreated`, `sink.other_publisher`,
                `sink.indefinite`, `sink.unreachable`, `sink.fatal`, `sink.wrong_partition`, ….
                Look at `needs_replacement` before the next call.
        """
