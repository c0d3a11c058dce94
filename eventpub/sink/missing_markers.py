"""Transactions that the broker has left open after answering that they are over.

A coordinator that finds a partition without a leader while it writes a transaction's markers takes
the partition for deleted, skips the marker and calls the transaction complete (Kafka 4.3.1:
"Couldn't find leader endpoint for partitions … likely deleted already and hence can be skipped").
Its records then share the outcome of the next transaction that the same producer ends there.

So, before anything else is published to such a partition, the transaction is ended by an abort, and
what had been committed is published again unchanged. The range is noted in the index first, in case
of a crash in between. A record that the index counts as published is visible, or about to be.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from eventpub import config
from eventpub.admission.model import SkippedGap
from eventpub.errors import SinkError
from eventpub.sink import records
from eventpub.sink.batch import Batch
from eventpub.sink.client import Clients, log
from eventpub.sink.encoder import CloudEvents, read_gap
from eventpub.sink.layout import tail_gone
from eventpub.sink.reading import iter_ranges, own_records
from eventpub.sink.records import PartitionId, Written
from eventpub.sink.topics import MARKER_TIMEOUT, Meanwhile, hanging, list_offsets, open_below
from eventpub.sink.transaction import PROBE, TransactionWriter

if TYPE_CHECKING:
    from eventpub.sink.markers import Markers


class MissingMarkerError(Exception):
    """Committed but invisible ranges; see `ShardSink.restore`. Never leaves a task."""

    def __init__(self, written: Mapping[PartitionId, Written]) -> None:
        super().__init__(f"committed, but not visible: {dict(written)}")
        self.written = dict(written)


def lost_records(
    clients: Clients,
    app_id: str,
    written: Mapping[PartitionId, Written],
    meanwhile: Meanwhile = lambda: None,
) -> list[tuple[str, records.Record]]:
    """Own records in these ranges that are visible neither there nor after them, in order.

    No transaction may be open there. Memory holds the lost records, and some numbers of others.

    Raises:
        SinkError: `sink.topic_recreated` where the records no longer exist; `sink.unreachable`, ….
    """
    places = list(written)
    ends = list_offsets(clients, places, "latest", committed=True)
    for place, (_, end) in written.items():
        if ends[place] < end:
            raise tail_gone(clients, place, end, ends[place])
    lows = list_offsets(clients, places, "earliest")
    firsts = {place: max(first, lows[place]) for place, (first, _) in written.items()}

    def ours(ends: Mapping[PartitionId, int], *, committed: bool) -> Iterator[Any]:
        ranges = {place: (firsts[place], end) for place, end in ends.items()}
        messages = iter_ranges(clients, ranges, committed=committed, meanwhile=meanwhile)
        return (message for message, _ in own_records(messages, app_id))

    seen = ours({place: ends[place] for place in written}, committed=True)
    visible = _Visible(clients.sink, seen)
    raw = ours({place: end for place, (_, end) in written.items()}, committed=False)
    return [(message.topic(), record) for message in raw for record in visible.lacks(message)]


class _Visible:
    """Own records that readers see, or will when the lost ones are published again.

    A record may be lost again when republished. And it may have changed: an owner that did not know
    of the lost transaction has decided again on the same rows.
    """

    def __init__(self, sink: config.Sink, messages: Iterable[Any]) -> None:
        self._sink = sink
        self._there: set[tuple[Any, ...]] = set()
        self._decided: dict[bytes, list[tuple[int, int]]] = {}
        """By aggregate, version ranges that are published, refused or skipped."""
        for message in messages:
            self._there.add(self._identity(message))
            gap = self._gap(message)
            sequence = dict(message.headers() or ()).get(records.SEQUENCE)
            if gap is not None:
                versions = gap.from_version, gap.to_version
            elif sequence is not None:
                versions = int(sequence), int(sequence)
            else:
                continue
            self._decided.setdefault(message.key(), []).append(versions)

    def lacks(self, message: Any) -> list[records.Record]:
        """What to republish of a record (of a skip: some versions); it then counts as visible."""
        gap = self._gap(message)
        if gap is None:
            identity = self._identity(message)
            is_there = identity in self._there
            self._there.add(identity)
            return [] if is_there else [again(message)]
        versions = gap.from_version, gap.to_version
        decided = self._decided.setdefault(message.key(), [])
        left = undecided(versions, decided)
        decided += left
        if left == [versions]:
            return [again(message)]
        gaps = [replace(gap, from_version=first, to_version=last) for first, last in left]
        values = [CloudEvents("").gap(each, 1).value for each in gaps]
        return [replace(again(message), value=value) for value in values]

    def _gap(self, message: Any) -> SkippedGap | None:
        if message.topic() == self._sink.gaps_topic:
            with suppress(ValueError):
                return read_gap(message.value())
        return None

    def _identity(self, message: Any) -> tuple[Any, ...]:
        headers = tuple(message.headers() or ())
        place, key = (message.topic(), message.partition()), message.key()
        values = dict(headers)
        sequence, time = values.get(records.SEQUENCE), values.get(records.TIME)
        if key is None or sequence is None or time is None:
            return *place, key, message.value(), headers
        is_event = message.topic() in {self._sink.topic, self._sink.late_topic}
        # with the time, since a version may have been rewritten
        return "event" if is_event else place[0], place[1], key, sequence, time


def undecided(
    versions: tuple[int, int], decided: Iterable[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Parts of a version range that no decided range covers."""
    left = [versions]
    for low, high in decided:
        left = [
            part
            for first, last in left
            for part in ((first, min(last, low - 1)), (max(first, high + 1), last))
            if part[0] <= part[1]
        ]
    return left


