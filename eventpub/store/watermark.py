"""The watermark: up to where no open transaction can hide a row.

A row's `create_time` is the start of its statement, so a transaction that has written nothing and
runs nothing cannot hide a row from the past yet. Whoever may read `information_schema.innodb_trx`
sees which transactions have written or are running a statement; once those of one poll are gone,
everything up to that poll is visible. One that only reads (a dump, a report) never hides any.

A statement that waits for a table, a global or a metadata lock has its time already, but InnoDB
knows nothing of it. So each poll reads the list of processes first: a statement that gets its lock
in between is in the second answer.

`innodb_trx` is a cache that InnoDB refreshes only when nobody has read it for 100 ms. So each poll
is made inside a transaction with a nonce in a comment, and counts only where the answer has the
own row with that nonce. Several readers that keep the same pace would keep each other from ever
seeing anything. So after an answer that is not fresh, publishers take turns for a while, by a named
lock: who has it waits 105 ms, polls, and lets it go.

A transaction is known by its id. `trx_started` has whole seconds, in the local time of the server's
operating system whatever the session's zone is: only a session in the zone `SYSTEM` can
turn it into UTC.
"""

from __future__ import annotations

import random
import re
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import pymysql.err

from eventpub.config import Store
from eventpub.store.connection import (
    ASKED_AFTER,
    Connection,
    connect_for_reading,
    is_alive,
    is_mariadb,
    run,
)
from eventpub.store.failures import mapped
from eventpub.store.server import require_primary

State = Literal["off", "denied", "stale", "held", "open"]

_REFRESH = 0.105
"""Seconds without a reader after which InnoDB refreshes what it shows, and some."""
_TURN_LOCK = "eventpub.watermark"
_TURNS_FOR = 10.0
"""Seconds for which readers take turns after they have met."""
_LONGEST_TURN = 1.0
"""Seconds after which somebody who has the turn, and does not poll, is not waited for."""
_AWAITS_TURN = 0.02, 0.05
_WITHOUT_TURNS = _REFRESH, 4 * _REFRESH
_BETWEEN_TURNS = 0.06
"""Seconds between two questions for the turn, at least and at most; after the own one."""
_STALE_AFTER = 3.0
"""Seconds without a fresh answer after which nobody can tell, at least."""
_SECOND = 1_000_000
_DST = 3600
"""Seconds by which clocks go back."""
_DAY = 86_400 * _SECOND
_SHOWS = 2
"""Whole seconds of a statement's age from which it counts although it waits for no lock."""
_QUERY_LENGTH = 1000
_DENIED = {1044, 1142, 1227}  # no privilege
_FIRST_PSEUDO_ID = 1 << 48  # MySQL's ids of transactions that have not written; MariaDB's are 0
_NOW = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
_AT = "UNIX_TIMESTAMP(trx_started)"
# what the clocks showed twice is taken for the first time that they did
_AT_FIRST = (
    f"CASE WHEN FROM_UNIXTIME({_AT} - 3600) = trx_started THEN {_AT} - 3600"
    f" WHEN FROM_UNIXTIME({_AT} - 1800) = trx_started THEN {_AT} - 1800 ELSE {_AT} END"
)
_OPEN = (
    f"{_NOW}, trx_id, trx_mysql_thread_id, {_AT}, {_AT_FIRST}, COALESCE(trx_query, ''),"
    " trx_rows_modified, trx_lock_structs + trx_rows_locked, trx_is_read_only,"
    " trx_autocommit_non_locking FROM information_schema.innodb_trx"
)
_WAITS = "^Waiting for .*(lock|flush|table)"
_PROCESSES = (
    f"{_NOW}, id, {{age}}, state REGEXP '{_WAITS}', LEFT(info, {_QUERY_LENGTH})"
    " FROM information_schema.processlist WHERE info IS NOT NULL AND id <> CONNECTION_ID()"
    f" AND command NOT IN ('Sleep', 'Daemon') AND (state REGEXP '{_WAITS}' OR time >= {_SHOWS})"
    f" UNION ALL SELECT {_NOW}, NULL, NULL, NULL, NULL"
)

