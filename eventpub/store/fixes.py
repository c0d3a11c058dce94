"""What a table lacks to be published, and the statements that add it.

Made for that very table, so that the server takes them: no unique key over rows that repeat one,
none that leaves out a column by which the table is partitioned, none longer than an index may be,
no second AUTO_INCREMENT, no name that is taken.
"""

# ruff: noqa: S608 (names come through `quote`)

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eventpub.config import Store
from eventpub.store.connection import Connection, run
from eventpub.store.failures import error_number
from eventpub.store.frameworks import BESIDE_ID, plain, recognise
from eventpub.store.identity import literal
from eventpub.store.layout import INTEGERS, OF_KEY, Column, Index, quote, read_columns, read_indexes

TIME = "TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6)"
_PREFIX = 191
"""Characters of a longer text that are indexed: as many as fit into any index."""
_TYPE = re.compile(r"^\w+(\([^)]*\))?( unsigned)?( zerofill)?( CHARACTER SET \w+)?( COLLATE \w+)?")
"""Of a definition that a server shows, what must come before NOT NULL."""
_SAMPLE = 100_000
_DENIED = 1142


@dataclass(frozen=True)
class Table:
    """What decides which statements a table takes.

    Attributes:
        name: quoted.
        longest_key: bytes that an index may have.
        partitioned_by: columns in the expressions by which it is partitioned.
    """

    name: str
    columns: Mapping[str, Column]
    indexes: Sequence[Index]
    longest_key: int
    partitioned_by: Sequence[str]

    def free(self, name: str) -> str:
        """A name that no column has."""
        return f"eventpub_{name}" if name in {n.lower() for n in self.columns} else name

    def alter(self, additions: Sequence[str]) -> str:
        """The statement that makes changes."""
        return f"ALTER TABLE {self.name} {', '.join(additions)}"


def read_table(config: Store, connection: Connection) -> Table:
    """A table's facts, from the catalogue.

    Raises:
        StoreError: store.table_missing, store.privilege_missing, store.is_view
    """
    columns, indexes = read_columns(config, connection), read_indexes(config, connection)
    rows = run(
        connection,
        "SELECT t.engine, t.row_format, p.partition_expression, p.subpartition_expression"
        " FROM information_schema.tables AS t LEFT JOIN information_schema.partitions AS p"
        " USING (table_schema, table_name)"
        f" WHERE t.table_schema = DATABASE() AND t.table_name = {literal(config.table)}",
    )
    kind = f"{rows[0][0]} {rows[0][1]}".lower()
    longest = 3_072 if kind in {"innodb dynamic", "innodb compressed"} else 767
    words = re.findall(r"\w+", " ".join(str(by or "").lower() for row in rows for by in row[2:]))
    partitions = [name for name in columns if name.lower() in words]
    return Table(quote(config.table), columns, indexes, longest, partitions)


def suggestion(config: Store, connection: Connection) -> str | None:
    """What gives the configured table the columns and indexes that it lacks; None: nothing does."""
    table = read_table(config, connection)
    own = {name.lower(): name for name in table.columns}
    wanted = {k: v for k, v in config.columns.model_dump().items() if v}
    parts = [own.get(name.lower(), name) for name in wanted.pop("aggregate_id")]
    names = {role: own.get(name.lower(), name) for role, name in wanted.items()}
    wider = identity(table, connection, parts, names["version"])
    if wider != tuple(parts):
        return set_identity(wider)
    time, addable, version = names["create_time"], {*recognise(own).add}, names["version"]
    changes, also = [], ""
    for name in [*parts, version]:
        column = table.columns.get(name)
        numbers = {"decimal", "float", "double", *(("char", "varchar") if name == version else ())}
        if column and column.type in numbers and not column.generated_as:
            null = "NOT " * (not column.nullable) + "NULL" + _definition(table, connection, name)[1]
            changes.append(f"MODIFY {quote(name)} BIGINT {null}")
            also += f"; {name} must hold whole numbers only: others are rounded, or refused"
        elif column and (column.type in numbers or not {column.type, column.full_type} & OF_KEY):
            return None
    if time not in own.values():
        addable.add(time)
    elif table.columns[time].type not in {"timestamp", "datetime"}:
        names["create_time"] = table.free("create_time")
        addable.add(names["create_time"])
        also += f', and set create_time = "{names["create_time"]}" in [store.columns]'
    needless = {name for role, name in names.items() if role in {"id", "metadata"}}
    if not {*parts, *names.values()} - needless - addable <= {*own.values()}:
        return None
    changes += needed(table, connection, parts, names)
    return table.alter(changes) + also if changes else None


