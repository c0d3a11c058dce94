"""Appending events to the event table in the caller's own transaction."""

# ruff: noqa: S608 (names come through `_quote`)

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from eventpub.config import Columns
from eventpub.errors import VersionConflict
from eventpub.sources.mysql.connection import error_number
from eventpub.sources.mysql.table import quote

_DUPLICATE = 1062


@dataclass(frozen=True)
class NewEvent:
    """An event to append; `payload` is published byte for byte, `metadata` as headers."""

    event_type: str
    payload: bytes | None = None
    metadata: Mapping[str, str] | None = None


def append(  # noqa: PLR0913 (options, by keyword)
    connection: Any,
    aggregate_id: str,
    expected_version: int,
    events: Sequence[NewEvent],
    *,
    table: str = "events",
    columns: Mapping[str, str] | None = None,
    first_version: int = 1,
) -> list[int]:
    """Append events to an aggregate whose last version is `expected_version`.

    Args:
        connection: SQLAlchemy's (`Connection` or `Session`) or PyMySQL's, in a transaction that the
            caller commits or rolls back.
        expected_version: ``first_version − 1`` (so 0) for a new aggregate.
        columns, first_version: as in ``[store.columns]`` and ``[store]``.

    Returns:
        The versions of the new events.

    Raises:
        ValueError: the table's identity has several columns.
        VersionConflict: the last version is another one. Nothing was written; end the transaction,
            which may hold a lock.
    """
    names = Columns(**(columns or {}))
    if len(names.aggregate_id) > 1:
        raise ValueError("append supports only tables whose aggregate_id is one text column")
    if expected_version < first_version - 1:
        raise _conflict(aggregate_id, expected_version, table)
    if not events:
        return []
    if any(event.metadata for event in events) and not names.metadata:
        raise ValueError("the event has metadata, but the table has no column for it")

    def select(what: str, version: int | None = None) -> list[Any]:
        sql = f"SELECT {what} FROM {_quote(table)} WHERE {_quote(names.aggregate_id[0])} = %s"
        if version is None:
            return _run(connection, sql, (aggregate_id,))
        # waits for another writer's open transaction on it
        sql += f" AND {_quote(names.version)} = %s LOCK IN SHARE MODE"
        return _run(connection, sql, (aggregate_id, version))

    [(last,)] = select(f"MAX({_quote(names.version)})")
    if last is None:
        last = first_version - 1
    # The caller's snapshot may be older than the version it expects. Versions are never removed,
    # so only a lower one needs a second check, against committed rows.
    if last > expected_version or (last < expected_version and not select("1", expected_version)):
        raise _conflict(aggregate_id, expected_version, table)
    versions = list(range(expected_version + 1, expected_version + 1 + len(events)))
    try:
        _run(connection, *_insert(table, names, aggregate_id, versions, events))
    except Exception as error:
        if error_number(error) == _DUPLICATE and any(select("1", version) for version in versions):
            raise _conflict(aggregate_id, expected_version, table) from error
        raise
    return versions


def _insert(
    table: str,
    names: Columns,
    aggregate_id: str,
    versions: Sequence[int],
    events: Sequence[NewEvent],
) -> tuple[str, tuple[Any, ...]]:
    columns = [names.aggregate_id[0], names.version, names.event_type, names.payload]
    metadata = names.metadata if any(event.metadata for event in events) else None
    if metadata:
        columns.append(metadata)
    rows: list[str] = []
    values: list[Any] = []
    for version, event in zip(versions, events, strict=True):
        # bytes for a binary column; text for one that refuses bytes, such as JSON
        payload = "CONVERT(%s USING utf8mb4)" if _is_text(event.payload) else "%s"
        rows.append(f"(%s, %s, %s, {payload}{', %s' if metadata else ''})")
        values += [aggregate_id, version, event.event_type, event.payload]
        if metadata:
            text = json.dumps(dict(event.metadata), ensure_ascii=False) if event.metadata else None
            values.append(text)
    listed = ", ".join(map(_quote, columns))
    return f"INSERT INTO {_quote(table)} ({listed}) VALUES {', '.join(rows)}", tuple(values)


def _is_text(payload: bytes | None) -> bool:
    try:
        return payload is not None and payload.decode() is not None
    except UnicodeDecodeError:
        return False


def _run(connection: Any, sql: str, parameters: tuple[Any, ...]) -> list[Any]:
    if callable(getattr(connection, "connection", None)):
        connection = connection.connection()  # a Session's, in its transaction
    if hasattr(connection, "exec_driver_sql"):
        result = connection.exec_driver_sql(sql, parameters)
        return list(result) if result.returns_rows else []
    with closing(connection.cursor()) as cursor:
        cursor.execute(sql, parameters)
        return list(cursor.fetchall()) if cursor.description else []


def _quote(name: str) -> str:
    return quote(name).replace("%", "%%")


def _conflict(aggregate_id: str, expected: int, table: str) -> VersionConflict:
    return VersionConflict(
        "store.version_conflict",
        f"the last version of {aggregate_id!r} is not {expected}",
        where=f"table {table}",
        suggestion="reload the aggregate, decide again, and append again",
    )
