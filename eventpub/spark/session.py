"""The Spark session of the publisher: what is set, and why. Needs Java 17."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from eventpub.config import Config
from eventpub.errors import StateError
from eventpub.spark.jvm import Jvm
from eventpub.spark.state import StateDir

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TASK_FAILURES = 4
"""How often one shard's task may fail before the micro-batch does, as on a cluster."""


@contextmanager
def Session(  # noqa: N802 (reads as what it is)
    config: Config,
    log_file: Path,
    *,
    archive: Path | None = None,
    stops: Callable[[], bool] = lambda: False,
) -> Iterator[SparkSession]:
    """Spark on this machine, or a connection to its cluster, for as long as the block runs.

    Args:
        config: the whole configuration.
        log_file: takes what the JVM and its workers print, so that the terminal stays readable.
        archive: see `jvm.Jvm`.
        stops: whether nobody wants it any more; asked while the JVM starts.

    Raises:
        StateError: run.stopping, spark.java_missing, spark.start_failed.
    """
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    properties = _properties(config)
    local = re.fullmatch(r"local(?:\[(\*|\d+)\])?", config.spark.master)
    # `local[N]` lets no task fail twice unless set so.
    master = f"local[{_slots(local[1], config)},{TASK_FAILURES}]" if local else config.spark.master
    jvm = Jvm(properties, log_file, archive=archive, stops=stops) if local else None
    try:
        from pyspark.sql import SparkSession

        builder = SparkSession.builder.appName(f"eventpub:{config.app.id}").master(master)
        for key, value in properties.items():
            builder = builder.config(key, value)
        try:
            # the JVM writes to the file already, and what others say meanwhile is for the terminal
            with nullcontext() if jvm else _stderr_to(log_file), ThreadPoolExecutor(1) as thread:
                # in the main thread it would put a handler of its own in the place of ours
                spark = thread.submit(builder.getOrCreate).result()
        except Exception as error:
            raise StateError(
                "spark.start_failed",
                f"Spark does not start: {_reason(error)}",
                where=f"spark.master = {config.spark.master}",
                suggestion="check spark.master and spark.properties; Spark's own words are in "
                f"{log_file}",
            ) from error
        if not os.environ.get("EVENTPUB_SPARK_LOG"):
            spark.sparkContext.setLogLevel("OFF")
        try:
            yield spark
        finally:
            with suppress(OSError, Exception):  # a JVM that has died has stopped already
                spark.stop()
    finally:
        if jvm is not None:
            jvm.close()


def _slots(asked: str | None, config: Config) -> int:
    """How many tasks may run at a time: those of all shards, which go on side by side."""
    cores = (os.cpu_count() or 1) if asked == "*" else int(asked or 1)
    return max(cores, config.spark.shards)


def _reason(error: Exception) -> str:
    """What the JVM says, not what called it."""
    lines = str(error).splitlines()
    return next((line[2:] for line in lines if line.startswith(": ")), lines[0])


@contextmanager
def _stderr_to(file: Path) -> Iterator[None]:
    """Child processes started inside write their standard error to a file."""
    sys.stderr.flush()
    terminal = os.dup(2)
    with file.open("ab") as log:
        os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(terminal, 2)
        os.close(terminal)


def _properties(config: Config) -> dict[str, str]:
    quiet = Path(__file__).with_name("log4j2.properties").as_uri()
    log = "" if os.environ.get("EVENTPUB_SPARK_LOG") else f"-Dlog4j2.configurationFile={quiet}"
    ours = {
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": log,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.pyspark.python": sys.executable,
        "spark.python.daemon.module": "eventpub.spark.daemon",
        # A TCP socket for each worker costs a handshake and a secret per task.
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.sql.streaming.checkpointFileManagerClass": "org.apache.spark.sql.execution"
        ".streaming.checkpointing.FileSystemBasedCheckpointFileManager",
        "spark.sql.streaming.noDataMicroBatches.enabled": "false",
        "spark.sql.streaming.numRecentProgressUpdates": "2",
        # Hadoop gives the checkpoint's files their mode itself, whatever the process's umask is.
        "spark.hadoop.fs.permissions.umask-mode": "077",
        "spark.sql.shuffle.partitions": "1",
        "spark.sql.adaptive.enabled": "false",
    }
    if config.spark.master.startswith("local"):
        ours["spark.driver.host"] = "127.0.0.1"
        ours["spark.driver.bindAddress"] = "127.0.0.1"
        ours["spark.local.dir"] = str(StateDir(config.app.state_dir).spark_scratch)
    return ours | config.spark.properties
