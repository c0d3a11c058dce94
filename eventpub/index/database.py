"""One RocksDB directory: opened, read and written, with each of its errors mapped to one of ours.

What belongs together is written in one write batch, so that after a kill the index is either before
or after a publication, never in between. The write-ahead log is not synced: after a crash of the
machine an older index comes up, and the fold brings it up to the topic. What must not happen is
that offsets come up newer than the versions that were read up to there: a manifest that was cut
short makes RocksDB leave out a part in the middle, and say nothing. So a mark, `g` and a number (8
bytes, big-endian), is written now and then: where a part is missing, the marks are not numbered
without a gap.
"""

from __future__ import annotations

import os
import secrets
import shutil
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rocksdict import AccessType, Checkpoint, Options, Rdict, WriteBatch

from eventpub.errors import StateError

NUMBER = struct.Struct(">q")
"""A number in a key: in this order RocksDB has them."""
_OF_WHO_OPENS = ("LOCK", "LOG", "rocksdict-config.json")
"""Files that are written anew whenever an index is opened."""
_MARKED_EVERY = 1 << 20
"""Bytes between two marks: fewer than RocksDB keeps in one file."""


Changes = Mapping[bytes, bytes | None]
"""New values by key; None: the key is deleted."""


class Database:
    """Open for writing; nobody else has it.

    Args:
        directory: made when absent.
        lock_timeout: seconds to wait while another process has it open.

    Raises:
        StateError: index.locked, index.corrupt, index.disk_full.
    """

    def __init__(self, directory: Path, lock_timeout: float) -> None:
        self.directory = directory
        self._db = _open(directory, lock_timeout)
        self._session = os.urandom(8)
        self._marks = self._since_mark = 0
        try:
            self._old_marks = checked_marks(self._db, directory)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close it and release the lock.

        What it may not write any more, on a full disk, was said by the write that failed before;
        what stands in the write-ahead log, or on the topic, is read again.
        """
        with suppress(Exception):
            self._db.close()

    @property
    def size(self) -> int:
        """Bytes that it takes, on the disk and in memory for what is to come there."""
        sizes = ("rocksdb.total-sst-files-size", "rocksdb.cur-size-all-mem-tables")
        return sum(int(self._db.property_int_value(name) or 0) for name in sizes)

    def copy_to(self, folder: Path) -> None:
        """Make a consistent copy beside publishing: links to files, where the disk has them.

        Raises:
            StateError: index.disk_full, ….
        """
        shutil.rmtree(folder, ignore_errors=True)
        try:
            Checkpoint(self._db).create_checkpoint(str(folder))
        except Exception as error:
            raise mapped(error, self.directory) from error

    @staticmethod
    def new_batch() -> Any:
        """An empty batch of writes that belong together, for `write`."""
        return WriteBatch(raw_mode=True)

    def apply(self, changes: Changes) -> None:
        """Write changes, all of them or none."""
        batch = self.new_batch()
        for key, value in changes.items():
            if value is None:
                batch.delete(key)
            else:
                batch.put(key, value)
        self.write(batch)

    def write(self, batch: Any) -> None:
        """All of it or nothing."""
        size = self._since_mark + batch.size_in_bytes()
        is_marked = not self._marks or size >= _MARKED_EVERY
        if is_marked:
            # not as a range: each read would look at that, too, until the next compaction
            for number in range(self._old_marks):
                batch.delete(_mark(number))
            batch.put(_mark(self._marks), self._session)
        try:
            self._db.write(batch)
        except Exception as error:
            raise mapped(error, self.directory) from error
        if is_marked:
            self._old_marks = 0
        self._marks += is_marked
        self._since_mark = 0 if is_marked else size

    def get(self, keys: Any) -> Any:
        """The value of a key, or the values of some; None: there is none."""
        try:
            return self._db.get(keys)
        except Exception as error:
            raise mapped(error, self.directory) from error

    def get_all(self, prefix: bytes, aggregate_ids: list[str]) -> list[bytes | None]:
        """The values of aggregates; one multi-get."""
        if not aggregate_ids:
            return []
        return list(self.get([prefix + a.encode() for a in aggregate_ids]))

    def items(self, prefix: bytes, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """As `items_of`."""
        return items_of(self._db, prefix, self.directory, start)


class _Batch(dict[bytes, bytes | None]):
    """A batch that is kept in memory."""

    put = dict.__setitem__

    def delete(self, key: bytes) -> None:
        self[key] = None


class Overlay:
    """A database with changes that are kept in memory until `flush`: a reader sees them at once.

    Args:
        database: below.
    """

    new_batch = _Batch

    def __init__(self, database: Database) -> None:
        self._below = database
        self.directory = database.directory
        self.changes = _Batch()
        self.close, self.copy_to = database.close, database.copy_to

    @property
    def size(self) -> int:
        """As of `Database`."""
        return self._below.size

    def write(self, batch: Changes) -> None:
        """Keep changes in memory."""
        self.changes.update(batch)

    def flush(self) -> None:
        """Write all changes to the database, at once."""
        self._below.apply(self.changes)
        self.changes.clear()

    def get(self, keys: Any) -> Any:
        """As of `Database`."""
        if isinstance(keys, bytes):
            return self.changes[keys] if keys in self.changes else self._below.get(keys)
        if not self.changes:
            return self._below.get(keys)
        missing = [key for key in keys if key not in self.changes]
        below = dict(zip(missing, self._below.get(missing), strict=True)) if missing else {}
        return [below[key] if key in below else self.changes[key] for key in keys]

    def get_all(self, prefix: bytes, aggregate_ids: list[str]) -> list[bytes | None]:
        """As of `Database`."""
        return list(self.get([prefix + a.encode() for a in aggregate_ids])) if aggregate_ids else []

    def items(self, prefix: bytes, start: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """As of `Database`."""
        found: dict[bytes, bytes | None] = dict(self._below.items(prefix, start))
        first = prefix + start
        found |= {k: v for k, v in self.changes.items() if k.startswith(prefix) and k >= first}
        for key in sorted(found):
            if (value := found[key]) is not None:
                yield key, value


def items_of(
    db: Any, prefix: bytes, directory: Path, start: bytes = b""
) -> Iterator[tuple[bytes, bytes]]:
    """All keys with a prefix; unlike `Rdict.items`, it does not end where a block is damaged."""
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
        raise mapped(error, directory) from error


def checked_marks(db: Any, directory: Path) -> int:
    """How many marks there are: one for each MiB that a runner has written while it had the shard.

    Raises:
        StateError: index.corrupt: some are missing, and what was written between them.
    """
    count, first = 0, None
    for key, session in items_of(db, b"g", directory):
        first = first or session
        if key != _mark(count) or session != first:
            raise _corrupt("a part of what was written is missing", directory)
        count += 1
    return count


def _mark(number: int) -> bytes:
    return b"g" + NUMBER.pack(number)


def set_aside(directory: Path, *, is_damaged: bool = True) -> Path:
    """Move an index out of the way of a new one; where to. An older one there is removed."""
    aside = directory.with_name(f"{directory.name}.{'damaged' if is_damaged else 'former'}")
    shutil.rmtree(aside, ignore_errors=True)
    with suppress(FileNotFoundError):
        directory.rename(aside)
    return aside


_copies: set[Path] = set()
"""Folders of this process's copies, which whoever makes one removes."""


