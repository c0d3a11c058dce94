"""What an answer for people is made of; `console` draws it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Span: TypeAlias = str | tuple[str, str]
"""Text, or text and its style."""


class Line:
    """A line of an answer for people."""

    def __init__(self, *spans: Span) -> None:
        self.spans = spans


def notes(texts: Iterable[str]) -> list[Line]:
    """A line for each."""
    return [Line(f"note: {text}") for text in texts]


@dataclass
class Table:
    """A table of an answer for people.

    Args:
        names: of the columns; "" names a column that needs none.
        rows: their cells, as many as there are names.
        title: above it.
    """

    names: Sequence[str]
    rows: Sequence[Sequence[Span]]
    title: str = ""


Part: TypeAlias = Line | Table
