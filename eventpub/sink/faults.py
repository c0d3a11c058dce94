"""Maps librdkafka's errors to the sink's; docs/errors.md lists their codes."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence

from confluent_kafka import KafkaError, KafkaException

from eventpub import config
from eventpub.errors import SinkError
from eventpub.sink.client_settings import provider_failed, token_failed

NO_TOKEN = "Failed to acquire SASL OAUTHBEARER token"  # as librdkafka words it
AUTHENTICATION = frozenset({KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED})
_HANDSHAKE = AUTHENTICATION | {KafkaError._SSL}  # a restarting broker breaks these, too: retry
_AUTHORIZATION = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }
)
AWAY = frozenset(
    {
        KafkaError._TIMED_OUT,
        KafkaError._MSG_TIMED_OUT,
        KafkaError._TIMED_OUT_QUEUE,
        KafkaError._TRANSPORT,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError._DESTROY_BROKER,
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
MISSING = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.UNKNOWN_TOPIC_ID,
        KafkaError.INCONSISTENT_TOPIC_ID,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
    }
)
MOMENTARY = frozenset(  # a partition's leader is moving, or new
    {
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.REPLICA_NOT_AVAILABLE,
        KafkaError.KAFKA_STORAGE_ERROR,
        KafkaError.OFFSET_NOT_AVAILABLE,  # of a new leader
    }
)
REFUSED_RECORD = {
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.RECORD_LIST_TOO_LARGE,
    KafkaError.INVALID_MSG,
    KafkaError.INVALID_MSG_SIZE,
    KafkaError.INVALID_TIMESTAMP,
    KafkaError.INVALID_RECORD,
}
_LATE_WITHIN = 60.0
"""Seconds after which the broker has executed or lost an unanswered request: a late
`InitProducerId` fences this process's newer producer, as another publisher would."""
_unanswered_at = float("-inf")


def is_unanswered() -> None:
    """Record that the broker did not answer a request, or that a connection broke."""
    global _unanswered_at  # noqa: PLW0603 (a process has one cluster)
    _unanswered_at = time.monotonic()


def may_be_own_request() -> bool:  # after a fence: a late request of this process
    return time.monotonic() - _unanswered_at < _LATE_WITHIN


def kafka_error(error: KafkaException | KafkaError) -> KafkaError:
    return error.args[0] if isinstance(error, KafkaException) else error


def says(error: KafkaError) -> str:
    return f"{error.name()}: {error.str()}"


def refuses(error: KafkaError, limit: str = "the topic's max.message.bytes") -> str:
    is_too_large = error.code() == KafkaError.MSG_SIZE_TOO_LARGE
    return f"{error.name()}: larger than {limit}" if is_too_large else says(error)


def unreachable(
    sink: config.Sink, doing: str, waited: float | None, last: KafkaError | None
) -> SinkError:  # waited: s; None: the client gave up by itself
    if last is not None and (
        last.code() in _HANDSHAKE
        or re.search(r"SSL_HANDSHAKE|SSL routines|SSL alert|SSL transport", last.str())
    ):
        return auth_failed(sink, last)
    is_unanswered()
    waiting = "" if waited is None else f" for {waited:.0f} s"
    detail = "" if last is None else f"; the client says {says(last)}"
    return SinkError(
        "sink.unreachable",
        f"no answer from Kafka{waiting} while {doing}{detail}",
        where=f"sink.bootstrap_servers = {sink.bootstrap_servers}",
        suggestion="check that the brokers run, that the address is right, and that"
        " security.protocol fits it: a broker that requires TLS or a login closes other"
        " connections",
        retriable=True,
    )


_FIXES = (
    (
        r"certificate verify failed|self.signed|local issuer|unknown ca",
        "set ssl.ca.location in [sink.properties] to the file of the CA that has signed the"
        " broker's certificate; where that is right, the certificate is of another host name: put"
        " the name that is in it into sink.bootstrap_servers and the broker's advertised.listeners",
    ),
    (
        r"alert|certificate required|bad certificate|handshake.failure|SSL transport",
        "the broker requires a client certificate, or does not trust it: set"
        " ssl.certificate.location and ssl.key.location in [sink.properties]",
    ),
    (
        r"invalid_token|OAUTHBEARER",
        "the broker does not take the token: check that sink.token_provider, or sasl.oauthbearer.*"
        " in [sink.properties], gives one that has not expired, of the issuer and audience that"
        " the broker expects",
    ),
    (
        r"[Ii]nvalid credentials|Invalid username or password",
        "check sasl.username and sasl.password (or the file of sasl.password.file) in"
        " [sink.properties]; also security.protocol and sasl.mechanism",
    ),
    (
        r"Unsupported SASL mechanism|mechanism handshake failed",
        "set sasl.mechanism in [sink.properties] to one that the broker takes"
        " (sasl.enabled.mechanisms); also check security.protocol and the other sasl.*",
    ),
)
_FIX = "check security.protocol, sasl.* and ssl.* in [sink.properties]"


