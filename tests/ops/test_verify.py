"""`verify` on real servers: what was written by nobody's publisher but the test's own producer."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import subprocess
import time
import zlib
from pathlib import Path
from typing import Any

import duckdb
import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic  # type: ignore[attr-defined]
from rich.console import Console

from eventpub.admission.model import Shard
from eventpub.cli.events import report
from eventpub.cli.terminal import drawn
from eventpub.config import Config, format_time, parse_time
from eventpub.errors import ConfigError, SinkError, StateError
from eventpub.local.servers import Kafka
from eventpub.ops import comparison, topic
from eventpub.ops.sides import KINDS, SHOWN, Verdict, no_space_is_named
from eventpub.ops.topic import TopicReader
from eventpub.ops.verify import verify
from eventpub.sink.base import Content
from eventpub.sink.client import Clients
from eventpub.sink.shard import ShardSink
from tests.conftest import FreshDatabase
from tests.publisher.harness import eventually
from tests.sink.helpers import events

PARTITIONS = 4
TABLE = """
CREATE TABLE events (
  id           BIGINT AUTO_INCREMENT PRIMARY KEY,
  aggregate_id VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
  version      BIGINT NOT NULL,
  event_type   VARCHAR(255) NOT NULL,
  payload      LONGBLOB NULL,
  metadata     JSON NULL,
  create_time  TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
  UNIQUE KEY (aggregate_id, version), KEY (create_time)
)
"""
Row = tuple[str, int, str, bytes | None, str | None, str]


class World:
    """A table, a topic, and a plain transactional producer that fills the one from the other."""

    def __init__(self, database: FreshDatabase, broker: Kafka, topic: str, folder: Path) -> None:
        self.database, self.broker, self.topic = database, broker, topic
        self.config = Config.model_validate(
            {
                "app": {"id": "orders", "state_dir": folder / "state"},
                "store": {"url": database.url},
                "sink": {"topic": topic, "bootstrap_servers": broker.bootstrap_servers},
            }
        )
        database.execute(TABLE)
        admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
        names = [topic, f"{topic}.gaps", f"{topic}.dead", f"{topic}.late"]
        for made in admin.create_topics([NewTopic(n, PARTITIONS, 1) for n in names]).values():
            made.result()
        eventually(lambda: admin.list_topics().topics.keys() >= {*names})

    def append(self, *keys: tuple[str, int]) -> None:
        for aggregate_id, version in keys:
            self.database.execute(
                "INSERT INTO events (aggregate_id, version, event_type, payload, metadata)"
                " VALUES (%s, %s, 'Changed', %s, %s)",
                (aggregate_id, version, b"{\x00'%d'}" % version, '{"user": "u1"}'),
            )

    def rows(self) -> list[Row]:
        return [
            (str(a), int(v), str(t), p, str(m), str(c))
            for a, v, t, p, m, c in self.database.execute(
                "SELECT aggregate_id, version, event_type, payload, metadata, DATE_FORMAT("
                "CONVERT_TZ(create_time, @@session.time_zone, '+00:00'), '%Y-%m-%dT%H:%i:%s.%fZ')"
                " FROM events ORDER BY id"
            )
        ]

    def producer(self, name: str = "writer") -> Producer:
        made = Producer(
            {
                "bootstrap.servers": self.broker.bootstrap_servers,
                "transactional.id": f"{self.topic}-{name}",
                "transaction.timeout.ms": 60_000,
            }
        )
        made.init_transactions(30)
        return made

    def produce(self, producer: Producer, rows: list[Row], side: str = "", **extra: str) -> None:
        for aggregate_id, version, event_type, payload, metadata, created in rows:
            key = aggregate_id.encode()
            headers: list[tuple[str, str | bytes | None]] = [
                ("ce_specversion", "1.0"),
                ("ce_id", f"{aggregate_id}/{version}"),
                ("ce_source", "orders"),
                ("ce_type", event_type),
                ("ce_time", created),
                ("ce_subject", aggregate_id),
                ("ce_sequence", str(version)),
                ("content-type", "application/octet-stream"),
                *json.loads(metadata or "{}").items(),
                *extra.items(),
            ]
            producer.produce(
                self.topic + side,
                key=key,
                value=payload,
                partition=zlib.crc32(key) % PARTITIONS,
                timestamp=parse_time(created) // 1000,
                headers=headers,
            )

    def publish(self, rows: list[Row], side: str = "", **extra: str) -> None:
        producer = self.producer()
        producer.begin_transaction()
        self.produce(producer, rows, side, **extra)
        producer.commit_transaction(30)


@pytest.fixture
def world(
    request: pytest.FixtureRequest,
    database: FreshDatabase,
    kafka_server: Kafka,
    topic_name: str,
    tmp_path: Path,
) -> World:
    return World(database, kafka_server, topic_name, tmp_path)


EVENTS = [("a", 1), ("b", 1), ("a", 2), ("ä 'x'", 1), ("b", 2), ("a", 3)]


def counts(world: World, **arguments: Any) -> dict[str, int]:
    found = verify(world.config, last=parse_time("2100-01-01T00:00:00Z"), **arguments)
    return {k: found.counts[k] for k in KINDS if found.counts[k]}


@pytest.mark.parametrize("database", ["mysql", "mariadb"], indirect=True)
def test_a_faithful_topic_has_no_difference(world: World) -> None:
    world.append(*EVENTS)
    rows = world.rows()
    world.publish(rows[:2])
    world.publish(rows[2:])
    found = verify(world.config, last=parse_time("2100-01-01T00:00:00Z"))
    assert found.ok, found.to_dict()
    assert found.events == found.records == len(EVENTS)


def test_every_kind_of_difference_is_found(world: World) -> None:
    world.append(*EVENTS, ("c", 1), ("c", 2), ("d", 1), ("e", 1))
    rows = {(r[0], r[1]): r for r in world.rows()}
    order = [("a", 1), ("b", 1), ("a", 3), ("a", 2), ("b", 2), ("b", 2), ("ä 'x'", 1)]
    world.publish([rows[k] for k in order])
    created = rows["a", 1][5]
    world.publish([("ghost", 1, "Changed", b"", None, created)])
    altered = list(rows["c", 1])
    altered[3] = b"something else"
    world.publish([tuple(altered)])  # type: ignore[list-item]
    world.publish([rows["d", 1]], side=".dead")
    world.publish([rows["e", 1]], side=".late")
    found = verify(world.config, last=parse_time("2100-01-01T00:00:00Z"), wait=0.0)
    assert found.counts == {
        "missing": 1, "repeated": 1, "out_of_order": 1, "altered": 1, "extra": 1, "doubled": 0,
        "held": 0,
    }  # fmt: skip
    names = {k: [(d.aggregate_id, d.version) for d in v] for k, v in found.examples.items()}
    assert names == {
        "missing": [("c", 2)],
        "repeated": [("b", 2)],
        "out_of_order": [("a", 2)],
        "altered": [("c", 1)],
        "extra": [("ghost", 1)],
        "doubled": [],
        "held": [],
    }
    assert found.accounted["dead"] == found.accounted["diverted"] == 1


def test_all_differences_go_into_a_file(world: World, tmp_path: Path) -> None:
    missing = [(f"lost-{number}", 1) for number in range(SHOWN + 5)]
    world.append(("a", 1), *missing)
    world.publish([row for row in world.rows() if row[0] == "a"] * 3)
    producer = world.producer()
    producer.begin_transaction()
    producer.produce(world.topic, key=b"stranger", value=b"")
    producer.commit_transaction(30)
    file = tmp_path / "differences.jsonl"
    file.write_text("of yesterday\n")
    last = parse_time("2100-01-01T00:00:00Z")
    found = verify(world.config, last=last, wait=0.0, differences=file)
    assert (found.counts["missing"], len(found.examples["missing"])) == (SHOWN + 5, SHOWN)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    listed = {(one["kind"], one["aggregate_id"], one["version"]) for one in lines}
    assert listed == {
        *(("missing", *event) for event in missing),
        ("repeated", "a", 1),
        ("extra", "stranger", None),
    }
    assert len(lines) == SHOWN + 5 + 2 + 1


def test_a_file_of_differences_that_cannot_be_written_is_named_before_anything_is_read(
    world: World, tmp_path: Path
) -> None:
    for file in (tmp_path / "no" / "folder", tmp_path, Path()):
        with pytest.raises(ConfigError) as caught:
            verify(world.config, differences=file)
        assert caught.value.code == "verify.not_writable"
        assert str(file) in caught.value.message


def test_differences_are_written_into_what_is_there_and_do_not_replace_it(
    world: World, tmp_path: Path
) -> None:
    world.append(("a", 1), ("ä", 1))
    world.publish(world.rows()[:1])
    last = parse_time("2100-01-01T00:00:00Z")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE, text=True) as reading:
        verify(world.config, last=last, wait=0.0, differences=pipe)
        out, _ = reading.communicate(timeout=20)
    assert json.loads(out)["aggregate_id"] == "ä"
    assert pipe.is_fifo()
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to(target)
    verify(world.config, last=last, wait=0.0, differences=link)
    assert link.is_symlink()
    assert json.loads(target.read_text(encoding="utf-8"))["aggregate_id"] == "ä"


def test_a_full_disk_of_the_file_of_differences_is_named(world: World) -> None:
    world.append(("a", 1), ("a", 2))
    world.publish(world.rows()[:1])
    last = parse_time("2100-01-01T00:00:00Z")
    with pytest.raises(ConfigError) as caught:
        verify(world.config, last=last, wait=0.0, differences=Path("/dev/full"))
    assert caught.value.code == "verify.not_writable"
    assert "/dev/full" in caught.value.message


def test_an_interrupted_comparison_leaves_a_former_file_of_differences(
    world: World, tmp_path: Path
) -> None:
    file = tmp_path / "differences.jsonl"
    file.write_text("of yesterday\n")
    world.append(("a", 1))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify(world.config, differences=file, on_progress=interrupt)
    assert file.read_text() == "of yesterday\n"
    other = tmp_path / "other.jsonl"
    with pytest.raises(KeyboardInterrupt):
        verify(world.config, differences=other, on_progress=interrupt)
    assert not other.exists(), "an empty list would say that nothing differs"


def test_aborted_records_do_not_count(world: World) -> None:
    world.append(*EVENTS)
    rows = world.rows()
    producer = world.producer("aborting")
    producer.begin_transaction()
    world.produce(producer, rows)
    producer.flush(30)
    producer.abort_transaction(30)
    world.publish(rows)
    producer.begin_transaction()
    world.produce(producer, rows[:1])
    producer.flush(30)
    producer.abort_transaction(30)
    assert counts(world) == {}


def test_a_transaction_that_hangs_open_is_an_error(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.append(*EVENTS)
    rows = world.rows()
    world.publish(rows[:3])
    hanging = world.producer("hanging")
    hanging.begin_transaction()
    world.produce(hanging, rows[3:4])
    hanging.flush(30)
    monkeypatch.setattr(topic, "_SETTLED_WITHIN", 1.0)
    with pytest.raises(SinkError) as caught:
        verify(world.config, last=parse_time("2100-01-01T00:00:00Z"))
    assert caught.value.code == "sink.hanging_transaction"
    assert caught.value.where == f"topic {world.topic}"
    hanging.commit_transaction(30)
    world.publish(rows[4:])
    assert counts(world) == {}


def test_the_range_is_by_create_time_and_includes_both_ends(world: World) -> None:
    world.append(*EVENTS)
    rows = world.rows()
    world.publish(rows[1:5])
    times = [parse_time(r[5]) for r in rows]
    assert verify(world.config, first=times[1], last=times[4]).ok
    for first, last in ((times[0], times[4]), (times[1], times[5])):
        assert verify(world.config, first=first, last=last, wait=0.0).counts["missing"] == 1
    with pytest.raises(ConfigError) as caught:
        verify(world.config, first=times[4], last=times[1])
    assert caught.value.code == "verify.empty_range"


def test_the_topic_is_read_from_the_first_record_of_the_range_on(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    day = 86_400_000_000

    def at(row: Row, before: int) -> Row:
        time = format_time(parse_time(row[5]) - before)
        world.database.execute(
            "UPDATE events SET create_time = FROM_UNIXTIME(%s * 0.000001)"
            " WHERE aggregate_id = %s AND version = %s",
            (parse_time(time), row[0], row[1]),
        )
        return (*row[:5], time)

    old = [("a", n) for n in range(1, 101)]
    world.append(*old, ("a", 101), ("a", 102), ("b", 1))
    *former, before, late, other = world.rows()
    world.publish([at(row, 3 * day) for row in former])
    world.publish([other])
    world.publish([at(before, 2 * day)])  # by another's timestamp, there are younger ones before it
    world.publish([at(late, day)], eventpub_late="1")
    read: list[int] = []

    def compared(first: int) -> Verdict:
        reader = TopicReader(world.config.sink, "orders", first=first)
        read.append(sum(end - at for at, end in reader.spans().values()))
        return verify(world.config, first=first, last=parse_time("2100-01-01T00:00:00Z"), wait=0.0)

    now = parse_time(other[5])
    for days, number in ((4, 103), (2.5, 3), (1.5, 2), (0.5, 1)):
        found = compared(now - int(days * day))
        assert found.ok, found.to_dict()
        assert found.events == found.records == number
    assert read[0] > 103  # and markers
    assert read[1] < 10
    assert read == sorted(read, reverse=True)
    assert compared(now + day // 2).records == 0
    assert read[-1] == 0
    # what is on the topic twice, or lacks its row, is found there, too
    world.publish([other])
    world.publish([("c", 1, *other[2:])])
    found = compared(now - day // 2)
    assert (found.counts["repeated"], found.counts["extra"]) == (1, 1)


def test_what_retention_has_removed_is_noted_where_it_may_be_of_the_range(world: World) -> None:
    hour, day = 3_600_000_000, 86_400_000_000
    world.append(("a", 1), ("a", 2))
    first, second = world.rows()
    time = first[5]
    old = (*first[:5], format_time(parse_time(time) - 2 * hour))
    world.publish([old])
    world.publish([second])
    admin = AdminClient({"bootstrap.servers": world.broker.bootstrap_servers})
    partition = zlib.crc32(b"a") % PARTITIONS
    for cut in (0, 1):
        if cut:
            [done] = admin.delete_records([TopicPartition(world.topic, partition, 1)]).values()
            done.result()
        for minutes in (180, 60, -3):  # at last, what is kept begins before
            moment = parse_time(time) - minutes * 60_000_000
            found = verify(world.config, first=moment, last=moment + day, wait=0.0)
            noted = [note for note in found.notes if "retention" in note]
            assert len(noted) == (cut and minutes > 0), (cut, minutes)


def test_a_range_in_which_nothing_lies_is_refused_whichever_end_is_given(world: World) -> None:
    world.append(*EVENTS)
    make_older(world, 1, 3600)
    rows = world.rows()
    world.publish(rows)
    future, past = parse_time("2100-01-01T00:00:00Z"), parse_time("2020-01-01T00:00:00Z")

    def refused(**span: Any) -> bool:
        with pytest.raises(ConfigError) as caught:
            verify(world.config, **span)
        return caught.value.code == "verify.empty_range"

    assert refused(first=future)
    publisher_state(world, parse_time(rows[0][5]))
    assert refused(first=future)
    # the publisher has not come so far, and should have
    found = verify(world.config, first=parse_time(rows[1][5]))
    assert (found.ok, found.events) == (False, 0)
    # nobody has written since: what a nightly comparison finds of a quiet table
    publisher_state(world, parse_time(rows[-1][5]))
    time.sleep(world.config.read.delay / 1e6)
    found = verify(world.config, first=parse_time(rows[-1][5]) + 1)
    assert (found.ok, found.events) == (True, 0)
    assert "the publisher has not reached any event" in found.notes[0]
    state = world.config.app.state_dir / "start.json"
    state.write_text(json.dumps({"configured": "now", "position": parse_time(rows[0][5])}))
    assert refused(last=past)


def test_the_publishers_state_gives_the_range(world: World) -> None:
    world.append(*EVENTS)
    rows = world.rows()
    world.publish(rows[1:5])
    state = world.config.app.state_dir
    state.mkdir()
    (state / "start.json").write_text(
        json.dumps({"configured": "now", "position": parse_time(rows[0][5])})
    )
    (state / "progress.json").write_text(
        json.dumps({"position": parse_time(rows[4][5]), "holds": 2})
    )
    found = verify(world.config)
    assert found.ok, found.to_dict()
    assert found.events == 4
    assert any("2 aggregates are held" in note for note in found.notes)


def test_another_users_state_is_as_good_as_none(world: World) -> None:
    world.append(*EVENTS, ("h", 2))
    world.publish(world.rows()[:-1])
    (world.config.app.state_dir / "eventpub.lock").mkdir(parents=True)  # fails for root, too
    assert counts(world, first=0, wait=0.0) == {"held": 1}


def test_events_of_the_number_of_partitions_that_the_publisher_still_uses_are_as_they_should_be(
    world: World,
) -> None:
    world.append(*((f"a{n}", 1) for n in range(20)))
    publisher_state(world, parse_time(world.rows()[-1][5]), partitions=PARTITIONS)
    admin = AdminClient({"bootstrap.servers": world.broker.bootstrap_servers})
    [done] = admin.create_partitions([NewPartitions(world.topic, PARTITIONS + 3)]).values()
    done.result()
    eventually(
        lambda: len(admin.list_topics(world.topic).topics[world.topic].partitions) == PARTITIONS + 3
    )
    world.publish(world.rows())
    assert verify(world.config, first=0).ok


def test_a_foreign_record_is_extra(world: World) -> None:
    producer = Producer({"bootstrap.servers": world.broker.bootstrap_servers})
    producer.produce(world.topic, key=b"x", value=b"y", partition=1)
    producer.produce(world.topic, value=b"y", partition=1)
    producer.flush(30)
    found = verify(world.config, last=parse_time("2100-01-01T00:00:00Z"))
    assert found.counts["extra"] == 2
    without_key, with_key = found.examples["extra"]
    assert "ce_sequence" in with_key.note
    assert "it has no key" in without_key.note
    assert with_key.to_dict()["version"] is None
    out = io.StringIO()
    Console(file=out, width=200).print(*map(drawn, report(found).parts), sep="\n")
    rows = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert any(re.match(r"x \S+ 1 0 ", row) for row in rows)
    assert any(re.match(r"a record without a key \S+ 1 1 ", row) for row in rows)


def test_a_foreign_record_counts_where_its_timestamp_is_in_the_range(world: World) -> None:
    world.append(("a", 1))
    world.publish(world.rows())
    before, after = parse_time("2026-01-01T00:00:00Z"), parse_time("2026-01-01T00:00:02Z")
    producer = Producer({"bootstrap.servers": world.broker.bootstrap_servers})
    for second in (0, 1, 2):
        producer.produce(world.topic, b"y", f"x{second}", timestamp=before // 1000 + 1000 * second)
    producer.flush(30)

    def extra(**span: Any) -> set[str]:
        found = verify(world.config, **span)
        assert found.counts["extra"] == len(found.examples["extra"])
        return {one.aggregate_id for one in found.examples["extra"]}

    assert extra(first=before, last=after) == {"x0", "x1", "x2"}
    assert extra(first=before + 1_000, last=after - 1) == {"x1"}
    assert extra(first=after - 1) == {"x2"}
    assert extra(last=before) == {"x0"}
    # where no end is given none is hidden: neither what was written just now, nor with a false time
    created = parse_time(world.rows()[0][5])
    publisher_state(world, created)
    (world.config.app.state_dir / "start.json").write_text(json.dumps({"position": created - 1}))
    producer.produce(world.topic, b"y", "now")
    producer.flush(30)
    assert extra() == {"x0", "x1", "x2", "now"}


def test_a_topic_that_is_not_there_is_named(world: World) -> None:
    sink = world.config.sink.model_copy(update={"topic": "not.there"})
    with pytest.raises(SinkError) as caught:
        verify(world.config.model_copy(update={"sink": sink}))
    assert caught.value.code == "sink.topic_missing"


def test_a_broker_that_is_away_is_named(world: World) -> None:
    sink = world.config.sink.model_copy(update={"bootstrap_servers": "127.0.0.1:1"})
    with pytest.raises(SinkError) as caught:
        verify(world.config.model_copy(update={"sink": sink}))
    assert caught.value.code == "sink.unreachable"
    assert caught.value.retriable


def test_nothing_is_left_on_the_disk(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    world.append(*EVENTS)
    world.publish(world.rows())
    assert counts(world) == {}
    assert list(folder.iterdir()) == []


def test_what_is_published_seconds_after_it_was_missed_is_not_missing(world: World) -> None:
    """The topic's end is known, and the last rows are not on it; then they are published.

    That is how the recount publishes rows that were committed late.
    """
    world.append(*EVENTS, *[(name, 1) for name in "cdefg"])
    rows = world.rows()
    later = iter([rows[4:6], rows[6:8]])
    world.publish(rows[:4])
    world.publish(rows[8:9], side=".dead")

    def publish_later(doing: str, _: float) -> None:
        if doing.startswith(("comparing", "waiting for missing events")):
            for some in itertools.islice(later, 1):
                world.publish(some)
                if some == rows[6:8]:
                    world.publish(rows[9:10], side=".late")

    last = parse_time("2100-01-01T00:00:00Z")
    found = verify(world.config, last=last, on_progress=publish_later)
    lost = [row[:2] for row in rows[10:]]
    assert [(d.aggregate_id, d.version) for d in found.examples["missing"]] == lost
    assert found.counts["missing"] == sum(found.counts.values()) == len(lost)
    assert found.accounted["arrived"] == 4
    assert found.accounted["dead"] == found.accounted["diverted"] == 1
    assert found.events == len(rows)


def test_what_comes_while_missing_events_are_waited_for_is_compared_like_the_rest(
    world: World,
) -> None:
    world.append(*EVENTS)
    rows = world.rows()
    altered = (*rows[4][:3], b"something else", *rows[4][4:])
    later = iter([[altered, rows[5]]])
    world.publish(rows[:4])

    def publish_later(doing: str, _: float) -> None:
        if doing.startswith("comparing"):
            for some in later:
                world.publish(some)

    assert counts(world, on_progress=publish_later) == {"altered": 1}


def test_nobody_waits_for_what_is_not_missing(world: World) -> None:
    world.append(*EVENTS)
    world.publish(world.rows())
    seen: set[str] = set()
    assert counts(world, on_progress=lambda doing, _: seen.add(doing.partition(":")[0])) == {}
    assert seen == {"reading store and topic", "comparing"}


def test_of_very_many_missing_events_it_says_that_some_may_be_held(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The notes on the range took the place of this one."""
    monkeypatch.setattr(comparison, "_MOST_HELD", 1)
    world.append(*EVENTS)
    found = verify(world.config, last=parse_time("2100-01-01T00:00:00Z"), wait=0.0)
    assert found.counts["missing"] == len(EVENTS)
    assert any("some may only be held" in note for note in found.notes)


