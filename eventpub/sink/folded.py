"""Decodes folded records. Others' records raise no version; unreadable ones are only counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from eventpub.admission.model import Shard, SkippedGap, topic_partition
from eventpub.sink import records
from eventpub.sink.client import Clients
from eventpub.sink.encoder import read_conflict, read_gap
from eventpub.sink.reading import origin_of, other_publisher
from eventpub.sink.records import PartitionId

Kind = Literal["events", "gaps", "dead", "late"]


def _no_versions() -> npt.NDArray[np.int64]:
    return np.empty(0, np.int64)


@dataclass(frozen=True)
class Folded:
    """One chunk of one topic, in partition order.

    `gaps` is for gaps only; `aggregate_ids`, `versions` and `create_times` (µs) for other kinds.
    `published`: of dead letters that have it, by row. `contents`: by version, if requested.
    """

    kind: Kind
    offsets: dict[PartitionId, int]
    aggregate_ids: list[str] = field(default_factory=list)
    versions: npt.NDArray[np.int64] = field(default_factory=_no_versions)
    create_times: npt.NDArray[np.int64] = field(default_factory=_no_versions)
    gaps: list[SkippedGap] = field(default_factory=list)
    published: dict[int, tuple[int, int]] = field(default_factory=dict)
    contents: dict[tuple[str, int], set[bytes]] = field(default_factory=dict)


@dataclass
class Decoder:
    """What a fold reads, and how: the records of `app_id`.

    `everywhere` searches all partitions for this shard's aggregates, since the partition count may
    have changed. `with_contents` adds a hash per event, to detect rewritten ones. `not_ours` counts
    records that another publisher wrote, or that cannot be read; `misplaced` own records in another
    partition than today's, if all partitions are read.
    """

    clients: Clients
    shard: Shard
    app_id: str
    everywhere: bool = False
    with_contents: bool = False
    not_ours: int = 0
    misplaced: int = 0

    @cached_property
    def kinds(self) -> dict[str, Kind]:
        kinds: tuple[Kind, ...] = "events", "gaps", "dead", "late"
        return dict(zip(self.clients.sink.topics, kinds, strict=True))

    def kind(self, place: PartitionId) -> Kind:
        return self.kinds[place[0]]

    @cached_property
    def places(self) -> list[PartitionId]:
        shard = self.shard
        numbers = range(shard.partitions) if self.everywhere else sorted(shard.topic_partitions())
        return [(topic, number) for topic in self.kinds for number in numbers]

    @cached_property
    def of_others(self) -> set[PartitionId]:
        """Partitions read that other shards write."""
        own = set(self.shard.topic_partitions())
        return {(topic, number) for topic, number in self.places if number not in own}

    def decode(self, kind: Kind, messages: list[Any], offsets: dict[PartitionId, int]) -> Folded:
        """Decode a chunk; another publisher's event raises `sink.other_publisher`."""
        if kind == "gaps":
            return Folded(kind, offsets, gaps=self._gaps(messages))
        ids: list[str] = []
        versions: list[int] = []
        times: list[str] = []
        published: dict[int, tuple[int, int]] = {}
        contents: dict[tuple[str, int], set[bytes]] = {}
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
                content = self._content(kind, headers, message)
                time = (headers.get(records.TIME) or b"").decode(errors="replace")
            except (KeyError, ValueError, TypeError, AttributeError):
                # Not ours: a missing header or key, no number, no UTF-8.
                self.not_ours += 1
                continue
            if not self._is_own(aggregate_id, message.partition()):
                continue
            conflict = read_conflict(headers) if kind == "dead" else None
            if conflict is not None:
                published[len(ids)] = conflict
            if content is not None:
                contents.setdefault((aggregate_id, version), set()).add(content)
            ids.append(aggregate_id)
            versions.append(version)
            times.append(time)
        return Folded(
            kind,
            offsets,
            aggregate_ids=ids,
            versions=np.array(versions, np.int64),
            create_times=_times(times),
            published=published,
            contents=contents,
        )

    def _content(self, kind: Kind, headers: Mapping[str, Any], message: Any) -> bytes | None:
        if not self.with_contents or (kind == "dead" and records.CONTENT not in headers):
            return None
        return records.content_of_record(headers, message.value())

    def _gaps(self, messages: list[Any]) -> list[SkippedGap]:
        gaps: list[SkippedGap] = []
        for message in messages:
            try:
                gap = read_gap(message.value() or b"")
                headers = dict(message.headers() or ())
            except ValueError:
                self.not_ours += 1
                continue
            counts = self._counts("gaps", message, headers)
            if counts and self._is_own(gap.aggregate_id, message.partition()):
                gaps.append(gap)
        return gaps

    def _counts(self, kind: Kind, message: Any, headers: Mapping[str, Any]) -> bool:
        """Whether this publisher wrote the record."""
        origin = origin_of(message, headers, self.app_id)
        if origin == "own":
            return True
        if origin == "other_publisher" and kind == "events":
            raise other_publisher(self.clients.sink, message)
        self.not_ours += 1
        return False

    def _is_own(self, aggregate_id: str, partition: int) -> bool:
        """Whether the aggregate is this shard's; always true if only own partitions are read."""
        if not self.everywhere:
            return True
        at = topic_partition(aggregate_id, self.shard.partitions)
        self.misplaced += at != partition
        return at % self.shard.shards == self.shard.number


def _times(texts: list[str]) -> npt.NDArray[np.int64]:
    try:
        times = records.parse_times(texts)
    except ValueError:
        times = np.array([records.time_of(t) for t in texts], np.int64)
    is_date = (times >= records.FIRST_TIME) & (times <= records.LAST_TIME)
    return np.where(is_date, times, 0)
