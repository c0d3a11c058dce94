"""Dead letters: the events of a batch that the broker will never take, found by its refusals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from eventpub import config
from eventpub.admission import Decision, values
from eventpub.errors import SinkError, StateError
from eventpub.sink import DeadRow, RecordRefusedError


@dataclass(frozen=True)
class Kept:
    """What of a decision's events is published, and what became of the others.

    Attributes:
        events: without those that were refused.
        late: which of them are late; None: none is.
        letters: the refused ones.
        run: how many of those came in a row up to here; None: there was no event.
    """

    events: pa.Table
    late: npt.NDArray[np.bool_] | None
    letters: list[DeadRow]
    run: int | None


class Refusals:
    """Which events were refused so far, and why; a batch is done again without them."""

    def __init__(self, sink: config.Sink) -> None:
        self._sink = sink
        self._reasons: dict[tuple[str, int], str] = {}

    def note(
        self, refusal: RecordRefusedError, events: pa.Table, diverted: pa.Table | None
    ) -> None:
        """Take over which rows of a batch were refused.

        Raises:
            StateError: publish.refused_twice
        """
        reason = f"{refusal.code}: {refusal.reason}"
        before = len(self._reasons)
        for table, rows in ((events, refusal.rows), (diverted, refusal.diverted_rows)):
            if table is None or not rows:
                continue
            some = table.take(rows)
            for key in zip(values(some, "aggregate_id"), values(some, "version"), strict=True):
                self._reasons[key] = reason
        if len(self._reasons) == before:
            raise StateError(
                "publish.refused_twice",
                "a record was refused that had been taken out of the batch",
                where=refusal.where,
                suggestion="please report this: it is a defect of eventpub",
            ) from refusal

    def split(self, events: pa.Table) -> tuple[pa.Table, npt.NDArray[np.bool_], list[DeadRow]]:
        """The events without those that were refused, which of them were, and their letters."""
        keys = zip(values(events, "aggregate_id"), values(events, "version"), strict=True)
        reasons = [self._reasons.get(key) for key in keys]
        is_dead = np.array([reason is not None for reason in reasons], bool)
        letters = dead_rows(
            events.filter(pa.array(is_dead)), [reason for reason in reasons if reason is not None]
        )
        return events.filter(pa.array(~is_dead)), is_dead, letters

    def without(self, decision: Decision, run: int) -> Kept:
        """What of a decision's events is published.

        Args:
            run: how many dead letters in a row came before.

        Raises:
            SinkError: sink.too_many_refused
        """
        events, late = decision.events, decision.late
        if not self._reasons:
            return Kept(events, late, [], 0 if events.num_rows else None)
        kept, is_dead, letters = self.split(events)
        longest = run
        for each in is_dead.tolist():
            run = run + 1 if each else 0
            longest = max(longest, run)
        if longest > self._sink.dead_limit:
            worst = letters[-1]
            raise SinkError(
                "sink.too_many_refused",
                f"the broker refuses more than {self._sink.dead_limit} events in a row,"
                f" as version {worst.version} of {worst.aggregate_id!r}: {worst.reason}",
                where=f"sink.topic = {self._sink.topic}",
                suggestion="if the topic's or the client's limits are too low, raise them"
                " (max.message.bytes; message.max.bytes in [sink.properties]); if these events"
                " shall be dead letters, raise sink.dead_limit. Nothing of them was published",
            )
        return Kept(kept, None if late is None else late[~is_dead], letters, run)


def dead_rows(rows: pa.Table, reasons: Sequence[str]) -> list[DeadRow]:
    """Rows of `EVENTS` as dead letters, each with its reason."""
    return [
        DeadRow(
            aggregate_id=row["aggregate_id"],
            version=row["version"],
            reason=reason,
            payload=row["payload"],
            event_type=row["event_type"],
            metadata=row["metadata"],
            create_time=row["create_time"],
        )
        for row, reason in zip(rows.to_pylist(), reasons, strict=True)
    ]