def again(message: Any) -> records.Record:
    """Copy a message to a record."""
    place, (_, created) = message.partition(), message.timestamp()
    return records.Record(message.key(), message.value(), place, created, message.headers() or [])


def require_none_left_open(clients: Clients, app_id: str, places: Collection[PartitionId]) -> None:
    """Raise `sink.hanging_transaction` if a fenced id has one open: its outcome is undecided."""
    ends = list_offsets(clients, [*places], "latest")
    for place, stable in open_below(clients, ends, MARKER_TIMEOUT).items():
        if is_held_by(clients, app_id, place, stable, ends[place]):
            raise hanging(clients.sink, place, stable, ends[place], MARKER_TIMEOUT)


def is_held_by(clients: Clients, app_id: str, place: PartitionId, stable: int, end: int) -> bool:
    """Whether the transaction open between last stable offset and high watermark is this id's."""
    first = next(iter_ranges(clients, {place: (stable, end)}, committed=False, few=True), None)
    return first is not None and records.is_ours(dict(first.headers() or ()), app_id)


def note_written(written: dict[str, Any], batch: Batch) -> None:
    """Add the offsets and the count of a batch's delivered records."""
    for (topic, partition), reports in batch.reports.items():
        if reports.first is None:
            continue
        first, end = reports.first.offset(), reports.last.offset() + 1
        before = written.setdefault(topic, {}).get(str(partition), [first, end, 0])
        count = before[2] + reports.count + reports.between
        written[topic][str(partition)] = [min(first, before[0]), end, count]


@dataclass(frozen=True)
class Span:
    """Offsets that a task has written in a partition, and how many of them are records."""

    task: int
    place: PartitionId
    first: int
    end: int
    count: int


def spans_of(published: Mapping[int, dict[str, Any]]) -> Iterator[Span]:
    for task, marker in published.items():
        for topic, by_partition in marker["written"].items():
            for partition, (first, end, count) in by_partition.items():
                yield Span(task, (topic, int(partition)), first, end, count)


def unseen(
    clients: Clients,
    written: Mapping[PartitionId, Written],
    meanwhile: Meanwhile = lambda: None,
    *,
    committed: bool = True,
) -> set[PartitionId]:
    """Ranges, not removed by retention, whose last record is not visible, or not there at all.

    Offsets alone prove nothing: a coordinator that lost its decision writes an abort marker exactly
    where the commit marker was to be.
    """
    lows = list_offsets(clients, [*written], "earliest")
    last = {place: (end - 1, end) for place, (_, end) in written.items() if end > lows[place]}
    messages = iter_ranges(clients, last, committed=committed, few=True, meanwhile=meanwhile)
    return last.keys() - {(message.topic(), message.partition()) for message in messages}


class Settling:
    """Republishes what tasks of a numbered sink have committed and a broker has left open.

    The markers have the rows' offsets and count, so rows need not name their publisher. Spark's
    driver runs this when no task runs, before a batch counts as done. The previous start may have
    ended in this step, so tasks that had published before (`repeated`) are checked, too.
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
        """Repeat until all is visible, or raise `sink.not_visible`."""
        while True:
            held = self._left_open()
            doubtful = {span.task for span in held} | self._repeated
            spans = [span for span in spans_of(self._published) if span.task in doubtful]
            if not (hidden := [span for span in spans if self._is_hidden(span)]):
                return
            places = sorted({span.place for span in hidden})
            log.warning(
                "republishing committed records that the broker left open or discarded: %s", places
            )
            self._publish_again(hidden)

    def _left_open(self) -> list[Span]:
        """End transactions that were left open; returns their spans."""
        spans = [*spans_of(self._published)]
        places = sorted({span.place for span in spans})
        deadline = self._clients.clock.monotonic() + MARKER_TIMEOUT
        while places:
            stable = list_offsets(self._clients, places, "latest", committed=True)
            # ours cannot be detected where another one began before it
            places = sorted(
                {s.place for s in spans if s.place in stable and stable[s.place] == s.first}
            )
            if places and self._clients.clock.monotonic() > deadline:
                break
            self._clients.clock.sleep(0.02 if places else 0)
        held = [s for s in spans if s.place in places and s.end > stable[s.place]]
        for task in sorted({span.task for span in held}):
            with TransactionWriter(self._clients, self._id, task) as writer:
                writer.run_aborted([span.place for span in held if span.task == task])
        return held

    def _is_hidden(self, span: Span) -> bool:
        """Without the right to read the topic, the span counts as visible."""
        try:
            written = {span.place: (span.first, span.end)}
            return bool(unseen(self._clients, written)) and not unseen(
                self._clients, written, committed=False
            )
        except SinkError as error:
            if error.code != "sink.not_authorized":
                raise
            log.warning("cannot check what was published: %s", error)
            return False

    def _publish_again(self, hidden: list[Span]) -> None:
        """In one transaction with the markers, which have the new offsets."""
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

    def _lost(self, spans: list[Span]) -> list[Any]:
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
            f"a broker has left open or discarded {expected} committed records of"
            f" {place[0]}[{place[1]}] between offsets {ranges[place][0]} and {ranges[place][1]};"
            f" {len(lost)} are invisible there, so some belong to other transactions",
            where=f"topic {place[0]}",
            suggestion="read these offsets with isolation.level = read_uncommitted, and publish"
            " what belongs to the batch; then start with a new checkpoint and the option"
            " after_query, from a source that begins with what is not on the topic",
        )
