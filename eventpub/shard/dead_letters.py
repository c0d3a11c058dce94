"""Dead letters: events that the broker refuses permanently, and rows that admission refuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from eventpub import config
from eventpub.admission.model import CONFLICT, Decision, Rewritten, values
from eventpub.errors import SinkError, StateError, StoreError
from eventpub.sink.base import Content, RecordRefusedError
from eventpub.sink.records import DeadRow, contents_of


class Refusals:
    """Events refused so far, and why; their batch is retried without them."""

    def __init__(self, sink: config.Sink) -> None:
        self._sink = sink
        self._reasons: dict[tuple[str, int], str] = {}

    def note(
        self, refusal: RecordRefusedError, events: pa.Table, diverted: pa.Table | None
    ) -> None:
        """Record the refused rows of a batch; raises publish.refused_twice if none is new."""
        before = len(self._reasons)
        for topic, table in ((self._sink.topic, events), (self._sink.late_topic, diverted)):
            if table is None or topic not in refusal.by_topic:
                continue
            rows = refusal.by_topic[topic]
            some = table.take([*rows])
            keys = zip(values(some, "aggregate_id"), values(some, "version"), strict=True)
            reasons = (f"{refusal.code}: {reason}" for reason in rows.values())
            self._reasons |= dict(zip(keys, reasons, strict=True))
        if len(self._reasons) == before:
            raise StateError(
                "publish.refused_twice",
                "a record that was already removed from the batch was refused again:"
                f" {sorted(self._reasons)[:3]} ({refusal.reason})",
                where=refusal.where,
                suggestion="this is a bug in eventpub; please report it",
            ) from refusal

    def forget(self) -> None:
        """Forget all, once their dead letters are published."""
        self._reasons.clear()

    def split(self, events: pa.Table) -> tuple[pa.Table, npt.NDArray[np.bool_], list[DeadRow]]:
        """The events not refused, the mask of refused ones, and their dead letters."""
        keys = zip(values(events, "aggregate_id"), values(events, "version"), strict=True)
        reasons = [self._reasons.get(key) for key in keys]
        is_dead = np.array([reason is not None for reason in reasons], bool)
        dead = dead_rows(
            events.filter(pa.array(is_dead)),
            [reason for reason in reasons if reason is not None],
        )
        return events.filter(pa.array(~is_dead)), is_dead, dead

    def without(
        self, decision: Decision, run: int, store: str, now: int
    ) -> tuple[Content, int | None]:
        """What is published of a decision, after `run` dead letters in a row.

        Returns:
            The content, and the refused events in a row up to its end; None: no events.

        Raises:
            SinkError: sink.too_many_refused
            StoreError: store.other_history
        """
        events, late, diverted = decision.events, decision.late, decision.diverted
        gaps = decision.gaps
        refused: list[DeadRow] = []
        if decision.refused is not None:
            refused = dead_rows(*decision.refused, decision.rewritten)
        conflicts = [row for row in refused if row.reason.startswith(CONFLICT)]
        if not (self._reasons or conflicts):
            content = Content(events, late, gaps, refused, diverted, now)
            return content, 0 if events.num_rows else None
        kept, is_dead, dead = self.split(events)
        created = np.array(
            [*values(events, "create_time"), *(c.create_time or 0 for c in conflicts)], np.int64
        )
        in_time = np.argsort(created, kind="stable")
        longest = run
        for each in np.append(is_dead, np.ones(len(conflicts), bool))[in_time].tolist():
            run = run + 1 if each else 0
            longest = max(longest, run)
        if longest > self._sink.dead_limit and conflicts:
            worst = conflicts[-1]
            raise StoreError(
                "store.other_history",
                f"more than {self._sink.dead_limit} events in a row differ from those"
                f" published under their versions, such as version {worst.version} of"
                f" {worst.aggregate_id!r}: {worst.reason}",
                where=store,
                suggestion="if store.url or store.table names another store than the one that"
                " this state belongs to, correct it, or set another app.id, app.state_dir and"
                " sink.topic; if several columns say which aggregate a row belongs to, list them in"
                " store.columns.aggregate_id, with another app.id, app.state_dir and"
                " sink.topic; if the store was restored to an earlier time or"
                " another server took over, and these events should become dead letters, raise"
                " sink.dead_limit. Nothing of"
                " them was published",
            )
        if longest > self._sink.dead_limit:
            worst = dead[-1]
            raise SinkError(
                "sink.too_many_refused",
                f"the broker refuses more than {self._sink.dead_limit} events in a row,"
                f" such as version {worst.version} of {worst.aggregate_id!r}: {worst.reason}",
                where=f"sink.topic = {self._sink.topic}",
                suggestion="if the topic's or the client's limits are too low, raise them"
                " (max.message.bytes; message.max.bytes in [sink.properties]); if these events"
                " should become dead letters, raise sink.dead_limit. Nothing of them was published",
            )
        if diverted is not None:
            diverted, _, dead_late = self.split(diverted)
            dead += dead_late
        late = None if late is None else late[~is_dead]
        return Content(kept, late, gaps, dead + refused, diverted, now), run


def dead_rows(
    rows: pa.Table,
    reasons: Sequence[str],
    rewritten: Mapping[str, Rewritten] | None = None,
) -> list[DeadRow]:

    def published(aggregate_id: str, reason: str) -> tuple[int, int] | None:
        of = (rewritten or {}).get(aggregate_id)
        return (of.last, of.since) if of is not None and reason.startswith(CONFLICT) else None

    return [
        DeadRow(
            **row,
            reason=reason,
            published=published(row["aggregate_id"], reason),
            content=content,
        )
        for row, reason, content in zip(rows.to_pylist(), reasons, contents_of(rows), strict=True)
    ]
