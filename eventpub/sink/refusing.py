"""Why a numbered sink publishes nothing."""

from __future__ import annotations

from dataclasses import dataclass

from eventpub import config
from eventpub.errors import SinkError

_SAME_ROWS = (
    "a repeated batch must have the same rows in the same tasks: use a replayable source, and start"
    " the query with as many cores and partitions as before (with the source rate, set"
    " numPartitions; after a shuffle, spark.sql.shuffle.partitions)"
)


@dataclass(frozen=True)
class Numbered:
    """One task's part of a batch.

    Attributes:
        query: the query's id, as Spark keeps it in the checkpoint.
        batch: the number of the batch, from 0.
        task: the number of the task, from 0.
        is_repeated: whether there may have been another attempt.
        run: names this start of the query; "": a start always divides rows as the one before.
    """

    query: str
    batch: int
    task: int
    is_repeated: bool = False
    run: str = ""


@dataclass(frozen=True)
class Refusing:
    """The errors of one id."""

    id: str
    sink: config.Sink
    markers: str

    def other_query(self, numbered: Numbered, owner: str) -> SinkError:
        """Another query owns the id."""
        where = f"option id = {self.id}, topic {self.markers}"
        if numbered.batch:
            return SinkError(
                "sink.other_query",
                f"another publisher (query {owner}) has taken over this id; nothing was lost or"
                " repeated, and this one stops",
                where=where,
                suggestion="let only one publisher run for an id; or give this one another id",
            )
        return SinkError(
            "sink.other_query",
            f"query {owner} publishes with this id, and this query has another checkpoint: it"
            " would publish everything again",
            where=where,
            suggestion="start the query with its previous checkpoint; or give it another id; or, if"
            f" it replaces query {owner}, which must have stopped, set the option after_query to"
            f' "{owner}"',
        )

    def markers_gone(self, numbered: Numbered) -> SinkError:
        """What the query has published cannot be known."""
        return SinkError(
            "sink.markers_gone",
            f"batch {numbered.batch} of this query is to be published, and topic {self.markers} has"
            " no marker of this id, so whether it was published before is unknown",
            where=f"option id = {self.id}, query {numbered.query}",
            suggestion="if the option topic or id was changed: change it back, or start with a new"
            f" checkpoint. If the markers were deleted (their topic must be compacted only): check"
            f" that no row of batch {numbered.batch} is on the topic, then set the option"
            f' after_query to "{numbered.query}"',
        )

    def behind(self, numbered: Numbered, published: int) -> SinkError:
        """The checkpoint is an older copy."""
        return SinkError(
            "sink.checkpoint_behind",
            f"batch {numbered.batch} is to be published, but batch {published} of this query"
            " already was: its checkpoint is older than the topic; nothing was published",
            where=f"option id = {self.id}, query {numbered.query}",
            suggestion="if the checkpoint was restored from a backup: start with a new"
            f" checkpoint and the option after_query = {numbered.query}, from a source that"
            " begins with what is not on the topic. If a stalled attempt reports this, ignore it",
        )

    def too_many(self, reason: str) -> SinkError:
        """The broker refuses one row after the other."""
        return SinkError(
            "sink.too_many_refused",
            f"the broker refuses more than {self.sink.dead_limit} rows of a task in a row:"
            f" {reason}",
            where=f"topic {self.sink.topic}",
            suggestion="if the topic's or the client's limits are too low, raise them"
            " (max.message.bytes; the option kafka.message.max.bytes); if these rows should become"
            " dead letters, raise the option dead_limit. Nothing of them was published",
        )

    def changed(self, numbered: Numbered, before: int, now: int) -> SinkError:
        """A task has other rows."""
        return SinkError(
            "sink.batch_changed",
            f"batch {numbered.batch} is repeated, but task {numbered.task} has other rows ({now})"
            f" than it published before ({before}): the source gives others, or divides them among"
            " another number of tasks",
            where=f"option id = {self.id}",
            suggestion=_SAME_ROWS,
        )

    def unconfirmed(self, numbered: Numbered, tasks: list[int], seconds: float) -> SinkError:
        """Tasks that have published do not come again."""
        numbers = ", ".join(map(str, tasks))
        return SinkError(
            "sink.batch_changed",
            f"batch {numbered.batch} is repeated, and an earlier start of the query has published"
            f" its tasks {numbers}, which have not come again within {seconds:.0f} s: there are"
            " fewer tasks, or fewer cores, than before; nothing more was published",
            where=f"option id = {self.id}",
            suggestion=_SAME_ROWS,
        )
