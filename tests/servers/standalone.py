"""Spark's standalone cluster, for tests of the engine Spark."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import pyspark

from eventpub.local.downloads import find_java
from eventpub.local.processes import free_port

_HIDE = 'mount -t tmpfs none "$1"; shift; exec "$@"'
"""Gives a process an empty folder in the place of one, as on another machine."""
_DEPLOY = "org.apache.spark.deploy"
_COMES_UP = 120.0
"""Seconds."""


class Standalone:
    """Spark's standalone cluster: a master and two workers; a context manager.

    Args:
        folder: of its logs and working directories.
        cores: of each worker: how many shards it takes.
        hidden: a folder in whose place the workers have an empty one; None: they see what there is.

    Attributes:
        url: of its master.
        workers: in no order that matters.
    """

    def __init__(self, folder: Path, cores: int = 2, hidden: Path | None = None) -> None:
        self._folder = folder
        self._cores = cores
        hide = ["unshare", "--mount", "sh", "-c", _HIDE, "sh", str(hidden)]
        self._hide = [] if hidden is None else hide
        self._started: list[psutil.Popen] = []
        self.url = ""
        self.workers: list[psutil.Popen] = []

    def __enter__(self) -> Self:
        port = free_port()
        self.url = f"spark://127.0.0.1:{port}"
        try:
            here = ("--host", "127.0.0.1", "--webui-port", "0")
            self._start("master", f"{_DEPLOY}.master.Master", *here, "--port", str(port))
            self._wait_for(port)
            self.workers = [
                self._start(
                    f"worker-{number}",
                    *(f"{_DEPLOY}.worker.Worker", *here),
                    *("--cores", str(self._cores), "--memory", "1g"),
                    *("--work-dir", str(self._folder / f"work-{number}"), self.url),
                    hide=self._hide,
                )
                for number in range(2)
            ]
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def end(self) -> None:
        """Kill what was started, and what descends from it."""
        for process in self._started:
            kill(process)
        psutil.wait_procs(self._started, timeout=20)

    def _start(self, name: str, *arguments: str, hide: Sequence[str] = ()) -> psutil.Popen:
        home = Path(pyspark.__file__).parent
        with (self._folder / f"{name}.log").open("wb") as log:
            process = psutil.Popen(
                [*hide, str(find_java()), "-Xmx256m", "-cp", f"{home}/jars/*", *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                # what Spark's own start scripts set
                env=os.environ | {"SPARK_HOME": str(home), "SPARK_SCALA_VERSION": "2.13"},
                cwd=self._folder,
            )
        self._started.append(process)
        return process

    @staticmethod
    def _wait_for(port: int) -> None:
        deadline = time.monotonic() + _COMES_UP
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            if time.monotonic() > deadline:
                raise TimeoutError(f"Spark's master does not listen after {_COMES_UP:.0f} s")
            time.sleep(0.1)


def kill(process: psutil.Process) -> None:
    """`kill -9` of it and of all that descends from it."""
    with suppress(psutil.Error):
        for each in [process, *process.children(recursive=True)]:
            with suppress(psutil.Error):
                each.kill()
