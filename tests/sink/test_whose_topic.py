"""Scenario F9: whose topic it is, what may stand on it, and what the broker refuses.

On a real broker, with a reader of its own. The cases that need the installed command are in
`tests/publisher/test_topics.py`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import NewPartitions  # type: ignore[attr-defined]

from eventpub import config
from eventpub.admission.model import EVENTS, Decision, Shard, SkippedGap
from eventpub.errors import ConfigError, SinkError
from eventpub.local.servers import Kafka
from eventpub.shard.dead_letters import Refusals, dead_rows
from eventpub.sink import client
from eventpub.sink.base import Content, RecordRefusedError
from eventpub.sink.client import Clients, check_properties
from eventpub.sink.encoder import CloudEvents
from eventpub.sink.layout import check_topics
from eventpub.sink.missing_markers import MissingMarkerError
from eventpub.sink.reading import has_written
from eventpub.sink.records import DeadRow
from eventpub.sink.shard import ShardSink
from eventpub.sink.topics import list_offsets
from tests.sink.helpers import (
    APP,
    CREATED,
    PARTITIONS,
    WHOLE,
    as_set,
    events,
    identities,
    ids_of,
    read_topic,
    settings,
    some_events,
)
from tests.sink.test_publish_and_fold import CrashError, configure, crash_at, folded

LITTLE = "100"
"""Bytes: less than any record, more than a transaction's marker, without which none would end."""

SOON = 7_200
"""Seconds ahead: more than the hour that a broker takes by default."""


@pytest.fixture
def servers(kafka_server: Kafka) -> str:
    return kafka_server.bootstrap_servers


@pytest.fixture
def sink(servers: str, topic_name: str) -> config.Sink:
    made = settings(topic_name, servers)
    check_topics(Clients(made), late=True)
    return made


@pytest.fixture
def new_sink(sink: config.Sink) -> Iterator[Callable[..., ShardSink]]:
    made: list[ShardSink] = []

    def make(shard: Shard = WHOLE, **more: Any) -> ShardSink:
        made.append(ShardSink(Clients(more.pop("sink", sink)), APP, shard, **more))
        made[-1].ready()
        return made[-1]

    yield make
    for each in made:
        each.close()


def publish(
    new_sink: Callable[..., ShardSink], sink: config.Sink, rows: Any, tries: int = 8
) -> int:
    """As a shard's task does: refused rows become dead letters; how many tries it took."""
    refusals = Refusals(sink)
    for attempt in range(1, tries + 1):
        owner = new_sink()
        content, _ = refusals.without(Decision(rows), 0, "events", 0)
        try:
            owner.publish(replace(content, now=None))
        except RecordRefusedError as refusal:
            refusals.note(refusal, content.events, None)
        except SinkError as error:
            if not error.retriable:
                raise
        else:
            return attempt
    raise AssertionError(f"not published in {tries} tries")


def tried(new_sink: Callable[..., ShardSink], rows: Any, **more: Any) -> SinkError | None:
    """Publish, by a new sink while trying again may help; what then is wrong, or None."""
    for _ in range(6):
        try:
            new_sink().publish(Content(rows, **more))
        except SinkError as error:
            if not error.retriable:
                return error
        else:
            return None
    raise AssertionError("it would be tried for ever")


def write(servers: str, topic: str, records: list[tuple[str, int]], **headers: str) -> None:
    """Events of eventpub's shape, written by somebody else."""
    producer = Producer({"bootstrap.servers": servers, "partitioner": "consistent"})
    for key, version in records:
        made = {
            "ce_specversion": "1.0",
            "ce_id": f"{key}/{version}",
            "ce_source": "billing",
            "ce_type": "Paid",
            "ce_time": "2026-01-01T00:00:00.000000Z",
            "ce_subject": key,
            "ce_sequence": str(version),
            **headers,
        }
        producer.produce(topic, b"{}", key, headers=list(made.items()))
    assert producer.flush(10) == 0


