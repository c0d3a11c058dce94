"""Looks events up in the store and on the publisher's topics."""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from itertools import chain, starmap
from typing import Any, TypeAlias

from eventpub.admission.model import SkippedGap, VersionRange
from eventpub.config import Config
from eventpub.errors import ConfigError
from eventpub.sink import records
from eventpub.sink.client import Clients
from eventpub.sink.encoder import read_gap
from eventpub.sink.reading import Message, Place, own_records, read_committed
from eventpub.sink.topics import list_offsets, offsets_at, partition_counts
from eventpub.sources.base import RowSeen
from eventpub.sources.mysql import EventStore
from eventpub.times import format_time

Key: TypeAlias = tuple[str, int]

LOWEST, HIGHEST = -(2**63), 2**63 - 1
_YEAR_3000 = 32_503_680_000_000
_FIRST_BYTES = 512
_TIMES = {"first_seen", "next_attempt", "since", "skipped_at", "create_time"}


def with_times(of: Any) -> dict[str, Any]:
    fields = asdict(of).items()
    return {k: format_time(v) if k in _TIMES and v is not None else v for k, v in fields}


def require_utf8(aggregate_id: str) -> None:
    try:
        aggregate_id.encode()
    except UnicodeEncodeError:
        raise ConfigError("cli.usage", "the aggregate id is not UTF-8", where="ID") from None


def shown_rows(rows: Sequence[RowSeen]) -> dict[str, Any] | None:
    """The first row of a version, and the others that it should not have."""
    shown = [with_times(row) for row in rows]
    for row in shown:
        del row["version"]
    return shown[0] | {"others": shown[1:]} if shown else None


def stored_rows(
    store: EventStore, aggregate_id: str, versions: list[int]
) -> tuple[dict[int, list[RowSeen]], int | None]:
    """The rows of some versions, and the oldest time among them and the row below, or None."""
    if not versions:
        return {}, None
    rows = store.seen(VersionRange(aggregate_id, versions[0], versions[-1]))
    stored: dict[int, list[RowSeen]] = {}
    for row in rows:
        stored.setdefault(row.version, []).append(row)
    if len(stored) < len(versions):
        below = VersionRange(aggregate_id, LOWEST, versions[0] - 1)
        for version in store.versions(below, 1, highest=True):
            rows += store.seen(VersionRange(aggregate_id, version, version))
    times = [row.create_time for row in rows if row.create_time is not None]
    return stored, min(times) if times and len(times) == len(rows) else None


@dataclass(frozen=True)
class Found:
    """A record of a row on the publisher's topics: an event, or a dead letter.

    Attributes:
        aggregate_id, version: of the row; None: it has no usable one.
        payload_bytes: size of the row's payload; None: NULL.
    """

    aggregate_id: str | None
    version: int | None
    topic: str
    partition: int
    offset: int
    timestamp: int
    headers: dict[str, str]
    payload_bytes: int | None
    first_bytes: bytes

    @property
    def key(self) -> Key | None:
        if self.aggregate_id is None or self.version is None:
            return None
        return self.aggregate_id, self.version

    @property
    def is_late(self) -> bool:
        return records.LATE in self.headers

    @property
    def reason(self) -> str | None:
        """Why the row was refused; None: the record is an event."""
        return self.headers.get(records.REASON)


def found_in(message: Message, headers: dict[str, bytes | None]) -> Found:
    texts = {n: (v or b"").decode(errors="replace") for n, v in headers.items()}
    key, value = message.key(), message.value()
    version, size = None, None if value is None else len(value)
    with suppress(KeyError, ValueError):
        version = int(texts[records.SEQUENCE])
    with suppress(KeyError, ValueError):
        size = int(texts["eventpub_payload_bytes"])
    return Found(
        None if key is None else key.decode(errors="replace"),
        version,
        message.topic(),
        message.partition(),
        message.offset(),
        message.timestamp()[1],
        texts,
        size,
        (value or b"")[:_FIRST_BYTES],
    )


