"""The JVM of a Spark that runs on this machine, started directly.

pyspark starts its JVM by a shell script and a second JVM that works out the command, and has all
Python workers import pyspark from a zip, which every process compiles anew. Started directly and
with an archive of the classes it loads (`python -m eventpub.spark.jvm` makes it, once an
installation), a publisher needs about 9 instead of 28 s of CPU time until its first event on a
small machine.
"""

from __future__ import annotations

import hashlib
import os
import re
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
        properties: Spark's properties that only the command line can set (memory, Java options).
        log_file: takes what it and the Python workers print.
        archive: make the archive of classes when it ends.
        stops: whether nobody wants it any more.

    Raises:
        StateError: run.stopping, spark.java_missing, spark.start_failed.
        OSError: no disk, memory or file descriptor is left.
    """

    def __init__(
        self,
        properties: Mapping[str, str],
        log_file: Path,
        *,
        archive: Path | None = None,
        stops: Callable[[], bool] = lambda: False,
    ) -> None:
        java = find_java()
        self._end_timeout = _END_TIMEOUT if archive is None else _ARCHIVE_TIMEOUT
        with tempfile.TemporaryDirectory(prefix="eventpub-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            info_file = folder / "connection"
            environment = {k: v for k, v in os.environ.items() if k != "SPARK_HOME"} | {
                "SPARK_CONNECT_MODE": "0",
                "_PYSPARK_DRIVER_CONN_INFO_PATH": str(info_file),
            }
            # by files: a process's arguments can be read by everybody on the machine
            settings, options = folder / "spark.properties", folder / "java.options"
            settings.write_text(_as_properties(properties))
            options.write_text(_as_arguments(properties.get("spark.driver.extraJavaOptions", "")))
            command = [java, *_java_options(java, properties, archive), f"@{options}"]
            command += ["org.apache.spark.deploy.SparkSubmit"]
            command += ["--properties-file", str(settings), "--load-spark-defaults"]
            with log_file.open("wb") as log:
                self.process = subprocess.Popen(
                    [*command, "pyspark-shell"],
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
        deadline = time.monotonic() + _START_TIMEOUT
        while not info_file.exists():
            if stops():
                raise StateError("run.stopping", "stopped before Spark had started")
            if self.process.poll() is not None or time.monotonic() > deadline:
                words = log_file.read_text(errors="replace").strip().splitlines()
                raise StateError(
                    "spark.start_failed",
                    f"the JVM of Spark does not start: {words[-1] if words else 'no reason given'}",
                    where=str(log_file),
                    suggestion="Java 17 or newer is needed; check JAVA_HOME and spark.properties",
                    retriable=True,
                )
            time.sleep(0.02)
        data = info_file.read_bytes()
        size = int.from_bytes(data[4:8], "big")
        return int.from_bytes(data[:4], "big"), data[8 : 8 + size].decode()

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
    printed = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)
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
