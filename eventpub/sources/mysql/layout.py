"""How the event table is read, and what it lacks to be published.

The layout is discovered once and passed to every task as a plain value. Suggested ALTER statements
fit the actual table: no unique key over duplicate rows or without a partitioning column, no index
that is too long, no name that is taken.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

import numpy as np

from eventpub.config import Store
from eventpub.errors import StoreError
from eventpub.sources.mysql.table import (
    BESIDE_ID,
    INTEGERS,
    OF_KEY,
    SLICES,
    TIMES,
    Column,
    EventTable,
    Roles,
    TableIndex,
    free_name,
    is_view,
    listed,
    plain,
    quote,
)
from eventpub.sources.mysql.values import UTC, Identity, Zone, is_utc, zone_of

TIME = "TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6)"
NOW = re.compile(r"current_timestamp|utc_timestamp|sysdate|localtime|\bnow\b")
"""In a column default: the database sets it to the time of the statement."""
_PREFIX = 191
"""Characters of a longer text that fit into any index."""
_OPTIONAL = {("id", "id"), ("metadata", "metadata")}


@dataclass(frozen=True)
class Layout:
    """The event table as discovered. Names are quoted identifiers.

    Args:
        id: an indexed column of ascending numbers.
        key_index: begins with the identity's columns and `version`, in any order: `key_columns`.
        key_is_unique: the table refuses a second row of one version.
        unit: precision of `create_time`, µs.
        zone: of the local time in a DATETIME; None for a TIMESTAMP.
        slice: a generated column with ``CRC32(aggregate_id) % 1024``.
        id_is_nullable: a column of the identity may hold NULL.
        skips_nulls: rows without an identity or a version are passed over.
        times_last: an updated row keeps its `create_time`.
        columns: all of the table.
    """

    table: str
    id: str | None
    identity: Identity
    version: str
    event_type: str
    payload: str
    metadata: str | None
    create_time: str
    time_index: str
    key_index: str
    key_columns: tuple[str, ...]
    key_is_unique: bool
    unit: int
    zone: Zone | None
    slice: str | None
    id_is_nullable: bool
    where: str
    times_last: bool = True
    id_index: str | None = None
    skips_nulls: bool = False
    columns: tuple[str, ...] = field(default=(), compare=False)

    @property
    def by_time(self) -> str:
        return f"{self.table} FORCE INDEX ({self.time_index})"

    @property
    def by_key(self) -> str:
        return f"{self.table} FORCE INDEX ({self.key_index})"

    @property
    def by_id(self) -> str:
        return f"{self.table} FORCE INDEX ({self.id_index})"

    @property
    def read_as(self) -> str:
        """A fingerprint of how `create_time` is read; the rules of the zone SYSTEM may change."""
        zone, unit = self.zone, f"{self.unit}{'' if self.times_last else '/moves'}"
        if zone is None:
            return f"{self.create_time}/UTC/{unit}"
        rules = zlib.crc32(repr((zone.changes, zone.offsets)).encode())
        return f"{self.create_time}/{zone.name}/{rules:08x}/{unit}"

    @property
    def ids_as(self) -> str:
        """How each column of the identity is read: in another form it may give other keys."""
        return " and ".join(
            f"{'UUID' if part.kind.endswith('uuid') else 'text'} of {part.name}"
            for part in self.identity.parts
        )

    @property
    def sampled_by(self) -> str:
        return self.id or self.create_time

    @property
    def clock(self) -> Zone:
        return self.zone or UTC

    def instant(self, local: int, after: int | None = None, upto: int | None = None) -> int:
        return int(self.clock.utc(np.array([local]), after, upto)[0])


def is_set_once(column: Column) -> bool:
    """Whether the database sets it to the time of the insert, as far as writers leave it out."""
    return bool(NOW.search(column.default)) and "on update" not in column.extra


def layout_of(config: Store, table: EventTable) -> Layout:
    """The layout of the configured table; StoreError if it cannot be published."""
    roles = roles_of(config, table)
    time_index, key_index = _find_indexes(table, roles)
    names, columns = roles.names, table.columns
    id, id_index = _number(table, names.get("id"), roles.key)
    create_time = columns[names["create_time"]]
    is_local = create_time.type != "timestamp"
    slice_column = table.slice_of(roles.parts)
    may_be_nameless = any(columns[name].nullable for name in roles.key)
    quoted = {role: quote(name) for role, name in names.items()}
    return Layout(
        table=table.name,
        id=id,
        identity=table.identity(roles.parts),
        version=quoted["version"],
        event_type=quoted["event_type"],
        payload=quoted["payload"],
        metadata=quoted.get("metadata"),
        create_time=quoted["create_time"],
        time_index=quote(time_index.name),
        key_index=quote(key_index.name),
        key_columns=tuple(quote(name) for name in key_index.columns[: len(roles.key)]),
        key_is_unique=table.is_unique(roles.key),
        unit=int(10 ** (6 - create_time.precision)),
        zone=zone_of(config, table.connection, create_time.default) if is_local else None,
        slice=quote(slice_column) if slice_column else None,
        id_is_nullable=any(columns[part].nullable for part in roles.parts),
        where=table.where,
        times_last="on update" not in create_time.extra,
        id_index=id_index,
        skips_nulls=config.without_identity == "skip" and may_be_nameless,
        columns=tuple(map(quote, columns)),
    )


def _number(
    table: EventTable, named: str | None, key: Collection[str]
) -> tuple[str | None, str | None]:
    """A column that grows with each insert, and its index; none of the event's `key`."""
    firsts = {index.columns[0]: index.name for index in reversed(table.indexes)}
    columns = [c for c in table.columns.values() if c.name in firsts and c.name not in key]
    numbers = [c for c in columns if c.type in INTEGERS and not c.nullable]
    found = [c.name for c in numbers if c.name == named]
    found = found or [c.name for c in numbers if c.counts_rows]
    return (quote(found[0]), quote(firsts[found[0]])) if found else (None, None)


