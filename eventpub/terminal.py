"""Whether somebody looks at a terminal where lines can be drawn again."""

from __future__ import annotations

import os
import sys


def can_redraw() -> bool:
    """Whether stderr is a terminal that can; a dumb one (TERM=dumb, of editors) gets lines."""
    return sys.stderr.isatty() and os.environ.get("TERM") not in {"dumb", "unknown"}
