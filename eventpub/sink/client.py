"""Settings of every librdkafka client of the sink, and the ones the user may not change.

`[sink.properties]` wins over the defaults here, except for what would break a guarantee: such a key
is refused by name. What must hold: security settings reach producers, consumers and the admin
client alike; no client is made anywhere else in the project's publishing path.
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
from pathlib import Path
from typing import Any, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from eventpub import config
from eventpub.errors import ConfigError
from eventpub.masking import current
from eventpub.private_apis.client_log import TransactionLog
from eventpub.properties import refused_property
from eventpub.sink import caution, faults
from eventpub.sink.property_names import nearest, refused_value, unknown_name
from eventpub.tokens import TokenProvider, find_function

log = logging.getLogger("eventpub.sink")

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
    # by default 1 s, each time that the queue has been full, or the little that `_FEW` fetches
    "fetch.queue.backoff.ms": "10",
    "queued.min.messages": "100000",
    "queued.max.messages.kbytes": "16384",
    "check.crcs": "true",
}
_FEW = {"queued.min.messages": "1", "max.partition.fetch.bytes": "65536"}
_QUIET = "4"
_CONSUMER_PREFIXES = ("fetch.", "queued.", "check.crcs", "max.partition.fetch", "group.")
_PRODUCER_KEYS = {
    "acks",
    "request.required.acks",
    "compression.codec",
    "compression.type",
    "compression.level",
    "linger.ms",
    "queue.buffering.max.ms",
    "batch.num.messages",
    "batch.size",
    "queue.buffering.max.messages",
    "queue.buffering.max.kbytes",
    "queue.buffering.backpressure.threshold",
    "message.send.max.retries",
    "retries",
    "message.timeout.ms",
    "delivery.timeout.ms",
    "request.timeout.ms",
    "retry.backoff.ms",
    "retry.backoff.max.ms",
    "transaction.timeout.ms",
    "sticky.partitioning.linger.ms",
    "enable.idempotence",
    "max.in.flight",
    "max.in.flight.requests.per.connection",
}


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


def check_properties(sink: config.Sink, app_id: str) -> None:
    """Whether the client takes its settings; it is made, and connects to no broker.

    `sink.token_provider` is found, and not called: it may ask its issuer. With
    `sasl.oauthbearer.method` oidc the client asks its own, and nobody waits for the answer.

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


def _is_consumer_only(key: str) -> bool:
    return key.startswith(_CONSUMER_PREFIXES)


def _message_timeout(conf: dict[str, Any]) -> int:
    """The time that a message has, ms; 0 is without a limit."""
    name = "message.timeout.ms" if "message.timeout.ms" in conf else "delivery.timeout.ms"
    text = str(conf[name])
    if not re.fullmatch(r"[0-9]{1,10}", text):
        raise ConfigError(
            "config.sink_property",
            f"Kafka's client refuses its settings: {name} = {text!r} is no number",
            where=f"sink.properties.{name}",
            suggestion="write a whole number of milliseconds",
        )
    return int(text)


