"""How long a publisher takes to its first event, with the archive of Spark's classes and without.

    python -m bench.start --rounds 5

In turns, each with a new topic and state, before one event and before a backlog of more than a
page; threads publish both while Spark starts. Times are from the start of the process until a
`read_committed` consumer could read the first event, and all of them; CPU seconds are of the
publisher's processes until then, with one event of its first `--settled` seconds, in which Spark
has started. Making the archive is measured, too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from . import topic
from .machine import PARTITIONS, Machine, environment
from .publisher import Publisher
from .usage import Usage, one


def start(
    machine: Machine, url: str, events: int, cache: Path, settled: float = 0.0
) -> dict[str, float]:
    """One start; seconds.

    Args:
        cache: where the publisher finds an archive, or does not.
        settled: how long it runs at least.
    """
    name = machine.name("start")
    servers = machine.broker.bootstrap_servers
    topic.create(servers, name, PARTITIONS)
    consumer = topic.asking_consumer(servers)
    with Publisher(machine.folder / name, url, servers, name, {}) as publisher:
        before = os.environ.get("EVENTPUB_CACHE")
        os.environ["EVENTPUB_CACHE"] = str(cache)
        began = time.monotonic()
        publisher.start()
        if before is None:
            del os.environ["EVENTPUB_CACHE"]
        else:
            os.environ["EVENTPUB_CACHE"] = before
        with Usage(publisher.group) as usage:
            first = last = 0.0
            seen = 0
            while seen < events:  # markers are offsets, too: the end is seen a little early
                publisher.check()
                time.sleep(0.02)
                seen = topic.stable_offsets(consumer, name, PARTITIONS)
                last = time.monotonic() - began
                first = first or (last if seen else 0.0)
            time.sleep(max(0.0, settled - last))
    return {
        "first": round(first, 2),
        "all": round(last, 2),
        "cpu": round(sum(usage.cpu.values()), 1),
        "load": round(os.getloadavg()[0], 1),
    }


def make(cache: Path) -> dict[str, float]:
    """Makes the archive; seconds, and bytes."""
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "eventpub.spark.jvm"],
        env={**os.environ, "EVENTPUB_CACHE": str(cache)},
        stdout=subprocess.DEVNULL,
    )
    with Usage(one("make", process.pid)) as usage:
        if process.wait() != 0:
            raise RuntimeError(f"it ended with status {process.returncode}")
    return {
        "seconds": round(time.monotonic() - began, 1),
        "cpu": usage.cpu["make"],
        "peak_memory_mb": round(usage.peak_memory["make"] / 1e6),
        "archive_mb": round(sum(f.stat().st_size for f in cache.glob("*.jsa")) / 1e6),
    }


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.start", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--backlog", type=int, default=200_000)
    parser.add_argument("--settled", type=float, default=20.0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    result: dict[str, Any] = {"environment": environment(), "runs": []}
    with tempfile.TemporaryDirectory() as made, Machine() as machine:
        caches = {"with": Path(made) / "with", "without": Path(made) / "without"}
        result["making"] = make(caches["with"])
        print(json.dumps(result["making"]), flush=True)
        for events, settled in ((1, given.settled), (given.backlog, 0.0)):
            url = machine.table(f"of{events}")
            machine.fill(url, events, min(events, 20_000))
            for _ in range(given.rounds):
                for archive, cache in caches.items():
                    run = start(machine, url, events, cache, settled)
                    result["runs"].append({"events": events, "archive": archive, **run})
                    print(json.dumps(result["runs"][-1]), flush=True)
            for archive in caches:
                own = [
                    run
                    for run in result["runs"]
                    if run["events"] == events and run["archive"] == archive
                ]
                keys = ("first", "all", "cpu", "load")
                found = {k: round(statistics.median(run[k] for run in own), 2) for k in keys}
                result[f"{events} events, {archive}"] = found
                print(f"{events} events, {archive}: {found}", flush=True)
            if given.json:
                given.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
