"""The twin of `Sink` in memory: a topic of one partition, and its owners."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from eventpub.admission.model import values
from eventpub.errors import SinkError
from eventpub.sink.base import Content, CrashPoint, PublishedBatch, RecordRefusedError, no_crash
from eventpub.sink.folded import Folded

PLACE = "events", 0
LARGEST = 1_000_000
"""Bytes of the largest payload that is taken."""
Key = tuple[str, int]


@dataclass
class Topic:
    """What is visible, and whose it is.

    Attributes:
        rows: aggregate and version, in their order.
        owner: number of the sink that owns it; each newer one has a larger number.
        loses_answer: whether the next batch becomes visible without an answer.
    """

    rows: list[Key] = field(default_factory=list)
    owner: int = 0
    loses_answer: bool = False


class MemorySink:
    """See the module; what is not an event is not kept."""

    def __init__(self, topic: Topic) -> None:
        self._topic = topic
        self._number: int | None = None
        self.needs_replacement = False

    def ready(self) -> None:
        """As there: once."""
        if self._number is None:
            self._topic.owner += 1
            self._number = self._topic.owner

    def fold(self, saved: Mapping[tuple[str, int], int]) -> Iterator[Folded]:
        """As there: in one chunk."""
        self.ready()
        self._require_owner()
        rows = self._topic.rows[saved.get(PLACE, 0) :]
        if rows:
            ids, versions = [a for a, _ in rows], np.array([v for _, v in rows])
            yield Folded("events", {PLACE: len(self._topic.rows)}, ids, versions)

    def publish(self, content: Content, crash_point: CrashPoint = no_crash) -> PublishedBatch:
        """As there."""
        events = content.events
        self.ready()
        crash_point("before_begin")
        self._require_owner()
        crash_point("after_begin")
        payloads = values(events, "payload")
        refused = [n for n, payload in enumerate(payloads) if len(payload or b"") > LARGEST]
        if refused:
            raise RecordRefusedError({PLACE[0]: dict.fromkeys(refused, "too large")})
        rows = list(zip(values(events, "aggregate_id"), values(events, "version"), strict=True))
        for point in ("during_produce", "after_produce", "before_commit"):
            crash_point(point)
        self._require_owner()
        self._topic.rows += rows
        if self._topic.loses_answer:
            self._topic.loses_answer, self.needs_replacement = False, True
            raise SinkError("sink.indefinite", "the answer was lost", retriable=True)
        crash_point("after_commit")
        return PublishedBatch(len(rows), {PLACE: len(self._topic.rows)})

    def close(self) -> None:
        """Nothing is open."""

    def _require_owner(self) -> None:
        if self._number != self._topic.owner:
            self.needs_replacement = True
            raise SinkError("sink.fenced", "another sink owns the topic")
