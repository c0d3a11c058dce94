"""Polls of the open transactions: the real `Watermark`, but for the two statements of a poll.

What an answer says becomes the real `OpenTransactions`' argument, and what the source makes of it
is the real source's. Like `innodb_trx`, an answer shows which transactions have written, and when
each began, in whole seconds; and while somebody else reads it too often, nothing new.
"""

from __future__ import annotations

from typing import Any

from eventpub.sources.mysql import watermark
from eventpub.sources.mysql.open_transactions import Transaction
from tests.simulation.world import World, world

_SECOND = 1_000_000


class Watermark(watermark.Watermark):
    """As there."""

    def poll(self, *reached: int) -> None:
        """As there; answers come at once, so that none is left out."""
        this = world()
        if self._denied:
            return
        this.point("store.look")
        if this.setup.watermark == "denied":
            self._denied = True
            return
        self._now = this.clock
        if this.is_stale:
            this.counts["polls in vain"] += 1
            if self._stale_since is None:
                self._stale_since = this.monotonic
            return
        self._stale_since = None
        this.counts["fresh polls"] += 1
        self._transactions.seen(this.clock, _open(this), *reached)
        this.clock += 1  # whatever is written next is newer

    def close(self) -> None:
        """Nothing to close."""


def _open(this: World) -> list[Transaction]:
    """What a fresh answer shows; such rows have to be found however late they commit."""
    found: list[Any] = []
    for number, rows in this.transactions.items():
        if not rows:
            continue
        id_, begun = this.begun[number]
        for row in rows:
            row.seen = row.seen or this.moment
            row.begun = begun
        # a row of exactly a full second's time would be no newer than its transaction
        started = (begun - 1) // _SECOND * _SECOND
        found.append(
            Transaction(
                id_,
                0 if number in this.prepared else number + 1,
                min(started, this.clock),
                modified=len(rows),
                is_ahead=started // _SECOND > this.clock // _SECOND,
            )
        )
    return found
