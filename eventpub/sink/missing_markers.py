"""Transactions that the broker has left open, though it has answered that they are over.

A coordinator that finds a partition without a leader while it writes a transaction's markers takes
the partition for deleted, leaves the marker out, and calls the transaction complete (Kafka 4.3.1:
"Couldn't find leader endpoint for partitions … likely deleted already and hence can be skipped").
A broker that is killed and comes back within its session's time-out may do so with any transaction
that was just being committed. Its records then belong to whatever transaction the same producer
ends there next: readers wait until then, and see the records, or not, by *that* outcome.

So, before anything else is published to such a partition: a transaction of ours is ended there by
an abort; what was committed before, and thereby lost, is published again as it was. The range is
noted in the index first, so that a crash in between changes nothing. What must hold: a record that
the index counts as published is visible, or about to be.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from eventpub import config
from eventpub.admission import SkippedGap
from eventpub.sink import records
from eventpub.sink.client import Clients
from eventpub.sink.encoder import CloudEvents, read_gap
from eventpub.sink.layout import tail_gone
from eventpub.sink.reading import iter_ranges
from eventpub.sink.records import PartitionId, Written
from eventpub.sink.topics import list_offsets


class MissingMarkerError(Exception):
    """Committed ranges that are not visible; see `ShardSink.restore`. Never leaves a task.

    Attributes:
        written: by place.
    """

    def __init__(self, written: Mapping[PartitionId, Written]) -> None:
        super().__init__(f"committed, but not visible: {dict(written)}")
        self.written = dict(written)


def lost_records(
    clients: Clients,
    app_ids: Collection[str],
    written: Mapping[PartitionId, Written],
    meanwhile: Callable[[], None] = lambda: None,
) -> list[tuple[str, records.Record]]:
    """What eventpub has written in these ranges that is visible neither there nor behind them.

    To be called when no transaction is open there. In the order of each partition. Memory holds
    what is lost, and a few numbers of each record that is not.

    Args:
        app_ids: whose records count.
        meanwhile: called again and again; what it raises ends the reading.

    Raises:
        SinkError: `sink.topic_recreated` where what was written there is not there any more;
            `sink.unreachable`, ….
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
        for message in iter_ranges(clients, ranges, committed=committed):
            meanwhile()
            if records.is_ours(dict(message.headers() or ()), app_ids):
                yield message

    seen = ours({place: ends[place] for place in written}, committed=True)
    visible = _Visible(clients.sink, seen)
    raw = ours({place: end for place, (_, end) in written.items()}, committed=False)
    return [(message.topic(), record) for message in raw for record in visible.lacks(message)]


class _Visible:
    """What readers have of our records, or will have when what was lost is published again.

    A record may be lost more than once: as it was written, and as it was published again by whoever
    had to restore it and was cut off, or had not known of it. And it need not be there as it was:
    where another owner of the shard, which has not known of the lost transaction, has come in
    between, it has decided again on the same rows.
    """

    def __init__(self, sink: config.Sink, messages: Iterable[Any]) -> None:
        self._sink = sink
        self._there: set[tuple[Any, ...]] = set()
        self._decided: dict[bytes, list[tuple[int, int]]] = {}
        """By aggregate: first and last of what is published, refused or skipped."""
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
        """What is to be published of a record: nothing, all of it, or some versions of a skip.

        That counts as there from then on.
        """
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
        # the time, since a version may have been rewritten
        return "event" if is_event else place[0], place[1], key, sequence, time


def undecided(
    versions: tuple[int, int], decided: Iterable[tuple[int, int]]
) -> list[tuple[int, int]]:
    """What of a range of versions no other range has, each as its first and last."""
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
    """The record that a message was."""
    place, (_, created) = message.partition(), message.timestamp()
    return records.Record(message.key(), message.value(), place, created, message.headers() or [])
