"""`spark.readStream.format("eventstore")` in a user's own job."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from pyspark.sql.streaming.datasource import ReadMaxRows

from eventpub.config import Store
from eventpub.errors import ConfigError, StoreError
from eventpub.local import Database
from eventpub.spark.boundary import Bounds
from eventpub.spark.passed import told
from eventpub.spark.recount import bucket_of
from eventpub.spark.source import EventStoreStreamReader, SourceError, Window
from eventpub.spark.state import StateDir
from eventpub.store import Watermark
from eventpub.store.connection import connect_for_reading
from tests.conftest import FreshDatabase
from tests.publisher.harness import create_table, insert, transaction
from tests.tcp_proxy import TcpProxy

SCHEMA = (
    "struct<aggregate_id:string,version:bigint,event_type:string,payload:binary,"
    "metadata:string,create_time:timestamp>"
)

CREATED = "SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', create_time) FROM events"


def run_job(database: FreshDatabase, checkpoint: Path) -> list[dict[str, Any]]:
    """What the job prints."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.spark.own_job", database.url, str(checkpoint)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_a_job_of_ones_own_reads_pages_and_goes_on_where_it_was(
    database: FreshDatabase, tmp_path: Path
) -> None:
    create_table(database)
    with transaction(database) as cursor:
        for version in range(1, 31):
            insert(cursor, "a", version, b'{"n": 1}', metadata='{"tenant": "t"}')
        cursor.connection.commit()
    time.sleep(0.2)
    schema, *events = run_job(database, tmp_path / "checkpoint")
    assert schema["schema"] == SCHEMA
    assert sorted(e["version"] for e in events) == list(range(2, 31))
    assert len({e["batch"] for e in events}) == 3
    assert events[0]["payload"] == '{"n": 1}'
    with transaction(database) as cursor:
        insert(cursor, "b", 2)
        cursor.connection.commit()
    time.sleep(0.2)
    _, *events = run_job(database, tmp_path / "checkpoint")
    assert [(e["aggregate_id"], e["version"]) for e in events] == [("b", 2)]


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(ConfigError) as refused:
        EventStoreStreamReader({"url": "mysql+pymysql://x@y/z", "pages": "3"})
    assert refused.value.code == "config.unknown_key"
    assert "pages" in refused.value.message


