"""Requests and answers of the pages, and access control. A page refuses with `RefusedError`."""

from __future__ import annotations

import hmac
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import structlog

from eventpub.config import Ops
from eventpub.masking import current, mask, mask_all

log: structlog.stdlib.BoundLogger = structlog.get_logger("eventpub.http")

_REFUSED_AFTER = 1.0
"""Seconds by which the answer to a wrong token is delayed."""
_REFUSED_EVERY = 10.0
"""Seconds between two log lines about wrong tokens."""

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
    wait: Callable[[float], None] = time.sleep


@dataclass(frozen=True)
class Reply:
    status: int
    body: bytes
    content_type: str

    @property
    def headers(self) -> dict[str, str]:
        return {"Content-Type": self.content_type, **_SAFE}


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


def not_done(error: dict[str, Any] | None, silent: str) -> RefusedError:
    if error is None:
        return refused(silent, 503)
    code, text = error["code"], f"{error['code']}: {error['message']}"
    status = 409 if code == "run.paused" else 503
    return RefusedError(json_reply({"error": text, "code": code}, status))


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
