"""The flag that a signal sets: no moment at which the signal comes makes it wait for itself."""

from __future__ import annotations

import subprocess
import sys
import time

from eventpub.stop_flag import StopFlag

_SIGNALS = """
import random, signal
from eventpub.stop_flag import StopFlag
for _ in range(5000):
    flag = StopFlag()
    signal.signal(signal.SIGALRM, lambda *_: flag.set())
    signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 1e-3))
    while not flag.wait(1e-6):
        pass
"""


def test_a_signal_may_come_at_any_moment_of_a_wait() -> None:
    """With `threading.Event` the loop stands still within some hundred turns."""
    subprocess.run([sys.executable, "-c", _SIGNALS], check=True, timeout=60)


def test_a_wait_ends_with_the_flag_or_its_time() -> None:
    flag = StopFlag()
    began = time.monotonic()
    assert not flag.wait(0.05)
    assert time.monotonic() - began >= 0.04
    assert not flag.is_set()
    flag.set()
    assert flag.wait(60.0)
    assert flag.wait(60.0)
    assert flag.is_set()