def roles_of(config: Store, table: EventTable) -> Roles:
    if table.is_view:
        raise is_view(table.name.strip("`"), table.where)
    own = {name.lower(): name for name in table.columns}
    named = config.columns.model_dump()
    parts = tuple(own.get(name.lower(), name) for name in named.pop("aggregate_id"))
    roles = Roles(parts, {of: own.get(name.lower(), name) for of, name in named.items() if name})
    absent = {name: of for of, name in roles.names.items() if name not in table.columns}
    lacks = [("aggregate_id", part) for part in parts if part not in table.columns]
    lacks += [(of, name) for name, of in absent.items() if (of, name) not in _OPTIONAL]
    if lacks:
        names = ", ".join(repr(name) for _, name in lacks)
        raise StoreError(
            "store.column_missing",
            f"the event table lacks {names}; it has {', '.join(table.columns)}",
            where=table.where,
            suggestion=suggestion(table, roles)
            or f'name the right one in [store.columns]: {lacks[0][0]} = "…"; if the table has '
            "it, this account may not read it: GRANT SELECT",
        )
    for key, name, allowed in (
        *(("aggregate_id", part, OF_KEY) for part in parts),
        ("version", roles.names["version"], INTEGERS),
        ("create_time", roles.names["create_time"], TIMES),
    ):
        if not table.columns[name].is_one_of(allowed):
            other = f"`{name}_text` VARCHAR(255) AS (HEX(`{name}`)) STORED"
            or_else = {"aggregate_id": f", such as {other}", "version": ", or make this one BIGINT"}
            raise StoreError(
                "store.column_type",
                f"column {name!r} is {table.columns[name].full_type}; as {key} it must be one of "
                + ", ".join(sorted(allowed)),
                where=table.where,
                suggestion=suggestion(table, roles)
                or f'map another column in [store.columns]: {key} = "…"{or_else[key]}',
            )
    return Roles(parts, {of: name for of, name in roles.names.items() if name not in absent})


