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
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from eventpub import config
from eventpub.config_values import refused_property
from eventpub.errors import ConfigError
from eventpub.masking import current
from eventpub.private_apis import bulk
from eventpub.private_apis.bulk import TransactionLog
from eventpub.sink import faults
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
    """A client of this kind.

    Raises:
        ConfigError: `config.sink_property`, `config.token_provider`.
        SinkError: `sink.token_failed`.
    """
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


# -- settings of the clients ---------------------------------------------------------------------

_COMMON: dict[str, Any] = {
    # Connecting to a broker when it is needed, not when a timer comes round: a new client is
    # ready in a few milliseconds instead of 55 to 510.
    "enable.sparse.connections": "false",
    "socket.timeout.ms": "10000",
    "socket.connection.setup.timeout.ms": "5000",
    "socket.keepalive.enable": "true",
    "reconnect.backoff.ms": "50",
    "reconnect.backoff.max.ms": "1000",
    "allow.auto.create.topics": "false",
}
_PRODUCER: dict[str, Any] = {
    "compression.type": "lz4",
    # With more, librdkafka 2.16 spins between two answers of a busy broker: up to 58 µs of CPU a
    # record instead of 1.6 (docs/dev/2026-11-speed.md). One request holds up to `batch.size` bytes.
    "max.in.flight": "1",
    "batch.num.messages": "10000",
    "batch.size": "900000",
    "queue.buffering.max.messages": "200000",
    "queue.buffering.max.kbytes": "262144",
    # What a topic takes by default. librdkafka's own is 1,000,000: rows between would become dead
    # letters without the broker being asked.
    "message.max.bytes": "1048588",
}
_LINGER_MS = 200
"""Each batch ends with a flush, which waits for no linger; until then only full requests go out."""
_CONSUMER: dict[str, Any] = {
    "fetch.wait.max.ms": "50",
    "fetch.error.backoff.ms": "50",
    # by default 1 s, each time that the queue has been full, as it is with `FETCH_LITTLE`
    "fetch.queue.backoff.ms": "10",
    "queued.min.messages": "100000",
    "queued.max.messages.kbytes": "16384",
    "check.crcs": "true",
}
FETCH_LITTLE = {"queued.min.messages": "1", "max.partition.fetch.bytes": "65536"}
_QUIET = "4"


def settings(sink: config.Sink) -> dict[str, Any]:
    """What all clients share: the servers, the defaults, the user's properties.

    Raises:
        ConfigError: `config.contradiction`, a property that would break a guarantee.
    """
    for key, value in sink.properties.items():
        if refusal := refused_property(key, value, sink.delivery):
            raise ConfigError(
                "config.contradiction",
                f"the property {key} cannot be set: {refusal}",
                where=f"sink.properties.{key}",
                suggestion=f"remove {key} from [sink.properties]",
            )
    given = {name: current(value) for name, value in sink.properties.items()}
    return {"bootstrap.servers": sink.bootstrap_servers, **_COMMON, **given}


def _message_timeout(conf: dict[str, Any]) -> int:
    """The time that a message has, ms; 0 is without a limit."""
    name = "message.timeout.ms" if "message.timeout.ms" in conf else "delivery.timeout.ms"
    text = str(conf[name])
    if not re.fullmatch(r"[0-9]{1,10}", text):
        raise ConfigError(
            "config.sink_property",
            f"Kafka's client refuses its settings: {name} = {text!r} is not a number",
            where=f"sink.properties.{name}",
            suggestion="write a whole number of milliseconds",
        )
    return int(text)


