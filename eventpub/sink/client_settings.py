"""Settings of every librdkafka client of the sink, which ones the user may not change, and the
tokens of OAUTHBEARER.

`[sink.properties]` overrides the defaults, except where that would break a guarantee. Security
settings reach producers, consumers and admin clients alike; each ignores what it does not know.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from eventpub import config
from eventpub.errors import ConfigError, SinkError
from eventpub.masking import current, mask_url, remember

_COMMON: dict[str, Any] = {
    # Connect when a broker is needed, not on a timer: a new client is ready in a few ms instead of
    # 55 to 510.
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
    # Kafka's default for topics. With librdkafka's 1,000,000, rows in between would become dead
    # letters without reaching the broker.
    "message.max.bytes": "1048588",
}
_LINGER_MS = 200
"""Each batch ends with a flush, which ignores linger; until then only full requests are sent."""
_CONSUMER: dict[str, Any] = {
    "fetch.wait.max.ms": "50",
    "fetch.error.backoff.ms": "50",
    # default: 1 s each time the queue was full, as with `FETCH_LITTLE`
    "fetch.queue.backoff.ms": "10",
    "queued.min.messages": "100000",
    "queued.max.messages.kbytes": "16384",
    "check.crcs": "true",
}
FETCH_LITTLE = {"queued.min.messages": "1", "max.partition.fetch.bytes": "65536"}
_QUIET = "4"


def settings(sink: config.Sink) -> dict[str, Any]:
    """Settings of all clients; `config.contradiction` if a property would break a guarantee."""
    for refusal in config.refused_properties("sink", sink.properties, sink.delivery):
        raise refusal
    given = {name: current(value) for name, value in sink.properties.items()}
    return {"bootstrap.servers": sink.bootstrap_servers, **_COMMON, **given}


def _message_timeout(conf: dict[str, Any]) -> int:
    """Message timeout, ms; 0: none."""
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
    timeout_ms = max(1000, sink.transaction_timeout // 1000)
    conf = {**_PRODUCER, **settings(sink)}
    if "max.in.flight.requests.per.connection" in conf:
        del conf["max.in.flight"]
    if not {"message.timeout.ms", "delivery.timeout.ms"} & conf.keys():
        # A message must expire before its transaction: what is still queued after the broker's
        # abort would be sent into the next transaction.
        conf["message.timeout.ms"] = str(min(30_000, timeout_ms * 3 // 4))
    limit = _message_timeout(conf)
    if not {"linger.ms", "queue.buffering.max.ms"} & conf.keys():
        # librdkafka rejects a linger above the message timeout (0: no timeout)
        conf["linger.ms"] = str(min(_LINGER_MS, limit // 2 or _LINGER_MS))
    if transactional_id is not None:
        if "socket.timeout.ms" not in sink.properties:
            # librdkafka requires it to be within the transaction timeout
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
    # Only the protocol's log lines show an `EndTxn` that was sent twice.
    conf["log_level"] = "7"
    conf["debug"] = ",".join({"protocol", *filter(None, str(conf.get("debug", "")).split(","))})
    return conf


def consumer_settings(sink: config.Sink, *, committed: bool = True) -> dict[str, Any]:
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
    """To librdkafka, an admin client is a producer."""
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
"""By alias, the name that librdkafka's messages use."""


def refused(reason: str, properties: Mapping[str, str]) -> ConfigError:
    """The error for settings that the client rejects with the message `reason`."""
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
    """The user's property that a message is about ("": none), and the message with that name."""
    for word in re.findall(r"\w+(?:\.\w+)*", reason):
        names = [word, *(alias for alias, name in _ALIASES.items() if name == word)]
        own = next((name for name in names if name in properties), None)
        if own is not None:
            return own, reason.replace(word, own).strip()
    return "", reason


class TokenProvider:
    """Calls the user's function, `sink.token_provider`, for one client.

    It gets the property `sasl.oauthbearer.config` ("" if unset), from several threads and in every
    process of the publisher, and returns ``(token, expires)``, in seconds since 1970, UTC,
    optionally followed by the principal and a mapping of SASL extensions.

    Attributes:
        failure: the error of the last call, or None.

    Raises:
        ConfigError: config.token_provider: there is no such function.
        SinkError: sink.token_failed: the first call raised; a client would wait for 10 s.
    """

    def __init__(self, name: str, properties: str) -> None:
        self._name = name
        self._function = find_function(name)
        self.failure: str | None = None
        try:
            self._first: tuple[Any, ...] | None = self._call(properties)
        except Exception as error:
            raise token_failed(self.failure or str(error)) from error

    def __call__(self, properties: str) -> tuple[Any, ...]:
        """A token and its expiry, as confluent-kafka's `oauth_cb` expects."""
        first, self._first = self._first, None
        return first or self._call(properties)

    def _call(self, properties: str) -> tuple[Any, ...]:
        try:
            token, expires, *more = self._function(properties)
            remember(token, passing=True)
            answer = (token, float(expires), *more)
        except Exception as error:
            text = mask_url(str(error))
            self.failure = f"{self._name} raised {type(error).__name__}: {text}"
            raise
        self.failure = None
        return answer


def token_failed(how: str) -> SinkError:
    return SinkError(
        "sink.token_failed",
        f"no token for Kafka: {how}",
        where="sink.token_provider",
        suggestion="test the function on its own; it must return (token, expires), with expires in"
        " seconds since 1970",
        retriable=True,
    )


def provider_failed(how: str) -> SinkError:
    return SinkError(
        "sink.token_failed",
        f"the identity provider returned no token for Kafka: {how}",
        where="sink.properties.sasl.oauthbearer.token.endpoint.url",
        suggestion="check it, sasl.oauthbearer.client.id, sasl.oauthbearer.client.secret and"
        " sasl.oauthbearer.scope in [sink.properties], and that the provider can be reached; if its"
        " tokens are not JWTs with sub and exp, write a sink.token_provider",
        retriable=True,
    )


def find_function(name: str) -> Callable[[str], Any]:
    """Import the module and return its function; raises config.token_provider."""
    module, _, function = name.partition(":")
    try:
        found: Callable[[str], Any] = getattr(importlib.import_module(module), function)
        if not callable(found):
            raise TypeError("it is not a function")
    except Exception as error:  # an import may raise anything
        raise ConfigError(
            "config.token_provider",
            f"there is no {name}: {type(error).__name__}: {mask_url(str(error))}",
            where="sink.token_provider",
            suggestion="sink.token_provider names package.module:function; the package must be"
            " installed in eventpub's environment, or be on PYTHONPATH",
        ) from error
    return found
