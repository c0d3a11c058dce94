"""Decides which events may be published now. Pure: no I/O; time and rows are arguments."""

from eventpub.admission.batch import CONFLICT, Counts, Decision, Rules
from eventpub.admission.bulk import unknown
from eventpub.admission.decide import Plan
from eventpub.admission.model import (
    EVENTS,
    NO_TIME,
    Hold,
    Known,
    Rewritten,
    Seen,
    Shard,
    SkippedGap,
    VersionRange,
    Versions,
    after_fold,
    in_ranges,
    numbers_of,
    topic_partition,
    topic_partitions,
    values,
    version_ranges,
    without,
)
from eventpub.admission.walk import failed_attempt

__all__ = [
    "CONFLICT",
    "EVENTS",
    "NO_TIME",
    "Counts",
    "Decision",
    "Hold",
    "Known",
    "Plan",
    "Rewritten",
    "Rules",
    "Seen",
    "Shard",
    "SkippedGap",
    "VersionRange",
    "Versions",
    "after_fold",
    "failed_attempt",
    "in_ranges",
    "numbers_of",
    "topic_partition",
    "topic_partitions",
    "unknown",
    "values",
    "version_ranges",
    "without",
]
