"""Numbers with their nouns, as summaries say them."""

from __future__ import annotations


def counted(number: int, one: str, many: str | None = None) -> str:
    """``1 event``, ``2 events``, ``1,000 events``.

    Args:
        one: what follows the number 1.
        many: what follows any other number; by default `one` with an "s".
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def named_versions(first: int, last: int) -> str:
    """``version 3``, ``versions 3 to 5``."""
    return f"version {first}" if first == last else f"versions {first} to {last}"
