"""What a process remembers of its brokers, forgotten: as one that begins."""

from __future__ import annotations

from eventpub.sink import causes, faults


def forget_all() -> None:
    """Forget it."""
    causes._by_owner.clear()
    faults._unanswered_at = float("-inf")
