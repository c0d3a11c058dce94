"""Durable writes of small files; file system errors as `StateError`."""

from __future__ import annotations

import errno
import os
import pwd
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from eventpub.errors import StateError


def replace_file(path: Path, text: str, *, lasting: bool = False) -> None:
    """Replace a file atomically, or raise OSError and leave it as it was; `lasting`: synced."""
    handle, partial = tempfile.mkstemp(".new", f"{path.name}.", path.parent)
    try:
        give_to_owner(Path(partial))
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
            with suppress(OSError):  # the file system cannot sync folders
                os.fsync(folder)
        finally:
            os.close(folder)


def give_to_owner(path: Path) -> None:
    """Give a file created by root to the owner of its folder, the publisher's user."""
    if os.geteuid() == 0:
        of = path.parent.stat()
        with suppress(OSError):  # a file system without owners
            os.chown(path, of.st_uid, of.st_gid)


@contextmanager
def mapping(path: Path) -> Iterator[None]:
    """Raise OSError as state.disk_full, state.no_locks, state.not_writable, …."""
    try:
        yield
    except OSError as error:
        raise _mapped(error, path) from error


def disk_full(where: str) -> StateError:
    return StateError(
        "state.disk_full",
        "no space is left on the disk",
        where=where,
        suggestion="free space on the disk of app.state_dir, or of state.location",
        retriable=True,
    )


def is_disk_full(text: str) -> bool:
    return "No space left" in text or "Disk quota" in text


def too_many_files(where: str) -> StateError:
    return StateError(
        "state.too_many_files",
        "too many files are open",
        where=where,
        suggestion="raise the limit (ulimit -n, systemd's LimitNOFILE, sysctl fs.file-max), and"
        " restart",
        retriable=True,
    )


def raise_file_limit() -> None:
    """Let this process and its children open as many files as it may, up to 65,536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _mapped(error: OSError, path: Path) -> StateError:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return disk_full(str(path))
    if error.errno in {errno.EMFILE, errno.ENFILE}:
        return too_many_files(str(path))
    if error.errno in {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}:
        return StateError(
            "state.no_locks",
            f"files cannot be locked: {error.strerror}; a second publisher could not be refused",
            where=str(path),
            suggestion="set app.state_dir to a folder on a local disk; on NFS, mount it with"
            " locking (NFS 4, or lockd, and without nolock)",
        )
    owner = _owner(path) if error.errno == errno.EACCES else None
    return StateError(
        "state.not_writable",
        f"cannot be written: {error.strerror}" + (f"; it belongs to user {owner}" if owner else ""),
        where=str(path),
        suggestion=(f"run the command as that user (sudo -u {owner} …), " if owner else "")
        + "give the publisher's user write access, set app.state_dir to another folder,"
        " or, if it was moved, move it back",
    )


def _owner(path: Path) -> str | None:
    """The name of the user who owns the file; None: it is missing, or this user's."""
    for place in (path, *path.parents):
        try:
            uid = place.stat().st_uid
            return None if uid == os.geteuid() else pwd.getpwuid(uid).pw_name
        except PermissionError:  # in a folder of that user's
            continue
        except (OSError, KeyError):
            return None
    return None
