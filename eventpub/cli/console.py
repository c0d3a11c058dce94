"""Where people's answers are drawn: styles are ours, and text from outside is only text.

Imported when something is drawn: rich takes a while to load.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from eventpub.terminal import CONTROLS, escaped, for_people


class SafeConsole(Console):
    """A console that escapes control characters in whatever text it is given.

    Who lays text out by its width escapes it before, by `for_people`: here it is too late for that.
    Nor is anything markup or the name of an emoji: ids may contain ``[red]`` or ``:bug:``.

    Args:
        file: where to.
        options: others of rich's.
    """

    def __init__(self, file: IO[str], **options: Any) -> None:
        environ = {k: v for k, v in os.environ.items() if k not in _SIZES or _is_size(v)}
        options |= {"highlight": False, "markup": False, "emoji": False}
        super().__init__(file=file, _environ=environ, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Text of a string, without secrets."""
        return super().render_str(for_people(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """What is written of something that can be drawn."""
        if isinstance(renderable, Text):
            renderable = _printable(renderable)
        return super().render(renderable, options)


_SIZES = {"COLUMNS", "LINES"}


def _is_size(value: str) -> bool:
    """Whether a variable says how large a terminal is; in a width of 0 nothing would be drawn."""
    return value.isascii() and value.isdigit() and int(value) > 0


def has_width() -> bool:
    """Whether somebody has said how wide the text is to be."""
    return _is_size(os.environ.get("COLUMNS", ""))


def _printable(text: Text) -> Text:
    if not CONTROLS.search(text.plain):
        return text
    made, at = text.blank_copy(), 0
    for found in CONTROLS.finditer(text.plain):
        made.append_text(text[at : found.start()]).append(escaped(found[0]))
        at = found.end()
    return made.append_text(text[at:])
