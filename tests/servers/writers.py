"""The load: an application that appends events, keeps transactions open, and rolls some back.

One process and one loop over many connections, so that thousands of events a second leave the
machine to those who are measured. Each transaction appends to aggregates that no other open one
uses, so versions are 1, 2, 3, … without holes, as an application with optimistic locking makes
them; the exceptions (versions skipped for good, commits in reverse order) are made on purpose and
counted.

    python -m tests.servers.writers --url mysql+pymysql://root@127.0.0.1:3306/shop --rate 6000
"""

from __future__ import annotations

import argparse
import heapq
import json
import selectors
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pymysql
from pymysql.constants import ER

from tests.servers.connections import Pool, WriterConnection, connect, quoted
from tests.servers.load import Load, Report
from tests.servers.transactions import ROLLBACK, Maker, Transaction

if TYPE_CHECKING:
    from pymysql.cursors import Cursor

_IN_FLIGHT = 32  # statements that the server works on at once; more would only queue inside it
_CATCH_UP_SECONDS = 5.0  # after a stall the load is not made up for beyond this
_GIVE_UP_SECONDS = 15.0  # to end what is open while the database is away

_LOST = {0, 1053, 1927, 2003, 2006, 2013, 3169, 4031}  # shutdown, killed, refused, cut
_REFUSED = {ER.LOCK_DEADLOCK, ER.LOCK_WAIT_TIMEOUT, ER.DUP_ENTRY, ER.QUERY_INTERRUPTED}


def run(
    load: Load,
    *,
    stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[Report], None] | None = None,
) -> Report:
    """Appends until `seconds` have passed or `stop` is true, then ends what is open.

    Goes on from the versions that the table has. A database that goes away is waited for.
    `on_progress` is called once a second.

    Raises:
        pymysql.Error: the database cannot be reached at the start, or refuses a statement for
            another reason than a conflict.
    """
    return _Run(load).run(stop, on_progress)


