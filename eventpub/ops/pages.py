"""The pages of a running publisher: health, metrics, status, and the dashboard.

    GET  /healthz   200 while the coordinator's loop turns
    GET  /readyz    200 while no check of /status is wrong
    GET  /metrics   for Prometheus
    GET  /status    JSON: `coordinator.status`, and `is_ready`
    GET  /history   the last 15 minutes, one `sample` a second
    GET  /config    the effective configuration, without secrets
    GET  /gaps      open holds
    GET  /recorded  skips and dead letters on their topics, and which are unresolved
    GET  /          the dashboard and its files

With ``Authorization: Bearer`` and `ops.token`, or on the publisher's own socket:

    GET  /gap?aggregate_id=     the versions that a skip would skip now
    GET  /trace?aggregate_id=&version=   like `eventpub trace`
    POST /pause, /resume, /retry?aggregate_id=, /skip?aggregate_id=&from_version=&to_version=

Only on that socket, with a JSON body:

    POST /request   {"request", "timeout"}: a `channel.Request` for the shards
    POST /withdraw  {"id"}: of a waiting request

Other answers are JSON; errors are an object with `error`. Retry and skip are refused while the
publisher is paused: 409.
"""

from __future__ import annotations

import json
import secrets
import threading
import zipfile
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

import structlog
from prometheus_client import CONTENT_TYPE_LATEST

from eventpub.channel import Request, request_of
from eventpub.config import Config
from eventpub.coordinator.status import is_ready
from eventpub.errors import ConfigError, EventpubError, from_dict
from eventpub.ops.dead import find as find_dead
from eventpub.ops.gaps import find as find_gaps
from eventpub.ops.gaps import given_up
from eventpub.ops.http import (
    Asked,
    CachedList,
    Guard,
    Listener,
    RefusedError,
    Reply,
    body_of,
    json_reply,
    line,
    listen,
    no_page,
    refused,
    reply_to,
)
from eventpub.ops.metrics import exposition
from eventpub.ops.trace import trace
from eventpub.settings import effective
from eventpub.state import StateDir

log: structlog.stdlib.BoundLogger = structlog.get_logger("eventpub.http")

_FILES = {
    "/index.html": "text/html; charset=utf-8",
    "/dashboard.css": "text/css; charset=utf-8",
    "/dashboard.js": "text/javascript; charset=utf-8",
    "/icon.svg": "image/svg+xml",
    "/d3.min.js": "text/javascript; charset=utf-8",
}
HISTORY_SAMPLES = 900
"""One a second."""

_LIST_TIMEOUT = 10.0
_ACT_TIMEOUT = 30.0
_MOST_SHOWN = 200

_MOST_RECORDED = 20
_RECORDED_WITHIN = 2.0
"""Seconds for finding dead letters that were published since."""
_TRACED_WITHIN = 20.0

_LISTS_SHARE = 0.02
"""Share of the shards' time for lists of open gaps."""
_RECORDED_SHARE = 0.1
"""Share of one thread's time for reading skips and dead letters."""


class Source(Protocol):
    """The publisher, as the pages see it; thread-safe."""

    def status(self) -> dict[str, Any]:
        """See `coordinator.status`."""

    def pause(self, is_paused: bool, by: str) -> None:
        """Raises StateError if it could not be saved."""

    def ask(self, request: Request, timeout: float) -> dict[str, Any]:
        """`answers` by shard, or None; then `error` may say why."""

    def withdraw(self, id: str) -> None:
        """Withdraw a waiting request."""


Endpoint = Callable[[Asked], Reply]
Access = Literal["open", "token", "local"]


