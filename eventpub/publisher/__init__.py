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

    SIGTERM and SIGINT finish the transactions in flight, then this returns (if called in the main
    thread); a second signal ends the process at once, like a kill.

    Args:
        available_now: publish every event committed before the call, holds included, then return.
        on_progress: called about every second, and when something is wrong.

    Returns:
        The totals at the end.

    Raises:
        StoreError, SinkError, StateError, ConfigError: anything wrong at the start, and later what
            waiting cannot fix.
    """
    if config.run.engine == "threads":
        from eventpub.publisher.publisher import Publisher as Engine
    else:
        from eventpub.spark.publisher import SparkPublisher as Engine
    return Engine(config, available_now, on_progress or (lambda _: None)).run()
