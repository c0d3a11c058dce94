"""The watermark: up to where no open transaction can hide a row.

A row's `create_time` is the start of its statement, so a transaction that has written nothing and
runs nothing cannot hide an old row. `information_schema.innodb_trx` shows which have written; once
those of one poll are gone, everything up to that poll is visible. Pure readers never hide any.

A statement that waits for a table, global or metadata lock has its time already, but InnoDB does
not know it yet. So each poll reads the process list first: a statement that gets its lock in
between is in the second answer.

`innodb_trx` is a cache that is refreshed only if it was not read for 100 ms. So a poll counts only
if its answer has our own transaction with a nonce. Several readers take turns (`Turns`). MySQL
answers with an error (3854) while any session runs a statement that is not UTF-8 text.

`trx_started` has whole seconds in the zone of the server's operating system; only a session in the
zone `SYSTEM` can convert it to UTC.
"""

from __future__ import annotations

import random
import secrets
from typing import Literal

import pymysql.err

from eventpub.config import Store
from eventpub.errors import StoreError
from eventpub.sources.mysql.connection import Connection, is_mariadb, run
from eventpub.sources.mysql.open_transactions import (
    DAY,
    NOW,
    OPEN,
    PROCESSES,
    SECOND,
    OpenTransactions,
    found_in,
)
from eventpub.sources.mysql.server import Pool
from eventpub.times import SYSTEM_CLOCK, Clock

State = Literal["denied", "stale", "held", "open"]

_STALE_AFTER = 3.0
"""Fewest seconds without a fresh answer after which visibility is unknown."""
_ASKS_AGAIN_AFTER = 60.0


