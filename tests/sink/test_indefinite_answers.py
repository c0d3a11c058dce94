"""The T-rule and the errors of a transaction, on librdkafka's mock cluster.

Each case injects what a broker or a network does and asserts three things: what the caller is told,
whether the sink must be replaced, and how often `EndTxn` was sent, since the client sends it again
by itself and says nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from confluent_kafka import KafkaError

from eventpub.errors import SinkError
from eventpub.private_apis import bulk
from eventpub.sink import batch, faults, transaction
from eventpub.sink.base import Content, PublishedBatch, RecordRefusedError
from eventpub.sink.client import Clients
from eventpub.sink.shard import ShardSink
from tests import cautions
from tests.sink.helpers import APP, PARTITIONS, WHOLE, settings, some_events
from tests.sink.mock_cluster import (
    ADD_PARTITIONS,
    END_TXN,
    INIT_PRODUCER_ID,
    PRODUCE,
    MockCluster,
    library_path,
)

pytestmark = pytest.mark.skipif(library_path() is None, reason="no shared librdkafka in the wheel")

TOPIC = "orders.events"
SOCKET_TIMEOUT_MS = 1000
SCAN_MS = 1000  # how often librdkafka looks for requests past their time
FAST = {"socket.timeout.ms": str(SOCKET_TIMEOUT_MS), "message.timeout.ms": "1500"}
_TRANSPORT = KafkaError._TRANSPORT


@pytest.fixture
def cluster() -> Iterator[MockCluster]:
    cautions.forget_all()  # what other tests have met
    made = MockCluster({TOPIC: PARTITIONS})
    yield made
    made.close()


@pytest.fixture
def new_sink(cluster: MockCluster) -> Iterator[Callable[..., ShardSink]]:
    made: list[ShardSink] = []

    def new(**more: str) -> ShardSink:
        properties = FAST | {key.replace("_", "."): value for key, value in more.items()}
        made.append(
            ShardSink(
                Clients(settings(TOPIC, cluster.bootstrap_servers, properties=properties)),
                APP,
                WHOLE,
            )
        )
        return made[-1]

    yield new
    for sink in made:
        sink.close()


@pytest.fixture
def sink(new_sink: Callable[[], ShardSink]) -> ShardSink:
    made = new_sink()
    made.ready()
    return made


def publish(sink: ShardSink, count: int = 20) -> PublishedBatch:
    return sink.publish(Content(some_events(WHOLE, count)))


def refused(sink: ShardSink, count: int = 20) -> SinkError:
    with pytest.raises(SinkError) as caught:
        publish(sink, count)
    return caught.value


def test_a_plain_commit_sends_one_end_and_leaves_no_doubt(
    sink: ShardSink, cluster: MockCluster
) -> None:
    assert publish(sink).events == 20
    assert cluster.requests(END_TXN) == 1
    assert not sink.needs_replacement
    assert publish(sink).events == 20, "the same producer goes on"
    assert not sink.needs_replacement


def test_an_answer_later_than_the_socket_timeout_is_a_doubt(
    sink: ShardSink, cluster: MockCluster
) -> None:
    cluster.answer(END_TXN, (0, SOCKET_TIMEOUT_MS + SCAN_MS + 500))
    assert publish(sink).events == 20, "it was committed"
    assert cluster.requests(END_TXN) == 2, "and the client has asked twice"
    assert sink.needs_replacement


def test_a_connection_cut_at_the_end_is_a_doubt_however_short_it_was(
    sink: ShardSink, cluster: MockCluster
) -> None:
    cluster.answer(END_TXN, (_TRANSPORT, 0))
    assert publish(sink).events == 20
    assert cluster.requests(END_TXN) == 2
    assert sink.needs_replacement


def test_a_refusal_to_end_at_once_is_an_answer_and_no_doubt(
    sink: ShardSink, cluster: MockCluster
) -> None:
    cluster.answer(END_TXN, (KafkaError.CONCURRENT_TRANSACTIONS, 0))
    assert publish(sink).events == 20
    assert cluster.requests(END_TXN) == 2
    assert not sink.needs_replacement


def test_a_commit_that_times_out_is_asked_again_and_the_sink_replaced(
    sink: ShardSink, cluster: MockCluster
) -> None:
    cluster.answer(END_TXN, (0, SOCKET_TIMEOUT_MS - 250))
    assert publish(sink).events == 20
    assert cluster.requests(END_TXN) == 1
    assert sink.needs_replacement


def test_a_commit_that_is_never_answered_is_indefinite(
    sink: ShardSink, cluster: MockCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction, "COMMIT_TIMEOUT", 0.8)
    cluster.answer(END_TXN, *[(0, 10_000)] * 5)
    error = refused(sink)
    assert (error.code, error.retriable) == ("sink.indefinite", True)
    assert sink.needs_replacement


def test_being_fenced_after_a_request_without_an_answer_is_no_other_publisher(
    sink: ShardSink, cluster: MockCluster
) -> None:
    """A late InitProducerId of its own does that; from outside it looks like another publisher."""
    cluster.answer(END_TXN, (0, 10_000), (KafkaError.PRODUCER_FENCED, 0))
    error = refused(sink)
    assert (error.code, error.retriable) == ("sink.own_request_late", True)


def test_a_new_broker_may_take_its_time_to_give_the_first_transactional_id(
    cluster: MockCluster,
) -> None:
    """It makes the topic that keeps transactions first: more than 10 s on a slow disk."""
    slow = settings(TOPIC, cluster.bootstrap_servers)
    cluster.answer(INIT_PRODUCER_ID, (0, 12_000))
    transaction.fence_all(Clients(slow), APP, 1)


def test_being_fenced_says_who_is_to_blame(
    sink: ShardSink, cluster: MockCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    # other tests of this process may just have met a broker that did not answer
    monkeypatch.setattr(faults, "may_be_own_request", lambda: False)
    cluster.answer(END_TXN, (KafkaError.PRODUCER_FENCED, 0))
    error = refused(sink)
    assert (error.code, error.retriable) == ("sink.fenced", False)
    assert "app.id" in (error.suggestion or "")
    assert cluster.requests(END_TXN) == 1
    assert sink.needs_replacement


def test_a_sink_in_doubt_publishes_nothing_more(sink: ShardSink, cluster: MockCluster) -> None:
    cluster.answer(END_TXN, (_TRANSPORT, 0))
    publish(sink)
    cluster.forget_requests()
    assert refused(sink).code == "sink.aborted"
    assert cluster.requests(PRODUCE) == cluster.requests(END_TXN) == 0


def test_a_new_sink_goes_on_where_one_was_in_doubt(
    sink: ShardSink, cluster: MockCluster, new_sink: Callable[[], ShardSink]
) -> None:
    cluster.answer(END_TXN, (_TRANSPORT, 0))
    publish(sink)
    sink.close()
    cluster.forget_requests()
    assert publish(new_sink()).events == 20
    assert cluster.requests(INIT_PRODUCER_ID) == 1, "after a new init_transactions only"


def test_messages_that_time_out_are_never_committed(sink: ShardSink, cluster: MockCluster) -> None:
    started = time.monotonic()
    with pytest.raises(SinkError) as caught:
        sink.publish(
            Content(some_events(WHOLE, 20)),
            crash_point=lambda point: cluster.down() if point == "after_begin" else None,
        )
    assert caught.value.code == "sink.unreachable"
    assert caught.value.retriable
    assert cluster.bootstrap_servers in (caught.value.where or "")
    assert cluster.requests(END_TXN) == 0
    assert time.monotonic() - started < 15


def test_a_transaction_that_a_slow_broker_takes_only_in_part_is_too_large(
    new_sink: Callable[..., ShardSink], cluster: MockCluster
) -> None:
    """It counted as a broker that is away, and the same one was tried for ever."""
    slow = new_sink(socket_timeout_ms="9000", max_in_flight="1", batch_num_messages="1")
    slow.ready()
    cluster.answer(PRODUCE, *[(0, 400)] * 9)
    assert refused(slow).code == "sink.transaction_expired"
    assert slow.needs_replacement


def test_a_broker_that_goes_away_in_a_transaction_is_no_slow_one(
    new_sink: Callable[..., ShardSink], cluster: MockCluster
) -> None:
    """An outage made the next transactions smaller, and Spark begin a new checkpoint."""
    made = new_sink(message_timeout_ms="4000", max_in_flight="1", batch_num_messages="1")
    made.ready()
    cluster.answer(PRODUCE, (0, 0), (0, 0), *[(_TRANSPORT, 0)] * 400)
    assert refused(made).code == "sink.unreachable"


def test_a_transaction_that_expired_is_too_large_though_an_answer_was_late(
    cluster: MockCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted as fenced by a request of its own, and the same one was tried for ever."""
    monkeypatch.setattr(faults, "may_be_own_request", lambda: True)
    short = settings(TOPIC, cluster.bootstrap_servers, transaction_timeout="1s")
    for at, code in ("", "sink.own_request_late"), ("before_commit", "sink.transaction_expired"):
        with ShardSink(Clients(short), APP, WHOLE) as sink:
            publish(sink)
            cluster.answer(END_TXN, (KafkaError.PRODUCER_FENCED, 0))
            with pytest.raises(SinkError) as caught:
                sink.publish(
                    Content(some_events(WHOLE, 20)),
                    crash_point=lambda point, at=at: time.sleep(1.1 * (point == at)),  # type: ignore[misc]
                )
            assert caught.value.code == code


