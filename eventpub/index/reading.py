"""Indexes as others see them: of a shard that another process has open, or that nobody has."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from eventpub.admission import Hold
from eventpub.errors import StateError
from eventpub.index.database import checked_marks, items_of, read_only
from eventpub.index.holds import unpacked
from eventpub.index.identity import IDENTITY, require_known_format

Pending: TypeAlias = tuple[list[Hold], dict[str, list[tuple[int, int]]]]
"""Open holds, and skipped versions that have not turned up since, per aggregate."""


@dataclass(frozen=True)
class Summary:
    """What an index says of its shard.

    Attributes:
        position, baseline: as of `Index`.
        low: from where a shard without an index must read again, µs; None: as `position`.
    """

    position: int | None
    low: int | None
    baseline: int | None


def glance(directory: Path) -> Pending:
    """What is pending in an index that another process may have open; nothing where there is none.

    Raises:
        StateError: index.newer_format, index.corrupt, ….
    """
    for _ in range(5):  # files go while another process writes
        with suppress(StateError):
            return _glance(directory)
        time.sleep(0.05)
    return _glance(directory)


def _glance(directory: Path) -> Pending:
    with read_only(directory) as reader:
        if reader is None:
            return [], {}
        require_known_format(items_of(reader, IDENTITY, directory), directory)
        holds = [
            unpacked(key[1:].decode(), value) for key, value in items_of(reader, b"h", directory)
        ]
        return holds, skipped_in(items_of(reader, b"s", directory))


def skipped_in(items: Iterator[tuple[bytes, bytes]]) -> dict[str, list[tuple[int, int]]]:
    """The skipped versions, of their keys and values."""
    return {
        key[1:].decode(): [(first, last) for first, last in json.loads(value)]
        for key, value in items
    }


def summary(directory: Path) -> Summary | None:
    """Of an index that nobody has open; None where there is none, or none that can be used."""
    try:
        with read_only(directory) as reader:
            if reader is None:
                return None
            require_known_format(items_of(reader, IDENTITY, directory), directory)
            checked_marks(reader, directory)
            facts: dict[str, Any] = {
                k[1:].decode(): json.loads(v) for k, v in items_of(reader, b"m", directory)
            }
            since = [unpacked("", v).since for _, v in items_of(reader, b"h", directory)]
    except StateError:
        return None
    if "offsets" not in facts:
        return None
    position = facts.get("position")
    low = None if position is None else min([position, *(at - 1 for at in since)])
    return Summary(position, low, facts.get("baseline"))
