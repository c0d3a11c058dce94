"""The twin of `Encoder`: records that have a key, a payload and a version, and nothing else."""

from __future__ import annotations

from typing import Any

from eventpub.admission.model import SkippedGap, values
from eventpub.sink.records import SEQUENCE, Columns, DeadRow, Record


class PlainEncoder:
    """See the module."""

    def events(self, rows: Any, placed: Any, late: Any, limit: int) -> Columns:
        """As there."""
        del late, limit
        ids, versions = values(rows, "aggregate_id"), values(rows, "version")
        headers: Any = [[(SEQUENCE, str(version))] for version in versions]
        return Columns(ids, values(rows, "payload"), placed, [1] * len(ids), headers)

    def fixed(self, rows: Any, placed: Any, late: Any, limit: int) -> None:
        """Never."""

    def gap(self, gap: SkippedGap, partitions: int, limit: int) -> Record:
        """As there."""
        del partitions, limit
        return Record(gap.aggregate_id, None, 0, 1, [(SEQUENCE, str(gap.from_version))])

    def dead(self, row: DeadRow, shard: tuple[int, int], limit: int, *, reduced: bool) -> Record:
        """As there."""
        del limit
        is_large = reduced and len(row.aggregate_id or "") > 1_000
        key = None if is_large else row.aggregate_id
        return Record(key, None, shard[1], 1, [(SEQUENCE, str(row.version))])
