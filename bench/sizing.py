"""What a publisher needs, by the rate of events: CPU, memory and disk, with Spark and without.

Without Spark is what `eventpub init` writes for one machine: the shards are threads of the
publisher's process. Everything else is as by default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import peers
from .load import Phase, under_load
from .machine import Machine
from .publisher import Settings
from .steady import resting

ENGINES: dict[str, Settings] = {
    'run.engine = "threads"': {"run": {"engine": "threads"}},
    'run.engine = "spark"': {"run": {"engine": "spark"}},
}
AGGREGATES = 200_000
"""Of the backlog, by which the index is measured."""


def sizing(  # noqa: PLR0913 (what a case is measured with)
    machine: Machine,
    rates: Sequence[float],
    seconds: float,
    backlog: int,
    *,
    publishers: Mapping[str, Settings] = ENGINES,
    warm_up: float = 8.0,
    quiet: float = 4.0,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Idle, at each rate, and a backlog.

    Args:
        rates: events per second; every transaction is committed at once.
        seconds: of each rate and of idleness, behind a warm-up.
        backlog: events of the drain, of `AGGREGATES` aggregates or as many as there are events.
    """
    found: dict[str, Any] = {}
    for number, (name, settings) in enumerate(publishers.items()):
        rest = resting(machine, f"sizing{number}", settings, seconds)
        say(f"idle, {name}: {rest}")
        loads: dict[str, Any] = {}
        for rate in rates:
            database = f"sizing{number}_{rate:.0f}"
            one = under_load(
                machine,
                database,
                [Phase(rate, warm_up + seconds)],
                settings,
                quiet=quiet,
                warm_up=warm_up,
            )
            machine.drop(database)
            loads[f"{rate:.0f}"] = {k: v for k, v in one.items() if k != "over_time"}
            say(f"{rate:,.0f} events/s, {name}: {one['steady']}, {one['latency']['at_once']}")
        found[name] = {
            "settings": settings,
            "idle": rest,
            "rates": loads,
            "backlog": _backlog(machine, settings, backlog, say),
        }
    return {
        "case": "sizing",
        "settings": machine.settings()
        | {"seconds": seconds, "warm_up": warm_up, "rates": list(rates), "backlog": backlog},
        "publishers": found,
    }


def _backlog(
    machine: Machine, settings: Settings, events: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """A drain, and what is on the disks after it."""
    url = machine.table("sizing")
    aggregates = min(events, AGGREGATES)
    machine.fill(url, events, aggregates)
    drain = peers.Eventpub(machine, url)
    run = drain.drain(events, settings)
    run["disk"] = {
        "topic_bytes": machine.topic_bytes(drain.topic),
        "table_bytes": machine.table_bytes("sizing"),
        "index_bytes": run["index_bytes"],
        "aggregates": aggregates,
    }
    drain.finish()
    machine.drop("sizing")
    say(f"backlog of {events:,} events: {run['rate']:,} events/s, {run['disk']}")
    return {key: value for key, value in run.items() if key != "growth"}
