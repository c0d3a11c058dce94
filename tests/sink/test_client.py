"""What a client says, and for how long it is remembered."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
from confluent_kafka import KafkaError

from eventpub import config
from eventpub.sink import client, faults

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


def test_no_two_threads_share_an_admin_client_and_it_ends_with_its_thread() -> None:
    """Asked for offsets by two at once, librdkafka frees what it works on twice, now and then."""
    sink = config.Sink(topic="events", bootstrap_servers="127.0.0.1:1")
    here, _ = client.admin(sink)
    assert client.admin(sink)[0] is here
    there: list[weakref.ref[Any]] = []

    def ask() -> None:
        made, _ = client.admin(sink)
        assert client.admin(sink)[0] is made
        there.append(weakref.ref(made))
        assert made is not here

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    [made] = there
    assert made() is None
    assert client.admin(sink, anew=True)[0] is not here
