"""The plan of a micro-batch, which is Spark's offset."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from eventpub.errors import StateError

FIRST_BYTES = 8 << 20
"""For a task of the first batch; see `Plan.most_bytes`."""


@dataclass(frozen=True)
class Plan:
    """One micro-batch, for all shards. Times are µs on the database's clock.

    Attributes:
        query: identity of the query's checkpoint; journals and indexes belong to it.
        batch: 0: nothing is planned yet.
        start: events created up to here are not published; None: all are.
        begin: a shard that has read nothing reads what was created after this.
        upto: events created up to here belong to this batch or an earlier one.
        after: few enough rows were created after this, up to `upto`, to be read as one page; None:
            unknown.
        open_since, hidden_since, uncounted_since: see `channel.Window`.
        unpublished_since: rows that may be unpublished below `upto`, except holds, were created
            after this.
        comparison, buckets: the recount's last comparison, and what this batch compares.
        newest: see `DatabaseChanges.newest`.
        server: identity of the database server; "": unknown.
        most_bytes: after so many bytes of rows a task leaves the rest of its window to the next
            batch.
        snapshot: the shards keep snapshots of their indexes.
        requests: by the fields of `channel.Request`.
        answered: ids of recent requests, not to be repeated.
    """

    query: str
    batch: int = 0
    start: int | None = None
    begin: int = 0
    upto: int = 0
    after: int | None = None
    open_since: int | None = None
    hidden_since: int | None = None
    uncounted_since: int | None = None
    unpublished_since: int | None = None
    comparison: int = 0
    buckets: tuple[int, ...] = ()
    newest: tuple[int, int, str] | None = None
    server: str = ""
    most_bytes: int = FIRST_BYTES
    snapshot: bool = False
    requests: tuple[dict[str, Any], ...] = ()
    answered: tuple[str, ...] = ()

    def to_offset(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_offset(cls, offset: dict[str, Any]) -> Plan:
        """Inverse of `to_offset`; raises state.checkpoint_version."""
        if "query" not in offset or not offset.keys() <= {field.name for field in fields(cls)}:
            raise StateError(
                "state.checkpoint_version",
                "the checkpoint was written by another version of eventpub, or another source",
                where=f"offset of query {offset.get('query')}",
                suggestion="install the version that wrote it; or start with a new checkpoint",
            )
        newest = offset.get("newest")
        tuples = {n: tuple(offset.get(n, ())) for n in ("buckets", "requests", "answered")}
        return cls(**offset | tuples | {"newest": None if newest is None else tuple(newest)})
