"""What a user's query does about its own transactions that a broker has left open: the decisions.

`test_missing_markers.py` does the same with a broker.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import MagicMock, Mock

import pyarrow as pa
import pytest

from eventpub import config, times
from eventpub.errors import SinkError
from eventpub.sink import missing_markers, numbered
from eventpub.sink.batch import Batch
from eventpub.sink.client import Clients
from eventpub.sink.markers import Numbered
from eventpub.sink.missing_markers import again
from eventpub.sink.records import Record
from eventpub.sink.transaction import PROBE
from eventpub.spark.rows import InputRows

SINK = config.Sink(topic="orders", bootstrap_servers="127.0.0.1:1")


@dataclass
class Message:
    at: int
    headers_: list[tuple[str, Any]] = field(default_factory=list)
    key_: bytes = b"\xff\x00"

    def offset(self) -> int:
        return self.at

    def headers(self) -> list[tuple[str, Any]]:
        return self.headers_

    def key(self) -> bytes:
        return self.key_

    def value(self) -> bytes:
        return b""

    def __len__(self) -> int:
        """As confluent_kafka's: of the value."""
        return 0

    def topic(self) -> str:
        return "orders"

    def partition(self) -> int:
        return 0

    def timestamp(self) -> tuple[int, int]:
        return (1, 1000)


def settling(
    monkeypatch: pytest.MonkeyPatch, there: list[Message], visible: set[int]
) -> missing_markers.Settling:
    def ranges(
        _: Any, asked: dict[Any, tuple[int, int]], *, committed: bool, **__: Any
    ) -> Iterator[Message]:
        for first, end in asked.values():
            for message in there:
                if first <= message.at < end and (message.at in visible or not committed):
                    yield message

    monkeypatch.setattr(missing_markers, "iter_ranges", ranges)
    monkeypatch.setattr(
        missing_markers, "list_offsets", lambda _, places, *__, **___: {places[0]: 0}
    )
    return missing_markers.Settling(Clients(SINK), "app", Mock(), {}, [])


def span(first: int, end: int, count: int, task: int = 0) -> missing_markers.Span:
    return missing_markers.Span(task, ("orders", 0), first, end, count)


def test_what_lies_between_the_parts_of_a_batch_is_not_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An attempt that was aborted between them, and a probe within one."""
    probe = Message(2, [PROBE])
    there = [Message(0), Message(1), probe, Message(3), Message(4), Message(5), Message(6)]
    found = settling(monkeypatch, there, set())._lost([span(0, 4, 3), span(6, 7, 1, task=1)])
    assert [message.offset() for message in found] == [0, 1, 3, 6]


def test_a_record_that_others_have_within_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SinkError) as caught:
        settling(monkeypatch, [Message(0), Message(1)], set())._lost([span(0, 2, 1)])
    assert caught.value.code == "sink.not_visible"


def test_what_is_not_there_at_all_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the topic is compacted."""
    made = settling(monkeypatch, [Message(0)], set())
    assert made._is_hidden(span(0, 1, 1))
    assert not made._is_hidden(span(0, 5, 5))


def test_partitions_may_become_free_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second look asked for one of them, and failed."""
    stable = iter([{("orders", 0): 5, ("orders", 1): 9}, {("orders", 0): 9}])
    made = settling(monkeypatch, [], set())
    made._published = {0: {"written": {"orders": {"0": [5, 6, 1], "1": [5, 6, 1]}}}}
    monkeypatch.setattr(missing_markers, "list_offsets", lambda *_, **__: next(stable))
    assert made._left_open() == []


def test_a_topic_that_may_not_be_read_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = settling(monkeypatch, [], set())

    def refused(*_: Any, **__: Any) -> Iterator[Message]:
        raise SinkError("sink.not_authorized", "no")

    monkeypatch.setattr(missing_markers, "iter_ranges", refused)
    assert not made._is_hidden(span(0, 1, 1))


def test_a_key_that_is_no_text_is_published_as_it_was() -> None:
    assert again(Message(0)).key == b"\xff\x00"


def test_a_broker_that_stays_away_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended the query at the second question."""
    monkeypatch.setattr(times, "_FIRST_PAUSE", 0.01)
    away = SinkError("sink.unreachable", "no answer", retriable=True)
    runs = Mock(side_effect=[away, None])
    monkeypatch.setattr(numbered, "Settling", lambda *_: Mock(run=runs))
    sink = numbered.NumberedSink(Clients(SINK), "app")
    sink.markers = Mock(back_to=Mock(side_effect=[away, away, []]))
    sink.settle({0: {"query": "q", "batch": 1}}, [])
    assert (runs.call_count, sink.markers.back_to.call_count) == (2, 3)


class Writer:
    """Of transactions: records what it is asked to do."""

    ended: list[set[tuple[str, int]]]
    committed: list[str]
    failures: int

    def __init__(self, *_: Any) -> None:
        self.caution = Mock(reduces_dead=False)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""

    def run(self, parts: Iterator[Batch], *_: Any, **__: Any) -> None:
        topics = [topic for batch in parts for topic, _ in batch.side]
        if Writer.failures:
            Writer.failures -= 1
            raise SinkError("sink.aborted", "no", retriable=True)
        self.committed += topics

    def run_aborted(self, places: set[tuple[str, int]]) -> None:
        self.ended.append({*places})


@pytest.mark.parametrize("failures", [0, 2])
@pytest.mark.parametrize("is_repeated", [False, True])
def test_each_further_attempt_ends_what_those_before_left_open_in_each_topic_of_the_rows(
    monkeypatch: pytest.MonkeyPatch, is_repeated: bool, failures: int
) -> None:
    """Only the topic of the options was looked at, and then each partition only once."""
    place = "named", 1
    monkeypatch.setattr(times, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(Writer, "ended", [], raising=False)
    monkeypatch.setattr(Writer, "committed", [], raising=False)
    monkeypatch.setattr(Writer, "failures", failures, raising=False)
    monkeypatch.setattr(numbered, "TransactionWriter", Writer)
    monkeypatch.setattr(numbered, "list_offsets", lambda _, places, *__: dict.fromkeys(places, 9))
    monkeypatch.setattr(
        numbered, "open_below", lambda _, ends, *__: {p: 5 for p in ends if p == place}
    )
    sink = numbered.NumberedSink(Clients(SINK), "app")
    sink.partitions = {"named": 2}
    sink.markers = Mock(
        number_of=Mock(return_value=None),
        back_to=Mock(return_value=[]),
        batch=lambda _: Batch({}, []),
    )
    rows = Batch({}, [("named", Record(b"k", b"v", 0, 1, []))])
    parts = MagicMock(rows=1, has_rows=True, digest=lambda: "d", topics=lambda: {"named"})
    parts.__iter__.side_effect = lambda: iter([lambda *_: rows])
    done = sink.publish(Numbered("q", 1, 0, is_repeated), parts)
    assert done.is_new
    assert Writer.committed == ["named"]
    assert Writer.ended == [{place}] * (failures + is_repeated)


def test_the_topics_of_a_task_are_those_that_its_rows_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventpub.spark.rows.require_whole_input", lambda: None)
    named: list[list[str | None]] = [["a", None], ["a", "b", ""]]
    batches = [pa.record_batch({"value": [b""] * len(n), "topic": n}) for n in named]
    assert InputRows(iter(batches)).topics() == {"a", "b"}
    assert InputRows(iter([pa.record_batch({"value": [b"x"]})])).topics() == set()
