"""The sink: making a batch of admitted events visible atomically, and reading back what is visible.

Knows Kafka, nothing of SQL or Spark. What must hold: a `read_committed` consumer sees each event
once, whatever crashes; the topic is the truth, and `ShardSink.fold` reads it.
"""

from eventpub.sink.checks import checks
from eventpub.sink.faults import RecordRefusedError
from eventpub.sink.fold import Fold, Folded
from eventpub.sink.owning import fence_all
from eventpub.sink.records import DeadRow, Record
from eventpub.sink.shard import PublishedBatch, ShardSink
from eventpub.sink.topics import TopicLayout, check_topics
from eventpub.sink.unmarked import UnmarkedError, are_left_open

__all__ = [
    "DeadRow",
    "Fold",
    "Folded",
    "PublishedBatch",
    "Record",
    "RecordRefusedError",
    "ShardSink",
    "TopicLayout",
    "UnmarkedError",
    "are_left_open",
    "check_topics",
    "checks",
    "fence_all",
]
