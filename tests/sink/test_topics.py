"""Topics that are missing or do not fit, brokers that are away or refuse us, and the doctor."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from eventpub import config
from eventpub.errors import Check, SinkError
from eventpub.local.servers import Kafka
from eventpub.sink import topics, transaction
from eventpub.sink.checks import checks
from eventpub.sink.client import Clients
from eventpub.sink.layout import check_topics
from eventpub.sink.shard import ShardSink
from eventpub.sink.topics import list_offsets, partition_counts, topic_ids
from tests.publisher.harness import eventually
from tests.servers import kafka_cluster
from tests.sink.helpers import APP, PARTITIONS, WHOLE, settings
from tests.sink.mock_cluster import MockCluster

Make = Callable[..., None]


@pytest.fixture
def servers(kafka_server: Kafka) -> str:
    return kafka_server.bootstrap_servers


@pytest.fixture
def make(servers: str) -> Make:
    """Creates topics: name → partitions."""

    def made(partitions: dict[str, int], **settings: str) -> None:
        admin = AdminClient({"bootstrap.servers": servers})
        named = {key.replace("_", "."): value for key, value in settings.items()}
        new = [NewTopic(topic, count, 1, config=named) for topic, count in partitions.items()]
        for future in admin.create_topics(new).values():
            future.result(10)
        deadline = time.monotonic() + 10
        while not set(partitions) <= admin.list_topics(timeout=5).topics.keys():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    return made


def nobody() -> str:
    """An address where nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def error_of(sink: config.Sink, **more: Any) -> SinkError:
    with pytest.raises(SinkError) as caught:
        check_topics(Clients(sink), **more)
    return caught.value


class TestCheckTopics:
    def test_creates_what_is_missing_to_be_kept_for_good(
        self, servers: str, topic_name: str
    ) -> None:
        sink = settings(topic_name, servers)
        assert check_topics(Clients(sink), late=True) == PARTITIONS
        names = (topic_name, *(f"{topic_name}.{side}" for side in ("gaps", "dead", "late")))
        found = partition_counts(Clients(sink))
        assert [found.get(name) for name in names] == [PARTITIONS] * 4
        assert check_topics(Clients(sink), late=True) == PARTITIONS
        kept = [c for c in checks(Clients(sink), APP, 1) if c.name == "topic settings"]
        assert [c.status for c in kept] == ["ok"]

    def test_side_topics_follow_the_topic_that_exists(
        self, servers: str, topic_name: str, make: Make
    ) -> None:
        make({topic_name: 7})
        assert check_topics(Clients(settings(topic_name, servers))) == 7
        counts = topics.partition_counts(Clients(settings(topic_name, servers)))
        assert counts[f"{topic_name}.gaps"] == 7

    def test_says_how_to_create_what_it_may_not(self, servers: str, topic_name: str) -> None:
        error = error_of(settings(topic_name, servers, create_topics=False))
        assert error.code == "sink.topic_missing"
        for part in ("kafka-topics.sh", servers, topic_name, f"--partitions {PARTITIONS}"):
            assert part in (error.suggestion or "")

    @pytest.mark.parametrize("count", [PARTITIONS - 1, PARTITIONS + 1])
    def test_side_topics_must_have_as_many_partitions(
        self, servers: str, topic_name: str, make: Make, count: int
    ) -> None:
        make({topic_name: PARTITIONS, f"{topic_name}.gaps": count})
        error = error_of(settings(topic_name, servers))
        assert error.code == "sink.partition_count"
        assert f"{topic_name}.gaps" in error.message

    def test_shards_need_a_partition_each(self, servers: str, topic_name: str) -> None:
        sink = settings(topic_name, servers)
        error = error_of(sink, shards=PARTITIONS + 1)
        assert (error.code, error.where) == ("sink.partition_count", "run.shards")
        assert f"created with {PARTITIONS}" in error.message
        assert f"sink.partitions to at least {PARTITIONS + 1}" in (error.suggestion or "")
        assert topic_name not in partition_counts(Clients(sink)), "it is refused before it is made"

    def test_shards_need_a_partition_each_of_the_topic_that_exists(
        self, servers: str, topic_name: str, make: Make
    ) -> None:
        """It may have been made with fewer, as sink.partitions still says."""
        make({topic_name: PARTITIONS + 2})
        sink = settings(topic_name, servers)
        assert check_topics(Clients(sink), shards=PARTITIONS + 2) == PARTITIONS + 2
        error = error_of(sink, shards=PARTITIONS + 3)
        assert f"{topic_name} has {PARTITIONS + 2}" in error.message


