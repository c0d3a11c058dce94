"""Every librdkafka client of the sink, and what it says of itself.

What must hold: code that talks to the broker is given `Clients`, and creates no client itself.
"""

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
    admin_settings,
    consumer_settings,
    producer_settings,
    refused,
    settings,
)
from eventpub.times import SYSTEM_CLOCK, Clock
from eventpub.tokens import TokenProvider, find_function

log = logging.getLogger("eventpub.sink")

T = TypeVar("T")


def call(function: Callable[..., T], *arguments: Any) -> T:
    """Calls a method of a client that may meet a fatal error, and raises it as a KafkaException.

    `poll` and `flush` raise a fatal error as a bare `KafkaError`, which is no `BaseException`: no
    ``except`` clause with a name catches it, and an exception raised while it is being handled
    would take it for its context. They may also call a delivery callback while it is pending,
    which ends in a SystemError with it as the cause. So it is taken out here before anything else
    is raised.
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


_ANSWERED_WITHIN = 60.0
"""Seconds; a request that is not answered fails within `socket.timeout.ms`."""
_ASKS_FOR_A_TOKEN_WITHIN = 15.0
"""Seconds; librdkafka asks again 10 s after it was given none."""
_REPEATED_WITHIN = 60.0
"""Seconds; librdkafka leaves out log lines that repeat one of the last 30 s."""


class ClientLog(TransactionLog):
    """Receives librdkafka's log lines and errors during `poll()`, and remembers what matters.

    Attributes:
        last_error: what `error_cb` was given last, such as a refused authentication.
        tokens: where the client's tokens come from.
    """

    def __init__(self) -> None:
        super().__init__()
        self.last_error: KafkaError | None = None
        self._error_at = 0.0
        self._failed_connection: tuple[float, str] | None = None
        """When a connection failed last, and why."""
        self.tokens: TokenProvider | None = None

    def forget(self) -> None:
        """Start over, before the next transaction or request.

        That there was no token is kept for a while: the client says it once, and then nothing.
        """
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
            self._failed_connection = time.monotonic(), _why_it_failed(text)
        log.debug("%s %s %s", facility, name, text)  # the errors of the sink say what matters

    def error(self, error: KafkaError) -> None:
        """Called by the client as its `error_cb`."""
        failure = self.tokens.failure if self.tokens is not None else None
        if failure is not None and error.code() in faults.AUTHENTICATION:
            error = KafkaError(error.code(), f"{faults.NO_TOKEN}: {failure}")
        log.debug("client error %s: %s", error.name(), error.str())
        now = time.monotonic()
        if error.code() == KafkaError._ALL_BROKERS_DOWN:  # which does not say why
            faults.is_unanswered()
            if self.last_error is not None:
                return
            failed_at, why = self._failed_connection or (now, error.str())
            if now - failed_at < _REPEATED_WITHIN:
                error = KafkaError(error.code(), why)
        self.last_error = error
        self._error_at = now


def _why_it_failed(text: str) -> str:
    """Broker and reason of a line of librdkafka's log, without its thread, times and states.

    As of ``[thrd:host:9092/bootstrap]: host:9092/bootstrap: Disconnected (after 0ms in state UP)``.
    """
    text = re.sub(r"^\[thrd:[^\]]*\]: ", "", text)
    text = re.sub(r": receive 0 after POLLIN|\s*\(after \d+ms in state .*\)$", "", text)
    return re.sub(r"^([^ ]*)/(bootstrap|\d+): ", r"\1: ", text)


@dataclass(frozen=True)
class Clients:
    """Makes the clients of one Kafka cluster; the sink has no other way to it. Tests have others.

    Attributes:
        sink: the section `[sink]` that they are configured by.
        clock, thread, pool: of the machine.
    """

    sink: config.Sink
    clock: Clock = SYSTEM_CLOCK
    thread: type[threading.Thread] = threading.Thread
    pool: type[ThreadPoolExecutor] = ThreadPoolExecutor

    def producer(
        self, transactional_id: str | None, client_log: ClientLog, *, careful: bool = False
    ) -> Producer:
        """A new one; `client_log` gets its log lines; `careful` sends each record by itself."""
        conf = producer_settings(self.sink, transactional_id)
        if careful:
            conf["batch.num.messages"] = "1"
        made: Producer = _made(Producer, conf, client_log, self.sink)
        return made

    def bulk(self, producer: Producer, rows: int) -> bulk.Bulk | None:
        """The way to give it so many records at once; None: one by one."""
        return bulk.bulk_of(producer) if rows >= bulk.WORTHWHILE else None

    def consumer(
        self, client_log: ClientLog, *, committed: bool = True, few: bool = False
    ) -> Consumer:
        """A new one, of committed records or all; with `few` it fetches no more than is asked."""
        conf = consumer_settings(self.sink, committed=committed) | (FETCH_LITTLE if few else {})
        made: Consumer = _made(Consumer, conf, client_log, self.sink)
        return made

    def admin(self) -> tuple[AdminClient, ClientLog]:
        """This process's admin client for these servers."""
        return self._of_process(AdminClient, admin_settings(self.sink))

    def admin_of(self, servers: str) -> tuple[AdminClient, ClientLog]:
        """A new admin client that knows these servers."""
        client_log = ClientLog()
        conf = {**admin_settings(self.sink), "bootstrap.servers": servers}
        return _made(AdminClient, conf, client_log, self.sink), client_log

    def asking_consumer(self, *, committed: bool) -> tuple[Consumer, ClientLog]:
        """This process's consumer that asks for offsets; `committed`: of what is committed."""
        return self._of_process(Consumer, consumer_settings(self.sink, committed=committed))

    def renew(self) -> None:
        """Have the next questions asked by new clients: these believe for 15 minutes who leads."""
        shared_by = _frozen(settings(self.sink))
        for key in list(_shared):  # which other threads may change
            if key[1] == shared_by:
                _shared.pop(key, None)

    def _of_process(self, kind: Any, conf: dict[str, Any]) -> tuple[Any, ClientLog]:
        # one that was made with a certificate that has expired would never log in again
        files = {k: _file_version(str(v)) for k, v in conf.items() if k.endswith(".location")}
        key = (os.getpid(), _frozen(settings(self.sink)), kind, _frozen(conf))
        found = _shared.get(key)
        if found is None or found[0] != files:
            client_log = ClientLog()
            found = _shared[key] = (files, _made(kind, conf, client_log, self.sink), client_log)
        return found[1:]


