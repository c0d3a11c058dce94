"""Publishing to a real broker, and reading back what is visible, through crashes and rivals."""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from confluent_kafka import OFFSET_END, Producer, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
)

from eventpub import config
from eventpub.admission.model import Shard, SkippedGap
from eventpub.errors import ConfigError, SinkError
from eventpub.local.servers import Kafka
from eventpub.sink.base import Content, RecordRefusedError
from eventpub.sink.client import ClientLog, Clients
from eventpub.sink.fold import Fold
from eventpub.sink.layout import check_topics
from eventpub.sink.records import DeadRow
from eventpub.sink.shard import ShardSink
from eventpub.sink.topics import list_offsets
from eventpub.sink.transaction import fence_all
from tests.publisher.harness import eventually
from tests.sink.conftest import OwnBroker
from tests.sink.helpers import (
    APP,
    CREATED,
    PARTITIONS,
    WHOLE,
    events,
    identities,
    ids_of,
    open_transactions,
    read_topic,
    settings,
    some_events,
)
from tests.sink.mock_cluster import END_TXN

Offsets = dict[tuple[str, int], int]


class CrashError(Exception):
    """Stands for the death of the process."""


def crash_at(name: str) -> Callable[[str], None]:
    def point(passed: str) -> None:
        if passed == name:
            raise CrashError

    return point


@pytest.fixture
def servers(kafka_server: Kafka) -> str:
    return kafka_server.bootstrap_servers


@pytest.fixture
def sink_config(servers: str, topic_name: str) -> config.Sink:
    made = settings(topic_name, servers)
    check_topics(Clients(made), late=True)
    return made


@pytest.fixture
def new_sink(sink_config: config.Sink) -> Iterator[Callable[..., ShardSink]]:
    made: list[ShardSink] = []

    def new(shard: Shard = WHOLE, sink: config.Sink = sink_config) -> ShardSink:
        made.append(ShardSink(Clients(sink), APP, shard))
        made[-1].ready()
        return made[-1]

    yield new
    for sink in made:
        sink.close()


def folded(sink: ShardSink, saved: Mapping[tuple[str, int], int]) -> tuple[set[Any], Fold]:
    """Every (aggregate, version) of the topic that the fold gave."""
    fold = sink.fold(saved)
    found = set()
    for part in fold:
        if part.kind == "events":
            found |= set(zip(part.aggregate_ids, part.versions.tolist(), strict=True))
    return found, fold


def as_set(table: Any) -> set[tuple[str, int]]:
    return set(zip(table["aggregate_id"].to_pylist(), table["version"].to_pylist(), strict=True))


def configure(servers: str, topic: str, key: str, value: str) -> None:
    resource = ConfigResource("topic", topic)
    resource.add_incremental_config(
        ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET)
    )
    admin = AdminClient({"bootstrap.servers": servers})
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(10)
    time.sleep(0.5)  # the broker answers before the partitions have heard of it


def publish_all_but_refused(
    new_sink: Callable[..., ShardSink], table: pa.Table, tries: int = 10
) -> list[int]:
    """Publishes as a caller does, redoing what may be redone; the rows that were refused."""
    sink = new_sink()
    refused: list[int] = []
    for _ in range(tries):
        keep = [n for n in range(table.num_rows) if n not in refused]
        try:
            sink.publish(Content(table.take(keep)))
        except RecordRefusedError as refusal:
            refused += [keep[n] for n in refusal.rows]
        except SinkError as error:
            if not error.retriable:
                raise
        else:
            return refused
        if sink.needs_replacement:
            sink.close()
            sink = new_sink()
    raise AssertionError("the batch was never published")


