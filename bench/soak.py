"""The publisher under faults for a long time: does it always come back, whole, and leak nothing?

    python -m bench.soak --minutes 30 --rate 3000

Starts a Kafka broker, a MySQL, writers that commit late and roll back, and the installed command.
Every 20 to 60 s a new random subset of the faults happens (none is a subset, too), and is healed;
after each heal the topic must grow again within two minutes. A consumer reads `read_committed` all
the while, and another one afterwards; store and topic must be equal in the end. What the publisher
holds (processes, threads, files, memory) is noted in each calm moment. Prints one line a round and
the sum, and with `--json FILE` writes them; exit status 1: something was lost, repeated, out of
order, stuck, or left behind.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from confluent_kafka import Consumer, TopicPartition

from eventpub.local.servers import Database, Kafka
from tests.conftest import FreshDatabase
from tests.publisher.harness import Publisher, create_table, differences, eventually
from tests.servers.databases import mysql
from tests.servers.kafka import kafka
from tests.servers.signals import pause, resume

_PROGRESS_SECONDS = 120
_MOST_FAULTS = 3

_quiet = logging.getLogger(__name__)  # a broker that is away is what this is about
_quiet.setLevel(logging.CRITICAL)


class Reader:
    """A consumer that reads through all of it: each aggregate's versions must only ascend.

    Attributes:
        newest: of each partition when the newest event was created that was read, s since 1970.
    """

    def __init__(self, publisher: Publisher) -> None:
        self._topic = publisher.topic
        self.newest: dict[int, float] = {}
        self._last: dict[bytes, int] = {}
        self.records = 0
        self.wrong: list[str] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        consumer = Consumer(
            {
                "bootstrap.servers": self._topic.bootstrap_servers,
                "group.id": "soak",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                # a broker that answers nothing is given up before its successor would be late
                "socket.timeout.ms": 5_000,
                "topic.metadata.refresh.interval.ms": 2_000,
            },
            logger=_quiet,
        )
        partitions = self._topic.partitions()
        consumer.assign([TopicPartition(self._topic.name, p, 0) for p in range(partitions)])
        while not self._ended.is_set():
            for message in consumer.consume(5_000, 0.5):
                if message.error() is None:
                    self._take(message)
        consumer.close()

    def _take(self, message: Any) -> None:
        headers = dict(message.headers())
        self.records += 1
        created = message.timestamp()[1] / 1000
        partition = message.partition()
        self.newest[partition] = max(created, self.newest.get(partition, 0.0))
        if "eventpub_late" in headers:
            return
        key, version = message.key(), int(headers["ce_sequence"])
        if version <= self._last.get(key, 0):
            self.wrong.append(f"{key.decode()}/{version} after {self._last[key]}")
        self._last[key] = version

    def close(self) -> None:
        """Stop reading."""
        self._ended.set()
        self._thread.join(30)


class Soak:
    """The servers, the publisher, and what can happen to them."""

    def __init__(self, folder: Path, rate: int, seed: int) -> None:
        self.broker: Kafka = kafka(folder / "kafka")
        self.server: Database = mysql(folder / "mysql")
        self.database = FreshDatabase(self.server, "soak")
        with self.server.connect(None) as connection, connection.cursor() as cursor:
            cursor.execute("CREATE DATABASE soak")
        create_table(self.database)
        self.publisher = Publisher(
            folder / "publisher",
            self.database.url,
            "soak",
            self.broker.bootstrap_servers,
            {"gaps": {"backoff_base": "500ms", "max_backoff": 9}},
        )
        self._rate = rate
        self._folder = folder
        self.dice = random.Random(seed)
        self.load: subprocess.Popen[bytes] | None = None
        self.faults: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
            "kill publisher": (self.publisher.kill, self.publisher.start),
            "kill driver": (self._kill("driver"), self._start_again),
            "kill jvm": (self._kill("jvm"), self._start_if_ended),
            "kill worker": (self._kill("worker"), self._start_if_ended),
            "pause worker": (self._pause_worker, lambda: None),
            "kill broker": (self.broker.kill, self.broker.start),
            "pause broker": (partial(pause, self.broker), partial(resume, self.broker)),
            "kill database": (self.server.kill, self.server.start),
            "pause database": (partial(pause, self.server), partial(resume, self.server)),
        }

    def write(self) -> None:
        """Start the writers."""
        self.load = subprocess.Popen(
            [
                sys.executable, "-m", "tests.servers.writers",
                "--url", self.database.url, "--rate", str(self._rate),
                "--open-fraction", "0.05", "--open-seconds", "0", "3",
                "--rollback-fraction", "0.02", "--reversed-fraction", "0.005",
                "--no-close", "--json",
            ],
            stdout=(self._folder / "load.json").open("wb"),
        )  # fmt: skip

    def _kill(self, which: str) -> Callable[[], None]:
        def kill() -> None:
            family = self.publisher.family()
            jvms = [p for p in family if "java" in _name(p)]
            victims = {
                "driver": family[:1],
                "jvm": jvms[:1],
                "worker": self.dice.sample(w, 1) if (w := self.publisher.workers()) else [],
            }[which]
            for victim in victims:
                with suppress(psutil.Error):
                    victim.kill()

        return kill

    def _pause_worker(self) -> None:
        """Stopped for some seconds, as a machine is that swaps."""
        for worker in self.publisher.workers()[:1]:
            with suppress(psutil.Error):
                worker.suspend()
                threading.Timer(self.dice.uniform(1, 8), _resume, [worker]).start()

    def _start_again(self) -> None:
        assert self.publisher.process is not None
        self.publisher.process.wait(60)
        self.publisher.start()

    def _start_if_ended(self) -> None:
        """What a service manager does."""
        assert self.publisher.process is not None
        with suppress(subprocess.TimeoutExpired):
            self.publisher.process.wait(20)
            self.publisher.start()

    def end(self) -> int:
        """Ends of the partitions, added up: what has become visible, and markers."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.broker.bootstrap_servers,
                "group.id": "soak-ends",
                "isolation.level": "read_committed",
            },
            logger=_quiet,
        )
        try:
            return sum(
                consumer.get_watermark_offsets(TopicPartition("soak", p), timeout=10)[1]
                for p in range(4)
            )
        finally:
            consumer.close()

    def grows(self) -> float:
        """Seconds until something new was published."""
        started = time.monotonic()
        before = eventually(self.end_or_none, _PROGRESS_SECONDS) or 0

        def more() -> bool:
            self.start_if_dead()
            return (self.end_or_none() or 0) >= before + 100

        eventually(more, _PROGRESS_SECONDS, every=0.2)
        return time.monotonic() - started

    def start_if_dead(self) -> None:
        """Start the publisher again where it has ended."""
        if self.publisher.process is not None and self.publisher.process.poll() is not None:
            self.publisher.start()

    def end_or_none(self) -> int | None:
        """As `end`; None while the broker is away."""
        with suppress(Exception):
            return self.end()
        return None

    def held(self) -> dict[str, int]:
        """What the publisher's processes hold now."""
        family = self.publisher.family()
        found: Counter[str] = Counter(processes=len(family))
        for process in family:
            with suppress(psutil.Error):
                found["threads"] += process.num_threads()
                found["files"] += process.num_fds()
                found["megabytes"] += process.memory_full_info().pss // 1_000_000
        return dict(found)


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""


