"""Scenario F3: the database's address moves to a replica that has been promoted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from eventpub.errors import LocalError
from eventpub.local.servers import Database
from tests.conftest import FreshDatabase
from tests.publisher.conftest import NewPublisher
from tests.publisher.harness import (
    Publisher,
    Topic,
    compare,
    create_table,
    eventually,
    insert,
    transaction,
)
from tests.servers import Replica, replica_of, replicating
from tests.servers.databases import mariadb, mysql
from tests.tcp_proxy import TcpProxy
from tests.variants import variants

SERVERS: dict[str, tuple[Callable[..., Database], str]] = {
    "mysql": (mysql, "utf8mb4_0900_bin"),
    "mariadb": (mariadb, "utf8mb4_nopad_bin"),
}


@dataclass
class Pair:
    """A primary, its replica, and the address that clients use."""

    primary: Database
    replica: Replica
    address: TcpProxy

    @property
    def old(self) -> FreshDatabase:
        return FreshDatabase(self.primary, "eventpub")

    @property
    def new(self) -> FreshDatabase:
        return FreshDatabase(self.replica.server, "eventpub")

    def fail_over(self) -> None:
        """The primary dies; the replica takes its place and its address."""
        self.primary.kill()
        self.replica.promote()
        self.address.target = self.replica.server.port
        self.address.cut()


@contextmanager
def pair_of(kind: str, folder: Path) -> Iterator[Pair]:
    """Skips where this platform cannot have it."""
    start, collation = SERVERS[kind]
    options = replicating(1, mariadb=kind == "mariadb")
    try:
        with (
            start(folder / "primary", options=options) as primary,
            replica_of(primary, folder / "replica") as replica,
            TcpProxy(primary.port) as address,
        ):
            pair = Pair(primary, replica, address)
            create_table(pair.old, collation=collation)
            yield pair
    except LocalError as error:
        if error.code == "local.unsupported_platform":
            pytest.skip(str(error))
        raise


def write(database: FreshDatabase, aggregate_id: str, *versions: int, payload: bytes = b"") -> None:
    """Committed at once."""
    with transaction(database) as cursor:
        for version in versions:
            insert(cursor, aggregate_id, version, payload)
        cursor.connection.commit()


def publisher_of(pair: Pair, new_publisher: NewPublisher) -> Publisher:
    """Running; it has published the first events."""
    url = f"mysql+pymysql://root@127.0.0.1:{pair.address.port}/eventpub"
    publisher = new_publisher(pair.old, store={"url": url, "connect_timeout": "3s"})
    publisher.start()
    write(pair.old, "a", 1, 2)
    write(pair.old, "renewed", 1)
    publisher.until_published("a", [1, 2])
    publisher.until_published("renewed", [1])
    return publisher


@pytest.mark.parametrize("kind", variants(SERVERS))
def test_f3_a_promoted_replica_that_has_everything(
    kind: str, tmp_path: Path, new_publisher: NewPublisher
) -> None:
    with pair_of(kind, tmp_path) as pair:
        publisher = publisher_of(pair, new_publisher)
        with transaction(pair.old) as given_up:
            insert(given_up, "a", 3)
            write(pair.old, "last", 1)
            pair.replica.wait_until_applied()
            pair.fail_over()  # what was open is rolled back by it
        write(pair.new, "a", 3, 4)
        write(pair.new, "first", 1)
        publisher.until_published("a", [1, 2, 3, 4])
        publisher.until_published("last", [1])
        publisher.until_published("first", [1])
        differences = compare(pair.new, publisher.topic)
        assert not differences, differences


@pytest.mark.engines("threads", "here")
def test_f3_an_address_that_moves_and_leaves_connections_where_they_were(
    tmp_path: Path, new_publisher: NewPublisher
) -> None:
    """As names, HAProxy and others do: the former primary lives on, and nobody writes to it."""
    with pair_of("mysql", tmp_path) as pair:
        publisher = publisher_of(pair, new_publisher)
        publisher.until_spark_publishes()
        pair.replica.wait_until_applied()
        pair.replica.promote()
        pair.address.target = pair.replica.server.port
        write(pair.new, "a", 3, 4)
        write(pair.new, "first", 1)
        publisher.until_published("first", [1])
        publisher.until_published("a", [1, 2, 3, 4])
        differences = compare(pair.new, publisher.topic)
        assert not differences, differences


def fall_behind(pair: Pair, publisher: Publisher) -> None:
    """Two events are published and die with the primary; one of them is written anew later."""
    pair.replica.wait_until_applied()
    pair.replica.stop_receiving()
    write(pair.old, "lost", 1)
    write(pair.old, "renewed", 2, payload=b"before")
    publisher.until_published("lost", [1])
    publisher.until_published("renewed", [1, 2])
    pair.fail_over()


def test_f3_a_promoted_replica_that_lacks_the_last_transactions(
    tmp_path: Path, new_publisher: NewPublisher
) -> None:
    """What it has is published once and in order; what is lost there stays published."""
    with pair_of("mysql", tmp_path) as pair:
        publisher = publisher_of(pair, new_publisher)
        fall_behind(pair, publisher)
        write(pair.new, "a", 3, 4)
        write(pair.new, "renewed", 2, payload=b"after")
        write(pair.new, "renewed", 3, payload=b"after")
        write(pair.new, "other", 1)
        publisher.until_published("other", [1])
        publisher.until_published("a", [1, 2, 3, 4])
        publisher.until_published("renewed", [1, 2, 3])
        differences = compare(pair.new, publisher.topic)
        assert differences.unknown == [("lost", 1)]
        differences.unknown.clear()
        assert not differences, differences
        assert publisher.process is not None
        assert publisher.process.poll() is None, publisher.words()
        the_conflict_is_a_dead_letter(publisher)


def the_conflict_is_a_dead_letter(publisher: Publisher) -> None:
    """The event that was written anew is not dropped without a word."""
    dead = Topic(publisher.topic.bootstrap_servers, f"{publisher.topic.name}.dead")
    eventually(lambda: [r.key for r in dead.read()] == ["renewed"], 20, every=0.5)
