"""The servers of a measurement, and what every number has to say of where it was measured."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import confluent_kafka
import psutil

from eventpub.local.downloads import find_java
from eventpub.local.servers import KAFKA_VERSION, Database, Kafka
from tests.servers.databases import mysql
from tests.servers.fill import fill
from tests.servers.kafka import kafka

from . import usage

PAYLOAD_BYTES = 280
PARTITIONS = 8
TABLE = """
CREATE TABLE events (
  id           BIGINT AUTO_INCREMENT PRIMARY KEY,
  aggregate_id VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_0900_bin NOT NULL,
  version      BIGINT NOT NULL,
  event_type   VARCHAR(255) NOT NULL,
  payload      LONGBLOB NULL,
  metadata     JSON NULL,
  create_time  TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
  UNIQUE KEY (aggregate_id, version),
  KEY (create_time)
)
"""
MYSQL_OPTIONS = ("--innodb-redo-log-capacity=2G",)
_WITH_BINLOG = ("--server-id=1", "--gtid-mode=ON", "--enforce-gtid-consistency=ON")


class Machine:
    """A Kafka broker and a MySQL of its own, in a folder that is deleted afterwards.

    Args:
        binlog: whether the database writes one, as change data capture needs.
        folder: where the data are; None: a temporary folder.
    """

    def __init__(self, *, binlog: bool = False, folder: Path | None = None) -> None:
        self.binlog = binlog
        self.folder = Path(tempfile.mkdtemp(prefix="eventpub-bench-", dir=folder))
        self.options = (*MYSQL_OPTIONS, *(_WITH_BINLOG if binlog else ("--skip-log-bin",)))
        self.database: Database
        self.broker: Kafka
        self._names = 0

    def __enter__(self) -> Self:
        try:
            with ThreadPoolExecutor(2) as pool:
                broker = pool.submit(kafka, self.folder / "kafka")
                self.database = mysql(self.folder / "mysql", options=self.options)
                self.broker = broker.result()
        except BaseException:
            shutil.rmtree(self.folder, ignore_errors=True)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.broker.stop()
        self.database.stop()
        shutil.rmtree(self.folder, ignore_errors=True)

    def name(self, stem: str) -> str:
        """A name that was not given before."""
        self._names += 1
        return f"{stem}-{self._names}"

    def table(self, database: str) -> str:
        """Makes a database with an empty table `events`; returns its URL."""
        with self.database.connect(None) as connection, connection.cursor() as cursor:
            cursor.execute(f"DROP DATABASE IF EXISTS {database}")
            cursor.execute(f"CREATE DATABASE {database}")
            cursor.execute(f"USE {database}")
            cursor.execute(TABLE)
        return self.database.url(database=database)

    def drop(self, database: str) -> None:
        """Frees the disk space of a database that `table` made."""
        with self.database.connect(None) as connection, connection.cursor() as cursor:
            cursor.execute(f"DROP DATABASE {database}")

    def grow(self, url: str, events: int, aggregates: int, **arguments: Any) -> float:
        """As `fill`, of many: indexes beside the primary key are made anew, from sorted rows."""
        started = time.monotonic()
        database = url.rpartition("/")[2]
        with self.database.connect(database) as connection, connection.cursor() as cursor:
            cursor.execute("SET SESSION innodb_ddl_buffer_size = 268435456")
            cursor.execute("ALTER TABLE events DROP INDEX aggregate_id, DROP INDEX create_time")
            fill(url, events, aggregates, **{"payload_bytes": PAYLOAD_BYTES, **arguments})
            cursor.execute(
                "ALTER TABLE events ADD UNIQUE KEY (aggregate_id, version), ADD KEY (create_time)"
            )
            cursor.execute("ANALYZE TABLE events")
        return time.monotonic() - started

    def fill(self, url: str, events: int, aggregates: int, **arguments: Any) -> float:
        """Appends a backlog; returns how many seconds that took."""
        started = time.monotonic()
        fill(url, events, aggregates, **{"payload_bytes": PAYLOAD_BYTES, **arguments})
        with self.database.connect(None) as connection, connection.cursor() as cursor:
            cursor.execute(f"ANALYZE TABLE {url.rpartition('/')[2]}.events")
        return time.monotonic() - started

    def topic_bytes(self, topic: str) -> int:
        """What the topic takes on the broker's disk, without the indexes of segments."""
        partitions = (self.folder / "kafka").rglob(f"{topic}-*/*.log")
        return sum(
            file.stat().st_size
            for file in partitions
            if file.parent.name.removeprefix(f"{topic}-").isdigit()
        )

    def table_bytes(self, database: str) -> int:
        """Size of the event table's file, its indexes included."""
        with self.database.connect(None) as connection, connection.cursor() as cursor:
            cursor.execute(
                "SELECT FILE_SIZE FROM information_schema.INNODB_TABLESPACES WHERE NAME = %s",
                (f"{database}/events",),
            )
            ((size,),) = cursor.fetchall()
        return int(size)

    def questions(self) -> int:
        """How many statements the database was sent since it started."""
        with self.database.connect(None) as connection, connection.cursor() as cursor:
            cursor.execute("SHOW GLOBAL STATUS LIKE 'Questions'")
            ((_, value),) = cursor.fetchall()
        return int(value)

    def version(self) -> str:
        """The database's."""
        with self.database.connect(None) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT VERSION()")
            ((value,),) = cursor.fetchall()
        return str(value)

    def groups(self) -> list[usage.Group]:
        """The two servers' processes."""
        return [usage.one("database", self.database.pid), usage.one("broker", self.broker.pid)]

    def settings(self) -> dict[str, Any]:
        """What the servers are and how they are set."""
        return {
            "mysql": self.version(),
            "mysql_options": ["--innodb-buffer-pool-size=512M", *self.options],
            "kafka": KAFKA_VERSION,
            "kafka_heap": "-Xmx1g",
            "partitions": PARTITIONS,
            "payload_bytes": PAYLOAD_BYTES,
        }


def become_quiet(below: float = 1.0, most: float = 60.0) -> float:
    """Waits until the 1-minute load is below that, for at most so long; returns the seconds.

    What ran before, the last case as well, fades from the load within a minute.
    """
    started = time.monotonic()
    while os.getloadavg()[0] >= below and time.monotonic() - started < most:
        time.sleep(1.0)
    return time.monotonic() - started


def environment(waited: float = 0.0) -> dict[str, Any]:
    """The machine, the versions, and the commit that is measured.

    Args:
        waited: seconds, by `become_quiet`.
    """
    return {
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "git": git_version(),
        "cores": os.cpu_count(),
        "cpu": _cpu(),
        "memory_gib": round(psutil.virtual_memory().total / (1 << 30), 1),
        "load_before": [round(x, 2) for x in os.getloadavg()],
        "waited_seconds": round(waited),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "java": _java(),
        "librdkafka": confluent_kafka.libversion()[0],
        **{
            package: _version(package)
            for package in ("eventpub", "pyspark", "confluent-kafka", "rocksdict", "connectorx")
        },
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def git_version() -> str:
    """The commit of the source that runs, with ``+changes`` where it is not as committed."""
    folder = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        answer = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True
        )
        return answer.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", __file__)  # a wheel may be installed inside a clone
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "../eventpub", ".")
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "an installed wheel"


def _cpu() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        return platform.processor()
    return found[1] if found else platform.processor()


def _java() -> str:
    answer = subprocess.run(
        [find_java(), "-version"], capture_output=True, text=True, check=False
    ).stderr
    found = re.search(r'version "([^"]+)"', answer)
    return found[1] if found else "?"