def _find_indexes(table: EventTable, roles: Roles) -> tuple[TableIndex, TableIndex]:
    key, create_time, version = roles.key, roles.names["create_time"], roles.names["version"]
    slice_column = table.slice_of(roles.parts)
    by_time = [index for index in table.indexes if index.columns[0] == create_time]
    by_time.sort(key=lambda i: (i.columns[1:2] != (slice_column,), len(i.columns), i.name))
    by_key = [index for index in table.indexes if {*index.columns[: len(key)]} == {*key}]
    # the more identity columns precede the version, the less of the index a range reads
    by_key.sort(key=lambda i: (-i.columns.index(version), not i.unique, len(i.columns), i.name))
    for found, wanted in ((by_time, (create_time,)), (by_key, key)):
        if not found:
            raise StoreError(
                "store.index_missing",
                f"the event table has no index that begins with ({', '.join(wanted)})",
                where=table.where,
                suggestion=suggestion(table, roles)
                or f"ALTER TABLE {table.name} ADD INDEX ({listed(wanted)})",
            )
    return by_time[0], by_key[0]


def suggestion(table: EventTable, roles: Roles) -> str | None:
    """The statement that adds missing columns and indexes; None if none can."""
    if (wider := identity(table, roles)) != roles.parts:
        return set_identity(wider)
    columns, names, addable = table.columns, {**roles.names}, {*table.framework.add}
    types = [(name, OF_KEY) for name in roles.parts] + [(names["version"], INTEGERS)]
    if any(name in columns and not columns[name].is_one_of(of) for name, of in types):
        return None
    time, also = names["create_time"], ""
    if time not in columns and get_close_matches(time, columns, 1, 0.85):
        return None  # a misspelt name
    if time in columns and columns[time].type not in TIMES:
        names["create_time"] = time = free_name("create_time", columns)
        also = f', and set create_time = "{time}" in [store.columns]'
    required = {*roles.parts, *(name for of, name in names.items() if of not in {"id", "metadata"})}
    if not required - addable - {time} <= {*columns}:
        return None
    changes = additions(table, Roles(roles.parts, names))
    return table.alter(changes) + also if changes else None


def additions(table: EventTable, roles: Roles, *, with_slice: bool = False) -> list[str]:
    """The clauses of the ALTER TABLE that makes the table publishable.

    `roles` may name columns that only the statement adds.
    """
    create_time, key = roles.names["create_time"], roles.key
    wanted, by_time = {*roles.parts, *roles.names.values()}, [create_time]
    new = {**table.framework.add, create_time: TIME}
    new = {name: of for name, of in new.items() if name in wanted and name not in table.columns}
    if with_slice and (of := table.identity(roles.parts)).is_text:
        found = table.slice_of(roles.parts)
        by_time.append(found or free_name("slice", table.columns))
        if found is None:
            text, name = of.utf8, of.parts[0].name
            if table.columns[roles.parts[0]].type == "char":  # or MariaDB refuses it
                text = text.replace(name, f"RTRIM({name})")
            new = {by_time[1]: slice_type(text)} | new
    # invisible, so that a writer's INSERT without a column list still fits
    added = [f"ADD COLUMN {quote(name)} {definition} INVISIBLE" for name, definition in new.items()]
    has_index = any({*index.columns[: len(key)]} == {*key} for index in table.indexes)
    if not (has_index and table.is_unique(key)):
        index, why_not_unique = key_index(table, key)
        added += [index] * (not (has_index and why_not_unique))
    if not any([*index.columns[: len(by_time)]] == by_time for index in table.indexes):
        added.append(f"ADD INDEX ({listed(by_time)})")
    return added


def slice_type(aggregate_id: str) -> str:
    return f"SMALLINT UNSIGNED GENERATED ALWAYS AS (CRC32({aggregate_id}) % {SLICES}) STORED"


