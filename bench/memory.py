"""What a publisher of large rows has in memory: all its processes, Spark's among them.

    python -m bench.memory --rows 30000 --bytes 100000
    python -m bench.memory --rows 20000 --bytes 1024 --large 300

Fills a MySQL with rows of random bytes, some of nearly the broker's limit of 1 MB among them,
starts `eventpub run` and samples five times a second what each of its processes has (PSS: pages
that are shared count once, and RSS), until everything is on the topic. Prints the highest sums and
whose they were.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import psutil

from . import topic
from .machine import PARTITIONS, Machine, environment
from .publisher import Publisher

EVERY = 0.2
"""Seconds between two samples."""

_LARGE_BYTES = 1_000_000
_AT_ONCE = 100 << 20
_MB = 1_000_000


class Memory:
    """Samples a process and all that descend from it, while it is entered.

    Attributes:
        most: the highest sum, bytes, by `pss` and `rss`.
        parts: whose that was, by kind of process.
        samples: how many there are.
    """

    def __init__(self, pid: int) -> None:
        self.most = {"pss": 0, "rss": 0}
        self.parts: dict[str, dict[str, int]] = {}
        self.highest: Counter[str] = Counter()
        self.samples = 0
        self._pid = pid
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(EVERY):
            try:
                driver = psutil.Process(self._pid)
                family = [driver, *driver.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            found: dict[str, Counter[str]] = {"pss": Counter(), "rss": Counter()}
            for process in family:
                kind = _kind(process, self._pid)
                for which, size in _sizes(process.pid).items():
                    found[which][kind] += size
            self.samples += 1
            self.highest |= found["pss"]
            for which, parts in found.items():
                if parts.total() > self.most[which]:
                    self.most[which], self.parts[which] = parts.total(), dict(parts)

    def facts(self) -> dict[str, Any]:
        """In MB (10^6 bytes)."""

        def in_mb(parts: Any) -> dict[str, int]:
            return {kind: round(size / _MB) for kind, size in sorted(parts.items())}

        return {
            **{f"{which}_mb": round(size / _MB) for which, size in self.most.items()},
            **{f"{which}_mb_of": in_mb(parts) for which, parts in self.parts.items()},
            "highest_pss_mb_of_each_kind": in_mb(self.highest),
            "samples": self.samples,
        }


def _sizes(pid: int) -> dict[str, int]:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return {"pss": 0, "rss": 0}
    values = dict(line.split(":", 1) for line in lines)
    return {name.lower(): int(values[name].split()[0]) * 1024 for name in ("Pss", "Rss")}


def _kind(process: psutil.Process, driver: int) -> str:
    try:
        if process.pid == driver:
            return "driver"
        if process.name().startswith("java"):
            return "jvm"
        command = " ".join(process.cmdline())
        parent = process.parent()
        is_forked = parent is not None and parent.cmdline() == process.cmdline()
    except psutil.Error:
        return "gone"
    if "spark.daemon" in command:
        return "worker" if is_forked else "daemon"
    return "source"


def fill(  # noqa: PLR0913 (what a case is measured with)
    machine: Machine, url: str, rows: int, size: int, *, aggregates: int, prefix: str
) -> None:
    """Rows of random bytes, which no compression makes smaller."""
    with machine.database.connect(None) as connection, connection.cursor() as cursor:
        cursor.execute(f"USE {url.rpartition('/')[2]}")
        cursor.execute("SET SESSION cte_max_recursion_depth = 10000000")
        at_once = max(1, _AT_ONCE // size)  # rows with one time, and one transaction
        for first in range(0, rows, at_once):
            last = min(first + at_once, rows) - 1
            # RANDOM_BYTES gives at most 1024
            cursor.execute(
                "INSERT INTO events (aggregate_id, version, event_type, payload)"
                " WITH RECURSIVE n (i) AS (SELECT %s UNION ALL SELECT i + 1 FROM n WHERE i < %s)"
                " SELECT CONCAT(%s, i %% %s), 1 + i DIV %s, 'happened',"
                " REPEAT(RANDOM_BYTES(1000), %s) FROM n",
                [first, last, f"{prefix}-", aggregates, aggregates, max(1, size // 1000)],
            )
            connection.commit()


def measure(machine: Machine, given: argparse.Namespace) -> dict[str, Any]:
    """One publisher from its start until everything is published."""
    url = machine.table("memory")
    with machine.database.connect(None) as connection, connection.cursor() as cursor:
        cursor.execute("SET GLOBAL max_allowed_packet = 67108864")
    began = time.monotonic()
    half = given.rows // 2
    fill(machine, url, half, given.bytes, aggregates=given.aggregates, prefix="row")
    fill(machine, url, given.large, _LARGE_BYTES, aggregates=given.aggregates, prefix="large")
    fill(machine, url, given.rows - half, given.bytes, aggregates=given.aggregates, prefix="other")
    filled = time.monotonic() - began
    events = given.rows + given.large
    servers = machine.broker.bootstrap_servers
    name = machine.name("memory")
    topic.create(servers, name, PARTITIONS)
    settings: dict[str, dict[str, Any]] = {}
    for text in given.set:
        key, value = text.split("=", 1)
        section, _, last = key.partition(".")
        settings.setdefault(section, {})[last] = json.loads(value)
    with ExitStack() as stack:
        publisher = stack.enter_context(
            Publisher(machine.folder / name, url, servers, name, settings)
        )
        watch = stack.enter_context(topic.Watch(servers, name, PARTITIONS))
        started = time.monotonic()
        publisher.start(*given.argument)
        assert publisher.process is not None
        with Memory(publisher.process.pid) as memory:
            while watch.offsets < events:  # markers are among them
                publisher.check()
                time.sleep(0.5)
            watch.settled(events, 5.0)
            seconds = time.monotonic() - started
            ended = publisher.process.poll()
        if ended is None:
            publisher.stop()
        verified = json.loads(publisher.command("verify", "--json")) if given.verify else None
    growth = watch.growth
    return {
        "rows": given.rows,
        "bytes": given.bytes,
        "large": given.large,
        "filled_in_seconds": round(filled),
        "seconds": round(seconds, 1),
        "mb_per_second": round(
            (given.rows * given.bytes + given.large * _LARGE_BYTES)
            / _MB
            * growth.share
            / max(1e-9, growth.last - growth.since)
        ),
        **memory.facts(),
        "verify": verified and verified["summary"],
    }


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description=__doc__)
    parser.add_argument("--rows", type=int, default=30_000)
    parser.add_argument("--bytes", type=int, default=100_000, help="of each row's payload")
    parser.add_argument("--large", type=int, default=0, help="rows of 1 MB among them")
    parser.add_argument("--aggregates", type=int, default=500)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=JSON")
    parser.add_argument("--argument", action="append", default=[], help="of `eventpub run`")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--no-verify", dest="verify", action="store_false")
    given = parser.parse_args(arguments)
    with Machine() as machine:
        for _ in range(given.repeat):
            where = environment()
            print(json.dumps({"environment": where, **measure(machine, given)}), flush=True)
            machine.drop("memory")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
