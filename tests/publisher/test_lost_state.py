"""State that is lost, of a topic from which retention has removed what would say the same."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from eventpub.index import Index
from tests.conftest import FreshDatabase
from tests.publisher.conftest import NewPublisher
from tests.publisher.harness import (
    Publisher,
    Topic,
    compare,
    create_table,
    delete_as_proposed,
    delete_topics,
    eventually,
    insert,
    transaction,
)

pytestmark = pytest.mark.parametrize("database", ["mysql"], indirect=True)


def commit(database: FreshDatabase, versions: range, aggregates: int = 40) -> None:
    """Several versions of several aggregates."""
    with transaction(database) as cursor:
        for version in versions:
            for number in range(aggregates):
                insert(cursor, f"a-{number}", version)
        cursor.connection.commit()


def cut(publisher: Publisher, partitions: list[int], upto: int = -1) -> None:
    """Retention removes records: all, or those below an offset."""
    admin = AdminClient({"bootstrap.servers": publisher.topic.bootstrap_servers})
    places = [TopicPartition(publisher.topic.name, p, upto) for p in partitions]
    for future in admin.delete_records(places).values():
        future.result(30)


def published(publisher: Publisher) -> Counter[tuple[str, int]]:
    """What a new reader sees."""
    return Counter((r.key, r.version) for r in publisher.topic.read())


@pytest.mark.parametrize(
    ("emptied", "start"), [([0, 1, 2, 3], "beginning"), ([1, 3], "now"), ([1, 3], "beginning")]
)
def test_the_operator_is_asked_where_neither_state_nor_topic_says_what_was_published(
    publisher: Publisher, database: FreshDatabase, emptied: list[int], start: str
) -> None:
    """200 of 200 events were published again; with "now", none of those committed meanwhile."""
    commit(database, range(1, 6))
    publisher.publish_everything()
    assert len(published(publisher)) == 200
    [(last,)] = database.execute("SELECT UTC_TIMESTAMP(6)")
    cut(publisher, emptied)
    left = published(publisher)
    shutil.rmtree(publisher.state)
    publisher.settings["read"]["start"] = start
    commit(database, range(6, 7))
    for _ in range(2):  # the first has not left what the second takes for the start
        done = publisher.command("run", "--available-now", "--json")
        error = json.loads(done.stdout)["error"] or {}
        assert error.get("code") == "state.start_lost", done.stdout
    checks = json.loads(publisher.command("doctor", "--json").stdout)["result"]["checks"]
    assert [c["status"] for c in checks if c["code"] == "state.start_lost"] == ["wrong"]
    assert published(publisher) == left

    shutil.rmtree(publisher.state, ignore_errors=True)
    publisher.settings["read"]["start"] = f"{last.isoformat()}Z"
    publisher.publish_everything()
    assert published(publisher) == left + Counter((f"a-{n}", 6) for n in range(40))


def test_an_event_from_the_future_does_not_say_what_was_published(
    publisher: Publisher, database: FreshDatabase
) -> None:
    """20 of 41 new events were published, and none for years."""
    commit(database, range(1, 6))
    with transaction(database) as cursor:
        insert(cursor, "f", 1)
        insert(cursor, "f", 2, create_time="2037-01-01 00:00:00")
        insert(cursor, "f", 3)
        cursor.connection.commit()
    publisher.publish_everything()
    assert publisher.topic.versions("f") == [1, 2, 3]
    before = published(publisher)
    cut(publisher, [0, 1, 2, 3], 1)
    left = published(publisher)
    assert len(left) < len(before)
    shutil.rmtree(publisher.state)
    commit(database, range(6, 7))
    with transaction(database) as cursor:
        insert(cursor, "f", 4)
        cursor.connection.commit()
    publisher.publish_everything()
    new = Counter([("f", 4), *((f"a-{n}", 6) for n in range(40))])
    assert new - published(publisher) == Counter()
    assert all(count == 1 for count in published(publisher).values())


@pytest.mark.parametrize("is_emptied", [False, True])
@pytest.mark.parametrize("lost", ["index", "index/2-shards/1", "replaced"])
def test_what_commits_late_is_not_lost_with_the_index_of_a_topic_that_was_cut(
    publisher: Publisher, database: FreshDatabase, lost: str, is_emptied: bool
) -> None:
    """101 of 101 events were lost, and a version was passed over without a record of it."""
    publisher.settings["run"]["shards"] = 2
    publisher.settings["gaps"] = {"backoff_base": "2s", "max_backoff": 6}
    commit(database, range(1, 3))
    with transaction(database) as cursor:
        insert(cursor, "g", 1)
        cursor.connection.commit()
    publisher.publish_everything()
    shutil.copytree(publisher.state / "index", publisher.folder / "older")
    publisher.start()
    commit(database, range(3, 4))
    eventually(lambda: sum(v == 3 for _, v in published(publisher)) == 40)
    for partition in range(4):
        left = [r.offset for r in publisher.topic.read() if r.partition == partition]
        cut(publisher, [partition], left[-3])
    late = [f"late-{n}" for n in range(101)]
    with transaction(database) as one, transaction(database) as other:
        for name in late:
            insert(one, name, 1)
        insert(other, "g", 2)
        commit(database, range(4, 5))
        with transaction(database) as cursor:
            insert(cursor, "g", 3)
            cursor.connection.commit()
        eventually(lambda: sum(v == 4 for _, v in published(publisher)) == 40)
        held = _progress(publisher)
        eventually(lambda: _progress(publisher)["holds"] and _progress(publisher) != held)
        publisher.kill()
        if is_emptied:
            cut(publisher, [0, 1, 2, 3])
        before = published(publisher)
        shutil.rmtree(publisher.state / ("index" if lost == "replaced" else lost))
        if lost == "replaced":
            shutil.copytree(publisher.folder / "older", publisher.state / "index")
        publisher.start()
        commit(database, range(5, 6))
        eventually(lambda: sum(v == 5 for _, v in published(publisher)) == 40)
        one.connection.commit()
        other.connection.commit()
    expected = before + Counter([("g", 2), ("g", 3), *((name, 1) for name in late)])
    expected += Counter((f"a-{n}", 5) for n in range(40))
    eventually(lambda: expected - published(publisher) == Counter())
    assert published(publisher) == expected
    publisher.until_said("count as published")
    publisher.stop()


def _progress(publisher: Publisher) -> dict[str, object]:
    found: dict[str, object] = json.loads((publisher.state / "progress.json").read_text())
    return found


@pytest.mark.parametrize("told_late", [False, True])
def test_a_topic_that_was_deleted_after_a_skip_is_published_anew(
    publisher: Publisher, database: FreshDatabase, told_late: bool
) -> None:
    """As printed. Each start ended with an OverflowError, since the skip was one of the new topic;
    without that, the first event would have been a dead letter.

    Args:
        told_late: the state is removed, and the side topics are left, as somebody may do.
    """
    with transaction(database) as cursor:
        for name, version in (("a", 1), ("a", 3), ("b", 1)):
            insert(cursor, name, version)
        cursor.connection.commit()
    publisher.publish_everything()
    assert [r.key for r in publisher.gaps.read()] == ["a"]
    assert publisher.topic.versions("a") == [1, 3]
    publisher.topic.close()
    delete_topics(publisher, re.escape(publisher.topic.name))
    if told_late:
        shutil.rmtree(publisher.state)
    done = publisher.command("run", "--available-now", "--json")
    error = json.loads(done.stdout)["error"] or {}
    code = "sink.side_topics_left" if told_late else "sink.topic_missing"
    assert error.get("code") == code, done.stdout
    checks = json.loads(publisher.command("doctor", "--json").stdout)["result"]["checks"]
    found = [c for c in checks if c["code"] == code]
    assert [(c["status"], c["suggestion"]) for c in found] == [("wrong", error["suggestion"])]

    delete_as_proposed(publisher, error)
    shutil.rmtree(publisher.state, ignore_errors=True)
    with transaction(database) as cursor:
        insert(cursor, "a", 2)
        cursor.connection.commit()
    publisher.publish_everything()
    found = [(r.key, r.version, r.late) for r in publisher.topic.read()]
    assert sorted(found) == [("a", 1, False), ("a", 2, False), ("a", 3, False), ("b", 1, False)]
    assert publisher.topic.versions("a") == [1, 2, 3]
    for side in (".gaps", ".dead"):
        assert Topic(publisher.topic.bootstrap_servers, publisher.topic.name + side).read() == []


@pytest.mark.engines("here", why="the engine threads has no journals")
def test_an_index_that_knows_nothing_is_not_believed(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """As one made where another attempt of the task had just set the index aside: the journals
    lack what the topic had before them, which was published again."""
    create_table(database)
    publisher = new_publisher(database, run={"engine": "threads", "shards": 1})
    commit(database, range(1, 3))
    publisher.publish_everything()
    publisher.settings["run"]["engine"] = "spark"
    publisher.start()
    commit(database, range(3, 4), aggregates=1)
    publisher.until_published("a-0", [1, 2, 3])
    publisher.stop()
    [folder] = (publisher.state / "query").glob("*/0")
    shutil.rmtree(folder)
    Index(folder, {}).close()
    publisher.start()
    commit(database, range(4, 5), aggregates=1)
    with transaction(database) as cursor:
        insert(cursor, "a-1", 3)
        cursor.connection.commit()
    publisher.until_published("a-0", [1, 2, 3, 4])
    publisher.until_published("a-1", [1, 2, 3])
    assert all(count == 1 for count in published(publisher).values())
    assert not compare(database, publisher.topic)


@pytest.mark.engines("here", why="a query's own index has snapshots, which the threads' has not")
def test_a_damaged_index_of_the_other_engine_is_set_aside(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """Each new checkpoint began with it, and failed, for ever."""
    create_table(database)
    publisher = new_publisher(database, run={"engine": "threads", "shards": 2})
    commit(database, range(1, 3))
    publisher.start()
    publisher.until_published("a-39", [1, 2])
    publisher.stop()
    for file in (publisher.state / "index" / "2-shards" / "0").glob("MANIFEST-*"):
        os.truncate(file, 0)
    publisher.settings["run"]["engine"] = "spark"
    publisher.start()
    commit(database, range(3, 4))
    for number in range(40):
        publisher.until_published(f"a-{number}", [1, 2, 3])
    assert "it was moved to" in publisher.log.read_text()
    assert not compare(database, publisher.topic)


@pytest.mark.engines("here", why="the engine threads keeps nothing at a location")
def test_a_location_that_is_away_is_waited_for(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """Spark's words for it counted as a damaged checkpoint: it was given up, and deleted once the
    location was back."""
    create_table(database)
    publisher = new_publisher(database)
    location, away = publisher.folder / "location", publisher.folder / "away"
    publisher.settings["state"] = {"location": str(location)}
    publisher.start()
    commit(database, range(1, 2))
    publisher.until_published("a-39", [1])
    location.rename(away)
    location.symlink_to(location)  # whoever looks at it gets an error
    publisher.command("pause")
    publisher.command("resume")
    commit(database, range(2, 3))
    eventually(lambda: publisher.log.read_text().count("the query failed; restarting it") > 3)
    location.unlink()
    away.rename(location)
    publisher.until_published("a-39", [1, 2])
    assert publisher.log.read_text().count("new checkpoint: the topic is read back first") == 1
    publisher.stop()
    assert not compare(database, publisher.topic)
