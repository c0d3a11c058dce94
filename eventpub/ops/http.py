"""The address at which a running publisher is asked over HTTP; `pages` has what it answers.

Served by uvicorn in a thread of the publisher's process.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from contextlib import suppress
from typing import Any, Protocol

import structlog

from eventpub.channel import Request as ShardRequest
from eventpub.config import Config
from eventpub.errors import ConfigError

log: structlog.stdlib.BoundLogger = structlog.get_logger("eventpub.http")

HISTORY_SAMPLES = 900
"""One a second."""

MOST_CONNECTIONS = 64
"""One more closes the oldest: who connects and says nothing, or slowly, keeps nobody out, neither a
liveness probe nor the publisher from its file descriptors."""

_ENDS_WITHIN = 0.3


class Source(Protocol):
    """What answers."""

    def status(self) -> dict[str, Any]:
        """As of `coordinator.status`."""

    def pause(self, is_paused: bool, by: str) -> dict[str, Any]:
        """`is_paused`; None: nobody has answered. `error`: why it is not written down."""

    def ask(self, request: ShardRequest, timeout: float) -> dict[str, Any]:
        """`answers` by shard; None: there are none, because of `error` where that is not None."""


class Pages:
    """See the module.

    Args:
        config: the whole configuration.
        source: answers.
    """

    def __init__(self, config: Config, source: Source) -> None:
        self._config = config
        self._source = source
        self._history: deque[dict[str, Any]] = deque(maxlen=HISTORY_SAMPLES)
        self._socket: socket.socket | None = None
        self._server: Any = None
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Serve, where an address is configured.

        Raises:
            ConfigError: `ops.http_address`: a configured address cannot be had. Where it is the
                default one, which another publisher may have, that is only said.
        """
        if not self._config.ops.http:
            return
        try:
            self._socket = _listen(self._config.ops.http)
        except OSError as error:
            why = error.strerror or error
            if "http" in self._config.ops.model_fields_set:
                raise ConfigError(
                    "ops.http_address",
                    f"{self._config.ops.http} cannot be listened on: {why}",
                    where="ops.http",
                    suggestion="another process has it: give each publisher one of its own, or"
                    " set ops.http = '' for none",
                ) from error
            log.warning(
                "no metrics, health and dashboard: set ops.http",
                address=self._config.ops.http,
                error=str(why),
            )
            return
        self._thread = threading.Thread(target=self._serve, name="eventpub-http", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Where it is served; "" where it is not."""
        if self._socket is None:
            return ""
        host, port = self._socket.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _serve(self) -> None:
        import uvicorn

        from eventpub.ops.pages import application

        app = application(self._config, self._source, self._history)
        settings = uvicorn.Config(
            app,
            http=_protocol(MOST_CONNECTIONS),
            ws="none",
            log_config=None,
            log_level="critical",  # strangers' malformed requests; of what fails `pages` tells
            access_log=False,
            lifespan="off",
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=5,
            h11_max_incomplete_event_size=16_384,
        )
        self._server = uvicorn.Server(settings)
        try:
            log.info("metrics, health and dashboard", address=f"http://{self.address}")
            self._server.run(sockets=[self._socket])
        except Exception as error:  # publishing goes on
            log.warning("metrics, health and dashboard have ended", error=str(error))

    def sample(self, status: dict[str, Any]) -> None:
        """Keep how it stands now for the charts; called about once a second."""
        if self._thread is not None:
            self._history.append(sample(status))

    def end(self) -> None:
        """Serve no more."""
        if self._server is not None:
            self._server.should_exit = self._server.force_exit = True
        if self._thread is not None:
            self._thread.join(_ENDS_WITHIN)
        if self._socket is not None:
            with suppress(OSError):
                self._socket.close()


def _protocol(most: int) -> Any:
    """uvicorn's own, with so many connections at most; for one server."""
    from h11 import LocalProtocolError
    from uvicorn.protocols.http.h11_impl import H11Protocol

    connected: dict[Any, None] = {}

    class Bounded(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            if len(connected) >= most:
                oldest = next(iter(connected))
                del connected[oldest]
                oldest.abort()
            connected[transport] = None
            super().connection_made(transport)

        def data_received(self, data: bytes) -> None:
            try:
                super().data_received(data)
            except LocalProtocolError:  # malformed, behind what was answered
                self.transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            connected.pop(self.transport, None)
            super().connection_lost(exc)

    return Bounded


def _listen(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, int(port)))
        made.listen(64)
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made


def sample(status: dict[str, Any]) -> dict[str, Any]:
    """What of a status is kept for the charts: totals, from which the page takes differences."""
    return {
        "at": status["at"],
        "published": status["counters"]["published"],
        "skipped": status["counters"]["gaps_skipped"],
        "late": status["counters"]["late"],
        "dead": status["counters"]["dead"],
        "holds": status["holds_open"],
        "lag_seconds": status["lag"]["seconds"],
        "lag_events": status["lag"]["events"],
        "latency": status["latency"]["counts"],
        "steps": {
            step: [found["sum"], sum(found["counts"])] for step, found in status["steps"].items()
        },
    }
