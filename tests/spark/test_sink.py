"""The sink `eventpub`, its writer called as in a task of Spark's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import AlterConfigOpType, ConfigEntry, ConfigResource
from confluent_kafka.admin._resource import ResourceType
from confluent_kafka.cimpl import NewTopic
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    StringType,
    StructField,
    StructType,
)

from eventpub import times
from eventpub.admission.model import SkippedGap
from eventpub.channel import PartitionId
from eventpub.coordinator.events import CheckTopic
from eventpub.errors import EventpubError, SinkError, find_marked
from eventpub.local.servers import Kafka
from eventpub.sink import numbered
from eventpub.sink.batch import Producing
from eventpub.sink.client import Clients
from eventpub.sink.markers import Markers
from eventpub.sink.records import SOURCE
from eventpub.sink.topics import list_offsets
from eventpub.sink.transaction import TransactionWriter, fence_all, transactional_id
from eventpub.spark import SourceError, monitor, sink_task
from eventpub.spark import rows as of_spark
from eventpub.spark.checkpoint import require_still_owner
from eventpub.spark.monitor import TopicWatch
from eventpub.spark.options import SinkOptions, sink_options
from eventpub.spark.sink import EventpubSink, Published, Writer
from tests.conftest import FreshDatabase
from tests.publisher.harness import commit, create_table, eventually
from tests.sink.helpers import CREATED, read_topic
from tests.spark import cut_off, redivided
from tests.tcp_proxy import TcpProxy

_FIELDS: list[Any] = [
    ("aggregate_id", pa.string()),
    ("version", pa.int64()),
    ("event_type", pa.string()),
    ("payload", pa.binary()),
    ("metadata", pa.string()),
    ("create_time", pa.timestamp("us", tz="UTC")),
    ("late", pa.bool_()),
    ("kind", pa.string()),
    ("reason", pa.string()),
    ("detail", pa.string()),
]
ROWS: Any = pa.schema(_FIELDS)


def event(aggregate_id: str, version: int, kind: str = "event", **columns: Any) -> dict[str, Any]:
    """A row of the source."""
    nothing = {"metadata": None, "reason": None, "detail": None}
    row = {"event_type": "t", "payload": b"p", "create_time": CREATED, "late": False, **nothing}
    return row | {"aggregate_id": aggregate_id, "version": version, "kind": kind} | columns


_PLAIN_FIELDS: list[Any] = [
    ("key", pa.string()),
    ("value", pa.binary()),
    ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
    ("topic", pa.string()),
    ("partition", pa.int32()),
]
PLAIN: Any = pa.schema(_PLAIN_FIELDS)


def plain(key: str | None, value: str, **columns: Any) -> dict[str, Any]:
    """A row with Spark's columns."""
    nothing = {"headers": None, "topic": None, "partition": None}
    return {"key": key, "value": value.encode(), **nothing, **columns}


class Task:
    """One sink, and the batches that its tasks write.

    Args:
        server: the broker.
        options: of the sink.
    """

    def __init__(self, server: Kafka, topic: str, query: str = "q1", **options: str) -> None:
        self.options = {
            "id": f"id-{topic}",
            "topic": topic,
            "kafka.bootstrap.servers": server.bootstrap_servers,
            "partitions": "4",
            **options,
        }
        self.query = query
        self.part = 1_000
        self.attempt = 0
        self.run = "r1"

    def write(
        self, batch: int, rows: list[dict[str, Any]], task: int = 0, schema: Any = ROWS
    ) -> Published:
        """Write the rows of a task."""
        properties = {
            "sql.streaming.queryId": self.query,
            "streaming.sql.batchId": str(batch),
            "spark.jobGroup.id": self.run,
        }
        context = SimpleNamespace(
            getLocalProperty=properties.get,
            partitionId=lambda: task,
            attemptNumber=lambda: self.attempt,
        )
        table = pa.Table.from_pylist(rows, schema=schema)
        _task.context = context
        return self.writer(schema).write(iter(table.to_batches(max_chunksize=self.part)))

    def writer(self, schema: Any = ROWS) -> Writer:
        """As Spark has one, in driver and tasks."""
        return EventpubSink(self.options).streamWriter(from_arrow_schema(schema), False)

    def refused(self, *arguments: Any, **more: Any) -> EventpubError:
        """The error that such a write ends with."""
        with pytest.raises(SourceError) as failed:
            self.write(*arguments, **more)
        error = find_marked(str(failed.value))
        assert error is not None
        return error


def versions(server: Kafka, topic: str) -> list[tuple[str, int]]:
    """What is visible: aggregate and version."""
    return [
        (record.key().decode(), int(dict(record.headers())["ce_sequence"]))
        for record in read_topic(server.bootstrap_servers, topic)
    ]


_task = threading.local()


@pytest.fixture(autouse=True)
def tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads are tasks of Spark's; whether rows were cut off is tried with a real one below."""
    monkeypatch.setattr(sink_task, "TaskContext", SimpleNamespace(get=lambda: _task.context))
    monkeypatch.setattr(of_spark, "require_whole_input", lambda: None)


@pytest.fixture
def sink(kafka_server: Kafka, topic_name: str) -> Task:
    return Task(kafka_server, topic_name)


def test_a_batch_is_published_once_however_often_it_is_written(
    sink: Task, kafka_server: Kafka, topic_name: str
) -> None:
    first, second = [event("a", 1), event("a", 2)], [event("a", 3)]
    assert sink.write(0, first).is_new
    assert not sink.write(0, first).is_new
    assert sink.write(1, second).is_new
    stalled = sink.refused(0, first)
    assert stalled.code == "sink.checkpoint_behind", "an attempt that was stalled since"
    assert not sink.write(1, second).is_new
    assert versions(kafka_server, topic_name) == [("a", 1), ("a", 2), ("a", 3)]


def test_each_task_of_a_batch_is_told_apart(
    sink: Task, kafka_server: Kafka, topic_name: str
) -> None:
    assert sink.write(0, [event("a", 1)], task=0).is_new
    assert sink.write(0, [event("b", 1)], task=1).is_new
    assert not sink.write(0, [event("b", 1)], task=1).is_new
    assert not sink.write(0, [event("a", 1)], task=0).is_new
    assert sink.write(7, [event("c", 1)], task=2).is_new
    assert sink.write(7, [event("a", 2)], task=0).is_new
    assert sorted(versions(kafka_server, topic_name)) == [("a", 1), ("a", 2), ("b", 1), ("c", 1)]