@pytest.mark.parametrize(
    ("at_once", "code"), [(True, "sink.aborted"), (False, "sink.delivery_lost")]
)
def test_a_missing_delivery_report_prevents_the_commit(
    sink: ShardSink, cluster: MockCluster, monkeypatch: pytest.MonkeyPatch, at_once: bool, code: str
) -> None:
    monkeypatch.setattr(bulk, "WORTHWHILE", 10 if at_once else 1_000)
    counted = batch.Reports.on_delivery

    def forgetful(self: batch.Reports, row: int, error: KafkaError | None, message: object) -> None:
        if message.offset() != 0 or message.partition() != 1:  # type: ignore[attr-defined]
            counted(self, row, error, message)  # type: ignore[arg-type]

    monkeypatch.setattr(batch.Reports, "on_delivery", forgetful)
    error = refused(sink, 200)
    assert (error.code, error.retriable) == (code, True)
    assert sink.needs_replacement


@pytest.mark.parametrize(
    "code", [KafkaError.NOT_ENOUGH_REPLICAS, KafkaError.NOT_LEADER_FOR_PARTITION]
)
def test_what_a_broker_refuses_for_a_moment_is_sent_again(
    sink: ShardSink, cluster: MockCluster, code: int
) -> None:
    cluster.answer(PRODUCE, (code, 0))
    assert publish(sink).events == 20
    assert not sink.needs_replacement