class _Run:
    """One run of a load: `due` holds the next step of each open transaction that waits for its
    time, the selector the connections whose answer is awaited."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.maker = Maker(load)
        self.pool = Pool(load.url, load.connections)
        self.touched: set[int] = set()
        self.skipped: dict[int, list[int]] = {}
        self.selector = selectors.DefaultSelector()
        self.in_flight = 0
        self.open: set[Transaction] = set()
        self.due: list[tuple[float, int, Transaction]] = []
        self.numbers = count()
        self.unsure: list[Transaction] = []
        self.planned = 0.0
        self.blocked = False
        self.ends_at: float | None = None
        self.counts: dict[str, Any] = asdict(Report())

    # the loop

    def run(self, stop: Callable[[], bool], on_progress: Callable[[Report], None] | None) -> Report:
        with closing(connect(self.load.url)) as connection, connection.cursor() as cursor:
            self._read_versions(cursor)
        began = reported = time.monotonic()
        while True:
            now = time.monotonic()
            if self.ends_at is None and self._is_over(stop, now - began):
                self.ends_at = now
                self.due = [(now, number, waiting) for _, number, waiting in self.due]
            if self.unsure and now >= self.pool.retry_at:
                self._settle(now)
            if self.ends_at is None:
                self._begin_due(now, now - began)
            elif (not self.open and not self.unsure) or now - self.ends_at > _GIVE_UP_SECONDS:
                break
            self._send_due(now)
            if on_progress is not None and now - reported >= 1:
                reported = now
                on_progress(self._report(now - began))
            for key, _ in self.selector.select(self._pause(now, began)):
                self._answered(key.data)
        report = self._finish(self.ends_at - began)
        if on_progress is not None:
            on_progress(report)
        return report

    def _is_over(self, stop: Callable[[], bool], elapsed: float) -> bool:
        return stop() or (self.load.seconds is not None and elapsed >= self.load.seconds)

    def _finish(self, seconds: float) -> Report:
        if self.load.close_all:
            self._append_one_each()
        self.pool.close()
        self.selector.close()
        self.load.versions = {
            self.maker.names[number]: self.maker.last[number] for number in self.touched
        }
        self.load.skipped = {
            self.maker.names[number]: gone for number, gone in self.skipped.items()
        }
        return self._report(seconds)

    def _report(self, seconds: float) -> Report:
        rate = self.counts["events"] / max(seconds, 1e-9)
        return Report(**{**self.counts, "seconds": round(seconds, 3), "rate": round(rate, 1)})

    def _pause(self, now: float, began: float) -> float:
        """Seconds until something is due that no answer announces."""
        until = now + 0.1
        if self.due:
            until = min(until, self.due[0][0])
        if self.ends_at is None:
            if not self.blocked:  # at the earliest, where there are bursts
                factor = self.load.bursts[2] if self.load.bursts else 1.0
                missing = self.planned - self.load.planned(now - began)
                until = min(until, now + max(0.0, missing) / (self.load.rate * factor))
            if self.load.seconds is not None:
                until = min(until, began + self.load.seconds)
        return max(0.0, until - now)

    # beginning transactions

    def _begin_due(self, now: float, elapsed: float) -> None:
        target = self.load.planned(elapsed)
        self.planned = max(self.planned, target - _CATCH_UP_SECONDS * self.load.rate)
        self.blocked = False
        while self.planned < target:
            if self.in_flight >= _IN_FLIGHT or not self.pool.has_one(now):
                self.blocked = True
                return
            transaction = self.maker.next()
            if transaction is None:  # too many aggregates are busy; some will be free soon
                self.blocked = True
                return
            self.open.add(transaction)
            if transaction.commits:
                self.planned += transaction.events
            if transaction.follower is not None:
                self.planned += transaction.follower.events
            self._send_next(transaction, now)

    # steps of transactions

    def _send_due(self, now: float) -> None:
        while self.due and self.due[0][0] <= now:
            _, _, transaction = heapq.heappop(self.due)
            if transaction.done:
                continue
            if transaction.connection is None and not self.pool.has_one(now):
                self._push(now + 0.005, transaction)
                continue
            follower = transaction.follower
            if len(transaction.steps) == 1 and follower is not None and not follower.done:
                transaction.waits = True
                continue
            self._send_next(transaction, now)

    def _push(self, when: float, transaction: Transaction) -> None:
        heapq.heappush(self.due, (when, next(self.numbers), transaction))

    def _send_next(self, transaction: Transaction, now: float) -> None:
        connection = transaction.connection
        if connection is None:
            connection = self.pool.idle.pop()
            connection.transaction, transaction.connection = transaction, connection
            transaction.began = now
        _, statement = transaction.steps.popleft()
        try:
            connection.send(statement)
        except (pymysql.Error, OSError):
            self._lost(connection, registered=False)
            return
        self.selector.register(connection, selectors.EVENT_READ, connection)
        self.in_flight += 1

    def _answered(self, connection: WriterConnection) -> None:
        transaction = connection.transaction
        assert transaction is not None
        try:
            connection.receive()
        except (pymysql.Error, OSError) as error:
            code = error.args[0] if error.args else 0
            if isinstance(error, OSError) or code in _LOST:
                self._lost(connection, registered=True)
                return
            if code not in _REFUSED:
                raise
            transaction.refused = True
            explicit = bool(transaction.steps)
            transaction.steps = deque([(0.0, ROLLBACK)] if explicit else [])
        self.selector.unregister(connection)
        self.in_flight -= 1
        now = time.monotonic()
        if not transaction.steps:
            if transaction.refused:
                self.pool.give_back(connection)
                self.unsure.append(transaction)
            else:
                self._ended(transaction, committed=transaction.commits)
            return
        follower = transaction.follower
        if follower is not None and follower not in self.open and len(transaction.steps) == 1:
            if transaction.refused:
                follower.done = True
            else:
                self.open.add(follower)
                span = transaction.steps[0][0] if self.ends_at is None else 0.0
                self._push(now + self.maker.random.uniform(0.0, span / 2), follower)
        after = transaction.steps[0][0] if self.ends_at is None else 0.0
        if after == 0.0 and (follower is None or follower.done):
            self._send_next(transaction, now)
        else:
            self._push(transaction.began + after, transaction)

    def _ended(self, transaction: Transaction, *, committed: bool) -> None:
        if transaction.connection is not None:
            self.pool.give_back(transaction.connection)
        transaction.done, transaction.committed = True, committed
        self.open.discard(transaction)
        self.counts["held_open"] += transaction.held
        if committed:
            self.counts["transactions"] += 1
            self.counts["events"] += transaction.events
            if self.load.note_all or (transaction.held and self.load.note_held):
                self.load.held.append((time.time(), transaction.versions))
            self.touched.update(transaction.versions)
            for number, versions in transaction.versions.items():
                self.maker.last[number] = max(self.maker.last[number], versions[-1])
        elif not transaction.commits:
            self.counts["rolled_back"] += 1
        self._release(transaction)

    def _release(self, transaction: Transaction) -> None:
        leader = transaction.leader or transaction
        follower = leader.follower
        if follower is None:
            self.maker.busy.difference_update(transaction.versions)
            return
        if transaction is follower and leader.waits:
            self._push(0.0, leader)
        if not (leader.done and follower.done):
            return
        self.maker.busy.difference_update(leader.versions)
        if follower.committed and leader.committed:
            self.counts["reversed"] += 1
        elif follower.committed:
            self.counts["skipped_versions"] += leader.events
            for number, versions in leader.versions.items():
                self.skipped.setdefault(number, []).extend(versions)

    def _lost(self, connection: WriterConnection, *, registered: bool) -> None:
        """What became of the connection's transaction is read from the table, in `_settle`."""
        transaction = connection.transaction
        assert transaction is not None
        if registered:
            self.selector.unregister(connection)
            self.in_flight -= 1
        self.pool.lose(connection, time.monotonic())
        connection.transaction = transaction.connection = None
        self.unsure.append(transaction)

    def _settle(self, now: float) -> None:
        """Ends the transactions whose outcome, or whose aggregates' versions, are not known."""
        try:
            with closing(connect(self.load.url)) as connection, connection.cursor() as cursor:
                while self.unsure:
                    transaction = self.unsure[0]
                    committed = False
                    if not transaction.refused:
                        number, versions = next(iter(transaction.versions.items()))
                        cursor.execute(
                            f"SELECT 1 FROM {quoted(self.load.table)} "  # noqa: S608
                            "WHERE aggregate_id = %s AND version = %s",
                            (self.maker.names[number], versions[0]),
                        )
                        committed = cursor.fetchone() is not None
                    self._read_versions(cursor, transaction.versions)
                    self.unsure.pop(0)
                    follower = transaction.follower
                    if follower is not None and follower not in self.open:
                        follower.done = True
                    self.counts["failed" if transaction.refused else "unsure"] += 1
                    self._ended(transaction, committed=committed)
        except pymysql.Error:
            self.pool.retry_at = now + 0.5

    def _read_versions(self, cursor: Cursor, numbers: Iterable[int] | None = None) -> None:
        """Takes the last versions from the table, of all aggregates where none are named."""
        values: Sequence[str]
        if numbers is None:
            # "." follows "-" in every character set
            where = "aggregate_id >= %s AND aggregate_id < %s"
            values = (f"{self.load.prefix}-", f"{self.load.prefix}.")
        else:
            values = [self.maker.names[number] for number in numbers]
            where = f"aggregate_id IN ({','.join(['%s'] * len(values))})"
        cursor.execute(
            "SELECT aggregate_id, MAX(version) "  # noqa: S608
            f"FROM {quoted(self.load.table)} WHERE {where} GROUP BY aggregate_id",
            values,
        )
        for name, version in cursor:
            number = int(name.rpartition("-")[2])
            if number < len(self.maker.names):
                self.maker.last[number] = version

    def _append_one_each(self) -> None:
        numbers = sorted(self.touched)
        with closing(connect(self.load.url)) as connection:
            for start in range(0, len(numbers), 200):
                some = numbers[start : start + 200]
                connection.send(self.maker.statement((n, self.maker.last[n] + 1) for n in some))
                connection.receive()
                for number in some:
                    self.maker.last[number] += 1
        self.counts["closing_events"] = len(numbers)


