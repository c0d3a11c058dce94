"""What `eventpub doctor` says of the store: what `run` needs, and what could be better.

Reads only. Every finding names the statement that fixes it; "wrong" carries the code of the error
that `run` would end with.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from eventpub.config import Store, format_time
from eventpub.errors import Check, EventpubError, StoreError
from eventpub.store import server, statements
from eventpub.store.connection import (
    Connection,
    connect_arguments,
    connect_for_reading,
    is_mariadb,
    run,
    run_named,
)
from eventpub.store.events import newest_ids, newest_time
from eventpub.store.failures import error_number
from eventpub.store.identity import IdPart, literal
from eventpub.store.layout import (
    Layout,
    discover,
    mapped_columns,
    quote,
    read_columns,
    read_indexes,
)
from eventpub.store.schema import additions
from eventpub.words import counted

_ACCESS_DENIED = 1227
_CLOCK_TOLERANCE = 60_000_000
_HOST_BEHIND = 600
"""Seconds; see `eventpub.sink.batch.AHEAD_OF_CLOCK`."""
_FEW_ROWS = 1_000
_NEWEST = 100_000
"""Rows of which it is said how many have no identity."""
_LONG_AGO = 300_000_000
_SAMPLES = 4
_BETWEEN_SAMPLES = 0.4
_MONTH = 30 * 86_400_000_000


@dataclass(frozen=True)
class Plan:
    """How the server would execute one part of a statement, in the words of EXPLAIN."""

    access: str
    index: str | None
    rows: int
    extra: str

    @property
    def is_index_range(self) -> bool:
        """Whether it reads only the wanted part of an index, in the index's order."""
        return self.access in {"range", "ref", "const", "eq_ref"} and "filesort" not in self.extra


_SOME_AGGREGATES = 1_000
"""Whose lowest versions are looked at."""


def checks(config: Store, former_server: str | None = None) -> list[Check]:
    """Looks at everything that the publisher needs of the store.

    Args:
        former_server: identity of the server that was read last; None: not known.

    Raises:
        ConfigError: `store.url` or the password file cannot be used.
    """
    try:
        connection = connect_for_reading(config)
    except StoreError as error:
        return [_wrong("event store: connection", error)]
    try:
        return list(_examine(config, connection, former_server))
    except StoreError as error:
        return [_wrong("event store", error)]
    finally:
        connection.close()


def explain(connection: Connection, sql: str) -> list[Plan]:
    """The server's plan of a statement."""
    form = "" if is_mariadb(connection) else "FORMAT=TRADITIONAL "
    return [
        Plan(row["type"] or "", row["key"], int(row["rows"] or 0), row["extra"] or "")
        for row in run_named(connection, f"EXPLAIN {form}{sql}")
    ]


def _examine(config: Store, connection: Connection, former_server: str | None) -> Iterator[Check]:
    arguments = connect_arguments(config)
    version = run(connection, "SELECT VERSION()")[0][0]
    yield Check("event store: connection", "ok", f"{version}, as {arguments['user']}")
    yield _server(config, connection, arguments["user"], former_server)
    try:
        layout = discover(config, connection)
    except StoreError as error:
        yield _wrong("event store: table", error)
        return
    yield Check("event store: table", "ok", f"{config.table}: columns, types and indexes as needed")
    yield _slices(config, connection, layout)
    yield _plans(connection, layout)
    yield _identity(connection, layout)
    yield _nulls(config, connection, layout)
    yield _first_versions(config, connection, layout)
    yield _create_time(config, connection)
    yield _open_transactions(config, arguments["user"], connection)
    yield from _clocks(config, connection, layout)


def _server(config: Store, connection: Connection, user: str, former_server: str | None) -> Check:
    name = "event store: server"
    found = server.examine(config, connection)
    said = f"{found.identity} {found.what_it_is}"
    try:
        found.require_primary(config)
    except StoreError as error:
        return _wrong(name, error)
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
            f"GRANT {grant} ON *.* TO {user!r}@'…'",
        )
    return Check(name, "ok", f"{said}, no replica")