def shown_record(record: Found) -> dict[str, Any]:
    is_known = 0 <= record.timestamp < _YEAR_3000
    names = ("topic", "partition", "offset", "is_late", "reason")
    timestamp = format_time(record.timestamp * 1000) if is_known else None
    return {name: getattr(record, name) for name in names} | {"timestamp": timestamp}


class OwnTopics:
    """Reads a publisher's topics until a deadline.

    Attributes:
        unread: partitions not read to their ends.
        is_cut: retention has removed the event topic's records after the last `starts`.
    """

    def __init__(self, config: Config, until: float = float("inf")) -> None:
        self.clients, self._sink = Clients(config.sink), config.sink
        self._app_id = config.app.id
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
        self.is_cut = any(0 < low >= starts[place] for place, low in lows.items())
        return starts

    def read(
        self,
        starts: Mapping[Place, int],
        ends: Mapping[Place, int] | None = None,
        keys: Collection[str] | None = None,
    ) -> Generator[tuple[Message, dict[str, Any]], None, None]:
        """Records of some aggregates (None: all) with headers; close the generator to stop."""
        wanted = None if keys is None else {key.encode() for key in keys}
        reading = read_committed(self.clients, starts, self._until, ends, self.unread)
        with closing(reading):
            yield from own_records(chain.from_iterable(reading), self._app_id, wanted)

    def letters(self, keys: Collection[str] | None = None) -> Iterator[Found]:
        places = self.places(self._sink.dead_topic)
        return starmap(found_in, self.read(dict.fromkeys(places, 0), keys=keys))

    def skips(self, keys: Collection[str] | None = None) -> Iterator[SkippedGap]:
        places = self.places(self._sink.gaps_topic)
        for message, _ in self.read(dict.fromkeys(places, 0), keys=keys):
            with suppress(ValueError):
                yield read_gap(message.value() or b"")


class Topics(OwnTopics):
    """The topics' records of one aggregate, as far as found in a limited time.

    Attributes:
        partitions: of the event topic; 0: it does not exist yet.
    """

    def __init__(self, config: Config, aggregate_id: str, timeout: float) -> None:
        super().__init__(config, time.monotonic() + timeout)
        self.partitions = len(self.places(config.sink.topic))
        self.by_version: dict[int, list[Found]] = {}
        self.own_skips: list[SkippedGap] = []
        self._aggregate_id = aggregate_id
        self._starts: dict[Place, int] = {}

    def read_sides(self) -> None:
        keys = [self._aggregate_id]
        self.own_skips = list(self.skips(keys))
        for letter in sorted(self.letters(keys), key=lambda letter: letter.timestamp):
            self._add(letter)

    def _add(self, found: Found) -> None:
        if found.version is not None:
            self.by_version.setdefault(found.version, []).append(found)

    def read_events(self, wanted: Collection[int] | None, oldest: int | None) -> None:
        """Read events until the `wanted` versions are found; None: all.

        Args:
            oldest: lower bound of their records' times, µs; None: unknown.
        """
        places = self.places(self._sink.topic, self._sink.late_topic)
        self._starts = self.starts(places, oldest and records.timestamp(oldest))
        self._read(self._starts, wanted)

    def read_older_events(self, wanted: Collection[int]) -> None:
        """Read records older than expected, such as of an event whose time was changed."""
        before = {place: end for place, end in self._starts.items() if end}
        if wanted and before:
            self._read(dict.fromkeys(before, 0), wanted, before)

    def has_event(self, version: int) -> bool:
        return any(found.reason is None for found in self.by_version.get(version, ()))

    def _read(
        self,
        starts: dict[Place, int],
        wanted: Collection[int] | None = None,
        ends: dict[Place, int] | None = None,
    ) -> None:
        left: set[int | None] = {v for v in wanted or () if not self.has_event(v)}
        with closing(self.read(starts, ends=ends, keys=[self._aggregate_id])) as reading:
            for found in starmap(found_in, reading):
                if wanted is None or found.version in wanted:
                    self._add(found)
                    left.discard(found.version)
                if wanted is not None and not left:
                    return
