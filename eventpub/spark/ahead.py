"""Reads a backlog's next page while a batch runs, once for all shards.

Without it each task reads the whole window and drops the rows of other shards: a quarter of a
drain's CPU time. Tasks of this machine find a page's rows in files; without one they read the
window themselves.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent import futures
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from eventpub.config import Config
from eventpub.coordinator import events as e
from eventpub.coordinator.boundary import PollResult
from eventpub.errors import EventpubError
from eventpub.publisher.workers import in_thread, unexpected
from eventpub.state import StateDir

_PAGE_BYTES = 64 << 20
_LEFT_FREE = 8 * _PAGE_BYTES
"""Bytes on the disk below which pages are left to the tasks: indexes and journals need them."""
_KEPT = 2
"""Pages: of the batch that runs, and the next."""
_AFTER = b"after"


class Ahead:
    """Polls with `do` in a thread; call `take` before another poll, and `forget` to reconnect."""

    def __init__(self, config: Config, do: Callable[[e.Poll], PollResult]) -> None:
        self._folder, self._do = _folder(config), do
        self._reading: futures.Future[tuple[int, PollResult]] | None = None
        self._ends: list[int] = []
        self.forget()

    def begin(self, poll: e.Poll) -> None:
        self._reading = in_thread(lambda: self._read(poll), "eventpub-ahead")

    def wait(self) -> None:
        if self._reading is not None:
            futures.wait([self._reading])

    def take(self) -> tuple[int, PollResult] | None:
        """`after` of the last poll begun, and what it has found, once; raises its error."""
        reading, self._reading = self._reading, None
        return None if reading is None else reading.result()

    def forget(self) -> None:
        self.wait()
        self._reading = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self, poll: e.Poll) -> tuple[int, PollResult]:
        try:
            result = self._do(replace(poll, with_rows=self._has_room(), page_bytes=_PAGE_BYTES))
        except EventpubError:
            raise
        except Exception as error:
            raise unexpected(poll, error) from error
        try:
            self._keep(poll.after, result)
        except OSError:  # as on a full disk: the tasks read the window
            shutil.rmtree(self._folder, ignore_errors=True)
        return poll.after, replace(result, rows=None)

    def _has_room(self) -> bool:
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return shutil.disk_usage(self._folder).free > _LEFT_FREE
        return False

    def _keep(self, after: int, result: PollResult) -> None:
        if result.rows is None or result.end is None:
            return
        self._ends = [*self._ends, result.end]
        for shard, rows in enumerate(result.rows):
            partial = self._folder / "partial"
            schema = rows.schema.with_metadata({_AFTER: str(after)})
            with pa.OSFile(str(partial), "wb") as out, pa.ipc.new_file(out, schema) as writer:
                writer.write_table(rows.replace_schema_metadata(schema.metadata))
            partial.rename(self._folder / f"{result.end}-{shard}")
        for end in self._ends[:-_KEPT]:
            self.drop(end)
        self._ends = self._ends[-_KEPT:]

    def drop(self, end: int) -> None:
        """Remove a page: a later window may end there, too, and have more rows."""
        for file in self._folder.glob(f"{end}-*"):
            file.unlink()


def page(config: Config, after: int, upto: int, shard: int) -> list[pa.RecordBatch] | None:
    """A shard's rows of ``after < create_time ≤ upto``, if they were read ahead."""
    try:
        file = pa.memory_map(str(_folder(config) / f"{upto}-{shard}"))
    except FileNotFoundError:
        return None
    rows = pa.ipc.open_file(file).read_all()
    begin = int((rows.schema.metadata or {})[_AFTER])
    if begin > after:
        return None
    return rows.filter(pc.greater(rows.column("create_time"), pa.scalar(after))).to_batches()


def _folder(config: Config) -> Path:
    return StateDir(config.app.state_dir).spark_scratch / "pages"
