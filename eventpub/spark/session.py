"""Spark for `eventpub run`: settings, process, shutdown."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventpub.config import Config
from eventpub.config_values import SECRET_NAME
from eventpub.errors import EventpubError, StateError, find_marked, words_of
from eventpub.local.downloads import OLDEST, version_of
from eventpub.publisher.workers import in_thread
from eventpub.state import StateDir
from eventpub.state_files import disk_full, is_disk_full

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ASKED_EVERY = 0.1
"""Seconds between questions to Spark about a query."""
_EXECUTOR_WITHIN = 15.0
_ANSWERS_WITHIN = 5.0

NO_EXECUTOR = (
    f"a batch has waited {_EXECUTOR_WITHIN:.0f} s for an executor: the cluster has no free cores or"
    " memory, or no workers (see the master's pages); stop other applications, limit their"
    " spark.cores.max, or add workers"
)

_JAVA_OPTIONS = "spark.driver.extraJavaOptions"
_OF_WORKERS = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "2097152",
    "MALLOC_TRIM_THRESHOLD_": "1000000",
    "OPENBLAS_NUM_THREADS": "1",
}
"""Environment of Spark on one machine: a drain takes 0.5 GB less memory. Without the threshold each
group of rows has pages of its own that the kernel clears: 1.5 CPU s per million events more."""
_STARTS_WITH = "eventpub-"
_SAYS_IT_IS_SLOW = "org.apache.spark.sql.execution.streaming.runtime.ProcessingTimeExecutor"
"""Spark's class that warns of each batch longer than the trigger, as most are by design."""
_LARGEST_LOG = 64 << 20


def require_java() -> str:
    """The `java` for Spark, with its version; raises spark.java_missing or spark.java_too_old."""
    home = os.environ.get("JAVA_HOME")
    program = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    version = None if program is None else version_of(Path(program))
    if version is not None and version >= OLDEST:
        return f"version {version} ({program})"
    found = "there is none on the PATH, and JAVA_HOME is not set"
    if program is not None:
        found = f"{program} {f'is version {version}' if version else 'does not run'}"
    raise StateError(
        "spark.java_too_old" if version else "spark.java_missing",
        f"Spark needs Java {OLDEST} or newer, but {found}",
        suggestion=f"install it (Debian: apt-get install openjdk-{OLDEST}-jre-headless), or correct"
        ' JAVA_HOME; without Java: run.engine = "threads"',
    )


class Spark:
    """The session of a run, which starts beside the checks of the publisher's start."""

    _is_starting = threading.Lock()  # a process has one Spark, also for two runs of a demo

    def __init__(self, config: Config, state: StateDir) -> None:
        self.config, self.state = config, state
        self._started: Future[SparkSession] | None = None
        self.has_run = False  # whether a query has started, also in a former session

    def begin(self) -> Future[SparkSession]:
        if self._started is None:
            self._started = Future()
            threading.Thread(target=self._start, args=(self._started,), daemon=True).start()
        return self._started

    def _start(self, started: Future[SparkSession]) -> None:
        with self._is_starting:  # until `end` has ended a former one
            try:
                session = new_session(self.config, self.state)
            except BaseException as error:
                started.set_exception(error)
            else:
                started.set_result(session)

    def session(self) -> SparkSession:
        """Wait for the session, and have Spark find its data sources in this thread."""
        try:
            session = self.begin().result()
        except BaseException:
            self.end()
            raise
        make_active(session)
        return session

    @property
    def is_alive(self) -> bool:
        return self._started is not None and is_alive(self._started.result())

    def end(self, *, kills: bool = False) -> None:
        """End Spark; one that is still starting ends when it has, or with this process."""
        started, self._started = self._started, None
        if started is not None:
            if not started.done():  # what it is started with, secrets included
                for folder in self.state.spark_scratch.glob(f"{_STARTS_WITH}*"):
                    shutil.rmtree(folder, ignore_errors=True)
            kills = kills or self.config.spark.master.startswith("local")
            started.add_done_callback(lambda _: end_session(kills=kills))


