"""Kills a job on the source `eventstore` again and again while events commit late, and compares.

    python -m tests.spark.kills --sink parquet --kills 20 [--seed 1] [--cluster]

With --cluster the job runs on two workers that share nothing but the state and the sink's folder,
and executors are killed.

Prints one line: kills by what was killed, events, and how many are lost, repeated and out of order
in what the sink has. Exit status 1 where any are.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pymysql
from sqlalchemy import make_url

from tests.spark.cluster import Cluster, cluster

ROOT = Path(__file__).parents[2]
TABLE = """CREATE TABLE events (
    id BIGINT AUTO_INCREMENT PRIMARY KEY, aggregate_id VARCHAR(255) NOT NULL COLLATE utf8mb4_bin,
    version BIGINT NOT NULL, event_type VARCHAR(255) NOT NULL, payload LONGBLOB,
    metadata JSON, create_time TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
    UNIQUE KEY (aggregate_id, version), KEY (create_time))"""
Event = tuple[str, int]


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
        environment: of its process.
    """

    def __init__(self, command: Callable[[bool], list[str]], log: Path, **environment: str) -> None:
        self._command, self._log, self._environment = command, log, environment
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, ends: bool = False) -> None:
        """Start it.

        Args:
            ends: when everything up to now is published.
        """
        log = self._log.open("ab")
        environment = {**os.environ, **self._environment, "PYTHONPATH": str(ROOT)}
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

    def processes(self) -> dict[str, list[psutil.Process]]:
        """By what they are: driver (Python and JVM) and workers."""
        assert self._process is not None
        found: dict[str, list[psutil.Process]] = {"driver": [], "worker": []}
        with suppress(psutil.NoSuchProcess):
            main = psutil.Process(self._process.pid)
            for each in [main, *main.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    line = " ".join(each.cmdline())
                    kind = (
                        "worker"
                        if "pyspark.daemon" in line or "eventpub.spark" in line
                        else "driver"
                    )
                    found[kind].append(each)
        return found

    def kill(self, what: str, chance: random.Random) -> bool:
        """Kill one worker, or the driver with everything; whether there was one."""
        found = self.processes()
        if what == "worker":
            victims = [chance.choice(found["worker"])] if found["worker"] else []
        else:
            victims = [*found["driver"], *found["worker"]]
        for each in victims:
            with suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGKILL)
        if what == "driver" and self._process is not None:
            self._process.wait()
        return bool(victims)

    def wait(self, timeout: float) -> int:
        """Its exit status."""
        assert self._process is not None
        return self._process.wait(timeout)


def compare(stored: list[Event], published: list[Event]) -> tuple[int, int, int]:
    """Events that are lost, repeated and out of order."""
    counts = Counter(published)
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
def servers(folder: Path, *, kafka: bool) -> Iterator[tuple[str, str]]:
    """A MySQL with the event table, and a broker: its URL and addresses."""
    from eventpub.local.servers import kafka as broker
    from tests.servers.databases import mysql

    with ExitStack() as stack:
        database = stack.enter_context(mysql(folder / "mysql"))
        with pymysql.connect(
            host="127.0.0.1", port=make_url(database.url()).port or 0, user="root"
        ) as connection:
            connection.cursor().execute("CREATE DATABASE kills")
        url = database.url(database="kills")
        with connect(url) as connection, connection.cursor() as cursor:
            cursor.execute(TABLE)
            cursor.execute("CREATE TABLE batches (id BIGINT PRIMARY KEY)")
            cursor.execute(
                "CREATE TABLE out_events (batch BIGINT, place BIGINT, aggregate_id VARCHAR(255),"
                " version BIGINT)"
            )
        address = stack.enter_context(broker(folder / "kafka")).bootstrap_servers if kafka else ""
        yield url, address


Command = Callable[[bool], list[str]]


def job_of(
    sink: str, url: str, address: str, folder: Path, master: str
) -> tuple[Command, Callable[[], list[Event]]]:
    """The command of a job, and what reads its sink."""
    if sink in {"run", "threads"}:
        return run_of(sink, url, address, folder, master), lambda: read_kafka(address, "kills")
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
        "master": master,
        "conf": _ON_CLUSTER if master.startswith("spark:") else {},
        "checkpoint": str(folder / "checkpoint"),
        "out": url if sink == "sql" else str(folder / "out"),
    }
    if sink == "eventpub":
        options = {"id": "kills", "topic": "kills", "kafka.bootstrap.servers": address}
        job["source"]["rows"] = "all"
        job |= {"sink_options": options}

    def command(ends: bool) -> list[str]:
        text = json.dumps(job | {"trigger": "once" if ends else "0 seconds"})
        return [sys.executable, "-m", "tests.spark.job", text]

    readers: dict[str, Callable[[], list[Event]]] = {
        "sql": lambda: read_sql(url),
        "eventpub": lambda: read_kafka(address, "kills"),
        "parquet": lambda: read_parquet(job["out"]),
        "delta": lambda: read_delta(job["out"]),
    }
    return command, readers[sink]


