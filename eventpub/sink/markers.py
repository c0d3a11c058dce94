"""The topic of markers, which record published batches.

All markers of an id are in one partition. They also record where a task's rows are, so that
`missing_markers.Settling` can republish what a broker has left open.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from eventpub import config
from eventpub.errors import SinkError
from eventpub.sink import faults
from eventpub.sink.base import Refused
from eventpub.sink.batch import Batch
from eventpub.sink.client import Clients
from eventpub.sink.layout import check_leaders
from eventpub.sink.reading import iter_ranges
from eventpub.sink.records import SOURCE, Header, PartitionId, Record
from eventpub.sink.topics import (
    MARKER_TIMEOUT,
    create,
    end_all,
    hanging,
    list_offsets,
    open_below,
)
from eventpub.sink.transaction import TransactionWriter

_ENDED_WITHIN = 30.0
"""Seconds for a broker to end a transaction that has lasted too long."""

_READ_AT_FIRST = 64
"""Markers read at first; four times as many each time these do not suffice."""

_PARTITIONS = 16
"""Partition count of a new topic of markers."""

Marker = tuple[int, dict[str, Any]]
"""Its number, and its content."""

SAME_ROWS = (
    "a repeated batch must have the same rows, divided among tasks as before: use a replayable"
    " source, and start with as many partitions and at least as many cores as tasks (source rate:"
    " set numPartitions; after a shuffle: set spark.sql.shuffle.partitions, and"
    " spark.sql.adaptive.enabled = false, or Spark divides rows by the cores it then has)"
)


@dataclass(frozen=True)
class Numbered:
    """One task's part of a batch.

    `query` is the id that Spark keeps in the checkpoint; `batch` and `task` count from 0.
    `is_repeated`: there may have been another attempt. `run` names this start of the query; "": a
    start always divides rows as the one before. `after`: a batch that this task has published, and
    that must be visible; -1: none, or unknown. `after_query`: the query that it may take over from.
    `owner`: the start of a publisher, which has taken the id; "": the query owns it.
    """

    query: str
    batch: int
    task: int
    is_repeated: bool = False
    run: str = ""
    after: int = -1
    after_query: str = ""
    owner: str = ""

    def marker(self) -> dict[str, Any]:
        """An empty marker: owner, start and task; the rows' digest, count, offsets and trailing
        refusals."""
        whose = {"query": self.query, "batch": self.batch, "run": self.run, "task": self.task}
        whose["owner"] = self.owner or self.query
        return {**whose, "digest": "", "rows": 0, "written": {}, "refused": 0}


class Parts(Protocol):
    """A task's rows in parts; iterable before all have arrived, and more than once."""

    def __iter__(self) -> Iterator[Callable[[Refused, bool], Batch]]:
        """Functions that encode the parts; refused rows become dead letters, reduced on request."""

    @property
    def has_rows(self) -> bool:
        """Whether there is any row."""

    @property
    def rows(self) -> int:
        """Rows received so far."""

    def topics(self) -> set[str]:
        """Topics that a column names; waits for the last row."""

    def digest(self) -> str:
        """Hash of the set of rows, independent of how it is divided; waits for the last row."""


def markers_of_batch(markers: list[Marker], query: str, batch: int) -> dict[int, dict[str, Any]]:
    """The last marker of each part of a batch that is published, by its number."""
    found: dict[int, dict[str, Any]] = {}
    for number, marker in markers:
        if (marker["query"], marker["batch"]) == (query, batch):
            found.setdefault(number, marker)
    return found


def unnoticed_for(sink: config.Sink) -> float:
    """Seconds for which a transaction left open looks like any other."""
    return sink.transaction_timeout / 1e6 + _ENDED_WITHIN


def place_of(markers: str, id_: str, partitions: int) -> PartitionId:
    return markers, zlib.crc32(id_.encode()) % partitions


def topic_missing(sink: config.Sink, topic: str) -> SinkError:
    return faults.topic_missing(sink, topic, _PARTITIONS, "cleanup.policy=compact")


