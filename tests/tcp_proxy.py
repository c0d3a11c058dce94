"""A TCP proxy that does to connections what networks, firewalls and failovers do."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import TracebackType
from typing import Self


class TcpProxy:
    """Forwards 127.0.0.1:`port` to `target`, one thread for each direction.

    Attributes:
        port: where it listens.
        target: the port that new connections go to; None: they are refused.
        accepted: how many connections there were.
        forgets_after: seconds without a byte after which a connection is swallowed.
        cuts_after: so many parts of what a client sends are forwarded, then it is cut.
    """

    def __init__(self, target: int | None) -> None:
        self.target = target
        self.accepted = 0
        self.forgets_after: float | None = None
        self.cuts_after: int | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._open: set[_Pair] = set()
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def swallow(self) -> None:
        """What is open now stays open, and nothing of it passes any more: as a NAT that forgot."""
        with self._lock:
            for pair in self._open:
                pair.swallows = True

    def cut(self) -> None:
        """Resets what is open now."""
        with self._lock:
            for pair in list(self._open):
                pair.close()

    def close(self) -> None:
        """Ends everything."""
        _close(self._listener)
        self._thread.join(5)
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.accepted += 1
                try:
                    if self.target is None:
                        raise ConnectionRefusedError
                    server = socket.create_connection(("127.0.0.1", self.target), 5)
                    server.settimeout(None)
                except OSError:
                    _close(client)
                    continue
                pair = _Pair(client, server)
                with self._lock:
                    self._open.add(pair)
                for source, sink in ((client, server), (server, client)):
                    arguments = (pair, source, sink)
                    threading.Thread(target=self._forward, args=arguments, daemon=True).start()

    def _forward(self, pair: _Pair, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                now, last_used = time.monotonic(), pair.last_used
                pair.last_used = now
                if self.forgets_after is not None and now - last_used > self.forgets_after:
                    pair.swallows = True
                if self.cuts_after is not None and sink is pair.sockets[1]:
                    pair.sent += 1
                    if pair.sent > self.cuts_after:
                        break
                if not pair.swallows:
                    sink.sendall(data)
        if pair.swallows:
            return
        pair.close()
        with self._lock:
            self._open.discard(pair)


class _Pair:
    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.sockets = (client, server)
        self.swallows = False
        self.last_used = time.monotonic()
        self.sent = 0

    def close(self) -> None:
        for each in self.sockets:
            _close(each)


def _close(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()
