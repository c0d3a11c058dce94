"""Text for a terminal."""

from __future__ import annotations

import os
import re
import sys

from eventpub.masking import mask

CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufff9-\ufffb]"
)
"""Characters that move the cursor, colour, ring or reorder text; not newlines and tabs."""


def can_redraw() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") not in {"dumb", "unknown"}


def printable(text: str) -> str:
    return CONTROLS.sub(lambda found: escaped(found[0]), text)


def escaped(character: str) -> str:
    return f"\\x{ord(character):02x}" if character < "\u0100" else f"\\u{ord(character):04x}"


def for_people(text: str) -> str:
    return printable(mask(text))


def counted(number: int, one: str, many: str | None = None) -> str:
    """``1 event``, ``2 events``, ``1,000 events``; the default of `many` is `one` with an "s"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def named_versions(first: int, last: int) -> str:
    return f"version {first}" if first == last else f"versions {first} to {last}"
