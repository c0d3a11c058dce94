"""Batches with numbers, each published once by any of the tasks that Spark may run for it.

A task publishes its rows in one transaction, with a marker on a compacted topic, under the key
``<id>/<task>``; see `_marker`. A task that finds the marker of its batch has been run
before. What must hold:

- a task fences every older attempt (its transactional id is that of its number) before it reads the
  markers, and so nothing can be added between reading and publishing;
- markers are read up to the end, and not only as far as no transaction is open;
- all markers of an id are in one partition: the last one says which query owns the id. A query with
  another checkpoint counts its batches from 0 again, and would publish everything twice, so it is
  refused unless it names the query that it follows;
- where a query that was started again repeats a batch which some tasks have published, the others
  publish when each of those has found that its rows are the same: rows may be divided among another
  number of tasks, which Spark does not tell.

Spark runs the tasks of a batch when all of the batch before are done. So the markers of a query are
in the order of its batches, and a task reads back only as far as those of the batch before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from eventpub import config
from eventpub.errors import SinkError
from eventpub.failpoint import failpoint
from eventpub.sink.base import no_crash
from eventpub.sink.batch import Batch
from eventpub.sink.client import Clients
from eventpub.sink.left_open import Settling, Written, end_own, note_written
from eventpub.sink.markers import Marker, Markers
from eventpub.sink.missing_markers import PartitionId, require_none_left_open
from eventpub.sink.owned_producer import Caution, OwnedProducer, fence_all
from eventpub.sink.refusals import RecordRefusedError, Refusals, Refused
from eventpub.sink.refusing import Numbered, Refusing
from eventpub.sink.topics import partition_counts
from eventpub.sink.transaction import Transactions
from eventpub.times import Patience

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

_CONFIRMED_WITHIN = 300.0
"""Seconds that the tasks which have published before may take to read their rows again."""

_ENDED_WITHIN = 3.0
"""Seconds in which Spark ends a process whose rows it has cut off; it must not take over again."""

log = logging.getLogger("eventpub.sink")


class Parts(Protocol):
    """The rows of a task in parts, which may be read before all have come, and more than once."""

    def __iter__(self) -> Iterator[Callable[[Refused, bool], Batch]]:
        """Per part the function that makes its records; refused rows are dead letters, without
        their payload where the second argument is True."""

    @property
    def has_rows(self) -> bool:
        """Whether there is any."""

    @property
    def rows(self) -> int:
        """How many have come."""

    def digest(self) -> str:
        """Hash of the set of rows, however they are divided; waits for the last row."""


@dataclass(frozen=True)
class Outcome:
    """What became of a task's rows.

    Attributes:
        is_new: whether this attempt has published them.
        marker: as of `_marker`; None: there are no rows.
    """

    is_new: bool
    marker: dict[str, Any] | None


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
            where the broker has left a transaction open; see `missing_markers`. Else `left_open`
            publishes it again.
    """

    def __init__(
        self, clients: Clients, id_: str, *, after_query: str = "", reads_back: bool = False
    ) -> None:
        self._clients, self._sink = clients, clients.sink
        self._id = id_
        self._after_query = after_query
        self._reads_back = reads_back
        self._errors = Refusing(id_, clients.sink, markers_of(clients.sink))

    @cached_property
    def partitions(self) -> dict[str, int]:
        """The number of partitions of each topic."""
        return partition_counts(self._clients)

    @cached_property
    def markers(self) -> Markers:
        topic = markers_of(self._sink)
        return Markers(self._clients, self._id, topic, self.partitions.get(topic))

    def publish(self, numbered: Numbered, parts: Parts) -> Outcome:
        """Publish one task's rows, unless that was done before.

        The transaction begins with the first part, and ends when the last is delivered. An outage
        of the broker is waited for.

        Raises:
            SinkError: sink.other_query, sink.batch_changed, sink.checkpoint_behind,
                sink.markers_gone, sink.too_many_refused, sink.rows_cut_off, sink.unreachable,
                sink.hanging_transaction, …. Nothing was published, or the markers tell that it was.
        """
        refusals, redos = Refusals(), 0
        what = f"publishing batch {numbered.batch}, task {numbered.task}"
        patience = Patience(what, self._clients.clock)
        while True:
            try:
                return self._try(numbered, parts, refusals)
            except RecordRefusedError as refusal:
                if not refusals.take(refusal):
                    raise
                if refusals.in_a_row()[0] > self._sink.dead_limit:
                    raise self._errors.too_many(refusal.reason) from refusal
            except SinkError as error:
                if error.code == "sink.rows_cut_off":
                    self._clients.clock.sleep(_ENDED_WITHIN)
                    raise
                redos += error.code in _REDO
                is_passing = error.retriable and error.code != "sink.hanging_transaction"
                if redos == _MOST_REDOS or not (error.code in _REDO or is_passing):
                    raise
                patience.wait(error)
                numbered = replace(numbered, is_repeated=True)

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
            marker = _marker(Numbered(query, -1, -1))
            transactions.run([self.markers.batch({-1: marker})], no_crash)
        # only now: an attempt that has begun before has read the markers, and is fenced
        fence_all(self._clients, self._id, tasks)
        self.markers.end_left_open(tasks)

    def settle(self, published: dict[int, dict[str, Any]], repeated: Collection[int]) -> None:
        """Publish again what was committed, and a broker has left open; see `left_open`.

        Args:
            published: the marker of each task of a batch that has rows.
            repeated: the tasks that had published before.

        Raises:
            SinkError: sink.not_visible, …
        """
        patience = Patience("checking what a batch has published", self._clients.clock)
        has_failed = False
        while published:
            try:
                if has_failed:  # anywhere
                    [(query, batch), *_] = {(m["query"], m["batch"]) for m in published.values()}
                    published |= _of_batch(self.markers.back_to(query, batch), query, batch)
                    repeated = [*published]
                Settling(self._clients, self._id, self.markers, published, repeated).run()
                return
            except SinkError as error:
                if not error.retriable:
                    raise
                has_failed = True
                patience.wait(error)

    def _try(self, numbered: Numbered, parts: Parts, refusals: Refusals) -> Outcome:
        number, before = numbered.task, (numbered.query, numbered.batch)
        if numbered.batch == 0:  # before any producer of another query is fenced
            self._own_marker(numbered, parts, self.markers.back_to(*before))
        if numbered.is_repeated and parts.has_rows and not self._reads_back:
            self._end_left_open(number)
        with closing(OwnedProducer(self._clients, self._id, number)) as owned:
            owned.ready()
            failpoint("after_take")
            if numbered.is_repeated:
                self.markers.check_leader()
            markers = self.markers.back_to(*before)
            partitions = self.partitions.get(self._sink.topic, 0)
            transactions = Transactions(self._clients, partitions or 1, owned)
            marker = self._own_marker(numbered, parts, markers)
            if marker is not None:
                if marker.get("run") != numbered.run:
                    marker["run"] = numbered.run
                    transactions.run([self.markers.batch({number: marker})], no_crash)
                return Outcome(False, marker)
            # the first marker also says who owns the id from now on
            if not parts.has_rows and (numbered.batch or number):
                return Outcome(False, None)
            if numbered.run:
                self._wait_for_confirmed(numbered, markers)
            mine = (m["refused"] for key, m in markers if key == f"{self._id}/{number}")
            refusals.before = next(mine, 0)
            marker = _marker(numbered)
            batches = self._batches(marker, parts, refusals, numbered, owned.caution)
            transactions.run(batches, failpoint)
        return Outcome(True, marker)

    def _end_left_open(self, number: int) -> None:
        """End what a former attempt of a task has left open, by a producer that does nothing else:
        an abort may leave a doubt."""
        topics = {t: self.partitions.get(t, 0) for t in self._sink.topics}
        with closing(OwnedProducer(self._clients, self._id, number)) as owned:
            owned.ready()
            places = [(topic, n) for topic, count in topics.items() for n in range(count)]
            end_own(self._clients, Transactions(self._clients, 1, owned), places)

    def _batches(
        self,
        marker: dict[str, Any],
        parts: Parts,
        refusals: Refusals,
        numbered: Numbered,
        caution: Caution,
    ) -> Iterator[Batch]:
        """What the transaction holds: the records of each part, and the marker."""
        checked = set[PartitionId]()
        written: Written = {}
        for number, make in enumerate(parts):
            batch = make(refusals.begin(number), caution.reduces_dead)
            refusals.made({topic: len(of.partitions) for topic, of in batch.events.items()})
            if self._reads_back:
                # not of the side topics, where another task may have one open for good reason
                own = {place for place in batch.places if place[0] == self._sink.topic}
                require_none_left_open(self._clients, self._id, own - checked)
                checked |= own
            yield batch
            if not self._reads_back:
                note_written(written, batch)
        digest, rows = parts.digest(), parts.rows
        marker |= {"digest": digest, "rows": rows, "written": written}
        marker["refused"] = refusals.in_a_row()[1]
        last = self.markers.batch({numbered.task: marker})
        yield last
        note_written(written, last)

    def published_tasks(self, query: str, batch: int) -> set[int]:
        """The tasks whose part of the last batch that was begun is published.

        Raises:
            SinkError: as of `publish`.
        """
        return {*_of_batch(self.markers.back_to(query, batch), query, batch)}

    def owner(self) -> tuple[str, int] | None:
        """The query whose marker is the last one, and its batch; None: there is none."""
        found = self.markers.back_to("", 1 << 62)
        return (found[0][1]["query"], found[0][1]["batch"]) if found else None

    # -- what was published -----------------------------------------------------------------------

    def _own_marker(
        self, numbered: Numbered, parts: Parts, markers: list[Marker]
    ) -> dict[str, Any] | None:
        """The marker of this task's rows; None: they were not published.

        Raises:
            SinkError: sink.other_query, sink.batch_changed, sink.checkpoint_behind,
                sink.markers_gone, sink.hanging_transaction, …
        """
        is_unknown = numbered.is_repeated and numbered.batch and not markers
        if is_unknown and self._after_query != numbered.query:
            raise self._errors.markers_gone(numbered)
        for key, marker in markers:
            if marker["query"] != numbered.query:
                if numbered.batch or marker["query"] != self._after_query:
                    raise self._errors.other_query(numbered, marker["query"])
                return None
            if marker["batch"] > numbered.batch:
                raise self._errors.behind(numbered, marker["batch"])
            if marker["batch"] < numbered.batch:
                return None
            if key == f"{self._id}/{numbered.task}":
                if marker["digest"] != parts.digest():
                    raise self._errors.changed(numbered, marker.get("rows", 0), parts.rows)
                return marker
        return None

    def _wait_for_confirmed(self, numbered: Numbered, markers: list[Marker]) -> None:
        """Until each task that an earlier run has published has found the same rows in this one.

        Raises:
            SinkError: sink.batch_changed: one has not.
        """
        began = self._clients.clock.monotonic()
        query, batch = numbered.query, numbered.batch
        while True:
            others = _of_batch(markers, query, batch).items()
            if not (waiting := sorted(task for task, m in others if m.get("run") != numbered.run)):
                return
            waited = self._clients.clock.monotonic() - began
            if not waited:
                log.warning(
                    "batch %d is repeated; waiting until tasks %s, published by an"
                    " earlier run, have confirmed their rows",
                    batch,
                    waiting,
                )
            if waited > _CONFIRMED_WITHIN:
                raise self._errors.unconfirmed(numbered, waiting, waited)
            self._clients.clock.sleep(0.2)
            markers = self.markers.back_to(query, batch)


def _marker(numbered: Numbered) -> dict[str, Any]:
    """What is kept of a task's rows: whose they are, their digest and number, where they are
    (`left_open.Written`), and how many the broker has refused in a row up to the last."""
    whose = {"query": numbered.query, "batch": numbered.batch, "run": numbered.run}
    return {**whose, "digest": "", "rows": 0, "written": {}, "refused": 0}


def _of_batch(markers: list[Marker], query: str, batch: int) -> dict[int, dict[str, Any]]:
    """The last marker of each task that has published its part of a batch."""
    found: dict[int, dict[str, Any]] = {}
    for key, marker in markers:
        if (marker["query"], marker["batch"]) == (query, batch):
            found.setdefault(int(key.rpartition("/")[2]), marker)
    return found