def test_a_transaction_that_the_coordinator_gives_up_is_aborted(
    sink: ShardSink, cluster: MockCluster
) -> None:
    cluster.answer(ADD_PARTITIONS, (KafkaError.TOPIC_AUTHORIZATION_FAILED, 0))
    error = refused(sink)
    assert error.code == "sink.not_authorized"
    assert not error.retriable


@pytest.mark.parametrize(
    ("api", "code"),
    [
        (ADD_PARTITIONS, KafkaError.CONCURRENT_TRANSACTIONS),
        (ADD_PARTITIONS, KafkaError.NOT_COORDINATOR),
        (ADD_PARTITIONS, KafkaError.INVALID_PRODUCER_ID_MAPPING),
        (ADD_PARTITIONS, KafkaError.INVALID_TXN_STATE),
        (ADD_PARTITIONS, _TRANSPORT),
        (PRODUCE, KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER),
        (PRODUCE, KafkaError.UNKNOWN_PRODUCER_ID),
        (PRODUCE, KafkaError.REQUEST_TIMED_OUT),
        (PRODUCE, KafkaError.KAFKA_STORAGE_ERROR),
        (PRODUCE, _TRANSPORT),
        (END_TXN, KafkaError.NOT_COORDINATOR),
        (END_TXN, KafkaError.INVALID_TXN_STATE),
        (END_TXN, KafkaError.UNKNOWN),
        (END_TXN, KafkaError.COORDINATOR_LOAD_IN_PROGRESS),
        (INIT_PRODUCER_ID, KafkaError.COORDINATOR_NOT_AVAILABLE),
        (INIT_PRODUCER_ID, _TRANSPORT),
    ],
)
def test_a_caller_that_does_as_it_is_told_publishes_after_any_single_fault(
    cluster: MockCluster, new_sink: Callable[[], ShardSink], api: int, code: int
) -> None:
    sink = new_sink()
    if api != INIT_PRODUCER_ID:
        sink.ready()
    cluster.answer(api, (code, 0))
    told: list[SinkError] = []
    while len(told) < 3:
        try:
            assert publish(sink).events == 20
            break
        except SinkError as error:
            told.append(error)
        if sink.needs_replacement:
            sink.close()
            sink = new_sink()
    assert len(told) < 3, told
    assert all(error.retriable for error in told), told


def test_an_abort_with_a_lost_answer_is_a_doubt_as_well(
    sink: ShardSink, cluster: MockCluster
) -> None:
    cluster.answer(PRODUCE, *[(KafkaError.INVALID_RECORD, 0)] * 8)
    cluster.answer(END_TXN, (_TRANSPORT, 0))
    refused(sink)
    assert sink.needs_replacement


