"""A container's liveness check: ``python -m eventpub.ops.alive [STATE_DIR]``.

It asks only the publisher. One that waits for an unavailable database or broker counts as alive: it
recovers by itself, and a restart would fail. Use `/readyz` to learn whether it works.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from eventpub.ops.asking import ask_running
from eventpub.state import StateDir


def alive(folder: Path) -> tuple[bool, str]:
    if not folder.is_dir():
        return False, f"there is no state directory {folder}"
    state = StateDir(folder)
    if not state.is_running():
        return False, f"no publisher is running on {folder}"
    status = ask_running(state, "status")
    if status is None:
        return False, "the publisher is starting, or does not answer"
    if not status["is_alive"]:
        return False, "the coordinator's loop does not turn"
    return True, f"the publisher is {status['state']}"


if __name__ == "__main__":
    named = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("EVENTPUB_APP__STATE_DIR")
    fine, line = alive(Path(named or "state"))
    print(line)
    sys.exit(0 if fine else 1)
