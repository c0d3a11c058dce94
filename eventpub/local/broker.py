"""A Kafka broker (KRaft), its jars from Maven Central; alone, or one node of a `cluster`."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from eventpub.errors import LocalError
from eventpub.local.downloads import MIB, check_space, installed, maven, tail
from eventpub.local.java import find_java
from eventpub.local.processes import Server, free_port
from eventpub.local.progress import STDERR, Progress

VERSION = "4.3.1"
LOG4J = "2.25.4"  # the version that this Kafka ships, with the binding that it does not

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

CLASSES = "classes.jsa"
"""Beside the jars: an archive of the classes that a broker loads, where one was made."""

_LOGGING_3 = """\
log4j.rootLogger=INFO, out
log4j.appender.out=org.apache.log4j.ConsoleAppender
log4j.appender.out.layout=org.apache.log4j.PatternLayout
log4j.appender.out.layout.ConversionPattern=%d %p %c{1}: %m%n
"""


@dataclass(frozen=True)
class Node:
    """What tells the brokers of one cluster apart, and how much memory one takes.

    Args:
        id: its number in the cluster.
        cluster_id: None: a new cluster.
        heap: the JVM's, in MiB: at its start, and at most.
    """

    id: int = 1
    cluster_id: str | None = None
    heap: tuple[int, int] = (512, 1024)


_ALONE = Node()


class Kafka(Server):
    """A running broker.

    Attributes:
        options: of its JVM, beside the heap.
    """

    def __init__(  # noqa: PLR0913 (what a server is started with)
        self,
        directory: Path,
        port: int | None,
        properties: Mapping[str, str],
        progress: Progress,
        version: str = VERSION,
        *,
        node: Node = _ALONE,
    ) -> None:
        super().__init__(directory, port, progress)
        self.name = f"Kafka {version}"
        self.node = node
        self._properties = dict(properties)
        self._version = version
        self._jars = jars_of(version, progress)
        self.options = os.environ.get("KAFKA_JVM_PERFORMANCE_OPTS", _JVM).split()
        if (self._jars / CLASSES).exists():
            self.options.append(f"-XX:SharedArchiveFile={self._jars / CLASSES}")
        self.directory.mkdir(parents=True, exist_ok=True)
        check_space(self.directory, 200 * MIB)

    @property
    def bootstrap_servers(self) -> str:
        """The address for clients."""
        return f"127.0.0.1:{self.port}"

    def _command(self) -> Sequence[str]:
        data = self.directory / "data"
        if not data.exists():
            _format(self._jars, data, self.node)
        settings = self.directory / "server.properties"
        effective = {**_settings(data, self.port, free_port()), **self._properties}
        settings.write_text("".join(f"{key}={value}\n" for key, value in effective.items()))
        logging = self.directory / "log4j2.properties"
        logging.write_text(LOGGING)
        before_4 = self.directory / "log4j.properties"
        before_4.write_text(_LOGGING_3)
        first, most = self.node.heap
        return [
            *(str(find_java()), f"-Xms{first}m", f"-Xmx{most}m"),
            *self.options,
            f"-Dlog4j2.configurationFile={logging.as_uri()}",
            f"-Dlog4j.configuration={before_4.as_uri()}",
            *("-cp", f"{self._jars}/*", "kafka.Kafka", str(settings)),
        ]

    def _is_ready(self, printed: str) -> bool:
        return "Kafka Server started" in printed


def kafka(
    directory: Path,
    *,
    port: int | None = None,
    properties: Mapping[str, str] | None = None,
    progress: Progress = STDERR,
    version: str = VERSION,
) -> Kafka:
    """Starts a broker whose data live in `directory`.

    Topics are not created by being named, and records are kept whatever their timestamp.

    Args:
        port: a free one when not given.
        properties: of the broker, over those that it would be started with.
        version: of Kafka, 3.9 or newer; downloaded when it is first asked for.

    Raises:
        LocalError: `local.java_missing`, `local.network`, `local.disk_full`, `local.start_failed`.
    """
    broker = Kafka(directory, port, properties or {}, progress, version)
    broker.start()
    return broker


def jars_of(version: str, progress: Progress) -> Path:
    """The folder of this version's jars, downloaded where it is missing."""
    find_java()

    def build(folder: Path, progress: Progress, lock: int) -> None:
        binding = (
            ("org.slf4j", "slf4j-reload4j", "1.7.36")
            if version.startswith("3.")
            else ("org.apache.logging.log4j", "log4j-slf4j-impl", LOG4J)
        )
        with progress.task(f"downloading Kafka {version} (44 MiB)") as report:
            artifacts = [("org.apache.kafka", "kafka_2.13", version), binding]
            maven(artifacts, folder, report, size=47 * MIB, lock=lock)
        with progress.task("preparing Kafka"):
            _format_template(folder)

    return installed(f"kafka-{version}", needs=250 * MIB, progress=progress, build=build)


def _format_template(jars: Path) -> None:
    """Formats one empty data folder, to be copied: Kafka's own tool takes a second each time."""
    template = jars / "formatted"
    settings = jars / "format.properties"
    effective = _settings(template, 9092, 9093)
    settings.write_text("".join(f"{key}={value}\n" for key, value in effective.items()))
    answer = subprocess.run(
        [
            *(str(find_java()), "-cp", f"{jars}/*", "kafka.tools.StorageTool"),
            *("format", "-t", new_id(), "-c", str(settings)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if answer.returncode != 0:
        raise LocalError(
            "local.start_failed",
            "Kafka's storage could not be formatted:\n"
            + tail(answer.stdout + answer.stderr, lines=15),
            where=str(template),
        )


def _format(jars: Path, data: Path, node: Node) -> None:
    partial = data.with_name("data.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(jars / "formatted", partial)
    meta = partial / "meta.properties"
    own = {
        "node.id": str(node.id),
        "cluster.id": node.cluster_id or new_id(),
        "directory.id": new_id(),  # two brokers of a cluster with one are refused
    }
    kept = [line for line in meta.read_text().splitlines() if line.partition("=")[0] not in own]
    meta.write_text("\n".join([*kept, *(f"{key}={value}" for key, value in own.items()), ""]))
    partial.rename(data)


def new_id() -> str:
    """A new identifier as Kafka writes them."""
    # a leading "-" would be taken for an option
    text = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
    return f"e{text[1:]}"


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
