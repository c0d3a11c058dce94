"""Which tables of a database may be event tables, and which of their columns stands for what.

Found by names, types, unique keys and what is known of frameworks: a proposal for a person to look
at. Some rows are read, to see with which version aggregates begin, whether versions are counted by
aggregate at all, and whether what is called metadata is JSON.
"""

# ruff: noqa: S608 (nothing in here comes from outside but through `quote`)

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from eventpub.config import Store
from eventpub.errors import StoreError
from eventpub.store import fixes
from eventpub.store.connection import Connection, connect_for_reading, display_name, is_mariadb, run
from eventpub.store.failures import mapped
from eventpub.store.fixes import Table
from eventpub.store.frameworks import BESIDE_ID, NAMES, Framework, holds_no_events, plain, recognise
from eventpub.store.layout import BYTES, INTEGERS, TEXT, Column, quote, read_columns
from eventpub.store.versions import Versions, versions_of

_MOST_TABLES = 1000
_SAMPLE = 5_000
_FEW = 20

_TYPES: dict[str, set[str]] = {
    "aggregate_id": TEXT | INTEGERS | {"varbinary", "binary(16)"},
    "version": INTEGERS,
    "event_type": TEXT,
    "payload": TEXT | BYTES | {"json"},
    "metadata": TEXT | BYTES | {"json"},
    "create_time": {"timestamp", "datetime"},
    "id": INTEGERS,
}
_LARGE = {"json", "mediumtext", "longtext", "text", "mediumblob", "longblob", "blob"}
_REQUIRED = ("aggregate_id", "version", "event_type", "payload", "create_time")


@dataclass(frozen=True)
class Candidate:
    """A table that may be an event table.

    Attributes:
        table: its name.
        columns: by our names its own; `id` and `metadata` only where it has any.
        score: how much speaks for it: rows, then names and keys.
        names: of all its columns.
        framework: whose table it is; "": that is not known.
        first_version: with which aggregates begin.
        without_identity: what `store.without_identity` should be.
        statements: what is to be done to the table first.
        notes: what is to be known of it, a sentence each.
    """

    table: str
    columns: Mapping[str, str | tuple[str, ...]]
    score: tuple[bool, int]
    names: frozenset[str]
    framework: str
    first_version: int
    without_identity: str
    statements: list[str]
    notes: list[str]


@dataclass(frozen=True)
class Proposal:
    """What was found in a database.

    Attributes:
        database: its name.
        is_mariadb: which server it is.
        candidates: the likeliest first.
        lacking: by name of each other table, which of our columns it has none for.
        refused: by name of a table that looks like one, why it cannot be published.
        views: those that look like one.
    """

    database: str
    is_mariadb: bool
    candidates: list[Candidate]
    lacking: dict[str, tuple[str, ...]]
    refused: dict[str, str]
    views: list[str]


@dataclass
class Roles:
    """Which column stands for what.

    Attributes:
        parts: the columns of the identity.
        names: by our names the other columns; "": there is none.
        by_key: whether an index says which the identity and the version are.
    """

    parts: tuple[str, ...]
    names: dict[str, str]
    by_key: bool = False

    @property
    def lacking(self) -> tuple[str, ...]:
        """Our names of the columns that were not found and must be there."""
        there = {role for role, name in self.names.items() if name}
        there |= {"aggregate_id"} if self.parts else set()
        return tuple(role for role in _REQUIRED if role not in there)

    @property
    def taken(self) -> set[str]:
        """The columns that stand for something."""
        return {*self.parts, *self.names.values()}


def propose(
    config: Store, table: str | None = None, columns: Mapping[str, Any] | None = None
) -> Proposal:
    """Look at the tables of the database.

    Args:
        config: which says how to connect; its table and columns are of no account.
        table: look at this one alone.
        columns: by our names its own, those that somebody has named.

    Raises:
        StoreError: store.unreachable, store.auth_failed, store.table_missing,
            store.is_view, ….
    """
    with closing(connect_for_reading(config)) as connection, mapped(display_name(config)):
        database = str(run(connection, "SELECT DATABASE()")[0][0])
        found = Proposal(database, is_mariadb(connection), [], {}, {}, [])
        given = columns or {}
        for name, is_view in [(table, False)] if table else _tables(connection):
            of_table = config.model_copy(update={"table": name})
            try:
                if not is_view:
                    _sort(found, name, fixes.read_table(of_table, connection), connection, given)
                elif not _roles(read_columns(of_table, connection), [], given).lacking:
                    found.views.append(name)
            except StoreError:
                if table:
                    raise
                # one that this account may not read
        found.candidates.sort(key=lambda candidate: candidate.table)
        found.candidates.sort(key=lambda candidate: candidate.score, reverse=True)
        return found


def _tables(connection: Connection) -> Iterator[tuple[str, bool]]:
    """Those that may have events, and whether each is a view."""
    rows = run(
        connection,
        "SELECT table_name, table_type FROM information_schema.tables WHERE table_schema ="
        f" DATABASE() AND table_type <> 'SEQUENCE' ORDER BY table_name LIMIT {_MOST_TABLES}",
    )
    for row in rows:
        name, kind = (t.decode() if isinstance(t, bytes) else str(t) for t in row)
        if not holds_no_events(name):
            yield name, kind.endswith("VIEW")


