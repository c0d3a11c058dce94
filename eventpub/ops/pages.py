"""The pages of a running publisher: health, metrics, status, and the dashboard.

    GET  /healthz   200 while the coordinator's loop turns
    GET  /readyz    200 while no check of /status is wrong
    GET  /metrics   for Prometheus
    GET  /status    as JSON: `coordinator.status`, and `is_ready`
    GET  /history   the last 15 minutes, one sample a second: `http.sample`
    GET  /config    the configuration in effect, without secrets
    GET  /gaps      open holds
    GET  /recorded  skips and dead letters as their topics have them, and which of them still stand
    GET  /          the dashboard, and its files

With ``Authorization: Bearer`` and `ops.token`:

    GET  /gap?aggregate_id=     the versions that a skip would give up, as the gap stands now
    GET  /trace?aggregate_id=&version=   as `eventpub trace` says it
    POST /pause, /resume, /retry?aggregate_id=, /skip?aggregate_id=&from_version=&to_version=

An answer that is no page is JSON; where something is wrong, an object with `error`. A retry or a
skip is not done while the publisher is paused: 409.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import time
import zipfile
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict
from importlib import resources
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import structlog
from h11 import LocalProtocolError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from eventpub.channel import MalformedError, request_of
from eventpub.channel import Request as ShardRequest
from eventpub.config import Config
from eventpub.coordinator.status import is_ready
from eventpub.errors import EventpubError
from eventpub.masking import current, mask, mask_all
from eventpub.ops.dead import find as find_dead
from eventpub.ops.gaps import find as find_gaps
from eventpub.ops.http import Source
from eventpub.ops.metrics import exposition
from eventpub.ops.status import not_lasting
from eventpub.ops.trace import trace
from eventpub.settings import Loaded, shown

log: structlog.stdlib.BoundLogger = structlog.get_logger("eventpub.http")

_FILES = {
    "index.html": "text/html",
    "dashboard.css": "text/css",
    "dashboard.js": "text/javascript",
    "icon.svg": "image/svg+xml",
    "d3.min.js": "text/javascript",
}
_LIST_TIMEOUT = 10.0
_ACT_TIMEOUT = 30.0
_MOST_SHOWN = 200

_MOST_RECORDED = 20
_RECORDED_WITHIN = 2.0
"""Seconds of looking for dead letters that were published since."""
_TRACED_WITHIN = 20.0

_LISTS_EVERY = 2.0
"""Seconds between two lists of one kind, whoever asks."""
_LISTS_SHARE = 0.02
"""Of the time of shards that may go into open gaps."""
_RECORDED_SHARE = 0.1
"""Of the time of one thread that may go into reading skips and dead letters."""
_MOST_WAITING = 16
"""Who may wait for one list; each holds memory while shards do not answer."""

_REFUSED_AFTER = 1.0
"""Seconds that an answer to a wrong token takes."""
_REFUSED_EVERY = 10.0
"""Seconds between two log lines about wrong tokens."""

_SAFE = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

Endpoint = Callable[[Request], Awaitable[Response]]


def application(config: Config, source: Source, history: deque[dict[str, Any]]) -> Starlette:
    """The pages, without a server.

    Args:
        config: the whole configuration.
        source: answers.
        history: samples, the oldest first.
    """
    reading, acting = Reading(config, source, history), Acting(config, source)
    return Starlette(
        routes=[
            Route("/healthz", reading.healthz),
            Route("/readyz", reading.readyz),
            Route("/metrics", reading.metrics),
            Route("/status", reading.status),
            Route("/history", reading.history),
            Route("/config", reading.configuration),
            Route("/gaps", reading.gaps),
            Route("/recorded", reading.recorded),
            Route("/gap", acting.guarded(acting.gap)),
            Route("/trace", acting.guarded(acting.trace)),
            Route("/pause", acting.guarded(acting.pause), methods=["POST"]),
            Route("/resume", acting.guarded(acting.resume), methods=["POST"]),
            Route("/retry", acting.guarded(acting.retry), methods=["POST"]),
            Route("/skip", acting.guarded(acting.skip), methods=["POST"]),
            Route("/", reading.page),
            Route("/{name}", reading.page),
        ],
        exception_handlers={Exception: _failed},
        middleware=[Middleware(_OwnPages, address=config.ops.http)],
    )


class _OwnPages:
    """Answers no browser that shows another site's page.

    On loopback, no name but this machine's own is answered: another site could let its name lead to
    this address (DNS rebinding). Anywhere, what names another origin is refused, whatever token it
    has; behind a proxy that changes the host, X-Forwarded-Host is what it was.
    """

    def __init__(self, app: ASGIApp, address: str) -> None:
        self._app = app
        host = address.rpartition(":")[0].strip("[]")
        with suppress(ValueError):
            host = "localhost" if ip_address(host).is_loopback else host
        self._names = {"127.0.0.1", "::1", "localhost"} if host == "localhost" else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(Headers(scope=scope)) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, headers: Headers) -> Response | None:
        host = headers.get("host", "")
        try:
            name, origin = (
                urlsplit(f"//{host}").hostname,
                urlsplit(headers.get("origin", "")).netloc,
            )
        except ValueError:
            name, origin = None, ""
        if self._names is not None and name not in self._names:
            return _line("this address answers to no such name", 400)
        if "origin" in headers and origin not in {host, headers.get("x-forwarded-host")}:
            return _line("another site's page may not ask this one", 403)
        return None


def _answer(data: Any, status: int = 200) -> Response:
    return JSONResponse(mask_all(data), status, headers=_SAFE)


def _line(text: str, status: int) -> Response:
    return PlainTextResponse(mask(text) + "\n", status, headers=_SAFE)


def _not_done(error: dict[str, Any] | None, silent: str) -> Response:
    """Why a request was not done.

    Args:
        error: as `EventpubError.to_dict` says it; None: nobody has answered.
        silent: what is said then.
    """
    if error is None:
        return _answer({"error": silent}, 503)
    code, text = error["code"], f"{error['code']}: {error['message']}"
    return _answer({"error": text, "code": code}, 409 if code == "run.paused" else 503)


async def _failed(_: Request, error: Exception) -> Response:
    # an answer to a request whose body turned out to be malformed is not taken: it was refused
    if not isinstance(error, LocalProtocolError):
        log.warning("a page failed", error=f"{type(error).__name__}: {error}", exc_info=error)
    return _answer({"error": "the page failed; the publisher's log says why"}, 500)


class _Lists:
    """A list that is slow to make: refreshed only once the last one is old for the time it took.

    Args:
        make: makes it.
        share: of the time, that may go into it.
    """

    def __init__(self, make: Callable[[], Awaitable[Response]], share: float) -> None:
        self._make, self._share = make, share
        self._lock = asyncio.Lock()
        self._again = 0.0
        self._waiting = 0
        self._last: Response

    async def get(self) -> Response:
        if self._waiting >= _MOST_WAITING:
            return _answer({"error": "too many ask for this list at once"}, 503)
        self._waiting += 1
        try:
            async with self._lock:
                began = time.monotonic()
                if began >= self._again:
                    self._last = await self._make()
                    took = time.monotonic() - began if self._last.status_code == 200 else 0.0
                    self._again = time.monotonic() + max(_LISTS_EVERY, took / self._share)
                return self._last
        finally:
            self._waiting -= 1


class Reading:
    """What anybody may ask who reaches the address."""

    def __init__(self, config: Config, source: Source, history: deque[dict[str, Any]]) -> None:
        self._config = config
        self._source = source
        self._history = history
        self._gaps = _Lists(self._list, _LISTS_SHARE)
        self._recorded = _Lists(self._list_recorded, _RECORDED_SHARE)

    async def healthz(self, _: Request) -> Response:
        """Whether the process is to be left alone."""
        if self._source.status()["is_alive"]:
            return _line("ok", 200)
        return _line("the coordinator's loop does not turn", 503)

    async def readyz(self, _: Request) -> Response:
        """Whether all works; else a line for each check that is wrong."""
        found = self._source.status()
        wrong = [f"{c['name']}: {c['message']}" for c in found["checks"] if c["state"] == "error"]
        return _line("\n".join(wrong) or "ok", 200 if is_ready(found) else 503)

    async def metrics(self, _: Request) -> Response:
        """For Prometheus."""
        text = exposition(self._source.status)
        return Response(text, headers={**_SAFE, "Content-Type": CONTENT_TYPE_LATEST})

    async def status(self, _: Request) -> Response:
        """How it stands."""
        found = self._source.status()
        return _answer({**found, "is_ready": is_ready(found)})

    async def history(self, _: Request) -> Response:
        """How it has stood."""
        return _answer(list(self._history))

    async def configuration(self, _: Request) -> Response:
        """Each key's value."""
        return _answer(shown(Loaded(self._config, {}, None)))

    async def gaps(self, _: Request) -> Response:
        """The holds that are open, the oldest first."""
        if not self._source.status()["holds_open"]:
            return _answer({"open": [], "open_count": 0})
        return await self._gaps.get()

    async def _list(self) -> Response:
        asked = ShardRequest(secrets.token_hex(8), "list", most=_MOST_SHOWN)
        found = await run_in_threadpool(self._source.ask, asked, _LIST_TIMEOUT)
        if found["answers"] is None:
            return _not_done(found["error"], "the shards have not answered in time")
        answers = [json.loads(answer) for answer in found["answers"].values()]
        holds = [hold for answer in answers for hold in answer["holds"]]
        holds.sort(key=lambda hold: hold["first_seen"])
        count = sum(answer["count"] for answer in answers)
        return _answer({"open": holds[:_MOST_SHOWN], "open_count": count})

    async def recorded(self, _: Request) -> Response:
        """What was given up and refused, the newest first, whenever that was."""
        return await self._recorded.get()

    async def _list_recorded(self) -> Response:
        return await _answered(lambda: recorded(self._config))

    async def page(self, request: Request) -> Response:
        """The dashboard, and its files."""
        name = request.path_params.get("name", "index.html")
        body = asset(name) if name in _FILES else None
        if body is None:
            return _answer({"error": "there is no such page"}, 404)
        return Response(body, media_type=_FILES[name], headers=_SAFE)