def _slices(config: Store, connection: Connection, layout: Layout) -> Check:
    name = "event store: slice column"
    columns = read_columns(config, connection)
    parts, names = mapped_columns(config, columns, config.table)
    added = additions(columns, read_indexes(config, connection), parts, names)
    if not added and layout.slice:
        return Check(name, "ok", "each shard reads its own rows from the index")
    if not added:
        said = "none, since only a key of one text column can have one: shards read all rows"
        return Check(name, "ok", said)
    return Check(
        name,
        "ok",
        "none: works, but each shard reads the other shards' rows too. Adding it copies the table "
        "and holds up its writers meanwhile",
        f"eventpub migrate, or: ALTER TABLE {quote(config.table)} {', '.join(added)}",
    )


def _plans(connection: Connection, layout: Layout) -> Check:
    name = "event store: query plans"
    now = int(run(connection, statements.NOW)[0][0])
    recent = statements.local_range(layout, now - 60_000_000, now) or (now, now)
    everything = statements.local_range(layout, 0, now) or (now, now)
    by_key = statements.lower_versions(layout, [(layout.identity.of_nothing, 2)], 1)
    for what, sql, index in (
        ("a window", statements.window(layout, *recent, None), layout.time_index),
        ("a page", statements.nth_time(layout, *everything, 1_000), layout.time_index),
        ("an event by key", by_key, layout.key_index),
    ):
        for plan in explain(connection, sql):
            if plan.rows < _FEW_ROWS:  # a small table may be read in any way
                continue
            if not plan.is_index_range or quote(plan.index or "") != index:
                return Check(
                    name,
                    "warn",
                    f"{what} is read by {plan.access} over {plan.index}: {plan.extra}",
                    f"ANALYZE TABLE {layout.table}",
                )
    return Check(name, "ok", "windows, pages and lookups by key are index range scans")


def _identity(connection: Connection, layout: Layout) -> Check:
    name = "event store: identity of aggregates"
    parts = layout.identity.parts
    collations = ", ".join(dict.fromkeys(part.collation for part in parts))
    fine = Check(name, "ok", f"by bytes ({collations}), versions unique")
    if not layout.key_is_unique:
        key = ", ".join([*layout.identity.names, layout.version])
        return Check(
            name,
            "warn",
            "the table allows one version of an aggregate twice; a second row that differs becomes"
            " a dead letter",
            f"ALTER TABLE {layout.table} ADD UNIQUE INDEX ({key})",
        )
    for part in parts:
        equal = [] if part.is_bytewise else _taken_for_equal(connection, part)
        if part.is_bytewise or (not equal and part.collation.endswith("_bin")):
            continue
        *others, last = [what for what, _ in equal] or ["characters that it ignores"]
        differences = f"{', '.join(others)} or {last}" if others else last
        other = next((repr(id_) for _, id_ in equal), None)
        column = part.name.strip("`")
        refused = f"{column} 'a' beside {other}" if other else f"the second {column} of the two"
        return Check(
            name,
            "warn",
            f"collation {part.collation} takes ids for equal that differ only in {differences}, "
            f"so the database refuses {refused}; "
            "eventpub publishes each row under its exact bytes, as an aggregate of its own",
            "give the column the collation utf8mb4_0900_bin (MariaDB: utf8mb4_nopad_bin), or let "
            "writers use one spelling",
        )
    return fine


_SPELLINGS = (("case", "A"), ("accents", "á"), ("trailing blanks", "a "))
"""What else an id may look like that some collation takes for `a`."""


def _taken_for_equal(connection: Connection, part: IdPart) -> list[tuple[str, str]]:
    """Those of `_SPELLINGS` that the column's collation takes for `a`, as the server says."""

    def as_stored(text: str) -> str:
        return f"CONVERT({literal(text)} USING {part.charset})"

    first = f"{as_stored('a')} COLLATE {part.collation}"
    compared = ", ".join(f"{first} = {as_stored(spelling)}" for _, spelling in _SPELLINGS)
    answers = run(connection, f"SELECT {compared}")[0]
    return [entry for entry, is_equal in zip(_SPELLINGS, answers, strict=True) if is_equal]


