"""Kafka as people run it: several brokers, of which any one may go.

Every node is broker and controller, in a JVM of its own; topics and the log of transactions have
three copies, of which two must have a record before it counts (`min.insync.replicas`). For tests of
what happens when a broker goes: which one leads a partition, coordinates a transactional id, or is
the active controller can be asked for, and each can be killed, paused, restarted or, with
`relayed`, taken off the network.
"""

from __future__ import annotations

import random
import re
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from eventpub.errors import LocalError
from eventpub.local.downloads import copied, step
from eventpub.local.processes import free_port
from eventpub.local.servers import KAFKA_VERSION as VERSION
from eventpub.local.servers import Kafka, new_id
from tests.servers.kafka import new_broker
from tests.servers.relay import Network
from tests.servers.signals import pause, restart, resume

_TRANSACTIONS = "__transaction_state"
_ASK_SECONDS = 5.0
_DESCRIBE_QUORUM = 55


class KafkaCluster:
    """Running brokers; a context manager that stops them.

    Attributes:
        brokers: by number, from 1; each can be stopped, killed, paused and started by itself.
        network: where the brokers are relayed: takes one off the network, by its number.
    """

    def __init__(self, brokers: Mapping[int, Kafka], network: Network | None) -> None:
        self.brokers = dict(brokers)
        self.network = network
        self._ports = [broker.port for broker in brokers.values()]

    @property
    def bootstrap_servers(self) -> str:
        """The addresses for clients."""
        return ",".join(f"127.0.0.1:{port}" for port in self._ports)

    def start(self) -> None:
        """Starts what does not run: all at a time, since none serves before most of them do.

        Raises:
            LocalError: `local.start_failed`.
        """
        with ThreadPoolExecutor(len(self.brokers)) as pool:
            for started in [pool.submit(broker.start) for broker in self.brokers.values()]:
                started.result()

    def stop(self) -> None:
        """Stops all of them."""
        if self.network is not None:
            self.network.close()
        with ThreadPoolExecutor(len(self.brokers)) as pool:
            for stopped in [pool.submit(broker.stop) for broker in self.brokers.values()]:
                stopped.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def leader(self, topic: str, partition: int) -> Kafka:
        """The broker that leads a partition.

        Raises:
            LocalError: `local.no_answer`: there is none, or nobody says who it is.
        """
        return self._asked(
            f"who leads {topic} {partition}",
            lambda: self._metadata(topic).partitions[partition].leader,
        )

    def coordinator(self, transactional_id: str) -> Kafka:
        """The broker that coordinates the transactions of an id.

        Raises:
            LocalError: as `leader`.
        """

        def find() -> int:
            partitions = self._metadata(_TRANSACTIONS).partitions
            number = _java_hash(transactional_id) & 0x7FFFFFFF
            return int(partitions[number % len(partitions)].leader)

        return self._asked(f"who coordinates {transactional_id}", find)

    def controller(self) -> Kafka:
        """The active controller.

        Raises:
            LocalError: as `leader`.
        """

        def find() -> int:
            for broker in self.brokers.values():
                if broker.running:
                    try:
                        return _quorum_leader(broker.port)
                    except (OSError, struct.error):
                        continue  # paused, or cut off
            return -1

        return self._asked("who is the controller", find)

    def _metadata(self, topic: str) -> Any:
        from confluent_kafka.admin import AdminClient

        # a new client each time: an old one believes what it knows for a while
        admin = AdminClient({"bootstrap.servers": self.bootstrap_servers, "log_level": 0})
        return admin.list_topics(topic, timeout=_ASK_SECONDS).topics[topic]

    def _asked(self, question: str, find: Callable[[], int]) -> Kafka:
        from confluent_kafka import KafkaException

        deadline = time.monotonic() + 90  # brokers that start beside much else take their time
        while True:
            try:
                found = find()
            except (KafkaException, KeyError):
                found = -1
            if found in self.brokers:
                return self.brokers[found]
            if time.monotonic() > deadline:
                raise LocalError(
                    "local.no_answer",
                    f"nobody says {question}",
                    suggestion="start again; the brokers' logs are in the cluster's folder",
                    retriable=True,
                )
            time.sleep(0.2)


FAULTS = (
    "rolling restart",
    "kill leader",
    "kill coordinator",
    "kill controller",
    "cut off leader",
    "cut off coordinator",
    "cut off controller",
    "pause leader",
    "pause coordinator",
    "two of three killed",
    "two of three paused",
)


