"""What the catalogue says of a table: its columns, its indexes, and what limits both.

Read once, and taken by everything that judges a table: the layout that the publisher reads by, what
`init` proposes, what `doctor` and `migrate` find missing.
"""

# ruff: noqa: S608 (names and values come through `quote` and `literal`)

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eventpub.config import Store
from eventpub.errors import StoreError
from eventpub.sources.mysql.connection import Connection, display_name, run, run_named
from eventpub.sources.mysql.failures import error_number, mapped
from eventpub.sources.mysql.identity import literal

TEXT = {"char", "varchar", "tinytext", "text", "mediumtext", "longtext"}
BYTES = {"binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob"}
INTEGERS = {"tinyint", "smallint", "mediumint", "int", "bigint"}
OF_KEY = TEXT | INTEGERS | {"enum", "varbinary", "binary(16)", "uuid"}
TIMES = {"timestamp", "datetime"}

_SAMPLE = 100_000
_DENIED = 1142


def quote(name: str) -> str:
    """A name as an SQL identifier: whatever it contains, it stays one name."""
    return "`" + name.replace("`", "``") + "`"


def listed(names: Sequence[str]) -> str:
    """Names as SQL identifiers, with commas."""
    return ", ".join(map(quote, names))


@dataclass(frozen=True)
class TableIndex:
    """One usable index: its name and columns in order (a prefix of a column counts as it)."""

    name: str
    columns: tuple[str, ...]
    unique: bool


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

    def is_one_of(self, types: set[str]) -> bool:
        """Whether its type, as `binary` or `binary(16)`, is among some."""
        return not types.isdisjoint({self.type, self.full_type})

    @property
    def counts_rows(self) -> bool:
        """Whether it is AUTO_INCREMENT."""
        return "auto_increment" in self.extra


@dataclass
class Roles:
    """Which column stands for what.

    Attributes:
        parts: the columns of the identity.
        names: the other columns by our names; `id` and `metadata` only where there are any.
    """

    parts: tuple[str, ...]
    names: dict[str, str]

    @property
    def key(self) -> tuple[str, ...]:
        """What tells events apart: the columns of the identity, and the version."""
        return (*self.parts, self.names["version"])


@dataclass(frozen=True)
class EventTable:
    """A table as it is.

    Attributes:
        name: quoted.
        where: for messages.
        indexes: B-trees that the optimizer may use.
        longest_key: bytes that an index may have.
        partitioned_by: columns in the expressions by which it is partitioned.
    """

    connection: Connection
    name: str
    where: str
    columns: Mapping[str, Column]
    indexes: Sequence[TableIndex]
    engine: str
    longest_key: int
    partitioned_by: Sequence[str]
    is_view: bool

    def require_table(self) -> None:
        """Raises: StoreError: store.is_view."""
        if self.is_view:
            raise is_view(self.name.strip("`"), self.where)

    def free(self, name: str) -> str:
        """A name that no column has."""
        return f"eventpub_{name}" if name in {n.lower() for n in self.columns} else name

    def alter(self, additions: Sequence[str]) -> str:
        """The statement that makes changes."""
        return f"ALTER TABLE {self.name} {', '.join(additions)}"

    def is_unique(self, key: Sequence[str]) -> bool:
        """Whether the table refuses a second row of a key."""
        return any(index.unique and {*index.columns} <= {*key} for index in self.indexes)

    def octets(self, name: str) -> int:
        """How long a value may be; 0 for a column that is not there."""
        return self.columns[name].octets if name in self.columns else 0

    def repeated(self, key: Sequence[str]) -> str:
        """A key that several of the first rows have, as text; "": they have none."""
        if not {*key} <= {*self.columns}:
            return ""
        found = run(
            self.connection,
            f"SELECT {listed(key)} FROM (SELECT {listed(key)} FROM {self.name} LIMIT {_SAMPLE})"
            f" AS some WHERE {' AND '.join(f'{quote(name)} IS NOT NULL' for name in key)}"
            f" GROUP BY {listed(key)} HAVING COUNT(*) > 1 LIMIT 1",
        )
        values = [v.hex() if isinstance(v, bytes) else v for v in (found[0] if found else ())]
        return ", ".join(f"{name} {value}" for name, value in zip(key, values, strict=False))

    def definition(self, column: str) -> tuple[str, str]:
        """A column's own definition, as the server shows it, and the comment behind it; "": an
        account that may read only some columns is not shown it."""
        try:
            text = str(run(self.connection, f"SHOW CREATE TABLE {self.name}")[0][1])
        except Exception as error:
            if error_number(error) != _DENIED:
                raise
            return "", ""
        lines = (line.strip().rstrip(",") for line in text.splitlines())
        start = f"{quote(column)} "
        line = next(line for line in lines if line.startswith(start))
        body, mark, comment = line.removeprefix(start).partition(" COMMENT '")
        return body, mark + comment


def is_view(name: str, where: str) -> StoreError:
    """The error that a view cannot be published."""
    return StoreError(
        "store.is_view",
        f"{name} is a view, which has no indexes; eventpub needs those of a table",
        where=where,
        suggestion="set store.table to the table that the view reads, and [store.columns] to the"
        " names of its columns",
    )


def read_table(config: Store, connection: Connection) -> EventTable:
    """Reads the configured table's facts from the catalogue.

    Raises:
        StoreError: store.table_missing, store.privilege_missing
    """
    where = f"{display_name(config)}, table {config.table}"
    this = f"table_schema = DATABASE() AND table_name = {literal(config.table)}"
    with mapped(where):
        # tells a missing table from one that we may not see; the catalogue shows neither
        run(connection, f"SELECT 1 FROM {quote(config.table)} LIMIT 0")
        columns = _columns(connection, this)
        facts = "SELECT table_type, engine, row_format FROM information_schema.tables WHERE "
        [kind] = run_named(connection, facts + this)
        # not joined: each of these views looks at one table where that is named, else at all
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
        "SELECT column_name, data_type, column_type, is_nullable, character_set_name,"
        " collation_name, datetime_precision, generation_expression, column_default,"
        " extra, character_octet_length"
        f" FROM information_schema.columns WHERE {this} ORDER BY ordinal_position",
    )
    return {
        row["column_name"]: Column(
            name=row["column_name"],
            type=row["data_type"].lower(),
            full_type=row["column_type"].lower(),
            nullable=row["is_nullable"].upper() == "YES",
            charset=row["character_set_name"],
            collation=row["collation_name"],
            precision=int(row["datetime_precision"] or 0),
            generated_as=row["generation_expression"] or "",
            default=(row["column_default"] or "").lower(),
            extra=(row["extra"] or "").lower(),
            octets=int(row["character_octet_length"] or 8),
        )
        for row in rows
    }


def _indexes(connection: Connection, table: str) -> list[TableIndex]:
    columns: dict[str, list[str]] = {}
    unique: dict[str, bool] = {}
    for row in run_named(connection, f"SHOW INDEX FROM {quote(table)}"):
        is_hidden = row.get("visible", "YES") == "NO" or row.get("ignored", "NO") == "YES"
        if row["index_type"] == "BTREE" and not is_hidden:
            # an expression has no name, and is no column of ours
            columns.setdefault(row["key_name"], []).append(row["column_name"] or "")
            unique[row["key_name"]] = not int(row["non_unique"])
    return [TableIndex(name, tuple(of), unique[name]) for name, of in columns.items()]
