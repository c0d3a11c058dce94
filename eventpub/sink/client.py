"""Settings of every librdkafka client of the sink, and the ones the user may not change.

`[sink.properties]` wins over the defaults here, except for what would break a guarantee: such a key
is refused by name. What must hold: security settings reach producers, consumers and the admin
client alike; no client is made anywhere else in the project's publishing path.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from eventpub import config
from eventpub.errors import ConfigError

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
    # record instead of 1.6 (docs/design.md). One request holds up to `batch.size` bytes.
    "max.in.flight": "1",
    "batch.num.messages": "10000",
    "batch.size": "900000",
    "queue.buffering.max.messages": "200000",
    "queue.buffering.max.kbytes": "262144",
}
_LINGER_MS = 200
"""Each batch ends with a flush, which waits for no linger; until then only full requests go out."""
_CONSUMER: dict[str, Any] = {
    "fetch.wait.max.ms": "50",
    "fetch.error.backoff.ms": "50",
    "queued.min.messages": "100000",
    "queued.max.messages.kbytes": "65536",
    "check.crcs": "true",
}
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
_OURS = {
    "bootstrap.servers": "use sink.bootstrap_servers",
    "metadata.broker.list": "use sink.bootstrap_servers",
    "transactional.id": "it is made of app.id and the shard's number, so that a newer owner fences",
    "transaction.timeout.ms": "use sink.transaction_timeout",
    "isolation.level": "what is read back must be committed",
    "group.id": "the sink joins no group",
    "enable.partition.eof": "reading back ends by it",
    "enable.auto.commit": "the sink joins no group",
    "auto.offset.reset": "an offset that is gone must be said, not passed over",
    "partitioner": "the partition is CRC32 of the aggregate's id",
    "delivery.report.only.error": "delivery reports are counted before each commit",
    "enable.gapless.guarantee": "transactions give it",
    "log.queue": "the log is watched for lost answers of the coordinator",
    "log_level": "the log is watched for lost answers of the coordinator",
}


def settings(sink: config.Sink) -> dict[str, Any]:
    """What all clients share: the servers, the defaults, the user's properties.

    Raises:
        ConfigError: `config.contradiction`, a property that would break a guarantee.
    """
    transactional = sink.delivery == "exactly_once"
    for key, value in sink.properties.items():
        refusal = _OURS.get(key)
        text = value.strip().lower()
        if key == "enable.idempotence" and text != "true" and sink.delivery != "at_most_once":
            refusal = "without it a retry repeats or reorders records"
        elif key in {"acks", "request.required.acks"} and sink.delivery != "at_most_once":
            if text not in {"all", "-1"}:
                refusal = "only acks=all survives the loss of a broker"
        elif key in {"max.in.flight", "max.in.flight.requests.per.connection"}:
            if not text.isdigit() or int(text) > 5:
                refusal = "more than 5 requests in flight lose the order of an idempotent producer"
        elif key == "log.connection.close" and text != "true" and transactional:
            refusal = "the log is watched for lost connections to the coordinator"
        if refusal:
            raise ConfigError(
                "config.contradiction",
                f"the property {key} cannot be set: {refusal}",
                where=f"sink.properties.{key}",
                suggestion=f"remove {key} from [sink.properties]",
            )
    return {"bootstrap.servers": sink.bootstrap_servers, **_COMMON, **sink.properties}


def _is_consumer_only(key: str) -> bool:
    return key.startswith(_CONSUMER_PREFIXES)


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
    limit = int(conf.get("message.timeout.ms") or conf["delivery.timeout.ms"])
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
    # The protocol's log lines tell each request and answer: nothing else shows an `EndTxn` that
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


_LOST_ANSWER = frozenset({"REQTMOUT", "FAIL"})
_NAME_AT_END = re.compile(r"\((\w+)[^()]*\)\s*$")
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


class ClientLog:
    """Receives librdkafka's log lines and errors during `poll()`, and remembers what matters.

    Attributes:
        in_doubt: True after a line that says that an answer of the transaction coordinator was
            lost, or when an `EndTxn` was sent that no answer has come to: librdkafka repeats such a
            request by itself and reports nothing.
        transaction_error: why the transaction cannot be committed any more; nothing else says it
            before the commit is tried.
        last_error: what `error_cb` heard last, such as a refused authentication.
    """

    def __init__(self) -> None:
        self._lost_answer = False
        self._ends_sent = 0
        self._ends_answered = 0
        self.transaction_error: KafkaError | None = None
        self.last_error: KafkaError | None = None

    def forget(self) -> None:
        """Begins anew, with the next transaction or question."""
        self.last_error = None
        self._lost_answer = False
        self._ends_sent = self._ends_answered = 0
        self.transaction_error = None

    @property
    def in_doubt(self) -> bool:
        """See the class; True only of what was logged since `forget`."""
        return self._lost_answer or self._ends_sent > self._ends_answered

    def log(self, level: int, _format: str, facility: str, name: str, text: str) -> None:
        """Called by the client in place of `logging.Logger.log`."""
        if facility == "SEND":
            self._ends_sent += "Sent EndTxnRequest" in text
        elif facility == "RECV":
            self._ends_answered += "Received EndTxnResponse" in text
        elif facility in _LOST_ANSWER and ("TxnCoordinator" in text or "EndTxn" in text):
            self._lost_answer = True
        elif facility == "TXNERR" and (name_at_end := _NAME_AT_END.search(text)):
            code = getattr(KafkaError, name_at_end[1], KafkaError._FAIL)
            # the first is the cause; an abort that fails in turn tells less
            self.transaction_error = self.transaction_error or KafkaError(code, text)
        log.log(min(level, logging.INFO), "%s %s %s", facility, name, text)

    def error(self, error: KafkaError) -> None:
        """Called by the client as its `error_cb`."""
        if self.last_error is None or error.code() != KafkaError._ALL_BROKERS_DOWN:
            self.last_error = error  # "all are down" does not say why
        log.info("client error %s: %s", error.name(), error.str())


def producer(
    sink: config.Sink,
    transactional_id: str | None,
    client_log: ClientLog,
    *,
    careful: bool = False,
) -> Producer:
    """A new producer; `client_log` hears what it says; `careful` sends each record by itself."""
    conf = producer_settings(sink, transactional_id)
    if careful:
        conf["batch.num.messages"] = "1"
    made: Producer = _made(Producer, conf, client_log)
    return made


def consumer(sink: config.Sink, client_log: ClientLog, *, committed: bool = True) -> Consumer:
    """A new consumer, by default of committed records; `client_log` hears what it says."""
    made: Consumer = _made(Consumer, consumer_settings(sink, committed=committed), client_log)
    return made


def _made(kind: Any, conf: dict[str, Any], client_log: ClientLog) -> Any:
    try:
        return kind({**conf, "error_cb": client_log.error}, logger=client_log)
    except KafkaException as exception:
        error = exception.args[0]
        raise ConfigError(
            "config.sink_property",
            f"Kafka's client refuses its settings: {error.str()}",
            where="sink.properties",
            suggestion="see the list of properties in librdkafka's CONFIGURATION.md",
        ) from exception


_admins: dict[tuple[int, frozenset[tuple[str, str]]], tuple[AdminClient, ClientLog]] = {}


def admin(sink: config.Sink, *, anew: bool = False) -> tuple[AdminClient, ClientLog]:
    """This process's admin client for these servers.

    Args:
        anew: make a new one; the old one's idea of who leads a partition stays for 15 minutes.
    """
    conf = _admin_settings(sink)
    key = (os.getpid(), frozenset((k, str(v)) for k, v in conf.items()))
    found = _admins.get(key)
    if found is None or anew:
        client_log = ClientLog()
        found = _admins[key] = (_made(AdminClient, conf, client_log), client_log)
    return found
