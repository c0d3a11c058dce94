"""The boundary on real databases: how far may be read, what is open, and what has ended since."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
from pydantic import SecretStr

from eventpub.admission.model import bucket_of, topic_partition, values
from eventpub.config import App, Config, Read, Recount, Run, Sink, Store
from eventpub.coordinator.boundary import Boundary, PollResult
from eventpub.errors import StoreError
from eventpub.local.servers import Database
from eventpub.shard.assignment import Assignment, real_parts
from eventpub.sources.mysql import EventStore, Watermark
from tests.conftest import FreshDatabase
from tests.publisher.harness import create_table, insert, transaction
from tests.store.tables import utc
from tests.tcp_proxy import TcpProxy

HOUR = 3_600_000_000
CREATED = "SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', create_time) FROM events"

Open = Callable[..., Boundary]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Makes boundaries that are closed in the end."""
    with ExitStack() as stack:

        def make(url: str, **settings: Any) -> Boundary:
            store = Store(url=SecretStr(url))
            given = {name: settings.pop(name, None) for name in ("until", "hidden_since")}
            shards, partitions = settings.pop("shards", (1, 1))
            config = Config(
                app=App(id="a"),
                store=store,
                sink=Sink(topic="t"),
                run=Run.model_validate({"shards": shards, "trigger": "50ms"}),
                read=Read(**settings),
                recount=Recount.model_validate({"horizon": "0"}),
            )
            layout, parts = EventStore.discover(store), real_parts(config)
            boundary = Boundary(Assignment(config, layout, partitions, None, 0, parts), **given)
            return stack.enter_context(closing(boundary))

        yield make


def now(database: FreshDatabase) -> int:
    """The database's time, µs."""
    statement = "SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
    return int(database.execute(statement)[0][0])


def polled_until(
    boundary: Boundary,
    after: int,
    found: Callable[[PollResult], bool],
    seconds: float = 60.0,
    *,
    rows: bool = False,
) -> PollResult:
    """Polls from one position until something is found; others may look at this moment."""
    deadline = time.monotonic() + seconds
    while not found(result := boundary.poll(after, with_rows=rows)):
        assert time.monotonic() < deadline, result
        time.sleep(0.02)
    return result


def test_a_window_ends_with_a_page_or_a_delay_before_now(
    database: FreshDatabase, opened: Open
) -> None:
    create_table(database)
    with transaction(database) as cursor:
        for version in range(1, 26):
            insert(cursor, "a", version)
            cursor.connection.commit()
    time.sleep(0.2)
    boundary = opened(database.url, watermark="off", delay="100ms", page_rows=10)
    results = [boundary.poll(0)]
    while results[-1].end is not None:
        results.append(boundary.poll(results[-1].end))
    assert [result.is_page for result in results] == [True, True, False, False]
    assert results[2].end is not None
    assert results[2].end <= results[2].now - 100_000
    assert results[0].upper == results[0].now - 100_000
    assert results[0].server


def test_the_first_poll_ends_a_window_and_then_only_rows_do(
    database: FreshDatabase, opened: Open
) -> None:
    create_table(database)
    boundary = opened(database.url, watermark="off", delay="0")
    first = boundary.poll(0)
    assert first.end is not None
    assert boundary.poll(first.end).end is None
    with transaction(database) as cursor:
        insert(cursor, "a", 1)
        cursor.connection.commit()
    result = polled_until(boundary, first.end, lambda result: result.end is not None)
    assert not result.is_page


@pytest.mark.parametrize("watermark", ["off", "auto"])
def test_rows_of_whole_seconds_are_read_when_their_second_is_over(
    database: FreshDatabase, opened: Open, watermark: str
) -> None:
    """With open transactions looked at, it was a second later."""
    create_table(database, time="TIMESTAMP(0)")
    boundary = opened(database.url, watermark=watermark, delay="100ms")
    first = polled_until(boundary, 0, lambda result: result.end is not None)
    with transaction(database) as cursor:
        insert(cursor, "a", 1)
        cursor.connection.commit()
    [(created,)] = database.execute(CREATED)
    assert first.end is not None
    while (result := boundary.poll(first.end)).end is None:
        assert result.now - 100_000 < int(created) + 1_500_000
        time.sleep(0.02)


