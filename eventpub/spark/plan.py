"""The plan of a micro-batch, which is Spark's offset."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from eventpub.errors import StateError

FIRST_BYTES = 8 << 20
"""Of a task of the first batch; see `Plan.most_bytes`."""


@dataclass(frozen=True)
class Plan:
    """One micro-batch, for all shards. Times are µs on the database's clock.

    Attributes:
        query: identity of the query's checkpoint; journals and indexes belong to it.
        batch: number of the batch; 0: nothing is planned yet.
        start: events created at or before are not published; None: all are.
        begin: a shard that has read nothing reads what was created after it.
        upto: events created at or before belong to this batch or to one before it.
        after: created after it and up to `upto` are few enough rows to be read as one page; None:
            no such time is known.
        open_since, hidden_since, uncounted_since: as of `channel.Window`.
        unpublished_since: nothing that may be unpublished below `upto`, but for holds, was created
            at or before.
        comparison, buckets: the recount's last comparison, and what this batch compares.
        newest: as of `NewestRows.last`.
        server: identity of the database server that was read; "": not known.
        most_bytes: after so many bytes of rows a task leaves the rest of its window to the next.
        snapshot: whether the shards keep snapshots of their indexes.
        requests: what users ask for, by the fields of `channel.Request`.
        answered: ids of requests of the batches before: they are not done again.
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
    newest: tuple[int, int] | None = None
    server: str = ""
    most_bytes: int = FIRST_BYTES
    snapshot: bool = False
    requests: tuple[dict[str, Any], ...] = ()
    answered: tuple[str, ...] = ()

    def to_offset(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_offset(cls, offset: dict[str, Any]) -> Plan:
        """The plan that `to_offset` wrote.

        Raises:
            StateError: state.checkpoint_version
        """
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
