"""Connections of writers, and what they write."""

from __future__ import annotations

import random
import socket
import string
from typing import TYPE_CHECKING

import pymysql
from pymysql.connections import Connection
from pymysql.constants import COMMAND
from sqlalchemy.engine import make_url

if TYPE_CHECKING:
    from pymysql.cursors import Cursor

    from tests.servers.transactions import Transaction

    _Base = Connection[Cursor]
else:
    _Base = Connection

TYPES = ("OrderPlaced", "ItemAdded", "OrderPaid", "OrderShipped", "NoteWritten")
TEXT_SIZE = 65_536


class WriterConnection(_Base):
    """A connection whose answer is read when it has come, instead of waited for."""

    transaction: Transaction | None = None

    if TYPE_CHECKING:  # what pymysql's stubs leave out
        _sock: socket.socket

        def _execute_command(self, command: int, sql: bytes) -> None: ...
        def _read_query_result(self) -> None: ...

    def send(self, statement: bytes) -> None:
        """Send it."""
        self._execute_command(COMMAND.COM_QUERY, statement)

    def receive(self) -> None:
        """Read the answer."""
        self._read_query_result()

    def fileno(self) -> int:
        """For a selector."""
        return self._sock.fileno()


class Pool:
    """The connections of one load that nobody uses.

    Args:
        url: of the database.
        most: how many there may be, those in use among them.
    """

    def __init__(self, url: str, most: int) -> None:
        self._url = url
        self._most = most
        self._opened = 0
        self.idle: list[WriterConnection] = []
        self.retry_at = 0.0

    def has_one(self, now: float) -> bool:
        """Whether there is one, by now."""
        if self.idle:
            return True
        if self._opened >= self._most or now < self.retry_at:
            return False
        try:
            self.idle.append(connect(self._url))
        except pymysql.Error:
            self.retry_at = now + 0.5
            return False
        self._opened += 1
        return True

    def give_back(self, connection: WriterConnection) -> None:
        """Its transaction is over."""
        if connection.transaction is not None:
            connection.transaction.connection = None
        connection.transaction = None
        self.idle.append(connection)

    def lose(self, connection: WriterConnection, now: float) -> None:
        """It is lost; most likely the others are as well."""
        drop(connection)
        self._opened -= 1
        for other in self.idle:
            drop(other)
        self._opened -= len(self.idle)
        self.idle.clear()
        self.retry_at = max(self.retry_at, now + 0.5)

    def close(self) -> None:
        """Close those that nobody uses."""
        for connection in self.idle:
            connection.close()


def connect(url: str) -> WriterConnection:
    """A connection that commits each statement by itself."""
    address = make_url(url)
    return WriterConnection(
        host=address.host or "127.0.0.1",
        port=address.port or 3306,
        user=address.username,
        password=address.password or "",
        database=address.database,
        autocommit=True,
        connect_timeout=5,
        ssl_disabled=True,  # decrypted bytes would wait where the selector does not see them
        init_command="SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",
    )


def drop(connection: WriterConnection) -> None:
    """Close it, whatever it says."""
    try:
        connection.close()
    except (pymysql.Error, OSError):
        return


def quoted(name: str) -> str:
    """A name in a statement."""
    return "`" + name.replace("`", "``") + "`"


def text_of(source: random.Random) -> str:
    """What payloads are cut from: as hard to compress as text without any repetition."""
    return "".join(source.choices(string.ascii_letters + string.digits, k=TEXT_SIZE))


def aggregate_name(prefix: str, number: int) -> str:
    """The id of an aggregate of `Load` and `fill`."""
    return f"{prefix}-{number:07d}"
