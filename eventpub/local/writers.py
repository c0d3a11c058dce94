"""Writers of the demo: an application that appends events, commits late, and rolls some back.

Each thread has its own aggregates, so versions are 1, 2, 3, … without gaps, as with optimistic
locking; exceptions (versions that never come, commits in reverse order) are deliberate and counted.

    python -m eventpub.local.writers --url mysql+pymysql://root@127.0.0.1:3306/shop --rate 100
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing

import pymysql
from pydantic import SecretStr

from eventpub.config import Store
from eventpub.errors import StoreError
from eventpub.sources.mysql.connection import Connection, connect

_AGGREGATES = 1_000
_OF_A_THREAD = 10.0
_HELD, _ROLLED_BACK, _GAPS, _REVERSED = 0.1, 0.03, 0.005, 0.05
"""Fractions of the transactions: open for up to 3 s, rolled back, rolled back after the next
version was committed, committed after it.
"""
_TYPES = ("OrderPlaced", "ItemAdded", "OrderPaid", "OrderShipped", "NoteWritten")
_VERSIONS = (
    "SELECT aggregate_id, MAX(version) FROM events WHERE aggregate_id IN %s GROUP BY aggregate_id"
)
_INSERT = "INSERT INTO events (aggregate_id, version, event_type, payload) VALUES (%s, %s, %s, %s)"


class Writer(threading.Thread):
    """Writes to its aggregates until it is stopped, then one more event to each: without a later
    event, a late commit of the last version would show no gap.
    """

    def __init__(
        self, url: str, names: Sequence[str], rate: float, stopped: threading.Event
    ) -> None:
        super().__init__(daemon=True)
        self._store = Store(url=SecretStr(url))
        self._rate = rate
        self._stopped = stopped
        self.counts = Counter[str]()
        self._last = dict.fromkeys(names, 0)
        self._touched: set[str] = set()

    def run(self) -> None:
        self._stopped.wait(random.random())
        while not self._stopped.is_set():
            try:
                with closing(self._connect()) as connection, closing(self._connect()) as other:
                    self._read_versions(connection)
                    due = time.monotonic()
                    while not self._stopped.wait(max(0.0, due - time.monotonic())):
                        events = self._write(connection, other)
                        due = max(due + events / self._rate, time.monotonic() - 2.0)
                    last = dict.fromkeys(self._touched, 1)
                    self._append(connection, last)
                    self._commit(connection, last)
            except (StoreError, pymysql.Error, OSError):
                self._stopped.wait(0.5)

    def check(self) -> None:
        with closing(self._connect()) as connection:  # closes without a commit
            self._append(connection, {next(iter(self._last)): 1}, first=-1)

    def _write(self, connection: Connection, other: Connection) -> int:
        """Write one transaction, or a pair whose first ends last; returns the number of events."""
        chance = random.random()
        if chance < _GAPS + _REVERSED:
            return self._pair(connection, other, commits=chance >= _GAPS)
        is_held, is_rolled_back = random.random() < _HELD, random.random() < _ROLLED_BACK
        new = {name: random.randint(1, 3) for name in random.sample(list(self._last), 2)}
        for name, count in new.items():
            self._append(connection, {name: count})
            if is_held:
                self._stopped.wait(random.uniform(0.0, 1.5))
        if is_rolled_back:
            connection.rollback()
        else:
            self._commit(connection, new)
        self.counts["rolled_back"] += is_rolled_back
        self.counts["held_open"] += is_held
        return sum(new.values())

    def _pair(self, connection: Connection, other: Connection, *, commits: bool) -> int:
        name = random.choice(list(self._last))
        self._append(connection, {name: 1})
        self._append(other, {name: 1}, first=1)
        other.commit()
        self._stopped.wait(random.uniform(0.05, 1.0))
        if commits:
            self._commit(connection, {name: 2})
        else:
            connection.rollback()
            self._commit(other, {name: 2})
        self.counts["reversed" if commits else "skipped_versions"] += 1
        self.counts["events"] -= not commits
        return 2

    def _append(self, connection: Connection, new: Mapping[str, int], first: int = 0) -> None:
        """Insert so many events of each aggregate; the `first` versions are left out."""
        rows = [
            (name, self._last[name] + 1 + first + n, random.choice(_TYPES), f'{{"order":"{name}"}}')
            for name, count in new.items()
            for n in range(count)
        ]
        with connection.cursor() as cursor:
            cursor.executemany(_INSERT, rows)

    def _commit(self, connection: Connection, new: Mapping[str, int]) -> None:
        connection.commit()
        for name, events in new.items():
            self._last[name] += events
        self._touched.update(new)
        self.counts["events"] += sum(new.values())

    def _connect(self) -> Connection:
        connection = connect(self._store)
        connection.autocommit(False)
        return connection

    def _read_versions(self, connection: Connection) -> None:
        with connection.cursor() as cursor:
            cursor.execute(_VERSIONS, (list(self._last),))
            self._last.update(cursor.fetchall())
        connection.commit()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m eventpub.local.writers")
    parser.add_argument("--url", required=True, help="mysql+pymysql://user@host:port/database")
    parser.add_argument("--rate", type=float, required=True, help="events per second")
    parser.add_argument("--seconds", type=float, help="until SIGTERM when not given")
    parser.add_argument("--json", action="store_true", help="a line of JSON every second")
    given = parser.parse_args(arguments)
    stopped, signals = threading.Event(), list[int]()
    for number in (signal.SIGINT, signal.SIGTERM):  # `Event.set` would wait for the main thread
        signal.signal(number, lambda got, _: signals.append(got))
    threads = round(min(100.0, max(4.0, given.rate / _OF_A_THREAD)))
    names = [f"order-{number:07d}" for number in range(_AGGREGATES)]
    writers = [
        Writer(given.url, names[n::threads], given.rate / threads, stopped) for n in range(threads)
    ]
    try:
        writers[0].check()
    except (StoreError, pymysql.Error, OSError) as error:
        parser.exit(1, f"the table `events` of --url cannot be written to: {error}\n")
    began = printed = time.monotonic()
    ends = began + (given.seconds or float("inf"))
    for writer in writers:
        writer.start()
    while not signals and time.monotonic() < ends:
        time.sleep(0.05)
        if given.json and time.monotonic() - printed >= 1.0:
            printed = time.monotonic()
            _print(writers, printed - began)
    stopped.set()
    seconds = time.monotonic() - began
    for writer in writers:
        writer.join(20)
    _print(writers, seconds)
    return 0


def _print(writers: Iterable[Writer], seconds: float) -> None:
    counts = sum((writer.counts for writer in writers), Counter[str]())
    rate = round(counts["events"] / max(seconds, 1e-9), 1)
    print(json.dumps({**counts, "rate": rate, "seconds": round(seconds, 1)}), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
