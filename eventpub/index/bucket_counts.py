"""How many rows of each time bucket were accounted for."""

from __future__ import annotations

import struct
from typing import Any

from eventpub.index.database import NUMBER, Database, Overlay

_ROWS = struct.Struct("<q")


class BucketCounts:
    """By the bucket's number.

    Args:
        database: of the index.
    """

    def __init__(self, database: Database | Overlay) -> None:
        self._db = database
        self._pruned_below = 0

    def since(self, first: int) -> dict[int, int]:
        """Of the buckets from one on."""
        found = self._db.items(b"c", NUMBER.pack(max(first, 0)))
        return {NUMBER.unpack(key[1:])[0]: _ROWS.unpack(value)[0] for key, value in found}

    def of(self, bucket: int) -> int:
        found = self._db.get(b"c" + NUMBER.pack(bucket))
        return 0 if found is None else int(_ROWS.unpack(found)[0])

    def put(self, batch: Any, bucket: int, rows: int) -> None:
        batch.put(b"c" + NUMBER.pack(bucket), _ROWS.pack(rows))

    def delete_since(self, batch: Any, first: int) -> None:
        """Delete buckets from one on."""
        for bucket in self.since(first):
            batch.delete(b"c" + NUMBER.pack(bucket))

    def prune(self, batch: Any, forget_below: int) -> None:
        since = self._pruned_below  # what was deleted before is not passed over again
        if forget_below <= since:
            return
        for key, _ in self._db.items(b"c", NUMBER.pack(since)):
            if NUMBER.unpack(key[1:])[0] >= forget_below:
                break
            batch.delete(key)
        self._pruned_below = forget_below