class Markers:
    """The markers of one id; creates a missing topic if `create_topics` allows it.

    `is_publisher`: the query is a publisher's, which has taken the id.
    """

    def __init__(
        self,
        clients: Clients,
        id_: str,
        topic: str,
        partitions: int | None,
        *,
        is_publisher: bool = False,
    ) -> None:
        self._clients, self._id = clients, id_
        self._is_publisher = is_publisher
        if partitions is None and not clients.sink.create_topics:
            raise topic_missing(clients.sink, topic)
        number = partitions or create(clients, [topic], _PARTITIONS, policy="compact")[topic]
        self.place = place_of(topic, id_, number)

    def back_to(self, query: str, batch: int, *, waits: float | None = None) -> list[Marker]:
        """This id's markers back to the previous batch or another query's, the last first.

        Of each number only the last, as the compacted topic may have: there may be days between.
        It `waits` so many seconds for open transactions, by default as long as one may last. A task
        that published nothing has no marker, so a batch may have none. Those of owners are of none.
        Nothing is returned if some of what is needed was removed, as by retention.

        Raises:
            SinkError: sink.hanging_transaction, ….
        """
        end = list_offsets(self._clients, [self.place], "latest")[self.place]
        open_for = unnoticed_for(self._clients.sink) if waits is None else waits
        if held := open_below(self._clients, {self.place: end}, open_for):
            raise hanging(self._clients.sink, self.place, held[self.place], end, open_for)
        low, count = 0, _READ_AT_FIRST
        while True:
            begin, is_enough = max(low, end - count), False
            found: dict[int, dict[str, Any]] = {}
            try:
                for number, marker in self._read(begin, end):
                    is_enough |= marker["query"] != query or 0 <= marker["batch"] < batch
                    found.pop(number, None)
                    found[number] = marker
            except SinkError as error:
                if error.code != "sink.offset_gone":
                    raise
                low = list_offsets(self._clients, [self.place], "earliest")[self.place]
                continue
            if is_enough or begin == low:
                return [*reversed(found.items())] if is_enough or not low else []
            count *= 4

    def owner(self) -> tuple[str, str] | None:
        """The last marker's query, and the owner that it names; None without markers."""
        found = self.back_to("", 1 << 62)
        return (found[0][1]["query"], found[0][1].get("owner", "")) if found else None

    def are_after(self, owner: str) -> bool:
        """Whether an attempt of a former owner has committed since this owner took the id.

        Also False if another owner has taken it since, or an open transaction hides the markers.
        """
        try:
            found = [marker for _, marker in self.back_to("", 1 << 62, waits=MARKER_TIMEOUT)]
        except SinkError as error:
            if error.code != "sink.hanging_transaction":
                raise
            return False
        owners = (marker["owner"] for marker in found if marker["batch"] < 0)
        return bool(found) and found[0]["batch"] >= 0 and next(owners, owner) == owner

    def _read(self, begin: int, end: int) -> Iterator[Marker]:
        """This id's markers in a range."""
        ranges = {self.place: (begin, end)}
        for message in iter_ranges(self._clients, ranges, committed=True, few=True):
            id_, _, number = (message.key() or b"").decode(errors="replace").rpartition("/")
            is_ours = id_ == self._id and number.lstrip("-").isdigit()
            if is_ours and message.value():
                yield int(number), json.loads(message.value())

    def batch(self, markers: Mapping[int, Mapping[str, Any]]) -> Batch:
        now = int(self._clients.clock.time() * 1000)
        own: list[Header] = [(SOURCE, self._id)]
        values = {f"{self._id}/{task}": json.dumps(each).encode() for task, each in markers.items()}
        records = [Record(key, value, self.place[1], now, own) for key, value in values.items()]
        return Batch({}, [(self.place[0], record) for record in records])

    def check_leader(self) -> None:
        """Check that no marker is missed: a leader cut off from the others lacks the last ones."""
        check_leaders(self._clients, [self.place])

    def end_left_open(self, tasks: int) -> None:
        """Abort what this id has left open among the markers; a new checkpoint needs no old ones.

        Transactions of other ids stay open. `tasks`: at least as many as have written.
        """

        def end_open(_: Any) -> None:
            ends = list_offsets(self._clients, [self.place], "latest")
            for number in ("owner", *range(tasks)):
                with TransactionWriter(self._clients, self._id, number) as writer:
                    writer.run_aborted([self.place])
                if not open_below(self._clients, ends, 0):
                    return

        try:
            end_all(self._clients, [self.place], end_open)
        except SinkError as error:
            if error.code != "sink.hanging_transaction":
                raise

    # -- a task's own marker ----------------------------------------------------------------------

    def number_of(self, numbered: Numbered, parts: Parts, markers: list[Marker]) -> int | None:
        """The number under which this task's rows are published; None if they were not.

        Raises:
            SinkError: sink.other_query, sink.batch_changed, sink.checkpoint_behind,
                sink.markers_gone, sink.hanging_transaction, …
        """
        self._require_turn(numbered, markers)
        query, batch = numbered.query, numbered.batch
        published = markers_of_batch(markers, query, batch)
        of_before = []
        for number, marker in published.items():
            if marker["run"] != numbered.run:
                of_before.append(number)
            elif marker["task"] == numbered.task:
                if marker["digest"] != parts.digest():
                    self.refuse(
                        "sink.batch_changed",
                        f"batch {batch} is repeated, but task {numbered.task} has other rows"
                        f" ({parts.rows}) than it published before ({marker['rows']}): the source"
                        " returns other rows, or divides them differently",
                        suggestion=SAME_ROWS,
                    )
                return number
        # after a restart a source may number its tasks differently, as Spark's own for Kafka does
        of_before.sort(key=lambda number: number != numbered.task)
        alike = (n for n in of_before if published[n]["digest"] == parts.digest())
        return next(alike, None)

    def _require_turn(self, numbered: Numbered, markers: list[Marker]) -> None:
        """Refuse a batch that is not the last one of the id's owner, or the next."""
        query, batch = numbered.query, numbered.batch
        had_some = batch or self._is_publisher  # of the first batch, or of the owner
        if had_some and not markers and numbered.after_query != query:
            self.refuse(
                "sink.markers_gone",
                f"batch {batch} of this query is to be published, and topic {self.place[0]} has no"
                " marker of this id, so whether it was published before is unknown",
                suggestion="if the option topic or id was changed: change it back, or start with a"
                " new checkpoint. If the markers were deleted (their topic must be compacted only):"
                f" check that no row of batch {batch} is on the topic, then set the option"
                f' after_query to "{query}"',
            )
        if not markers:
            return
        owner = markers[0][1]["query"]
        published = max((m["batch"] for _, m in markers if m["query"] == query), default=-1)
        is_owner = markers[0][1].get("owner", owner) == (numbered.owner or query)
        if not is_owner and (batch or self._is_publisher):
            self.refuse(
                "sink.other_query",
                f"another publisher (query {owner}) has taken over this id; nothing was lost or"
                " repeated, and this one stops",
                suggestion="let only one publisher run for an id; or give this one another id",
            )
        if owner not in {query, numbered.after_query}:
            self.refuse(
                "sink.other_query",
                f"query {owner} publishes with this id, and this query has another checkpoint:"
                " it would publish everything again",
                suggestion="start the query with its previous checkpoint; or give it another"
                f" id; or, if it replaces query {owner}, which must have stopped, set the"
                f' option after_query to "{owner}"',
            )
        if owner == query and published > batch:
            self.refuse(
                "sink.checkpoint_behind",
                f"batch {batch} is to be published, but batch {published} of this query already"
                " was: its checkpoint is older than the topic; nothing was published",
                suggestion="if the checkpoint was restored from a backup: start with a new"
                f" checkpoint and the option after_query = {query}, from a source that begins"
                " with what is not on the topic. If a stalled attempt reports this, ignore it",
            )

    def refuse(self, code: str, message: str, *, suggestion: str) -> NoReturn:
        where = f"option id = {self._id}, topic {self.place[0]}"
        raise SinkError(code, message, where=where, suggestion=suggestion)
