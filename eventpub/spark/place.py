"""The location that all executors of a query share: a folder, or a bucket via obstore.

Of several processes that create one object, one succeeds: obstore uses a hard link in a folder, and
a conditional request on S3, Google Cloud Storage and Azure.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import from_url

from eventpub.errors import ConfigError, StateError
from eventpub.state_files import disk_full, is_disk_full

IDENTITY = "identity.json"
"""Below a query's name: what its state belongs to; the driver writes it first."""

_RETRIES_FOR = timedelta(seconds=10)
"""Callers try again: the publisher's loop must not wait for minutes."""

_SCHEMES = ("file", "s3", "s3a", "gs", "az", "abfs", "abfss", "https")


class Place:
    """Objects by `/`-separated name.

    Every method raises `StateError` (state.unreachable, state.disk_full) if the location fails.
    Credentials for ``s3://…``, ``gs://…`` and ``az://…`` come from the environment, as documented
    by obstore.

    Raises:
        ConfigError: config.invalid_value
    """

    def __init__(self, location: str) -> None:
        self.location = location
        scheme = urlsplit(location).scheme if "://" in location else "file"
        if scheme not in _SCHEMES:
            raise ConfigError(
                "config.invalid_value",
                f"{scheme}:// is not supported for the state",
                where=f"state = {location}",
                suggestion="use a folder that every executor mounts, s3://…, gs://… or az://…",
            )
        self._folder: Path | None = None
        if scheme == "file":
            path = urlsplit(location).path if "://" in location else location
            self._folder = Path(path).absolute()
            with self._mapped():
                self._folder.mkdir(parents=True, exist_ok=True)
            location = self._folder.as_uri()
        with self._mapped():
            url = location.replace("s3a://", "s3://", 1)
            self._store: Any = from_url(url, retry_config={"retry_timeout": _RETRIES_FOR})

    def create(self, name: str, data: bytes) -> bool:
        """Create an object; False if it exists."""
        try:
            with self._mapped():
                obstore.put(self._store, name, data, mode="create")
        except AlreadyExistsError:
            return False
        self._make_durable(name)
        return True

    def require_exclusive(self, prefix: str) -> None:
        """Raise state.not_exclusive unless the location creates an object only once."""
        name = f"{prefix}/probe-{secrets.token_hex(8)}"
        first, second = self.create(name, b""), self.create(name, b"")
        self.delete(name)
        if not first or second:
            raise StateError(
                "state.not_exclusive",
                "the state's location lets two processes create one object, so that two tasks of a"
                " batch could both publish it",
                where=f"state = {self.location}",
                suggestion="use a storage with conditional writes: S3 (or a server that answers"
                " If-None-Match), Google Cloud Storage, Azure, or a POSIX file system with hard"
                " links",
            )

    def read(self, name: str, length: int | None = None) -> bytes | None:
        """An object, or its first bytes; None: there is none."""
        try:
            with self._mapped():
                found = obstore.get(self._store, name)
                if length is None:
                    return bytes(found.bytes())
                # not a range, which an empty object does not have
                return bytes(next(iter(found.stream(min_chunk_size=length)), b""))[:length]
        except FileNotFoundError:
            return None

    def names(self, prefix: str, older: timedelta = timedelta.min) -> Iterator[str]:
        """Names below a prefix, unordered; `older`: only of what was written so long ago."""
        with self._mapped():
            for some in obstore.list(self._store, prefix):
                now = datetime.now(UTC)
                yield from (each["path"] for each in some if now - each["last_modified"] > older)

    def sweep(self, prefix: str, older: timedelta) -> None:
        """Remove what killed processes have half written below a prefix. obstore does not list it;
        in a bucket, it is a matter of its lifecycle rules."""
        if self._folder is not None:
            with suppress(OSError):  # one is completed just now, or a folder removed
                for left in (self._folder / prefix).rglob("*#*"):
                    if time.time() - left.stat().st_mtime > older.total_seconds():
                        left.unlink()

    def delete(self, *names: str) -> None:
        with self._mapped(), suppress(FileNotFoundError):
            if names:
                obstore.delete(self._store, list(names))
        if self._folder is not None:
            for parent in {(self._folder / name).parent for name in names}:
                with suppress(OSError):  # not empty, or already gone
                    parent.rmdir()

    def upload(self, name: str, file: Path) -> None:
        """Write a file to an object, replacing it."""
        with self._mapped():
            obstore.put(self._store, name, file)
        self._make_durable(name)

    def download(self, name: str, file: Path) -> None:
        """Write an object to a file; raises FileNotFoundError."""
        with self._mapped(), file.open("wb") as out:
            for part in obstore.get(self._store, name).stream():
                out.write(part)

    def _make_durable(self, name: str) -> None:
        """fsync a folder's object, so that it survives a power failure."""
        if self._folder is None:
            return
        file = self._folder / name
        for path in (file, file.parent, file.parent.parent):  # whose entry may be new too
            with self._mapped(), suppress(FileNotFoundError):  # already deleted
                number = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(number)
                finally:
                    os.close(number)

    @contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except (AlreadyExistsError, FileNotFoundError):
            raise
        except (BaseError, OSError) as error:
            if is_disk_full(str(error)):
                raise disk_full(f"state = {self.location}") from error
            raise StateError(
                "state.unreachable",
                f"the state's location cannot be used: {str(error).splitlines()[0]}",
                where=f"state = {self.location}",
                suggestion="check the location, its permissions and credentials: every executor"
                " must be able to list, read, create and delete objects there",
                retriable=True,
            ) from error