def test_nothing_is_read_behind_the_end_of_a_run_and_a_window_reaches_it(
    database: FreshDatabase, opened: Open
) -> None:
    create_table(database)
    until = now(database)
    boundary = opened(database.url, watermark="off", delay="100ms", until=until)
    result = polled_until(boundary, until - 1, lambda result: result.end is not None)
    assert result.end == until
    assert boundary.poll(until).end is None


@pytest.mark.parametrize("watermark", ["off", "auto"])
def test_pages_give_each_shard_its_rows_and_so_does_what_is_behind_the_last(
    database: FreshDatabase, opened: Open, watermark: str
) -> None:
    create_table(database)
    with transaction(database) as cursor:
        for number in range(40):
            insert(cursor, f"a-{number}", 1)
            cursor.connection.commit()
    time.sleep(0.2)
    boundary = opened(database.url, watermark=watermark, delay="100ms", page_rows=15, shards=(3, 6))
    after, pages = 0, []
    found: list[set[str]] = [set(), set(), set()]
    while sum(map(len, found)) < 40:
        result = polled_until(boundary, after, lambda result: result.end is not None, rows=True)
        assert result.end is not None
        after = result.end
        if result.rows is None:  # the first poll may still wait for what was open
            assert not result.is_page
            continue
        pages.append(result.is_page)
        for number, part in enumerate(result.rows):
            ids = set(values(part, "aggregate_id"))
            assert {topic_partition(aggregate_id, 6) % 3 for aggregate_id in ids} <= {number}
            assert not ids & found[number]
            found[number] |= ids
    assert pages == [True, True, False]
    assert polled_until(boundary, after, lambda result: result.end is None, rows=True).rows is None


def test_a_moment_that_is_more_than_a_page_is_left_to_the_shards(
    database: FreshDatabase, opened: Open
) -> None:
    create_table(database)
    at = "2026-03-01 12:00:00"
    with transaction(database) as cursor:
        for number in range(5):
            insert(cursor, f"a-{number}", 1, create_time=at)
        insert(cursor, "b", 1)
        cursor.connection.commit()
    boundary = opened(database.url, watermark="off", delay="0", page_rows=3)
    result = boundary.poll(0, with_rows=True)
    assert (result.end, result.is_page, result.rows) == (utc(at), True, None)
    last = boundary.poll(utc(at), with_rows=True)
    assert not last.is_page
    assert last.rows is not None
    assert [values(part, "aggregate_id") for part in last.rows] == [["b"]]


