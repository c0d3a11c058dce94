"""Every librdkafka client of the sink; other code gets them from `Clients` and creates none."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from eventpub import config
from eventpub.private_apis import bulk
from eventpub.private_apis.bulk import TransactionLog
from eventpub.sink import faults
from eventpub.sink.client_settings import (
    FETCH_LITTLE,
    TokenProvider,
    admin_settings,
    consumer_settings,
    find_function,
    producer_settings,
    refused,
    settings,
)
from eventpub.times import SYSTEM_CLOCK, Clock

log = logging.getLogger("eventpub.sink")

T = TypeVar("T")


def call(function: Callable[..., T], *arguments: Any) -> T:
    """Call a client's method; raise a fatal error as a KafkaException.

    `poll` and `flush` raise a fatal error as a bare `KafkaError`, which is no `BaseException`: only
    a bare ``except`` catches it, and an exception raised meanwhile would take it for its context.
    A delivery callback called while it is pending ends in a SystemError. So it is removed first.
    """
    try:
        return function(*arguments)
    except KafkaException:
        raise
    except:  # noqa: E722 (see above)
        raised: Any = sys.exc_info()[1]
    if isinstance(raised, SystemError):
        raised.__cause__ = raised.__context__ = None
        raised = KafkaError(KafkaError._FATAL, "a fatal error of the client", fatal=True)
    if isinstance(raised, BaseException):
        raise raised
    raise KafkaException(raised)


_ALL_DOWN = KafkaError._ALL_BROKERS_DOWN
_ANSWERED_WITHIN = 60.0
"""Seconds; a request without an answer fails within `socket.timeout.ms`."""
_ASKS_FOR_A_TOKEN_WITHIN = 15.0
"""Seconds; librdkafka asks again 10 s after it got no token."""
_REPEATED_WITHIN = 60.0
"""Seconds; librdkafka suppresses log lines repeated within 30 s."""


class ClientLog(TransactionLog):
    """Receives librdkafka's log lines and errors during `poll()`; keeps the last error."""

    def __init__(self) -> None:
        super().__init__()
        self.last_error: KafkaError | None = None
        self._error_at = 0.0
        self.failed_connection: tuple[float, str] | None = None
        """When and why a connection failed last."""
        self.tokens: TokenProvider | None = None

    def forget(self) -> None:
        """Reset for the next request; a missing token, reported only once, is kept for a while."""
        super().forget()
        if self.last_error is None or not (
            faults.NO_TOKEN in self.last_error.str()
            and time.monotonic() - self._error_at < _ASKS_FOR_A_TOKEN_WITHIN
        ):
            self.last_error = None

    def log(self, level: int, _format: str, facility: str, name: str, text: str) -> None:
        """Called by the client in place of `logging.Logger.log`."""
        self.note(facility, text)
        if facility == "REQTMOUT":
            faults.is_unanswered()
        if facility == "FAIL":
            self.failed_connection = time.monotonic(), _why_it_failed(text)
            if self.last_error is not None and self.last_error.code() == _ALL_DOWN:
                self.error(self.last_error)
        log.debug("%s %s %s", facility, name, text)  # the errors of the sink say what matters

    def error(self, error: KafkaError) -> None:
        """Called by the client as its `error_cb`."""
        failure = self.tokens.failure if self.tokens is not None else None
        if failure is not None and error.code() in faults.AUTHENTICATION:
            error = KafkaError(error.code(), f"{faults.NO_TOKEN}: {failure}")
        log.debug("client error %s: %s", error.name(), error.str())
        now = time.monotonic()
        if error.code() == _ALL_DOWN:  # which does not say why
            faults.is_unanswered()
            if self.last_error is not None and self.last_error.code() != _ALL_DOWN:
                return
            failed_at, why = self.failed_connection or (now, error.str())
            if now - failed_at < _REPEATED_WITHIN:
                error = KafkaError(error.code(), why)
        self.last_error = error
        self._error_at = now


def _why_it_failed(text: str) -> str:
    """Reduce a log line of a failed connection to broker and reason."""
    text = re.sub(r"^\[thrd:[^\]]*\]: ", "", text)
    text = re.sub(r": receive 0 after POLLIN|\s*\(after \d+ms in state .*\)$", "", text)
    return re.sub(r"^([^ ]*)/(bootstrap|\d+): ", r"\1: ", text)


