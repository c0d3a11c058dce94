"""A TCP relay before the listeners of a cluster, which can take one broker off the network.

Knows nothing of Kafka. What is cut off gets no packet through in either direction, and no error:
what was sent waits, as it would in the operating systems' buffers, and arrives when the network is
back, unless one of the ends has closed the connection meanwhile.
"""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import threading
from collections.abc import Callable

from eventpub.errors import LocalError


class Network:
    """Relays between clients and brokers, and between brokers.

    Args:
        pid_of: the process id of each broker that runs, by its number.

    Raises:
        LocalError: `local.psutil_missing`.
    """

    def __init__(self, pid_of: Callable[[], dict[int, int]]) -> None:
        if importlib.util.find_spec("psutil") is None:
            raise LocalError(
                "local.psutil_missing",
                "a cluster of brokers needs psutil, which eventpub itself does not",
                suggestion="pip install psutil",
            )
        self._pid_of = pid_of
        self._away: set[int] = set()
        self._alone: set[int] = set()
        self._changed = threading.Condition()
        self._listeners: list[socket.socket] = []
        self._sockets: set[socket.socket] = set()
        self._closed = False

    def listen(self, port: int, broker: int, broker_port: int) -> None:
        """Relays `port` to a port of this broker."""
        listener = socket.create_server(("127.0.0.1", port), backlog=128)
        self._listeners.append(listener)
        _thread(self._accept, listener, broker, broker_port)

    def cut_off(self, broker: int) -> None:
        """Nothing reaches this broker or comes from it, until `join`."""
        with self._changed:
            self._away.add(broker)

    def cut_off_from_peers(self, broker: int) -> None:
        """Nothing passes between this broker and the others, until `join`; clients reach it."""
        with self._changed:
            self._alone.add(broker)

    def join(self, broker: int) -> None:
        """It is on the network again."""
        with self._changed:
            self._away.discard(broker)
            self._alone.discard(broker)
            self._changed.notify_all()

    def close(self) -> None:
        """Ends all connections."""
        with self._changed:
            self._closed = True
            self._away.clear()
            self._alone.clear()
            self._changed.notify_all()
            sockets = [*self._listeners, *self._sockets]
        for each in sockets:
            _cut(each)

    def _accept(self, listener: socket.socket, broker: int, broker_port: int) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, address = listener.accept()
                _thread(self._connect, client, address[1], broker, broker_port)

    def _connect(self, client: socket.socket, port: int, broker: int, broker_port: int) -> None:
        ends = {broker, *self._owner(port)}
        self._wait(ends)
        try:
            server = socket.create_connection(("127.0.0.1", broker_port))
        except OSError:
            _cut(client)
            return
        for each in (client, server):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._changed:
            self._sockets |= {client, server}
        _thread(self._pump, server, client, ends)
        self._pump(client, server, ends)

    def _owner(self, port: int) -> set[int]:
        """The broker whose process has this port, where it is one's."""
        import psutil

        for broker, pid in self._pid_of().items():
            with contextlib.suppress(psutil.Error):
                for connection in psutil.Process(pid).net_connections("tcp"):
                    if connection.laddr.port == port and connection.status != psutil.CONN_LISTEN:
                        return {broker}
        return set()

    def _wait(self, ends: set[int]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_cut(ends))

    def _is_cut(self, ends: set[int]) -> bool:
        return bool(self._away & ends or (len(ends) > 1 and self._alone & ends))

    def _pump(self, source: socket.socket, target: socket.socket, ends: set[int]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if self._away or self._alone:
                    self._wait(ends)
                target.sendall(data)
        if self._away or self._alone:
            self._wait(ends)  # the end of a connection is a packet, too
        _cut(source)
        _cut(target)
        with self._changed:
            self._sockets -= {source, target}


def _cut(each: socket.socket) -> None:
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
    each.close()


def _thread(target: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=target, args=arguments, name="eventpub-relay", daemon=True).start()
