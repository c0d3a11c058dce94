"""What `eventpub doctor` says of the store: what `run` needs, and what could be better.

Reads only. Every finding names the statement that fixes it; "wrong" carries the code of the error
that `run` would end with.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import datetime

from eventpub.config import Store, format_time
from eventpub.errors import Check, StoreError
from eventpub.sources.mysql import server, statements
from eventpub.sources.mysql.connection import (
    Connection,
    connect_arguments,
    connect_for_reading,
    is_mariadb,
    run,
)
from eventpub.sources.mysql.events import EventStore
from eventpub.sources.mysql.failures import UNKNOWN_HOST, error_number
from eventpub.sources.mysql.layout import Layout, layout_of, roles_of
from eventpub.sources.mysql.row_checks import FEW_ROWS, Subject, row_checks
from eventpub.sources.mysql.rows import micros
from eventpub.sources.mysql.schema import additions
from eventpub.sources.mysql.table import read_table

_ACCESS_DENIED = 1227
_CLOCK_TOLERANCE = 60_000_000
_HOST_BEHIND = 600
"""Seconds; see `eventpub.sink.batch.AHEAD_OF_CLOCK`."""
_LONG_AGO = 300_000_000
_SAMPLES = 4
_BETWEEN_SAMPLES = 0.4
_MONTH = 30 * 86_400_000_000


def checks(config: Store, former_server: str | None = None) -> list[Check]:
    """Checks everything that the publisher needs of the store.

    Args:
        former_server: identity of the server that was read last; None: not known.

    Raises:
        ConfigError: `store.url` or the password file cannot be used.
    """
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
    version = run(connection, "SELECT VERSION()")[0][0]
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
    subject = Subject(config, layout, table, roles_of(config, table))
    yield _slices(subject)
    yield from row_checks(subject)
    yield _open_transactions(subject)
    yield _clock(connection)
    with EventStore(config, layout) as store:
        yield _time_zone(connection, layout, store)


def _account(connection: Connection) -> str:
    """The account of a connection, as GRANT takes it."""
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
        return Check(
            name, "warn", f"{said}; not guaranteed: {server.UNGUARDED}", "name the primary"
        )
    if former_server is not None and former_server != found.identity:
        return Check(
            name,
            "warn",
            f"{said}, but {former_server} was read last: events that were written anew under"
            " published versions become dead letters",
            "eventpub verify",
        )
    if config.takes_all_writes:
        return Check(name, "ok", f"{said}; takes all writes, as store.takes_all_writes says")
    if not found.source_is_visible:
        grant = "SLAVE MONITOR" if is_mariadb(connection) else "REPLICATION CLIENT"
        return Check(
            name,
            "warn",
            f"{said}; this account cannot see whether it is a replica, which must not be read",
            f"GRANT {grant} ON *.* TO {_account(connection)}",
        )
    return Check(name, "ok", f"{said}, no replica")


def _slices(subject: Subject) -> Check:
    name = "event store: slice column"
    added = additions(subject.table, subject.roles)
    if not added and subject.layout.slice:
        return Check(name, "ok", "each shard reads its own rows from the index")
    if not added:
        said = "none, since only a key of one text column can have one: shards read all rows"
        return Check(name, "ok", said)
    return Check(
        name,
        "ok",
        "none: works, but each shard reads the other shards' rows too. Adding it copies the table "
        "and holds up its writers meanwhile",
        f"eventpub migrate, or: {subject.table.alter(added)}",
    )


def _open_transactions(subject: Subject) -> Check:
    name = "event store: open transactions"
    table, connection = subject.table, subject.connection
    if table.engine.lower() != "innodb":
        return Check(
            name,
            "warn",
            f"those of {table.engine} show to no account: a missing version may be skipped while "
            "the transaction that writes it is still open, and what is committed later than "
            "recount.horizon after it was created may be lost",
            table.alter(["ENGINE = InnoDB"]),
        )
    try:
        run(connection, "SELECT COUNT(*) FROM information_schema.innodb_trx")
    except Exception as error:
        if error_number(error) != _ACCESS_DENIED:
            raise
        return Check(
            name,
            "warn",
            "this account cannot see them, so a missing version may be skipped while the "
            "transaction that writes it is still open",
            f"GRANT PROCESS ON *.* TO {_account(connection)}",
        )
    return Check(name, "ok", "visible to this account")


def _clock(connection: Connection) -> Check:
    name = "event store: clock"
    before = time.time()
    now = int(run(connection, statements.NOW)[0][0])
    ahead = now / 1e6 - (before + time.time()) / 2
    way = "ahead of" if ahead > 0 else "behind"
    said = f"the database's is {abs(ahead):.3f} s {way} this machine's"
    if ahead <= _HOST_BEHIND:
        return Check(name, "ok", f"{said}; only the database's is used")
    return Check(
        name,
        "warn",
        f"{said}; records get timestamps of at most {_HOST_BEHIND // 60} minutes after this "
        "machine's time, so that Kafka's retention by time removes them too early",
        "set this machine's clock",
    )


def _time_zone(connection: Connection, layout: Layout, store: EventStore) -> Check:
    name = "event store: time zone"
    zone = layout.zone
    [(now, newest)] = run(connection, statements.now_and_newest_time(layout))
    said = "TIMESTAMP, so no time zone matters"
    if zone:
        hours, minutes = divmod(abs(zone.local(now) - now) // 60_000_000, 60)
        sign = "-" if zone.local(now) < now else "+"
        said = f"DATETIME in {zone.name}, now UTC{sign}{hours:02d}:{minutes:02d}"
        if zone.backward_changes(now, now + 12 * _MONTH):
            said += "; in the hour that is repeated each year times may be off by that hour"
    created = layout.instant(micros(newest)) if isinstance(newest, datetime) else 0
    if created - now > _CLOCK_TOLERANCE:
        return Check(
            name,
            "warn",
            f"{said}; but the newest event has a create_time in the future, "
            f"{format_time(created)}: it is published then, or earlier if a later version of "
            "its aggregate points to it",
            "set store.time_zone to the zone that the writers' sessions use",
            "store.rows_in_future",
        )
    if created:
        said += f"; the newest event was created {max(0, now - created) / 1e6:.0f} s ago"
    if zone is None or layout.id_index is None:
        return Check(name, "ok", said)
    return _past(name, said, store)


def _past(name: str, said: str, store: EventStore) -> Check:
    """Whether rows that are inserted meanwhile say that they were created long ago."""
    highest = max((row.id for row in store.newest(1)), default=0)
    past, worst = 0, 0
    for _ in range(_SAMPLES):
        time.sleep(_BETWEEN_SAMPLES)
        now = store.now()
        new = [r for r in store.newest(FEW_ROWS) if r.id > highest]
        ages = [now - row.created for row in new if now - row.created > _LONG_AGO]
        past += bool(ages)
        worst = max(worst, *ages, 0)
        highest = max([highest, *(row.id for row in new)])
    if not past:
        return Check(name, "ok", said)
    return Check(
        name,
        "wrong" if past > 2 else "warn",
        f"{said}; new rows arrive with create_times up to"
        f" {worst / 1e6:.0f} s old, behind what the publisher has read",
        "set store.time_zone to the zone that the writers' sessions use, or have them SET time_zone"
        " to that one",
        "store.rows_in_past",
    )
