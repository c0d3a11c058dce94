"""Looks events up in the store and on the publisher's topics."""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

from eventpub.admission import SkippedGap, VersionRange
from eventpub.config import Config
from eventpub.sink import records
from eventpub.sink.client import Clients
from eventpub.sink.encoder import read_gap
from eventpub.sink.reading import Message, Place, own_records, read_committed
from eventpub.sink.topics import list_offsets, offsets_at, partition_counts
from eventpub.sources.mysql import EventStore
from eventpub.times import format_time

LOWEST, HIGHEST = -(2**63), 2**63 - 1
_YEAR_3000 = 32_503_680_000_000
_TIMES = {"first_seen", "next_attempt", "since", "skipped_at", "create_time"}


def with_times(of: Any) -> dict[str, Any]:
    fields = asdict(of).items()
    return {k: format_time(v) if k in _TIMES and v is not None else v for k, v in fields}


@dataclass(frozen=True)
class Stored:
    """A row of the event table; `create_time` is µs, or None if invalid."""

    create_time: int | None
    event_type: str
    payload_bytes: int | None
    others: tuple[Stored, ...] = ()


def shown_row(row: Stored) -> dict[str, Any]:
    return with_times(row) | {"others": [shown_row(other) for other in row.others]}


def stored_rows(
    store: EventStore, aggregate_id: str, versions: list[int]
) -> tuple[dict[int, Stored], int | None]:
    """The rows of some versions, and the oldest time among them and the row below, or None."""
    if not versions:
        return {}, None
    rows = store.seen(VersionRange(aggregate_id, versions[0], versions[-1]))
    stored: dict[int, Stored] = {}
    for r in rows:
        row, first = Stored(r.create_time, r.event_type, r.payload_bytes), stored.get(r.version)
        stored[r.version] = row if first is None else replace(first, others=(*first.others, row))
    if len(stored) < len(versions):
        below = VersionRange(aggregate_id, LOWEST, versions[0] - 1)
        for version in store.versions(below, 1, highest=True):
            rows += store.seen(VersionRange(aggregate_id, version, version))
    times = [row.create_time for row in rows if row.create_time is not None]
    return stored, min(times) if times and len(times) == len(rows) else None


@dataclass(frozen=True)
class Found:
    topic: str
    partition: int
    offset: int
    timestamp: int
    is_late: bool = False
    reason: str | None = None


def shown_record(record: Found) -> dict[str, Any]:
    is_known = 0 <= record.timestamp < _YEAR_3000
    timestamp = format_time(record.timestamp * 1000) if is_known else None
    return asdict(record) | {"timestamp": timestamp}


class OwnTopics:
    """Reads a publisher's topics, by its current and former names, until a deadline.

    Attributes:
        unread: partitions not read to their ends.
        is_cut: retention has removed the event topic's records after `starts`.
    """

    def __init__(self, config: Config, until: float = float("inf")) -> None:
        self.clients, self._sink = Clients(config.sink), config.sink
        self._ids = {config.app.id, *config.app.former_ids}
        self._until = until
        self._counts = partition_counts(self.clients)
        self.unread: set[Place] = set()
        self.is_cut = False

    def places(self, *topics: str) -> list[Place]:
        return [(topic, n) for topic in topics for n in range(self._counts.get(topic, 0))]

    def starts(self, places: list[Place], since: int | None) -> dict[Place, int]:
        """Offsets below which no timestamp is at or after `since`, ms; None: the first offsets."""
        starts = dict.fromkeys(places, 0)
        if since is not None:
            starts = offsets_at(self.clients, places, since)
        events = [place for place in places if place[0] == self._sink.topic]
        lows = list_offsets(self.clients, events, "earliest")
        self.is_cut |= any(0 < low >= starts[place] for place, low in lows.items())
        return starts

    def read(
        self,
        starts: Mapping[Place, int],
        ends: Mapping[Place, int] | None = None,
        keys: Collection[str] | None = None,
    ) -> Generator[tuple[Message, dict[str, Any]], None, None]:
        """Records of some aggregates (None: all) with headers; close the generator to stop."""
        wanted = None if keys is None else {key.encode() for key in keys}
        with closing(read_committed(self.clients, starts, self._until, ends)) as reading:
            yield from own_records(chain.from_iterable(reading), self._ids, wanted)
            self.unread |= reading.unread


class Topics:
    """The topics' records of one aggregate, as far as found in a limited time.

    Attributes:
        partitions: of the event topic; 0: it does not exist yet.
    """

    def __init__(self, config: Config, aggregate_id: str, timeout: float) -> None:
        self.own = OwnTopics(config, time.monotonic() + timeout)
        self.partitions = len(self.own.places(config.sink.topic))
        self.by_version: dict[int, list[Found]] = {}
        self.skips: list[SkippedGap] = []
        self._sink = config.sink
        self._aggregate_id = aggregate_id
        self._starts: dict[Place, int] = {}

    def read_sides(self) -> None:
        places = self.own.places(self._sink.gaps_topic, self._sink.dead_topic)
        self._read(dict.fromkeys(places, 0))
        for letters in self.by_version.values():
            letters.sort(key=lambda letter: letter.timestamp)

    def read_events(self, wanted: Collection[int] | None, oldest: int | None) -> None:
        """Read events until the `wanted` versions are found; None: all.

        Args:
            oldest: lower bound of their records' times, µs; None: unknown.
        """
        places = self.own.places(self._sink.topic, self._sink.late_topic)
        self._starts = self.own.starts(places, oldest and records.timestamp(oldest))
        self._read(self._starts, wanted)

    def read_older_events(self, wanted: Collection[int]) -> None:
        """Read records older than expected, such as of an event whose time was changed."""
        before = {place: end for place, end in self._starts.items() if end}
        if wanted and before:
            self._read(dict.fromkeys(before, 0), wanted, before)

    def has_event(self, version: int) -> bool:
        return any(f.topic != self._sink.dead_topic for f in self.by_version.get(version, ()))

    def _read(
        self,
        starts: dict[Place, int],
        wanted: Collection[int] | None = None,
        ends: dict[Place, int] | None = None,
    ) -> None:
        left = {version for version in wanted or () if not self.has_event(version)}
        with closing(self.own.read(starts, ends=ends, keys=[self._aggregate_id])) as found:
            for message, headers in found:
                with suppress(KeyError, TypeError, ValueError):
                    left.discard(self._take(message, headers, wanted))
                if wanted is not None and not left:
                    return

    def _take(
        self, message: Message, headers: dict[str, Any], wanted: Collection[int] | None
    ) -> int | None:
        if message.topic() == self._sink.gaps_topic:
            self.skips.append(read_gap(message.value() or b""))
            return None
        version = int(headers[records.SEQUENCE])
        if wanted is not None and version not in wanted:
            return None
        is_dead = message.topic() == self._sink.dead_topic
        reason = headers.get(records.REASON) if is_dead else None
        found = Found(
            message.topic(),
            message.partition(),
            message.offset(),
            message.timestamp()[1],
            records.LATE in headers,
            None if reason is None else reason.decode(errors="replace"),
        )
        self.by_version.setdefault(version, []).append(found)
        return version
