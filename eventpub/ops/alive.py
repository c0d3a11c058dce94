"""Whether the publisher of a state directory runs and sees its database, for a container's health.

    python -m eventpub.ops.alive [STATE_DIR]

Exit status 0 or 1, with one line that says why. It connects to nothing and takes no lock.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from eventpub.spark.state import StateDir

_SILENT = 60.0
"""Seconds without an answer of the database after which the publisher does not work."""


def alive(folder: Path) -> tuple[bool, str]:
    """Whether it does, and the line."""
    if not folder.is_dir():
        return False, f"there is no state directory {folder}"
    state = StateDir(folder)
    if not state.is_running():
        return False, f"no publisher has {folder}"
    seen = state.seen_database()
    if seen is None:
        return False, "the publisher has not seen the database yet"
    age = max(0.0, time.time() - seen)
    return age < _SILENT, f"the publisher has seen the database {age:.0f} s ago"


if __name__ == "__main__":
    named = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("EVENTPUB_APP__STATE_DIR")
    fine, line = alive(Path(named or "state"))
    print(line)
    sys.exit(0 if fine else 1)
