"""The sink: making a batch of admitted events visible atomically, and reading back what is visible.

Knows Kafka, nothing of SQL or Spark. What must hold: a `read_committed` consumer sees each event
once, whatever crashes; the topic is the truth, and `ShardSink.fold` reads it.
"""

from eventpub.sink.checks import Written, checks
from eventpub.sink.client import check_properties
from eventpub.sink.faults import RecordRefusedError, topic_gone, topic_remade
from eventpub.sink.fencing import fence_all
from eventpub.sink.finding import has_event, oldest_events
from eventpub.sink.folded import Folded
from eventpub.sink.missing_markers import MissingMarkerError
from eventpub.sink.origin import (
    Sources,
    check_between,
    check_sample,
    check_sides,
    has_written,
    sources_of,
)
from eventpub.sink.records import DeadRow, Record
from eventpub.sink.shard import PublishedBatch, ShardSink
from eventpub.sink.stable_ends import are_left_open
from eventpub.sink.topic_settings import check_age
from eventpub.sink.topics import (
    TopicLayout,
    check_topics,
    check_written,
    first_offsets,
    topic_ids,
    visible_ends,
)

__all__ = [
    "DeadRow",
    "Folded",
    "MissingMarkerError",
    "PublishedBatch",
    "Record",
    "RecordRefusedError",
    "ShardSink",
    "Sources",
    "TopicLayout",
    "Written",
    "are_left_open",
    "check_age",
    "check_between",
    "check_properties",
    "check_sample",
    "check_sides",
    "check_topics",
    "check_written",
    "checks",
    "fence_all",
    "first_offsets",
    "has_event",
    "has_written",
    "oldest_events",
    "sources_of",
    "topic_gone",
    "topic_ids",
    "topic_remade",
    "visible_ends",
]
