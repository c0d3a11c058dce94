"""`verify` beside a publisher: one that works, one that is paused, one that is dead."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from bench.usage import Usage, one
from eventpub.config import Config
from eventpub.ops.verify import verify
from tests.conftest import FreshDatabase
from tests.publisher.conftest import NewPublisher
from tests.publisher.harness import Publisher, commit, create_table, eventually, insert, transaction

pytestmark = pytest.mark.parametrize("database", ["mysql"], indirect=True)


def verified(publisher: Publisher) -> tuple[int, dict[str, Any]]:
    """Exit status and answer."""
    done = publisher.command("verify", "--json")
    return done.returncode, json.loads(done.stdout)


@contextmanager
def writers(database: FreshDatabase, number: int = 3) -> Iterator[None]:
    """Transactions of ten events, one after the other, some 100 ms each."""
    stop = threading.Event()

    def write(name: str) -> None:
        version = 0
        while not stop.is_set():
            with transaction(database) as cursor:
                for _ in range(10):
                    version += 1
                    insert(cursor, name, version)
                    stop.wait(0.01)
                cursor.connection.commit()

    threads = [threading.Thread(target=write, args=(f"w-{n}",)) for n in range(number)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_only_a_publisher_that_stands_still_is_behind(
    database: FreshDatabase, publisher: Publisher
) -> None:
    publisher.start()
    with writers(database):
        eventually(lambda: publisher.topic.versions("w-0"))
        for _ in range(3):
            status, answer = verified(publisher)
            assert (status, answer["ok"]) == (0, True), answer
            assert answer["result"]["events"] > 0
            assert answer["result"]["behind"] == 0

        assert publisher.command("pause").returncode == 0
        eventually(lambda: verified(publisher)[0] == 1)
        _, answer = verified(publisher)
        assert answer["result"]["missing"] == 0
        assert answer["result"]["behind"] > 10
        publisher.kill()
        assert verified(publisher)[1]["result"]["behind"] > 10
        assert publisher.command("resume").returncode == 0
        status, answer = verified(publisher)
        assert status == 1
        assert answer["result"]["behind"] > 10
        assert answer["summary"].endswith("recorded position")

        publisher.start()
        eventually(lambda: verified(publisher)[0] == 0)
    publisher.stop()


def test_a_row_that_commits_late_and_is_published_while_verify_runs_is_not_missing(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """The publisher stands still from its commit until table and topic are read to their ends."""
    create_table(database)
    publisher = new_publisher(database, read={"watermark": "off"})
    publisher.start()
    with transaction(database) as late:
        with database.connect() as connection, connection.cursor() as cursor:
            insert(cursor, "first", 1)
            publisher.until_published("first", [1])
            insert(late, "late", 1)
            insert(cursor, "beside", 1)
        publisher.until_published("beside", [1])
        time.sleep(2.0)  # it knows of no event any more, and has no transaction open
        assert publisher.process is not None
        publisher.process.send_signal(signal.SIGSTOP)
        late.connection.commit()

    def go_on(doing: str, _: float) -> None:
        if doing.startswith("comparing") and publisher.process is not None:
            publisher.process.send_signal(signal.SIGCONT)

    config = Config.model_validate(publisher.settings)
    found = verify(config, on_progress=go_on)
    assert found.ok, found.to_dict()
    assert (found.events, found.accounted["arrived"]) == (3, 1)
    assert publisher.topic.versions("late") == [1]
    publisher.stop()


def test_events_of_any_size_are_compared_in_bounded_memory(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """With the client's limit far above what verify fetches at once, as large events need it."""
    create_table(database)
    publisher = new_publisher(
        database,
        **{"sink.properties": {"message.max.bytes": "20000000"}, "sink": {"partitions": 2}},
    )
    admin = AdminClient({"bootstrap.servers": publisher.topic.bootstrap_servers})
    topic = NewTopic(publisher.topic.name, 2, 1, config={"max.message.bytes": "20000000"})
    admin.create_topics([topic])[topic.topic].result(30)
    commit(database, "small", 1, 2)
    for version in range(1, 25):
        commit(database, "large", version, payload=os.urandom(1_000) * 16_000)
    publisher.publish_everything()
    assert len(publisher.topic.read()) == 26

    command = [publisher.program, "verify", "--json", "--config", str(publisher.config)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=publisher.folder)
    with Usage(one("verify", process.pid)) as usage:
        out, _ = process.communicate()
    answer = json.loads(out)
    assert process.returncode == 0, answer
    assert answer["result"]["events"] == answer["result"]["records"] == 26
    assert usage.peak_memory["verify"] < 500e6, usage.peak_memory


def test_an_event_that_is_held_is_said_and_is_no_difference(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """A comparison at night called what waits for a version that is not there missing."""
    create_table(database)
    publisher = new_publisher(database, gaps={"backoff_base": "10m", "max_backoff": 3})
    commit(database, "a", 1, 3, 4)
    commit(database, "b", 1)
    publisher.start()
    publisher.until_published("b", [1])
    eventually(lambda: publisher.answer(1, "gaps", "list")["open"])
    status, answer = verified(publisher)
    result = answer["result"]
    assert (status, result["held"], result["missing"]) == (0, 2, 0), answer
    assert {e["note"] for e in result["examples"]["held"]} == {"waits for version 2"}
    assert "2 events held: not published yet" in publisher.command("verify").stdout
    publisher.kill()
