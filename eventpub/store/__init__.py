"""The database with the event table: every SQL statement of eventpub stands in this package.

It knows nothing of Kafka, Spark or the index: it finds out what the event table looks like
(`EventStore.discover`), says how far it may be read (`poll`), reads it by time (`window`, `page`)
and by key (`fetch`, `below`), counts it again (`counts`,
`keys`), follows open transactions (`Watermark`), appends to it for whoever wants help (`append`),
makes it (`migrate`) and says what is wrong with it (`checks`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from eventpub.sources.base import Poll
from eventpub.store.appending import NewEvent, append
from eventpub.store.events import EventStore
from eventpub.store.layout import Layout
from eventpub.store.watermark import Watermark

if TYPE_CHECKING:
    from eventpub.store.checking import checks
    from eventpub.store.migrating import migrate, would_execute
    from eventpub.store.proposing import propose

__all__ = [
    "EventStore",
    "Layout",
    "NewEvent",
    "Poll",
    "Watermark",
    "append",
    "checks",
    "migrate",
    "propose",
    "would_execute",
]


def __getattr__(name: str) -> Any:
    # Alembic is not for the tasks that read
    if name in {"migrate", "would_execute"}:
        from eventpub.store import migrating

        return getattr(migrating, name)
    if name == "propose":
        from eventpub.store.proposing import propose

        return propose
    if name == "checks":
        from eventpub.store.checking import checks

        return checks
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
