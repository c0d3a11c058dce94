"""Who is a `Sink`: Kafka's on a broker and on a modelled one, the journal's, and the twin."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from eventpub import config
from eventpub.sink.client import Clients
from eventpub.sink.layout import check_topics
from eventpub.sink.shard import ShardSink
from eventpub.spark.rows import JournalSink, are
from tests import cautions
from tests.simulation import broker
from tests.simulation.world import Current, Setup, World
from tests.sink.conftest import OwnBroker
from tests.sink.contract import Case, Key, OwnedCase, OwnedSinkContract, SinkContract
from tests.sink.helpers import APP, CREATED, PARTITIONS, WHOLE, identities, read_topic, settings
from tests.sink.mock_cluster import END_TXN
from tests.twins.sink import LARGEST, MemorySink, Topic


class MemoryCase:
    """A topic in memory."""

    refused = b"x" * (LARGEST + 1)

    def __init__(self) -> None:
        self.topic = Topic()

    def sink(self) -> MemorySink:
        return MemorySink(self.topic)

    def visible(self) -> list[Key]:
        return self.topic.rows

    def lose_answer(self) -> None:
        self.topic.loses_answer = True


class KafkaCase:
    """A topic of Kafka, by some clients."""

    refused = b"x" * 2_000_000

    def __init__(self, clients: Clients) -> None:
        self.clients = clients
        self.made: list[ShardSink] = []

    def sink(self) -> ShardSink:
        self.made.append(ShardSink(self.clients, APP, WHOLE))
        return self.made[-1]


class BrokerCase(KafkaCase):
    """On a broker behind a proxy."""

    def __init__(self, own_broker: OwnBroker, sink: config.Sink) -> None:
        super().__init__(Clients(sink))
        self._broker = own_broker
        check_topics(self.clients)

    def visible(self) -> list[Key]:
        return identities(read_topic(self._broker.open, self.clients.sink.topic))

    def lose_answer(self) -> None:
        self._broker.proxy.strike_next(END_TXN, "lost")


class ModelledCase(KafkaCase):
    """On the broker of the simulation."""

    refused = b"{}" + broker.ALONE.encode()

    def __init__(self) -> None:
        self.world = Current.world = World(Setup(partitions=PARTITIONS))
        self.world.clock = CREATED + 1_000_000
        sink = settings("events", "modelled:1")
        self.world.broker = broker.Broker(self.world, list(sink.topics))
        super().__init__(broker.Clients(sink))

    def visible(self) -> list[Key]:
        self.world.broker.settle()
        places = [("events", number) for number in range(PARTITIONS)]
        return identities([m for place in places for m in self.world.broker.read(place, 0)])

    def lose_answer(self) -> None:
        self.world.faults["commit unanswered"] += 1


class JournalCase:
    """The rows of a task of Spark, before its journal is created."""

    def __init__(self) -> None:
        self._sink = JournalSink(has_contents=False)

    def sink(self) -> JournalSink:
        return self._sink

    def visible(self) -> list[Key]:
        keys = self._sink.keys()
        rows = keys.filter(are("event", keys)).to_pylist()
        return [(row["aggregate_id"], row["version"]) for row in rows]


class TestMemorySink(OwnedSinkContract):
    """The twin."""

    @pytest.fixture
    def case(self) -> MemoryCase:
        return MemoryCase()


class TestJournalSink(SinkContract):
    """The journal's."""

    @pytest.fixture
    def case(self) -> Case:
        return JournalCase()


class TestModelledBroker(OwnedSinkContract):
    """Kafka's, without a broker."""

    @pytest.fixture
    def case(self) -> OwnedCase:
        cautions.forget_all()
        return ModelledCase()


class TestBroker(OwnedSinkContract):
    """Kafka's."""

    @pytest.fixture
    def case(self, own_broker: OwnBroker, topic_name: str) -> Iterator[OwnedCase]:
        case = BrokerCase(own_broker, settings(topic_name, own_broker.proxied))
        yield case
        for sink in case.made:
            sink.close()