def _resume(process: psutil.Process) -> None:
    with suppress(psutil.Error):
        process.resume()


def soak(minutes: float, rate: int, seed: int, folder: Path) -> dict[str, Any]:
    """Run it; what came of it."""
    s = Soak(folder, rate, seed)
    rounds: list[dict[str, Any]] = []
    try:
        s.publisher.start()
        s.write()
        eventually(lambda: (s.end_or_none() or 0) > 0, 240)
        reader = Reader(s.publisher)
        deadline = time.monotonic() + minutes * 60
        while time.monotonic() < deadline:
            length = s.dice.uniform(20, 60)
            names = s.dice.sample(sorted(s.faults), s.dice.randint(0, _MOST_FAULTS))
            started = time.monotonic()
            for name in names:
                strike, heal = s.faults[name]
                time.sleep(s.dice.uniform(0, 4))
                strike()
                time.sleep(s.dice.uniform(0.5, 8))
                heal()
            recovered = s.grows()
            time.sleep(max(0.0, length - (time.monotonic() - started)))
            rounds.append({"faults": names, "recovered": round(recovered, 1), **s.held()})
            print(json.dumps(rounds[-1]), flush=True)
        assert s.load is not None
        s.load.terminate()
        s.load.wait(120)
        s.start_if_dead()
        stored = _stored(s.database)
        eventually(lambda: reader.records >= len(stored), 300, every=1.0)
        family = s.publisher.family()
        status = s.publisher.stop()
        left = [p.pid for p in psutil.wait_procs(family, timeout=20)[1]]
        s.publisher.publish_everything()
        seen = eventually(lambda: reader.records >= len(stored) and reader.records, 60)
        reader.close()
        afterwards = differences(stored, s.publisher.topic.stream(), 4)
        load = json.loads((folder / "load.json").read_text().splitlines()[-1])
        return {
            "minutes": minutes,
            "events": len(stored),
            "rate": load["rate"],
            "rounds": len(rounds),
            "faults": dict(Counter(name for r in rounds for name in r["faults"])),
            "longest_recovery": max(r["recovered"] for r in rounds),
            "median_recovery": sorted(r["recovered"] for r in rounds)[len(rounds) // 2],
            "lost_repeated_out_of_order": afterwards.counts(),
            "seen_by_the_reader_of_all_time": seen,
            "wrong_for_it": reader.wrong[:20],
            "exit_status": status,
            "processes_left": left,
            "held_first": {k: v for k, v in rounds[0].items() if k != "faults"},
            "held_last": {k: v for k, v in rounds[-1].items() if k != "faults"},
            "details": rounds,
        }
    finally:
        if s.load is not None and s.load.poll() is None:
            s.load.kill()
        if s.publisher.process is not None:
            s.publisher.kill()
        for server in (s.broker, s.server):
            with suppress(Exception):
                resume(server)
            server.stop()


def _stored(database: FreshDatabase) -> set[tuple[Any, ...]]:
    return set(database.execute("SELECT aggregate_id, version FROM events"))


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--rate", type=int, default=3000, help="events/s")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="eventpub-soak-") as folder:
        found = soak(given.minutes, given.rate, given.seed, Path(folder))
        if found["wrong_for_it"] or any(found["lost_repeated_out_of_order"]):
            print((Path(folder) / "publisher/publisher.log").read_text()[-8000:])
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))
    print(json.dumps({k: v for k, v in found.items() if k != "details"}, indent=1))
    wrong = found["wrong_for_it"] or any(found["lost_repeated_out_of_order"])
    return 1 if wrong or found["processes_left"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
