"""Rows by the hash of their aggregate, in files: any number of them in little memory.

Both sides of a comparison go through the same buckets, so that one bucket of each is all that is
ever held. What must hold: all rows of an aggregate are in one bucket.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import mkstemp
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Columns = Mapping[str, npt.NDArray[Any]]

_ROWS_OF_A_BUCKET = 65_536
_MOST_BUCKETS = 4_096


def bucket_count(rows: int) -> int:
    """A power of two: so many buckets that one of them has about 65,536 of the rows."""
    wanted = max(1, rows // _ROWS_OF_A_BUCKET)
    return int(min(_MOST_BUCKETS, 1 << (wanted - 1).bit_length()))


class Runs:
    """One side's rows: a file for each portion that was added, sorted by bucket.

    Args:
        folder: where the files are; made if it is not there. The files are the caller's to remove.
        fields: the columns beside `aggregate_id`, with their NumPy types.
        buckets: how many there are; the same for all files of the folder.
    """

    def __init__(self, folder: Path, fields: Mapping[str, Any], buckets: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._row = np.dtype([(name, np.dtype(kind)) for name, kind in fields.items()])
        self._buckets = buckets

    def add(self, ids: pa.Array[Any], columns: Columns) -> int:
        """Write a portion, which can be read from then on.

        Args:
            ids: strings, without null.

        Returns:
            How many bytes it has.
        """
        codes = ids.dictionary_encode()
        names: list[Any] = codes.dictionary.to_pylist()
        distinct = crc32s(names) % self._buckets
        of_row = distinct.astype(np.uint16)[codes.indices.to_numpy(zero_copy_only=False)]
        order = np.argsort(of_row, kind="stable")
        rows = np.empty(len(ids), self._row)
        for field in self._row.names or ():
            rows[field] = columns[field]
        text = ids.take(pa.array(order))  # type: ignore[arg-type]
        _, offsets, data = text.buffers()
        bounds = np.zeros(1, np.int32)
        if offsets is not None and len(ids):
            bounds = np.frombuffer(offsets, np.int32)[: len(ids) + 1]  # type: ignore[call-overload]
        ends = np.zeros(self._buckets + 1, np.int64)
        np.cumsum(np.bincount(of_row, minlength=self._buckets), out=ends[1:])
        descriptor, _ = mkstemp(".run", dir=self._folder)
        with os.fdopen(descriptor, "wb") as file:
            file.write(ends.tobytes())
            file.write(bounds[ends].astype(np.int64).tobytes())
            file.write(np.diff(bounds).astype(np.int32).tobytes())
            file.write(rows[order].tobytes())
            if data is not None:
                file.write(memoryview(data)[bounds[0] : bounds[-1]])
            return file.tell()

    def read(self, numbers: Sequence[int]) -> Iterator[tuple[int, pa.Table]]:
        """Each of some buckets that follow one another, with its rows.

        Those of a portion are in their order, portions in any.
        """
        paths = self._folder.glob("*.run")
        sources = [_Run(path, self._row, self._buckets, numbers) for path in paths]
        for number in numbers:
            parts = [part for source in sources if (part := source.bucket(number)) is not None]
            ids = pa.chunked_array([ids for ids, _ in parts], pa.string())
            rows = np.concatenate([rows for _, rows in parts] or [np.empty(0, self._row)])
            columns = {n: np.ascontiguousarray(rows[n]) for n in self._row.names or ()}
            yield number, pa.table({"aggregate_id": ids, **columns})


class _Run:
    """Some buckets, which follow one another, of one file.

    It is opened for each bucket, and memory holds where these lie and not where all do: there may
    be any number of files.
    """

    def __init__(
        self, path: Path, row: np.dtype[Any], buckets: int, numbers: Sequence[int]
    ) -> None:
        self._path, self._dtype = path, row
        self._first = numbers[0]
        begin, size = 8 * self._first, 8 * (len(numbers) + 1)
        width = 8 * (buckets + 1)
        with path.open("rb", buffering=0) as file:
            self._ends = np.frombuffer(_exactly(file, begin, size), np.int64)
            texts = _exactly(file, width + begin, size)
            base = int.from_bytes(_exactly(file, width, 8), "little")
            rows = int.from_bytes(_exactly(file, width - 8, 8), "little")
        self._text_ends = np.frombuffer(texts, np.int64) - base
        self._lengths_at = 2 * width
        self._rows_at = self._lengths_at + 4 * rows
        self._text_at = self._rows_at + row.itemsize * rows

    def bucket(self, number: int) -> tuple[pa.Array[Any], npt.NDArray[Any]] | None:
        at = number - self._first
        first, last = self._ends[at : at + 2].tolist()
        if first == last:
            return None
        text_first, text_last = self._text_ends[at : at + 2].tolist()
        with self._path.open("rb", buffering=0) as file:
            lengths = np.frombuffer(
                _exactly(file, self._lengths_at + 4 * first, 4 * (last - first)), np.int32
            )
            size = self._dtype.itemsize
            rows = np.frombuffer(
                _exactly(file, self._rows_at + size * first, size * (last - first)), self._dtype
            )
            text = _exactly(file, self._text_at + text_first, text_last - text_first)
        bounds = np.zeros(last - first + 1, np.int32)
        np.cumsum(lengths, out=bounds[1:])
        ids = pa.StringArray.from_buffers(
            last - first, pa.py_buffer(bounds.data), pa.py_buffer(text)
        )
        return ids, rows


def _exactly(file: Any, at: int, size: int) -> bytes:
    file.seek(at)
    data = bytes(file.read(size))
    while len(data) < size:
        more = file.read(size - len(data))
        if not more:
            raise OSError(0, "is shorter than it was", str(file.name))
        data += more
    return data


def crc32s(ids: Sequence[str]) -> npt.NDArray[np.uint32]:
    """CRC32 of each id's UTF-8 bytes: what the topic's partitions are made of."""
    crc = zlib.crc32
    return np.fromiter((crc(i.encode()) for i in ids), np.uint32, len(ids))