class TestDeadLetters:
    def test_a4_a_dead_letter_is_bounded_whatever_the_row_is(
        self, new_sink: Callable[..., ShardSink], sink: config.Sink, servers: str
    ) -> None:
        ids = ids_of(WHOLE, 5)
        rows = events(
            [(a, 1) for a in ids],
            metadata=['{"trace":"' + "x" * 1_200_000 + '"}', None, None, None, None],
            event_type=["E", "T" * 1_500_000, "E", "E", "E"],
            payload=[b"{}", b"{}", b"p" * 3_000_000, b"{}", b"{}"],
        )
        publish(new_sink, sink, rows)
        seen = identities(read_topic(servers, sink.topic))
        assert sorted(seen) == sorted((a, 1) for a in ids[3:])
        letters = {
            m.key().decode(): dict(m.headers()) for m in read_topic(servers, sink.dead_topic)
        }
        assert letters.keys() == set(ids[:3])
        assert letters[ids[0]]["eventpub_metadata_bytes"] == b"1200012"
        assert letters[ids[1]]["eventpub_type_bytes"] == b"1500000"
        assert letters[ids[2]]["eventpub_payload_bytes"] == b"3000000"
        reason = b"MSG_SIZE_TOO_LARGE: larger than the client's message.max.bytes (1048588)"
        assert reason in letters[ids[2]]["eventpub_reason"]
        assert all(b"MSG_SIZE_TOO_LARGE" in found["eventpub_reason"] for found in letters.values())
        assert folded(new_sink(), {})[0] == {(a, 1) for a in ids[3:]}

    def test_a4_a_row_is_published_that_the_topic_takes_but_the_clients_own_limit_would_not(
        self, new_sink: Callable[..., ShardSink], sink: config.Sink, servers: str
    ) -> None:
        publish(new_sink, sink, events([("a", 1)], payload=[b"p" * 1_000_000]))
        assert [len(m.value()) for m in read_topic(servers, sink.topic)] == [1_000_000]

    def test_a4_a_large_row_that_admission_refuses_is_a_dead_letter_too(
        self, new_sink: Callable[..., ShardSink], sink: config.Sink, servers: str
    ) -> None:
        rows = events([("a", -1)], payload=[b"p" * 1_200_000])
        new_sink().publish(
            Content(EVENTS.empty_table(), dead=dead_rows(rows, ["admission.version: -1"]))
        )
        (letter,) = read_topic(servers, sink.dead_topic)
        assert dict(letter.headers())["eventpub_payload_bytes"] == b"1200000"

    def test_a4_a_dead_letter_that_is_refused_is_reduced_and_then_said(
        self, new_sink: Callable[..., ShardSink], sink: config.Sink, servers: str
    ) -> None:
        configure(servers, sink.dead_topic, "max.message.bytes", "2000")
        payload = os.urandom(9_000)  # which no compression makes small
        letter = DeadRow("a", 1, "admission.x: because", payload=payload, create_time=CREATED)
        good = some_events(WHOLE, 20)
        assert tried(new_sink, good, dead=[letter]) is None
        (found,) = read_topic(servers, sink.dead_topic)
        assert found.value() is None
        assert dict(found.headers())["eventpub_payload_bytes"] == b"9000"
        assert set(identities(read_topic(servers, sink.topic))) == as_set(good)

        configure(servers, sink.dead_topic, "max.message.bytes", LITTLE)
        error = tried(new_sink, some_events(WHOLE, 5, 100), dead=[letter])
        assert error is not None
        assert error.code == "sink.side_record_refused"
        assert f"--entity-name {sink.dead_topic}" in str(error)
        configure(servers, sink.dead_topic, "max.message.bytes", "1048588")  # as it says
        assert tried(new_sink, some_events(WHOLE, 5, 100), dead=[letter]) is None
        assert len(read_topic(servers, sink.dead_topic)) == 2

    def test_a4_a_gap_that_is_refused_is_not_tried_for_ever(
        self, new_sink: Callable[..., ShardSink], sink: config.Sink, servers: str
    ) -> None:
        configure(servers, sink.gaps_topic, "max.message.bytes", LITTLE)
        gap = SkippedGap("a", 2, 2, CREATED, CREATED, 8, "gave up")
        error = tried(new_sink, some_events(WHOLE, 5), gaps=[gap])
        assert error is not None
        assert error.code == "sink.side_record_refused"
        assert sink.gaps_topic in error.message


