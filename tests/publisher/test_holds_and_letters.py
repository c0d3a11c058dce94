"""Scenarios A6, A7, D1, D3: what is held, given up, late or refused, and who may act on it."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.conftest import FreshDatabase
from tests.publisher.conftest import NewPublisher
from tests.publisher.harness import (
    Publisher,
    Record,
    Topic,
    commit,
    create_table,
    differences,
    eventually,
    insert,
    transaction,
)

pytestmark = pytest.mark.engines("threads", "here")


def letters(publisher: Publisher) -> list[Record]:
    """What stands on the topic of dead letters."""
    topic = publisher.topic
    return Topic(topic.bootstrap_servers, f"{topic.name}.dead").read()


def gaps(publisher: Publisher, status: int) -> dict[str, Any]:
    """`eventpub gaps list --json`."""
    return publisher.answer(status, "gaps", "list")


def answer(publisher: Publisher, *arguments: str) -> str:
    """What came of `eventpub gaps …`."""
    done = publisher.command("gaps", *arguments, "--json")
    outcome: str = json.loads(done.stdout)["result"]["outcome"]
    is_done = outcome in {"found", "nothing is missing", "skipped", "kept"}
    assert done.returncode == (0 if is_done else 1)
    assert json.loads(done.stdout)["ok"] == is_done
    return outcome


def test_a6_a7_holds_and_skips_are_listed_and_acted_on(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create_table(database)
    publisher = new_publisher(database, gaps={"backoff_base": "60s", "max_backoff": 8})
    publisher.start()
    commit(database, "a", 1, 3)
    commit(database, "b", 1, 3)
    publisher.until_published("b", [1])
    publisher.until_published("a", [1])
    eventually(lambda: len(gaps(publisher, 1)["open"]) == 2)
    found = gaps(publisher, 1)
    assert (found["running"], found["kind"]) == (True, "running")
    hold = next(h for h in found["open"] if h["aggregate_id"] == "a")
    assert (hold["first_missing"], hold["seen"], hold["attempts"]) == (2, 3, 0)

    assert answer(publisher, "retry", "a") == "still missing"
    commit(database, "a", 2)
    # found at once, not after the minute of its first wait
    assert answer(publisher, "retry", "a") in {"found", "nothing is missing"}
    publisher.until_published("a", [1, 2, 3])
    # who retries what has come meanwhile has what he wanted
    assert answer(publisher, "retry", "a") == "nothing is missing"
    done = publisher.command("gaps", "retry", "a")
    assert (done.returncode, done.stdout) == (0, "a: nothing is missing\n")

    assert answer(publisher, "skip", "b", "--yes") == "skipped"
    publisher.until_published("b", [1, 3])
    found = gaps(publisher, 0)
    (skip,) = found["skipped"]
    assert (skip["aggregate_id"], skip["from_version"], skip["to_version"]) == ("b", 2, 2)
    assert (skip["reason"], skip["still_missing"]) == ("requested", True)
    assert answer(publisher, "skip", "b", "--yes") == "nothing is held"
    assert answer(publisher, "retry", "b") == "still missing"

    assert publisher.stop() == 143
    found = gaps(publisher, 0)
    assert (found["running"], found["kind"]) == (False, "stopped")
    assert "; no publisher runs; this is what" in publisher.command("gaps", "list").stdout
    with transaction(database) as cursor:  # behind the horizon: nobody looks for it by itself
        insert(cursor, "b", 2, create_time="2020-01-01 00:00:00")
        cursor.connection.commit()
    assert answer(publisher, "retry", "b") == "not running"
    assert answer(publisher, "retry", "b", "--later") == "kept"
    publisher.publish_everything()
    assert publisher.topic.versions("b") == [1, 3, 2]
    assert gaps(publisher, 0)["skipped"][0]["still_missing"] is False


def test_a6_a_retry_looks_for_all_that_an_aggregate_lacks_held_or_skipped(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create_table(database)
    publisher = new_publisher(database, gaps={"backoff_base": "60s"})
    publisher.start()
    commit(database, "a", 1, 3)
    publisher.until_published("a", [1])
    eventually(lambda: publisher.command("gaps", "list").returncode == 1)
    assert answer(publisher, "skip", "a", "--yes") == "skipped"
    with transaction(database) as cursor:  # behind the horizon: found by no recount
        insert(cursor, "a", 2, create_time="2020-01-01 00:00:00")
        cursor.connection.commit()
    commit(database, "a", 5, 7)
    eventually(lambda: publisher.command("gaps", "list").returncode == 1)
    commit(database, "a", 4)
    assert answer(publisher, "retry", "a") == "still missing", "6, and no more 2 or 4"
    eventually(lambda: sorted(publisher.topic.versions("a")) == [1, 2, 3, 4, 5], 30)
    commit(database, "a", 6)
    assert answer(publisher, "retry", "a") in {"found", "nothing is missing"}
    eventually(lambda: sorted(publisher.topic.versions("a")) == [1, 2, 3, 4, 5, 6, 7], 30)


def test_a6_a_skip_of_which_a_part_has_come_is_still_missing(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create_table(database)
    publisher = new_publisher(database, gaps={"backoff_base": "60s"})
    publisher.start()
    commit(database, "a", 1, 5)
    publisher.until_published("a", [1])
    eventually(lambda: gaps(publisher, 1)["open"])
    assert answer(publisher, "skip", "a", "--yes") == "skipped"
    commit(database, "a", 2, 4)  # the first and the last of those that were given up
    assert answer(publisher, "retry", "a") == "still missing"
    publisher.until_published("a", [1, 5, 2, 4])
    assert [skip["still_missing"] for skip in gaps(publisher, 0)["skipped"]] == [True]
    assert "(1 still missing)" in publisher.command("gaps", "list").stdout
    [traced] = publisher.answer(0, "trace", "a", "3")["versions"]
    assert traced["verdict"] == "skipped"
    commit(database, "a", 3)
    assert answer(publisher, "retry", "a") in {"found", "nothing is missing"}
    assert [skip["still_missing"] for skip in gaps(publisher, 0)["skipped"]] == [False]


def test_a6_no_skip_while_a_transaction_that_could_fill_the_gap_is_alive(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create_table(database)
    publisher = new_publisher(database, gaps={"backoff_base": "50ms", "max_backoff": 3})
    publisher.start()
    commit(database, "warm-up", 1)
    publisher.until_published("warm-up", [1])
    with transaction(database) as writer:
        insert(writer, "a", 1)
        commit(database, "a", 2)
        commit(database, "never", 2)
        time.sleep(6.0)  # a skip would have come after 0.35 s and the longest wait
        assert publisher.topic.versions("a") == []
        writer.connection.commit()
    publisher.until_published("a", [1, 2])
    publisher.until_published("never", [2])
    assert {r.key for r in publisher.gaps.read()} == {"never"}


def late_events(publisher: Publisher, database: FreshDatabase) -> None:
    """A version that comes after its gap was skipped."""
    publisher.start()
    commit(database, "a", 1, 3)
    publisher.until_published("a", [1, 3])
    commit(database, "a", 2)
    commit(database, "a", 4)
    eventually(lambda: publisher.topic.versions("a")[-1] == 4)


@pytest.mark.engines("threads", "spark")
def test_a7_a_late_event_is_diverted(database: FreshDatabase, new_publisher: NewPublisher) -> None:
    create_table(database)
    publisher = new_publisher(database, gaps={"late": "divert"})
    late_events(publisher, database)
    assert publisher.stop() == 143
    assert publisher.topic.versions("a") == [1, 3, 4]
    topic = Topic(publisher.topic.bootstrap_servers, f"{publisher.topic.name}.late")
    assert [(r.key, r.version, r.late) for r in topic.read()] == [("a", 2, True)]


def test_a7_a_late_event_is_dropped_and_counted(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create_table(database)
    publisher = new_publisher(database, gaps={"late": "drop"})
    late_events(publisher, database)
    assert publisher.stop() == 143
    assert publisher.topic.versions("a") == [1, 3, 4]
    assert "published 3 events, 1 gap skipped, 1 late" in publisher.words()


def test_hold_shard_keeps_the_order_across_aggregates(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create_table(database)
    publisher = new_publisher(
        database,
        gaps={"policy": "hold_shard", "backoff_base": "200ms", "max_backoff": 6},
        read={"watermark": "off"},
        run={"shards": 1},
        sink={"partitions": 1},
    )
    publisher.start()
    commit(database, "x", 1)
    publisher.until_published("x", [1])
    with transaction(database) as writer:
        insert(writer, "x", 2)
        commit(database, "y", 1)
        publisher.until_published("y", [1])
        commit(database, "x", 3)
        commit(database, "y", 2)
        commit(database, "z", 1)
        time.sleep(2.0)
        assert publisher.topic.versions("z") == []
        writer.connection.commit()
    publisher.until_published("z", [1])
    commit(database, "never", 2)
    commit(database, "after", 1)
    publisher.until_published("after", [1])
    assert publisher.stop() == 143
    assert [(r.key, r.version) for r in publisher.topic.read()] == [
        ("x", 1),
        ("y", 1),
        ("x", 2),
        ("x", 3),
        ("y", 2),
        ("z", 1),
        ("never", 2),
        ("after", 1),
    ]


@pytest.mark.engines("threads", "spark")
def test_d1_what_the_broker_never_takes_is_a_dead_letter_and_its_successors_flow(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create_table(database)
    publisher = new_publisher(database)
    publisher.start()
    commit(database, "a", 1)
    commit(database, "a", 2, payload=b"x" * 3_000_000)
    commit(database, "a", 3)
    commit(database, "empty", 1, payload=b"")
    commit(database, "null", 1, payload=None)
    commit(database, "bytes", 1, payload=b"\xff\xfe\x00")
    commit(database, "other", 1, payload=b"y" * 3_000_000)
    commit(database, "other", 2)
    publisher.until_published("a", [1, 3])
    publisher.until_published("other", [2])
    publisher.until_published("bytes", [1])
    publisher.until_published("null", [1])
    publisher.until_published("empty", [1])
    publisher.kill()
    commit(database, "a", 4)
    publisher.publish_everything()
    assert publisher.topic.versions("a") == [1, 3, 4]
    dead = letters(publisher)
    assert sorted((r.key, r.version) for r in dead) == [("a", 2), ("other", 1)]
    assert all(b"sink.record_refused" in r.headers["eventpub_reason"] for r in dead)
    assert dead[0].headers["eventpub_payload_bytes"] == b"3000000"
    done = publisher.command("verify", "--json")
    assert done.returncode == 0, done.stdout


def test_d1_a_broker_that_refuses_everything_stops_the_publisher(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create_table(database)
    publisher = new_publisher(
        database, sink={"dead_limit": 10, "properties": {"message.max.bytes": "1000"}}
    )
    commit(database, "fine", 1)
    for number in range(30):
        commit(database, f"a-{number}", 1, payload=b"x" * 2000)
    publisher.start()
    assert publisher.finish() == 3
    assert "sink.too_many_refused" in publisher.words()
    assert "message.max.bytes" in publisher.words()
    assert letters(publisher) == []
    publisher.settings["sink"]["properties"] = {}
    publisher.publish_everything()
    stored = set(database.execute("SELECT aggregate_id, version FROM events"))
    assert not differences(stored, publisher.topic.stream(), publisher.topic.partitions())


def test_d3_versions_below_the_first_and_twice_the_same_are_dead_letters(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create_table(database)
    database.execute(
        "ALTER TABLE events DROP INDEX aggregate_id, ADD INDEX (aggregate_id, version)"
    )
    publisher = new_publisher(database)
    commit(database, "zero", 0, 1, 2)
    commit(database, "negative", -1, 1)
    with transaction(database) as cursor:
        insert(cursor, "twice", 1, b"first")
        insert(cursor, "twice", 1, b"second")
        insert(cursor, "twice", 2)
        cursor.connection.commit()
    publisher.publish_everything()
    publisher.publish_everything()
    assert publisher.topic.versions("zero") == [1, 2]
    assert publisher.topic.versions("negative") == [1]
    assert publisher.topic.versions("twice") == [1, 2]
    found = {(r.key, r.version): r for r in letters(publisher)}
    assert len(letters(publisher)) == len(found)
    assert set(found) == {("zero", 0), ("negative", -1), ("twice", 1)}
    assert found["twice", 1].value == b"second"
    assert b"version_below_first" in found["zero", 0].headers["eventpub_reason"]

    import shutil

    shutil.rmtree(publisher.state)
    publisher.publish_everything()
    assert len(letters(publisher)) == 3
    assert publisher.topic.versions("zero") == [1, 2]


def test_d3_a_version_beyond_the_largest_number_is_refused_with_the_row_named(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create_table(database)
    database.execute("ALTER TABLE events MODIFY version BIGINT UNSIGNED NOT NULL")
    publisher = new_publisher(database)
    others = [f"a{number}" for number in range(20)]
    for aggregate_id in others:
        commit(database, aggregate_id, 1)
    commit(database, "huge", 2**63)
    for aggregate_id in others:
        commit(database, aggregate_id, 2)
    publisher.start()
    assert publisher.finish() == 3
    assert "store.row_invalid" in publisher.words()
    assert "huge" in publisher.words()
    database.execute("DELETE FROM events WHERE aggregate_id = 'huge'")
    publisher.publish_everything()
    assert {a: publisher.topic.versions(a) for a in others} == {a: [1, 2] for a in others}
