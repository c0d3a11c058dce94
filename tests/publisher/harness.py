"""The installed command in its own process, and an independent look at what it did.

Nothing that judges here shares code with the publisher: the table is made by plain SQL, and the
topic is read by a consumer of its own.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

import psutil
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from eventpub.ops.asking import ask_running
from eventpub.state import StateDir
from eventpub.state_files import replace_file
from tests.conftest import FreshDatabase
from tests.publisher import forked

EVENTPUB = str(Path(sys.executable).with_name("eventpub"))

TABLE = """
CREATE TABLE {name} (
  id           BIGINT AUTO_INCREMENT PRIMARY KEY,
  aggregate_id VARCHAR(255) CHARACTER SET utf8mb4 COLLATE {collation} NOT NULL,
  version      BIGINT NOT NULL,
  event_type   VARCHAR(255) NOT NULL,
  payload      LONGBLOB NULL,
  metadata     JSON NULL,
  create_time  {time} NOT NULL DEFAULT CURRENT_TIMESTAMP{precision},
  UNIQUE KEY (aggregate_id, version),
  KEY (create_time)
)
"""
"""The table of INTERFACE.md and nothing added to it."""

T = TypeVar("T")


ENGINE = "EVENTPUB_TEST_ENGINE"
"""threads, spark, or here: Spark's micro-batches without Spark; see `tests.spark.here`."""

_HERE = f"""\
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.spark.here import main
sys.exit(main())
"""


WITHIN = 400.0
"""Seconds that a test waits for what comes in a few: it is loaded, slow machines that need more."""


def chosen_engine() -> str:
    """Of publishers whose settings name none."""
    return os.environ.get(ENGINE, "threads")


def create_table(
    database: FreshDatabase,
    name: str = "events",
    *,
    time: str = "TIMESTAMP(6)",
    collation: str = "utf8mb4_0900_bin",
) -> None:
    """Make the event table."""
    precision = "(" + time.partition("(")[2] if "(" in time else ""
    database.execute(TABLE.format(name=name, time=time, precision=precision, collation=collation))


def insert(
    cursor: Any, aggregate_id: str, version: int, payload: bytes = b"{}", **columns: Any
) -> None:
    """Append one event, as any application would."""
    values = {
        "aggregate_id": aggregate_id,
        "version": version,
        "event_type": "happened",
        "payload": payload,
        **columns,
    }
    names = ", ".join(values)
    marks = ", ".join(["%s"] * len(values))
    cursor.execute(f"INSERT INTO events ({names}) VALUES ({marks})", list(values.values()))  # noqa: S608


def commit(database: FreshDatabase, aggregate_id: str, *versions: int, **columns: Any) -> None:
    """Append events of one aggregate, committed at once."""
    with transaction(database) as cursor:
        for version in versions:
            insert(cursor, aggregate_id, version, **columns)
        cursor.connection.commit()


@contextmanager
def transaction(database: FreshDatabase) -> Iterator[Any]:
    """A transaction on a connection of its own; the test commits or rolls back."""
    connection = database.connect(autocommit=False)
    try:
        with connection.cursor() as cursor:
            yield cursor
    finally:
        connection.close()


def eventually(what: Callable[[], T], timeout: float = WITHIN, *, every: float = 0.1) -> T:
    """Wait until something is true; return it. With Spark, whose start takes longer, thrice."""
    if timeout < WITHIN and chosen_engine() == "spark":
        timeout *= 3
    deadline = time.monotonic() + timeout
    while True:
        found = what()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:.0f} s")
        time.sleep(every)


@dataclass(frozen=True)
class Record:
    """One record of a topic, as a consumer sees it."""

    key: str
    version: int
    partition: int
    offset: int
    value: bytes | None
    timestamp: int
    headers: dict[str, bytes]

    @property
    def late(self) -> bool:
        """Whether it belongs to a gap that was skipped."""
        return self.headers.get("eventpub_late") == b"1"


