"""Jobs on Spark that are killed and started again, late commits, and readers of what came of it.

`test_campaign.py` has the kills.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pymysql
from sqlalchemy import make_url

from tests.publisher.harness import eventually
from tests.sink.helpers import open_transactions

ROOT = Path(__file__).parents[2]
TABLE = """CREATE TABLE events (
    id BIGINT AUTO_INCREMENT PRIMARY KEY, aggregate_id VARCHAR(255) NOT NULL COLLATE utf8mb4_bin,
    version BIGINT NOT NULL, event_type VARCHAR(255) NOT NULL, payload LONGBLOB,
    metadata JSON, create_time TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
    UNIQUE KEY (aggregate_id, version), KEY (create_time))"""
Event = tuple[str, int]
_SPARK_KAFKA = "4.2.0"
"""The newest of Maven Central; it runs on Spark 4.3, too."""
Command = Callable[[bool], list[str]]


def connect(url: str) -> Any:
    """A connection, autocommit off."""
    of = make_url(url)
    return pymysql.connect(
        host=of.host,
        port=of.port or 3306,
        user=of.username or "",
        password=of.password or "",
        database=of.database,
        ssl_disabled=True,
    )


class Writers:
    """Threads that append events; a part of the transactions is open for up to some seconds.

    Args:
        url: of the database.
        threads: how many.
        pause: seconds between two transactions of a thread.
        longest: seconds for which a transaction may stay open.
    """

    def __init__(
        self, url: str, threads: int = 6, pause: float = 0.02, longest: float = 4.0
    ) -> None:
        self._url, self._pause, self._longest = url, pause, longest
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._write, args=(n,)) for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End them; all that was begun is committed then."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _write(self, number: int) -> None:
        chance, connection = random.Random(number), connect(self._url)
        versions: Counter[str] = Counter()
        singles = 0
        with connection, connection.cursor() as cursor:
            while not self._stop.is_set():
                rows = []
                for _ in range(chance.choice([1, 1, 3, 8])):
                    aggregate_id = f"w{number}-{chance.randrange(40)}"
                    if chance.random() < 0.2:
                        singles += 1
                        aggregate_id = f"w{number}-single-{singles}"
                    versions[aggregate_id] += 1
                    rows.append((aggregate_id, versions[aggregate_id], "t", b"x" * 60))
                for row in rows:
                    cursor.execute(
                        "INSERT INTO events (aggregate_id, version, event_type, payload)"
                        " VALUES (%s, %s, %s, %s)",
                        row,
                    )
                if chance.random() < 0.08:
                    self._stop.wait(chance.random() * self._longest)
                connection.commit()
                time.sleep(self._pause * chance.random() * 2)


class Job:
    """A job, killed and started again.

    Args:
        command: of the job, by whether it is to end by itself.
        log: takes what it prints.
    """

    def __init__(self, command: Command, log: Path, environment: dict[str, str]) -> None:
        self._command, self._log, self._environment = command, log, environment
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, ends: bool = False) -> None:
        """Start it.

        Args:
            ends: when everything up to now is published.
        """
        environment = {**os.environ, **self._environment, "PYTHONPATH": str(ROOT)}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(ends),
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env=environment,
                start_new_session=True,
            )

    @property
    def is_running(self) -> bool:
        """Whether its process lives."""
        return self._process is not None and self._process.poll() is None

    def processes(self) -> list[psutil.Process]:
        """Driver (Python and JVM) and Python workers."""
        if self._process is not None:
            with suppress(psutil.NoSuchProcess):
                main = psutil.Process(self._process.pid)
                return [main, *main.children(recursive=True)]
        return []

    def workers(self) -> list[psutil.Process]:
        """Those that run Python for Spark, in tasks or for the driver."""
        found = []
        for each in self.processes():
            with suppress(psutil.NoSuchProcess):
                line = " ".join(each.cmdline())
                if "pyspark.daemon" in line or "eventpub.spark" in line:
                    found.append(each)
        return found

    def kill(self) -> None:
        """End all of its processes at once."""
        if self._process is not None:
            kill_all(self.processes())
            self._process.wait()

    def wait(self, timeout: float) -> int:
        """Its exit status."""
        assert self._process is not None
        return self._process.wait(timeout)

    def words(self) -> str:
        """The last that it said."""
        return self._log.read_text()[-5000:]


def kill_all(processes: list[psutil.Process]) -> None:
    """kill -9."""
    for each in processes:
        with suppress(psutil.NoSuchProcess):
            each.send_signal(signal.SIGKILL)


def compare(stored: list[Event], published: list[Event]) -> tuple[int, int, int]:
    """Events that are lost, repeated and out of order; none may be there that was not stored."""
    counts = Counter(published)
    assert not (invented := counts.keys() - {*stored}), sorted(invented)[:5]
    lost = sum(1 for event in stored if event not in counts)
    repeated = sum(counts.values()) - len(counts)
    last: dict[str, int] = {}
    disordered = 0
    for aggregate_id, version in published:
        disordered += version < last.get(aggregate_id, 0)
        last[aggregate_id] = max(version, last.get(aggregate_id, 0))
    return lost, repeated, disordered


def stored(url: str) -> list[Event]:
    """All events of the table."""
    with connect(url) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT aggregate_id, version FROM events")
        return list(cursor.fetchall())


# -- sinks -----------------------------------------------------------------------------------------


def read_parquet(folder: str) -> list[Event]:
    """The rows of Spark's file sink, as its log names the files, batch by batch."""
    import pyarrow.parquet as pq

    found: list[Event] = []
    log = Path(folder) / "_spark_metadata"
    names: dict[int, Path] = {}
    for file in log.iterdir():
        name = file.name.removesuffix(".compact")
        if name.isdigit():
            names[int(name)] = file
    compact = max((n for n, f in names.items() if f.name.endswith(".compact")), default=-1)
    for number in sorted(n for n in names if n >= compact):
        for line in names[number].read_text().splitlines()[1:]:
            path = json.loads(line)["path"].removeprefix("file://")
            table = pq.read_table(path, columns=["aggregate_id", "version"])
            found += zip(*(table[n].to_pylist() for n in ("aggregate_id", "version")), strict=True)
    return found


