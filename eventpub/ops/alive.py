"""Whether the publisher of a state directory runs and sees its database, for a container's health.

    python -m eventpub.ops.alive [STATE_DIR]

Exit status 0 or 1, with one line that says why. It asks the publisher, and nobody else.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from eventpub.ops.asking import ask_running
from eventpub.state import StateDir

_SILENT = 60.0
"""Seconds without an answer of the database after which the publisher does not work."""


def alive(folder: Path) -> tuple[bool, str]:
    """Whether it does, and the line."""
    if not folder.is_dir():
        return False, f"there is no state directory {folder}"
    state = StateDir(folder)
    if not state.is_running():
        return False, f"no publisher has {folder}"
    status = ask_running(state, "status")
    if status is None:
        return False, "the publisher is starting, or does not answer"
    # not the age of the last poll: none is made while no shard is published, whatever keeps them
    database = next(check for check in status["checks"] if check["name"] == "database")
    if database["last_ok"] is None:
        return False, "the publisher has not seen the database yet"
    age = status["at"] - database["last_ok"]
    return age < _SILENT, f"the publisher has seen the database {age:.0f} s ago"


if __name__ == "__main__":
    named = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("EVENTPUB_APP__STATE_DIR")
    fine, line = alive(Path(named or "state"))
    print(line)
    sys.exit(0 if fine else 1)
