"""One drain of a waiting table, by the publisher or by a peer: the same rows, the same measure."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from eventpub.config import Read

from . import topic
from .machine import PARTITIONS, Machine
from .publisher import Publisher, Settings
from .raw_pipe import IN_FLIGHT, READERS
from .usage import Usage, one

Run = dict[str, Any]


def module(name: str, *arguments: str) -> list[str]:
    """The command that runs a module of this package, wherever it is installed."""
    return [sys.executable, "-m", f"{__package__}.{name}", *arguments]


def eventpub(  # noqa: PLR0913 (what a case is measured with)
    machine: Machine,
    url: str,
    events: int,
    settings: Settings | None = None,
    *,
    partitions: int = PARTITIONS,
    what: str = "eventpub",
) -> Run:
    """Drains by `eventpub run --available-now`, exactly once, from an empty state."""
    drain = Eventpub(machine, url, partitions)
    run = drain.drain(events, settings)
    drain.finish()
    return run | {"what": what}


class Eventpub:
    """Drains one after the other of a table that grows, on a state that is empty at first."""

    def __init__(self, machine: Machine, url: str, partitions: int = PARTITIONS) -> None:
        self._machine, self._url, self._partitions = machine, url, partitions
        self._name = machine.name("drain")
        self._events = 0
        self.topic = self._name
        topic.create(machine.broker.bootstrap_servers, self._name, partitions)

    def drain(self, events: int, settings: Settings | None = None) -> Run:
        """So many are waiting."""
        machine, name = self._machine, self._name
        servers = machine.broker.bootstrap_servers
        stated = settings or {}
        with Publisher(machine.folder / name, self._url, servers, name, stated) as publisher:
            with topic.Watch(servers, name, self._partitions) as watch:
                started = time.time()
                publisher.start("--available-now")
                with Usage(publisher.group, *machine.groups()) as usage:
                    publisher.finish()
                ended = time.time()
            index_bytes = publisher.index_bytes()
        self._events += events
        run = outcome("eventpub", events, started, ended, growth=watch.growth, usage=usage)
        page_rows = stated.get("read", {}).get("page_rows", Read().page_rows)
        return run | {
            "page_seconds": round(page_rows / run["rate"], 3),
            "index_bytes": index_bytes,
            "settings": {section: dict(keys) for section, keys in stated.items()},
        }

    def finish(self) -> None:
        """Removes the topic.

        Raises:
            RuntimeError: it has not one record for each event that was drained.
        """
        _must_have(self._events, self._machine, self._name, self._partitions)
        topic.delete(self._machine.broker.bootstrap_servers, self._name)


def raw_pipe(  # noqa: PLR0913 (what a case is measured with)
    machine: Machine,
    url: str,
    events: int,
    *,
    client: str = "connectorx",
    page_rows: int,
    transaction_rows: int,
    in_flight: int = IN_FLIGHT,
    partitions: int = PARTITIONS,
) -> Run:
    """Drains by the raw pipe in a process of its own."""
    name = machine.name("raw")
    servers = machine.broker.bootstrap_servers
    topic.create(servers, name, partitions)
    command = module(
        "raw_pipe",
        *("--url", url, "--bootstrap-servers", servers, "--topic", name, "--client", client),
        *("--partitions", str(partitions), "--page-rows", str(page_rows)),
        *("--transaction-rows", str(transaction_rows), "--in-flight", str(in_flight)),
    )
    with topic.Watch(servers, name, partitions) as watch:
        started = time.time()
        usage = run_measured(command, "raw pipe", machine)
        ended = time.time()
    _must_have(events, machine, name, partitions)
    return outcome("raw pipe", events, started, ended, growth=watch.growth, usage=usage) | {
        "settings": {
            "client": client,
            "page_rows": page_rows,
            "transaction_rows": transaction_rows,
            "max_in_flight": in_flight,
        }
    }


def readers(url: str, page_rows: int) -> dict[str, Any]:
    """How fast each client that is installed reads the table into Arrow, and does nothing else."""
    found = {}
    for client in READERS:
        if importlib.util.find_spec(client) is None:
            continue
        command = module(
            "raw_pipe", "--url", url, "--client", client, "--page-rows", str(page_rows)
        )
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
        said = json.loads(answer.stdout.splitlines()[-1])
        found[client] = {
            "rate": round(said["events"] / said["seconds"]),
            "cpu_seconds_per_million": round(said["cpu_seconds"] * 1e6 / said["events"], 2),
        }
    return found


def run_measured(command: Sequence[str], group: str, machine: Machine) -> Usage:
    """Runs a command to its end; what it and the servers used meanwhile.

    Raises:
        RuntimeError: it failed; with what it printed.
    """
    log = machine.folder / f"{machine.name(group.replace(' ', '-'))}.log"
    with ExitStack() as stack:
        out = stack.enter_context(log.open("wb"))
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        stack.callback(process.kill)
        with Usage(one(group, process.pid), *machine.groups()) as usage:
            status = process.wait()
    if status != 0:
        raise RuntimeError(f"{group} ended with status {status}\n{log.read_text()[-3000:]}")
    return usage


def _must_have(events: int, machine: Machine, name: str, partitions: int) -> None:
    found = topic.count(machine.broker.bootstrap_servers, name, partitions)
    if found != events:
        raise RuntimeError(f"{name}: {found} records of {events} events")


def outcome(  # noqa: PLR0913 (what a case is measured with)
    what: str, events: int, started: float, ended: float, *, growth: topic.Growth, usage: Usage
) -> Run:
    """The facts of one drain, the same for everybody; times are Unix, s."""
    return {
        "what": what,
        "events": events,
        "rate": round(growth.rate(events)),
        "rates_of_tenths": [round(rate) for rate in growth.rates(events, 10)],
        "rate_from_start": round(events / (ended - started)),
        "first_visible_seconds": round(growth.first - started, 3),
        "seconds": round(ended - started, 3),
        "cpu_seconds": usage.cpu,
        "cpu_seconds_per_million": round(sum(usage.cpu.values()) * 1e6 / events, 2),
        "cpu_seconds_per_million_visible": _while_visible(events, growth, usage),
        "others_cores": round(usage.others / (ended - started), 2),
        "peak_memory_mb": {k: round(v / 1e6) for k, v in usage.peak_memory.items()},
        "peak_rss_mb": {k: round(v / 1e6) for k, v in usage.peak_rss.items()},
        "growth": [
            [round(t - started, 3), n] for t, n in zip(growth.times, growth.offsets, strict=True)
        ],
    }


def _while_visible(events: int, growth: topic.Growth, usage: Usage) -> dict[str, float]:
    """CPU seconds per million events from the first visible ones to the last: without starts."""
    share = growth.share
    used = usage.cpu_between(growth.since, growth.last)
    return {group: round(seconds * 1e6 / (events * share), 2) for group, seconds in used.items()}
