"""What the event table looks like: found out once, then carried to every task as a plain value.

`discover` reads the catalogue only. Whatever the publisher cannot work without is an error here
that names the statement which fixes it; whatever merely should be better is for `checks`.
"""

# ruff: noqa: S608 (names and values come through `quote` and `literal`)

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eventpub.config import Store
from eventpub.errors import StoreError
from eventpub.store.connection import Connection, display_name, run, run_named
from eventpub.store.failures import mapped
from eventpub.store.identity import Identity, IdPart, Kind, literal
from eventpub.store.zones import Zone, fixed_zone, named_zone, sampled_zone

SLICES = 1024
"""`slice` is ``CRC32(aggregate_id) % SLICES``."""

TEXT = {"char", "varchar", "tinytext", "text", "mediumtext", "longtext"}
BYTES = {"binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob"}
INTEGERS = {"tinyint", "smallint", "mediumint", "int", "bigint"}
OF_KEY = TEXT | INTEGERS | {"enum", "varbinary", "binary(16)", "uuid"}


def quote(name: str) -> str:
    """A name as an SQL identifier: whatever it contains, it stays one name."""
    return "`" + name.replace("`", "``") + "`"


@dataclass(frozen=True)
class Index:
    """One usable index: its name and columns in order (a prefix of a column counts as it)."""

    name: str
    columns: tuple[str, ...]
    unique: bool


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
        ties_by_id: whether `time_index` gives rows of one `create_time` in order of `id`.
        nullable: columns (by our name) that may hold NULL.
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
    ties_by_id: bool
    nullable: frozenset[str]
    where: str
    times_last: bool = True
    id_index: str | None = None
    skips_nulls: bool = False

    @property
    def read_as(self) -> str:
        """How `create_time` is read: what changes it gives a row another time."""
        zone = self.zone
        if zone is None:
            return f"UTC/{self.unit}"
        rules = zlib.crc32(
            repr((zone.changes, zone.offsets)).encode()
        )  # of SYSTEM, they may change
        return f"{zone.name}/{rules:08x}/{self.unit}"

    @property
    def sampled_by(self) -> str:
        """The column by which rows are sampled for those that have come last."""
        return self.create_time if self.id_index is None or self.id is None else self.id

    @property
    def repeated(self) -> tuple[tuple[int, int], ...]:
        """From when on local times are lived again, and by how much the clocks went back, µs."""
        return () if self.zone is None else tuple(self.zone.repeated)


@dataclass(frozen=True)
class Column:
    """A column of the catalogue."""

    name: str
    type: str
    full_type: str
    nullable: bool
    charset: str | None
    collation: str | None
    precision: int
    generated_as: str
    default: str
    extra: str
    octets: int


def discover(config: Store, connection: Connection) -> Layout:
    """Reads the event table's layout from the catalogue.

    Raises:
        StoreError: store.table_missing, store.is_view, store.column_missing, store.column_type,
            store.index_missing, store.privilege_missing, store.time_zone_unknown.
    """
    where = f"{display_name(config)}, table {config.table}"
    with mapped(where):
        columns = read_columns(config, connection)
        indexes = read_indexes(config, connection)
    try:
        parts, names = mapped_columns(config, columns, where)
        check_types(columns, parts, names, where)
        time_index, key_index = find_indexes(config, columns, indexes, where)
    except StoreError as error:
        from eventpub.store import fixes

        error.suggestion = fixes.suggestion(config, connection) or error.suggestion
        raise
    id_index = _id_index(columns, indexes, names)
    create_time = columns[names["create_time"]]
    slice_column = find_slice(columns, parts)
    key = {*parts, names["version"]}
    id_is_primary = "id" in names and any(
        index.name == "PRIMARY" and index.columns == (names["id"],) for index in indexes
    )

    nullable = {key for key, name in names.items() if columns[name].nullable}
    if any(columns[part].nullable for part in parts):
        nullable.add("aggregate_id")

    def quoted(key: str) -> str | None:
        return quote(names[key]) if key in names else None

    return Layout(
        table=quote(config.table),
        id=quoted("id"),
        identity=identity_of(columns, parts),
        version=quote(names["version"]),
        event_type=quote(names["event_type"]),
        payload=quote(names["payload"]),
        metadata=quoted("metadata"),
        create_time=quote(names["create_time"]),
        time_index=quote(time_index.name),
        key_index=quote(key_index.name),
        key_columns=tuple(quote(name) for name in key_index.columns[: len(key)]),
        key_is_unique=any(index.unique and {*index.columns} <= key for index in indexes),
        unit=unit_of(create_time),
        zone=None if create_time.type == "timestamp" else zone_of(config, connection),
        slice=quote(slice_column) if slice_column else None,
        ties_by_id=id_is_primary
        and columns[names["id"]].type in INTEGERS
        and time_index.columns == (names["create_time"],),
        nullable=frozenset(nullable),
        where=where,
        times_last="on update" not in create_time.extra,
        id_index=id_index,
        skips_nulls=config.without_identity == "skip"
        and not nullable.isdisjoint({"aggregate_id", "version"}),
    )


