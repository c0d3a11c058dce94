"""A shard's step: what is done with a window's rows, and with other work.

For both engines: a runner does it for each window, a Spark task once for its micro-batch.
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
"""Holds retried in one transaction (least, most), seconds for due holds after each window, and the
inverse of their share of the time while there are rows: with very many holds, other events neither
wait for all of them nor lose most of the machine."""


class Step:
    """Handles a shard's windows, comparisons and requests, with its index up to date."""

    def __init__(self, context: ShardContext, renew_sink: Callable[[], None]) -> None:
        self._context = context
        self._horizon = context.assignment.config.recount.horizon
        self.accounted = Accounted(self._horizon)
        self._publishing = publishing = Publishing(context, self.accounted, renew_sink)
        self._holds = HoldsInTurn(context, publishing)
        self.comparing = Comparing(context, publishing)
        self.answering = Answering(context, publishing)

    def rows(self, rows: pa.Table) -> bool:
        """Publish rows of a window, sorted by `create_time`; False: the shard waits, or stops."""
        times = rows.column("create_time").to_numpy()
        if not len(times):
            return True
        # older rows are counted again only where open transactions hide some
        since = self._context.now - self._horizon - COUNTED_LATE
        if (hidden_since := self._context.hidden_since) is not None:
            since = min(since, hidden_since)
        self.accounted.add(times, since)
        return self._publishing.step(rows, int(times[-1]) - 1)

    def end(self, upto: int | None, *, had_rows: bool = False) -> None:
        """Record a window's end (µs; None: the position stays), and retry due holds."""
        self._holds.run(upto, had_rows=had_rows)


class HoldsInTurn:
    """Retries due holds in portions; if there are very many, only part of the time."""

    def __init__(self, context: ShardContext, publishing: Publishing) -> None:
        self._context = context
        self._publishing = publishing
        self._at_once = max(_DUE_AT_ONCE)
        self._not_before = 0.0

    def run(self, position: int | None, *, had_rows: bool = False) -> None:
        """Record a window's end, and retry due holds; rows that came get their share of time."""
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