def add_number(table: EventTable) -> str:
    name = quote(free_name("seq", table.columns))
    column = f"ADD COLUMN {name} BIGINT NOT NULL AUTO_INCREMENT INVISIBLE"
    return table.alter([column, f"ADD INDEX ({name})"])


def key_index(table: EventTable, key: Sequence[str]) -> tuple[str, str]:
    """The clause that adds an index for lookups, and why it is not unique ("": it is)."""
    columns = listed(key)
    if (longest := sum(map(table.octets, key))) > table.longest_key:
        columns = ", ".join(
            quote(name) + f"({_PREFIX})" * (table.octets(name) > 4 * _PREFIX) for name in key
        )
        why = f"it would have up to {longest:,} bytes, and may have {table.longest_key:,}"
    elif others := [n for n in table.partitioned_by if n not in key]:
        why = f"it would leave out {', '.join(others)}, by which the table is partitioned"
    elif twice := table.repeated(key):
        why = f"{twice} is there twice"
    elif not (why := table.merged(key)):
        return f"ADD UNIQUE INDEX ({columns})", ""
    return f"ADD INDEX ({columns})", why


def identity(table: EventTable, roles: Roles) -> tuple[str, ...]:
    """The identity's columns, extended where rows with one id and version belong to several."""
    parts, key = roles.parts, roles.key
    others = beside(table, key)
    if others and all(table.columns[name].is_one_of(OF_KEY) for name in others):
        return (*others, *parts)
    for name in [c for n in BESIDE_ID for c in table.columns if plain(c) == n and c not in parts]:
        if table.repeated(key) and not table.repeated((name, *key)):
            return (name, *parts)
    return tuple(parts)


def beside(table: EventTable, key: Sequence[str]) -> list[str]:
    """The columns by which a unique key distinguishes rows of one identity and version."""

    def is_identity(name: str, of: Sequence[str]) -> bool:
        column, is_behind = table.columns[name], of.index(name) > of.index(key[-1])
        is_other = column.type in {*TIMES, "date"} or name in table.partitioned_by
        is_other |= table.is_unique((name,)) or (is_behind and column.type in INTEGERS)
        return name not in key and not is_other

    keys = [i.columns for i in table.indexes if i.unique and {*key} < {*i.columns}]
    wider = [[n for n in of if is_identity(n, of)] for of in keys if {*of} <= {*table.columns}]
    return [] if table.is_unique(key) else min(wider, key=len, default=[])


def set_identity(parts: Sequence[str]) -> str:
    columns = json.dumps(parts, ensure_ascii=False)
    return (
        f"set aggregate_id = {columns} in [store.columns]; if events have been published, also"
        " another app.id, app.state_dir and sink.topic"
    )


def not_null(table: EventTable, columns: Sequence[str]) -> str:
    """The statement that makes columns NOT NULL and changes nothing else, except that the database
    sets a time once, on insert, where no writer does.
    """
    changes = []
    for column in (table.columns[name] for name in columns):
        body, default = column.full_type, ""
        is_computed = NOW.search(column.default) and NOW.sub("", column.default).strip("()0123456")
        if is_utc(column.default):
            default = f"({column.default})"
        elif column.type in TIMES and not is_computed:
            default = f"CURRENT_TIMESTAMP({column.precision or ''})"
        elif column.default not in {"", "null"}:
            return f"make {', '.join(columns)} NOT NULL (ALTER TABLE … MODIFY)"
        if column.charset:
            body += f" CHARACTER SET {column.charset} COLLATE {column.collation}"
        body += " NOT NULL" + f" DEFAULT {default}" * bool(default)
        if column.comment:
            body += " COMMENT '" + column.comment.replace("\\", "\\\\").replace("'", "''") + "'"
        changes.append(f"MODIFY {quote(column.name)} {body}")
    return table.alter(changes)
