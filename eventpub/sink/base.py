"""The protocol `Sink`: where a shard's step publishes, and how it learns what is published.

What every implementation promises, and `tests/sink/contract.py` checks: a batch becomes visible
whole or not at all, whatever dies at whatever step; what is recovered is what is visible; an older
owner publishes nothing; rows that are refused are named, and the others can go; offsets only grow;
the rows of a key stay in their order; and an answer that leaves a doubt is an error. The twin in
memory is `tests/twins/sink.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from eventpub.admission.model import SkippedGap
from eventpub.sink.missing_markers import PartitionId, Written
from eventpub.sink.records import DeadRow, Header

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
