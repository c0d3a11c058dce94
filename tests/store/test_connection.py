"""The URL, the session and what goes wrong with connections: named, in time, without secrets."""

from __future__ import annotations

import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import pymysql
import pytest

from eventpub.config import Store
from eventpub.errors import ConfigError, StoreError
from eventpub.local.servers import Database
from eventpub.sources.mysql import EventStore
from eventpub.sources.mysql.connection import (
    connect_arguments,
    connect_for_reading,
    display_name,
    run,
    store_error,
)
from tests.conftest import FreshDatabase
from tests.servers.signals import pause, resume
from tests.store.tables import SECOND, create, insert, open_store, read, utc

both = pytest.mark.parametrize("database", ["mysql", "mariadb"], indirect=True)
NOON = utc("2026-03-01 12:00:00")


def test_the_parts_of_a_url() -> None:
    url = "mysql+pymysql://us%40er:p%2Fw@db.example:3307/my%20shop?ssl_ca=/ca.pem&ssl_verify_cert=true"
    arguments = connect_arguments(Store(url=url))
    assert arguments["host"] == "db.example"
    assert arguments["port"] == 3307
    assert arguments["user"] == "us@er"
    assert arguments["password"] == b"p/w"
    assert arguments["database"] == "my shop"
    assert arguments["ssl_ca"] == "/ca.pem"
    assert arguments["ssl_verify_cert"] is True


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("mysql+pymysql://u@[::1]:3310/d", "::1", 3310),
        ("mariadb+pymysql://u@h/d?charset=utf8mb4", "h", 3306),
    ],
)
def test_other_forms_of_a_url(url: str, host: str, port: int) -> None:
    arguments = connect_arguments(Store(url=url))
    assert (arguments["host"], arguments["port"]) == (host, port)
    assert arguments["charset"] == "utf8mb4"


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("mysql+pymysql://u:secret@h/d?sslca=/x", "unknown option sslca"),
        ("mysql+pymysql://u:secret@h/d?ssl_disabled=maybe", "true or false"),
        ("mysql+pymysql://u:secret@h/d?read_timeout=0", "not a number of seconds"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_without_its_password(url: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        connect_arguments(Store(url=url))
    assert "secret" not in str(caught.value)
    assert "secret" not in repr(caught.value)


def test_the_password_of_its_own_key_or_file_wins(tmp_path: Path) -> None:
    url = "mysql+pymysql://u:first@h/d"
    file = tmp_path / "password"
    file.write_text("dritt€\n")
    assert connect_arguments(Store(url=url, password="zwöi"))["password"] == "zwöi".encode()
    given = connect_arguments(Store(url=url, password_file=file))
    assert given["password"] == "dritt€".encode()
    assert "dritt" not in display_name(Store(url=url, password_file=file))
    with pytest.raises(ConfigError) as caught:
        connect_arguments(Store(url=url, password_file=tmp_path / "none"))
    assert (caught.value.code, caught.value.where) == (
        "config.file_unreadable",
        "store.password_file",
    )
    assert display_name(Store(url=url, password_file=tmp_path / "none")) == "u@h:3306/d"


@both
def test_a_password_beyond_latin1(database: FreshDatabase) -> None:
    user = f"u{uuid.uuid4().hex[:8]}"
    database.execute(f"CREATE USER {user}@'%' IDENTIFIED BY 'päßwörd€'")
    database.execute(f"GRANT SELECT ON {database.name}.* TO {user}@'%'")
    create(database)
    config = Store(url=database.url_of(user), password="päßwörd€")
    with open_store(config) as store:
        assert store.now() > 0
    with pytest.raises(StoreError) as caught:
        EventStore.discover(config.model_copy(update={"password": None}))
    assert caught.value.code == "store.auth_failed"
    assert not caught.value.retriable
    database.execute(f"DROP USER {user}@'%'")


@both
def test_a_reading_session_is_read_committed_read_only_and_utc(database: FreshDatabase) -> None:
    config = create(database)
    connection = connect_for_reading(config)
    isolation = "tx_isolation" if "Maria" in database.server.name else "transaction_isolation"
    assert run(connection, f"SELECT @@{isolation}, @@time_zone, @@autocommit") == [
        ("READ-COMMITTED", "+00:00", 1)
    ]
    with pytest.raises(pymysql.err.MySQLError, match=r"READ.ONLY"):
        run(
            connection,
            "INSERT INTO events (aggregate_id, version, event_type) VALUES ('a', 1, 't')",
        )
    connection.close()


@both
def test_errors_say_what_is_wrong_and_how_to_mend_it(database: FreshDatabase) -> None:
    user = f"u{uuid.uuid4().hex[:8]}"
    database.execute(f"CREATE USER {user}@'%' IDENTIFIED BY 'secret'")
    create(database)
    create(database, table="other", indexes="UNIQUE KEY (aggregate_id, version)")
    database.execute(f"GRANT SELECT ON {database.name}.other TO {user}@'%'")
    limited = Store(url=database.url_of(user, "secret"))
    cases = {
        "store.privilege_missing": limited,
        "store.index_missing": limited.model_copy(update={"table": "other"}),
        "store.table_missing": Store(url=database.url, table="nothing"),
        "store.database_missing": Store(url=database.server.url(database="nowhere")),
        "store.auth_failed": Store(url=database.url_of(user, "wrong")),
        "store.unreachable": Store(url="mysql+pymysql://root@127.0.0.1:1/d"),
        "store.column_missing": Store.model_validate(
            {"url": database.url, "columns": {"version": "revision"}}
        ),
        "store.column_type": Store.model_validate(
            {"url": database.url, "columns": {"version": "payload"}}
        ),
    }
    for code, config in cases.items():
        began = time.monotonic()
        with pytest.raises(StoreError) as caught:
            EventStore.discover(config)
        assert caught.value.code == code
        assert caught.value.suggestion
        assert caught.value.retriable == (code == "store.unreachable")
        assert "secret" not in str(caught.value)
        assert time.monotonic() - began < 15
    with pytest.raises(StoreError, match="create_time") as caught:
        EventStore.discover(cases["store.index_missing"])
    database.execute(str(caught.value.suggestion))
    EventStore.discover(cases["store.index_missing"])
    database.execute(f"DROP USER {user}@'%'")


def kill_connections(database: FreshDatabase) -> None:
    """All that others have to it."""
    for (number,) in database.execute(
        "SELECT id FROM information_schema.processlist"
        " WHERE db = DATABASE() AND id <> CONNECTION_ID()"
    ):
        with suppress(pymysql.err.OperationalError):  # it has gone by itself meanwhile
            database.execute(f"KILL {number}")


@both
def test_a_limit_of_rows_that_the_server_sets_for_all_sessions_cuts_nothing_off(
    database: FreshDatabase,
) -> None:
    """`DEFAULT` of a session is what the server's is set to."""
    config = create(database)
    insert(database, [("a", n, "2026-03-01 12:00:01") for n in range(1, 31)])
    database.execute("SET GLOBAL sql_select_limit = 7")
    try:
        store = open_store(config)
        assert len(read(store, NOON, NOON + SECOND)) == 30
        store.close()
    finally:
        database.execute("SET GLOBAL sql_select_limit = DEFAULT")


@both
def test_a_connection_that_was_closed_while_nobody_used_it_is_replaced(
    database: FreshDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As servers and proxies do with those that rest."""
    store = open_store(create(database))
    monkeypatch.setattr("eventpub.sources.mysql.server.IDLE_FOR", 0.5)
    assert store.now() > 0
    kill_connections(database)
    time.sleep(0.6)
    assert store.now() > 0


@both
def test_a_connection_that_dies_is_a_retriable_error_and_the_next_call_works(
    database: FreshDatabase,
) -> None:
    store = open_store(create(database))
    insert(database, [("a", n, "2026-03-01 12:00:01") for n in range(1, 2001)])
    database.execute("UPDATE events SET payload = REPEAT('x', 20000)")

    assert store.now() > 0
    kill_connections(database)
    with pytest.raises(StoreError) as caught:
        store.now()
    assert (caught.value.code, caught.value.retriable) == ("store.connection_lost", True)
    assert store.now() > 0
    window = store.window(NOON, NOON + SECOND, None)
    first = next(window)
    kill_connections(database)  # no statement is open while a batch is worked on
    assert first.num_rows + sum(batch.num_rows for batch in window) == 2000
    assert len(read(store, NOON, NOON + SECOND)) == 2000


def test_a_server_that_hangs_is_noticed(berlin_server: Database) -> None:
    with (
        berlin_server.connect(None, ssl_disabled=True) as connection,
        connection.cursor() as cursor,
    ):
        cursor.execute("CREATE DATABASE IF NOT EXISTS hanging")
    config = Store(
        url=berlin_server.url(database="hanging") + "?read_timeout=1",
        connect_timeout="1s",
    )
    create(FreshDatabase(berlin_server, "hanging"))
    store = open_store(config)
    assert store.now() > 0
    pause(berlin_server)
    try:
        for _ in range(2):  # on the connection that is open, then on a new one
            began = time.monotonic()
            with pytest.raises(StoreError) as caught:
                store.now()
            assert caught.value.retriable
            assert caught.value.code in {"store.timeout", "store.unreachable"}
            assert time.monotonic() - began < 10
    finally:
        resume(berlin_server)
    deadline = time.monotonic() + 30
    while True:  # what has waited in the server comes first
        try:
            assert store.now() > 0
            break
        except StoreError as error:
            if not error.retriable or time.monotonic() > deadline:
                raise
    store.close()
    FreshDatabase(berlin_server, "hanging").execute("DROP DATABASE hanging")


@both
def test_what_waits_for_the_table_to_be_altered_does_not_pile_up_at_the_server(
    database: FreshDatabase,
) -> None:
    """Each statement that was given up waited on, with a connection of the server's: for a year."""
    create(database)
    patient = open_store(Store(url=f"{database.url}?read_timeout=3"))
    with (
        database.connect(autocommit=False) as reading,
        database.connect() as altering,
        ThreadPoolExecutor() as beside,
        reading.cursor() as cursor,
    ):
        cursor.execute("SELECT COUNT(*) FROM events")
        altered = beside.submit(altering.cursor().execute, "ALTER TABLE events COMMENT = 'new'")
        time.sleep(0.5)
        for _ in range(2):
            with pytest.raises(StoreError) as raised:
                patient.poll(0, 0, 10)
            assert (raised.value.code, raised.value.retriable) == ("store.timeout", True)
        waiting = [row[7] for row in database.execute("SHOW FULL PROCESSLIST") if row[7]]
        assert [sql for sql in waiting if "events" in sql] == ["ALTER TABLE events COMMENT = 'new'"]
        reading.rollback()
        altered.result(20)
        assert not patient.poll(0, 0, 10).has_rows


def test_the_options_of_tls_reach_the_connection(database: FreshDatabase) -> None:
    create(database)
    folder = Path(database.execute("SELECT @@datadir")[0][0])
    if not (folder / "ca.pem").is_file():
        pytest.skip("the server's certificates are not on this machine")

    def cipher(options: str) -> str:
        connection = connect_for_reading(Store(url=f"{database.url}?{options}"))
        with closing(connection):
            return str(run(connection, "SHOW SESSION STATUS LIKE 'Ssl_cipher'")[0][1])

    assert cipher(f"ssl_ca={folder / 'ca.pem'}&ssl_verify_cert=true")
    assert not cipher("ssl_disabled=true")
    with pytest.raises(StoreError, match="certificate") as caught:
        cipher(f"ssl_ca={folder / 'client-cert.pem'}&ssl_verify_cert=true")
    assert caught.value.code == "store.tls_failed"
    with pytest.raises(StoreError) as caught:
        cipher("ssl_ca=/nowhere/ca.pem")
    assert caught.value.code == "store.tls_failed"


def test_what_stays_on_this_machine_is_encrypted_only_where_it_must_be(
    database: FreshDatabase,
) -> None:
    create(database)
    name = f"strict_{uuid.uuid4().hex[:8]}"

    def cipher(config: Store) -> str:
        with closing(connect_for_reading(config)) as connection:
            return str(run(connection, "SHOW SESSION STATUS LIKE 'Ssl_cipher'")[0][1])

    assert not cipher(Store(url=database.url))
    database.execute(f"CREATE USER {name} IDENTIFIED BY 'word' REQUIRE SSL")
    database.execute(f"GRANT SELECT ON events TO {name}")
    try:
        account = f"{name}:word@"
        url = database.url.replace("root@", account)
        assert account in url
        for _ in range(2):
            assert cipher(Store.model_validate({"url": url}))
    finally:
        database.execute(f"DROP USER {name}")


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (9001, "Max connect timeout reached while reaching hostgroup 0 after 10000ms"),
        (9501, "Timed-out waiting to acquire database connection"),
        (3032, "The server is currently in offline mode"),
    ],
)
def test_a_proxy_that_finds_no_server_is_waited_for(number: int, text: str) -> None:
    error = store_error(pymysql.err.OperationalError(number, text))
    assert (error.code, error.retriable) == ("store.unreachable", True)
