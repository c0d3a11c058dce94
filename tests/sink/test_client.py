"""What a client says, and for how long it is remembered."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, KafkaException, Producer

from eventpub.config import Sink
from eventpub.errors import ConfigError
from eventpub.sink import client, faults
from eventpub.sink.property_names import NAMES, unknown_name

SAYS = f"{faults.NO_TOKEN}: Failed to connect to 127.0.0.1:1"


def test_that_there_is_no_token_is_not_forgotten_before_the_client_says_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does after 10 s. Whoever asked something in between heard that Kafka did not answer."""
    now = [100.0]
    monkeypatch.setattr("eventpub.sink.client.time.monotonic", lambda: now[0])
    log = client.ClientLog()
    log.error(KafkaError(KafkaError._AUTHENTICATION, SAYS))
    now[0] += 10.5
    log.forget()
    assert log.last_error is not None
    assert log.last_error.str() == SAYS
    now[0] += 5.0
    log.forget()
    assert log.last_error is None


def test_what_else_it_has_said_is_forgotten_with_the_next_question() -> None:
    log = client.ClientLog()
    log.error(KafkaError(KafkaError._TRANSPORT, "localhost:1: Connect failed"))
    assert log.last_error is not None
    log.forget()
    assert log.last_error is None


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (
            "[thrd:127.0.0.1:9092/bootstrap]: 127.0.0.1:9092/bootstrap: Disconnected: connection"
            " closed by peer: receive 0 after POLLIN (after 0ms in state UP, 1 identical error(s)"
            " suppressed)",
            "127.0.0.1:9092: Disconnected: connection closed by peer",
        ),
        (
            "[thrd:ssl://kafka:9093/2]: ssl://kafka:9093/2: Connect to ipv4#10.0.0.7:9093 failed:"
            " Connection refused (after 0ms in state CONNECT)",
            "ssl://kafka:9093: Connect to ipv4#10.0.0.7:9093 failed: Connection refused",
        ),
    ],
)
def test_that_all_brokers_are_down_is_said_with_why_a_connection_failed(
    monkeypatch: pytest.MonkeyPatch, line: str, why: str
) -> None:
    now = [100.0]
    monkeypatch.setattr("eventpub.sink.client.time.monotonic", lambda: now[0])
    all_down = KafkaError(KafkaError._ALL_BROKERS_DOWN, "0/2 brokers are down")
    log = client.ClientLog()
    log.log(20, "%s", "FAIL", "rdkafka#producer-1", line)
    log.error(all_down)
    assert log.last_error is not None
    assert log.last_error.str() == why
    now[0] += 100.0
    log.forget()
    log.error(all_down)
    assert log.last_error.str() == "0/2 brokers are down"


def test_a_login_without_a_provider_names_other_mechanisms() -> None:
    sink = Sink(topic="t", properties={"security.protocol": "sasl_ssl", "sasl.mechanism": "GSSAPI"})
    with pytest.raises(ConfigError) as caught:
        client.check_properties(sink, "orders")
    assert caught.value.where == "sink.properties.sasl.mechanism"
    assert "SCRAM-SHA-512" in str(caught.value.suggestion)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("compresion.type", "compression.type"),
        ("queue.buffering.max.message", "queue.buffering.max.messages"),
        ("security_protocol", "security.protocol"),
        ("sasl.user.name", "sasl.username"),
    ],
)
def test_a_misspelt_property_is_named_with_the_nearest_known_one(given: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        client.check_properties(Sink(topic="t", properties={given: "x"}), "orders")
    error = caught.value
    assert (error.code, error.where) == ("config.sink_property", f"sink.properties.{given}")
    assert error.suggestion == f"did you mean {meant}?"


def test_the_client_knows_every_name_that_is_suggested() -> None:
    unknown = []
    for name in NAMES:
        try:
            Producer({"bootstrap.servers": "", name: "\x01"})
        except (KafkaException, TypeError, ValueError) as refused:
            unknown.append(unknown_name(str(refused)))
    assert set(unknown) == {None}
