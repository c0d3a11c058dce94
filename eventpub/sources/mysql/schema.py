"""The event table as eventpub would create it, and what an existing one lacks of it.

Statements only, made from the configuration and the catalogue; nothing is executed here. A table
that exists keeps its columns and their types: only what is missing is added.
"""

from __future__ import annotations

from collections.abc import Iterable

from eventpub.config import Columns, Store
from eventpub.errors import StoreError
from eventpub.sources.mysql import fixes
from eventpub.sources.mysql.connection import Connection, is_mariadb
from eventpub.sources.mysql.layout import SLICES, find_slice, identity_of, roles_of
from eventpub.sources.mysql.table import EventTable, Roles, quote, read_table

ALTERS = "ALTER TABLE"
"""How a statement begins that changes a table which exists."""

_ONLINE = "ALGORITHM=INPLACE, LOCK=NONE"


def missing(config: Store, connection: Connection) -> list[str]:
    """The statements that make the event table, or add what it lacks; empty if it lacks nothing.

    Raises:
        StoreError: store.column_missing, store.column_type: that table holds something else.
    """
    try:
        table = read_table(config, connection)
    except StoreError as error:
        if error.code != "store.table_missing":
            raise
        return [create_table(config, mariadb=is_mariadb(connection))]
    added = additions(table, roles_of(config, table))
    if not added:
        return []
    # One statement, since each new stored column copies the table.
    if not any(part.startswith("ADD COLUMN") for part in added):
        added.append(_ONLINE)
    return [table.alter(added)]


def copies_the_table(statement: str) -> bool:
    """Whether writers have to wait until a statement is done."""
    return statement.startswith(ALTERS) and not statement.endswith(_ONLINE)


def offline(statement: str) -> str:
    """The same statement for an engine that cannot let others write meanwhile."""
    return statement.removesuffix(f", {_ONLINE}")


def create_table(config: Store, *, mariadb: bool) -> str:
    """The statement that creates the event table.

    Identity is by bytes: the collation tells case, accents and trailing blanks apart.

    One index serves windows of every shard: on 1,000,000 events, reading a window by
    (create_time, slice) costs MySQL 4.2 µs per event with 2 shards and 5.8 with 4; by (create_time)
    alone, which has to fetch the other shards' rows as well, 6.4 and 12.4. Keeping both costs 21 MB
    per 1,000,000 events and serves nothing better.
    """
    names = config.columns
    if len(names.aggregate_id) > 1:
        raise StoreError(
            "store.several_id_columns",
            "eventpub creates only tables whose store.columns.aggregate_id is one column",
            where=f"table {config.table}",
            suggestion="create the table as your application does; `eventpub doctor` says whether"
            " anything is missing of it",
        )
    bytewise = "utf8mb4_nopad_bin" if mariadb else "utf8mb4_0900_bin"
    text = f"VARCHAR(255) CHARACTER SET utf8mb4 COLLATE {bytewise} NOT NULL"
    slice_name = quote(free_slice_name(_own_names(names)))
    aggregate_id, version = quote(names.aggregate_id[0]), quote(names.version)
    create_time = quote(names.create_time)
    key = f"({aggregate_id}, {version})"
    lines = [
        f"{aggregate_id} {text}",
        f"{version} BIGINT NOT NULL",
        f"{quote(names.event_type)} {text}",
        f"{quote(names.payload)} LONGBLOB NULL",
        f"{create_time} TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6)",
        f"{slice_name} {_slice_type(aggregate_id)}",
    ]
    if names.metadata:
        lines.insert(4, f"{quote(names.metadata)} JSON NULL")
    if names.id:
        lines.insert(0, f"{quote(names.id)} BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY")
        lines.append(f"UNIQUE KEY {key}")
    else:
        lines.append(f"PRIMARY KEY {key}")
    lines.append(f"KEY ({create_time}, {slice_name})")
    body = ",\n  ".join(lines)
    return f"CREATE TABLE IF NOT EXISTS {quote(config.table)} (\n  {body}\n) ENGINE = InnoDB"


def additions(table: EventTable, roles: Roles) -> list[str]:
    """What ALTER TABLE is to add to a table that exists.

    A slice column only where the identity is one column of text.
    """
    identity = identity_of(table.columns, roles.parts)
    if len(roles.parts) > 1 or identity.parts[0].kind not in {"text", "bytes"}:
        return fixes.needed(table, roles)
    found = find_slice(table, roles.parts)
    name = found or free_slice_name(table.columns)
    added = fixes.needed(table, roles, (roles.names["create_time"], name))
    if found is None:
        added.insert(0, f"ADD COLUMN {quote(name)} {_slice_type(identity.utf8)}")
    return added


def free_slice_name(taken: Iterable[str]) -> str:
    """A name for the slice column that no other column has."""
    lower = {name.lower() for name in taken}
    return next(n for n in ("slice", "eventpub_slice", "eventpub_slice_1024") if n not in lower)


def _slice_type(aggregate_id: str) -> str:
    # invisible, so that a writer's INSERT without a column list still fits
    return (
        f"SMALLINT UNSIGNED GENERATED ALWAYS AS (CRC32({aggregate_id}) % {SLICES}) STORED INVISIBLE"
    )


def _own_names(names: Columns) -> list[str]:
    others = names.model_dump(exclude={"aggregate_id"}).values()
    return [*names.aggregate_id, *(name for name in others if name)]
