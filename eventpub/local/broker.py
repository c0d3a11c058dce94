"""A Kafka broker (KRaft), its jars from Maven Central."""

from __future__ import annotations

import base64
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from eventpub.local.downloads import (
    MIB,
    Progress,
    check_space,
    find_java,
    installed,
    maven,
    on_stderr,
    run_once,
)
from eventpub.local.processes import Server, free_port

VERSION = "4.3.1"
LOGGER = "org.apache.logging.log4j", "log4j-slf4j-impl", "2.25.4"
"""The binding that this Kafka does not ship, of the version of log4j that it does."""

LOGGING = """\
appender.out.type=Console
appender.out.name=out
appender.out.layout.type=PatternLayout
appender.out.layout.pattern=%d %p %c{1}: %m%n
rootLogger.level=INFO
rootLogger.appenderRef.out.ref=out
"""
_JVM = "-XX:+UseG1GC -XX:MaxGCPauseMillis=20"
"""Unless $KAFKA_JVM_PERFORMANCE_OPTS says something else, as with Kafka's own scripts."""


class Kafka(Server):
    """A running broker.

    Attributes:
        ids: of the node, its cluster and its folder; they count before the first start.
    """

    name = f"Kafka {VERSION}"

    def __init__(
        self,
        directory: Path,
        port: int | None,
        properties: Mapping[str, str],
        progress: Progress,
        jars: Path,
    ) -> None:
        super().__init__(directory, port, progress)
        self._properties = dict(properties)
        self._jars = jars
        self.options = ["-Xms512m", "-Xmx1024m"]
        self.options += os.environ.get("KAFKA_JVM_PERFORMANCE_OPTS", _JVM).split()
        self.ids = {"node.id": "1", "cluster.id": new_id(), "directory.id": new_id()}
        self.directory.mkdir(parents=True, exist_ok=True)
        check_space(self.directory, 200 * MIB)

    @property
    def bootstrap_servers(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _command(self) -> Sequence[str]:
        data = self.directory / "data"
        if not data.exists():
            self._format(data)
        settings = self.directory / "server.properties"
        _write(settings, {**_settings(data, self.port, free_port()), **self._properties})
        logging = self.directory / "log4j2.properties"
        logging.write_text(LOGGING)
        return [
            *(str(find_java()), *self.options, f"-Dlog4j2.configurationFile={logging.as_uri()}"),
            *("-cp", f"{self._jars}/*", "kafka.Kafka", str(settings)),
        ]

    def _format(self, data: Path) -> None:
        partial = data.with_name("data.partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(self._jars / "formatted", partial)
        meta = partial / "meta.properties"
        kept = dict(line.split("=", 1) for line in meta.read_text().splitlines() if "=" in line)
        _write(meta, {**kept, **self.ids})
        partial.rename(data)

    def _is_ready(self, printed: str) -> bool:
        return "Kafka Server started" in printed


def kafka(
    directory: Path,
    *,
    port: int | None = None,
    properties: Mapping[str, str] | None = None,
    progress: Progress = on_stderr,
) -> Kafka:
    """Starts a broker whose data live in `directory`.

    Topics are not created by being named, and records are kept whatever their timestamp.

    Args:
        properties: of the broker, over those that it would be started with.

    Raises:
        LocalError: `local.java_missing`, `local.network`, `local.disk_full`, `local.start_failed`.
    """
    broker = Kafka(directory, port, properties or {}, progress, jars_of(VERSION, LOGGER, progress))
    broker.start()
    return broker


def jars_of(version: str, logger: tuple[str, str, str], progress: Progress) -> Path:
    find_java()

    def build(folder: Path, progress: Progress) -> None:
        with progress(f"downloading Kafka {version} (44 MiB)"):
            maven([("org.apache.kafka", "kafka_2.13", version), logger], folder)
        with progress("preparing Kafka"):
            _format_template(folder)

    return installed(f"kafka-{version}", needs=250 * MIB, progress=progress, build=build)


def _format_template(jars: Path) -> None:
    """Formats one empty data folder, to be copied: Kafka's own tool takes a second each time."""
    template = jars / "formatted"
    settings = jars / "format.properties"
    _write(settings, _settings(template, 9092, 9093))
    run_once(
        [
            *(str(find_java()), "-cp", f"{jars}/*", "kafka.tools.StorageTool"),
            *("format", "-t", new_id(), "-c", str(settings)),
        ]
    )


def _write(file: Path, properties: Mapping[str, str]) -> None:
    file.write_text("".join(f"{key}={value}\n" for key, value in properties.items()))


def new_id() -> str:
    # a leading "-" would be taken for an option
    return f"e{base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip('=')[1:]}"


def _settings(data: Path, port: int, controller_port: int) -> dict[str, str]:
    return {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@127.0.0.1:{controller_port}",
        "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
        "controller.listener.names": "CONTROLLER",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "log.dirs": str(data),
        "num.partitions": "8",
        "auto.create.topics.enable": "false",
        # events of any age are published with their own time as the record's timestamp
        "log.retention.ms": "-1",
        "offsets.topic.replication.factor": "1",
        "offsets.topic.num.partitions": "4",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "transaction.state.log.num.partitions": "4",
        "share.coordinator.state.topic.replication.factor": "1",
        "share.coordinator.state.topic.min.isr": "1",
        "group.initial.rebalance.delay.ms": "0",
        # after kill -9 a broker comes back only when its former registration has expired
        "broker.session.timeout.ms": "5000",
        "broker.heartbeat.interval.ms": "500",
        "log.cleaner.dedupe.buffer.size": str(16 * MIB),
    }
