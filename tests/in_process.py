"""A command that is run in the process of the tests, which has others to run."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog

from eventpub import masking


@contextmanager
def commands_run_in(folder: Path) -> Iterator[pytest.MonkeyPatch]:
    """In a folder, no variable of eventpub set; what a command changes is put back."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    root = logging.getLogger()
    logs = root.handlers[:], root.filters[:], root.level
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name in list(os.environ):
            if name.startswith("EVENTPUB_"):
                patch.delenv(name)
        yield patch
    forget_secrets()
    structlog.reset_defaults()
    root.handlers[:], root.filters[:] = logs[:2]
    root.setLevel(logs[2])
    for number, handler in handlers.items():
        signal.signal(number, handler)


def forget_secrets() -> None:
    """What was remembered to be masked."""
    masking._lasting.clear()
    masking._passing.clear()
    masking._forms = (None, [])
