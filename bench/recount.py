"""What the recount costs the database at a rate of events.

    python -m bench.recount --rate 16000

Starts a MySQL, makes a table that has `rate` rows in each second, and counts seconds of it as the
publisher does: one statement a second with one range for each age (2, 4, 8, … s up to the horizon).
Prints the database's CPU time per second of running, as a share of one core.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import psutil

from eventpub.admission.model import WIDTH, window_of
from eventpub.config import Store
from eventpub.coordinator.recount import Recount
from eventpub.sources.mysql import EventStore
from tests.conftest import FreshDatabase
from tests.publisher.harness import create_table
from tests.servers.databases import mysql
from tests.servers.fill import fill

_TICKS = 200


def main(arguments: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m bench.recount", description=__doc__)
    parser.add_argument("--rate", type=int, default=16_000, help="events/s")
    parser.add_argument("--seconds", type=int, default=60, help="of events in the table")
    parser.add_argument("--horizon", type=float, default=300, help="seconds")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="eventpub-recount-") as folder:
        server = mysql(Path(folder))
        try:
            database = FreshDatabase(server, "recount")
            with server.connect(None) as connection, connection.cursor() as cursor:
                cursor.execute("CREATE DATABASE recount")
            create_table(database)
            start = int(time.time()) * 1_000_000
            fill(
                database.url,
                given.rate * given.seconds,
                20_000,
                first=start,
                last=start + given.seconds * 1_000_000,
            )
            database.execute("ANALYZE TABLE events")
            config = Store.model_validate({"url": database.url})
            with EventStore(config, EventStore.discover(config)) as store:
                print(json.dumps(measured(store, server.pid, start, given)))
        finally:
            server.stop()
    return 0


def measured(
    store: EventStore, pid: int, start: int, given: argparse.Namespace
) -> dict[str, float]:
    """CPU of the database and of this process for counting one bucket of each age."""
    recount = Recount(int(given.horizon * 1e6), start=0)
    far = 10_000 * WIDTH
    recount.due(far, far)
    ages = set()
    for tick in range(1, int(given.horizon) + 2):
        now = far + tick * WIDTH
        due = recount.due(now, now)
        ages = {bucket for bucket in due if bucket < far // WIDTH + given.horizon}
        recount.counted(now, dict.fromkeys(due, 0), {})
    buckets = (start // WIDTH + number % given.seconds for number in range(len(ages)))
    ranges = [window_of(bucket, (bucket + 1) * WIDTH) for bucket in buckets]
    server = psutil.Process(pid)
    rows = sum(store.counts(ranges))
    before, mine, clock = server.cpu_times(), time.process_time(), time.perf_counter()
    for _ in range(_TICKS):
        store.counts(ranges)
    after = server.cpu_times()
    cpu = after.user + after.system - before.user - before.system
    return {
        "rate": given.rate,
        "ages": len(ages),
        "rows_counted_per_second": rows,
        "database_core_share": round(cpu / _TICKS, 4),
        "client_core_share": round((time.process_time() - mine) / _TICKS, 5),
        "seconds_per_statement": round((time.perf_counter() - clock) / _TICKS, 4),
        "microseconds_per_row": round(cpu / _TICKS / rows * 1e6, 4),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