def main(arguments: Sequence[str]) -> int:
    """``python -m tests.servers.writers``; SIGTERM and Ctrl-C end what is open, then stop."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.servers.writers", description="Appends events at a rate."
    )
    parser.add_argument("--url", required=True, help="mysql+pymysql://user@host:port/database")
    parser.add_argument("--rate", type=float, required=True, help="events per second")
    parser.add_argument("--seconds", type=float, help="until SIGTERM when not given")
    parser.add_argument("--bursts", type=float, nargs=3, metavar=("EVERY", "LENGTH", "FACTOR"))
    parser.add_argument("--aggregates", type=int, default=10_000)
    parser.add_argument("--zipf", type=float, default=0.0)
    for what in ("open", "rollback", "gap", "reversed"):
        parser.add_argument(f"--{what}-fraction", type=float, default=0.0)
    parser.add_argument("--open-seconds", type=float, nargs=2, default=(0.0, 3.0))
    parser.add_argument("--events-per-transaction", type=int, default=20)
    parser.add_argument("--payload-bytes", type=int, default=300)
    parser.add_argument("--connections", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", default="events")
    parser.add_argument("--prefix", default="order", help="of the aggregates' ids")
    parser.add_argument("--no-close", dest="close_all", action="store_false")
    parser.add_argument("--json", action="store_true", help="the report as JSON on stdout")
    parser.add_argument("--live", action="store_true", help="with --json: a line every second")
    parser.add_argument("--versions", type=Path, help="a file for the last versions, as JSON")
    parser.add_argument("--held", type=Path, help="a file for what was held open, as JSON lines")
    parser.add_argument("--note-all", action="store_true", help="with --held: all of them")
    given = vars(parser.parse_args(arguments))
    as_json, live, path = given.pop("json"), given.pop("live"), given.pop("versions")
    held: Path | None = given.pop("held")
    given["open_seconds"] = tuple(given["open_seconds"])

    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    load = Load(**given, note_held=held is not None)
    report = run(load, stop=stopped.is_set, on_progress=_print_json if as_json and live else None)
    if path is not None:
        path.write_text(json.dumps({"versions": load.versions, "skipped": load.skipped}))
    if held is not None:
        with held.open("w") as lines:
            for committed, versions in load.held:
                of_each = [[number, those[0], those[-1]] for number, those in versions.items()]
                lines.write(json.dumps([committed, of_each]) + "\n")
    if not live or not as_json:
        _print_json(report) if as_json else print(report)
    return 0


def _print_json(report: Report) -> None:
    print(json.dumps(asdict(report)), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
