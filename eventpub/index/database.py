"""One RocksDB directory, with its errors mapped to `StateError`.

Changes that belong together share a write batch, so a kill leaves the index before or after a
publication, never in between. The write-ahead log is not synced: after a machine crash an older
index comes up, and the fold catches up. Offsets must never be newer than the versions read up to
them, but a truncated manifest makes RocksDB silently drop a part in the middle. So marks (`g` and a
number, 8 bytes, big-endian) are written regularly: where a part is missing, so is a number.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from heapq import merge
from pathlib import Path
from typing import Any

from rocksdict import AccessType, Checkpoint, Options, Rdict, WriteBatch

from eventpub.errors import StateError
from eventpub.state_files import is_disk_full, too_many_files
from eventpub.times import SYSTEM_CLOCK, Clock

FORMAT = 4
IDENTITY = b"midentity"
"""Key of what an index belongs to, the same in every format."""
NUMBER = struct.Struct(">q")
"""A number in a key; RocksDB sorts by it."""
_MARKED_EVERY = 1 << 20
"""Bytes between two marks: fewer than RocksDB keeps in one file."""

Changes = Mapping[bytes, bytes | None]
"""New values by key; None: delete."""
Batch = dict[bytes, bytes | None]
"""Changes while they are collected."""
Items = Callable[[bytes], Iterator[tuple[bytes, bytes]]]
"""All keys with a prefix, and their values."""


@dataclass(frozen=True)
class Storage:
    """RocksDB on the local disk; tests replace it."""

    clock: Clock

    def exists(self, directory: Path) -> bool:
        return (directory / "CURRENT").exists()

    def open(self, directory: Path) -> Rdict:
        """Open for writing in raw mode; created if absent."""
        options = Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_keep_log_file_num(2)
        options.set_max_open_files(256)
        options.set_write_buffer_size(16 << 20)
        options.set_stats_dump_period_sec(0)
        options.set_stats_persist_period_sec(0)
        directory.parent.mkdir(parents=True, exist_ok=True)
        return Rdict(str(directory), options)

    def reader(self, directory: Path) -> Rdict:
        """Open read-only, even while another process has it open."""
        return Rdict(str(directory), Options(raw_mode=True), access_type=AccessType.read_only())

    def new_batch(self) -> WriteBatch:
        return WriteBatch(raw_mode=True)

    def set_aside(self, directory: Path, *, is_damaged: bool = True) -> Path:
        """Move an index away, replacing one moved earlier; returns where to."""
        aside = directory.with_name(f"{directory.name}.{'damaged' if is_damaged else 'former'}")
        shutil.rmtree(aside, ignore_errors=True)
        with suppress(FileNotFoundError):
            directory.rename(aside)
        return aside


ROCKSDB = Storage(SYSTEM_CLOCK)


class Database:
    """Open for writing, by this process alone; created if absent.

    Args:
        lock_timeout: seconds to wait while another process has it open.

    Raises:
        StateError: index.locked, index.corrupt, index.disk_full.
    """

    def __init__(self, directory: Path, lock_timeout: float, storage: Storage) -> None:
        self.directory = directory
        self.storage = storage
        self._db = _open(directory, lock_timeout, storage)
        self._session = os.urandom(8)
        self._marks = self._since_mark = 0
        try:
            self._old_marks = _checked_marks(self._db, directory)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close; errors are ignored: the failed write has raised, and the topic has its data."""
        with suppress(Exception):
            self._db.close()

    @property
    def size(self) -> int:
        """Bytes on disk and in memtables."""
        sizes = ("rocksdb.total-sst-files-size", "rocksdb.cur-size-all-mem-tables")
        return sum(int(self._db.property_int_value(name) or 0) for name in sizes)

    def make_durable(self) -> None:
        """Have what was written survive a power failure; the log of writes alone does not."""
        try:
            self._db.flush()
        except Exception as error:
            raise _mapped(error, self.directory) from error
        self._since_mark = _MARKED_EVERY  # the next write shows if this file is lost

    def copy_to(self, folder: Path) -> None:
        """Make a consistent copy while in use, of hard links where the disk has them.

        Raises:
            StateError: index.disk_full, ….
        """
        shutil.rmtree(folder, ignore_errors=True)
        try:
            Checkpoint(self._db).create_checkpoint(str(folder))
        except Exception as error:
            raise _mapped(error, self.directory) from error

    def write(self, changes: Changes) -> None:
        """All or nothing."""
        batch = self.storage.new_batch()
        for key, value in changes.items():
            if value is None:
                batch.delete(key)
            else:
                batch.put(key, value)
        size = self._since_mark + batch.size_in_bytes()
        is_marked = not self._marks or size >= _MARKED_EVERY
        if is_marked:
            # not a range delete, which slows down reads until the next compaction
            for number in range(self._old_marks):
                batch.delete(_mark(number))
            batch.put(_mark(self._marks), self._session)
        try:
            self._db.write(batch)
        except Exception as error:
            raise _mapped(error, self.directory) from error
        if is_marked:
            self._old_marks = 0
        self._marks += is_marked
        self._since_mark = 0 if is_marked else size

    def get(self, keys: Any) -> Any:
        """The value of a key, or the values of a list of keys; None: absent."""
        try:
            return self._db.get(keys)
        except Exception as error:
            raise _mapped(error, self.directory) from error

    def items(self, prefix: bytes, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """All keys with a prefix, from `prefix + start` on."""
        return _items(self._db, self.directory, prefix, start)


class Overlay(Database):
    """A database whose changes stay in memory until `flush`; reads see them at once."""

    def __init__(self, directory: Path, lock_timeout: float, storage: Storage) -> None:
        super().__init__(directory, lock_timeout, storage)
        self.changes: Batch = {}

    def write(self, changes: Changes) -> None:
        self.changes.update(changes)

    def flush(self) -> None:
        """Write all changes to disk, atomically."""
        super().write(self.changes)
        self.changes.clear()

    def get(self, keys: Any) -> Any:
        if isinstance(keys, bytes):
            return self.changes[keys] if keys in self.changes else super().get(keys)
        missing = [key for key in keys if key not in self.changes]
        below = dict(zip(missing, super().get(missing), strict=True)) if missing else {}
        return [below[key] if key in below else self.changes[key] for key in keys]

    def items(self, prefix: bytes, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        first = prefix + start
        new = {k: v for k, v in self.changes.items() if k.startswith(prefix) and k >= first}
        below = (item for item in super().items(prefix, start) if item[0] not in new)
        return merge(below, sorted((k, v) for k, v in new.items() if v is not None))


def _items(
    db: Any, directory: Path, prefix: bytes, start: bytes = b""
) -> Iterator[tuple[bytes, bytes]]:
    """All keys with a prefix; unlike `Rdict.items`, raises where a block is damaged."""
    items = db.iter()
    if prefix:
        items.seek(prefix + start)
    else:
        items.seek_to_first()
    while items.valid():
        key = items.key()
        if key[: len(prefix)] != prefix:
            return
        yield key, items.value()
        items.next()
    try:
        items.status()
    except Exception as error:
        raise _mapped(error, directory) from error


def _checked_marks(db: Any, directory: Path) -> int:
    """The number of marks, one per MiB of a session's writes; index.corrupt if one is missing."""
    count, first = 0, None
    for key, session in _items(db, directory, b"g"):
        first = first or session
        if key != _mark(count) or session != first:
            raise corrupt("a part of what was written is missing", directory)
        count += 1
    return count


def _mark(number: int) -> bytes:
    return b"g" + NUMBER.pack(number)


def require_known_format(items: Iterator[tuple[bytes, bytes]], directory: Path) -> None:
    """Raise index.newer_format; call before anything else is read. `items`: of `IDENTITY`."""
    written = next((json.loads(identity).get("format") for _, identity in items), None)
    if isinstance(written, int) and written > FORMAT:
        raise StateError(
            "index.newer_format",
            "this index was written by a newer version of eventpub",
            where=str(directory),
            suggestion="install that version again; or stop the publisher, remove `index` of"
            " app.state_dir (with Spark, `query` and `query.json`, too; on a cluster, on each"
            " machine) and start it: what was published is read back from the topic (not if the"
            " topic lacks part of it, as with sink.accept_topic_id)",
        )


@contextmanager
def read_only(directory: Path, storage: Storage = ROCKSDB) -> Iterator[Items | None]:
    """Open an index that another process may have open; yields None if there is none.

    Raises:
        StateError: index.newer_format, index.corrupt, ….
    """
    if not storage.exists(directory):
        yield None
        return
    try:
        reader = storage.reader(directory)
    except Exception as error:
        raise _mapped(error, directory) from error
    with closing(reader):
        require_known_format(_items(reader, directory, IDENTITY), directory)
        _checked_marks(reader, directory)
        yield partial(_items, reader, directory)


def _open(directory: Path, lock_timeout: float, storage: Storage) -> Any:
    deadline = storage.clock.monotonic() + lock_timeout
    while True:
        try:
            return storage.open(directory)
        except Exception as error:
            found = _mapped(error, directory)
            if found.code != "index.locked" or storage.clock.monotonic() > deadline:
                raise found from error
        storage.clock.sleep(0.05)


def _mapped(error: Exception, directory: Path) -> StateError:
    text, where = str(error), str(directory)
    said = text.replace(where, "")  # a folder may have any name
    if is_disk_full(said):
        return StateError(
            "index.disk_full",
            "no space is left for the index",
            where=where,
            suggestion="free space on the disk of app.state_dir; publishing then resumes",
            retriable=True,
        )
    if "Too many open files" in said:
        return too_many_files(where)
    if "Permission denied" in said or "Read-only file system" in said:
        return StateError(
            "index.not_writable",
            "the index cannot be written",
            where=where,
            suggestion="give the publisher's user write access to app.state_dir",
        )
    if "Corruption" in said or "No such file" in said:
        return corrupt(text, directory)
    if "/LOCK: " in said:
        return StateError(
            "index.locked",
            "another process has the index open",
            where=where,
            suggestion="stop the other publisher, or give this one another app.state_dir",
            retriable=True,
        )
    return StateError(
        "index.unusable",
        f"the index cannot be used: {text}",
        where=where,
        suggestion="check the disk; if the error stays, stop the publisher and delete this"
        " directory: it is rebuilt from the topic",
    )


def corrupt(text: str, directory: Path) -> StateError:
    return StateError(
        "index.corrupt",
        f"the index is damaged: {text}",
        where=str(directory),
        suggestion="start the publisher: it sets a damaged index aside and rebuilds it from the "
        "topic",
    )
