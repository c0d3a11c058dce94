"""The publisher before three brokers of which one or two are always going: does it go on, whole?

    python -m bench.brokers --faults 24 --rate 3000

Starts three brokers (KRaft, `min.insync.replicas=2`, each behind a relay that can cut it off), a
MySQL, writers that commit late and roll back, and the installed command; then one fault after the
other, each healed: rolling restarts, kill -9 of a partition's leader, of the coordinator of a
shard's transactions, of the active controller, one of them cut off from clients and peers without a
word, paused, two of three gone. A consumer reads `read_committed` all the while, and another one
afterwards, each partition to its end. The process of the publisher must stay the same one.

Prints a line a fault: seconds from the fault until the first event that was created since then has
been read (`first`) and one from each partition (`everywhere`; none where two of three are gone, or
all restart), and from its end until all that was committed by then, and something newer from each
partition, has been read (`after`); at the end the same for each kind of fault, and the verdict.
What is found is written to the file of `--json` after each fault. A fault that the publisher does
not get over in `--patience` seconds, or at which it ends, is the last one, and is `stuck`. Exit
status 1: something was lost, repeated, out of order or stuck.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaException

from bench.soak import Reader
from tests.conftest import FreshDatabase
from tests.publisher.harness import Publisher, create_table, differences, eventually
from tests.servers import KafkaCluster, kafka_cluster
from tests.servers.cluster import FAULTS, strike
from tests.servers.databases import mysql
from tests.servers.signals import resume
from tests.sink.helpers import high_watermarks, open_transactions, stable_offsets

TOPIC = "brokers"
PARTITIONS = 4
PATIENCE = 300.0
"""Seconds after which a publisher is stuck; on a loaded machine some 60 were seen."""


class Run:
    """The servers, the load, the publisher, and what happens to the brokers.

    A context manager that ends all of it but the database.

    Args:
        folder: of everything that is kept.
        database: empty.
        rate: events per second.
        seed: of which broker, and how long.
        patience: seconds; see `PATIENCE`.
    """

    def __init__(
        self,
        folder: Path,
        database: FreshDatabase,
        rate: int,
        seed: int = 1,
        patience: float = PATIENCE,
    ) -> None:
        self.dice = random.Random(seed)
        self._patience = patience
        self._folder = folder
        self._database = database
        self._rate = rate
        create_table(database)
        self.cluster: KafkaCluster = kafka_cluster(folder / "kafka", relayed=True)
        self.publisher = Publisher(
            folder / "publisher", database.url, TOPIC, self.cluster.bootstrap_servers
        )
        self._load: subprocess.Popen[bytes] | None = None
        self._reader: Reader | None = None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        if self._load is not None and self._load.poll() is None:
            self._load.kill()
            self._load.wait()
        if self.publisher.process is not None:
            self.publisher.kill()
        if self._reader is not None:
            self._reader.close()
        for broker in self.cluster.brokers.values():
            with suppress(RuntimeError, ProcessLookupError):
                resume(broker)
        self.cluster.stop()

    def begin(self) -> None:
        """Publisher, writers and reader; returns when events flow."""
        self.cluster.controller()  # brokers that have just started may not answer a publisher yet
        self.publisher.start()
        self._load = subprocess.Popen(
            [
                sys.executable, "-m", "tests.servers.writers",
                "--url", self._database.url, "--rate", str(self._rate),
                "--open-fraction", "0.05", "--open-seconds", "0", "2",
                "--rollback-fraction", "0.02", "--no-close", "--json",
            ],
            stdout=(self._folder / "load.json").open("wb"),
        )  # fmt: skip
        self._until(self._has_topic, 0.0)
        self._reader = Reader(self.publisher)
        self._until(lambda: self.seen() > self._rate and self._newest(min) > 0, 0.0)

    def _has_topic(self) -> bool:
        with suppress(KafkaException):
            return self.publisher.topic.exists()
        return False

    def seen(self) -> int:
        """How many events the reader has seen."""
        assert self._reader is not None
        return self._reader.records

    def committed(self) -> int:
        """How many events are in the table."""
        return int(self._database.execute("SELECT COUNT(*) FROM events")[0][0])

    def strike(self, fault: str) -> dict[str, Any]:
        """One fault and its end; seconds of both, which brokers it has met, and how it is stuck."""
        ids = [f"eventpub.app-{TOPIC}.{shard}" for shard in range(2)]
        struck, heal = strike(self.cluster, fault, self.dice, TOPIC, PARTITIONS, ids)
        line: dict[str, Any] = {"fault": fault, "brokers": struck}
        try:
            line |= self._during(fault, time.time())
        except AssertionError as error:
            line["stuck"] = f"during the fault: {error}"
        heal()
        if "stuck" not in line:
            healed, committed = time.time(), self.committed()
            try:
                line["after"] = self._until(
                    lambda: self.seen() >= committed and self._newest(min) > healed, healed
                )
            except AssertionError as error:
                line["stuck"] = f"after the fault: {error}"
        return line

    def _during(self, fault: str, struck: float) -> dict[str, float]:
        """Until the fault shall be over: something new, unless too few are left to take it."""
        if "two of three" in fault:
            time.sleep(self.dice.uniform(3, 8))
            return {}
        if fault == "rolling restart":  # it is over
            return {}
        first = self._until(lambda: self._newest(max) > struck, struck)
        everywhere = self._until(lambda: self._newest(min) > struck, struck)
        time.sleep(self.dice.uniform(0, 4))
        return {"first": first, "everywhere": everywhere}

    def _newest(self, which: Callable[[list[float]], float]) -> float:
        """When the newest event that was read was created: of the partition ahead or behind."""
        assert self._reader is not None
        return which([self._reader.newest.get(p, 0.0) for p in range(PARTITIONS)])

    def _until(self, what: Callable[[], bool], since: float) -> float:
        """Seconds since a time until something is true of what is published or was read.

        Raises:
            AssertionError: the publisher has ended, or it takes too long.
        """
        process = self.publisher.process
        assert process is not None
        deadline = time.monotonic() + self._patience
        while not what():
            assert process.poll() is None, f"the publisher has ended\n{self.publisher.words()}"
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"not within {self._patience:.0f} s: {self.seen()} seen, {self._where()}"
                )
            time.sleep(0.05)
        return round(time.time() - since, 1)

    def _where(self) -> str:
        """What is visible and what is open, for whom nothing comes."""
        address = self.cluster.bootstrap_servers
        try:
            return (
                f"ends {high_watermarks(address, TOPIC)}, stable {stable_offsets(address, TOPIC)},"
                f" committed {self.committed()}\n{self.publisher.words()}"
            )
        except Exception as error:
            return f"{error!r}\n{self.publisher.words()}"

    def end(self) -> dict[str, Any]:
        """Ends the load and the publisher; what came of it."""
        assert self._load is not None
        assert self._reader is not None
        self._load.terminate()
        self._load.wait(120)
        stored = set(self._database.execute("SELECT aggregate_id, version FROM events"))
        with suppress(AssertionError):  # what is missing is counted below
            self._until(lambda: self.seen() >= len(stored), 0.0)
        self.publisher.kill()
        self._reader.close()
        address = self.cluster.bootstrap_servers
        eventually(lambda: not open_transactions(address, TOPIC), 90, every=1.0)
        afterwards = differences(stored, self.publisher.topic.stream(), PARTITIONS)
        load = json.loads((self._folder / "load.json").read_text().splitlines()[-1])
        return {
            "events": len(stored),
            "rate": load["rate"],
            "lost_repeated_out_of_order": afterwards.counts(),
            "seen_meanwhile": self.seen(),
            "wrong_meanwhile": self._reader.wrong[:20],
        }


def play(
    run: Run,
    faults: Sequence[str],
    pause: float = 2.0,
    note: Callable[[list[dict[str, Any]]], None] = lambda _: None,
    minutes: float = float("inf"),
) -> list[dict[str, Any]]:
    """One fault after the other, some seconds apart, until one is stuck; a line of each.

    Args:
        note: called with the lines so far.
        minutes: no fault begins later.
    """
    lines: list[dict[str, Any]] = []
    deadline = time.monotonic() + minutes * 60
    for fault in faults:
        time.sleep(pause)
        if time.monotonic() > deadline:
            break
        lines.append({**run.strike(fault), "load": round(os.getloadavg()[0], 1)})
        print(json.dumps(lines[-1]), flush=True)
        note(lines)
        if "stuck" in lines[-1]:
            break
    return lines


def by_kind(lines: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Of each kind of fault how many, and the median and the longest of its times, in seconds."""
    found: dict[str, dict[str, Any]] = {}
    for fault in sorted({line["fault"] for line in lines}):
        of_it = [line for line in lines if line["fault"] == fault]
        found[fault] = {"times": len(of_it)}
        for what in ("first", "everywhere", "after"):
            seconds = sorted(line[what] for line in of_it if what in line)
            if seconds:
                found[fault][what] = [seconds[len(seconds) // 2], seconds[-1]]
    return found


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.brokers", description=__doc__)
    parser.add_argument("--faults", type=int, default=24)
    parser.add_argument("--rate", type=int, default=3000, help="events/s")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the result to this file")
    parser.add_argument("--only", help="this fault, again and again")
    parser.add_argument("--keep", type=Path, help="a folder for all data and logs, which stay")
    parser.add_argument("--minutes", type=float, default=60, help="no fault begins later")
    parser.add_argument("--patience", type=float, default=PATIENCE, help="seconds")
    given = parser.parse_args(arguments)

    def write(found: dict[str, Any]) -> None:
        if given.json:
            given.json.write_text(json.dumps(found, indent=1) + "\n")

    with ExitStack() as stack:
        folder = given.keep or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="eventpub-brokers-"))
        )
        with mysql(folder / "mysql", options=["--skip-log-bin"]) as server:
            with server.connect(None) as connection, connection.cursor() as cursor:
                cursor.execute("CREATE DATABASE brokers")
            database = FreshDatabase(server, "brokers")
            with Run(folder, database, given.rate, given.seed, given.patience) as run:
                kinds = [given.only] if given.only else [*FAULTS]
                order = kinds * (given.faults // len(kinds) + 1)
                run.dice.shuffle(order)
                run.begin()
                lines = play(
                    run,
                    order[: given.faults],
                    note=lambda so_far: write({"details": so_far}),
                    minutes=given.minutes,
                )
                found = run.end()
                wrong = found["wrong_meanwhile"] or any(found["lost_repeated_out_of_order"])
                if wrong:
                    print(run.publisher.words())
    found |= {"settings": {"rate": given.rate, "seed": given.seed}}
    found |= {"struck": len(lines), "faults": by_kind(lines)}
    write(found | {"details": lines})
    print(json.dumps(found, indent=1))
    stuck = any("stuck" in line for line in lines)
    return 1 if wrong or stuck or found["seen_meanwhile"] != found["events"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
