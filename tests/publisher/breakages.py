"""Ways to break a publisher's surroundings, and to put them right again.

`servers` starts one broker and one database whose clock can be moved; `installed` is a table, a
topic and a publisher (with pages on a free port and a JSON log) of one breakage; each class of
`BREAKAGES` breaks one thing while its `with` block runs:

    with servers(folder) as running, installed(running, folder / "broker") as case:
        case.start()
        with BREAKAGES["broker"](case):
            ...
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import pymysql
import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)
from prometheus_client.parser import text_string_to_metric_families

from eventpub.local.servers import Database, Kafka
from tests.conftest import FreshDatabase, fresh_database, small_file_system
from tests.publisher.harness import Publisher, create_table, eventually, insert, transaction
from tests.publisher.test_moving_clocks import SHIM, Clock
from tests.servers.databases import mysql
from tests.servers.kafka import kafka
from tests.servers.signals import pause, resume

TOKEN = "the-token-of-this-dashboard"
MOST_BYTES = 100_000
"""Of a record, by the topic's configuration."""


@dataclass(frozen=True)
class Servers:
    """The servers of all breakages.

    Attributes:
        clock: of the database; None: it cannot be moved here.
        environment: of the database's process.
    """

    broker: Kafka
    database: Database
    clock: Clock | None
    environment: dict[str, str]

    def start_database(self) -> None:
        """Start it again after `kill`, with the clock that can be moved."""
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.environment.items():
                patch.setenv(name, value)
            self.database.start()


@contextmanager
def servers(folder: Path) -> Iterator[Servers]:
    """Start them below a folder; stop them at the end."""
    environment = _movable_clock(folder)
    # before the server maps its file: who reads a truncated one is ended by SIGBUS
    clock = Clock(folder / "ahead") if environment else None
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        options = ["--skip-log-bin", "--innodb-flush-log-at-trx-commit=2"]
        database = mysql(folder / "mysql", options=options)
    with database, kafka(folder / "kafka") as broker:
        yield Servers(broker, database, clock, environment)


