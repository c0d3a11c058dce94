"""Durations and times as text; the clock; retries with backoff.

Durations are whole microseconds; times are microseconds since 1970, UTC.
"""

from __future__ import annotations

import logging
import re
import time
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol

from eventpub.errors import EventpubError

_UNITS = {
    "us": 1,
    "ms": 1_000,
    "s": 1_000_000,
    "m": 60_000_000,
    "h": 3_600_000_000,
    "d": 86_400_000_000,
}

ZONES_DIFFER = 26 * _UNITS["h"]
"""The most by which local times of two zones differ, µs."""

_DURATION = "a number and a unit (us, ms, s, m, h or d), such as '250ms' or '1.5s'; at most 365d"
_LONGEST = 365 * _UNITS["d"]


def parse_duration(value: Any) -> int:
    """Microseconds of a duration such as ``"250ms"``, ``"1.5s"``, ``"5m"`` or ``"7d"``.

    A bare number other than zero is refused, since its unit would be a guess.
    """
    text = str(value).strip()
    if text in {"0", "0.0"}:
        return 0
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|ms|s|m|h|d)", text)
    micros = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not match or micros > _LONGEST:
        raise ValueError(_DURATION)
    return round(micros)


def format_duration(micros: int) -> str:
    for unit in ("d", "h", "m", "s", "ms", "us"):
        if micros and micros % _UNITS[unit] == 0:
            return f"{micros // _UNITS[unit]}{unit}"
    return "0"


_RFC_3339 = re.compile(
    r"\d{4}-\d{2}-\d{2}[Tt ]\d{2}:\d{2}:\d{2}(?:\.\d{1,6})?(?:[Zz]|[+-]\d{2}:\d{2})"
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_FIRST, _LAST = (
    (datetime(year, month, day, tzinfo=UTC) - _EPOCH) // timedelta(microseconds=1)
    for year, month, day in ((1, 1, 1), (9999, 12, 31))
)


def parse_time(value: Any) -> int:
    """Microseconds since 1970, UTC, of an RFC 3339 time with its zone, or ValueError."""
    text = value.isoformat() if isinstance(value, datetime) else str(value).strip()
    form = "an RFC 3339 time with its zone, such as 2026-01-31T09:30:00Z"
    if not _RFC_3339.fullmatch(text):
        raise ValueError(form)
    try:
        # in UTC, too, it must be within the years 1 to 9999
        parsed = datetime.fromisoformat(text.upper()).astimezone(UTC)
    except (ValueError, OverflowError):
        raise ValueError(form) from None
    return (parsed - _EPOCH) // timedelta(microseconds=1)


def format_time(micros: int) -> str:
    """RFC 3339, UTC, six decimals: ``2026-01-31T09:30:00.000000Z``; clamped to years 1 to 9999."""
    since = min(max(micros, _FIRST), _LAST)
    text = (_EPOCH + timedelta(microseconds=since)).isoformat(timespec="microseconds")
    return text.replace("+00:00", "Z")


class Clock(Protocol):
    """A source of time; the module `time` is one."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary moment; never goes back."""

    def time(self) -> float:
        """Seconds since 1970, UTC."""

    def sleep(self, seconds: float, /) -> None: ...


SYSTEM_CLOCK: Clock = time


OUTAGE = 600.0
"""Seconds for which to retry while the database or the broker is unavailable."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 5.0
_SAID_EVERY = 60.0


class Patience:
    def __init__(self, what: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self._what, self._clock = what, clock
        self._pause = _FIRST_PAUSE
        self._since: float | None = None
        self._said_at = float("-inf")

    def wait(self, error: EventpubError) -> None:
        """Sleep until the next attempt; raise `error`, the last failure, after `OUTAGE`."""
        now = self._clock.monotonic()
        self._since = now if self._since is None else self._since
        left = self._since + OUTAGE - now
        if left <= 0:
            raise error
        if now - self._said_at >= _SAID_EVERY:
            self._said_at = now
            text = "%s failed; retrying, giving up in %.0f s: %s"
            logging.getLogger("eventpub").warning(text, self._what, left, error.message)
        self._clock.sleep(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
