"""Scenarios F1 to F3 and F11: which database this is, and whether its rows can be trusted."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from eventpub.local.servers import Database
from tests.conftest import FreshDatabase
from tests.publisher.conftest import NewPublisher
from tests.publisher.harness import (
    Publisher,
    Record,
    Topic,
    compare,
    create_table,
    eventually,
    insert,
)
from tests.servers.databases import mysql

AGGREGATES = [f"order-{number}" for number in range(20)]


def write(database: FreshDatabase, versions: list[int], payload: bytes = b"{}") -> None:
    """The same versions of all aggregates, committed together."""
    with database.connect(autocommit=False) as connection, connection.cursor() as cursor:
        for version in versions:
            for aggregate_id in AGGREGATES:
                insert(cursor, aggregate_id, version, payload)
        connection.commit()


def restore(database: FreshDatabase, version: int) -> None:
    """As a backup of an earlier time would leave the table."""
    database.execute("DELETE FROM events WHERE version > %s", (version,))


def letters(publisher: Publisher) -> list[Record]:
    """The dead letters."""
    bootstrap_servers = publisher.topic.bootstrap_servers
    return Topic(bootstrap_servers, f"{publisher.topic.name}.dead").read()


def until_dead(publisher: Publisher, keys: set[tuple[str, int]]) -> list[Record]:
    """Wait for exactly these dead letters, each once."""

    def found() -> list[Record]:
        assert publisher.process is None or publisher.process.poll() is None, publisher.words()
        return [*letters(publisher)]

    eventually(lambda: len(found()) >= len(keys), every=0.5)
    dead = found()
    assert sorted((r.key, r.version) for r in dead) == sorted(keys)
    assert all(r.headers["eventpub_reason"].startswith(b"admission.version_conflict") for r in dead)
    return dead


def every(*versions: int) -> set[tuple[str, int]]:
    """These versions of all aggregates."""
    return {(a, v) for a in AGGREGATES for v in versions}


def last_published(publisher: Publisher, version: int) -> None:
    """Wait until all aggregates have come so far."""
    publisher.until_published(AGGREGATES[0], list(range(1, version + 1)))
    eventually(lambda: len(publisher.topic.follow()) == len(AGGREGATES) * version, 30)


def test_a13_f3_versions_written_anew_after_a_restore_are_dead_letters(
    database: FreshDatabase, publisher: Publisher
) -> None:
    """While the publisher runs, while it is stopped, and when its index is lost."""
    write(database, [1, 2, 3])
    publisher.start()
    last_published(publisher, 3)
    restore(database, 1)
    write(database, [2, 3], b'{"written": "anew"}')
    dead = until_dead(publisher, every(2, 3))
    assert {r.value for r in dead} == {b'{"written": "anew"}'}
    write(database, [4])
    last_published(publisher, 4)
    publisher.until_said("admission.version_conflict")

    publisher.kill()
    restore(database, 3)
    write(database, [4], b'{"written": "again"}')
    publisher.start()
    until_dead(publisher, every(2, 3, 4))
    write(database, [5])
    last_published(publisher, 5)

    publisher.kill()
    publisher.lose_index()
    publisher.start()
    write(database, [6])
    last_published(publisher, 6)
    until_dead(publisher, every(2, 3, 4))
    publisher.kill()


def test_a13_f3_two_versions_written_anew_at_one_time_are_both_dead_letters(
    database: FreshDatabase, publisher: Publisher
) -> None:
    """The second is committed behind the reader, when the index of the first is lost."""
    write(database, [1, 2, 3])
    publisher.start()
    last_published(publisher, 3)
    restore(database, 1)
    at = ago(0)
    with database.connect() as connection, connection.cursor() as cursor:
        cursor.execute("SET time_zone = '+00:00'")
        for aggregate_id in AGGREGATES:
            insert(cursor, aggregate_id, 2, create_time=at)
        until_dead(publisher, every(2))
        publisher.kill()
        publisher.lose_index()
        publisher.start()
        write(database, [4])
        eventually(lambda: len(publisher.topic.follow()) == len(AGGREGATES) * 4)
        for aggregate_id in AGGREGATES:
            insert(cursor, aggregate_id, 3, create_time=at)
    until_dead(publisher, every(2, 3))
    publisher.kill()


def test_a13_f3_another_store_with_this_state_stops_the_publisher(
    database: FreshDatabase, publisher: Publisher
) -> None:
    """Of the same name: more conflicts in a row than `sink.dead_limit`, and no dead letter."""
    write(database, [1, 2])
    publisher.settings["sink"]["dead_limit"] = 10
    publisher.start()
    last_published(publisher, 2)
    publisher.kill()
    database.execute("DROP TABLE events")
    create_table(database)
    write(database, [1, 2, 3], b'{"of": "another store"}')
    publisher.start()
    assert publisher.finish(60) == 3
    assert "store.other_history" in publisher.words()
    assert "store.url" in publisher.words()
    assert letters(publisher) == []
    assert len(publisher.topic.read()) == len(AGGREGATES) * 2


def test_f11_published_rows_may_be_deleted_archived_and_made_anonymous(
    database: FreshDatabase, publisher: Publisher
) -> None:
    """None of it is an error, nor a conflict, whatever the index knows."""
    write(database, [1, 2, 3])
    publisher.start()
    last_published(publisher, 3)
    database.execute("DELETE FROM events WHERE version = 1")
    database.execute("UPDATE events SET payload = '{}', event_type = 'anonymous' WHERE version = 2")
    write(database, [4])
    last_published(publisher, 4)
    publisher.kill()
    publisher.lose_index()
    publisher.start()
    database.execute("DELETE FROM events WHERE version < 4")
    write(database, [5])
    last_published(publisher, 5)
    assert letters(publisher) == []
    publisher.kill()


@pytest.mark.engines("threads", "here")
@pytest.mark.parametrize("loss", ["index", "progress.json"])
def test_f11_rows_made_anonymous_where_a_version_may_have_two(
    database: FreshDatabase, publisher: Publisher, loss: str
) -> None:
    """They are read again; more of them than `sink.dead_limit` would stop the publisher."""
    database.execute("ALTER TABLE events DROP INDEX aggregate_id, ADD KEY (aggregate_id, version)")
    write(database, [*range(1, 9)])
    publisher.publish_everything()
    database.execute("UPDATE events SET payload = 'gone' WHERE version < 8")
    if loss == "index":
        publisher.lose_index()
    else:
        (publisher.state / loss).unlink()
    write(database, [8], b"another")
    write(database, [9])
    publisher.publish_everything()
    assert len(publisher.topic.read()) == len(AGGREGATES) * 9
    assert {(r.key, r.version) for r in letters(publisher)} == {(a, 8) for a in AGGREGATES}
    assert len(letters(publisher)) == len(AGGREGATES)


Pair = tuple[FreshDatabase, FreshDatabase]


def execute(server: Database, *statements: str) -> None:
    """As root, one after the other."""
    with (
        server.connect(None, autocommit=True, ssl_disabled=True) as connection,
        connection.cursor() as cursor,
    ):
        for statement in statements:
            cursor.execute(statement)


@pytest.fixture(scope="module")
def mysql_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A primary and its replica, which is writable, as a replica is by default."""
    folder: Path = tmp_path_factory.mktemp("pair")
    common = ["--gtid-mode=ON", "--enforce-gtid-consistency=ON", "--log-bin=bin"]
    common += ["--innodb-flush-log-at-trx-commit=2", "--sync-binlog=0"]
    with (
        mysql(folder / "primary", options=["--server-id=1", *common]) as primary,
        mysql(folder / "replica", options=["--server-id=2", *common]) as replica,
    ):
        follow(replica, primary)
        pair = FreshDatabase(primary, "shop"), FreshDatabase(replica, "shop")
        execute(primary, "CREATE DATABASE shop", "CREATE USER plain")
        execute(primary, "GRANT SELECT ON shop.* TO plain")
        create_table(pair[0])
        eventually(lambda: has_table(pair[1]))
        yield pair


