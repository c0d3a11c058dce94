"""Scenario A12: from the beginning, from now, from a time; and what a restart makes of it."""

from __future__ import annotations

import json
import shutil
import socket
import time

import pytest
from confluent_kafka import Producer

from eventpub import config, settings
from eventpub.admission.model import Shard
from eventpub.errors import StateError
from eventpub.ops.asking import ask_running
from eventpub.publisher import prepare as start
from eventpub.shard.assignment import real_parts
from eventpub.sink.base import Content
from eventpub.sink.client import Clients
from eventpub.sink.shard import ShardSink
from eventpub.state import StateDir
from tests.conftest import FreshDatabase
from tests.publisher.conftest import NewPublisher
from tests.publisher.harness import Publisher, compare, create_table, insert, transaction
from tests.sink.helpers import events


def commit_at(database: FreshDatabase, aggregate_id: str, version: int, second: int) -> None:
    """An event created at a second of one minute."""
    with transaction(database) as cursor:
        cursor.execute("SET time_zone = '+00:00'")
        insert(cursor, aggregate_id, version, create_time=f"2026-01-01 00:00:{second:02}")
        cursor.connection.commit()


@pytest.mark.engines("threads", "spark")
def test_a12_from_a_time_exactly_the_events_after_it_with_a_gap_directly_above(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create_table(database)
    publisher = new_publisher(database, read={"start": "2026-01-01T00:00:10Z"})
    for version, second in ((1, 1), (2, 10), (3, 11), (4, 12)):
        commit_at(database, "across", version, second)
    commit_at(database, "before", 1, 9)
    commit_at(database, "after", 1, 11)
    for version, second in ((1, 1), (2, 5), (4, 12)):
        commit_at(database, "gap", version, second)
    for version, second in ((1, 1), (2, 11), (3, 9), (4, 12)):
        commit_at(database, "inverted", version, second)
    publisher.start()
    publisher.until_published("after", [1])
    commit_at(database, "gap", 3, 11)
    publisher.until_published("gap", [3, 4])
    assert publisher.stop() == 143
    assert publisher.topic.versions("across") == [3, 4]
    assert publisher.topic.versions("inverted") == [2, 4]
    assert publisher.topic.versions("before") == []
    assert publisher.gaps.read() == []


def test_a12_from_now_and_the_start_stays_where_it_was(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create_table(database)
    publisher = new_publisher(database, read={"start": "now"})
    with transaction(database) as cursor:
        insert(cursor, "old", 1)
        insert(cursor, "both", 1)
        cursor.connection.commit()
    time.sleep(0.1)
    publisher.publish_everything()
    with transaction(database) as cursor:
        insert(cursor, "both", 2)
        insert(cursor, "new", 1)
        cursor.connection.commit()
    publisher.publish_everything()
    assert {(r.key, r.version) for r in publisher.topic.read()} == {("both", 2), ("new", 1)}
    assert "other users had access" not in publisher.log.read_text(), "to what a run has left"


def test_a12_a_state_that_is_gone_is_not_begun_from_now(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """As with a container whose volume is empty: what was committed meanwhile would be left out."""
    create_table(database)
    publisher = new_publisher(database, read={"start": "now"})
    prepare(publisher)
    topic = publisher.topic
    sink = config.Sink(topic=topic.name, bootstrap_servers=topic.bootstrap_servers, partitions=4)
    producer = Producer({"bootstrap.servers": topic.bootstrap_servers})
    producer.produce(topic.name, b"theirs", b"a", headers={"ce_source": b"somebody"})
    assert producer.flush(10) == 0
    shutil.rmtree(publisher.state)
    prepare(publisher)  # nothing of ours is there
    with ShardSink(Clients(sink), publisher.settings["app"]["id"], Shard(0, 1, 4)) as owner:
        owner.publish(Content(events([("a", 2)])))
    prepare(publisher)
    shutil.rmtree(publisher.state)
    for _ in range(2):
        with pytest.raises(StateError) as refused:
            prepare(publisher)
        assert refused.value.code == "state.start_lost"
    assert "state.start_lost" in called_wrong(publisher)
    publisher.settings["read"]["start"] = "2026-01-01T00:00:10Z"
    assert not called_wrong(publisher)
    prepare(publisher)


def called_wrong(publisher: Publisher) -> set[str]:
    """The codes of what the doctor calls wrong."""
    checks = json.loads(publisher.command("doctor", "--json").stdout)["result"]["checks"]
    return {check["code"] for check in checks if check["status"] == "wrong"}


def prepare(publisher: Publisher) -> None:
    """All that a start looks at before Spark is started."""
    config = settings.load(publisher.config, {}, {}).config
    state = StateDir(config.app.state_dir)
    state.lock()
    try:
        start.prepare(config, state, real_parts(config), available_now=False)
    finally:
        state.unlock()


def test_a12_from_a_time_to_come_is_refused(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """A wrong year: nothing was published, nothing said so, and the start was kept."""
    create_table(database)
    publisher = new_publisher(database, read={"start": "2099-01-01T00:00:00Z"})
    refused = publisher.command("run", "--available-now")
    assert refused.returncode == 2
    assert "is in the future, and nothing before it would be published" in refused.stderr
    assert "config.invalid_value" in called_wrong(publisher)


def test_a12_a_gap_directly_above_the_start_is_skipped_and_a_restart_keeps_the_start(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """What lies at or before the start is never missed, also where the configured start moves."""
    create_table(database)
    publisher = new_publisher(database, read={"start": "2026-01-01T00:00:10Z"})
    for version, second in ((1, 1), (2, 10), (4, 11), (5, 12)):
        commit_at(database, "gap", version, second)
    commit_at(database, "new", 2, 11)  # no baseline: its first version is missing
    commit_at(database, "before", 1, 10)
    publisher.publish_everything()
    assert publisher.topic.versions("gap") == [4, 5]
    assert publisher.topic.versions("new") == [2]
    found = [json.loads(r.value) for r in publisher.gaps.read() if r.value]
    skipped = {(g["aggregate_id"], g["from_version"], g["to_version"]) for g in found}
    assert skipped == {("gap", 3, 3), ("new", 1, 1)}

    publisher.settings["read"]["start"] = "beginning"
    with transaction(database) as cursor:
        insert(cursor, "before", 2)
        cursor.connection.commit()
    publisher.publish_everything()
    assert "the first start stays in force" in publisher.words()
    assert publisher.topic.versions("before") == [2]
    assert publisher.topic.versions("gap") == [4, 5]


@pytest.mark.engines("threads", "spark")
def test_b7_rows_that_land_behind_the_reader_while_it_is_stopped(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """Last versions and single events with times before the position: no gap shows them."""
    create_table(database)
    publisher = new_publisher(database)
    with transaction(database) as late:
        insert(late, "open-while-it-stopped", 1)
        with transaction(database) as cursor:
            insert(cursor, "a", 1)
            insert(cursor, "later", 1)
            cursor.connection.commit()
        time.sleep(3)
        with transaction(database) as cursor:
            insert(cursor, "later", 2)
            cursor.connection.commit()
        publisher.start()
        publisher.until_published("later", [1, 2])
        assert publisher.stop() == 143
        late.connection.commit()
    with transaction(database) as cursor:
        cursor.execute("SELECT NOW(6) - INTERVAL 60 SECOND")
        row = cursor.fetchone()
        assert row is not None
        insert(cursor, "a", 2, create_time=str(row[0]))
        cursor.connection.commit()
    publisher.publish_everything()
    differences = compare(database, publisher.topic)
    assert not differences, differences


def test_b7_a_start_compares_only_the_seconds_in_which_something_has_landed(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create_table(database)

    def commit(prefix: str, age: int) -> None:
        """An event created so many seconds ago."""
        with transaction(database) as cursor:
            cursor.execute("SELECT NOW(6) - INTERVAL %s SECOND", (age,))
            insert(cursor, f"{prefix}-{age}", 1, create_time=str(cursor.fetchone()[0]))
            cursor.connection.commit()

    for age in range(20, 120, 10):
        commit("read", age)
    publisher = new_publisher(database)
    publisher.publish_everything()
    publisher.start()
    commit("live", 0)
    publisher.until_published("live-0", [1])
    time.sleep(3)  # the start's count is done
    commit("late", 60)
    publisher.until_published("late-60", [1])
    time.sleep(2)  # a status is of the last second
    status = ask_running(StateDir(publisher.state), "status")
    assert status is not None
    assert status["counters"]["comparisons"] == 1
    assert publisher.stop() == 143
    assert not compare(database, publisher.topic)


def test_f12_sigterm_while_a_start_waits_for_a_broker_that_says_nothing(
    new_publisher: NewPublisher, database: FreshDatabase
) -> None:
    """The start gives up after 10 s, with an error; whoever asks it to stop does not wait."""
    create_table(database)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        publisher = new_publisher(database, sink={"bootstrap_servers": address})
        publisher.start()
        silent.settimeout(60)
        silent.accept()
        assert publisher.stop(timeout=8) == 143
