"""What a process remembers of its brokers, forgotten: as one that begins."""

from __future__ import annotations

from eventpub.sink import faults, transaction


def forget_all() -> None:
    """Forget it."""
    transaction.cautions.clear()
    faults._unanswered_at = float("-inf")
