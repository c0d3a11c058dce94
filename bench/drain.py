"""A backlog drains: by the publisher and its peers in turns, on the same rows of the same servers.

python -m bench.drain --events 300000 --rounds 1
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from . import peers, raw_pipe
from .debezium import Debezium
from .machine import Machine, environment
from .peers import Run

AGGREGATES = 20_000
ON_SPARK = "eventpub on Spark"
_FACTS = (
    *("rate", "rate_from_start", "first_visible_seconds", "cpu_seconds_per_million"),
    "others_cores",
)


def drain(  # noqa: PLR0913 (what a case is measured with)
    machine: Machine,
    events: int,
    rounds: int,
    *,
    aggregates: int = AGGREGATES,
    debezium: bool = True,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Each in turn, another first in each round; the runs, and their medians by who drained."""
    url = machine.table("backlog")
    page = min(raw_pipe.PAGE_ROWS, max(1_000, events // 10))
    transaction = min(raw_pipe.TRANSACTION_ROWS, 2 * page)
    contestants: list[Callable[[], Run]] = [
        lambda: peers.eventpub(machine, url, events),
        lambda: peers.eventpub(machine, url, events, {"run": {"engine": "spark"}}, what=ON_SPARK),
        lambda: peers.raw_pipe(machine, url, events, page_rows=page, transaction_rows=transaction),
    ]
    runs: list[Run] = []
    with ExitStack() as stack:
        if debezium:
            connector = stack.enter_context(Debezium(machine, "backlog"))
            contestants.append(lambda: connector.drain(events))
        say(f"filling {events:,} events")
        machine.fill(url, events, aggregates)
        readers = peers.readers(url, page)
        say(f"reading alone: {readers}")
        for number in range(rounds):
            first = number % len(contestants)  # the first pays for the broker's warm-up
            for run in contestants[first:] + contestants[:first]:
                one = run()
                say(
                    f"round {number + 1}, {one['what']}: {one['rate']:,} events/s "
                    f"({one['rate_from_start']:,} from its start), "
                    f"{one['cpu_seconds_per_million']} CPU s per million"
                )
                runs.append(one)
    machine.drop("backlog")
    return {
        "case": "drain",
        "settings": machine.settings() | {"events": events, "aggregates": aggregates},
        "readers": readers,
        "medians": medians(runs),
        "runs": runs,
    }


def medians(runs: list[Run]) -> dict[str, dict[str, Any]]:
    """By who drained; `ratio` is eventpub's rate by this one's."""
    found: dict[str, dict[str, Any]] = {}
    for what in dict.fromkeys(run["what"] for run in runs):
        own = [run for run in runs if run["what"] == what]
        found[what] = {key: round(statistics.median(run[key] for run in own), 2) for key in _FACTS}
        found[what]["peak_memory_mb"] = statistics.median(
            sum(v for k, v in run["peak_memory_mb"].items() if k not in {"database", "broker"})
            for run in own
        )
        found[what]["runs"] = len(own)
        found[what]["lowest"] = min(run["rate"] for run in own)
        found[what]["highest"] = max(run["rate"] for run in own)
        # a run that takes longer than others has a JVM as well
        spent = [run["cpu_seconds_per_million_visible"] for run in own]
        groups = dict.fromkeys(group for of_run in spent for group in of_run)
        found[what]["cpu"] = {
            group: round(statistics.median(of_run.get(group, 0.0) for of_run in spent), 2)
            for group in groups
        }
    for values in found.values():
        values["ratio"] = round(found["eventpub"]["rate"] / values["rate"], 3)
    return found


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.drain", description=__doc__)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--aggregates", type=int, default=AGGREGATES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-debezium", dest="debezium", action="store_false")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    with Machine(binlog=given.debezium) as machine:
        result = drain(
            machine,
            given.events,
            given.rounds,
            aggregates=given.aggregates,
            debezium=given.debezium,
        )
    print(json.dumps(result["medians"], indent=1))
    if given.json:
        given.json.write_text(json.dumps({"environment": environment(), **result}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