def publisher_state(world: World, position: int, **more: Any) -> None:
    state = world.config.app.state_dir
    state.mkdir(exist_ok=True)
    (state / "progress.json").write_text(json.dumps({"position": position, **more}))


def make_older(world: World, versions_from: int, seconds: int) -> None:
    world.database.execute(
        "UPDATE events SET create_time = create_time - INTERVAL %s SECOND WHERE version >= %s",
        (seconds, versions_from),
    )


def test_where_there_is_nothing_it_says_so(world: World) -> None:
    answer = report(verify(world.config))
    assert answer.exit_status == 0
    assert answer.summary.startswith("nothing to compare")


@pytest.mark.parametrize("database", ["mysql", "mariadb"], indirect=True)
def test_a_publisher_that_stands_still_is_behind(world: World) -> None:
    world.append(("a", 1), ("b", 1), ("a", 2), ("b", 2))
    make_older(world, 1, 3600)
    rows = world.rows()
    world.publish(rows[:2])
    publisher_state(world, parse_time(rows[1][5]))
    found = verify(world.config)
    assert not any(found.counts.values()), found.to_dict()
    assert not found.ok
    assert found.to_dict()["behind"] == round(found.behind, 1)
    assert 3600 <= found.behind < 3660
    answer = report(found)
    assert answer.exit_status == 1
    words = (
        r"nothing differs up to \S+Z, but events after the range, the oldest 3,6\d\d seconds old"
    )
    position = "according to the publisher's last recorded position"
    assert re.search(f"{words}, are not published yet, {position}$", answer.summary)
    # an end that is asked for is all that is compared
    explicit = verify(world.config, last=parse_time(rows[1][5]))
    assert explicit.ok
    assert explicit.to_dict()["behind"] == 0


