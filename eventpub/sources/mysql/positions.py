"""Where reading starts."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from eventpub.config import Read

BEGINNING = 0
"""Before every event, µs."""


def start_position(read: Read, now: Callable[[], int]) -> int:
    """The position before the first event, µs: events created at or before it are baseline."""
    if read.start == "beginning":
        return BEGINNING
    if read.start == "now":
        return now()
    started = datetime.fromisoformat(read.start) - datetime(1970, 1, 1, tzinfo=UTC)
    return started // timedelta(microseconds=1)
