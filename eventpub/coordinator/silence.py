"""Runners that have work and a connection, and of which nothing is heard.

Such a one is frozen (its process was stopped, or its machine swaps), or waits for what does not
come. Its shard is not published meanwhile, and nothing else ends it: its connection lives, and it
keeps the lock on its index.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from eventpub.coordinator.shards import Shard

WARNED_AFTER = 60.0
ENDED_AFTER = 600.0
"""Seconds; doubled each time for a shard until the next runner has done something, in case that
what it does takes so long."""


class Silence:
    """Since when nothing has been heard of each shard's runner."""

    def __init__(self) -> None:
        self._heard: dict[int, float] = {}
        self._patience: dict[int, float] = {}
        self._ended: dict[int, int] = {}
        self._warned: dict[int, float] = {}

    def heard(self, shard: int, now: float) -> None:
        """A runner has said something, or has just been given the lease."""
        self._heard[shard] = now
        self._warned.pop(shard, None)

    def ends(self, shard: Shard) -> None:
        """A runner has done something: where another one was ended, what that was at is over."""
        if self._ended.get(shard.number) != shard.lease:
            self._patience.pop(shard.number, None)

    def check(self, shards: Sequence[Shard], now: float) -> Iterator[tuple[Shard, float, bool]]:
        """The shards of whose runner something is to be said, for how many seconds it has been
        silent, and whether it is to be ended."""
        for shard in shards:
            since = self._heard.get(shard.number)
            if shard.lane is None or since is None or not shard.has_work():
                continue
            if shard.works_since is not None:
                since = max(since, shard.works_since)
            seconds = now - since
            patience = self._patience.setdefault(shard.number, ENDED_AFTER)
            if seconds >= patience:
                self._patience[shard.number] = 2 * patience
                self._ended[shard.number] = shard.lease
                yield shard, seconds, True
            elif seconds >= WARNED_AFTER and self._warned.get(shard.number) != since:
                self._warned[shard.number] = since
                yield shard, seconds, False
