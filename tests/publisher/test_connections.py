"""Connections as they are run: idle ones that vanish, limits that are reached, few privileges."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from eventpub.local.servers import Database
from tests.conftest import FreshDatabase, fresh_database
from tests.publisher.conftest import NewPublisher
from tests.publisher.harness import Publisher, compare, create_table, eventually, insert
from tests.publisher.test_set_up import ask, assert_both_say
from tests.servers.databases import mysql
from tests.tcp_proxy import TcpProxy

WORD = "hunter2-hunter2"


@pytest.fixture(scope="module")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """One whose global settings a test may change."""
    options = ["--skip-log-bin", "--innodb-flush-log-at-trx-commit=2"]
    with mysql(tmp_path_factory.mktemp("small"), options=options) as server:
        yield server


@pytest.fixture
def database(small_server: Database) -> Iterator[FreshDatabase]:
    with fresh_database(small_server) as fresh:
        create_table(fresh)
        user = reader(fresh)
        fresh.execute(f"CREATE USER {user}@'%' IDENTIFIED BY '{WORD}'")
        fresh.execute(f"GRANT SELECT ON {fresh.name}.events TO {user}@'%'")
        yield fresh
        fresh.execute(f"DROP USER {user}@'%'")


def reader(database: FreshDatabase) -> str:
    """An account of the test's own."""
    return f"r{database.name[-10:]}"


def through(proxy: TcpProxy, database: FreshDatabase) -> dict[str, str]:
    """`[store]` for a publisher whose connections go through the proxy."""
    url = database.url_of(reader(database), WORD)
    return {
        "url": url.replace(str(database.server.port), str(proxy.port)),
        "connect_timeout": "3s",
    }


def write(database: FreshDatabase, aggregate_id: str, version: int = 1) -> float:
    """Commits one event; when."""
    with database.connect() as connection, connection.cursor() as cursor:
        insert(cursor, aggregate_id, version)
    return time.monotonic()


def seconds_until_published(publisher: Publisher, aggregate_id: str, since: float) -> float:
    publisher.until_published(aggregate_id, [1])
    return time.monotonic() - since


def test_a_network_that_forgets_idle_connections_without_a_word(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """As a NAT or a load balancer does: what is sent over them is answered by nobody."""
    with TcpProxy(database.server.port) as proxy:
        publisher = new_publisher(database, store=through(proxy, database))
        publisher.start()
        write(database, "first")
        publisher.until_published("first", [1])
        proxy.forgets_after = 6.0
        time.sleep(9.0)
        waited = seconds_until_published(publisher, "second", write(database, "second"))
        assert waited < 8.0, publisher.words()


def test_a_firewall_that_forgets_all_connections_at_once(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """Those in use, too: they count as gone when nothing has come for some seconds."""
    with TcpProxy(database.server.port) as proxy:
        publisher = new_publisher(database, store=through(proxy, database))
        publisher.start()
        write(database, "first")
        publisher.until_published("first", [1])
        proxy.swallow()
        waited = seconds_until_published(publisher, "second", write(database, "second"))
        assert waited < 45.0, publisher.words()
        assert publisher.process is not None
        assert publisher.process.poll() is None


def test_a_server_that_closes_idle_connections(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    publisher = new_publisher(database)
    (usual,) = database.execute("SELECT @@global.wait_timeout")[0]
    database.execute("SET GLOBAL wait_timeout = 5")
    try:
        publisher.start()
        write(database, "first")
        publisher.until_published("first", [1])
    finally:
        database.execute(f"SET GLOBAL wait_timeout = {int(usual)}")
    time.sleep(8.0)
    waited = seconds_until_published(publisher, "second", write(database, "second"))
    assert waited < 8.0, publisher.words()
    assert not compare(database, publisher.topic)


def test_no_connection_is_left(database: FreshDatabase, new_publisher: NewPublisher) -> None:
    """At the start it is said; a publisher that runs waits for one."""
    store = {"url": database.url_of(reader(database), WORD)}
    publisher = new_publisher(database, store=store)
    limit = f"ALTER USER {reader(database)} WITH MAX_USER_CONNECTIONS "
    database.execute(limit + "1")
    with closing(database.server.connect(user=reader(database), password=WORD, database=None)):
        said = ask(publisher, doctor_status=3)
        assert_both_say(said, "store.too_many_connections", "limit")
    (most,) = database.execute("SELECT @@global.max_connections")[0]
    with ExitStack() as stack:
        stack.callback(database.execute, f"SET GLOBAL max_connections = {most}")
        database.execute("SET GLOBAL max_connections = 10")
        database.execute(limit + "0")
        take_all(stack, database)
        said = ask(publisher, doctor_status=3)
        assert_both_say(said, "store.too_many_connections", "max_connections")

    publisher.start()
    write(database, "first")
    publisher.until_published("first", [1])
    database.execute(limit + "1")
    kill(database)
    committed = write(database, "second")
    time.sleep(4.0)
    assert publisher.process is not None
    assert publisher.process.poll() is None, publisher.words()
    database.execute(limit + "0")
    assert seconds_until_published(publisher, "second", committed) < 30


def take_all(stack: ExitStack, database: FreshDatabase) -> None:
    """All connections that the server gives to accounts without privileges."""

    def is_refused() -> bool:
        try:
            connection = database.server.connect(
                user=reader(database), password=WORD, database=None
            )
        except Exception:
            return True
        stack.callback(connection.close)
        return False

    eventually(is_refused, 20, every=0)


def kill(database: FreshDatabase) -> None:
    """The publisher's connections."""
    for (number,) in database.execute(
        "SELECT id FROM information_schema.processlist WHERE user = %s", (reader(database),)
    ):
        database.execute(f"KILL {int(number)}")


def only_columns(database: FreshDatabase, columns: str) -> str:
    """The account may read these only."""
    user = reader(database)
    database.execute(f"REVOKE SELECT ON {database.name}.events FROM {user}")  # noqa: S608
    database.execute(f"GRANT SELECT ({columns}) ON {database.name}.events TO {user}")
    return user


def test_select_on_the_mapped_columns_is_enough(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    user = only_columns(
        database, "aggregate_id, version, event_type, payload, metadata, create_time"
    )
    publisher = new_publisher(database, store={"url": database.url_of(user, WORD)})
    done = publisher.command("doctor", "--json")
    assert done.returncode == 0, done.stdout
    publisher.start()
    write(database, "first")
    publisher.until_published("first", [1])


def test_a_column_that_may_not_be_read_is_named(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    user = only_columns(database, "aggregate_id, version, event_type, metadata, create_time")
    publisher = new_publisher(database, store={"url": database.url_of(user, WORD)})
    said = ask(publisher)
    assert "payload" in f"{said.run['message']} {said.run['where']}"
    assert "GRANT SELECT" in said.run["suggestion"], said.run