class TestTimes:
    def test_a23_no_record_is_later_than_its_publication(
        self, new_sink: Callable[..., ShardSink], sink: config.Sink, servers: str
    ) -> None:
        for topic in (sink.topic, sink.dead_topic):
            configure(servers, topic, "message.timestamp.after.max.ms", "3600000")
        now = int(time.time() * 1e6)
        far = now + SOON * 1_000_000
        dead = DeadRow("a", 4, "admission.x: because", create_time=far)
        late = events([("a", 3)], create_time=[far])
        new_sink().publish(
            Content(
                events([("a", 1), ("a", 2)], create_time=[CREATED, far]),
                dead=[dead],
                diverted=late,
                gaps=[SkippedGap("a", 5, 5, far, far, 1, "gave up")],
                now=now,
            )
        )
        first, second = read_topic(servers, sink.topic)
        assert first.timestamp()[1] == CREATED // 1000
        assert second.timestamp()[1] == now // 1000
        assert dict(second.headers())["ce_time"] > dict(first.headers())["ce_time"]
        for topic in (sink.dead_topic, sink.gaps_topic, sink.late_topic):
            (record,) = read_topic(servers, topic)
            assert record.timestamp()[1] == now // 1000

    def test_a23_a_database_whose_clock_is_hours_ahead(
        self, new_sink: Callable[..., ShardSink], sink: config.Sink, servers: str
    ) -> None:
        configure(servers, sink.topic, "message.timestamp.after.max.ms", "3600000")
        ahead = int(time.time() * 1e6) + SOON * 1_000_000
        rows = events([("a", v) for v in range(1, 100)], create_time=[ahead] * 99)
        new_sink().publish(Content(rows, now=ahead))
        assert len(read_topic(servers, sink.topic)) == 99