class TestBrokersThatDoNotAnswer:
    def test_a_broker_that_is_away_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(topics, "REACH_TIMEOUT", 1.0)
        address = nobody()
        started = time.monotonic()
        error = error_of(settings("orders", address))
        assert (error.code, error.retriable) == ("sink.unreachable", True)
        assert address in (error.where or "")
        assert time.monotonic() - started < 5

    @pytest.mark.parametrize(
        "properties",
        [
            {"security.protocol": "ssl"},
            {
                "security.protocol": "sasl_plaintext",
                "sasl.mechanism": "PLAIN",
                "sasl.username": "eventpub",
                "sasl.password": "a-secret-word",
            },
        ],
        ids=["ssl", "sasl"],
    )
    def test_security_that_the_broker_does_not_speak_is_said_by_every_client(
        self,
        servers: str,
        topic_name: str,
        monkeypatch: pytest.MonkeyPatch,
        properties: dict[str, str],
    ) -> None:
        sink = settings(topic_name, servers, properties=properties)
        monkeypatch.setattr(topics, "REACH_TIMEOUT", 1.0)
        error = error_of(sink)
        assert error.code == "sink.auth_failed"
        assert "a-secret-word" not in str(error)
        monkeypatch.setattr(transaction, "READY_TIMEOUT", 1.0)
        with (
            ShardSink(Clients(sink), APP, WHOLE) as producer,
            pytest.raises(SinkError) as caught,
        ):
            producer.ready()
        assert caught.value.code == "sink.auth_failed"
        assert "a-secret-word" not in str(caught.value)


