"""What the event table looks like: found out once, then carried to every task as a plain value.

The catalogue alone is read. Whatever the publisher cannot work without is an error here
that names the statement which fixes it; whatever merely should be better is for `checks`.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eventpub.config import Store
from eventpub.errors import StoreError
from eventpub.sources.mysql import fixes
from eventpub.sources.mysql.connection import Connection, mapped, run
from eventpub.sources.mysql.identity import Identity, literal
from eventpub.sources.mysql.table import (
    INTEGERS,
    OF_KEY,
    TIMES,
    EventTable,
    Roles,
    TableIndex,
    listed,
    quote,
)
from eventpub.sources.mysql.zones import Zone, fixed_zone, named_zone, sampled_zone

_NEVER = 1 << 62
"""µs; beyond every time that a column can hold."""


@dataclass(frozen=True)
class Layout:
    """The event table as discovered. Names are quoted identifiers, ready for a statement.

    Args:
        table: the event table.
        id: the unique ascending key; None where there is none.
        identity: the columns that say which aggregate a row belongs to.
        metadata: None where the table has none.
        time_index: an index that begins with `create_time`.
        key_index: an index that begins with the identity's columns and `version`, in any order.
        key_columns: these columns, in its order.
        key_is_unique: whether the table itself refuses a second row of one version.
        unit: µs between two values that `create_time` can tell apart.
        zone: rules of the local time that a DATETIME holds; None for a TIMESTAMP.
        slice: a generated column with ``CRC32(aggregate_id) % 1024``; None where there is none.
        id_is_nullable: whether a column of the identity may hold NULL.
        skips_nulls: whether rows without an identity or a version are passed over, and there may
            be any.
        times_last: whether a row keeps its `create_time` when it is updated.
        id_index: an index that begins with `id`; None where there is none, or it is no number.
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
        """How `create_time` is read: what changes it gives a row another time."""
        zone = self.zone
        if zone is None:
            return f"UTC/{self.unit}"
        # of SYSTEM, they may change
        rules = zlib.crc32(repr((zone.changes, zone.offsets)).encode())
        return f"{zone.name}/{rules:08x}/{self.unit}"

    @property
    def sampled_by(self) -> str:
        """The column by which rows are sampled for those that have come last."""
        return self.create_time if self.id_index is None or self.id is None else self.id

    def instants(
        self, local: npt.NDArray[np.int64], after: int | None = None, upto: int | None = None
    ) -> npt.NDArray[np.int64]:
        """When values of `create_time` were, read in a window; see `Zone.utc`."""
        return local if self.zone is None else self.zone.utc(local, after, upto)

    def instant(self, local: int, after: int | None = None, upto: int | None = None) -> int:
        return int(self.instants(np.array([local]), after, upto)[0])

    def latest_instant(self, local: int) -> int:
        """The later of the two instants that an ambiguous local time may be."""
        return local if self.zone is None else int(self.zone.latest(np.array([local]))[0])

    def local(self, instant: int) -> int:
        return instant if self.zone is None else self.zone.local(instant)

    def next_backward_change(self, instant: int) -> int:
        """When the clocks go back next, at or after an instant; far in the future: never."""
        back = (at for at, _ in self.repeated if at >= instant)
        return next(back, _NEVER)

    @property
    def repeated(self) -> tuple[tuple[int, int], ...]:
        """From when on local times are lived again, and by how much the clocks went back, µs."""
        return () if self.zone is None else tuple(self.zone.repeated)


def layout_of(config: Store, table: EventTable) -> Layout:
    """What a table looks like that the configuration names.

    Raises:
        StoreError: store.is_view, store.column_missing, store.column_type, store.index_missing,
            store.time_zone_unknown.
    """
    roles = roles_of(config, table)
    time_index, key_index = _find_indexes(config, table, roles)
    id_index = _id_index(table, roles.names)
    names, columns = roles.names, table.columns
    create_time = columns[names["create_time"]]
    slice_column = table.slice_of(roles.parts)
    may_be_nameless = any(columns[name].nullable for name in roles.key)
    quoted = {role: quote(name) for role, name in names.items()}
    return Layout(
        table=table.name,
        id=quoted.get("id"),
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
        zone=None if create_time.type == "timestamp" else _zone_of(config, table.connection),
        slice=quote(slice_column) if slice_column else None,
        id_is_nullable=any(columns[part].nullable for part in roles.parts),
        where=table.where,
        times_last="on update" not in create_time.extra,
        id_index=quote(id_index) if id_index else None,
        skips_nulls=config.without_identity == "skip" and may_be_nameless,
    )


