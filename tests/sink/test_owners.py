"""Starts of one publisher on one query, as on a copy of its state: the last one has the id."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest

from eventpub import config
from eventpub.errors import SinkError
from eventpub.local.servers import Kafka
from eventpub.sink import numbered
from eventpub.sink.client import Clients
from eventpub.sink.layout import check_topics
from eventpub.sink.markers import Markers, Numbered
from eventpub.sink.transaction import fence_all
from tests.sink.helpers import APP, PARTITIONS, assert_published_once, settings
from tests.sink.test_missing_markers import FIRST, SECOND, THIRD, Parts


class Start:
    """A start of `eventpub run`, and its tasks."""

    def __init__(self, sink: config.Sink, name: str) -> None:
        self.section, self.name = sink, name
        self.sink = numbered.NumberedSink(Clients(sink), APP, at_start=PARTITIONS)

    def take(self, *after: str, query: str = "q") -> bool:
        """Take the id, from these, as a start does."""
        fence_all(Clients(self.section), APP, PARTITIONS)
        return self.sink.take(query, PARTITIONS, self.name, [*after] or None)

    def publish(self, batch: int, rows: Any, task: int = 0) -> bool:
        """Whether it is new."""
        of_task = Numbered("q", batch, task, owner=self.name)
        return self.sink.publish(of_task, Parts(self.section, rows)).is_new

    def refused(self, batch: int, rows: Any) -> str:
        """The error's code."""
        with pytest.raises(SinkError) as caught:
            self.publish(batch, rows)
        return caught.value.code


@pytest.fixture
def start(kafka_server: Kafka, topic_name: str) -> Callable[[str], Start]:
    sink = settings(topic_name, kafka_server.bootstrap_servers)
    check_topics(Clients(sink))
    return lambda name: Start(sink, name)


WAKES = ("at once", "after_take", "before_begin", "after_produce", "before_marker", "before_commit")


@pytest.mark.parametrize("wakes", WAKES)
def test_a_task_of_an_older_start_publishes_nothing_whenever_it_wakes(
    start: Callable[[str], Start],
    kafka_server: Kafka,
    topic_name: str,
    monkeypatch: pytest.MonkeyPatch,
    wakes: str,
) -> None:
    older, newer = start("s1"), start("s2")
    older.take()
    assert older.publish(0, FIRST)
    taken: list[bool] = []

    def take(at: str) -> None:
        if at == wakes and not taken:
            taken.append(newer.take("s1"))

    monkeypatch.setattr(numbered, "failpoint", take)
    take("at once")
    assert older.refused(1, SECOND) == "sink.other_query"
    assert taken == [True]
    assert_published_once(kafka_server.bootstrap_servers, topic_name, FIRST)
    assert newer.publish(1, SECOND)
    assert older.refused(1, SECOND) == older.refused(2, THIRD) == "sink.other_query"
    assert not newer.publish(1, SECOND), "repeated by its query, or its session"
    assert newer.publish(2, THIRD)
    assert_published_once(kafka_server.bootstrap_servers, topic_name, FIRST, SECOND, THIRD)


def test_what_an_older_start_has_published_is_recognised_however_many_start_meanwhile(
    start: Callable[[str], Start],
    kafka_server: Kafka,
    topic_name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The owners' markers lie between the batch and the end of the topic."""
    monkeypatch.setattr("eventpub.sink.markers._READ_AT_FIRST", 1)
    first = start("s0")
    first.take()
    assert first.publish(0, FIRST)
    assert first.publish(1, SECOND)
    for number in range(4):
        last = start(f"s{number + 1}")
        assert last.take(f"s{number}")
    assert not last.publish(1, SECOND)
    assert last.publish(2, THIRD)
    another = start("s9")
    assert another.take("s4")
    assert another.refused(1, SECOND) == "sink.checkpoint_behind"
    assert_published_once(kafka_server.bootstrap_servers, topic_name, FIRST, SECOND, THIRD)


def test_the_id_is_taken_from_those_named_or_from_nobody(start: Callable[[str], Start]) -> None:
    older, copy, later = start("s1"), start("s2"), start("s3")
    markers = later.sink.markers
    assert not older.take("s0"), "there is no marker"
    assert older.take()
    assert copy.take("s1", "s2")
    assert not later.take("s1")
    assert not later.take("s2", query="q2")
    assert markers.owner() == ("q", "s2")
    looked: list[Any] = []

    def look_too_early(self: Markers) -> Any:
        found = of_topic(self)
        if not looked:
            looked.append(found)
            assert older.take()
        return found

    of_topic = Markers.owner
    with patch.object(Markers, "owner", look_too_early), pytest.raises(SinkError) as caught:
        later.take("s2")
    assert caught.value.code == "sink.fenced"
    assert looked == [("q", "s2")]
    assert markers.owner() == ("q", "s1")
