"""The Java that runs the servers, and the cache of their programs.

A program is built in a `.partial` folder under a file lock and renamed when complete, so it is
fetched once, whole or not at all.
"""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from eventpub.errors import LocalError

MIB = 1 << 20


@contextmanager
def step(what: str) -> Iterator[None]:
    """Say on stderr what takes long, and how long it took."""
    started = time.monotonic()
    print(f"eventpub: {what} …", file=sys.stderr, flush=True)
    yield
    seconds = time.monotonic() - started
    print(f"eventpub: {what}: done in {seconds:.1f} s", file=sys.stderr, flush=True)


def cache_folder() -> Path:
    if named := os.environ.get("EVENTPUB_CACHE"):
        return Path(named).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eventpub"


def installed(name: str, *, needs: int, build: Callable[[Path], None]) -> Path:
    """The cached folder `name`; if it is missing, `build` fills it, with `needs` bytes free."""
    folder = cache_folder() / name
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f"{name}.lock"), name):
            if folder.is_dir():
                return folder
            partial = folder.with_name(f"{name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            check_space(folder.parent, needs)
            partial.mkdir()
            try:
                build(partial)
                partial.rename(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise _disk_full(folder.parent, needs) from error
        raise LocalError(
            "local.cache_denied",
            f"the cache cannot be used: {error.strerror or error}",
            where=str(error.filename or folder.parent),
            suggestion="set EVENTPUB_CACHE to a folder that you may write to",
        ) from error
    return folder


def copied(template: Path, folder: Path) -> Path:
    """A folder that is a copy of `template` at first: whole, or not there."""
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(template, partial)
        partial.rename(folder)
    return folder


def check_space(folder: Path, needs: int) -> None:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if shutil.disk_usage(existing).free < needs:
        raise _disk_full(folder, needs)


def _disk_full(folder: Path, needs: int) -> LocalError:
    return LocalError(
        "local.disk_full",
        f"{needs // MIB} MiB of free disk space are needed",
        where=str(folder),
        suggestion="free some space, or set EVENTPUB_CACHE or TMPDIR to a folder on another disk",
    )


@contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    with path.open("w") as file:
        # passed on by `run`: a download may outlive a killed parent and still write to the folder
        os.set_inheritable(file.fileno(), True)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with step(f"waiting for another process that fetches {name}"):
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def maven(artifacts: Sequence[tuple[str, str, str]], folder: Path) -> None:
    """Put the jars of `artifacts` (organisation, name, version) and their dependencies into
    `folder`.

    From Maven Central, by the Ivy that pyspark ships. Some jars are of the type bundle.
    """
    stage = folder / ".ivy"
    stage.mkdir()
    wanted = "".join(
        f'<dependency org="{org}" name="{name}" rev="{version}" conf="default->default"/>'
        for org, name, version in artifacts
    )
    module = stage / "ivy.xml"
    module.write_text(
        '<ivy-module version="2.0"><info organisation="eventpub" module="local"/>'
        f'<configurations><conf name="default"/></configurations>'
        f"<dependencies>{wanted}</dependencies></ivy-module>"
    )
    command = [
        *(str(find_java()), *_proxy_options()),
        *("-jar", str(_ivy_jar()), "-cache", str(stage), "-ivy", str(module)),
        *("-confs", "default", "-types", "jar", "bundle"),
        *("-retrieve", f"{folder}/[artifact]-[revision].[ext]"),
    ]
    run(command, what="Maven Central")
    shutil.rmtree(stage)


def _ivy_jar() -> Path:
    pyspark = importlib.util.find_spec("pyspark")  # not imported: that takes a second
    jars: list[Path] = []
    if pyspark is not None and pyspark.origin is not None:
        jars = sorted(Path(pyspark.origin).parent.glob("jars/ivy-*.jar"))
    if not jars:
        raise LocalError(
            "local.ivy_missing",
            "the installed pyspark has no jars/ivy-*.jar, which fetches the servers",
            where="pyspark",
            suggestion="pip install --force-reinstall pyspark",
        )
    return jars[-1]


def _proxy_options() -> list[str]:
    """Java does not read the environment's proxies by itself."""
    proxy = os.environ.get("https_proxy") or os.environ.get("HTTPS_PROXY") or ""
    parts = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    if not parts.hostname:
        return []
    return [f"-Dhttps.proxyHost={parts.hostname}", f"-Dhttps.proxyPort={parts.port or 3128}"]


def run(command: Sequence[str], *, what: str, folder: Path | None = None) -> None:
    answer = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        close_fds=False,  # the lock
        cwd=folder,
        check=False,
    )
    if answer.returncode:
        if "No space left on device" in answer.stdout:
            raise OSError(errno.ENOSPC, answer.stdout)
        raise LocalError(
            "local.network",
            f"{what} could not be reached or did not have what was requested:\n"
            + tail(answer.stdout, lines=12),
            where=what,
            suggestion="check the network connection and the proxy settings (https_proxy), then "
            "start again; what is cached stays",
            retriable=True,
        )


def run_once(command: Sequence[str], text: str = "") -> None:
    # in a folder of its own: a starting MariaDB removes temporary tables
    with TemporaryDirectory(prefix="eventpub-") as temporary:
        answer = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            env={**os.environ, "TMPDIR": temporary},
        )
    if answer.returncode != 0:
        raise LocalError(
            "local.start_failed",
            "the server's data could not be initialised:\n"
            + tail(answer.stdout + answer.stderr, lines=15),
            where=command[0],
        )


def tail(text: str, *, lines: int) -> str:
    return "\n".join([line for line in text.splitlines() if line.strip()][-lines:])


OLDEST = 17
"""Older versions run neither Spark nor Kafka."""
_PLACES = (
    "usr/lib/jvm/*/bin/java",
    "opt/homebrew/opt/openjdk*/bin/java",
    "usr/local/opt/openjdk*/bin/java",
    "Library/Java/JavaVirtualMachines/*/Contents/Home/bin/java",
)


@cache
def find_java() -> Path:
    """A recent `java` of $JAVA_HOME, the PATH, or the usual folders; raises local.java_missing."""
    tried: list[str] = []
    for candidate in dict.fromkeys(_candidates()):
        version = version_of(candidate)
        if version is not None and version >= OLDEST:
            return candidate
        tried.append(f"{candidate} ({f'Java {version}' if version else 'does not run'})")
    raise LocalError(
        "local.java_missing",
        f"no Java {OLDEST} or newer was found"
        + (f"; tried {', '.join(tried)}" if tried else " in JAVA_HOME, PATH or the usual folders"),
        where="JAVA_HOME",
        suggestion=f"set JAVA_HOME, or install one: apt-get install openjdk-{OLDEST}-jre-headless,"
        f" dnf install java-{OLDEST}-openjdk-headless or brew install openjdk@{OLDEST}",
    )


def _candidates() -> Iterator[Path]:
    if home := os.environ.get("JAVA_HOME"):
        yield Path(home) / "bin" / "java"
    if on_path := shutil.which("java"):
        yield Path(on_path)
    for pattern in _PLACES:
        yield from sorted(Path("/").glob(pattern))


def version_of(java: Path) -> int | None:
    try:
        answer = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r'version "(?:1\.)?(\d+)', answer.stderr + answer.stdout)
    return int(match[1]) if match and answer.returncode == 0 else None
