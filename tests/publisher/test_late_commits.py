"""Scenarios A: what commits late, in another order, or never.

One publisher runs for all of them; each test has aggregates of its own.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import pytest

from eventpub.local.servers import Database, Kafka
from tests.conftest import FreshDatabase, fresh_database
from tests.publisher.conftest import FAST
from tests.publisher.harness import (
    Publisher,
    commit,
    compare,
    create_table,
    eventually,
    insert,
    transaction,
)

pytestmark = pytest.mark.engines("threads", "spark")


@pytest.fixture(scope="module")
def world(
    engine: str,
    mysql_server: Database,
    kafka_server: Kafka,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[FreshDatabase, Publisher]]:
    """A running publisher and its database."""
    with (
        fresh_database(mysql_server) as database,
        Publisher(
            tmp_path_factory.mktemp("late"),
            database.url,
            f"late.{database.name}",
            kafka_server.bootstrap_servers,
            FAST,
        ) as publisher,
    ):
        create_table(database)
        publisher.start()
        commit(database, "warm-up", 1)
        publisher.until_published("warm-up", [1])
        yield database, publisher
        assert publisher.stop() == 143
        differences = compare(database, publisher.topic)
        assert not differences, differences


def gaps_of(publisher: Publisher, aggregate_id: str) -> list[dict[str, Any]]:
    """The recorded skips of an aggregate."""
    return [json.loads(r.value) for r in publisher.gaps.read() if r.key == aggregate_id and r.value]


def test_a1_two_transactions_commit_in_reverse_order_of_create_time(
    world: tuple[FreshDatabase, Publisher],
) -> None:
    database, publisher = world
    with transaction(database) as first, transaction(database) as second:
        insert(first, "a1", 1)
        time.sleep(0.05)
        insert(second, "a1", 2)
        second.connection.commit()
        time.sleep(1.0)
        first.connection.commit()
    publisher.until_published("a1", [1, 2])


def test_a2_a_transaction_of_500_rows_whose_tail_commits_after_the_window(
    world: tuple[FreshDatabase, Publisher],
) -> None:
    database, publisher = world
    with transaction(database) as cursor:
        for version in range(1, 501):
            insert(cursor, "a2", version)
        for other in range(20):
            commit(database, f"a2-other-{other}", 1)
        time.sleep(3.0)
        cursor.connection.commit()
    commit(database, "a2", 501)
    publisher.until_published("a2", list(range(1, 502)))


def test_a3_the_last_version_of_an_aggregate_commits_late(
    world: tuple[FreshDatabase, Publisher],
) -> None:
    database, publisher = world
    commit(database, "a3", 1, 2)
    publisher.until_published("a3", [1, 2])
    with transaction(database) as cursor:
        insert(cursor, "a3", 3)
        insert(cursor, "a3", 4)
        time.sleep(3.5)
        commit(database, "a3-other", 1)
        publisher.until_published("a3-other", [1])
        cursor.connection.commit()
    publisher.until_published("a3", [1, 2, 3, 4], timeout=30)


def test_a4_single_event_aggregates_commit_late(world: tuple[FreshDatabase, Publisher]) -> None:
    database, publisher = world
    with transaction(database) as cursor:
        for number in range(50):
            insert(cursor, f"a4-{number}", 1)
        time.sleep(3.5)
        commit(database, "a4-other", 1)
        publisher.until_published("a4-other", [1])
        cursor.connection.commit()
    for number in range(50):
        publisher.until_published(f"a4-{number}", [1], timeout=30)


def test_a4_an_event_whose_writer_stamped_a_time_in_the_past(
    world: tuple[FreshDatabase, Publisher],
) -> None:
    database, publisher = world
    with transaction(database) as cursor:
        cursor.execute("SELECT NOW(6) - INTERVAL 25 SECOND")
        row = cursor.fetchone()
        assert row is not None
        insert(cursor, "a4-past", 1, create_time=str(row[0]))
        cursor.connection.commit()
    publisher.until_published("a4-past", [1])


def test_a5_the_first_version_commits_after_the_second_is_visible(
    world: tuple[FreshDatabase, Publisher],
) -> None:
    database, publisher = world
    with transaction(database) as cursor:
        insert(cursor, "a5", 1)
        time.sleep(0.6)
        commit(database, "a5", 2)
        commit(database, "a5-other", 1)
        publisher.until_published("a5-other", [1])
        assert publisher.topic.versions("a5") == []
        cursor.connection.commit()
    publisher.until_published("a5", [1, 2])


def test_a6_a_version_that_never_comes_is_skipped_once_and_nobody_else_waits(
    world: tuple[FreshDatabase, Publisher],
) -> None:
    database, publisher = world
    with transaction(database) as cursor:
        insert(cursor, "a6", 2)
        cursor.connection.rollback()
    commit(database, "a6", 1)
    commit(database, "a6", 3)
    started = time.monotonic()
    commit(database, "a6-other", 1)
    publisher.until_published("a6-other", [1])
    waited = time.monotonic() - started
    publisher.until_published("a6", [1, 3])
    assert waited < time.monotonic() - started
    commit(database, "a6", 4)
    publisher.until_published("a6", [1, 3, 4])
    (gap,) = gaps_of(publisher, "a6")
    assert (gap["from_version"], gap["to_version"], gap["attempts"]) == (2, 2, 5)
    assert gap["reason"]
    assert gap["first_seen"] < gap["skipped_at"]


def test_a6_the_first_version_of_many_aggregates_never_comes(
    world: tuple[FreshDatabase, Publisher],
) -> None:
    """As where a consumer's history begins later: each is skipped once, none for another."""
    database, publisher = world
    ids = [f"a6-many-{number}" for number in range(300)]
    with transaction(database) as cursor:
        for aggregate_id in ids:
            insert(cursor, aggregate_id, 3)
            insert(cursor, aggregate_id, 5)
        cursor.connection.commit()
    eventually(lambda: sum(r.key in ids for r in publisher.topic.follow()) >= 600)
    published = [(r.key, r.version) for r in publisher.topic.read() if r.key in ids]
    assert sorted(published) == sorted((a, v) for a in ids for v in (3, 5))
    skipped = [json.loads(r.value) for r in publisher.gaps.read() if r.key in ids and r.value]
    found = sorted((g["aggregate_id"], g["from_version"], g["to_version"]) for g in skipped)
    assert found == sorted((a, *gap) for a in ids for gap in ((1, 2), (4, 4)))


