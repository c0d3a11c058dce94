"""The load: an application that appends events, keeps transactions open, and rolls some back.

One process and one loop over many connections, so that thousands of events a second leave the
machine to those who are measured. Each transaction appends to aggregates that no other open one
uses, so versions are 1, 2, 3, … without holes, as an application with optimistic locking makes
them; the exceptions (versions skipped for good, commits in reverse order) are made on purpose and
counted.

    python -m eventpub.local.writers --url mysql+pymysql://root@127.0.0.1:3306/shop --rate 6000
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import selectors
import signal
import socket
import string
import sys
import threading
import time
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pymysql
from pymysql.connections import Connection
from pymysql.constants import COMMAND, ER
from sqlalchemy.engine import make_url

if TYPE_CHECKING:
    from pymysql.cursors import Cursor

    _Base = Connection[Cursor]
else:
    _Base = Connection

_TYPES = ("OrderPlaced", "ItemAdded", "OrderPaid", "OrderShipped", "NoteWritten")
_TEXT_SIZE = 65_536
_IN_FLIGHT = 32  # statements that the server works on at once; more would only queue inside it
_CATCH_UP_SECONDS = 5.0  # after a stall the load is not made up for beyond this
_GIVE_UP_SECONDS = 15.0  # to end what is open while the database is away
_PAIR_OPEN_SECONDS = (0.05, 1.0)

_LOST = {0, 1053, 1927, 2003, 2006, 2013, 3169, 4031}  # shutdown, killed, refused, cut
_REFUSED = {ER.LOCK_DEADLOCK, ER.LOCK_WAIT_TIMEOUT, ER.DUP_ENTRY, ER.QUERY_INTERRUPTED}

_BEGIN, _COMMIT, _ROLLBACK = b"BEGIN", b"COMMIT", b"ROLLBACK"


@dataclass(frozen=True)
class Report:
    """What a load has done.

    `events` and `transactions` are committed ones, without the `closing_events`; `rate` is events
    per second. `skipped_versions` were rolled back although a later one was committed. `failed`
    transactions were refused by the database (deadlock); `unsure` ones lost their connection, and
    what became of them was read from the table.
    """

    events: int = 0
    transactions: int = 0
    rolled_back: int = 0
    held_open: int = 0
    reversed: int = 0
    skipped_versions: int = 0
    closing_events: int = 0
    failed: int = 0
    unsure: int = 0
    seconds: float = 0.0
    rate: float = 0.0


@dataclass
class Load:
    """Appends events at a rate.

    Attributes:
        url: SQLAlchemy's URL of the database.
        rate: committed events per second that are aimed at.
        seconds: how long; None = until `stop` says so.
        bursts: (every, length, factor): every so many seconds the rate is `factor` times as high
            for `length` seconds, at the end of each period.
        aggregates: how many there are; several times those in open transactions are needed.
        zipf: the n-th most popular aggregate is chosen with a weight of 1 / n ** zipf; one that is
            busy in an open transaction is passed over, as by an application that would conflict.
        open_fraction: of the transactions: kept open for `open_seconds` after the first insert.
        rollback_fraction: of the transactions; the next one uses their versions again.
        gap_fraction: of the transactions: rolled back after later versions were committed.
        reversed_fraction: of the transactions: committed after later versions were.
        events_per_transaction: on average.
        payload_bytes: about how long a payload is.
        close_all: at the end append one more event to each aggregate that was touched, so that a
            last version that was committed late has a successor.
        connections: the most that are opened.
        note_held: remember each transaction that was held open, in `held`.
        note_all: remember the others there, too.
    """

    url: str
    rate: float
    seconds: float | None = None
    bursts: tuple[float, float, float] | None = None
    aggregates: int = 10_000
    zipf: float = 0.0
    open_fraction: float = 0.0
    open_seconds: tuple[float, float] = (0.0, 3.0)
    rollback_fraction: float = 0.0
    gap_fraction: float = 0.0
    reversed_fraction: float = 0.0
    events_per_transaction: int = 20
    payload_bytes: int = 300
    seed: int = 0
    close_all: bool = True
    table: str = "events"
    prefix: str = "order"
    connections: int = 400
    note_held: bool = False
    note_all: bool = False

    versions: dict[str, int] = field(default_factory=dict, init=False)
    """After `run`: the last version of each aggregate that was touched."""
    skipped: dict[str, list[int]] = field(default_factory=dict, init=False)
    """After `run`: the versions that will never come, by aggregate."""
    held: list[tuple[float, dict[int, range]]] = field(default_factory=list, init=False)
    """With `note_held`, after `run`: when the commit of each transaction that was held open was
    answered (Unix, s), and its versions by the aggregate's number."""

    def planned(self, elapsed: float) -> float:
        """How many events are to be committed so many seconds after the beginning."""
        events = self.rate * elapsed
        if self.bursts is not None:
            every, length, factor = self.bursts
            periods, rest = divmod(elapsed, every)
            bursting = periods * length + max(0.0, rest - (every - length))
            events += self.rate * (factor - 1) * bursting
        return events

    def run(
        self,
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
        return _Run(self).run(stop, on_progress)


def aggregate_name(prefix: str, number: int) -> str:
    """The id of an aggregate of `Load` and `fill`."""
    return f"{prefix}-{number:07d}"


@dataclass(eq=False, slots=True)
class _Transaction:
    steps: deque[tuple[float, bytes]]  # seconds after the first one, statement
    versions: dict[int, range]  # by the aggregate's number
    held: bool = False
    commits: bool = True
    refused: bool = False
    follower: _Transaction | None = None  # begins inside this one and must end before it
    leader: _Transaction | None = None
    connection: _Connection | None = None
    began: float = 0.0
    waits: bool = False  # for its follower
    done: bool = False
    committed: bool = False

    @property
    def events(self) -> int:
        return sum(map(len, self.versions.values()))


class _Connection(_Base):
    """A connection whose answer is read when it has come, instead of waited for."""

    transaction: _Transaction | None = None

    if TYPE_CHECKING:  # what pymysql's stubs leave out
        _sock: socket.socket

        def _execute_command(self, command: int, sql: bytes) -> None: ...
        def _read_query_result(self) -> None: ...

    def send(self, statement: bytes) -> None:
        self._execute_command(COMMAND.COM_QUERY, statement)

    def receive(self) -> None:
        self._read_query_result()

    def fileno(self) -> int:
        return self._sock.fileno()


class _Run:
    """One run of a load: `due` holds the next step of each open transaction that waits for its
    time, the selector the connections whose answer is awaited."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.random = random.Random(load.seed)
        self.text = _text(self.random)
        columns = "(aggregate_id,version,event_type,payload)"
        self.insert = f"INSERT INTO {_quoted(load.table)} {columns} VALUES "  # noqa: S608
        self.names = [aggregate_name(load.prefix, number) for number in range(load.aggregates)]
        self.weights: list[float] | None = None
        if load.zipf:
            each = (1 / number**load.zipf for number in range(1, load.aggregates + 1))
            self.weights = list(accumulate(each))
        self.last = [0] * load.aggregates
        self.busy: set[int] = set()
        self.touched: set[int] = set()
        self.skipped: dict[int, list[int]] = {}
        self.selector = selectors.DefaultSelector()
        self.idle: list[_Connection] = []
        self.connections = 0
        self.in_flight = 0
        self.open: set[_Transaction] = set()
        self.due: list[tuple[float, int, _Transaction]] = []
        self.pushed = 0
        self.unsure: list[_Transaction] = []
        self.retry_at = 0.0
        self.planned = 0.0
        self.blocked = False
        self.ends_at: float | None = None
        self.counts: dict[str, Any] = asdict(Report())

    # the loop

    def run(self, stop: Callable[[], bool], on_progress: Callable[[Report], None] | None) -> Report:
        with closing(_connect(self.load.url)) as connection, connection.cursor() as cursor:
            self._read_versions(cursor)
        began = reported = time.monotonic()
        while True:
            now = time.monotonic()
            if self.ends_at is None and self._is_over(stop, now - began):
                self.ends_at = now
                self.due = [(now, number, waiting) for _, number, waiting in self.due]
            if self.unsure and now >= self.retry_at:
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
        for connection in self.idle:
            connection.close()
        self.selector.close()
        self.load.versions = {self.names[number]: self.last[number] for number in self.touched}
        self.load.skipped = {self.names[number]: gone for number, gone in self.skipped.items()}
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
            if self.in_flight >= _IN_FLIGHT or not self._has_connection(now):
                self.blocked = True
                return
            transaction = self._next_transaction()
            if transaction is None:  # too many aggregates are busy; some will be free soon
                self.blocked = True
                return
            self.open.add(transaction)
            if transaction.commits:
                self.planned += transaction.events
            if transaction.follower is not None:
                self.planned += transaction.follower.events
            self._send_next(transaction, now)

    def _next_transaction(self) -> _Transaction | None:
        load, chance = self.load, self.random.random()
        if chance < load.gap_fraction + load.reversed_fraction:
            return self._pair(commits=chance >= load.gap_fraction)
        events = self.random.randint(
            (load.events_per_transaction + 1) // 2, load.events_per_transaction * 3 // 2
        )
        versions = self._take(events)
        if versions is None:
            return None
        commits = self.random.random() >= load.rollback_fraction
        held = self.random.random() < load.open_fraction
        rows = [(number, version) for number, those in versions.items() for version in those]
        steps: deque[tuple[float, bytes]]
        if held:
            seconds = self.random.uniform(*load.open_seconds)
            half = len(rows) // 2
            steps = deque([(0.0, _BEGIN), (0.0, self._statement(rows[: half or 1]))])
            if rows[half or 1 :]:
                at_end = self.random.random() < 0.5
                moment = seconds if at_end else self.random.uniform(0.0, seconds)
                steps.append((moment, self._statement(rows[half or 1 :])))
            steps.append((seconds, _COMMIT if commits else _ROLLBACK))
        elif commits:  # autocommit: one statement is the transaction
            steps = deque([(0.0, self._statement(rows))])
        else:
            steps = deque([(0.0, _BEGIN), (0.0, self._statement(rows)), (0.0, _ROLLBACK)])
        return _Transaction(steps, versions, held=held, commits=commits)

    def _pair(self, *, commits: bool) -> _Transaction | None:
        """Versions of one aggregate in a transaction that ends after the one with the next."""
        first = self._take(self.random.randint(1, 3), at_most=1)
        if first is None:
            return None
        ((number, versions),) = first.items()
        later = range(versions.stop, versions.stop + self.random.randint(1, 3))
        follower = _Transaction(
            deque([(0.0, self._statement([(number, version) for version in later]))]),
            {number: later},
        )
        seconds = self.random.uniform(*_PAIR_OPEN_SECONDS)
        leader = _Transaction(
            deque(
                [
                    (0.0, _BEGIN),
                    (0.0, self._statement([(number, version) for version in versions])),
                    (seconds, _COMMIT if commits else _ROLLBACK),
                ]
            ),
            first,
            held=True,
            commits=commits,
            follower=follower,
        )
        follower.leader = leader
        return leader

    def _take(self, events: int, at_most: int | None = None) -> dict[int, range] | None:
        """The next versions of aggregates that nobody uses; None where hardly any are free."""
        taken: dict[int, range] = {}
        tries = 0
        while events > 0:
            number = self._choose()
            if number in self.busy or number in taken:
                tries += 1
                if tries > 100:
                    return None
                continue
            count = events if at_most == 1 else min(events, 1 + int(self.random.random() * 3))
            taken[number] = range(self.last[number] + 1, self.last[number] + 1 + count)
            events -= count
        self.busy.update(taken)
        return taken

    def _choose(self) -> int:
        if self.weights is None:
            return int(self.random.random() * self.load.aggregates)
        return bisect(self.weights, self.random.random() * self.weights[-1])

    def _statement(self, rows: Iterable[tuple[int, int]]) -> bytes:
        text, size, names = self.text, max(0, self.load.payload_bytes - 60), self.names
        space = _TEXT_SIZE - size
        values = []
        for number, version in rows:
            name = names[number]
            start = (number * 7919 + version * 104_729) % space
            values.append(
                f"('{name}',{version},'{_TYPES[(number + version) % len(_TYPES)]}',"
                f'\'{{"order":"{name}","version":{version},'
                f'"note":"{text[start : start + size]}"}}\')'
            )
        return (self.insert + ",".join(values)).encode()

    # steps of transactions

    def _send_due(self, now: float) -> None:
        while self.due and self.due[0][0] <= now:
            _, _, transaction = heapq.heappop(self.due)
            if transaction.done:
                continue
            if transaction.connection is None and not self._has_connection(now):
                self._push(now + 0.005, transaction)
                continue
            follower = transaction.follower
            if len(transaction.steps) == 1 and follower is not None and not follower.done:
                transaction.waits = True
                continue
            self._send_next(transaction, now)

    def _push(self, when: float, transaction: _Transaction) -> None:
        self.pushed += 1
        heapq.heappush(self.due, (when, self.pushed, transaction))

    def _send_next(self, transaction: _Transaction, now: float) -> None:
        connection = transaction.connection
        if connection is None:
            connection = self.idle.pop()
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

    def _answered(self, connection: _Connection) -> None:
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
            transaction.steps = deque([(0.0, _ROLLBACK)] if explicit else [])
        self.selector.unregister(connection)
        self.in_flight -= 1
        now = time.monotonic()
        if not transaction.steps:
            if transaction.refused:
                self._return(connection)
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
                self._push(now + self.random.uniform(0.0, span / 2), follower)
        after = transaction.steps[0][0] if self.ends_at is None else 0.0
        if after == 0.0 and (follower is None or follower.done):
            self._send_next(transaction, now)
        else:
            self._push(transaction.began + after, transaction)

    def _ended(self, transaction: _Transaction, *, committed: bool) -> None:
        if transaction.connection is not None:
            self._return(transaction.connection)
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
                self.last[number] = max(self.last[number], versions[-1])
        elif not transaction.commits:
            self.counts["rolled_back"] += 1
        self._release(transaction)

    def _release(self, transaction: _Transaction) -> None:
        leader = transaction.leader or transaction
        follower = leader.follower
        if follower is None:
            self.busy.difference_update(transaction.versions)
            return
        if transaction is follower and leader.waits:
            self._push(0.0, leader)
        if not (leader.done and follower.done):
            return
        self.busy.difference_update(leader.versions)
        if follower.committed and leader.committed:
            self.counts["reversed"] += 1
        elif follower.committed:
            self.counts["skipped_versions"] += leader.events
            for number, versions in leader.versions.items():
                self.skipped.setdefault(number, []).extend(versions)

    # connections

    def _return(self, connection: _Connection) -> None:
        if connection.transaction is not None:
            connection.transaction.connection = None
        connection.transaction = None
        self.idle.append(connection)

    def _has_connection(self, now: float) -> bool:
        if self.idle:
            return True
        if self.connections >= self.load.connections or now < self.retry_at:
            return False
        try:
            self.idle.append(_connect(self.load.url))
        except pymysql.Error:
            self.retry_at = now + 0.5
            return False
        self.connections += 1
        return True

    def _lost(self, connection: _Connection, *, registered: bool) -> None:
        """What became of the connection's transaction is read from the table, in `_settle`."""
        transaction = connection.transaction
        assert transaction is not None
        if registered:
            self.selector.unregister(connection)
            self.in_flight -= 1
        _drop(connection)
        self.connections -= 1
        connection.transaction = transaction.connection = None
        self.unsure.append(transaction)
        for other in self.idle:  # most likely lost as well
            _drop(other)
        self.connections -= len(self.idle)
        self.idle.clear()
        self.retry_at = max(self.retry_at, time.monotonic() + 0.5)

    def _settle(self, now: float) -> None:
        """Ends the transactions whose outcome, or whose aggregates' versions, are not known."""
        try:
            with closing(_connect(self.load.url)) as connection, connection.cursor() as cursor:
                while self.unsure:
                    transaction = self.unsure[0]
                    committed = False
                    if not transaction.refused:
                        number, versions = next(iter(transaction.versions.items()))
                        cursor.execute(
                            f"SELECT 1 FROM {_quoted(self.load.table)} "  # noqa: S608
                            "WHERE aggregate_id = %s AND version = %s",
                            (self.names[number], versions[0]),
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
            self.retry_at = now + 0.5

    def _read_versions(self, cursor: Cursor, numbers: Iterable[int] | None = None) -> None:
        """Takes the last versions from the table, of all aggregates where none are named."""
        values: Sequence[str]
        if numbers is None:
            # "." follows "-" in every character set
            where = "aggregate_id >= %s AND aggregate_id < %s"
            values = (f"{self.load.prefix}-", f"{self.load.prefix}.")
        else:
            values = [self.names[number] for number in numbers]
            where = f"aggregate_id IN ({','.join(['%s'] * len(values))})"
        cursor.execute(
            "SELECT aggregate_id, MAX(version) "  # noqa: S608
            f"FROM {_quoted(self.load.table)} WHERE {where} GROUP BY aggregate_id",
            values,
        )
        for name, version in cursor:
            number = int(name.rpartition("-")[2])
            if number < len(self.names):
                self.last[number] = version

    def _append_one_each(self) -> None:
        numbers = sorted(self.touched)
        with closing(_connect(self.load.url)) as connection:
            for start in range(0, len(numbers), 200):
                some = numbers[start : start + 200]
                connection.send(self._statement((n, self.last[n] + 1) for n in some))
                connection.receive()
                for number in some:
                    self.last[number] += 1
        self.counts["closing_events"] = len(numbers)


def _connect(url: str) -> _Connection:
    address = make_url(url)
    return _Connection(
        host=address.host or "127.0.0.1",
        port=address.port or 3306,
        user=address.username,
        password=address.password or "",
        database=address.database,
        autocommit=True,
        connect_timeout=5,
        ssl_disabled=True,  # decrypted bytes would wait where the selector does not see them
        init_command="SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
    )


def _drop(connection: _Connection) -> None:
    try:
        connection.close()
    except (pymysql.Error, OSError):
        return


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _text(source: random.Random) -> str:
    """What payloads are cut from: as hard to compress as text without any repetition."""
    return "".join(source.choices(string.ascii_letters + string.digits, k=_TEXT_SIZE))


def fill(  # noqa: PLR0913 (what a table is filled with)
    url: str,
    events: int,
    aggregates: int,
    *,
    first: int | None = None,
    last: int | None = None,
    payload_bytes: int = 300,
    table: str = "events",
    prefix: str = "order",
    connections: int = 2,
    session_time_zone: str | None = "+00:00",
) -> None:
    """Appends `events` events as fast as the server can make them, for a backlog.

    The n-th event is version ``n // aggregates + 1`` of aggregate ``n % aggregates``; all are
    committed, and no version is missing. Meant for aggregates that the table does not have yet.

    Args:
        first: `create_time` of the first event, in microseconds; None = an hour before `last`.
        last: the time before which the last event is; None = the database's present time.
        session_time_zone: None = the server's, for a DATETIME column with local time.

    Raises:
        pymysql.Error: the database cannot be reached or refuses the rows.
    """
    with closing(_connect(url)) as connection, connection.cursor() as cursor:
        if last is None:
            cursor.execute("SELECT CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS SIGNED)")
            ((last,),) = cursor.fetchall()
    assert last is not None
    begin = last - 3_600_000_000 if first is None else first
    space = 16_384
    text = _text(random.Random(0))[:space]
    size = max(0, payload_bytes - 60)
    digits = "SELECT 0 d" + "".join(f" UNION ALL SELECT {digit}" for digit in range(1, 10))
    kinds = ",".join(f"'{kind}'" for kind in _TYPES)

    def statement(start: int, stop: int) -> str:
        name = f"CONCAT('{prefix}-', LPAD(n % {aggregates}, 7, '0'))"
        return (
            f"INSERT INTO {_quoted(table)} "  # noqa: S608
            "(aggregate_id, version, event_type, payload, create_time) "
            f"SELECT {name}, n DIV {aggregates} + 1, ELT(1 + n % {len(_TYPES)}, {kinds}), "
            f"""CONCAT('{{"order":"', {name}, '","version":', n DIV {aggregates} + 1, """
            f"""',"note":"', SUBSTRING(_latin1'{text}', 1 + n * 7919 % {space - size}, {size}), """
            """'"}'), """
            f"FROM_UNIXTIME({begin // 1_000_000}) + INTERVAL "
            f"({begin % 1_000_000} + n * {last - begin} DIV {events}) MICROSECOND "
            f"FROM (SELECT {start} + a.d * 1000 + b.d * 100 + c.d * 10 + e.d AS n FROM "
            f"({digits}) a JOIN ({digits}) b JOIN ({digits}) c JOIN ({digits}) e) numbers "
            f"WHERE n < {stop} ORDER BY n"
        )

    local = threading.local()
    opened: list[_Connection] = []

    def insert(start: int) -> None:
        if not hasattr(local, "connection"):
            local.connection = _connect(url)
            opened.append(local.connection)
            if session_time_zone is not None:
                local.connection.query(f"SET time_zone = '{session_time_zone}'")
        local.connection.query(statement(start, min(start + 10_000, events)))

    with ThreadPoolExecutor(connections) as pool:
        try:
            for _ in pool.map(insert, range(0, events, 10_000)):
                pass
        finally:
            pool.shutdown(cancel_futures=True)
            for connection in opened:
                _drop(connection)


def main(arguments: Sequence[str]) -> int:
    """``python -m eventpub.local.writers``; SIGTERM and Ctrl-C end what is open, then stop."""
    parser = argparse.ArgumentParser(
        prog="python -m eventpub.local.writers", description="Appends events at a rate."
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
    report = load.run(stop=stopped.is_set, on_progress=_print_json if as_json and live else None)
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
