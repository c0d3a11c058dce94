"""Proposes which tables may be event tables, and the role of each column, for a person to check.

Uses names, types, unique keys, known frameworks, and a few rows.
"""

# ruff: noqa: S608 (nothing in here comes from outside but through `listed`)

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from eventpub.config import Store
from eventpub.errors import StoreError
from eventpub.sources.mysql.connection import (
    Connection,
    connect_for_reading,
    display_name,
    is_mariadb,
    mapped,
    run,
    run_named,
)
from eventpub.sources.mysql.layout import additions, beside, identity, is_set_once
from eventpub.sources.mysql.table import (
    BESIDE_ID,
    BYTES,
    INTEGERS,
    OF_KEY,
    SAMPLE,
    TEXT,
    TIMES,
    Column,
    EventTable,
    Roles,
    Versions,
    free_name,
    holds_no_events,
    listed,
    plain,
    rank,
    read_table,
)

_MOST_TABLES = 1000
_FEW = 20

_TYPES: dict[str, set[str]] = {
    "aggregate_id": OF_KEY,
    "version": INTEGERS,
    "create_time": TIMES,
    "payload": TEXT | BYTES | {"json"},
    "metadata": TEXT | BYTES | {"json"},
    "event_type": TEXT | {"enum"},
    "id": INTEGERS,
}
"""By role; the surest first, since each column is assigned to the first role that it fits."""
_LARGE = {"json", "mediumtext", "longtext", "text", "mediumblob", "longblob", "blob"}
_NUMBERS_ROWS = "numbers the rows of the table, not the events of an aggregate"
_REQUIRED = ("aggregate_id", "version", "event_type", "payload", "create_time")


@dataclass(frozen=True)
class Candidate:
    """A table that may be an event table; `statements` are to be executed first."""

    table: str
    columns: Mapping[str, str | tuple[str, ...]]
    score: tuple[int, ...]
    names: frozenset[str]
    framework: str
    first_version: int
    without_identity: str
    statements: list[str]
    notes: list[str]

    @property
    def left_out(self) -> list[str]:
        used = {name for of in self.columns.values() for name in _several(of)}
        return sorted(self.names - used)


@dataclass(frozen=True)
class Proposal:
    """The tables of a database; `lacking` and `refused` say why the others are no candidates."""

    database: str
    is_mariadb: bool
    candidates: list[Candidate]
    lacking: dict[str, tuple[str, ...]]
    refused: dict[str, str]
    views: list[str]


@dataclass
class Guess(Roles):
    """The column of each role, or ""; `by_key`: an index shows the identity and the version."""

    given: Collection[str]
    by_key: bool = False

    @property
    def lacking(self) -> tuple[str, ...]:
        there = {"aggregate_id": self.parts, **self.names}
        return tuple(role for role in _REQUIRED if not there.get(role))


def propose(
    config: Store, table: str | None = None, columns: Mapping[str, Any] | None = None
) -> Proposal:
    """Examine the tables of the database, or only `table`; `columns` are named by the operator."""
    with closing(connect_for_reading(config)) as connection, mapped(display_name(config)):
        database = str(run(connection, "SELECT DATABASE()")[0][0])
        found = Proposal(database, is_mariadb(connection), [], {}, {}, [])
        given = columns or {}
        for name in [table] if table else _tables(connection):
            try:
                read = read_table(config.model_copy(update={"table": name}), connection)
                if not read.is_view:
                    _sort(found, name, read, given)
                elif table or not _guess(read, given).lacking:
                    found.views.append(name)
            except StoreError:
                if table:
                    raise
                # not readable by this account
        # stable sort: equals stay in the order of their names
        found.candidates.sort(key=lambda candidate: candidate.score, reverse=True)
        return found


def _tables(connection: Connection) -> list[str]:
    rows = run_named(
        connection,
        "SELECT table_name FROM information_schema.tables WHERE table_schema = DATABASE()"
        f" AND table_type <> 'SEQUENCE' ORDER BY table_name LIMIT {_MOST_TABLES}",
    )
    return [row["table_name"] for row in rows if not holds_no_events(row["table_name"])]


