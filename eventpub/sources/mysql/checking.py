"""The store's part of `eventpub doctor`. Reads only; each finding has the statement for a fix."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeAlias

from eventpub.config import Store, format_time
from eventpub.errors import Check, StoreError, counted
from eventpub.sources.mysql import server, statements
from eventpub.sources.mysql.connection import (
    UNKNOWN_HOST,
    Connection,
    connect_arguments,
    connect_for_reading,
    error_number,
    is_mariadb,
    run,
)
from eventpub.sources.mysql.events import EventStore
from eventpub.sources.mysql.layout import (
    NOW,
    Layout,
    add_number,
    additions,
    identity,
    is_set_once,
    key_index,
    layout_of,
    not_null,
    roles_of,
    set_identity,
)
from eventpub.sources.mysql.statements import micros
from eventpub.sources.mysql.table import SAMPLE, TIMES, EventTable, Roles, Versions, read_table
from eventpub.sources.mysql.values import writers_zone

_ACCESS_DENIED, _NOT_TEXT = 1227, 3854
_PREPARED = (
    "SELECT COUNT(*) FROM information_schema.innodb_trx"
    " WHERE trx_mysql_thread_id = 0 AND trx_state <> 'ROLLING BACK'"
)
_CLOCK_TOLERANCE = 60_000_000
_HOST_BEHIND = 600
_LONG_AGO = 300_000_000
_SAMPLES = 4
_BETWEEN_SAMPLES = 0.4
_FEW_ROWS = 1_000
_NEWEST = 100_000
_FEW_ABOVE = 20

_Finding: TypeAlias = tuple[Any, ...]
"""Status, message, and a suggestion if there is one."""


@dataclass(frozen=True)
class _Subject:
    config: Store
    table: EventTable
    roles: Roles
    layout: Layout


def checks(config: Store, former_server: str | None = None) -> list[Check]:
    """Check the store; `former_server` is the identity of the server read last, or None."""
    try:
        connection = connect_for_reading(config)
    except StoreError as error:
        return [Check.wrong("event store: connection", error)]
    try:
        return list(_examine(config, connection, former_server))
    except StoreError as error:
        return [Check.wrong("event store", error)]
    finally:
        connection.close()


def _examine(config: Store, connection: Connection, former_server: str | None) -> Iterator[Check]:
    [(version,)] = run(connection, "SELECT VERSION()")
    user = connect_arguments(config)["user"]
    yield Check("event store: connection", "ok", f"{version}, as {user}")
    yield _server(config, connection, former_server)
    try:
        table = read_table(config, connection)
        layout = layout_of(config, table)
    except StoreError as error:
        fixed = (error.suggestion or "").replace(f"'{user}'@{UNKNOWN_HOST}", _account(connection))
        error.suggestion = fixed
        yield Check.wrong("event store: table", error)
        return
    yield Check("event store: table", "ok", f"{config.table}: columns, types and indexes as needed")
    subject = _Subject(config, table, roles_of(config, table), layout)
    versions = Versions(run(connection, statements.some_keys(layout, SAMPLE)))
    findings = {
        "slice column": _slices(subject),
        "identity of aggregates": _identity(subject),
        "rows without identity or time": _nulls(subject),
        "versions": _versions(subject, versions),
        "first versions": _first_versions(config.first_version, versions.lowest),
        "create_time": _create_time(subject),
        "order of insertion": _insertion_order(subject),
        "open transactions": _open_transactions(subject),
        "clock": _clock(connection),
    }
    yield from (Check(f"event store: {name}", *of) for name, of in findings.items() if of)
    yield _time_zone(subject)


def _account(connection: Connection) -> str:
    user, _, host = str(run(connection, "SELECT CURRENT_USER()")[0][0]).rpartition("@")
    return f"'{user}'@'{host}'"


def _server(config: Store, connection: Connection, former_server: str | None) -> Check:
    name = "event store: server"
    found = server.examine(config, connection)
    said = f"{found.identity} {found.what_it_is}"
    try:
        found.require_primary(config)
    except StoreError as error:
        return Check.wrong(name, error)
    if found.is_replica(config):
        said, fix = f"{said}; not guaranteed: {server.UNGUARDED}", "name the primary"
    elif former_server is not None and former_server != found.identity:
        said += f", but {former_server} was read last: rewritten versions become dead letters"
        fix = "eventpub verify"
    elif config.takes_all_writes or found.source_is_visible:
        return Check(name, "ok", said + "; takes all writes" * config.takes_all_writes)
    else:
        grant = "SLAVE MONITOR" if is_mariadb(connection) else "REPLICATION CLIENT"
        said += "; this account cannot see whether it is a replica, which must not be read"
        fix = f"GRANT {grant} ON *.* TO {_account(connection)}"
    return Check(name, "warn", said, fix)


def _slices(subject: _Subject) -> _Finding:
    added = additions(subject.table, subject.roles, with_slice=True)
    if subject.layout.slice and not added:
        return "ok", "each shard reads its own rows from the index"
    said = "each shard reads the other shards' rows, too"
    if not added:
        return "ok", f"none, since only a key of one text column can have one: {said}"
    fix = f"eventpub migrate, or: {subject.table.alter(added)}"
    return "ok", f"none: {said}. Adding it copies the table while writers wait", fix


def _identity(subject: _Subject) -> _Finding:
    if not subject.layout.key_is_unique:
        return _not_unique(subject)
    parts = subject.layout.identity.parts
    for part in (part for part in parts if not part.is_bytewise):
        return (
            "warn",
            f"{part.merged}, so the database refuses one {part.name.strip('`')} beside the other;"
            " eventpub tells them apart by their bytes",
            _bytewise(subject),
        )
    collations = ", ".join(dict.fromkeys(part.collation for part in parts))
    return "ok", f"by bytes ({collations}), versions unique"


def _bytewise(subject: _Subject) -> str:
    collation = "nopad_bin" if is_mariadb(subject.table.connection) else "0900_bin"
    return f"give the column the collation utf8mb4_{collation}, or let writers use one spelling"


def _not_unique(subject: _Subject) -> _Finding:
    table, roles = subject.table, subject.roles
    said = "the table allows a version twice; a second row that differs becomes a dead letter"
    wider = identity(table, roles)
    if wider != roles.parts:
        others = " and ".join(name for name in wider if name not in roles.parts)
        said += f"; {others} distinguishes rows of one {', '.join(roles.parts)} and version"
        return "warn", said, set_identity(wider)
    added, why = key_index(table, roles.key)
    if not why:
        return "warn", said, table.alter([added])
    fix = "make sure that writers write each version once"
    if table.repeated(roles.key):
        fix = f"correct the repeated rows: {statements.repeated(subject.layout)}"
    elif why == table.merged(roles.key):
        fix = _bytewise(subject)
    return "warn", f"{said}; no unique key is possible: {why}", fix


def _nulls(subject: _Subject) -> _Finding:
    layout, table = subject.layout, subject.table
    time = subject.roles.names["create_time"]
    never_read = int(run(table.connection, statements.without_time(layout, _FEW_ROWS))[0][0])
    if never_read:
        said = "at least " * (never_read == _FEW_ROWS) + counted(never_read, "row has", "rows have")
        return (
            "warn",
            f"{said} no create_time, a zero date, or one before 1970: never published, and the"
            " publisher stops where a later version of the aggregate follows",
            f"set {time} of these rows to the current time, and make it NOT NULL",
        )
    allowed = [name for name in (*subject.roles.key, time) if table.columns[name].nullable]
    if not allowed:
        return "ok", "none"
    nameless = int(run(table.connection, statements.without_identity(layout, _NEWEST))[0][0])
    rows = f"{counted(nameless, 'row')} of the newest {_NEWEST:,} without aggregate_id or version"
    if layout.skips_nulls:
        return "ok", f"{rows}; store.without_identity skips them"
    said, ways = f"{', '.join(allowed)} may be NULL: a row without create_time is never read", []
    # a generated column has the value of its expression
    if not nameless and not any(table.columns[column].generated_as for column in allowed):
        ways.append(not_null(table, allowed))
    if allowed != [time]:
        said += f", one without aggregate_id or version stops the publisher ({rows})"
        ways.append('set store.without_identity = "skip" if such rows are not events')
    return "warn", said, "; or ".join(ways) or f"make {time} NOT NULL"


def _versions(subject: _Subject, found: Versions) -> _Finding:
    version = subject.roles.names["version"]
    if subject.table.columns[version].counts_rows or found.count_all_rows:
        return (
            "wrong",
            f"{version} numbers the rows of the table, not the events of an aggregate: each event"
            " would wait for versions that never come",
            "map a column that increases by one within the aggregate: version in [store.columns]",
        )
    if not found.with_holes:
        return "ok", "consecutive within each aggregate"
    many = counted(found.with_several, "aggregate")
    said = f"versions are missing in {found.with_holes} of {many} with several events"
    fix = f"check that every writer increments {version} by one within an aggregate"
    if found.with_holes * 2 <= found.with_several:
        return "ok", said, fix
    return "warn", f"{said}: each waits until its gap is skipped (gaps.max_backoff)", fix


def _first_versions(first: int, lowest: Sequence[int]) -> _Finding:
    above, below = sum(v > first for v in lowest), sum(v < first for v in lowest)
    if below:
        are_most = below * 2 > len(lowest)
        return (
            "wrong" if are_most else "warn",
            f"{below} of {len(lowest)} aggregates begin below version {first}: these events become"
            " dead letters",
            "set store.first_version = 0"
            if are_most and min(lowest) == 0
            else "correct what writes them: with a lower first version the others would wait",
        )
    said = f"{above} of {len(lowest)} aggregates begin above version {first}"
    if above * _FEW_ABOVE <= len(lowest):
        return "ok", said if above else f"aggregates begin with version {first}"
    said += (
        ": each waits until its gap is skipped (gaps.max_backoff; a record on the topic .gaps),"
        " unless it begins before read.start"
    )
    if first == 0 and lowest.count(0) < lowest.count(1) and lowest.count(1) * 2 > above:
        return "warn", said, "set store.first_version = 1"
    return "warn", said, "if the first events were archived, set read.start to a time after that"


def _create_time(subject: _Subject) -> _Finding:
    columns = subject.table.columns
    column = columns[subject.roles.names["create_time"]]
    if "on update" in column.extra:
        said = "ON UPDATE CURRENT_TIMESTAMP: an updated row is read again at its new time"
        return "warn", said, not_null(subject.table, [column.name])
    if is_set_once(column):
        return "ok", f"{column.full_type}, has the default {column.default}"
    said = (
        "not set by the database: an event whose writer's clock is behind by more than"
        " read.delay is found late, by a gap or a recount"
    )
    others = [c.name for c in columns.values() if c.type in TIMES and is_set_once(c)]
    fix = "set read.delay above what the writers' clocks may be behind"
    if others:
        fix = f'before anything is published, set create_time = "{others[0]}" in [store.columns]'
    return "warn", said, fix


def _insertion_order(subject: _Subject) -> _Finding | None:
    """Local times only: the order of insertion reveals writers in another time zone."""
    if subject.layout.zone is None:
        return None
    if subject.layout.id:
        return "ok", f"by {subject.layout.id.strip('`')}"
    return (
        "warn",
        "rows inserted with an old create_time are not noticed, since the table has no indexed"
        " column of ascending numbers",
        add_number(subject.table),
    )


def _open_transactions(subject: _Subject) -> _Finding:
    table, connection = subject.table, subject.table.connection
    skipped = "a missing version may be skipped while the transaction that writes it is still open"
    if table.engine.lower() != "innodb":
        return (
            "warn",
            f"no account can see those of {table.engine}: {skipped}",
            table.alter(["ENGINE = InnoDB"]),
        )
    try:
        [(prepared,)] = run(connection, _PREPARED)
    except Exception as error:
        if error_number(error) == _NOT_TEXT:
            return (
                "warn",
                "a statement that is not UTF-8 text (as with _binary'…') is running: while MySQL"
                f" cannot show it, {skipped}",
                "send binary values as parameters of prepared statements, or as X'…'",
            )
        if error_number(error) != _ACCESS_DENIED:
            raise
        grant = f"GRANT PROCESS ON *.* TO {_account(connection)}"
        return "warn", f"this account cannot see them, so {skipped}", grant
    if prepared:
        return (
            "warn",
            f"{counted(int(prepared), 'prepared XA transaction')} without a session: gaps seen"
            " since it began are not skipped (read.watermark)",
            "list them with XA RECOVER; end forgotten ones with XA COMMIT or XA ROLLBACK",
        )
    return "ok", "visible to this account"


def _clock(connection: Connection) -> _Finding:
    before = time.time()
    now = int(run(connection, statements.NOW)[0][0])
    ahead = now / 1e6 - (before + time.time()) / 2
    said = f"the database's differs from this machine's by {ahead:+.3f} s"
    if ahead <= _HOST_BEHIND:
        return "ok", f"{said}; only the database's is used"
    said += "; records get older timestamps, and Kafka's retention by time removes them too early"
    return "warn", said, "set this machine's clock"


def _time_zone(subject: _Subject) -> Check:
    name, layout = "event store: time zone", subject.layout
    zone = layout.zone
    [(now, newest)] = run(subject.table.connection, statements.now_and_newest_time(layout))
    name_of_zone = zone.name if zone else None
    said = "TIMESTAMP: the time zone does not matter as long as the database sets the value"
    if zone:
        hours, minutes = divmod(abs(zone.local(now) - now) // 60_000_000, 60)
        sign = "-" if zone.local(now) < now else "+"
        said = f"DATETIME in {zone.name}, now UTC{sign}{hours:02d}:{minutes:02d}"
    created = layout.instant(micros(newest)) if isinstance(newest, datetime) else 0
    if created - now > _CLOCK_TOLERANCE:
        return Check(
            name,
            "warn",
            f"{said}; but the newest event has a create_time in the future, {format_time(created)}:"
            " it is published then, or earlier if a later version of its aggregate points to it",
            writers_zone(name_of_zone),
            "store.rows_in_future",
        )
    if created:
        said += f"; the newest event was created {max(0, now - created) / 1e6:.0f} s ago"
    default = subject.table.columns[subject.roles.names["create_time"]].default
    past, oldest = 0, 0
    if layout.id_index and (zone or not NOW.search(default)):
        with EventStore(subject.config, layout) as store:
            past, oldest = _old_times(store)
    if not past:
        return Check(name, "ok", said)
    return Check(
        name,
        "wrong" if past > 2 else "warn",
        f"{said}; new rows arrive with create_times up to {oldest / 1e6:.0f} s old, behind what the"
        " publisher has read",
        writers_zone(name_of_zone),
        "store.rows_in_past",
    )


def _old_times(store: EventStore) -> tuple[int, int]:
    """How many samples have new rows with old times, and the highest age, µs."""
    highest = max((row.id for row in store.newest(1)), default=0)
    past, oldest = 0, 0
    for _ in range(_SAMPLES):
        time.sleep(_BETWEEN_SAMPLES)
        now = store.now()
        new = [r for r in store.newest(_FEW_ROWS) if r.id > highest]
        ages = [now - row.created for row in new if now - row.created > _LONG_AGO]
        past += bool(ages)
        oldest = max(oldest, *ages, 0)
        highest = max([highest, *(row.id for row in new)])
    return past, oldest
