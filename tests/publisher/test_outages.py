"""Scenarios C5 and C6: the broker or the database is away, answers nothing, or breaks off."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pymysql
import pytest

from eventpub.local.servers import Database, Kafka
from eventpub.ops.asking import ask_running
from eventpub.state import StateDir
from tests.conftest import FreshDatabase
from tests.publisher.conftest import FAST
from tests.publisher.harness import (
    Publisher,
    compare,
    create_table,
    eventually,
    insert,
    transaction,
)
from tests.servers.databases import mysql
from tests.servers.kafka import kafka
from tests.servers.signals import pause, resume
from tests.sink.conftest import broker_with_doors
from tests.sink.test_hazards import WRITE_TXN_MARKERS

AWAY = 6.0
"""Seconds; longer than the transaction's timeout and than those of the clients."""

SETTINGS = FAST | {
    "sink": {
        "partitions": 4,
        "transaction_timeout": "5s",
        "properties": {"socket.timeout.ms": 3000},
    },
    "store": {"connect_timeout": "3s"},
}


class World:
    """A broker and a database of their own, and one publisher between them."""

    def __init__(self, broker: Kafka, server: Database, publisher: Publisher) -> None:
        self.broker, self.server, self.publisher = broker, server, publisher
        self.database = FreshDatabase(server, "eventpub")
        self._commits = 0

    def is_running(self) -> bool:
        """Whether the publisher's process is still there."""
        process = self.publisher.process
        return process is not None and process.poll() is None

    def position(self) -> int:
        """Up to where the publisher says that everything is published, µs."""
        state = json.loads((self.publisher.state / "progress.json").read_text())
        return int(state["position"])

    def settled_position(self) -> int:
        """The position once it stands still for longer than a batch takes."""
        seen = [self.position()]
        while len(seen) < 6 or len({*seen[-6:]}) > 1:
            time.sleep(0.5)
            seen.append(self.position())
        return seen[-1]

    @contextmanager
    def writer(self) -> Iterator[None]:
        """Commits an event every few milliseconds, and the same one again after an error."""
        self._commits += 1
        stop, name = threading.Event(), f"writer-{self._commits}"

        def write() -> None:
            number = 0
            while not stop.is_set():
                try:
                    with self.database.connect(connect_timeout=2) as connection:
                        while not stop.wait(0.005):
                            with connection.cursor() as cursor:
                                insert(cursor, f"{name}-{number % 20}", number // 20 + 1)
                            number += 1
                except pymysql.err.IntegrityError:  # the last answer was lost, the event was not
                    number += 1
                except pymysql.err.MySQLError:
                    stop.wait(0.1)

        thread = threading.Thread(target=write)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def catches_up(self) -> None:
        """Everything that is committed gets published, exactly once, by the same process."""
        upto = self.database.execute(
            "SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
        )[0][0]
        insert_one(self.database, f"marker-{upto}")
        self.publisher.until_published(f"marker-{upto}", [1])
        eventually(lambda: self.position() >= upto)
        differences = compare(self.database, self.publisher.topic)
        assert not differences, differences
        assert self.is_running()
        eventually(lambda: self.status()["lag"]["seconds"] == 0)
        eventually(lambda: not self.wrong())

    def status(self) -> dict[str, Any]:
        """How the publisher says that it stands."""
        found = ask_running(StateDir(self.publisher.state), "status")
        assert found is not None
        return found

    def wrong(self) -> set[str]:
        """The checks that are wrong."""
        return {check["name"] for check in self.status()["checks"] if check["state"] == "error"}

    def lag_grows(self) -> float:
        """The lag, s, which gets no smaller while something is away."""
        seen = []
        for _ in range(6):
            seen.append(float(self.status()["lag"]["seconds"]))
            time.sleep(0.5)
        assert seen == sorted(seen), seen
        assert seen[-1] > seen[0] + 1, seen
        return seen[-1]


def insert_one(database: FreshDatabase, aggregate_id: str) -> None:
    """One event of an aggregate of its own, committed at once."""
    with database.connect() as connection, connection.cursor() as cursor:
        insert(cursor, aggregate_id, 1)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One publisher for all outages of this file."""
    with (
        kafka(tmp_path_factory.mktemp("kafka")) as broker,
        mysql(tmp_path_factory.mktemp("mysql"), options=["--skip-log-bin"]) as server,
    ):
        database = FreshDatabase(server, "eventpub")
        create_table(database)
        # an account of its own, so that its connections can be told from the writers'
        database.execute("CREATE USER reader@'%' IDENTIFIED BY 'secret'")
        database.execute("GRANT SELECT ON eventpub.events TO reader@'%'")
        publisher = Publisher(
            tmp_path_factory.mktemp("outages"),
            database.url_of("reader", "secret"),
            "outages",
            broker.bootstrap_servers,
            {**SETTINGS, "store": SETTINGS["store"] | {"url": database.url_of("reader", "secret")}},
        )
        world = World(broker, server, publisher)
        publisher.start()
        insert_one(database, "warm-up")
        publisher.until_published("warm-up", [1])
        eventually((publisher.state / "progress.json").exists)
        yield world
        assert publisher.stop() == 143


@pytest.mark.parametrize("how", ["killed", "hangs"])
def test_c5_kafka_is_away_and_comes_back(world: World, how: str) -> None:
    """The position stands still meanwhile: it is never ahead of what is published."""
    broker = world.broker
    with world.writer():
        time.sleep(1.0)
        pause(broker) if how == "hangs" else broker.kill()
        before = world.settled_position()  # a batch that was being committed gets to its end
        time.sleep(AWAY)
        assert world.position() == before
        assert world.is_running()
        assert world.lag_grows() > AWAY / 2
        eventually(lambda: "broker" in world.wrong())
        resume(broker) if how == "hangs" else broker.start()
    world.catches_up()


def test_a5_a_broker_that_is_away_while_only_a_hold_waits(world: World) -> None:
    """One shard's runner fails without a row to publish; who writes afterwards does not wait."""
    time.sleep(5.0)  # tasks idle
    with world.database.connect() as connection, connection.cursor() as cursor:
        insert(cursor, "above-a-gap", 2)
    world.broker.kill()
    time.sleep(AWAY)  # the gap is given up meanwhile, which cannot be published
    listed = world.publisher.command("gaps", "list", "--json")
    world.broker.start()
    found = json.loads(listed.stdout)
    assert (listed.returncode, found["error"]["code"]) == (3, "sink.unreachable")
    assert [hold["aggregate_id"] for hold in found["result"]["open"]] == ["above-a-gap"]
    began = time.monotonic()
    world.publisher.until_published("above-a-gap", [2])
    for number in range(8):  # of both shards
        insert_one(world.database, f"after-the-gap-{number}")
    for number in range(8):
        world.publisher.until_published(f"after-the-gap-{number}", [1])
    print(f"{time.monotonic() - began:.1f} s")
    assert world.is_running()


def test_c5_killed_while_kafka_is_away_the_position_is_not_ahead_of_the_topic(
    world: World,
) -> None:
    with world.writer():
        time.sleep(1.0)
        world.broker.kill()
        time.sleep(2.0)
        world.publisher.kill()
        position = world.position()
    world.broker.start()
    stored = world.database.execute(
        "SELECT aggregate_id, version FROM events WHERE"
        " TIMESTAMPDIFF(MICROSECOND, '1970-01-01 00:00:00', CONVERT_TZ(create_time,"
        " @@session.time_zone, '+00:00')) <= %s",
        (position,),
    )
    assert stored
    # what was committed just before shows once the broker, up again, has written its markers
    eventually(
        lambda: set(stored) <= {(r.key, r.version) for r in world.publisher.topic.stream()}, 60
    )
    world.publisher.start()
    world.catches_up()


@pytest.mark.parametrize("how", ["killed", "hangs"])
def test_c6_mysql_is_away_and_comes_back(world: World, how: str) -> None:
    server = world.server
    with world.writer():
        time.sleep(1.0)
        pause(server) if how == "hangs" else server.kill()
        time.sleep(AWAY)  # for longer than what was measured last is shown
        assert world.is_running()
        assert world.lag_grows() > AWAY / 4
        eventually(lambda: {"database", "boundary"} <= world.wrong())
        resume(server) if how == "hangs" else server.start()
    world.catches_up()


def test_c6_connections_that_die_in_the_middle_of_a_result(world: World) -> None:
    """Every connection of the publisher, again and again while it drains a backlog."""
    with transaction(world.database) as cursor:  # all at once, so that full pages are read
        for number in range(20):
            cursor.execute(
                "INSERT INTO events (aggregate_id, version, event_type, payload)"
                " WITH RECURSIVE n (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM n WHERE n < 1000)"
                " SELECT CONCAT('backlog-', %s, '-', a.n %% 100),"
                " 1 + (a.n - 1) DIV 100 + 10 * (b.n - 1), 'happened', REPEAT('x', 500)"
                " FROM n AS a JOIN n AS b ON b.n <= 5",
                (number,),
            )
        cursor.connection.commit()
    in_the_middle = 0
    with world.server.connect() as connection, connection.cursor() as cursor:
        deadline = time.monotonic() + 12
        while time.monotonic() < deadline and in_the_middle < 5:
            time.sleep(0.002)
            cursor.execute(
                "SELECT id, COALESCE(info, '') FROM information_schema.processlist"
                " WHERE user = 'reader'"
            )
            found = cursor.fetchall()
            reading = [i for i, text in found if " BETWEEN " in text and "ORDER BY" in text]
            if not reading:
                continue
            in_the_middle += 1
            for number, _ in found:
                with suppress(pymysql.err.MySQLError):
                    cursor.execute(f"KILL {int(number)}")
            time.sleep(0.3)
    assert in_the_middle >= 1
    world.catches_up()


def test_c5_killed_while_it_commits_the_last_event(
    tmp_path: Path, database: FreshDatabase, topic_name: str
) -> None:
    """It may leave the transaction open when it is back; nobody commits anything afterwards."""
    create_table(database)
    folder = tmp_path / "kafka"
    folder.mkdir()
    with broker_with_doors(folder) as doors:
        publisher = Publisher(tmp_path, database.url, topic_name, doors.open, SETTINGS)
        publisher.start()
        insert_one(database, "warm-up")
        publisher.until_published("warm-up", [1])
        for number in range(3):
            time.sleep(1.0)  # markers of what was before
            doors.to_itself.strike_next(WRITE_TXN_MARKERS, "held")
            insert_one(database, f"last-{number}")
            eventually(lambda: doors.to_itself.has_struck, 30)
            doors.server.kill()
            doors.to_itself.drop()
            doors.server.start()
            publisher.until_published(f"last-{number}", [1])
        assert not compare(database, publisher.topic)
        assert publisher.stop() == 143