def _sort(found: Proposal, name: str, table: EventTable, given: Mapping[str, Any]) -> None:
    framework = table.framework
    absent = tuple(
        f"{role} (it has no column {column})"
        for role, of in given.items()
        for column in _several(of)
        if column not in table.columns
    )
    if absent:
        found.lacking[name] = absent
        return
    if framework.refused:
        found.refused[name] = f"{framework.name}: {framework.refused}"
        return
    roles = _guess(table, given)
    times = [c for c in table.columns.values() if _may_be(c, "create_time")]
    # where the table clearly has no time, a column can be added
    is_timeless = framework.name or (roles.by_key and not times)
    if roles.lacking and not (roles.lacking == ("create_time",) and is_timeless):
        found.lacking[name] = _lacks(table, roles)
        return
    version = roles.names["version"]
    if "aggregate_id" not in given:
        roles.parts = identity(table, roles)
        if others := beside(table, roles.key):
            found.lacking[name] = (f"aggregate_id (a unique key has {', '.join(others)}, too)",)
            return
    key = listed(roles.key) if {*roles.key} <= {*table.columns} else "NULL, NULL"
    versions = Versions(run(table.connection, f"SELECT {key} FROM {table.name} LIMIT {SAMPLE}"))
    if version in table.columns and table.columns[version].counts_rows:
        found.refused[name] = f"{version} is AUTO_INCREMENT: it {_NUMBERS_ROWS}"
    elif versions.count_all_rows:
        found.refused[name] = f"{version} {_NUMBERS_ROWS}: no two aggregates have one in common"
    else:
        found.candidates.append(_candidate(name, table, roles, versions))


def _several(value: Any) -> list[str]:
    return [value] if value and isinstance(value, str) else list(value or ())


def _guess(table: EventTable, given: Mapping[str, Any]) -> Guess:
    columns = table.columns
    framework = table.framework
    own = {plain(name): name for name in [*framework.add, *columns]}
    said = {r: [own[name] for name in _several(of)] for r, of in framework.columns.items()}
    said |= {role: _several(of) for role, of in given.items()}
    parts = tuple(said.pop("aggregate_id", ()))
    roles = Guess(parts, {role: (of or [""])[0] for role, of in said.items()}, given)
    if key := _key(table, roles):
        roles.parts, roles.names["version"], roles.by_key = key
    firsts = {index.columns[0] for index in table.indexes}
    for role in _TYPES:
        if role in roles.names or (role == "aggregate_id" and roles.parts):
            continue
        left = {n: c for n, c in columns.items() if n not in {*roles.parts, *roles.names.values()}}
        if role == "id":
            left = {name: column for name, column in left.items() if name in firsts}
        is_added = role in framework.add
        found = _best(role, left, firsts, is_sure=roles.by_key and not is_added)
        found = found or (role if is_added else None)
        if found and role == "aggregate_id":
            roles.parts = (found,)
        elif found:
            roles.names[role] = found
    return roles


def _may_be(column: Column, role: str) -> bool:
    if role == "event_type" and plain(column.name) == "eventtype":
        return True  # any type is read as text
    is_generated_time = role == "create_time" and column.generated_as
    return column.is_one_of(_TYPES[role]) and not is_generated_time


def _lacks(table: EventTable, roles: Guess) -> tuple[str, ...]:
    """The roles without a column, with the type of one that is called so."""
    used, found = {*roles.parts, *roles.names.values()}, []
    for role in roles.lacking:
        types = _TYPES[role]
        others = [c for n, c in table.columns.items() if n not in used and not c.is_one_of(types)]
        best = max(others, key=lambda column: rank(role, column.name), default=None)
        why = f" ({best.name} is {best.full_type}, not {', '.join(sorted(types))})" if best else ""
        found.append(role + why * bool(best and rank(role, best.name)))
    return tuple(found)


def _best(
    role: str, columns: Mapping[str, Column], indexed: set[str], *, is_sure: bool
) -> str | None:
    fitting = [c for c in columns.values() if _may_be(c, role)]
    named = [c for c in fitting if rank(role, c.name) or (role == "id" and c.counts_rows)]
    if named:
        # a unique number per row is an id, not a version
        named.sort(key=lambda c: (rank(role, c.name), c.name in indexed), reverse=True)
        if role == "create_time":  # a writer's own time may be on any clock
            named.sort(key=is_set_once, reverse=True)
        if role == "event_type":
            named.sort(key=lambda c: c.type == "enum" and plain(c.name) != "eventtype")
        return max(named, key=lambda c: c.counts_rows == (role == "id")).name
    if role == "create_time":
        always = [c for c in fitting if not c.nullable]
        left = [c for c in always if is_set_once(c)] or always
    else:
        types = {"event_type": {"varchar", "char"}, "payload": _LARGE}.get(role, set())
        left = [c for c in fitting if is_sure and c.type in types]
    return left[0].name if len(left) == 1 else None


