"""MySQL and MariaDB: every SQL statement of eventpub is in this package.

It knows nothing of Kafka, Spark or the index. `EventStore` is the `Source`: it finds out what the
event table looks like (`discover`) and reads it. `Watermark` follows open transactions, `append`
helps applications to write. Tasks need no more, so the rest is imported from its modules:
`migrating` makes the table, `proposing` finds it, and `checking` says what is wrong with it.
"""

from __future__ import annotations

from eventpub.sources.mysql.appending import NewEvent, append
from eventpub.sources.mysql.events import EventStore
from eventpub.sources.mysql.layout import Layout
from eventpub.sources.mysql.watermark import Watermark

__all__ = ["EventStore", "Layout", "NewEvent", "Watermark", "append"]
