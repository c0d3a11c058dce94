"""The connections of one `EventStore`: made when needed, kept while idle, one thread each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from eventpub.config import Store
from eventpub.sources.mysql.connection import ASKED_AFTER, KEPT_FOR, Connection, is_alive
from eventpub.sources.mysql.failures import mapped
from eventpub.sources.mysql.server import connect_to_primary


class Pool:
    """Connections to a server that may be read."""

    def __init__(self, config: Store, where: str) -> None:
        self._config = config
        self._where = where
        self._idle: list[tuple[Connection, float, float]] = []

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        """One that no other caller uses; after an error it is closed.

        Raises:
            StoreError: the database's, or store.replica.
        """
        connection, made = self._take_idle() or self._connect()
        finished = False
        try:
            with mapped(self._where):
                yield connection
            finished = True
        finally:
            if finished:
                self._idle.append((connection, made, monotonic()))
            else:
                connection._force_close()  # type: ignore[attr-defined]

    def close(self) -> None:
        """Closes what is idle."""
        while self._idle:
            self._idle.pop()[0].close()

    def _connect(self) -> tuple[Connection, float]:
        return connect_to_primary(self._config)[0], monotonic()

    def _take_idle(self) -> tuple[Connection, float] | None:
        """One that is there, and when it was made.

        What has not been used for a while, a server or a proxy may close; what was made long ago
        may lead to a server that is not the store any more.
        """
        while True:
            try:  # not asked before whether there is one: another thread may take the last
                connection, made, used = self._idle.pop()
            except IndexError:
                return None
            if monotonic() - made > KEPT_FOR:
                connection.close()
                continue
            if monotonic() - used <= ASKED_AFTER or is_alive(connection):
                return connection, made
            connection._force_close()  # type: ignore[attr-defined]
