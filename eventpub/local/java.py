"""Finds a Java that Spark and Kafka run on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from eventpub.errors import LocalError

OLDEST = 17
"""Older ones run neither Spark nor Kafka."""
_PLACES = (
    "usr/lib/jvm/*/bin/java",
    "opt/homebrew/opt/openjdk*/bin/java",
    "usr/local/opt/openjdk*/bin/java",
    "Library/Java/JavaVirtualMachines/*/Contents/Home/bin/java",
)


@cache
def find_java() -> Path:
    """The `java` of $JAVA_HOME, the PATH, or the system's usual folders that is new enough.

    Raises:
        LocalError: `local.java_missing`, with the command that installs one.
    """
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
