"""Turns that several readers of `innodb_trx` take, so that each of them sees it refreshed.

Readers that keep the same pace would keep each other from ever seeing anything, and random pauses
alone leave eight of them without a fresh answer for a minute. So after an answer that is not fresh
they take turns for a while, by a named lock: its holder waits until InnoDB refreshes, polls, and
lets it go.
"""

from __future__ import annotations

import random
import time

import pymysql.err

from eventpub.sources.mysql.connection import Connection, is_alive, run

REFRESH = 0.105
"""Seconds without a reader after which InnoDB refreshes what it shows, and some."""
_LOCK = "eventpub.watermark"
_FOR = 10.0
"""Seconds for which readers take turns after they have met."""
_LONGEST = 1.0
"""Seconds after which a reader that has the turn, and does not poll, is no longer waited for."""
_AWAITS = 0.02, 0.05
"""Seconds between two questions for the turn, at least and at most."""
_AFTER_OWN = 0.06
_WITHOUT = REFRESH, 4 * REFRESH
"""Seconds between two polls where there are no such locks, likewise."""


class Turns:
    """The turns of one reader; all times are seconds."""

    def __init__(self) -> None:
        self._until = float("-inf")
        self._are_possible = True
        self._waits_since: float | None = None
        self._is_ours = False

    def wait(self, connection: Connection) -> float | None:
        """For how long to wait before asking again; None: it is the reader's turn to poll."""
        now = time.monotonic()
        if self._is_ours or now > self._until:
            return None
        try:
            [(is_free,)] = run(connection, f"SELECT GET_LOCK('{_LOCK}', 0)")
        except pymysql.err.DatabaseError:
            if not is_alive(connection):
                raise
            self._are_possible = False  # a cluster may know of no such locks
            return None
        if is_free:
            self._is_ours, self._waits_since = True, None
            return REFRESH
        self._until = now + _FOR
        self._waits_since = self._waits_since or now
        if now - self._waits_since > _LONGEST:
            self._waits_since, self._until = None, float("-inf")
            return None
        return random.uniform(*_AWAITS)

    def polled(self, connection: Connection) -> None:
        """The turn is over."""
        if self._is_ours:
            self._is_ours = False
            run(connection, f"SELECT RELEASE_LOCK('{_LOCK}')")

    def lost(self) -> None:
        """The connection is gone, and the lock with it."""
        self._is_ours = False

    def pause(self, *, is_fresh: bool) -> float:
        """For how long to wait after an answer."""
        now = time.monotonic()
        if is_fresh:
            return REFRESH if now > self._until else _AFTER_OWN
        if self._are_possible:
            self._until = now + _FOR
            return random.uniform(*_AWAITS)
        self._until = float("-inf")
        return random.uniform(*_WITHOUT)
