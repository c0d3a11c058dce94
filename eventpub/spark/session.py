"""Spark for `eventpub run`: its settings, its process, and how that ends."""

from __future__ import annotations

import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventpub.config import Config
from eventpub.properties import SECRET_NAME
from eventpub.state import StateDir

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_JAVA_OPTIONS = "spark.driver.extraJavaOptions"


def new_session(config: Config, state: StateDir) -> SparkSession:
    """Spark, with what the data sources need; what it prints goes to `spark.log`.

    Raises:
        Exception: it does not start.
    """
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    from pyspark import SparkConf, SparkContext, accumulators
    from pyspark.sql import SparkSession

    from eventpub.spark import register

    local = re.fullmatch(r"local(?:\[(\*|\d+)\])?", config.spark.master)
    master = f"local[{_slots(local[1], config)},4]" if local else config.spark.master
    properties = _defaults(state, is_local=local is not None) | config.spark.properties
    properties |= {"spark.master": master, "spark.app.name": f"eventpub:{config.app.id}"}
    gateway = SparkContext._gateway or _launched(properties, state)
    conf = SparkConf()
    conf.setAll([*properties.items()])
    # that Spark's process has gone is said by whoever needs it
    servers: Any = (accumulators.AccumulatorTCPServer, accumulators.AccumulatorUnixServer)
    for server in servers:
        server.handle_error = _say_nothing
    context = SparkContext(conf=conf, gateway=gateway)
    context.setLogLevel("WARN")
    session = SparkSession(context)
    register(session)
    return session


def _launched(properties: Mapping[str, str], state: StateDir) -> Any:
    """A JVM whose arguments and environment have nothing of the configuration in them: everybody on
    the machine can read the former, and its workers inherit the latter."""
    from pyspark.java_gateway import launch_gateway

    state.spark_scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
    kept = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="eventpub-", dir=state.spark_scratch) as folder:
        file, options = Path(folder) / "spark.properties", Path(folder) / "java.options"
        if properties.get(_JAVA_OPTIONS):  # of which arguments are made
            options.write_text(_as_arguments(properties[_JAVA_OPTIONS]))
            properties = {**properties, _JAVA_OPTIONS: f'"@{options}"'}
        file.write_text(_as_properties(properties))
        for name in [n for n in kept if n.startswith("EVENTPUB_") and "__" in n]:
            del os.environ[name]
        arguments = f"--properties-file {shlex.quote(str(file))} --load-spark-defaults"
        os.environ["PYSPARK_SUBMIT_ARGS"] = f"{arguments} pyspark-shell"
        try:
            with state.spark_log.open("ab") as out:
                launch: Any = launch_gateway
                return launch(None, {"stdout": out, "stderr": out})
        finally:
            os.environ.pop("PYSPARK_SUBMIT_ARGS", None)
            os.environ.update(kept)


def _as_properties(properties: Mapping[str, str]) -> str:
    """A file of java.util.Properties."""

    def escaped(text: str) -> str:
        units = memoryview(text.encode("utf-16-be"))
        numbers = [int.from_bytes(units[at : at + 2], "big") for at in range(0, len(units), 2)]
        return "".join(chr(n) if n < 128 and chr(n).isalnum() else f"\\u{n:04x}" for n in numbers)

    return "".join(f"{escaped(k)}={escaped(v)}\n" for k, v in properties.items())


def _as_arguments(options: str) -> str:
    """A file of the java command's arguments, each of them quoted."""
    quoted = (o.replace("\\", "\\\\").replace('"', '\\"') for o in options.split())
    return "".join(f'"{option}"\n' for option in quoted)


def end_session(*, is_local: bool) -> None:
    """End Spark; of one on this machine the process, since to stop it in order takes a second."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    gateway: Any = SparkContext._gateway
    process = getattr(gateway, "proc", None)
    if is_local and process is not None:
        process.kill()
        process.wait()
        ignoring(gateway.shutdown)
    elif SparkContext._active_spark_context is not None:
        ignoring(SparkContext._active_spark_context.stop)
    SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None
    SparkSession._instantiatedSession = None


def _defaults(state: StateDir, *, is_local: bool) -> dict[str, str]:
    managers = "org.apache.spark.sql.execution.streaming.checkpointing"
    found = {
        "spark.driver.memory": "1g",
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "20000",
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.sql.streaming.checkpointFileManagerClass": (
            f"{managers}.FileSystemBasedCheckpointFileManager"
        ),
        "spark.pyspark.python": sys.executable,
        # what Spark's pages and the log of its events hide; by default less
        "spark.redaction.regex": f"(?i){SECRET_NAME}",
        # as all that is in the state directory
        "spark.hadoop.fs.permissions.umask-mode": "077",
    }
    if is_local:
        found |= {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.ui.port": "0",
            "spark.local.dir": str(state.spark_scratch),
        }
    return found


def _slots(given: str | None, config: Config) -> int:
    cores = (os.cpu_count() or 1) if given == "*" else int(given or 1)
    return max(cores, config.run.shards)


def _say_nothing(*_: object) -> None:
    return


def ignoring(call: Callable[[], Any]) -> None:
    """Call what may fail because Spark's process has gone."""
    with suppress(Exception):
        call()
