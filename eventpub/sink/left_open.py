"""What tasks of a numbered sink have committed, and a broker has left open: published again.

As of `missing_markers`, for rows that need not say whose they are: the marker of a task says which
offsets its rows have, and how many they are. Spark's driver looks at them when all tasks of a batch
are done, before it counts the batch as done.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from eventpub.errors import SinkError
from eventpub.sink.base import no_crash
from eventpub.sink.batch import Batch
from eventpub.sink.client import Clients
from eventpub.sink.markers import Markers
from eventpub.sink.missing_markers import PartitionId, again
from eventpub.sink.owned_producer import OwnedProducer
from eventpub.sink.reading import MARKER_TIMEOUT, iter_ranges
from eventpub.sink.topics import list_offsets, open_below
from eventpub.sink.transaction import PROBE, Transactions

Written = dict[str, dict[str, list[int]]]
"""By topic and partition: first offset, the next after the last, and number of records."""

log = logging.getLogger("eventpub.sink")


def note_written(written: Written, batch: Batch) -> None:
    """Add what was delivered of a batch."""
    for (topic, partition), reports in batch.reports.items():
        if reports.first is None:
            continue
        first, end = reports.first.offset(), reports.last.offset() + 1
        before = written.setdefault(topic, {}).get(str(partition), [first, end, 0])
        count = before[2] + reports.count + reports.between
        written[topic][str(partition)] = [min(first, before[0]), end, count]


def end_own(clients: Clients, transactions: Transactions, places: Collection[PartitionId]) -> None:
    """End what this producer has left open in partitions; what others have open stays."""
    ends = list_offsets(clients, [*places], "latest") if places else {}
    if held := open_below(clients, ends, MARKER_TIMEOUT):
        transactions.run_in_vain(held)


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
            with closing(OwnedProducer(self._clients, self._id, task)) as owned:
                owned.ready()
                own = [span.place for span in held if span.task == task]
                Transactions(self._clients, 1, owned).run_in_vain(own)
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
            written: Written = {}
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

        with closing(OwnedProducer(self._clients, self._id, tasks[0])) as owned:
            owned.ready()
            Transactions(self._clients, 1, owned).run(parts(), no_crash)

    def _lost(self, spans: list[_Span]) -> list[Any]:
        """The records of a partition that are not visible.

        Raises:
            SinkError: sink.not_visible: some of them are others'.
        """
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