def test_the_next_poll_comes_less_often_where_nothing_has_come(
    database: FreshDatabase, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_table(database)
    boundary = opened(database.url, watermark="off", delay="1s")
    first = boundary.poll(0)
    assert first.end is not None
    busy = boundary.poll(first.end).pause
    monkeypatch.setattr("eventpub.coordinator.boundary._IDLE_AFTER", 0.0)
    assert busy < boundary.poll(first.end).pause <= 0.5


@pytest.mark.parametrize(("max_wait", "is_soon"), [("1h", True), ("59m", False)])
def test_open_transactions_are_looked_at_before_the_delay_of_the_first_rows_has_passed(
    database: FreshDatabase,
    opened: Open,
    monkeypatch: pytest.MonkeyPatch,
    max_wait: str,
    is_soon: bool,
) -> None:
    """Those of which one may still be waited for then; so a long delay asks no more of them."""
    create_table(database)
    boundary = opened(database.url, delay="1h", max_wait=max_wait)
    after = now(database)
    boundary._is_first = False
    assert boundary._watermark is not None
    results: list[int] = []
    monkeypatch.setattr(boundary._watermark, "poll", results.append)
    assert boundary.poll(after).end is None
    assert not results
    with transaction(database) as cursor:
        insert(cursor, "a", 1)
        cursor.connection.commit()
    assert boundary.poll(after).end is None
    assert bool(results) == is_soon


def test_a_hold_that_is_due_has_open_transactions_looked_at(
    database: FreshDatabase, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_table(database)
    boundary = opened(database.url)
    after = now(database)
    boundary._is_first = False
    assert boundary._watermark is not None
    results: list[int] = []
    monkeypatch.setattr(boundary._watermark, "poll", results.append)
    assert not boundary.poll(after, after + HOUR).is_due
    assert not results
    assert boundary.poll(after, after).is_due
    assert results


def test_while_the_clock_is_behind_open_transactions_are_looked_at(
    database: FreshDatabase, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rows show in a window then, and what commits may be older than the horizon."""
    create_table(database)
    boundary = opened(database.url)
    boundary._is_first = False
    assert boundary._watermark is not None
    results: list[int] = []
    monkeypatch.setattr(boundary._watermark, "poll", results.append)
    ahead = now(database) + HOUR
    assert boundary.poll(ahead).end is None
    assert results == [ahead]


def test_the_end_of_a_transaction_that_was_timed_out_is_looked_for_and_reported(
    database: FreshDatabase, opened: Open
) -> None:
    """Also where nothing else comes."""
    create_table(database)
    boundary = opened(database.url, max_wait="10ms")
    behind = now(database) + HOUR
    with transaction(database) as cursor:
        insert(cursor, "a-1", 1)
        boundary.poll(0)
        result = polled_until(boundary, behind, lambda result: result.timed_out > 0)
        assert result.end is None
        assert result.ended == ()
        assert result.open_since is not None
        cursor.connection.commit()
    result = polled_until(boundary, behind, lambda result: bool(result.ended))
    [(created,)] = database.execute(CREATED)
    assert any(after < created <= upto for after, upto in result.ended)
    result = boundary.poll(behind)
    assert (result.ended, result.open_since, result.hidden_since) == ((), None, None), (
        "it is said once"
    )


@pytest.mark.parametrize("database", ["mysql", "mariadb"], indirect=True)
def test_what_its_statement_had_done_before_the_engine_knew_of_it_is_reported_with_it(
    database: FreshDatabase, opened: Open
) -> None:
    """A row is as old as its statement, which the list of processes shows from two seconds on."""
    create_table(database)
    boundary = opened(database.url, max_wait="10ms")
    behind = now(database) + HOUR
    boundary.poll(0)
    insert_slowly = (
        "INSERT INTO events (aggregate_id, version, event_type)"
        " SELECT CONCAT('slow', slept), 1, 't' FROM (SELECT SLEEP(1.2) AS slept) AS slowly"
    )
    with transaction(database) as cursor:
        writer = threading.Thread(target=cursor.execute, args=(insert_slowly,))
        writer.start()
        deadline = time.monotonic() + 30.0
        assert boundary._watermark is not None
        while not boundary._watermark.timed_out:
            assert time.monotonic() < deadline
            boundary._watermark.poll(behind)
            time.sleep(0.02)
        writer.join()
        cursor.execute(CREATED)
        [created] = cursor.fetchone()
        hidden = boundary.hidden_since
        assert hidden is not None
        assert hidden < created
        cursor.connection.commit()
    result = polled_until(boundary, behind, lambda result: bool(result.ended))
    assert any(
        bucket_of(after + 1) <= bucket_of(created) <= bucket_of(upto)
        for after, upto in result.ended
    )


def test_a14_who_polls_anew_reports_what_had_ended_before_it_looked(
    database: FreshDatabase, opened: Open
) -> None:
    """The database was away, say, and connections were made again: nobody saw that end."""
    create_table(database)
    former = opened(database.url, max_wait="10ms")
    with transaction(database) as cursor:
        insert(cursor, "a-1", 1)
        cursor.execute(CREATED)
        (created,) = cursor.fetchone()
        result = polled_until(former, created - 1, lambda result: result.hidden_since is not None)
        assert result.hidden_since is not None
        assert result.hidden_since < created
        cursor.connection.commit()
    assert result.ended == ()
    reopened = opened(database.url, max_wait="10ms", hidden_since=result.hidden_since)
    assert reopened.hidden_since is not None, "until it has looked"
    assert reopened.hidden_since <= result.hidden_since
    found = polled_until(reopened, created + 1_000_000, lambda result: bool(result.ended))
    assert any(after < created <= upto for after, upto in found.ended)


def test_f3_an_address_that_moves_is_followed_though_its_connections_stay(
    mysql_server: Database,
    mariadb_server: Database,
    opened: Open,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name, HAProxy: the former primary lives on, and what is connected to it notices nothing.

    A boundary is of one server. The next one reconnects, and so do the shards.
    """
    monkeypatch.setattr("eventpub.sources.mysql.server.KEPT_FOR", 1.0)
    name = f"moved_{uuid.uuid4().hex[:12]}"
    for server in (mysql_server, mariadb_server):
        with server.connect(None, ssl_disabled=True) as connection, connection.cursor() as cursor:
            cursor.execute(f"CREATE DATABASE {name}")
    first, second = FreshDatabase(mysql_server, name), FreshDatabase(mariadb_server, name)
    create_table(first)
    create_table(second, collation="utf8mb4_nopad_bin")
    with TcpProxy(mysql_server.port) as address:
        url = f"mysql+pymysql://root@127.0.0.1:{address.port}/{name}"
        boundary = opened(url, delay="0")
        with transaction(first) as cursor:
            insert(cursor, "a", 1)
            cursor.connection.commit()
        at = polled_until(boundary, 0, lambda result: result.end is not None)
        assert at.end is not None
        address.target = mariadb_server.port
        with transaction(second) as cursor:
            insert(cursor, "a", 1)
            insert(cursor, "a", 2)
            cursor.connection.commit()
        with pytest.raises(StoreError) as moved:
            polled_until(boundary, at.end, lambda result: False)
        assert (moved.value.code, moved.value.retriable) == ("store.moved", True)
        reopened = opened(url, delay="0")
        after = at.end
        result = polled_until(reopened, after, lambda result: result.end is not None)
        assert result.server != at.server
    for server in (mysql_server, mariadb_server):
        with server.connect(None, ssl_disabled=True) as connection, connection.cursor() as cursor:
            cursor.execute(f"DROP DATABASE {name}")


def test_f3_open_transactions_are_looked_at_where_windows_are_read(
    database: FreshDatabase, mariadb_server: Database, opened: Open
) -> None:
    """A name leads to either while it moves; what is connected once stays where it is."""
    create_table(database)
    elsewhere = f"mysql+pymysql://root@127.0.0.1:{mariadb_server.port}/mysql"
    boundary = opened(database.url)
    assert boundary._watermark is not None
    boundary._watermark._pool._config = Store(url=SecretStr(elsewhere))
    with pytest.raises(StoreError) as moved:
        boundary.poll(0)
    assert moved.value.code == "store.moved"


def test_f3_open_transactions_of_a_replica_are_not_looked_at(database: FreshDatabase) -> None:
    mark = Watermark(Store(url=SecretStr(database.url)), 1_000_000)
    database.execute("SET GLOBAL read_only = ON")
    try:
        with pytest.raises(StoreError) as refused:
            mark.poll()
    finally:
        database.execute("SET GLOBAL read_only = OFF")
        mark.close()
    assert (refused.value.code, refused.value.retriable) == ("store.replica", True)
