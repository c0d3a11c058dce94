"""One run of the publisher: prepare, start coordinator and runners, wait, stop cleanly.

It knows coordinator and shards; Spark comes in as a `Placement` (`eventpub.spark` implements it).
What it exports is imported when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eventpub.coordinator.progress import Progress
    from eventpub.publisher.publisher import run

__all__ = ["Progress", "run"]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    homes = {"Progress": "eventpub.coordinator.progress", "run": "eventpub.publisher.publisher"}
    if name not in homes:
        raise AttributeError(name)
    return getattr(import_module(homes[name]), name)