class TestOthers:
    def test_a16_a_record_of_somebody_else_silences_no_aggregate(
        self, new_sink: Callable[..., ShardSink], sink: config.Sink, servers: str
    ) -> None:
        owner = new_sink()
        owner.publish(Content(some_events(WHOLE, 20)))
        a = ids_of(WHOLE, 1)[0]
        producer = Producer({"bootstrap.servers": servers})
        forged: list[Any] = [("ce_source", "billing"), ("ce_sequence", "999")]
        producer.produce(sink.topic, b"{}", a, headers=forged)
        producer.produce(sink.topic, b"{}", a, headers=forged[1:])
        producer.produce(sink.dead_topic, b"{}", a, headers=forged)
        time = "2026-01-01T00:00:00.000000Z"
        skip = {"aggregate_id": a, "from_version": 1, "to_version": 999, "attempts": 8}
        skip |= {"first_seen": time, "skipped_at": time, "reason": "max_backoff"}
        producer.produce(sink.gaps_topic, json.dumps(skip), a)
        producer.flush()
        found, fold = folded(new_sink(), {})
        assert found == as_set(some_events(WHOLE, 20))
        assert fold.decoder.not_ours == 4

    def test_a7_a_skip_of_an_earlier_version_is_told_apart(
        self, new_sink: Callable[..., ShardSink], sink: config.Sink, servers: str
    ) -> None:
        a = ids_of(WHOLE, 1)[0]
        new_sink().publish(Content(some_events(WHOLE, 20)))
        gap = SkippedGap(a, 3, 4, CREATED, CREATED + 1, 8, "max_backoff")
        record = CloudEvents(APP).gap(gap, PARTITIONS)
        json_alone: list[Any] = [h for h in record.headers if h[0] != "ce_source"]
        producer = Producer({"bootstrap.servers": servers})
        value = record.value or b""
        for key, text, headers in (
            (a, value, json_alone),
            (a, value, [*json_alone, ("by", b"hand")]),
            ("another", value, json_alone),
            (a, value.replace(b'":', b'": '), json_alone),
            (a, value, [("ce_source", b"billing"), *json_alone]),
        ):
            producer.produce(sink.gaps_topic, text, key, record.partition, headers=headers)
        assert producer.flush(10) == 0
        fold = new_sink().fold({})
        parts = [part for part in fold if part.kind == "gaps"]
        assert not any(part.gaps for part in parts)
        assert fold.decoder.not_ours == 5

    def test_a22_what_was_written_is_found_between_the_records_of_others(
        self, new_sink: Callable[..., ShardSink], sink: config.Sink, servers: str
    ) -> None:
        """Without state, a start at "now" left out what was committed while no publisher ran."""
        producer = Producer({"bootstrap.servers": servers})

        def others_write() -> None:
            for number in range(120 * PARTITIONS):
                producer.produce(sink.topic, b"{}", "k", number % PARTITIONS)
            assert producer.flush(20) == 0

        others_write()
        assert not has_written(Clients(sink), APP)
        new_sink().publish(Content(some_events(WHOLE, 2)))
        others_write()
        assert has_written(Clients(sink), APP)
        assert not has_written(Clients(sink), "another")

    def test_a22_another_publisher_is_an_error(
        self, new_sink: Callable[..., ShardSink], sink: config.Sink, servers: str
    ) -> None:
        owner = new_sink()
        owner.publish(Content(some_events(WHOLE, 20)))
        write(servers, sink.topic, [("x", 1), ("x", 2)])
        with pytest.raises(SinkError) as caught:
            folded(new_sink(), {})
        assert (caught.value.code, caught.value.retriable) == ("sink.other_publisher", False)
        assert "'billing'" in str(caught.value)

    @pytest.mark.parametrize("delivery", ["exactly_once", "at_least_once"])
    def test_a22_it_is_found_between_two_batches_of_one_producer(
        self, new_sink: Callable[..., ShardSink], sink: config.Sink, servers: str, delivery: str
    ) -> None:
        owner = new_sink(sink=sink.model_copy(update={"delivery": delivery}))
        list(owner.fold({}))
        owner.publish(Content(some_events(WHOLE, 40)))
        write(servers, sink.topic, [(f"x-{n}", 1) for n in range(16)])
        with pytest.raises(SinkError) as caught:
            owner.publish(Content(some_events(WHOLE, 40, 100)))
        assert caught.value.code == "sink.other_publisher"
        there = identities(read_topic(servers, sink.topic))
        if delivery == "exactly_once":
            assert sum(not name.startswith("x-") for name, _ in there) == 40, (
                "what both may publish is not there twice"
            )

    def test_c8_shards_of_another_number_that_nobody_fences_repeat_nothing(
        self, new_sink: Callable[..., ShardSink], sink: config.Sink, servers: str
    ) -> None:
        """Of a second publisher of this application: no transactional id is the same."""
        theirs = Shard(2, 4, PARTITIONS)
        a = ids_of(theirs, 1)[0]
        first, second = new_sink(Shard(0, 2, PARTITIONS)), new_sink(theirs)
        for each in (first, second):
            list(each.fold({}))
        first.publish(Content(events([(a, 1)])))
        with pytest.raises(SinkError):
            second.publish(Content(events([(a, 1)])))
        second = new_sink(theirs)
        list(second.fold({}))
        second.publish(Content(events([(a, 2)])))
        with pytest.raises(SinkError) as caught:
            first.publish(Content(events([(a, 2)])))
        assert caught.value.code == "sink.aborted"
        assert first.needs_replacement
        assert identities(read_topic(servers, sink.topic)) == [(a, 1), (a, 2)]

    def test_a15_what_stands_in_former_partitions_is_found(
        self, new_sink: Callable[..., ShardSink], sink: config.Sink
    ) -> None:
        before = some_events(WHOLE, 200)
        new_sink().publish(Content(before))
        admin, _ = Clients(sink).admin()
        for future in admin.create_partitions([NewPartitions(t, 6) for t in sink.topics]).values():
            future.result(10)
        Clients(sink).renew()
        found: list[tuple[str, int]] = []
        for number in range(3):
            owner = new_sink(Shard(number, 3, 6))
            for part in owner.fold({}, everywhere=True):
                found += zip(part.aggregate_ids, part.versions.tolist(), strict=True)
        assert sorted(found) == sorted(as_set(before)), "by one shard each"

    def test_a15_what_another_shard_has_to_restore_is_left_to_it(
        self, new_sink: Callable[..., ShardSink], sink: config.Sink
    ) -> None:
        """Two that restored it would publish it twice, and end nothing of the other's."""
        mine, theirs = Shard(0, 2, PARTITIONS), Shard(1, 2, PARTITIONS)
        with pytest.raises(CrashError):
            new_sink(theirs).publish(
                Content(some_events(theirs, 40)), crash_point=crash_at("before_commit")
            )
        other = new_sink(theirs)  # which ends it by an abort
        places = [(sink.topic, p) for p in theirs.topic_partitions()]
        saved = list_offsets(Clients(sink), places, "latest")
        other.publish(Content(some_events(theirs, 40, 101)))
        believed = {place: (0, end - 1) for place, end in saved.items()}
        with pytest.raises(MissingMarkerError):
            list(other.fold(saved, believed))
        assert list(new_sink(mine).fold(saved, believed, everywhere=True))