_ON_CLUSTER = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
}


def run_of(engine: str, url: str, address: str, folder: Path, master: str) -> Command:
    """`eventpub run`; "run" is the engine spark."""
    config = folder / "eventpub.toml"
    engine = "threads" if engine == "threads" else "spark"
    properties = {**_ON_CLUSTER, "spark.driver.host": "127.0.0.1"}
    lines = "".join(f'"{name}" = "{value}"\n' for name, value in properties.items())
    config.write_text(
        f'[app]\nid = "kills"\nstate_dir = "{folder}/run"\n[store]\nurl = "{url}"\n'
        '[read]\ndelay = "300ms"\nwatermark = "off"\n[gaps]\nbackoff_base = "100ms"\n'
        f'[sink]\ntopic = "kills"\nbootstrap_servers = "{address}"\n'
        f'[run]\nengine = "{engine}"\nshards = 2\n[spark]\nmaster = "{master}"\n[ops]\nhttp = ""\n'
        f'[state]\nlocation = "{folder}/shared"\n'
        + (f"[spark.properties]\n{lines}" if master.startswith("spark:") else "")
    )
    program = str(Path(sys.executable).with_name("eventpub"))
    flags = ["--config", str(config)]
    return lambda ends: [program, "run", *(["--available-now"] if ends else []), *flags]


def campaign(
    sink: str,
    kills: int,
    seed: int,
    folder: Path,
    *,
    driver_share: float = 0.4,
    on_cluster: bool = False,
) -> dict[str, Any]:
    """Kill a job so many times; what came of it."""
    chance = random.Random(seed)
    killed: Counter[str] = Counter()
    with ExitStack() as stack:
        kafka = sink in {"eventpub", "run", "threads"}
        url, address = stack.enter_context(servers(folder, kafka=kafka))
        executors: Cluster | None = None
        if on_cluster:
            private = [folder / "local", folder / "run"]
            executors = stack.enter_context(cluster(folder, private))
        master = "local[2,4]" if executors is None else executors.master
        command, read = job_of(sink, url, address, folder, master)
        running = Job(command, folder / "job.log")
        writers = Writers(url)
        try:
            while sum(killed.values()) < kills:
                if not running.is_running:
                    running.start()
                    deadline = time.monotonic() + 120
                    while not _has_workers(running, executors) and time.monotonic() < deadline:
                        time.sleep(0.3)
                        if sink == "threads":
                            break
                time.sleep(chance.random() * 4)
                what = "driver" if chance.random() < driver_share else "worker"
                if executors is not None and what == "worker":
                    _until_it_grows(read)
                    killed["executor"] += executors.kill_one(chance)
                else:
                    killed[what] += running.is_running and running.kill(what, chance)
            if running.is_running:
                running.kill("driver", chance)
        finally:
            writers.stop()
        for _ in range(3):
            running.start(ends=True)
            if running.wait(600) == 0:
                break
        else:
            raise RuntimeError((folder / "job.log").read_text()[-3000:])
        events = stored(url)
        lost, repeated, disordered = compare(events, read())
    return {
        "sink": sink,
        "kills": dict(killed),
        "events": len(events),
        "lost": lost,
        "repeated": repeated,
        "out_of_order": disordered,
    }


def _until_it_grows(read: Callable[[], list[Event]]) -> None:
    """An executor takes some seconds to come back: what is killed shall have done something."""
    before, deadline = len(read()), time.monotonic() + 60
    while len(read()) <= before and time.monotonic() < deadline:
        time.sleep(0.5)


def _has_workers(job: Job, executors: Cluster | None) -> bool:
    return bool(job.processes()["worker"] if executors is None else executors.executors())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--sink", default="parquet")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder")
    parser.add_argument("--cluster", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(given.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        outcome = campaign(given.sink, given.kills, given.seed, folder, on_cluster=given.cluster)
    print(json.dumps(outcome))
    sys.exit(any(outcome[name] for name in ("lost", "repeated", "out_of_order")))
