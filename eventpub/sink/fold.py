"""Reads back what is visible in a shard's own partitions: the topic is the truth.

Runs after `init_transactions`, when the former owner is fenced and its transaction complete. Reads
committed records from the saved offsets to the *high watermark*: stopping at the last stable offset
would publish the events of an open transaction twice. So no transaction may be open there (see
`missing_markers` for those that outlive a fenced producer). Those of other shards are waited for,
up to ends taken once: where they overlap, one is open below any later end.

At the end, each partition was read to its high watermark and everything below is committed or
aborted, or an error says why not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field

from eventpub.sink.client import Clients
from eventpub.sink.folded import Decoder, Folded
from eventpub.sink.layout import check_leaders, tail_gone
from eventpub.sink.missing_markers import MissingMarkerError, unseen
from eventpub.sink.reading import Message, iter_chunks
from eventpub.sink.records import PartitionId, Written
from eventpub.sink.topics import MARKER_TIMEOUT, End, Meanwhile, hanging, list_offsets

FOLD_TIMEOUT = 60.0
"""Seconds without progress after which a fold fails."""


@dataclass(eq=False)
class Fold(Iterable[Folded]):
    """Iterates over chunks, once; its attributes are complete then.

    Attributes:
        decoder: counts records that do not count as published.
        offsets: next offsets of own partitions, to be saved with what was folded; at first those
            that were saved. Other partitions are read from their beginning.
        written: records of the transaction that ends at a saved offset.
        acknowledged: next offsets up to which all is committed, even if the saved one, of a lost or
            older index, is lower.
        end_open: ends open transactions of the shard's own producer.
        truncated: whether retention removed records that were never folded.
    """

    decoder: Decoder
    offsets: dict[PartitionId, int]
    written: Mapping[PartitionId, Written]
    acknowledged: Mapping[PartitionId, int]
    end_open: Callable[[set[PartitionId]], None] | None
    meanwhile: Meanwhile
    truncated: bool = False
    _ends: dict[PartitionId, int] = field(default_factory=dict)

    @property
    def _clients(self) -> Clients:
        return self.decoder.clients

    @property
    def unread(self) -> int:
        """Offsets left to read, including compacted ones."""
        ends = self._ends.items()
        return sum(max(0, end - self.offsets.get(place, 0)) for place, end in ends)

    def __iter__(self) -> Iterator[Folded]:
        self._ends = self._settle()
        self.offsets = {p: self.offsets[p] for p in self._ends if p in self.offsets}
        while any(self.decoder.kind(place) == "events" for place in self._behind()):
            if self._sides_are_whole():
                break
            self._ends = self._settle()
        self._require_visible()
        if not (behind := self._behind()):
            return
        for places in self._in_turn(self._start(behind)):
            yield from self._decoded(places)

    def _behind(self) -> list[PartitionId]:
        return [p for p, end in self._ends.items() if self.offsets.get(p) != end]

    # -- where to start and end -------------------------------------------------------------------

    def _settle(self) -> dict[PartitionId, int]:
        """The ends, once no transaction is open and none is below its saved offset."""
        began: float | None = None
        still: dict[PartitionId, tuple[int, float]] = {}
        ended: set[PartitionId] = set()
        kept: dict[PartitionId, int] = {}
        of_others = self.decoder.of_others
        while True:
            ends = {**self._list("latest"), **kept}
            short = {p for p, end in ends.items() if self._reached(p) > end}
            kept |= {p: end for p, end in ends.items() if p in of_others - short}
            stable = self._list("latest", committed=True)
            now = self._clients.clock.monotonic()
            began = began or now  # not before the broker answers
            for place, offset in stable.items():
                if still.get(place, (None,))[0] != offset:
                    still[place] = offset, now
            blocked = {place for place, end in ends.items() if stable[place] < end}
            if not (held := blocked | short):
                return ends
            if now - began > MARKER_TIMEOUT:
                seconds = {place: now - still[place][1] for place in held}
                # a marker may come after the answer that its transaction is over
                late = {place for place, since in seconds.items() if since > MARKER_TIMEOUT}
                self._check_tails(ends, short)
                self._check_committed(ends, stable, short, late - of_others)
                own = (blocked & late) - of_others - ended
                if self.end_open is not None and own:
                    self.end_open(own)
                    ended |= own
                elif max(seconds.values()) > FOLD_TIMEOUT or now - began > 4 * FOLD_TIMEOUT:
                    place = max(sorted(seconds), key=seconds.__getitem__)
                    at, end = stable[place], ends[place]
                    raise hanging(self._clients.sink, place, at, end, seconds[place])
            self.meanwhile()
            self._clients.clock.sleep(0.02 if now - began < 0.5 else 0.2)

    def _check_tails(self, ends: Mapping[PartitionId, int], short: set[PartitionId]) -> None:
        """Check that partitions which end too early lack one offset at most, a marker."""
        for place in sorted(short):
            known = self._reached(place, -1 if self._before_marker(place) is not None else 0)
            if ends[place] < known:
                raise tail_gone(self._clients, place, known, ends[place])

    def _check_committed(
        self,
        ends: Mapping[PartitionId, int],
        stable: Mapping[PartitionId, int],
        short: set[PartitionId],
        late: set[PartitionId],
    ) -> None:
        """Check that nothing known as committed was left open."""
        missing_markers = {}
        for place in late:
            first = stable[place]
            known = min(self.acknowledged.get(place, 0) - 1, ends[place])
            written = self._before_marker(place)
            if written is not None and first <= written[0]:
                known = max(known, written[1])
            if known > first:
                missing_markers[place] = (first, known)
            elif place in short:
                raise tail_gone(self._clients, place, self.offsets[place], ends[place])
        if missing_markers:
            raise MissingMarkerError(missing_markers)

    def _reached(self, place: PartitionId, more: int = 0) -> int:
        """The saved or, for own events, the acknowledged offset: side topics may be recreated."""
        saved = self.offsets.get(place, 0) + more
        is_own = self.decoder.kind(place) == "events" and place not in self.decoder.of_others
        return max(saved, self.acknowledged.get(place, 0) - 1) if is_own else saved

    def _before_marker(self, place: PartitionId) -> Written | None:
        """What was written before the marker that a saved offset includes, if it includes one."""
        written = self.written.get(place)
        return (
            written if written is not None and self.offsets.get(place) == written[1] + 1 else None
        )

    def _sides_are_whole(self) -> bool:
        """Check that skips and dead letters are read to their ends before events.

        Otherwise a late event of an unread skip would count as published, and be dropped.
        """
        sides = [p for p in self._ends if self.decoder.kind(p) in {"gaps", "dead"}]
        sides = [p for p in sides if p not in self.decoder.of_others]
        if not sides:
            return True
        check_leaders(self._clients, sides)
        now = self._list("latest")
        return all(now[place] == self._ends[place] for place in sides)

    def _require_visible(self) -> None:
        """Check that the last record below each saved offset is visible."""
        places = self._ends.keys() - self.decoder.of_others
        written = {place: at for place in places if (at := self._before_marker(place))}
        if lost := unseen(self._clients, written, self.meanwhile):
            raise MissingMarkerError({place: written[place] for place in lost})

    def _list(self, end: End, *, committed: bool = False) -> dict[PartitionId, int]:
        optional = frozenset({self._clients.sink.late_topic})
        return list_offsets(
            self._clients, self.decoder.places, end, committed=committed, optional=optional
        )

    # -- reading ----------------------------------------------------------------------------------

    def _start(self, behind: list[PartitionId]) -> set[PartitionId]:
        """Set where to start, as far as retention allows; returns partitions with records left."""
        lows = self._list("earliest")
        for place in behind:
            low, at = lows[place], self.offsets.get(place)
            if low > (at or 0) and self.decoder.kind(place) == "events":
                self.truncated = True
            self.offsets[place] = max(low, at or 0)
        return {place for place in behind if self.offsets[place] < self._ends[place]}

    def _in_turn(self, unread: set[PartitionId]) -> list[set[PartitionId]]:
        """Partitions to read together, in order.

        Skips before events: a skip below the last version looks like one filled since. Dead letters
        before events: they tell late events from rewritten ones.
        """
        gaps, dead = (
            {place for place in unread if self.decoder.kind(place) == kind}
            for kind in ("gaps", "dead")
        )
        return [places for places in (gaps, dead, unread - gaps - dead) if places]

    def _decoded(self, places: set[PartitionId]) -> Iterator[Folded]:
        # records after the ends are from a later owner, whose skips are not read
        ranges = {place: (self.offsets[place], self._ends[place]) for place in places}
        chunks = iter_chunks(self._clients, ranges, timeout=FOLD_TIMEOUT, meanwhile=self.meanwhile)
        with closing(chunks):
            for chunk in chunks:
                by_topic: dict[str, list[Message]] = {}
                for message in chunk:
                    by_topic.setdefault(message.topic(), []).append(message)
                for topic, messages in by_topic.items():
                    # by topic, so that a chunk's offsets never exceed what was given
                    for message in messages:
                        self.offsets[topic, message.partition()] = message.offset() + 1
                    kind = self.decoder.kinds[topic]
                    yield self.decoder.decode(kind, messages, dict(self.offsets))
        # past the markers of transactions that follow the last records
        self.offsets |= {place: self._ends[place] for place in places}
