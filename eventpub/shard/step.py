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
from eventpub.shard.publishing import HoldsInTurn, Publishing


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