def has_table(database: FreshDatabase) -> bool:
    """Whether the event table has been applied."""
    with (
        database.server.connect(None, ssl_disabled=True) as connection,
        connection.cursor() as cursor,
    ):
        cursor.execute(
            "SELECT 1 FROM information_schema.tables"
            " WHERE table_schema = 'shop' AND table_name = 'events'"
        )
        return bool(cursor.fetchall())


class Gateway:
    """An address that leads to one server, and later to another one."""

    def __init__(self, port_behind: int) -> None:
        self.port_behind = port_behind
        self._open: list[socket.socket] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.close()
        self.cut()

    def cut(self) -> None:
        """End all connections."""
        while self._open:
            with suppress(OSError):
                self._open.pop().shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                behind = socket.create_connection(("127.0.0.1", self.port_behind))
                self._open += [client, behind]
                for one, other in ((client, behind), (behind, client)):
                    threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(65_536):
                other.sendall(data)
        for end in (one, other):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def follow(replica: Database, primary: Database) -> None:
    """Replicate from there from now on."""
    execute(
        replica,
        "CHANGE REPLICATION SOURCE TO SOURCE_HOST = '127.0.0.1', SOURCE_USER = 'root',"
        f" SOURCE_PORT = {primary.port}, SOURCE_AUTO_POSITION = 1, GET_SOURCE_PUBLIC_KEY = 1",
        "START REPLICA",
    )


