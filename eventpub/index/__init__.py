"""Per-shard index in RocksDB: the last published version per aggregate, and what is held.

A cache of the topic: whatever is lost here is read back by a fold. Knows neither SQL nor Kafka.
RocksDB's lock ensures that one task at a time has a shard's index open.
"""

from eventpub.index.database import Changes, Storage, corrupt
from eventpub.index.facts import Facts, of_another
from eventpub.index.index import Index, Pending, Summary, folder_for, glance, summary

__all__ = [
    "Changes",
    "Facts",
    "Index",
    "Pending",
    "Storage",
    "Summary",
    "corrupt",
    "folder_for",
    "glance",
    "of_another",
    "summary",
]
