"""Writers of the demo: an application that appends events, commits late, and rolls some back.

Each thread has aggregates of its own, so versions are 1, 2, 3, … without holes, as optimistic
locking makes them; the exceptions (versions that never come, commits in reverse order) are made on
purpose and counted.

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
from collections.abc import Iterable, Sequence
from contextlib import closing

import pymysql
from pydantic import SecretStr

from eventpub.config import Store
from eventpub.errors import StoreError
from eventpub.store.connection import Connection, connect

_AGGREGATES = 1_000
_OF_A_THREAD = 10.0
"""Events a second that one thread writes, whose transactions are mostly waiting."""
_HELD, _ROLLED_BACK, _GAPS, _REVERSED = 0.1, 0.03, 0.005, 0.05
"""Fractions of the transactions: open for up to 3 s, rolled back, rolled back after the next
version was committed, committed after it."""
_TYPES = ("OrderPlaced", "ItemAdded", "OrderPaid", "OrderShipped", "NoteWritten")
_INSERT = "INSERT INTO events (aggregate_id, version, event_type, payload) VALUES (%s, %s, %s, %s)"


class Writer(threading.Thread):
    """Writes until it is stopped, then one more event to each aggregate: a last version that has
    committed late has nothing behind it that would show the gap.

    Args:
        url: SQLAlchemy's, of the database.
        names: of its aggregates.
        rate: events a second.
        stopped: ends it.

    Attributes:
        counts: what it has done, by name.
    """

    def __init__(
        self, url: str, names: Sequence[str], rate: float, stopped: threading.Event
    ) -> None:
        super().__init__(daemon=True)
        self._store = Store(url=SecretStr(url))
        self._names = names
        self._rate = rate
        self._stopped = stopped
        self.counts = Counter[str]()
        self._last: dict[str, int] = {}
        self._touched: set[str] = set()

    def run(self) -> None:
        """Write; what became of a transaction whose connection was lost is read from the table."""
        self._stopped.wait(random.random())
        while not self._stopped.is_set():
            try:
                with closing(self._connect()) as connection, closing(self._connect()) as other:
                    self._read_versions(connection)
                    self._write(connection, other)
                    self._append(connection, [(n, self._last[n] + 1) for n in self._touched])
                    connection.commit()
                    self.counts["events"] += len(self._touched)
            except (StoreError, pymysql.Error, OSError):
                self._stopped.wait(0.5)

    def check(self) -> None:
        """Raises: StoreError, pymysql.Error, OSError: it cannot write to the table."""
        with closing(self._connect()) as connection:  # which ends without a commit
            self._append(connection, [(self._names[0], 0)])

    def _write(self, connection: Connection, other: Connection) -> None:
        due = time.monotonic()
        while not self._stopped.wait(max(0.0, due - time.monotonic())):
            chance = random.random()
            if chance < _GAPS + _REVERSED:
                events = self._pair(connection, other, commits=chance >= _GAPS)
            else:
                events = self._transaction(connection)
            due = max(due + events / self._rate, time.monotonic() - 2.0)

    def _transaction(self, connection: Connection) -> int:
        """A few events of a few aggregates; how many."""
        is_held, is_rolled_back = random.random() < _HELD, random.random() < _ROLLED_BACK
        new = {name: random.randint(1, 3) for name in random.sample(self._names, 2)}
        for name, count in new.items():
            last = self._last[name]
            self._append(connection, [(name, last + 1 + n) for n in range(count)])
            if is_held:
                self._stopped.wait(random.uniform(0.0, 1.5))
        if is_rolled_back:
            connection.rollback()
            self.counts["rolled_back"] += 1
        else:
            connection.commit()
            for name, count in new.items():
                self._committed(name, count)
        self.counts["held_open"] += is_held
        return sum(new.values())

    def _pair(self, connection: Connection, other: Connection, *, commits: bool) -> int:
        """A version in a transaction that ends after the one with the next."""
        name = random.choice(self._names)
        self._append(connection, [(name, self._last[name] + 1)])
        self._append(other, [(name, self._last[name] + 2)])
        other.commit()
        self._stopped.wait(random.uniform(0.05, 1.0))
        if commits:
            connection.commit()
        else:
            connection.rollback()
        self.counts["reversed" if commits else "skipped_versions"] += 1
        self.counts["events"] -= not commits
        self._committed(name, 2)
        return 2

    def _committed(self, name: str, events: int) -> None:
        self._last[name] += events
        self._touched.add(name)
        self.counts["events"] += events

    def _append(self, connection: Connection, rows: Iterable[tuple[str, int]]) -> None:
        with connection.cursor() as cursor:
            cursor.executemany(
                _INSERT,
                [
                    (name, version, random.choice(_TYPES), f'{{"order":"{name}","n":{version}}}')
                    for name, version in rows
                ],
            )

    def _connect(self) -> Connection:
        connection = connect(self._store)
        connection.autocommit(False)
        return connection

    def _read_versions(self, connection: Connection) -> None:
        with connection.cursor() as cursor:
            cursor.execute(
                "SELECT aggregate_id, MAX(version) FROM events WHERE aggregate_id IN %s"
                " GROUP BY aggregate_id",
                (self._names,),
            )
            self._last = dict.fromkeys(self._names, 0) | dict(cursor.fetchall())
        connection.commit()


def main(arguments: Sequence[str]) -> int:
    """``python -m eventpub.local.writers``; SIGTERM and Ctrl-C end what is open, then stop."""
    parser = argparse.ArgumentParser(
        prog="python -m eventpub.local.writers", description="Appends events to the table `events`."
    )
    parser.add_argument("--url", required=True, help="mysql+pymysql://user@host:port/database")
    parser.add_argument("--rate", type=float, required=True, help="events per second")
    parser.add_argument("--seconds", type=float, help="until SIGTERM when not given")
    parser.add_argument("--json", action="store_true", help="a line of JSON every second")
    given = parser.parse_args(arguments)
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    threads = round(min(100.0, max(4.0, given.rate / _OF_A_THREAD)))
    names = [f"order-{number:07d}" for number in range(_AGGREGATES)]
    writers = [
        Writer(given.url, names[n::threads], given.rate / threads, stopped) for n in range(threads)
    ]
    try:
        writers[0].check()
    except (StoreError, pymysql.Error, OSError) as error:
        parser.exit(1, f"the table `events` of --url cannot be written to: {error}\n")
    began = time.monotonic()
    ends = began + (given.seconds or float("inf"))
    for writer in writers:
        writer.start()
    while not stopped.wait(min(1.0, max(0.0, ends - time.monotonic()))):
        if given.json:
            _print(writers, time.monotonic() - began)
        if time.monotonic() >= ends:
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