def refused(publisher: Publisher) -> str:
    """What `doctor` and `run` say, both of which refuse the server; in the words of `run`."""
    doctor = publisher.command("doctor", "--json")
    checks = {c["name"]: c for c in json.loads(doctor.stdout)["result"]["checks"]}
    check = checks["event store: server"]
    assert (check["status"], check["code"]) == ("wrong", "store.replica"), check
    assert doctor.returncode in {1, 3}
    before = len(publisher.words())
    publisher.start()
    assert publisher.finish(60) == 3
    said = publisher.log.read_text()[before:]
    assert "store.replica" in said
    assert "allow_replica" in said
    return said


def test_a2_f2_a_replica_is_refused_whatever_its_state(
    mysql_pair: Pair, new_publisher: NewPublisher
) -> None:
    """Writable, as by default; stopped; read only."""
    primary, replica = mysql_pair
    publisher = new_publisher(replica)
    assert f"replica of 127.0.0.1:{primary.server.port}" in refused(publisher)
    execute(replica.server, "STOP REPLICA")
    assert "replica of" in refused(publisher)
    # an account that sees nothing but the table sees that it is read only
    execute(replica.server, "SET GLOBAL read_only = ON")
    publisher.settings["store"]["url"] = replica.url_of("plain")
    assert "read only" in refused(publisher)
    publisher.settings["store"]["allow_replica"] = True
    publisher.start()
    publisher.until_said("not_guaranteed")
    publisher.kill()
    execute(replica.server, "SET GLOBAL read_only = OFF", "START REPLICA")


def test_a2_f3_a_primary_that_is_demoted_is_not_read_and_the_next_one_is(
    mysql_pair: Pair, new_publisher: NewPublisher
) -> None:
    """The address leads to the old primary, which becomes read only, and then to the new one."""
    primary, replica = mysql_pair
    with Gateway(primary.server.port) as gateway:
        publisher = new_publisher(primary)
        url = primary.url.replace(f":{primary.server.port}", f":{gateway.port}")
        publisher.settings["store"]["url"] = url
        write(primary, [1])
        publisher.start()
        last_published(publisher, 1)
        eventually(lambda: replica.execute("SELECT COUNT(*) FROM events")[0][0] == 20)
        execute(primary.server, "SET GLOBAL super_read_only = ON")
        publisher.until_said("store.replica")
        # the new primary goes on; the old one applies it late
        execute(replica.server, "STOP REPLICA", "RESET REPLICA ALL")
        write(replica, [2])
        time.sleep(2)
        follow(primary.server, replica.server)
        eventually(lambda: primary.execute("SELECT COUNT(*) FROM events")[0][0] == 40)
        time.sleep(2)
        assert len(publisher.topic.read()) == 20
        gateway.port_behind = replica.server.port
        gateway.cut()
        last_published(publisher, 2)
        publisher.until_said("another database server answers")
        publisher.kill()


@contextmanager
def writing(database: FreshDatabase, zone: str) -> Iterator[list[tuple[str, int]]]:
    """A writer whose session keeps a time zone, at some four events a second."""
    written: list[tuple[str, int]] = []
    ends = threading.Event()

    def write_on() -> None:
        with database.connect() as connection, connection.cursor() as cursor:
            cursor.execute("SET time_zone = %s", (zone,))
            while not ends.wait(0.25):
                insert(cursor, f"w-{len(written)}", 1)
                written.append((f"w-{len(written)}", 1))

    writer = threading.Thread(target=write_on)
    writer.start()
    try:
        yield written
    finally:
        ends.set()
        writer.join()


