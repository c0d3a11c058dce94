"""What a client says, and for how long it is remembered."""

from __future__ import annotations

import gc
import os
from contextlib import suppress

import pytest
from confluent_kafka import KafkaError

from eventpub.config import Sink
from eventpub.errors import ConfigError, SinkError
from eventpub.sink import client, faults
from eventpub.sink.transaction import TransactionWriter

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
    log.log(20, "%s", "FAIL", "rdkafka#producer-1", line)
    assert log.last_error.str() == why, "the reason may be heard after it"


def test_a_login_without_a_provider_names_other_mechanisms() -> None:
    sink = Sink(topic="t", properties={"security.protocol": "sasl_ssl", "sasl.mechanism": "GSSAPI"})
    with pytest.raises(ConfigError) as caught:
        client.check_properties(sink, "orders")
    assert caught.value.where == "sink.properties.sasl.mechanism"
    assert "SCRAM-SHA-512" in str(caught.value.suggestion)


@pytest.mark.parametrize("name", ["compresion.type", "security_protocol"])
def test_a_misspelt_property_is_named(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        client.check_properties(Sink(topic="t", properties={name: "x"}), "orders")
    error = caught.value
    assert (error.code, error.where) == ("config.sink_property", f"sink.properties.{name}")
    assert "CONFIGURATION.md" in (error.suggestion or "")


def test_settings_of_one_kind_of_client_are_no_obstacle_to_the_others() -> None:
    properties = {
        "compression.level": "3",
        "delivery.timeout.ms": "5000",
        "enable.idempotence": "true",
        "fetch.max.bytes": "1000000",
        "linger.ms": "100",
        "max.in.flight": "5",
        "message.max.bytes": "900000",
        "queued.min.messages": "10",
    }
    sink = Sink(topic="t", bootstrap_servers="127.0.0.1:1", properties=properties)
    client.check_properties(sink, "orders")
    client.Clients(sink).admin()


def test_a_writer_that_could_not_take_over_leaves_no_client_behind() -> None:
    """In an outage there is one such writer every few seconds, and cycles are seldom collected."""

    def try_to_take_over() -> None:
        writer = TransactionWriter(client.Clients(sink), "orders", 0, timeout=0.1)
        for _ in range(2):  # it does not try again
            with suppress(SinkError):
                writer.ready()
        assert writer.needs_replacement
        writer.close()

    sink = Sink(topic="t", bootstrap_servers="127.0.0.1:1")
    try_to_take_over()  # what the library starts once
    before = len(os.listdir("/proc/self/task"))
    gc.disable()
    try:
        for _ in range(3):
            try_to_take_over()
        assert len(os.listdir("/proc/self/task")) <= before
    finally:
        gc.enable()
