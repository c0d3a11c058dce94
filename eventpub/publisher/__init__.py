"""One run of the publisher: prepare, start the engine, wait, stop cleanly."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eventpub.config import Config
    from eventpub.coordinator.progress import Progress

__all__ = ["run"]


def run(
    config: Config,
    *,
    available_now: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> Progress:
    """Publish until stopped.

    SIGTERM and SIGINT finish the transactions in work, then this returns (when called in the main
    thread); a second one ends the process at once, as a kill would.

    Args:
        config: the whole configuration.
        available_now: publish every event that was committed before the call, holds included, then
            return.
        on_progress: called about every second, and when something is wrong.

    Returns:
        The totals at the end.

    Raises:
        StoreError, SinkError, StateError, ConfigError: what waiting cannot fix, and anything that
            is wrong when it starts.
    """
    if config.run.engine == "threads":
        from eventpub.publisher.publisher import Publisher as Engine
    else:
        from eventpub.spark.publisher import SparkPublisher as Engine
    return Engine(config, available_now, on_progress or (lambda _: None)).run()