def needed(
    table: Table,
    connection: Connection,
    parts: Sequence[str],
    names: Mapping[str, str],
    by_time: Sequence[str] = (),
) -> list[str]:
    """What ALTER TABLE is to add so that the table can be published.

    Args:
        parts: the columns of the identity; some may be there only after the statement.
        names: by our names those of other columns, likewise.
        by_time: the columns with which an index is to begin, where it is more than the time.
    """
    framework, create_time = recognise(table.columns), names["create_time"]
    wanted, by_time = dict.fromkeys([*parts, *names.values()]), tuple(by_time) or (create_time,)
    added = [
        # invisible, so that a writer's INSERT without a column list still fits
        f"ADD COLUMN {quote(name)} {definition} INVISIBLE"
        for name, definition in [*framework.add.items(), (create_time, TIME)]
        if name in wanted and name not in table.columns
    ]
    key = (*parts, names["version"])
    if not any({*index.columns[: len(key)]} == {*key} for index in table.indexes):
        added.append(key_index(table, connection, key)[0])
    elif not is_unique(table, key) and not (unique := key_index(table, connection, key))[1]:
        added.append(unique[0])
    if not any(index.columns[: len(by_time)] == by_time for index in table.indexes):
        added.append(f"ADD INDEX ({', '.join(map(quote, by_time))})")
    return added


def is_unique(table: Table, key: Sequence[str]) -> bool:
    """Whether the table refuses a second row of a key."""
    return any(index.unique and {*index.columns} <= {*key} for index in table.indexes)


def key_index(table: Table, connection: Connection, key: Sequence[str]) -> tuple[str, str]:
    """What adds an index for lookups, and why it is not a unique one ("": it is)."""
    if (longest := sum(_octets(table, name) for name in key)) > table.longest_key:
        prefixes = [f"({_PREFIX})" * (_octets(table, name) > 4 * _PREFIX) for name in key]
        listed = ", ".join(quote(n) + prefix for n, prefix in zip(key, prefixes, strict=True))
        why = f"it would have up to {longest:,} bytes, and may have {table.longest_key:,}"
        return f"ADD INDEX ({listed})", why
    listed = ", ".join(map(quote, key))
    if others := [n for n in table.partitioned_by if n not in key]:
        why = f"it would leave out {', '.join(others)}, by which the table is partitioned"
        return f"ADD INDEX ({listed})", why
    if twice := repeated(table, connection, key):
        return f"ADD INDEX ({listed})", f"{twice} is there twice"
    return f"ADD UNIQUE INDEX ({listed})", ""


def _octets(table: Table, name: str) -> int:
    return table.columns[name].octets if name in table.columns else 0


def repeated(table: Table, connection: Connection, key: Sequence[str]) -> str:
    """A key that several of the first rows have, as text; "": they have none."""
    if not {*key} <= {*table.columns}:
        return ""
    listed = ", ".join(map(quote, key))
    found = run(
        connection,
        f"SELECT {listed} FROM (SELECT {listed} FROM {table.name} LIMIT {_SAMPLE}) AS some"
        f" WHERE {' AND '.join(f'{quote(name)} IS NOT NULL' for name in key)}"
        f" GROUP BY {listed} HAVING COUNT(*) > 1 LIMIT 1",
    )
    values = [v.hex() if isinstance(v, bytes) else v for v in (found[0] if found else ())]
    return ", ".join(f"{name} {value}" for name, value in zip(key, values, strict=False))


