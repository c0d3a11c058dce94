"""A table's columns, indexes and their limits, from the catalogue."""

# ruff: noqa: S608 (names and values come through `quote` and `literal`)

from __future__ import annotations

import re
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from typing import Any

from eventpub.config import Store
from eventpub.errors import StoreError
from eventpub.sources.mysql.connection import (
    Connection,
    display_name,
    mapped,
    run,
    run_named,
)
from eventpub.sources.mysql.values import Identity, IdPart, Kind, literal

TEXT = {"char", "varchar", "tinytext", "text", "mediumtext", "longtext"}
BYTES = {"binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob"}
INTEGERS = {"tinyint", "smallint", "mediumint", "int", "bigint"}
OF_KEY = TEXT | INTEGERS | {"enum", "varbinary", "binary(16)", "uuid"}
TIMES = {"timestamp", "datetime"}

SLICES = 1024

SAMPLE = 5_000
_MANY = 100_000

_NAMES = tomllib.loads(files(__package__).joinpath("frameworks.toml").read_text("utf-8"))
BESIDE_ID: list[str] = _NAMES["beside_id"]


def quote(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def listed(names: Sequence[str]) -> str:
    return ", ".join(map(quote, names))


def free_name(name: str, taken: Iterable[str]) -> str:
    return f"eventpub_{name}" if name in {other.lower() for other in taken} else name


@dataclass(frozen=True)
class TableIndex:
    name: str
    columns: tuple[str, ...]
    unique: bool


@dataclass(frozen=True)
class Column:
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
    comment: str

    def is_one_of(self, types: set[str]) -> bool:
        return not types.isdisjoint({self.type, self.full_type})

    @property
    def counts_rows(self) -> bool:
        return "auto_increment" in self.extra

    @property
    def as_id(self) -> IdPart:
        kinds: dict[str, Kind] = {"binary": "uuid", "uuid": "native_uuid", "varbinary": "bytes"}
        kinds |= {"enum": "enum", **dict.fromkeys(INTEGERS, "number")}
        charset, collation = self.charset or "binary", self.collation or "binary"
        return IdPart(quote(self.name), kinds.get(self.type, "text"), charset, collation)


@dataclass
class Roles:
    """The column of each role; `parts` are the columns of the identity."""

    parts: tuple[str, ...]
    names: dict[str, str]

    @property
    def key(self) -> tuple[str, ...]:
        return (*self.parts, self.names["version"])


@dataclass(frozen=True)
class Framework:
    """A known kind of table, from `frameworks.toml`; unknown if it has no name."""

    name: str = ""
    has: list[str] = field(default_factory=list)
    lacks: list[str] = field(default_factory=list)
    columns: dict[str, str | list[str]] = field(default_factory=dict)
    add: dict[str, str] = field(default_factory=dict)
    first_version: int = 1
    without_identity: str = "stop"
    note: str = ""
    refused: str = ""


FRAMEWORKS = [Framework(**entry) for entry in _NAMES["framework"]]


@dataclass(frozen=True)
class EventTable:
    """A table; `indexes` are B-trees that the optimizer may use, `longest_key` is in bytes."""

    connection: Connection
    name: str
    where: str
    columns: Mapping[str, Column]
    indexes: Sequence[TableIndex]
    engine: str
    longest_key: int
    partitioned_by: Sequence[str]
    is_view: bool

    @cached_property
    def framework(self) -> Framework:
        there = {plain(name) for name in self.columns}
        known = (f for f in FRAMEWORKS if there.issuperset(f.has) and there.isdisjoint(f.lacks))
        return next(known, Framework())

    def identity(self, parts: Sequence[str]) -> Identity:
        return Identity(tuple(self.columns[name].as_id for name in parts))

    def slice_of(self, parts: Sequence[str]) -> str | None:
        """The stored generated column ``CRC32(key) % 1024`` for a key of one text column."""

        def bare(expression: str) -> str:
            """Strip what the server adds when it rewrites an expression."""
            expression = re.sub(r"(?i)\smod\s", "%", expression)
            if self.columns[parts[0]].type == "char":
                expression = re.sub(r"(?i)\brtrim\b", "", expression)
            return re.sub(r"[\s()`\\]", "", expression).lower()

        identity = self.identity(parts)
        if not identity.is_text:
            return None
        expected = bare(f"CRC32({identity.utf8}) % {SLICES}")
        for column in self.columns.values():
            if "stored" in column.extra and bare(column.generated_as) == expected:
                return column.name
        return None

    def alter(self, additions: Sequence[str]) -> str:
        return f"ALTER TABLE {self.name} {', '.join(additions)}"

    def is_unique(self, key: Sequence[str]) -> bool:
        return any(index.unique and {*index.columns} <= {*key} for index in self.indexes)

    def octets(self, name: str) -> int:
        return self.columns[name].octets if name in self.columns else 0

    def repeated(self, key: Sequence[str], *, by_bytes: bool = True) -> str:
        """A key that several rows have, or "": of equal bytes, or as an index compares them."""
        if not {*key} <= {*self.columns}:
            return ""
        grouped = (self.columns[name].as_id.grouped for name in key)
        found = run(
            self.connection,
            f"SELECT {listed(key)} FROM (SELECT {listed(key)} FROM {self.name} LIMIT {_MANY})"
            f" AS some WHERE {' AND '.join(f'{quote(name)} IS NOT NULL' for name in key)}"
            f" GROUP BY {', '.join(grouped) if by_bytes else listed(key)}"
            " HAVING COUNT(*) > 1 LIMIT 1",
        )
        values = [v.hex() if isinstance(v, bytes) else v for v in (found[0] if found else ())]
        return ", ".join(f"{name} {value}" for name, value in zip(key, values, strict=False))

    def merged(self, key: Sequence[str]) -> str:
        """Why a unique key would refuse rows although none are `repeated`; "": it would not."""
        parts = [self.columns[name].as_id for name in key[:-1] if name in self.columns]
        ways = [part.merged for part in parts if not part.is_bytewise]
        if not ways or not (one := self.repeated(key, by_bytes=False)):
            return ""
        return f"{ways[0]}, as in {one}; eventpub tells them apart by their bytes"


class Versions:
    """Statistics of rows of the identity's columns and, last, the version.

    Attributes:
        with_several: aggregates with several versions.
        with_holes: of these, those with gaps.
        count_all_rows: versions number the rows of the table, not those of an aggregate.
    """

    def __init__(self, rows: Iterable[Sequence[Any]]) -> None:
        self.without_identity = 0
        found: dict[tuple[Any, ...], set[int]] = defaultdict(set)
        for row in rows:
            if None in row:
                self.without_identity += 1
            else:
                found[tuple(row[:-1])].add(int(row[-1]))
        every: set[int] = set().union(*found.values())
        several = [v for v in found.values() if len(v) > 1]
        self.lowest = [min(v) for v in found.values()]
        self.with_several = len(several)
        self.with_holes = sum(max(v) - min(v) + 1 != len(v) for v in several)
        are_distinct = len(every) == sum(map(len, found.values()))
        begin_later = sum(version > min(every) for version in self.lowest)
        is_dense = bool(every) and max(every) - min(every) < len(every)
        # aggregates whose old versions were purged may have none in common, but have no holes
        is_sure = is_dense or (len(found) > 2 and (self.with_holes > 0 or not several))
        self.count_all_rows = is_sure and are_distinct and begin_later == len(found) - 1 > 0


def plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def rank(role: str, name: str) -> int:
    known, name = _NAMES["names"][role], plain(name)
    return len(known) - known.index(name) if name in known else 0


def holds_no_events(table: str) -> bool:
    """Whether a framework uses this table name for something else."""
    return any(part in plain(table) for part in _NAMES["other_tables"])


def is_view(name: str, where: str) -> StoreError:
    return StoreError(
        "store.is_view",
        f"{name} is a view, which has no indexes; eventpub needs those of a table",
        where=where,
        suggestion="set store.table to the table that the view reads, and [store.columns] to the"
        " names of its columns",
    )


def read_table(config: Store, connection: Connection) -> EventTable:
    """Read the table from the catalogue; raises store.table_missing or store.privilege_missing."""
    where = f"{display_name(config)}, table {config.table}"
    this = f"table_schema = DATABASE() AND table_name = {literal(config.table)}"
    with mapped(where):
        # the catalogue shows neither a missing table nor one without privileges
        run(connection, f"SELECT 1 FROM {quote(config.table)} LIMIT 0")
        columns = _columns(connection, this)
        facts = "SELECT table_type, engine, row_format FROM information_schema.tables WHERE "
        [kind] = run_named(connection, facts + this)
        # not joined: a join would make these views open every table
        partitions = run(
            connection,
            "SELECT partition_expression, subpartition_expression"
            f" FROM information_schema.partitions WHERE {this}",
        )
        indexes = _indexes(connection, config.table)
    engine, row_format = str(kind["engine"]), str(kind["row_format"]).lower()
    is_large = engine.lower() == "innodb" and row_format in {"dynamic", "compressed"}
    words = re.findall(r"\w+", " ".join(str(by) for row in partitions for by in row).lower())
    return EventTable(
        connection,
        quote(config.table),
        where,
        columns,
        indexes,
        engine,
        3_072 if is_large else 767,
        [name for name in columns if name.lower() in words],
        not indexes and kind["table_type"].upper().endswith("VIEW"),
    )


def _columns(connection: Connection, this: str) -> dict[str, Column]:
    rows = run_named(
        connection,
        "SELECT column_name AS name, LOWER(data_type) AS type, column_type AS full_type,"
        " is_nullable = 'YES' AS nullable, character_set_name AS charset,"
        " collation_name AS collation, COALESCE(datetime_precision, 0) AS `precision`,"
        " COALESCE(generation_expression, '') AS generated_as,"
        " LOWER(COALESCE(column_default, '')) AS `default`, LOWER(COALESCE(extra, '')) AS extra,"
        " COALESCE(character_octet_length, 8) AS octets, column_comment AS comment"
        f" FROM information_schema.columns WHERE {this} ORDER BY ordinal_position",
    )
    return {row["name"]: Column(**row) for row in rows}


def _indexes(connection: Connection, table: str) -> list[TableIndex]:
    columns: dict[str, list[str]] = {}
    unique: dict[str, bool] = {}
    for row in run_named(connection, f"SHOW INDEX FROM {quote(table)}"):
        is_hidden = row.get("visible", "YES") == "NO" or row.get("ignored", "NO") == "YES"
        if row["index_type"] == "BTREE" and not is_hidden:
            # an expression has no column name
            columns.setdefault(row["key_name"], []).append(row["column_name"] or "")
            unique[row["key_name"]] = not int(row["non_unique"])
    return [TableIndex(name, tuple(of), unique[name]) for name, of in columns.items()]
