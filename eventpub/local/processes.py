"""A server as a child process that never outlives its parent.

Each runs in its own session, so Ctrl-C on the terminal reaches only eventpub. A watcher (a shell
that waits for the end of a pipe) stops the server when the parent is gone, even after ``kill -9``;
Linux's parent-death signal would fire when the *thread* ends.
"""

from __future__ import annotations

import collections
import os
import random
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from eventpub.errors import LocalError
from eventpub.local.downloads import step, tail

_START_SECONDS = 120.0  # with both cores busy the broker needs 20
_STOP_SECONDS = 20.0

_WATCH = """
while read -r _; do :; done
"$@"
"""
_STOP_PID = """
kill -CONT "$1"; kill -TERM "$1"
n=0; while kill -0 "$1" && [ "$n" -lt 100 ]; do sleep 0.1; n=$((n+1)); done
kill -KILL "$1"
"""

_given: collections.deque[socket.socket] = collections.deque(maxlen=100)  # marks of free_port


class Server(ABC):
    """One server on 127.0.0.1; a context manager that stops it. It keeps its port."""

    name = "server"

    def __init__(self, directory: Path, port: int | None) -> None:
        self.directory = directory.absolute()
        self.log = self.directory / "server.log"
        self.port = port or free_port()
        self.environment: dict[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError(f"{self.name} is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it and wait until it answers; raises local.start_failed."""
        if self.running:
            return
        with step(f"starting {self.name}"):
            begin = self._start_process()
            try:
                self._wait_until_ready(begin)
            except BaseException:
                self.kill()
                raise

    def stop(self) -> None:
        """Stop it cleanly; by force after 20 s."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @abstractmethod
    def _command(self) -> Sequence[str]:
        """The command line; may write configuration files first."""

    @abstractmethod
    def _is_ready(self, printed: str) -> bool:
        """Whether it serves; `printed` is its log since the start."""

    def _deliver(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def _stop_command(self) -> Sequence[str]:
        return ["sh", "-c", _STOP_PID, "sh", str(self.pid)]

    def _start_process(self) -> int:
        """Returns the log's offset at which its output begins."""
        command = self._command()
        with self.log.open("ab") as log:
            begin = log.tell()
            self._process = subprocess.Popen(
                command,
                cwd=self.directory,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._watcher = subprocess.Popen(
            ["sh", "-c", _WATCH, "sh", *self._stop_command()],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return begin

    def _wait_until_ready(self, begin: int) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            ended = not self.running
            with self.log.open("rb") as log:
                log.seek(begin)
                printed = log.read().decode(errors="replace")
            if ended:
                raise self._start_failed("exited while it was starting", printed)
            if self._is_ready(printed):
                return
            if time.monotonic() > deadline:
                raise self._start_failed(f"did not answer within {_START_SECONDS:.0f} s", printed)
            time.sleep(0.05)

    def _start_failed(self, how: str, printed: str) -> LocalError:
        said = tail(printed, lines=15) or "(it printed nothing)"
        return LocalError(
            "local.start_failed",
            f"{self.name} {how}; the last lines of its log:\n{said}",
            where=str(self.log),
            suggestion=_suggestion(printed),
        )

    def _end(self, number: signal.Signals) -> None:
        process, watcher = self._process, self._watcher
        if process is not None and self.running:
            self._deliver(signal.SIGCONT)
            self._deliver(number)
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._deliver(signal.SIGKILL)
                process.wait()
        if watcher is not None:
            watcher.kill()
            if watcher.stdin is not None:
                watcher.stdin.close()
            watcher.wait()
        self._process = self._watcher = None


def _suggestion(printed: str) -> str:
    if "in use" in printed:
        return "another process listens on this port; name another, or none to get a free one"
    return (
        "install the library, or free the disk space, that the log says is missing; a folder left"
        " by another version may be deleted"
    )


def free_port() -> int:
    """A free port of 127.0.0.1, below the range of outgoing connections.

    Until a server listens, the UDP port of the same number is held as a reservation.
    """
    for _ in range(200):
        port = random.randrange(20_000, 32_000)
        mark = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                mark.bind(("127.0.0.1", port))
                probe.bind(("127.0.0.1", port))
            except OSError:
                mark.close()
                continue
        _given.append(mark)
        return port
    raise LocalError("local.start_failed", "no free port between 20000 and 32000 was found")
