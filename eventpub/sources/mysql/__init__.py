"""MySQL and MariaDB: every SQL statement of eventpub is in this package."""

from __future__ import annotations

from eventpub.sources.mysql.appending import NewEvent, append
from eventpub.sources.mysql.events import EventStore
from eventpub.sources.mysql.layout import Layout
from eventpub.sources.mysql.watermark import Watermark

__all__ = ["EventStore", "Layout", "NewEvent", "Watermark", "append"]
