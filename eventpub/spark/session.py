"""The Spark that the publisher's tasks run on: what is set, and why. Needs Java 17."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventpub.config import Config
from eventpub.errors import StateError, words_of
from eventpub.properties import SECRET_NAME
from eventpub.spark.jvm import Jvm
from eventpub.state import StateDir

if TYPE_CHECKING:
    from pyspark import SparkContext


_HIDDEN = f"(?i){SECRET_NAME}"


class Session:
    """Spark on this machine, or a connection to its cluster; a context manager that ends it.

    To be made in another thread than the main one, in which Spark would put a signal handler of its
    own in the place of ours.

    Args:
        config: the whole configuration.
        log_file: takes what the JVM and its workers print, so that the terminal stays readable.
        archive: see `jvm.Jvm`.
        stops: whether nobody wants it any more; asked while the JVM starts.

    Attributes:
        context: Spark's.

    Raises:
        StateError: run.stopping, spark.java_missing, spark.start_failed.
        OSError: no disk, memory or file descriptor is left.
    """

    def __init__(
        self,
        config: Config,
        log_file: Path,
        *,
        archive: Path | None = None,
        stops: Callable[[], bool] = lambda: False,
    ) -> None:
        os.environ["PYSPARK_PYTHON"] = sys.executable
        os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
        properties = _properties(config)
        local = re.fullmatch(r"local(?:\[(\*|\d+)\])?", config.spark.master)
        master = f"local[{_slots(local[1], config)}]" if local else config.spark.master
        self._is_kept = archive is not None
        self._is_local = local is not None
        name = f"eventpub:{config.app.id}"
        self._jvm = None
        if local or not _has_gateway():
            of_cluster = {} if local else {"spark.master": master, "spark.app.name": name}
            self._jvm = Jvm(
                properties | of_cluster,
                log_file,
                scratch=StateDir(config.app.state_dir).spark_scratch,
                archive=archive,
                by_script=not local,
                stops=stops,
            )
        try:
            self.context = _connect(name, properties, master)
            if not os.environ.get("EVENTPUB_SPARK_LOG"):
                self.context.setLogLevel("OFF")
        except Exception as error:
            reason = _reason(error)  # which the JVM knows
            self._end_jvm()
            if stops():
                raise StateError(
                    "run.stopping",
                    "stopped before Spark had started",
                    suggestion="nothing to do: it was asked to stop",
                ) from error
            raise StateError(
                "spark.start_failed",
                f"Spark does not start: {reason}",
                where=f"spark.master = {config.spark.master}",
                suggestion="check spark.master and spark.properties; Spark's own words are in "
                f"{log_file}",
                retriable=True,
            ) from error

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_kept or not self._is_local:
            with suppress(OSError, Exception):  # a JVM that has died has stopped already
                self.context.stop()
        self._end_jvm()  # to stop Spark's context takes a second more than to end its process

    def _end_jvm(self) -> None:
        if self._jvm is not None:
            self._jvm.close(at_once=not self._is_kept)

    def is_alive(self) -> bool:
        """Whether it still takes jobs: where its master has gone, say, it stops itself."""
        if self._jvm is not None and self._jvm.process.poll() is not None:
            return False
        jvm: Any = self.context._jsc
        try:
            return not jvm.sc().isStopped()
        except Exception:
            return False


def _has_gateway() -> bool:
    """Whether there is a JVM already, of a program that runs the publisher: it is left alone."""
    from pyspark import SparkContext

    return SparkContext._gateway is not None


def _connect(name: str, properties: dict[str, str], master: str) -> SparkContext:
    from pyspark import SparkConf, SparkContext, accumulators

    # that its JVM has gone is said by whoever needs it
    servers: Any = (accumulators.AccumulatorTCPServer, accumulators.AccumulatorUnixServer)
    for server in servers:
        server.handle_error = _ignored
    conf = SparkConf().setAppName(name).setMaster(master)
    conf.setAll(list(properties.items()))
    return SparkContext(conf=conf)


def _ignored(*_: object) -> None:
    return


def _slots(asked: str | None, config: Config) -> int:
    """How many tasks may run at a time: those of all shards, which go on side by side."""
    cores = (os.cpu_count() or 1) if asked == "*" else int(asked or 1)
    return max(cores, config.run.shards)


def _reason(error: Exception) -> str:
    """What the JVM says, not what called it."""
    lines = words_of(error).splitlines() or [type(error).__name__]
    return next((line[2:] for line in lines if line.startswith(": ")), lines[0])


def _properties(config: Config) -> dict[str, str]:
    quiet = Path(__file__).with_name("log4j2.properties").as_uri()
    log = "" if os.environ.get("EVENTPUB_SPARK_LOG") else f"-Dlog4j2.configurationFile={quiet}"
    ours = {
        "spark.driver.memory": "1g",
        "spark.driver.extraJavaOptions": log,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        # what its pages and the log of its events hide; by default less
        "spark.redaction.regex": _HIDDEN,
        # a runner that is lost is started again by the coordinator
        "spark.task.maxFailures": "1",
        # whatever a cluster's defaults say: a second task of a shard would take its lease away
        "spark.speculation": "false",
        "spark.pyspark.python": sys.executable,
        "spark.python.daemon.module": "eventpub.spark.daemon",
        # A TCP socket for each worker costs a handshake and a secret per task.
        "spark.python.unix.domain.socket.enabled": "true",
    }
    if config.spark.master.startswith("local"):
        ours["spark.driver.host"] = "127.0.0.1"
        ours["spark.driver.bindAddress"] = "127.0.0.1"
        ours["spark.local.dir"] = str(StateDir(config.app.state_dir).spark_scratch)
    return ours | config.spark.properties
