"""A shard's index on this machine: opened, or a new one made.

What must hold: an index of anything else than this shard of this topic is never published from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eventpub.admission import Shard
from eventpub.channel import Report
from eventpub.errors import StateError
from eventpub.index import Index
from eventpub.index.database import FORMAT
from eventpub.shard.assignment import Assignment, identity_of

_OF_NO_USE = {"state.foreign", "index.newer_format"}
"""Errors of an index that is intact but cannot be used."""


def open_index(assignment: Assignment, shard: Shard, report: Report) -> Index:
    """The index of a shard; a new one where the one that is there is of no use.

    Args:
        assignment: of all shards.
        shard: whose.
        report: says why it is a new one.

    Raises:
        StateError: index.…
    """
    folder = assignment.index(shard.number)
    identity = {
        **identity_of(assignment.config),
        "partitions": assignment.partitions,
        "shard": [shard.number, assignment.config.run.shards],
    }
    was: dict[str, Any] = {}

    def adopts(found: Mapping[str, Any]) -> bool:
        was.update(found)
        is_same = all(found.get(name) == identity[name] for name in ("partitions", "shard"))
        return is_same and found.get("format") == FORMAT and assignment.adopts(found)

    try:
        return Index(folder, identity, adopts=adopts, storage=assignment.parts.storage)
    except StateError as error:
        has_grown = bool(was) and was["partitions"] != assignment.partitions
        if error.code not in _OF_NO_USE or not has_grown:
            raise
    # on the publisher's own disk it was moved to `former_indexes`; on an executor's it was not
    former = assignment.parts.storage.set_aside(folder, is_damaged=False)
    report.rebuilt = f"the topic had {was['partitions']} partitions; it was moved to {former}"
    return Index(folder, identity, adopts=adopts, storage=assignment.parts.storage)