def test_a6_a_topic_that_is_made_again_while_a_producer_lives(
    new_sink: Callable[..., ShardSink], sink: config.Sink, servers: str
) -> None:
    owner = new_sink()
    list(owner.fold({}))
    saved = owner.publish(Content(some_events(WHOLE, 400)))
    remake(sink)
    caught = None
    deadline = time.monotonic() + 60.0
    while time.monotonic() < deadline:
        try:
            if owner.needs_replacement:  # as a task does: fold before anything is published
                owner = new_sink()
                list(owner.fold(saved.next_offsets, saved.written))
            owner.publish(Content(some_events(WHOLE, 400, 100)))
        except SinkError as error:
            caught = error
            if not _passes(error):
                break
    assert caught is not None
    assert caught.code == "sink.topic_recreated"
    assert read_topic(servers, sink.topic) == []
    remake(sink)  # without what was aborted
    while True:  # as a task that is tried again: its partitions may have no leader yet
        began = time.monotonic()
        with pytest.raises(SinkError) as raised:
            list(
                new_sink().fold(saved.next_offsets, saved.written, acknowledged=saved.next_offsets)
            )
        if not _passes(raised.value) or began > deadline:
            break
    assert (raised.value.code, raised.value.retriable) == ("sink.topic_recreated", False)
    assert time.monotonic() - began < 5.0


def _passes(error: SinkError) -> bool:
    """A broker may not know of a new topic yet; for so long the publisher waits."""
    return error.retriable or error.code == "sink.topic_missing"


def remake(sink: config.Sink) -> None:
    """Delete the topic, and make it again."""
    admin, _ = Clients(sink).admin()
    for future in admin.delete_topics([sink.topic]).values():
        future.result(10)
    deadline = time.monotonic() + 20
    # its deletion is answered before it is gone, and what is still there is not made again
    while sink.topic in admin.list_topics(timeout=5).topics and time.monotonic() < deadline:
        time.sleep(0.1)
    while time.monotonic() < deadline:
        try:
            check_topics(Clients(sink))
            break
        except SinkError:
            time.sleep(0.2)


def test_a20_a_log_that_is_worded_differently_counts_as_a_doubt(
    new_sink: Callable[..., ShardSink],
    sink: config.Sink,
    servers: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    receive = client.ClientLog.log

    def other_words(
        self: client.ClientLog, level: int, form: str, facility: str, name: str, text: str
    ) -> None:
        receive(self, level, form, facility, name, text.replace("EndTxnRequest", "EndTxn"))

    monkeypatch.setattr(client.ClientLog, "log", other_words)
    monkeypatch.setattr("eventpub.sink.transaction._log_is_strange.is_set", lambda: False)
    owner = new_sink()
    owner.publish(Content(some_events(WHOLE, 40)))
    assert owner.needs_replacement
    assert "read back after each transaction" in caplog.text
    monkeypatch.undo()
    owner = new_sink()
    owner.publish(Content(some_events(WHOLE, 40, 100)))
    assert not owner.needs_replacement
    assert len(identities(read_topic(servers, sink.topic))) == 80


@pytest.mark.parametrize(
    "properties",
    [
        {"compresion.type": "lz4"},
        {"fetch.wait.max.ms": "soon"},
        {
            "security.protocol": "SASL_SSL",
            "sasl.mechanisms": "OAUTHBEARER",
            "sasl.oauthbearer.method": "oidc",
        },
        {"stats.interval.ms": "often"},
    ],
)
def test_a_property_that_the_client_refuses_is_found_without_a_broker(
    properties: dict[str, str],
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_properties(config.Sink(topic="t", properties=properties), APP)
    assert caught.value.code == "config.sink_property"
