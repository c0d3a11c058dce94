"""The state directory: lock, position, and where the publisher started.

eventpub.lock   held by the running publisher; has its process id; marks the folder as ours
publisher.sock  where the running publisher answers commands (HTTP)
start.json      owner of the state (application, topic, table) and the resolved start position;
                run.json and progress.json repeat it
status.json     the last status, for `eventpub status` when no publisher runs
run.json        number of the run; grows with every start
progress.json   position and pending work, as last reported by the shards
pause.json      whether users have paused publishing, and who
requests/       requests of `eventpub gaps retry --later` and `skip --later` for the next publisher
index/          one folder per shard, per number of shards
spark/          Spark's scratch files
spark.log       output of Spark and its workers; above 64 MB, its last part moves to spark.log.1

start.json, run.json, progress.json, pause.json and requests are synced, yet a start works without
any of them (see `publisher.prepare`). Only the publisher's user has access: the files hold ids and,
in spark/, possibly payloads.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from eventpub.channel import MalformedError, Request, request_of
from eventpub.errors import StateError
from eventpub.state_files import give_to_owner, mapping, replace_file
from eventpub.times import format_time

_LOCK_TIMEOUT = 1.0
"""Seconds. Checks for a running publisher share the lock for an instant."""

LOCK = "eventpub.lock"

WITHOUT_FILES = (
    "start it (eventpub run): without progress.json it takes the position from the indexes (if"
    " there are none, reads the whole table), and re-counts the events of the day before it;"
    " without pause.json it publishes"
)

_LEFT_OVER = 60.0
"""Seconds after which a temporary file counts as abandoned."""


class StateDir:
    """Files of one publisher's state. Only `lock` and `keep` create the directory."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.lock_file = self.root / LOCK
        self.socket_file = self.root / "publisher.sock"
        self.progress_file = self.root / "progress.json"
        self.start_file = self.root / "start.json"
        self.run_file = self.root / "run.json"
        self.status_file = self.root / "status.json"
        self.pause_file = self.root / "pause.json"
        written = (self.start_file, self.run_file, self.progress_file, self.status_file)
        self._files = (*written, self.pause_file)
        self.query_file = self.root / "query.json"
        self.index = self.root / "index"
        self.spark_log = self.root / "spark.log"
        self.spark_scratch = self.root / "spark"
        self.requests = self.root / "requests"
        self._lock: IO[str] | None = None

    def _make(self) -> None:
        with mapping(self.root):
            is_new = not self.root.exists()
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if is_new:
                give_to_owner(self.root)
            self.require_ours()
            if not self.lock_file.exists():
                self.lock_file.touch(mode=0o600)
                give_to_owner(self.lock_file)

    def require_ours(self) -> None:
        """Raise state.not_ours if the folder has files but no publisher created it.

        `lost+found` and hidden files, as in an empty volume, are ignored.
        """
        if self.lock_file.exists() or self.identities() or self.indexed():
            return
        others = sorted(p.name for p in self.root.iterdir() if not p.name.startswith("."))
        others = [name for name in others if name != "lost+found"]
        if others:
            raise StateError(
                "state.not_ours",
                f"the folder is not a state directory, and not empty: {', '.join(others[:5])}"
                + (", …" if len(others) > 5 else ""),
                where=str(self.root),
                suggestion="set app.state_dir to a folder of its own, such as"
                f' "{self.root / "eventpub-state"}"',
            )

    def identities(self) -> list[dict[str, Any]]:
        starts = [self.read(self.start_file)]
        starts += [(self.read(f) or {}).get("start") for f in (self.run_file, self.progress_file)]
        found = [start.get("of") for start in starts if isinstance(start, dict)]
        return [of for of in found if isinstance(of, dict)]

    def lock(self) -> None:
        """Lock out other publishers on this machine until the process ends.

        Raises:
            StateError: state.locked, state.not_writable, state.not_ours, state.no_locks
        """
        self._make()
        with mapping(self.lock_file):
            descriptor = os.open(self.lock_file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            handle = os.fdopen(descriptor, "a+")
            deadline = time.monotonic() + _LOCK_TIMEOUT
            while not _is_locked(handle, fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    raise self._locked()
                time.sleep(0.02)
            self._lock = handle
            self.socket_file.unlink(missing_ok=True)  # left by a killed publisher
            handle.truncate(0)
            handle.write(json.dumps({"pid": os.getpid()}))
            handle.flush()

    def _locked(self) -> StateError:
        pid = (self.read(self.lock_file) or {}).get("pid", "unknown")
        return StateError(
            "state.locked",
            f"another publisher (process {pid}) is running on this state directory",
            where=str(self.root),
            suggestion=f"stop process {pid}; a publisher of another table needs an app.id,"
            " an app.state_dir and a sink.topic of its own",
        )

    def listen(self) -> socket.socket:
        with self._socket() as (listening, address):
            listening.bind(address)
            self.socket_file.chmod(0o600)
            listening.listen(64)
        return listening

    def connect(self, timeout: float) -> socket.socket:
        """A connection to the publisher; OSError: none runs, or it does not answer yet."""
        with self._socket() as (connection, address):
            connection.settimeout(timeout)
            connection.connect(address)
        return connection

    @contextmanager
    def _socket(self) -> Iterator[tuple[socket.socket, str]]:
        """A socket and its path, below the kernel's limit of 108 bytes."""
        folder = os.open(self.root, os.O_RDONLY)
        made = socket.socket(socket.AF_UNIX)
        try:
            short = f"/proc/self/fd/{folder}/{self.socket_file.name}"
            yield made, short if os.path.exists("/proc/self/fd") else str(self.socket_file)
        except OSError:
            made.close()
            raise
        finally:
            os.close(folder)

    def beat(self) -> None:
        """Record in the lock file that the publisher's loop is running."""
        with suppress(OSError):
            os.utime(self.lock_file)

    def beat_at(self) -> float:
        with suppress(OSError):
            return self.lock_file.stat().st_mtime
        return 0.0

    def clear(self) -> None:
        """Delete leftovers of an earlier run; needs the lock."""
        shutil.rmtree(self.spark_scratch, ignore_errors=True)
        left = [*self.root.glob("*.json.*.new"), *self.requests.glob("*.new")]
        with suppress(OSError):
            for file in left:
                if time.time() - file.stat().st_mtime > _LEFT_OVER:
                    file.unlink(missing_ok=True)

    def protect(self) -> bool:
        """Remove other users' access; returns whether they had any."""
        files = [*self._files, self.spark_log, self.lock_file]
        folders = [self.index, self.spark_scratch, self.requests]
        inside = [path for folder in folders for path in folder.rglob("*")]
        found = False
        for path in [self.root, *files, *folders, *inside]:
            with suppress(OSError):  # gone, or another user's, as a volume's mount point
                mode = path.stat(follow_symlinks=False).st_mode
                if mode & 0o077 and not path.is_symlink():
                    path.chmod(mode & 0o700)
                    found = True
        return found

    def unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def read(self, path: Path) -> dict[str, Any] | None:
        """The object in a file; None if it is missing or damaged."""
        try:
            data = json.loads(path.read_text())
        except (FileNotFoundError, ValueError, RecursionError):
            return None
        except OSError as error:
            raise StateError(
                "state.not_readable",
                f"cannot be read: {error.strerror}",
                where=str(path),
                suggestion="run it as the publisher's user, or set app.state_dir",
            ) from error
        return data if isinstance(data, dict) else None

    def damaged(self) -> list[Path]:
        return [file for file in self._files if file.exists() and self.read(file) is None]

    def read_progress(self) -> dict[str, Any] | None:
        """The content of progress.json, or None; raises state.file_damaged."""
        found = self.read(self.progress_file)
        if found is None and self.progress_file.exists():
            raise StateError(
                "state.file_damaged",
                f"{self.progress_file.name} in {self.root} is damaged and cannot be read",
                where=str(self.progress_file),
                suggestion=WITHOUT_FILES,
            )
        return found

    def keep_pause(self, is_paused: bool, by: str) -> None:
        """Have this publisher, or the next one, pause or resume; lasts over any end of it."""
        by = f"{by or 'unknown'} at {format_time(round(time.time() * 1e6))}"
        self.write(self.pause_file, {"is_paused": is_paused, "by": by}, lasting=True)

    def pause(self) -> tuple[bool, str]:
        """Whether users have paused publishing; who asked for that last, and when ("": never)."""
        found = self.read(self.pause_file) or {}
        return bool(found.get("is_paused")), str(found.get("by", ""))

    def was_used(self) -> bool:
        return bool(self.indexed()) or any(file.exists() for file in self._files)

    def write(self, path: Path, data: dict[str, Any], *, lasting: bool = False) -> None:
        """Replace a file atomically; `lasting`: it is synced to the disk on return."""
        with mapping(path):
            replace_file(path, json.dumps(data), lasting=lasting)

    def forget_shards(self, shards: int) -> None:
        shutil.rmtree(self.index / f"{shards}-shards", ignore_errors=True)

    def set_aside(self, shards: int, partitions: int) -> None:
        """Keep the indexes of an earlier number of partitions as input for the new ones.

        While those of a number before have not been taken over by all shards, what the present
        ones know beside them is on the topic.
        """
        source, aside = self.index / f"{shards}-shards", self.index / f"former-{partitions}"
        if self.former_indexes():
            self.forget_shards(shards)
        elif source.exists():
            source.rename(aside)

    def former_indexes(self) -> tuple[Path, ...]:
        return tuple(sorted(self.index.glob("former-*/*")))

    def forget_former(self) -> None:
        for aside in self.index.glob("former-*"):
            shutil.rmtree(aside, ignore_errors=True)

    def keep(self, request: Request) -> None:
        self._make()
        with mapping(self.requests), suppress(FileExistsError):
            self.requests.mkdir(mode=0o700)
            give_to_owner(self.requests)
        self.write(self.requests / f"{request.id}.json", asdict(request), lasting=True)

    def kept(self) -> list[Request]:
        """Unanswered requests, oldest first; other files are ignored."""
        try:
            files = sorted(self.requests.glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
        except FileNotFoundError:  # answered meanwhile
            return []
        found = (_request(self.read(file), file) for file in files if file.is_file())
        return [request for request in found if request is not None]

    def withdraw(self, request: Request) -> bool:
        """Remove a request; False if it was already answered."""
        file = self.requests / f"{request.id}.json"
        with mapping(file), suppress(FileNotFoundError):
            file.unlink()
            return True
        return False

    def is_running(self) -> bool:
        with mapping(self.root), suppress(FileNotFoundError), self.lock_file.open() as handle:
            return not _is_locked(handle, fcntl.LOCK_SH)
        return False

    def indexed(self) -> list[int]:
        found = (folder.name.removesuffix("-shards") for folder in self.index.glob("*-shards"))
        return sorted(int(number) for number in found if number.isdigit())

    def is_of_spark(self) -> bool:
        """Whether the engine `spark` wrote the progress; raises state.file_damaged."""
        return (self.read_progress() or {}).get("engine") == "spark"

    def query_index(self, query: str, number: int) -> Path:
        return self.root / "query" / query / str(number)

    def shard_index(self, shards: int, number: int) -> Path:
        return self.index / f"{shards}-shards" / str(number)


def _is_locked(handle: IO[str], how: int) -> bool:
    """Try to lock a file; the lock is held until the file is closed."""
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _request(data: dict[str, Any] | None, file: Path) -> Request | None:
    try:
        request = request_of(data or {})
    except MalformedError:
        return None
    is_known = request.action in {"retry", "skip"} and request.aggregate_id
    return request if f"{request.id}.json" == file.name and is_known else None