def test_what_differs_is_said_beside_what_is_behind(world: World) -> None:
    world.append(*EVENTS)
    make_older(world, 1, 60)
    rows = world.rows()
    publisher_state(world, parse_time(rows[0][5]))
    found = verify(world.config, wait=0.0)
    assert found.counts["missing"] == 1
    assert found.behind >= 60
    assert re.search("1 missing.*; and events after the range", report(found).summary)


def test_a_publisher_is_not_behind_for_what_it_is_about_to_publish(world: World) -> None:
    world.append(*EVENTS)
    rows = world.rows()
    world.publish(rows[:1])
    publisher_state(world, parse_time(rows[0][5]))
    found = verify(world.config)
    assert found.ok, found.to_dict()
    assert report(found).exit_status == 0
    assert found.to_dict()["behind"] == 0


def test_without_a_publishers_state_nothing_is_behind(world: World) -> None:
    world.append(*EVENTS)
    make_older(world, 1, 60)
    world.publish(world.rows())
    found = verify(world.config)
    assert found.ok
    assert found.behind == 0


def test_a_lack_of_space_is_named(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.append(*EVENTS)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "not there"))
    with pytest.raises(StateError) as caught:
        verify(world.config)
    assert caught.value.code == "verify.no_space"
    with pytest.raises(StateError) as caught, no_space_is_named():
        raise duckdb.OutOfMemoryException("could not allocate block of size 256.0 KiB")
    assert caught.value.code == "verify.no_memory"
    with pytest.raises(StateError) as caught, no_space_is_named():
        raise duckdb.OutOfMemoryException("failed to offload: max_temp_directory_size reached")
    assert caught.value.code == "verify.no_space"


