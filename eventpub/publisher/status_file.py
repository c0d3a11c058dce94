"""The status as it is written down, for when the publisher does not run or does not answer."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from typing import Any

from eventpub import __version__
from eventpub.config import Config
from eventpub.coordinator.status import notable
from eventpub.errors import EventpubError
from eventpub.masking import mask_all
from eventpub.state import StateDir

_EVERY = 10.0
"""Seconds after which it is written though no check has changed: `at` says how old it is."""


class StatusFile:
    """Keeps it.

    Args:
        config: the whole configuration.
        state: where it is kept.
        run: number of the run.

    Attributes:
        identity: what of the status names the publisher.
    """

    def __init__(self, config: Config, state: StateDir, run: int) -> None:
        self._state = state
        self._checks: list[tuple[str, str, str]] = []
        self._at = float("-inf")
        self.identity: dict[str, Any] = {
            "version": __version__,
            "app": config.app.id,
            "table": config.store.table,
            "topic": config.sink.topic,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "run": run,
            "started_at": round(time.time(), 3),
        }

    def keep(
        self, found: dict[str, Any], error: EventpubError | None = None, *, is_over: bool = False
    ) -> None:
        """Write a status down, where a check has changed, or the file is old, or it is over.

        Args:
            error: why it is over.
        """
        now, checks = time.monotonic(), notable(found)
        if not is_over and checks == self._checks and now - self._at < _EVERY:
            return
        self._checks, self._at = checks, now
        if is_over:
            why = None if error is None else str(error)
            found |= {"state": "stopped", "stopped_by": why, "stopped_at": time.time()}
        with suppress(EventpubError):  # a full disk is met, and said, by what matters more
            self._state.write(self._state.status_file, mask_all(found))
