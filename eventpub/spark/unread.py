"""What a shard did in a batch, and what a function of `foreachBatch` has left unread of it.

A task that is not read to its end has no journal, and what it had belongs to the next batch. But a
state that is older than its checkpoint looks like that, too, and then a sink has the rows already.
So only the process that has handed out a batch's tasks takes it for that.
"""

from __future__ import annotations

from eventpub.channel import Report
from eventpub.spark.journal import KEYS, Journal, Journals, no_journals
from eventpub.spark.plan import Plan


def report_of(journals: Journals, plan: Plan, shard: int, *, may_leave: bool) -> Report:
    """What a shard did in a batch that is done.

    Args:
        may_leave: whether the task may not have been read to its end; its journal is created then.

    Raises:
        StateError: state.journal_missing, state.unreachable
    """
    head = journals.head(plan.batch, shard)
    before = journals.head(plan.batch - 1, shard) if head is None and may_leave else None
    if before is not None or (may_leave and plan.batch == 1 and head is None):
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
        head = journals.head(plan.batch, shard)
    if head is None:
        raise no_journals(plan.query, plan.batch)
    found: Report = head["report"]
    return found