def test_a7_a_skipped_version_that_comes_after_all_is_published_as_late(
    world: tuple[FreshDatabase, Publisher],
) -> None:
    database, publisher = world
    commit(database, "a7", 2)
    publisher.until_published("a7", [2])
    commit(database, "a7", 1)
    publisher.until_published("a7", [2, 1])
    late = {r.version: r.late for r in publisher.topic.read() if r.key == "a7"}
    assert late == {2: False, 1: True}
    commit(database, "a7", 3)
    publisher.until_published("a7", [2, 1, 3])


def test_a8_several_gaps_in_one_aggregate_and_one_filled_in_two_parts(
    world: tuple[FreshDatabase, Publisher],
) -> None:
    database, publisher = world
    with transaction(database) as early, transaction(database) as later:
        insert(early, "a8", 2)
        insert(later, "a8", 4)
        insert(later, "a8", 6)
        commit(database, "a8", 1, 3)
        time.sleep(0.8)
        commit(database, "a8", 5, 7)
        time.sleep(0.8)
        early.connection.commit()
        publisher.until_published("a8", [1, 2, 3])
        later.connection.commit()
    publisher.until_published("a8", [1, 2, 3, 4, 5, 6, 7])


def test_a9_after_an_idle_time_a_gap_waits_its_full_time(
    world: tuple[FreshDatabase, Publisher],
) -> None:
    """Measured from its first sight, on the database's time; not from when something last came."""
    database, publisher = world
    time.sleep(8.0)  # longer than the 3.1 s after which a gap is skipped
    (before,) = database.execute("SELECT UTC_TIMESTAMP(6)")[0]
    commit(database, "a9", 2)
    publisher.until_published("a9", [2])
    (gap,) = gaps_of(publisher, "a9")
    first_seen, skipped_at = (
        datetime.fromisoformat(gap[name]).replace(tzinfo=None)
        for name in ("first_seen", "skipped_at")
    )
    assert first_seen >= before
    assert (skipped_at - first_seen).total_seconds() >= 3.1
    assert gap["attempts"] == 5


