"""The publisher as it runs all day: idle, at some rates, in bursts, killed and started again."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from . import peers, topic
from .compare import Records, caught_up
from .load import QUIET, Phase, under_load
from .machine import PARTITIONS, Machine
from .publisher import Publisher, Settings
from .usage import Usage

DELAYS: dict[str, Settings] = {
    "delay 1s, watermark off": {"read": {"delay": "1s", "watermark": "off"}},
    "delay 50ms, watermark": {"read": {"delay": "50ms", "watermark": "auto"}},
    "Spark, delay 1s, watermark": {"run": {"engine": "spark"}, "read": {"delay": "1s"}},
}
_BEYOND_RECOUNT = 600_000_000
_SETTLE_SECONDS = 10.0
_SLACK_SECONDS = 0.2
_NEAR = 4_000_000
"""Microseconds behind the present that a publisher without a backlog is at most."""
_CATCH_UP_SECONDS = 300.0
_UNTIL_STOPPED = 100_000.0
WARM_UP = 10.0


def idle(
    machine: Machine,
    seconds: float,
    *,
    publishers: Mapping[str, Settings] = DELAYS,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """What a publisher costs that has nothing to publish."""
    found: dict[str, Any] = {}
    for number, (name, settings) in enumerate(publishers.items()):
        found[name] = resting(machine, f"idle{number}", settings, seconds)
        say(f"idle, {name}: {found[name]}")
    return {
        "case": "idle",
        "settings": machine.settings() | {"seconds": seconds},
        "publishers": found,
    }


def resting(machine: Machine, database: str, settings: Settings, seconds: float) -> dict[str, Any]:
    """One publisher with nothing to publish, on a table and a topic of its own."""
    url = machine.table(database)
    last = time.time_ns() // 1000 - _BEYOND_RECOUNT  # what is younger is still counted again
    machine.fill(url, 10_000, 1_000, last=last)
    servers = machine.broker.bootstrap_servers
    at = machine.name(database)
    topic.create(servers, at, PARTITIONS)
    with Publisher(machine.folder / at, url, servers, at, settings) as publisher:
        publisher.start()
        publisher.started()
        time.sleep(min(seconds, _SETTLE_SECONDS))
        before = machine.questions()
        with Usage(publisher.group, *machine.groups()) as usage:
            started = time.monotonic()
            time.sleep(seconds)
            span = time.monotonic() - started
        # the question itself is one
        questions = machine.questions() - before - 1
        publisher.stop()
    machine.drop(database)
    percent = {group: round(100 * used / span, 2) for group, used in usage.cpu.items()}
    return {
        "settings": settings,
        "cpu_percent_of_a_core": percent,
        "cpu_percent_of_the_publisher": round(
            sum(v for k, v in percent.items() if k in {"driver", "jvm", "workers"}), 2
        ),
        "queries_per_second": round(questions / span, 2),
        "memory_mb": {k: round(v / 1e6) for k, v in usage.peak_memory.items()},
        "rss_mb": {k: round(v / 1e6) for k, v in usage.peak_rss.items()},
    }


def latency(  # noqa: PLR0913 (what a case is measured with)
    machine: Machine,
    rates: Sequence[float],
    seconds: float,
    *,
    publishers: Mapping[str, Settings] = DELAYS,
    warm_up: float = WARM_UP,
    quiet: float = 5.0,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """create_time → consumer at each rate; every transaction is committed at once.

    What was created in the first `warm_up` seconds does not count.
    """
    found: dict[str, Any] = {}
    for number, (name, settings) in enumerate(publishers.items()):
        found[name] = {}
        for rate in rates:
            database = f"latency{number}_{rate:.0f}"
            one = under_load(
                machine,
                database,
                [Phase(rate, warm_up + seconds)],
                settings,
                quiet=quiet,
                warm_up=warm_up,
            )
            machine.drop(database)
            found[name][f"{rate:.0f}"] = one
            say(f"{rate:,.0f} events/s, {name}: {one['latency']['at_once']}, {one['verdict']}")
    return {
        "case": "latency",
        "settings": machine.settings()
        | {"seconds": seconds, "warm_up": warm_up, "rates": list(rates)},
        "publishers": found,
    }


def restart(  # noqa: PLR0913 (what a case is measured with)
    machine: Machine,
    rate: float,
    times: int,
    *,
    settings: Settings | None = None,
    calm: float = 15.0,
    quiet: float = QUIET,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """`kill -9` of driver, JVM and workers under load, and a start at once.

    The next kill comes `calm` seconds after the publisher has caught up with the last one and its
    tasks run on Spark again. What is normal is seen in as many seconds before the first.
    """
    kills: list[int] = []

    def kill(publisher: Publisher) -> None:
        time.sleep(calm)
        publisher.reaches(time.time_ns() // 1000)  # so that something is normal before the kill
        time.sleep(1)
        for _ in range(times):
            kills.append(time.time_ns() // 1000)
            publisher.kill()
            publisher.start()
            publisher.started()
            deadline = time.monotonic() + _CATCH_UP_SECONDS
            while publisher.position() < time.time_ns() // 1000 - _NEAR:
                publisher.check()
                if time.monotonic() > deadline:
                    break
                time.sleep(0.1)
            time.sleep(calm)

    def examine(records: Records) -> dict[str, Any]:
        before = (records.arrived < kills[0]) & (records.created > kills[0] - calm * 1e6)
        waited = (records.arrived - records.created)[before]
        normal = float(np.percentile(waited, 99)) / 1e6 + _SLACK_SECONDS
        runs = []
        for number, kill in enumerate(kills):
            until = kills[number + 1] if number + 1 < len(kills) else None
            part = records.arrived >= kill
            if until is not None:
                part &= records.arrived < until
            one = Records(
                records.names,
                *(
                    getattr(records, name)[part]
                    for name in ("keys", "versions", "created", "arrived", "late")
                ),
            )
            new = one.arrived[one.created >= kill]
            runs.append(
                {
                    "first_new_event": round((int(new.min()) - kill) / 1e6, 3)
                    if len(new)
                    else None,
                    "caught_up": caught_up(one, kill, normal),
                }
            )
        return {
            "normal_latency": round(normal, 3),
            "kills": runs,
            "kill_times": kills,
            "median": {
                key: _median([run[key] for run in runs]) for key in ("first_new_event", "caught_up")
            },
        }

    phase = Phase(rate, _UNTIL_STOPPED)
    found = under_load(
        machine, "restart", [phase], settings or {}, quiet=quiet, meanwhile=kill, examine=examine
    )
    machine.drop("restart")
    say(f"restart at {rate:,.0f} events/s: {found['median']}, {found['verdict']}")
    return found | {
        "case": "restart",
        "settings": machine.settings() | {"phase": vars(phase), "times": times},
    }


def bursts(  # noqa: PLR0913 (what a case is measured with)
    machine: Machine,
    rate: float,
    seconds: float,
    hot_events: int,
    *,
    every: float = 30.0,
    length: float = 5.0,
    zipf: bool = True,
    quiet: float = QUIET,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Ten times the rate for some seconds, popularity by Zipf's law, and one hot aggregate."""
    loads = {
        f"10 times the rate for {length:.0f} s of every {every:.0f} s": Phase(
            rate, seconds, bursts=(every, length, 10.0)
        )
    }
    if zipf:
        loads["zipf 1.2, 10% of transactions open for 0 to 5 s"] = Phase(
            rate, seconds, open_fraction=0.1, zipf=1.2
        )
    found: dict[str, Any] = {}
    for number, (name, phase) in enumerate(loads.items()):
        found[name] = under_load(machine, f"bursts{number}", [phase], {}, quiet=quiet) | {
            "phase": vars(phase)
        }
        machine.drop(f"bursts{number}")
        say(f"{name}: {found[name]['latency']['at_once']}, {found[name]['verdict']}")
    url = machine.table("hot")
    machine.fill(url, hot_events, 1)
    hot = peers.eventpub(machine, url, hot_events)
    machine.drop("hot")
    say(f"one aggregate with {hot_events:,} events: {hot['rate']:,} events/s")
    return {
        "case": "bursts",
        "settings": machine.settings() | {"rate": rate, "seconds": seconds},
        "loads": found,
        "one_aggregate": hot,
    }


