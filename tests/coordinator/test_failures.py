"""Which failures end the publisher."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from eventpub.coordinator.failures import Failures
from eventpub.errors import SinkError


@pytest.mark.parametrize(("code", "times"), [("sink.fenced", 3), ("sink.own_request_late", 30)])
def test_who_is_fenced_again_and_again_gives_way(code: str, times: int) -> None:
    """Two publishers of one id at a broker that leaves requests unanswered never ended."""
    named: Any = SimpleNamespace(app=SimpleNamespace(id="a"), sink=SimpleNamespace(topic="t"))
    failures = Failures(named)
    failures.is_well(0, 0.0, has_progressed=True)
    error = SinkError(code, "fenced", retriable=True)
    ends = [failures.of_shard(0, error, 1, 60.0 + 30 * n) for n in range(times)]
    assert ends[:-1] == [None] * (times - 1)
    assert ends[-1] is not None
    assert ends[-1].code == "sink.fenced"
