"""Batches with numbers, each published once by any of the tasks that Spark may run for it.

A task publishes its rows in one transaction, with a marker on a compacted topic:
``{"query", "batch", "digest"}`` under the key ``<id>/<task>``. A task that finds the marker of its
batch has been run before. What must hold:

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
import time
import zlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from eventpub import config
from eventpub.errors import SinkError
from eventpub.failpoint import failpoint
from eventpub.sink.batch import Batch
from eventpub.sink.caution import caution_of
from eventpub.sink.faults import RecordRefusedError
from eventpub.sink.fencing import fence_all, transactional_id
from eventpub.sink.owned_producer import OwnedProducer
from eventpub.sink.producing import no_crash
from eventpub.sink.reading import iter_ranges
from eventpub.sink.records import Record
from eventpub.sink.topics import create, list_offsets, partition_counts
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

_OPEN_FOR = 90.0
"""Seconds for which a transaction of another task may hide markers: longer than one may last."""

_READ_AT_FIRST = 64
"""Markers that are read back at first; four times as many each time that they do not tell."""

_PARTITIONS = 16
"""Of a topic of markers that is created."""

log = logging.getLogger("eventpub.sink")

MakeBatch = Callable[[dict[str, dict[int, str]]], Batch]
"""Makes the records; by topic, the rows that the broker refuses, and why, are dead letters."""


@dataclass(frozen=True)
class Numbered:
    """One task's part of a batch.

    Attributes:
        query: the query's id, as Spark keeps it in the checkpoint.
        batch: the number of the batch, from 0.
        task: the number of the task, from 0.
        digest: of the task's rows, in their order.
    """

    query: str
    batch: int
    task: int
    digest: str


def markers_of(sink: config.Sink) -> str:
    """The topic of the markers."""
    return f"{sink.topic}.batches"


def require_owner(sink: config.Sink, id_: str, owner: str) -> None:
    """Check that no query has taken an id over from a publisher that does without markers.

    To be called when the publisher has fenced whoever published before: what takes over later
    fences it.

    Args:
        owner: what the publisher has called itself in `NumberedSink.take`.

    Raises:
        SinkError: sink.other_query, ….
    """
    if markers_of(sink) not in partition_counts(sink):
        return
    found = NumberedSink(sink, id_, markers_of(sink)).owner()
    if found is not None and found != owner:
        raise SinkError(
            "sink.other_query",
            "a publisher with the engine spark has taken over this app.id; nothing was lost or"
            " repeated, and this one stops",
            where=f"app.id = {id_}, topic {sink.topic}",
            suggestion="let only one publisher run for an app.id",
        )


class NumberedSink:
    """Publishes the batches of one id.

    Args:
        sink: the configuration.
        id_: names what publishes; a part of the transactional ids.
        markers: the topic of the markers.
        after_query: the query whose id may be taken over; "": none.
    """

    def __init__(self, sink: config.Sink, id_: str, markers: str, *, after_query: str = "") -> None:
        self._sink = sink
        self._id = id_
        self._after_query = after_query
        counts = partition_counts(sink)
        self.partitions: dict[str, int] = counts
        number = counts.get(markers) or create(sink, markers, _PARTITIONS, is_compacted=True)
        self._place = (markers, zlib.crc32(id_.encode()) % number)

    def publish(self, numbered: Numbered, make: MakeBatch) -> bool:
        """Publish a part of a batch; False where that was done before.

        Raises:
            SinkError: sink.other_query, sink.batch_changed, sink.too_many_refused,
                sink.unreachable, …. Nothing was published, or the markers tell that it was.
        """
        if numbered.batch == 0:  # before any producer of another query is fenced
            self._was_published(numbered)
        refused: dict[str, dict[int, str]] = {}
        pause, redos = _REDO_PAUSE, 0
        while True:
            try:
                return self._try(numbered, make(refused))
            except RecordRefusedError as refusal:
                before = sum(map(len, refused.values()))
                for topic, rows in refusal.by_topic.items():
                    refused.setdefault(topic, {}).update(dict.fromkeys(rows, refusal.reason))
                if sum(map(len, refused.values())) == before:
                    raise
            except SinkError as error:
                redos += error.code in _REDO
                if redos == _MOST_REDOS or not (error.code in _REDO or error.retriable):
                    raise
                log.warning("batch %s is tried again: %s", numbered.batch, error.message)
                time.sleep(pause)  # a broker that is away is waited for
                pause = min(2 * pause, _LONGEST_PAUSE)

    def take(self, query: str, tasks: int) -> None:
        """Have a query own the id: whatever another one still publishes is refused or fenced.

        Args:
            tasks: at least as many as the other query may have.

        Raises:
            SinkError: as of `publish`.
        """
        with closing(OwnedProducer(self._sink, self._id, "owner")) as owned:
            owned.ready()
            caution = caution_of((self._sink.bootstrap_servers, f"{self._id}.owner"))
            transactions = Transactions(self._sink, self._id, 1, owned, caution)
            marker = self._marker(Numbered(query, -1, -1, ""))
            transactions.run(Batch({}, [(self._place[0], marker)]), no_crash, lambda _: None)
        # only now: an attempt that has begun before has read the markers, and is fenced
        fence_all(self._sink, self._id, tasks)

    def _try(self, numbered: Numbered, batch: Batch) -> bool:
        number = numbered.task
        caution = caution_of((self._sink.bootstrap_servers, transactional_id(self._id, number)))
        owned = OwnedProducer(self._sink, self._id, number, sends_singly=caution.sends_singly)
        with closing(owned):
            owned.ready()
            failpoint("after_take")
            if self._was_published(numbered):
                return False
            batch.side.append((self._place[0], self._marker(numbered)))
            partitions = self.partitions.get(self._sink.topic, 1)
            transactions = Transactions(self._sink, self._id, partitions, owned, caution)
            transactions.run(batch, failpoint, lambda _: None)
        return True

    def _marker(self, numbered: Numbered) -> Record:
        value = {
            "query": numbered.query,
            "batch": numbered.batch,
            "digest": numbered.digest,
        }
        return Record(
            key=f"{self._id}/{numbered.task}",
            value=json.dumps(value).encode(),
            partition=self._place[1],
            timestamp=int(time.time() * 1000),
            headers=[],
        )

    def published_tasks(self, query: str, batch: int) -> set[int]:
        """The tasks whose part of the last batch that was begun is published.

        Raises:
            SinkError: as of `publish`.
        """
        found = self._markers(Numbered(query, batch, -1, ""))
        mine = (k for k, m in found if (m["query"], m["batch"]) == (query, batch))
        return {int(key.rpartition("/")[2]) for key in mine}

    def owner(self) -> str | None:
        """The query whose marker is the last one; None: there is none."""
        reader = Numbered("", 1 << 62, -1, "")
        found = self._markers(reader)
        return found[0][1]["query"] if found else None

    # -- what was published -----------------------------------------------------------------------

    def _was_published(self, numbered: Numbered) -> bool:
        """Whether the markers say so.

        Raises:
            SinkError: sink.other_query, sink.batch_changed, sink.hanging_transaction, …
        """
        for key, marker in self._markers(numbered):
            if marker["query"] != numbered.query:
                if numbered.batch or marker["query"] != self._after_query:
                    raise self._other_query(numbered, marker["query"])
                return False
            if marker["batch"] > numbered.batch:
                return True
            if marker["batch"] < numbered.batch:
                return False
            if key == f"{self._id}/{numbered.task}":
                if marker["digest"] != numbered.digest:
                    raise self._changed(numbered)
                return True
        return False

    def _markers(self, numbered: Numbered) -> list[tuple[str, dict[str, Any]]]:
        """The markers of this id back to the batch before, or to another query's; the last first.

        A task of which nothing was published has no marker: there may be none of a batch.
        """
        end, count = self._stable_end(), _READ_AT_FIRST
        while True:
            begin = max(0, end - count)
            found: list[tuple[str, dict[str, Any]]] = []
            ranges = {self._place: (begin, end)}
            for message in iter_ranges(self._sink, ranges, committed=True, few=True):
                key = (message.key() or b"").decode(errors="replace")
                if key.rpartition("/")[0] == self._id and message.value():
                    found.append((key, json.loads(message.value())))
            found.reverse()
            is_enough = any(
                marker["query"] != numbered.query or marker["batch"] < numbered.batch
                for _, marker in found
            )
            if is_enough or begin == 0:
                return found
            count *= 4

    def _stable_end(self) -> int:
        """The end of the markers, when no transaction is open before it."""
        end = list_offsets(self._sink, [self._place], "latest")[self._place]
        deadline = time.monotonic() + _OPEN_FOR
        while True:
            stable = list_offsets(self._sink, [self._place], "latest", committed=True)
            if stable[self._place] >= end:
                return end
            if time.monotonic() > deadline:
                raise SinkError(
                    "sink.hanging_transaction",
                    f"a transaction is open in {self._place[0]}[{self._place[1]}] at offset"
                    f" {stable[self._place]} for more than {_OPEN_FOR:.0f} s",
                    where=f"topic {self._place[0]}",
                    suggestion="kafka-transactions.sh find-hanging names it, abort ends it",
                    retriable=True,
                )
            time.sleep(0.02)

    def _other_query(self, numbered: Numbered, owner: str) -> SinkError:
        where = f"option id = {self._id}, topic {self._place[0]}"
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
            f"the query {owner} publishes with this id, and this one has another checkpoint: it"
            " would publish everything again",
            where=where,
            suggestion="start the query with the checkpoint that it had; or give this one another"
            " id; or, if it is to follow that one, which must not run any more, set the option"
            f' after_query to "{owner}"',
        )

    def _changed(self, numbered: Numbered) -> SinkError:
        return SinkError(
            "sink.batch_changed",
            f"batch {numbered.batch} is repeated, and task {numbered.task} has other rows than it"
            " published before",
            where=f"option id = {self._id}",
            suggestion="a repeated batch must have the same rows in the same tasks: use a source"
            " that can be replayed, and start the query with as many cores as before (of the source"
            " rate, set numPartitions)",
        )
