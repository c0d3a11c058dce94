"""One poll of the open transactions: what a server is asked, and what its answer shows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from eventpub.sources.mysql.open_transactions import DAY, SECOND, Transaction

_DST = 3600
"""Seconds by which clocks go back."""
_SHOWS = 2
"""Whole seconds of a statement's age from which it counts although it waits for no lock."""
_QUERY_LENGTH = 1000
_NOW = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
_AT = "UNIX_TIMESTAMP(trx_started)"
# what the clocks showed twice is taken for the first time that they did
_AT_FIRST = (
    f"CASE WHEN FROM_UNIXTIME({_AT} - 3600) = trx_started THEN {_AT} - 3600"
    f" WHEN FROM_UNIXTIME({_AT} - 1800) = trx_started THEN {_AT} - 1800 ELSE {_AT} END"
)
OPEN = (
    f"{_NOW}, trx_id, trx_mysql_thread_id, {_AT}, {_AT_FIRST}, COALESCE(trx_query, ''),"
    " trx_rows_modified, trx_lock_structs + trx_rows_locked, trx_is_read_only,"
    " trx_autocommit_non_locking FROM information_schema.innodb_trx"
)
_WAITS = "^Waiting for .*(lock|flush|table)"
PROCESSES = (
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
_APPENDS = {"insert", "replace", "load", ""}  # "": a statement that is not understood may append


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


def started_at(own: tuple[int, int], between: tuple[int, int], other: tuple[int, int]) -> int:
    """When a transaction began, µs, rounded down to a second.

    Args:
        own: `trx_started` of a transaction that began a moment ago, as the server turns it into
            seconds since 1970, the usual and the earliest way.
        between: two times, µs, between which that transaction began.
        other: as `own`, of the transaction in question.
    """
    first, last = between[0] // SECOND, between[1] // SECOND
    if any(first <= seconds <= last for seconds in own):
        found = other[1]
    else:  # these are not the system's zone; only the age says something
        age = own[0] - other[0]
        found = first - (age if age >= 0 else age + _DST)
    return min(found * SECOND, between[0])


def is_ahead(own: tuple[int, int], between: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether a transaction says that it began later than now; arguments as of `started_at`."""
    first, last = between[0] // SECOND, between[1] // SECOND
    return any(first <= seconds <= last for seconds in own) and other[1] > last


def found_in(
    now: int, processes: Sequence[Any], own: Sequence[Any], rows: Sequence[Any]
) -> list[Transaction]:
    """What one poll shows that may write, or has."""
    statements: dict[int, int] = {}
    running: dict[int, int] = {}
    for _, thread, age, waits, text in processes:
        if text is None:
            continue
        # MySQL's ages are whole seconds: the difference of two times, both rounded down
        began = (now if int(age) % SECOND else now // SECOND * SECOND) - int(age)
        # none takes a day; of a session that has SET its own timestamp, that is what it says
        running[int(thread)] = began = min(max(began, now - DAY), now)
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
        times = (int(own[3]), int(own[4])), (now, int(own[0])), (int(local), int(earliest))
        found.append(
            Transaction(
                int(number),
                int(thread),
                started_at(*times),
                int(modified),
                bool(query),
                statement=statement,
                is_ahead=is_ahead(*times),
            )
        )
    # what InnoDB does not know of, yet
    return found + [
        Transaction(0, thread, began, 0, is_running=True, is_waiting=True, statement=began)
        for thread, began in statements.items()
        if thread not in threads
    ]
