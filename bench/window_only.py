"""`eventpub` that looks up no missing version: what a reader loses that only moves a window.

It loses events, so it is no setting of the publisher. Only for shards that are threads of the
publisher's process (`run.engine = "threads"`): Spark's workers would not see it.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from eventpub.__main__ import main as eventpub
from eventpub.admission import Rules
from eventpub.shard.assignment import Assignment


def program(folder: Path) -> str:
    """An executable file in `folder` that takes the arguments of `eventpub`."""
    file = folder / "window-only"
    clone = str(Path(__file__).parents[1])
    file.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {clone!r})\n"
        "from bench.window_only import main\nsys.exit(main())\n"
    )
    file.chmod(0o755)
    return str(file)


def main() -> int:
    """As `eventpub`."""
    whole = Assignment.rules

    def rules(self: Assignment) -> Rules:
        return replace(whole(self), backtrack=False)

    Assignment.rules = rules  # type: ignore[method-assign]
    return eventpub()