_VERB = re.compile(r"(?:\s+|\(|/\*(?!M?!).*?\*/|(?:--|#)[^\n]*\n)*(\w+)", re.DOTALL)
# MariaDB: SET STATEMENT max_statement_time = 10 FOR INSERT …; BEGIN NOT ATOMIC INSERT …; END
_AROUND = re.compile(r"\s*(?:SET\s+STATEMENT\b.*?\bFOR|BEGIN\s+NOT\s+ATOMIC)\b", re.I | re.DOTALL)
_READS = {"select", "with", "table", "values", "show", "desc", "describe", "explain"}
_READS |= {"begin", "start", "commit", "rollback", "savepoint", "release", "set", "use", "unlock"}
# Not CALL and EXECUTE: the list shows the statement that they run, with the time of its own start.
_APPENDS = {"insert", "replace", "load", ""}  # "": of what is not understood nobody knows


def _verb(statement: str) -> str:
    around = _AROUND.match(statement)
    found = _VERB.match(statement, around.end() if around else 0)
    return found[1].lower() if found else ""


def only_reads(statement: str) -> bool:
    """Whether a statement surely writes nothing; one that is not understood may.

    A SELECT without a table, or a SET, may call a function that appends.
    """
    verb = _verb(statement)
    if _AROUND.match(statement):
        return verb in {"select", "with"} and not {"(", ";"} & {*statement}
    if verb == "set":
        return "(" not in statement
    if verb == "select" and len(statement) < _QUERY_LENGTH and "(" in statement:
        return re.search(r"\bfrom\b", statement, re.IGNORECASE) is not None
    return verb in _READS


@dataclass(frozen=True)
class Transaction:
    """One that has written or runs a statement that may.

    Attributes:
        id: InnoDB's; one that has not written yet has none of its own (a pseudo id).
        thread: of its connection; 0 for one without (prepared XA).
        started: µs, rounded down to a second; where it runs a statement that began before InnoDB
            knew of it, the start of that.
        modified: rows that it has written, deleted, or rolled back, so far.
        is_running: whether it runs a statement.
        is_waiting: its statement waits for a lock, and InnoDB knows nothing of it yet.
        statement: when the statement that it runs began, µs; None: it runs none, or a young one.
        before: at this time, µs, it had neither written nor run a statement.
        since: nothing that it hides was created at or before, µs.
        first_seen: µs.
        wrote_before: µs; nothing that it had written when it was seen last is newer.
        shown: µs; when it began as InnoDB said last.
        timed_out: it was open for too long, and nobody waits for it any more.
    """

    id: int
    thread: int
    started: int
    modified: int = 0
    is_running: bool = False
    is_waiting: bool = False
    statement: int | None = None
    before: int = 0
    since: int = 0
    first_seen: int = 0
    wrote_before: int = 0
    shown: int = 0
    timed_out: bool = False

    @property
    def has_id(self) -> bool:
        """Whether `id` is its own."""
        return 0 < self.id < _FIRST_PSEUDO_ID

    def may_be(self, other: Transaction) -> bool:
        """Whether it may be the same as `other`, of the same thread, which was seen earlier."""
        if other.has_id:
            return self.id == other.id
        if other.is_waiting:
            return not self.is_waiting or self.started <= other.wrote_before
        return not self.is_waiting and (self.id == other.id or self.started == other.shown)


