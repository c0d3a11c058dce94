"""The JVM of Spark's driver, started here and not by pyspark.

pyspark passes Spark's properties as arguments, which everybody on the machine can read; here they
are in files that only the publisher's user can read, for as long as the JVM starts.

pyspark starts its JVM by a shell script and a second JVM that works out the command, and has all
Python workers import pyspark from a zip, which every process compiles anew. Started directly and
with an archive of the classes it loads (`python -m eventpub.spark.jvm` makes it, once an
installation), a publisher needs about 9 instead of 28 s of CPU time until its first event on a
small machine. The driver of a cluster is started by Spark's script all the same: it knows the
cluster's settings (`spark-env.sh`, Hadoop's and Kubernetes' files).
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from eventpub.errors import StateError

_START_TIMEOUT = 120.0
_END_TIMEOUT = 60.0
_ARCHIVE_TIMEOUT = 600.0
"""Seconds for its end, and where it writes the archive then, which a busy machine is slow at."""

_JAVA_OPTIONS = "spark.driver.extraJavaOptions"

# What Spark's own launcher adds (org.apache.spark.launcher.JavaModuleOptions).
_OPENED = [
    "java.base/java.lang",
    "java.base/java.lang.invoke",
    "java.base/java.lang.reflect",
    "java.base/java.io",
    "java.base/java.net",
    "java.base/java.nio",
    "java.base/java.util",
    "java.base/java.util.concurrent",
    "java.base/java.util.concurrent.atomic",
    "java.base/jdk.internal.ref",
    "java.base/sun.nio.ch",
    "java.base/sun.nio.cs",
    "java.base/sun.security.action",
    "java.base/sun.util.calendar",
    "java.security.jgss/sun.security.krb5",
]


class Jvm:
    """A JVM that pyspark connects to instead of starting its own.

    It ends when this process does, however that happens: its standard input is a pipe from here.

    Args:
        properties: all of Spark's; some can be set only before it starts (memory, Java options).
        log_file: takes what it and the Python workers print.
        scratch: folder for the files that it is started with, made where it is missing; None: the
            system's. They are gone when it has started.
        archive: make the archive of classes when it ends.
        by_script: start it by Spark's own script.
        stops: whether nobody wants it any more.

    Raises:
        StateError: run.stopping, spark.java_missing, spark.start_failed.
        OSError: no disk, memory or file descriptor is left.
    """

    def __init__(  # noqa: PLR0913 (options, by keyword)
        self,
        properties: Mapping[str, str],
        log_file: Path,
        *,
        scratch: Path | None = None,
        archive: Path | None = None,
        by_script: bool = False,
        stops: Callable[[], bool] = lambda: False,
    ) -> None:
        self._end_timeout = _END_TIMEOUT if archive is None else _ARCHIVE_TIMEOUT
        # a cluster's may fetch jars first (`spark.jars.packages`), which takes what it takes
        self._start_timeout = math.inf if by_script else _START_TIMEOUT
        self._master = properties["spark.master"] if by_script else None
        if scratch is not None:
            scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix="eventpub-", dir=scratch, ignore_cleanup_errors=True
        ) as name:
            folder = Path(name)
            info_file = folder / "connection"
            environment = _environment() | {"_PYSPARK_DRIVER_CONN_INFO_PATH": str(info_file)}
            if by_script:
                command = _script_command(properties, folder)
            else:
                environment.pop("SPARK_HOME", None)
                command = _direct_command(properties, folder, archive)
            with log_file.open("wb") as log:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    # Ctrl-C is for the publisher, which lets open transactions finish.
                    process_group=0,
                )
            try:
                port, secret = self._connection(info_file, log_file, stops)
            except BaseException:
                self.process.kill()
                self.process.wait()
                raise
        os.environ["PYSPARK_GATEWAY_PORT"] = str(port)
        os.environ["PYSPARK_GATEWAY_SECRET"] = secret

    def _connection(
        self, info_file: Path, log_file: Path, stops: Callable[[], bool]
    ) -> tuple[int, str]:
        deadline = time.monotonic() + self._start_timeout
        while not info_file.exists():
            if stops():
                raise StateError("run.stopping", "stopped before Spark had started")
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise self._failure(log_file)
            time.sleep(0.02)
        data = info_file.read_bytes()
        size = int.from_bytes(data[4:8], "big")
        return int.from_bytes(data[:4], "big"), data[8 : 8 + size].decode()

    def _failure(self, log_file: Path) -> StateError:
        lines = log_file.read_text(errors="replace").splitlines()
        words = [line.strip() for line in lines if line.strip() and not line.startswith("\t")]
        why = words[-1] if words else "no reason given"
        master = self._master
        return StateError(
            "spark.start_failed",
            f"the JVM of Spark does not start: {why}",
            where=str(log_file) if master is None else f"spark.master = {master}",
            suggestion="Java 17 or newer is needed; check JAVA_HOME and spark.properties"
            if master is None
            else "check spark.master, spark.properties and JAVA_HOME; Spark's own words are in"
            f" {log_file}",
            retriable=True,
        )

    def close(self, *, at_once: bool = False) -> None:
        """End the JVM; pyspark may start or be given another one afterwards.

        Args:
            at_once: nothing in it is of any worth.
        """
        if at_once:
            self.process.kill()
        forget_gateway()
        os.environ.pop("PYSPARK_GATEWAY_PORT", None)
        os.environ.pop("PYSPARK_GATEWAY_SECRET", None)
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(self._end_timeout)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()


def forget_gateway() -> None:
    """Have pyspark start, or be given, another JVM; one that it has started itself is ended."""
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    if gateway is not None:
        process: subprocess.Popen[bytes] | None = getattr(gateway, "proc", None)
        if process is not None:
            process.kill()
            process.wait()
        with suppress(Exception):  # it is gone
            gateway.shutdown()
    SparkContext._gateway = None
    SparkContext._jvm = None
    SparkContext._active_spark_context = None


def archive_file(java: str) -> Path:
    """Where the archive of classes of this Java and of Spark's jars as they are installed is.

    A JVM takes it only for the very files that it was made of: each environment has its own.
    """
    named = os.environ.get("EVENTPUB_CACHE")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = Path(named) if named else home / "eventpub"
    java_version = _version_of(java)
    place = hashlib.sha256(os.fsencode(_jars())).hexdigest()[:8]
    return cache / f"spark-{version('pyspark')}-java-{java_version}-{place}.jsa"


@cache
def _version_of(java: str) -> str:
    printed = subprocess.run(
        [java, "-version"], capture_output=True, text=True, check=False, env=_environment()
    )
    match = re.search(r'version "([^"]+)"', printed.stderr)
    return match[1] if match else "unknown"


def has_archive(file: Path) -> bool:
    """Whether it was made, and of the jars that are there now."""
    return file.exists() and file.stat().st_mtime > _jars().stat().st_mtime


def _jars() -> Path:
    spec = find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).resolve().parent / "jars"


def _environment() -> dict[str, str]:
    """What the JVM and its workers inherit: not the configuration, which comes with the tasks."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not (name.startswith("EVENTPUB_") and "__" in name)
    }
    return inherited | {"SPARK_CONNECT_MODE": "0"}


