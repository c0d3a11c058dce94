"""A shard's index at the first batch of a checkpoint: what the topic says was published."""

from __future__ import annotations

from pathlib import Path

from eventpub.channel import Lease
from eventpub.index import folder_for
from eventpub.shard.assignment import Assignment
from eventpub.shard.context import LeasedContext
from eventpub.shard.folding import Fold


class _NoLink:
    """The link of a shard that nobody can stop, and that has no lease to lose."""

    is_stopping = False

    def lease(self) -> Lease | None:
        return None

    def confirm(self) -> None:
        """Nobody else has it."""

    def send(self, message: object) -> None:
        """Nobody wants to know."""


def recover(assignment: Assignment, number: int, lease: Lease, folder: Path) -> None:
    """Bring the index of the engine `threads`, or a new one, up to the topic; a copy of it is kept
    in a folder.

    Args:
        assignment: of all shards.
        number: the shard's.
        lease: what is known of what was published before.
        folder: does not exist.

    Raises:
        SinkError, StateError: as of `Fold.run`.
    """
    link: object = _NoLink()
    with LeasedContext(assignment, number, lease, link) as context:  # type: ignore[arg-type]
        Fold(context).run()
        folder.parent.mkdir(parents=True, exist_ok=True)
        copy = folder_for(folder)
        context.index.copy_to(copy)
    copy.rename(folder)
