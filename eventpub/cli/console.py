"""Where people's answers are drawn: styles are ours, and text from outside is only text.

Imported when something is drawn: rich takes a while to load.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table as RichTable
from rich.text import Text

from eventpub.cli.output import Part, Span, Table
from eventpub.terminal import CONTROLS, escaped, for_people


class SafeConsole(Console):
    """A console that escapes control characters in whatever text it is given.

    Who lays text out by its width escapes it before, by `for_people`: here it is too late for that.
    Nor is anything markup or the name of an emoji: ids may contain ``[red]`` or ``:bug:``.
    """

    def __init__(self, file: IO[str], **options: Any) -> None:
        environ = {k: v for k, v in os.environ.items() if k not in _SIZES or _is_size(v)}
        options |= {"highlight": False, "markup": False, "emoji": False}
        super().__init__(file=file, _environ=environ, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(for_people(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        if isinstance(renderable, Text):
            renderable = _printable(renderable)
        return super().render(renderable, options)


_SIZES = {"COLUMNS", "LINES"}
_GAP = 2


def _is_size(value: str) -> bool:
    """Whether a variable says how large a terminal is; in a width of 0 nothing would be drawn."""
    return value.isascii() and value.isdigit() and int(value) > 0


def has_width() -> bool:
    """Whether the width of the text was set explicitly."""
    return _is_size(os.environ.get("COLUMNS", ""))


def _printable(text: Text) -> Text:
    if not CONTROLS.search(text.plain):
        return text
    made, at = text.blank_copy(), 0
    for found in CONTROLS.finditer(text.plain):
        made.append_text(text[at : found.start()]).append(escaped(found[0]))
        at = found.end()
    return made.append_text(text[at:])


def drawn(part: Part) -> RenderableType:
    return _Rows(part) if isinstance(part, Table) else _text(*part.spans)


def _text(*spans: Span) -> Text:
    pairs = [(span, "") if isinstance(span, str) else span for span in spans]
    return Text.assemble(*[(for_people(text), style) for text, style in pairs])


class _Rows:
    def __init__(self, table: Table) -> None:
        self._table = table
        self._rows = [[_text(cell) for cell in row] for row in table.rows]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names, title = self._table.names, self._table.title
        columns = zip(names, *self._rows, strict=True)
        widths = [max([len(name), *(c.cell_len for c in cells)]) for name, *cells in columns]
        if not console.is_terminal or sum(widths) + _GAP * len(widths) <= options.max_width:
            table = RichTable(title=title or None, title_justify="left", box=None, pad_edge=False)
            for name in names:
                table.add_column(name, overflow="fold")
            for row in self._rows:
                table.add_row(*row)
            yield table
            return
        if title:
            yield Text(title, style="italic")
        for row in self._rows:
            named = [
                Text(f"{name} ").append_text(cell) if name else cell
                for name, cell in zip(names, row, strict=True)
                if cell.plain
            ]
            yield named[0]
            if named[1:]:
                yield Padding(Text(", ").join(named[1:]), (0, 0, 0, 2))
