"""What a runner does where a request cannot be done."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from eventpub.channel import Report, Request
from eventpub.errors import EventpubError, SinkError, StateError
from eventpub.shard.answering import Answering


def raised_by(error: EventpubError) -> EventpubError:
    """What ends the runner, where the index has met that."""

    class Holds:
        def get(self, _: str) -> None:
            raise error

    report = Report(0)
    context: Any = SimpleNamespace(index=SimpleNamespace(holds=Holds()), report=report)
    publishing: Any = SimpleNamespace(step=None)
    with pytest.raises(type(error)) as caught:
        Answering(context, publishing).answer(Request("r", "retry", "a"))
    assert not report.answers
    return caught.value


def test_what_waiting_does_not_fix_ends_no_publisher() -> None:
    """It judges the error of a runner; without the request there might be none."""
    error = SinkError("sink.wrong_partition", "an event of another partition", suggestion="report")
    met = raised_by(error)
    assert met.to_dict() == error.to_dict() | {"retriable": True}


@pytest.mark.parametrize(
    "error",
    [
        SinkError("sink.fenced", "another publisher"),
        StateError("index.corrupt", "a file is missing"),
        SinkError("sink.unreachable", "no broker answers", retriable=True),
    ],
)
def test_what_others_know_what_to_do_about_is_as_it_was(error: EventpubError) -> None:
    assert raised_by(error) is error