def _movable_clock(folder: Path) -> dict[str, str]:
    """The environment of a server whose clock a `Clock` moves; nothing without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return {}
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(SHIM)
    command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return {"LD_PRELOAD": str(library), "CLOCK_AHEAD": str(folder / "ahead")}


class Case:
    """One publisher and what it works with: an account of its own, whose password is in a file."""

    def __init__(
        self, running: Servers, database: FreshDatabase, folder: Path, disk: Path | None
    ) -> None:
        self.servers, self.database, self.disk = running, database, disk
        self.password_file = folder / "password"
        self.account = f"reader_{uuid.uuid4().hex[:8]}"
        topic = f"orders.{uuid.uuid4().hex[:8]}"
        self.publisher = Publisher(
            folder,
            database.url_of(self.account),
            topic,
            running.broker.bootstrap_servers,
            {
                "app": {"id": topic, "state_dir": str((disk or folder) / "state")},
                "store": {"url": database.url_of(self.account)}
                | {"password_file": str(self.password_file), "connect_timeout": "3s"},
                "read": {"delay": "300ms"},
                "gaps": {"backoff_base": "1s", "max_backoff": 10},
                "ops": {"http": "127.0.0.1:0", "token": TOKEN, "log": "json"},
            },
        )
        self.publisher.state = (disk or folder) / "state"
        self.set_password("first-secret-of-this-account", create=True)
        database.execute(f"GRANT SELECT ON {database.name}.* TO {self.account}@'%'")
        database.execute(f"GRANT PROCESS, REPLICATION CLIENT ON *.* TO {self.account}@'%'")

    # -- what a test does --------------------------------------------------------------------------

    def set_password(self, password: str, *, create: bool = False, file: bool = True) -> None:
        """Of the account; where `file`, also in the file that the publisher reads."""
        verb = "CREATE" if create else "ALTER"
        self.database.execute(f"{verb} USER {self.account}@'%' IDENTIFIED BY '{password}'")
        if file:
            self.password_file.write_text(f"{password}\n")

    def end_connections(self) -> None:
        """Those of the publisher's account, as a proxy or an administrator ends them."""
        for (number,) in self.database.execute(
            "SELECT id FROM information_schema.processlist WHERE user = %s", (self.account,)
        ):
            with suppress(pymysql.err.MySQLError):  # it has ended by itself meanwhile
                self.database.execute(f"KILL {number}")

    def write(self, aggregate_id: str, *versions: int, payload: bytes = b"{}") -> None:
        """Append events of one aggregate, committed at once."""
        with transaction(self.database) as cursor:
            for version in versions:
                insert(cursor, aggregate_id, version, payload)
            cursor.connection.commit()

    def admin(self) -> AdminClient:
        """Of the broker; to be kept until what it does is done."""
        return AdminClient({"bootstrap.servers": self.servers.broker.bootstrap_servers})

    def start(self) -> None:
        """Start the publisher; wait until it has published and says that all is well."""
        self.publisher.start()
        aggregate_id = f"start-{uuid.uuid4().hex[:6]}"
        self.write(aggregate_id, 1)
        self.publisher.until_published(aggregate_id, [1])
        self.publisher.topic.close()  # whose client would complain of a broker that is away
        eventually(lambda: self.get("/readyz")[0] == 200)

    # -- what the publisher says -------------------------------------------------------------------

    def log(self) -> list[dict[str, Any]]:
        """The log's lines; each must be a JSON object."""
        return [json.loads(line) for line in self.publisher.log.read_text().splitlines()]

    @property
    def address(self) -> str:
        """Where the last start serves its pages; "" where it does not yet."""
        served = [line for line in self.log() if "metrics, health and dashboard" in line["event"]]
        return str(served[-1]["address"]) if served else ""

    def get(self, path: str, timeout: float = 5.0) -> tuple[int, str]:
        """A page: its status, 0 where nobody answers, and its text."""
        address = eventually(lambda: self.address)
        try:
            with urllib.request.urlopen(address + path, timeout=timeout) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def status(self) -> dict[str, Any]:
        """The object that `eventpub status --json` prints."""
        done = self.publisher.command("status", "--json")
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def page(self) -> dict[str, Any]:
        """`/status`; empty where nobody answers."""
        status, text = self.get("/status")
        return dict(json.loads(text)) if status == 200 else {}

    def metrics(self) -> dict[str, float]:
        """`/metrics`, by name and labels; empty where nobody answers."""
        status, text = self.get("/metrics")
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text) if status == 200 else ():
            for sample in family.samples:
                labels = ",".join(f"{k}={v}" for k, v in sample.labels.items())
                found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return found