def _nulls(config: Store, connection: Connection, layout: Layout) -> Check:
    name = "event store: rows without identity or time"
    columns = read_columns(config, connection)
    parts, names = mapped_columns(config, columns, config.table)
    needed = [*parts, names["version"], names["create_time"]]
    allowed = [column for column in needed if columns[column].nullable]
    never_read = int(run(connection, statements.without_time(layout, _FEW_ROWS))[0][0])
    if never_read:
        said = counted(never_read, "row has", "rows have")
        if never_read == _FEW_ROWS:
            said = f"{never_read} or more rows have"
        return Check(
            name,
            "warn",
            f"{said} no create_time, a zero date, or one before 1970: never published; and the"
            " publisher stops where a later version of the same aggregate follows one without a"
            " time",
            f"give {names['create_time']} of these rows a time of now, and make it NOT NULL",
        )
    if not allowed:
        return Check(name, "ok", "none")
    nameless = int(run(connection, statements.without_identity(layout, _NEWEST))[0][0])
    said = f"{counted(nameless, 'row')} of the newest {_NEWEST:,} without aggregate_id or version"
    if layout.skips_nulls:
        return Check(name, "ok", f"{said}; store.without_identity passes them over")
    changes = ", ".join(
        f"MODIFY {quote(column)} {columns[column].full_type} NOT NULL" for column in allowed
    )
    return Check(
        name,
        "warn",
        f"{', '.join(allowed)} may be NULL: a row without create_time is never "
        f"published, one without aggregate_id or version stops the publisher ({said})",
        'where such rows are none of an aggregate\'s events: store.without_identity = "skip"; else'
        f" ALTER TABLE {layout.table} {changes} (keep the column's other attributes)",
    )


def _first_versions(config: Store, connection: Connection, layout: Layout) -> Check:
    name = "event store: first versions"
    first = config.first_version
    found = run(connection, statements.lowest_versions(layout, _SOME_AGGREGATES, first))
    aggregates, above = (int(number) for number in found[0])
    if above * 2 <= aggregates:
        return Check(name, "ok", f"aggregates begin with version {first}")
    return Check(
        name,
        "warn",
        f"{above} of {aggregates} aggregates begin above version {first}: each waits for what lies "
        "below until its gap is skipped (gaps.max_backoff), unless that is before read.start",
        "set store.first_version to what they begin with; where the first events were archived, "
        "set read.start to a time after that",
    )


def _create_time(config: Store, connection: Connection) -> Check:
    name = "event store: create_time"
    columns = read_columns(config, connection)
    column = columns[mapped_columns(config, columns, config.table)[1]["create_time"]]
    if "on update" in column.extra:
        return Check(
            name,
            "warn",
            "ON UPDATE CURRENT_TIMESTAMP: an updated row is read again at its new time",
            f"ALTER TABLE {quote(config.table)} MODIFY {quote(column.name)} {column.full_type} "
            f"NOT NULL DEFAULT CURRENT_TIMESTAMP({column.precision})",
        )
    if not column.default.startswith("current_timestamp"):
        return Check(
            name,
            "warn",
            "not set by the database: an event whose writer's clock is behind by more than "
            "read.delay is found late, by a gap or a recount",
            f"ALTER TABLE {quote(config.table)} MODIFY {quote(column.name)} {column.full_type} "
            f"NOT NULL DEFAULT CURRENT_TIMESTAMP({column.precision})",
        )
    return Check(name, "ok", f"{column.full_type}, set by the database")


def _open_transactions(config: Store, user: str, connection: Connection) -> Check:
    name = "event store: open transactions"
    [(engine,)] = run(
        connection,
        "SELECT engine FROM information_schema.tables"  # noqa: S608 (as `literal` has it)
        f" WHERE table_schema = DATABASE() AND table_name = {literal(config.table)}",
    )
    if str(engine).lower() != "innodb":
        return Check(
            name,
            "warn",
            f"those of {engine} show to no account: a missing version may be skipped while the "
            "transaction that writes it is still open, and what is committed later than "
            "recount.horizon after it was created may be lost",
            f"ALTER TABLE {quote(config.table)} ENGINE = InnoDB",
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
            f"GRANT PROCESS ON *.* TO {user!r}@'…'",
        )
    return Check(name, "ok", "visible to this account")