@dataclass(frozen=True)
class Clients:
    """Creates every client of one Kafka cluster; tests substitute it."""

    sink: config.Sink
    clock: Clock = SYSTEM_CLOCK
    pool: type[ThreadPoolExecutor] = ThreadPoolExecutor

    def producer(
        self, transactional_id: str | None, client_log: ClientLog, *, careful: bool = False
    ) -> Producer:
        """`careful`: one record per record batch."""
        conf = producer_settings(self.sink, transactional_id)
        if careful:
            conf["batch.num.messages"] = "1"
        return _made(Producer, conf, client_log, self.sink)

    def bulk(self, producer: Producer, rows: int) -> bulk.Bulk | None:
        """Bulk production for this many records; None: produce them one by one."""
        return bulk.bulk_of(producer) if rows >= bulk.WORTHWHILE else None

    def consumer(
        self, client_log: ClientLog, *, committed: bool = True, few: bool = False
    ) -> Consumer:
        """`committed`: committed records only; `few`: fetch little at a time."""
        conf = consumer_settings(self.sink, committed=committed) | (FETCH_LITTLE if few else {})
        return _made(Consumer, conf, client_log, self.sink)

    def admin(self) -> tuple[AdminClient, ClientLog]:
        """This process's shared admin client."""
        return self._of_process(AdminClient, admin_settings(self.sink))

    def admin_of(self, servers: str) -> tuple[AdminClient, ClientLog]:
        """A new admin client for these servers."""
        client_log = ClientLog()
        conf = {**admin_settings(self.sink), "bootstrap.servers": servers}
        return _made(AdminClient, conf, client_log, self.sink), client_log

    def asking_consumer(self, *, committed: bool) -> tuple[Consumer, ClientLog]:
        """This process's shared consumer for offset queries; `committed`: last stable offsets."""
        return self._of_process(Consumer, consumer_settings(self.sink, committed=committed))

    def renew(self) -> None:
        """Replace the shared clients: they cache partition leaders for up to 15 minutes."""
        shared_by = _frozen(settings(self.sink))
        for key in list(_shared):  # which other threads may change
            if key[1] == shared_by:
                _shared.pop(key, None)

    def _of_process(self, kind: Any, conf: dict[str, Any]) -> tuple[Any, ClientLog]:
        # a client made with an expired certificate would never log in again
        files = {k: _file_version(str(v)) for k, v in conf.items() if k.endswith(".location")}
        key = (os.getpid(), _frozen(settings(self.sink)), kind, _frozen(conf))
        found = _shared.get(key)
        if found is None or found[0] != files:
            client_log = ClientLog()
            found = _shared[key] = (files, _made(kind, conf, client_log, self.sink), client_log)
        return found[1:]


_shared: dict[tuple[Any, ...], tuple[dict[str, str], Any, ClientLog]] = {}
"""This process's shared clients."""


def _file_version(file: str) -> str:
    """Changes when the file does: certificates are renewed."""
    try:
        return str(Path(file).stat().st_mtime_ns)
    except OSError:
        return ""


def _frozen(conf: dict[str, Any]) -> frozenset[tuple[str, str]]:
    return frozenset((k, str(v)) for k, v in conf.items())


def let_go(producer: Producer) -> None:
    """Destroy a producer once in-flight requests are answered; returns at once, drops the queue.

    librdkafka up to 2.16 frees a failed transaction's error text twice if a `Produce` fails while
    the producer is being destroyed: heap corruption (docs/hazards.md, "A producer's end").
    """
    if len(producer):
        threading.Thread(
            target=_when_answered, args=(producer,), name="eventpub-sink-end", daemon=True
        ).start()


def _when_answered(producer: Producer) -> None:
    deadline = time.monotonic() + _ANSWERED_WITHIN
    while len(producer) and time.monotonic() < deadline:
        with contextlib.suppress(KafkaException):
            call(producer.purge, True, False, False)
            call(producer.poll, 0.1)


def _made(
    kind: Callable[..., T], conf: dict[str, Any], client_log: ClientLog, sink: config.Sink
) -> T:
    conf = {**conf, "error_cb": client_log.error}
    if sink.token_provider is not None:
        properties = str(conf.get("sasl.oauthbearer.config", ""))
        conf["oauth_cb"] = client_log.tokens = TokenProvider(sink.token_provider, properties)
    try:
        return kind(conf, logger=client_log)
    except (KafkaException, TypeError, ValueError, AttributeError) as exception:
        first = exception.args[0] if exception.args else exception
        reason = str(first)
        if isinstance(first, KafkaError):
            reason = first.str()
            if first.code() in faults.AUTHENTICATION:  # it waits for a token while it is created
                error = client_log.last_error or first
                raise faults.auth_failed(sink, error) from exception
        raise refused(reason, sink.properties) from exception


def check_properties(sink: config.Sink, app_id: str) -> None:
    """Check that the client accepts its settings, without connecting to a broker.

    `sink.token_provider` is found but not called. With `sasl.oauthbearer.method` oidc the client
    requests a token, and the answer is not awaited.

    Raises:
        ConfigError: `config.contradiction`, `config.sink_property`, `config.token_provider`.
    """
    id_ = f"eventpub.{app_id}.check" if sink.delivery == "exactly_once" else None
    more: dict[str, Any] = {"bootstrap.servers": "", "enable.sparse.connections": "true"}
    if sink.token_provider is not None:
        find_function(sink.token_provider)
        more["oauth_cb"] = lambda _: ("none", time.time() + 3600)
        sink = sink.model_copy(update={"token_provider": None})
    _made(Producer, producer_settings(sink, id_) | more, ClientLog(), sink)
    _made(Consumer, consumer_settings(sink) | more, ClientLog(), sink)