@contextmanager
def installed(running: Servers, folder: Path, *, on_small_disk: bool = False) -> Iterator[Case]:
    """A case of its own, not started; ended and cleaned up at the end.

    Args:
        folder: for configuration, log and state; it need not exist.
        on_small_disk: the state lies on a file system of its own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        disk = stack.enter_context(small_file_system(folder / "disk")) if on_small_disk else None
        database = stack.enter_context(fresh_database(running.database))
        create_table(database)
        case = Case(running, database, folder, disk)
        stack.enter_context(case.publisher)
        yield case
        database.execute(f"DROP USER {case.account}@'%'")


class Breakage(ABC):
    """One thing that is broken while a `with` block runs, unless `heal` was called before."""

    name: ClassVar[str]
    on_small_disk: ClassVar[bool] = False
    settings: ClassVar[dict[str, dict[str, Any]]] = {}

    def __init__(self, case: Case) -> None:
        self.case = case
        self._is_broken = False

    @abstractmethod
    def _break(self) -> None: ...

    @abstractmethod
    def _heal(self) -> None: ...

    def __enter__(self) -> Self:
        self._break()
        self._is_broken = True
        self.began = time.monotonic()
        return self

    def heal(self) -> None:
        """Put it right."""
        if self._is_broken:
            self._is_broken = False
            self._heal()

    def __exit__(self, *_: object) -> None:
        self.heal()


class DatabaseAway(Breakage):
    """The database is killed; it starts again."""

    name = "database"

    def _break(self) -> None:
        self.case.servers.database.kill()

    def _heal(self) -> None:
        self.case.servers.start_database()


class BrokerAway(Breakage):
    """The only broker is killed; it starts again."""

    name = "broker"

    def _break(self) -> None:
        self.case.servers.broker.kill()

    def _heal(self) -> None:
        self.case.servers.broker.start()


class BrokerHangs(Breakage):
    """The only broker keeps its connections and answers nothing; then it goes on."""

    name = "hang"
    settings: ClassVar[dict[str, dict[str, Any]]] = {"sink": {"transaction_timeout": "10s"}}

    def _break(self) -> None:
        pause(self.case.servers.broker)

    def _heal(self) -> None:
        resume(self.case.servers.broker)


class DiskFull(Breakage):
    """Something else fills the disk of the state directory; it is removed."""

    name = "disk"
    on_small_disk = True

    @property
    def _ballast(self) -> Path:
        assert self.case.disk is not None
        return self.case.disk / "ballast"

    def _break(self) -> None:
        with self._ballast.open("wb", buffering=0) as out:
            try:
                while True:
                    out.write(bytes(65536))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    def _heal(self) -> None:
        self._ballast.unlink()


class TopicDeleted(Breakage):
    """The topic is deleted; an empty one of the same name is created."""

    name = "topic"

    def _break(self) -> None:
        self._partitions = self.case.publisher.topic.partitions()
        admin = self.case.admin()
        admin.delete_topics([self._topic])[self._topic].result(30)

    def _heal(self) -> None:
        new = NewTopic(self._topic, self._partitions, 1)
        admin = self.case.admin()
        with suppress(KafkaException):  # a publisher that was started again has created it
            admin.create_topics([new])[self._topic].result(30)

    @property
    def _topic(self) -> str:
        return self.case.publisher.topic.name


class Frozen(Breakage):
    """The publisher's process is stopped (SIGSTOP), as by a debugger or a paused container."""

    name = "freeze"

    def _break(self) -> None:
        assert self.case.publisher.process is not None
        os.kill(self.case.publisher.process.pid, signal.SIGSTOP)

    def _heal(self) -> None:
        assert self.case.publisher.process is not None
        os.kill(self.case.publisher.process.pid, signal.SIGCONT)


class ClockBack(Breakage):
    """The database's clock goes back by 30 s, and forward again."""

    name = "clock"
    seconds = 30.0

    def _break(self) -> None:
        if self.case.servers.clock is None:
            pytest.skip("there is no C compiler")
        self.case.servers.clock.step(-self.seconds)

    def _heal(self) -> None:
        assert self.case.servers.clock is not None
        self.case.servers.clock.step(self.seconds)


class PasswordRotated(Breakage):
    """The database has another password than the file, and ends the connections; then both agree.

    Attributes:
        password: the new one.
    """

    name = "password"
    password = "second-secret-of-this-account"

    def _break(self) -> None:
        self.case.set_password(self.password, file=False)
        self.case.end_connections()

    def _heal(self) -> None:
        self.case.password_file.write_text(f"{self.password}\n")


class Gap(Breakage):
    """Versions 1 and 3 of an aggregate are there; version 2 is committed at last."""

    name = "gap"
    aggregate_id = "gap-1"

    def _break(self) -> None:
        self.case.write(self.aggregate_id, 1, 3)

    def _heal(self) -> None:
        self.case.write(self.aggregate_id, 2)


class LargeRow(Breakage):
    """An event that the topic does not take; its limit is raised."""

    name = "large row"
    aggregate_id = "large-1"

    def _break(self) -> None:
        self._limit(MOST_BYTES)
        self.case.write(self.aggregate_id, 1, payload=os.urandom(2 * MOST_BYTES))

    def _heal(self) -> None:
        self._limit(10 * MOST_BYTES)

    def _limit(self, most: int) -> None:
        entry = ConfigEntry(
            "max.message.bytes", str(most), incremental_operation=AlterConfigOpType.SET
        )
        topic = self.case.publisher.topic.name
        resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
        admin = self.case.admin()
        admin.incremental_alter_configs([resource])[resource].result(30)


BREAKAGES: dict[str, type[Breakage]] = {
    breakage.name: breakage
    for breakage in (
        DatabaseAway, BrokerAway, BrokerHangs, DiskFull, TopicDeleted, Frozen, ClockBack,
        PasswordRotated, Gap, LargeRow,
    )
}  # fmt: skip
"""Each kind, by its name."""
