"""Which server answers: its identity, and whether it is a replica, as far as an account may see."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eventpub.config import Store
from eventpub.errors import StoreError
from eventpub.local.servers import Database
from eventpub.sources.mysql import EventStore
from eventpub.sources.mysql import server as roles
from eventpub.sources.mysql.checking import checks
from eventpub.sources.mysql.connection import connect_for_reading
from eventpub.sources.mysql.server import Server, cluster_of, examine, require_primary
from tests.servers.databases import mariadb, mysql


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Database, Database]]:
    """A MariaDB and its replica, which is writable."""
    folder = tmp_path_factory.mktemp("pair")
    with (
        mariadb(folder / "primary", options=["--server-id=1", "--log-bin=bin"]) as primary,
        mariadb(folder / "replica", options=["--server-id=2"]) as replica,
    ):
        execute(
            replica,
            f"CHANGE MASTER TO MASTER_HOST = '127.0.0.1', MASTER_PORT = {primary.port},"
            " MASTER_USER = 'root', MASTER_USE_GTID = slave_pos, MASTER_SSL = 0,"
            " MASTER_SSL_VERIFY_SERVER_CERT = 0",
            "START SLAVE",
            "CREATE USER plain@'%'",
            "GRANT SELECT ON eventpub.* TO plain@'%'",
        )
        yield primary, replica


def execute(server: Database, *statements: str) -> None:
    """As root."""
    with server.connect(None, autocommit=True) as connection, connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)


def seen(server: Database, user: str = "root") -> Server:
    """What an account sees."""
    config = Store(url=server.url(user))
    connection = connect_for_reading(config)
    try:
        return examine(config, connection)
    finally:
        connection.close()


def is_replica(server: Database, user: str = "root") -> bool:
    """Whether an account sees that it is."""
    return seen(server, user).is_replica(Store(url=server.url(user)))


def test_a_replica_of_mariadb_is_seen_and_so_is_a_stopped_one(
    pair: tuple[Database, Database],
) -> None:
    primary, replica = pair
    assert not is_replica(primary)
    assert seen(primary).source_is_visible
    assert seen(primary).identity != seen(replica).identity
    assert seen(replica).source == f"127.0.0.1:{primary.port}"
    deadline = time.monotonic() + 20
    while not is_replica(replica, "plain"):  # by its status, which everybody may read
        assert time.monotonic() < deadline
        time.sleep(0.2)
    execute(replica, "STOP SLAVE")
    assert is_replica(replica)
    assert not seen(replica, "plain").source_is_visible
    execute(replica, "SET GLOBAL read_only = ON")
    assert seen(replica, "plain").read_only
    config = Store(url=replica.url("plain"))
    connection = connect_for_reading(config)
    with pytest.raises(StoreError, match="read only") as raised:
        require_primary(config, connection)
    assert (raised.value.code, raised.value.retriable) == ("store.replica", True)
    require_primary(config.model_copy(update={"allow_replica": True}), connection)
    connection.close()


def test_of_two_that_replicate_each_other_the_one_that_takes_all_writes_may_be_read(
    pair: tuple[Database, Database],
) -> None:
    """Nobody can see that the writers leave the other one alone; so somebody has to say it."""
    active, passive = pair
    execute(passive, "SET GLOBAL read_only = ON", "START SLAVE")
    execute(
        active,
        f"CHANGE MASTER TO MASTER_HOST = '127.0.0.1', MASTER_PORT = {passive.port},"
        " MASTER_USER = 'root', MASTER_USE_GTID = slave_pos, MASTER_SSL = 0,"
        " MASTER_SSL_VERIFY_SERVER_CERT = 0",
        "START SLAVE",
    )
    try:
        for server, promised, is_read in (
            (active, False, False),
            (active, True, True),
            (passive, False, False),
            (passive, True, False),
        ):
            config = Store(url=server.url(), takes_all_writes=promised)
            if is_read:
                seen(server).require_primary(config)
                continue
            with pytest.raises(StoreError) as raised:
                seen(server).require_primary(config)
            assert raised.value.code == "store.replica"
            assert "store.takes_all_writes" in str(raised.value.suggestion)
    finally:
        execute(active, "STOP SLAVE", "RESET SLAVE ALL")


def test_a_primary_that_becomes_a_replica_and_still_takes_writes_is_noticed_within_a_minute(
    pair: tuple[Database, Database], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only `read_only` was asked again, so it was read as a primary until the process ended."""
    primary, other = pair
    config = Store(url=primary.url())
    connection = connect_for_reading(config)
    clock = 1000.0
    monkeypatch.setattr(roles, "monotonic", lambda: clock)
    require_primary(config, connection)
    execute(
        primary,
        f"CHANGE MASTER TO MASTER_HOST = '127.0.0.1', MASTER_PORT = {other.port},"
        " MASTER_USER = 'root', MASTER_SSL = 0, MASTER_SSL_VERIFY_SERVER_CERT = 0",
    )
    try:
        clock += 61
        for _ in range(2):
            with pytest.raises(StoreError) as raised:
                require_primary(config, connection)
            assert (raised.value.code, raised.value.retriable) == ("store.replica", True)
    finally:
        execute(primary, "RESET SLAVE ALL")
    require_primary(config, connection)
    connection.close()


