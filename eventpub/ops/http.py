"""HTTP servers: at `ops.http` for browsers and Prometheus, on a socket for the command line.

Slow, silent or malicious clients cannot block others, and use a bounded number of threads.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler
from socketserver import BaseServer, TCPServer, ThreadingMixIn
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import structlog

from eventpub.config import Config
from eventpub.errors import ConfigError
from eventpub.ops.pages import Site, Source, sample
from eventpub.ops.replies import Asked, Reply, line
from eventpub.state import StateDir

log: structlog.stdlib.BoundLogger = structlog.get_logger("eventpub.http")

HISTORY_SAMPLES = 900
"""One a second."""

MOST_CONNECTIONS = 64
"""One more closes the oldest: liveness probes get through, and file descriptors stay bounded."""

_IDLE = 5.0
"""Seconds for which a connection may stall while sending or receiving."""

_MOST_BODY = 64 * 1024 * 1024
"""Bytes of a request on the local socket: it may list many aggregate ids."""

_ENDS_WITHIN = 0.3
"""Seconds between two checks for shutdown."""


class Pages:
    def __init__(self, config: Config, source: Source, state: StateDir) -> None:
        self._config = config
        self._state = state
        self._history: deque[dict[str, Any]] = deque(maxlen=HISTORY_SAMPLES)
        self._site = Site(config, source, self._history)
        self._local: Listener | None = None
        self._public: Listener | None = None

    def begin(self) -> None:
        """Serve the command line, and others where an address is configured.

        Raises ops.http_address if a configured address is unavailable; the default one is only
        logged.
        """
        try:
            self._local = Listener(self._state.listen(), self._site, is_local=True)
        except OSError as error:
            log.warning(
                "commands cannot reach this publisher: its state directory takes no socket",
                socket=str(self._state.socket_file),
                error=error.strerror or str(error),
            )
        address = self._config.ops.http
        if not address:
            return
        try:
            self._public = Listener(_listen(address), self._site)
        except OSError as error:
            why = error.strerror or str(error)
            if "http" in self._config.ops.model_fields_set:
                raise ConfigError(
                    "ops.http_address",
                    f"cannot listen on {address}: {why}",
                    where="ops.http",
                    suggestion="another process has it: give each publisher one of its own, or"
                    " set ops.http = '' for none",
                ) from error
            log.warning(
                "no metrics, health and dashboard: set ops.http", address=address, error=why
            )
            return
        log.info("metrics, health and dashboard", address=f"http://{self.address}")

    @property
    def address(self) -> str:
        return "" if self._public is None else self._public.address

    def sample(self, status: dict[str, Any]) -> None:
        if self._public is not None:
            self._history.append(sample(status))

    def end(self) -> None:
        for listener in (self._public, self._local):
            if listener is not None:
                listener.end()
        with suppress(OSError):  # the directory is gone, or read-only
            self._state.socket_file.unlink()


class Listener(ThreadingMixIn, TCPServer):
    """Serves requests on one listening socket; `is_local`: the clients are the publisher's user."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, listening: socket.socket, site: Site, *, is_local: bool = False) -> None:
        BaseServer.__init__(self, listening.getsockname(), _Handler)
        listening.settimeout(_ENDS_WITHIN)  # or `accept` blocks when a client has already gone
        self.socket = listening
        self.site = site
        self.is_local = is_local
        self._open: dict[Any, None] = {}
        self._guard = threading.Lock()
        serve = partial(self.serve_forever, _ENDS_WITHIN)
        threading.Thread(target=serve, name="eventpub-http", daemon=True).start()

    @property
    def address(self) -> str:
        host, port = self.socket.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError:  # the process has too many files open
            time.sleep(0.1)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._guard:
            if len(self._open) >= MOST_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                _hang_up(oldest)
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._guard:
            self._open.pop(request, None)
            request.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Write nothing: the client is gone, or there are too many threads."""

    def end(self) -> None:
        self.shutdown()
        self.server_close()
        with self._guard:
            for connection in self._open:
                _hang_up(connection)


def _hang_up(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # so that every answer has a status line
    timeout = _IDLE
    wbufsize = 64 * 1024
    server: Listener

    def do_GET(self) -> None:
        reply = self.server.site.answer(
            Asked(
                self.command,
                *_parts(self.path),
                headers={name.lower(): value for name, value in reversed(self.headers.items())},
                client=str(next(iter(self.client_address), "local")),
                is_local=self.server.is_local,
                body=self._body(),
                wait=self._wait,
            )
        )
        self._send(reply)

    do_HEAD = do_POST = do_GET  # noqa: N815 (named by the base)

    def _body(self) -> bytes:
        """Read the body of a local request only: no public page needs one."""
        has_body = "Transfer-Encoding" in self.headers
        length = self.headers.get("Content-Length", "0")
        if self.server.is_local and length.isdecimal() and int(length) <= _MOST_BODY:
            return self.rfile.read(int(length))
        if has_body or length != "0":
            self.close_connection = True
        return b""

    def _wait(self, seconds: float) -> None:
        closed = select.poll()
        closed.register(self.connection, 0)
        closed.poll(seconds * 1000)

    def _send(self, reply: Reply) -> None:
        self.send_response_only(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(reply.body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a malformed request without echoing any of it."""
        self.close_connection = True
        status = {501: 405, 505: 400}.get(code, code)
        self._send(line("not a request that is answered here", status))

    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing: remote clients would fill the log."""


def _parts(target: str) -> tuple[str, dict[str, str]]:
    try:
        parts = urlsplit(target)
        found = dict(reversed(parse_qsl(parts.query, keep_blank_values=True)))
    except ValueError:
        return "", {}
    return ("" if parts.netloc else parts.path), found


def _listen(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, int(port)))
        made.listen(64)
    except OSError:
        made.close()
        raise
    return made