def _id_index(
    columns: Mapping[str, Column], indexes: Sequence[Index], names: dict[str, str]
) -> str | None:
    """An index that begins with the ascending number.

    Where no such column is named, AUTO_INCREMENT tells it, and it is added to the names.
    """
    firsts = {index.columns[0]: index.name for index in reversed(indexes)}
    numbers = [c for c in columns.values() if c.type in INTEGERS and c.name in firsts]
    named = [c.name for c in numbers if c.name == names.get("id")]
    found = named or [c.name for c in numbers if "auto_increment" in c.extra]
    if not found:
        return None
    names["id"] = found[0]
    return quote(firsts[found[0]])


def read_columns(config: Store, connection: Connection) -> dict[str, Column]:
    """The table's columns by name.

    Raises:
        StoreError: store.table_missing, store.privilege_missing
    """
    with mapped(f"{display_name(config)}, table {config.table}"):
        # tells a missing table from one that we may not see; the catalogue shows neither
        run(connection, f"SELECT 1 FROM {quote(config.table)} LIMIT 0")
        rows = run(
            connection,
            "SELECT column_name, data_type, column_type, is_nullable, character_set_name,"
            " collation_name, datetime_precision, generation_expression, column_default,"
            " extra, character_octet_length"
            " FROM information_schema.columns"
            f" WHERE table_schema = DATABASE() AND table_name = {literal(config.table)}"
            " ORDER BY ordinal_position",
        )
    found = {}
    for row in rows:
        name, kind, full, nullable, charset, collation, *others = map(_text, row)
        precision, expression, default, extra, octets = others
        found[str(name)] = Column(
            name=str(name),
            type=str(kind).lower(),
            full_type=str(full).lower(),
            nullable=str(nullable).upper() == "YES",
            charset=charset,
            collation=collation,
            precision=int(precision or 0),
            generated_as=expression or "",
            default=(default or "").lower(),
            extra=(extra or "").lower(),
            octets=int(octets or 8),
        )
    return found


def read_indexes(config: Store, connection: Connection) -> list[Index]:
    """The table's B-tree indexes that the optimizer may use.

    Raises:
        StoreError: store.is_view
    """
    columns: dict[str, list[str]] = {}
    unique: dict[str, bool] = {}
    for row in run_named(connection, f"SHOW INDEX FROM {quote(config.table)}"):
        hidden = row.get("visible", "YES") == "NO" or row.get("ignored", "NO") == "YES"
        if row["index_type"] == "BTREE" and not hidden:
            name = row["key_name"]
            # an expression has no name, and is no column of ours
            columns.setdefault(name, []).append(row["column_name"] or "")
            unique[name] = not int(row["non_unique"])
    if not columns and _is_view(config, connection):
        raise is_view(config.table, f"{display_name(config)}, table {config.table}")
    return [Index(name, tuple(of), unique[name]) for name, of in columns.items()]


def is_view(name: str, where: str) -> StoreError:
    """The error that a view cannot be published."""
    return StoreError(
        "store.is_view",
        f"{name} is a view, which has no indexes; eventpub needs those of a table",
        where=where,
        suggestion="set store.table to the table that the view reads, and [store.columns] to the"
        " names of its columns",
    )


def _is_view(config: Store, connection: Connection) -> bool:
    rows = run(
        connection,
        "SELECT table_type FROM information_schema.tables"
        f" WHERE table_schema = DATABASE() AND table_name = {literal(config.table)}",
    )
    return any(str(_text(kind)).upper().endswith("VIEW") for (kind,) in rows)


def mapped_columns(
    config: Store, columns: Mapping[str, Column], where: str
) -> tuple[tuple[str, ...], dict[str, str]]:
    """The table's own names: of the columns of the identity, and by our name of each other one.

    `id` and `metadata` are only there where the table has them.

    Raises:
        StoreError: store.column_missing
    """
    by_lower = {name.lower(): name for name in columns}
    names, missing = {}, []
    wanted_columns = config.columns.model_dump(exclude={"aggregate_id"})
    for key, wanted in wanted_columns.items():
        found = by_lower.get(wanted.lower()) if wanted else None
        if found is not None:
            names[key] = found
        elif key not in {"id", "metadata"} or (wanted and wanted != key):
            missing.append((key, wanted))
    parts = tuple(by_lower.get(part.lower(), "") for part in config.columns.aggregate_id)
    pairs = zip(config.columns.aggregate_id, parts, strict=True)
    missing[:0] = [("aggregate_id", part) for part, found in pairs if not found]
    if missing:
        key, wanted = missing[0]
        raise StoreError(
            "store.column_missing",
            f"the event table has no column {wanted or key!r}"
            + (f" (nor {', '.join(repr(w or k) for k, w in missing[1:])})" if missing[1:] else "")
            + f"; it has {', '.join(columns)}",
            where=where,
            suggestion=f'name the right one in [store.columns]: {key} = "…"; where the table has '
            "it, this account may not read it: GRANT SELECT",
        )
    return parts, names