class OpenTransactions:
    """What several polls say together. Pure.

    Args:
        max_wait: how long a transaction is waited for, µs.
        hidden_since: who polled before has read on, and nothing that was hidden then was created
            at or before, µs; None: nobody has. More than a day before the first poll counts as a
            day: who reads what is years old has seen nothing hidden there, and its seconds are not
            counted again one by one.

    Attributes:
        polled_at: the time of the last poll, µs; None: there was none.
        timed_out: how many transactions were open for longer.
    """

    def __init__(self, max_wait: int, hidden_since: int | None = None) -> None:
        self._max_wait = max_wait
        self._hidden_since = hidden_since
        self._open: dict[tuple[int, int], Transaction] = {}
        self.polled_at: int | None = None
        self.timed_out = 0
        self._ended: list[tuple[int, int]] = []
        self._first_poll: int | None = None

    def seen(self, at: int, transactions: Iterable[Transaction], reached: int = 0) -> None:
        """Take over a poll.

        Args:
            at: its database time, µs.
            transactions: that were open.
            reached: up to where the reader has read before it, µs.
        """
        if self._first_poll is None and self._hidden_since is not None:
            self._hidden_since = max(self._hidden_since, at - _DAY)
        if self.polled_at is not None and at < self.polled_at:
            self._clock_went_back(at)
        before = dict(self._open)
        by_id = {t.id: key for key, t in before.items() if t.has_id}
        after: dict[tuple[int, int], Transaction] = {}
        for found in transactions:
            key = (found.thread, 0 if found.thread else found.id)
            # by its id first: a prepared one changes or loses its thread
            former = by_id.get(found.id, key) if found.has_id else key
            earlier = before.get(former)
            if earlier is not None and found.may_be(earlier):
                del before[former]
                now = self._is_still_open(found, earlier, at)
                if earlier.is_waiting and not found.is_waiting:
                    # unless that statement is over, and this is another one
                    self._end(earlier, reached)
            else:
                now = self._begins(found, at)
            if not now.timed_out and at - now.first_seen > self._max_wait:
                now = replace(now, timed_out=True)
                self.timed_out += 1
            after[key] = now
        if self._first_poll is None:
            self._first_poll = at
            since = self._hidden_since
            if since is not None and since < reached:
                # what was open when somebody else polled last, and has ended since
                self._ended.append((since, reached))
        for t in before.values():
            self._end(t, reached)
        self._open, self.polled_at = after, at

    def _clock_went_back(self, at: int) -> None:
        """What was written since then may be older than all polls before it."""
        self.polled_at = at - _SECOND
        self._open = {
            key: replace(
                t,
                before=min(t.before, self.polled_at),
                since=min(t.since, self.polled_at),
                first_seen=min(t.first_seen, at),
            )
            for key, t in self._open.items()
        }

    def _is_still_open(self, found: Transaction, earlier: Transaction, at: int) -> Transaction:
        began = earlier.started if found.statement is None else found.statement
        wrote = found.is_running or found.modified != earlier.modified
        return replace(
            found,
            started=min(found.started, earlier.started),
            before=min(earlier.before, began) if found.is_waiting else earlier.before,
            since=min(earlier.since, began) if found.is_waiting else earlier.since,
            first_seen=earlier.first_seen,
            wrote_before=at if wrote else earlier.wrote_before,
            shown=found.started,
            timed_out=earlier.timed_out,
        )

    def _begins(self, found: Transaction, at: int) -> Transaction:
        """Its first statement began after the last poll; InnoDB may have known of it much later."""
        started = found.started if found.statement is None else min(found.started, found.statement)
        if self.polled_at is None:
            before = started
            since = before if self._hidden_since is None else min(before, self._hidden_since)
        else:
            before = self.polled_at
            if found.statement is not None:
                before = found.statement if found.is_waiting else min(before, found.statement)
            since = before
        return replace(
            found,
            started=started,
            before=before,
            since=since,
            first_seen=at,
            wrote_before=at,
            shown=found.started,
        )

    def _end(self, t: Transaction, reached: int) -> None:
        """Report it where the reader may have read past what it hid.

        So it has where it did not wait, and where it could not see: before the first poll, or while
        no answer was fresh.
        """
        first, last = self._first_poll, self.polled_at
        if t.timed_out or t.since < reached or (first is not None and t.before < first):
            was_blind = last is None or reached > last
            upto = max(t.wrote_before, reached) if was_blind else t.wrote_before
            self._ended.append((t.since, upto))

    def take_ended(self) -> list[tuple[int, int]]:
        """When those whose rows the reader may have passed, and that are gone, may have written:
        ``(after, upto]``, µs. Each is reported once."""
        ended, self._ended = self._ended, []
        return ended

    @property
    def upto(self) -> int | None:
        """Everything created at or before is visible, except what is no longer waited for; µs."""
        waited_for = [t.before for t in self._open.values() if not t.timed_out]
        return min(waited_for, default=self.polled_at)

    @property
    def awaits_first_poll(self) -> bool:
        """Whether something was hidden when somebody else polled, and nobody has polled since."""
        return self.polled_at is None and self._hidden_since is not None

    @property
    def open_since(self) -> int | None:
        """When the oldest that is open began, µs, rounded down to a second; None: none is."""
        return min((t.started for t in self._open.values()), default=None)

    @property
    def hidden_since(self) -> int | None:
        """Nothing that they hide was created at or before, µs; None: they hide nothing."""
        if self.polled_at is None:
            return self._hidden_since
        return min((t.since for t in self._open.values()), default=None)


def started_at(own: tuple[int, int], between: tuple[int, int], other: tuple[int, int]) -> int:
    """When a transaction began, µs, rounded down to a second.

    Args:
        own: `trx_started` of a transaction that began a moment ago, as the server turns it into
            seconds since 1970, the usual and the earliest way.
        between: two times, µs, between which that transaction began.
        other: as `own`, of the transaction in question.
    """
    first, last = between[0] // _SECOND, between[1] // _SECOND
    if any(first <= seconds <= last for seconds in own):
        found = other[1]
    else:  # these are not the system's zone; only the age says something
        age = own[0] - other[0]
        found = first - (age if age >= 0 else age + _DST)
    return min(found * _SECOND, between[0])


