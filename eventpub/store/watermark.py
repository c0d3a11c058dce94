"""The watermark: up to where no open transaction can hide a row.

A row's `create_time` is the start of its statement, so a transaction that has written nothing and
runs nothing cannot hide a row from the past yet. Whoever may read `information_schema.innodb_trx`
sees which transactions have written or are running a statement; once those of one look are gone,
everything up to that look is visible.

`innodb_trx` is a cache that InnoDB refreshes only when nobody has read it for 100 ms. So each look
is made inside a transaction with a nonce in a comment, and counts only where the answer has the
own row with that nonce. Transactions are told apart by their ids: `trx_started` has whole seconds.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import pymysql.err

from eventpub.config import Store
from eventpub.store.connection import Connection, connect_for_reading, run
from eventpub.store.failures import mapped

State = Literal["off", "denied", "stale", "held", "open"]

_REFRESH = 0.105
"""Seconds without a reader after which InnoDB refreshes what it shows, and some."""
_DENIED = {1044, 1142, 1227}  # no privilege
_FIRST_PSEUDO_ID = 1 << 48  # MySQL's ids of transactions that have not written; MariaDB's are 0
_NOW = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
_STARTED = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', trx_started)"
_OPEN = (
    f"{_NOW}, trx_id, trx_mysql_thread_id, {_STARTED}, COALESCE(trx_query, ''), trx_rows_modified,"
    " trx_is_read_only, trx_autocommit_non_locking FROM information_schema.innodb_trx"
)


@dataclass(frozen=True)
class Transaction:
    """One that has written or runs a statement.

    Attributes:
        id: InnoDB's; one that has not written yet has none of its own (a pseudo id).
        thread: of its connection; 0 for one without (prepared XA).
        started: µs, rounded down to a second.
        before: at this time, µs, it had neither written nor run a statement.
        modified: rows that it has written, deleted, or rolled back, so far.
        is_running: whether it runs a statement.
        first_seen: µs.
        wrote_before: µs; nothing that it had written when it was seen last is newer.
        passed: it was open for too long, and nobody waits for it any more.
    """

    id: int
    thread: int
    started: int
    modified: int = 0
    is_running: bool = False
    before: int = 0
    first_seen: int = 0
    wrote_before: int = 0
    passed: bool = False

    def is_still(self, other: Transaction) -> bool:
        """Whether it is the same transaction as `other`, which was seen earlier."""
        if self.id == other.id:
            return True
        has_no_id = other.id == 0 or other.id >= _FIRST_PSEUDO_ID
        return has_no_id and self.started == other.started


class OpenTransactions:
    """What several looks say together. Pure.

    Args:
        max_wait: how long a transaction is waited for, µs.

    Attributes:
        looked_at: the time of the last look, µs; None: there was none.
        passed: how many transactions were open for longer.
    """

    def __init__(self, max_wait: int) -> None:
        self._max_wait = max_wait
        self._open: dict[tuple[int, int], Transaction] = {}
        self.looked_at: int | None = None
        self.passed = 0
        self._ended: list[tuple[int, int]] = []
        self._first_look: int | None = None

    def seen(self, at: int, transactions: Iterable[Transaction]) -> None:
        """Take over a look at database time `at`, µs."""
        before = self._open
        self._open = {}
        for found in transactions:
            key = (found.thread, 0 if found.thread else found.id)
            earlier = before.get(key)
            if earlier is not None and found.is_still(earlier):
                del before[key]
                now = replace(
                    found,
                    before=earlier.before,
                    first_seen=earlier.first_seen,
                    wrote_before=earlier.wrote_before,
                    passed=earlier.passed,
                )
                if found.is_running or found.modified != earlier.modified:
                    now = replace(now, wrote_before=at)
            else:
                since = max(found.started, self.looked_at or 0)
                now = replace(found, before=since, first_seen=at, wrote_before=at)
            if not now.passed and at - now.first_seen > self._max_wait:
                now = replace(now, passed=True)
                self.passed += 1
            self._open[key] = now
        if self._first_look is None:
            self._first_look = at
        for t in before.values():
            # what was open at the first look may have been passed by before there was a look
            if t.passed or t.before < self._first_look:
                self._ended.append((t.before, t.wrote_before))
        self.looked_at = at

    def take_ended(self) -> list[tuple[int, int]]:
        """When those that were passed by, or open at the first look, and are gone since, may have
        written: ``(after, upto]``, µs. Each is told once."""
        ended, self._ended = self._ended, []
        return ended

    @property
    def upto(self) -> int | None:
        """Everything created at or before is visible, but of what was passed by; µs."""
        waited_for = [t.before for t in self._open.values() if not t.passed]
        return min(waited_for, default=self.looked_at)

    @property
    def open_since(self) -> int | None:
        """When the oldest that is open began, µs, rounded down to a second; None: none is."""
        return min((t.started for t in self._open.values()), default=None)


class Watermark:
    """Looks at the open transactions of a server.

    Args:
        config: the store.
        max_wait: how long a transaction is waited for, and how long an answer that is not fresh
            holds the boundary, µs.
    """

    def __init__(self, config: Store, max_wait: int) -> None:
        self._config = config
        self._max_wait = max_wait
        self._connection: Connection | None = None
        self._transactions = OpenTransactions(max_wait)
        self._looked = float("-inf")
        self._stale_since: float | None = None
        self._denied = False

    @property
    def state(self) -> State:
        """ "denied" the account may not look; "stale" no answer was fresh for `max_wait`; "held"
        it is below the last look; "open" nothing holds it."""
        if self._denied:
            return "denied"
        since = self._stale_since
        if since is not None and time.monotonic() - since > self._max_wait / 1e6:
            return "stale"
        at, upto = self._transactions.looked_at, self._transactions.upto
        return "open" if at is not None and upto == at else "held"

    @property
    def upto(self) -> int | None:
        """Everything created at or before is visible, µs; None: nobody can tell."""
        return None if self.state in {"denied", "stale"} else self._transactions.upto or 0

    @property
    def open_since(self) -> int | None:
        """As of `OpenTransactions`; None too where nobody can tell."""
        return None if self.state in {"denied", "stale"} else self._transactions.open_since

    @property
    def passed(self) -> int:
        """How many transactions were not waited for any longer."""
        return self._transactions.passed

    @property
    def has_open(self) -> bool:
        """Whether there is one whose end another look may show."""
        return self._transactions.open_since is not None

    def take_ended(self) -> list[tuple[int, int]]:
        """As of `OpenTransactions`."""
        return self._transactions.take_ended()

    @property
    def next_look(self) -> float | None:
        """Seconds until `look` looks again; None: it would do so now."""
        wait = self._looked + _REFRESH - time.monotonic()
        return wait if wait > 0 and not self._denied else None

    def look(self) -> None:
        """Look, unless the last look was a moment ago.

        Raises:
            StoreError: the database cannot be reached.
        """
        now = time.monotonic()
        if self._denied or now - self._looked < _REFRESH:
            return
        self._looked = now
        nonce = secrets.token_hex(8)
        try:
            if self._connection is None:
                self._connection = connect_for_reading(self._config)
                run(
                    self._connection,
                    "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ",
                )  # or a snapshot is not one, and the own transaction does not show
            with mapped("information_schema.innodb_trx"):
                run(self._connection, "START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY")
                rows = run(
                    self._connection,
                    f"SELECT /* {nonce} */ {_OPEN}",
                )
                run(self._connection, "COMMIT")
        except Exception as error:
            self.close()
            cause = error.__cause__ or error
            if isinstance(cause, pymysql.err.MySQLError) and cause.args[0] in _DENIED:
                self._denied = True
                return
            raise
        self._looked = time.monotonic()
        if not any(nonce in query for _, _, _, _, query, *_ in rows):
            if self._stale_since is None:
                self._stale_since = self._looked
            return
        self._stale_since = None
        self._transactions.seen(
            int(rows[0][0]),
            [
                Transaction(int(number), int(thread), int(started), int(written), bool(query))
                for _, number, thread, started, query, written, read_only, plain in rows
                if nonce not in query
                and not int(read_only)
                and not int(plain)
                and (query or int(written))
            ],
        )

    def close(self) -> None:
        """Closes the connection; the next look makes a new one."""
        if self._connection is not None:
            self._connection._force_close()  # type: ignore[attr-defined]
            self._connection = None
