"""What an exactly-once producer must survive: a test for each row of docs/hazards.md.

Those on a real broker put a proxy between the two and let one request come late, get lost, or lose
its answer; those that no broker can be made to do on purpose use librdkafka's mock cluster. Every
one ends with an independent look at the topic: each event once, in order, and every partition can
be read to its end.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any, Literal

import psutil
import pytest
from confluent_kafka import KafkaError
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
)

from eventpub import config
from eventpub.errors import SinkError
from eventpub.local.servers import Kafka
from eventpub.ops.topic import TopicReader
from eventpub.sink.base import Content
from eventpub.sink.client import Clients
from eventpub.sink.layout import check_topics
from eventpub.sink.shard import ShardSink
from eventpub.sink.topics import list_offsets
from eventpub.sink.transaction import transactional_id
from tests.servers.kafka import kafka
from tests.sink.conftest import OwnBroker
from tests.sink.helpers import (
    APP,
    PARTITIONS,
    WHOLE,
    Way,
    as_set,
    assert_published_once,
    high_watermarks,
    open_transactions,
    read_topic,
    settings,
    some_events,
)
from tests.sink.mock_cluster import (
    ADD_PARTITIONS,
    END_TXN,
    INIT_PRODUCER_ID,
    PRODUCE,
    MockCluster,
    library_path,
)
from tests.sink.proxy import Fault

IMPATIENT = {"socket.timeout.ms": "1000", "message.timeout.ms": "5000"}
TOPIC = "orders.events"
LIST_OFFSETS = 2
WRITE_TXN_MARKERS = 27
_PRODUCERS = 20
"""Of which one did damage, on average, where 4 partitions failed and it was not waited for."""
FIRST, SECOND, THIRD = (some_events(WHOLE, 40, version) for version in (1, 101, 201))


@pytest.fixture
def proxied(own_broker: OwnBroker, topic_name: str) -> Iterator[config.Sink]:
    """A sink that reaches its broker through the proxy."""
    made = settings(topic_name, own_broker.proxied, properties=IMPATIENT)
    check_topics(Clients(made))
    yield made
    own_broker.proxy.calm()
    own_broker.to_itself.calm()


@pytest.fixture
def way(proxied: config.Sink) -> Iterator[Way]:
    made = Way(proxied)
    yield made
    made.close()


class TestOneRequest:
    """Each request of a transaction, each thing that a network may do to it."""

    @pytest.mark.parametrize("api", [INIT_PRODUCER_ID, ADD_PARTITIONS, PRODUCE, END_TXN])
    @pytest.mark.parametrize("fault", ["lost", "unanswered"])
    def test_is_lost_or_its_answer_is(
        self, own_broker: OwnBroker, proxied: config.Sink, way: Way, api: int, fault: Fault
    ) -> None:
        if api != INIT_PRODUCER_ID:
            way.publish(FIRST)
        own_broker.proxy.strike_next(api, fault)
        way.publish(FIRST)
        way.publish(SECOND)
        assert own_broker.proxy.has_struck
        way.publish(THIRD)
        assert_published_once(own_broker.open, proxied.topic, FIRST, SECOND, THIRD)

    @pytest.mark.parametrize("api", [INIT_PRODUCER_ID, ADD_PARTITIONS, PRODUCE, END_TXN])
    @pytest.mark.parametrize("fault", ["held", "late"])
    @pytest.mark.parametrize(
        "into", [("during_produce", 1), ("before_commit", 1), ("before_commit", 2)], ids=str
    )
    def test_comes_late(
        self,
        own_broker: OwnBroker,
        proxied: config.Sink,
        way: Way,
        api: int,
        fault: Fault,
        into: tuple[str, int],
    ) -> None:
        """The client has long sent it again; now the first arrives, too, in a transaction.

        Without the rule that replaces a sink in doubt, an old `EndTxn` ends the next transaction in
        its middle.
        """
        proxy = own_broker.proxy
        last = some_events(WHOLE, 40, 301)
        if api != INIT_PRODUCER_ID:
            way.publish(FIRST)
        proxy.strike_next(api, fault)
        passed = 0

        def late(point: str) -> None:
            nonlocal passed
            if point != into[0] or not proxy.has_struck:
                return
            passed += 1
            if passed == into[1]:
                eventually(lambda: open_transactions(own_broker.open, proxied.topic) != [])
                proxy.release()

        for rows in (FIRST, SECOND, THIRD, last):
            way.publish(rows, crash_point=late)
        assert passed >= into[1]
        assert api != END_TXN or way.told == [], "no transaction of the new owner was touched"
        assert_published_once(own_broker.open, proxied.topic, FIRST, SECOND, THIRD, last)


def test_a_sink_that_is_closed_before_it_takes_its_shard_over_does_not_fence_the_next_one(
    own_broker: OwnBroker, proxied: config.Sink
) -> None:
    """As where an index turns out to be damaged, and the task begins anew at once."""
    own_broker.proxy.strike_next(INIT_PRODUCER_ID, "held")
    first = ShardSink(Clients(proxied), APP, WHOLE)
    first.close()
    with ShardSink(
        Clients(proxied.model_copy(update={"bootstrap_servers": own_broker.open})), APP, WHOLE
    ) as second:
        second.publish(Content(FIRST))
        first.ready()
        assert not own_broker.proxy.has_struck
        with pytest.raises(SinkError, match="closed"):
            first.publish(Content(SECOND))
        second.publish(Content(SECOND))
    assert_published_once(own_broker.open, proxied.topic, FIRST, SECOND)


class TestQuestionForOffsets:
    """librdkafka 2.16 answers it with -1001 and no error where the connection is lost meanwhile."""

    @pytest.mark.parametrize("fault", ["lost", "unanswered"])
    @pytest.mark.parametrize(("end", "committed"), [("earliest", False), ("latest", True)])
    def test_is_asked_again(
        self,
        own_broker: OwnBroker,
        proxied: config.Sink,
        way: Way,
        fault: Fault,
        end: Literal["earliest", "latest"],
        committed: bool,
    ) -> None:
        way.publish(FIRST)
        eventually(lambda: open_transactions(own_broker.open, proxied.topic) == [])
        places = [(proxied.topic, number) for number in range(PARTITIONS)]
        expected = list_offsets(Clients(proxied), places, end, committed=committed)
        assert any(expected.values()) == (end == "latest")
        own_broker.proxy.strike_next(LIST_OFFSETS, fault)
        assert list_offsets(Clients(proxied), places, end, committed=committed) == expected
        assert own_broker.proxy.has_struck

    @pytest.mark.parametrize("fault", ["lost", "unanswered"])
    def test_is_asked_again_by_who_verifies(
        self, own_broker: OwnBroker, proxied: config.Sink, way: Way, fault: Fault
    ) -> None:
        way.publish(FIRST)
        own_broker.proxy.strike_next(LIST_OFFSETS, fault)
        reader = TopicReader(proxied, APP)
        assert sum(rows.num_rows for rows in reader.read(reader.spans())) == len(FIRST)
        assert own_broker.proxy.has_struck
        assert not reader.truncated


class TestLateProduceAfterAbort:
    """KAFKA-14402: it opens a transaction that nobody but its own producer will ever end."""

    @pytest.mark.parametrize("verified", [True, False])
    def test_hangs_unless_the_broker_verifies_and_the_next_owner_ends_it(
        self,
        own_broker: OwnBroker,
        proxied: config.Sink,
        way: Way,
        verified: bool,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        topic, hasty = proxied.topic, {"socket.timeout.ms": "1000", "message.timeout.ms": "900"}
        way.publish(FIRST)
        way.close()
        with verification(own_broker, on=verified):
            sink = ShardSink(Clients(proxied.model_copy(update={"properties": hasty})), APP, WHOLE)
            sink.ready()
            own_broker.proxy.strike_next(PRODUCE, "held")
            with pytest.raises(SinkError) as caught:
                sink.publish(Content(SECOND))
            assert (caught.value.code, sink.needs_replacement) == ("sink.unreachable", True)
            sink.close()
            eventually(lambda: open_transactions(own_broker.open, topic) == [])
            own_broker.proxy.release()
            if verified:
                way.publish(SECOND)
                assert_published_once(own_broker.open, topic, FIRST, SECOND)
                return
            eventually(lambda: open_transactions(own_broker.open, topic) != [])
            monkeypatch.setattr("eventpub.sink.fold.FOLD_TIMEOUT", 1.0)
            with (
                pytest.raises(SinkError) as caught,
                ShardSink(Clients(proxied), "another", WHOLE) as other,
            ):
                list(other.fold({}))
            high = high_watermarks(own_broker.open, topic)
            # the first that the fold met; the client had sent more than one request
            partition = next(
                p
                for p in open_transactions(own_broker.open, topic)
                if f"[{p}]" in str(caught.value)
            )
            error = caught.value
            assert (error.code, error.retriable) == ("sink.hanging_transaction", True)
            assert f"{topic}[{partition}]: last stable offset" in error.message
            assert f"high watermark {high[partition]}" in error.message
            assert "kafka-transactions.sh" in (error.suggestion or "")
            assert f"abort --topic {topic} --partition {partition}" in (error.suggestion or "")

            way.publish(SECOND)
            assert_published_once(own_broker.open, topic, FIRST, SECOND)


class TestCommitAnsweredBeforeTheMarkersAreWritten:
    def test_who_reads_at_once_waits_for_them(
        self, own_broker: OwnBroker, proxied: config.Sink
    ) -> None:
        own_broker.to_itself.strike_next(WRITE_TXN_MARKERS, "held")
        with ShardSink(Clients(proxied), APP, WHOLE) as first:
            batch = first.publish(Content(FIRST))
        eventually(lambda: own_broker.to_itself.has_struck)
        assert open_transactions(own_broker.open, proxied.topic) != [], "not to be seen yet"
        with ShardSink(Clients(proxied), APP, WHOLE) as second:
            reader = threading.Thread(target=second.ready)
            reader.start()
            reader.join(0.5)
            assert reader.is_alive(), "a reader that went on would miss the batch"
            own_broker.to_itself.release()
            reader.join(20)
            assert sum(len(part.aggregate_ids) for part in second.fold({})) == len(FIRST)
            fold = second.fold(batch.next_offsets)
            assert list(fold) == []
            assert batch.next_offsets.items() <= fold.offsets.items()
        assert_published_once(own_broker.open, proxied.topic, FIRST)

    def test_the_next_transaction_waits_for_them(
        self, own_broker: OwnBroker, proxied: config.Sink, way: Way
    ) -> None:
        own_broker.to_itself.strike_next(WRITE_TXN_MARKERS, "held")
        way.publish(FIRST)
        eventually(lambda: own_broker.to_itself.has_struck)
        timer = threading.Timer(0.5, own_broker.to_itself.release)
        timer.start()
        way.publish(SECOND)
        timer.join()
        way.publish(THIRD)
        assert (way.told, way.sinks) == ([], 1)
        assert_published_once(own_broker.open, proxied.topic, FIRST, SECOND, THIRD)


class TestAmbiguousCommitThenCrash:
    @pytest.mark.parametrize(
        ("fault", "delivered", "committed"),
        [
            ("held", "before the next owner", True),
            ("held", "after the next owner has come", False),
            ("held", "never", False),
            ("unanswered", "at once", True),
        ],
    )
    def test_the_fold_decides(
        self,
        own_broker: OwnBroker,
        proxied: config.Sink,
        way: Way,
        fault: Fault,
        delivered: str,
        committed: bool,
    ) -> None:
        proxy = own_broker.proxy
        proxy.strike_next(END_TXN, fault)
        child, _ = publishing_child(proxied)
        eventually(lambda: proxy.has_struck)
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        if delivered == "before the next owner":
            proxy.release()
        found = way.fold()
        assert found == (as_set(FIRST) if committed else set())
        if delivered == "after the next owner has come":
            proxy.release()
        way.publish(FIRST)
        way.publish(SECOND)
        assert way.told == []
        assert_published_once(own_broker.open, proxied.topic, FIRST, SECOND)


class TestStoppedProcess:
    def test_a_producer_stalled_beyond_its_transactions_timeout_does_it_again(
        self, own_broker: OwnBroker, topic_name: str
    ) -> None:
        sink = settings(topic_name, own_broker.open, transaction_timeout="1s")
        check_topics(Clients(sink))
        child, told = publishing_child(sink, stop_at="before_commit")
        until_stopped(child)
        assert open_transactions(own_broker.open, topic_name) != []
        eventually(lambda: open_transactions(own_broker.open, topic_name) == [])
        assert read_topic(own_broker.open, topic_name) == []
        os.kill(child.pid, signal.SIGCONT)
        child.join(60)
        assert child.exitcode == 0
        assert told.get(timeout=5) == ["sink.transaction_expired"]
        assert_published_once(own_broker.open, topic_name, FIRST)

    @pytest.mark.parametrize(
        "stop_at", ["before_begin", "after_begin", "after_produce", "before_commit"]
    )
    def test_a_zombie_that_wakes_after_another_has_published_writes_nothing(
        self, own_broker: OwnBroker, proxied: config.Sink, way: Way, stop_at: str
    ) -> None:
        child, told = publishing_child(proxied, stop_at=stop_at)
        until_stopped(child)
        way.publish(FIRST)
        way.publish(SECOND)
        # a commit is answered before its markers are written
        eventually(lambda: open_transactions(own_broker.open, proxied.topic) == [])
        ends = high_watermarks(own_broker.open, proxied.topic)
        os.kill(child.pid, signal.SIGCONT)
        child.join(60)
        assert child.exitcode == 0
        assert told.get(timeout=5) == ["sink.fenced"]
        assert high_watermarks(own_broker.open, proxied.topic) == ends
        assert_published_once(own_broker.open, proxied.topic, FIRST, SECOND)


class TestFencing:
    def test_two_publishers_with_one_id_leave_the_topic_intact(
        self, own_broker: OwnBroker, proxied: config.Sink
    ) -> None:
        batches = [some_events(WHOLE, 20, version) for version in range(1, 400, 10)]
        refused: list[str] = []
        have_begun = threading.Barrier(2, timeout=60)

        def run() -> None:
            way = Way(proxied)
            with contextlib.suppress(SinkError, threading.BrokenBarrierError):
                for number, rows in enumerate(batches):
                    if number == 1:  # else one may have done all before the other has begun
                        have_begun.wait()
                    way.publish(rows)
            refused.extend(way.told)
            way.close()

        rivals = [threading.Thread(target=run) for _ in range(2)]
        for rival in rivals:
            rival.start()
        for rival in rivals:
            rival.join()
        assert "sink.fenced" in refused
        way = Way(proxied)
        for rows in batches:
            way.publish(rows)
        assert_published_once(own_broker.open, proxied.topic, *batches)

    def test_being_fenced_again_and_again_is_said(
        self, own_broker: OwnBroker, proxied: config.Sink, way: Way
    ) -> None:
        def overtaken(point: str) -> None:
            if point == "before_commit":
                init_producer_id(own_broker.open, 1)

        with pytest.raises(SinkError) as caught:
            way.publish(FIRST, crash_point=overtaken)
        assert caught.value.code == "sink.fenced"
        assert "app.id" in (caught.value.suggestion or "")
        assert set(way.told) == {"sink.fenced"}
        assert_published_once(own_broker.open, proxied.topic)


class TestProducerIds:
    def test_an_id_that_the_broker_has_forgotten_is_replaced(
        self, tmp_path: Path, topic_name: str
    ) -> None:
        """INVALID_PRODUCER_ID_MAPPING, after a pause beyond `transactional.id.expiration.ms`."""
        short = {
            "transactional.id.expiration.ms": "1000",
            "transaction.remove.expired.transaction.cleanup.interval.ms": "200",
        }
        with kafka(tmp_path, properties=short) as broker:
            sink = settings(topic_name, broker.bootstrap_servers)
            check_topics(Clients(sink))
            way = Way(sink)
            way.publish(FIRST)
            time.sleep(4)
            way.publish(SECOND)
            assert set(way.told) == {"sink.aborted"}, "it was forgotten, once or again"
            way.publish(THIRD)
            way.close()
            assert_published_once(broker.bootstrap_servers, topic_name, FIRST, SECOND, THIRD)

    @pytest.mark.long
    def test_hundreds_of_replacements_in_a_row(self, kafka_server: Kafka, topic_name: str) -> None:
        sink = settings(topic_name, kafka_server.bootstrap_servers)
        check_topics(Clients(sink))
        batches = [some_events(WHOLE, 16, version) for version in range(1, 301)]
        for rows in batches:
            with ShardSink(Clients(sink), APP, WHOLE) as each:
                each.publish(Content(rows))
                assert not each.needs_replacement
        assert_published_once(kafka_server.bootstrap_servers, topic_name, *batches)

    @pytest.mark.long
    def test_the_epoch_wraps(self, kafka_server: Kafka, topic_name: str) -> None:
        """After 32,766 owners the broker gives the shard another producer id (KAFKA-19367)."""
        servers = kafka_server.bootstrap_servers
        sink = settings(topic_name, servers)
        check_topics(Clients(sink))
        with ShardSink(Clients(sink), APP, WHOLE) as first:
            first.ready()  # the broker has a coordinator from now on
        ids, epoch = init_producer_id(servers, 1)
        init_producer_id(servers, 32_764 - epoch)
        batches = [some_events(WHOLE, 16, version) for version in range(1, 7)]
        for rows in batches:
            with ShardSink(Clients(sink), APP, WHOLE) as each:
                each.publish(Content(rows))
        after, epoch = init_producer_id(servers, 1)
        assert after != ids
        assert epoch < 10
        assert_published_once(servers, topic_name, *batches)

    def test_a_transaction_right_after_another(self, kafka_server: Kafka, topic_name: str) -> None:
        sink = settings(topic_name, kafka_server.bootstrap_servers)
        check_topics(Clients(sink))
        batches = [some_events(WHOLE, 16, version) for version in range(1, 201)]
        way = Way(sink)
        for rows in batches:
            way.publish(rows)
        way.close()
        assert (way.told, way.sinks) == ([], 1)
        assert_published_once(kafka_server.bootstrap_servers, topic_name, *batches)


@pytest.mark.skipif(library_path() is None, reason="no shared librdkafka in the wheel")
@pytest.mark.timeout(90)
class TestErrorsThatOnlyTheLogShows:
    """On the mock cluster: no call may wait for ever, and nothing may be committed."""

    @pytest.mark.parametrize(
        ("api", "error"),
        [
            (ADD_PARTITIONS, KafkaError.PRODUCER_FENCED),
            (ADD_PARTITIONS, KafkaError.INVALID_PRODUCER_EPOCH),
            (ADD_PARTITIONS, KafkaError.INVALID_TXN_STATE),
            (PRODUCE, KafkaError.INVALID_PRODUCER_EPOCH),
            (PRODUCE, KafkaError.CLUSTER_AUTHORIZATION_FAILED),
            (PRODUCE, KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER),
        ],
    )
    def test_end_the_flush(self, cluster: MockCluster, api: int, error: int) -> None:
        """And the producer ends well, too: docs/hazards.md, "A producer's end".

        In a process of its own, whose heap is nobody else's.
        """
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        child = context.Process(target=_meet, args=(cluster.bootstrap_servers, there), daemon=True)
        child.start()
        for _ in range(_PRODUCERS):
            assert here.poll(60)
            assert here.recv() == "ready"
            cluster.answer(api, *[(error, 0)] * 20)
            here.send("publish")
            assert here.poll(30), "the call waits for ever"
            assert here.recv().startswith("sink.")
            here.send("go on")
        child.join(60)
        assert child.exitcode == 0

    def test_a_broker_that_never_answers_ends_the_flush(self, cluster: MockCluster) -> None:
        with mock_sink(cluster.bootstrap_servers) as sink:
            cluster.answer(PRODUCE, *[(0, 600_000)] * 20)
            with pytest.raises(SinkError) as caught:
                sink.publish(Content(FIRST))
        assert caught.value.retriable

    def test_poll_may_raise_them_too(self, cluster: MockCluster) -> None:
        with mock_sink(cluster.bootstrap_servers) as sink:
            cluster.answer(END_TXN, (KafkaError.PRODUCER_FENCED, 0))
            for _ in range(3):
                with pytest.raises(SinkError):
                    sink.publish(Content(FIRST))
                assert sink.needs_replacement
                sink._writer.needs_replacement = False

    @pytest.mark.parametrize("when", ["after_begin", "before_commit"])
    def test_a_topic_that_is_gone_in_the_middle(self, cluster: MockCluster, when: str) -> None:
        """Fixed in librdkafka 1.9: sequences began anew, and records were lost in silence."""

        def gone(point: str) -> None:
            if point == when:
                cluster.topic_error(TOPIC, KafkaError.UNKNOWN_TOPIC_OR_PART)
                cluster.answer(PRODUCE, *[(KafkaError.NOT_LEADER_FOR_PARTITION, 0)] * 4)

        with mock_sink(cluster.bootstrap_servers) as sink:
            sink.publish(Content(FIRST))
            if when == "before_commit":
                assert sink.publish(Content(SECOND), crash_point=gone).events == len(SECOND)
            else:
                with pytest.raises(SinkError):
                    sink.publish(Content(SECOND), crash_point=gone)
        cluster.answer(PRODUCE)
        cluster.topic_error(TOPIC, 0)
        with mock_sink(cluster.bootstrap_servers) as sink:
            assert sink.publish(Content(THIRD)).events == len(THIRD)

    @pytest.mark.parametrize("when", ["after_begin", "after_produce"])
    def test_messages_that_time_out_are_not_committed_as_nothing(
        self, cluster: MockCluster, when: str
    ) -> None:
        """Fixed in librdkafka 1.7: the transaction committed without them."""
        with mock_sink(cluster.bootstrap_servers) as sink:
            sink.publish(Content(FIRST))
            cluster.forget_requests()
            cluster.answer(PRODUCE, *[(0, 600_000)] * 20)
            with pytest.raises(SinkError) as caught:
                sink.publish(
                    Content(SECOND),
                    crash_point=lambda point: cluster.down() if point == when else None,
                )
        assert caught.value.retriable
        assert cluster.requests(END_TXN) == 0


@pytest.fixture
def cluster() -> Iterator[MockCluster]:
    made = MockCluster({TOPIC: PARTITIONS})
    yield made
    made.close()


def _meet(bootstrap_servers: str, parent: Connection) -> None:
    """Publishes when told to, and says which error it met; with one producer after the other."""
    for _ in range(_PRODUCERS):
        with mock_sink(bootstrap_servers) as sink:
            parent.send("ready")
            parent.recv()
            try:
                sink.publish(Content(FIRST))
                parent.send("published")
            except SinkError as error:
                parent.send(error.code)
        parent.recv()
    while any(t.name == "eventpub-sink-end" for t in threading.enumerate()):
        time.sleep(0.05)


def mock_sink(bootstrap_servers: str) -> ShardSink:
    short = {"socket.timeout.ms": "1000", "message.timeout.ms": "1500"}
    sink = ShardSink(Clients(settings(TOPIC, bootstrap_servers, properties=short)), APP, WHOLE)
    sink.ready()
    return sink


@contextlib.contextmanager
def verification(own_broker: OwnBroker, *, on: bool) -> Iterator[None]:
    """`transaction.partition.verification.enable`, and back to its default at the end."""
    admin = AdminClient({"bootstrap.servers": own_broker.open})

    def alter(value: str) -> None:
        resource = ConfigResource("broker", "1")
        resource.add_incremental_config(
            ConfigEntry(
                "transaction.partition.verification.enable",
                value,
                incremental_operation=AlterConfigOpType.SET,
            )
        )
        for future in admin.incremental_alter_configs([resource]).values():
            future.result(10)
        time.sleep(0.5)  # the broker answers before it has heard of it itself

    alter(str(on).lower())
    yield
    alter("true")


def _child(sink: config.Sink, stop_at: str, told: Queue[list[str]]) -> None:
    stopped = False

    def stop(point: str) -> None:
        nonlocal stopped
        if point == stop_at and not stopped:
            stopped = True
            os.kill(os.getpid(), signal.SIGSTOP)

    way = Way(sink)
    way.publish(FIRST, crash_point=stop)
    told.put(way.told)


def publishing_child(sink: config.Sink, stop_at: str = "") -> tuple[Any, Queue[list[str]]]:
    """A process that publishes the first batch, and what it was told; it may stop itself."""
    context = multiprocessing.get_context("spawn")
    told: Queue[list[str]] = context.Queue()
    child = context.Process(target=_child, args=(sink, stop_at, told), daemon=True)
    child.start()
    return child, told


def until_stopped(child: Any) -> None:
    eventually(lambda: psutil.Process(child.pid).status() == psutil.STATUS_STOPPED)


def eventually(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def exchange(broker: socket.socket, frame: bytes) -> bytes:
    broker.sendall(struct.pack(">i", len(frame)) + frame)
    (length,) = struct.unpack(">i", broker.recv(4, socket.MSG_WAITALL))
    return broker.recv(length, socket.MSG_WAITALL)[4:]


def init_producer_id(servers: str, times: int) -> tuple[int, int]:
    """Takes the shard's transactional id over, so many times; the last producer id and epoch."""
    host, port = servers.split(":")
    own = transactional_id(APP, WHOLE.number).encode()
    header = struct.pack(">hhihh", INIT_PRODUCER_ID, 1, 1, -1, len(own))
    frame = header + own + struct.pack(">i", 60_000)
    done = 0
    while done < times:
        with socket.create_connection((host, int(port)), timeout=10) as broker:
            broker.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while done < times:
                code, producer_id, epoch = struct.unpack_from(">hqh", exchange(broker, frame), 4)
                assert code in {0, KafkaError.CONCURRENT_TRANSACTIONS}, code
                done += code == 0
    return producer_id, epoch
