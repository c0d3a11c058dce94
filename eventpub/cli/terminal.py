"""What people see: tables that fit, a view that stays in place, how far a long command is.

Views and bars are drawn on stderr, and only on a terminal. They end two columns before its edge: a
line that fills it would have the terminal put the "^C" of Ctrl-C, and then the cursor, on the next.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eventpub.terminal import can_redraw, for_people

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

_SECONDS_BETWEEN_LINES = 10.0
_BAR_WIDTH = 40
_GAP = 2


@contextmanager
def in_place(view: RenderableType, *, stays: bool = False) -> Iterator[None]:
    """Redraw something on the terminal behind stderr; what is logged meanwhile appears above it.

    The terminal is held by a descriptor of its own: while Spark starts, stderr goes to a file.
    """
    from rich.live import Live

    from eventpub.cli.console import SafeConsole

    with os.fdopen(os.dup(2), "w", encoding="utf-8") as terminal:
        shown = SafeConsole(terminal)
        live = Live(
            _Narrower(view),
            console=shown,
            refresh_per_second=4,
            redirect_stdout=False,
            transient=not stays,
        )
        stderr = sys.stderr
        try:
            live.start(refresh=True)
            yield
        finally:
            with suppress(IndexError):  # Ctrl-C has come while it began, and it takes back too much
                live.stop()
            sys.stderr = stderr
            shown.show_cursor()


@dataclass(frozen=True)
class _Narrower:
    view: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from console.render(self.view, options.update_width(max(1, options.max_width - _GAP)))


Show = Callable[[str, "float | None"], None]
"""Takes what is being done, in words, and the part of it that is done, 0 to 1; None: not known."""


@contextmanager
def progress(log: logging.Logger) -> Iterator[Show]:
    """How far a command is: a bar with an estimate on a terminal, log lines elsewhere."""
    if can_redraw():
        with _bar() as show:
            yield show
    else:
        yield Lines(log).show


@contextmanager
def waiting(doing: str, limit: float) -> Iterator[None]:
    """Show on a terminal how long something of unknown progress has been running."""
    from rich.text import Text

    began = time.monotonic()

    class View:
        def __rich__(self) -> Text:
            return Text(f"{doing}: {time.monotonic() - began:.0f} s, at most {limit:.0f} s")

    with in_place(View()) if can_redraw() else nullcontext():
        yield


@contextmanager
def _bar() -> Iterator[Show]:
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining
    from rich.table import Column

    from eventpub.cli.output import console

    words = TextColumn(
        "{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1)
    )
    terminal = console(stderr=True)
    bar = BarColumn(min(_BAR_WIDTH, terminal.width // 4))
    shown = Progress(bar, TaskProgressColumn(), Remaining(), words, console=terminal, expand=True)
    task = shown.add_task("starting", total=None)

    def show(doing: str, done: float | None) -> None:
        total = None if done is None else 1.0
        shown.update(task, total=total, completed=done or 0.0, description=for_people(doing))

    with in_place(shown):
        yield show


class Lines:
    """A log line every ten seconds."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._began = self._said = clock()
        self._done_before: float | None = None

    def show(self, doing: str, done: float | None) -> None:
        now = self._clock()
        if self._done_before is None and done is not None:
            self._began, self._done_before = now, done
        if now - self._said < _SECONDS_BETWEEN_LINES:
            return
        self._said = now
        if done is None or self._done_before is None:
            self._log.info("%s", doing)
            return
        gained = done - self._done_before
        left = (now - self._began) * (1 - done) / gained if gained > 0 else None
        estimate = "" if left is None else f", about {left:.0f} s left"
        self._log.info("%s: %.0f%%%s", doing, 100 * done, estimate)
