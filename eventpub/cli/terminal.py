"""Terminal output: answers, live views, and progress of long commands.

Imported lazily: rich loads slowly. Views and bars are drawn on stderr, and only on a terminal. They
end two columns before its edge, where the terminal puts a "^C".
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
from rich.progress import TimeRemainingColumn as Remaining
from rich.table import Column
from rich.table import Table as RichTable
from rich.text import Text

from eventpub.cli.output import Line, Part, Span, can_redraw, for_people

_SECONDS_BETWEEN_LINES = 10.0
_BAR_WIDTH = 40
_GAP = 2


class SafeConsole(Console):
    """A console without markup: ids may contain ``[red]``, ``:bug:`` or an escape.

    It does not escape a `Text`: use `for_people` for external text.
    """

    def __init__(self, file: IO[str], **options: Any) -> None:
        environ = {k: v for k, v in os.environ.items() if k not in _SIZES or _is_size(v)}
        options |= {"highlight": False, "markup": False, "emoji": False}
        super().__init__(file=file, _environ=environ, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(for_people(text), **options)


_SIZES = {"COLUMNS", "LINES"}


def _is_size(value: str) -> bool:
    """Whether a variable holds a usable terminal size: with a width of 0, nothing is drawn."""
    return value.isascii() and value.isdigit() and int(value) > 0


def console(*, stderr: bool = False) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    made = SafeConsole(stream, soft_wrap=not stream.isatty())
    if not stream.isatty() and not _is_size(os.environ.get("COLUMNS", "")):
        made.width = 160
    return made


def drawn(part: Part) -> RenderableType:
    if isinstance(part, Line):
        return _text(*part.spans)
    table = RichTable(title=part.title or None, title_justify="left", box=None, pad_edge=False)
    for name in part.names:
        table.add_column(name, overflow="fold")
    for row in part.rows:
        table.add_row(*map(_text, row))
    return table


def _text(*spans: Span) -> Text:
    pairs = [(span, "") if isinstance(span, str) else span for span in spans]
    return Text.assemble(*[(for_people(text), style) for text, style in pairs])


@contextmanager
def in_place(view: RenderableType) -> Iterator[None]:
    # an own descriptor: while Spark starts, stderr goes to a file
    with os.fdopen(os.dup(2), "w", encoding="utf-8") as terminal:
        shown = SafeConsole(terminal)
        narrow = _Narrower(view)
        live = Live(narrow, console=shown, redirect_stdout=False, transient=True)
        stderr = sys.stderr
        try:
            live.start(refresh=True)
            yield
        finally:
            with suppress(IndexError):  # Ctrl-C during its start makes it remove too much
                live.stop()
            sys.stderr = stderr
            shown.show_cursor()


@dataclass(frozen=True)
class _Narrower:
    view: RenderableType

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from console.render(self.view, options.update_width(max(1, options.max_width - _GAP)))


Show = Callable[[str, "float | None"], None]
"""Takes a description of the work and its done fraction, 0 to 1; None: unknown."""


@contextmanager
def progress(log: logging.Logger) -> Iterator[Show]:
    """Shows progress: a bar with an estimate on a terminal, log lines elsewhere."""
    if not can_redraw():
        yield Lines(log).show
        return
    text = "{task.description}"
    words = TextColumn(text, markup=False, table_column=Column(no_wrap=True, ratio=1))
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
    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._said = clock()

    def show(self, doing: str, done: float | None) -> None:
        now = self._clock()
        if now - self._said >= _SECONDS_BETWEEN_LINES:
            self._said = now
            self._log.info("%s%s", doing, "" if done is None else f": {done:.0%}")