def _sort(
    found: Proposal, name: str, table: Table, connection: Connection, given: Mapping[str, Any]
) -> None:
    """Put a table where it belongs in a proposal."""
    every = {name for value in given.values() for name in _listed(value)}
    framework = recognise(table.columns)
    roles = _roles(table.columns, table.indexes, given)
    absent = [r for r, value in given.items() if not table.columns.keys() >= {*_listed(value)}]
    if every and absent:
        found.lacking[name] = tuple(absent)
    elif framework.refused:
        found.refused[name] = f"{framework.name}: {framework.refused}"
    elif roles.lacking == ("version",) and (number := _of_all_rows(table.columns)):
        found.refused[name] = (
            f"{number} is AUTO_INCREMENT: it numbers the rows of the table, not the events of an"
            " aggregate"
        )
    elif not _is_addable(roles, table, framework):
        found.lacking[name] = roles.lacking
    else:
        versions = _sample(table, connection, roles)
        if versions.count_all_rows:
            found.refused[name] = (
                f"{roles.names['version']} numbers the rows of the table, not the events of an"
                " aggregate: no two aggregates have a number in common"
            )
        else:
            found.candidates.append(_candidate(name, table, connection, roles, versions, given))


def _listed(value: Any) -> list[str]:
    return [value] * bool(value) if isinstance(value, str) else list(value or ())


def _of_all_rows(columns: Mapping[str, Column]) -> str | None:
    """A column that is called like a version, and counts all rows."""
    return next(
        (c.name for c in columns.values() if _counts_rows(c) and _rank("version", c.name)), None
    )


def _counts_rows(column: Column) -> bool:
    return "auto_increment" in column.extra


def _is_addable(roles: Roles, table: Table, framework: Framework) -> bool:
    """Whether all is there but the time, which a column can be added for."""
    if roles.lacking != ("create_time",):
        return not roles.lacking
    times = [c for c in table.columns.values() if _may_be(c, "create_time")]
    return bool(framework.name) or (roles.by_key and not times)


def _roles(
    columns: Mapping[str, Column], indexes: Sequence[Any], given: Mapping[str, Any]
) -> Roles:
    """Which column stands for what, as far as can be told.

    Args:
        given: names of columns that somebody has said; "": there is none.
    """
    framework = recognise(columns)
    own = {plain(name): name for name in [*framework.add, *columns]}
    said: dict[str, Any] = {
        role: [own[name] for name in _listed(names)] for role, names in framework.columns.items()
    } | {role: _listed(names) for role, names in given.items()}
    parts = tuple(said.pop("aggregate_id", ()))
    roles = Roles(parts, {role: names[0] if names else "" for role, names in said.items()})
    if key := _key(columns, indexes, roles):
        roles.parts, roles.names["version"], roles.by_key = *key, True
    firsts = {index.columns[0] for index in indexes}
    # what is taken is taken: the surest first
    for role in ("aggregate_id", "version", "create_time", "payload", "metadata", "event_type"):
        if role in roles.names or (role == "aggregate_id" and roles.parts):
            continue
        left = {n: c for n, c in columns.items() if n not in roles.taken}
        found = _best(role, left, firsts) or next((n for n in framework.add if n == role), None)
        if found is None and roles.by_key:
            found = _only_one(role, left)
        if found and role == "aggregate_id":
            roles.parts = (found,)
        elif found:
            roles.names[role] = found
    if "id" not in roles.names:
        left = {n: c for n, c in columns.items() if n in firsts - roles.taken}
        counting = next((c.name for c in left.values() if _counts_rows(c)), None)
        roles.names["id"] = counting or _best("id", left, firsts) or ""
    return roles


def _rank(role: str, name: str) -> int:
    """How well a name fits; 0: it is none that such columns have."""
    known, name = NAMES[role], plain(name)
    return len(known) - known.index(name) if name in known else 0


def _may_be(column: Column, role: str) -> bool:
    """Whether a column's type is one for that."""
    if role == "version" and _counts_rows(column):
        return False
    if role == "create_time" and column.generated_as:
        return False
    return bool({column.type, column.full_type} & _TYPES[role])


def _best(role: str, columns: Mapping[str, Column], indexed: set[str]) -> str | None:
    """The column that fits best. A time may have any name, if it is the only one."""
    fitting = [c for c in columns.values() if _may_be(c, role)]
    if named := [c for c in fitting if _rank(role, c.name)]:
        return max(named, key=lambda c: (_rank(role, c.name), c.name in indexed)).name
    if role == "create_time":
        always = [c for c in fitting if not c.nullable]
        defaults = [c for c in always if "current_timestamp" in c.default] or always
        return defaults[0].name if len(defaults) == 1 else None
    return None


def _only_one(role: str, columns: Mapping[str, Column]) -> str | None:
    """The column that is left, whatever its name, if there is just one for it."""
    types = {"event_type": {"varchar", "char"}, "payload": _LARGE}.get(role, set())
    left = [c.name for c in columns.values() if c.type in types]
    return left[0] if len(left) == 1 else None