def producer_settings(sink: config.Sink, transactional_id: str | None) -> dict[str, Any]:
    """Settings of a producer; with an id they are those of a transactional one."""
    timeout_ms = max(1000, sink.transaction_timeout // 1000)
    conf = {**_PRODUCER, **settings(sink)}
    if "max.in.flight.requests.per.connection" in conf:
        del conf["max.in.flight"]
    if not {"message.timeout.ms", "delivery.timeout.ms"} & conf.keys():
        # A message must give up before its transaction does: what is still in the queue when the
        # broker has aborted would be sent into the next one's time.
        conf["message.timeout.ms"] = str(min(30_000, timeout_ms * 3 // 4))
    limit = _message_timeout(conf)
    if not {"linger.ms", "queue.buffering.max.ms"} & conf.keys():
        # librdkafka takes no linger above the time that a message has; 0 is all of it
        conf["linger.ms"] = str(min(_LINGER_MS, limit // 2 or _LINGER_MS))
    if transactional_id is not None:
        if "socket.timeout.ms" not in sink.properties:
            # librdkafka wants it within the transaction's timeout
            conf["socket.timeout.ms"] = str(min(int(conf["socket.timeout.ms"]), timeout_ms))
        if not 0 < limit < timeout_ms:
            raise ConfigError(
                "config.contradiction",
                f"message.timeout.ms ({limit}) must be below the transaction timeout"
                f" ({timeout_ms} ms)",
                where="sink.properties.message.timeout.ms",
                suggestion="lower message.timeout.ms or raise sink.transaction_timeout",
            )
        conf["transactional.id"] = transactional_id
        conf["transaction.timeout.ms"] = str(timeout_ms)
    elif sink.delivery == "at_most_once":
        conf["message.send.max.retries"] = "0"
    else:
        conf["enable.idempotence"] = "true"
    # The protocol's log lines name each request and answer: nothing else shows an `EndTxn` that
    # was sent twice.
    conf["log_level"] = "7"
    conf["debug"] = ",".join({"protocol", *filter(None, str(conf.get("debug", "")).split(","))})
    return conf


def consumer_settings(sink: config.Sink, *, committed: bool = True) -> dict[str, Any]:
    """Settings of a consumer that is assigned its partitions; `committed`: of nothing else."""
    return {
        **_CONSUMER,
        **settings(sink),
        "group.id": "eventpub",
        "enable.auto.commit": "false",
        "enable.auto.offset.store": "false",
        "isolation.level": "read_committed" if committed else "read_uncommitted",
        "enable.partition.eof": "true",
        "auto.offset.reset": "error",
        "log_level": _QUIET,
    }


def admin_settings(sink: config.Sink) -> dict[str, Any]:
    """Settings of an admin client, to librdkafka a producer, though it produces nothing."""
    return {
        **settings(sink),
        "enable.idempotence": "false",
        "linger.ms": "0",
        "log_level": _QUIET,
    }


_ALIASES = {
    "acks": "request.required.acks",
    "bootstrap.servers": "metadata.broker.list",
    "compression.type": "compression.codec",
    "delivery.timeout.ms": "message.timeout.ms",
    "linger.ms": "queue.buffering.max.ms",
    "max.in.flight": "max.in.flight.requests.per.connection",
    "max.partition.fetch.bytes": "fetch.message.max.bytes",
    "retries": "message.send.max.retries",
    "sasl.mechanism": "sasl.mechanisms",
    "sasl.oauthbearer.client.credentials.client.id": "sasl.oauthbearer.client.id",
    "sasl.oauthbearer.client.credentials.client.secret": "sasl.oauthbearer.client.secret",
}
"""By an alias the name that the client's messages have."""


def refused(reason: str, properties: Mapping[str, str]) -> ConfigError:
    """The error of settings that the client does not take; `reason`: its own words."""
    has_no_provider = "No provider for SASL mechanism" in reason
    name, reason = _as_named_by_user(reason, properties)
    name = "sasl.mechanism" if has_no_provider else name
    return ConfigError(
        "config.sink_property",
        f"Kafka's client refuses its settings: {reason}",
        where=f"sink.properties.{name}".rstrip("."),
        suggestion="set sasl.mechanism in [sink.properties] to another one, such as PLAIN or"
        " SCRAM-SHA-512"
        if has_no_provider
        else "see the list of properties in librdkafka's CONFIGURATION.md",
    )


def _as_named_by_user(reason: str, properties: Mapping[str, str]) -> tuple[str, str]:
    """The user's property that the client's words are about, and the words with the user's name.

    "": they are about none that the user has set.
    """
    for word in re.findall(r"\w+(?:\.\w+)*", reason):
        names = [word, *(alias for alias, name in _ALIASES.items() if name == word)]
        own = next((name for name in names if name in properties), None)
        if own is not None:
            return own, reason.replace(word, own).strip()
    return "", reason