def test_an_idle_producer_hands_over_what_it_has_logged(
    new_sink: Callable[..., ShardSink],
    sink_config: config.Sink,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It keeps all of it until it is asked."""
    lines: list[str] = []
    often = {"topic.metadata.refresh.interval.ms": "100"}
    sink = new_sink(sink=sink_config.model_copy(update={"properties": often}))
    sink.publish(Content(some_events(WHOLE, 40)))
    sink.serve()
    monkeypatch.setattr(ClientLog, "note", lambda _, facility, text: lines.append(facility))
    time.sleep(1)
    assert lines == []
    sink.serve()
    assert len(lines) > 5
    assert not sink.needs_replacement


class TestPublish:
    def test_a_consumer_sees_what_the_store_had(
        self, new_sink: Callable[..., ShardSink], sink_config: config.Sink, servers: str
    ) -> None:
        ids = ["order-1", "ä/ö'\" ", "A", "a\x00b", "x" * 255]
        rows = [(a, v) for v in (1, 2) for a in ids]
        payloads = [b'{"n":1}', b"", None, b"\xff\x00", b"x" * 100_000] * 2
        table = events(rows, payload=payloads, metadata=['{"user":"u1"}'] * len(rows))
        late = np.zeros(len(rows), np.bool_)
        late[3] = True
        batch = new_sink().publish(Content(table, late=late))
        assert batch.events == len(rows)

        messages = read_topic(servers, sink_config.topic)
        assert sorted(identities(messages)) == sorted(rows)
        by_identity = {identities([m])[0]: m for m in messages}
        for number, row in enumerate(rows):
            message = by_identity[row]
            headers = dict(message.headers())
            assert message.value() == payloads[number]
            assert message.partition() == zlib.crc32(row[0].encode()) % PARTITIONS
            assert message.timestamp()[1] == CREATED // 1000
            assert headers["ce_id"] == f"{row[0]}/{row[1]}".encode()
            assert headers["ce_source"] == APP.encode()
            assert headers["user"] == b"u1"
            assert headers.get("eventpub_late") == (b"1" if number == 3 else None)

    def test_the_order_of_a_batch_is_the_order_of_each_partition(
        self, new_sink: Callable[..., ShardSink], sink_config: config.Sink, servers: str
    ) -> None:
        table = some_events(WHOLE, 5_000)
        new_sink().publish(Content(table))
        seen = identities(read_topic(servers, sink_config.topic))
        for aggregate_id in set(table["aggregate_id"].to_pylist()):
            versions = [v for a, v in seen if a == aggregate_id]
            assert versions == list(range(1, len(versions) + 1))
        assert set(seen) == as_set(table)
        assert len(seen) == 5_000

    def test_the_side_topics_are_part_of_the_transaction(
        self, new_sink: Callable[..., ShardSink], sink_config: config.Sink, servers: str
    ) -> None:
        gap = SkippedGap("order-1", 2, 3, CREATED, CREATED, 8, "gave up")
        extra: dict[str, Any] = {
            "gaps": [gap],
            "dead": [DeadRow("order-2", 9, "sink.record_refused: too large", b"x")],
            "diverted": events([("order-3", 4)]),
        }
        sink = new_sink()
        with pytest.raises(CrashError):
            sink.publish(
                Content(some_events(WHOLE, 3), **extra), crash_point=crash_at("before_commit")
            )
        sink.close()
        sink = new_sink()
        for topic in (sink_config.topic, sink_config.gaps_topic, sink_config.dead_topic):
            assert read_topic(servers, topic) == []

        batch = sink.publish(Content(some_events(WHOLE, 3), **extra))
        assert batch.events == 3
        assert len(read_topic(servers, sink_config.topic)) == 3
        assert len(read_topic(servers, sink_config.dead_topic)) == 1
        assert identities(read_topic(servers, sink_config.late_topic)) == [("order-3", 4)]
        kinds = {part.kind: part for part in sink.fold({})}
        assert kinds["gaps"].gaps == [gap]
        assert kinds["dead"].aggregate_ids == ["order-2"]
        assert kinds["late"].versions.tolist() == [4]
        assert {p: o for p, o in sink.offsets.items() if o} == batch.next_offsets | {
            p: o for p, o in sink.offsets.items() if o and p not in batch.next_offsets
        }

    def test_dead_letters_of_versions_written_anew_say_above_what_and_come_first(
        self, new_sink: Callable[..., ShardSink]
    ) -> None:
        conflict = "admission.version_conflict: another event"
        above = (3, CREATED - 1)
        dead = DeadRow("order-1", 2, conflict, b"x", create_time=CREATED, published=above)
        new_sink().publish(Content(some_events(WHOLE, 3), dead=[dead]))
        found = [part for part in new_sink().fold({}) if part.kind in {"dead", "events"}]
        assert [part.kind for part in found][:2] == ["dead", "events"]
        assert found[0].published == {0: above}
        assert all((part.kind, part.published) == ("events", {}) for part in found[1:])

    def test_a_batch_of_nothing_asks_the_broker_nothing(
        self, new_sink: Callable[..., ShardSink]
    ) -> None:
        batch = new_sink().publish(Content(events([])))
        assert (batch.events, batch.next_offsets) == (0, {})

    def test_a_record_of_another_shard_stops_everything(
        self, new_sink: Callable[..., ShardSink], sink_config: config.Sink, servers: str
    ) -> None:
        mine, theirs = Shard(0, 2, PARTITIONS), Shard(1, 2, PARTITIONS)
        rows = [(ids_of(mine, 1)[0], 1), (ids_of(theirs, 1)[0], 1)]
        with pytest.raises(SinkError) as caught:
            new_sink(mine).publish(Content(events(rows)))
        assert caught.value.code == "sink.wrong_partition"
        assert read_topic(servers, sink_config.topic) == []

    def test_more_rows_than_the_clients_queue_holds_wait_for_room(
        self, servers: str, sink_config: config.Sink, new_sink: Callable[..., ShardSink]
    ) -> None:
        small = sink_config.model_copy(
            update={"properties": {"queue.buffering.max.messages": "100"}}
        )
        assert new_sink(sink=small).publish(Content(some_events(WHOLE, 3_000))).events == 3_000
        assert len(read_topic(servers, sink_config.topic)) == 3_000


class TestRefusedRecords:
    def test_the_row_that_is_too_large_is_named_and_the_rest_goes_on(
        self, new_sink: Callable[..., ShardSink], sink_config: config.Sink, servers: str
    ) -> None:
        rows = [("order-1", 1), ("order-1", 2), ("order-1", 3), ("order-2", 1)]
        payload: list[bytes] = [b"{}", b"x" * 3_000_000, b"{}", b"y" * 2_000_000]
        table = events(rows, payload=payload)
        sink = new_sink()
        with pytest.raises(RecordRefusedError) as caught:
            sink.publish(Content(table))
        assert caught.value.code == "sink.record_refused"
        assert caught.value.rows == [1, 3]
        assert read_topic(servers, sink_config.topic) == []
        assert sink.needs_replacement
        sink = new_sink()

        dead = [
            DeadRow(*rows[n], f"sink.record_refused: {caught.value.reason}", payload[n])
            for n in caught.value.rows
        ]
        sink.publish(Content(table.take([0, 2]), dead=dead))
        assert identities(read_topic(servers, sink_config.topic)) == [rows[0], rows[2]]
        refused = read_topic(servers, sink_config.dead_topic)
        assert sorted(identities(refused)) == [rows[1], rows[3]]
        assert {dict(m.headers())["eventpub_payload_bytes"] for m in refused} == {
            b"3000000",
            b"2000000",
        }

    def test_the_row_that_the_topic_does_not_take_is_found(
        self, new_sink: Callable[..., ShardSink], sink_config: config.Sink, servers: str
    ) -> None:
        configure(servers, sink_config.topic, "max.message.bytes", "20000")
        noise = random.Random(1)
        rows = [("order-1", v) for v in range(1, 101)]
        payload = [noise.randbytes(500 if v != 70 else 40_000) for _, v in rows]
        refused = publish_all_but_refused(new_sink, events(rows, payload=payload))
        assert refused == [69]
        seen = identities(read_topic(servers, sink_config.topic))
        assert seen == [r for r in rows if r[1] != 70]

    def test_all_rows_that_the_topic_does_not_take_are_found_in_one_pass(
        self, new_sink: Callable[..., ShardSink], sink_config: config.Sink, servers: str
    ) -> None:
        configure(servers, sink_config.topic, "max.message.bytes", "20000")
        noise = random.Random(1)
        large = set(range(3, 100, 5))
        payload = [noise.randbytes(40_000 if n in large else 500) for n in range(100)]
        rows = [(f"order-{n % 7}", n) for n in range(100)]
        refused = publish_all_but_refused(new_sink, events(rows, payload=payload), tries=3)
        assert set(refused) == large
        seen = identities(read_topic(servers, sink_config.topic))
        assert sorted(seen) == sorted(row for row in rows if row[1] not in large)

    def test_a_time_that_the_broker_refuses_names_its_row(
        self, new_sink: Callable[..., ShardSink], sink_config: config.Sink, servers: str
    ) -> None:
        three_years = str(3 * 365 * 86_400_000)
        configure(servers, sink_config.topic, "message.timestamp.before.max.ms", three_years)
        far = CREATED - 10 * 365 * 86_400_000_000
        table = events(
            [("order-1", v) for v in range(1, 6)], create_time=[CREATED, CREATED, far, CREATED, far]
        )
        assert sorted(publish_all_but_refused(new_sink, table)) == [2, 4]
        assert len(read_topic(servers, sink_config.topic)) == 3


class TestFold:
    def test_gives_back_everything_from_nothing(self, new_sink: Callable[..., ShardSink]) -> None:
        table = some_events(WHOLE, 3_000)
        sink = new_sink()
        batch = sink.publish(Content(table))
        found, fold = folded(new_sink(), {})
        assert found == as_set(table)
        assert not fold.truncated
        assert not fold.decoder.not_ours
        assert batch.next_offsets.items() <= fold.offsets.items()
        created = np.concatenate([p.create_times for p in new_sink().fold({})])
        assert sorted(created.tolist()) == table["create_time"].to_pylist()

    def test_reads_nothing_after_a_batch_whose_offsets_were_saved(
        self, new_sink: Callable[..., ShardSink]
    ) -> None:
        sink = new_sink()
        saved: Offsets = {}
        for version in range(1, 4):
            list(sink.fold(saved))
            saved = (
                sink.offsets | sink.publish(Content(some_events(WHOLE, 50, version))).next_offsets
            )
            fold = new_sink().fold(saved)
            assert list(fold) == []
            assert fold.offsets == saved
            sink = new_sink()

    def test_gives_back_what_was_committed_and_never_saved(
        self, new_sink: Callable[..., ShardSink]
    ) -> None:
        first = new_sink()
        saved = first.publish(Content(some_events(WHOLE, 50))).next_offsets
        second = some_events(WHOLE, 70, first_version=100)
        with pytest.raises(CrashError):
            first.publish(Content(second), crash_point=crash_at("after_commit"))
        found, fold = folded(new_sink(), saved)
        assert found == as_set(second)
        assert folded(new_sink(), fold.offsets)[0] == set()

    @pytest.mark.parametrize("point", ["after_begin", "after_produce", "before_commit"])
    def test_passes_over_what_was_never_committed(
        self, new_sink: Callable[..., ShardSink], point: str
    ) -> None:
        visible = set()
        for version in (1, 101, 201):
            sink = new_sink()
            with pytest.raises(CrashError):
                sink.publish(Content(some_events(WHOLE, 40, 10_000)), crash_point=crash_at(point))
            sink.close()
            sink = new_sink()
            table = some_events(WHOLE, 30, version)
            sink.publish(Content(table))
            visible |= as_set(table)
        sink = new_sink()
        with pytest.raises(CrashError):
            sink.publish(Content(some_events(WHOLE, 40, 10_000)), crash_point=crash_at(point))
        found, fold = folded(new_sink(), {})
        assert found == visible, "an aborted transaction at the end, too"
        assert list(new_sink().fold(fold.offsets)) == []

    def test_reads_its_own_partitions_only(self, new_sink: Callable[..., ShardSink]) -> None:
        shards = [Shard(n, 2, PARTITIONS) for n in range(2)]
        tables = [some_events(s, 40) for s in shards]
        for shard, table in zip(shards, tables, strict=True):
            new_sink(shard).publish(Content(table))
        for shard, table in zip(shards, tables, strict=True):
            found, fold = folded(new_sink(shard), {})
            assert found == as_set(table)
            assert {p % 2 for _, p in fold.offsets} == {shard.number}

    def test_counts_what_others_have_written(
        self, new_sink: Callable[..., ShardSink], sink_config: config.Sink, servers: str
    ) -> None:
        other = Producer({"bootstrap.servers": servers})
        other.produce(sink_config.topic, b"?", partition=0)
        other.produce(sink_config.topic, b"?", "key", 0, headers={"ce_sequence": "seven"})
        other.produce(sink_config.topic, b"?", b"\xff", 0, headers={"ce_sequence": "7"})
        other.produce(sink_config.gaps_topic, b"?", "key", 0)
        other.flush(10)
        sink = new_sink()
        sink.publish(Content(some_events(WHOLE, 20)))
        found, fold = folded(sink, {})
        assert len(found) == 20
        assert fold.decoder.not_ours == 4

    def test_says_when_retention_was_faster(
        self, new_sink: Callable[..., ShardSink], sink_config: config.Sink, servers: str
    ) -> None:
        sink = new_sink()
        sink.publish(Content(some_events(WHOLE, 100)))
        list(sink.fold({}))
        saved = sink.offsets
        last = some_events(WHOLE, 100, 1_000)
        sink.publish(Content(last))
        admin = AdminClient({"bootstrap.servers": servers})
        gone = [TopicPartition(t, p, o) for (t, p), o in saved.items() if t == sink_config.topic]
        for future in admin.delete_records(gone).values():
            future.result(10)

        found, fold = folded(new_sink(), saved)
        assert (found, fold.truncated) == (as_set(last), False), "what was read is not missed"
        found, fold = folded(new_sink(), {})
        assert (found, fold.truncated) == (as_set(last), True)

    def test_side_topics_that_were_cut_say_nothing_of_the_events(
        self, new_sink: Callable[..., ShardSink], sink_config: config.Sink, servers: str
    ) -> None:
        """What counts as published would be set by them, although the topic has all of it."""
        gap = SkippedGap("order-1", 2, 3, CREATED, CREATED, 8, "gave up")
        dead = DeadRow("order-2", 9, "sink.record_refused: too large", b"x")
        rows = some_events(WHOLE, 20)
        new_sink().publish(Content(rows, gaps=[gap], dead=[dead]))
        side = (sink_config.gaps_topic, sink_config.dead_topic)
        eventually(lambda: not any(open_transactions(servers, topic) for topic in side))
        cut = [TopicPartition(t, p, OFFSET_END) for t in side for p in range(PARTITIONS)]
        admin = AdminClient({"bootstrap.servers": servers})
        for future in admin.delete_records(cut).values():
            future.result(10)
        places = [(place.topic, place.partition) for place in cut]
        lows = list_offsets(Clients(sink_config), places, "earliest")
        assert lows == list_offsets(Clients(sink_config), places, "latest")
        assert any(lows.values())
        found, fold = folded(new_sink(), {})
        assert (found, fold.truncated) == (as_set(rows), False)

    @pytest.mark.parametrize("known_by", ["index", "coordinator"])
    def test_a_topic_that_was_made_anew_is_an_error(
        self, new_sink: Callable[..., ShardSink], sink_config: config.Sink, known_by: str
    ) -> None:
        """Where the index is new or a copy, too."""
        reached = {(sink_config.topic, 0): 10}
        saved, acknowledged = (reached, {}) if known_by == "index" else ({}, reached)
        with pytest.raises(SinkError) as caught:
            list(new_sink().fold(saved, acknowledged=acknowledged))
        assert caught.value.code == "sink.topic_recreated"
        assert caught.value.suggestion

    def test_without_a_late_topic_is_well(self, servers: str, topic_name: str) -> None:
        sink_config = settings(topic_name, servers)
        check_topics(Clients(sink_config))
        with ShardSink(Clients(sink_config), APP, WHOLE) as sink:
            sink.publish(Content(some_events(WHOLE, 20)))
            found, fold = folded(sink, {})
        assert len(found) == 20
        assert {t for t, _ in fold.offsets} == {
            sink_config.topic,
            sink_config.gaps_topic,
            sink_config.dead_topic,
        }


class TestRivals:
    def test_a_zombie_is_fenced_and_nothing_of_it_is_seen(
        self, new_sink: Callable[..., ShardSink], sink_config: config.Sink, servers: str
    ) -> None:
        zombie = new_sink()

        def overtaken(point: str) -> None:
            if point == "before_commit":
                new_sink().publish(Content(some_events(WHOLE, 20)))

        with pytest.raises(SinkError) as caught:
            zombie.publish(Content(some_events(WHOLE, 30, 1_000)), crash_point=overtaken)
        assert caught.value.code == "sink.fenced"
        assert zombie.needs_replacement
        seen = identities(read_topic(servers, sink_config.topic))
        assert sorted(seen) == sorted(as_set(some_events(WHOLE, 20)))

    @pytest.mark.parametrize("when", ["before_begin", "after_begin", "after_produce"])
    def test_a_zombie_that_wakes_up_earlier_is_fenced_as_well(
        self, new_sink: Callable[..., ShardSink], sink_config: config.Sink, servers: str, when: str
    ) -> None:
        zombie = new_sink()

        def overtaken(point: str) -> None:
            if point == when:
                new_sink().publish(Content(some_events(WHOLE, 20)))

        with pytest.raises(SinkError) as caught:
            zombie.publish(Content(some_events(WHOLE, 30, 1_000)), crash_point=overtaken)
        assert caught.value.code == "sink.fenced"
        assert zombie.needs_replacement
        assert len(read_topic(servers, sink_config.topic)) == 20

    def test_a_fold_that_stalls_reads_no_event_of_a_later_owner(
        self, new_sink: Callable[..., ShardSink]
    ) -> None:
        """It has not read the later owner's skips, which come before the events."""
        gap = SkippedGap("order-1", 2, 3, CREATED, CREATED, 8, "gave up")
        before = some_events(WHOLE, 20)
        offsets = new_sink().publish(Content(before, gaps=[gap])).next_offsets
        stalled = new_sink().fold({})
        chunks = iter(stalled)
        assert next(chunks).kind == "gaps"
        new_sink().publish(Content(some_events(WHOLE, 20, 1_000), gaps=[gap]))
        found: set[tuple[str, int]] = set()
        for part in chunks:
            found |= set(zip(part.aggregate_ids, part.versions.tolist(), strict=True))
        assert found == as_set(before)
        assert {place: stalled.offsets[place] for place in offsets} == offsets

    def test_a_writer_that_slept_through_its_timeout_has_published_nothing(
        self, own_broker: OwnBroker, topic_name: str
    ) -> None:
        sink = settings(topic_name, own_broker.open, transaction_timeout="1s")
        check_topics(Clients(sink))

        def oversleep(point: str) -> None:
            if point == "before_commit":
                time.sleep(2.0)

        with ShardSink(Clients(sink), APP, WHOLE) as sleeper:
            with pytest.raises(SinkError) as caught:
                sleeper.publish(Content(some_events(WHOLE, 20)), crash_point=oversleep)
            assert caught.value.code == "sink.transaction_expired"
            assert sleeper.needs_replacement
        with ShardSink(Clients(sink), APP, WHOLE) as awake:
            assert folded(awake, {})[0] == set()
            awake.publish(Content(some_events(WHOLE, 20)))
        assert len(read_topic(own_broker.open, topic_name)) == 20

    @pytest.mark.parametrize("rule", [True, False], ids=["new-sink", "same-sink"])
    def test_an_end_that_arrives_late_ends_no_later_transaction(
        self,
        own_broker: OwnBroker,
        topic_name: str,
        rule: bool,
    ) -> None:
        """KAFKA-17754. With the same sink it does: the rule is needed, and this test can fail."""
        sink_config = settings(topic_name, own_broker.proxied)
        check_topics(Clients(sink_config))
        first, second = some_events(WHOLE, 20), some_events(WHOLE, 20, 100)
        proxy = own_broker.proxy
        sink = ShardSink(Clients(sink_config), APP, WHOLE)
        sink.ready()
        proxy.strike_next(END_TXN, "late")
        assert sink.publish(Content(first)).events == 20, "the client has sent it again, unasked"
        assert proxy.has_struck
        assert sink.needs_replacement
        if rule:
            sink.close()
            sink = ShardSink(Clients(sink_config), APP, WHOLE)
        else:
            sink._writer.needs_replacement = False

        def late(point: str) -> None:
            if point == "before_commit":
                proxy.release()
                raise CrashError

        with pytest.raises(CrashError):
            sink.publish(Content(second), crash_point=late)
        sink.close()
        with ShardSink(Clients(sink_config), APP, WHOLE) as after:
            found, _ = folded(after, {})
        if rule:
            assert found == as_set(first), "nothing of what was never committed"
        else:
            assert found == as_set(first) | as_set(second)

    def test_shards_do_not_fence_each_other(self, new_sink: Callable[..., ShardSink]) -> None:
        shards = [Shard(n, 2, PARTITIONS) for n in range(2)]
        sinks = [new_sink(shard) for shard in shards]
        for version in (1, 100):
            for sink, shard in zip(sinks, shards, strict=True):
                assert sink.publish(Content(some_events(shard, 10, version))).events == 10

    def test_a_former_shards_open_transaction_is_ended_at_the_start(
        self,
        new_sink: Callable[..., ShardSink],
        sink_config: config.Sink,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("eventpub.sink.fold.FOLD_TIMEOUT", 1.0)
        former = new_sink(Shard(3, 4, PARTITIONS))
        with pytest.raises(CrashError):
            former.publish(
                Content(some_events(Shard(3, 4, PARTITIONS), 10)),
                crash_point=crash_at("before_commit"),
            )
        sink = new_sink(Shard(1, 2, PARTITIONS))
        with pytest.raises(SinkError) as caught:
            list(sink.fold({}))
        error = caught.value
        assert (error.code, error.retriable) == ("sink.hanging_transaction", True)
        for part in ("last stable offset 0", "high watermark 12", f"{sink_config.topic}[3]"):
            assert part in error.message
        assert "find-hanging" in (error.suggestion or "")

        fence_all(Clients(sink_config), APP, PARTITIONS)
        sink = new_sink(Shard(1, 2, PARTITIONS))
        found, fold = folded(sink, {})
        assert found == set()
        # ten records and their marker; and before it a try to end what is this shard's own
        assert fold.offsets[sink_config.topic, 3] == 10 + 2 + 1
        with pytest.raises(SinkError) as caught:
            former.publish(Content(some_events(Shard(3, 4, PARTITIONS), 10)))
        assert former.needs_replacement


class TestOtherDeliveries:
    @pytest.mark.parametrize("delivery", ["at_least_once", "at_most_once"])
    def test_publish_without_transactions(
        self, sink_config: config.Sink, servers: str, delivery: str
    ) -> None:
        plain = sink_config.model_copy(update={"delivery": delivery})
        with ShardSink(Clients(plain), APP, WHOLE) as sink:
            batch = sink.publish(Content(some_events(WHOLE, 500)))
            assert (batch.events, batch.lost) == (500, 0)
            found, fold = folded(sink, {})
            assert len(found) == 500
            assert batch.next_offsets.items() <= fold.offsets.items()
            assert list(sink.fold(fold.offsets)) == []
        assert len(read_topic(servers, sink_config.topic)) == 500

    def test_at_least_once_names_a_row_that_is_too_large(self, sink_config: config.Sink) -> None:
        plain = sink_config.model_copy(update={"delivery": "at_least_once"})
        table = events([("a", 1), ("a", 2), ("a", 3)], payload=[b"{}", b"x" * 2_000_000, b"{}"])
        with (
            ShardSink(Clients(plain), APP, WHOLE) as sink,
            pytest.raises(RecordRefusedError) as caught,
        ):
            sink.publish(Content(table))
        assert caught.value.rows == [1]

    def test_at_most_once_counts_what_it_loses(self, sink_config: config.Sink) -> None:
        plain = sink_config.model_copy(update={"delivery": "at_most_once"})
        table = events([("a", 1), ("a", 2), ("a", 3)], payload=[b"{}", b"x" * 2_000_000, b"{}"])
        with ShardSink(Clients(plain), APP, WHOLE) as sink:
            batch = sink.publish(Content(table))
        assert (batch.events, batch.lost) == (2, 1)


@pytest.mark.parametrize(
    "properties",
    [
        {"transactional.id": "mine"},
        {"enable.idempotence": "false"},
        {"acks": "1"},
        {"max.in.flight": "6"},
        {"isolation.level": "read_uncommitted"},
        {"message.timeout.ms": "60000"},
        {"log_level": "3"},
        {"bootstrap.servers": "elsewhere:9092"},
        {"no.such.property": "1"},
    ],
)
def test_a_property_that_breaks_a_guarantee_is_refused_by_name(
    sink_config: config.Sink, properties: dict[str, str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        ShardSink(
            Clients(sink_config.model_copy(update={"properties": properties})), APP, WHOLE
        ).ready()
    key = next(iter(properties))
    assert key in f"{caught.value.where} {caught.value.message}"


def test_other_properties_reach_the_client(sink_config: config.Sink) -> None:
    mine = sink_config.model_copy(
        update={
            "properties": {"compression.type": "zstd", "linger.ms": "0", "fetch.min.bytes": "1"}
        }
    )
    with ShardSink(Clients(mine), APP, WHOLE) as sink:
        sink.publish(Content(some_events(WHOLE, 20)))
        assert len(folded(sink, {})[0]) == 20


def test_no_transaction_waits_for_the_linger(sink_config: config.Sink) -> None:
    patient = sink_config.model_copy(update={"properties": {"linger.ms": "20000"}})
    with ShardSink(Clients(patient), APP, WHOLE) as sink:
        sink.ready()
        started = time.monotonic()
        sink.publish(Content(some_events(WHOLE, 20)))
        assert time.monotonic() - started < 15


def test_a_message_may_have_less_time_than_the_usual_linger(sink_config: config.Sink) -> None:
    hasty = sink_config.model_copy(update={"properties": {"message.timeout.ms": "150"}})
    with ShardSink(Clients(hasty), APP, WHOLE) as sink:
        sink.ready()