class Pages:
    """Serves the command line on a socket in the state directory, and others at `ops.http`."""

    def __init__(self, config: Config, source: Source, state: StateDir) -> None:
        self._config, self._source, self._state = config, source, state
        self.history: deque[dict[str, Any]] = deque(maxlen=HISTORY_SAMPLES)
        self._local: Listener | None = None
        self._public: Listener | None = None
        self._guard = Guard(config.ops)
        self._open_gaps = CachedList(self._list, _LISTS_SHARE)
        ended = CachedList(lambda: json_reply(recorded(config)), _RECORDED_SHARE)
        self._tracing = threading.Lock()
        self._routes: dict[str, tuple[str, Access, Endpoint]] = {
            "/healthz": ("GET", "open", self._healthz),
            "/readyz": ("GET", "open", self._readyz),
            "/metrics": ("GET", "open", self._metrics),
            "/status": ("GET", "open", self._status),
            "/history": ("GET", "open", lambda _: json_reply(list(self.history))),
            "/config": ("GET", "open", lambda _: json_reply(effective(config))),
            "/gaps": ("GET", "open", self._gaps),
            "/recorded": ("GET", "open", lambda _: ended.get()),
            "/gap": ("GET", "token", self._gap),
            "/trace": ("GET", "token", self._trace),
            "/pause": ("POST", "token", lambda asked: self._set_paused(asked, True)),
            "/resume": ("POST", "token", lambda asked: self._set_paused(asked, False)),
            "/retry": ("POST", "token", lambda asked: self._act(asked, "retry")),
            "/skip": ("POST", "token", lambda asked: self._act(asked, "skip")),
            "/request": ("POST", "local", self._request),
            "/withdraw": ("POST", "local", self._withdraw),
        }

    def begin(self) -> None:
        """Serve the command line, and others where an address is configured.

        Raises ops.http_address if a configured address is unavailable; the default one is only
        logged.
        """
        try:
            self._local = Listener(self._state.listen(), self.answer, is_local=True)
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
            self._public = Listener(listen(address), self.answer)
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
            self.history.append(sample(status))

    def end(self) -> None:
        for listener in (self._public, self._local):
            if listener is not None:
                listener.end()
        with suppress(OSError):  # the directory is gone, or read-only
            self._state.socket_file.unlink()

    def answer(self, asked: Asked) -> Reply:
        try:
            return self._answer(asked)
        except (RefusedError, EventpubError) as error:
            return reply_to(error)
        except Exception as error:
            log.warning("a page failed", error=f"{type(error).__name__}: {error}", exc_info=error)
            return json_reply({"error": "the page failed; the publisher's log says why"}, 500)

    def _answer(self, asked: Asked) -> Reply:
        if not asked.is_local:
            self._guard.require_own_page(asked)
        method, access, endpoint = self._routes.get(asked.path, ("GET", "open", _file))
        if access == "local" and not asked.is_local:
            raise no_page()
        if asked.method != method and (asked.method, method) != ("HEAD", "GET"):
            raise refused(f"{asked.path} takes only {method}", 405)
        if access == "token" and not asked.is_local:
            self._guard.require_token(asked)
        return endpoint(asked)

    # -- open to every client that reaches the address ---------------------------------------------

    def _healthz(self, _: Asked) -> Reply:
        if self._source.status()["is_alive"]:
            return line("ok", 200)
        return line("the coordinator's loop does not turn", 503)

    def _readyz(self, _: Asked) -> Reply:
        found = self._source.status()
        wrong = [f"{c['name']}: {c['message']}" for c in found["checks"] if c["state"] == "error"]
        return line("\n".join(wrong) or "ok", 200 if is_ready(found) else 503)

    def _metrics(self, _: Asked) -> Reply:
        return Reply(200, exposition(self._source.status), CONTENT_TYPE_LATEST)

    def _status(self, _: Asked) -> Reply:
        found = self._source.status()
        return json_reply({**found, "is_ready": is_ready(found)})

    def _gaps(self, _: Asked) -> Reply:
        if not self._source.status()["holds_open"]:
            return json_reply({"open": [], "open_count": 0})
        return self._open_gaps.get()

    def _list(self) -> Reply:
        request = Request(secrets.token_hex(8), "list", most=_MOST_SHOWN)
        answers = [json.loads(answer) for answer in self._ask(request, _LIST_TIMEOUT)]
        holds = [hold for answer in answers for hold in answer["holds"]]
        holds.sort(key=lambda hold: hold["first_seen"])
        count = sum(answer["count"] for answer in answers)
        return json_reply({"open": holds[:_MOST_SHOWN], "open_count": count})

    def _ask(self, request: Request, timeout: float) -> list[str]:
        found = self._source.ask(request, timeout)
        if found["error"] is not None:
            raise from_dict(found["error"])
        if found["answers"] is None:
            raise refused("the shard has not answered in time", 503)
        return list(found["answers"].values())

    # -- what needs the token ----------------------------------------------------------------------

    def _set_paused(self, asked: Asked, is_paused: bool) -> Reply:
        by = str(body_of(asked).get("by") or f"the pages of ops.http, from {asked.client}")
        self._source.pause(is_paused, by)
        return json_reply({"is_paused": is_paused})

    def _trace(self, asked: Asked) -> Reply:
        given, number = asked.parameters.get("aggregate_id", ""), asked.parameters.get("version")
        if not given or not (number or "0").isdecimal():
            raise refused("it needs aggregate_id, and a number as version", 400)
        if not self._tracing.acquire(blocking=False):
            raise refused("another event is being traced; try again", 503)
        try:
            version = int(number) if number else None
            return json_reply(traced(self._config, given, version))
        finally:
            self._tracing.release()

    def _gap(self, asked: Asked) -> Reply:
        first, last = given_up(self._config, _aggregate_id(asked)) or (None, None)
        return json_reply({"from_version": first, "to_version": last})

    def _act(self, asked: Asked, action: Literal["retry", "skip"]) -> Reply:
        aggregate_id, given = _aggregate_id(asked), asked.parameters
        names = ("from_version", "to_version")
        try:
            first, last = (int(given[name]) if action == "skip" else None for name in names)
            request = Request(secrets.token_hex(8), action, aggregate_id, first, last)
            request_of(asdict(request))
        except (KeyError, ValueError):
            needs = "it needs from_version and to_version, two numbers of at most 64 bits"
            raise refused(needs, 400) from None
        [answer] = self._ask(request, _ACT_TIMEOUT)
        return json_reply({"outcome": answer})

    # -- what the command line asks ----------------------------------------------------------------

    def _request(self, asked: Asked) -> Reply:
        given = body_of(asked)
        try:
            request, timeout = request_of(given["request"]), float(given["timeout"])
        except (LookupError, TypeError, ValueError) as error:
            raise refused(f"it needs a request and a timeout: {error}", 400) from None
        return json_reply(self._source.ask(request, timeout))

    def _withdraw(self, asked: Asked) -> Reply:
        self._source.withdraw(str(body_of(asked).get("id", "")))
        return json_reply({})


