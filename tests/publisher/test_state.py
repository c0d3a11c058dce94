"""Scenarios C7, C9, C11: what the publisher keeps when topic, shards or disk change under it."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import psutil
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from tests.conftest import FreshDatabase
from tests.publisher.conftest import NewPublisher
from tests.publisher.harness import (
    Publisher,
    compare,
    create_table,
    eventually,
    insert,
    transaction,
)


def commit(database: FreshDatabase, versions: range, aggregates: int = 40) -> None:
    """Several versions of several aggregates."""
    with transaction(database) as cursor:
        for version in versions:
            for number in range(aggregates):
                insert(cursor, f"a-{number}", version)
        cursor.connection.commit()


def empty_by_retention(publisher: Publisher) -> None:
    """All records of the topic are removed; offsets go on from where they were."""
    admin = AdminClient({"bootstrap.servers": publisher.topic.bootstrap_servers})
    everything = [
        TopicPartition(publisher.topic.name, p, -1) for p in range(publisher.topic.partitions())
    ]
    for future in admin.delete_records(everything).values():
        future.result(30)


def keys_and_versions(publisher: Publisher) -> list[tuple[str, int]]:
    """What a new reader of the topic sees, without an order."""
    return sorted((r.key, r.version) for r in publisher.topic.read())


def test_a10_a_first_fold_that_is_killed_still_decides_what_counts_as_published(
    publisher: Publisher, database: FreshDatabase, tmp_path: Path
) -> None:
    """Index lost and topic cut: what both have forgotten is not published again."""
    commit(database, range(1, 6))
    publisher.start()
    publisher.until_published("a-39", [1, 2, 3, 4, 5])
    eventually(lambda: len(keys_and_versions(publisher)) == 200)
    publisher.kill()
    consumer = Consumer({"bootstrap.servers": publisher.topic.bootstrap_servers, "group.id": "x"})
    places = [TopicPartition(publisher.topic.name, p) for p in range(publisher.topic.partitions())]
    for place in places:
        place.offset = consumer.get_watermark_offsets(place, timeout=10)[1] - 12
    consumer.close()
    admin = AdminClient({"bootstrap.servers": publisher.topic.bootstrap_servers})
    for future in admin.delete_records(places).values():
        future.result(30)
    kept = keys_and_versions(publisher)
    assert 0 < len(kept) < 60
    publisher.lose_index()
    marker = tmp_path / "folding"
    publisher.start(environment={"EVENTPUB_FAILPOINT": f"during_fold:1:{marker}"})
    eventually(marker.exists)
    publisher.kill()
    publisher.start()
    commit(database, range(6, 7))
    eventually(lambda: ("a-39", 6) in keys_and_versions(publisher))
    eventually(lambda: len(keys_and_versions(publisher)) >= len(kept) + 40)
    assert keys_and_versions(publisher) == sorted([*kept, *((f"a-{n}", 6) for n in range(40))])
    publisher.kill()


@pytest.mark.engines("threads", "here")
def test_c7_the_topic_is_emptied_by_retention(
    publisher: Publisher, database: FreshDatabase
) -> None:
    """With its index the publisher knows what it has published.

    Without, what is older than its position counts as published, and that is said: a topic that
    forgets and an index that is lost cannot tell.
    """
    commit(database, range(1, 4))
    publisher.publish_everything()
    empty_by_retention(publisher)
    assert keys_and_versions(publisher) == []

    commit(database, range(4, 6))
    publisher.publish_everything()
    assert keys_and_versions(publisher) == sorted((f"a-{n}", v) for n in range(40) for v in (4, 5))
    assert "count as published" not in publisher.words()

    empty_by_retention(publisher)
    publisher.lose_index()
    commit(database, range(6, 8))
    publisher.publish_everything()
    assert keys_and_versions(publisher) == sorted((f"a-{n}", v) for n in range(40) for v in (6, 7))
    assert "count as published" in publisher.words()
    assert publisher.gaps.read() == []


def run_until(publisher: Publisher, records: int) -> None:
    """Publish until so many are on the topic."""
    publisher.start()
    eventually(lambda: len(keys_and_versions(publisher)) >= records, every=0.5)
    publisher.stop()


@pytest.mark.parametrize("restored", ["index", "."])
def test_an_older_state_and_a_topic_that_has_forgotten_what_came_after_it(
    publisher: Publisher, database: FreshDatabase, tmp_path: Path, restored: str
) -> None:
    """As of a backup, or of a machine that has not had the shard for longer than the retention.

    Half of the aggregates had their last events while it was away.
    """
    publisher.settings["recount"] = {"horizon": "2s"}
    commit(database, range(1, 4))
    run_until(publisher, 120)
    shutil.copytree(publisher.state, tmp_path / "older")
    commit(database, range(4, 6))
    run_until(publisher, 200)
    time.sleep(5)  # more than the horizon and the longest hold
    empty_by_retention(publisher)
    commit(database, range(6, 8), 20)
    run_until(publisher, 40)
    before = keys_and_versions(publisher)
    assert before == sorted((f"a-{n}", v) for n in range(20) for v in (6, 7))

    folder = publisher.index if restored == "index" else publisher.state
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "older" / folder.relative_to(publisher.state), folder)
    commit(database, range(8, 9), 20)
    run_until(publisher, 60)
    expected = sorted([*before, *((f"a-{n}", 8) for n in range(20))])
    assert keys_and_versions(publisher) == expected
    if restored == "." or publisher.index.name == "index":  # Spark's journals know what came since
        publisher.until_said("count as published", 1)
    assert publisher.gaps.read() == []


def test_what_others_wrote_is_cut_in_partitions_where_nothing_of_ours_was_written_since(
    publisher: Publisher, database: FreshDatabase
) -> None:
    """Index and state are whole: what commits late, or fills a gap that waits, is not given up."""
    publisher.settings["gaps"] = {"backoff_base": "10s", "max_backoff": 8}
    commit(database, range(1, 4))
    with transaction(database) as cursor:
        insert(cursor, "waits", 2)
        cursor.connection.commit()
    publisher.start()
    eventually(lambda: len(keys_and_versions(publisher)) == 120)
    time.sleep(2)
    publisher.stop()
    producer = Producer({"bootstrap.servers": publisher.topic.bootstrap_servers})
    for number in range(200):
        partition = number % publisher.topic.partitions()
        headers: dict[str, str | bytes | None] = {"ce_source": "billing"}
        producer.produce(publisher.topic.name, b"theirs", b"k", partition, headers=headers)
    producer.flush(10)
    empty_by_retention(publisher)
    with transaction(database) as cursor:
        cursor.execute("SELECT CURRENT_TIMESTAMP(6) - INTERVAL 20 SECOND")
        [(before,)] = cursor.fetchall()
        insert(cursor, "late", 1, create_time=before)
        insert(cursor, "waits", 1, create_time=before)
        cursor.connection.commit()
    publisher.start()
    publisher.until_published("late", [1])
    publisher.until_published("waits", [1, 2])
    publisher.stop()
    assert keys_and_versions(publisher) == [("late", 1), ("waits", 1), ("waits", 2)]
    assert "count as published" not in publisher.words()


def test_f9_an_older_index_does_not_know_what_the_topic_has_forgotten(
    publisher: Publisher, database: FreshDatabase, tmp_path: Path
) -> None:
    """It counts as published up to the position that progress.json has."""
    commit(database, range(1, 4))
    publisher.publish_everything()
    shutil.copytree(publisher.index, tmp_path / "index")
    commit(database, range(4, 6))
    publisher.publish_everything()
    empty_by_retention(publisher)
    publisher.lose_index()
    shutil.copytree(tmp_path / "index", publisher.index)
    commit(database, range(6, 8))
    publisher.publish_everything()
    assert keys_and_versions(publisher) == sorted((f"a-{n}", v) for n in range(40) for v in (6, 7))
    assert "count as published" in publisher.words()
    assert publisher.gaps.read() == []


def test_c9_shards_4_8_2_with_one_shard_far_behind_and_a_hold_open(
    database: FreshDatabase, new_publisher: NewPublisher, tmp_path: Path
) -> None:
    """One of four shards is stopped before its first record; the rest of the window is out."""
    create_table(database)
    patience = {"backoff_base": "2s", "max_backoff": 8}
    publisher = new_publisher(database, gaps=patience, sink={"partitions": 8})
    with transaction(database) as late:
        insert(late, "held", 1)
        commit(database, range(1, 26))
        with transaction(database) as cursor:
            insert(cursor, "held", 2)
            insert(cursor, "other", 1)
            cursor.connection.commit()

        publisher.settings["run"]["shards"] = 4
        marker = tmp_path / "behind.pid"
        hit = 1 if publisher.index.name == "index" else 2  # Spark's first one says who publishes
        publisher.start(environment={"EVENTPUB_FAILPOINT": f"before_begin:{hit}:{marker}"})
        eventually(marker.exists)
        assert psutil.Process(int(marker.read_text())) in publisher.family()
        eventually(lambda: len({r.partition % 4 for r in publisher.topic.follow()}) == 3)
        publisher.kill()
        assert len(compare(database, publisher.topic).missing) >= 25

        publisher.settings["run"]["shards"] = 8
        commit(database, range(26, 31))
        publisher.start()
        publisher.until_published("a-7", list(range(1, 31)))
        publisher.until_published("other", [1])
        assert publisher.stop() == 143
        assert publisher.topic.versions("held") == []
        late.connection.commit()

    publisher.settings["run"]["shards"] = 2
    commit(database, range(31, 33))
    publisher.publish_everything()
    differences = compare(database, publisher.topic)
    assert not differences, differences
    assert publisher.topic.versions("held") == [1, 2]


def test_c9_what_the_index_knows_moves_with_the_shards_though_the_topic_was_emptied(
    publisher: Publisher, database: FreshDatabase
) -> None:
    publisher.settings["run"]["shards"] = 4
    commit(database, range(1, 4))
    publisher.publish_everything()
    empty_by_retention(publisher)
    publisher.settings["run"]["shards"] = 2
    commit(database, range(4, 5))
    publisher.publish_everything()
    publisher.settings["run"]["shards"] = 4
    commit(database, range(5, 6))
    publisher.publish_everything()
    assert keys_and_versions(publisher) == sorted((f"a-{n}", v) for n in range(40) for v in (4, 5))
    if publisher.index.name == "index":  # with other shards, Spark begins with a new index
        assert "count as published" not in publisher.words()
        assert {p.name for p in publisher.index.iterdir()} == {"4-shards"}


@pytest.mark.engines("threads", "here")
def test_c11_the_disk_is_full_under_index_and_checkpoint(
    database: FreshDatabase, new_publisher: NewPublisher, small_disk: Path
) -> None:
    """It says so and waits, or stops with status 3; when there is space again, it goes on."""
    create_table(database)
    publisher = new_publisher(database, app={"state_dir": str(small_disk / "state")})
    publisher.state = small_disk / "state"
    commit(database, range(1, 3))
    publisher.start()
    publisher.until_published("a-1", [1, 2])

    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as out:  # else closing it writes the rest
        try:
            while True:
                out.write(b"\0" * 65536)
        except OSError:
            pass
    for version in range(3, 30):
        commit(database, range(version, version + 1))
    publisher.until_said("disk_full")
    assert publisher.process is not None
    stopped = publisher.process.poll()
    assert stopped in {None, 3}, publisher.words()
    assert "free space" in publisher.words()

    ballast.unlink()
    if stopped is not None:
        publisher.start()
    publisher.until_published("a-1", list(range(1, 30)))
    eventually(lambda: not compare(database, publisher.topic))  # the other shard, too
    assert publisher.stop() == 143
    differences = compare(database, publisher.topic)
    assert not differences, differences
