"""Named places where a test may stop a process for good, to kill it there.

Off, and free of cost, unless ``EVENTPUB_FAILPOINT=name:hit:file`` is in the environment: the
`hit`-th time that any process passes `name`, it writes its process id to `file` and waits to be
killed, or until there is a file of that name with ``.go`` added: then it goes on, as a process that
was stalled does. A file that exists already has been used: the failpoint stays off then, so that a
restarted publisher passes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

_SPEC = os.environ.get("EVENTPUB_FAILPOINT")
_hits = 0


def _stop_here(name: str) -> None:
    global _hits  # noqa: PLW0603 (counts over the life of the process)
    assert _SPEC is not None
    wanted, hit, file = _SPEC.split(":", 2)
    if name != wanted or Path(file).exists():
        return
    _hits += 1
    if _hits < int(hit):
        return
    partial = Path(f"{file}.{os.getpid()}")
    partial.write_text(str(os.getpid()))
    partial.rename(file)
    while not Path(f"{file}.go").exists():
        time.sleep(0.05)


def _pass(name: str) -> None:
    del name


failpoint: Callable[[str], None] = _stop_here if _SPEC else _pass
"""Called with the name of the place."""
