"""The HTTP server of the pages: requests and replies, and who may ask.

Slow, silent or malicious clients cannot block others, and use a bounded number of threads. A page
refuses with `RefusedError`.
"""

from __future__ import annotations

import hmac
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler
from ipaddress import ip_address
from socketserver import BaseServer, TCPServer, ThreadingMixIn
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import structlog

from eventpub.config import Ops
from eventpub.errors import EventpubError
from eventpub.masking import current, mask, mask_all

log: structlog.stdlib.BoundLogger = structlog.get_logger("eventpub.http")

MOST_CONNECTIONS = 64
"""One more closes the oldest: liveness probes get through, and file descriptors stay bounded."""

_IDLE = 5.0
"""Seconds for which a connection may stall while sending or receiving."""

_MOST_BODY = 64 * 1024 * 1024
"""Bytes of a request on the local socket: it may list many aggregate ids."""

_ENDS_WITHIN = 0.3
"""Seconds between two checks for shutdown."""

_REFUSED_AFTER = 1.0
"""Seconds by which the answer to a wrong token is delayed."""
_REFUSED_EVERY = 10.0
"""Seconds between two log lines about wrong tokens."""

_LISTS_EVERY = 2.0
"""Seconds between two lists of one kind, however many clients request it."""
_MOST_WAITING = 16
"""Clients that may wait for one list; each holds a thread while shards do not answer."""

_SAFE = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True)
class Asked:
    """A request; header names are in lower case. `wait` ends early when the client is gone."""

    method: str
    path: str
    parameters: Mapping[str, str]
    headers: Mapping[str, str] = field(default_factory=dict)
    client: str = "unknown"
    is_local: bool = False
    body: bytes = b""
    wait: Callable[[float], object] = time.sleep


@dataclass(frozen=True)
class Reply:
    status: int
    body: bytes
    content_type: str


def line(text: str, status: int) -> Reply:
    return Reply(status, f"{mask(text)}\n".encode(), "text/plain; charset=utf-8")


def json_reply(data: Any, status: int = 200) -> Reply:
    text = json.dumps(mask_all(data), ensure_ascii=False, separators=(",", ":"))
    return Reply(status, text.encode(errors="replace"), "application/json")


class RefusedError(Exception):
    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.status)
        self.reply = reply


def refused(text: str, status: int) -> RefusedError:
    return RefusedError(json_reply({"error": text}, status))


def no_page() -> RefusedError:
    return refused("there is no such page", 404)


def reply_to(error: RefusedError | EventpubError) -> Reply:
    if isinstance(error, RefusedError):
        return error.reply
    status = 409 if error.code == "run.paused" else 503
    return json_reply({"error": f"{error.code}: {error.message}", "code": error.code}, status)


def body_of(asked: Asked) -> dict[str, Any]:
    try:
        given = json.loads(asked.body or b"{}")
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise refused("the body is not a JSON object", 400)
    return given


class Guard:
    def __init__(self, ops: Ops) -> None:
        self._names = _names(ops.http)
        self._token = ops.token
        self._refused = 0
        self._refused_at = float("-inf")

    def require_own_page(self, asked: Asked) -> None:
        """Refuse requests that a browser sends for another site's page.

        On loopback only this machine's names are answered (DNS rebinding); another Origin is
        refused everywhere, whatever its token. X-Forwarded-Host is the host before a proxy.
        """
        host, origin = asked.headers.get("host", ""), asked.headers.get("origin")
        try:
            name = urlsplit(f"//{host}").hostname
            site = None if origin is None else urlsplit(origin).netloc
        except ValueError:
            name, site = None, ""
        if self._names is not None and name not in self._names:
            raise RefusedError(line("no page for this Host", 400))
        if site is not None and site not in {host, asked.headers.get("x-forwarded-host")}:
            raise RefusedError(line("requests from other sites are refused", 403))

    def require_token(self, asked: Asked) -> None:
        if self._token is None:
            raise refused("actions are off: ops.token is not set", 403)
        given = asked.headers.get("authorization", "").removeprefix("Bearer ")
        wanted = current(self._token.get_secret_value())
        if not hmac.compare_digest(given.encode(errors="replace"), wanted.encode()):
            self._refuse(asked)
            raise refused("the token is not ops.token", 401)

    def _refuse(self, asked: Asked) -> None:
        """Log a wrong token, at most every 10 s, and delay the answer."""
        self._refused += 1
        if time.monotonic() - self._refused_at >= _REFUSED_EVERY:
            self._refused_at = time.monotonic()
            log.warning(
                "an action was refused: the token is not ops.token",
                client=asked.client,
                path=asked.path,
                refused=self._refused,
            )
        asked.wait(_REFUSED_AFTER)


def _names(address: str) -> set[str] | None:
    """The names of this machine at which an address answers; None: any."""
    host = address.rpartition(":")[0].strip("[]")
    with suppress(ValueError):
        host = "localhost" if ip_address(host).is_loopback else host
    return {"127.0.0.1", "::1", "localhost"} if host == "localhost" else None


class CachedList:
    """A cached list; recomputed at most so often that computing takes `share` of the time."""

    def __init__(self, make: Callable[[], Reply], share: float) -> None:
        self._make, self._share = make, share
        self._places = threading.BoundedSemaphore(_MOST_WAITING)
        self._making = threading.Lock()
        self._again = 0.0
        self._last = json_reply({})

    def get(self) -> Reply:
        if not self._places.acquire(blocking=False):
            raise refused("too many requests for this list at once", 503)
        try:
            with self._making:
                began, took = time.monotonic(), 0.0
                if began < self._again:
                    return self._last
                try:
                    self._last = self._make()
                    took = time.monotonic() - began
                except (RefusedError, EventpubError) as error:
                    self._last = reply_to(error)
                self._again = time.monotonic() + max(_LISTS_EVERY, took / self._share)
                return self._last
        finally:
            self._places.release()


class Listener(ThreadingMixIn, TCPServer):
    """Serves requests on one listening socket; `is_local`: the clients are the publisher's user."""

    daemon_threads = True
    block_on_close = False

    def __init__(
        self, listening: socket.socket, answer: Callable[[Asked], Reply], *, is_local: bool = False
    ) -> None:
        BaseServer.__init__(self, listening.getsockname(), _Handler)
        listening.settimeout(_ENDS_WITHIN)  # or `accept` blocks when a client has already gone
        self.socket = listening
        self.answer = answer
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
        body = self._body()
        if self._wait(0):  # as after this process was frozen
            self.close_connection = True
            return
        reply = self.server.answer(
            Asked(
                self.command,
                *_parts(self.path),
                headers={name.lower(): value for name, value in reversed(self.headers.items())},
                client=str(next(iter(self.client_address), "local")),
                is_local=self.server.is_local,
                body=body,
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

    def _wait(self, seconds: float) -> bool:
        """Wait for the client to leave; whether it has."""
        closed = select.poll()
        closed.register(self.connection, 0)
        return bool(closed.poll(seconds * 1000))

    def _send(self, reply: Reply) -> None:
        self.send_response_only(reply.status)
        for name, value in _SAFE.items():
            self.send_header(name, value)
        self.send_header("Content-Type", reply.content_type)
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


def listen(address: str) -> socket.socket:
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