def _key(table: EventTable, roles: Guess) -> tuple[tuple[str, ...], str, bool] | None:
    found, columns = [], table.columns
    for index in table.indexes:
        for version in index.columns:
            parts = tuple(name for name in index.columns if name != version)
            is_given = roles.names.get("version", version) == version
            is_given &= not roles.parts or {*roles.parts} == {*parts}
            if not (parts and is_given and {*index.columns} <= {*columns}):
                continue
            if not _may_be(columns[version], "version") or columns[version].counts_rows:
                continue
            named = rank("version", version), max(rank("aggregate_id", name) for name in parts)
            is_pair = len(parts) == 1 and columns[parts[0]].type in TEXT | {"varbinary"}
            is_clear = all(named) or (is_pair and index.unique)
            # the columns before a trailing version are the identity, whatever their names
            is_last = index.unique and version == index.columns[-1] and named[0] and not named[1]
            if (is_clear or is_last) and all(_fits_key(columns[n], bool(is_last)) for n in parts):
                fit = index.unique, all(named), sum(named), -len(parts)
                found.append((fit, roles.parts or parts, version, is_clear))
    return max(found)[1:] if found else None


def _fits_key(column: Column, is_last: bool) -> bool:
    is_known = rank("aggregate_id", column.name) > 0 or plain(column.name) in BESIDE_ID
    is_clear = is_known or column.type not in INTEGERS or (is_last and not column.counts_rows)
    return is_clear and _may_be(column, "aggregate_id")


def _candidate(name: str, table: EventTable, roles: Guess, versions: Versions) -> Candidate:
    framework, names, lowest = table.framework, roles.names, versions.lowest
    notes = [framework.note] * bool(framework.note)
    if "create_time" not in names:
        names["create_time"] = free_name("create_time", table.columns)
        why = "no column has the time at which the database stores a row"
        time = max(table.columns.values(), key=lambda column: rank("create_time", column.name))
        if rank("create_time", time.name):
            why = f"{time.name} is {time.full_type}, not TIMESTAMP or DATETIME"
        notes.append(f"{why}: a column with that time is to be added")
    if twice := table.repeated(roles.key):
        notes.append(f"{twice} is there twice: the second row becomes a dead letter if it differs")
    elif why := table.merged(roles.key):
        notes.append(f"no unique key is possible: {why}")
    elif not roles.by_key and not table.is_unique(roles.key):
        notes.append("no unique key confirms the columns of aggregate and version: check them")
    metadata = "metadata" not in roles.given and names.get("metadata")
    if metadata and not _is_metadata(table, metadata):
        notes.append(f"{metadata} is not a JSON object, so it is not published")
        names["metadata"] = ""
    added = additions(table, roles)
    return Candidate(
        name,
        {"aggregate_id": roles.parts if len(roles.parts) > 1 else roles.parts[0]}
        | {role: of for role, of in names.items() if of},
        (
            bool(lowest or versions.without_identity),
            bool(framework.name),
            roles.by_key,
            "event" in name.lower(),
            sum(rank(role, of) > 0 for role, of in names.items()),
        ),
        frozenset(table.columns),
        framework.name,
        # aggregates may have lost their first events since, and a stray row is none
        0 if lowest.count(0) > lowest.count(1) or not framework.first_version else 1,
        "skip" if versions.without_identity else framework.without_identity,
        [table.alter(added) + ";"] if added else [],
        notes,
    )


def _is_metadata(table: EventTable, column: str) -> bool:
    name = listed([column])
    sql = f"SELECT {name} FROM {table.name} WHERE {name} IS NOT NULL LIMIT {_FEW}"
    rows = run(table.connection, sql)
    try:
        values = [json.loads(value) for (value,) in rows]
    except ValueError:
        return False
    # PHP writes an empty object as []
    are_objects = all(isinstance(value, dict) or value == [] for value in values)
    return are_objects and (bool(rows) or table.columns[column].type not in BYTES)
