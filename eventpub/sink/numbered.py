"""Numbered batches, each published once by any of the tasks that Spark may run for it.

A task publishes its rows in one transaction, with a marker on a compacted topic under the key
``<id>/<number>``, mostly the task's own number. A marker of its batch shows that the task has run
before. What must hold:

- whoever publishes under a number fences every older attempt (the transactional id has it) before
  reading the markers, so nothing can be added under it between reading and publishing;
- markers are read to the high watermark, not only to the last stable offset;
- all markers of an id are in one partition: the last one names its owner, a query or a publisher's
  start. A query with another checkpoint counts batches from 0 again and would publish everything
  twice, so it is refused unless it names its predecessor;
- if a restarted query repeats a partly published batch, tasks with other rows wait until tasks have
  come with all published ones: Spark may have divided rows among another number of tasks. It may
  also have given the same tasks other numbers, so a restart recognises rows by their digest, and a
  task whose number has other rows publishes under one that is left.

Spark starts a batch when the previous one is done. So a query's markers are in the order of its
batches, and a task reads them back only to the previous batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from eventpub import config
from eventpub.errors import SinkError
from eventpub.failpoint import failpoint
from eventpub.sink.base import REDO, RecordRefusedError, Refusals
from eventpub.sink.batch import Batch
from eventpub.sink.client import Clients, log
from eventpub.sink.markers import (
    SAME_ROWS,
    Marker,
    Markers,
    Numbered,
    Parts,
    markers_of_batch,
)
from eventpub.sink.missing_markers import (
    Settling,
    note_written,
    require_none_left_open,
    spans_of,
    unseen,
)
from eventpub.sink.records import PartitionId
from eventpub.sink.topics import MARKER_TIMEOUT, list_offsets, open_below, partition_counts
from eventpub.sink.transaction import TransactionWriter, fence_all
from eventpub.times import Patience

_REDO = REDO | {"sink.fenced", "sink.own_request_late"}
_NOT_PASSING = {"sink.hanging_transaction", "sink.transaction_expired"}
"""Retriable errors with which a task ends: the same rows are as likely to take as long again."""
_MOST_REDOS = 8

_CONFIRMED_WITHIN = 300.0
"""Seconds for tasks that published before to read their rows again."""

_ENDED_WITHIN = 3.0
"""Seconds until Spark ends a process whose rows it has cut off; it must not take over again."""


@dataclass(frozen=True)
class Outcome:
    """`is_new`: published by this attempt; `marker`: see `Numbered.marker`, None without rows;
    `number`: under which it is kept."""

    is_new: bool
    number: int
    marker: dict[str, Any] | None


def markers_of(sink: config.Sink) -> str:
    return f"{sink.topic}.batches"


def require_owner(clients: Clients, id_: str, owner: str) -> None:
    """Raise `sink.other_query` if another publisher or query has taken over an id.

    A publisher without markers calls it once it has fenced its predecessors: a later takeover
    fences the publisher. `owner`: the name that it gave to `NumberedSink.take`.
    """
    if markers_of(clients.sink) not in partition_counts(clients):
        return
    sink = NumberedSink(clients, id_)
    sink.markers.check_leader()
    found = sink.markers.owner()
    if found is not None and found[1] != owner:
        raise SinkError(
            "sink.other_query",
            f"another publisher (query {found[0]}) has taken over this app.id; nothing was lost or"
            " repeated, and this one stops",
            where=f"app.id = {id_}, topic {clients.sink.topic}",
            suggestion="let only one publisher run for an app.id",
        )


class NumberedSink:
    """Publishes the batches of one id.

    `at_start`: the partitions that a publisher's topics had at its start, and with which its source
    divides rows; those added since count from its next start on. Its new checkpoint republishes
    what is not visible, so a task fails where the broker has left a transaction open. For others
    (0) `settle` republishes it.
    """

    def __init__(self, clients: Clients, id_: str, *, at_start: int = 0) -> None:
        self._clients, self._sink = clients, clients.sink
        self._id = id_
        self._at_start = at_start

    @cached_property
    def partitions(self) -> dict[str, int]:
        """Partition count of each topic."""
        return self.count_partitions()

    def count_partitions(self) -> dict[str, int]:
        found, most = partition_counts(self._clients), self._at_start
        own = {*self._sink.topics} if most else set()
        return {name: min(n, most) if name in own else n for name, n in found.items()}

    @cached_property
    def markers(self) -> Markers:
        topic, is_publisher = markers_of(self._sink), bool(self._at_start)
        counted = self.partitions.get(topic)
        return Markers(self._clients, self._id, topic, counted, is_publisher=is_publisher)

    def publish(self, numbered: Numbered, parts: Parts) -> Outcome:
        """Publish one task's rows, unless that was done before; waits while the broker is away.

        The transaction begins with the first part, and ends when the last is delivered.

        Raises:
            SinkError: sink.other_query, sink.batch_changed, sink.checkpoint_behind,
                sink.markers_gone, sink.too_many_refused, sink.rows_cut_off, sink.unreachable,
                sink.hanging_transaction, …. Nothing was published, or the markers show that it was.
        """
        refusals, redos = Refusals(self._sink), 0
        what = f"publishing batch {numbered.batch}, task {numbered.task}"
        patience = Patience(what, self._clients.clock)
        while True:
            try:
                return self._try(numbered, parts, refusals)
            except RecordRefusedError:
                if not refusals.has_new:
                    raise
            except SinkError as error:
                if error.code == "sink.rows_cut_off":
                    self._clients.clock.sleep(_ENDED_WITHIN)
                    raise
                redos += error.code in _REDO
                is_passing = error.retriable and error.code not in _NOT_PASSING
                if redos == _MOST_REDOS or not (error.code in _REDO or is_passing):
                    raise
                patience.wait(error)
                numbered = replace(numbered, is_repeated=True)

    def take(self, query: str, tasks: int, owner: str = "", after: list[str] | None = None) -> bool:
        """Make a query, or its start `owner`, the owner and fence others; `tasks`: at least as many
        as they have. False, and nothing is done: its last owner is none of `after`."""
        marker = Numbered(query, -1, -1, owner=owner).marker()
        while True:
            with self._writer("owner") as writer:  # no other start takes it meanwhile
                if after is not None and self.markers.owner() not in {(query, n) for n in after}:
                    return False
                writer.run([self.markers.batch({-1: marker})])
            # only now: an attempt that began before has read the markers, and is fenced
            fence_all(self._clients, self._id, tasks)
            self.markers.end_left_open(tasks)
            if not self.markers.are_after(marker["owner"]):
                return True

    def settle(self, published: dict[int, dict[str, Any]], repeated: Collection[int]) -> None:
        """Republish what was left open (see `Settling`), or raise `sink.not_visible`."""
        patience = Patience("checking what a batch has published", self._clients.clock)
        has_failed = False
        while published:
            try:
                if has_failed:  # anywhere
                    [(query, batch), *_] = {(m["query"], m["batch"]) for m in published.values()}
                    published |= markers_of_batch(self.markers.back_to(query, batch), query, batch)
                    repeated = [*published]
                Settling(self._clients, self._id, self.markers, published, repeated).run()
                return
            except SinkError as error:
                if not error.retriable:
                    raise
                has_failed = True
                patience.wait(error)

    def published_tasks(self, query: str, batch: int) -> set[int]:
        """Tasks that have published their part of this batch, the last one begun."""
        return {*markers_of_batch(self.markers.back_to(query, batch), query, batch)}

    def _writer(self, number: int | str) -> TransactionWriter:
        return TransactionWriter(self._clients, self._id, number)

    def _try(self, numbered: Numbered, parts: Parts, refusals: Refusals) -> Outcome:
        task, before = numbered.task, (numbered.query, numbered.batch)
        if numbered.batch == 0 or numbered.is_repeated:  # before another query is fenced
            self._require_turn(numbered, parts)
        number = task
        while True:
            if numbered.is_repeated and not self._at_start:
                self._end_left_open(number, parts)
            with self._writer(number) as writer:
                failpoint("after_take")
                if numbered.is_repeated:
                    self.markers.check_leader()
                markers = self.markers.back_to(*before)
                to = self.markers.number_of(numbered, parts, markers)
                if to is None:
                    is_taken = task in markers_of_batch(markers, *before)
                    if numbered.run and (parts.has_rows or is_taken):
                        markers = self._wait_for_confirmed(numbered, markers)
                    # the first marker also names the id's new owner
                    if not parts.has_rows and (numbered.batch or task):
                        return Outcome(False, task, None)
                    to = _free(task, markers_of_batch(markers, *before))
                if to == number:  # no other task can take it meanwhile
                    return self._publish(
                        numbered, parts, refusals, number=number, writer=writer, markers=markers
                    )
            number = to

    def _require_turn(self, numbered: Numbered, parts: Parts) -> None:
        if numbered.is_repeated:
            self.markers.check_leader()
        try:
            markers = self.markers.back_to(numbered.query, numbered.batch, waits=0.0)
        except SinkError as error:  # an earlier attempt of this task may have left one open
            if error.code != "sink.hanging_transaction":
                raise
        else:
            self.markers.number_of(numbered, parts, markers)

    def _publish(  # noqa: PLR0913 (by keyword)
        self,
        numbered: Numbered,
        parts: Parts,
        refusals: Refusals,
        *,
        number: int,
        writer: TransactionWriter,
        markers: list[Marker],
    ) -> Outcome:
        """Publish the rows under this number, or confirm that an earlier start has."""
        task, run = numbered.task, numbered.run
        published = markers_of_batch(markers, numbered.query, numbered.batch)
        if (marker := published.get(number)) is not None:
            if (marker["task"], marker["run"]) != (task, run):
                marker |= {"task": task, "run": run}
                writer.run([self.markers.batch({number: marker})])
            return Outcome(False, number, marker)
        if numbered.after >= 0:
            self._require_visible(numbered, markers)
        before = (m for _, m in markers if m["batch"] < numbered.batch)
        mine = (m["refused"] for m in before if m["task"] == task)
        refusals.before = next(mine, 0)
        marker, reduced = numbered.marker(), writer.caution.reduces_dead
        batches = self._batches(number, marker, parts, refusals, reduced)
        writer.run(batches, failpoint, on_refusal=refusals.take)
        return Outcome(True, number, marker)

    def _end_left_open(self, number: int, parts: Parts) -> None:
        """End what earlier attempts left open in any topic of the rows.

        In each attempt, and before its transaction, by a producer of its own: an abort may leave a
        doubt. What another task has open stays open.
        """
        names = {self._sink.topic, *parts.topics()}
        topics = {t for n in names for t in self._sink.model_copy(update={"topic": n}).topics}
        places = [(topic, n) for topic in topics for n in range(self.partitions.get(topic, 0))]
        with self._writer(number) as writer:
            ends = list_offsets(self._clients, places, "latest") if places else {}
            if held := open_below(self._clients, ends, MARKER_TIMEOUT):
                writer.run_aborted(held)

    def _batches(
        self,
        number: int,
        marker: dict[str, Any],
        parts: Parts,
        refusals: Refusals,
        reduced: bool,
    ) -> Iterator[Batch]:
        """The transaction's batches: the records of each part, then the marker."""
        checked = set[PartitionId]()
        written: dict[str, Any] = {}
        for part, make in enumerate(parts):
            batch = make(refusals.begin(part), reduced)
            refusals.made({topic: len(of.partitions) for topic, of in batch.events.items()})
            if self._at_start:
                # not side topics, where another task may have one open for good reason
                own = {place for place in batch.places if place[0] == self._sink.topic} - checked
                if own:
                    require_none_left_open(self._clients, self._id, own)
                checked |= own
            yield batch
            note_written(written, batch)
        if refusals.has_new:
            return
        digest, rows = parts.digest(), parts.rows
        marker |= {"digest": digest, "rows": rows, "written": written}
        marker["refused"] = refusals.in_a_row()[1]
        last = self.markers.batch({number: marker})
        failpoint("before_marker")
        yield last
        failpoint("after_marker")
        note_written(written, last)

    def _require_visible(self, numbered: Numbered, markers: list[Marker]) -> None:
        """Check that what this task published last is visible, before more is published.

        A coordinator that has lost its decision aborts what it had committed, and so may an
        operator.
        """

        def last(markers: list[Marker]) -> dict[str, Any] | None:
            of_task = (m for number, m in markers if number == numbered.task)
            return next((m for m in of_task if m["batch"] >= numbered.after), None)

        marker = last(markers) or last(self.markers.back_to(numbered.query, numbered.after))
        spans = [] if marker is None else spans_of({numbered.task: marker})
        written = {s.place: (s.first, s.end) for s in spans if s.place[0] == self._sink.topic}
        place = self.markers.place
        if marker is None and list_offsets(self._clients, [place], "earliest")[place]:
            self.markers.refuse(
                "sink.markers_gone",
                f"topic {place[0]} no longer has the marker of task {numbered.task} of batch"
                f" {numbered.after}, so whether its rows are visible is unknown; nothing more was"
                " published",
                suggestion=f"set cleanup.policy = compact for {place[0]}: retention has removed"
                " markers. A new checkpoint reads the topic back",
            )
        if marker is None or (written and unseen(self._clients, written)):
            self.markers.refuse(
                "sink.not_visible",
                f"batch {numbered.after} was published, and task {numbered.task} of it is not"
                " visible any more: the broker has lost the commit, or an operator has aborted it;"
                " nothing more was published",
                suggestion="nothing to do: a new checkpoint reads topic and table from the start,"
                " and publishes what is missing",
            )

    def _wait_for_confirmed(self, numbered: Numbered, markers: list[Marker]) -> list[Marker]:
        """Wait until tasks have come with all rows that an earlier run has published."""
        began = self._clients.clock.monotonic()
        query, batch = numbered.query, numbered.batch
        while True:
            others = markers_of_batch(markers, query, batch).items()
            if not (waiting := sorted(number for number, m in others if m["run"] != numbered.run)):
                return markers
            waited = self._clients.clock.monotonic() - began
            if not waited:
                log.warning(
                    "batch %d is repeated; waiting for the rows of its published parts %s",
                    batch,
                    waiting,
                )
            if waited > _CONFIRMED_WITHIN:
                self.markers.refuse(
                    "sink.batch_changed",
                    f"batch {batch} is repeated, but within {waited:.0f} s no task had the rows"
                    f" that a previous start published as part {', '.join(map(str, waiting))}:"
                    " the source returns other rows, or divides them differently, or there are"
                    " fewer cores than tasks; nothing more was published",
                    suggestion=SAME_ROWS,
                )
            self._clients.clock.sleep(0.2)
            markers = self.markers.back_to(query, batch)


def _free(task: int, published: Mapping[int, Mapping[str, Any]]) -> int:
    """A number for a task's rows: its own, or one left by a task whose rows have another.

    Each task has at most one number, so no two tasks come to the same one.
    """
    while (marker := published.get(task)) is not None:
        task = marker["task"]
    return task
