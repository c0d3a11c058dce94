"""Commands in processes of their own that are forked from one that has imported eventpub.

As installed, most of a command's CPU time is its imports (1.4 of 1.8 s on a slow machine), and the
tests of whole publishers run more than a thousand. `eventpub run` is always the installed program;
tests/cli starts commands as installed.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

_MODULES = [
    __name__,
    "eventpub.cli.terminal",
    "eventpub.ops.dead",
    "eventpub.ops.doctor",
    "eventpub.ops.gaps",
    "eventpub.ops.replay",
    "eventpub.ops.status",
    "eventpub.ops.trace",
    "eventpub.ops.verify",
    "eventpub.settings",
]
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(_MODULES)


def run(
    arguments: list[str], environment: dict[str, str], folder: Path, timeout: float
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run([EVENTPUB, *arguments], capture_output=True, …)`."""
    with tempfile.TemporaryDirectory(dir=folder) as files:
        outputs = Path(files, "stdout"), Path(files, "stderr")
        process = _processes.Process(target=_main, args=(arguments, environment, folder, outputs))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(["eventpub", *arguments], timeout)
        texts = [path.read_text(encoding="utf-8") for path in outputs]
        return subprocess.CompletedProcess(["eventpub", *arguments], process.exitcode, *texts)


def _main(
    arguments: list[str], environment: dict[str, str], folder: Path, outputs: tuple[Path, Path]
) -> None:
    for descriptor, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["eventpub", *arguments]
    from eventpub import cli

    sys.exit(cli.main())