def test_a3_f1_writers_whose_sessions_keep_another_zone_stop_the_publisher(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """Their rows are born an hour behind the reader; with the right zone all are published."""
    create_table(database, time="DATETIME(6)")
    publisher = new_publisher(database, store={"time_zone": "+00:00"})
    with writing(database, "-01:00") as written:
        publisher.start()
        doctor = publisher.command("doctor", "--json")
        (check,) = [
            c
            for c in json.loads(doctor.stdout)["result"]["checks"]
            if c["code"] == "store.rows_in_past"
        ]
        assert check["status"] == "wrong"
        assert publisher.finish(120) == 3
        assert "store.rows_in_past" in publisher.words()
        assert "store.time_zone" in publisher.words()
        publisher.settings["store"]["time_zone"] = "-01:00"
        publisher.start()
        publisher.until_published("w-0", [1])
        reached = len(written)
        eventually(lambda: len(publisher.topic.follow()) >= reached)
    eventually(lambda: len(publisher.topic.follow()) == len(written))
    assert not compare(database, publisher.topic)
    assert letters(publisher) == []
    publisher.kill()


def test_a3_rows_of_the_past_and_of_the_future_are_said_and_published(
    database: FreshDatabase, publisher: Publisher
) -> None:
    """One that was created an hour ago, an import of many, and one of in an hour."""
    publisher.settings["recount"] = {"rows_in_past": "count"}
    publisher.start()
    write(database, [1])
    last_published(publisher, 1)
    with database.connect() as connection, connection.cursor() as cursor:
        cursor.execute("SET time_zone = '+00:00'")
        insert(cursor, "late", 1, create_time=ago(1))
        publisher.until_published("late", [1], 30)
        for number in range(5):
            for second in range(200):
                at = ago(2 + number) + timedelta(seconds=second)
                insert(cursor, f"imported-{number}", second + 1, create_time=at)
        for number in range(5):
            publisher.until_published(f"imported-{number}", list(range(1, 201)))
        publisher.until_said("store.rows_in_past")
        insert(cursor, "early", 1, create_time=ago(-1))
        publisher.until_said("store.rows_in_future")
    doctor = publisher.command("doctor", "--json")
    checks = json.loads(doctor.stdout)["result"]["checks"]
    assert [c["status"] for c in checks if c["code"] == "store.rows_in_future"] == ["warn"]
    assert publisher.topic.versions("early") == []
    publisher.kill()


def test_a3_late_commits_on_a_quiet_table_do_not_stop_the_publisher(
    database: FreshDatabase, publisher: Publisher
) -> None:
    """Of transactions that were open for longer than the horizon, and whose end nobody may see."""
    publisher.settings["recount"] = {"horizon": "30s"}
    with database.connect() as connection, connection.cursor() as cursor:
        cursor.execute("SET time_zone = '+00:00'")
        insert(cursor, "early", 1, create_time=ago(0.5))
        publisher.start()
        publisher.until_published("early", [1])
        time.sleep(3.0)  # the newest rows are looked at every second, from now on
        for number in range(6):  # in the order of their ids, as they began
            insert(cursor, f"late-{number}", 1, create_time=ago(0.2 - number * 0.01))
            publisher.until_published(f"late-{number}", [1], 30)
    publisher.until_said("store.rows_in_past")
    assert publisher.stop() == 143


@pytest.mark.engines("threads", "here")
def test_a3_rows_that_are_born_in_the_past_between_two_runs_are_published_by_the_second(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """As with a timer: each run is too short to see that they keep coming."""
    create_table(database)
    publisher = new_publisher(database, recount={"horizon": "5s"})
    write(database, [1])
    publisher.start()
    last_published(publisher, 1)
    eventually(lambda: json.loads((publisher.state / "progress.json").read_text()).get("newest"))
    time.sleep(2)
    publisher.kill()
    with database.connect() as connection, connection.cursor() as cursor:
        cursor.execute("SET time_zone = '+00:00'")
        for version in (1, 2, 3):
            insert(cursor, "late", version, create_time=ago(1))
    publisher.start()
    publisher.until_published("late", [1, 2, 3])
    publisher.until_said("store.rows_in_past")
    publisher.kill()


def ago(hours: float) -> datetime:
    """UTC."""
    return datetime.now(UTC).replace(tzinfo=None) - timedelta(hours=hours)