def _clocks(config: Store, connection: Connection, layout: Layout) -> Iterator[Check]:
    before = time.time()
    now = int(run(connection, statements.NOW)[0][0])
    ahead = now / 1e6 - (before + time.time()) / 2
    way = "ahead of" if ahead > 0 else "behind"
    said = f"the database's is {abs(ahead):.3f} s {way} this machine's"
    if ahead > _HOST_BEHIND:
        yield Check(
            "event store: clock",
            "warn",
            f"{said}; records get timestamps of at most {_HOST_BEHIND // 60} minutes after this "
            "machine's time, so that Kafka's retention by time removes them too early",
            "set this machine's clock",
        )
    else:
        yield Check("event store: clock", "ok", f"{said}; only the database's is used")
    name = "event store: time zone"
    zone = layout.zone
    said = "TIMESTAMP, so no time zone matters"
    if zone:
        hours, minutes = divmod(abs(zone.local(now) - now) // 60_000_000, 60)
        sign = "-" if zone.local(now) < now else "+"
        said = f"DATETIME in {zone.name}, now UTC{sign}{hours:02d}:{minutes:02d}"
        if zone.backward_changes(now, now + 12 * _MONTH):
            said += "; in the hour that is repeated each year times may be off by that hour"
    newest = newest_time(layout, connection)
    if newest is not None:
        future = newest - now
        if future > _CLOCK_TOLERANCE:
            yield Check(
                name,
                "warn",
                f"{said}; but the newest event has a create_time in the future, "
                f"{format_time(newest)}: it is published then, or earlier if a later version of "
                "its aggregate points to it",
                "set store.time_zone to the zone that the writers' sessions use",
                "store.rows_in_future",
            )
            return
        said += f"; the newest event was created {max(0, -future) / 1e6:.0f} s ago"
    if zone is None:
        yield Check(name, "ok", said)
        return
    if layout.id_index is None:
        yield Check(
            name,
            "warn",
            f"{said}; rows inserted with an old create_time are not noticed, since the table has no"
            " indexed column of ascending numbers",
            f"name such a column in store.columns.id and let this account SELECT it; to add one:"
            f" ALTER TABLE {layout.table} ADD COLUMN seq BIGINT NOT NULL AUTO_INCREMENT UNIQUE",
        )
        return
    yield _past(name, said, connection, layout)


def _past(name: str, said: str, connection: Connection, layout: Layout) -> Check:
    """Whether rows that are inserted meanwhile say that they were created long ago."""
    highest = max((row.id for row in newest_ids(layout, connection, 1)), default=0)
    past, worst = 0, 0
    for _ in range(_SAMPLES):
        time.sleep(_BETWEEN_SAMPLES)
        now = int(run(connection, statements.NOW)[0][0])
        new = [r for r in newest_ids(layout, connection, _FEW_ROWS) if r.id > highest]
        ages = [now - row.created for row in new if now - row.created > _LONG_AGO]
        past += bool(ages)
        worst = max(worst, *ages, 0)
        highest = max([highest, *(row.id for row in new)])
    if not past:
        return Check(name, "ok", said)
    return Check(
        name,
        "wrong" if past > 2 else "warn",
        f"{said}; rows that are inserted now say that they were created up to"
        f" {worst / 1e6:.0f} s ago, where the publisher has read already",
        "set store.time_zone to the zone that the writers' sessions use, or have them SET time_zone"
        " to that one",
        "store.rows_in_past",
    )


def _wrong(name: str, error: EventpubError) -> Check:
    message = error.message if error.where is None else f"{error.message} ({error.where})"
    return Check(name, "wrong", message, error.suggestion, error.code)
