"""Copies of indexes in a place that all machines of a cluster reach.

An index lives on the disk of the machine that publishes its shard. A machine that gets a shard for
the first time takes the newest copy and reads back from the topic what is newer: seconds instead of
the whole topic. A copy is an older index like any other, so nothing depends on how old it is, or
on there being one.

Below the place: ``<app.id>/<partitions>-partitions/<shards>-shards/<shard>/<name>/``, names in the
order of time; a copy counts when its `complete.json` is there, which is written last and names each
file with its size.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import structlog

from eventpub.errors import StateError

_KEPT = 2
"""Copies of a shard that are kept: who is reading the older one may finish."""

_COMPLETE = "complete.json"

_TRIES = 3
_TRIES_AGAIN_AFTER = 1.0
"""Seconds."""

_AT_ONCE = 4 << 20
"""Bytes that are fetched between two questions whether to go on."""

log: structlog.stdlib.BoundLogger = structlog.get_logger("eventpub")


class Snapshots:
    """The copies of one shard's index.

    Args:
        place: a folder, or a URI that pyarrow knows: ``s3://…``, ``gs://…``, ``hdfs://…``.
        app_id: the application's id.
        partitions: of the topic; an index of another number is of no use as it is.
        shards: how many there are.
        shard: the number of this one.
    """

    def __init__(self, place: str, app_id: str, partitions: int, shards: int, shard: int) -> None:
        self._place = place
        self._of = f"{app_id}/{partitions}-partitions/{shards}-shards/{shard}"

    @cached_property
    def _found(self) -> tuple[pafs.FileSystem, str]:
        """The file system of the place, and the folder there; to find out may ask the network."""
        try:
            if "://" in self._place:
                files, root = pafs.FileSystem.from_uri(self._place)
            else:
                files, root = pafs.LocalFileSystem(), str(Path(self._place).absolute())
        except (OSError, ValueError) as error:
            raise self._unreachable(error) from error
        return files, f"{root.rstrip('/')}/{self._of}"

    @property
    def _files(self) -> pafs.FileSystem:
        return self._found[0]

    @property
    def _root(self) -> str:
        return self._found[1]

    def _unreachable(self, error: Exception) -> StateError:
        return StateError(
            "state.snapshots_unreachable",
            f"copies of the index cannot be kept or found: {error}",
            where=f"state.snapshots = {self._place}",
            suggestion="set it to a folder, or to s3://…, gs://… or hdfs://… that each executor"
            " may read and write",
            retriable=True,
        )

    def put(self, folder: Path) -> str:
        """Keep a copy of a folder of files; its name. Older copies are removed.

        Raises:
            StateError: state.snapshots_unreachable
        """
        # the clock of the machine that has made the last one may be ahead of this one's
        after = max((int(before) for before in self._names()), default=0)
        name = f"{max(time.time_ns(), after + 1 + secrets.randbelow(10**6)):020d}"
        target = f"{self._root}/{name}"
        try:
            self._files.create_dir(target, recursive=True)
            sizes = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
            local = pafs.LocalFileSystem()
            pafs.copy_files(
                str(folder), target, source_filesystem=local, destination_filesystem=self._files
            )
            with self._files.open_output_stream(f"{target}/{_COMPLETE}") as stream:
                stream.write(json.dumps({"files": sizes}).encode())
            for older in self._names()[:-_KEPT]:
                with suppress(OSError):  # another runner of this shard removes it, too
                    self._files.delete_dir(f"{self._root}/{older}")
        except OSError as error:
            raise self._unreachable(error) from error
        return name

    def get(self, folder: Path, meanwhile: Callable[[], None] = lambda: None) -> str | None:
        """Fetch the newest copy into a folder that is not there; its name.

        None: there is none, or another runner was faster.

        Args:
            meanwhile: called again and again; what it raises ends the fetching.

        Raises:
            StateError: state.snapshots_unreachable
        """
        # of its own: who had the lease before may still fetch on the same machine
        partial = folder_for(folder)
        try:
            for name in reversed(self._names()):
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
                try:
                    is_whole = self._fetch_with_retries(name, partial, meanwhile)
                except (OSError, ValueError, KeyError) as error:  # not complete, or just removed
                    source = f"{self._root}/{name}"
                    log.info("a copy of the index cannot be used", copy=source, reason=str(error))
                    continue
                if is_whole:
                    try:
                        partial.rename(folder)
                    except OSError:
                        if not folder.exists():
                            raise
                        return None
                    return name
        finally:
            _remove(partial)
        return None

    def _fetch_with_retries(self, name: str, folder: Path, meanwhile: Callable[[], None]) -> bool:
        """As `_fetch`: reading the topic back instead costs more than a second try."""
        for _ in range(_TRIES - 1):
            try:
                return self._fetch(name, folder, meanwhile)
            except FileNotFoundError:
                raise
            except OSError as error:
                log.info("a copy of the index is fetched again", copy=name, reason=str(error))
                time.sleep(_TRIES_AGAIN_AFTER)
                meanwhile()
        return self._fetch(name, folder, meanwhile)

    def _fetch(self, name: str, folder: Path, meanwhile: Callable[[], None]) -> bool:
        """Fetch a copy; whether it is whole."""
        source = f"{self._root}/{name}"
        with self._files.open_input_stream(f"{source}/{_COMPLETE}") as stream:
            sizes: dict[str, int] = json.loads(stream.read())["files"]
        if any(Path(file).name != file for file in sizes):  # "..", or a path that leads elsewhere
            raise ValueError("it names files outside of its folder")
        for file in sizes:
            with (
                self._files.open_input_stream(f"{source}/{file}") as read,
                (folder / file).open("wb") as write,
            ):
                meanwhile()
                while part := read.read(_AT_ONCE):
                    write.write(part)
                    meanwhile()
        return {file: (folder / file).stat().st_size for file in sizes} == sizes

    def _names(self) -> list[str]:
        """Of copies, also of those that are being written; the newest last."""
        try:
            found = self._files.get_file_info(
                pafs.FileSelector(self._root, allow_not_found=True, recursive=False)
            )
        except OSError as error:
            raise self._unreachable(error) from error
        folders = [info.base_name for info in found if info.type == pafs.FileType.Directory]
        return sorted(name for name in folders if name.isdecimal())


class Copying:
    """Keeps copies of an open index beside publishing, one at a time, in a thread.

    Args:
        snapshots: where.
        every: seconds between two, at least.
    """

    def __init__(self, snapshots: Snapshots, every: float) -> None:
        self._snapshots = snapshots
        self._every = every
        self._next = time.monotonic() + every
        self._known: Any = None
        self._thread: threading.Thread | None = None

    def due(self, offsets: Any) -> bool:
        """Whether it is time for one.

        Args:
            offsets: what changes with what the index knows.
        """
        if time.monotonic() < self._next or offsets == self._known:
            return False
        return self._thread is None or not self._thread.is_alive()

    def begin(self, folder: Path, offsets: Any) -> None:
        """Keep a folder, which is removed then."""
        self._next, self._known = time.monotonic() + self._every, offsets
        self._thread = threading.Thread(
            target=self._put, args=(folder,), name="eventpub-snapshot", daemon=True
        )
        self._thread.start()

    def _put(self, folder: Path) -> None:
        try:
            self._snapshots.put(folder)
        except StateError as error:
            _say_that_none_was_kept(error)
        finally:
            _remove(folder)

    def failed(self, folder: Path, error: StateError) -> None:
        """A folder could not be made."""
        self._next = time.monotonic() + self._every
        _say_that_none_was_kept(error)
        _remove(folder)

    def end(self, timeout: float) -> None:
        """Wait for the one that is under way, so many seconds."""
        if self._thread is not None:
            self._thread.join(timeout)


def _say_that_none_was_kept(error: StateError) -> None:
    log.warning("no copy of the index was kept; the next one is tried later", error=str(error))


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _in_use.discard(folder)


_in_use: set[Path] = set()
"""Folders of this process, which a thread removes."""


def folder_for(directory: Path) -> Path:
    """Where a checkpoint of an index is made, or a copy is fetched; on its disk, for links.

    What a process that was killed has left of others is removed.
    """
    for left in directory.parent.glob(f"{directory.name}.copy-*"):
        if left not in _in_use and not _is_of_another(left):
            shutil.rmtree(left, ignore_errors=True)
    folder = directory.with_name(f"{directory.name}.copy-{os.getpid()}-{secrets.token_hex(4)}")
    _in_use.add(folder)
    return folder


def _is_of_another(folder: Path) -> bool:
    """Whether another process that lives may have made it."""
    pid = folder.name.rpartition(".copy-")[2].split("-")[0]
    if not pid.isdigit() or int(pid) == os.getpid():
        return False
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
