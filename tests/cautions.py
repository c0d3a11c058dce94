"""What a process remembers of its brokers, forgotten: as one that begins."""

from __future__ import annotations

from eventpub.sink import faults, owned_producer


def forget_all() -> None:
    """Forget it."""
    owned_producer.cautions.clear()
    faults._unanswered_at = float("-inf")