class _Reader:
    """A consumer that has read a topic up to some place."""

    def __init__(self, bootstrap_servers: str, name: str) -> None:
        self._records: list[Record] = []
        self._name = name
        self._reached: dict[int, int] = {}
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap_servers,
                "group.id": "independent",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "earliest",
                "fetch.wait.max.ms": 100,
            }
        )
        self.close = self._consumer.close

    def read_on(self, patience: float) -> Iterator[Record]:
        """What lies between there and the end that every partition has now."""
        consumer, reached = self._consumer, self._reached
        metadata = consumer.list_topics(self._name, timeout=10).topics[self._name]
        if metadata.error is not None:
            return
        ends = {
            p: end_when_led(consumer, TopicPartition(self._name, p)) for p in metadata.partitions
        }
        new = {p: 0 for p, end in ends.items() if end and p not in reached}
        consumer.incremental_assign([TopicPartition(self._name, p, 0) for p in new])
        reached |= new
        deadline = time.monotonic() + patience
        while any(reached[p] < ends[p] for p in reached):
            message: Any
            for message in consumer.consume(10_000, 0.2):
                error = message.error()
                if error is None:
                    deadline = time.monotonic() + patience
                    yield _record(message)
                    reached[message.partition()] = message.offset() + 1
                elif error.code() == KafkaError._PARTITION_EOF:
                    reached[message.partition()] = message.offset()
                else:
                    raise AssertionError(str(error))
            if time.monotonic() > deadline:
                raise AssertionError(f"the end of {self._name} cannot be read: {reached}, {ends}")

    def all_records(self) -> list[Record]:
        """Those that were read before, and those up to the end now."""
        self._records += self.read_on(60.0)
        return self._records


class Topic:
    """Reads a topic as `read_committed`, always to the very end of every partition."""

    def __init__(self, bootstrap_servers: str, name: str) -> None:
        self.bootstrap_servers, self.name = bootstrap_servers, name
        self._follower: _Reader | None = None

    def read(self) -> list[Record]:
        """All records."""
        return list(self.stream())

    def stream(self, patience: float = 60.0) -> Iterator[Record]:
        """All records, each partition in its order.

        A partition whose end cannot be read (an open transaction) fails, after so many seconds in
        which nothing came.
        """
        reader = _Reader(self.bootstrap_servers, self.name)
        try:
            yield from reader.read_on(patience)
        finally:
            reader.close()

    def follow(self) -> list[Record]:
        """All records, for who asks again and again: what was read before is not read again.

        A topic that was made again meanwhile is not noticed.
        """
        if self._follower is not None:
            try:
                return self._follower.all_records()
            except (AssertionError, KafkaException):  # a broker that was away meanwhile, perhaps
                self.close()
        self._follower = _Reader(self.bootstrap_servers, self.name)
        return self._follower.all_records()

    def close(self) -> None:
        """No longer follow it."""
        if self._follower is not None:
            self._follower.close()
            self._follower = None

    def exists(self) -> bool:
        """Whether it is there."""
        consumer = Consumer({"bootstrap.servers": self.bootstrap_servers, "group.id": "x"})
        try:
            return self.name in consumer.list_topics(timeout=10).topics
        finally:
            consumer.close()

    def versions(self, aggregate_id: str) -> list[int]:
        """The versions of one aggregate, in the order of the topic, which is followed."""
        return [r.version for r in self.follow() if r.key == aggregate_id]

    def partitions(self) -> int:
        """How many partitions it has."""
        consumer = Consumer({"bootstrap.servers": self.bootstrap_servers, "group.id": "x"})
        try:
            return len(consumer.list_topics(self.name, timeout=10).topics[self.name].partitions)
        finally:
            consumer.close()


_NOT_YET = {
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError._UNKNOWN_PARTITION,
    KafkaError._TRANSPORT,
    KafkaError._TIMED_OUT,
}


def end_when_led(consumer: Any, place: TopicPartition) -> int:
    """The end of a partition, which has no leader for a moment after it was created.

    Nor while its broker starts again.
    """
    for _ in range(50):
        try:
            return int(consumer.get_watermark_offsets(place, timeout=10)[1])
        except KafkaException as error:
            if error.args[0].code() not in _NOT_YET:
                raise
            time.sleep(0.2)
    raise AssertionError(f"{place} has no leader")


def _record(message: Any) -> Record:
    headers = dict(message.headers() or [])
    return Record(
        key=message.key().decode(errors="replace"),
        version=int(headers.get("ce_sequence", b"0")),
        partition=message.partition(),
        offset=message.offset(),
        value=message.value(),
        timestamp=message.timestamp()[1],
        headers=headers,
    )


@dataclass
class Differences:
    """Store and topic compared: what a user of the topic would complain of."""

    missing: list[tuple[str, int]] = field(default_factory=list)
    repeated: list[tuple[str, int]] = field(default_factory=list)
    out_of_order: list[tuple[str, int]] = field(default_factory=list)
    unknown: list[tuple[str, int]] = field(default_factory=list)
    wrong_partition: list[tuple[str, int]] = field(default_factory=list)

    def counts(self) -> tuple[int, int, int]:
        """Missing, repeated, out of order."""
        return len(self.missing), len(self.repeated), len(self.out_of_order)

    def __bool__(self) -> bool:
        return any(vars(self).values())


