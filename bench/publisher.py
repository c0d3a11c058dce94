"""`eventpub run`, the installed command in its own process, configured for one measurement."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import psutil

from eventpub.ops.asking import ask_running
from eventpub.state import StateDir

from . import usage, window_only
from .tables import toml

Settings = Mapping[str, Mapping[str, Any]]
"""Sections of `eventpub.toml`; and `bench`: `backtrack = false` is `bench.window_only`."""


class PublisherFailedError(Exception):
    """It ended, or did not start; the message has the end of its log."""


class Publisher:
    """One publisher; stopped, by force if need be, when the block ends."""

    def __init__(
        self, folder: Path, url: str, bootstrap_servers: str, topic: str, settings: Settings
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.topic = folder, topic
        self.state = folder / "state"
        self.log = folder / "publisher.log"
        sections: dict[str, dict[str, Any]] = {
            "app": {"id": topic, "state_dir": str(self.state)},
            "store": {"url": url},
            "sink": {"topic": topic, "bootstrap_servers": bootstrap_servers},
            "run": {"engine": "threads"},
            "ops": {"http": "", "log": "json"},
        }
        for section, keys in settings.items():
            sections.setdefault(section, {}).update(keys)
        backtracks = sections.pop("bench", {}).get("backtrack", True)
        self._program = _command() if backtracks else window_only.program(folder)
        self._by_threads = sections["run"]["engine"] == "threads"
        self._config = folder / "eventpub.toml"
        self._config.write_text(
            "".join(
                f"[{section}]\n" + "".join(f"{k} = {toml(v)}\n" for k, v in keys.items())
                for section, keys in sections.items()
            )
        )
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self, *arguments: str) -> None:
        """Starts it; does not wait."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [self._program, "run", *arguments, "--config", str(self._config)],
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=_environment(),
                start_new_session=True,
            )

    def started(self, timeout: float = 180) -> None:
        """Waits until the shards are where they stay: Spark's tasks, without Spark threads."""
        deadline = time.monotonic() + timeout
        while not self._is_settled():
            self.check()
            if time.monotonic() > deadline:
                raise PublisherFailedError(f"not started after {timeout:.0f} s\n{self.words()}")
            time.sleep(0.1)

    def _is_settled(self) -> bool:
        status = ask_running(StateDir(self.state), "status")
        shards = [] if status is None else status["shards"]
        where = {shard["where"] for shard in shards}
        return bool(where) and "" not in where and ("this process" in where) == self._by_threads

    def reaches(self, moment: int, timeout: float = 900) -> None:
        """Waits until everything created at or before `moment` (µs) is accounted for."""
        deadline = time.monotonic() + timeout
        while self.position() < moment:
            self.check()
            if time.monotonic() > deadline:
                raise PublisherFailedError(f"not there after {timeout:.0f} s\n{self.words()}")
            time.sleep(0.1)

    def position(self) -> int:
        """How far it says that it is, µs."""
        try:
            return int(json.loads((self.state / "progress.json").read_text())["position"])
        except FileNotFoundError:
            return 0

    def check(self) -> None:
        """Raises PublisherFailedError: it does not run any more."""
        if self.process is not None and self.process.poll() not in {None, 0, 130, 143}:
            raise PublisherFailedError(
                f"it ended with status {self.process.returncode}\n{self.words()}"
            )

    def finish(self, timeout: float = 3600) -> None:
        """Waits for its good end."""
        assert self.process is not None
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise PublisherFailedError(
                f"still running after {timeout:.0f} s\n{self.words()}"
            ) from None
        self.check()

    def command(self, *arguments: str, timeout: float = 3600) -> str:
        """What another command of eventpub prints with the same configuration."""
        return subprocess.run(
            [self._program, *arguments, "--config", str(self._config)],
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=self.folder,
            env=_environment(),
            check=False,
        ).stdout

    def stop(self) -> None:
        """SIGTERM, and waits for its end."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        self.finish(300)

    def kill(self) -> None:
        """`kill -9` of all its processes at once."""
        if self.process is None or self.process.poll() is not None:
            return
        try:
            driver = psutil.Process(self.process.pid)
            family = [driver, *driver.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait(30)
        deadline = time.monotonic() + 30
        while any(_is_alive(process) for process in family) and time.monotonic() < deadline:
            time.sleep(0.002)

    def index_bytes(self) -> int:
        """Size of the index of all shards on disk."""
        files = (self.state / "index").rglob("*")
        return sum(file.stat().st_size for file in files if file.is_file())

    @property
    def group(self) -> usage.Group:
        """Its processes, to be measured."""
        assert self.process is not None
        return usage.publisher(self.process.pid)

    def words(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else ""


def _is_alive(process: psutil.Process) -> bool:
    """Not so is a zombie: who inherits it may take a second to see that it has ended."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _environment() -> dict[str, str]:
    """Without what would change the configuration."""
    kept = {"EVENTPUB_CACHE"}
    return {k: v for k, v in os.environ.items() if k in kept or not k.startswith("EVENTPUB_")}


def _command() -> str:
    return str(Path(sys.executable).with_name("eventpub"))
