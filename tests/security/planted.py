"""Secrets that are planted, and where they are looked for."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

import psutil


@dataclass
class Planted:
    """Secrets by name; keeps where each was found."""

    secrets: Mapping[str, str]
    found: dict[str, set[str]] = field(default_factory=dict)

    def search(self, where: str, text: str | bytes) -> None:
        """Look for all of them in a text, also as a URL or JSON would write them."""
        data = text.encode(errors="replace") if isinstance(text, str) else text
        for name, secret in self.secrets.items():
            for form in {secret, quote(secret, safe=""), secret.encode("unicode_escape").decode()}:
                if form.encode() in data:
                    self.found.setdefault(name, set()).add(where)

    def search_folder(self, folder: Path) -> int:
        """Look into all files below a folder, and at their names; how many there were."""
        files = 0
        for path in folder.rglob("*"):
            self.search(f"the name of {path.name}", str(path.relative_to(folder)))
            with suppress(OSError):  # a socket, or gone
                if path.is_file():
                    self.search(str(path.relative_to(folder)), path.read_bytes())
                    files += 1
        return files


@dataclass
class Processes:
    """All that has run below some processes while they were watched.

    Attributes:
        arguments, environments: of each process, by its id; as they were last.
    """

    arguments: dict[int, set[str]] = field(default_factory=dict)
    environments: dict[int, set[bytes]] = field(default_factory=dict)

    def look(self, roots: list[int]) -> None:
        """At all that run now."""
        for root in roots:
            with suppress(psutil.Error):
                top = psutil.Process(root)
                for process in [top, *top.children(recursive=True)]:
                    self._keep(process.pid)

    def _keep(self, pid: int) -> None:
        with suppress(OSError):
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
            self.arguments.setdefault(pid, set()).add(arguments)
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            self.environments.setdefault(pid, set()).add(environment)

    def seen(self, word: str) -> int:
        """How many processes had this in their arguments."""
        return sum(any(word in a for a in found) for found in self.arguments.values())


@contextmanager
def watched(roots: list[int]) -> Iterator[Processes]:
    """Looks every 250 ms: a look costs CPU time; more roots can be appended."""
    processes, ended = Processes(), threading.Event()

    def work() -> None:
        while not ended.wait(0.25):
            processes.look(list(roots))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield processes
    finally:
        ended.set()
        thread.join(10)