class Watermark:
    """Polls the open transactions of a server.

    Args:
        max_wait: how long a transaction is waited for, and a stale answer holds the boundary, µs.
        unknown_for: how long, without information, something counts as open, µs.
        hidden_since: see `OpenTransactions`.
    """

    def __init__(
        self,
        config: Store,
        max_wait: int,
        *,
        unknown_for: int = 0,
        hidden_since: int | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._clock = clock
        self._stale_after = max(max_wait / 1e6, _STALE_AFTER)
        self._unknown_for = unknown_for
        self._pool = Pool(config, "information_schema.innodb_trx", self._prepare)
        self.server: str | None = None
        self._processes = ""
        self._transactions = OpenTransactions(max_wait, hidden_since)
        self._due = float("-inf")
        self._now = 0
        self._turns = Turns(clock)
        self._stale_since: float | None = None
        self._denied = False
        self._seen_at = float("-inf")

    @property
    def state(self) -> State:
        """What is known: "denied": no privilege; "stale": no fresh answer for `max_wait`, at least
        3 s; "held": one of them holds `upto` below the last poll; "open": none does.
        """
        if self._denied:
            return "denied"
        since = self._stale_since
        if since is not None and self._clock.monotonic() - since > self._stale_after:
            return "stale"
        at, upto = self._transactions.polled_at, self._transactions.upto
        return "open" if at is not None and upto == at else "held"

    @property
    def upto(self) -> int | None:
        """Everything created at or before is visible, µs; None: unknown."""
        return None if self.state in {"denied", "stale"} else self._transactions.upto or 0

    @property
    def open_since(self) -> int | None:
        """See `OpenTransactions`.

        Without a fresh answer something may be open since the last poll, at most for `unknown_for`;
        without the privilege, the last known state counts, for `unknown_for`.
        """
        state, transactions = self.state, self._transactions
        if state == "denied":
            is_recent = self._clock.monotonic() - self._seen_at < self._unknown_for / 1e6
            return transactions.open_since if is_recent else None
        if state != "stale" and transactions.polled_at is not None:
            return transactions.open_since
        known = transactions.open_since
        known = transactions.polled_at or 0 if known is None else known
        return max(known, self._now - self._unknown_for)

    @property
    def hidden_since(self) -> int | None:
        """See `OpenTransactions`; without a fresh answer, since the last one, at most a day;
        without the privilege, the last known.
        """
        state, transactions = self.state, self._transactions
        if state == "denied" and transactions.polled_at is None:
            return None
        if state != "stale":
            return transactions.hidden_since
        since = max(transactions.polled_at or 0, self._now - DAY)
        known = transactions.hidden_since
        return since if known is None else min(since, known)

    @property
    def timed_out(self) -> int:
        return self._transactions.timed_out

    @property
    def has_open(self) -> bool:
        return self._transactions.has_open and not self._denied

    def take_ended(self) -> list[tuple[int, int]]:
        return self._transactions.take_ended()

    @property
    def next_poll(self) -> float | None:
        wait = self._due - self._clock.monotonic()
        return wait if wait > 0 and not self._denied else None

    def poll(self, reached: int = 0) -> None:
        """Poll if due, after the reader has `reached`, µs."""
        if self._clock.monotonic() < self._due:
            return
        nonce = secrets.token_hex(8)
        try:
            with self._pool.connection() as connection:
                wait = self._turns.wait(connection)
                if wait is not None:
                    self._pause_for(wait)
                    return
                processes = run(connection, f"SELECT {self._processes}")
                run(connection, "START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY")
                rows = run(connection, f"SELECT /* {nonce} */ {OPEN}")
                run(connection, "COMMIT")
                self._turns.end(connection)
        except Exception as error:
            code = error.code if isinstance(error, StoreError) else ""
            is_denied = code == "store.privilege_missing"
            self._pause_for(_ASKS_AGAIN_AFTER if is_denied else REFRESH)
            if is_denied:
                self._denied = True
            elif code == "store.query_failed":
                self._note_stale()
            else:
                raise
            return
        self._denied = False
        self._now = int(processes[-1][0])
        own = next((row for row in rows if nonce in row[5]), None)
        self._pause_for(self._turns.pause(is_fresh=own is not None))
        if own is None:
            self._note_stale()
            return
        self._stale_since, self._seen_at = None, self._clock.monotonic()
        self._transactions.seen(self._now, found_in(self._now, processes, own, rows), reached)

    def _note_stale(self) -> None:
        if self._stale_since is None:
            self._stale_since = self._clock.monotonic()

    def _pause_for(self, seconds: float) -> None:
        self._due = self._clock.monotonic() + seconds

    def _prepare(self, connection: Connection, server: str) -> None:
        self.server = server
        self._turns.is_ours = False  # the former connection held its lock
        [(_, uptime)] = run(connection, "SHOW GLOBAL STATUS LIKE 'Uptime'")
        [(now,)] = run(connection, f"SELECT {NOW}")
        self._transactions.server_started = int(now) - int(uptime) * SECOND
        age = "time_ms * 1000" if is_mariadb(connection) else "time * 1000000"
        self._processes = PROCESSES.format(age=age)
        # other isolation levels take no snapshot, so our own transaction would not show
        for setting in ("TRANSACTION ISOLATION LEVEL REPEATABLE READ", "time_zone = 'SYSTEM'"):
            run(connection, f"SET SESSION {setting}")

    def close(self) -> None:
        self._pool.close()


REFRESH = 0.105
"""Seconds without a reader after which InnoDB refreshes its answer, with a margin."""
_LOCK = "eventpub.watermark"
_FOR = 10.0
"""Seconds for which readers that met take turns."""
_LONGEST = 1.0
"""Seconds after which a reader that has the turn and does not poll is skipped."""
_AWAITS = 0.02, 0.05
_AFTER_OWN = 0.06
_WITHOUT = REFRESH, 4 * REFRESH
"""Seconds between polls if the server has no such locks."""


class Turns:
    """The turns of one reader among several, by a lock of the server."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until = float("-inf")
        self._are_possible = True
        self._waits_since: float | None = None
        self.is_ours = False

    def wait(self, connection: Connection) -> float | None:
        """Seconds to wait before asking again; None: poll now."""
        now = self._clock.monotonic()
        if self.is_ours or now > self._until:
            return None
        try:
            [(is_free,)] = run(connection, f"SELECT GET_LOCK('{_LOCK}', 0)")
        except pymysql.err.DatabaseError as error:
            try:
                connection.ping(reconnect=False)
            except (pymysql.err.Error, OSError):
                raise error from None
            self._are_possible = False  # a cluster may not support such locks
            return None
        if is_free:
            self.is_ours, self._waits_since = True, None
            return REFRESH
        self._until = now + _FOR
        self._waits_since = self._waits_since or now
        if now - self._waits_since > _LONGEST:
            self._waits_since, self._until = None, float("-inf")
            return None
        return random.uniform(*_AWAITS)

    def end(self, connection: Connection) -> None:
        if self.is_ours:
            self.is_ours = False
            run(connection, f"SELECT RELEASE_LOCK('{_LOCK}')")

    def pause(self, *, is_fresh: bool) -> float:
        now = self._clock.monotonic()
        if is_fresh:
            return REFRESH if now > self._until else _AFTER_OWN
        if self._are_possible:
            self._until = now + _FOR
            return random.uniform(*_AWAITS)
        self._until = float("-inf")
        return random.uniform(*_WITHOUT)
