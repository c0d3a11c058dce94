"""Transactions that are over, and left open by the broker: none of it lost, none of it twice.

A broker that is killed does that by itself, but not each time: one test kills it and must hold in
either case. The others make the same log in another way, by a request that comes late.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from eventpub import config
from eventpub.errors import SinkError
from eventpub.sink import numbered
from eventpub.sink.base import Content
from eventpub.sink.batch import Batch, batch_of
from eventpub.sink.client import Clients
from eventpub.sink.encoder import CloudEvents
from eventpub.sink.layout import check_topics
from eventpub.sink.markers import Numbered
from eventpub.sink.missing_markers import MissingMarkerError
from eventpub.sink.records import SOURCE, PartitionId, Record, Written
from eventpub.sink.shard import ShardSink
from eventpub.sink.topics import list_offsets, open_below
from eventpub.sink.transaction import TransactionWriter
from tests.sink.conftest import OwnBroker, broker_with_doors
from tests.sink.helpers import (
    APP,
    WHOLE,
    as_set,
    assert_published_once,
    forget_leaders,
    high_watermarks,
    identities,
    open_transactions,
    settings,
    some_events,
    stable_offsets,
)
from tests.sink.mock_cluster import PRODUCE
from tests.sink.test_hazards import WRITE_TXN_MARKERS, eventually, verification
from tests.sink.test_publish_and_fold import CrashError, crash_at, folded

FIRST, SECOND, THIRD = (some_events(WHOLE, 40, version) for version in (1, 101, 201))
NewSink = Callable[[], ShardSink]


@pytest.fixture
def sink(own_broker: OwnBroker, topic_name: str) -> Iterator[config.Sink]:
    made = settings(topic_name, own_broker.open)
    check_topics(Clients(made))
    yield made
    own_broker.proxy.calm()


@pytest.fixture
def left_open(
    own_broker: OwnBroker, sink: config.Sink, new_sink: NewSink
) -> dict[PartitionId, Written]:
    """FIRST is published; some of SECOND was written behind it, and no marker follows."""
    new_sink().publish(Content(FIRST))
    hasty = {"socket.timeout.ms": "1000", "message.timeout.ms": "900"}
    through = {"bootstrap_servers": own_broker.proxied, "properties": hasty}
    with verification(own_broker, on=False):
        with ShardSink(Clients(sink.model_copy(update=through)), APP, WHOLE) as late:
            late.ready()
            own_broker.proxy.strike_next(PRODUCE, "held")
            with pytest.raises(SinkError):
                late.publish(Content(SECOND))
        eventually(lambda: open_transactions(own_broker.open, sink.topic) == [])
        own_broker.proxy.release()
        eventually(lambda: open_transactions(own_broker.open, sink.topic) != [])
    stable = stable_offsets(own_broker.open, sink.topic)
    high = high_watermarks(own_broker.open, sink.topic)
    return {(sink.topic, p): (stable[p], high[p]) for p in stable if stable[p] < high[p]}


def written_in(sink: config.Sink, ranges: dict[PartitionId, Written]) -> list[tuple[str, int]]:
    """(aggregate, version) of all records there, committed or not."""
    consumer = Consumer(
        {
            "bootstrap.servers": sink.bootstrap_servers,
            "group.id": "uncommitted",
            "isolation.level": "read_uncommitted",
        }
    )
    try:
        consumer.assign([TopicPartition(t, p, first) for (t, p), (first, _) in ranges.items()])
        count = sum(end - first for first, end in ranges.values())
        messages = [message for _ in range(count) if (message := consumer.poll(10)) is not None]
        assert len(messages) == count
        return identities(messages)
    finally:
        consumer.close()


def saved(ranges: dict[PartitionId, Written]) -> dict[PartitionId, int]:
    """What an index has that takes these ranges for committed."""
    return {place: end + 1 for place, (_, end) in ranges.items()}


def assert_ends_well(
    own_broker: OwnBroker, sink: config.Sink, ranges: dict[PartitionId, Written], last: ShardSink
) -> None:
    """What was written there is published once, in its order, as is what comes afterwards."""
    pairs = written_in(sink, ranges)
    there = some_events(WHOLE, 40, 101).filter([pair in pairs for pair in _pairs(SECOND)])
    assert not open_below(Clients(sink), saved(ranges), 0)
    last.publish(Content(THIRD))
    assert_published_once(own_broker.open, sink.topic, FIRST, there, THIRD)


def _pairs(rows: object) -> list[tuple[str, int]]:
    columns = [rows[name].to_pylist() for name in ("aggregate_id", "version")]  # type: ignore[index]
    return list(zip(*columns, strict=True))


def test_what_was_committed_is_published_again(
    own_broker: OwnBroker,
    sink: config.Sink,
    new_sink: NewSink,
    left_open: dict[PartitionId, Written],
) -> None:
    assert open_below(Clients(sink), saved(left_open), 0)
    second = new_sink()
    with pytest.raises(MissingMarkerError) as caught:
        list(second.fold(saved(left_open), left_open))
    assert caught.value.written == left_open
    pairs = written_in(sink, left_open)
    assert second.restore(left_open) == len(pairs) > 0
    assert second.restore(left_open) == 0, "done again after a crash"
    found, fold = folded(second, {place: first for place, (first, _) in left_open.items()})
    assert found >= set(pairs)
    assert list(second.fold(fold.offsets)) == []
    assert_ends_well(own_broker, sink, left_open, second)


def test_what_an_index_has_lost_may_have_been_committed(
    own_broker: OwnBroker,
    sink: config.Sink,
    new_sink: NewSink,
    left_open: dict[PartitionId, Written],
) -> None:
    second = new_sink()
    with pytest.raises(MissingMarkerError) as caught:
        list(second.fold({}, acknowledged=saved(left_open)))
    assert caught.value.written == left_open
    second.restore(left_open)
    assert_ends_well(own_broker, sink, left_open, second)


def test_an_abort_that_takes_a_committed_transaction_with_it_is_found(
    own_broker: OwnBroker,
    sink: config.Sink,
    new_sink: NewSink,
    left_open: dict[PartitionId, Written],
) -> None:
    unaware = new_sink()  # as a producer is that lives through it
    with pytest.raises(CrashError):
        unaware.publish(Content(THIRD), crash_point=crash_at("before_commit"))
    third = new_sink()
    assert open_transactions(own_broker.open, sink.topic) == [], "both were aborted"
    with pytest.raises(MissingMarkerError):
        list(third.fold(saved(left_open), left_open))
    pairs = written_in(sink, left_open)
    assert third.restore(left_open) == len(pairs)
    assert_ends_well(own_broker, sink, left_open, third)


def test_what_was_lost_several_times_is_published_again_once(
    own_broker: OwnBroker, sink: config.Sink, new_sink: NewSink
) -> None:
    """As it was written, and as others have published it since, who were cut off in turn."""
    for _ in range(3):
        with pytest.raises(CrashError):
            new_sink().publish(Content(FIRST), crash_point=crash_at("before_commit"))
    last = new_sink()
    ends = high_watermarks(own_broker.open, sink.topic)
    lost = {(sink.topic, partition): (0, end - 1) for partition, end in ends.items() if end}
    assert sum(end - 3 for end in ends.values() if end) == 3 * 40, "beside the markers"
    assert last.restore(lost) == 40
    assert_published_once(own_broker.open, sink.topic, FIRST)


def test_a_commit_that_takes_a_committed_transaction_with_it_is_no_loss(
    own_broker: OwnBroker,
    sink: config.Sink,
    new_sink: NewSink,
    left_open: dict[PartitionId, Written],
) -> None:
    pairs = written_in(sink, left_open)
    batch = new_sink().publish(Content(THIRD))
    for place, (first, end) in left_open.items():
        assert batch.written[place][0] == end, "where the marker should be"
        assert first < end
    third = new_sink()
    assert list(third.fold(batch.next_offsets, batch.written)) == []
    there = SECOND.filter([pair in pairs for pair in _pairs(SECOND)])
    assert_published_once(own_broker.open, sink.topic, FIRST, there, THIRD)


def test_what_was_never_committed_is_not_taken_along_by_the_next_commit(
    own_broker: OwnBroker,
    sink: config.Sink,
    new_sink: NewSink,
    left_open: dict[PartitionId, Written],
) -> None:
    assert left_open
    second = new_sink()
    found, _ = folded(second, {})
    assert found == as_set(FIRST)
    assert open_transactions(own_broker.open, sink.topic) == []
    second.publish(Content(SECOND))
    assert_published_once(own_broker.open, sink.topic, FIRST, SECOND)


def test_what_is_not_ours_to_end_is_named(
    own_broker: OwnBroker, sink: config.Sink, left_open: dict[PartitionId, Written]
) -> None:
    """As after a change of the number of shards: another transactional id has written it."""
    with (
        ShardSink(Clients(sink), "another", WHOLE) as other,
        pytest.raises(SinkError) as caught,
    ):
        other.restore(left_open)
    assert (caught.value.code, caught.value.retriable) == ("sink.hanging_transaction", True)
    (topic, partition), (first, _) = min(left_open.items())
    assert f"{topic}[{partition}]: last stable offset {first}" in caught.value.message
    assert f"abort --topic {topic} --partition {partition}" in (caught.value.suggestion or "")


def test_markers_of_batches_that_are_hidden_are_given_up_for_those_of_a_new_checkpoint(
    own_broker: OwnBroker, sink: config.Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eventpub.sink.markers.unnoticed_for", lambda _: 1.0)
    clients = Clients(sink)
    batches = numbered.NumberedSink(clients, APP)
    batches.take("q1", WHOLE.partitions)
    assert batches.markers.owner() == ("q1", "q1")
    place = batches.markers.place
    leave_open(own_broker, sink, place, b"{}")
    with pytest.raises(SinkError) as caught:
        batches.markers.owner()
    assert caught.value.code == "sink.hanging_transaction"
    batches.take("q2", WHOLE.partitions)
    assert batches.markers.owner() == ("q2", "q2")


def leave_open(own_broker: OwnBroker, sink: config.Sink, place: PartitionId, value: bytes) -> None:
    """A marker of task 2 in a transaction that is over, and open all the same."""
    topic, partition = place
    clients = Clients(sink)
    hasty = {"socket.timeout.ms": "1000", "message.timeout.ms": "900"}
    through = {"bootstrap_servers": own_broker.proxied, "properties": hasty}
    lost = Record(f"{APP}/2", value, partition, 0, [(SOURCE, APP)])
    with verification(own_broker, on=False):
        made = Clients(sink.model_copy(update=through))
        with TransactionWriter(made, APP, 2) as late:
            own_broker.proxy.strike_next(PRODUCE, "held")
            with pytest.raises(SinkError):
                late.run([Batch({}, [(topic, lost)])])
        high = list_offsets(clients, [place], "latest")[place]
        eventually(lambda: not open_below(clients, {place: high}, 0))
        own_broker.proxy.release()
        eventually(lambda: bool(open_below(clients, {place: high + 1}, 0)))
        eventually(lambda: list_offsets(clients, [place], "latest")[place] > high)


class Parts:
    """Events as the rows of a task."""

    has_rows = True

    def __init__(self, sink: config.Sink, events: pa.Table) -> None:
        self._sink, self._events = sink, events
        self.rows = len(events)

    def __iter__(self) -> Iterator[Any]:
        content = Content(self._events)
        yield lambda *_: batch_of(self._sink, CloudEvents(APP), WHOLE, content)

    def topics(self) -> set[str]:
        return set()

    def digest(self) -> str:
        return str(self._events["version"][0])


def marker_of(ranges: dict[PartitionId, Written]) -> dict[str, Any]:
    """Of a task that has published what was left open."""
    written: dict[str, dict[str, list[int]]] = {}
    for (topic, partition), (first, end) in ranges.items():
        written.setdefault(topic, {})[str(partition)] = [first, end, end - first]
    marker = {"query": "q1", "batch": 3, "run": "r1", "digest": "d", "rows": 1, "refused": 0}
    return {**marker, "written": written}


@pytest.mark.parametrize("is_aborted", [False, True])
def test_what_a_task_has_committed_is_published_again_with_its_marker(
    own_broker: OwnBroker,
    sink: config.Sink,
    left_open: dict[PartitionId, Written],
    is_aborted: bool,
) -> None:
    """Of rows that do not say whose they are."""
    pairs = written_in(sink, left_open)
    clients = Clients(sink)
    batches, marker = numbered.NumberedSink(clients, APP), marker_of(left_open)
    if is_aborted:  # as by whoever has begun to settle it, and died
        with TransactionWriter(clients, APP, 0) as writer:
            writer.run_aborted(left_open)
        batches.settle({0: marker}, [])
        assert_published_once(own_broker.open, sink.topic, FIRST)
    batches.settle({0: marker}, [0] if is_aborted else [])
    there = SECOND.filter([pair in pairs for pair in _pairs(SECOND)])
    assert_published_once(own_broker.open, sink.topic, FIRST, there)
    [(number, found)] = batches.markers.back_to("q1", 3)
    assert (number, found["digest"]) == (0, "d")
    assert found["written"] != marker["written"]
    numbered.NumberedSink(clients, APP).settle({0: found}, [0])
    assert_published_once(own_broker.open, sink.topic, FIRST, there)


def test_of_the_markers_since_a_quiet_tasks_last_one_only_the_newest_are_kept(
    sink: config.Sink,
) -> None:
    """There may be a day of them: they had taken a gigabyte."""
    batches = numbered.NumberedSink(Clients(sink), APP, at_start=4)
    batches.take("q1", 2)
    batches.publish(Numbered("q1", 0, 1), Parts(sink, FIRST))
    for batch in range(1, 150):
        marker = Numbered("q1", batch, 0).marker() | {"written": {}}
        with TransactionWriter(Clients(sink), APP, 0) as writer:
            writer.run([batches.markers.batch({0: marker})])
    found = batches.markers.back_to("q1", 0)
    assert [(number, marker["batch"]) for number, marker in found] == [(0, 149), (1, 0), (-1, -1)]
    assert batches.publish(Numbered("q1", 150, 1, after=0), Parts(sink, SECOND)).is_new


def test_markers_that_retention_has_removed_are_not_taken_for_a_lost_commit(
    sink: config.Sink, own_broker: OwnBroker
) -> None:
    """The topic was made by hand, without `cleanup.policy=compact`."""
    admin = AdminClient({"bootstrap.servers": own_broker.open})
    name = numbered.markers_of(sink)
    for future in admin.create_topics([NewTopic(name, 1, 1)]).values():
        future.result(10)
    eventually(lambda: name in admin.list_topics(timeout=5).topics)
    batches = numbered.NumberedSink(Clients(sink), APP)
    batches.publish(Numbered("q1", 0, 1), Parts(sink, FIRST))
    batches.publish(Numbered("q1", 1, 0), Parts(sink, SECOND))
    for future in admin.delete_records([TopicPartition(name, 0, 1)]).values():
        future.result(10)
    with pytest.raises(SinkError, match="compact") as caught:
        batches.publish(Numbered("q1", 2, 1, after=0), Parts(sink, THIRD))
    assert caught.value.code == "sink.markers_gone"


def test_what_cannot_be_told_from_others_records_is_named(
    sink: config.Sink, left_open: dict[PartitionId, Written]
) -> None:
    marker = marker_of(left_open)
    for by_partition in marker["written"].values():
        for at in by_partition.values():
            at[2] -= 1
    with pytest.raises(SinkError) as caught:
        numbered.NumberedSink(Clients(sink), APP).settle({0: marker}, [])
    assert caught.value.code == "sink.not_visible"


def test_a_repeated_task_ends_what_its_former_attempt_has_left_open(
    own_broker: OwnBroker, sink: config.Sink, left_open: dict[PartitionId, Written]
) -> None:
    """The next commit would take it along, and the rows of the attempt would be there twice."""
    assert left_open

    repeated = Numbered("q1", 0, 0, is_repeated=True)
    done = numbered.NumberedSink(Clients(sink), APP).publish(repeated, Parts(sink, THIRD))
    assert done.is_new
    assert_published_once(own_broker.open, sink.topic, FIRST, THIRD)
    assert done.marker is not None
    written = done.marker["written"][sink.topic]
    assert sum(count for _, _, count in written.values()) == len(THIRD)
    numbered.NumberedSink(Clients(sink), APP).settle({0: done.marker}, [])


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnBroker]:
    """A broker that is killed."""
    with broker_with_doors(tmp_path_factory.mktemp("killed")) as made:
        yield made


@pytest.mark.parametrize("round_", [1, 2])
def test_a_broker_that_dies_before_it_has_written_the_markers(
    killed: OwnBroker, topic_name: str, round_: int
) -> None:
    """Kafka 4.3.1 leaves them out in some of the rounds; it must hold in either case."""
    del round_
    sink = settings(topic_name, killed.open)
    check_topics(Clients(sink))
    with ShardSink(Clients(sink), APP, WHOLE) as first:
        first.publish(Content(FIRST))
        eventually(lambda: open_transactions(killed.open, topic_name) == [])
        killed.to_itself.strike_next(WRITE_TXN_MARKERS, "held")
        batch = first.publish(Content(SECOND))
        eventually(lambda: killed.to_itself.has_struck)
        killed.server.kill()
        killed.to_itself.drop()
        killed.server.start()
    forget_leaders()
    with ShardSink(Clients(sink), APP, WHOLE) as second:
        second.ready()
        try:
            again, unknown = 0, list(second.fold(batch.next_offsets, batch.written))
        except MissingMarkerError as lost:
            again, unknown = second.restore(lost.written), []
        assert again in {0, len(SECOND)}
        assert not unknown
        assert not open_below(Clients(sink), batch.next_offsets, 0)
        second.publish(Content(THIRD))
    assert_published_once(killed.open, topic_name, FIRST, SECOND, THIRD)


@pytest.mark.parametrize("round_", [1, 2])
def test_a_broker_that_dies_before_it_has_written_the_markers_of_a_task(
    killed: OwnBroker, topic_name: str, round_: int
) -> None:
    del round_
    sink = settings(topic_name, killed.open)
    check_topics(Clients(sink))
    first = numbered.NumberedSink(Clients(sink), APP)
    first.publish(Numbered("q1", 0, 0), Parts(sink, FIRST))
    eventually(lambda: open_transactions(killed.open, topic_name) == [])
    killed.to_itself.strike_next(WRITE_TXN_MARKERS, "held")
    done = first.publish(Numbered("q1", 1, 0), Parts(sink, SECOND))
    eventually(lambda: killed.to_itself.has_struck)
    killed.server.kill()
    killed.to_itself.drop()
    killed.server.start()
    forget_leaders()
    assert done.marker is not None
    second = numbered.NumberedSink(Clients(sink), APP)
    second.settle({0: done.marker}, [])
    assert not second.publish(Numbered("q1", 1, 0, is_repeated=True), Parts(sink, SECOND)).is_new
    second.publish(Numbered("q1", 2, 0), Parts(sink, THIRD))
    assert_published_once(killed.open, topic_name, FIRST, SECOND, THIRD)
