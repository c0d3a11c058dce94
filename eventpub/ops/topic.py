"""Reading a publisher's topics: the committed records that are there now, as columns.

What must hold: a partition that cannot be read to its end (a transaction that hangs open) is an
error, never an end. Records are taken apart by code of `ops.records`, not by the sink's: what is
said about the topic must not depend on the code that wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

import pyarrow as pa

from eventpub import config
from eventpub.ops.records import DEAD, DIVERTED, EVENT, GAP, NO_TIME, Message, Rows
from eventpub.ops.verdict import Difference
from eventpub.sink.client import Clients
from eventpub.sink.faults import topic_missing
from eventpub.sink.missing_markers import hanging
from eventpub.sink.reading import Place, Reading
from eventpub.sink.topics import list_offsets, offsets_at, open_below, partition_counts
from eventpub.times import format_time

Chosen = Callable[[bytes], bool]
"""Whether the aggregate with a key is looked at."""

_CALL_SECONDS = 8.0
_STALL_SECONDS = 60.0
_CHUNK = 2_000
"""Records that are taken apart together: of more, the headers take much memory."""
_MARGIN_MS = 60_000
"""Of the time from which on a topic is read, should its timestamps not be `create_time`."""
_FOREIGN_SHOWN = 20
_YEAR_3000 = 32_503_680_000_000
"""Milliseconds; a record's writer may set any timestamp."""


class TopicReader:
    """Reads a publisher's topics once, to what is there now.

    Args:
        sources: the application's ids, now and before, one of which every event names.
        patience: seconds to wait for open transactions to end.
        first: `create_time` of the earliest events that count, µs, and the timestamp of the
            earliest records that are not ours and count: the topic is read from there on; None:
            from its first record.
        last: the timestamp of the last records that are not ours and count, µs; None: no bound.

    Attributes:
        partitions: how many the topic itself has, once `spans` was asked.
        truncated: partitions whose first records are gone, and may be some that were to be read.
        foreign: the first records that are not ours, of those that count.
    """

    def __init__(
        self,
        sink: config.Sink,
        sources: Collection[str],
        patience: float = 15.0,
        *,
        first: int | None = None,
        last: int | None = None,
    ) -> None:
        self._clients, self._sink = Clients(sink), sink
        self._patience = patience
        self._first, self._last = first, last
        self._sources = sources
        self._kinds = {
            sink.topic: EVENT,
            sink.dead_topic: DEAD,
            sink.late_topic: DIVERTED,
            sink.gaps_topic: GAP,
        }
        self.partitions = 0
        self.truncated: set[int] = set()
        self.foreign: list[Difference] = []
        self.foreign_count = 0
        self.records = 0

    def spans(self) -> dict[Place, tuple[int, int]]:
        """Where each partition is read from, and its end, once no transaction is open below it.

        Raises:
            SinkError: `sink.hanging_transaction`; `sink.topic_missing` and others, as
                `sink.check_topics`.
        """
        sink, clients = self._sink, self._clients
        counts = partition_counts(clients, _CALL_SECONDS)
        self.partitions = counts.get(sink.topic, 0)
        if not self.partitions:
            raise topic_missing(sink, sink.topic)
        places = [(name, n) for name in self._kinds for n in range(counts.get(name, 0))]
        kept = list_offsets(clients, places, "earliest", timeout=_CALL_SECONDS)
        ends = committed_ends(clients, places, self._patience)
        starts = kept
        if self._first is not None and (since := self._first // 1000 - _MARGIN_MS) > 0:
            # A record's timestamp is the `create_time` of its event. The side topics are read from
            # their beginning: a record there has the time at which it was written.
            events = [place for place in places if place[0] == sink.topic]
            starts = kept | offsets_at(clients, events, since)
        self.truncated |= {
            number
            for (name, number), at in starts.items()
            if name == sink.topic and 0 < at == kept[name, number]
        }
        return {place: (min(starts[place], end), end) for place, end in ends.items()}

    def read(
        self,
        spans: Mapping[Place, tuple[int, int]],
        chosen: Chosen | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Iterator[pa.Table]:
        """The records of some partitions from an offset up to another, in chunks.

        Args:
            meanwhile: called again and again; what it raises ends the reading.

        Raises:
            SinkError: `sink.unreachable`, also where nothing comes for a minute; as `spans`.
        """
        for name, kind in self._kinds.items():
            ranges = {place: span for place, span in spans.items() if place[0] == name}
            reading = Reading(
                self._clients, ranges, chunk=_CHUNK, patience=_STALL_SECONDS, meanwhile=meanwhile
            )
            for chunk in reading:
                self.records += len(chunk)
                rows = Rows(self._sources)
                for message in chunk:
                    key = message.key()
                    if chosen is not None and key is not None and not chosen(key):
                        continue
                    if problem := rows.add(message, kind):
                        self._add_foreign(message, problem)
                yield rows.table()

    def _add_foreign(self, message: Message, reason: str) -> None:
        timestamp = max(0, message.timestamp()[1])
        micros = timestamp * 1000
        is_before = self._first is not None and micros + 999 < self._first
        is_after = self._last is not None and micros > self._last
        if timestamp and (is_before or is_after):
            return
        self.foreign_count += 1
        if len(self.foreign) < _FOREIGN_SHOWN:
            key = (message.key() or b"").decode(errors="replace")
            note = f"{message.topic()}: {reason}"
            if 0 < timestamp < _YEAR_3000:
                note += f"; its timestamp is {format_time(micros)}"
            place = (message.partition(), message.offset())
            self.foreign.append(Difference(key, None, NO_TIME, *place, note))


def committed_ends(clients: Clients, places: list[Place], patience: float) -> dict[Place, int]:
    """The ends of partitions, once no transaction is open below them.

    Raises:
        SinkError: `sink.hanging_transaction`: one was open for `patience` seconds.
    """
    ends = list_offsets(clients, places, "latest", timeout=_CALL_SECONDS)
    for place, stable in open_below(clients, ends, patience, timeout=_CALL_SECONDS).items():
        raise hanging(clients.sink, place, stable, ends[place], patience)
    return ends
