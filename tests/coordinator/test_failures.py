"""Which failures end the publisher."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from eventpub.coordinator.shards import Failures
from eventpub.errors import SinkError, StoreError

NAMED: Any = SimpleNamespace(app=SimpleNamespace(id="a"), sink=SimpleNamespace(topic="t"))


@pytest.mark.parametrize(
    ("code", "seconds"),
    [
        ("store.database_missing", 60.0),
        ("store.privilege_missing", 120.0),
        ("sink.not_authorized", 120.0),
        ("config.password_file", 120.0),
        ("config.sink_property", 120.0),
        ("store.tls_failed", 120.0),
    ],
)
def test_what_is_taken_away_and_given_back_is_waited_out(code: str, seconds: float) -> None:
    """DROP and CREATE of a database in a restore, or of an account, ended the publisher at once; so
    did a file that is removed before it is written again."""
    failures, error = Failures(NAMED), StoreError(code, "gone")
    assert failures.of_shard(0, error, 1, 0.0) is None
    assert failures.of_shard(0, error, 2, seconds - 1) is None
    assert failures.of_shard(0, error, 3, seconds) is error


@pytest.mark.parametrize(("code", "times"), [("sink.fenced", 3), ("sink.own_request_late", 30)])
def test_who_is_fenced_again_and_again_gives_way(code: str, times: int) -> None:
    """Two publishers of one id at a broker that leaves requests unanswered never ended."""
    failures = Failures(NAMED)
    failures.is_well(0, 0.0, has_progressed=True)
    error = SinkError(code, "fenced", retriable=True)
    ends = [failures.of_shard(0, error, 1, 60.0 + 30 * n) for n in range(times)]
    assert ends[:-1] == [None] * (times - 1)
    assert ends[-1] is not None
    assert ends[-1].code == "sink.fenced"
