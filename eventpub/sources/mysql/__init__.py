"""MySQL and MariaDB: every SQL statement of eventpub stands in this package.

It knows nothing of Kafka, Spark or the index. `EventStore` is the `Source`: it finds out what the
event table looks like (`discover`) and reads it. `Watermark` follows open transactions, `append`
helps applications to write, `migrate` makes the table, `propose` finds it, and `checks` says what
is wrong with it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from eventpub.sources.mysql.appending import NewEvent, append
from eventpub.sources.mysql.events import EventStore
from eventpub.sources.mysql.layout import Layout
from eventpub.sources.mysql.watermark import Watermark

if TYPE_CHECKING:
    from eventpub.sources.mysql.checking import checks
    from eventpub.sources.mysql.migrating import migrate, would_execute
    from eventpub.sources.mysql.proposing import propose

__all__ = [
    "EventStore",
    "Layout",
    "NewEvent",
    "Watermark",
    "append",
    "checks",
    "migrate",
    "propose",
    "would_execute",
]


# Alembic is not for the tasks that read
_LATER = {
    "checks": "checking",
    "migrate": "migrating",
    "propose": "proposing",
    "would_execute": "migrating",
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
