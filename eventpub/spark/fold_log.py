"""How far the shards have read their topics back, for the log; a new index may take hours."""

from __future__ import annotations

import structlog

_EVERY = 10.0

log: structlog.stdlib.BoundLogger = structlog.get_logger("eventpub")


class FoldLog:
    """Says every 10 s how far it is, and when it may end."""

    def __init__(self) -> None:
        self._began: tuple[float, int] | None = None
        self._said = 0.0

    def show(self, folding: tuple[int, int] | None, now: float) -> None:
        """Take over what `StateDir.folding` says now; seconds."""
        if folding is None:
            self._began = None
            return
        read, left = folding
        if self._began is None:
            self._began, self._said = (now, left), now - _EVERY
        if now - self._said < _EVERY:
            return
        self._said = now
        began, left_then = self._began
        rate = (left_then - left) / (now - began) if now > began else 0.0
        log.info(
            "reading the topic back into the index; nothing is published before",
            records=read,
            left=left,
            seconds_left=round(left / rate) if rate > 0 else None,
        )