def test_a_batch_refused_for_its_size_is_sent_again_record_by_record(
    sink: ShardSink, cluster: MockCluster, new_sink: Callable[[], ShardSink]
) -> None:
    rows = some_events(WHOLE, 64)
    cluster.answer(PRODUCE, (KafkaError.MSG_SIZE_TOO_LARGE, 0))
    with pytest.raises(SinkError) as caught:
        sink.publish(Content(rows))
    assert (caught.value.code, caught.value.retriable) == ("sink.aborted", True)
    assert sink.needs_replacement

    careful = new_sink()
    careful.ready()
    cluster.answer(PRODUCE, (KafkaError.MSG_SIZE_TOO_LARGE, 0))
    with pytest.raises(RecordRefusedError) as refusal:
        careful.publish(Content(rows))
    assert len(refusal.value.rows) == 1, "alone, only the guilty one fails"
    assert careful.needs_replacement

    others = [row for row in range(rows.num_rows) if row not in refusal.value.rows]
    without = rows.take(others)
    still_careful = new_sink()
    assert still_careful.publish(Content(without)).events == without.num_rows
    assert still_careful.needs_replacement, "the next one need not be careful"


def test_a_batch_refused_for_its_size_is_not_blamed_as_a_whole_beside_another_refusal(
    cluster: MockCluster, new_sink: Callable[..., ShardSink]
) -> None:
    sink = new_sink(max_in_flight="5")  # both requests are on their way when the first is refused
    sink.ready()
    cluster.answer(PRODUCE, (KafkaError.INVALID_RECORD, 0), (KafkaError.MSG_SIZE_TOO_LARGE, 0))
    assert refused(sink, 64).code == "sink.aborted"
    assert sink.needs_replacement, "it is sent again record by record"


class TestReady:
    def test_waits_for_the_former_owners_transaction(
        self, cluster: MockCluster, new_sink: Callable[[], ShardSink]
    ) -> None:
        cluster.answer(INIT_PRODUCER_ID, *[(KafkaError.CONCURRENT_TRANSACTIONS, 0)] * 3)
        new_sink().ready()
        assert cluster.requests(INIT_PRODUCER_ID) == 4

    def test_is_tried_once_more_when_its_own_retry_has_fenced_it(
        self, cluster: MockCluster, new_sink: Callable[[], ShardSink]
    ) -> None:
        cluster.answer(INIT_PRODUCER_ID, (KafkaError.PRODUCER_FENCED, 0))
        new_sink().ready()
        assert cluster.requests(INIT_PRODUCER_ID) == 2

    def test_fails_when_it_is_fenced_again(
        self,
        cluster: MockCluster,
        new_sink: Callable[[], ShardSink],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        # a client of another test may end without an answer at this moment
        monkeypatch.setattr(faults, "may_be_own_request", lambda: False)
        cluster.answer(INIT_PRODUCER_ID, *[(KafkaError.PRODUCER_FENCED, 0)] * 2)
        sink = new_sink()
        with pytest.raises(SinkError) as caught:
            sink.ready()
        assert caught.value.code == "sink.fenced"
        assert sink.needs_replacement

    @pytest.mark.parametrize(
        ("kafka_code", "code"),
        [
            (KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, "sink.not_authorized"),
            (KafkaError.CLUSTER_AUTHORIZATION_FAILED, "sink.not_authorized"),
            (KafkaError.INVALID_TRANSACTION_TIMEOUT, "sink.transactions_refused"),
        ],
    )
    def test_says_what_the_broker_does_not_allow(
        self,
        cluster: MockCluster,
        new_sink: Callable[[], ShardSink],
        kafka_code: int,
        code: str,
    ) -> None:
        cluster.answer(INIT_PRODUCER_ID, (kafka_code, 0))
        with pytest.raises(SinkError) as caught:
            new_sink().ready()
        assert caught.value.code == code
        assert caught.value.suggestion

    def test_gives_up_on_a_broker_that_is_away(
        self,
        cluster: MockCluster,
        new_sink: Callable[[], ShardSink],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(transaction, "READY_TIMEOUT", 1.0)
        cluster.down()
        with pytest.raises(SinkError) as caught:
            new_sink().ready()
        assert caught.value.code == "sink.unreachable"
        assert caught.value.retriable
        assert cluster.bootstrap_servers in (caught.value.where or "")
