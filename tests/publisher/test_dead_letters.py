"""`dead` on real servers: refused rows are listed, and published after all, each once."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from eventpub import settings
from eventpub.channel import Request
from eventpub.ops.asking import ask_shards
from eventpub.sink.client import Clients
from eventpub.state import StateDir
from tests.conftest import FreshDatabase
from tests.publisher.conftest import NewPublisher
from tests.publisher.harness import (
    Publisher,
    commit,
    create_table,
    eventually,
    insert,
    transaction,
)
from tests.publisher.test_state import empty_by_retention

pytestmark = pytest.mark.engines("threads", "here")

LARGE = Random(1).randbytes(300_000)


def take_up_to(publisher: Publisher, size: int) -> None:
    """Set the topic's max.message.bytes."""
    sink = publisher.settings["sink"]
    admin = AdminClient({"bootstrap.servers": sink["bootstrap_servers"]})
    entry = ConfigEntry("max.message.bytes", str(size), incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, sink["topic"], incremental_configs=[entry])
    for done in admin.incremental_alter_configs([resource]).values():
        done.result()


def dead(publisher: Publisher, status: int, *arguments: str) -> dict[str, Any]:
    """What `eventpub dead … --json` says."""
    return publisher.answer(status, "dead", *arguments)


@pytest.mark.engines("threads", "spark")
def test_a_refused_row_is_listed_and_published_after_all_once(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create_table(database)
    publisher = new_publisher(database)
    commit(database, "a", 1)
    publisher.publish_everything()
    assert dead(publisher, 0, "list") == {
        "count": 0,
        "rows": 0,
        "letters": [],
        "notes": [],
    }
    take_up_to(publisher, 100_000)
    publisher.start()
    commit(database, "a", 2, payload=LARGE)
    commit(database, "a", 3)
    commit(database, "gone", 1, payload=LARGE)
    commit(database, "b", 0, 1)
    publisher.until_published("a", [1, 3])
    publisher.until_published("b", [1])
    eventually(lambda: dead(publisher, 1, "list")["count"] == 3)
    database.execute("DELETE FROM events WHERE aggregate_id = 'gone'")

    found = dead(publisher, 1, "list")
    letters = {(x["aggregate_id"], x["version"]): x for x in found["letters"]}
    assert letters.keys() == {("a", 2), ("gone", 1), ("b", 0)}
    assert [x["created"] for x in found["letters"]] == sorted(
        (x["created"] for x in found["letters"]), reverse=True
    )
    assert letters["a", 2]["reason"].startswith("sink.record_refused")
    assert letters["a", 2]["payload_bytes"] == len(LARGE)
    assert (letters["a", 2]["in_store"], letters["gone", 1]["in_store"]) == (True, False)
    assert all(x["published"] is None and x["is_searched"] for x in found["letters"])
    assert len(dead(publisher, 1, "list", "--limit", "1")["letters"]) == 1
    shown = dead(publisher, 0, "show", "a", "2")
    assert shown["headers"]["ce_sequence"] == "2"
    assert dead(publisher, 0, "show", "b", "0")["first_bytes"] == "{}"
    assert "sink.record_refused" in publisher.command("dead", "show", "a", "2").stdout
    dead(publisher, 1, "show", "a", "3")

    # what cannot be published is not
    retried = publisher.command("dead", "retry", "a", "2", "--json")
    assert json.loads(retried.stdout)["result"]["outcome"] == "refused again"
    assert "larger than the topic's max.message.bytes" in json.loads(retried.stdout)["summary"]
    found = dead(publisher, 1, "list")
    assert (found["count"], found["rows"]) == (4, 3)
    of_one = [x["is_last"] for x in found["letters"] if x["aggregate_id"] == "a"]
    assert of_one == [True, False]
    text = publisher.command("dead", "list").stdout
    assert "4 dead letters of 3 rows, 0 rows published since" in text
    assert "earlier" in text
    assert dead(publisher, 1, "retry", "gone", "1")["outcome"] == "not in the store"
    assert dead(publisher, 1, "retry", "b", "0")["outcome"] == "below the first version"
    assert dead(publisher, 1, "retry", "a", "3")["outcome"] == "no dead letter"
    assert publisher.topic.versions("a") == [1, 3]

    take_up_to(publisher, 1_000_000)
    before = publisher_ends(publisher)
    # each of these two has searched the topic before the other's is there
    with ThreadPoolExecutor() as threads:
        answers = [threads.submit(ask, publisher, name, before) for name in ("one", "other")]
    outcomes = sorted(outcome for a in answers for outcome in a.result().values())
    assert outcomes == ["published", "published before"]
    publisher.until_published("a", [1, 3, 2])
    assert dead(publisher, 0, "retry", "a", "2")["outcome"] == "published before"
    [record] = [r for r in publisher.topic.read() if (r.key, r.version) == ("a", 2)]
    assert record.late
    assert record.value == LARGE
    status = json.loads(publisher.command("status", "--json").stdout)["result"]["status"]
    assert status["counters"]["late"] == 0, "nobody has committed late"
    letters = {(x["aggregate_id"], x["version"]): x for x in dead(publisher, 1, "list")["letters"]}
    assert letters["a", 2]["published"] == {
        "partition": record.partition,
        "offset": record.offset,
    }
    commit(database, "a", 4)
    publisher.until_published("a", [1, 3, 2, 4])
    assert publisher.stop() == 143
    done = publisher.command("verify", "--json")
    assert done.returncode == 0, done.stdout
    assert dead(publisher, 1, "retry", "a", "2")["outcome"] == "not running"


def test_of_equal_events_only_the_one_with_too_large_headers_is_refused(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """Events of one aggregate with the same payload differ in nothing but their headers."""
    create_table(database)
    publisher = new_publisher(database)
    commit(database, "first", 1)
    publisher.publish_everything()
    take_up_to(publisher, 100_000)
    large = json.dumps({"note": Random(2).randbytes(150_000).hex()})
    aggregates = [f"a-{n}" for n in range(5)]
    with transaction(database) as cursor:
        for aggregate_id in aggregates:
            insert(cursor, aggregate_id, 1, b"{}")
            insert(cursor, aggregate_id, 2, b"{}", metadata=large)
            insert(cursor, aggregate_id, 3, b"{}")
        cursor.connection.commit()
    publisher.publish_everything()

    assert {a: publisher.topic.versions(a) for a in aggregates} == {a: [1, 3] for a in aggregates}
    letters = {(x["aggregate_id"], x["version"]) for x in dead(publisher, 1, "list")["letters"]}
    assert letters == {(a, 2) for a in aggregates}


def ask(publisher: Publisher, name: str, ends: tuple[int, ...]) -> dict[int, str]:
    """What the publisher says of a request to publish version 2 of a; nothing: it is not there."""
    request = Request(name, "publish", "a", 2, searched=ends)
    return ask_shards(StateDir(publisher.state), request, 60) or {}


def publisher_ends(publisher: Publisher) -> tuple[int, ...]:
    """By partition, where the topic ends for a reader of what is committed."""
    from eventpub.sink.topics import list_offsets

    sink = settings.load(publisher.config, {}, {}).config.sink
    places = [(sink.topic, number) for number in range(publisher.topic.partitions())]
    ends = list_offsets(Clients(sink), places, "latest", committed=True)
    return tuple(ends[place] for place in places)


@pytest.mark.parametrize(
    ("step", "outcome"), [("before_index", "published before"), ("before_commit", "published")]
)
def test_a_retry_whose_publisher_died_is_done_once(
    database: FreshDatabase, new_publisher: NewPublisher, step: str, outcome: str
) -> None:
    create_table(database)
    publisher = new_publisher(database)
    commit(database, "a", 1)
    publisher.publish_everything()
    take_up_to(publisher, 100_000)
    commit(database, "a", 2, payload=LARGE)
    commit(database, "a", 3)
    publisher.publish_everything()
    assert publisher.topic.versions("a") == [1, 3]
    take_up_to(publisher, 1_000_000)
    marker = publisher.folder / "marker"
    # the next transaction is that of the retry
    publisher.start(environment={"EVENTPUB_FAILPOINT": f"{step}:1:{marker}"})
    ends = publisher_ends(publisher)

    def ask_until_it_stands() -> None:
        while not marker.exists():  # at first it is not there yet
            ask(publisher, "dies", ends)
            time.sleep(0.2)

    asked = threading.Thread(target=ask_until_it_stands, daemon=True)
    asked.start()
    eventually(marker.exists)
    publisher.kill()
    asked.join(60)
    publisher.start()
    if publisher.settings["run"]["engine"] == "spark":
        outcome = "published before"  # its batch was decided, and is repeated first
    assert [*eventually(lambda: ask(publisher, "again", ends)).values()] == [outcome]
    publisher.until_published("a", [1, 3, 2])
    commit(database, "a", 4)
    publisher.until_published("a", [1, 3, 2, 4])


@pytest.mark.engines("threads")
def test_what_retention_has_removed_since_the_letter_may_have_been_its_row(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    create_table(database)
    publisher = new_publisher(database)

    def searched() -> dict[str, bool]:
        return {x["aggregate_id"]: x["is_searched"] for x in dead(publisher, 1, "list")["letters"]}

    commit(database, "old", 0, 1)
    for n in range(40):
        commit(database, f"a{n}", 1)
    publisher.publish_everything()
    assert searched() == {"old": True}
    empty_by_retention(publisher)
    for n in range(40):
        commit(database, f"b{n}", 1)
    time.sleep(0.01)
    commit(database, "new", 0)
    publisher.publish_everything()
    assert searched() == {"old": False, "new": True}
    assert "not known" in publisher.command("dead", "list").stdout