def _id_index(table: EventTable, names: dict[str, str]) -> str | None:
    """An index that begins with the ascending number.

    Where no such column is named, the AUTO_INCREMENT column is taken and added to the names.
    """
    firsts = {index.columns[0]: index.name for index in reversed(table.indexes)}
    numbers = [c for c in table.columns.values() if c.type in INTEGERS and c.name in firsts]
    named = [c.name for c in numbers if c.name == names.get("id")]
    found = named or [c.name for c in numbers if c.counts_rows]
    if not found:
        return None
    names["id"] = found[0]
    return firsts[found[0]]


def roles_of(config: Store, table: EventTable) -> Roles:
    """Which of the table's columns the configuration names for what, of types that can be read.

    Raises:
        StoreError: store.is_view, store.column_missing, store.column_type
    """
    table.require_table()
    own = {name.lower(): name for name in table.columns}
    wanted = config.columns.model_dump(exclude={"aggregate_id"})
    names = {key: own[name.lower()] for key, name in wanted.items() if (name or "").lower() in own}
    optional = {("id", "id"), ("metadata", "metadata"), ("id", None), ("metadata", None)}
    named = [("aggregate_id", part) for part in config.columns.aggregate_id] + [*wanted.items()]
    missing = [(k, n) for k, n in named if (n or "").lower() not in own and (k, n) not in optional]
    if missing:
        lacks = ", ".join(repr(name or key) for key, name in missing)
        raise StoreError(
            "store.column_missing",
            f"the event table lacks {lacks}; it has {', '.join(table.columns)}",
            where=table.where,
            suggestion=fixes.suggestion(config, table)
            or f'name the right one in [store.columns]: {missing[0][0]} = "…"; if the table has '
            "it, this account may not read it: GRANT SELECT",
        )
    roles = Roles(tuple(own[part.lower()] for part in config.columns.aggregate_id), names)
    for key, name, allowed in (
        *(("aggregate_id", part, OF_KEY) for part in roles.parts),
        ("version", names["version"], INTEGERS),
        ("create_time", names["create_time"], TIMES),
    ):
        if not table.columns[name].is_one_of(allowed):
            as_text = f", such as `{name}_text` VARCHAR(255) AS (HEX(`{name}`)) STORED"
            raise StoreError(
                "store.column_type",
                f"column {name!r} is {table.columns[name].full_type}; as {key} it must be one of "
                + ", ".join(sorted(allowed)),
                where=table.where,
                suggestion=fixes.suggestion(config, table)
                or f'map another column in [store.columns]: {key} = "…"'
                + as_text * (name in roles.parts),
            )
    return roles


def _find_indexes(config: Store, table: EventTable, roles: Roles) -> tuple[TableIndex, TableIndex]:
    """The indexes for windows and for lookups by key.

    Raises:
        StoreError: store.index_missing, with the statement that adds it
    """
    key, create_time, version = roles.key, roles.names["create_time"], roles.names["version"]
    slice_column = table.slice_of(roles.parts)
    by_time = [index for index in table.indexes if index.columns[0] == create_time]
    by_time.sort(key=lambda i: (i.columns[1:2] != (slice_column,), len(i.columns), i.name))
    by_key = [index for index in table.indexes if {*index.columns[: len(key)]} == {*key}]
    # the more of the identity stands before the version, the less of an index a range reads
    by_key.sort(key=lambda i: (-i.columns.index(version), not i.unique, len(i.columns), i.name))
    for found, wanted in ((by_time, (create_time,)), (by_key, key)):
        if not found:
            unique = "UNIQUE " if wanted == key else ""
            raise StoreError(
                "store.index_missing",
                f"the event table has no index that begins with ({', '.join(wanted)})",
                where=table.where,
                suggestion=fixes.suggestion(config, table)
                or f"ALTER TABLE {table.name} ADD {unique}INDEX ({listed(wanted)})",
            )
    return by_time[0], by_key[0]


def _zone_of(config: Store, connection: Connection) -> Zone:
    """The zone whose local time a DATETIME column holds, by configuration or as the server has it.

    Raises:
        StoreError: store.time_zone_unknown
    """
    name = config.time_zone
    if name != "auto":
        return fixed_zone(name) or named_zone(name)
    with mapped("store.time_zone"):
        name = str(run(connection, "SELECT @@GLOBAL.time_zone")[0][0])
        return fixed_zone(name) or _server_zone(name, connection)


def _server_zone(name: str, connection: Connection) -> Zone:
    """The zone by the server's own rules, since it is the server that writes the local times."""

    def offsets(instants: Sequence[int]) -> list[int | None]:
        local = "TIMESTAMPDIFF(SECOND, '1970-01-01', FROM_UNIXTIME({}))".format
        row = run(connection, f"SELECT {', '.join(map(local, instants))}")[0]
        return [None if at is None else int(at) - t for at, t in zip(row, instants, strict=True)]

    run(connection, f"SET time_zone = {literal(name)}")
    try:
        return sampled_zone(name, offsets)
    finally:
        run(connection, "SET time_zone = '+00:00'")
