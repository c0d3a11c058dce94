"""Scenario F4: a broker that leads no more, and does not know it, answers with an old end.

As one does that is cut off from the others, and not from the publisher. A fold then ends too early.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from eventpub import config
from eventpub.admission.model import SkippedGap, topic_partition
from eventpub.errors import SinkError
from eventpub.local.servers import Kafka
from eventpub.sink import fold
from eventpub.sink.base import Content
from eventpub.sink.client import ClientLog, Clients
from eventpub.sink.layout import check_leaders, check_topics
from eventpub.sink.records import DeadRow, PartitionId
from eventpub.sink.shard import ShardSink
from eventpub.sink.topics import list_offsets, metadata
from tests.publisher.harness import eventually
from tests.servers import kafka_cluster
from tests.sink.helpers import (
    APP,
    CREATED,
    WHOLE,
    as_set,
    assert_published_once,
    events,
    ids_of,
    read_topic,
    settings,
    some_events,
)
from tests.sink.test_publish_and_fold import folded

FIRST, SECOND, THIRD = (some_events(WHOLE, 40, version) for version in (1, 101, 201))
Offsets = dict[PartitionId, int]


@pytest.fixture
def servers(kafka_server: Kafka) -> str:
    return kafka_server.bootstrap_servers


@pytest.fixture
def sink(servers: str, topic_name: str) -> config.Sink:
    made = settings(topic_name, servers)
    check_topics(Clients(made))
    return made


@pytest.fixture
def old_ends(monkeypatch: pytest.MonkeyPatch) -> Callable[[Offsets], None]:
    """From now on some ends are given as they were."""

    def begin(ends: Offsets) -> None:
        def listed(clients: Any, places: Any, end: Any, **more: Any) -> Offsets:
            return {
                **list_offsets(clients, places, end, **more),
                **(ends if end == "latest" else {}),
            }

        monkeypatch.setattr(fold, "list_offsets", listed)

    return begin


def test_f4_nothing_is_committed_behind_a_fold_that_has_ended_too_early(
    new_sink: Callable[[], ShardSink],
    sink: config.Sink,
    servers: str,
    old_ends: Callable[[Offsets], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    owner = new_sink()
    list(owner.fold({}))
    saved = owner.offsets | owner.publish(Content(FIRST)).next_offsets
    owner.publish(Content(SECOND))  # and its process dies before the index has it
    owner = new_sink()
    old_ends(saved)
    assert folded(owner, saved)[0] == set(), "nobody knows better"
    with pytest.raises(SinkError) as caught:
        owner.publish(Content(SECOND))
    assert (caught.value.code, caught.value.retriable) == ("sink.aborted", True)
    assert owner.needs_replacement
    assert "a broker answered that no longer leads the partition" in caplog.text
    old_ends({})
    owner = new_sink()
    assert folded(owner, saved)[0] == as_set(SECOND)
    owner.publish(Content(THIRD))
    assert_published_once(servers, sink.topic, FIRST, SECOND, THIRD)


def test_f4_it_is_noticed_on_the_side_topics_too(
    new_sink: Callable[[], ShardSink],
    sink: config.Sink,
    servers: str,
    old_ends: Callable[[Offsets], None],
) -> None:
    """Though the topic itself was read to its end."""
    a = ids_of(WHOLE, 1)[0]
    more: list[dict[str, Any]] = [
        {"dead": [DeadRow(a, 9, "sink.record_refused: too large", b"x")]},
        {"gaps": [SkippedGap(a, 2, 3, CREATED, CREATED, 8, "gave up")]},
    ]
    for topic, records in zip((sink.dead_topic, sink.gaps_topic), more, strict=True):
        owner = new_sink()
        list(owner.fold({}))
        before = owner.offsets
        owner.publish(Content(events([]), **records))
        owner = new_sink()
        old_ends({place: end for place, end in before.items() if place[0] == topic})
        list(owner.fold(before))
        with pytest.raises(SinkError) as caught:
            owner.publish(Content(events([]), **records))
        assert caught.value.code == "sink.aborted"
        assert len(read_topic(servers, topic)) == 1
        old_ends({})


def test_f4_a_skip_is_read_before_the_events_above_it_whoever_gives_its_topic_s_end(
    new_sink: Callable[[], ShardSink],
    sink: config.Sink,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without it, a late event of the skip would count as published, and be dropped."""
    owner = new_sink()
    list(owner.fold({}))
    before = owner.offsets
    gap = SkippedGap(ids_of(WHOLE, 1)[0], 2, 3, CREATED, CREATED, 8, "gave up")
    owner.publish(Content(FIRST, gaps=[gap]))  # and its process dies before the index has it
    old = [{place: end for place, end in before.items() if place[0] == sink.gaps_topic}]

    def listed(clients: Any, places: Any, end: Any, **more: Any) -> Offsets:
        first = old.pop() if old and end == "latest" and not more.get("committed") else {}
        return {**list_offsets(clients, places, end, **more), **first}

    monkeypatch.setattr(fold, "list_offsets", listed)
    parts = list(new_sink().fold(before))
    assert (parts[0].kind, parts[0].gaps) == ("gaps", [gap])
    assert {part.kind for part in parts[1:]} == {"events"}


