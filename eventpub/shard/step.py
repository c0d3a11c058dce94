"""A shard's step: what is done with the rows of a window, and with what else comes with it.

The same for both engines: a runner does it for each window that the coordinator sends, a task of
Spark once for its micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from eventpub.shard.answering import Answering
from eventpub.shard.comparing import Comparing
from eventpub.shard.context import COUNTED_LATE, Accounted, ShardContext
from eventpub.shard.publishing import NO_EVENTS, Publishing

_DUE_AT_ONCE = 100, 500
_HOLDS_TURN = 0.1
_HOLDS_SHARE = 4
"""Holds that are tried in one transaction, seconds for those that are due after each window, and of
which part of all time that may be while there are rows: where there are very many, the others'
events do not wait for all of them, and still get most of the machine."""


class Step:
    """See the module.

    Args:
        context: of the shard, its index up to date.
        renew_sink: as of `Publishing`.

    Attributes:
        accounted: rows that windows have shown, until the index has them.
        comparing: the recount's comparison of keys.
        answering: requests.
    """

    def __init__(self, context: ShardContext, renew_sink: Callable[[], None]) -> None:
        self._context = context
        self._horizon = context.assignment.config.recount.horizon
        self.accounted = Accounted(self._horizon)
        self._publishing = publishing = Publishing(context, self.accounted, renew_sink)
        self._holds = HoldsInTurn(context, publishing)
        self.comparing = Comparing(context, publishing)
        self.answering = Answering(context, publishing)

    def rows(self, rows: pa.Table) -> bool:
        """Decide and publish some rows of a window, in order of `create_time`.

        Returns:
            False where the shard waits for a gap, or stops, and the rest of the window with it.
        """
        times = rows.column("create_time").to_numpy()
        if not len(times):
            return True
        # what is older when it is read is counted again only where something hides there
        since = self._context.now - self._horizon - COUNTED_LATE
        if (hidden_since := self._context.hidden_since) is not None:
            since = min(since, hidden_since)
        self.accounted.add(times, since)
        return self._publishing.step(rows, int(times[-1]) - 1)

    def end(self, upto: int | None, *, had_rows: bool = False) -> None:
        """A window is done: note its end, and try the holds that are due.

        Args:
            upto: the end, µs; None: the position stays.
            had_rows: as of `HoldsInTurn.run`.
        """
        self._holds.run(upto, had_rows=had_rows)


class HoldsInTurn:
    """Tries the holds that are due in portions, and where there are very many for a part of the
    time only."""

    def __init__(self, context: ShardContext, publishing: Publishing) -> None:
        self._context = context
        self._publishing = publishing
        self._at_once = max(_DUE_AT_ONCE)
        self._not_before = 0.0

    def run(self, position: int | None, *, had_rows: bool = False) -> None:
        """A window is done: note its end, and try holds that are due.

        Args:
            position: as of `Publishing.step`.
            had_rows: whether rows came since the last time, which have their share of the time.
        """
        clock = self._context.parts.clock
        began = now = clock.monotonic()
        if began < self._not_before:
            self._publishing.step(NO_EVENTS, position)
            return
        context = self._context
        while now - began < _HOLDS_TURN:
            self._publishing.step(NO_EVENTS, position, due=self._at_once)
            due = context.index.holds.next_due()
            if due is None or due > context.now or context.is_stopping:
                return
            took, now = clock.monotonic() - now, clock.monotonic()
            least, most = _DUE_AT_ONCE
            if took > _HOLDS_TURN:
                self._at_once = max(least, self._at_once // 2)
            elif took < _HOLDS_TURN / 4:
                self._at_once = min(most, 2 * self._at_once)
        if had_rows:
            self._not_before = now + (_HOLDS_SHARE - 1) * (now - began)
