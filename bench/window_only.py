"""`eventpub` that looks up no missing version: what a reader loses that only moves a window.

It loses events, so it is no setting of the publisher. Only for shards that are threads of the
publisher's process (`run.engine = "threads"`): Spark's workers would not see it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from eventpub.__main__ import main as eventpub
from eventpub.admission import decide
from eventpub.admission.walk import Walk, Walker


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


def pass_over(
    self: Walker, walk: Walk, version: int, available: dict[int, int], reachable: int
) -> tuple[None, int | None]:
    """The version to continue with behind a missing one: the next that is there."""
    return None, min((other for other in available if other > version), default=None)


def main() -> int:
    """As `eventpub`."""
    decide._holes = lambda *_: []
    Walker._meet = pass_over  # type: ignore[method-assign]
    return eventpub()
