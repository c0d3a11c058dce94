"""Reading back what is visible in a shard's own partitions: the topic is the truth.

Called after `init_transactions`, when the former owner is fenced and its transaction is complete.
Reads committed records from the saved next offsets to the *high watermark*: a reader that trusted
the last stable offset would stop before an open transaction and publish its events a second time.
Where a transaction is open although its producer is fenced, the broker has left its markers out;
see `missing_markers`.
What must hold at the end: every partition was read to its high watermark, or an error says why not.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from eventpub import config
from eventpub.admission.model import Shard, SkippedGap, topic_partition
from eventpub.errors import SinkError
from eventpub.sink import client, faults, records
from eventpub.sink.missing_markers import (
    MARKER_TIMEOUT,
    MissingMarkerError,
    PartitionId,
    Written,
    hanging,
)
from eventpub.sink.origin import Sources, other_publisher
from eventpub.sink.topics import End, check_leaders, list_offsets, tail_gone

FOLD_TIMEOUT = 60.0
"""Seconds without any progress after which a fold gives up."""

_CHUNK = 10_000

Kind = Literal["events", "gaps", "dead", "late"]


def _no_versions() -> npt.NDArray[np.int64]:
    return np.empty(0, np.int64)


@dataclass(frozen=True)
class Folded:
    """One chunk of one topic: in the order of each partition.

    `aggregate_ids`, `versions` and `create_times` (µs) belong to events, dead and late rows; a
    chunk of gaps has `gaps` instead, and in `unsigned` those that do not say who has written them.
    `published` is that of each dead letter that has one, by row.
    `offsets` are the next offsets reached so far.
    """

    kind: Kind
    offsets: dict[PartitionId, int]
    aggregate_ids: list[str] = field(default_factory=list)
    versions: npt.NDArray[np.int64] = field(default_factory=_no_versions)
    create_times: npt.NDArray[np.int64] = field(default_factory=_no_versions)
    gaps: list[SkippedGap] = field(default_factory=list)
    unsigned: list[SkippedGap] = field(default_factory=list)
    published: dict[int, tuple[int, int]] = field(default_factory=dict)


class Fold(Iterator[Folded]):
    """Iterates over the chunks; what it found besides is known when it has ended.

    Args:
        sink: the configuration.
        shard: whose partitions are read.
        saved: next offsets; a partition without one is read from its beginning.
        written: where a saved offset is that of a transaction's end: what it has written.
        acknowledged: next offsets up to which all counts as committed, though `saved`, of a lost
            or older index, may be behind.
        end_open: ends what the shard's own producer has open in these partitions.
        timeout: seconds without any progress after which it gives up.
        only: read no other kind of topic.
        sources: whose records count; None: whoever's.
        everywhere: read all partitions, for what belongs to this shard's aggregates: where the
            number of partitions may have been another one when it was written.
        meanwhile: called again and again while nothing comes; what it raises ends the iteration.

    Attributes:
        offsets: the next offset of every own partition; to be saved with what was folded.
        truncated: True if retention has removed records of the topic that were never folded.
        not_ours: by origin, records that this publisher has not written; they do not count.
        records: how many records were read.
        misplaced: where all partitions are read, records of this publisher that stand in another
            one than they would be written to today.
    """

    def __init__(  # noqa: PLR0913 (options, by keyword)
        self,
        sink: config.Sink,
        shard: Shard,
        saved: Mapping[PartitionId, int],
        written: Mapping[PartitionId, Written] | None = None,
        *,
        acknowledged: Mapping[PartitionId, int] | None = None,
        end_open: Callable[[set[PartitionId]], None] | None = None,
        timeout: float = FOLD_TIMEOUT,
        only: Kind | None = None,
        sources: Sources | None = None,
        everywhere: bool = False,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        self._sink = sink
        self._meanwhile = meanwhile
        self._shard = shard
        self._sources = sources
        self._everywhere = everywhere
        self._timeout = timeout
        self._acknowledged = acknowledged or {}
        self._end_open = end_open
        self._written = written or {}
        self._must_see: dict[PartitionId, int] = {}
        kinds: dict[str, Kind] = {
            sink.topic: "events",
            sink.gaps_topic: "gaps",
            sink.dead_topic: "dead",
            sink.late_topic: "late",
        }
        self._kinds = {t: kind for t, kind in kinds.items() if only in {None, kind}}
        own = set(shard.topic_partitions())
        numbers = range(shard.partitions) if everywhere else sorted(own)
        self._own = [(t, p) for t in self._kinds for p in numbers]
        self._of_others = {(t, p) for t, p in self._own if p not in own}
        self._shared = set(self._own) if sources and sources.ignored else self._of_others
        """Others write to these: what stands behind their ends as seen first is not ours."""
        self._ends: dict[PartitionId, int] = {}
        self._reading: set[PartitionId] = set()
        self.offsets: dict[PartitionId, int] = dict(saved)
        self.truncated = False
        self.not_ours: Counter[str] = Counter()
        self.records = self.misplaced = 0
        self._chunks = self._read()

    @property
    def unread(self) -> int:
        """How many offsets are left up to the ends; what was compacted away counts, too."""
        ends = self._ends.items()
        return sum(max(0, end - self.offsets.get(place, 0)) for place, end in ends)

    def __next__(self) -> Folded:
        return next(self._chunks)

    def _read(self) -> Iterator[Folded]:
        self._settle()
        self.offsets = {p: self.offsets[p] for p in self._ends if p in self.offsets}
        behind = self._behind()
        while any(self._kinds[topic] == "events" for topic, _ in behind):
            if self._sides_are_whole():
                break
            self._settle()
            behind = self._behind()
        if not behind:
            return
        self._start(behind)
        if not self._reading:
            return
        client_log = client.ClientLog()
        consumer = client.consumer(self._sink, client_log)
        try:
            # Skips before events: once the events above a skip have raised an aggregate's last
            # version, a skip below it cannot be distinguished from one that was filled since. Dead
            # letters before events: a late event is known from one written anew where the
            # conflict is known.
            reading = self._reading
            gaps, dead = (
                {place for place in reading if self._kinds[place[0]] == kind}
                for kind in ("gaps", "dead")
            )
            for self._reading in (gaps, dead, reading - gaps - dead):
                if self._reading:
                    consumer.assign(
                        [
                            TopicPartition(t, p, self._must_see.get((t, p), self.offsets[t, p]))
                            for t, p in self._reading
                        ]
                    )
                    yield from self._consume(consumer)
        except KafkaException as exception:
            error = faults.kafka_error(exception)
            raise faults.fault(error, "reading the topic back", self._sink) from exception
        finally:
            consumer.close()

    def _behind(self) -> list[PartitionId]:
        return [p for p, end in self._ends.items() if self.offsets.get(p) != end]

    def _sides_are_whole(self) -> bool:
        """Whether skips and dead letters are known to their ends, before events are read.

        Of events that are read, and of a skip below them that is not since a broker has answered
        that leads no more, it would follow that a late event of that skip was published: it would
        be dropped, and nothing that is written afterwards shows that.
        """
        sides = [p for p in self._ends if self._kinds[p[0]] in {"gaps", "dead"}]
        sides = [p for p in sides if p not in self._shared]
        if not sides:
            return True
        check_leaders(self._sink, sides)
        ends = self._list("latest")
        return all(ends[place] == self._ends[place] for place in sides)

    def _settle(self) -> None:
        """No transaction is open, nor is an end before its saved offset, but by a lost marker."""
        began: float | None = None
        ended = False
        seen: dict[PartitionId, int] = {}
        while True:
            self._ends = {**self._list("latest"), **seen}
            short = {p for p, end in self._ends.items() if self.offsets.get(p, 0) > end}
            seen = {p: end for p, end in self._ends.items() if p in self._shared - short}
            stable = self._list("latest", committed=True)
            began = began or time.monotonic()  # not before the broker answers
            blocked = {place for place, end in self._ends.items() if stable[place] < end}
            if not blocked | short:
                return
            waited = time.monotonic() - began
            if waited > MARKER_TIMEOUT:  # else: a commit is answered before its markers are written
                for place in sorted(short):
                    # a marker that is missing is one offset
                    if self._ends[place] < self.offsets[place] - (self._last(place) is not None):
                        saved, end = self.offsets[place], self._ends[place]
                        raise tail_gone(self._sink, place, saved, end)
                missing_markers = {}
                for place in (blocked | short) - self._of_others:
                    first = stable[place]
                    known = min(self._acknowledged.get(place, 0) - 1, self._ends[place])
                    if self._last(place) is not None and first <= self._written[place][0]:
                        known = max(known, self._written[place][1])
                    if known > first:
                        missing_markers[place] = (first, known)
                    elif place in short:
                        saved, end = self.offsets[place], self._ends[place]
                        raise tail_gone(self._sink, place, saved, end)
                if missing_markers:
                    raise MissingMarkerError(missing_markers)
                if not ended and self._end_open is not None and blocked - self._of_others:
                    self._end_open(blocked - self._of_others)
                    ended = True
                elif waited > self._timeout:
                    place = min(blocked | short)
                    raise hanging(self._sink, place, stable[place], self._ends[place], waited)
            time.sleep(0.02 if waited < 0.5 else 0.2)

    def _list(self, end: End, *, committed: bool = False) -> dict[PartitionId, int]:
        optional = frozenset({self._sink.late_topic})
        return list_offsets(self._sink, self._own, end, committed=committed, optional=optional)

    def _start(self, behind: list[PartitionId]) -> None:
        lows = self._list("earliest")
        for place in behind:
            end, low = self._ends[place], lows[place]
            at = self.offsets.get(place)
            last = self._last(place)
            if last is not None and last >= low and place not in self._of_others:
                self._must_see[place] = last
            if low > (at or 0) and self._kinds[place[0]] == "events":
                self.truncated = True
            self.offsets[place] = start = max(low, at or 0)
            if start < end:
                self._reading.add(place)

    def _last(self, place: PartitionId) -> int | None:
        """The record before the marker that the saved offset counts on."""
        written = self._written.get(place)
        if written is None or self.offsets.get(place) != written[1] + 1:
            return None
        return written[1] - 1

    def _see(self, place: PartitionId, offset: int | None) -> bool:
        """Whether this is the record that had to be seen first, at None: the partition's end."""
        expected = self._must_see.pop(place, None)
        if expected is not None and offset != expected:
            raise MissingMarkerError({place: self._written[place]})
        return expected is not None

    def _consume(self, consumer: Consumer) -> Iterator[Folded]:  # noqa: PLR0912 (one pass over what comes, in the order of the rules)
        deadline = time.monotonic() + self._timeout
        while self._reading:
            first = client.call(consumer.poll, 0.1)
            if first is None:
                self._meanwhile()
            messages: list[Any] = (
                [] if first is None else [first, *client.call(consumer.consume, _CHUNK, 0)]
            )
            found: dict[str, list[Any]] = {}
            reached: dict[str, dict[PartitionId, int]] = {}
            for message in messages:
                error = message.error()
                topic, partition = message.topic(), message.partition()
                if error is None:
                    if self._see((topic, partition), message.offset()):
                        continue  # known since it was written
                    if message.offset() >= self._ends[topic, partition]:
                        continue  # written by an owner after this one, whose skips were not read
                    found.setdefault(topic, []).append(message)
                    reached.setdefault(topic, {})[topic, partition] = message.offset() + 1
                elif error.code() == KafkaError._PARTITION_EOF:
                    # After the last record there are transaction markers, which only the position
                    # of an end-of-partition event shows.
                    self._see((topic, partition), None)
                    end = min(message.offset(), self._ends[topic, partition])
                    reached.setdefault(topic, {})[topic, partition] = end
                elif error.code() == KafkaError._AUTO_OFFSET_RESET:
                    raise SinkError(
                        "sink.offset_gone",
                        f"retention removed records of {topic}[{partition}] while they were read",
                        where=f"topic {topic}",
                        retriable=True,
                    )
                elif topic is not None or error.fatal():
                    raise faults.fault(error, f"reading {topic}[{partition}] back", self._sink)
                # What belongs to no partition concerns a group, which is not used, or a connection,
                # which is made again; if it is not, there is no progress.
            before = dict(self.offsets)
            for topic, places in reached.items():
                # Topic by topic, so that the offsets of a chunk are never ahead of what was given.
                self.offsets.update(places)
                if topic in found:
                    self.records += len(found[topic])
                    yield self._fold(self._kinds[topic], found[topic])
            self._reading -= {p for p in self._reading if self.offsets[p] >= self._ends[p]}
            if self.offsets != before:
                deadline = time.monotonic() + self._timeout
            elif time.monotonic() > deadline:
                raise self._stuck()

    def _fold(self, kind: Kind, messages: list[Any]) -> Folded:
        if kind == "gaps":
            gaps, unsigned = self._gaps(messages)
            return Folded(kind, dict(self.offsets), gaps=gaps, unsigned=unsigned)
        ids: list[str] = []
        versions: list[int] = []
        times: list[str] = []
        published: dict[int, tuple[int, int]] = {}
        for message in messages:
            try:
                headers = dict(message.headers() or ())
                key = message.key()
                if not self._counts(kind, message, headers):
                    continue
                if kind == "dead" and records.REASON in headers and records.SEQUENCE not in headers:
                    continue
                version = int(headers[records.SEQUENCE])
                if not -(2**63) <= version < 2**63:
                    raise ValueError(version)
                aggregate_id = key.decode()
            except (KeyError, ValueError, TypeError, AttributeError):
                # Not one of ours: no such header, no number, no key, no UTF-8.
                self.not_ours["unrecognised"] += 1
                continue
            if not self._is_own(aggregate_id, message.partition()):
                continue
            conflict = records.read_conflict(headers) if kind == "dead" else None
            if conflict is not None:
                published[len(ids)] = conflict
            ids.append(aggregate_id)
            versions.append(version)
            times.append(headers.get(records.TIME, b"").decode(errors="replace"))
        return Folded(
            kind,
            dict(self.offsets),
            aggregate_ids=ids,
            versions=np.array(versions, np.int64),
            create_times=_times(times),
            published=published,
        )

    def _gaps(self, messages: list[Any]) -> tuple[list[SkippedGap], list[SkippedGap]]:
        """The skips, and apart from them those that only look like this publisher's."""
        gaps: list[SkippedGap] = []
        unsigned: list[SkippedGap] = []
        for message in messages:
            headers = dict(message.headers() or ())
            try:
                gap = records.read_gap(message.value() or b"")
            except ValueError:
                self.not_ours["unrecognised"] += 1
                continue
            is_signed = records.SOURCE in headers or self._sources is None
            if not is_signed and not records.is_unsigned_gap(gap, message, headers):
                self.not_ours["unrecognised"] += 1
            elif is_signed and not self._counts("gaps", message, headers):
                continue
            elif self._is_own(gap.aggregate_id, message.partition()):
                (gaps if is_signed else unsigned).append(gap)
        return gaps, unsigned

    def _counts(self, kind: Kind, message: Any, headers: Mapping[str, Any]) -> bool:
        """Whether this publisher has written a record."""
        if self._sources is None:
            return True
        origin = self._sources.origin(message, headers)
        if origin == "own":
            return True
        if origin == "other_publisher" and kind == "events":
            raise other_publisher(self._sink, message)
        self.not_ours["ignored" if origin == "ignored" else "unrecognised"] += 1
        return False

    def _is_own(self, aggregate_id: str, partition: int) -> bool:
        """Whether an aggregate is this shard's; asked where partitions of others are read."""
        if not self._everywhere:
            return True
        at = topic_partition(aggregate_id, self._shard.partitions)
        self.misplaced += at != partition
        return at % self._shard.shards == self._shard.number

    def _stuck(self) -> SinkError:
        topic, partition = place = min(self._reading)
        return SinkError(
            "sink.unreachable",
            f"{topic}[{partition}] gave no records for {self._timeout:.0f} s at offset"
            f" {self.offsets[place]} of {self._ends[place]}",
            where=f"topic {topic}",
            retriable=True,
        )


def _times(texts: list[str]) -> npt.NDArray[np.int64]:
    try:
        return records.parse_times(texts)
    except ValueError:
        return np.array([_time(t) for t in texts], np.int64)


def _time(text: str) -> int:
    try:
        return int(records.parse_times([text])[0])
    except ValueError:
        return 0