class Watermark:
    """Looks at the open transactions of a server.

    Args:
        config: the store.
        max_wait: how long a transaction is waited for, and how long an answer that is not fresh
            holds the boundary, at least; µs.
        unknown_for: for how long something counts as open while nobody can tell, µs.
        hidden_since: as of `OpenTransactions`.

    Attributes:
        server: who has answered last; see `server.Server.identity`. None: nobody yet.
    """

    def __init__(
        self,
        config: Store,
        max_wait: int,
        *,
        unknown_for: int = 0,
        hidden_since: int | None = None,
    ) -> None:
        self._config = config
        self._stale_after = max(max_wait / 1e6, _STALE_AFTER)
        self._unknown_for = unknown_for
        self._connection: Connection | None = None
        self.server: str | None = None
        self._processes = ""
        self._transactions = OpenTransactions(max_wait, hidden_since)
        self._polled = float("-inf")
        self._now = 0
        self._pause = _REFRESH
        self._turns_until = float("-inf")
        self._takes_turns = True
        self._waits_since: float | None = None
        self._has_turn = False
        self._stale_since: float | None = None
        self._denied = False

    @property
    def state(self) -> State:
        """ "denied" the account may not see them; "stale" no answer was fresh for `max_wait`, 3 s;
        "held" it is below the last poll; "open" nothing holds it."""
        if self._denied:
            return "denied"
        since = self._stale_since
        if since is not None and time.monotonic() - since > self._stale_after:
            return "stale"
        at, upto = self._transactions.polled_at, self._transactions.upto
        return "open" if at is not None and upto == at else "held"

    @property
    def upto(self) -> int | None:
        """Everything created at or before is visible, µs; None: nobody can tell."""
        return None if self.state in {"denied", "stale"} else self._transactions.upto or 0

    @property
    def open_since(self) -> int | None:
        """As of `OpenTransactions`; None too where the account may not see them.

        While no answer is fresh, nobody knows what is open: something may have been since the last
        poll, or for `unknown_for`, whichever is less.
        """
        state, transactions = self.state, self._transactions
        if state != "stale":
            return None if state == "denied" else transactions.open_since
        known = transactions.open_since or transactions.polled_at or 0
        return max(known, self._now - self._unknown_for)

    @property
    def hidden_since(self) -> int | None:
        """As of `OpenTransactions`; while no answer is fresh, since the last one that was, or for
        a day, whichever is less. None too where the account may not see them."""
        state, transactions = self.state, self._transactions
        if state != "stale":
            return None if state == "denied" else transactions.hidden_since
        since = [transactions.hidden_since, transactions.polled_at]
        known = min((at for at in since if at is not None), default=0)
        return max(known, self._now - _DAY)

    @property
    def timed_out(self) -> int:
        """How many transactions were not waited for any longer."""
        return self._transactions.timed_out

    @property
    def has_open(self) -> bool:
        """Whether there is one, or was at somebody else's last poll, whose end a poll may show."""
        return self._transactions.open_since is not None or self._transactions.awaits_first_poll

    def take_ended(self) -> list[tuple[int, int]]:
        """As of `OpenTransactions`."""
        return self._transactions.take_ended()

    @property
    def next_poll(self) -> float | None:
        """Seconds until `poll` asks the server again; None: it would do so now."""
        wait = self._polled + self._pause - time.monotonic()
        return wait if wait > 0 and not self._denied else None

    def poll(self, reached: int = 0) -> None:
        """Poll, unless the last one was a moment ago.

        Args:
            reached: up to where the reader has read, µs.

        Raises:
            StoreError: the database cannot be reached, or is a replica.
        """
        if self._denied or time.monotonic() - self._polled < self._pause:
            return
        idle = time.monotonic() - self._polled
        nonce = secrets.token_hex(8)
        try:
            if self._connection and idle > ASKED_AFTER and not is_alive(self._connection):
                self.close()
            if self._connection is None:
                self._connection = self._connect()
            with mapped("information_schema.innodb_trx"):
                if not self._is_turn(self._connection):
                    return
                processes = run(self._connection, f"SELECT {self._processes}")
                run(self._connection, "START TRANSACTION WITH CONSISTENT SNAPSHOT, READ ONLY")
                rows = run(
                    self._connection,
                    f"SELECT /* {nonce} */ {_OPEN}",
                )
                run(self._connection, "COMMIT")
                if self._has_turn:
                    self._has_turn = False
                    run(self._connection, f"SELECT RELEASE_LOCK('{_TURN_LOCK}')")
        except Exception as error:
            self.close()
            self._pause_for(_REFRESH)
            cause = error.__cause__ or error
            if isinstance(cause, pymysql.err.MySQLError) and cause.args[0] in _DENIED:
                self._denied = True
                return
            raise
        self._pause_for(_REFRESH if time.monotonic() > self._turns_until else _BETWEEN_TURNS)
        self._now = int(processes[-1][0])
        own = next((row for row in rows if nonce in row[5]), None)
        if own is None:
            if self._takes_turns:
                self._turns_until = self._polled + _TURNS_FOR
                self._pause_for(random.uniform(*_AWAITS_TURN))
            else:
                self._turns_until = float("-inf")
                self._pause_for(random.uniform(*_WITHOUT_TURNS))
            if self._stale_since is None:
                self._stale_since = self._polled
            return
        self._stale_since = None
        self._transactions.seen(self._now, _found(self._now, processes, own, rows), reached)

    def _pause_for(self, seconds: float) -> None:
        self._polled, self._pause = time.monotonic(), seconds

    def _is_turn(self, connection: Connection) -> bool:
        """Whether to poll now; where it is not, `next_poll` says when to ask again."""
        now = time.monotonic()
        if self._has_turn or now > self._turns_until:
            return True
        try:
            [(is_free,)] = run(connection, f"SELECT GET_LOCK('{_TURN_LOCK}', 0)")
        except pymysql.err.DatabaseError:
            if not is_alive(connection):
                raise
            self._takes_turns = False  # a cluster may know of no such locks
            return True
        if is_free:
            self._has_turn, self._waits_since = True, None
            self._pause_for(_REFRESH)
            return False
        self._turns_until = now + _TURNS_FOR
        self._waits_since = self._waits_since or now
        if now - self._waits_since > _LONGEST_TURN:
            self._waits_since, self._turns_until = None, float("-inf")
            return True
        self._pause_for(random.uniform(*_AWAITS_TURN))
        return False

    def _connect(self) -> Connection:
        connection = connect_for_reading(self._config)
        try:
            self.server = require_primary(self._config, connection)
        except BaseException:
            connection._force_close()  # type: ignore[attr-defined]
            raise
        age = "time_ms * 1000" if is_mariadb(connection) else "time * 1000000"
        self._processes = _PROCESSES.format(age=age)
        # another isolation level's snapshot is not one, and the own transaction does not show
        for setting in ("TRANSACTION ISOLATION LEVEL REPEATABLE READ", "time_zone = 'SYSTEM'"):
            run(connection, f"SET SESSION {setting}")
        return connection

    def close(self) -> None:
        """Closes the connection; the next poll makes a new one."""
        if self._connection is not None:
            self._connection._force_close()  # type: ignore[attr-defined]
            self._connection = None
            self._has_turn = False


