"""Which records are published again: all that readers lack, and nothing that they have."""

from __future__ import annotations

from typing import Any

import pytest

from eventpub import config
from eventpub.admission.model import SkippedGap
from eventpub.sink import records
from eventpub.sink.encoder import CloudEvents, read_gap
from eventpub.sink.missing_markers import _Visible, undecided

SINK = config.Sink(topic="events")


class Message:
    """confluent_kafka.Message."""

    def __init__(self, topic: str, value: bytes, version: int | None = None, at: str = "1") -> None:
        self._topic = topic
        self._value = value
        pairs = ((records.SEQUENCE, str(version)), (records.TIME, at))
        self._headers = [] if version is None else [(name, v.encode()) for name, v in pairs]

    def topic(self) -> str:
        return self._topic

    def partition(self) -> int:
        return 0

    def key(self) -> bytes:
        return b"x"

    def value(self) -> bytes:
        return self._value

    def headers(self) -> list[tuple[str, Any]]:
        return self._headers

    def timestamp(self) -> tuple[int, int]:
        return 1, 5


def event(version: int, topic: str = SINK.topic, at: str = "1") -> Message:
    return Message(topic, b"payload", version, at)


def skip(first: int, last: int) -> Message:
    gap = SkippedGap("x", first, last, 100, 200, 8, "max_backoff")
    value = CloudEvents("orders").gap(gap, 1).value
    assert value is not None
    return Message(SINK.gaps_topic, value)


def ranges(found: list[records.Record]) -> list[tuple[int, int]]:
    gaps = [read_gap(record.value or b"") for record in found]
    return [(gap.from_version, gap.to_version) for gap in gaps]


@pytest.mark.parametrize(
    ("decided", "left"),
    [
        ([], [(2, 10)]),
        ([(1, 1), (11, 20)], [(2, 10)]),
        ([(2, 2)], [(3, 10)]),
        ([(5, 6), (10, 12), (1, 2)], [(3, 4), (7, 9)]),
        ([(2, 5), (4, 10)], []),
    ],
)
def test_what_of_a_range_is_not_decided(
    decided: list[tuple[int, int]], left: list[tuple[int, int]]
) -> None:
    assert undecided((2, 10), decided) == left


def test_an_event_that_readers_have_is_not_published_again_wherever_it_stands() -> None:
    visible = _Visible(SINK, [event(2), event(3, SINK.late_topic)])
    assert not visible.lacks(event(2))
    assert not visible.lacks(event(3))
    assert len(visible.lacks(event(4))) == 1
    assert len(visible.lacks(event(2, at="2"))) == 1, "it was written anew"
    assert len(visible.lacks(event(2, SINK.dead_topic))) == 1


def test_of_a_skip_what_nobody_has_decided_is_recorded_again() -> None:
    """Another owner has published version 2 meanwhile, and refused 5."""
    visible = _Visible(SINK, [event(1), event(2), event(5, SINK.dead_topic)])
    assert not visible.lacks(skip(1, 2))
    assert ranges(visible.lacks(skip(2, 10))) == [(3, 4), (6, 10)]
    assert not visible.lacks(skip(6, 10)), "lost twice, it is recorded again once"


def test_of_two_skips_that_meet_only_the_rest_is_recorded_again() -> None:
    visible = _Visible(SINK, [skip(2, 4)])
    assert ranges(visible.lacks(skip(3, 6))) == [(5, 6)]
    assert not visible.lacks(skip(3, 3))
