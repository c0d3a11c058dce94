"""What an exactly-once producer must survive: a test for each row of docs/hazards.md.

Those on a real broker put a proxy between the two and let one request come late, get lost, or lose
its answer; those that no broker can be made to do on purpose use librdkafka's mock cluster. Every
one ends with an independent look at the topic: each event once, in order, and every partition can
be read to its end.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, Producer
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
)

from eventpub import config
from eventpub.errors import SinkError
from eventpub.local import Kafka, kafka
from eventpub.sink import ShardSink, check_topics, shard
from eventpub.sink.shard import transactional_id
from tests.sink.conftest import OwnBroker
from tests.sink.helpers import (
    APP,
    PARTITIONS,
    WHOLE,
    Way,
    assert_published_once,
    read_topic,
    settings,
    some_events,
)
from tests.sink.mock_cluster import (
    ADD_PARTITIONS,
    END_TXN,
    INIT_PRODUCER_ID,
    PRODUCE,
    MockCluster,
    library_path,
)
from tests.sink.proxy import Fault

IMPATIENT = {"socket.timeout.ms": "1000", "message.timeout.ms": "5000"}
FIRST, SECOND, THIRD = (some_events(WHOLE, 40, version) for version in (1, 101, 201))


class CrashError(Exception):
    """Stands for the death of the process."""


def crash_at(name: str) -> Callable[[str], None]:
    def point(passed: str) -> None:
        if passed == name:
            raise CrashError

    return point


@pytest.fixture
def proxied(own_broker: OwnBroker, topic_name: str) -> config.Sink:
    """A sink that reaches its broker through the proxy."""
    made = settings(topic_name, own_broker.proxied, properties=IMPATIENT)
    check_topics(made)
    return made


@pytest.fixture
def way(proxied: config.Sink) -> Iterator[Way]:
    made = Way(proxied)
    yield made
    made.close()


class TestOneRequest:
    """Each request of a transaction, each thing that a network may do to it."""

    @pytest.mark.parametrize("api", [INIT_PRODUCER_ID, ADD_PARTITIONS, PRODUCE, END_TXN])
    @pytest.mark.parametrize("fault", ["lost", "unanswered"])
    def test_is_lost_or_its_answer_is(
        self, own_broker: OwnBroker, proxied: config.Sink, way: Way, api: int, fault: Fault
    ) -> None:
        if api != INIT_PRODUCER_ID:
            way.publish(FIRST)
        own_broker.proxy.strike_next(api, fault)
        way.publish(FIRST)
        way.publish(SECOND)
        assert own_broker.proxy.has_struck
        way.publish(THIRD)
        assert_published_once(own_broker.open, proxied.topic, FIRST, SECOND, THIRD)

    @pytest.mark.parametrize("api", [INIT_PRODUCER_ID, ADD_PARTITIONS, PRODUCE, END_TXN])
    @pytest.mark.parametrize("fault", ["held", "late"])
    @pytest.mark.parametrize("into", ["its own transaction", "the next transaction"])
    def test_comes_late(
        self,
        own_broker: OwnBroker,
        proxied: config.Sink,
        way: Way,
        api: int,
        fault: Fault,
        into: str,
    ) -> None:
        """The client has long sent it again; now the first arrives, too, before a commit."""
        proxy = own_broker.proxy
        if api != INIT_PRODUCER_ID:
            way.publish(FIRST)
        proxy.strike_next(api, fault)
        transactions = 0
        released = False

        def late(point: str) -> None:
            nonlocal transactions, released
            if point == "before_commit" and proxy.has_struck and not released:
                transactions += 1
                if transactions == (1 if into == "its own transaction" else 2):
                    proxy.release()
                    released = True

        for rows in (FIRST, SECOND, THIRD, some_events(WHOLE, 40, 301)):
            way.publish(rows, crash_point=late)
        assert released
        assert_published_once(
            own_broker.open, proxied.topic, FIRST, SECOND, THIRD, some_events(WHOLE, 40, 301)
        )
