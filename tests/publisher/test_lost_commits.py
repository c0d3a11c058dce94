"""Kafka answers a commit, and afterwards ends the transaction by an abort, at the same offset.

The coordinator's log may come back without the decision (power loss with one replica, an unclean
election, a restored disk), or a marker that Kafka has left out is replaced by an operator's
`kafka-transactions.sh abort`. Here a broker's files are cut to what such a broker would have.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition

from eventpub.local.servers import Kafka
from tests.conftest import FreshDatabase
from tests.publisher.conftest import FAST
from tests.publisher.harness import (
    Publisher,
    compare,
    create_table,
    eventually,
    insert,
    transaction,
)
from tests.servers.kafka import kafka

_HEADER = 61
_LOG = "00000000000000000000.log"


class Appended(NamedTuple):
    """A batch of a partition's log."""

    at: int
    base: int
    end: int
    producer: int
    epoch: int
    is_control: bool


def batches(log: Path) -> list[Appended]:
    """What a segment holds."""
    data, at = log.read_bytes(), 0
    found: list[Appended] = []
    while at + _HEADER <= len(data):
        base, size = struct.unpack_from(">qi", data, at)
        if size <= 0:
            break
        attributes, delta = struct.unpack_from(">hi", data, at + 21)
        producer, epoch = struct.unpack_from(">qh", data, at + 43)
        last = base + delta
        found.append(Appended(at, base, last + 1, producer, epoch, bool(attributes & 0x20)))
        at += size + 12
    return found


def cut(log: Path, size: int) -> None:
    """Leave the beginning of a segment, and nothing that says there was more."""
    os.truncate(log, size)
    for snapshot in log.parent.glob("*.snapshot"):
        snapshot.unlink()


def abort(server: str, topic: str, records: Appended) -> None:
    """What `kafka-transactions.sh abort` sends for partition 0: WriteTxnMarkers, version 1."""
    host, port = server.split(":")
    name = topic.encode()
    topics = bytes([2, len(name) + 1]) + name + bytes([2]) + struct.pack(">i", 0) + b"\0"
    marker = struct.pack(">qhb", records.producer, records.epoch, 0)
    body = bytes([2]) + marker + topics + struct.pack(">i", 0) + b"\0\0"
    request = struct.pack(">hhih", 27, 1, 7, 1) + b"x\0" + body
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(struct.pack(">i", len(request)) + request)
        assert len(connection.recv(1024)) > 4


def ends(server: str, topic: str) -> tuple[int, int]:
    """The last stable offset of partition 0, and its high watermark; -1 where it has no leader."""
    found = []
    for level in ("read_committed", "read_uncommitted"):
        settings = {"bootstrap.servers": server, "group.id": level, "isolation.level": level}
        consumer = Consumer(settings)
        try:
            found.append(consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=10)[1])
        except KafkaException:
            return -1, -1
        finally:
            consumer.close()
    return found[0], found[1]


@pytest.fixture
def own_kafka(tmp_path: Path) -> Iterator[Kafka]:
    with kafka(tmp_path / "kafka") as server:
        yield server


def commit(database: FreshDatabase, *versions: int) -> None:
    with transaction(database) as cursor:
        for version in versions:
            insert(cursor, "a", version)
        cursor.connection.commit()


@pytest.mark.engines("threads", "here")
@pytest.mark.parametrize("how", ["operator", "coordinator", "running"])
def test_a_commit_that_becomes_an_abort_is_published_again(
    how: str, own_kafka: Kafka, database: FreshDatabase, tmp_path: Path
) -> None:
    create_table(database)
    server = own_kafka.bootstrap_servers
    settings = {
        **FAST,
        "sink": {"partitions": 1, "transaction_timeout": "10s"},
        "run": {"shards": 1},
    }
    with Publisher(tmp_path / "publisher", database.url, "orders", server, settings) as publisher:
        publisher.start()
        commit(database, 1, 2, 3)
        publisher.until_published("a", [1, 2, 3])
        commit(database, 4, 5, 6)
        publisher.until_published("a", [1, 2, 3, 4, 5, 6])
        files = own_kafka.directory / "data"
        log = files / "orders-0" / _LOG
        eventually(lambda: batches(log)[-1].is_control)
        publisher.topic.close()  # it reads anew: what it has read is not there any more
        if how != "running":
            publisher.stop()
        own_kafka.kill()
        *_, records, marker = batches(log)
        assert (marker.is_control, records.is_control) == (True, False)
        cut(log, marker.at)
        if how != "operator":
            for decisions in files.glob(f"__transaction_state-*/{_LOG}"):
                if found := batches(decisions):
                    cut(decisions, found[-2].at)  # PrepareCommit and CompleteCommit
        own_kafka.start()
        if how == "operator":
            eventually(lambda: ends(server, "orders") == (records.base, records.end))
            abort(server, "orders", records)
        if how != "coordinator":  # else the next start aborts it
            # what is lost is published again at once
            eventually(lambda: min(ends(server, "orders")) >= marker.end)
        if how != "running":
            publisher.start()
        commit(database, 7)
        publisher.until_published("a", [1, 2, 3, 4, 5, 6, 7])
        publisher.stop()
        assert not compare(database, publisher.topic)
        assert publisher.command("verify").returncode == 0