def test_what_a_reading_thread_raises_is_raised(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.append(*EVENTS)
    monkeypatch.setattr(TopicReader, "read", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        verify(world.config)


def test_metadata_and_late_records_are_read_among_others(world: World) -> None:
    world.append(*EVENTS)
    rows = world.rows()
    plain = [(*row[:4], None, row[5]) for row in rows]
    world.database.execute(
        "UPDATE events SET metadata = NULL, create_time = create_time WHERE id = 2"
    )
    world.publish([rows[0], plain[1], *rows[2:5]])
    world.publish(rows[5:], eventpub_late="1")
    found = verify(world.config, last=parse_time("2100-01-01T00:00:00Z"))
    assert found.ok, found.to_dict()
    assert found.accounted["late"] == 1
    assert found.records == len(EVENTS)


def test_a_metadata_key_with_a_nul_is_the_header_that_the_documentation_says(world: World) -> None:
    """The client would cut its name there."""
    metadata = json.dumps({"a\0b": "1", "content-type\0": "mine", "ce_\0": None, "\0": {}})
    world.append(("a", 1))
    world.database.execute(
        "UPDATE events SET metadata = %s, create_time = create_time", (metadata,)
    )
    [(key, version, event_type, payload, text, created)] = world.rows()
    row: dict[str, Any] = {
        "event_type": [event_type],
        "payload": [payload],
        "metadata": [text],
        "create_time": [parse_time(created)],
    }
    with ShardSink(Clients(world.config.sink), "orders", Shard(0, 1, PARTITIONS)) as sink:
        sink.publish(Content(events([(key, version)], **row)))
    found = verify(world.config, last=parse_time("2100-01-01T00:00:00Z"))
    assert found.ok, found.to_dict()
    assert found.records == 1
