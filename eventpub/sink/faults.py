"""librdkafka's errors as the sink's own, in one place.

| code | what happened | the caller |
|---|---|---|
| `sink.unreachable` | no broker, or no coordinator, answered in time | waits, tries again |
| `sink.auth_failed`, `sink.not_authorized` | the broker refused us | stops |
| `sink.topic_missing` | a topic is gone | stops |
| `sink.transactions_refused` | the broker does not do our transactions | stops |
| `sink.fenced` | another publisher owns the shard now | fails; the driver counts and tries again |
| `sink.indefinite` | nobody knows whether the transaction was committed | replaces, folds, redoes |
| `sink.aborted` | the transaction was aborted for good | redoes the batch |
| `sink.record_refused` | a record that the broker will never take | dead-letters it, redoes |
| `sink.fatal` | the producer is of no more use | replaces, folds, redoes |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from eventpub import config
from eventpub.errors import SinkError

AUTHENTICATION = frozenset({KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED})
# A broker that restarts breaks a handshake, too: said as a refusal, but worth another try.
_HANDSHAKE = AUTHENTICATION | {KafkaError._SSL}
_AUTHORIZATION = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }
)
_AWAY = frozenset(
    {
        KafkaError._TIMED_OUT,
        KafkaError._MSG_TIMED_OUT,
        KafkaError._TIMED_OUT_QUEUE,
        KafkaError._TRANSPORT,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._RESOLVE,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.NOT_COORDINATOR,
        KafkaError.BROKER_NOT_AVAILABLE,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NETWORK_EXCEPTION,
        KafkaError.NOT_ENOUGH_REPLICAS,
        KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        KafkaError._NOENT,  # "no leaders found"
    }
)
_FENCED = frozenset(
    {KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED}
)
_REFUSED_TRANSACTIONS = frozenset(
    {KafkaError.INVALID_TRANSACTION_TIMEOUT, KafkaError._UNSUPPORTED_FEATURE}
)
MISSING = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC})
MOMENTARY = frozenset(
    {
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.REPLICA_NOT_AVAILABLE,
        KafkaError.KAFKA_STORAGE_ERROR,
        KafkaError._NOENT,
    }
)
"""A partition's leader moves, or has just been created."""
REFUSED_RECORD = {
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.RECORD_LIST_TOO_LARGE,
    KafkaError.INVALID_MSG,
    KafkaError.INVALID_MSG_SIZE,
    KafkaError.INVALID_TIMESTAMP,
    KafkaError.INVALID_RECORD,
}


class RecordRefusedError(SinkError):
    """The broker or the client will never take some records; nothing of the batch was published.

    Args:
        rows: indices into the events given to `publish`.
        diverted_rows: indices into its `diverted`.
        reason: what the refusal said.
    """

    def __init__(self, rows: Sequence[int], diverted_rows: Sequence[int], reason: str, topic: str):
        super().__init__(
            "sink.record_refused",
            f"{len(rows) + len(diverted_rows)} record(s) can never be published: {reason}",
            where=f"topic {topic}",
            suggestion="for size: raise the topic's max.message.bytes and, in [sink.properties],"
            " message.max.bytes",
            retriable=True,
        )
        self.rows = list(rows)
        self.diverted_rows = list(diverted_rows)
        self.reason = reason

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "type": SinkError.__name__}


def kafka_error(error: KafkaException | KafkaError) -> KafkaError:
    """The error inside an exception of the client."""
    return error.args[0] if isinstance(error, KafkaException) else error


def says(error: KafkaError) -> str:
    """The error's name and text."""
    return f"{error.name()}: {error.str()}"


def unreachable(sink: config.Sink, doing: str, waited: float, last: KafkaError | None) -> SinkError:
    """No answer within the time that we give a broker; `last` is what the client heard instead."""
    if last is not None and (last.code() in _HANDSHAKE or "SSL_HANDSHAKE" in last.str()):
        return auth_failed(sink, last)
    detail = f"; the client says {says(last)}" if last is not None else ""
    return SinkError(
        "sink.unreachable",
        f"no answer from Kafka for {waited:.0f} s while {doing}{detail}",
        where=f"sink.bootstrap_servers = {sink.bootstrap_servers}",
        suggestion="check that the brokers run and that the address is right",
        retriable=True,
    )


def auth_failed(sink: config.Sink, error: KafkaError) -> SinkError:
    """TLS or SASL refused."""
    return SinkError(
        "sink.auth_failed",
        f"Kafka refused the connection's authentication ({says(error)})",
        where=f"sink.bootstrap_servers = {sink.bootstrap_servers}",
        suggestion="check security.protocol, sasl.* and ssl.* in [sink.properties]",
        retriable=error.code() not in AUTHENTICATION,
    )


def not_authorized(sink: config.Sink, error: KafkaError, doing: str) -> SinkError:
    """An ACL is missing."""
    return SinkError(
        "sink.not_authorized",
        f"Kafka does not allow it: {doing} ({says(error)})",
        where=f"sink.topic = {sink.topic}",
        suggestion="the publisher needs WRITE, READ and DESCRIBE on the topic and its side topics"
        " (CREATE to create them), and WRITE and DESCRIBE on the transactional ids 'eventpub.*'",
    )


def fault(error: KafkaError, doing: str, sink: config.Sink) -> SinkError:
    """The sink's error for one of the client's; what has no name of its own is `sink.fatal`."""
    code = error.code()
    if code in _HANDSHAKE:
        return auth_failed(sink, error)
    if code in _AUTHORIZATION:
        return not_authorized(sink, error, doing)
    if code in _FENCED:
        return SinkError(
            "sink.fenced",
            f"another publisher has taken over this shard ({says(error)} while {doing})",
            where=f"sink.topic = {sink.topic}",
            suggestion="let only one publisher run for an app.id",
        )
    if code in _REFUSED_TRANSACTIONS:
        return SinkError(
            "sink.transactions_refused",
            f"the broker does not take our transactions ({says(error)})",
            where="sink.transaction_timeout",
            suggestion="keep sink.transaction_timeout at or below the broker's"
            ' transaction.max.timeout.ms, or set sink.delivery = "at_least_once"',
        )
    if code in MISSING:
        return topic_missing(sink, sink.topic)
    if code in _AWAY:
        return SinkError(
            "sink.unreachable",
            f"no answer from Kafka while {doing} ({says(error)})",
            where=f"sink.bootstrap_servers = {sink.bootstrap_servers}",
            suggestion="check that the brokers run and that the address is right",
            retriable=True,
        )
    return SinkError(
        "sink.fatal",
        f"Kafka's client failed while {doing} ({says(error)})",
        where=f"sink.topic = {sink.topic}",
        retriable=True,
    )


def topic_missing(sink: config.Sink, topic: str, partitions: int | None = None) -> SinkError:
    """A topic is not there, with the command that creates it."""
    return SinkError(
        "sink.topic_missing",
        f"there is no topic {topic}",
        where=f"topic {topic}",
        suggestion=f"kafka-topics.sh --bootstrap-server {sink.bootstrap_servers} --create"
        f" --topic {topic} --partitions {partitions or sink.partitions}"
        " --config retention.ms=-1 (or sink.create_topics = true)",
    )
