"""`replay` on real servers: a range once more, in order, each event once, also if interrupted."""

from __future__ import annotations

import json
import time
from itertools import combinations, count, pairwise
from pathlib import Path
from random import Random
from typing import Any, Literal

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)

from eventpub import settings
from eventpub.config import parse_time
from eventpub.errors import SinkError
from eventpub.local.servers import Kafka
from eventpub.ops import replay as replaying
from eventpub.ops.replay import Range, replay
from eventpub.ops.verify import verify
from eventpub.sink.batch import Batch, Producing
from tests.conftest import FreshDatabase
from tests.publisher.harness import Publisher, Record, Topic, create_table
from tests.sink.conftest import broker_with_doors
from tests.sink.mock_cluster import END_TXN

BEGIN = parse_time("2026-01-01T00:00:00Z")
SECOND = 1_000_000


@pytest.fixture
def publisher(
    database: FreshDatabase, kafka_server: Kafka, topic_name: str, tmp_path: Path
) -> Publisher:
    """A configuration; nothing of it is started."""
    create_table(database)
    servers = kafka_server.bootstrap_servers
    return Publisher(tmp_path / "publisher", database.url, topic_name, servers)


def fill(database: FreshDatabase, rows: list[tuple[str, int, int]], payload: Any = b"{}") -> None:
    """Rows of aggregate, version and second."""
    with database.connect() as connection, connection.cursor() as cursor:
        cursor.execute("SET time_zone = '+00:00'")
        cursor.executemany(
            "INSERT INTO events (aggregate_id, version, event_type, payload, create_time)"
            " VALUES (%s, %s, 'happened', %s, '2026-01-01' + INTERVAL %s SECOND)",
            [(a, v, payload, s) for a, v, s in rows],
        )


def of(publisher: Publisher, topic: str) -> list[Record]:
    return Topic(publisher.topic.bootstrap_servers, topic).read()