def check_types(
    columns: Mapping[str, Column], parts: Sequence[str], names: Mapping[str, str], where: str
) -> None:
    """Refuses types that cannot be read as what they stand for.

    Raises:
        StoreError: store.column_type
    """
    for key, name, allowed in (
        *(("aggregate_id", part, OF_KEY) for part in parts),
        ("version", names["version"], INTEGERS),
        ("create_time", names["create_time"], {"timestamp", "datetime"}),
    ):
        column = columns[name]
        if not {column.type, column.full_type} & allowed:
            raise StoreError(
                "store.column_type",
                f"column {column.name!r} is {column.full_type}; as {key} it must be one of "
                + ", ".join(sorted(allowed)),
                where=where,
                suggestion=f'map another column in [store.columns]: {key} = "…"'
                + f", such as `{name}_text` VARCHAR(255) AS (HEX(`{name}`)) STORED"
                * (name in parts),
            )


def identity_of(columns: Mapping[str, Column], parts: Sequence[str]) -> Identity:
    """How rows are read and looked up by these columns."""

    def kind(column: Column) -> Kind:
        if column.type in INTEGERS:
            return "number"
        if column.type in {"binary", "uuid"}:
            return "uuid" if column.type == "binary" else "native_uuid"
        return (
            "enum" if column.type == "enum" else "bytes" if column.type == "varbinary" else "text"
        )

    of = [columns[part] for part in parts]
    return Identity(
        tuple(
            IdPart(
                quote(column.name),
                kind(column),
                column.charset or "binary",
                column.collation or "binary",
                "zerofill" in column.full_type,
            )
            for column in of
        )
    )


def find_indexes(
    config: Store, columns: Mapping[str, Column], indexes: Sequence[Index], where: str
) -> tuple[Index, Index]:
    """The indexes for windows and for lookups by key.

    Raises:
        StoreError: store.index_missing, with the statement that adds it
    """
    parts, names = mapped_columns(config, columns, where)
    create_time, version = names["create_time"], names["version"]
    key = (*parts, version)
    slice_column = find_slice(columns, parts)
    by_time = [index for index in indexes if index.columns[0] == create_time]
    by_time.sort(
        key=lambda index: (index.columns[1:2] != (slice_column,), len(index.columns), index.name)
    )
    by_key = [index for index in indexes if {*index.columns[: len(key)]} == {*key}]

    def rank(index: Index) -> tuple[int, bool, int, str]:
        # the more of the identity stands before the version, the less of an index a range reads
        return -index.columns.index(version), not index.unique, len(index.columns), index.name

    by_key.sort(key=rank)
    for found, wanted in ((by_time, (create_time,)), (by_key, key)):
        if not found:
            listed = ", ".join(quote(name) for name in wanted)
            unique = "UNIQUE " if wanted == key else ""
            raise StoreError(
                "store.index_missing",
                f"the event table has no index that begins with ({', '.join(wanted)})",
                where=where,
                suggestion=f"ALTER TABLE {quote(config.table)} ADD {unique}INDEX ({listed})",
            )
    return by_time[0], by_key[0]


def find_slice(columns: Mapping[str, Column], parts: Sequence[str]) -> str | None:
    """The stored generated column that holds the key's CRC32 % 1024, whatever its name.

    Only a key of one text column can have such a one.
    """

    def bare(expression: str) -> str:
        """What is left when the server has written the expression in its own way."""
        return re.sub(r"[\s()`\\]", "", re.sub(r"(?i)\smod\s", "%", expression)).lower()

    identity = identity_of(columns, parts)
    if [part.kind for part in identity.parts] not in (["text"], ["bytes"]):
        return None
    expected = bare(f"CRC32({identity.utf8}) % {SLICES}")
    for column in columns.values():
        if "stored" in column.extra and bare(column.generated_as) == expected:
            return column.name
    return None


def unit_of(create_time: Column) -> int:
    """µs between two values that the column can tell apart."""
    return int(10 ** (6 - create_time.precision))


def zone_of(config: Store, connection: Connection) -> Zone:
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
        if not instants:
            return []
        row = run(
            connection,
            "SELECT "
            + ", ".join(
                f"TIMESTAMPDIFF(SECOND, '1970-01-01', FROM_UNIXTIME({t}))" for t in instants
            ),
        )[0]
        return [None if at is None else int(at) - t for at, t in zip(row, instants, strict=True)]

    run(connection, f"SET time_zone = {literal(name)}")
    try:
        return sampled_zone(name, offsets)
    finally:
        run(connection, "SET time_zone = '+00:00'")


def _text(value: Any) -> str | None:
    """Catalogue text, which some servers send as bytes."""
    return value.decode() if isinstance(value, bytes) else value
