"""What a process remembers of its brokers, forgotten: as one that begins."""

from __future__ import annotations

from eventpub.sink import caution


def forget_all() -> None:
    """Forget it."""
    caution._by_owner.clear()
    caution._unanswered_at = float("-inf")