def is_refusal(error: KafkaError) -> bool:  # waiting will not help
    return error.code() in AUTHENTICATION or "certificate verify failed" in error.str()


def auth_failed(sink: config.Sink, error: KafkaError) -> SinkError:
    text = error.str()
    if NO_TOKEN in text:
        failed = provider_failed if sink.token_provider is None else token_failed
        return failed(text.rpartition(f"{NO_TOKEN}: ")[2])
    fix = next((fix for pattern, fix in _FIXES if re.search(pattern, text)), None)
    return SinkError(
        "sink.auth_failed",
        f"Kafka refused the connection's authentication ({says(error)})",
        where=f"sink.bootstrap_servers = {sink.bootstrap_servers}",
        suggestion=fix or _FIX,
        retriable=not is_refusal(error),
    )


_ACLS = "kafka-acls.sh --bootstrap-server {servers} --add --allow-principal User:…"


def not_authorized(sink: config.Sink, error: KafkaError, doing: str) -> SinkError:
    acls = _ACLS.format(servers=sink.bootstrap_servers)
    return SinkError(
        "sink.not_authorized",
        f"Kafka denied permission while {doing} ({says(error)})",
        where=f"sink.topic = {sink.topic}",
        suggestion="the publisher needs WRITE, READ and DESCRIBE on the topic and its side topics"
        " (CREATE to create them), and WRITE and DESCRIBE on the transactional ids that begin with"
        f" 'eventpub.<app.id>.': {acls} --operation Write --operation Read --topic {sink.topic}"
        f" --resource-pattern-type prefixed; {acls} --operation Write"
        " --transactional-id 'eventpub.<app.id>.' --resource-pattern-type prefixed",
    )


def rights_missing(sink: config.Sink, lacking: Mapping[str, Sequence[str]]) -> SinkError:
    acls = _ACLS.format(servers=sink.bootstrap_servers)
    topic, operations = next(iter(lacking.items()))
    words = ", ".join(f"{', '.join(names)} on {name}" for name, names in lacking.items())
    flags = " ".join(f"--operation {name}" for name in operations)
    create = "Create" in operations
    return SinkError(
        "sink.not_authorized",
        f"this account lacks rights: {words}",
        where=f"topic {topic}",
        suggestion=f"{acls} {flags} --topic {sink.topic} --resource-pattern-type prefixed"
        + (", or create its topics by yourself and set sink.create_topics = false" * create),
    )


def fault(error: KafkaError, doing: str, sink: config.Sink) -> SinkError:  # noqa: PLR0911 (one case an error of the client)
    code = error.code()
    if code in _HANDSHAKE:
        return auth_failed(sink, error)
    if code in _AUTHORIZATION:
        return not_authorized(sink, error, doing)
    if code in _FENCED and may_be_own_request():
        return SinkError(
            "sink.own_request_late",
            f"the producer was fenced ({says(error)} while {doing}) shortly after the broker did"
            " not answer: most likely by a delayed request of this publisher itself; nothing was"
            " lost or repeated",
            where=f"sink.topic = {sink.topic}",
            suggestion="nothing to do: the shard is taken over again; if this repeats while the"
            " broker answers, look for another publisher with the same app.id",
            retriable=True,
        )
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
            f"the broker refuses transactions like these ({says(error)})",
            where="sink.transaction_timeout",
            suggestion="keep sink.transaction_timeout at or below the broker's"
            ' transaction.max.timeout.ms, or set sink.delivery = "at_least_once" (events may then'
            " be repeated after a crash)",
        )
    if code in MISSING:
        return topic_missing(sink, sink.topic)
    if code == KafkaError.INVALID_REPLICATION_FACTOR:
        return SinkError(
            "sink.too_few_brokers",
            f"the cluster has too few brokers for the replication factor ({says(error)})",
            where=f"sink.replication_factor = {sink.replication_factor}",
            suggestion="set sink.replication_factor to at most the number of brokers, or create"
            " the topics yourself",
            retriable=True,
        )
    if code in AWAY:
        return unreachable(sink, doing, None, error)
    return SinkError(
        "sink.fatal",
        f"Kafka's client failed while {doing} ({says(error)})",
        where=f"sink.topic = {sink.topic}",
        suggestion="nothing to do: the shard restarts with a new producer",
        retriable=True,
    )


def topic_missing(sink: config.Sink, topic: str, count: int = 0, kept: str = "") -> SinkError:
    return SinkError(
        "sink.topic_missing",
        f"there is no topic {topic}",
        where=f"topic {topic}",
        suggestion=f"kafka-topics.sh --bootstrap-server {sink.bootstrap_servers} --create"
        f" --topic {topic} --partitions {count or sink.partitions}"
        f" --config {kept or 'retention.ms=-1'} (or sink.create_topics = true)",
    )