_shared: dict[tuple[Any, ...], tuple[dict[str, str], Any, ClientLog]] = {}
"""This process's clients that ask questions."""


def _file_version(file: str) -> str:
    """What changes with a file that a property names: certificates are renewed."""
    try:
        return str(Path(file).stat().st_mtime_ns)
    except OSError:
        return ""


def _frozen(conf: dict[str, Any]) -> frozenset[tuple[str, str]]:
    return frozenset((k, str(v)) for k, v in conf.items())


def let_go(producer: Producer) -> None:
    """Destroys a producer, as soon as the broker has answered what is on its way; does not wait.

    Up to version 2.16, librdkafka frees the text of a failed transaction's error when a producer
    is destroyed, and once more when a `Produce` that is answered by then fails, too: the heap is
    damaged (docs/hazards.md, "A producer's end"). What is still queued is dropped.
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


def _made(kind: Any, conf: dict[str, Any], client_log: ClientLog, sink: config.Sink) -> Any:
    """A client of this kind."""
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
            if first.code() in faults.AUTHENTICATION:  # it waits for a token while it is made
                error = client_log.last_error or first
                raise faults.auth_failed(sink, error) from exception
        raise refused(reason, sink.properties) from exception


def check_properties(sink: config.Sink, app_id: str) -> None:
    """Whether the client takes its settings; it is made, and connects to no broker.

    `sink.token_provider` is found, and not called: it may ask its issuer. With
    `sasl.oauthbearer.method` oidc the client asks its own, and the answer is not waited for.

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