def strike(
    cluster: KafkaCluster,
    fault: str,
    dice: random.Random,
    topic: str,
    partitions: int,
    transactional_ids: Sequence[str],
) -> tuple[list[int], Callable[[], None]]:
    """Begins one of `FAULTS`; the brokers that it meets, and what ends it.

    Args:
        cluster: relayed.
        dice: which partition's leader, which id's coordinator, which brokers.
        topic: whose leaders are meant.
    """
    if fault == "rolling restart":
        for broker in cluster.brokers.values():
            restart(broker)
        return [*cluster.brokers], lambda: None
    kind, _, whom = fault.rpartition(" ")
    if fault.startswith("two of three"):
        two = dice.sample(sorted(cluster.brokers), 2)
        brokers = [cluster.brokers[n] for n in two]
        for broker in brokers:
            broker.kill() if whom == "killed" else pause(broker)

        def back() -> None:
            for broker in brokers:
                resume(broker) if whom == "paused" else broker.start()

        return two, back
    broker = {
        "leader": lambda: cluster.leader(topic, dice.randrange(partitions)),
        "coordinator": lambda: cluster.coordinator(dice.choice(transactional_ids)),
        "controller": cluster.controller,
    }[whom]()
    number = next(n for n, one in cluster.brokers.items() if one is broker)
    if kind == "kill":
        broker.kill()
        return [number], broker.start
    if kind == "pause":
        pause(broker)
        return [number], lambda: resume(broker)
    network = cluster.network
    assert network is not None
    network.cut_off(number)
    return [number], lambda: network.join(number)


def kafka_cluster(
    directory: Path,
    *,
    brokers: int = 3,
    properties: Mapping[str, str] | None = None,
    version: str = VERSION,
    relayed: bool = False,
) -> KafkaCluster:
    """Starts brokers whose data live in folders of `directory`, on free ports.

    Topics have three copies (fewer with fewer brokers) and a record counts when two have it, as
    have the logs of transactions and groups.

    Args:
        brokers: how many.
        properties: of each broker, over those that it would be started with.
        version: as of `kafka`.
        relayed: all connections go through a `Network`, so that a broker can be cut off.

    Raises:
        LocalError: `local.java_missing`, `local.network`, `local.disk_full`, `local.start_failed`.
    """
    numbers = range(1, brokers + 1)
    inside = {n: (free_port(), free_port()) for n in numbers}
    outside = {n: (free_port(), free_port()) for n in numbers} if relayed else inside
    made: dict[int, Kafka] = {}
    network = Network(lambda: {n: b.pid for n, b in made.items() if b.running}) if relayed else None
    voters = ",".join(f"{n}@127.0.0.1:{controller}" for n, (_, controller) in outside.items())
    for n in numbers:
        own = {
            "node.id": str(n),
            "controller.quorum.voters": voters,
            "listeners": _listeners(*inside[n]),
            "advertised.listeners": _listeners(*outside[n])
            if relayed
            else f"PLAINTEXT://127.0.0.1:{outside[n][0]}",
        }
        made[n] = new_broker(
            directory / f"broker-{n}",
            port=inside[n][0],
            properties={**_copies(brokers), **own, **(properties or {})},
            version=version,
        )
        _name_node(made[n], n)
        made[n].options += ["-Xms160m", "-Xmx384m"]
    if network is not None:
        for n in numbers:
            for port, behind in zip(outside[n], inside[n], strict=True):
                network.listen(port, n, behind)
    cluster = KafkaCluster(made, network)
    cluster._ports = [client for client, _ in outside.values()]
    with step(f"starting {brokers} brokers of Kafka {version}"):
        try:
            cluster.start()
        except BaseException:
            cluster.stop()
            raise
    return cluster


def _copies(brokers: int) -> dict[str, str]:
    copies, least = str(min(3, brokers)), str(min(2, brokers))
    return {
        "default.replication.factor": copies,
        "min.insync.replicas": least,
        "offsets.topic.replication.factor": copies,
        "transaction.state.log.replication.factor": copies,
        "transaction.state.log.min.isr": least,
        "share.coordinator.state.topic.replication.factor": copies,
        "share.coordinator.state.topic.min.isr": least,
    }


def _listeners(port: int, controller_port: int) -> str:
    return f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}"


def _name_node(broker: Kafka, number: int) -> None:
    """Data of its own, which only the cluster's id has in common with the other nodes."""
    data = broker.directory / "data"
    if not data.exists():
        meta = copied(broker._jars / "formatted", data) / "meta.properties"
        text = re.sub(r"(?m)^node.id=.*", f"node.id={number}", meta.read_text())
        meta.write_text(re.sub(r"(?m)^directory.id=.*", f"directory.id={new_id()}", text))


def _java_hash(text: str) -> int:
    value = 0
    for (unit,) in struct.iter_unpack("<H", text.encode("utf-16-le")):
        value = (31 * value + unit) & 0xFFFFFFFF
    return value


def _quorum_leader(port: int) -> int:
    """By DescribeQuorum, which no Python client has; brokers ask the controller for it.

    Raises:
        OSError: no answer. struct.error: not this answer.
    """
    topic = b"__cluster_metadata"
    body = struct.pack(">hhih", _DESCRIBE_QUORUM, 0, 1, -1) + b"\0"
    body += b"\x02" + bytes([len(topic) + 1]) + topic + b"\x02" + struct.pack(">i", 0) + b"\0\0\0"
    with socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
        connection.sendall(struct.pack(">i", len(body)) + body)
        with connection.makefile("rb") as answer:
            (length,) = struct.unpack(">i", answer.read(4))
            data = answer.read(length)
    # correlation, tags | error, topics | name | partitions, index, error, leader
    at = 4 + 1
    (error,) = struct.unpack_from(">h", data, at)
    at += 2 + 1 + 1 + len(topic) + 1
    _, failed, leader = struct.unpack_from(">ihi", data, at)
    return -1 if error or failed else int(leader)