def test_markers_are_found_however_many_tasks_there_are(
    sink: Task, kafka_server: Kafka, topic_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eventpub.sink.markers._READ_AT_FIRST", 2)
    sink.write(0, [event("b", 1)])
    for task in range(6):
        assert sink.write(3, [event(f"a-{task}", 1)], task=task).is_new
    for task in range(6):
        assert not sink.write(3, [event(f"a-{task}", 1)], task=task).is_new
    assert len(versions(kafka_server, topic_name)) == 7


def test_an_empty_part_of_a_batch_costs_no_transaction(sink: Task) -> None:
    assert sink.write(0, [], task=1) == Published(0, False, 1)


def test_a_repeated_batch_with_other_rows_is_refused(
    sink: Task, kafka_server: Kafka, topic_name: str
) -> None:
    sink.write(0, [event("a", 1)])
    assert sink.refused(0, [event("a", 1), event("a", 2)]).code == "sink.batch_changed"
    assert versions(kafka_server, topic_name) == [("a", 1)]


@pytest.mark.parametrize("is_plain", [True, False])
def test_a_repeated_batch_may_have_its_rows_in_another_order(
    sink: Task,
    kafka_server: Kafka,
    topic_name: str,
    is_plain: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after a shuffle, which gives a task the same rows in the order of their arrival."""
    monkeypatch.setattr(numbered, "_CONFIRMED_WITHIN", 0.5)
    schema = PLAIN if is_plain else ROWS
    rows = [plain(f"k{n % 3}", f"v{n % 5}") if is_plain else event("a", n) for n in range(20)]
    assert sink.write(0, rows, schema=schema).is_new
    sink.run, sink.part = "r2", 3
    for changed in (rows[1:], [*rows, rows[0]], [*rows[1:], rows[1]]):
        refused = sink.refused(0, changed, schema=schema)
        assert refused.code == "sink.batch_changed"
        assert "published as part 0" in refused.message
    assert not sink.write(0, rows[::-1], schema=schema).is_new
    for changed in (rows[1:], [*rows, rows[0]], [*rows[1:], rows[1]]):
        refused = sink.refused(0, changed, schema=schema)
        assert refused.code == "sink.batch_changed"
        assert f"({len(changed)}) than it published before (20)" in refused.message
    assert len(read_topic(kafka_server.bootstrap_servers, topic_name)) == 20


def test_a_repeated_batch_with_other_headers_or_a_value_moved_to_the_key_is_refused(
    sink: Task,
) -> None:
    sink.write(0, [plain("ab", "c"), plain(None, "")], schema=PLAIN)
    headers = [{"key": "h", "value": b"1"}]
    for rows in (
        [plain("a", "bc"), plain(None, "")],
        [plain("ab", "c"), plain("", "")],
        [plain("ab", "c", headers=headers), plain(None, "")],
    ):
        assert sink.refused(0, rows, schema=PLAIN).code == "sink.batch_changed"


def test_a_task_that_had_rows_and_is_empty_when_repeated_is_refused(
    sink: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numbered, "_CONFIRMED_WITHIN", 0.5)
    sink.write(0, [event("a", 1)])
    sink.write(1, [event("a", 2)], task=3)
    sink.run = "r2"
    assert sink.refused(1, [], task=3).code == "sink.batch_changed"
    assert sink.write(1, [], task=2) == Published(0, False, 2)


def test_a_repeated_batch_in_another_number_of_tasks_publishes_nothing(
    sink: Task, kafka_server: Kafka, topic_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Task 1 of three has rows that task 0 of two has published."""
    monkeypatch.setattr(numbered, "_CONFIRMED_WITHIN", 0.5)
    rows = [event(f"a-{n}", 1) for n in range(6)]
    sink.write(0, rows[:3], task=0)
    sink.run = "r2"
    refused = sink.refused(0, rows[2:4], task=1)
    assert refused.code == "sink.batch_changed"
    assert "published as part 0" in refused.message
    assert sink.refused(0, rows[:2], task=0).code == "sink.batch_changed"
    assert len(versions(kafka_server, topic_name)) == 3
    assert not sink.write(0, rows[:3], task=0).is_new
    assert sink.write(0, rows[3:], task=1).is_new, "divided as before"
    assert sorted(versions(kafka_server, topic_name)) == [(f"a-{n}", 1) for n in range(6)]


@pytest.mark.parametrize("published", [(0,), (1,), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("order", [(1, 0, 2), (1, 2, 0), (2, 1, 0)])
def test_a_start_may_number_the_tasks_of_a_batch_otherwise(
    sink: Task, kafka_server: Kafka, topic_name: str, published: tuple[int, ...], order: Any
) -> None:
    """As Spark's source for Kafka does, whose first plan has its partitions in any order."""
    rows = [[event(f"{name}-{n}", 1) for n in range(3)] for name in "abb"]  # two have the same
    rows[2] = rows[1]
    for task in published:
        assert sink.write(0, rows[task], task).is_new
    for run in ("r2", "r3"):
        sink.run = run
        with ThreadPoolExecutor() as pool:
            done = [pool.submit(sink.write, 0, rows[order[task]], task) for task in range(3)]
        assert sum(each.result().is_new for each in done) == (3 - len(published)) * (run == "r2")
        numbers = {each.result().task for each in done}
        assert numbers == {0, 1, 2}
        order = order[::-1]
    for task in range(3):
        assert not sink.write(0, rows[order[::-1][task]], task).is_new, "repeated in the same start"
    found = sorted(versions(kafka_server, topic_name))
    assert found == sorted((row["aggregate_id"], 1) for part in rows for row in part)


def test_tasks_that_have_not_published_wait_for_those_that_have(
    sink: Task, kafka_server: Kafka, topic_name: str
) -> None:
    sink.write(0, [event("b", 1)], task=1)
    sink.run = "r2"
    with ThreadPoolExecutor() as pool:
        first = pool.submit(sink.write, 0, [event("a", 1)], 0)
        time.sleep(2)
        assert versions(kafka_server, topic_name) == [("b", 1)]
        assert not sink.write(0, [event("b", 1)], 1).is_new
        assert first.result(20).is_new
    assert sink.write(1, [event("a", 2)]).is_new


def test_an_outage_of_the_broker_is_waited_for_from_the_start(
    kafka_server: Kafka, topic_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eventpub.sink.topics.REACH_TIMEOUT", 0.5)
    with TcpProxy(None) as proxy, ThreadPoolExecutor() as pool:
        sink = Task(kafka_server, topic_name)
        sink.options["kafka.bootstrap.servers"] = f"127.0.0.1:{proxy.port}"
        with monkeypatch.context() as patched:
            patched.setattr(times, "OUTAGE", 1.0)
            assert sink.refused(0, [event("a", 1)]).code == "sink.unreachable"
        written = pool.submit(sink.write, 0, [event("a", 1)])
        time.sleep(3)
        assert not written.done()
        proxy.target = int(kafka_server.bootstrap_servers.rpartition(":")[2])
        assert written.result(60).is_new
    assert versions(kafka_server, topic_name) == [("a", 1)]


@pytest.mark.parametrize("option", ["id", "topic"])
def test_a_query_that_goes_on_with_another_id_or_topic_is_refused(
    sink: Task, kafka_server: Kafka, topic_name: str, option: str
) -> None:
    """Whether its last batch was published is noted for the former one."""
    for batch in range(3):
        sink.write(batch, [event("a", batch + 1)])
    sink.run = "r2"
    sink.options[option] += "-2"
    refused = sink.refused(2, [event("a", 3)])
    assert refused.code == "sink.markers_gone"
    assert 'after_query to "q1"' in (refused.suggestion or "")
    assert len(versions(kafka_server, topic_name)) == 3
    sink.options["after_query"] = "q1"
    if option == "topic":
        assert sink.refused(2, [event("a", 3)]).code == "sink.topic_missing"
    else:
        assert sink.write(3, [event("a", 4)]).is_new


def test_two_queries_of_one_id_with_two_topics_lose_and_repeat_nothing(
    sink: Task, kafka_server: Kafka, topic_name: str
) -> None:
    """Their tasks have the same transactional ids, and fence each other."""
    other = Task(kafka_server, f"{topic_name}-2", "q2", id=sink.options["id"])

    def write(one: Task) -> None:
        for batch in range(15):
            one.write(batch, [event("a", batch + 1), event("b", batch + 1)])

    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(write, one) for one in (sink, other)]:
            done.result(120)
    for topic in (topic_name, f"{topic_name}-2"):
        found = versions(kafka_server, topic)
        assert sorted(found) == [(key, n) for key in "ab" for n in range(1, 16)]


def test_a_task_that_commits_while_its_query_is_taken_over_does_not_get_the_id_back(
    sink: Task, kafka_server: Kafka, topic_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the marker of the new owner and the fence; the new owner stopped, not the old."""
    sink.write(0, [event("a", 1)])
    written: list[Any] = []

    def fence_later(*arguments: Any) -> None:
        if not written:
            written.append(None)
            with patch.object(Markers, "number_of", lambda *_: 0):  # it has looked before
                assert sink.write(1, [event("a", 2)]).is_new
        fence_all(*arguments)

    monkeypatch.setattr(numbered, "fence_all", fence_later)
    options = sink_options(sink.options)
    successor = numbered.NumberedSink(Clients(options.sink), options.id)
    successor.take("threads-1", 4)
    assert written
    assert successor.markers.owner() == ("threads-1", "threads-1")
    numbered.require_owner(Clients(options.sink), options.id, "threads-1")
    assert sink.refused(2, [event("a", 3)]).code == "sink.other_query"
    assert versions(kafka_server, topic_name) == [("a", 1), ("a", 2)]
    # nor does a publisher that replaces its checkpoint meanwhile take the id back
    app: Any = SimpleNamespace(id=options.id)
    config: Any = SimpleNamespace(app=app, sink=options.sink)
    require_still_owner(config, "threads-1")
    with pytest.raises(SinkError) as found:
        require_still_owner(config, "q1")
    assert found.value.code == "sink.other_query"
    # nor does one that was slow to take it, once a later one has
    later = Task(kafka_server, topic_name, "q9", after_query="threads-1")
    assert later.write(0, [event("a", 3)]).is_new
    assert successor.markers.are_after("threads-1"), "it has not said so by `take`"
    numbered.NumberedSink(Clients(options.sink), options.id).take("q9", 4)
    assert later.write(1, [event("a", 4)]).is_new
    assert not successor.markers.are_after("threads-1")


def test_another_query_with_the_same_id_is_refused_and_may_follow_by_name(
    sink: Task, kafka_server: Kafka, topic_name: str
) -> None:
    sink.write(0, [event("a", 1)])
    other = Task(kafka_server, topic_name, "q2")
    refused = other.refused(0, [event("a", 1)])
    assert refused.code == "sink.other_query"
    assert 'after_query to "q1"' in (refused.suggestion or "")
    assert sink.write(1, [event("a", 2)]).is_new, "it was not fenced"
    follows = Task(kafka_server, topic_name, "q2", after_query="q1")
    assert follows.write(0, [event("b", 1)], task=0).is_new
    assert follows.write(0, [event("c", 1)], task=1).is_new
    assert sink.refused(2, [event("a", 3)]).code == "sink.other_query"
    assert follows.write(1, [event("b", 2)]).is_new
    del follows.options["after_query"]
    assert follows.write(2, [event("b", 3)], task=1).is_new, "it owns the id from then on"


def test_what_an_older_attempt_has_open_is_aborted(
    sink: Task, kafka_server: Kafka, topic_name: str
) -> None:
    sink.write(0, [event("a", 1)])
    options = sink_options(sink.options)
    stalled = TransactionWriter(Clients(options.sink), options.id, 0)
    stalled.ready()
    stalled.client.begin_transaction()
    stalled.client.produce(topic_name, b"stalled", b"a", partition=0)
    stalled.client.flush(10)
    assert sink.write(1, [event("a", 2)]).is_new
    with pytest.raises(Exception, match=r"(?i)fenced|epoch"):
        stalled.client.commit_transaction(10)
    assert versions(kafka_server, topic_name) == [("a", 1), ("a", 2)]


def test_markers_behind_another_tasks_open_transaction_are_waited_for(
    sink: Task, kafka_server: Kafka, topic_name: str
) -> None:
    """A reader of what is stable would not see them, and publish the batch again."""
    sink.write(0, [event("a", 1)])
    other = Producer(
        {
            "bootstrap.servers": kafka_server.bootstrap_servers,
            "transactional.id": f"other-{topic_name}",
            "transaction.timeout.ms": 3000,
        }
    )
    other.init_transactions(10)
    other.begin_transaction()
    options = sink_options(sink.options)
    place = markers_of(options).place
    other.produce(place[0], b"{}", b"someone/0", partition=place[1])
    other.flush(10)
    sink.write(1, [event("a", 2)], task=1)
    assert not sink.write(1, [event("a", 2)], task=1).is_new
    assert versions(kafka_server, topic_name) == [("a", 1), ("a", 2)]


def markers_of(options: SinkOptions) -> Markers:
    """Those of its batches."""
    return numbered.NumberedSink(Clients(options.sink), options.id).markers


@contextmanager
def held(server: Kafka, place: PartitionId, app_id: str) -> Iterator[None]:
    """A partition with a transaction of an id's that none of its tasks can end."""
    settings = {"bootstrap.servers": server.bootstrap_servers, "transactional.id": f"x-{place}"}
    lost = Producer(settings)
    lost.init_transactions(10)
    lost.begin_transaction()
    lost.produce(place[0], b"", b"lost", partition=place[1], headers=[(SOURCE, app_id)])
    lost.flush(10)
    yield
    lost.abort_transaction(10)


def test_markers_that_stay_hidden_fail_the_task(
    sink: Task, kafka_server: Kafka, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for ever, where only a new checkpoint helps."""
    sink.write(0, [event("a", 1)])
    options = sink_options(sink.options)
    markers = markers_of(options)
    monkeypatch.setattr("eventpub.sink.markers.unnoticed_for", lambda _: 0.5)
    with held(kafka_server, markers.place, options.id):
        error = sink.refused(1, [event("a", 2)])
    assert (error.code, error.retriable) == ("sink.hanging_transaction", True)
    assert sink.write(1, [event("a", 2)]).is_new


def test_nothing_is_written_behind_a_transaction_that_was_left_open(
    sink: Task, kafka_server: Kafka, topic_name: str
) -> None:
    """Its records would be visible, or lost, by the outcome of the next one."""
    sink.write(0, [event("a", 1)])
    options = replace(sink_options(sink.options), query="q1", partitions=4)
    [first] = read_topic(kafka_server.bootstrap_servers, topic_name)
    place = (topic_name, first.partition())
    with patch.object(Writer, "options", options):
        with held(kafka_server, place, "another"):
            assert sink.write(1, [event("a", 2)]).is_new, "other publishers may take their time"
        with held(kafka_server, place, options.id):
            assert sink.refused(2, [event("a", 3)]).code == "sink.hanging_transaction"
        assert sink.write(2, [event("a", 3)]).is_new
    assert versions(kafka_server, topic_name) == [("a", 1), ("a", 2), ("a", 3)]


@pytest.mark.parametrize("where", ["topic", "markers"])
def test_a_transaction_that_was_left_open_is_noticed_without_any_rows(
    sink: Task, kafka_server: Kafka, topic_name: str, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    sink.write(0, [event("a", 1)])
    options = sink_options(sink.options)
    taken = iter(range(1, 9))
    watch = _watch(options, lambda: next(taken))
    monkeypatch.setattr(watch._work, "do", lambda command: command)
    markers = markers_of(options)
    place = (topic_name, 0) if where == "topic" else markers.place
    watch.do(CheckTopic({}))
    watch.do(CheckTopic({}))
    assert watch.visible_upto == 2, "nothing is open"
    with held(kafka_server, place, options.id):
        for _ in range(3):
            watch.do(CheckTopic({}))
        assert watch.visible_upto == 2, "what came later may be hidden"
        monkeypatch.setattr(monitor, "unnoticed_for", lambda _: 0.0)
        with pytest.raises(SinkError) as found:
            watch.do(CheckTopic({}))
    assert found.value.code == "sink.hanging_transaction"


def test_records_that_a_broker_has_lost_are_noticed_while_the_query_runs(
    sink: Task, kafka_server: Kafka, topic_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink.write(0, [event("a", 1)])
    options = sink_options(sink.options)
    watch = _watch(options, lambda: 0)
    monkeypatch.setattr(watch._work, "do", lambda command: command)
    [first] = read_topic(kafka_server.bootstrap_servers, topic_name)
    place = (topic_name, first.partition())

    def is_known() -> bool:  # consumers see a transaction a moment after its commit
        watch.do(CheckTopic({}))
        return place in watch.ends

    eventually(is_known)
    watch.ends = known = {**watch.ends, place: watch.ends[place] + 2}
    with pytest.raises(SinkError) as found:
        watch.do(CheckTopic({}))
    assert found.value.code == "sink.topic_recreated"
    watch.measure()
    assert watch.ends == known, "else the next start would believe the broker"


def _watch(options: SinkOptions, taken: Callable[[], int]) -> TopicWatch:
    app: Any = SimpleNamespace(id=options.id)
    config: Any = SimpleNamespace(app=app, sink=options.sink, run=SimpleNamespace(shards=4))
    parts = SimpleNamespace(clients=Clients(options.sink))
    prepared: Any = SimpleNamespace(
        assignment=SimpleNamespace(config=config, parts=parts, partitions=4),
        topics={},
        start_state=SimpleNamespace(acknowledged={}),
    )
    return TopicWatch(prepared, dict, taken)


@pytest.mark.parametrize("code", ["sink.indefinite", "sink.aborted", "sink.fenced"])
@pytest.mark.parametrize("is_done", [True, False])
def test_an_unknown_answer_is_never_success(
    sink: Task,
    kafka_server: Kafka,
    topic_name: str,
    monkeypatch: pytest.MonkeyPatch,
    code: str,
    is_done: bool,
) -> None:
    sink.write(0, [event("a", 1)])
    run, calls = TransactionWriter.run, []

    def doubtful(*arguments: Any, **more: Any) -> None:
        calls.append(1)
        if is_done or len(calls) > 1:
            run(*arguments, **more)
        if len(calls) == 1:
            raise SinkError(code, "no answer", retriable=True)

    monkeypatch.setattr(TransactionWriter, "run", doubtful)
    monkeypatch.setattr(times, "_FIRST_PAUSE", 0.01)
    sink.write(1, [event("a", 2)])
    assert versions(kafka_server, topic_name) == [("a", 1), ("a", 2)]


@pytest.mark.parametrize("is_spark_s", [True, False])
def test_a_repeated_attempt_believes_no_leader_alone(
    sink: Task,
    kafka_server: Kafka,
    topic_name: str,
    monkeypatch: pytest.MonkeyPatch,
    is_spark_s: bool,
) -> None:
    """One that is cut off from the other brokers does not have the marker of the first attempt."""
    sink.write(0, [event("a", 1)])
    old: dict[Any, int] = {}
    run = TransactionWriter.run

    def listed(*arguments: Any, **more: Any) -> Any:
        return {
            place: old.get(place, end) for place, end in list_offsets(*arguments, **more).items()
        }

    def disagree(_: Any, places: list[Any]) -> None:
        if old:
            old.clear()  # as by a new client
            raise SinkError("sink.unreachable", f"who leads {places}?", retriable=True)

    def lost(*arguments: Any, **more: Any) -> None:
        run(*arguments, **more)
        monkeypatch.setattr(TransactionWriter, "run", run)
        old.update(before)
        if not is_spark_s:
            raise SinkError("sink.indefinite", "no answer", retriable=True)

    options = sink_options(sink.options)
    markers = markers_of(options)
    before = list_offsets(Clients(options.sink), [markers.place], "latest")
    monkeypatch.setattr("eventpub.sink.markers.list_offsets", listed)
    monkeypatch.setattr("eventpub.sink.markers.check_leaders", disagree)
    monkeypatch.setattr(times, "_FIRST_PAUSE", 0.01)
    monkeypatch.setattr(TransactionWriter, "run", lost)
    sink.write(1, [event("a", 2)])
    if is_spark_s:
        sink.attempt = 1
        assert not sink.write(1, [event("a", 2)]).is_new
    assert versions(kafka_server, topic_name) == [("a", 1), ("a", 2)]


def test_skips_dead_letters_and_diverted_events_go_to_their_topics(
    kafka_server: Kafka, topic_name: str
) -> None:
    sink = Task(kafka_server, topic_name)
    gap = {
        "aggregate_id": "a", "from_version": 2, "to_version": 2, "first_seen": CREATED,
        "skipped_at": CREATED, "attempts": 3, "reason": "max_backoff",
    }  # fmt: skip
    sink.write(
        0,
        [
            event("a", 1),
            event("a", 2, "skip", reason="max_backoff", detail=json.dumps(gap)),
            event("a", 3, late=True),
            event("b", 0, "dead", reason="admission.version_below_first", detail="{}"),
            event("c", 1, "late"),
        ],
    )
    servers = kafka_server.bootstrap_servers
    plain, late = read_topic(servers, topic_name)
    assert "eventpub_late" not in dict(plain.headers())
    assert dict(late.headers())["eventpub_late"] == b"1"
    assert dict(plain.headers())["ce_source"] == sink.options["id"].encode()
    [skip] = read_topic(servers, f"{topic_name}.gaps")
    assert json.loads(skip.value())["from_version"] == 2
    [dead] = read_topic(servers, f"{topic_name}.dead")
    assert dead.key() == b"b"
    [diverted] = read_topic(servers, f"{topic_name}.late")
    assert diverted.key() == b"c"


def test_a_row_that_the_broker_refuses_is_a_dead_letter_and_the_rest_goes(
    sink: Task, kafka_server: Kafka, topic_name: str
) -> None:
    rows = [event("a", 1), event("b", 1, payload=b"x" * 2_000_000), event("c", 1)]
    assert sink.write(0, rows).is_new
    assert not sink.write(0, rows).is_new
    assert sorted(versions(kafka_server, topic_name)) == [("a", 1), ("c", 1)]
    [dead] = read_topic(kafka_server.bootstrap_servers, f"{topic_name}.dead")
    assert dead.key() == b"b"
    limited = Task(kafka_server, f"{topic_name}-2", dead_limit="1")
    too_many = [event(f"a-{n}", 1, payload=b"x" * 2_000_000) for n in range(2)]
    assert limited.refused(0, too_many).code == "sink.too_many_refused"


@pytest.mark.parametrize("schema", [ROWS, PLAIN], ids=["source", "plain"])
def test_side_topics_are_created_beside_a_topic_that_was_there(
    kafka_server: Kafka, topic_name: str, schema: Any
) -> None:
    """Without them, the first row that is refused would stop the query for good."""
    create_topic(kafka_server, topic_name, 6)
    sink, large = Task(kafka_server, topic_name), "x" * 2_000_000
    if schema is PLAIN:
        rows = [plain(f"k-{n}", large) for n in range(9)]
    else:
        rows = [event(f"k-{n}", 1, payload=large.encode()) for n in range(9)]
    assert sink.write(0, rows, schema=schema).is_new
    dead = read_topic(kafka_server.bootstrap_servers, f"{topic_name}.dead")
    assert sorted(record.key() for record in dead) == [f"k-{n}".encode() for n in range(9)]


def test_a_side_topic_with_fewer_partitions_is_named(kafka_server: Kafka, topic_name: str) -> None:
    create_topic(kafka_server, topic_name, 6)
    create_topic(kafka_server, f"{topic_name}.dead", 1)
    sink = Task(kafka_server, topic_name)
    assert sink.write(0, [event("a", 1)]).is_new, "it is not needed yet"
    error = sink.refused(1, [event("a", 2, "dead", reason="r", detail="{}")])
    assert error.code == "sink.partition_count"
    assert f"--alter --topic {topic_name}.dead --partitions 6" in str(error)


@pytest.mark.parametrize("part", [1, 1_000])
def test_refused_rows_are_counted_in_a_row(kafka_server: Kafka, topic_name: str, part: int) -> None:
    """A batch of many rows may have more of them, and batches of one row each no more."""
    sink = Task(kafka_server, topic_name, dead_limit="2")
    sink.part = part
    large = b"x" * 2_000_000

    def rows(name: str, pattern: str) -> list[dict[str, Any]]:
        return [
            event(f"{name}-{n}", 1, payload=large if each == "x" else b"p")
            for n, each in enumerate(pattern)
        ]

    assert sink.write(0, rows("a", "x.xx.x")).is_new, "four, and never three in a row"
    assert sink.write(1, rows("b", "x"), task=1).is_new, "those of each task for themselves"
    assert sink.write(1, rows("b", "x")).is_new
    assert sink.refused(2, rows("c", "x")).code == "sink.too_many_refused"
    assert sink.write(2, rows("c", ".")).is_new
    assert sink.write(3, rows("d", "xx")).is_new


def test_rows_with_sparks_columns_are_published_as_they_are(
    kafka_server: Kafka, topic_name: str
) -> None:
    sink, servers = Task(kafka_server, topic_name), kafka_server.bootstrap_servers
    headers = [None, {"key": "h", "value": b"1"}]
    nothing = {"headers": None, "topic": None, "partition": None}
    rows: list[Any] = [
        {"key": "k", "value": b"v", **nothing, "headers": headers, "partition": 3},
        {"key": "k", "value": b"w", **nothing},
        {"key": None, "value": None, **nothing, "topic": f"{topic_name}-2"},
        {"key": "k", "value": b"x" * 2_000_000, **nothing},
    ]
    assert sink.write(0, rows, schema=PLAIN).is_new
    assert not sink.write(0, rows, schema=PLAIN).is_new
    found = read_topic(servers, topic_name)
    assert sorted((r.key(), r.value()) for r in found) == [(b"k", b"v"), (b"k", b"w")]
    assert {r.value(): r.headers() for r in found}[b"v"] == [("h", b"1")]
    assert {r.value(): r.partition() for r in found}[b"v"] == 3
    [other] = read_topic(servers, f"{topic_name}-2")
    assert (other.key(), other.value()) == (None, None)
    assert len(read_topic(servers, f"{topic_name}.dead")) == 1


@pytest.mark.parametrize("how", ["raises", "killed"])
def test_rows_that_only_stop_coming_are_not_published(
    kafka_server: Kafka, topic_name: str, tmp_path: Path, how: str
) -> None:
    """Spark's worker sees an end like any other where the source has failed in the middle."""
    servers = kafka_server.bootstrap_servers
    job = [sys.executable, "-m", "tests.spark.cut_off", str(tmp_path), topic_name, servers, how]
    done = subprocess.run(job, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    values = [record.value() for record in read_topic(servers, topic_name)]
    assert len(values) == len(set(values)) == cut_off.ROWS


def test_a_query_that_is_started_again_with_other_tasks_repeats_nothing(
    kafka_server: Kafka, topic_name: str, tmp_path: Path
) -> None:
    servers = kafka_server.bootstrap_servers
    job = [sys.executable, "-m", "tests.spark.redivided", str(tmp_path), topic_name, servers]
    done = subprocess.run(job, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    values = sorted(int(record.value()) for record in read_topic(servers, topic_name))
    assert values == [*range(redivided.ROWS)]


def create_topic(server: Kafka, topic: str, partitions: int) -> None:
    admin = AdminClient({"bootstrap.servers": server.bootstrap_servers})
    admin.create_topics([NewTopic(topic, partitions)])[topic].result(10)


def limit(server: Kafka, topics: list[str], size: int) -> None:
    """Have the broker take no larger records."""
    admin = AdminClient({"bootstrap.servers": server.bootstrap_servers})
    operation = AlterConfigOpType.SET
    entry = ConfigEntry("max.message.bytes", str(size), incremental_operation=operation)
    resources = [
        ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry]) for topic in topics
    ]
    for done in admin.incremental_alter_configs(resources).values():
        done.result(10)


@pytest.mark.parametrize("part", [3, 1_000])
def test_rows_that_the_broker_alone_refuses_are_dead_letters(
    sink: Task, kafka_server: Kafka, topic_name: str, part: int
) -> None:
    sink.write(0, [event("z", 0, "dead", reason="admission.version_below_first", detail="{}")])
    limit(kafka_server, [topic_name], 50_000)
    sink.part = part
    large = {1, 2, 7}
    rows = [event(f"a-{n}", 1, payload=os.urandom(90_000 * (n in large))) for n in range(12)]
    assert sink.write(1, rows).is_new
    assert sorted(versions(kafka_server, topic_name)) == sorted(
        (f"a-{n}", 1) for n in range(12) if n not in large
    )
    dead = read_topic(kafka_server.bootstrap_servers, f"{topic_name}.dead")
    assert {record.key() for record in dead} == {b"z", b"a-1", b"a-2", b"a-7"}


@pytest.mark.parametrize("part", [40, 1_000])
def test_all_rows_that_the_broker_refuses_are_found_in_one_pass(
    kafka_server: Kafka, topic_name: str, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    """One refused row ends a transaction: each cost all that were before it once more."""
    admin = AdminClient({"bootstrap.servers": kafka_server.bootstrap_servers})
    compacted = NewTopic(topic_name, 4, 1, config={"cleanup.policy": "compact"})
    admin.create_topics([compacted])[topic_name].result(10)
    sink, runs, sent = Task(kafka_server, topic_name), list[int](), list[Any]()
    sink.part = part
    sink.write(0, [plain("z", "0")], schema=PLAIN)
    run, produce = TransactionWriter.run, Producing._produce_rows

    def counted_run(*arguments: Any, **more: Any) -> None:
        runs.append(1)
        run(*arguments, **more)

    def counted_produce(self: Any, topic: str, rows: Any, batch: Any) -> None:
        rows = list(rows)
        sent.extend(rows)
        produce(self, topic, rows, batch)

    monkeypatch.setattr(TransactionWriter, "run", counted_run)
    monkeypatch.setattr(Producing, "_produce_rows", counted_produce)
    limit(kafka_server, [topic_name], 20_000)
    rows = [plain(None if n % 10 == 3 else f"k{n}", "v") for n in range(120)]
    for n in (17, 64):
        rows[n]["value"] = os.urandom(40_000)
    rows[90]["value"] = b"x" * 90_000  # small when compressed
    assert sink.write(1, rows, schema=PLAIN).is_new
    assert len(runs) <= 4, "all at once, one by one, and without the refused rows"
    assert len(sent) < 800
    found = read_topic(kafka_server.bootstrap_servers, topic_name)
    expected = [f"k{n}" for n in range(120) if n % 10 != 3 and n not in (17, 64)]
    assert sorted(record.key().decode() for record in found) == sorted(["z", *expected])
    dead = read_topic(kafka_server.bootstrap_servers, f"{topic_name}.dead")
    reasons = [dict(record.headers())["eventpub_reason"].decode() for record in dead]
    assert len(reasons) == 14
    assert sum("INVALID_RECORD" in reason for reason in reasons) == 12
    assert sum("larger than the topic's max.message.bytes" in reason for reason in reasons) == 2


def test_a_dead_letter_that_is_refused_itself_goes_without_its_payload(
    sink: Task, kafka_server: Kafka, topic_name: str
) -> None:
    sink.write(0, [event("z", 0, "dead", reason="admission.version_below_first", detail="{}")])
    limit(kafka_server, [topic_name, f"{topic_name}.dead"], 50_000)
    assert sink.write(1, [event("a", 1, payload=os.urandom(100_000)), event("a", 2)]).is_new
    assert versions(kafka_server, topic_name) == [("a", 2)]


def test_a_row_whose_key_alone_is_too_large_is_a_dead_letter(
    sink: Task, kafka_server: Kafka, topic_name: str
) -> None:
    """Its dead letter was refused as well, at every start."""
    assert sink.write(0, [plain("k" * 1_500_000, "1"), plain("b", "2")], schema=PLAIN).is_new
    assert [r.key() for r in read_topic(kafka_server.bootstrap_servers, topic_name)] == [b"b"]
    [dead] = read_topic(kafka_server.bootstrap_servers, f"{topic_name}.dead")
    assert dead.key() is None
    assert dict(dead.headers())["eventpub_key_bytes"] == b"1500000"


@pytest.mark.parametrize("reduced", [False, True])
def test_a_dead_letter_of_a_plain_row_has_the_time_of_its_publication(
    sink: Task, kafka_server: Kafka, topic_name: str, reduced: bool
) -> None:
    """Retention by time would delete one of 1970 at once."""
    create_topic(kafka_server, f"{topic_name}.dead", 4)
    create_topic(kafka_server, topic_name, 4)
    if reduced:
        limit(kafka_server, [f"{topic_name}.dead"], 20_000)
    row = plain(os.urandom(15_000).hex() if reduced else "k", "x" * 2_000_000)
    assert sink.write(0, [row, plain("b", "2")], schema=PLAIN).is_new
    [dead] = read_topic(kafka_server.bootstrap_servers, f"{topic_name}.dead")
    assert abs(dead.timestamp()[1] / 1000 - time.time()) < 300


def test_a_query_owns_the_id_from_a_first_batch_without_rows(
    kafka_server: Kafka, topic_name: str
) -> None:
    Task(kafka_server, topic_name).write(0, [event("a", 1)])
    follows = Task(kafka_server, topic_name, "q2", after_query="q1")
    follows.write(0, [])
    assert follows.write(1, [event("b", 1)]).is_new


def test_a_checkpoint_that_is_older_than_the_topic_publishes_nothing(
    sink: Task, kafka_server: Kafka, topic_name: str
) -> None:
    for batch in range(6):
        sink.write(batch, [event("a", batch + 1)])
    sink.run = "r2"
    emptied = sink.refused(0, [event("a", 1)])
    assert emptied.code == "sink.checkpoint_behind", "it lacks its offsets alone"
    restored = sink.refused(3, [event("a", 4), event("new", 1)])
    assert restored.code == "sink.checkpoint_behind"
    assert "after_query = q1" in (restored.suggestion or "")
    assert len(versions(kafka_server, topic_name)) == 6


def test_events_that_have_lost_their_order_are_refused(sink: Task) -> None:
    """As by repartition(n): versions were published in descending order without a word."""
    large = os.urandom(900_000)
    rows = [event("a", 8), *(event("b", n, payload=large) for n in range(1, 7)), event("a", 7)]
    sink.part = 1
    refused = sink.refused(0, rows)
    assert refused.code == "config.invalid_value"
    assert "version 7 of 'a' comes after version 8" in refused.message
    assert 'repartition(n, "aggregate_id")' in str(refused.suggestion)
    in_order = [rows[-1], *rows[:-1]]
    assert sink.write(0, in_order).is_new


def test_what_the_source_may_yield_in_another_order_is_published(
    sink: Task, kafka_server: Kafka, topic_name: str
) -> None:
    gap = SkippedGap("a", 5, 6, CREATED, CREATED, 3, "r")
    rows = [
        event("a", 6, "skip", detail=json.dumps(asdict(gap))),
        event("a", 4),
        event("a", 7),
        event("a", 5, late=True),
        event("a", 8),
        event("a", 8),  # of a query that makes two rows of one
        event("a", 6, "late"),
        event("a", 7, "dead", reason="admission.version_conflict", detail="{}"),
        event("a", 9),
        event("b", 2, late=None),
        event("b", 1, late=None),
    ]
    assert sink.write(0, rows).is_new
    found = [4, 7, 5, 8, 8, 9]
    assert [v for a, v in versions(kafka_server, topic_name) if a == "a"] == found
    without = pa.schema([field for field in ROWS if field.name != "late"])
    rows = [event("c", 2), event("c", 1)]
    assert sink.write(1, rows, schema=without).is_new, "either may have been late"


def test_a_shuffle_that_divides_an_aggregate_is_refused(
    database: FreshDatabase, kafka_server: Kafka, topic_name: str, tmp_path: Path
) -> None:
    create_table(database)
    for number in range(4):
        commit(database, f"a-{number}", *range(1, 41))
    job = [sys.executable, "-m", "tests.spark.shuffled", str(tmp_path), database.url, topic_name]
    job.append(kafka_server.bootstrap_servers)
    done = subprocess.run(job, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    for way in ("by_aggregate", "coalesce"):
        found = versions(kafka_server, f"{topic_name}-{way}")
        assert len(found) == 160
        for number in range(4):
            assert [v for a, v in found if a == f"a-{number}"] == [*range(1, 41)]


def test_rows_of_another_kind_are_refused_and_those_of_none_are_events(
    sink: Task, kafka_server: Kafka, topic_name: str
) -> None:
    """They were left out without a word."""
    refused = sink.refused(0, [event("a", 1), event("a", 2, "order")])
    assert refused.code == "config.invalid_value"
    assert "'order'" in refused.message
    sink.write(0, [event("a", 1), event("a", 2, kind=None)])  # type: ignore[arg-type]
    assert versions(kafka_server, topic_name) == [("a", 1), ("a", 2)]


@pytest.mark.parametrize("column", ["aggregate_id", "version", "event_type", "create_time"])
def test_an_event_without_what_it_needs_is_refused(sink: Task, column: str) -> None:
    """It was an error without a name, or a record that cannot be read back."""
    refused = sink.refused(0, [event("a", 1), event("b", 1) | {column: None}])
    assert refused.code == "config.invalid_value"
    assert f"column {column} is NULL in 1 row" in refused.message


def test_a_partition_that_is_not_there_is_refused(sink: Task) -> None:
    """It was said that the topic is missing."""
    nothing = {"key": "k", "value": b"v", "headers": None, "topic": None}
    for number in (-1, 4):
        refused = sink.refused(0, [nothing | {"partition": number}], schema=PLAIN)
        assert refused.code == "config.invalid_value"
        assert "0 to 3" in str(refused.suggestion)


def test_a_header_without_a_name_is_refused_and_a_name_is_published_whole(
    sink: Task, kafka_server: Kafka, topic_name: str
) -> None:
    """It was published as `None`; the client cuts a name at a NUL."""
    nameless = plain("a", "1", headers=[{"key": "h", "value": b"1"}, {"key": None, "value": b"2"}])
    refused = sink.refused(0, [plain("b", "1"), nameless], schema=PLAIN)
    assert refused.code == "config.invalid_value"
    assert "column headers" in str(refused.where)
    assert "h.key IS NOT NULL" in str(refused.suggestion)
    sink.write(0, [plain("a", "1", headers=[{"key": "a\0b", "value": b"x"}])], schema=PLAIN)
    [found] = read_topic(kafka_server.bootstrap_servers, topic_name)
    assert found.headers() == [("a\ufffdb", b"x")]


def test_a_topic_that_cannot_be_written_is_refused_at_once(sink: Task, topic_name: str) -> None:
    """It was tried for 17 s at every start, and nothing was said to do."""
    for name in ("bad name/!", "x" * 300, "..", f"{topic_name}.batches"):
        refused = sink.refused(0, [plain("a", "1"), plain("a", "1", topic=name)], schema=PLAIN)
        assert refused.code == "config.invalid_value"
        assert repr(name)[:250] in refused.message
        assert "column topic" in str(refused.where)
    del sink.options["topic"]
    assert "names no topic" in sink.refused(0, [plain("a", "1")], schema=PLAIN).message


def test_a_topic_that_was_deleted_is_not_made_again(
    sink: Task, kafka_server: Kafka, topic_name: str
) -> None:
    sink.write(0, [event("a", 1)])
    admin = AdminClient({"bootstrap.servers": kafka_server.bootstrap_servers})
    for done in admin.delete_topics([topic_name]).values():
        done.result(10)
    time.sleep(1)
    assert sink.refused(1, [event("a", 2)]).code == "sink.topic_missing"


def test_a_repeated_batch_may_come_in_other_parts(
    sink: Task, kafka_server: Kafka, topic_name: str
) -> None:
    rows = [event(f"a-{n}", 1, payload=None if n % 3 else b"x") for n in range(50)]
    rows[20]["payload"] = b"x" * 2_000_000  # a dead letter, in a part that is not the first
    sink.part = 7
    assert sink.write(0, rows).is_new
    sink.part = 50
    assert not sink.write(0, rows).is_new
    assert len(versions(kafka_server, topic_name)) == 49
    assert sink.refused(0, rows[:49]).code == "sink.batch_changed"


class TestRefused:
    """What is wrong is refused by name."""

    @pytest.mark.parametrize(
        ("given", "code", "says"),
        [
            ({}, "config.missing_key", "'id'"),
            ({"id": "a"}, "config.missing_key", "kafka.bootstrap.servers"),
            ({"id": "a", "topics": "t"}, "config.unknown_key", "topic"),
            ({"id": "a", "kafka.bootstrap.servers": "h:1", "kafka.acks": "1"}, "", "acks"),
            (
                {"id": "a", "kafka.bootstrap.servers": "h:1", "partitions": "none"},
                "config.invalid_value",
                "partitions",
            ),
        ],
    )
    def test_options(self, given: dict[str, str], code: str, says: str) -> None:
        if not code:  # properties that break the promise are refused when a client is made
            from eventpub.sink.client_settings import settings

            with pytest.raises(EventpubError) as failed:
                settings(sink_options(given).sink)
            assert says in str(failed.value)
            return
        with pytest.raises(EventpubError) as failed:
            sink_options(given)
        assert failed.value.code == code
        assert says in f"{failed.value}"

    def test_columns(self) -> None:
        sink = EventpubSink({"id": "a", "topic": "t", "kafka.bootstrap.servers": "h:1"})
        with pytest.raises(SourceError, match="select key, value"):
            sink.streamWriter(StructType().add("timestamp", "string").add("value", "string"), False)
        for name, found, expected in (
            ("key", LongType(), "string or binary"),
            ("value", IntegerType(), "string or binary"),
            ("partition", StringType(), "int or bigint"),
            ("headers", MapType(StringType(), BinaryType()), "array<struct<key:string,value:binar"),
            ("topic", BinaryType(), "string"),
        ):
            types: dict[str, DataType] = {"value": StringType(), "headers": NullType(), name: found}
            schema = StructType([StructField(column, type_) for column, type_ in types.items()])
            says = f"column {name} has the type {found.simpleString()}; it must be {expected}"
            with pytest.raises(SourceError, match=says):
                sink.streamWriter(schema, False)
        of_source = from_arrow_schema(ROWS)
        with pytest.raises(SourceError, match="not both"):
            sink.streamWriter(from_arrow_schema(ROWS).add("topic", "string"), False)
        with pytest.raises(SourceError, match="detail goes with kind"):
            sink.streamWriter(StructType([f for f in of_source if f.name != "detail"]), False)
        nowhere = EventpubSink({"id": "a", "kafka.bootstrap.servers": "h:1"})
        for schema in (StructType().add("value", "string"), of_source):
            with pytest.raises(SourceError, match="name a topic"):
                nowhere.streamWriter(schema, False)


def test_a_transactional_id_is_that_of_the_task() -> None:
    assert transactional_id("orders", 3) == "eventpub.orders.3"
