"""The last published version per aggregate, and what is pending, in RocksDB.

The topic is the truth and this is a cache of it: whatever is lost here is read back by a fold.
Nothing here knows SQL or Kafka. One shard's task has its index open at a time; RocksDB's lock
makes sure of it.
"""

from eventpub.index.database import Changes, Storage
from eventpub.index.facts import of_another
from eventpub.index.index import Index, folder_for
from eventpub.index.reading import Pending, Summary, glance, summary

__all__ = [
    "Changes",
    "Index",
    "Pending",
    "Storage",
    "Summary",
    "folder_for",
    "glance",
    "of_another",
    "summary",
]