def test_a11_a_session_that_stays_open_delays_nobody_else(
    world: tuple[FreshDatabase, Publisher],
) -> None:
    database, publisher = world
    with transaction(database) as idle:
        insert(idle, "a11", 1)
        for number in range(3):
            commit(database, f"a11-other-{number}", 1, 2)
            publisher.until_published(f"a11-other-{number}", [1, 2])
        idle.connection.rollback()


def test_d2_ids_are_published_unchanged_and_keyed_right(
    world: tuple[FreshDatabase, Publisher],
) -> None:
    database, publisher = world
    ids = [
        "x" * 255,
        "ü" * 255,
        "日本語-🚀",
        'it\'s "quoted" `so` \\ %s',
        " leading",
        "trailing",
        "trailing ",
        "trailing  ",
        "Case",
        "case",
        "tab\tnew\nline",
    ]
    for aggregate_id in ids:
        commit(database, aggregate_id, 1)
        commit(database, aggregate_id, 2)
    for aggregate_id in ids:
        publisher.until_published(aggregate_id, [1, 2])
    assert {r.headers["ce_id"].decode() for r in publisher.topic.read()} >= {
        f"{a}/{v}" for a in ids for v in (1, 2)
    }


def test_concurrent_writers_of_one_aggregate(world: tuple[FreshDatabase, Publisher]) -> None:
    """Versions handed out by the application, committed in whatever order threads get to it."""
    database, publisher = world

    def write(version: int) -> None:
        with transaction(database) as cursor:
            insert(cursor, "crowd", version)
            time.sleep(version * 37 % 11 / 10)
            cursor.connection.commit()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(write, range(1, 65)))
    publisher.until_published("crowd", list(range(1, 65)))


def test_record_format(world: tuple[FreshDatabase, Publisher]) -> None:
    database, publisher = world
    with transaction(database) as cursor:
        insert(
            cursor,
            "format",
            1,
            b"\x00\xffbytes",
            event_type="OrderPlaced",
            metadata='{"tenant": "t1"}',
            create_time="2026-03-04 05:06:07.089012",
        )
        insert(cursor, "format", 2, None)  # type: ignore[arg-type]
        insert(cursor, "format", 3, b"")
        cursor.execute("SET time_zone = '+00:00'")
        cursor.connection.commit()
    found = eventually(lambda: [r for r in publisher.topic.read() if r.key == "format"], 30)
    del found
    publisher.until_published("format", [1, 2, 3])
    first, second, third = (r for r in publisher.topic.read() if r.key == "format")
    assert first.value == b"\x00\xffbytes"
    assert second.value is None
    assert third.value == b""
    assert first.headers["ce_specversion"] == b"1.0"
    assert first.headers["ce_id"] == b"format/1"
    assert first.headers["ce_source"].decode() == publisher.settings["app"]["id"]
    assert first.headers["ce_type"] == b"OrderPlaced"
    assert first.headers["ce_subject"] == b"format"
    assert first.headers["ce_sequence"] == b"1"
    assert first.headers["tenant"] == b"t1"
    assert first.headers["ce_time"].startswith(b"2026-03-04T")
    assert first.headers["ce_time"].endswith(b".089012Z")
