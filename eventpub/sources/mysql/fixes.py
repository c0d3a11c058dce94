"""What a table lacks to be published, and the statements that add it.

Made for that very table, so that the server takes them: no unique key over rows that repeat one,
none that leaves out a column by which the table is partitioned, none longer than an index may be,
no second AUTO_INCREMENT, no name that is taken.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from eventpub.config import Store
from eventpub.sources.mysql.table import (
    BESIDE_ID,
    INTEGERS,
    OF_KEY,
    SLICES,
    TIMES,
    EventTable,
    Roles,
    free_name,
    listed,
    plain,
    quote,
)

TIME = "TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6)"
_PREFIX = 191
"""Characters of a longer text that are indexed: as many as fit into any index."""
NOW = re.compile(r"current_timestamp|utc_timestamp|sysdate|localtime|\bnow\b")
"""In the default of a column that the database sets to the time of the statement."""

_TYPE = re.compile(r"^\w+(\([^)]*\))?( unsigned)?( zerofill)?( CHARACTER SET \w+)?( COLLATE \w+)?")
"""Of a definition that a server shows, what must come before NOT NULL."""
_NUMBERS = {"decimal", "float", "double"}
"""Types whose values may be whole numbers."""


def suggestion(config: Store, table: EventTable) -> str | None:
    """What gives the configured table the columns and indexes that it lacks; None: nothing does."""
    own = {name.lower(): name for name in table.columns}
    wanted = {k: v for k, v in config.columns.model_dump().items() if v}
    parts = tuple(own.get(name.lower(), name) for name in wanted.pop("aggregate_id"))
    names = {role: own.get(name.lower(), name) for role, name in wanted.items()}
    roles = Roles(parts, names)
    if (wider := identity(table, roles)) != parts:
        return set_identity(wider)
    time, addable = names["create_time"], {*table.framework.add}
    changes, also = [], ""
    for name in roles.key:
        column = table.columns.get(name)
        if column is None:
            continue
        numbers = _NUMBERS | ({"char", "varchar"} if name == names["version"] else set())
        if column.type in numbers and not column.generated_as:
            null = "NOT " * (not column.nullable) + "NULL" + table.definition(name)[1]
            changes.append(f"MODIFY {quote(name)} BIGINT {null}")
            also += f"; {name} must hold whole numbers only: others are rounded, or refused"
        elif column.type in numbers or not column.is_one_of(OF_KEY):
            return None
    if time not in own.values():
        addable.add(time)
    elif table.columns[time].type not in TIMES:
        names["create_time"] = free_name("create_time", table.columns)
        addable.add(names["create_time"])
        also += f', and set create_time = "{names["create_time"]}" in [store.columns]'
    needless = {name for role, name in names.items() if role in {"id", "metadata"}}
    if not {*parts, *names.values()} - needless - addable <= {*own.values()}:
        return None
    changes += needed(table, roles)
    return table.alter(changes) + also if changes else None


def needed(table: EventTable, roles: Roles, by_time: Sequence[str] = ()) -> list[str]:
    """What ALTER TABLE is to add so that the table can be published.

    Args:
        roles: some columns may be there only after the statement.
        by_time: the columns with which an index is to begin, where it is more than the time.
    """
    create_time, key = roles.names["create_time"], roles.key
    wanted, by_time = {*roles.parts, *roles.names.values()}, tuple(by_time) or (create_time,)
    added = [
        # invisible, so that a writer's INSERT without a column list still fits
        f"ADD COLUMN {quote(name)} {definition} INVISIBLE"
        for name, definition in [*table.framework.add.items(), (create_time, TIME)]
        if name in wanted and name not in table.columns
    ]
    if not any({*index.columns[: len(key)]} == {*key} for index in table.indexes):
        added.append(key_index(table, key)[0])
    elif not table.is_unique(key) and not (unique := key_index(table, key))[1]:
        added.append(unique[0])
    if not any(index.columns[: len(by_time)] == by_time for index in table.indexes):
        added.append(f"ADD INDEX ({listed(by_time)})")
    return added


def additions(table: EventTable, roles: Roles) -> list[str]:
    """As `needed`, and a slice column where the identity is one column of text."""
    identity = table.identity(roles.parts)
    if not identity.is_text:
        return needed(table, roles)
    found = table.slice_of(roles.parts)
    name = found or free_name("slice", table.columns)
    added = needed(table, roles, (roles.names["create_time"], name))
    if found is None:
        added.insert(0, f"ADD COLUMN {quote(name)} {slice_type(identity.utf8)}")
    return added


def slice_type(aggregate_id: str) -> str:
    """The definition of a slice column."""
    # invisible, so that a writer's INSERT without a column list still fits
    return (
        f"SMALLINT UNSIGNED GENERATED ALWAYS AS (CRC32({aggregate_id}) % {SLICES}) STORED INVISIBLE"
    )


def add_number(table: EventTable) -> str:
    """The statement that adds an indexed column of ascending numbers."""
    name = quote(free_name("seq", table.columns))
    column = f"ADD COLUMN {name} BIGINT NOT NULL AUTO_INCREMENT INVISIBLE"
    return table.alter([column, f"ADD INDEX ({name})"])


def key_index(table: EventTable, key: Sequence[str]) -> tuple[str, str]:
    """What adds an index for lookups, and why it is not a unique one ("": it is)."""
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
    else:
        return f"ADD UNIQUE INDEX ({columns})", ""
    return f"ADD INDEX ({columns})", why


def identity(table: EventTable, roles: Roles) -> tuple[str, ...]:
    """The columns that are the identity, where rows with one id and version belong to several.

    By a unique key, or by what rows there are; as given where neither says more.
    """
    parts, key = roles.parts, roles.key
    others = beside(table, key)
    if others and all(c.is_one_of(OF_KEY) for c in map(table.columns.get, others) if c):
        return (*others, *parts)
    for name in [c for n in BESIDE_ID for c in table.columns if plain(c) == n and c not in parts]:
        if table.repeated(key) and not table.repeated((name, *key)):
            return (name, *parts)
    return tuple(parts)


def beside(table: EventTable, key: Sequence[str]) -> list[str]:
    """The columns by which a unique key tells rows of one identity and version apart, if any: not
    those that it has for other reasons, as a time, a partition, a row's own number or id."""

    def is_identity(name: str, of: Sequence[str]) -> bool:
        column, is_behind = table.columns[name], of.index(name) > of.index(key[-1])
        is_other = column.type in {*TIMES, "date"} or name in table.partitioned_by
        is_other |= table.is_unique((name,)) or (is_behind and column.type in INTEGERS)
        return name not in key and not is_other

    keys = [i.columns for i in table.indexes if i.unique and {*key} < {*i.columns}]
    wider = [[n for n in of if is_identity(n, of)] for of in keys if {*of} <= {*table.columns}]
    return [] if table.is_unique(key) else min(wider, key=len, default=[])