def compare(database: FreshDatabase, topic: Topic, table: str = "events") -> Differences:
    """Every committed event against every visible record."""
    stored = set(database.execute(f"SELECT aggregate_id, version FROM {table}"))  # noqa: S608
    return differences(stored, topic.stream(), topic.partitions())


def differences(
    stored: set[tuple[Any, ...]], records: Iterable[Record], partitions: int
) -> Differences:
    """See `compare`; the records of each partition come in its order."""
    found = Differences()
    seen: set[tuple[str, int]] = set()
    last: dict[str, int] = {}
    for record in records:
        key = (record.key, record.version)
        if zlib.crc32(record.key.encode()) % partitions != record.partition:
            found.wrong_partition.append(key)
        if key in seen:
            found.repeated.append(key)
            continue
        seen.add(key)
        if not record.late:
            if record.version <= last.get(record.key, -1):
                found.out_of_order.append(key)
            last[record.key] = record.version
    found.missing = sorted(stored - seen)
    found.unknown = sorted(seen - stored)
    return found


class Publisher:
    """`eventpub run`, configured for one database and topic.

    Its shards are threads, without Spark, unless the settings name a `spark.master`: what they do
    is the same, and a start takes no JVM.

    As a context manager it kills what still runs at the end.
    """

    def __init__(
        self,
        folder: Path,
        url: str,
        topic: str,
        bootstrap_servers: str,
        settings: dict[str, dict[str, Any]] | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.folder, engine = folder, chosen_engine()
        folder.mkdir(parents=True, exist_ok=True)
        self.state = folder / "state"
        self.topic = Topic(bootstrap_servers, topic)
        self.gaps = Topic(bootstrap_servers, f"{topic}.gaps")
        self.settings: dict[str, dict[str, Any]] = {
            "app": {"id": f"app-{topic}", "state_dir": str(self.state)},
            "store": {"url": url},
            "read": {},
            "gaps": {},
            "sink": {"topic": topic, "bootstrap_servers": bootstrap_servers, "partitions": 4},
            "run": {"engine": "threads" if engine == "threads" else "spark"},
            "spark": {"master": "local[2]"} if engine == "spark" else {},
            "ops": {"http": ""},
        }
        for section, keys in (settings or {}).items():
            self.settings.setdefault(section, {}).update(keys)
        self.environment = environment or {}
        self.process: subprocess.Popen[bytes] | None = None
        self.log = folder / "publisher.log"
        self._starts = 0
        self.program = EVENTPUB
        if engine == "here":
            self.program = str(folder / "eventpub")
            Path(self.program).write_text(f"#!{sys.executable}\n{_HERE}")
            Path(self.program).chmod(0o700)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.topic.close()
        if self.process is not None:
            self.kill()

    @property
    def config(self) -> Path:
        """The configuration file, as the settings are now."""
        path = self.folder / "eventpub.toml"
        if "master" in self.settings["spark"]:
            self.settings["run"]["engine"] = "spark"
        lines = []
        for section, keys in self.settings.items():
            lines.append(f"[{section}]")
            lines += [f"{_key(k)} = {_value(v)}" for k, v in keys.items()]
        text = "\n".join(lines) + "\n"
        tomllib.loads(text)
        replace_file(path, text)  # a publisher that starts may be reading it
        return path

    @property
    def index(self) -> Path:
        """The folder of the shards' indexes."""
        is_spark = self.settings["run"]["engine"] == "spark"
        return self.state / ("query" if is_spark else "index")

    def lose_index(self) -> None:
        """Delete it, and with Spark what it can be restored from."""
        shutil.rmtree(self.index)
        shutil.rmtree(self.state / "shared", ignore_errors=True)

    def command(self, *arguments: str, timeout: float = WITHIN) -> subprocess.CompletedProcess[str]:
        """Run another command of eventpub with the same configuration."""
        end = arguments.index("--") if "--" in arguments else len(arguments)
        options = [*arguments[:end], "--config", str(self.config), *arguments[end:]]
        if arguments[0] != "run":
            return forked.run(options, self._environment(), self.folder, timeout)
        return subprocess.run(
            [self.program, *options],
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=self.folder,
            env=self._environment(),
            check=False,
        )

    def answer(self, status: int, *arguments: str) -> dict[str, Any]:
        """The result that another command has with --json; it must end with this status."""
        done = self.command(*arguments, "--json")
        assert done.returncode == status, done.stdout + done.stderr
        result: dict[str, Any] = json.loads(done.stdout)["result"]
        return result

    def start(self, *arguments: str, environment: dict[str, str] | None = None) -> None:
        """Start `eventpub run`; does not wait."""
        self._starts += 1
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [self.program, "run", *arguments, "--config", str(self.config)],
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=self._environment() | (environment or {}),
                start_new_session=True,
            )

    def _environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("EVENTPUB_")}
        cache = os.environ.get("EVENTPUB_CACHE")
        return kept | ({"EVENTPUB_CACHE": cache} if cache else {}) | self.environment

    def finish(self, timeout: float = WITHIN) -> int:
        """Wait for it to end; its exit status."""
        assert self.process is not None
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s\n{self.words()}") from None

    def publish_everything(self, timeout: float = WITHIN) -> None:
        """`run --available-now`, to its good end."""
        self.start("--available-now")
        status = self.finish(timeout)
        assert status == 0, f"exit status {status}\n{self.words()}"

    def words(self) -> str:
        """The end of what it printed."""
        return self.log.read_text()[-4000:] if self.log.exists() else ""

    def until_said(self, what: str, timeout: float = WITHIN) -> None:
        """Wait until it has printed this."""
        try:
            eventually(lambda: what in self.log.read_text(), timeout)
        except AssertionError as error:
            raise AssertionError(f"{error}: {what}\n{self.words()}") from error

    def until_published(
        self, aggregate_id: str, versions: list[int], timeout: float = WITHIN
    ) -> None:
        """Wait for exactly these versions of an aggregate, in this order."""

        def published() -> bool:
            assert self.process is None or self.process.poll() is None, self.words()
            return self.topic.versions(aggregate_id) == versions

        try:
            eventually(published, timeout)
        except AssertionError:
            found = self.topic.versions(aggregate_id)
            raise AssertionError(
                f"{aggregate_id}: {found}, not {versions}\n{self.words()}"
            ) from None

    def family(self) -> list[psutil.Process]:
        """Its process and all that descend from it."""
        assert self.process is not None
        try:
            driver = psutil.Process(self.process.pid)
            return [driver, *driver.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def until_spark_publishes(self, timeout: float = WITHIN) -> None:
        """Wait until Spark's tasks have taken the shards over, where there is Spark."""
        if self.settings["run"]["engine"] == "threads":
            return

        def has_begun() -> bool:
            status = ask_running(StateDir(self.state), "status")
            shards = [] if status is None else status["shards"]
            return bool(shards) and all(s["where"] not in {"", "this process"} for s in shards)

        eventually(has_begun, timeout)

    def workers(self) -> list[psutil.Process]:
        """The processes that run the shards' tasks: forked from a daemon of the same name."""
        named = {}
        for process in self.family():
            try:
                if "pyspark.worker" in process.cmdline():
                    named[process.pid] = process
            except psutil.Error:
                continue
        return [process for process in named.values() if process.ppid() in named]

    def kill(self) -> None:
        """`kill -9` of the whole publisher: driver, JVM and workers."""
        family = self.family()
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        if self.process is not None:
            self.process.wait(30)
        psutil.wait_procs(family, timeout=30)

    def stop(self, number: int = signal.SIGTERM, timeout: float = 180.0) -> int:
        """Ask it to stop; its exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.finish(timeout)


def _key(name: str) -> str:
    return f'"{name}"' if "." in name else name


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def delete_topics(publisher: Publisher, pattern: str) -> None:
    """What `kafka-topics.sh --delete --topic` does with a pattern."""
    admin = AdminClient({"bootstrap.servers": publisher.topic.bootstrap_servers})
    names = [t for t in admin.list_topics(timeout=10).topics if re.fullmatch(pattern, t)]
    assert names
    for future in admin.delete_topics(names).values():
        future.result(30)
    eventually(lambda: not {*admin.list_topics(timeout=10).topics} & {*names})


def delete_as_proposed(publisher: Publisher, error: dict[str, Any]) -> None:
    """The topics that an error says to delete."""
    proposed = re.search(r"--delete --topic '(.*?)'", error["suggestion"])
    assert proposed
    delete_topics(publisher, proposed[1])
