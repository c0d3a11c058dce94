"""MySQL, and other versions of MariaDB: Debian's and Ubuntu's packages, or containers.

| | from |
|---|---|
| MariaDB 10.11, 11.8 | the packages of Debian 12 and 13 |
| MySQL 9 | a container; without an engine the packages of Debian sid |
| MySQL 8.4 | a container; without an engine the packages of Ubuntu 26.04 |
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, get_args

from eventpub.errors import LocalError
from eventpub.local.downloads import MIB, cache_folder, installed, run_once, step, tail
from eventpub.local.servers import (
    DATA,
    MARIADB_OPTIONS,
    Database,
    Programs,
    as_root,
    mariadb_of_maven,
)
from tests.servers.packages import Packages, program, require_apt, unpack

MariaDBVersion = Literal["10.11", "11.4", "11.8"]
MySQLVersion = Literal["8.4", "9"]

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
_MYSQL_OPTIONS = ["--mysqlx=OFF", "--performance-schema=OFF"]


def mariadb(
    directory: Path,
    *,
    version: MariaDBVersion = "11.4",
    port: int | None = None,
    options: Sequence[str] = (),
    time_zone: str | None = None,
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
        programs = mariadb_of_maven()
    else:
        name = f"MariaDB {version}"
        programs = _mariadb_of_packages(name, _MARIADB[version])
    options = [*_offset(time_zone), *options]
    return _started(Database(directory, port, options, programs), time_zone)


def mysql(
    directory: Path,
    *,
    version: MySQLVersion = "9",
    port: int | None = None,
    options: Sequence[str] = (),
    time_zone: str | None = None,
) -> Database:
    """Starts a MySQL whose data live in `directory`; the arguments are those of `mariadb`.

    Raises:
        LocalError: `local.network`, `local.disk_full`, `local.unsupported_platform`,
            `local.start_failed`.
    """
    options = [*_offset(time_zone), *options]
    if _container_engine_answers():
        container = _MySQLContainer(directory, port, options, f"mysql:{version}")
        return _started(container, time_zone)
    programs = _mysql_of_packages(f"MySQL {version}", _MYSQL[version])
    return _started(Database(directory, port, options, programs), time_zone)


def _started(server: Database, time_zone: str | None) -> Database:
    server.environment |= _zone(time_zone)
    server.start()
    return server


DATABASES: dict[str, tuple[Callable[..., Database], Sequence[str]]] = {
    "mysql": (mysql, get_args(MySQLVersion)),
    "mariadb": (mariadb, get_args(MariaDBVersion)),
}
"""What starts a server, and the versions that there are."""


def another(server: Database, directory: Path, *, options: Sequence[str] = ()) -> Database:
    """Starts another server of the same programs, whose data live in `directory`.

    Raises:
        LocalError: `local.unsupported_platform`: they run in containers, which do not reach
            one another; `local.disk_full`, `local.start_failed`.
    """
    if not isinstance(server, _MySQLContainer):
        return _started(Database(directory, None, options, server.programs), None)
    raise LocalError(
        "local.unsupported_platform",
        f"{server.name} cannot have a replica on this machine",
        where="platform",
        suggestion="use MariaDB, or a machine without a container engine",
    )


def _mariadb_of_packages(name: str, packages: Packages) -> Programs:
    def command(folder: Path) -> list[str]:
        usr = folder / "usr"
        texts = next(usr.glob("share/*/english")).parent
        return [
            *(*program(folder, "usr/sbin/mariadbd"), "--no-defaults", *as_root()),
            *(f"--basedir={usr}", f"--lc-messages-dir={texts}"),
            *(f"--character-sets-dir={texts / 'charsets'}", f"--plugin-dir={_plugins(usr)}"),
        ]

    def make_data(folder: Path, data: Path) -> None:
        data.mkdir()
        texts = next((folder / "usr").glob("share/*/english")).parent
        parts = ["system_tables", "performance_tables", "system_tables_data", "sys_schema"]
        scripts = [next(texts.glob(f"m*_{part}.sql")).read_text() for part in parts]
        first = "CREATE DATABASE mysql;\nUSE mysql;\nSET @auth_root_socket = NULL;\n"
        run_once(
            [*command(folder), f"--datadir={data}", "--bootstrap", "--skip-name-resolve"],
            text=first + "\n".join(scripts),
        )

    return _of_packages(name, packages, command, make_data, options=MARIADB_OPTIONS)


def _mysql_of_packages(name: str, packages: Packages) -> Programs:
    def command(folder: Path) -> list[str]:
        usr = folder / "usr"
        return [
            *(*program(folder, "usr/sbin/mysqld"), "--no-defaults", *as_root()),
            *(f"--basedir={usr}", "--secure-file-priv=NULL"),
            *(f"--lc-messages-dir={usr / 'share/mysql'}", f"--plugin-dir={_plugins(usr)}"),
            f"--character-sets-dir={usr / 'share/mysql/charsets'}",
        ]

    def make_data(folder: Path, data: Path) -> None:
        data.mkdir()
        run_once([*command(folder), f"--datadir={data}", "--initialize-insecure"])
        (data / "auto.cnf").unlink()  # the server's own id, to be made anew by each copy

    return _of_packages(name, packages, command, make_data, options=_MYSQL_OPTIONS)


def _of_packages(
    name: str,
    packages: Packages,
    command: Callable[[Path], list[str]],
    make_data: Callable[[Path, Path], None],
    *,
    options: Sequence[str],
) -> Programs:
    if not (cache_folder() / packages.cached).is_dir():
        require_apt(packages, name)

    def build(folder: Path) -> None:
        unpack(packages, folder, name)
        make_data(folder, folder / DATA)

    folder = installed(packages.cached, needs=1200 * MIB, build=build)
    return Programs(name, [*command(folder), *options], folder / DATA)


def _plugins(usr: Path) -> Path:
    return usr / "lib/mysql/plugin"


class _MySQLContainer(Database):
    """MySQL's official image; its data are in the folder, its client process is the child."""

    def __init__(
        self,
        directory: Path,
        port: int | None,
        options: Sequence[str],
        image: str,
    ) -> None:
        programs = Programs(f"MySQL (container {image})", _MYSQL_OPTIONS, Path())
        super().__init__(directory, port, options, programs)
        self._image = image
        self._container = f"eventpub-mysql-{uuid.uuid4().hex[:12]}"
        if subprocess.run(
            ["docker", "image", "inspect", image], capture_output=True, check=False
        ).returncode:
            with step(f"pulling {image}"):
                _pull(image)

    def _command(self) -> Sequence[str]:
        data = self.directory / "data"
        data.mkdir(exist_ok=True)
        zone = [f"--env=TZ={self.environment['TZ']}"] if "TZ" in self.environment else []
        return [
            *("docker", "run", "--rm", f"--name={self._container}"),
            f"--user={os.getuid()}:{os.getgid()}",
            *(f"--publish=127.0.0.1:{self.port}:3306", f"--volume={data}:/var/lib/mysql"),
            f"--volume={self.directory}:{self.directory}",  # files that options name
            *("--env=MYSQL_ALLOW_EMPTY_PASSWORD=yes", "--env=MYSQL_ROOT_HOST=%"),
            *("--env=MYSQL_DATABASE=eventpub", *zone, self._image),
            *(*self.programs.command, *self._options),
        ]

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


def _is_offset(zone: str | None) -> bool:
    return zone is not None and zone[:1] in {"+", "-"}


def _offset(zone: str | None) -> list[str]:
    return [f"--default-time-zone={zone}"] if _is_offset(zone) else []


def _zone(zone: str | None) -> dict[str, str]:
    """Variables that make a name the system's zone."""
    return {} if zone is None or _is_offset(zone) else {"TZ": zone, **_zone_folder()}


def _zone_folder() -> dict[str, str]:
    """Where the rules of time zones are on a system that has none of its own."""
    if Path("/usr/share/zoneinfo").is_dir():
        return {}
    package = importlib.util.find_spec("tzdata")
    if package is None or package.origin is None:
        return {}
    return {"TZDIR": str(Path(package.origin).parent / "zoneinfo")}
