"""The boundary moves on while a micro-batch runs, and the shards' tasks follow it.

A micro-batch costs Spark 50 to 120 ms beyond its work: its two logs, two jobs' planning, workers
that are woken. So a task that has published its window goes on with the next one, as soon as the
source has found it; the latency of an event is then that of the publishing. It ends when nothing
new has come for a moment, when the driver wants another batch (a recount has found something, a
user asks, it shall stop), and after ten seconds. The bounds come from one place, the source, since
only one process may ask for open transactions; they go by a file in the state directory, as does
what the shards have done so far. A task on a machine that does not see the file publishes one
window per batch.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eventpub.errors import EventpubError

_EVERY = 0.05


class MovingBoundary:
    """Looks for the next window's end in a thread, from `go` to `rest`, and writes it to a file.

    Args:
        file: takes what `look` found last; replaced as a whole.
        look: the facts of the next window that begins behind a position: ``{"upto": µs, …}``, or
            None where there are no rows. Called by the thread, never while `rest` is in force.
    """

    def __init__(self, file: Path, look: Callable[[int], dict[str, Any] | None]) -> None:
        self._file = file
        self._look = look
        self._end = 0
        self._going = threading.Event()
        self._busy = threading.Lock()
        self._thread: threading.Thread | None = None

    def go(self, end: int) -> None:
        """A micro-batch begins, whose window ends there."""
        self._end = end
        self._going.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="eventpub-boundary", daemon=True)
            self._thread.start()

    def rest(self) -> None:
        """It has ended; returns when nothing is looked for any more."""
        self._going.clear()
        with self._busy:
            pass

    def _run(self) -> None:
        while self._going.wait():
            time.sleep(_EVERY)
            with self._busy:
                if self._going.is_set():
                    self._move()

    def _move(self) -> None:
        try:
            found = self._look(self._end)
        except EventpubError:  # who asks for the next window meets it, too
            self._going.clear()
            return
        if found is not None and found["upto"] > self._end:
            partial = self._file.with_suffix(".moving")
            try:
                partial.write_text(json.dumps(found))
                partial.rename(self._file)
            except OSError:  # a full disk: the batch's own window is published all the same
                self._going.clear()
                return
            self._end = found["upto"]
