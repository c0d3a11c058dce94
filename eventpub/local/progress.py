"""Says on stderr what is being set up, since a first start downloads for half a minute.

A bar on a terminal, one line at each beginning and end elsewhere. One `Progress` may be shared by
threads that start several servers at once.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from eventpub.terminal import can_redraw

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

Report = Callable[[float], None]
"""Takes the fraction that is done, 0 to 1."""


class Progress:
    """Reports to a person on stderr."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._bars: Bars | None = None

    @contextmanager
    def task(self, what: str) -> Iterator[Report]:
        """Shows `what` while the block runs; the block may report how far it is."""
        if can_redraw():
            with self._bar(what) as report:
                yield report
            return
        started = time.monotonic()
        print(f"eventpub: {what} …", file=sys.stderr, flush=True)
        yield lambda done: None
        seconds = time.monotonic() - started
        print(f"eventpub: {what}: done in {seconds:.1f} s", file=sys.stderr, flush=True)

    @contextmanager
    def _bar(self, what: str) -> Iterator[Report]:
        from rich.console import Console
        from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        with self._lock:
            if self._bars is None:
                self._bars = Bars(
                    SpinnerColumn(),
                    TextColumn("{task.description}"),
                    BarColumn(20),
                    TimeRemainingColumn(elapsed_when_finished=True),
                    console=Console(stderr=True),
                    transient=True,
                    refresh_per_second=4,
                )
                self._bars.start()
            self._open += 1
            bars = self._bars
        row = bars.add_task(what, total=None)
        try:
            yield lambda done: bars.update(row, total=1.0, completed=min(done, 1.0))
        finally:
            with self._lock:
                bars.remove_task(row)
                self._open -= 1
                if self._open == 0:
                    bars.stop()
                    self._bars = None


class Silent(Progress):
    """Reports to nobody."""

    @contextmanager
    def task(self, what: str) -> Iterator[Report]:
        yield lambda done: None


STDERR = Progress()
"""What is used where the caller gives none: shared, because a terminal has room for one."""
