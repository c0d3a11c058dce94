"""A shard's index on this machine: where it comes from, that it is the right one, and its copies.

What must hold: an index of anything else than this shard of this topic is never published from.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

from eventpub.admission import Shard
from eventpub.channel import Folding, Lease, Report
from eventpub.channel.lane import Link
from eventpub.errors import StateError
from eventpub.index import Copying, Index, Snapshots, aside_of, folder_for, set_aside
from eventpub.index.identity import FORMAT
from eventpub.shard.assignment import Assignment, identity_of

_SAID_EVERY = 1.0
"""Seconds after which a runner that fetches says that it is alive."""

_LOOKS_FOR = 10.0
"""Seconds for which the place of the copies may be away; then the whole topic is read instead."""

_LOOKS_AGAIN_AFTER = 1.0

_OF_NO_USE = {"state.foreign", "index.newer_format"}
"""Of an index that is whole."""

log: structlog.stdlib.BoundLogger = structlog.get_logger("eventpub")


def require_going_on(link: Link) -> None:
    """Called again and again by what may take long before the shard can be published.

    Raises:
        StateError: run.stopping
    """
    if link.is_stopping:
        raise StateError(
            "run.stopping",
            "stopped while it read the topic back",
            suggestion="nothing to do: it was asked to stop",
            retriable=True,
        )


class IndexCopies:
    """The copies of a shard's index, where `state.snapshots` says that there are any.

    Args:
        assignment: of all shards.
        shard: whose.
        link: to the coordinator.
    """

    def __init__(self, assignment: Assignment, shard: Shard, link: Link) -> None:
        self._assignment = assignment
        self._shard = shard
        self._link = link
        self._said_at = 0.0
        self._copying: Copying | None = None

    def find(self, lease: Lease) -> str | None:
        """Where this machine has no index of the shard, the newest copy is one: its name.

        Not where what another number of shards or partitions knows, which is newer, is taken over;
        nor beside a damaged one that was set aside: what has damaged it may be in its copies, too.
        Called before the index is opened; copies of it are kept from then on.

        Raises:
            StateError: run.stopping
        """
        state, app = self._assignment.config.state, self._assignment.config.app
        if not state.snapshots:
            return None
        shard, folder = self._shard, self._assignment.index(self._shard.number)
        snapshots = Snapshots(state.snapshots, app.id, shard.partitions, shard.shards, shard.number)
        supersedes_others = lease.former_shards is not None or bool(lease.former_indexes)
        found = None
        if not (supersedes_others or folder.exists() or aside_of(folder).exists()):
            found = self._get(snapshots, folder)
        self._copying = Copying(snapshots, state.snapshot_every / 1e6)
        return found

    def _get(self, snapshots: Snapshots, folder: Path) -> str | None:
        until = time.monotonic() + _LOOKS_FOR
        while True:
            try:
                return snapshots.get(folder, self._fetches)
            except StateError as error:
                if error.code == "run.stopping":
                    raise
                if time.monotonic() > until:
                    log.warning(
                        "no copy of the index is found; the topic is read from its beginning",
                        shard=self._shard.number,
                        error=str(error),
                    )
                    return None
            time.sleep(_LOOKS_AGAIN_AFTER)
            self._fetches()

    def _fetches(self) -> None:
        require_going_on(self._link)
        if time.monotonic() - self._said_at > _SAID_EVERY:
            self._said_at = time.monotonic()
            self._link.send(Folding(0, 0))

    @property
    def are_kept(self) -> bool:
        """Whether copies of the index are kept."""
        return self._copying is not None

    def keep(self, index: Index) -> None:
        """Keep a copy of the index, where one is due.

        Raises:
            StateError: index.corrupt
        """
        copying = self._copying
        if copying is not None and copying.due(offsets := dict(index.offsets)):
            folder = folder_for(index.directory)
            try:
                index.copy_to(folder)
            except StateError as error:
                copying.failed(folder, error)
                if error.code == "index.corrupt":
                    raise
            else:
                copying.begin(folder, offsets)


def open_index(assignment: Assignment, shard: Shard, report: Report) -> Index:
    """The index of a shard; a new one where the one that is there is of no use.

    Args:
        assignment: of all shards.
        shard: whose.
        report: says whether the index is a copy, and what became of it.

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
        return Index(folder, identity, adopts=adopts)
    except StateError as error:
        has_grown = bool(was) and was["partitions"] != assignment.partitions
        if error.code not in _OF_NO_USE or not (report.copied_from or has_grown):
            raise
    if report.copied_from:  # of another topic or a newer version: as if there were no copy
        report.copied_from = None
        shutil.rmtree(folder)
    else:  # on the publisher's own disk it was moved to `former_indexes`; here, nobody did
        former = set_aside(folder, is_damaged=False)
        report.rebuilt = f"the topic had {was['partitions']} partitions; it was moved to {former}"
    return Index(folder, identity, adopts=adopts)