def versions(records: list[Record]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for record in records:
        found.setdefault(record.key, []).append(record.version)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_versions_ascend_and_each_is_published_once_whatever_interrupts_it(
    publisher: Publisher, database: FreshDatabase, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    random = Random(seed)
    rows = [
        (f"a{n}", version, random.randrange(200))
        for n in range(25)
        for version in range(1, random.randrange(2, 14))
        if random.random() < 0.9
    ]
    fill(database, rows)
    monkeypatch.setattr(replaying, "_PAGE_ROWS", 9)
    config = settings.load(publisher.config, {}, {}).config
    what = Range(BEGIN + 30 * SECOND, BEGIN + 170 * SECOND, f"{publisher.topic.name}.again")
    expected: dict[str, list[int]] = {}
    for a, version, second in sorted(rows):
        if 30 <= second <= 170:
            expected.setdefault(a, []).append(version)
    total = sum(map(len, expected.values()))

    class Interrupted(Exception):  # noqa: N818 (no error)
        pass

    def stop_in(pages: int) -> Any:
        seen = iter(range(pages))

        def progress(events: int, of_all: int) -> None:
            assert of_all == total
            assert events <= total
            if next(seen, None) is None:
                raise Interrupted

        return progress

    interrupted = 0
    for _ in range(100):
        try:
            done = replay(config, what, stop_in(random.randrange(2, 5)))
            break
        except Interrupted:
            interrupted += 1
    assert interrupted > 3
    assert done.before > 0
    records = of(publisher, what.topic)
    assert versions(records) == expected
    assert {r.headers["eventpub_replay"].decode() for r in records} == {done.id}
    times = [(a, second) for a, _, second in sorted(rows)]
    assert any(a == b and earlier > later for (a, earlier), (b, later) in pairwise(times))
    assert replay(config, what).events == 0


def test_the_command_publishes_to_a_topic_of_its_own_and_goes_on(
    publisher: Publisher, database: FreshDatabase
) -> None:
    fill(database, [("a", 1, 0), ("b", 1, 1), ("a", 2, 2), ("b", 2, 3), ("a", 3, 4)], b"[1]")
    publisher.publish_everything()
    again = f"{publisher.topic.name}.again"
    span = ("--from", "2026-01-01T00:00:01Z", "--to", "2026-01-01T00:00:03Z")

    def command(status: int, *arguments: str) -> dict[str, Any]:
        done = publisher.command("replay", *arguments, "--json")
        assert done.returncode == status, done.stdout + done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    for own in ("", ".dead", ".gaps", ".late"):
        refused = command(2, *span, "--topic", publisher.topic.name + own)
        assert refused["error"]["code"] == "replay.own_topic"
    for name in ("bad name", "", "..", "x" * 250):
        refused = command(2, *span, "--topic", name)
        assert refused["error"]["code"] == "replay.topic_name"
        assert refused["error"]["where"] == "--topic"
    found = command(0, *span, "--topic", again)["result"]
    assert (found["events"], found["before"], found["transactions"]) == (3, 0, 1)
    records = of(publisher, again)
    assert versions(records) == {"b": [1, 2], "a": [2]}
    published = {(r.key, r.version): r for r in publisher.topic.read()}
    for record in records:
        before = published[record.key, record.version]
        assert (record.value, record.timestamp) == (before.value, before.timestamp)
        assert record.partition == before.partition
        marks = {n: v for n, v in record.headers.items() if n.startswith("eventpub_")}
        assert marks == {"eventpub_replay": found["id"].encode()}
        assert record.headers.items() - before.headers.items() == marks.items()
    assert command(0, *span, "--topic", again)["result"]["events"] == 0
    assert command(0, *span, "--topic", again, "--id", "2")["result"]["events"] == 3
    assert versions(of(publisher, again))["a"] == [2, 2]
    turned = ("--from", "2026-01-02T00:00:00Z", "--to", "2026-01-01T00:00:00Z")
    assert command(2, *turned, "--topic", again)["error"]["code"] == "replay.empty_range"


def test_a_topic_of_another_publisher_is_refused(
    publisher: Publisher, database: FreshDatabase, tmp_path: Path
) -> None:
    fill(database, [("a", 1, 0), ("a", 2, 1)])
    live, dead = f"{publisher.topic.name}.live", f"{publisher.topic.name}.live.dead"
    settings_of_other = {"app": {"id": "another"}}
    servers = publisher.topic.bootstrap_servers
    other = Publisher(tmp_path / "other", database.url, live, servers, settings_of_other)
    fill(database, [("a", 0, 2)])
    other.publish_everything()
    span = ("--from", "2026-01-01T00:00:00Z", "--to", "2026-01-01T00:00:03Z")
    for topic in (live, dead):
        done = publisher.command("replay", *span, "--topic", topic, "--json")
        assert done.returncode == 2, done.stdout + done.stderr
        error = json.loads(done.stdout)["error"]
        assert error["code"] == "replay.other_topic"
        assert "another" in error["message"]
        assert "resumes it" not in done.stderr
    assert len(of(publisher, live)) == 2
    # what no publisher has written does not matter
    shared = f"{publisher.topic.name}.shared"
    producer = Producer({"bootstrap.servers": servers, "allow.auto.create.topics": True})
    producer.produce(shared, b"anything", "a", headers={"ce_source": "somebody"})
    assert producer.flush(30) == 0
    done = publisher.command("replay", *span, "--topic", shared)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumes it" in done.stderr


def test_what_the_broker_refuses_is_named_and_the_rest_is_published(
    publisher: Publisher, database: FreshDatabase
) -> None:
    fill(database, [("a", 1, 0), ("a", 3, 2)])
    fill(database, [("a", 2, 1), ("b", 1, 1)], Random(1).randbytes(200_000))
    again = f"{publisher.topic.name}.again"
    admin = AdminClient({"bootstrap.servers": publisher.topic.bootstrap_servers})
    small = NewTopic(again, 2, 1, config={"max.message.bytes": "100000"})
    for made in admin.create_topics([small]).values():
        made.result()

    def command(status: int, *arguments: str) -> tuple[str, list[int], list[str]]:
        done = publisher.command(
            "replay", "--from", "2026-01-01T00:00:00Z", "--to", "2026-01-02T00:00:00Z",
            "--topic", again, "--json", *arguments,
        )  # fmt: skip
        assert done.returncode == status, done.stdout + done.stderr
        answer = json.loads(done.stdout)
        counts = [answer["result"][name] for name in ("events", "before", "refused", "left_out")]
        return (
            answer["summary"],
            counts,
            sorted(e.split(",")[0] for e in answer["result"]["examples"]),
        )

    _, counts, named = command(1)
    assert counts == [2, 0, 2, 0]
    assert [name.split(":")[0] for name in named] == ["a/2", "b/1"]
    assert versions(of(publisher, again)) == {"a": [1, 3]}
    # repeated, it left a/2 out for good, and said that all is done
    _, counts, _ = command(1)
    assert counts == [0, 2, 1, 1]
    limit = ConfigEntry("max.message.bytes", "1000000", incremental_operation=AlterConfigOpType.SET)
    larger = ConfigResource(ResourceType.TOPIC, again, incremental_configs=[limit])
    for altered in admin.incremental_alter_configs([larger]).values():
        altered.result()
    fill(database, [("a", 0, 3)])
    summary, counts, named = command(1)
    assert counts == [1, 2, 0, 2]
    assert named == ["a/0: left out", "a/2: left out"]
    assert "2 left out (to publish the whole range: another --id): a/0: left out, since" in summary
    assert versions(of(publisher, again)) == {"a": [1, 3], "b": [1]}
    assert command(0, "--id", "whole")[1] == [5, 0, 0, 0]


BACK = parse_time("2025-10-26T01:00:00Z")
"""In Berlin, 03:00 becomes 02:00."""
MINUTE = 60 * SECOND


@pytest.fixture
def in_berlin(publisher: Publisher, database: FreshDatabase) -> list[Record]:
    """What is published of a table of local time around the hour that was lived twice.

    The publisher begins in the middle of its first pass: what is before that is of the second.
    """
    database.execute("DROP TABLE events")
    create_table(database, time="DATETIME(6)")
    minutes = [*range(120, 150, 4), *range(151, 180, 4), 185]  # since midnight
    random = Random(1)
    rows = [(f"a{n}", random.choice(minutes)) for n in range(7) for _ in range(9)]
    version: dict[str, int] = {}
    with database.connect() as connection, connection.cursor() as cursor:
        for key, minute in sorted(rows, key=lambda row: (row[1] < 150, row[1], random.random())):
            version[key] = version.get(key, 0) + 1
            cursor.execute(
                "INSERT INTO events (aggregate_id, version, event_type, payload, create_time)"
                " VALUES (%s, %s, 'happened', '1', '2025-10-26' + INTERVAL %s MINUTE)",
                (key, version[key], minute),
            )
    publisher.settings["store"]["time_zone"] = "Europe/Berlin"
    publisher.settings["read"]["start"] = "2025-10-26T00:30:00Z"
    publisher.publish_everything()
    found = publisher.topic.read()
    first = [r for r in found if BACK - 30 * MINUTE <= r.timestamp * 1000 < BACK]
    second = [r for r in found if BACK <= r.timestamp * 1000 < BACK + 30 * MINUTE]
    assert first
    assert second
    return found


def test_what_was_created_in_the_hour_that_is_lived_twice_is_published_once(
    publisher: Publisher, in_berlin: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are of both passes of the hour, as far as the table says."""
    monkeypatch.setattr(replaying, "_PAGE_ROWS", 5)
    config = settings.load(publisher.config, {}, {}).config
    hour = 60 * MINUTE
    bounds = [BACK + minutes * MINUTE for minutes in (-30, -10, 0, 12, 90)]
    for number, (first, last) in enumerate(combinations(bounds, 2)):
        what = Range(first, last, f"{publisher.topic.name}.again", id=str(number))
        expected = {}
        for record in in_berlin:
            created = record.timestamp * 1000
            is_of_both = BACK - hour <= created < BACK + hour
            times = (
                [created % hour + BACK - hour, created % hour + BACK] if is_of_both else [created]
            )
            if times := [time for time in times if first <= time <= last]:
                expected[record.key, record.version] = times[0]
        assert replay(config, what).events == len(expected)
        assert replay(config, what).events == 0
        records = of(publisher, what.topic)
        published = [r for r in records if r.headers["eventpub_replay"] == str(number).encode()]
        assert {(r.key, r.version): r.timestamp * 1000 for r in published} == expected
        assert len(published) == len(expected)
        for key in {r.key for r in published}:
            order = [r.version for r in published if r.key == key]
            assert order == sorted(order)


def test_a_comparison_may_begin_or_end_within_the_hour_that_is_lived_twice(
    publisher: Publisher, in_berlin: list[Record]
) -> None:
    config = settings.load(publisher.config, {}, {}).config
    assert verify(config).is_equal
    assert verify(config).events == len(in_berlin)
    bounds = [BACK + minutes * MINUTE for minutes in (-20, 12, 60, 90)]
    for first, last in combinations(bounds, 2):
        verdict = verify(config, first=first, last=last, wait=0)
        assert verdict.is_equal, (first, last, verdict.to_dict())
        assert (verdict.first, verdict.last) == (first, last)
        of_it = [r for r in in_berlin if first <= r.timestamp * 1000 <= last]
        assert verdict.events >= len(of_it)


def test_a_topic_that_would_not_keep_the_events_is_refused_with_what_helps(
    publisher: Publisher, database: FreshDatabase
) -> None:
    fill(database, [("a", 1, 0), ("a", 2, 200)])
    config = settings.load(publisher.config, {}, {}).config
    again = f"{publisher.topic.name}.again"
    admin = AdminClient({"bootstrap.servers": config.sink.bootstrap_servers})
    age = time.time() * 1000 - BEGIN / 1000
    kept = {"retention.ms": str(round(age) - 100_000)}  # of the second event only
    [made] = admin.create_topics([NewTopic(again, 1, 1, config=kept)]).values()
    made.result()
    with pytest.raises(SinkError) as caught:
        replay(config, Range(BEGIN, BEGIN + 300 * SECOND, again))
    assert caught.value.code == "sink.backlog_too_old"
    assert f"--entity-name {again} --add-config retention.ms=-1" in str(caught.value.suggestion)
    assert replay(config, Range(BEGIN + SECOND, BEGIN + 300 * SECOND, again)).events == 1


@pytest.mark.parametrize("fault", ["late", "unanswered"])
def test_a_page_whose_commit_is_in_doubt_is_neither_lost_nor_cut_by_an_old_commit(
    database: FreshDatabase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Literal["late", "unanswered"],
) -> None:
    """The first of two commits that the client sent arrives in the middle of the next page."""
    create_table(database)
    fill(database, [(f"a{n}", 1, n) for n in range(60)])
    monkeypatch.setattr(replaying, "_PAGE_ROWS", 20)
    with broker_with_doors(tmp_path / "kafka") as broker:
        publisher = Publisher(tmp_path / "publisher", database.url, "orders", broker.proxied)
        config = settings.load(publisher.config, {}, {}).config
        what = Range(BEGIN, BEGIN + 100 * SECOND, "orders.again")
        produce, transactions = Producing.produce, count()

        def interrupted(self: Producing, batch: Batch, crash_point: Any) -> None:
            produce(self, batch, crash_point)
            if next(transactions) == 1:
                self._writer.client.flush(10)
                assert broker.proxy.has_struck
                if fault == "late":
                    broker.proxy.release()

        monkeypatch.setattr(Producing, "produce", interrupted)
        broker.proxy.strike_next(END_TXN, fault)
        done = replay(config, what)
        found = [(r.key, r.version) for r in Topic(broker.open, what.topic).read()]
    assert sorted(found) == sorted((f"a{n}", 1) for n in range(60))
    assert (done.events, done.before) == (60, 0)
