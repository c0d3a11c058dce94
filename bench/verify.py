"""How fast `eventpub verify` compares, and with how much CPU and memory.

    python -m bench.verify --events 1000000 --rounds 3

Fills a table, publishes it, and compares as often as asked for. Times are those of the whole
command, its start included; CPU seconds are of its processes and of the two servers; memory is the
highest sum over all its processes (pages that are shared count once).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from . import topic
from .machine import PARTITIONS, Machine, environment
from .publisher import Publisher
from .usage import Usage, one


def measure(machine: Machine, publisher: Publisher, arguments: list[str]) -> dict[str, Any]:
    """One comparison.

    Raises:
        RuntimeError: it did not find that nothing differs.
    """
    load = os.getloadavg()[0]
    began = time.monotonic()
    process = subprocess.Popen(
        [
            str(Path(sys.executable).with_name("eventpub")),
            *("verify", "--json", "--config", str(publisher.folder / "eventpub.toml"), *arguments),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with Usage(one("verify", process.pid), *machine.groups()) as usage:
        out, _ = process.communicate()
        seconds = time.monotonic() - began
    answer = json.loads(out)
    if not answer["ok"]:
        raise RuntimeError(f"it differs: {answer['summary']}")
    return {
        "events": answer["result"]["events"],
        "seconds": round(seconds, 1),
        "cpu": usage.cpu,
        "peak_memory_mb": round(usage.peak_memory["verify"] / 1e6),
        "load_before": round(load, 1),
    }


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.verify", description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--aggregates", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--argument", action="append", default=[], help="of `eventpub verify`")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    result: dict[str, Any] = {"environment": environment(), "events": given.events, "runs": []}
    with Machine() as machine:
        url = machine.table("verify")
        machine.grow(url, given.events, given.aggregates)
        servers, name = machine.broker.bootstrap_servers, machine.name("verify")
        topic.create(servers, name, PARTITIONS)
        with Publisher(machine.folder / name, url, servers, name, {}) as publisher:
            publisher.start("--available-now")
            publisher.finish()
            for _ in range(given.rounds):
                result["runs"].append(measure(machine, publisher, given.argument))
                print(json.dumps(result["runs"][-1]), flush=True)
    median = statistics.median(run["seconds"] for run in result["runs"])
    result["rows_per_second"] = round(given.events / median)
    print(f"{result['rows_per_second']:,} rows/s (median)")
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
