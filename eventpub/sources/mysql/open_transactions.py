"""Open transactions: the query of a poll, its result, and the state over several polls. Pure:
times and rows are arguments.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

SECOND = 1_000_000
DAY = 86_400 * SECOND
_HOUR = 3600 * SECOND
_EVER = 0
_FIRST_PSEUDO_ID = 1 << 48  # MySQL's ids of transactions that have not written; MariaDB's are 0


@dataclass(frozen=True)
class Transaction:
    """A transaction that has written or runs a statement that may write.

    Attributes:
        id: InnoDB's; a pseudo id until it has written.
        thread: of its connection; 0 without one (prepared XA).
        started: µs, rounded down to a second; no later than its running statement.
        modified: rows written, deleted or rolled back so far.
        is_waiting: its statement waits for a lock that InnoDB does not know of yet.
        statement: start of its statement, µs; None: none, or a young one.
        before: µs; at this time it had neither written nor run a statement.
        since: µs; it hides nothing created at or before.
        first_seen: µs.
        wrote_before: µs; rows that it had written when last seen are no newer.
        shown: µs; its start as InnoDB last showed it.
        timed_out: open for longer than `max_wait`, and no longer waited for.
        is_ahead: it seems to begin in the future, since the clock was set back.
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
    is_ahead: bool = False

    @property
    def has_id(self) -> bool:
        return 0 < self.id < _FIRST_PSEUDO_ID

    def may_be(self, other: Transaction) -> bool:
        """Whether it may be `other`, seen earlier on the same thread."""
        if other.has_id:
            return self.id == other.id
        if other.is_waiting:
            return not self.is_waiting or self.started <= other.wrote_before
        return not self.is_waiting and (self.id == other.id or self.started == other.shown)


class OpenTransactions:
    """The state over several polls.

    Args:
        max_wait: how long a transaction is waited for, µs.
        hidden_since: that of the previous reader, µs.

    Attributes:
        polled_at: database time of the last poll, µs.
        timed_out: number of transactions open for longer than `max_wait`.
        server_started: µs; None: unknown.
    """

    def __init__(self, max_wait: int, hidden_since: int | None = None) -> None:
        self._max_wait = max_wait
        self._hidden_since = hidden_since
        self._open: dict[tuple[int, int], Transaction] = {}
        self.polled_at: int | None = None
        self.timed_out = 0
        self.server_started: int | None = None
        self._ended: list[tuple[int, int]] = []
        self._first_poll: int | None = None
        self._steady_since = 0

    def seen(self, at: int, transactions: Iterable[Transaction], reached: int = 0) -> None:
        """Apply a poll: its database time and open transactions, and up to where the reader had
        read before it, µs.
        """
        if went_back := self.polled_at is not None and at < self.polled_at:
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
                now = self._begins(found, at, went_back=went_back)
            if not now.timed_out and at - now.first_seen > self._max_wait:
                now = replace(now, timed_out=True)
                self.timed_out += 1
            after[key] = now
        if self._first_poll is None:
            self._first_poll = self._steady_since = at
            since = self._hidden_since
            if since is not None and since < reached:
                # transactions of the previous reader's last poll that have ended since
                self._ended.append((since, reached))
        for t in before.values():
            self._end(t, reached)
        self._open, self.polled_at = after, at

    def _clock_went_back(self, at: int) -> None:
        """Rows written since may be older than all earlier polls."""
        self.polled_at, self._steady_since = at - SECOND, at
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
            is_ahead=earlier.is_ahead or found.is_ahead,
        )

    def _begins(self, found: Transaction, at: int, *, went_back: bool) -> Transaction:
        """A new transaction: its first statement began after the last poll."""
        started = found.started if found.statement is None else min(found.started, found.statement)
        if self.polled_at is None:
            before = started
            since = before if self._hidden_since is None else min(before, self._hidden_since)
            if not found.thread:
                # prepared (XA); a recovered one shows the time of its recovery, which the server
                # ends within an hour; a replicated one shows when it was applied
                up = self.server_started
                is_recovered = up is None or started <= up + _HOUR
                started = _EVER if is_recovered else started - _HOUR
                since = min(since, started)
        else:
            known = min(self.polled_at, started) if went_back else self.polled_at
            # in whole seconds; polls may be an hour apart
            is_sure = found.thread and started <= at
            before = _first_write(found, max(known, started - SECOND) if is_sure else known)
            since = _first_write(found, known)
            if at - self.polled_at > SECOND:  # the clock may have gone back and forth
                since = min(since, started)
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
        """Record what the reader may have passed: it did not wait, or could not see."""
        first, last = self._first_poll, self.polled_at or 0
        if t.timed_out or t.since < reached or (first is not None and t.before < first):
            is_known = t.first_seen > self._steady_since and not t.is_ahead and reached <= last
            upto = t.wrote_before if is_known else max(t.wrote_before, reached)
            self._ended.append((t.since, upto))

    def take_ended(self) -> list[tuple[int, int]]:
        """Ranges ``(after, upto]``, µs, already read, in which ended transactions may have written.
        Each is reported once.
        """
        ended, self._ended = self._ended, []
        return ended

    @property
    def upto(self) -> int | None:
        """Everything created at or before, µs, is visible, except of timed-out transactions."""
        waited_for = [t.before for t in self._open.values() if not t.timed_out]
        return min(waited_for, default=self.polled_at)

    @property
    def has_open(self) -> bool:
        """Whether one is open, or was when the previous reader ended."""
        return bool(self._open) or (self.polled_at is None and self._hidden_since is not None)

    @property
    def open_since(self) -> int | None:
        """Start of the oldest open one, µs; 0 if recovered (XA); None: none is open."""
        return min((t.started - DAY * t.is_ahead for t in self._open.values()), default=None)

    @property
    def hidden_since(self) -> int | None:
        """They hide nothing created at or before, µs; None: they hide nothing."""
        if self.polled_at is None:
            return self._hidden_since
        return min((t.since for t in self._open.values()), default=None)