def _direct_command(properties: Mapping[str, str], folder: Path, archive: Path | None) -> list[str]:
    java = find_java()
    options = _options_file(properties, folder)
    return [
        *(java, *_java_options(java, properties, archive), f"@{options}"),
        *("org.apache.spark.deploy.SparkSubmit", *_arguments(properties, folder)),
        "pyspark-shell",
    ]


def _script_command(properties: Mapping[str, str], folder: Path) -> list[str]:
    """As of pyspark, but for the properties."""
    from pyspark.find_spark_home import _find_spark_home

    if properties.get(_JAVA_OPTIONS):  # of which the script makes arguments of the JVM
        properties = {**properties, _JAVA_OPTIONS: f'"@{_options_file(properties, folder)}"'}
    script = Path(_find_spark_home()) / "bin" / "spark-submit"
    own = shlex.split(os.environ.get("PYSPARK_SUBMIT_ARGS", "pyspark-shell"))
    return [str(script), *_arguments(properties, folder), *own]


def _arguments(properties: Mapping[str, str], folder: Path) -> list[str]:
    """By a file: a process's arguments can be read by everybody on the machine."""
    file = folder / "spark.properties"
    file.write_text(_as_properties(properties))
    return ["--properties-file", str(file), "--load-spark-defaults"]


def _options_file(properties: Mapping[str, str], folder: Path) -> Path:
    file = folder / "java.options"
    file.write_text(_as_arguments(properties.get(_JAVA_OPTIONS, "")))
    return file


def _java_options(java: str, properties: Mapping[str, str], archive: Path | None) -> list[str]:
    options = ["-cp", f"{_jars()}{os.sep}*", f"-Xmx{properties['spark.driver.memory']}"]
    options += ["-XX:+IgnoreUnrecognizedVMOptions", "-XX:+UseSerialGC"]
    # It begins with a 64th of the machine's memory otherwise, most of it for what lives briefly.
    options += ["-Xms64m", "-Xmn32m"]
    # The JVM only plans; compiling its code better costs more than it brings.
    options += ["-XX:TieredStopAtLevel=1", "-Xshare:auto", "-Xlog:disable"]
    options += [f"--add-opens={package}=ALL-UNNAMED" for package in _OPENED]
    options += ["-Dio.netty.tryReflectionSetAccessible=true", "--enable-native-access=ALL-UNNAMED"]
    if archive is not None:
        options.append(f"-XX:ArchiveClassesAtExit={archive}")
    else:
        made = archive_file(java)
        if has_archive(made):
            options.append(f"-XX:SharedArchiveFile={made}")
    return options


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


def find_java() -> str:
    """The program: of JAVA_HOME, else of the PATH.

    Raises:
        StateError: spark.java_missing.
    """
    home = os.environ.get("JAVA_HOME")
    if home and (Path(home) / "bin" / "java").exists():
        return str(Path(home) / "bin" / "java")
    found = shutil.which("java")
    if found:
        return found
    raise StateError(
        "spark.java_missing",
        "Spark needs Java 17 or newer, and there is no java on the PATH or in JAVA_HOME",
        suggestion="install it (Debian: apt-get install openjdk-17-jre-headless) or set JAVA_HOME",
    )


def make_archive() -> Path:
    """Run a small job that loads what a publisher does, and keep its classes for later starts.

    Those of environments that are gone are removed.

    Returns:
        the archive, about 160 MB; one that can be used is kept.
    """
    from eventpub.spark.warm_up import run_a_little

    file = archive_file(find_java())
    if not has_archive(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        for place in file.parent.glob("spark-*.jars"):
            if not Path(place.read_text()).exists():
                place.with_suffix(".jsa").unlink(missing_ok=True)
                place.unlink()
        partial = file.with_suffix(f".{os.getpid()}")
        run_a_little(partial)
        if partial.exists():
            partial.rename(file)
            file.with_suffix(".jars").write_text(str(_jars()))
    return file


if __name__ == "__main__":
    if "--missing" in sys.argv:
        wanted = archive_file(find_java())
        print("" if has_archive(wanted) else wanted)
    else:
        made = make_archive()
        print(made)
        if not has_archive(made):
            sys.exit("it was not made: the JVM did not write it")