def _metadata(by: int, leader: int) -> Any:
    partition = SimpleNamespace(leader=leader, replicas=[1, 2, 3])
    brokers = {n: SimpleNamespace(host="broker", port=n) for n in (1, 2, 3)}
    topics = {"gaps": SimpleNamespace(partitions={0: partition})}
    return SimpleNamespace(orig_broker_id=by, brokers=brokers, topics=topics)


@pytest.mark.parametrize(
    ("first", "others", "agree"),
    [
        ((1, 2), {}, True),  # another than the leader says so: nobody is asked
        ((1, 1), {2: 1}, True),
        ((1, 1), {3: 1}, True),  # 2 is away
        ((1, 1), {}, True),  # nobody can tell
        ((1, 1), {2: 2, 3: 2}, False),
        ((1, 1), {3: 3}, False),
        ((-1, 1), {1: 1, 2: 2}, False),
        ((-1, 1), {1: 1, 2: 1}, True),
    ],
)
def test_f4_two_brokers_say_who_leads_a_side_topic(
    first: tuple[int, int], others: dict[int, int], agree: bool
) -> None:
    def of(answers: dict[int, int], by: int) -> Any:
        def list_topics(topic: str, timeout: float) -> Any:
            if by not in answers:
                raise KafkaException(KafkaError(KafkaError._TRANSPORT))
            return _metadata(by, answers[by])

        return SimpleNamespace(list_topics=list_topics, poll=lambda _: None), ClientLog()

    class Brokers(Clients):
        def admin(self) -> Any:
            return of(dict([first]), first[0])

        def admin_of(self, servers: str) -> Any:
            return of(others, int(servers.partition(":")[2]))

    brokers = Brokers(settings("orders", "broker:1"))
    if agree:
        check_leaders(brokers, [("gaps", 0)])
        return
    with pytest.raises(SinkError, match="disagree about the leader") as caught:
        check_leaders(brokers, [("gaps", 0)])
    assert (caught.value.code, caught.value.retriable) == ("sink.unreachable", True)


def test_why_a_connection_failed_is_known_to_the_next_client() -> None:
    """It had no time to learn it: "0/1 brokers are down" was all that was said."""
    met = [KafkaError(KafkaError._ALL_BROKERS_DOWN, "0/1 brokers are down")]

    class Brokers(Clients):
        def admin(self) -> Any:
            log = ClientLog()

            def list_topics(topic: str | None, timeout: float) -> Any:
                if len(met) == 1:  # the first
                    log.log(
                        3,
                        "",
                        "FAIL",
                        "client",
                        "broker:1/bootstrap: Disconnected (after 2ms in state UP)",
                    )
                met.append(met[0])
                log.error(met[0])
                raise KafkaException(met[0])

            return SimpleNamespace(list_topics=list_topics, poll=lambda _: None), log

    with pytest.raises(SinkError) as caught:
        metadata(Brokers(settings("orders", "broker:1")), timeout=0.5)
    assert len(met) > 2
    assert "broker:1: Disconnected" in caught.value.message


def test_f4_what_others_write_behind_a_fold_is_no_reason_to_fold_again(
    new_sink: Callable[[], ShardSink], sink: config.Sink, servers: str
) -> None:
    """A writer that never rests would keep a publisher from its first commit for ever."""
    producer = Producer({"bootstrap.servers": servers})
    owner = new_sink()
    list(owner.fold({}))
    for number in range(100):
        producer.produce(sink.topic, b"?", f"other-{number}")
    assert producer.flush(10) == 0
    owner.publish(Content(FIRST))
    assert not owner.needs_replacement
    assert {(k, v) for k, v in _ours(servers, sink.topic)} == as_set(FIRST)