GALERA = {"wsrep_on": "ON", "wsrep_provider": "/usr/lib/libgalera_smm.so"}
GROUP = {"group_replication_group_name": "aaaaaaaa-0000-0000-0000-000000000000"}


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({**GALERA, "wsrep_cluster_name": "shop"}, "Galera cluster 'shop'"),
        ({**GALERA, "wsrep_on": "OFF"}, None),
        ({"wsrep_on": "ON", "wsrep_provider": "none"}, None),
        ({**GROUP, "group_replication_single_primary_mode": "OFF"}, "multi-primary"),
        ({**GROUP, "group_replication_single_primary_mode": "ON"}, None),
        ({}, None),
    ],
)
def test_where_several_servers_take_writes_one_is_read_if_it_takes_all(
    variables: dict[str, str], named: str | None
) -> None:
    """As a server says it of itself; there is none of the first kind to be had for tests."""
    found = cluster_of(variables)
    assert (found is None) if named is None else (named in str(found))
    server = Server("s", False, None, True, found)
    config = Store(url="mysql+pymysql://u@h:1/d")
    if named is not None:
        with pytest.raises(StoreError) as raised:
            server.require_primary(config)
        assert raised.value.code == "store.multi_primary"
        assert "store.takes_all_writes" in str(raised.value.suggestion)
        assert "RESET" not in str(raised.value.suggestion)
        assert "open there are not seen" in raised.value.message
    promised = config.model_copy(update={"takes_all_writes": True})
    server.require_primary(promised)
    assert not server.is_replica(promised)
    with pytest.raises(StoreError):
        Server("s", True, None, True, found).require_primary(promised)


def test_a_group_with_several_primaries_is_refused_by_doctor_and_run(tmp_path: Path) -> None:
    """A server that is set up for one."""
    group = "loose-group-replication"
    options = ["--plugin-load-add=group_replication.so", "--gtid-mode=ON", "--log-bin=bin"]
    options += ["--enforce-gtid-consistency=ON", f"--{group}-single-primary-mode=OFF"]
    options += [f"--{group}-group-name={GROUP['group_replication_group_name']}"]
    options += [f"--{group}-enforce-update-everywhere-checks=ON"]
    with mysql(tmp_path, options=options) as server:
        execute(server, "CREATE DATABASE shop")
        for promised in (False, True):
            config = Store(url=server.url(database="shop"), takes_all_writes=promised)
            [check] = [c for c in checks(config) if c.name == "event store: server"]
            assert check.status == ("ok" if promised else "wrong"), check
            assert check.code == (None if promised else "store.multi_primary")
            if promised:
                EventStore.server(config)
                continue
            with pytest.raises(StoreError, match="multi-primary"):
                EventStore.server(config)
