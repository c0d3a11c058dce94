"""The sink: making a batch of admitted events visible atomically, and reading back what is visible.

Knows Kafka, nothing of SQL or Spark. What must hold: a `read_committed` consumer sees each event
once, whatever crashes; the topic is the truth, and `ShardSink.fold` reads it.
"""

from eventpub.sink.base import PublishedBatch
from eventpub.sink.checks import Written, checks
from eventpub.sink.client import Clients, check_properties
from eventpub.sink.faults import topic_gone, topic_remade
from eventpub.sink.folded import Folded
from eventpub.sink.layout import check_age, check_topics, check_written
from eventpub.sink.missing_markers import MissingMarkerError
from eventpub.sink.origin import (
    check_between,
    check_sample,
    check_sides,
    has_written,
    sources_of,
)
from eventpub.sink.owned_producer import fence_all
from eventpub.sink.reading import has_event, oldest_events
from eventpub.sink.records import DeadRow, Record
from eventpub.sink.refusals import RecordRefusedError
from eventpub.sink.shard import ShardSink
from eventpub.sink.topics import open_below, topic_ids, visible_ends

__all__ = [
    "Clients",
    "DeadRow",
    "Folded",
    "MissingMarkerError",
    "PublishedBatch",
    "Record",
    "RecordRefusedError",
    "ShardSink",
    "Written",
    "check_age",
    "check_between",
    "check_properties",
    "check_sample",
    "check_sides",
    "check_topics",
    "check_written",
    "checks",
    "fence_all",
    "has_event",
    "has_written",
    "oldest_events",
    "open_below",
    "sources_of",
    "topic_gone",
    "topic_ids",
    "topic_remade",
    "visible_ends",
]
