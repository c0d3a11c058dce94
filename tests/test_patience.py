"""How long an outage is waited for, and how often that is said."""

from __future__ import annotations

import logging
from typing import Any
from unittest.mock import Mock

import pytest

from eventpub.errors import SinkError
from eventpub.times import OUTAGE, Patience


def test_an_outage_is_waited_for_and_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    time = 0.0

    def sleep(seconds: float) -> None:
        nonlocal time
        time += seconds

    clock: Any = Mock(monotonic=lambda: time, sleep=sleep)
    patience = Patience("reading batch 7", clock)
    away = SinkError("sink.unreachable", "no answer", retriable=True)
    with caplog.at_level(logging.WARNING):
        while time < OUTAGE:
            patience.wait(away)
        with pytest.raises(SinkError) as caught:
            patience.wait(away)
    assert caught.value is away
    assert OUTAGE <= time < OUTAGE + 6
    assert 9 <= len(caplog.messages) <= 11
    assert caplog.messages[0].startswith("reading batch 7 failed; retrying, giving up in 600 s")