def folder_for(directory: Path) -> Path:
    """Where a copy of an index is made: beside it, on its disk, for links.

    What processes that were killed have left of others is removed.
    """
    for left in directory.parent.glob(f"{directory.name}.copy-*"):
        if left not in _copies and not _is_of_another(left):
            shutil.rmtree(left, ignore_errors=True)
    folder = directory.with_name(f"{directory.name}.copy-{os.getpid()}-{secrets.token_hex(4)}")
    _copies.add(folder)
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


@contextmanager
def read_only(directory: Path) -> Iterator[Rdict | None]:
    """An index beside whoever has it open, until the block is left; None where there is none."""
    if not (directory / "CURRENT").exists():
        yield None
        return
    with _writable(directory) as folder:
        try:
            reader = Rdict(str(folder), Options(raw_mode=True), access_type=AccessType.read_only())
        except Exception as error:
            raise mapped(error, directory) from error
        try:
            yield reader
        finally:
            reader.close()


@contextmanager
def _writable(directory: Path) -> Iterator[Path]:
    """The same files in a folder that may be written: rocksdict writes one also to read."""
    if os.access(directory, os.W_OK):
        yield directory
        return
    with TemporaryDirectory(prefix="eventpub-index-") as folder:
        for file in directory.resolve().iterdir():
            if file.name not in _OF_WHO_OPENS:
                (Path(folder) / file.name).symlink_to(file)
        yield Path(folder)


def _open(directory: Path, lock_timeout: float) -> Rdict:
    options = Options(raw_mode=True)
    options.create_if_missing(True)
    options.set_keep_log_file_num(2)
    options.set_max_open_files(256)
    options.set_write_buffer_size(16 << 20)
    options.set_stats_dump_period_sec(0)
    options.set_stats_persist_period_sec(0)
    directory.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + lock_timeout
    while True:
        try:
            return Rdict(str(directory), options)
        except Exception as error:
            found = mapped(error, directory)
            if found.code != "index.locked" or time.monotonic() > deadline:
                raise found from error
        time.sleep(0.05)


def mapped(error: Exception, directory: Path) -> StateError:
    """An error of RocksDB as one of ours."""
    text = str(error)
    where = str(directory)
    if "lock" in text.lower() and ("LOCK" in text or "No locks" in text):
        return StateError(
            "index.locked",
            "another process has the index open",
            where=where,
            suggestion="stop the other publisher, or give this one another app.state_dir",
            retriable=True,
        )
    if "No space left" in text or "Disk quota" in text:
        return StateError(
            "index.disk_full",
            "no space is left for the index",
            where=where,
            suggestion="free space on the disk of app.state_dir; publishing goes on after it",
            retriable=True,
        )
    if "Permission denied" in text or "Read-only file system" in text:
        return StateError(
            "index.not_writable",
            "the index cannot be written",
            where=where,
            suggestion="give the publisher's user write access to app.state_dir",
        )
    if "Corruption" in text or "No such file" in text:
        return _corrupt(text, directory)
    return StateError(
        "index.unusable",
        f"the index cannot be used: {text}",
        where=where,
        suggestion="check the disk and the permissions of this directory; if the error stays, "
        "stop the publisher and delete it: it is rebuilt from the topic",
    )


def _corrupt(text: str, directory: Path) -> StateError:
    return StateError(
        "index.corrupt",
        f"the index is damaged: {text}",
        where=str(directory),
        suggestion="start the publisher: it sets a damaged index aside and rebuilds it from the "
        "topic",
    )
