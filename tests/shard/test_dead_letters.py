"""What is kept of refused events, and for how long: a runner may live for weeks."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from eventpub.admission import Rules
from eventpub.admission.model import EVENTS, Decision
from eventpub.config import Sink
from eventpub.shard.context import Accounted
from eventpub.shard.dead_letters import Refusals
from eventpub.shard.publishing import Publishing
from eventpub.sink.base import PublishedBatch, RecordRefusedError
from eventpub.times import SYSTEM_CLOCK


def events(*versions: int) -> pa.Table:
    rows = [{"aggregate_id": "a", "version": v, "create_time": v} for v in versions]
    return pa.Table.from_pylist(rows, EVENTS)


def publishing(*outcomes: PublishedBatch | Exception) -> Publishing:
    """Of a shard whose sink does these, one after the other."""
    waiting = iter(outcomes)

    def publish(*_: object, **__: object) -> PublishedBatch:
        outcome = next(waiting)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    config = SimpleNamespace(
        sink=Sink(topic="events"), gaps=SimpleNamespace(policy="hold_aggregate")
    )
    context: Any = SimpleNamespace(
        assignment=SimpleNamespace(config=config),
        parts=SimpleNamespace(clock=SYSTEM_CLOCK, failpoint=lambda _: None),
        rules=Rules(),
        sink=SimpleNamespace(publish=publish),
        timed=lambda _: nullcontext(),
        pace=SimpleNamespace(published=lambda *_: None, is_full=False),
    )
    return Publishing(context, Accounted(0), lambda: None)


def test_a_refused_event_is_forgotten_when_its_letter_is_out() -> None:
    """Each batch that a runner published from then on was searched for it, row by row."""
    shard = publishing(
        RecordRefusedError({"events": {1: "too large"}}),
        PublishedBatch(1, {}),
    )
    decision = Decision(events(1, 2))
    with pytest.raises(RecordRefusedError):
        transact(shard, decision)
    dead = transact(shard, decision)
    assert [letter.version for letter in dead] == [2]
    assert shard._refusals._reasons == {}


def transact(shard: Publishing, decision: Decision) -> list[Any]:
    """One try; the letters that go out with it."""
    refusals: Refusals = shard._refusals
    content, _ = refusals.without(decision, 0, "table events", 0)
    shard._transact(content)
    return [*content.dead]
