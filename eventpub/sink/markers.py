"""The topic of the markers that say which batches are published, and what follows from it.

All markers of an id are in one partition. They also say where a task's rows are, so that what a
broker has left open of a batch can be published again; see `Settling`.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from eventpub.errors import SinkError
from eventpub.sink.base import Refused
from eventpub.sink.batch import Batch
from eventpub.sink.client import Clients, log
from eventpub.sink.fencing import end_all, hanging
from eventpub.sink.layout import check_leaders
from eventpub.sink.missing_markers import again
from eventpub.sink.reading import MARKER_TIMEOUT, iter_ranges
from eventpub.sink.records import SOURCE, Header, PartitionId, Record
from eventpub.sink.topics import create, list_offsets, open_below
from eventpub.sink.transaction import PROBE, TransactionWriter

_OPEN_FOR = 90.0
"""Seconds for which a transaction of another task may hide markers: longer than one may last."""

_READ_AT_FIRST = 64
"""Markers that are read back at first; four times as many each time that they do not tell."""

_PARTITIONS = 16
"""Number of partitions of a topic of markers that is created."""

Marker = tuple[str, dict[str, Any]]
"""Its key, ``<id>/<task>``, and what it says."""

SAME_ROWS = (
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

    def marker(self) -> dict[str, Any]:
        """What is kept of its rows: whose they are, their digest and number, where they are, and
        how many the broker has refused in a row up to the last."""
        whose = {"query": self.query, "batch": self.batch, "run": self.run}
        return {**whose, "digest": "", "rows": 0, "written": {}, "refused": 0}


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


def place_of(markers: str, id_: str, partitions: int) -> PartitionId:
    """The partition that has the markers of an id."""
    return markers, zlib.crc32(id_.encode()) % partitions


class Markers:
    """Those of one id.

    Args:
        id_: names what publishes.
        topic: made where it is missing.
        partitions: of it; None: it is missing.
        after_query: the query whose id may be taken over; "": none.
    """

    def __init__(
        self,
        clients: Clients,
        id_: str,
        topic: str,
        partitions: int | None,
        after_query: str = "",
    ) -> None:
        self._clients, self._id, self._after_query = clients, id_, after_query
        number = partitions or create(clients, [topic], _PARTITIONS, policy="compact")[topic]
        self.place = place_of(topic, id_, number)

    def back_to(self, query: str, batch: int) -> list[Marker]:
        """The markers of this id back to the batch before this one, or to another query's; the last
        first.

        A task of which nothing was published has no marker: there may be none of a batch.

        Raises:
            SinkError: sink.hanging_transaction, ….
        """
        end = list_offsets(self._clients, [self.place], "latest")[self.place]
        for stable in open_below(self._clients, {self.place: end}, _OPEN_FOR).values():
            raise hanging(self._clients.sink, self.place, stable, end, _OPEN_FOR)
        low, count = 0, _READ_AT_FIRST
        while True:
            begin = max(low, end - count)
            try:
                found = self._read(begin, end)
            except SinkError as error:
                if error.code != "sink.offset_gone":
                    raise
                low = list_offsets(self._clients, [self.place], "earliest")[self.place]
                continue
            is_enough = any(
                marker["query"] != query or marker["batch"] < batch for _, marker in found
            )
            if is_enough or begin == low:
                return found
            count *= 4

    def _read(self, begin: int, end: int) -> list[Marker]:
        """The markers of this id in a range, the last first."""
        found: list[Marker] = []
        ranges = {self.place: (begin, end)}
        for message in iter_ranges(self._clients, ranges, committed=True, few=True):
            key = (message.key() or b"").decode(errors="replace")
            if key.rpartition("/")[0] == self._id and message.value():
                found.append((key, json.loads(message.value())))
        return found[::-1]

    def batch(self, markers: Mapping[int, Mapping[str, Any]]) -> Batch:
        """The markers of tasks, to be written."""
        now = int(self._clients.clock.time() * 1000)
        own: list[Header] = [(SOURCE, self._id)]
        values = {f"{self._id}/{task}": json.dumps(each).encode() for task, each in markers.items()}
        records = [Record(key, value, self.place[1], now, own) for key, value in values.items()]
        return Batch({}, [(self.place[0], record) for record in records])

    def check_leader(self) -> None:
        """Check that the markers are all read: a leader that is cut off from the other brokers goes
        on to answer, and does not have the last ones.

        Raises:
            SinkError: as of `check_leaders`.
        """
        check_leaders(self._clients, [self.place])

    def end_left_open(self, tasks: int) -> None:
        """End what the broker has left open before their end, whoever of this id has written it.

        By transactions that are aborted: a new checkpoint does not need the markers of its
        predecessor. What another id has open stays.

        Args:
            tasks: at least as many as have written.

        Raises:
            SinkError: as of `TransactionWriter.ready`, ….
        """

        def end_open(_: Any) -> None:
            ends = list_offsets(self._clients, [self.place], "latest")
            for number in ("owner", *range(tasks)):
                with TransactionWriter(self._clients, self._id, number) as writer:
                    writer.run_in_vain([self.place])
                if not open_below(self._clients, ends, 0):
                    return

        try:
            end_all(self._clients, [self.place], end_open)
        except SinkError as error:
            if error.code != "sink.hanging_transaction":
                raise

    # -- what they say of a task ------------------------------------------------------------------

    def own(self, numbered: Numbered, parts: Parts, markers: list[Marker]) -> dict[str, Any] | None:
        """The marker of this task's rows; None: they were not published.

        Raises:
            SinkError: sink.other_query, sink.batch_changed, sink.checkpoint_behind,
                sink.markers_gone, sink.hanging_transaction, …
        """
        is_unknown = numbered.is_repeated and numbered.batch and not markers
        if is_unknown and self._after_query != numbered.query:
            self.refuse(
                "sink.markers_gone",
                f"batch {numbered.batch} of this query is to be published, and topic"
                f" {self.place[0]} has no marker of this id, so whether it was published"
                " before is unknown",
                suggestion="if the option topic or id was changed: change it back, or start with a new"
                " checkpoint. If the markers were deleted (their topic must be compacted only):"
                f" check that no row of batch {numbered.batch} is on the topic, then set the option"
                f' after_query to "{numbered.query}"',
            )
        for key, marker in markers:
            if marker["query"] != numbered.query:
                if numbered.batch or marker["query"] != self._after_query:
                    self._refuse_other(numbered, marker["query"])
                return None
            if marker["batch"] > numbered.batch:
                self.refuse(
                    "sink.checkpoint_behind",
                    f"batch {numbered.batch} is to be published, but batch {marker['batch']} of"
                    " this query already was: its checkpoint is older than the topic; nothing was"
                    " published",
                    suggestion="if the checkpoint was restored from a backup: start with a new checkpoint and"
                    f" the option after_query = {numbered.query}, from a source that begins with"
                    " what is not on the topic. If a stalled attempt reports this, ignore it",
                )
            if marker["batch"] < numbered.batch:
                return None
            if key == f"{self._id}/{numbered.task}":
                if marker["digest"] != parts.digest():
                    self.refuse(
                        "sink.batch_changed",
                        f"batch {numbered.batch} is repeated, but task {numbered.task} has other"
                        f" rows ({parts.rows}) than it published before ({marker.get('rows', 0)}):"
                        " the source gives others, or divides them among another number of tasks",
                        suggestion=SAME_ROWS,
                    )
                return marker
        return None

    def refuse(self, code: str, message: str, *, suggestion: str) -> NoReturn:
        where = f"option id = {self._id}, topic {self.place[0]}"
        raise SinkError(code, message, where=where, suggestion=suggestion)

    def _refuse_other(self, numbered: Numbered, owner: str) -> NoReturn:
        if numbered.batch:
            self.refuse(
                "sink.other_query",
                f"another publisher (query {owner}) has taken over this id; nothing was lost or"
                " repeated, and this one stops",
                suggestion="let only one publisher run for an id; or give this one another id",
            )
        self.refuse(
            "sink.other_query",
            f"query {owner} publishes with this id, and this query has another checkpoint: it"
            " would publish everything again",
            suggestion="start the query with its previous checkpoint; or give it another id; or, if it"
            f" replaces query {owner}, which must have stopped, set the option after_query to"
            f' "{owner}"',
        )


def note_written(written: dict[str, Any], batch: Batch) -> None:
    """Add what was delivered of a batch."""
    for (topic, partition), reports in batch.reports.items():
        if reports.first is None:
            continue
        first, end = reports.first.offset(), reports.last.offset() + 1
        before = written.setdefault(topic, {}).get(str(partition), [first, end, 0])
        count = before[2] + reports.count + reports.between
        written[topic][str(partition)] = [min(first, before[0]), end, count]


@dataclass(frozen=True)
class _Span:
    """What a task has written to a partition."""

    task: int
    place: PartitionId
    first: int
    end: int
    count: int


def _spans(published: Mapping[int, dict[str, Any]]) -> Iterator[_Span]:
    for task, marker in published.items():
        for topic, by_partition in marker["written"].items():
            for partition, (first, end, count) in by_partition.items():
                yield _Span(task, (topic, int(partition)), first, end, count)


class Settling:
    """Makes sure that readers see a batch, when none of its tasks runs.

    Args:
        id_: names what publishes.
        markers: those of this id.
        published: the marker of each task that has rows.
        repeated: the tasks that had published before; the start before may have ended here.
    """

    def __init__(
        self,
        clients: Clients,
        id_: str,
        markers: Markers,
        published: Mapping[int, dict[str, Any]],
        repeated: Collection[int],
    ) -> None:
        self._clients, self._id, self._markers = clients, id_, markers
        self._published, self._repeated = dict(published), {*repeated}

    def run(self) -> None:
        """Until all is visible.

        Raises:
            SinkError: sink.not_visible, sink.unreachable, ….
        """
        while True:
            held = self._left_open()
            doubtful = {span.task for span in held} | self._repeated
            spans = [span for span in _spans(self._published) if span.task in doubtful]
            if not (hidden := [span for span in spans if not self._is_visible(span)]):
                return
            places = sorted({span.place for span in hidden})
            log.warning(
                "republishing committed records that the broker left open or discarded: %s", places
            )
            self._publish_again(hidden)

    def _left_open(self) -> list[_Span]:
        """What was left open, and is ended now."""
        spans = [*_spans(self._published)]
        places = sorted({span.place for span in spans})
        deadline = self._clients.clock.monotonic() + MARKER_TIMEOUT
        while places:
            stable = list_offsets(self._clients, places, "latest", committed=True)
            # what is open where others' began before cannot be told
            places = sorted({s.place for s in spans if stable[s.place] == s.first})
            if places and self._clients.clock.monotonic() > deadline:
                break
            self._clients.clock.sleep(0.02 if places else 0)
        held = [s for s in spans if s.place in places and s.end > stable[s.place]]
        for task in sorted({span.task for span in held}):
            with TransactionWriter(self._clients, self._id, task) as writer:
                writer.run_in_vain([span.place for span in held if span.task == task])
        return held

    def _is_visible(self, span: _Span) -> bool:
        """Whether its last record is, or is not there any more; waits for what others have open.

        An account that may not read the topic is believed that it is.
        """
        low = list_offsets(self._clients, [span.place], "earliest")[span.place]
        last = {span.place: (span.end - 1, span.end)}
        if low >= span.end:
            return True
        try:
            return any(iter_ranges(self._clients, last, committed=True, few=True)) or not any(
                iter_ranges(self._clients, last, committed=False, few=True)
            )
        except SinkError as error:
            if error.code != "sink.not_authorized":
                raise
            log.warning("cannot check what was published: %s", error)
            return True

    def _publish_again(self, hidden: list[_Span]) -> None:
        """In one transaction, with the markers, which say where it is from then on."""
        at_markers = self._markers.place[0]
        places = {span.place for span in hidden if span.place[0] != at_markers}
        lost = [
            (message.topic(), again(message))
            for place in sorted(places)
            for message in self._lost([span for span in hidden if span.place == place])
        ]
        tasks = sorted({span.task for span in hidden})
        for task in tasks:
            marker = self._published[task]
            written: dict[str, Any] = {}
            for topic, by_partition in marker["written"].items():
                rest = {n: at for n, at in by_partition.items() if (topic, int(n)) not in places}
                written |= {topic: rest} if topic != at_markers else {}
            self._published[task] = {**marker, "written": written}

        def parts() -> Iterator[Batch]:
            rows = Batch({}, lost)
            yield rows
            note_written(self._published[tasks[0]]["written"], rows)
            markers = self._markers.batch({task: self._published[task] for task in tasks})
            yield markers
            for task in tasks:
                note_written(self._published[task]["written"], markers)

        with TransactionWriter(self._clients, self._id, tasks[0]) as writer:
            writer.run(parts())

    def _lost(self, spans: list[_Span]) -> list[Any]:
        """The records of a partition that are not visible."""
        place = spans[0].place
        ranges = {place: (min(s.first for s in spans), max(s.end for s in spans))}
        seen = {m.offset() for m in iter_ranges(self._clients, ranges, committed=True)}
        every = iter_ranges(self._clients, ranges, committed=False)
        own = (m for m in every if any(s.first <= m.offset() < s.end for s in spans))
        lost = [
            message
            for message in own
            if message.offset() not in seen and PROBE[0] not in dict(message.headers() or ())
        ]
        expected = sum(span.count for span in spans)
        if len(lost) == expected:
            return lost
        raise SinkError(
            "sink.not_visible",
            f"{place[0]}[{place[1]}] has {expected} records between offsets {ranges[place][0]} and"
            f" {ranges[place][1]} that were committed, and that a broker has left open or discarded"
            f" all the same; {len(lost)} are not visible there, so some are of other transactions",
            where=f"topic {place[0]}",
            suggestion="read these offsets with isolation.level = read_uncommitted, and publish"
            " what belongs to the batch; then start with a new checkpoint and the option"
            " after_query, from a source that begins with what is not on the topic",
        )