def _found(
    now: int, processes: Sequence[Any], own: Sequence[Any], rows: Sequence[Any]
) -> list[Transaction]:
    """What one poll shows that may write, or has."""
    statements: dict[int, int] = {}
    running: dict[int, int] = {}
    for _, thread, age, waits, text in processes:
        if text is None:
            continue
        # MySQL's ages are whole seconds: the difference of two times, both rounded down
        began = (now if int(age) % _SECOND else now // _SECOND * _SECOND) - int(age)
        # none takes a day; of a session that has SET its own timestamp, that is what it says
        running[int(thread)] = began = min(max(began, now - _DAY), now)
        if not only_reads(text) and (waits or _verb(text) in _APPENDS):
            statements[int(thread)] = began
    found = []
    threads = {int(row[2]) for row in rows}
    for row in rows:
        _, number, thread, local, earliest, query, modified, locks, read_only, plain = row
        statement = statements.get(int(thread))
        if row is own or int(read_only) or int(plain):
            continue
        reads = not query or (not int(locks) and only_reads(query))
        if reads and not int(modified) and statement is None:
            continue
        if statement is None and int(modified):  # by a function that it calls, say, just now
            statement = running.get(int(thread))
        started = started_at(
            (int(own[3]), int(own[4])), (now, int(own[0])), (int(local), int(earliest))
        )
        found.append(
            Transaction(
                int(number),
                int(thread),
                started,
                int(modified),
                bool(query),
                statement=statement,
            )
        )
    # what InnoDB does not know of, yet
    return found + [
        Transaction(0, thread, began, 0, is_running=True, is_waiting=True, statement=began)
        for thread, began in statements.items()
        if thread not in threads
    ]