_DST = 3600
"""Seconds by which clocks go back."""
_SHOWS = 2
"""From this age in whole seconds, a statement counts even if it waits for no lock."""
_QUERY_LENGTH = 1000
NOW = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
_AT = "UNIX_TIMESTAMP(trx_started)"
# of a repeated local time, the first instant
_AT_FIRST = (
    f"CASE WHEN FROM_UNIXTIME({_AT} - 3600) = trx_started THEN {_AT} - 3600"
    f" WHEN FROM_UNIXTIME({_AT} - 1800) = trx_started THEN {_AT} - 1800 ELSE {_AT} END"
)
OPEN = (
    f"{NOW}, trx_id, trx_mysql_thread_id, {_AT}, {_AT_FIRST}, COALESCE(trx_query, ''),"
    " trx_rows_modified, trx_lock_structs + trx_rows_locked, trx_is_read_only,"
    " trx_autocommit_non_locking FROM information_schema.innodb_trx"
    # left by a crash of the server; its rows never show
    " WHERE trx_mysql_thread_id <> 0 OR trx_state <> 'ROLLING BACK'"
)
_WAITS = "^Waiting for .*(lock|flush|table)"
PROCESSES = (
    f"{NOW}, id, {{age}}, state REGEXP '{_WAITS}', LEFT(info, {_QUERY_LENGTH})"
    " FROM information_schema.processlist WHERE info IS NOT NULL AND id <> CONNECTION_ID()"
    f" AND command NOT IN ('Sleep', 'Daemon') AND (state REGEXP '{_WAITS}' OR time >= {_SHOWS})"
    f" UNION ALL SELECT {NOW}, NULL, NULL, NULL, NULL"
)


_VERB = re.compile(r"(?:\s+|\(|/\*(?!M?!).*?\*/|(?:--|#)[^\n]*\n)*(\w+)", re.DOTALL)
# MariaDB: SET STATEMENT max_statement_time = 10 FOR INSERT …; BEGIN NOT ATOMIC INSERT …; END
_AROUND = re.compile(r"\s*(?:SET\s+STATEMENT\b.*?\bFOR|BEGIN\s+NOT\s+ATOMIC)\b", re.I | re.DOTALL)
_READS = {"select", "with", "table", "values", "show", "desc", "describe", "explain"}
_READS |= {"begin", "start", "commit", "rollback", "savepoint", "release", "set", "use", "unlock"}
# Not CALL and EXECUTE: the list shows the statement that they run, with the time of its own start.
_APPENDS = {"insert", "replace", "load", ""}  # "": a statement that is not understood may append


def _verb(statement: str) -> str:
    around = _AROUND.match(statement)
    found = _VERB.match(statement, around.end() if around else 0)
    return found[1].lower() if found else ""


def only_reads(statement: str) -> bool:
    """Whether a statement surely writes nothing itself (a function that it calls might)."""
    verb = _verb(statement)
    if _AROUND.match(statement):
        return verb in {"select", "with"} and not {"(", ";"} & {*statement}
    if verb == "set":
        return "(" not in statement
    if verb == "select" and len(statement) < _QUERY_LENGTH and "(" in statement:
        return re.search(r"\bfrom\b", statement, re.IGNORECASE) is not None
    return verb in _READS


def began(
    own: tuple[int, int], between: tuple[int, int], other: tuple[int, int]
) -> tuple[int, bool]:
    """When a transaction began, µs, rounded down to a second; and whether that is in the future.

    Args:
        own: `trx_started` of our own, young transaction, in the usual and the earliest reading.
        between: two times, µs, between which our own began.
        other: like `own`, for the transaction in question.
    """
    first, last = between[0] // SECOND, between[1] // SECOND
    if any(first <= seconds <= last for seconds in own):
        found, is_ahead = other[1], other[1] > last
    else:  # not in the system's zone; only the age is known
        age = own[0] - other[0]
        found, is_ahead = first - (age if age >= 0 else age + _DST), False
    return min(found * SECOND, between[0]), is_ahead


def found_in(
    now: int, processes: Sequence[Any], own: Sequence[Any], rows: Sequence[Any]
) -> list[Transaction]:
    statements: dict[int, int] = {}
    running: dict[int, int] = {}
    for _, thread, age, waits, text in processes:
        if text is None:
            continue
        # MySQL's ages are the difference of two times, both rounded down to seconds
        since = (now if int(age) % SECOND else now // SECOND * SECOND) - int(age)
        # a session that has SET its own timestamp shows any age
        running[int(thread)] = since = min(max(since, now - DAY), now)
        if not only_reads(text) and (waits or _verb(text) in _APPENDS):
            statements[int(thread)] = since
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
        if statement is None and int(modified):  # just now, or by a function that it calls
            statement = running.get(int(thread))
        times = (int(own[3]), int(own[4])), (now, int(own[0])), (int(local), int(earliest))
        started, is_ahead = began(*times)
        found.append(
            Transaction(
                int(number),
                int(thread),
                started,
                int(modified),
                is_running=bool(query),
                statement=statement,
                is_ahead=is_ahead,
            )
        )
    # not known to InnoDB yet
    return found + [
        Transaction(0, thread, since, 0, is_running=True, is_waiting=True, statement=since)
        for thread, since in statements.items()
        if thread not in threads
    ]


def _first_write(found: Transaction, known: int) -> int:
    """A new transaction has written nothing before; `known`: before its first statement."""
    if found.statement is None:
        return known
    return found.statement if found.is_waiting else min(known, found.statement)
