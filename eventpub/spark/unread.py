"""What a function of `foreachBatch` has left unread: it belongs to the next batch.

A task that is not read to its end has no journal. That is also how a state looks that is older than
its checkpoint, and then a sink has the rows already. So only the process that has handed out a
batch's tasks says which of them have not come to their ends: before it plans the next batch, or
when it is stopped. What still runs then fails when it would create its journal, and has not ended.
"""

from __future__ import annotations

from collections.abc import Iterable

from eventpub.channel import Report
from eventpub.spark.journal import KEYS, Journal, Journals
from eventpub.spark.plan import Plan


def leave_unread(journals: Journals, plan: Plan, shards: Iterable[int]) -> None:
    """Create the journals of a batch that are missing, without rows.

    Raises:
        StateError: state.unreachable
    """
    for shard in shards:
        if journals.head(plan.batch, shard) is not None:
            continue
        before = journals.head(plan.batch - 1, shard)
        if before is None and plan.batch > 1:
            continue  # a state that is not of this checkpoint, which is said where it is read
        at = max(plan.start or 0, plan.begin)
        was = Report(shard, position=at, low=at) if before is None else before["report"]
        report = Report(
            shard,
            done=plan.batch,
            position=was.position,
            low=was.low,
            hidden_since=was.hidden_since,
            holds=was.holds,
            next_due=was.next_due,
            compared=plan.comparison,
            unfinished=[*plan.buckets],
        )
        journals.create(plan.batch, shard, Journal(report, KEYS.empty_table(), {}))