def test_the_publishers_source_goes_on_looking_where_there_is_nothing_new(
    database: FreshDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_table(database)
    options = {"url": database.url, "windows": "true", "position": "0", "watermark": "off"}
    source = EventStoreStreamReader(options | {"looks_every": "1000"})
    at: Any = source.initialOffset()
    at = source.latestOffset(at, ReadMaxRows(10))
    monkeypatch.setattr("eventpub.spark.source._LOOKS_FOR", 0.02)
    assert source.latestOffset(at, ReadMaxRows(10)) == at

    pauses: list[float] = []

    def commit_meanwhile(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            with transaction(database) as cursor:
                insert(cursor, "a-1", 1, create_time=created)
                cursor.connection.commit()

    [(created,)] = database.execute("SELECT CURRENT_TIMESTAMP(6) - INTERVAL 2 SECOND")
    at["position"] -= 10_000_000
    monkeypatch.setattr("eventpub.spark.source._LOOKS_FOR", 60.0)
    monkeypatch.setattr("eventpub.spark.source.time.sleep", commit_meanwhile)
    assert source.latestOffset(at, ReadMaxRows(10))["position"] > at["position"]
    assert pauses == [0.001] * 3
    source.stop()


@pytest.mark.parametrize(("max_wait", "is_soon"), [("1h", True), ("59m", False)])
def test_open_transactions_are_looked_at_before_the_delay_of_the_first_rows_has_passed(
    database: FreshDatabase, monkeypatch: pytest.MonkeyPatch, max_wait: str, is_soon: bool
) -> None:
    """Those of which one may still be waited for then; so a long delay asks no more of them."""
    create_table(database)
    options = {"url": database.url, "windows": "true", "position": "0", "delay": "1h"}
    source = EventStoreStreamReader(options | {"max_wait": max_wait})
    now = source._connected().now()
    source._first = False
    assert source._watermark is not None
    looks: list[int] = []
    monkeypatch.setattr(source._watermark, "look", looks.append)
    assert source._next_window(now) is None
    assert source._next_look() is None
    assert not looks
    with transaction(database) as cursor:
        insert(cursor, "a-1", 1)
        cursor.connection.commit()
    assert source._next_window(now) is None
    assert bool(looks) is is_soon
    assert (source._next_look() is not None) is is_soon, "or the thread rests, and sees them late"
    source.stop()


def test_the_end_of_a_transaction_that_was_passed_by_is_looked_for_and_told(
    database: FreshDatabase, tmp_path: Path
) -> None:
    """Also where nothing else comes; as seldom as for rows then."""
    create_table(database)
    file = tmp_path / "passed.json"
    options = {"url": database.url, "windows": "true", "position": "0", "max_wait": "10ms"}
    source = EventStoreStreamReader(options | {"passed_file": str(file)})
    assert source._watermark is not None
    now = source._connected().now()
    with transaction(database) as cursor:
        insert(cursor, "a-1", 1)
        source.latestOffset({"position": now, "tick": 0}, ReadMaxRows(10))  # the first look
        source._first = False
        deadline = time.monotonic() + 10.0
        while not source._watermark.passed:
            assert time.monotonic() < deadline
            assert source._next_window(now + 3_600_000_000) is None
            assert source._next_look() is None
            time.sleep(0.02)
        assert told(file) == {}
        cursor.connection.commit()
    while not told(file):
        assert time.monotonic() < deadline
        assert source._next_window(now + 3_600_000_000) is None
        time.sleep(0.02)
    [(created,)] = database.execute(
        "SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', create_time) FROM events"
    )
    assert any(first <= bucket_of(created) <= last for first, last in told(file))
    assert not source._watermark.has_open
    source.stop()


@pytest.mark.parametrize("database", ["mysql", "mariadb"], indirect=True)
def test_what_its_statement_had_done_before_the_engine_knew_of_it_is_told_with_its_transaction(
    database: FreshDatabase, tmp_path: Path
) -> None:
    """A row is as old as its statement, which the list of processes shows from two seconds on."""
    create_table(database)
    file = tmp_path / "passed.json"
    options = {"url": database.url, "windows": "true", "position": "0", "max_wait": "10ms"}
    source = EventStoreStreamReader(options | {"passed_file": str(file)})
    assert source._watermark is not None
    now = source._connected().now()
    source.latestOffset({"position": now, "tick": 0}, ReadMaxRows(10))  # the first look
    insert_slowly = (
        "INSERT INTO events (aggregate_id, version, event_type)"
        " SELECT CONCAT('slow', slept), 1, 't' FROM (SELECT SLEEP(1.2) AS slept) AS slowly"
    )
    with transaction(database) as cursor:
        writer = threading.Thread(target=cursor.execute, args=(insert_slowly,))
        writer.start()
        deadline = time.monotonic() + 30.0
        while not source._watermark.passed:
            assert time.monotonic() < deadline
            source._watermark.look(now + 3_600_000_000)
            time.sleep(0.02)
        writer.join()
        source._note_hidden(source._watermark)
        [created] = cursor.execute(CREATED) and cursor.fetchone()
        assert source._hidden_since is not None
        assert source._hidden_since < created
        cursor.connection.commit()
    while not told(file):
        assert time.monotonic() < deadline
        assert source._next_window(now + 3_600_000_000) is None
        time.sleep(0.02)
    assert any(first <= bucket_of(created) <= last for first, last in told(file))
    source.stop()


def test_a_window_without_rows_is_announced_where_tasks_have_something_to_do(
    database: FreshDatabase, tmp_path: Path
) -> None:
    """Once for each time that they tell of it: of a hold that is due, and of a comparison."""
    create_table(database)
    state = StateDir(tmp_path)
    options = {"url": database.url, "windows": "true", "position": "0"}
    files = {
        "wake_file": str(state.progress_file),
        "boundary_file": str(state.boundary_file),
        "live_dir": str(state.live),
    }
    source = EventStoreStreamReader(options | files)
    now = source._connected().now()
    assert source._next_window(now) is None

    state.tell(1, 1, 0, {"position": now, "next_due": now + 3_600_000_000, "compared": 2})
    assert source._next_window(now) is None
    state.tell(1, 1, 0, {"position": now, "next_due": now, "compared": 2})
    assert source._next_window(now) == Bounds(now)
    assert source._next_window(now) is None, "it is on its way"
    state.tell(1, 1, 0, {"position": now, "next_due": now, "compared": 2, "again": True})
    assert source._next_window(now) == Bounds(now)

    state.tell(1, 1, 0, {"position": now, "next_due": None, "compared": 2})
    for number, buckets, found in ((2, [7], None), (3, [], None), (3, [7], Bounds(now))):
        comparison = {"run": 1, "number": number, "buckets": buckets}
        state.write(state.progress_file, {"comparison": comparison})
        assert source._next_window(now) == found
    source.stop()


def test_where_nothing_is_new_a_batch_begins_whose_tasks_wait(
    database: FreshDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_table(database)
    state = StateDir(tmp_path)
    monkeypatch.setattr("eventpub.spark.source._LOOKS_FOR", 0.02)
    options = {"url": database.url, "windows": "true", "position": "5", "rests_in_tasks": "true"}
    files = {"boundary_file": str(state.boundary_file), "wake_file": str(state.progress_file)}
    source = EventStoreStreamReader(options | files | {"looks_every": "1000"})
    at: Any = source.latestOffset(source.initialOffset(), ReadMaxRows(10))
    assert [w.moves for w in source.partitions(at, at)] == [False]  # type: ignore[attr-defined]
    reached = at["position"] + 7
    state.write(state.progress_file, {"position": reached})  # by tasks that followed
    rests: Any = source.latestOffset(at, ReadMaxRows(10))
    assert rests == {"position": reached, "tick": at["tick"] + 1}
    assert [w.moves for w in source.partitions(at, rests)] == [True]  # type: ignore[attr-defined]
    assert (state.read(state.boundary_file) or {})["upto"] == reached
    source.stop()


def test_a14_a_new_source_tells_of_what_had_ended_before_it_looked(
    database: FreshDatabase, tmp_path: Path
) -> None:
    """Kafka was away, say, and the query began anew: nobody saw that end."""
    create_table(database)
    file = tmp_path / "passed.json"
    options = {"url": database.url, "windows": "true", "position": "0", "max_wait": "10ms"}
    options |= {"passed_file": str(file), "rests_in_tasks": "true"}
    former = EventStoreStreamReader(options)
    assert former._watermark is not None
    with transaction(database) as cursor:
        insert(cursor, "a-1", 1)
        cursor.execute("SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', create_time) FROM events")
        (created,) = cursor.fetchone()
        deadline = time.monotonic() + 60.0
        while former._watermark._transactions.looked_at is None:  # others may look at this moment
            assert time.monotonic() < deadline, former._watermark.state
            end = former.latestOffset({"position": created - 1, "tick": 0}, ReadMaxRows(10))
            (window,) = former.partitions({"position": created - 1, "tick": 0}, end)
            assert isinstance(window, Window)
            if former._watermark.upto == 0:  # not seen yet: nothing may be read, so nothing hides
                assert window.upto == created - 1
                assert window.hidden_since is None
        assert isinstance(window, Window)
        assert window.hidden_since is not None
        assert window.hidden_since < created
        cursor.connection.commit()
    former.stop()
    assert told(file) == {}
    source = EventStoreStreamReader(options | {"hidden_since": str(window.hidden_since)})
    assert source._hidden_since is not None, "until it has looked"
    assert source._hidden_since <= window.hidden_since
    reached = {"position": created + 1_000_000, "tick": 0}
    deadline = time.monotonic() + 60.0
    while not told(file):
        assert time.monotonic() < deadline
        source.latestOffset(reached, ReadMaxRows(10))
    assert any(first <= bucket_of(created) <= last for first, last in told(file))
    assert source._hidden_since is not None, "until somebody has heard of it"
    assert source._hidden_since < created
    source.stop()


def polled_for(seconds: float, reader: EventStoreStreamReader, at: Any) -> None:
    """Polls again and again from one position, where nothing is found."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert reader.latestOffset(at, ReadMaxRows(10)) == at
        time.sleep(0.1)


def test_f3_an_address_that_moves_is_followed_though_its_connections_stay(
    mysql_server: Database, mariadb_server: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name, HAProxy: the former primary lives on, and what is connected to it notices nothing.

    A source is of one server. The next one makes all its connections anew, and so do the tasks.
    """
    monkeypatch.setattr("eventpub.store.events.KEPT_FOR", 1.0, raising=False)
    name = f"moved_{uuid.uuid4().hex[:12]}"
    for server in (mysql_server, mariadb_server):
        with server.connect(None, ssl_disabled=True) as connection, connection.cursor() as cursor:
            cursor.execute(f"CREATE DATABASE {name}")
    first, second = FreshDatabase(mysql_server, name), FreshDatabase(mariadb_server, name)
    create_table(first)
    create_table(second, collation="utf8mb4_nopad_bin")
    with TcpProxy(mysql_server.port) as address:
        url = f"mysql+pymysql://root@127.0.0.1:{address.port}/{name}"
        options = {"url": url, "delay": "0", "windows": "true"}
        reader = EventStoreStreamReader(options)
        with transaction(first) as cursor:
            insert(cursor, "a", 1)
            cursor.connection.commit()
        at: Any = reader.initialOffset()
        deadline = time.monotonic() + 60
        while at["position"] == 0:  # the first looks may come too early
            assert time.monotonic() < deadline
            at = reader.latestOffset(at, ReadMaxRows(10))
        address.target = mariadb_server.port
        with transaction(second) as cursor:
            insert(cursor, "a", 1)
            insert(cursor, "a", 2)
            cursor.connection.commit()
        with pytest.raises(SourceError, match=r"store\.moved"):
            polled_for(60, reader, at)
        reader.stop()
        reader = EventStoreStreamReader(options)
        deadline = time.monotonic() + 60
        while reader.latestOffset(at, ReadMaxRows(10))["position"] <= at["position"]:
            assert time.monotonic() < deadline
        reader.stop()
    for server in (mysql_server, mariadb_server):
        with server.connect(None, ssl_disabled=True) as connection, connection.cursor() as cursor:
            cursor.execute(f"DROP DATABASE {name}")


def test_f3_open_transactions_are_looked_at_where_windows_are_read(
    database: FreshDatabase, mariadb_server: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name leads to either while it moves; what is connected once stays where it is."""
    create_table(database)
    elsewhere = f"mysql+pymysql://root@127.0.0.1:{mariadb_server.port}/mysql"
    monkeypatch.setattr(
        "eventpub.store.watermark.connect_for_reading",
        lambda _: connect_for_reading(Store(url=SecretStr(elsewhere))),
    )
    options = {"url": database.url, "windows": "true", "position": "0"}
    reader = EventStoreStreamReader(options)
    with pytest.raises(SourceError, match=r"store\.moved"):
        reader.latestOffset(reader.initialOffset(), ReadMaxRows(10))
    reader.stop()


def test_f3_open_transactions_of_a_replica_are_not_looked_at(database: FreshDatabase) -> None:
    mark = Watermark(Store(url=SecretStr(database.url)), 1_000_000)
    database.execute("SET GLOBAL read_only = ON")
    try:
        with pytest.raises(StoreError) as refused:
            mark.look()
    finally:
        database.execute("SET GLOBAL read_only = OFF")
        mark.close()
    assert (refused.value.code, refused.value.retriable) == ("store.replica", True)
