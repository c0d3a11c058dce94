"""`policy = "hold_shard"`: where a shard waits, and with what the hold of its aggregate begins."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa

from eventpub.admission import Decision, Hold, values


def at_first_row(hold: Hold, rows: pa.Table) -> Hold:
    """The hold, ending at its first event: where the shard waits, nothing later is known yet."""
    pairs = zip(values(rows, "aggregate_id"), values(rows, "version"), strict=True)
    versions = [v for a, v in pairs if a == hold.aggregate_id and v > hold.first_missing]
    return replace(hold, seen=min(versions, default=hold.seen))


def with_unpublished(hold: Hold, whole: Decision, published: Decision) -> Hold:
    """The hold, beginning with what lies below the gap and does not go out before the shard waits.

    Such events have the time of the held one, or a later one, or came by the backtrack. What goes
    out may show that some of them are baseline: its last version is above them.
    """
    last = published.last.get(hold.aggregate_id)
    waiting = _versions_below(whole, hold) - _versions_below(published, hold)
    below = {version for version in waiting if last is None or version > last}
    if not below:
        return hold
    return replace(hold, first_missing=min(below), next_attempt=hold.first_seen, catching_up=True)


def _versions_below(decision: Decision, hold: Hold) -> set[int]:
    """The versions below a hold's gap that a decision publishes in their order."""
    events = decision.events
    if decision.late is not None:
        events = events.filter(pa.array(~decision.late))
    pairs = zip(values(events, "aggregate_id"), values(events, "version"), strict=True)
    return {v for a, v in pairs if a == hold.aggregate_id and v < hold.first_missing}
