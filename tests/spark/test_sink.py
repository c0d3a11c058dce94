"""The sink `eventpub`, its writer called as in a task of Spark's."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest
from confluent_kafka import Producer

from eventpub.errors import EventpubError, SinkError, find_marked
from eventpub.local import Kafka
from eventpub.sink import numbered
from eventpub.sink.fencing import transactional_id
from eventpub.sink.owned_producer import OwnedProducer
from eventpub.sink.transaction import Transactions
from eventpub.spark import sink as spark_sink
from eventpub.spark.sink import EventpubSink, Published, sink_options
from eventpub.spark.source import SourceError
from tests.sink.helpers import CREATED, read_topic

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

    def write(
        self, batch: int, rows: list[dict[str, Any]], task: int = 0, schema: Any = ROWS
    ) -> Published:
        """Write the rows of a task."""
        properties = {"sql.streaming.queryId": self.query, "streaming.sql.batchId": str(batch)}
        context = SimpleNamespace(getLocalProperty=properties.get, partitionId=lambda: task)
        names = SimpleNamespace(names=schema.names)
        table = pa.Table.from_pylist(rows, schema=schema)
        with patch.object(spark_sink, "TaskContext", SimpleNamespace(get=lambda: context)):
            writer = EventpubSink(self.options).streamWriter(names, False)
            return writer.write(iter(table.to_batches()))

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
    assert not sink.write(0, first).is_new, "an attempt that was stalled since"
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
    monkeypatch.setattr(numbered, "_READ_AT_FIRST", 2)
    for task in range(6):
        assert sink.write(3, [event(f"a-{task}", 1)], task=task).is_new
    for task in range(6):
        assert not sink.write(3, [event(f"a-{task}", 1)], task=task).is_new
    assert len(versions(kafka_server, topic_name)) == 6


def test_an_empty_part_of_a_batch_costs_no_transaction(sink: Task) -> None:
    assert sink.write(0, []) == Published(0, False)


def test_a_repeated_batch_with_other_rows_is_refused(
    sink: Task, kafka_server: Kafka, topic_name: str
) -> None:
    sink.write(0, [event("a", 1)])
    assert sink.refused(0, [event("a", 1), event("a", 2)]).code == "sink.batch_changed"
    assert versions(kafka_server, topic_name) == [("a", 1)]


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
    stalled = OwnedProducer(options.sink, options.id, 0)
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
    place = numbered.NumberedSink(
        options.sink, options.id, numbered.markers_of(options.sink)
    )._place
    other.produce(place[0], b"{}", b"someone/0", partition=place[1])
    other.flush(10)
    sink.write(1, [event("a", 2)], task=1)
    assert not sink.write(1, [event("a", 2)], task=1).is_new
    assert versions(kafka_server, topic_name) == [("a", 1), ("a", 2)]


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
    run, calls = Transactions.run, []

    def doubtful(self: Any, *arguments: Any) -> None:
        calls.append(1)
        if is_done or len(calls) > 1:
            run(self, *arguments)
        if len(calls) == 1:
            raise SinkError(code, "no answer", retriable=True)

    monkeypatch.setattr(Transactions, "run", doubtful)
    monkeypatch.setattr(numbered, "_REDO_PAUSE", 0.01)
    sink.write(1, [event("a", 2)])
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


_PLAIN_FIELDS: list[Any] = [
    ("key", pa.string()),
    ("value", pa.binary()),
    ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
    ("topic", pa.string()),
    ("partition", pa.int32()),
]
PLAIN: Any = pa.schema(_PLAIN_FIELDS)


def test_rows_with_sparks_columns_are_published_as_they_are(
    kafka_server: Kafka, topic_name: str
) -> None:
    sink, servers = Task(kafka_server, topic_name), kafka_server.bootstrap_servers
    headers = [{"key": "h", "value": b"1"}]
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
            from eventpub.sink.client import settings

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
            sink.streamWriter(SimpleNamespace(names=["timestamp", "value"]), False)
        nowhere = EventpubSink({"id": "a", "kafka.bootstrap.servers": "h:1"})
        with pytest.raises(SourceError, match="topic"):
            nowhere.streamWriter(SimpleNamespace(names=["value"]), False)


def test_a_transactional_id_is_that_of_the_task() -> None:
    assert transactional_id("orders", 3) == "eventpub.orders.3"
