"""Very many aggregates whose first version is gone: what the others' events wait for them.

    python -m bench.gaps --held 300000 --rate 2000 --seconds 120

Twice the same load, on a table that has one row of so many aggregates: of version 1 at first, then
of version 2, as after an archive took the first ones. Each of these waits as a gap, is looked for
again with growing pauses, and skipped in the end. The writers begin when the publisher has read
that backlog. Prints how long the writers' events waited from their commit to the consumer, and what
the database was asked meanwhile. Nothing may be lost, repeated or out of order.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np

from . import topic
from .compare import compare, over_time, spread, stored_codes
from .load import Phase, newest, stored, write
from .machine import PARTITIONS, PAYLOAD_BYTES, Machine, environment
from .memory import Memory
from .publisher import Publisher
from .reader import Reader
from .usage import Usage, one

_ARCHIVED = "archived-"
_AT_ONCE = 10_000
_STATUS = ("Questions", "Handler_read_key", "Handler_read_next")


def fill(machine: Machine, url: str, aggregates: int, version: int) -> None:
    """One row of each aggregate."""
    with machine.database.connect(None) as connection, connection.cursor() as cursor:
        cursor.execute(f"USE {url.rpartition('/')[2]}")
        cursor.execute("SET SESSION cte_max_recursion_depth = 10000000")
        for first in range(0, aggregates, _AT_ONCE):
            last = min(first + _AT_ONCE, aggregates) - 1
            cursor.execute(
                "INSERT INTO events (aggregate_id, version, event_type, payload)"
                " WITH RECURSIVE n (i) AS (SELECT %s UNION ALL SELECT i + 1 FROM n WHERE i < %s)"
                " SELECT CONCAT(%s, LPAD(i, 7, '0')), %s, 'happened', REPEAT('x', %s) FROM n",
                [first, last, _ARCHIVED, version, PAYLOAD_BYTES],
            )
            connection.commit()
        cursor.execute("ANALYZE TABLE events")
        cursor.fetchall()


def status(machine: Machine) -> dict[str, int]:
    """What the database has done since it started."""
    with machine.database.connect(None) as connection, connection.cursor() as cursor:
        cursor.execute("SHOW GLOBAL STATUS")
        found = dict(cursor.fetchall())
    return {name: int(found[name]) for name in _STATUS}


def measure(machine: Machine, given: argparse.Namespace, version: int) -> dict[str, Any]:
    """One publisher and its load; the aggregates of the backlog have this version alone."""
    database = f"gaps{version}"
    url = machine.table(database)
    fill(machine, url, given.held, version)
    servers = machine.broker.bootstrap_servers
    name = machine.name(database)
    folder = machine.folder / name
    folder.mkdir()
    topic.create(servers, name, PARTITIONS)
    settings = {"run": {"shards": given.shards}}
    phase = Phase(given.rate, given.seconds, events_per_transaction=given.transaction)
    with ExitStack() as stack:
        publisher = stack.enter_context(Publisher(folder, url, servers, name, settings))
        # from the beginning: what it had to catch up with would count as the publisher's
        reader = stack.enter_context(Reader(servers, name, folder))
        watch = stack.enter_context(topic.Watch(servers, name, PARTITIONS))
        began = time.monotonic()
        publisher.start()
        assert publisher.process is not None
        memory = stack.enter_context(Memory(publisher.process.pid))
        publisher.started()
        publisher.reaches(newest(url))
        taken = time.monotonic() - began
        before, clock = status(machine), time.monotonic()
        with Usage(publisher.group, *machine.groups(), one("reader", reader.pid)) as usage:
            reports, _ = write(url, [phase], folder, threading.Event())
            span = time.monotonic() - clock
            after = status(machine)
        publisher.reaches(newest(url))
        ended = None
        with suppress(TimeoutError):  # some still wait: the verdict calls them lost
            watch.settled(given.held + reports[0]["events"], 5.0, given.patience)
            ended = round(time.monotonic() - clock, 1)
        publisher.stop()
    records = reader.records
    with stored(url) as rows:
        verdict = compare(stored_codes(rows, records.names), records)
    machine.drop(database)
    is_other = np.array([not text.startswith(_ARCHIVED) for text in records.names])
    others = is_other[records.keys]
    waited = (records.arrived - records.created)[others]
    created = records.created[others]
    start = int(created.min())
    is_warm = created >= start + given.warm_up * 1e6
    series = over_time(created, waited, start, 10.0)
    return {
        "begins_with": version,
        "backlog_seconds": round(taken, 1),
        "writers": reports[0],
        "others": spread(waited[is_warm]),
        "others_p99_over_time": dict(zip(series["seconds"], series["p99"], strict=True)),
        "all_published_after": ended,
        "verdict": vars(verdict),
        "gaps_recorded": topic.count(servers, f"{name}.gaps", PARTITIONS),
        "database_per_second": {k: round((after[k] - before[k]) / span, 1) for k in _STATUS},
        "cpu_cores": {group: round(seconds / span, 2) for group, seconds in usage.cpu.items()},
        "others_cores": round(usage.others / span, 2),
        **memory.facts(),
    }


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.gaps", description=__doc__)
    parser.add_argument("--held", type=int, default=300_000, help="aggregates")
    parser.add_argument("--rate", type=float, default=2_000, help="of the others' events, 1/s")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--transaction", type=int, default=20, help="the others' events in one")
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--warm-up", type=float, default=30, help="seconds that do not count")
    parser.add_argument("--patience", type=float, default=1800, help="seconds for all skips")
    parser.add_argument("--versions", type=int, nargs="+", default=[1, 2])
    given = parser.parse_args(arguments)
    with Machine() as machine:
        for version in given.versions:
            where = environment()
            print(json.dumps({"environment": where, **measure(machine, given, version)}))
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
