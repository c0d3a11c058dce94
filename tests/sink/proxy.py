"""A proxy before a broker that knows where a request begins, and does to one what a network may.

| fault | the request | the client's connection |
|---|---|---|
| `held` | is delivered when `release()` is called, as is all that follows it | stays, silent |
| `late` | is delivered when `release()` is called | is cut |
| `lost` | is never delivered | is cut |
| `muted` | is delivered, its answer is not | stays |
| `unanswered` | is delivered, its answer is not | is cut when the broker has answered |
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from dataclasses import dataclass, field
from typing import Literal

Fault = Literal["held", "late", "lost", "muted", "unanswered"]


_KEPT: frozenset[Fault] = frozenset({"held", "late", "lost"})


@dataclass
class _Struck:
    """A request that a fault has met."""

    fault: Fault
    client_port: int
    broker: socket.socket
    correlation: int
    dropped: bool = False
    released: threading.Event = field(default_factory=threading.Event)
    answered: threading.Event = field(default_factory=threading.Event)


class Proxy:
    """Listens at `port` and forwards to the broker; one thread for each direction."""

    def __init__(self, port: int, broker_port: int) -> None:
        self._broker = ("127.0.0.1", broker_port)
        self._next: tuple[int, Fault] | None = None
        self._struck: _Struck | None = None
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", port))
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def strike_next(self, api: int, fault: Fault) -> None:
        """The next request of this kind meets the fault."""
        self._struck, self._next = None, (api, fault)

    @property
    def has_struck(self) -> bool:
        struck = self._struck
        return struck is not None and (struck.fault != "unanswered" or struck.answered.is_set())

    @property
    def client_port(self) -> int:
        """The port that the struck request came from."""
        assert self._struck is not None
        return self._struck.client_port

    def release(self) -> None:
        """Delivers the request that was kept; returns when the broker has answered it."""
        assert self._struck is not None
        self._struck.released.set()
        assert self._struck.answered.wait(10), "the broker has not answered the late request"

    def drop(self) -> None:
        """The request that was kept is never delivered; its connection is cut."""
        assert self._struck is not None
        self._struck.dropped = True
        self._struck.released.set()

    def calm(self) -> None:
        """No fault waits for its request any more, and none is kept: a failed test ends here."""
        self._next = None
        if self._struck is not None:
            self._struck.released.set()

    def close(self) -> None:
        """Cuts everything and ends the threads."""
        _cut(self._listener)
        if self._struck is not None:
            self.drop()
        with self._lock:
            for each in self._sockets:
                _cut(each)
        for thread in self._threads:
            thread.join(5)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    broker = socket.create_connection(self._broker)
                except OSError:  # not started yet
                    _cut(client)
                    continue
                with self._lock:
                    self._sockets |= {client, broker}
                for target, source, to in (
                    (self._requests, client, broker),
                    (self._answers, broker, client),
                ):
                    thread = threading.Thread(target=target, args=(source, to), daemon=True)
                    self._threads.append(thread)
                    thread.start()

    def _requests(self, client: socket.socket, broker: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while (frame := _frame(client)) is not None:
                struck = self._strike(frame, client, broker)
                if struck is None:
                    broker.sendall(frame)
                    continue
                if struck.fault == "lost":
                    break
                if struck.fault == "late":
                    _cut(client)
                if struck.fault in _KEPT:
                    struck.released.wait()
                if struck.dropped:
                    break
                broker.sendall(frame)
                struck.answered.wait(10)
                if struck.fault in {"late", "unanswered"}:
                    break
        _cut(client)
        _cut(broker)

    def _strike(self, frame: bytes, client: socket.socket, broker: socket.socket) -> _Struck | None:
        api, _, correlation = struct.unpack_from(">hhi", frame, 4)
        with self._lock:
            if self._next is None or self._next[0] != api:
                return None
            fault, self._next = self._next[1], None
            self._struck = _Struck(fault, client.getpeername()[1], broker, correlation)
            return self._struck

    def _answers(self, broker: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while (frame := _frame(broker)) is not None:
                fault = self._answers_struck(frame, broker)
                if fault == "unanswered":
                    break
                if fault == "muted":
                    continue
                with contextlib.suppress(OSError):  # the client may have gone before the request
                    client.sendall(frame)
        _cut(client)
        _cut(broker)

    def _answers_struck(self, frame: bytes, broker: socket.socket) -> Fault | None:
        struck = self._struck
        (correlation,) = struct.unpack_from(">i", frame, 4)
        if struck is None or struck.broker is not broker or struck.correlation != correlation:
            return None
        struck.answered.set()
        return struck.fault


def _cut(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()


def _frame(source: socket.socket) -> bytes | None:
    """One request or answer, with its length before it; None at the end."""
    data = b""
    wanted = 4
    while len(data) < wanted:
        part = source.recv(wanted - len(data))
        if not part:
            return None
        data += part
        if len(data) == 4:
            wanted += struct.unpack(">i", data)[0]
    return data
