"""The last published version per aggregate, and what is pending, in RocksDB.

The topic is the truth and this is a cache of it: whatever is lost here is read back by a fold.
Nothing here knows SQL or Kafka. One shard's task has its index open at a time; RocksDB's lock
makes sure of it.
"""

from eventpub.index.rocks import Index, Summary, set_aside
from eventpub.index.snapshots import Copying, Snapshots, folder_for

__all__ = ["Copying", "Index", "Snapshots", "Summary", "folder_for", "set_aside"]
