"""Rows of a SELECT as Arrow columns, read in bulk from MySQL's text protocol.

PyMySQL spends about 10 µs on a row of six columns. Reading the socket in large pieces and copying
values a column at a time by numpy and Arrow takes 1.4 µs. It uses private names of PyMySQL's
connection; if one is missing or a known answer is misread, nothing is read.

https://dev.mysql.com/doc/dev/mysql-server/latest/page_protocol_com_query_response_text_resultset.html
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import cache
from struct import Struct
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pymysql.err
from pymysql.connections import Connection
from pymysql.constants import COMMAND
from pymysql.protocol import MysqlPacket

from eventpub.errors import StoreError

Columns = list["pa.Array[Any]"]
"""Rows, column by column, as the server's text (binary columns: their bytes)."""

_PIECE = 256 * 1024
_LONGEST = 0xFFFFFF  # a packet of this length is continued in the next one
_END, _ERROR = 0xFE, 0xFF  # first byte of a packet that is no row
_NULL = 0xFB  # first byte of a value
_WIDTHS = {0xFC: 2, 0xFD: 3, 0xFE: 8}  # bytes of the length after a first byte
_header = Struct("<I").unpack_from


def stream(connection: Any, sql: str, *, rows: int, size: int) -> Iterator[Columns]:
    """Run a SELECT and yield its rows in blocks of at most `rows` rows and about `size` bytes.

    A consumer that stops early must close the connection.

    Raises:
        StoreError: store.client_unknown
    """
    if not is_safe():
        raise StoreError(
            "store.client_unknown",
            f"rows cannot be read with PyMySQL {pymysql.__version__}: it differs from the versions"
            " that this version of eventpub knows",
            suggestion="install one that it knows: pip install 'pymysql[rsa]>=1.1,<2.3'",
        )
    connection._execute_command(COMMAND.COM_QUERY, sql)
    width = connection._read_packet().read_length_encoded_integer()
    for _ in range(width + 1):  # skip the column definitions, which are known, and their end
        connection._read_packet()
    result = _Result(connection, width)
    while not result.ended:
        yield from result.blocks(rows, size)


_NAMES = ("_execute_command", "_read_packet", "_rfile", "_force_close")
_KNOWN = [[b"a", b""], [None, b"x" * 300]]
_ANSWER = b"\x03\0\0\1\1a\xfb" + b"\x30\1\0\2\0\xfc\x2c\1" + b"x" * 300 + b"\5\0\0\3\xfe\0\0\2\0"
"""These rows in the protocol, and the end of the result."""


@cache
def is_safe() -> bool:
    """Whether PyMySQL has the private names, and a known answer is read correctly."""
    try:
        result = _Result(SimpleNamespace(_rfile=io.BytesIO(_ANSWER)), 2)
        (columns,) = result.blocks(10, 1 << 20)
        is_known = result.ended and [column.to_pylist() for column in columns] == _KNOWN
        return is_known and all(hasattr(Connection, name) for name in _NAMES)
    except Exception:
        return False


class _Result:
    """The rest of one result set; `ended` once the server has said that it is complete."""

    def __init__(self, connection: Any, width: int) -> None:
        self._connection = connection
        self._width = width
        self._data = bytearray()
        self.ended = False

    def blocks(self, rows: int, size: int) -> Iterator[Columns]:
        data, at = self._data, 0
        starts: list[int] = []
        long_row = None
        while len(starts) < rows and at < size and not self.ended:
            end = len(data)
            if end - at < 4:
                data += self._read(4)
                continue
            length = _header(data, at)[0] & _LONGEST
            if at + 4 + length > end:
                data += self._read(at + 4 + length - end)
                continue
            if length == _LONGEST:
                long_row, at = self._join(data, at)
                break
            starts.append(at + 4)
            at += 4 + length
            if at == end:
                self._look_for_end(data, starts, length)
        self._data = data[at:]
        if starts:
            yield _columns(data, starts, self._width)
        if long_row is not None:
            yield _columns(long_row, [0], self._width)

    def _look_for_end(self, data: bytearray, starts: list[int], length: int) -> None:
        """Remove the last packet if it ends the result."""
        head = data[starts[-1]]
        # a long packet that begins like this is a row with a long first value
        if head == _ERROR or (head == _END and length < 9):
            self.ended = True
            start = starts.pop()
            if head == _ERROR:
                MysqlPacket(bytes(data[start : start + length]), "utf-8").raise_for_error()

    def _join(self, data: bytearray, at: int) -> tuple[bytearray, int]:
        row = bytearray()
        length = _LONGEST
        while length == _LONGEST:
            while len(data) - at < 4:
                data += self._read(4)
            length = _header(data, at)[0] & _LONGEST
            at += 4
            while len(data) - at < length:
                data += self._read(length - (len(data) - at))
            row += data[at : at + length]
            at += length
        return row, at

    def _read(self, missing: int) -> bytes:
        connection = self._connection
        reason = ""
        try:
            file = connection._rfile
            piece: bytes = file.read(missing) if missing > _PIECE else file.read1(_PIECE)
        except OSError as error:
            piece, reason = b"", f" ({error})"
        if not piece:
            connection._force_close()
            raise pymysql.err.OperationalError(
                2013, f"Lost connection to MySQL server during query{reason}"
            )
        return piece


def _columns(data: bytearray, starts: list[int], width: int) -> Columns:
    buffer = pa.py_buffer(data)
    octets = np.frombuffer(data, np.uint8)
    at = np.array(starts, np.int64)
    columns = []
    for _ in range(width):
        head = octets[at]
        length = head.astype(np.int64)
        at += 1
        nulls = head == _NULL
        for mark, size in _WIDTHS.items() if head.max() > _NULL else ():
            chosen = np.flatnonzero(head == mark)
            if len(chosen):
                octets_at = at[chosen]
                length[chosen] = sum(
                    octets[octets_at + i].astype(np.int64) << (8 * i) for i in range(size)
                )
                at[chosen] += size
        length[nulls] = 0
        columns.append(_values(buffer, at, length, nulls))
        at = at + length
    return columns


def _values(
    buffer: pa.Buffer,
    at: npt.NDArray[np.int64],
    length: npt.NDArray[np.int64],
    nulls: npt.NDArray[np.bool_],
) -> pa.Array[Any]:
    """Copy values out of a buffer.

    Arrow can only describe adjacent values, so the bytes between two are values as well, and every
    second one is taken.
    """
    count = len(at)
    bounds = np.empty(2 * count, np.int32)
    bounds[0::2] = at
    bounds[1::2] = at + length
    spread = pa.BinaryArray.from_buffers(
        pa.binary(), 2 * count - 1, [None, pa.py_buffer(bounds.data), buffer]
    )
    every_second = np.arange(0, 2 * count, 2)
    wanted: Any = pa.array(every_second, mask=nulls) if nulls.any() else every_second
    return spread.take(wanted)
