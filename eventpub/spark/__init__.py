"""Spark: the session, the leases of shards to its tasks, and a streaming source for one's own job.

What it exports is imported when it is asked for: Spark's workers start in this package and need
none of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eventpub.spark.source import EventStoreDataSource

__all__ = ["EventStoreDataSource"]


def __getattr__(name: str) -> Any:
    if name != "EventStoreDataSource":
        raise AttributeError(name)
    from eventpub.spark.source import EventStoreDataSource

    return EventStoreDataSource
