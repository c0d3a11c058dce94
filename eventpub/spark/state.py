"""The state directory: who may use it, where the reader is, where it started.

lock            held by the running publisher
start.json      where this publisher started, resolved once; run.json and progress.json repeat it
server.json     which database server was read last
run.json        which run this is: a number that grows with every start
boundary.json   how far the shards may read while a micro-batch runs
passed.json     where rows have become visible behind the windows, as the source has seen
pages/          pages of a backlog that the source has read for all shards
live/           what each shard has done so far in the micro-batch that runs; if one has ended it
requests/       what `eventpub gaps retry` and `skip` ask the publisher to do, and what came of it
progress.json   position and pending work, as the shards reported last; what they shall compare
checkpoint/     Spark's
index/          one folder a shard, per number of shards
seen            touched whenever the driver has seen the database
spark.log       what Spark and its workers printed

start.json, run.json, progress.json and requests that wait must outlive a power failure: they are
synced, and a start does without any of them all the same (see `recovery`). The index is repaired
from the topic. Everything else is of one run only, and each start throws it away. The directory is
for nobody but the publisher's user: payloads and ids are in it.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal

from eventpub.errors import StateError

_LOCK_TIMEOUT = 1.0
"""Seconds: who asks whether a publisher runs shares the lock for an instant."""

_LEFT_OVER = 60.0
"""Seconds after which a temporary file belongs to nobody any more."""


@dataclass(frozen=True)
class Request:
    """What somebody asks the publisher to do with one aggregate.

    Attributes:
        id: names it.
        action: "retry" looks for what is missing now; "skip" gives the open gap up now.
        aggregate_id: whose.
        version: the first that is to be given up; a request that is done again gives up no other
            one, and one that names none gives up nothing.
        to_version: the last that is to be given up; None: all up to the first one that is there.
    """

    id: str
    action: Literal["retry", "skip"]
    aggregate_id: str
    version: int | None = None
    to_version: int | None = None


class StateDir:
    """Paths and small files of one publisher's state.

    Raises:
        StateError: state.not_writable where the directory cannot be made.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise _mapped(error, self.root) from error
        self.progress_file = self.root / "progress.json"
        self.start_file = self.root / "start.json"
        self.server_file = self.root / "server.json"
        self.run_file = self.root / "run.json"
        self.boundary_file = self.root / "boundary.json"
        self.passed_file = self.root / "passed.json"
        self.checkpoint = self.root / "checkpoint"
        self.index = self.root / "index"
        self.spark_log = self.root / "spark.log"
        self.spark_scratch = self.root / "spark"
        self.pages = self.root / "pages"
        self.live = self.root / "live"
        self.seen = self.root / "seen"
        self.requests = self.root / "requests"
        self.stopping_file = self.root / "stopping.json"
        self._lock: IO[str] | None = None

    def lock(self) -> None:
        """Keep every other publisher on this machine out, until the process ends.

        Raises:
            StateError: state.locked, with the other's process id.
        """
        path = self.root / "lock"
        try:
            handle = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "a+")
        except OSError as error:
            raise _mapped(error, path) from error
        deadline = time.monotonic() + _LOCK_TIMEOUT
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() < deadline:
                    time.sleep(0.02)
                    continue
                handle.seek(0)
                pid = handle.read().strip() or "unknown"
                raise StateError(
                    "state.locked",
                    f"another publisher (process {pid}) is running on this state directory",
                    where=str(self.root),
                    suggestion=f"stop process {pid}; a publisher of another table needs an app.id,"
                    " an app.state_dir and a sink.topic of its own",
                ) from error
        handle.truncate(0)
        handle.write(str(os.getpid()))
        handle.flush()
        self._lock = handle

    def clear(self) -> None:
        """Throw away what belongs to a run that is over; by who holds the lock."""
        for folder in (self.spark_scratch, self.checkpoint, self.pages, self.live):
            shutil.rmtree(folder, ignore_errors=True)
        left = [*self.root.glob("*.new"), *self.requests.glob("*.new")]
        left += self.requests.glob("*.answer")  # that nobody waited for
        with suppress(OSError):
            self.boundary_file.unlink(missing_ok=True)
            self.seen.unlink(missing_ok=True)
            self.stopping_file.unlink(missing_ok=True)
            for file in left:
                if time.time() - file.stat().st_mtime > _LEFT_OVER:
                    file.unlink(missing_ok=True)

    def protect(self) -> bool:
        """Take other users' access away; whether there was any."""
        # only from what is ours: somebody's state directory may be their home
        files = [self.progress_file, self.start_file, self.run_file, self.boundary_file]
        files += [self.server_file, self.passed_file, self.stopping_file, self.spark_log]
        files += [self.seen, self.root / "lock"]
        folders = [self.checkpoint, self.index, self.spark_scratch, self.pages, self.live]
        folders.append(self.requests)
        inside = [path for folder in folders for path in folder.rglob("*")]
        found = False
        for path in [self.root, *files, *folders, *inside]:
            with suppress(OSError):  # gone, or another user's: a volume's mount point
                mode = path.stat(follow_symlinks=False).st_mode
                if mode & 0o077 and not path.is_symlink():
                    path.chmod(mode & 0o700)
                    found = True
        return found

    def unlock(self) -> None:
        """Let others in."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def read(self, path: Path) -> dict[str, Any] | None:
        """The object in one of the files; None where there is none, or what is left of one."""
        try:
            data = json.loads(path.read_text())
        except (FileNotFoundError, ValueError):
            return None
        return data if isinstance(data, dict) else None

    def write(self, path: Path, data: dict[str, Any], *, lasting: bool = False) -> None:
        """Replace one of the files, whole or not at all.

        Args:
            lasting: on the disk when this returns.
        """
        try:
            replace_file(path, json.dumps(data), lasting=lasting)
        except OSError as error:
            raise _mapped(error, path) from error

    def forget_pages(self) -> None:
        """Remove the pages of a run of the query that is over."""
        shutil.rmtree(self.pages, ignore_errors=True)

    def tell(self, run: int, batch: int, shard: int, report: dict[str, Any]) -> None:
        """Leave what a shard's task has done so far; nothing depends on its arriving."""
        with suppress(OSError, StateError):
            self.live.mkdir(mode=0o700, exist_ok=True)
            self.write(self.live / f"{shard}.json", {"run": run, "batch": batch, "report": report})

    def told(self, run: int, batch: int, shards: int) -> list[dict[str, Any]]:
        """What all shards have left in a micro-batch; nothing where one of them has not, yet."""
        found = [self.told_by(run, batch, n) for n in range(shards)]
        reports = [report for report in found if report is not None]
        return reports if len(reports) == shards else []

    def told_by(self, run: int, batch: int, shard: int) -> dict[str, Any] | None:
        """What one shard's task, or one before it, has left in a micro-batch."""
        told = self.read(self.live / f"{shard}.json")
        if told is None or (told["run"], told["batch"]) != (run, batch):
            return None
        report: dict[str, Any] = told["report"]
        return report

    def ask_to_stop(self, run: int) -> None:
        """Let the tasks of a run know that it is to stop; it may not arrive."""
        with suppress(OSError, StateError):
            self.write(self.stopping_file, {"run": run})

    def is_stopping(self, run: int) -> bool:
        """Whether a run is to stop."""
        return self.stopping_file.exists() and self.read(self.stopping_file) == {"run": run}

    def tell_fold(self, run: int, shard: int, read: int, left: int) -> None:
        """Leave how far a shard has read its topics back: records read, and offsets left."""
        with suppress(OSError, StateError):
            self.live.mkdir(exist_ok=True)
            found = {"run": run, "read": read, "left": left}
            self.write(self.live / f"fold-{shard}.json", found)

    def forget_fold(self, shard: int) -> None:
        """It has read them to their end."""
        with suppress(OSError):
            (self.live / f"fold-{shard}.json").unlink(missing_ok=True)

    def folding(self, run: int, shards: int) -> tuple[int, int] | None:
        """Records that the shards of a run have read back and offsets left; None: none reads."""
        found = [self.read(self.live / f"fold-{n}.json") for n in range(shards)]
        known = [data for data in found if data is not None and data["run"] == run]
        return (sum(d["read"] for d in known), sum(d["left"] for d in known)) if known else None

    def end_batch(self, run: int, batch: int) -> None:
        """Let the other shards know that one has ended a micro-batch; it may not arrive."""
        with suppress(OSError, StateError):
            self.live.mkdir(mode=0o700, exist_ok=True)
            self.write(self.live / "ended.json", {"run": run, "batch": batch})

    def has_ended(self, run: int, batch: int) -> bool:
        """Whether a shard has ended a micro-batch."""
        return self.read(self.live / "ended.json") == {"run": run, "batch": batch}

    def forget_shards(self, shards: int) -> None:
        """Remove the indexes of a number of shards that is not used any more."""
        shutil.rmtree(self.index / f"{shards}-shards", ignore_errors=True)

    def set_aside(self, shards: int, partitions: int) -> None:
        """Keep the indexes of a former number of partitions, to be taken over by new ones."""
        source, aside = self.index / f"{shards}-shards", self.index / f"former-{partitions}"
        if source.exists() and not aside.exists():
            source.rename(aside)

    def former_indexes(self) -> tuple[Path, ...]:
        """What `set_aside` has kept; empty: nothing."""
        return tuple(sorted(self.index.glob("former-*/*")))

    def forget_former(self) -> None:
        """Remove what `set_aside` has kept."""
        for aside in self.index.glob("former-*"):
            shutil.rmtree(aside, ignore_errors=True)

    def ask(
        self,
        action: Literal["retry", "skip"],
        aggregate_id: str,
        version: int | None = None,
        to_version: int | None = None,
    ) -> Request:
        """Leave a request for the publisher."""
        request = Request(secrets.token_hex(8), action, aggregate_id, version, to_version)
        self.requests.mkdir(mode=0o700, exist_ok=True)
        self.write(self.requests / f"{request.id}.json", asdict(request), lasting=True)
        return request

    def asked(self) -> list[Request]:
        """The requests that nobody has answered, oldest first."""
        return [request for _, request in self._requests() if request is not None]

    def set_invalid_requests_aside(self) -> list[Path]:
        """Rename the files in requests/ that are none; their new names."""
        aside = []
        for file, request in self._requests():
            if request is None:
                aside.append(file.with_suffix(".invalid"))
                with suppress(FileNotFoundError):
                    file.rename(aside[-1])
        return aside

    def _requests(self) -> list[tuple[Path, Request | None]]:
        try:
            files = sorted(self.requests.glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
        except FileNotFoundError:  # answered at this moment
            return []
        return [(file, _request(self.read(file), file.stem)) for file in files if file.exists()]

    def withdraw(self, request: Request) -> bool:
        """Take a request back; False where it was answered before."""
        try:
            (self.requests / f"{request.id}.json").unlink()
        except FileNotFoundError:
            return False
        return True

    def answer(self, request_id: str, outcome: str) -> None:
        """Say what came of a request, and take it away."""
        self.write(self.requests / f"{request_id}.answer", {"outcome": outcome})
        (self.requests / f"{request_id}.json").unlink(missing_ok=True)

    def answer_of(self, request: Request) -> str | None:
        """What came of a request, once; None: nothing yet."""
        file = self.requests / f"{request.id}.answer"
        data = self.read(file)
        if data is None:
            return None
        file.unlink(missing_ok=True)
        return str(data["outcome"])

    def is_running(self) -> bool:
        """Whether a publisher has this directory."""
        try:
            with (self.root / "lock").open() as handle:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        except OSError as error:
            raise _mapped(error, self.root) from error
        return False

    def see_database(self) -> None:
        """It has answered just now; see `eventpub.ops.alive`."""
        with suppress(OSError):
            self.seen.touch()

    def seen_database(self) -> float | None:
        """When it answered last, s since 1970; None: not since the start."""
        try:
            return self.seen.stat().st_mtime
        except FileNotFoundError:
            return None

    def indexed(self) -> list[int]:
        """The numbers of shards that there are indexes of."""
        found = (folder.name.removesuffix("-shards") for folder in self.index.glob("*-shards"))
        return sorted(int(number) for number in found if number.isdigit())

    def shard_index(self, shards: int, number: int) -> Path:
        """The folder of a shard's index."""
        return self.index / f"{shards}-shards" / str(number)


def replace_file(path: Path, text: str, *, lasting: bool = False) -> None:
    """Write a file anew, whole or not at all, whoever else does the same at this moment.

    Args:
        lasting: on the disk when this returns.

    Raises:
        OSError: it is as it was before.
    """
    handle, partial = tempfile.mkstemp(".new", f"{path.name}.", path.parent)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            if lasting:
                file.flush()
                os.fsync(handle)
        Path(partial).rename(path)
    except BaseException:
        with suppress(OSError):
            Path(partial).unlink()
        raise
    if lasting:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            with suppress(OSError):  # a file system that has no such thing
                os.fsync(folder)
        finally:
            os.close(folder)


def _request(data: dict[str, Any] | None, id: str) -> Request | None:
    """What a file in requests/ says; None: it is none that this version knows."""
    try:
        request = Request(**(data or {}))
    except TypeError:
        return None
    numbers = (request.version, request.to_version)
    valid = (
        request.id == id
        and request.action in {"retry", "skip"}
        and isinstance(request.aggregate_id, str)
        and all(n is None or isinstance(n, int) for n in numbers)
    )
    return request if valid else None


def _mapped(error: OSError, path: Path) -> StateError:
    full = error.errno in {28, 122}  # ENOSPC, EDQUOT
    return StateError(
        "state.disk_full" if full else "state.not_writable",
        "no space is left on the disk" if full else f"cannot be written: {error.strerror}",
        where=str(path),
        suggestion="free space on the disk of app.state_dir"
        if full
        else "give the publisher's user write access, or set app.state_dir",
        retriable=full,
    )
