"""How far the publisher is behind the table: what a comparison up to its position cannot see.

A publisher that has been dead for days has published all up to its position, and nothing after it.
Counted is only what should be published by now, so a publisher that is a second or two behind under
load is not behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eventpub.config import Read

if TYPE_CHECKING:
    from eventpub.sources.mysql import EventStore

GRACE = 10_000_000
"""µs that an event may wait beyond `read.delay` and `read.max_wait`."""

MOST_EVENTS = 100_000
"""Events that are counted, at most: counting a long backlog costs as much as reading it."""


@dataclass(frozen=True)
class Behind:
    """Events after the publisher's position that should be published by now.

    Args:
        events: how many; at most `MOST_EVENTS`.
        has_more: whether there are more than were counted.
        seconds: the age of the oldest; 0: there is none.
        is_paused: whether the publisher's state says that it is paused.
    """

    events: int = 0
    has_more: bool = False
    seconds: float = 0.0
    is_paused: bool = False

    @property
    def count(self) -> str:
        """The number of events, in words."""
        return f"more than {self.events:,}" if self.has_more else f"{self.events:,}"

    def to_dict(self) -> dict[str, Any]:
        """As JSON shows it."""
        return vars(self) | {"seconds": round(self.seconds, 1)}


def measure(
    store: EventStore, read: Read, progress: Mapping[str, Any], compared: int
) -> Behind | None:
    """Look at the table once more, now.

    Args:
        read: the section `[read]`.
        progress: the publisher's `progress.json`.
        compared: the end of the range that was compared, µs; nothing before it counts.

    Returns:
        None where the state has no position: who has no publisher has none that is behind.

    Raises:
        StoreError: the store cannot be read.
    """
    if "position" not in progress:
        return None
    after, now = max(int(progress["position"]), compared), store.now()
    upto = now - read.delay - read.max_wait - GRACE
    events, oldest = 0, now
    # more than once only where the clocks go back: what `waiting` counts must not cross that
    while events <= MOST_EVENTS:
        poll = store.poll(after, 0, 1, at_most=upto)
        if not poll.has_rows:
            break
        first, count = store.waiting(after, poll.upper, MOST_EVENTS + 1 - events)
        events += count
        oldest, after = min(oldest, first), poll.upper
    return Behind(
        min(events, MOST_EVENTS),
        events > MOST_EVENTS,
        (now - oldest) / 1e6,
        bool(progress.get("is_paused")),
    )
