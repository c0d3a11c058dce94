"""Real servers for the tests: started when the first test asks for one, stopped at the end.

`database` is a fresh database on MySQL; ``@pytest.mark.parametrize("database", ["mysql",
"mariadb"], indirect=True)`` runs a test on both. A server that this platform cannot have skips the
tests that ask for it; any other failure to start one fails them.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import hypothesis
import pytest

from eventpub.errors import LocalError
from eventpub.local.processes import Server
from eventpub.local.servers import Database, Kafka
from tests.servers.databases import mariadb, mysql
from tests.servers.kafka import kafka

if TYPE_CHECKING:
    from pymysql.connections import Connection
    from pymysql.cursors import Cursor

S = TypeVar("S", bound=Server)

# No test asserts how long it takes: beside five others, a step may take seconds.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# A shell that starts the tests in the background has them ignore Ctrl-C, and so would every command
# that they start and send one.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A broker lives for seconds: better compiled code costs more than it brings. (CPU s until it has
# started, and for 300 transactions afterwards: 4.9 and 8.8 as it is otherwise, 3.7 and 4.2 so.)
os.environ.setdefault("KAFKA_JVM_PERFORMANCE_OPTS", "-XX:+UseSerialGC -XX:TieredStopAtLevel=1")

# a killed server loses nothing by it, only a killed machine; 15% less CPU, 40% with the binary log
_LESS_WORK = ["--innodb-flush-log-at-trx-commit=2"]

_WHOLE = [
    "cli/test_command.py",
    "cli/test_demo.py",
    "cli/test_init.py",
    "cli/test_on_servers.py",
    "docs/test_how_to.py",
    "docs/test_tutorial.py",
    "frameworks/",
    "publisher/",
    "release/",
    "security/",
    "test_packaging.py",
]
_SAMPLE = {"test_streaming.py", "test_transactions.py"}
"""Of tests/publisher, beside the parts."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of whole publishers, by their file."""
    for item in items:
        path = item.path.relative_to(Path(__file__).parent).as_posix()
        if path.startswith(tuple(_WHOLE)) and item.path.name not in _SAMPLE:
            item.add_marker(pytest.mark.whole)


@dataclass(frozen=True)
class FreshDatabase:
    """An empty database, dropped when the test ends."""

    server: Database
    name: str

    @property
    def url(self) -> str:
        """SQLAlchemy's URL, as root."""
        return self.server.url(database=self.name)

    def url_of(self, user: str, password: str = "") -> str:
        """The URL for another user."""
        return self.server.url(user, password=password, database=self.name)

    def connect(self, **arguments: Any) -> Connection[Cursor]:
        """A connection as root, autocommit unless told otherwise.

        Without TLS, whose default context costs Python 40 ms for each of some thousand connections.
        """
        defaults = {"autocommit": True, "ssl_disabled": True}
        return self.server.connect(self.name, **{**defaults, **arguments})

    def execute(self, statement: str, parameters: Any = None) -> tuple[tuple[Any, ...], ...]:
        """Runs one statement on a connection of its own; returns its rows."""
        with self.connect() as connection, connection.cursor() as cursor:
            cursor.execute(statement, parameters)
            return tuple(cursor.fetchall())


def _serving(start: Callable[[], S]) -> Iterator[S]:
    try:
        server = start()
    except LocalError as error:
        if error.code == "local.unsupported_platform":
            pytest.skip(str(error))
        raise
    with server:
        yield server


@pytest.fixture(scope="session")
def kafka_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    """A broker for all tests; who stops or kills one starts a private one."""
    yield from _serving(lambda: kafka(tmp_path_factory.mktemp("kafka")))


@pytest.fixture(scope="session")
def mysql_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """A MySQL for all tests."""
    yield from _serving(
        lambda: mysql(tmp_path_factory.mktemp("mysql"), options=["--skip-log-bin", *_LESS_WORK])
    )


@pytest.fixture(scope="session")
def mariadb_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """A MariaDB for all tests."""
    yield from _serving(lambda: mariadb(tmp_path_factory.mktemp("mariadb"), options=_LESS_WORK))


@contextmanager
def fresh_database(server: Database) -> Iterator[FreshDatabase]:
    """A database of a name that nobody else uses."""
    fresh = FreshDatabase(server, f"test_{uuid.uuid4().hex[:12]}")
    with server.connect(None, ssl_disabled=True) as connection, connection.cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {fresh.name}")
    try:
        yield fresh
    finally:
        with server.connect(None, ssl_disabled=True) as connection, connection.cursor() as cursor:
            cursor.execute(f"DROP DATABASE IF EXISTS {fresh.name}")


@pytest.fixture
def database(request: pytest.FixtureRequest) -> Iterator[FreshDatabase]:
    """A fresh database on MySQL, or on the server that the test's parameter names."""
    kind = getattr(request, "param", "mysql")
    with fresh_database(request.getfixturevalue(f"{kind}_server")) as fresh:
        yield fresh


@pytest.fixture
def topic_name() -> str:
    """A name that no other test uses; the topic does not exist yet."""
    return f"orders.{uuid.uuid4().hex[:12]}"


@contextmanager
def small_file_system(folder: Path) -> Iterator[Path]:
    """A file system of its own with little room; needs the rights to mount one."""
    folder.mkdir()
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("only root may mount a small file system")
    options = [mount, "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(folder)]
    if subprocess.run(options, check=False, capture_output=True).returncode != 0:
        pytest.skip("mounting is not allowed here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """As `small_file_system`."""
    with small_file_system(tmp_path / "small") as folder:
        yield folder
