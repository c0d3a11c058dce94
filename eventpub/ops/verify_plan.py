"""What a comparison was asked for, what it is to do, and the folder in which its files are kept."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eventpub.config import Config
from eventpub.errors import EventpubError
from eventpub.ops.records import Place
from eventpub.ops.spill import Runs
from eventpub.ops.topic import TopicReader
from eventpub.ops.verify import (
    STORE_FIELDS,
    TOPIC_FIELDS,
    Sample,
)
from eventpub.store import Layout

_FORMAT = 3
"""Of what is kept; what an other one has kept is not resumed."""

_OLDEST = 3600.0
"""Seconds after which an interrupted comparison is begun anew."""

_LOCK_SECONDS = 2.0

Spans = dict[Place, tuple[int, int]]


@dataclass(frozen=True)
class Asked:
    """What `verify` was asked for; see there."""

    config: Config
    layout: Layout
    first: int | None
    last: int | None
    sample: Sample | None
    restart: bool
    patience: float
    known: str = ""
    """What else must be the same for an interrupted comparison to go on: topics and server."""
    wait: float = 10.0
    lists_all: bool = False
    former_partitions: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Equal for comparisons of the same."""
        config = self.config
        layout = {
            name: sorted(value) if isinstance(value, frozenset) else value  # in no order
            for name, value in vars(self.layout).items()
        }
        facts = [
            _FORMAT, sys.version, str(os.geteuid()), config.app.id, config.app.former_ids,
            config.store.url.get_secret_value(), layout, config.sink.topic,
            config.sink.bootstrap_servers, config.sink.ignored_sources, str(config.app.state_dir),
            config.read.start, self.first, self.last, self.sample, self.known,
            self.former_partitions,
        ]  # fmt: skip
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    def numbers(self, partitions: int) -> list[int]:
        """Of the topic's partitions, those that it had before first."""
        return [*(n for n in self.former_partitions if n != partitions), partitions]

    def reader(self) -> TopicReader:
        """A reader of the topic, connections of its own."""
        app = self.config.app
        ids = (app.id, *app.former_ids)
        return TopicReader(self.config.sink, ids, self.patience, first=self.first, last=self.last)


@dataclass(frozen=True)
class Plan:
    """What the host does. `slices` are the store's range in parts, `spans` what is on the topic."""

    asked: Asked
    folder: Path
    after: int
    upto: int
    buckets: int
    slices: list[tuple[int, int]]
    spans: Spans
    numbers: list[int]

    def rows(self) -> Runs:
        """The store's side."""
        return Runs(self.folder / "store", STORE_FIELDS, self.buckets)

    def records(self) -> Runs:
        """The topic's side."""
        return Runs(self.folder / "topic", TOPIC_FIELDS, self.buckets)

    def differences(self, bucket: int) -> Path:
        """The file of all differences of a bucket, where `lists_all`."""
        return self.folder / f"differences.{bucket}"


@contextmanager
def folder(asked: Asked) -> Iterator[tuple[Path, int | None]]:
    """Where the comparison keeps what it has read; it is gone once the comparison is over.

    It stays where that was interrupted. While another process does the same, it is one of our own.
    With it comes its lock, which all processes that write there must hold.
    """
    for former in Path(tempfile.gettempdir()).glob("eventpub-verify-*"):
        _remove_old(former)
    path = Path(tempfile.gettempdir()) / f"eventpub-verify-{asked.name}"
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    deadline = time.monotonic() + _LOCK_SECONDS
    while (lock := _locked(path)) is None and time.monotonic() < deadline:
        time.sleep(0.1)  # one that was killed is about to end
    if lock is None:
        own = Path(tempfile.mkdtemp(prefix="eventpub-verify-"))
        try:
            yield own, None
        finally:
            shutil.rmtree(own, ignore_errors=True)
        return
    try:
        if asked.restart or kept_plan(path) is None:
            for inside in path.iterdir():
                if inside.name != "lock":
                    shutil.rmtree(inside) if inside.is_dir() else inside.unlink()
        yield path, lock
        shutil.rmtree(path, ignore_errors=True)
    except EventpubError as e:
        if not e.retriable:
            shutil.rmtree(path, ignore_errors=True)
        raise
    finally:
        if not any(path.glob("*/*.run")):  # nothing was read
            shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _remove_old(folder: Path) -> None:
    """What was interrupted and will not be resumed any more."""
    with suppress(OSError):
        if time.time() - folder.lstat().st_mtime > _OLDEST and (lock := _locked(folder)):
            if kept_plan(folder) is None:
                shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _locked(path: Path) -> int | None:
    """A lock on a folder that is ours and nobody else's; None where it is not to be had."""
    try:
        about = path.lstat()
        if about.st_uid != os.geteuid() or not path.is_dir() or path.is_symlink():
            return None
        lock = os.open(path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def kept_plan(folder: Path) -> dict[str, Any] | None:
    """The plan of an interrupted comparison; None where there is none, or it is too old."""
    try:
        kept: dict[str, Any] = json.loads((folder / "plan.json").read_text())
    except (OSError, ValueError):
        return None
    return kept if 0 <= time.time() - kept["began"] < _OLDEST else None
