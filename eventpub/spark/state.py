"""The state directory: who may use it, where the reader is, where it started.

lock            held by the running publisher
start.json      where this publisher started, resolved once
run.json        which run this is: a number that grows with every start
boundary.json   how far the shards may read while a micro-batch runs
passed.json     where rows have become visible behind the windows, as the source has seen
pages/          pages of a backlog that the source has read for all shards
live/           what each shard has done so far in the micro-batch that runs; if one has ended it
requests/       what `eventpub gaps retry` and `skip` ask the publisher to do, and what came of it
progress.json   position and pending work, as the shards have told last; what they shall compare
checkpoint/     Spark's
index/          one folder a shard, per number of shards
spark.log       what Spark and its workers printed
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal

from eventpub.errors import StateError


@dataclass(frozen=True)
class Request:
    """What somebody asks the publisher to do with one aggregate.

    Attributes:
        id: names it.
        action: "retry" looks for what is missing now; "skip" gives the open gap up now.
        aggregate_id: whose.
        version: which is to be given up; a request that is done again gives up no other one. None:
            whichever is missing when it is done first.
    """

    id: str
    action: Literal["retry", "skip"]
    aggregate_id: str
    version: int | None = None


class StateDir:
    """Paths and small files of one publisher's state.

    Raises:
        StateError: state.not_writable where the directory cannot be made.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _mapped(error, self.root) from error
        self.progress_file = self.root / "progress.json"
        self.start_file = self.root / "start.json"
        self.run_file = self.root / "run.json"
        self.boundary_file = self.root / "boundary.json"
        self.passed_file = self.root / "passed.json"
        self.checkpoint = self.root / "checkpoint"
        self.index = self.root / "index"
        self.spark_log = self.root / "spark.log"
        self.spark_scratch = self.root / "spark"
        self.pages = self.root / "pages"
        self.live = self.root / "live"
        self.requests = self.root / "requests"
        self._lock: IO[str] | None = None

    def lock(self) -> None:
        """Keep every other publisher on this machine out, until the process ends.

        Raises:
            StateError: state.locked, with the other's process id.
        """
        path = self.root / "lock"
        try:
            handle = path.open("a+")
        except OSError as error:
            raise _mapped(error, path) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            handle.seek(0)
            pid = handle.read().strip() or "unknown"
            raise StateError(
                "state.locked",
                f"another publisher (process {pid}) is running on this state directory",
                where=str(self.root),
                suggestion=f"stop process {pid}, or give this publisher another app.state_dir "
                "and app.id",
            ) from error
        handle.truncate(0)
        handle.write(str(os.getpid()))
        handle.flush()
        self._lock = handle
        shutil.rmtree(self.spark_scratch, ignore_errors=True)

    def unlock(self) -> None:
        """Let others in."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def read(self, path: Path) -> dict[str, Any] | None:
        """The object in one of the files; None where there is none."""
        try:
            data: dict[str, Any] = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise StateError(
                "state.corrupt",
                "the file is not JSON",
                where=str(path),
                suggestion="delete it; it is made again, at the price of reading more of the store",
            ) from error
        return data

    def write(self, path: Path, data: dict[str, Any]) -> None:
        """Replace one of the files, whole or not at all."""
        partial = path.with_suffix(".new")
        try:
            partial.write_text(json.dumps(data))
            partial.rename(path)
        except OSError as error:
            raise _mapped(error, path) from error

    def forget_pages(self) -> None:
        """Remove the pages of a run of the query that is over."""
        shutil.rmtree(self.pages, ignore_errors=True)

    def tell(self, run: int, batch: int, shard: int, report: dict[str, Any]) -> None:
        """Leave what a shard's task has done so far; nothing depends on its arriving."""
        with suppress(OSError, StateError):
            self.live.mkdir(exist_ok=True)
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

    def end_batch(self, run: int, batch: int) -> None:
        """Let the other shards know that one has ended a micro-batch; it may not arrive."""
        with suppress(OSError, StateError):
            self.live.mkdir(exist_ok=True)
            self.write(self.live / "ended.json", {"run": run, "batch": batch})

    def has_ended(self, run: int, batch: int) -> bool:
        """Whether a shard has ended a micro-batch."""
        return self.read(self.live / "ended.json") == {"run": run, "batch": batch}

    def forget_shards(self, shards: int) -> None:
        """Remove the indexes of a number of shards that is not used any more."""
        shutil.rmtree(self.index / f"{shards}-shards", ignore_errors=True)

    def ask(
        self, action: Literal["retry", "skip"], aggregate_id: str, version: int | None = None
    ) -> Request:
        """Leave a request for the publisher."""
        request = Request(secrets.token_hex(8), action, aggregate_id, version)
        self.requests.mkdir(exist_ok=True)
        self.write(self.requests / f"{request.id}.json", asdict(request))
        return request

    def asked(self) -> list[Request]:
        """The requests that nobody has answered, oldest first."""
        try:
            files = sorted(self.requests.glob("*.json"), key=lambda file: file.stat().st_mtime_ns)
        except FileNotFoundError:  # answered at this moment
            return []
        found = [self.read(file) for file in files]
        return [Request(**data) for data in found if data is not None]

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
            with (self.root / "lock").open("a+") as handle:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError as error:
            raise _mapped(error, self.root) from error
        return False

    def shard_index(self, shards: int, number: int) -> Path:
        """The folder of a shard's index."""
        return self.index / f"{shards}-shards" / str(number)


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
