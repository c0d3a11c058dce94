"""A flag that a signal handler may set while the thread that it interrupts waits for it."""

from __future__ import annotations

import time

_SLICE = 0.05
"""Seconds by which a wait ends later than the flag is set, at most."""


class StopFlag:
    """As `threading.Event`, without a lock.

    A signal handler runs in the main thread. `Event.set` takes a lock that the main thread may hold
    at that moment, on its way into or out of `Event.wait`: it then waits for itself, for ever.
    """

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        """From now on it is set."""
        self._is_set = True

    def is_set(self) -> bool:
        """Whether it is."""
        return self._is_set

    def wait(self, timeout: float) -> bool:
        """Wait until it is set.

        Args:
            timeout: seconds, at most.

        Returns:
            whether it is set.
        """
        deadline = time.monotonic() + timeout
        while not self._is_set and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, _SLICE))
        return self._is_set
