"""Splitting the bytes of MySQL's text protocol: whatever the rows and however they arrive."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pymysql
import pymysql.err
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventpub.errors import StoreError
from eventpub.private_apis import packets as packets_module
from eventpub.private_apis.packets import _Result, is_safe, stream
from tests.conftest import FreshDatabase

END = b"\x05\x00\x00\x00\xfe\x00\x00\x02\x00"
Row = list[bytes | None]


class Trickle(io.RawIOBase):
    """A socket that gives a few bytes at a time."""

    def __init__(self, data: bytes, sizes: list[int]) -> None:
        self._data, self._sizes, self._at, self._turn = data, sizes, 0, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        size = min(len(buffer), self._sizes[self._turn % len(self._sizes)])
        self._turn += 1
        piece = self._data[self._at : self._at + size]
        self._at += len(piece)
        buffer[: len(piece)] = piece
        return len(piece)


class Wire:
    """What `_Result` needs of PyMySQL's connection."""

    def __init__(self, data: bytes, sizes: list[int] | None = None) -> None:
        self._rfile = io.BufferedReader(Trickle(data, sizes or [1 << 20]))
        self.closed = False

    def _force_close(self) -> None:
        self.closed = True


def value(of: bytes | None) -> bytes:
    """A value as the protocol writes it."""
    if of is None:
        return b"\xfb"
    for limit, head, width in ((251, b"", 1), (1 << 16, b"\xfc", 2), (1 << 24, b"\xfd", 3)):
        if len(of) < limit:
            return head + len(of).to_bytes(width, "little") + of
    return b"\xfe" + len(of).to_bytes(8, "little") + of


def packets(row: Row) -> bytes:
    """A row's packets: more than one where it is longer than 16 MiB."""
    data, written = b"".join(map(value, row)), b""
    while True:
        part, data = data[:0xFFFFFF], data[0xFFFFFF:]
        written += len(part).to_bytes(3, "little") + b"\x00" + part
        if len(part) < 0xFFFFFF:
            return written


def blocks(wire: Wire, width: int, rows: int, size: int) -> Iterator[list[Row]]:
    result = _Result(wire, width)
    while not result.ended:
        for columns in result.blocks(rows, size):
            yield [list(row) for row in zip(*(c.to_pylist() for c in columns), strict=True)]


values = st.none() | st.binary(max_size=40) | st.integers(240, 300).map(lambda n: b"v" * n)


@settings(max_examples=200)
@given(
    st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(values, min_size=n, max_size=n))),
    st.lists(st.integers(1, 50), min_size=1),
    st.integers(1, 10),
    st.integers(1, 2_000),
)
def test_any_rows_in_any_pieces_come_out_as_they_went_in(
    rows: list[Row], sizes: list[int], most: int, size: int
) -> None:
    width = len(rows[0]) if rows else 2
    wire = Wire(b"".join(map(packets, rows)) + END, sizes)
    found = list(blocks(wire, width, most, size))
    assert [row for block in found for row in block] == rows
    assert all(1 <= len(block) <= most for block in found)


@pytest.mark.parametrize("length", [0xFFFF, 0x10000, 0xFFFFFF - 5, 0xFFFFFF, 0x1FFFFFF])
def test_long_values_and_rows_longer_than_a_packet(length: int) -> None:
    rows: list[Row] = [[b"a", b"1"], [b"v" * length, None], [None, b"3"]]
    found = list(blocks(Wire(b"".join(map(packets, rows)) + END), 2, 10, 1 << 20))
    assert [row for block in found for row in block] == rows


def test_an_error_in_the_middle_of_a_result_is_raised() -> None:
    error = b"\xff" + (1317).to_bytes(2, "little") + b"#70100Query execution was interrupted"
    wire = Wire(packets([b"a"]) + len(error).to_bytes(3, "little") + b"\x01" + error)
    with pytest.raises(pymysql.err.OperationalError, match="interrupted"):
        list(blocks(wire, 1, 10, 1 << 20))


def test_a_connection_that_ends_in_the_middle_of_a_result_is_an_error() -> None:
    wire = Wire(packets([b"a"]) + packets([b"b"])[:-1])
    with pytest.raises(pymysql.err.OperationalError, match="Lost connection"):
        list(blocks(wire, 1, 10, 1 << 20))
    assert wire.closed


@pytest.fixture
def unknown_client(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A PyMySQL without one of the private names."""
    monkeypatch.setattr(packets_module, "_NAMES", ("_execute_command", "_is_gone"))
    is_safe.cache_clear()
    yield
    is_safe.cache_clear()


def test_the_installed_client_is_known() -> None:
    """If not, a new version of PyMySQL has to be looked at: see `packets._NAMES`."""
    assert is_safe()


def test_a_client_without_a_private_name_is_refused(unknown_client: None) -> None:
    assert not is_safe()
    with pytest.raises(StoreError) as raised:
        next(stream(None, "SELECT 1", rows=1, size=1))
    assert raised.value.code == "store.client_unknown"
    assert pymysql.__version__ in raised.value.message
    assert "pip install" in str(raised.value.suggestion)


def test_who_reads_a_known_answer_wrongly_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    is_safe.cache_clear()
    monkeypatch.setattr(packets_module, "_NULL", 0xFA)
    assert not is_safe()
    is_safe.cache_clear()


@pytest.mark.parametrize("database", ["mysql", "mariadb"], indirect=True)
def test_a_real_server_agrees_with_pymysql(database: FreshDatabase) -> None:
    sql = (
        "SELECT 1, NULL, '', 'Straße', X'00FF80', REPEAT('x', 300), REPEAT('y', 70000),"
        " TIMESTAMP '2026-01-02 03:04:05.000006', -9223372036854775807 UNION ALL"
        " SELECT 2, 'n', NULL, NULL, X'', 'short', 'short',"
        " TIMESTAMP '1999-12-31 23:59:59.000000', 0"
    )
    with database.connect(charset="utf8mb4") as connection:
        (columns,) = stream(connection, sql, rows=10, size=1 << 20)
        read = [list(row) for row in zip(*(c.to_pylist() for c in columns), strict=True)]
        with connection.cursor() as cursor:  # and the connection is free for the next statement
            cursor.execute(sql)
            rows = cursor.fetchall()
    expected = [
        [v if v is None or isinstance(v, bytes) else str(v).encode() for v in row] for row in rows
    ]
    for row in [*read, *expected]:
        row[7] = row[7][:19]  # PyMySQL leaves trailing zeros of a second out
    assert read == expected
