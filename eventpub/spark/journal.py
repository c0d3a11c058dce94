"""A batch's journal: what one shard decided, kept at the location that all executors share.

A journal is created once and never changed. It has a report for the planner, the keys of the batch
in their order, and the changes to the shard's index. So a batch that Spark repeats yields the same
rows, and an executor whose index is older applies the changes of the batches that it missed.

An object is: the length of the head (8 bytes, little-endian), the head (JSON), the keys and the
changes (an Arrow IPC stream each).
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from eventpub.admission import values
from eventpub.channel import Report, fields_of, report_of
from eventpub.errors import StateError
from eventpub.index import Changes
from eventpub.spark.place import Place

_LENGTH = struct.Struct("<Q")
_FIRST_READ = 256 << 10
"""Bytes that are read at first for the head, which is some KB."""

_FIELDS: list[pa.Field[Any]] = [
    pa.field("aggregate_id", pa.string()),
    pa.field("version", pa.int64()),
    pa.field("create_time", pa.int64()),
    pa.field("late", pa.bool_()),
    pa.field("kind", pa.string()),
    pa.field("reason", pa.string()),
    pa.field("detail", pa.string()),
    pa.field("content", pa.binary()),
]
KEYS: pa.Schema = pa.schema(_FIELDS)
"""Of a batch's rows. `content` tells rows of one version apart, where the table allows several."""

_CHANGES = pa.schema([pa.field("key", pa.binary()), pa.field("value", pa.binary())])


@dataclass(frozen=True)
class Journal:
    """One shard's part of a batch.

    Attributes:
        report: what the shard did and where it is.
        keys: schema `KEYS`.
        changes: of the index.
    """

    report: Report
    keys: pa.Table
    changes: Changes

    @property
    def digest(self) -> str:
        """Hash of the keys and their order."""
        return hashlib.blake2b(_stream(self.keys), digest_size=16).hexdigest()


class Journals:
    """The journals of one query.

    Args:
        place: the shared location.
        query: the identity of the query's checkpoint; see `plan.Plan`.
    """

    def __init__(self, place: Place, query: str) -> None:
        self._place = place
        self._root = f"{query}/journal"

    def create(self, batch: int, shard: int, journal: Journal) -> bool:
        """Create a journal; False where another attempt has.

        Raises:
            StateError: state.unreachable
        """
        keys, changes = _stream(journal.keys), _stream(_table_of(journal.changes))
        head = {
            "report": fields_of(journal.report),
            "digest": hashlib.blake2b(keys, digest_size=16).hexdigest(),
            "keys": len(keys),
            "rows": journal.keys.num_rows,
        }
        text = json.dumps(head).encode()
        data = b"".join([_LENGTH.pack(len(text)), text, keys, changes])
        return self._place.create(self._name(batch, shard), data)

    def head(self, batch: int, shard: int) -> dict[str, Any] | None:
        """`report`, `digest` of the keys, number of `rows`; None where there is no journal."""
        name = self._name(batch, shard)
        data = self._place.read(name, _FIRST_READ)
        if data is not None and len(data) < (end := self._end_of_head(name, data)):
            data = self._place.read(name, end)
        return None if data is None else self._head(name, data)

    def read(self, batch: int, shard: int) -> Journal | None:
        """A journal; None where there is none."""
        name = self._name(batch, shard)
        data = self._place.read(name)
        if data is None:
            return None
        head, begin = self._head(name, data), self._end_of_head(name, data)
        middle = begin + head["keys"]
        try:
            keys, changes = _table(data[begin:middle]), _table(data[middle:])
        except (pa.ArrowException, OSError) as error:
            raise self._damaged(name) from error
        found = zip(values(changes, "key"), values(changes, "value"), strict=True)
        return Journal(head["report"], keys, dict(found))

    def changes(self, shard: int, after: int, upto: int) -> Iterator[Changes]:
        """The changes of a shard's batches ``after < batch <= upto``.

        Raises:
            StateError: state.journal_missing
        """
        for batch in range(after + 1, upto + 1):
            journal = self.read(batch, shard)
            if journal is None:
                raise StateError(
                    "state.journal_missing",
                    f"the journal of batch {batch}, shard {shard} is missing",
                    where=f"{self._place.location}/{self._name(batch, shard)}",
                    suggestion="restore the location of the state from a backup that belongs to the"
                    " query's checkpoint; or start with a new checkpoint and a new state, which"
                    " reads the table from read.start",
                )
            yield journal.changes

    def newest(self) -> int:
        """The last batch that has a journal; 0: none has."""
        names = self._place.names(self._root)
        return max((int(name.rsplit("/", 2)[1]) for name in names), default=0)

    def prune(self, upto: dict[int, int]) -> None:
        """Delete the journals up to a batch of each shard."""
        found = ([*name.rsplit("/", 2)[1:], name] for name in self._place.names(self._root))
        old = [n for batch, shard, n in found if int(batch) <= upto.get(int(shard), -1)]
        self._place.delete(*old)

    def _name(self, batch: int, shard: int) -> str:
        return f"{self._root}/{batch:012d}/{shard}"

    def _end_of_head(self, name: str, data: bytes) -> int:
        if len(data) < _LENGTH.size:
            raise self._damaged(name)
        (length,) = _LENGTH.unpack_from(data)
        return int(_LENGTH.size + length)

    def _head(self, name: str, data: bytes) -> dict[str, Any]:
        end = self._end_of_head(name, data)
        if len(data) < end:
            raise self._damaged(name)
        try:
            head: dict[str, Any] = json.loads(data[_LENGTH.size : end])
            return head | {"report": report_of(head["report"])}
        except (ValueError, KeyError, TypeError) as error:
            raise self._damaged(name) from error

    def _damaged(self, name: str) -> StateError:
        return StateError(
            "state.journal_damaged",
            "a journal cannot be read: it is truncated, or was written by another version",
            where=f"{self._place.location}/{name}",
            suggestion="if the machine has just lost power, remove this object: its batch was not"
            " published, and will be decided again; otherwise restore it from a backup, or install"
            " the version that wrote it",
        )


def no_journals(query: str, batch: int) -> StateError:
    """The checkpoint is at a batch that has none."""
    return StateError(
        "state.journal_missing",
        f"the checkpoint is at batch {batch}, whose journals are missing",
        where=f"query {query}",
        suggestion="the checkpoint and the state belong together: use the state that belongs to"
        " this checkpoint, or start with a new checkpoint; where a function of foreachBatch left"
        " rows unread, as show and limit do, and the query ended then: have it read all its rows",
    )


def _stream(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4", unify_dictionaries=True)
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table.combine_chunks())
    return sink.getvalue().to_pybytes()


def _table(data: bytes) -> pa.Table:
    return pa.ipc.open_stream(data).read_all()


def _table_of(changes: Changes) -> pa.Table:
    columns = [pa.array([*changes], pa.binary()), pa.array([*changes.values()], pa.binary())]
    return pa.Table.from_arrays(columns, schema=_CHANGES)
