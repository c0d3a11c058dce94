"""A proxy before a broker that knows where a Kafka request begins: it can hold one back.

`hold_next(api)` takes the next request of a kind out of the stream and cuts the client's
connection, as a network does that loses a connection but not what was sent on it; `release()`
delivers it.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading


class Proxy:
    """Listens at `port` and forwards to the broker; one thread for each direction."""

    def __init__(self, port: int, broker_port: int) -> None:
        self._broker = ("127.0.0.1", broker_port)
        self._hold: int | None = None
        self._held: bytes | None = None
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", port))
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def hold_next(self, api: int) -> None:
        """The next request of this kind is kept, and its connection cut."""
        self._hold = api

    @property
    def holds(self) -> bool:
        """Whether a request was kept."""
        return self._held is not None

    def release(self) -> int:
        """Delivers the request that was kept; returns the broker's error code."""
        assert self._held is not None
        with socket.create_connection(self._broker, timeout=10) as broker:
            broker.sendall(self._held)
            answer = _frame(broker)
        assert answer is not None
        # length, correlation id, throttle time, error code: EndTxn v1
        code: int = struct.unpack_from(">h", answer, 12)[0]
        return code

    def close(self) -> None:
        """Cuts everything and ends the threads."""
        self._listener.close()
        with self._lock:
            for each in self._sockets:
                _cut(each)
        for thread in self._threads:
            thread.join(5)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                broker = socket.create_connection(self._broker)
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
                if struct.unpack_from(">h", frame, 4)[0] == self._hold:
                    self._hold, self._held = None, frame
                    break
                broker.sendall(frame)
        _cut(client)
        _cut(broker)

    def _answers(self, broker: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := broker.recv(65536):
                client.sendall(data)
        _cut(client)
        _cut(broker)


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
