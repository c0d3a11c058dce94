"""Appending events to the event table, inside the caller's own transaction.

Optional help for writers: eventpub reads any table that keeps the rules, whoever wrote it. Nothing
here commits or rolls back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from eventpub.config import Columns
from eventpub.errors import VersionConflict
from eventpub.store.failures import error_number
from eventpub.store.layout import quote

_DUPLICATE = 1062

_text_payload: WeakKeyDictionary[Any, dict[tuple[str, str], bool]] = WeakKeyDictionary()


@dataclass(frozen=True)
class NewEvent:
    """An event that is to be appended.

    Args:
        event_type: published as ``ce_type``.
        payload: published byte for byte; UTF-8 where the column is JSON or TEXT.
        metadata: published as headers.
    """

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
    """Appends events to an aggregate whose last version is `expected_version`.

    Args:
        connection: of SQLAlchemy (`Connection` or `Session`) or PyMySQL; its transaction is the
            caller's to commit or to roll back.
        expected_version: the aggregate's last version as the caller knows it;
            ``first_version − 1`` (so 0) for a new aggregate.
        columns: the table's names of the columns that differ, as in ``[store.columns]``.
        first_version: the first version of an aggregate, as in ``[store]``.

    Returns:
        The versions of the new events.

    Raises:
        ValueError: the table's identity is several columns.
        VersionConflict: the last version is another one: somebody was faster, or a hole would be
            made. Nothing has been written; end the transaction, which may hold a lock beside the
            aggregate's last row.
    """
    names = Columns(**(columns or {}))
    if len(names.aggregate_id) > 1:
        raise ValueError("append writes tables whose aggregate_id is one column, of text")
    if expected_version < first_version - 1:
        raise _conflict(aggregate_id, expected_version, table)
    if not events:
        return []
    run = _Statements(connection, table, names)
    last = run.last_version(aggregate_id)
    if last is None:
        last = first_version - 1
    # The caller's snapshot may be older than the version it expects; versions never go away, so
    # only a lower one needs a second look, at what is committed now.
    if last > expected_version or (
        last < expected_version and not run.exists_now(aggregate_id, expected_version)
    ):
        raise _conflict(aggregate_id, expected_version, table)
    versions = list(range(expected_version + 1, expected_version + 1 + len(events)))
    try:
        run.insert(aggregate_id, versions, events)
    except Exception as error:
        if error_number(error) == _DUPLICATE and any(
            run.exists_now(aggregate_id, version) for version in versions
        ):
            raise _conflict(aggregate_id, expected_version, table) from error
        raise
    return versions


class _Statements:
    """The statements of `append` for one table, over SQLAlchemy or a DBAPI cursor."""

    def __init__(self, connection: Any, table: str, names: Columns) -> None:
        if hasattr(connection, "connection") and callable(connection.connection):
            connection = connection.connection()  # a Session's, in its transaction
        self._connection = connection
        self._names = names
        self._table = table
        self._quoted_table = _quote(table)

    def last_version(self, aggregate_id: str) -> int | None:
        names = self._names
        rows = self._run(
            f"SELECT MAX({_quote(names.version)}) FROM {self._quoted_table}"  # noqa: S608
            f" WHERE {_quote(names.aggregate_id[0])} = %s",
            (aggregate_id,),
        )
        return None if rows[0][0] is None else int(rows[0][0])

    def exists_now(self, aggregate_id: str, version: int) -> bool:
        """Whether a version is committed (waiting for whoever is just writing it)."""
        names = self._names
        return bool(
            self._run(
                f"SELECT 1 FROM {self._quoted_table}"  # noqa: S608
                f" WHERE {_quote(names.aggregate_id[0])} = %s AND {_quote(names.version)} = %s"
                " LOCK IN SHARE MODE",
                (aggregate_id, version),
            )
        )

    def insert(
        self, aggregate_id: str, versions: Sequence[int], events: Sequence[NewEvent]
    ) -> None:
        names = self._names
        columns = [names.aggregate_id[0], names.version, names.event_type, names.payload]
        with_metadata = any(event.metadata for event in events)
        if with_metadata:
            if not names.metadata:
                raise ValueError("the event has metadata, but the table has no column for it")
            columns.append(names.metadata)
        as_text = self._payload_is_text()
        values: list[Any] = []
        for version, event in zip(versions, events, strict=True):
            payload = event.payload
            values += [
                aggregate_id,
                version,
                event.event_type,
                payload.decode() if as_text and payload is not None else payload,
            ]
            if with_metadata:
                values.append(
                    json.dumps(dict(event.metadata), ensure_ascii=False) if event.metadata else None
                )
        row = "(" + ", ".join(["%s"] * len(columns)) + ")"
        self._run(
            f"INSERT INTO {self._quoted_table} ({', '.join(map(_quote, columns))})"  # noqa: S608
            f" VALUES {', '.join([row] * len(events))}",
            tuple(values),
        )

    def _payload_is_text(self) -> bool:
        """Whether the payload's column holds text, which MySQL does not take from binary values."""
        key = (self._table, self._names.payload)
        known = _text_payload.setdefault(self._raw(), {})
        if key not in known:
            rows = self._run(
                "SELECT character_set_name IS NOT NULL OR data_type = 'json'"
                " FROM information_schema.columns"
                " WHERE table_schema = DATABASE() AND table_name = %s AND column_name = %s",
                key,
            )
            known[key] = bool(rows and rows[0][0])
        return known[key]

    def _raw(self) -> Any:
        pooled = getattr(self._connection, "connection", None)
        return getattr(pooled, "driver_connection", None) or self._connection

    def _run(self, sql: str, parameters: tuple[Any, ...]) -> list[Any]:
        if hasattr(self._connection, "exec_driver_sql"):
            result = self._connection.exec_driver_sql(sql, parameters)
            return list(result) if result.returns_rows else []
        cursor = self._connection.cursor()
        try:
            cursor.execute(sql, parameters)
            return list(cursor.fetchall()) if cursor.description else []
        finally:
            cursor.close()


def _quote(name: str) -> str:
    """`quote`, for a statement with ``%s`` placeholders."""
    return quote(name).replace("%", "%%")


def _conflict(aggregate_id: str, expected: int, table: str) -> VersionConflict:
    return VersionConflict(
        "store.version_conflict",
        f"the last version of {aggregate_id!r} is not {expected}",
        where=f"table {table}",
        suggestion="load the aggregate again, decide again, append again",
    )
