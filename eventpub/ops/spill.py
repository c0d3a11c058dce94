"""Rows by the hash of their aggregate, in files: any number of them in little memory.

Both sides of a comparison go through the same buckets, so that one bucket of each is all that is
ever held. What must hold: all rows of an aggregate are in one bucket.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

BUCKETS = 256
"""100,000,000 rows make about 400,000 in each."""

_HELD_ROWS = 100_000


class Buckets:
    """One side's rows. Files are appended to and closed each time: no limit on open ones is met.

    Args:
        folder: an empty one; its files are the caller's to remove.
        fields: the columns beside `aggregate_id`, with their NumPy types.
    """

    def __init__(self, folder: Path, fields: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._fields = {name: np.dtype(kind) for name, kind in fields.items()}
        self._schema = pa.schema(
            [
                pa.field("aggregate_id", pa.string()),
                *(pa.field(n, pa.from_numpy_dtype(t)) for n, t in self._fields.items()),
            ]
        )
        self._held: list[tuple[list[str], Mapping[str, npt.NDArray[Any]]]] = []
        self._held_rows = 0
        self.rows = 0

    def add(self, ids: list[str], columns: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take rows; they are on disk after enough others, or after `flush`."""
        if not ids:
            return
        self._held.append((ids, columns))
        self._held_rows += len(ids)
        self.rows += len(ids)
        if self._held_rows >= _HELD_ROWS:
            self.flush()

    def flush(self) -> None:
        """Write what is held."""
        if not self._held:
            return
        ids = [i for part, _ in self._held for i in part]
        columns = {
            name: np.concatenate([np.asarray(c[name], kind) for _, c in self._held])
            for name, kind in self._fields.items()
        }
        self._held, self._held_rows = [], 0
        bucket = crc32s(ids) % BUCKETS
        order = np.argsort(bucket, kind="stable")
        arrays: list[pa.Array[Any]] = [pa.array(ids, pa.string())]
        arrays += [pa.array(column) for column in columns.values()]
        table = pa.Table.from_arrays(arrays, schema=self._schema).take(order)
        ends = np.cumsum(np.bincount(bucket, minlength=BUCKETS))
        start = 0
        for number, end in enumerate(ends.tolist()):
            if end > start:
                with (
                    self._file(number).open("ab") as file,
                    pa.ipc.new_stream(file, self._schema) as stream,
                ):
                    stream.write_table(table.slice(start, end - start))
            start = end

    def read(self, number: int) -> pa.Table:
        """The rows of one bucket, in the order in which they were added."""
        batches: list[pa.RecordBatch] = []
        path = self._file(number)
        if path.exists():
            with pa.memory_map(str(path)) as file:
                while file.tell() < file.size():
                    batches += list(pa.ipc.open_stream(file))
        return pa.Table.from_batches(batches, self._schema)

    def remove(self, number: int) -> None:
        """Give one bucket's disk space back."""
        self._file(number).unlink(missing_ok=True)

    def _file(self, number: int) -> Path:
        return self._folder / f"{number:03}.arrow"


def crc32s(ids: Sequence[str]) -> npt.NDArray[np.uint32]:
    """CRC32 of each id's UTF-8 bytes: what the topic's partitions are made of."""
    crc = zlib.crc32
    return np.fromiter((crc(i.encode()) for i in ids), np.uint32, len(ids))