class TestDoctor:
    def of(self, sink: config.Sink, shards: int = 2, **more: Any) -> dict[str, Check]:
        return {check.name: check for check in checks(Clients(sink), APP, shards, **more)}

    def test_finds_nothing_where_all_is_well(self, servers: str, topic_name: str) -> None:
        sink = settings(topic_name, servers)
        check_topics(Clients(sink))
        found = self.of(sink)
        assert {c.status for c in found.values()} == {"ok"}
        assert set(found) == {
            "broker",
            "topic",
            "records on the topic",
            "side topic .gaps",
            "side topic .dead",
            "transactions",
            "topic settings",
            "replication",
            "broker settings",
        }

    def test_creates_nothing(self, servers: str, topic_name: str) -> None:
        sink = settings(topic_name, servers)
        assert self.of(sink)["topic"].status == "ok", "run will create it"
        assert topic_name not in topics.partition_counts(Clients(sink))
        forbidden = self.of(sink.model_copy(update={"create_topics": False}))
        assert (forbidden["topic"].status, forbidden["topic"].code) == (
            "wrong",
            "sink.topic_missing",
        )

    def test_more_copies_than_brokers_are_wrong_where_topics_are_to_be_created(
        self, servers: str, topic_name: str
    ) -> None:
        sink = settings(topic_name, servers).model_copy(update={"replication_factor": 3})
        found = self.of(sink)["replication"]
        assert (found.status, found.code) == ("wrong", "sink.too_few_brokers")
        assert "sink.replication_factor = 1" in (found.suggestion or "")
        error = error_of(sink)
        assert error.code == "sink.too_few_brokers"
        assert "number of brokers" in (error.suggestion or "")
        check_topics(Clients(settings(topic_name, servers)))
        assert self.of(sink)["replication"].status == "ok", "they are there"

    def test_says_a_broker_that_is_away_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(topics, "REACH_TIMEOUT", 1.0)
        address = nobody()
        found = checks(Clients(settings("orders", address)), APP, 2)
        assert [(c.status, c.code) for c in found] == [("wrong", "sink.unreachable")]
        assert address in found[0].message

    def test_warns_of_a_topic_that_forgets(self, servers: str, topic_name: str, make: Make) -> None:
        make({topic_name: PARTITIONS}, retention_ms="604800000", max_message_bytes="100000")
        found = [
            c
            for c in checks(Clients(settings(topic_name, servers)), APP, 2)
            if c.name == "topic settings"
        ]
        assert [c.status for c in found] == ["warn", "warn"]
        assert "7d" in found[0].message
        assert "retention.ms=-1" in (found[0].suggestion or "")
        assert "batch.size" in (found[1].suggestion or "")

    def test_warns_of_a_client_that_refuses_what_the_topic_takes(
        self, servers: str, topic_name: str, make: Make
    ) -> None:
        make({topic_name: PARTITIONS}, retention_ms="-1", max_message_bytes="2000000")
        found = self.of(settings(topic_name, servers))["topic settings"]
        assert (found.status, found.suggestion) == (
            "warn",
            '"message.max.bytes" = "2000000" in [sink.properties]',
        )

    def test_warns_of_a_compacted_topic(self, servers: str, topic_name: str, make: Make) -> None:
        make({topic_name: PARTITIONS}, cleanup_policy="compact", retention_ms="-1")
        found = self.of(settings(topic_name, servers))["topic settings"]
        assert found.status == "warn"
        assert "cleanup.policy=delete" in (found.suggestion or "")

    def test_warns_of_retention_by_size_and_of_side_topics_that_forget(
        self, servers: str, topic_name: str, make: Make
    ) -> None:
        make({topic_name: PARTITIONS}, retention_bytes="1000000", retention_ms="-1")
        make({f"{topic_name}.gaps": PARTITIONS}, cleanup_policy="compact", retention_bytes="9")
        make({f"{topic_name}.dead": PARTITIONS}, retention_ms="604800000")
        found = self.of(settings(topic_name, servers))
        for name, wanted in (
            ("topic settings", ["retention.bytes=-1"]),
            ("side topic .gaps settings", ["cleanup.policy=delete", "retention.bytes=-1"]),
            ("side topic .dead settings", ["retention.ms=-1"]),
        ):
            assert found[name].status == "warn"
            assert all(each in (found[name].suggestion or "") for each in wanted)

    def test_more_shards_than_partitions_are_wrong(
        self, servers: str, topic_name: str, make: Make
    ) -> None:
        make({topic_name: 2})
        sink = settings(topic_name, servers)
        found = self.of(sink, shards=3)["topic"]
        assert (found.status, found.code) == ("wrong", "sink.partition_count")
        not_made = sink.model_copy(update={"topic": f"{topic_name}.other"})
        found = self.of(not_made, shards=PARTITIONS + 1)["topic"]
        assert (found.status, found.code) == ("wrong", "sink.partition_count")
        assert "sink.partitions" in (found.suggestion or "")

    def test_a_timeout_above_the_brokers_is_refused(self, servers: str, topic_name: str) -> None:
        sink = settings(topic_name, servers)
        too_long = sink.model_copy(update={"transaction_timeout": 1_800_000_000})
        found = self.of(too_long)["transactions"]
        assert (found.status, found.code) == ("wrong", "sink.transactions_refused")


def test_f4_a_leader_that_hangs_is_asked_no_more_once_another_leads() -> None:
    """The client knew the old one for 15 minutes, and each question waited for it in vain."""
    cluster = MockCluster({"orders": 1}, brokers=3)
    try:
        sink = settings("orders", cluster.bootstrap_servers)
        cluster.lead("orders", 0, 1)
        assert list_offsets(Clients(sink), [("orders", 0)], "latest") == {("orders", 0): 0}
        cluster.hang(1)
        cluster.lead("orders", 0, 2)
        began = time.monotonic()
        assert list_offsets(Clients(sink), [("orders", 0)], "latest") == {("orders", 0): 0}
        assert time.monotonic() - began < 8
    finally:
        cluster.close()


@pytest.mark.long
def test_f4_a_broker_that_dies_is_not_waited_for_by_who_took_it_for_the_controller(
    tmp_path: Path,
) -> None:
    """The client asked no other one for up to five minutes, though the others lead everything."""
    with kafka_cluster(tmp_path / "kafka") as cluster:
        sink = settings("orders", cluster.bootstrap_servers)
        eventually(lambda: _is_there(sink))
        known = topic_ids(Clients(sink), ["orders"])
        assert "orders" in known
        admin, _ = Clients(sink).admin()
        number = admin.list_topics(timeout=10).controller_id
        cluster.brokers[number].kill()
        eventually(lambda: _ids(sink) == known)


def _is_there(sink: config.Sink) -> bool:
    with suppress(SinkError):
        return check_topics(Clients(sink)) > 0
    return False


def _ids(sink: config.Sink) -> dict[str, str]:
    with suppress(SinkError):
        return topic_ids(Clients(sink), ["orders"])
    return {}