def read_sql(url: str) -> list[Event]:
    """The rows of `job.into_sql`, in the order in which they were written."""
    with connect(url) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT aggregate_id, version FROM out_events ORDER BY batch, place")
        return list(cursor.fetchall())


def read_delta(folder: str) -> list[Event]:
    """The rows of a Delta table, version by version."""
    from deltalake import DeltaTable

    table = DeltaTable(folder)
    found: list[Event] = []
    import pyarrow.parquet as pq

    order = []
    for number in range(table.version() + 1):
        log = Path(folder) / "_delta_log" / f"{number:020d}.json"
        for line in log.read_text().splitlines():
            if "add" in (entry := json.loads(line)):
                order.append(entry["add"]["path"])
    for path in order:
        rows = pq.read_table(f"{folder}/{path}", columns=["aggregate_id", "version"])
        found += zip(*(rows[n].to_pylist() for n in ("aggregate_id", "version")), strict=True)
    return found


def read_kafka(servers: str, topic: str) -> list[Event]:
    """What a read_committed consumer sees, partition by partition."""
    from confluent_kafka import Consumer, TopicPartition

    eventually(lambda: not open_transactions(servers, topic), every=1.0)
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "check",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
        }
    )
    partitions = consumer.list_topics(topic, 10).topics[topic].partitions
    consumer.assign([TopicPartition(topic, p, 0) for p in partitions])
    found: dict[int, list[Event]] = {p: [] for p in partitions}
    left = set(partitions)
    while left:
        message: Any = consumer.poll(10)
        assert message is not None, f"no answer; unread: {left}"
        if message.error():
            left.discard(message.partition())
            continue
        headers = dict(message.headers() or ())
        version = int(headers["ce_sequence"]) if "ce_sequence" in headers else int(message.value())
        key = message.key().decode() if message.key() else ""
        found[message.partition()].append((key, version))
    consumer.close()
    return [event for events in found.values() for event in events]


@contextmanager
def database(folder: Path) -> Iterator[str]:
    """A MySQL with the event table, and tables for `job.into_sql`; its URL."""
    from tests.servers.databases import mysql

    with mysql(folder / "mysql") as server:
        with server.connect(None, ssl_disabled=True) as connection:
            connection.cursor().execute("CREATE DATABASE kills")
        url = server.url(database="kills")
        with connect(url) as connection, connection.cursor() as cursor:
            cursor.execute(TABLE)
            cursor.execute("CREATE TABLE batches (id BIGINT PRIMARY KEY)")
            cursor.execute(
                "CREATE TABLE out_events (batch BIGINT, place BIGINT, aggregate_id VARCHAR(255),"
                " version BIGINT)"
            )
        yield url


_ON_CLUSTER = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
}


def command_of(job: dict[str, Any]) -> Command:
    """A user's job."""

    def command(ends: bool) -> list[str]:
        text = json.dumps(job | {"trigger": "once" if ends else "0 seconds"})
        return [sys.executable, "-m", "tests.spark.job", text]

    return command