def _ours(servers: str, topic: str) -> list[tuple[str, int]]:
    found = [(m, dict(m.headers() or ())) for m in read_topic(servers, topic)]
    return [(m.key().decode(), int(h["ce_sequence"])) for m, h in found if "ce_sequence" in h]


@pytest.mark.long
def test_f4_a_leader_that_is_cut_off_from_the_other_brokers_alone(tmp_path: Path) -> None:
    """Two clients of two processes: one has learnt who leads now, the other one has not."""
    with kafka_cluster(tmp_path / "kafka", relayed=True) as cluster:
        network = cluster.network
        assert network is not None
        sink = settings("orders", cluster.bootstrap_servers)
        eventually(lambda: _made(sink))
        with ShardSink(Clients(sink), APP, WHOLE) as owner:
            list(owner.fold({}))
            saved = owner.offsets | owner.publish(Content(FIRST)).next_offsets
        coordinator = cluster.coordinator(f"eventpub.{APP}.0")
        number, partition = next(
            (n, p)
            for p in range(WHOLE.partitions)
            for n, broker in cluster.brokers.items()
            if broker is cluster.leader("orders", p) and broker is not coordinator
        )
        others = [s for n, s in enumerate(cluster.bootstrap_servers.split(","), 1) if n != number]
        knowing = sink.model_copy(update={"bootstrap_servers": ",".join(others)})
        unaware = [
            knowing.model_copy(update={"properties": {"client.id": name}}) for name in ("a", "b")
        ]
        place = (sink.topic, partition)
        for each in unaware:  # its process's client knows who leads
            assert list_offsets(Clients(each), [*saved], "latest") == saved

        network.cut_off_from_peers(number)
        eventually(lambda: _leader(others, partition) not in {-1, number})
        mine = SECOND.filter(
            [topic_partition(a, WHOLE.partitions) == partition for a, _ in _pairs(SECOND)]
        )
        with ShardSink(Clients(knowing), APP, WHOLE) as owner:
            later = saved | owner.publish(Content(mine)).next_offsets
        assert later[place] > saved[place]
        assert list_offsets(Clients(unaware[0]), [place], "latest") == {place: saved[place]}, (
            "the old end"
        )

        published = False
        tries = 0
        deadline = time.monotonic() + 120
        while not published:  # as a shard's task that is tried again
            assert time.monotonic() < deadline
            tries += 1
            with ShardSink(Clients(unaware[0]), APP, WHOLE) as owner, suppress(SinkError):
                known, _ = folded(owner, saved)
                rest = mine.filter([pair not in known for pair in _pairs(mine)])
                owner.publish(Content(rest))
                published = not owner.needs_replacement
        assert tries > 1

        with ShardSink(Clients(unaware[1]), APP, WHOLE) as owner:
            met: SinkError | None = None
            try:
                found = list(owner.fold(later))
            except SinkError as error:
                met, found = error, []
        assert found == []
        if met is not None:  # else: its client has learnt who leads meanwhile
            assert (met.code, met.retriable) == ("sink.unreachable", True)
            assert "disagree about the leader of" in met.message
        network.join(number)
        eventually(lambda: _leader([cluster.bootstrap_servers], partition) != -1)
        with ShardSink(Clients(unaware[1]), APP, WHOLE) as owner:
            assert list(owner.fold(later)) == []
        assert_published_once(cluster.bootstrap_servers, sink.topic, FIRST, mine)


def _made(sink: config.Sink) -> bool:
    with suppress(SinkError):
        return check_topics(Clients(sink)) == WHOLE.partitions
    return False


def _leader(servers: list[str], partition: int) -> int:
    """Of a partition of the topic, by who is asked anew."""
    admin = AdminClient({"bootstrap.servers": ",".join(servers), "log_level": 0})
    with suppress(KafkaException):
        topic = admin.list_topics("orders", timeout=5).topics["orders"]
        return int(topic.partitions[partition].leader)
    return -1


def _pairs(rows: Any) -> list[tuple[str, int]]:
    return list(zip(rows["aggregate_id"].to_pylist(), rows["version"].to_pylist(), strict=True))
