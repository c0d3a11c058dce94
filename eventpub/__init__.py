"""eventpub publishes the event table of MySQL or MariaDB to Kafka: complete, exactly once, in order
per aggregate.

`append`, `NewEvent` and `VersionConflict` are imported lazily, so ``import eventpub`` is fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eventpub.errors import VersionConflict
    from eventpub.sources.mysql.appending import NewEvent, append

__version__ = "0.1.0"

__all__ = ["NewEvent", "VersionConflict", "__version__", "append"]


def __getattr__(name: str) -> Any:
    if name in {"append", "NewEvent"}:
        from eventpub.sources.mysql import appending

        return getattr(appending, name)
    if name == "VersionConflict":
        from eventpub.errors import VersionConflict

        return VersionConflict
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
