"""Batches with numbers, each published once by any of the tasks that Spark may run for it.

A task publishes its rows in one transaction, with a marker on a compacted topic:
``{"query", "batch", "digest", "refused"}`` under the key ``<id>/<task>``. A task that finds the
marker of its batch has been run before. What must hold:

- a task fences every older attempt (its transactional id is that of its number) before it reads the
  markers, and so nothing can be added between reading and publishing;
- markers are read up to the end, and not only as far as no transaction is open;
- all markers of an id are in one partition: the last one says which query owns the id. A query with
  another checkpoint counts its batches from 0 again, and would publish everything twice, so it is
  refused unless it names the query that it follows.

Spark runs the tasks of a batch when all of the batch before are done. So the markers of a query are
in the order of its batches, and a task reads back only as far as those of the batch before.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Protocol

from eventpub import config
from eventpub.errors import SinkError
from eventpub.failpoint import failpoint
from eventpub.sink.base import no_crash
from eventpub.sink.batch import Batch
from eventpub.sink.client import Clients
from eventpub.sink.markers import Marker, Markers
from eventpub.sink.missing_markers import PartitionId, require_none_left_open
from eventpub.sink.owned_producer import OwnedProducer, fence_all
from eventpub.sink.refusals import RecordRefusedError, Refusals, Refused
from eventpub.sink.topics import partition_counts
from eventpub.sink.transaction import Transactions

_REDO = {
    "sink.aborted",
    "sink.delivery_lost",
    "sink.fatal",
    "sink.fenced",
    "sink.indefinite",
    "sink.own_request_late",
    "sink.transaction_expired",
}
_MOST_REDOS = 8
_REDO_PAUSE = 0.2
_LONGEST_PAUSE = 5.0
"""Seconds before a batch is tried again; twice as many each time."""

_ENDED_WITHIN = 3.0
"""Seconds in which Spark ends a process whose rows it has cut off; it must not take over again."""

log = logging.getLogger("eventpub.sink")


class Parts(Protocol):
    """The rows of a task in parts, which may be read before all have come, and more than once."""

    def __iter__(self) -> Iterator[Callable[[Refused, bool], Batch]]:
        """Per part the function that makes its records; refused rows are dead letters, without
        their payload where the second argument is True."""

    def digest(self) -> str:
        """Hash of all rows in their order, however they are divided; waits for the last row."""


@dataclass(frozen=True)
class Numbered:
    """One task's part of a batch.

    Attributes:
        query: the query's id, as Spark keeps it in the checkpoint.
        batch: the number of the batch, from 0.
        task: the number of the task, from 0.
        is_repeated: whether another attempt has failed.
    """

    query: str
    batch: int
    task: int
    is_repeated: bool = False


def markers_of(sink: config.Sink) -> str:
    """The topic of the markers."""
    return f"{sink.topic}.batches"


def require_owner(clients: Clients, id_: str, owner: str) -> None:
    """Check that no query has taken an id over from a publisher that does without markers.

    To be called when the publisher has fenced its predecessors: what takes over later
    fences it.

    Args:
        owner: what the publisher has called itself in `NumberedSink.take`.

    Raises:
        SinkError: sink.other_query, ….
    """
    if markers_of(clients.sink) not in partition_counts(clients):
        return
    found = NumberedSink(clients, id_).owner()
    if found is not None and found[0] != owner:
        raise SinkError(
            "sink.other_query",
            "a publisher with the engine spark has taken over this app.id; nothing was lost or"
            " repeated, and this one stops",
            where=f"app.id = {id_}, topic {clients.sink.topic}",
            suggestion="let only one publisher run for an app.id",
        )


class NumberedSink:
    """Publishes the batches of one id.

    Args:
        clients: of the cluster.
        id_: names what publishes; a part of the transactional ids.
        after_query: the query whose id may be taken over; "": none.
        reads_back: whether a new checkpoint publishes again what is not visible. Then a task fails
            where the broker has left a transaction open; see `missing_markers`.
    """

    def __init__(
        self, clients: Clients, id_: str, *, after_query: str = "", reads_back: bool = False
    ) -> None:
        self._clients, self._sink = clients, clients.sink
        self._id = id_
        self._after_query = after_query
        self._reads_back = reads_back
        self.partitions = partition_counts(clients)
        markers = markers_of(clients.sink)
        self.markers = Markers(clients, id_, markers, self.partitions.get(markers))

    def publish(self, numbered: Numbered, parts: Parts) -> bool:
        """Publish one task's rows; False where that was done before.

        The transaction begins with the first part, and ends when the last is delivered.

        Raises:
            SinkError: sink.other_query, sink.batch_changed, sink.checkpoint_behind,
                sink.too_many_refused, sink.rows_cut_off, sink.unreachable,
                sink.hanging_transaction, …. Nothing was published, or the markers tell that it was.
        """
        if numbered.batch == 0:  # before any producer of another query is fenced
            self._was_published(
                numbered, parts, self.markers.back_to(numbered.query, numbered.batch)
            )
        refusals = Refusals()
        pause, redos = _REDO_PAUSE, 0
        while True:
            try:
                return self._try(numbered, parts, refusals)
            except RecordRefusedError as refusal:
                if not refusals.take(refusal):
                    raise
                if refusals.in_a_row()[0] > self._sink.dead_limit:
                    raise self._too_many(refusal.reason) from refusal
            except SinkError as error:
                if error.code == "sink.rows_cut_off":
                    self._clients.clock.sleep(_ENDED_WITHIN)
                    raise
                redos += error.code in _REDO
                is_passing = error.retriable and error.code != "sink.hanging_transaction"
                if redos == _MOST_REDOS or not (error.code in _REDO or is_passing):
                    raise
                log.warning("retrying batch %s: %s", numbered.batch, error.message)
                numbered = replace(numbered, is_repeated=True)
                self._clients.clock.sleep(pause)  # a broker that is away is waited for
                pause = min(2 * pause, _LONGEST_PAUSE)

    def take(self, query: str, tasks: int) -> None:
        """Have a query own the id: whatever another one still publishes is refused or fenced.

        Args:
            tasks: at least as many as the other query may have.

        Raises:
            SinkError: as of `publish`.
        """
        with closing(OwnedProducer(self._clients, self._id, "owner")) as owned:
            owned.ready()
            transactions = Transactions(self._clients, 1, owned)
            transactions.run([self._marker(Numbered(query, -1, -1), "")], no_crash)
        # only now: an attempt that has begun before has read the markers, and is fenced
        fence_all(self._clients, self._id, tasks)
        self.markers.end_left_open(tasks)

    def _try(self, numbered: Numbered, parts: Parts, refusals: Refusals) -> bool:
        with closing(OwnedProducer(self._clients, self._id, numbered.task)) as owned:
            owned.ready()
            failpoint("after_take")
            if numbered.is_repeated:
                self.markers.check_leader()
            markers = self.markers.back_to(numbered.query, numbered.batch)
            if self._was_published(numbered, parts, markers):
                return False
            mine = (m["refused"] for key, m in markers if key == f"{self._id}/{numbered.task}")
            refusals.before = next(mine, 0)
            partitions = self.partitions.get(self._sink.topic, 1)
            transactions = Transactions(self._clients, partitions, owned)
            batches = self._batches(numbered, parts, refusals, reduced=owned.caution.reduces_dead)
            transactions.run(batches, failpoint)
        return True

    def _batches(
        self, numbered: Numbered, parts: Parts, refusals: Refusals, *, reduced: bool
    ) -> Iterator[Batch]:
        """What the transaction holds: the records of each part, and the marker."""
        checked = set[PartitionId]()
        for number, make in enumerate(parts):
            batch = make(refusals.begin(number), reduced)
            refusals.made({topic: len(of.partitions) for topic, of in batch.events.items()})
            if self._reads_back:
                # not of the side topics, where another task may have one open for good reason
                own = {place for place in batch.places if place[0] == self._sink.topic}
                require_none_left_open(self._clients, self._id, own - checked)
                checked |= own
            yield batch
        yield self._marker(numbered, parts.digest(), refusals.in_a_row()[1])

    def _marker(self, numbered: Numbered, digest: str, refused: int = 0) -> Batch:
        value = {"query": numbered.query, "batch": numbered.batch, "digest": digest}
        value["refused"] = refused  # how many in a row, up to the end of the batch
        record = self.markers.record(f"{self._id}/{numbered.task}", json.dumps(value).encode())
        return Batch({}, [(self.markers.place[0], record)])

    def published_tasks(self, query: str, batch: int) -> set[int]:
        """The tasks whose part of the last batch that was begun is published.

        Raises:
            SinkError: as of `publish`.
        """
        found = self.markers.back_to(query, batch)
        mine = (k for k, m in found if (m["query"], m["batch"]) == (query, batch))
        return {int(key.rpartition("/")[2]) for key in mine}

    def owner(self) -> tuple[str, int] | None:
        """The query whose marker is the last one, and its batch; None: there is none."""
        found = self.markers.back_to("", 1 << 62)
        return (found[0][1]["query"], found[0][1]["batch"]) if found else None

    # -- what was published -----------------------------------------------------------------------

    def _was_published(self, numbered: Numbered, parts: Parts, markers: list[Marker]) -> bool:
        """Whether the markers say so.

        Raises:
            SinkError: sink.other_query, sink.batch_changed, sink.checkpoint_behind,
                sink.hanging_transaction, …
        """
        for key, marker in markers:
            if marker["query"] != numbered.query:
                if numbered.batch or marker["query"] != self._after_query:
                    raise self._other_query(numbered, marker["query"])
                return False
            if marker["batch"] > numbered.batch:
                raise self._behind(numbered, marker["batch"])
            if marker["batch"] < numbered.batch:
                return False
            if key == f"{self._id}/{numbered.task}":
                if marker["digest"] != parts.digest():
                    raise self._changed(numbered)
                return True
        return False

    def _other_query(self, numbered: Numbered, owner: str) -> SinkError:
        where = f"option id = {self._id}, topic {self.markers.place[0]}"
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

    def _behind(self, numbered: Numbered, published: int) -> SinkError:
        return SinkError(
            "sink.checkpoint_behind",
            f"batch {numbered.batch} is to be published, but batch {published} of this query"
            " already was: its checkpoint is older than the topic; nothing was published",
            where=f"option id = {self._id}, query {numbered.query}",
            suggestion="if the checkpoint was restored from a backup: start with a new checkpoint"
            f" and the option after_query = {numbered.query}, from a source that begins with what"
            " is not on the topic. If it comes from a stalled attempt, ignore it",
        )

    def _too_many(self, reason: str) -> SinkError:
        return SinkError(
            "sink.too_many_refused",
            f"the broker refuses more than {self._sink.dead_limit} rows of a task in a row:"
            f" {reason}",
            where=f"topic {self._sink.topic}",
            suggestion="if the topic's or the client's limits are too low, raise them"
            " (max.message.bytes; the option kafka.message.max.bytes); if these rows should become"
            " dead letters, raise the option dead_limit. Nothing of them was published",
        )

    def _changed(self, numbered: Numbered) -> SinkError:
        return SinkError(
            "sink.batch_changed",
            f"batch {numbered.batch} is repeated, but task {numbered.task} has other rows than it"
            " published before",
            where=f"option id = {self._id}",
            suggestion="a repeated batch must have the same rows in the same tasks: use a"
            " replayable source, and start the query with as many cores as before (with the source"
            " rate, set numPartitions)",
        )
