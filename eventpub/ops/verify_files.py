"""The files of a comparison: the list of differences, and the folder for what is compared."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from eventpub.errors import ConfigError, StateError

_OLD = 3600.0
"""Seconds after which a folder may be one that a comparison has left which was killed."""


@contextmanager
def spill_folder() -> Iterator[Path]:
    """A folder in TMPDIR that is removed at the end.

    What comparisons that were killed have left is removed as well.

    Raises:
        StateError: `verify.no_space`.
    """
    for former in Path(tempfile.gettempdir()).glob("eventpub-verify-*"):
        with suppress(OSError):
            _remove_left(former)
    with no_space_is_named():
        made = tempfile.TemporaryDirectory(prefix="eventpub-verify-", ignore_cleanup_errors=True)
    with made as name, open(Path(name) / "lock", "wb") as lock:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield Path(name)


@contextmanager
def no_space_is_named() -> Iterator[None]:
    """Raises errors of files, also the database's, as `verify.no_space`."""
    import duckdb

    try:
        yield
    except (OSError, duckdb.IOException, duckdb.OutOfMemoryException) as error:
        raise StateError(
            "verify.no_space",
            f"the rows to compare cannot be kept: {error}",
            where=tempfile.gettempdir(),
            suggestion="free about 150 bytes an event there, or set TMPDIR to a larger disk",
        ) from error


def _remove_left(folder: Path) -> None:
    about = folder.lstat()
    if about.st_uid != os.geteuid() or time.time() - about.st_mtime < _OLD:
        return
    lock = os.open(folder / "lock", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a comparison that runs holds it
        shutil.rmtree(folder)
    finally:
        os.close(lock)


@contextmanager
def written(file: Path | None) -> Iterator[IO[str] | None]:
    """The file, open; under its name only once the comparison has come to its end.

    What is no ordinary file, such as /dev/stdout, is written to as it is.
    """
    if file is None:
        yield None
        return
    try:
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if file.exists() and (not file.is_file() or _is_ours(file)):
            with file.open("a", encoding="utf-8") as listed:
                yield listed
            return
        file = file.resolve()  # the file behind a link, not the link
        unfinished = file.with_name(f"{file.name}.part")
        try:
            with unfinished.open("w", encoding="utf-8") as listed:
                yield listed
            unfinished.replace(file)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            "verify.not_writable",
            f"{file} cannot be written: {error.strerror}",
            where="--differences",
            suggestion="name a file in a folder that exists and that you may write to, on a disk"
            " with space",
        ) from error


def _is_ours(file: Path) -> bool:
    """Whether stdout or stderr goes there."""
    about = file.stat()
    return any(os.path.samestat(about, os.fstat(descriptor)) for descriptor in (1, 2))