def sides_left(sink: config.Sink) -> SinkError:
    return SinkError(
        "sink.side_topics_left",
        f"{sink.topic} was never written to, but its side topics have records from a former topic"
        " of this name: events never published here would count as skipped or refused",
        where=f"topic {sink.topic}",
        suggestion=f"{_delete_sides(sink)}; then start again: run creates them",
    )


def _delete_sides(sink: config.Sink) -> str:
    servers, topic = sink.bootstrap_servers, sink.topic.replace(".", r"\.")
    return (
        f"delete the side topics (kafka-topics.sh --bootstrap-server {servers} --delete --topic"
        rf" '{topic}\.(gaps|dead|late)')"
    )


def _publish_everything(sink: config.Sink, which: str = "into a new one") -> str:
    return (
        f"to publish everything since read.start {which}: stop the publisher,"
        f" {_delete_sides(sink)}, remove app.state_dir and start again (where read.start ="
        ' "now", set it to the time in start.json of app.state_dir before)'
    )


def topic_remade(sink: config.Sink, found: str) -> SinkError:
    return SinkError(
        "sink.topic_recreated",
        f"{sink.topic} is not the topic this publisher wrote to: it was"
        f" deleted and created again (its id is {found} now)",
        where=f"topic {sink.topic}",
        suggestion=f"{_publish_everything(sink)}; to continue there with what is not yet"
        f' published: sink.accept_topic_id = "{found}"',
    )


def records_gone(sink: config.Sink, place: tuple[str, int], saved: int, end: int) -> SinkError:
    topic, partition = place
    return SinkError(
        "sink.topic_recreated",
        f"{topic}[{partition}] ends at offset {end}, but {saved} was reached before: records at its"
        " end are lost (an unclean leader election, a lost disk), or the topic was deleted and"
        " created again",
        where=f"topic {topic}",
        suggestion=f"{_publish_everything(sink, 'that is not on the topic')}; the topic is read"
        " back first, and nothing that is on it is repeated",
    )


def stalled(error: KafkaError, seconds: float) -> SinkError:
    return SinkError(
        "sink.transaction_expired",
        f"this process was stalled, or the broker slow or away, for so long ({seconds:.0f} s) that"
        f" the transaction was aborted; nothing was published ({says(error)})",
        where="sink.transaction_timeout",
        suggestion="nothing to do: the batch is retried; if this repeats, check whether machine or"
        " container is short of CPU or memory, or raise sink.transaction_timeout",
        retriable=True,
    )


def topic_gone(sink: config.Sink, partitions: int) -> SinkError:
    return SinkError(
        "sink.topic_missing",
        f"topic {sink.topic}, which this publisher has written to, no longer exists",
        where=f"topic {sink.topic}",
        suggestion=f"{_publish_everything(sink)}; to continue in a new one with unpublished"
        " events only, create it: kafka-topics.sh --bootstrap-server"
        f" {sink.bootstrap_servers} --create --topic {sink.topic} --partitions {partitions}"
        " --config retention.ms=-1; the next start names the sink.accept_topic_id to set",
    )


def aborted(error: KafkaError | None, sink: config.Sink) -> SinkError:
    why = "" if error is None else f" ({says(error)})"
    return SinkError(
        "sink.aborted",
        f"the transaction was aborted, nothing was published{why}",
        where=f"topic {sink.topic}",
        suggestion="nothing to do: the next transaction publishes the same events; if this"
        " repeats, see the broker's log",
        retriable=True,
    )


def indefinite(error: KafkaError, sink: config.Sink) -> SinkError:
    return SinkError(
        "sink.indefinite",
        f"the outcome of the commit is unknown ({says(error)})",
        where=f"topic {sink.topic}",
        suggestion="nothing to do: the topic is read back before anything is published",
        retriable=True,
    )


def delivery_lost(sink: config.Sink, produced: int, delivered: int, seconds: float) -> SinkError:
    return SinkError(
        "sink.delivery_lost",
        f"{produced} records were produced, but {delivered} delivery reports came within"
        f" {seconds:.0f} s; nothing was committed",
        where=f"sink.bootstrap_servers = {sink.bootstrap_servers}",
        suggestion="nothing to do: the batch is retried; if this repeats, the brokers are"
        " too slow: lower read.page_rows, or see their logs",
        retriable=True,
    )


def side_record_refused(sink: config.Sink, topic: str, reason: str) -> SinkError:
    return SinkError(
        "sink.side_record_refused",
        f"{topic} refuses a record even at its minimum size: {reason}",
        where=f"topic {topic}",
        suggestion=f"kafka-configs.sh --bootstrap-server {sink.bootstrap_servers}"
        f" --alter --entity-type topics --entity-name {topic} --add-config"
        " max.message.bytes=1048588 (or more); if [sink.properties] sets message.max.bytes,"
        " raise that to as much; if it is the timestamp (the current time): correct the broker's"
        " clock. Nothing was published",
    )
