"""Programs from Debian's and Ubuntu's packages, unpacked beside the system instead of installed.

They come with the C library and the loader of their own release, so a program of any release runs
on any Debian or Ubuntu. Packages are checked against the archive's keys; Ubuntu's keys come, where
the system has none, from a package of Debian.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eventpub.errors import LocalError
from eventpub.local.downloads import MIB, run, step

_KEYRINGS = Path("/usr/share/keyrings")
_NEEDLESS = ("usr/share/doc", "usr/share/man", "usr/share/perl", "usr/share/locale")


@dataclass(frozen=True)
class Packages:
    """What to unpack.

    Attributes:
        cached: the folder in the cache.
        suite: of the archive, as `bookworm`.
        names: with all that they depend on.
        alone: without what they depend on.
        size: bytes to download, for the progress.
    """

    cached: str
    archive: Literal["debian", "ubuntu"]
    suite: str
    names: Sequence[str]
    size: int
    alone: Sequence[str] = ()


def require_apt(packages: Packages, what: str) -> None:
    """Raises `local.unsupported_platform` where packages cannot be fetched and checked."""
    missing = [tool for tool in ("apt-get", "dpkg-deb") if shutil.which(tool) is None]
    if not _keyring(packages.archive).exists() and not _keyring("debian").exists():
        missing.append(str(_keyring("debian")))
    if missing:
        raise LocalError(
            "local.unsupported_platform",
            f"the packages of {what} need {', '.join(missing)}, which this machine has not",
            where="platform",
            suggestion="on Ubuntu `sudo apt-get install debian-archive-keyring`; elsewhere use "
            "MariaDB 11.4, or for MySQL start a container engine (docker)",
        )


def _keyring(archive: str) -> Path:
    return _KEYRINGS / f"{archive}-archive-keyring.gpg"


def unpack(packages: Packages, folder: Path, what: str) -> None:
    """Downloads the packages and unpacks them into `folder`.

    Raises:
        LocalError: `local.network`, `local.disk_full`.
    """
    keyring = _keyring(packages.archive)
    with step(f"downloading {what} ({packages.size // MIB} MiB)"):
        if not keyring.exists():
            keys = folder / ".keys"
            keys.mkdir()
            archive = _Apt(folder / ".apt-keys", "trixie", _mirror("debian"), _keyring("debian"))
            archive.fetch([], ["ubuntu-keyring"])
            archive.extract(keys)
            keyring = keys / keyring.relative_to("/")
        apt = _Apt(folder / ".apt", packages.suite, _mirror(packages.archive), keyring)
        apt.fetch(packages.names, packages.alone)
    with step(f"unpacking {what}"):
        apt.extract(folder)
        shutil.rmtree(folder / ".keys", ignore_errors=True)
        for needless in _NEEDLESS:
            shutil.rmtree(folder / needless, ignore_errors=True)


def program(folder: Path, path: str) -> list[str]:
    """The command that runs a program of an unpacked folder with its own libraries."""
    loader = next(
        found for top in ("usr/lib", "lib") for found in (folder / top).glob("*/ld-linux*.so.*")
    )
    libraries = [
        *(folder / top / loader.parent.name for top in ("usr/lib", "lib")),
        *(folder / "usr/lib/mysql/private", folder / "usr/lib"),
    ]
    return [
        *(str(loader), "--library-path", ":".join(map(str, libraries))),
        str(folder / path),
    ]


class _Apt:
    """apt-get with lists, cache and sources of its own."""

    def __init__(self, folder: Path, suite: str, mirror: str, keyring: Path) -> None:
        self._folder = folder
        for part in ("lists/partial", "cache/archives/partial"):
            (folder / part).mkdir(parents=True)
        (folder / "status").touch()
        source = f"deb [signed-by={keyring}] {mirror} {suite} main\n"
        (folder / "sources.list").write_text(source)
        options = {
            "Dir::Etc::sourcelist": folder / "sources.list",
            "Dir::Etc::sourceparts": "/dev/null",
            "Dir::State::Lists": folder / "lists",
            "Dir::State::status": folder / "status",
            "Dir::Cache": folder / "cache",
            "Debug::NoLocking": "1",
            "APT::Sandbox::User": "root",
            "Acquire::Check-Valid-Until": "false",  # a mirror that lags is good enough here
        }
        self._command = ["apt-get", *(f"-o{k}={v}" for k, v in options.items()), "-qq"]

    def fetch(self, names: Sequence[str], alone: Sequence[str]) -> None:
        """Downloads packages with what they depend on, and others `alone`."""
        steps = [["update"]]
        if names:
            with_others = ["--yes", "--download-only", "--no-install-recommends"]
            steps.append(["install", *with_others, *names])
        if alone:
            steps.append(["download", *alone])
        for arguments in steps:
            run(
                [*self._command, *arguments],
                what="the archive of packages",
                folder=self._folder / "cache/archives",
            )

    def extract(self, target: Path) -> None:
        """Unpacks what was downloaded and deletes it."""
        for package in sorted((self._folder / "cache/archives").glob("*.deb")):
            subprocess.run(["dpkg-deb", "-x", str(package), str(target)], check=True)
        shutil.rmtree(self._folder)


def _mirror(archive: str) -> str:
    """The mirror of an archive that this system uses, or the archive itself."""
    for file, prefix in (
        (Path(f"/etc/apt/sources.list.d/{archive}.sources"), "URIs:"),
        (Path("/etc/apt/sources.list"), "deb "),
    ):
        if not file.exists():
            continue
        for line in file.read_text().splitlines():
            if line.startswith(prefix):
                for word in line.removeprefix(prefix).split():
                    if word.startswith("http") and word.rstrip("/").endswith(f"/{archive}"):
                        return word
    if archive == "debian":
        return "http://deb.debian.org/debian"
    if platform.machine() in {"x86_64", "amd64"}:
        return "http://archive.ubuntu.com/ubuntu"
    return "http://ports.ubuntu.com/ubuntu-ports"