def producer_settings(sink: config.Sink, transactional_id: str | None) -> dict[str, Any]:
    """Settings of a producer; with an id they are those of a transactional one."""
    timeout_ms = max(1000, sink.transaction_timeout // 1000)
    conf = {k: v for k, v in settings(sink).items() if not _is_consumer_only(k)}
    conf = {**_PRODUCER, **conf}
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
    conf = {k: v for k, v in settings(sink).items() if k not in _PRODUCER_KEYS}
    return {
        **_CONSUMER,
        **conf,
        "group.id": "eventpub",
        "enable.auto.commit": "false",
        "enable.auto.offset.store": "false",
        "isolation.level": "read_committed" if committed else "read_uncommitted",
        "enable.partition.eof": "true",
        "auto.offset.reset": "error",
        "log_level": _QUIET,
    }


def _admin_settings(sink: config.Sink) -> dict[str, Any]:
    conf = {
        k: v
        for k, v in settings(sink).items()
        if k not in _PRODUCER_KEYS and not _is_consumer_only(k)
    }
    return {**conf, "log_level": _QUIET}


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
        """Begins anew, with the next transaction or question.

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
            caution.is_unanswered()
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
            caution.is_unanswered()
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


def producer(
    sink: config.Sink,
    transactional_id: str | None,
    client_log: ClientLog,
    *,
    careful: bool = False,
) -> Producer:
    """A new producer; `client_log` gets its log lines; `careful` sends each record by itself."""
    conf = producer_settings(sink, transactional_id)
    if careful:
        conf["batch.num.messages"] = "1"
    made: Producer = _made(Producer, conf, client_log, sink)
    return made


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


def consumer(
    sink: config.Sink, client_log: ClientLog, *, committed: bool = True, few: bool = False
) -> Consumer:
    """A new consumer, by default of committed records; `client_log` gets its log lines.

    With `few` it fetches no more than it is asked for.
    """
    conf = consumer_settings(sink, committed=committed)
    made: Consumer = _made(Consumer, conf | (_FEW if few else {}), client_log, sink)
    return made


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
        if (name := unknown_name(reason)) is not None:
            near = nearest(name)
            raise ConfigError(
                "config.sink_property",
                f"Kafka's client has no property {name or 'with an empty name'}",
                where=f"sink.properties.{name}".rstrip("."),
                suggestion=f"did you mean {near}?"
                if near
                else "see the list of properties in librdkafka's CONFIGURATION.md",
            ) from exception
        has_no_provider = "No provider for SASL mechanism" in reason
        name, reason = refused_value(reason, sink.properties) or ("", reason)
        name = "sasl.mechanism" if has_no_provider else name
        raise ConfigError(
            "config.sink_property",
            f"Kafka's client refuses its settings: {reason}",
            where=f"sink.properties.{name}" if name else "sink.properties",
            suggestion="set sasl.mechanism in [sink.properties] to another one, such as PLAIN or"
            " SCRAM-SHA-512"
            if has_no_provider
            else "see the list of properties in librdkafka's CONFIGURATION.md",
        ) from exception


_shared: dict[tuple[Any, ...], tuple[dict[str, str], Any, ClientLog]] = {}
"""This process's clients that ask questions."""


def _file_version(file: str) -> str:
    """What changes with a file that a property names: certificates are renewed."""
    try:
        return str(Path(file).stat().st_mtime_ns)
    except OSError:
        return ""


def admin(sink: config.Sink) -> tuple[AdminClient, ClientLog]:
    """This process's admin client for these servers."""
    return _shared_client(AdminClient, sink, _admin_settings(sink))


def asking_consumer(sink: config.Sink, *, committed: bool) -> tuple[Consumer, ClientLog]:
    """This process's consumer that asks for offsets; `committed`: of what is committed."""
    return _shared_client(Consumer, sink, consumer_settings(sink, committed=committed))


def renew(sink: config.Sink) -> None:
    """Has the next questions asked by new clients: these believe for 15 minutes who leads."""
    shared_by = _frozen(settings(sink))
    for key in list(_shared):  # which other threads may change
        if key[1] == shared_by:
            _shared.pop(key, None)


def _frozen(conf: dict[str, Any]) -> frozenset[tuple[str, str]]:
    return frozenset((k, str(v)) for k, v in conf.items())


def _shared_client(kind: Any, sink: config.Sink, conf: dict[str, Any]) -> tuple[Any, ClientLog]:
    # one that was made with a certificate that has expired would never log in again
    files = {k: _file_version(str(v)) for k, v in conf.items() if k.endswith(".location")}
    key = (os.getpid(), _frozen(settings(sink)), kind, _frozen(conf))
    found = _shared.get(key)
    if found is None or found[0] != files:
        client_log = ClientLog()
        found = _shared[key] = (files, _made(kind, conf, client_log, sink), client_log)
    return found[1:]


def admin_of(sink: config.Sink, servers: str) -> tuple[AdminClient, ClientLog]:
    """A new admin client that knows these servers."""
    client_log = ClientLog()
    conf = {**_admin_settings(sink), "bootstrap.servers": servers}
    return _made(AdminClient, conf, client_log, sink), client_log