def identity(
    table: Table, connection: Connection, parts: Sequence[str], version: str
) -> tuple[str, ...]:
    """The columns that are the identity, where rows with one id and version belong to several.

    By a unique key, or by what rows there are; as given where neither says more.
    """
    others = beside(table, (*parts, version))
    if others and all({c.type, c.full_type} & OF_KEY for c in map(table.columns.get, others) if c):
        return (*others, *parts)
    for name in [c for n in BESIDE_ID for c in table.columns if plain(c) == n and c not in parts]:
        wider = (name, *parts, version)
        if repeated(table, connection, wider[1:]) and not repeated(table, connection, wider):
            return (name, *parts)
    return tuple(parts)


def beside(table: Table, key: Sequence[str]) -> list[str]:
    """The columns by which a unique key tells rows of one identity and version apart, if any: not
    those that it has for other reasons, as a time, a partition, a row's own number or id."""

    def tells(name: str, of: Sequence[str]) -> bool:
        column, is_behind = table.columns[name], of.index(name) > of.index(key[-1])
        is_other = column.type in {"timestamp", "datetime", "date"} or name in table.partitioned_by
        is_other |= is_unique(table, (name,)) or (is_behind and column.type in INTEGERS)
        return name not in key and not is_other

    keys = [i.columns for i in table.indexes if i.unique and {*key} < {*i.columns}]
    wider = [[n for n in of if tells(n, of)] for of in keys if {*of} <= {*table.columns}]
    return [] if is_unique(table, key) else min(wider, key=len, default=[])


def set_identity(parts: Sequence[str]) -> str:
    """What to change in the configuration so that these columns are the identity."""
    return f"set aggregate_id = {json.dumps(parts, ensure_ascii=False)} in [store.columns]"


def _definition(table: Table, connection: Connection, column: str) -> tuple[str, str]:
    """A column's own definition, as the server shows it, and the comment behind it; "": an account
    that may read only some columns is not shown it."""
    try:
        text = str(run(connection, f"SHOW CREATE TABLE {table.name}")[0][1])
    except Exception as error:
        if error_number(error) != _DENIED:
            raise
        return "", ""
    lines = (line.strip().rstrip(",") for line in text.splitlines())
    start = f"{quote(column)} "
    body, mark, comment = next(line for line in lines if line.startswith(start)).partition(
        " COMMENT '"
    )
    return body.removeprefix(start), mark + comment


def not_null(table: Table, connection: Connection, columns: Sequence[str]) -> str:
    """The statement after which columns refuse NULL, and are what they were otherwise; but a time
    is set by the database, and only once, where a writer does not."""
    changes = []
    for name in columns:
        column, (body, comment) = table.columns[name], _definition(table, connection, name)
        if column.type in {"timestamp", "datetime"}:
            at = f"({column.precision})" if column.precision else ""
            body = f"{column.full_type} DEFAULT CURRENT_TIMESTAMP{at}"
        elif not body:
            return f"make {', '.join(columns)} NOT NULL (ALTER TABLE … MODIFY)"
        body = re.sub(r" (NULL )?DEFAULT NULL| NULL(?= DEFAULT)", "", body)
        body = _TYPE.sub(r"\g<0> NOT NULL", body, count=1)
        changes.append(f"MODIFY {quote(name)} {body}{comment}")
    return table.alter(changes)


def number(table: Table) -> str:
    """The statement that gives rows a number in the order in which they are inserted."""
    name = table.free("seq")
    return table.alter(
        [f"ADD COLUMN {quote(name)} BIGINT NOT NULL AUTO_INCREMENT", f"ADD INDEX ({quote(name)})"]
    )