class Acting:
    """What needs the token."""

    def __init__(self, config: Config, source: Source) -> None:
        self._token = config.ops.token
        self._source = source
        self._config = config
        self._is_tracing = False
        self._refused = 0
        self._refused_at = float("-inf")

    def guarded(self, act: Endpoint) -> Endpoint:
        """The same for who has the token, and for nobody else."""

        async def endpoint(request: Request) -> Response:
            if self._token is None:
                return _answer({"error": "actions are off: ops.token is not set"}, 403)
            given = request.headers.get("authorization", "").removeprefix("Bearer ")
            wanted = current(self._token.get_secret_value())
            if not hmac.compare_digest(given.encode(), wanted.encode()):
                await self._refuse(request)
                return _answer({"error": "the token is not ops.token"}, 401)
            return await act(request)

        return endpoint

    async def _refuse(self, request: Request) -> None:
        """Report a wrong token, at most every 10 s, and let whoever guesses wait."""
        self._refused += 1
        if time.monotonic() - self._refused_at >= _REFUSED_EVERY:
            self._refused_at = time.monotonic()
            log.warning(
                "an action was refused: the token is not ops.token",
                client=_client(request),
                path=request.url.path,
                refused=self._refused,
            )
        await asyncio.sleep(_REFUSED_AFTER)

    async def pause(self, request: Request) -> Response:
        """Nothing is published from now on."""
        return await self._set_paused(request, is_paused=True)

    async def resume(self, request: Request) -> Response:
        """It is again."""
        return await self._set_paused(request, is_paused=False)

    async def _set_paused(self, request: Request, *, is_paused: bool) -> Response:
        by = f"the pages of ops.http, from {_client(request)}"
        found = await run_in_threadpool(self._source.pause, is_paused, by)
        if found["error"] is not None:
            return _answer(found | {"error": not_lasting(found["error"], is_paused)}, 503)
        return _answer(found, 503 if found["is_paused"] is None else 200)

    async def gap(self, request: Request) -> Response:
        """From which version to which a skip would give up; null: nothing is missing."""
        answer = await self._ask("list", request.query_params.get("aggregate_id", ""))
        if isinstance(answer, Response):
            return answer
        first, last = json.loads(answer)["gap"] or (None, None)
        return _answer({"from_version": first, "to_version": last})

    async def trace(self, request: Request) -> Response:
        """Where an event is, or each of the last versions of an aggregate; one at a time."""
        given, number = (
            request.query_params.get("aggregate_id", ""),
            request.query_params.get("version"),
        )
        if not given or not (number or "0").isdecimal():
            return _answer({"error": "it needs aggregate_id, and a number as version"}, 400)
        if self._is_tracing:
            return _answer({"error": "another event is being traced; try again"}, 503)
        self._is_tracing = True
        try:
            version = int(number) if number else None
            return await _answered(lambda: traced(self._config, given, version))
        finally:
            self._is_tracing = False

    async def retry(self, request: Request) -> Response:
        """An aggregate's missing version is looked for now."""
        return _outcome(await self._ask("retry", request.query_params.get("aggregate_id", "")))

    async def skip(self, request: Request) -> Response:
        """An aggregate's missing versions are given up, those that are named."""
        given = request.query_params
        try:
            versions = int(given["from_version"]), int(given["to_version"])
        except (KeyError, ValueError):
            return _answer({"error": "it needs from_version and to_version, two numbers"}, 400)
        return _outcome(await self._ask("skip", given.get("aggregate_id", ""), *versions))

    async def _ask(
        self,
        action: Literal["list", "retry", "skip"],
        aggregate_id: str,
        first: int | None = None,
        last: int | None = None,
    ) -> str | Response:
        if not aggregate_id:
            return _answer({"error": "it needs aggregate_id"}, 400)
        asked = ShardRequest(secrets.token_hex(8), action, aggregate_id, first, last)
        try:
            request_of(asdict(asked))
        except MalformedError:
            return _answer({"error": "from_version and to_version have 64 bits"}, 400)
        found = await run_in_threadpool(self._source.ask, asked, _ACT_TIMEOUT)
        if found["answers"] is None:
            return _not_done(found["error"], "the shard has not answered in time")
        return str(next(iter(found["answers"].values())))