class Watched:
    """A query, and what Spark last said of it: a frozen JVM does not answer, so a thread asks.

    Attributes:
        last: its `lastProgress`.
        is_active: False also once Spark's process has ended.
        error: why it is not active; None: it is over.
        lacks_executor: a batch has long been waiting for one.
        unanswered: looks at it since Spark has last answered; not seconds, since this process may
            have been suspended, too.
    """

    def __init__(
        self, query: Any, context: Any, cause: Callable[[Exception], EventpubError]
    ) -> None:
        self.query = query
        self.last: Any = None
        self.error: EventpubError | None = None
        self.is_active = True
        self.lacks_executor = False
        self._context, self._cause = context, cause
        self.unanswered = 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        waits, is_active = 0, True
        failed: Exception | None = None
        while is_active:
            time.sleep(_ASKED_EVERY)
            try:
                is_active = self.query.isActive
                self.last = self.query.lastProgress
                failed = None if is_active else self.query.exception()
            except Exception:  # one call may fail, as for want of memory
                is_active = not _has_ended()
                failed = RuntimeError("Spark's process has ended")
            else:
                self.unanswered = 0
                waits = waits + 1 if self._waits_for_executor() else 0
                self.lacks_executor = waits * _ASKED_EVERY > _EXECUTOR_WITHIN
        self.error = None if failed is None else self._cause(failed)
        self.is_active = False

    def _waits_for_executor(self) -> bool:
        with suppress(Exception):
            if not self._context.master.startswith("local") and is_in_batch(self.query):
                return bool(self._context._jsc.sc().getExecutorMemoryStatus().size() == 1)  # driver
        return False

    def wait(self, seconds: float) -> None:
        """Wait until it has ended and its last progress is known."""
        self._thread.join(seconds)


def is_in_batch(query: Any) -> bool:
    return bool(query.status["message"].startswith("Processing"))


def new_session(config: Config, state: StateDir) -> SparkSession:
    """Start Spark with the data sources; its output goes to `spark.log`."""
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    from pyspark import SparkConf, SparkContext, accumulators
    from pyspark.sql import SparkSession

    from eventpub.spark import register

    local = re.fullmatch(r"local(?:\[(\*|\d+)\])?", config.spark.master)
    master = config.spark.master
    if local:
        given = os.cpu_count() if local[1] == "*" else local[1]
        master = f"local[{max(int(given or 1), config.run.shards)},4]"
    properties = {"spark.app.name": f"eventpub:{config.app.id}"}
    properties |= _defaults(state, is_local=local is not None) | config.spark.properties
    properties |= {"spark.master": master}
    gateway = SparkContext._gateway or _launched(properties, state, is_local=local is not None)
    if master.startswith("spark:"):
        jvm: Any = gateway.jvm
        properties |= of_standalone(jvm.org.apache.spark.SparkConf(), config.run.shards)
    conf = SparkConf()
    conf.setAll([*properties.items()])
    # that Spark's process has ended is reported by the next call, not by a traceback
    servers: Any = (accumulators.AccumulatorTCPServer, accumulators.AccumulatorUnixServer)
    for server in servers:
        server.handle_error = lambda *_: None
    context = SparkContext(conf=conf, gateway=gateway)
    context.setLogLevel("WARN")
    log4j: Any = gateway.jvm.org.apache.logging.log4j
    log4j.core.config.Configurator.setLevel(_SAYS_IT_IS_SLOW, log4j.Level.ERROR)
    session = SparkSession(context)
    register(session)
    # the parent of the Python workers imports while the query is planned
    threading.Thread(target=_warm_up, args=(session,), daemon=True).start()
    return session


def _warm_up(session: SparkSession) -> None:
    from pyspark.sql import functions

    with suppress(Exception):  # Spark's process may have gone
        same = functions.udf(int, "long", useArrow=False)
        session.range(1, numPartitions=1).select(same("id")).collect()


def make_active(session: SparkSession) -> None:
    """Have Spark find the session's data sources in this thread, which has its own in the JVM."""
    from pyspark.sql import SparkSession

    of_jvm: Any = SparkSession
    of_jvm._get_j_spark_session_class(session._jvm).setActiveSession(session._jsparkSession)


def _home(state: StateDir) -> Path:
    """Without `pyspark.zip`, which eight processes would each compile: 0.7 CPU s instead of 0.2."""
    import pyspark

    home, package = state.spark_scratch / "home", Path(pyspark.__file__).parent
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(mode=0o700, parents=True)
    for name in ("bin", "conf", "jars"):
        (home / name).symlink_to(package / name)
    return home


def of_standalone(found: Any, shards: int) -> dict[str, str]:
    """A limit for an application that else takes all cores, unless these properties, with those of
    `spark-defaults.conf`, say how large it or its executors are."""
    names = ("spark.cores.max", "spark.executor.cores", "spark.task.cpus")
    is_said = any(found.contains(name) for name in names)
    return {} if is_said else {"spark.cores.max": str(shards)}


