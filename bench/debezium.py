"""Debezium's MySQL connector on Kafka Connect, exactly once, as a peer of the drain.

It reads the database's binary log instead of the table, so that it is set back to before the fill
for each round.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from tests.servers.connect import DEBEZIUM_VERSION, KafkaConnect, kafka_connect

from . import topic
from .machine import PARTITIONS, Machine
from .peers import Run, outcome
from .usage import Usage, one

_NAME = "debezium"
_CONNECTOR: dict[str, Any] = {
    "connector.class": "io.debezium.connector.mysql.MySqlConnector",
    "tasks.max": "1",
    "exactly.once.support": "required",
    "transaction.boundary": "poll",
    "snapshot.mode": "no_data",
    "include.schema.changes": "false",
    "max.batch.size": "20000",
    "max.queue.size": "80000",
    "poll.interval.ms": "20",
    "producer.override.compression.type": "lz4",
    "producer.override.linger.ms": "5",
    "producer.override.batch.size": "262144",
    "producer.override.buffer.memory": "134217728",
}


class Debezium:
    """A worker and a connector for one database's table `events`, which must still be empty."""

    def __init__(self, machine: Machine, database: str) -> None:
        self._machine, self._database = machine, database
        self._topic = f"{_NAME}.{database}.events"
        self._sent = 0
        self._stack = ExitStack()
        self._worker: KafkaConnect

    def __enter__(self) -> Self:
        machine = self._machine
        servers = machine.broker.bootstrap_servers
        with self._stack as stack:
            self._worker = stack.enter_context(kafka_connect(machine.folder / "connect", servers))
            topic.create(servers, self._topic, PARTITIONS)
            self._position = self._binlog_position()
            config = {
                **_CONNECTOR,
                "topic.prefix": _NAME,
                "database.hostname": "127.0.0.1",
                "database.port": str(machine.database.port),
                "database.user": "root",
                "database.password": "",
                "database.ssl.mode": "disabled",
                "database.server.id": "5400",
                "database.include.list": self._database,
                "table.include.list": f"{self._database}.events",
                "message.key.columns": f"{self._database}.events:aggregate_id",
                "schema.history.internal.kafka.bootstrap.servers": servers,
                "schema.history.internal.kafka.topic": "debezium-schema",
            }
            self._worker.ask("PUT", f"/connectors/{_NAME}/config", config)
            self._worker.until(_NAME, "RUNNING")
            self._streams()
            self._stop()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _binlog_position(self) -> dict[str, Any]:
        with self._machine.database.connect(None) as connection, connection.cursor() as cursor:
            cursor.execute("SHOW BINARY LOG STATUS")
            ((file, position, _, _, gtids),) = cursor.fetchall()
        return {"file": file, "pos": position, "gtids": gtids.replace("\n", "")}

    def _streams(self) -> None:
        """Waits until the connector has written the tables' schemas and reads the binary log."""
        deadline = time.monotonic() + 120
        while "Connected to binlog" not in (said := self._worker.log.read_text(errors="replace")):
            if time.monotonic() > deadline:
                raise TimeoutError(f"Debezium does not stream\n{said[-3000:]}")
            time.sleep(0.2)

    def _stop(self) -> None:
        self._worker.ask("PUT", f"/connectors/{_NAME}/stop")
        self._worker.until(_NAME, "STOPPED")

    def drain(self, events: int) -> Run:
        """Sends what was appended since this was entered."""
        offset = {"partition": {"server": _NAME}, "offset": self._position}
        self._worker.ask("PATCH", f"/connectors/{_NAME}/offsets", {"offsets": [offset]})
        servers = self._machine.broker.bootstrap_servers
        with topic.Watch(servers, self._topic, PARTITIONS) as watch:
            before = watch.offsets
            started = time.time()
            groups = [one("connect", self._worker.pid), *self._machine.groups()]
            with Usage(*groups) as usage:
                self._worker.ask("PUT", f"/connectors/{_NAME}/resume")
                watch.settled(before + events)
        self._stop()
        self._sent += events
        found = topic.count(servers, self._topic, PARTITIONS)
        if found != self._sent:
            raise RuntimeError(f"Debezium: {found} records, not {self._sent}")
        return outcome(
            "Debezium", events, started, watch.growth.last, growth=watch.growth, usage=usage
        ) | {"settings": {"debezium": DEBEZIUM_VERSION, "worker_heap": "-Xmx2g", **_CONNECTOR}}