def job_of_source(sink: str, url: str, address: str, folder: Path) -> dict[str, Any]:
    """A user's job on the source, with two shards."""
    job: dict[str, Any] = {
        "source": {
            "url": url,
            "state": str(folder / "state"),
            "state_dir": str(folder / "local"),
            "shards": "2",
            "partitions": "8",
            "delay": "300ms",
            "watermark": "off",
            "backoff_base": "100ms",
        },
        "sink": sink,
        "checkpoint": str(folder / "checkpoint"),
        "out": url if sink == "sql" else str(folder / "out"),
    }
    if sink == "sql":  # a session in which TIMESTAMP is another type
        job["conf"] = {"spark.sql.timestampType": "TIMESTAMP_NTZ"}
    if sink == "eventpub":
        job["source"]["rows"] = "all"
        job["sink_options"] = {"id": "kills", "topic": "kills", "kafka.bootstrap.servers": address}
    return job


def job_of_rate(address: str, folder: Path, rate: int) -> dict[str, Any]:
    """Spark's numbers into the sink, and beside it into Spark's own one for Kafka.

    Numbers of a key are even, or odd: they come from one task, so their order is defined.
    """
    jars = spark_kafka_jars()
    servers = {"kafka.bootstrap.servers": address}
    return {
        "master": "local[4,4]",
        "format": "rate",
        "source": {"rowsPerSecond": str(rate), "numPartitions": "2"},
        "select": ["CAST(value % 8 AS STRING) AS key", "CAST(value AS STRING) AS value"],
        "sink": "eventpub",
        "sink_options": {"id": "kills", "topic": "kills", "partitions": "6", **servers},
        "checkpoint": str(folder / "checkpoint"),
        "beside": {
            "sink": "kafka",
            "sink_options": {"topic": "beside", **servers},
            "checkpoint": str(folder / "checkpoint-beside"),
        },
        "conf": {"spark.jars": ",".join(str(jar) for jar in jars)},
    }


def spark_kafka_jars() -> list[Path]:
    """Spark's own sink for Kafka."""
    from eventpub.local.downloads import MIB, installed, maven, step

    def build(folder: Path) -> None:
        with step(f"downloading Spark {_SPARK_KAFKA}'s sink for Kafka"):
            maven([("org.apache.spark", "spark-sql-kafka-0-10_2.13", _SPARK_KAFKA)], folder)

    name = f"spark-kafka-{_SPARK_KAFKA}"
    folder = installed(name, needs=200 * MIB, build=build)
    names = ("spark-sql-kafka", "spark-token-provider", "kafka-clients", "commons-pool2")
    return [jar for jar in folder.iterdir() if jar.name.startswith(names)]


def numbers_of_rate(checkpoint: Path, rate: int) -> list[Event]:
    """What a job of `job_of_rate` has committed, as its checkpoint says."""
    offsets = (checkpoint / "offsets" / str(batches_of(checkpoint) - 1)).read_text()
    return [(str(n % 8), n) for n in range(rate * int(offsets.splitlines()[-1]))]


def batches_of(checkpoint: Path) -> int:
    """How many batches were committed."""
    names = [file.name for file in (checkpoint / "commits").glob("[0-9]*")]
    return max((int(name) + 1 for name in names if name.isdigit()), default=0)


def run_of(
    url: str, address: str, folder: Path, master: str, properties: dict[str, str]
) -> Command:
    """`eventpub run` with Spark."""
    config = folder / "eventpub.toml"
    if master.startswith("spark:"):
        properties = {**_ON_CLUSTER, **properties}
    lines = "".join(f'"{name}" = "{value}"\n' for name, value in properties.items())
    config.write_text(
        f'[app]\nid = "kills"\nstate_dir = "{folder}/run"\n[store]\nurl = "{url}"\n'
        '[read]\ndelay = "300ms"\nwatermark = "off"\n[gaps]\nbackoff_base = "100ms"\n'
        f'[sink]\ntopic = "kills"\nbootstrap_servers = "{address}"\n'
        f'[run]\nengine = "spark"\nshards = 2\n[spark]\nmaster = "{master}"\n[ops]\nhttp = ""\n'
        f'[state]\nlocation = "{folder}/shared"\n[spark.properties]\n{lines}'
    )
    program = str(Path(sys.executable).with_name("eventpub"))
    flags = ["--config", str(config)]
    return lambda ends: [program, "run", *(["--available-now"] if ends else []), *flags]
