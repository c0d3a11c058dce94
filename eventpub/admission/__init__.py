"""Which events may go out now. Pure: no I/O, no clock; time and rows are arguments."""

from eventpub.admission.decide import (
    Counts,
    Decision,
    Plan,
    Rules,
    first_sight_is_decided,
    plan,
    unknown,
)
from eventpub.admission.model import (
    EVENTS,
    Shard,
    SkippedGap,
    VersionRange,
    topic_partition,
    topic_partitions,
    values,
)
from eventpub.admission.state import Hold, Known, Versions, after_fold, in_ranges, without

__all__ = [
    "EVENTS",
    "Counts",
    "Decision",
    "Hold",
    "Known",
    "Plan",
    "Rules",
    "Shard",
    "SkippedGap",
    "VersionRange",
    "Versions",
    "after_fold",
    "first_sight_is_decided",
    "in_ranges",
    "plan",
    "topic_partition",
    "topic_partitions",
    "unknown",
    "values",
    "without",
]
