"""Waiting for a service that is away, for a bounded time."""

from __future__ import annotations

import logging

from eventpub.errors import EventpubError
from eventpub.times import SYSTEM_CLOCK, Clock

OUTAGE = 600.0
"""Seconds for which an outage of the database or the broker is waited for."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 5.0
"""Seconds before a retry; twice as many each time."""

_SAID_EVERY = 60.0
"""Seconds between two lines about one piece of work."""

log = logging.getLogger("eventpub")


class Patience:
    """Pauses between the attempts of one piece of work.

    Args:
        what: the work, for the log.
    """

    def __init__(self, what: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self._what, self._clock = what, clock
        self._pause = _FIRST_PAUSE
        self._since: float | None = None
        self._said_at = float("-inf")

    def wait(self, error: EventpubError) -> None:
        """Wait until the next attempt.

        Args:
            error: of the last one.

        Raises:
            EventpubError: that one, `OUTAGE` after the first.
        """
        now = self._clock.monotonic()
        self._since = now if self._since is None else self._since
        left = self._since + OUTAGE - now
        if left <= 0:
            raise error
        if now - self._said_at >= _SAID_EVERY:
            self._said_at = now
            text = "%s failed; retrying, giving up in %.0f s: %s"
            log.warning(text, self._what, left, error.message)
        self._clock.sleep(self._pause)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