def _aggregate_id(asked: Asked) -> str:
    if not (given := asked.parameters.get("aggregate_id")):
        raise refused("it needs aggregate_id", 400)
    return given


def recorded(config: Config) -> dict[str, Any]:
    gaps, unread = find_gaps(config, _MOST_RECORDED)
    if unread is not None:
        raise unread
    dead = find_dead(config, limit=_MOST_RECORDED, timeout=_RECORDED_WITHIN, ask_store=False)
    letters = [letter.to_dict() for letter in dead.newest if letter.is_last]
    found = {name: gaps[name] for name in ("skipped", "skipped_count")}
    return found | {"dead": letters, "dead_rows": dead.rows}


def traced(config: Config, aggregate_id: str, version: int | None) -> dict[str, Any]:
    found = trace(config, aggregate_id, version, timeout=_TRACED_WITHIN)
    return found.to_dict() | {"summary": found.summary(version)}


def sample(status: dict[str, Any]) -> dict[str, Any]:
    """A status reduced for the charts: totals, from which the page takes differences."""
    counters, lag = status["counters"], status["lag"]
    return {
        "at": status["at"],
        "published": counters["published"],
        "skipped": counters["gaps_skipped"],
        "late": counters["late"],
        "dead": counters["dead"],
        "holds": status["holds_open"],
        "lag_seconds": lag["seconds"],
        "lag_events": lag["events"],
        "latency": status["latency"]["counts"],
        "steps": {
            step: [found["sum"], sum(found["counts"])] for step, found in status["steps"].items()
        },
    }


def _file(asked: Asked) -> Reply:
    path = "/index.html" if asked.path == "/" else asked.path
    if path not in _FILES:
        raise no_page()
    if path == "/d3.min.js":
        body = _chart_library()
    else:
        body = (resources.files("eventpub.ops") / "dashboard" / path[1:]).read_bytes()
    return Reply(200, body, _FILES[path])


def _chart_library() -> bytes:
    """D3, from Spark's package, which ships it for its own pages."""
    spec = find_spec("pyspark")
    if spec is not None and spec.origin is not None:
        for jar in sorted((Path(spec.origin).parent / "jars").glob("spark-core_*.jar")):
            with suppress(KeyError, OSError, zipfile.BadZipFile), zipfile.ZipFile(jar) as archive:
                return archive.read("org/apache/spark/ui/static/d3.min.js")
    raise no_page()
