"""How a server would execute a statement."""

from __future__ import annotations

from dataclasses import dataclass

from eventpub.sources.mysql.connection import Connection, is_mariadb, run_named


@dataclass(frozen=True)
class Plan:
    """How the server would execute one part of a statement, in the words of EXPLAIN."""

    access: str
    index: str | None
    rows: int
    extra: str

    @property
    def is_index_range(self) -> bool:
        """Whether it reads only the wanted part of an index, in the index's order."""
        return self.access in {"range", "ref", "const", "eq_ref"} and "filesort" not in self.extra


def explain(connection: Connection, sql: str) -> list[Plan]:
    """The server's plan of a statement."""
    form = "" if is_mariadb(connection) else "FORMAT=TRADITIONAL "
    return [
        Plan(row["type"] or "", row["key"], int(row["rows"] or 0), row["extra"] or "")
        for row in run_named(connection, f"EXPLAIN {form}{sql}")
    ]