def large(  # noqa: PLR0913 (what a case is measured with)
    machine: Machine,
    rate: float,
    seconds: float,
    *,
    rows: int = 3_000,
    publishers: Mapping[str, Settings] = DELAYS,
    warm_up: float = WARM_UP,
    quiet: float = QUIET,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Transactions of some `rows` rows, a tenth of them open for 0 to 3 s: commit → consumer.

    A row's create_time is its statement's start, so what it shows is mostly how long the writer
    took; what an event waits for the publisher begins with the answer to the COMMIT.
    """
    phase = Phase(
        rate,
        warm_up + seconds,
        open_fraction=0.1,
        open_seconds=3.0,
        aggregates=200_000,
        events_per_transaction=rows,
        note_all=True,
    )
    found: dict[str, Any] = {}
    for number, (name, settings) in enumerate(publishers.items()):
        one = under_load(machine, f"large{number}", [phase], settings, quiet=quiet, warm_up=warm_up)
        machine.drop(f"large{number}")
        found[name] = one
        say(f"{name}: {one['latency']['held_open_from_commit']}, {one['verdict']}")
    return {
        "case": "large",
        "settings": machine.settings() | {"phase": vars(phase), "warm_up": warm_up},
        "publishers": found,
    }


def _median(values: list[float | None]) -> float | None:
    """None where one is: it never happened."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known and len(known) == len(values) else None
