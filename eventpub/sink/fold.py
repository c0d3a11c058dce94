"""Reading back what is visible in a shard's own partitions: the topic is the truth.

Called after `init_transactions`, when the former owner is fenced and its transaction is complete.
Reads committed records from the saved next offsets to the ends that `StableEnds` gives.
What must hold at the end: every partition was read to its high watermark, or an error says why not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field

from eventpub.sink.folded import Decoder, Folded, Scope
from eventpub.sink.missing_markers import (
    MissingMarkerError,
    PartitionId,
    Written,
)
from eventpub.sink.reading import Message, Reading, iter_ranges
from eventpub.sink.stable_ends import StableEnds

FOLD_TIMEOUT = 60.0
"""Seconds without any progress after which a fold gives up."""

_CHUNK = 10_000


@dataclass(frozen=True)
class Known:
    """What is known of the partitions before they are read.

    Args:
        offsets: next offsets; a partition without one is read from its beginning.
        written: where such an offset is that of a transaction's end: what it has written.
        acknowledged: next offsets up to which all counts as committed, though `offsets`, of a lost
            or older index, may be behind.
    """

    offsets: Mapping[PartitionId, int] = field(default_factory=dict)
    written: Mapping[PartitionId, Written] = field(default_factory=dict)
    acknowledged: Mapping[PartitionId, int] = field(default_factory=dict)


class Fold(Iterator[Folded]):
    """Iterates over the chunks; what it found besides is known when it has ended.

    Args:
        scope: which partitions are read, and whose records count.
        known: what is known of them.
        end_open: ends what the shard's own producer has open in these partitions.
        timeout: seconds without any progress after which it gives up.
        meanwhile: called again and again while nothing comes; what it raises ends the iteration.

    Attributes:
        offsets: the next offset of every own partition; to be saved with what was folded.
        truncated: True if retention has removed records of the topic that were never folded.
        records: how many records were read.
    """

    def __init__(
        self,
        scope: Scope,
        known: Known = Known(),
        *,
        end_open: Callable[[set[PartitionId]], None] | None = None,
        timeout: float = FOLD_TIMEOUT,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        self._scope = scope
        self._stable_ends = StableEnds(
            *(scope, known.written, known.acknowledged, end_open, timeout), meanwhile=meanwhile
        )
        self._decoder = Decoder(scope)
        self._timeout = timeout
        self._meanwhile = meanwhile
        self._ends: dict[PartitionId, int] = {}
        self._written = known.written
        self.offsets: dict[PartitionId, int] = dict(known.offsets)
        self.truncated = False
        self.records = 0
        self._chunks = self._read()

    @property
    def unread(self) -> int:
        """How many offsets are left up to the ends; what was compacted away counts, too."""
        ends = self._ends.items()
        return sum(max(0, end - self.offsets.get(place, 0)) for place, end in ends)

    @property
    def not_ours(self) -> int:
        return self._decoder.not_ours

    @property
    def misplaced(self) -> int:
        return self._decoder.misplaced

    def __next__(self) -> Folded:
        return next(self._chunks)

    def _read(self) -> Iterator[Folded]:
        self._ends = self._stable_ends.settle(self.offsets)
        self.offsets = {p: self.offsets[p] for p in self._ends if p in self.offsets}
        behind = self._behind()
        while any(self._scope.kind(place) == "events" for place in behind):
            if self._stable_ends.sides_are_whole(self._ends):
                break
            self._ends = self._stable_ends.settle(self.offsets)
            behind = self._behind()
        self._require_visible()
        if not behind:
            return
        unread = self._start(behind)
        if not unread:
            return
        for places in self._in_turn(unread):
            yield from self._decoded(places)

    def _require_visible(self) -> None:
        """Check that readers see the end of what each saved offset counts as published.

        An end that is as it was saved proves nothing: a coordinator that has lost its decision, or
        an operator, writes an abort marker at the very offset where the commit's was to be.

        Raises:
            MissingMarkerError: transactions that were answered as committed, and are not.
        """
        lows = self._stable_ends.starts() if self._written else {}
        last = {
            place: (written[1] - 1, written[1])
            for place in self._ends.keys() - self._scope.of_others
            if (written := self._stable_ends.before_marker(place, self.offsets.get(place)))
            and written[1] > lows[place]
        }
        for message in iter_ranges(
            self._scope.sink,
            {**last},
            committed=True,
            few=True,
            timeout=self._timeout,
            meanwhile=self._meanwhile,
        ):
            last.pop((message.topic(), message.partition()), None)
        if last:
            raise MissingMarkerError({place: self._written[place] for place in last})

    def _behind(self) -> list[PartitionId]:
        return [p for p, end in self._ends.items() if self.offsets.get(p) != end]

    def _start(self, behind: list[PartitionId]) -> set[PartitionId]:
        """Where each partition is read from, as far as retention has left it; which have any."""
        lows = self._stable_ends.starts()
        for place in behind:
            low, at = lows[place], self.offsets.get(place)
            if low > (at or 0) and self._scope.kind(place) == "events":
                self.truncated = True
            self.offsets[place] = max(low, at or 0)
        return {place for place in behind if self.offsets[place] < self._ends[place]}

    def _in_turn(self, unread: set[PartitionId]) -> list[set[PartitionId]]:
        """What is read together, in its order.

        Skips before events: once the events above a skip have raised an aggregate's last version, a
        skip below it cannot be distinguished from one that was filled since. Dead letters before
        events: a late event is known from one written anew where the conflict is known.
        """
        gaps, dead = (
            {place for place in unread if self._scope.kind(place) == kind}
            for kind in ("gaps", "dead")
        )
        return [places for places in (gaps, dead, unread - gaps - dead) if places]

    def _decoded(self, places: set[PartitionId]) -> Iterator[Folded]:
        # what lies behind the ends was written by an owner after this one, whose skips are not read
        reading = Reading(
            self._scope.sink,
            {place: (self.offsets[place], self._ends[place]) for place in places},
            patience=self._timeout,
            meanwhile=self._meanwhile,
        )
        with closing(reading):
            for chunk in reading:
                by_topic: dict[str, list[Message]] = {}
                for message in chunk:
                    by_topic.setdefault(message.topic(), []).append(message)
                for topic, messages in by_topic.items():
                    # topic by topic: the offsets of a chunk are never ahead of what was given
                    for message in messages:
                        self.offsets[topic, message.partition()] = message.offset() + 1
                    self.records += len(messages)
                    kind = self._scope.kinds[topic]
                    yield self._decoder.decode(kind, messages, dict(self.offsets))
        # past the markers of transactions that follow the last records
        self.offsets |= {place: self._ends[place] for place in places}