def set_identity(parts: Sequence[str]) -> str:
    """What to change in the configuration so that these columns are the identity."""
    return f"set aggregate_id = {json.dumps(parts, ensure_ascii=False)} in [store.columns]"


def not_null(table: EventTable, columns: Sequence[str]) -> str:
    """The statement after which columns refuse NULL, and are what they were otherwise; but a time
    is set by the database, and only once, where a writer does not."""
    changes = []
    for name in columns:
        column, (body, comment) = table.columns[name], table.definition(name)
        if column.type in TIMES:
            at = f"({column.precision})" if column.precision else ""
            is_utc = "utc_timestamp" in column.default
            default = f"({column.default})" if is_utc else f"CURRENT_TIMESTAMP{at}"
            body = f"{column.full_type} DEFAULT {default}"
        elif not body:
            return f"make {', '.join(columns)} NOT NULL (ALTER TABLE … MODIFY)"
        body = re.sub(r" (NULL )?DEFAULT NULL| NULL(?= DEFAULT)", "", body)
        body = _TYPE.sub(r"\g<0> NOT NULL", body, count=1)
        changes.append(f"MODIFY {quote(name)} {body}{comment}")
    return table.alter(changes)


def writers_zone(zone: str | None) -> str:
    """What to do where writers' times are off by the difference of two zones.

    Args:
        zone: in which a DATETIME is read; None: it is a TIMESTAMP, whose values the server takes
            for times of the session that writes them.
    """
    if zone is None:
        return (
            "if writers set create_time themselves: have their sessions SET time_zone to the zone"
            " of the times that they write, or leave the column to its default"
        )
    return (
        "if the writers' sessions use another time zone: set store.time_zone to it, or have them"
        f" SET time_zone to that of {zone}"
    )