def _key(
    columns: Mapping[str, Column], indexes: Sequence[Any], roles: Roles
) -> tuple[tuple[str, ...], str] | None:
    """The identity and the version of an index of just these columns, the best named one."""
    found = []
    for index in indexes:
        there = [columns[name] for name in index.columns if name in columns]
        for version in there:
            parts = tuple(c.name for c in there if c is not version)
            if not parts or len(there) < len(index.columns) or not _may_be(version, "version"):
                continue
            if roles.names.get("version", version.name) != version.name:
                continue
            if roles.parts and {*roles.parts} != {*parts}:
                continue
            named = _rank("version", version.name)
            ids = [_rank("aggregate_id", name) for name in parts]
            is_pair = len(parts) == 1 and columns[parts[0]].type in TEXT | {"varbinary"}
            if not (max(ids) and named) and not (is_pair and index.unique):
                continue
            if all(_fits_key(columns[name]) for name in parts):
                rank = (index.unique, bool(named) and bool(max(ids)), named + max(ids), -len(parts))
                found.append((rank, roles.parts or parts, version.name))
    return max(found)[1:] if found else None


def _fits_key(column: Column) -> bool:
    """Whether a column may be of the identity; of numbers and marks, only those of known names."""
    if column.type in INTEGERS:
        return bool(_rank("aggregate_id", column.name)) or plain(column.name) in BESIDE_ID
    return _may_be(column, "aggregate_id")


def _sample(table: Table, connection: Connection, roles: Roles) -> Versions:
    wanted = [*roles.parts, roles.names["version"]]
    if any(name not in table.columns for name in wanted):
        wanted = ["NULL"] * 2
    listed = ", ".join(name if name == "NULL" else quote(name) for name in wanted)
    return versions_of(run(connection, f"SELECT {listed} FROM {table.name} LIMIT {_SAMPLE}"))


def _candidate(
    name: str,
    table: Table,
    connection: Connection,
    roles: Roles,
    versions: Versions,
    given: Mapping[str, Any],
) -> Candidate:
    framework, names = recognise(table.columns), roles.names
    notes = [framework.note] * bool(framework.note)
    score = sum(_rank(role, of) > 0 for role, of in names.items()) * 2 + 5 * bool(framework.name)
    score += 10 * roles.by_key + 3 * ("event" in name.lower())
    if "create_time" in names:
        created = table.columns[names["create_time"]]
        score += 2 * ("current_timestamp" in created.default)
        score += any(index.columns[0] == created.name for index in table.indexes)
    else:
        names["create_time"] = table.free("create_time", "stored_at")
        notes.append(_why_added(table))
    if "aggregate_id" not in given:
        roles.parts = fixes.identity(table, connection, roles.parts, names["version"])
    key = (*roles.parts, names["version"])
    additions = fixes.needed(table, connection, roles.parts, names)
    if twice := fixes.repeated(table, connection, key):
        notes.append(f"{twice} is there twice: the second row becomes a dead letter if it differs")
    elif not roles.by_key and not fixes.is_unique(table, key):
        notes.append("no unique key says which columns are aggregate and version: look at them")
    metadata = "" if "metadata" in given else names.get("metadata", "")
    if metadata and not _is_metadata(table, connection, metadata):
        notes.append(f"{metadata} is no JSON object, so it is not published")
        names["metadata"] = ""
    without = "skip" if versions.without_identity else framework.without_identity
    first = int(min(versions.lowest) != 0) if versions.lowest else framework.first_version
    return Candidate(
        name,
        {"aggregate_id": roles.parts if len(roles.parts) > 1 else roles.parts[0]}
        | {role: of for role, of in names.items() if of},
        (bool(versions.rows or versions.without_identity), score),
        frozenset(table.columns),
        framework.name,
        first,
        without,
        [table.alter(additions) + ";"] if additions else [],
        notes,
    )


def _why_added(table: Table) -> str:
    """What is wrong with the column that is called like a creation time, if there is one."""
    named = [c for c in table.columns.values() if _rank("create_time", c.name)]
    if not named:
        return "no column has the time at which the database stored a row: one is to be added"
    time = max(named, key=lambda c: _rank("create_time", c.name))
    return (
        f"{time.name} is {time.full_type}, not TIMESTAMP or DATETIME: a column with the time at"
        " which the database stores a row is to be added"
    )


def _is_metadata(table: Table, connection: Connection, column: str) -> bool:
    """Whether a column's values are JSON objects, or may be where there are none yet."""
    quoted = quote(column)
    rows = run(
        connection,
        f"SELECT {quoted} FROM {table.name} WHERE {quoted} IS NOT NULL LIMIT {_FEW}",
    )
    try:
        # PHP writes an empty object as []
        are_objects = [isinstance(json.loads(v), dict) or json.loads(v) == [] for (v,) in rows]
    except ValueError:
        return False
    return all(are_objects) and (bool(rows) or table.columns[column].type not in BYTES)
