"""The machine's time, as an argument; the database has one of its own."""

import time
from typing import Protocol


class Clock(Protocol):
    """The module `time` is one."""

    def monotonic(self) -> float:
        """Seconds since some moment; never goes back."""

    def time(self) -> float:
        """Seconds since 1970, UTC."""

    def sleep(self, seconds: float, /) -> None:
        """Return when so many seconds have passed."""


SYSTEM_CLOCK: Clock = time