def _launched(properties: Mapping[str, str], state: StateDir, *, is_local: bool) -> Any:
    """Keep secrets out of the JVM's arguments, which are public, and its workers' environment."""
    from pyspark.java_gateway import launch_gateway

    state.spark_scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
    kept = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix=_STARTS_WITH, dir=state.spark_scratch) as folder:
        file, options = Path(folder) / "spark.properties", Path(folder) / "java.options"
        if properties.get(_JAVA_OPTIONS):  # they become command line arguments
            options.write_text(_as_arguments(properties[_JAVA_OPTIONS]))
            properties = {**properties, _JAVA_OPTIONS: f'"@{options}"'}
        file.write_text(_as_properties(properties))
        for name in [n for n in kept if n.startswith("EVENTPUB_") and "__" in n]:
            del os.environ[name]
        arguments = f"--properties-file {shlex.quote(str(file))} --load-spark-defaults"
        added = _OF_WORKERS | {"SPARK_HOME": str(_home(state))} if is_local else {}
        added = {name: kept.get(name, value) for name, value in added.items()}
        added["PYSPARK_SUBMIT_ARGS"] = f"{arguments} pyspark-shell"
        os.environ.update(added)
        try:
            limit_log(state.spark_log)
            with state.spark_log.open("ab") as out:
                launch: Any = launch_gateway
                return launch(None, {"stdout": out, "stderr": out})
        finally:
            for name in added:
                os.environ.pop(name, None)
            os.environ.update(kept)


def limit_log(log: Path) -> None:
    """Move the last part of a large log to `<log>.1`, and empty it; others go on appending."""
    with suppress(OSError):  # there is none yet, or the disk is full
        if log.stat().st_size > _LARGEST_LOG:
            with log.open("r+b") as old, log.with_name(f"{log.name}.1").open("wb") as kept:
                old.seek(-_LARGEST_LOG, os.SEEK_END)
                shutil.copyfileobj(old, kept)
                old.truncate(0)


def _as_properties(properties: Mapping[str, str]) -> str:
    """A file of java.util.Properties."""

    def escaped(text: str) -> str:
        units = struct.iter_unpack(">H", text.encode("utf-16-be"))
        return "".join(f"\\u{unit:04x}" for (unit,) in units)

    return "".join(f"{escaped(k)}={escaped(v)}\n" for k, v in properties.items())


def _as_arguments(options: str) -> str:
    """A `java` argument file, each argument quoted."""
    quoted = (o.replace("\\", "\\\\").replace('"', '\\"') for o in options.split())
    return "".join(f'"{option}"\n' for option in quoted)


def end_session(*, kills: bool) -> None:
    """End Spark; a local or frozen process is killed, since an orderly stop takes a second. On a
    cluster that stop also removes what is there of the application."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    gateway: Any = SparkContext._gateway
    process, context = getattr(gateway, "proc", None), SparkContext._active_spark_context
    if context is not None and not kills:
        stopping = in_thread(context.stop)
        kills = bool(wait([stopping], _ANSWERS_WITHIN).not_done)
    with suppress(Exception):  # its process may have gone
        if kills and process is not None:
            process.kill()
            process.wait()
            gateway.shutdown()
    SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None
    SparkSession._instantiatedSession = None


def _has_ended() -> bool:
    """Whether Spark's process has."""
    from pyspark import SparkContext

    process = getattr(SparkContext._gateway, "proc", None)
    return process is None or process.poll() is not None


def is_alive(session: SparkSession) -> bool:
    """Whether the session answers, and is not stopped."""
    jvm: Any = session.sparkContext._jsc
    with suppress(Exception):
        return not in_thread(lambda: jvm.sc().isStopped()).result(_ANSWERS_WITHIN)
    return False


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
        # redacted in Spark's pages and event log; its default is narrower
        "spark.redaction.regex": f"(?i){SECRET_NAME}",
        # like everything in the state directory
        "spark.hadoop.fs.permissions.umask-mode": "077",
    }
    if is_local:
        found |= {
            # in a mostly idle JVM, half of the CPU time is the second compiler's; without it
            # 200,000 rows take 2.02 s instead of 1.93; groups of rows die young
            _JAVA_OPTIONS: "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xmn64m",
            "spark.python.daemon.module": "eventpub.spark.daemon",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.ui.port": "0",
            "spark.local.dir": str(state.spark_scratch),
        }
    return found


def error_of(error: Exception) -> EventpubError:
    """The eventpub error in Spark's text, or a new one for it."""
    if isinstance(error, EventpubError):
        return error
    text = words_of(error)
    found = find_marked(text)
    if found is not None:
        return found
    if is_disk_full(text):  # Spark's own
        return disk_full("state.location, or app.state_dir")
    lines = [line.strip(": ") for line in text.splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].startswith("An error occurred while calling"):
        del lines[0]  # Py4J's; the next line says which
    return StateError(
        "shard.failed",
        f"the query failed: {lines[0] if lines else type(error).__name__}",
        suggestion="see spark.log in app.state_dir; if it is a bug in eventpub, please report it",
        retriable=True,
    )
