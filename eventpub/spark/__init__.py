"""The streaming source, the micro-batch job, shard placement, checkpoint.

The only package that knows store, index and sink together; a shard's way through a window is one
page, `shard.py`. What it exports is imported when it is asked for: Spark's workers start in this
package and need none of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eventpub.spark.progress import Progress
    from eventpub.spark.publisher import run
    from eventpub.spark.source import EventStoreDataSource

__all__ = ["EventStoreDataSource", "Progress", "run"]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    homes = {"EventStoreDataSource": "source", "Progress": "progress", "run": "publisher"}
    if name not in homes:
        raise AttributeError(name)
    return getattr(import_module(f"eventpub.spark.{homes[name]}"), name)
