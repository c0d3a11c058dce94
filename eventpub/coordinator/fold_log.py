"""How far the shards have read their topics back, for the log; a new index may take hours."""

from __future__ import annotations

from eventpub.channel import Folding
from eventpub.coordinator.events import Log

_EVERY = 10.0


class FoldLog:
    """Says every 10 s how far it is, and when it may end."""

    def __init__(self) -> None:
        self._shards: dict[int, Folding] = {}
        self._began: tuple[float, int] | None = None
        self._said = 0.0

    def add(self, shard: int, folding: Folding) -> None:
        """A shard has come so far."""
        if folding.read or folding.left:
            self._shards[shard] = folding

    def forget(self, shard: int) -> None:
        """It has read everything, or has gone."""
        self._shards.pop(shard, None)

    def line(self, now: float) -> Log | None:
        """What is to be said now; seconds."""
        if not self._shards:
            self._began = None
            return None
        read = sum(folding.read for folding in self._shards.values())
        left = sum(folding.left for folding in self._shards.values())
        if self._began is None:
            self._began, self._said = (now, left), now - _EVERY
        if now - self._said < _EVERY:
            return None
        self._said = now
        began, left_then = self._began
        rate = (left_then - left) / (now - began) if now > began else 0.0
        facts = {
            "records": read,
            "left": left,
            "seconds_left": round(left / rate) if rate > 0 else None,
        }
        text = "reading the topic back into the index; nothing is published before"
        return Log("info", text, facts)