def recorded(config: Config) -> dict[str, Any]:
    """Skips and dead letters as their topics have them, the newest first.

    Raises:
        SinkError, StateError: the topics or the state cannot be read.
    """
    gaps = find_gaps(config, _MOST_RECORDED)
    if gaps.unread is not None:
        raise gaps.unread
    dead = find_dead(config, limit=_MOST_RECORDED, timeout=_RECORDED_WITHIN, ask_store=False)
    letters = [letter.to_dict() for letter in dead.newest if letter.is_last]
    found = {"skipped": gaps.skips(), "skipped_count": gaps.skipped_count}
    return found | {"dead": letters, "dead_rows": dead.rows}


def traced(config: Config, aggregate_id: str, version: int | None) -> dict[str, Any]:
    """What `eventpub trace --json` has as `result`, and its `summary`.

    Raises:
        EventpubError: the store, the topics or the state cannot be read.
    """
    found = trace(config, aggregate_id, version, timeout=_TRACED_WITHIN)
    return found.to_dict() | {"summary": found.summary(version)}


async def _answered(work: Callable[[], dict[str, Any]]) -> Response:
    try:
        return _answer(await run_in_threadpool(work))
    except EventpubError as error:
        return _not_done(error.to_dict(), "")


def _client(request: Request) -> str:
    return "unknown" if request.client is None else request.client.host


def _outcome(answer: str | Response) -> Response:
    return answer if isinstance(answer, Response) else _answer({"outcome": answer})


def asset(name: str) -> bytes | None:
    """One of the dashboard's files; None: it is not there.

    The chart library (d3) is the copy that Spark's package has for its own pages.
    """
    if name == "d3.min.js":
        return _chart_library()
    file = resources.files("eventpub.ops") / "dashboard" / name
    return file.read_bytes() if file.is_file() else None


def _chart_library() -> bytes | None:
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        return None
    for jar in sorted((Path(spec.origin).parent / "jars").glob("spark-core_*.jar")):
        with suppress(KeyError, OSError, zipfile.BadZipFile), zipfile.ZipFile(jar) as archive:
            return archive.read("org/apache/spark/ui/static/d3.min.js")
    return None
