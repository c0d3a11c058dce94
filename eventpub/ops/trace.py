"""Where one event is, or each version of an aggregate: in the store, on which topic, or held.

The publisher is asked first, then the store, then the topics: what a publisher has accounted for is
on the topics by the time they are read, so that nothing counts as missing which was on its way. The
topics are read as any service reads them, in the partition of the key, from the event's creation
time on, and for a limited time: what was not read is said.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, TypeAlias

from eventpub.admission import Hold, SkippedGap, VersionRange, in_ranges, topic_partition, values
from eventpub.channel import Request
from eventpub.config import Config, format_time, parse_time
from eventpub.errors import ConfigError
from eventpub.index import glance
from eventpub.ops.asking import ask_running, ask_shards
from eventpub.ops.committed import Committed, Message, Place, offsets_at
from eventpub.ops.dead import OF_ANOTHER
from eventpub.sink import records
from eventpub.sink.topics import list_offsets, partition_counts
from eventpub.state import StateDir
from eventpub.store import EventStore

Verdict: TypeAlias = Literal[
    "published",
    "held",
    "waiting",
    "skipped",
    "late",
    "dead",
    "baseline",
    "missing",
    "unknown",
]
"""published: on the topic. late: published, diverted or dropped after its version was skipped.
dead: a dead letter. skipped: given up. baseline: created before the start, never published. held:
its aggregate waits for a version. waiting: younger than what is read so far. missing: it is not
where it should be. unknown: nothing is known of it, or the time did not suffice."""

_ANSWERED = frozenset({"published", "late", "baseline"})

_LIST_TIMEOUT = 20.0
_BYTES = 16 * 1024 * 1024
_HIGHEST = 2**63 - 1
_YEAR_3000 = 32_503_680_000_000
MOST_OTHERS = 20
"""Records of others that are listed."""


@dataclass(frozen=True)
class Stored:
    """A row of the event table.

    Attributes:
        create_time: µs.
        event_type: of the event.
        payload_bytes: size of its payload; None: it is NULL.
    """

    create_time: int
    event_type: str
    payload_bytes: int | None


@dataclass(frozen=True)
class Found:
    """A record of one of the publisher's topics.

    Attributes:
        topic, partition, offset: where it is.
        timestamp: of the record, ms.
        is_late: whether it is marked as late.
        reason: of a dead letter; of one that the publisher has not written, why that is known.
    """

    topic: str
    partition: int
    offset: int
    timestamp: int
    is_late: bool = False
    reason: str | None = None


@dataclass(frozen=True)
class Traced:
    """One version.

    Attributes:
        version: its number.
        verdict: where it is, in a word.
        note: the same in a sentence, where the word does not say all.
        stored: its row; None: the store has none.
        found: its records, in the order of the topics.
        hold: the hold of its aggregate, if this version waits or is waited for.
        skip: the recorded skip that it belongs to.
    """

    version: int
    verdict: Verdict
    note: str = ""
    stored: Stored | None = None
    found: tuple[Found, ...] = ()
    hold: Hold | None = None
    skip: SkippedGap | None = None

    @property
    def is_accounted_for(self) -> bool:
        """Whether nothing is left to be done: published, or not there, or not to be published."""
        return self.verdict in _ANSWERED or (self.verdict == "skipped" and self.stored is None)

    def to_dict(self) -> dict[str, Any]:
        """JSON-serializable; times are RFC 3339."""
        stored = None if self.stored is None else asdict(self.stored)
        if stored is not None:
            stored["create_time"] = format_time(stored["create_time"])
        return {
            "version": self.version,
            "verdict": self.verdict,
            "note": self.note,
            "stored": stored,
            "records": [place(f) for f in self.found],
            "hold": _with_times(self.hold),
            "skip": _with_times(self.skip),
        }


def place(found: Found) -> dict[str, Any]:
    """A record as JSON shows it; without a timestamp, if it has none that a calendar knows."""
    is_known = 0 <= found.timestamp < _YEAR_3000
    timestamp = format_time(found.timestamp * 1000) if is_known else None
    return asdict(found) | {"timestamp": timestamp}


def _with_times(of: Hold | SkippedGap | None) -> dict[str, Any] | None:
    times = {"first_seen", "next_attempt", "since", "skipped_at"}
    if of is None:
        return None
    return {k: format_time(v) if k in times else v for k, v in asdict(of).items()}


@dataclass(frozen=True)
class Trace:
    """What was found of an aggregate.

    Attributes:
        aggregate_id: whose versions.
        versions: ascending.
        is_running: whether a publisher runs on the state directory, and answered.
        position: everything created at or before is accounted for, µs; None: not known.
        notes: what else is to be said.
        total: how many versions there are, of which `versions` are the last; None: not known.
        waits_for: the first and the last of the versions that the aggregate waits for.
        others: records with the aggregate's key that the publisher has not written.
        is_whole: whether the topics were read as far as was needed.
    """

    aggregate_id: str
    versions: list[Traced]
    is_running: bool
    position: int | None
    notes: list[str] = field(default_factory=list)
    total: int | None = None
    waits_for: tuple[int, int] | None = None
    others: list[Found] = field(default_factory=list)
    is_whole: bool = True

    @property
    def ok(self) -> bool:
        """Whether there is any version, and all are accounted for."""
        return bool(self.versions) and all(v.is_accounted_for for v in self.versions)


@dataclass(frozen=True)
class _Publisher:
    """What the publisher says, or its state where none runs."""

    is_running: bool
    position: int | None
    start: int
    hold: Hold | None
    skipped: Sequence[tuple[int, int]]


@dataclass
class _Topics:
    """What the topics have of an aggregate."""

    by_version: dict[int, list[Found]] = field(default_factory=dict)
    skips: list[SkippedGap] = field(default_factory=list)
    others: list[Found] = field(default_factory=list)
    unread: set[Place] = field(default_factory=set)
    is_cut: bool = False


@dataclass(frozen=True)
class _Versions:
    """The versions that an aggregate has, of which the last are shown.

    Args:
        span: from the first one that an aggregate may have to the highest that is known of.
        apart: others, refused or deleted since.
        is_whole: whether these are all.
    """

    span: range
    apart: frozenset[int] = frozenset()
    is_whole: bool = True

    def last(self, limit: int) -> list[int]:
        """The highest so many, ascending."""
        return sorted({*self.span[-limit:], *sorted(self.apart)[-limit:]})[-limit:]

    def and_of(self, more: Collection[int]) -> _Versions:
        """With others, which may be among them."""
        apart = self.apart.union(v for v in more if v not in self.span)
        return replace(self, apart=apart)

    @property
    def total(self) -> int | None:
        """How many there are; None: not known."""
        # len() is for less than 2^63
        return self.span.stop - self.span.start + len(self.apart) if self.is_whole else None


def trace(
    config: Config,
    aggregate_id: str,
    version: int | None = None,
    *,
    limit: int = 20,
    timeout: float = 60.0,
) -> Trace:
    """Find one version of an aggregate, or the last ones.

    Args:
        version: which; None: the highest `limit` that are known of.
        timeout: seconds for reading the topics.

    Raises:
        ConfigError: cli.usage, the id is not UTF-8
        StoreError, SinkError, StateError: the store, the topics or the state cannot be read.
    """
    try:
        aggregate_id.encode()
    except UnicodeEncodeError:
        raise ConfigError("cli.usage", "the aggregate id is not UTF-8", where="ID") from None
    sink = config.sink
    partitions = partition_counts(sink)
    count = partitions.get(sink.topic, 0)
    of_topic = topic_partition(aggregate_id, count) if count else None
    publisher = _ask(config, aggregate_id, of_topic)
    with EventStore(_readable(config), EventStore.discover(config.store)) as store:
        now = store.now()
        known = _Versions(range(0) if version is None else range(version, version + 1))
        if version is None:
            known = _all_versions(config, store, aggregate_id, publisher.hold, limit)
        versions = known.last(limit)
        stored, oldest = _rows(store, aggregate_id, versions)
        waits_for = _waits_for(store, publisher.hold)
    topics = _Topics()
    judge = _Judge(config, topics, publisher, now)
    if count:
        search = _Search(config, aggregate_id, partitions, topics, timeout)
        search.read_sides()
        if version is None and versions:
            known = known.and_of(topics.by_version)
            versions = known.last(limit)
            letters = [f for v in versions if v not in stored for f in topics.by_version.get(v, ())]
            if oldest is not None:
                oldest = min([oldest, *(letter.timestamp * 1000 for letter in letters)])
        search.run(set(versions) or None, oldest)
        if versions:
            is_asked_for = version is not None
            lost = [v for v in versions if judge.misses(v, stored.get(v), is_asked_for)]
            search.look_elsewhere(lost, oldest)
        else:
            search.look_elsewhere(set() if topics.by_version else None, oldest)
            known = known.and_of(topics.by_version)
            versions = known.last(limit)
    judged = [judge(v, stored.get(v)) for v in versions]
    return Trace(
        aggregate_id,
        judged,
        publisher.is_running,
        publisher.position,
        _notes(config, topics, publisher, count, timeout),
        known.total,
        waits_for,
        topics.others,
        not topics.unread,
    )


def _readable(config: Config) -> Any:
    # what a replica has not applied yet is shown as what it is
    return config.store.model_copy(update={"allow_replica": True})


# -- the publisher -----------------------------------------------------------------------------


def _ask(config: Config, aggregate_id: str, partition: int | None) -> _Publisher:
    state = StateDir(config.app.state_dir)
    is_running = state.is_running()
    kept = (state.read(state.progress_file) if is_running else state.read_progress()) or {}
    start = (state.read(state.start_file) or {}).get("position")
    if start is None and config.read.start not in {"beginning", "now"}:
        start = parse_time(config.read.start)
    status = ask_running(state, "status")
    if status is not None:
        shards = {shard["shard"]: shard for shard in status["shards"]}
        own = {} if partition is None or not shards else shards.get(partition % len(shards), {})
        position = own.get("position") or kept.get("position")
        answers = ask_shards(state, Request(secrets.token_hex(8), "list"), _LIST_TIMEOUT)
        found = [json.loads(answer) for answer in (answers or {}).values()]
        holds = [Hold(**hold) for answer in found for hold in answer["holds"]]
        skipped = [r for answer in found for r in answer["skipped"].get(aggregate_id, ())]
    else:
        position = kept.get("position")
        holds, skipped = [], []
        shards_kept = kept.get("shards", config.spark.shards)
        for number in range(shards_kept):
            of_shard, skipped_of = glance(state.shard_index(shards_kept, number))
            holds += of_shard
            skipped += skipped_of.get(aggregate_id, [])
    hold = next((h for h in holds if h.aggregate_id == aggregate_id), None)
    ranges = [(int(first), int(last)) for first, last in skipped]
    return _Publisher(status is not None, position, int(start or 0), hold, ranges)


# -- the store ---------------------------------------------------------------------------------


def _all_versions(
    config: Config, store: EventStore, aggregate_id: str, hold: Hold | None, limit: int
) -> _Versions:
    """Those that the store or the publisher knows of; below the first one the highest alone."""
    newest = _below(store, aggregate_id, _HIGHEST, 1)
    if hold is not None:
        newest.append(hold.seen)
    if not newest:
        return _Versions(range(0))
    first = config.store.first_version
    # those below the first one are no events; they are dead letters
    refused = _below(store, aggregate_id, first, limit + 1)
    span = range(first, max(first, max(newest) + 1))
    return _Versions(span, frozenset(refused), len(refused) <= limit)


def _below(store: EventStore, aggregate_id: str, bound: int, limit: int) -> list[int]:
    return [
        int(v)
        for batch in store.below([(aggregate_id, bound)], limit)
        for v in values(batch, "version")
    ]


def _waits_for(store: EventStore, hold: Hold | None) -> tuple[int, int] | None:
    """The first and the last version of the gap that a hold waits for."""
    if hold is None or hold.catching_up:
        return None
    above = VersionRange(hold.aggregate_id, hold.first_missing + 1, hold.seen)
    there = values(store.backtrack([above], 1), "version")
    return hold.first_missing, min(there, default=hold.seen) - 1


def _rows(
    store: EventStore, aggregate_id: str, versions: list[int]
) -> tuple[dict[int, Stored], int | None]:
    """The rows of some versions, and the creation time of the oldest of them and the one below.

    The time is None where neither is there.
    """
    stored: dict[int, Stored] = {}
    times: list[int] = []
    if not versions:
        return stored, None
    left = [VersionRange(aggregate_id, versions[0], versions[-1])]
    while left:
        rows, left = store.fetch(left, len(versions), _BYTES)
        for row in rows.to_pylist():
            payload = row["payload"]
            stored[row["version"]] = Stored(
                row["create_time"], row["event_type"], None if payload is None else len(payload)
            )
    times += [row.create_time for row in stored.values()]
    if len(stored) < len(versions):
        for batch in store.below([(aggregate_id, versions[0])], 1):
            times += values(batch, "create_time")
    return stored, min(times, default=None)


# -- the topics --------------------------------------------------------------------------------


class _Search:
    """Looks for an aggregate's records, for a limited time."""

    def __init__(
        self,
        config: Config,
        aggregate_id: str,
        partitions: dict[str, int],
        topics: _Topics,
        timeout: float,
    ) -> None:
        self._sink = config.sink
        self._ids = {config.app.id, *config.app.former_ids}
        self._key = aggregate_id.encode()
        self._aggregate_id = aggregate_id
        self._partitions = partitions
        self._until = time.monotonic() + timeout
        self._starts: dict[Place, int] = {}
        self._topics = topics

    def _own(self, topics: Iterable[str]) -> list[Place]:
        """Where the aggregate's records are by rights."""
        return [
            (topic, topic_partition(self._aggregate_id, self._partitions[topic]))
            for topic in topics
            if topic in self._partitions
        ]

    def read_sides(self) -> None:
        """Read its skips and dead letters.

        Few stand on these topics, and they may be of versions whose time nobody knows.
        """
        sides = self._own([self._sink.gaps_topic, self._sink.dead_topic])
        self._read(dict.fromkeys(sides, 0), None)

    def run(self, wanted: Collection[int] | None, oldest: int | None) -> None:
        """Look where the records are by rights.

        Args:
            wanted: versions; it ends when all are found. None: all that there are.
            oldest: no record of them is older, µs; None: not known.
        """
        sink = self._sink
        events = self._own([sink.topic, sink.late_topic])
        self._starts = self._from(events, oldest)
        first = list_offsets(sink, [p for p in events if p[0] == sink.topic], "earliest")
        self._topics.is_cut = any(self._starts[p] <= low and low for p, low in first.items())
        self._read(self._starts, wanted)

    def look_elsewhere(self, wanted: Collection[int] | None, oldest: int | None) -> None:
        """Look where the records are if partitions were added since, if a time lay in the future or
        was another one, or if somebody else has written them.

        Args:
            wanted: versions; none: nothing is to be done. None: all that there are.
        """
        if wanted is not None and not wanted:
            return
        sink = self._sink
        numbers = range(self._partitions[sink.topic])
        others = [(sink.topic, n) for n in numbers if (sink.topic, n) not in self._starts]
        before = {p: (0, end) for p, end in self._starts.items() if end and p[0] == sink.topic}
        self._read({p: low for p, (low, _) in before.items()}, wanted, dict(self._starts))
        self._read(self._from(others, oldest), wanted)

    def _from(self, places: list[Place], oldest: int | None) -> dict[Place, int]:
        if oldest is None:
            return dict.fromkeys(places, 0)
        millis = int(records.timestamps(_array(oldest))[0])
        return offsets_at(self._sink, places, millis)

    def _read(
        self,
        starts: dict[Place, int],
        wanted: Collection[int] | None,
        ends: dict[Place, int] | None = None,
    ) -> None:
        events = {self._sink.topic, self._sink.late_topic}
        left = set(wanted or ())
        for version, found in self._topics.by_version.items():
            if any(f.topic in events for f in found):  # a dead letter may be published since
                left.discard(version)
        if not starts or (wanted is not None and not left):
            return
        reading = Committed(self._sink, starts, self._until, ends)
        try:
            for chunk in reading:
                for message in chunk:
                    if message.key() == self._key:
                        self._take(message, wanted, left)
                if wanted is not None and not left:
                    return
        finally:
            reading.close()
        self._topics.unread |= reading.unread

    def _take(self, message: Message, wanted: Collection[int] | None, left: set[int]) -> None:
        """Note a record of the aggregate, if it is the publisher's and of a version that counts."""
        headers = dict(message.headers() or ())
        sink = self._sink
        if message.topic() == sink.gaps_topic:
            with suppress(ValueError):
                self._topics.skips.append(records.read_gap(message.value() or b""))
            return
        version, problem = self._version_of(headers)
        if wanted is not None and version is not None and version not in wanted:
            return
        if version is None or problem:
            self._add_other(message, problem)
            return
        is_dead = message.topic() == sink.dead_topic
        reason = headers.get(records.REASON) if is_dead else None
        found = Found(
            message.topic(),
            message.partition(),
            message.offset(),
            message.timestamp()[1],
            records.LATE in headers,
            None if reason is None else reason.decode(errors="replace"),
        )
        self._topics.by_version.setdefault(version, []).append(found)
        if not is_dead:
            left.discard(version)

    def _version_of(self, headers: dict[str, Any]) -> tuple[int | None, str]:
        """A record's version, and why the publisher has not written it; "": it has."""
        problem = ""
        if not records.is_ours(headers.items(), self._ids):
            source = headers.get(records.SOURCE)
            problem = "it has no header ce_source"
            if source is not None:
                problem = f"its ce_source is {source.decode(errors='replace')}"
        try:
            return int(headers[records.SEQUENCE]), problem
        except (KeyError, TypeError, ValueError):
            return None, problem or "it has no header ce_sequence that is a number"

    def _add_other(self, message: Message, problem: str) -> None:
        if message.topic() == self._sink.dead_topic or len(self._topics.others) >= MOST_OTHERS:
            return
        place = message.topic(), message.partition(), message.offset()
        self._topics.others.append(Found(*place, message.timestamp()[1], reason=problem))


def _array(micros: int) -> Any:
    import numpy as np

    return np.array([micros], np.int64)


# -- the verdict -------------------------------------------------------------------------------


class _Judge:
    """Says of each version where it is, from all that is known."""

    def __init__(self, config: Config, topics: _Topics, publisher: _Publisher, now: int) -> None:
        self._config = config
        self._topics = topics
        self._publisher = publisher
        self._now = now

    def __call__(self, version: int, stored: Stored | None) -> Traced:
        skips = self._topics.skips
        skip = next((s for s in skips if s.from_version <= version <= s.to_version), None)
        hold = self._publisher.hold
        if hold is not None and not hold.first_missing <= version <= hold.seen:
            hold = None
        found = tuple(self._topics.by_version.get(version, ()))
        traced = Traced(version, "unknown", "", stored, found, hold, skip)
        verdict, note = self._on_topics(found, stored) or self._not_on_topics(traced)
        if stored is None and any(f.topic == self._config.sink.topic for f in found):
            note = f"{note}; no row in the table".removeprefix("; ")
        return replace(traced, verdict=verdict, note=note)

    def misses(self, version: int, stored: Stored | None, is_asked_for: bool) -> bool:
        """Whether a version may be on the topic and was not found where it should be."""
        traced, position = self(version, stored), self._publisher.position
        if traced.verdict == "dead" and traced.note.startswith(OF_ANOTHER):
            return all(f.topic != self._config.sink.topic for f in traced.found)
        if stored is None:
            return is_asked_for and traced.verdict == "unknown"
        is_due = position is None or stored.create_time <= position
        return traced.verdict in {"missing", "waiting", "unknown"} and is_due

    def _on_topics(
        self, found: Sequence[Found], stored: Stored | None
    ) -> tuple[Verdict, str] | None:
        sink = self._config.sink
        events = [f for f in found if f.topic == sink.topic]
        letters = [f.reason or "" for f in found if f.topic == sink.dead_topic]
        if events and stored is not None and letters and letters[-1].startswith(OF_ANOTHER):
            created = int(records.timestamps(_array(stored.create_time))[0])
            if all(event.timestamp != created for event in events):
                return "dead", letters[-1]
        if len(events) > 1:
            return "published", f"{len(events)} times: see `eventpub verify`"
        if events and not events[0].is_late:
            return "published", ""
        if events:
            return "late", "published, marked as late"
        if any(f.topic == sink.late_topic for f in found):
            return "late", f"diverted to {sink.late_topic}"
        return ("dead", letters[-1]) if letters else None

    def _not_on_topics(self, traced: Traced) -> tuple[Verdict, str]:
        stored, hold = traced.stored, traced.hold
        if traced.skip is not None:
            return self._skipped(traced, traced.skip)
        if hold is not None:
            return _held(hold, stored)
        if self._topics.unread:
            return "unknown", "the topics were not read to their ends; see --timeout"
        if stored is None and self._topics.others:
            return "unknown", "not in the store, and on the topics not by this publisher"
        if stored is None:
            return "unknown", "neither in the store nor on the topics"
        return self._in_store_only(stored)

    def _skipped(self, traced: Traced, skip: SkippedGap) -> tuple[Verdict, str]:
        when = f"given up at {format_time(skip.skipped_at)} ({skip.reason})"
        if traced.stored is None:
            return "skipped", when
        if in_ranges(traced.version, self._publisher.skipped):
            return "skipped", f"{when}; it is in the store by now: see `eventpub gaps retry`"
        if self._config.gaps.late == "drop":
            return "late", f"{when}, and dropped when it came (gaps.late)"
        return "skipped", when

    def _in_store_only(self, stored: Stored) -> tuple[Verdict, str]:
        publisher, created = self._publisher, stored.create_time
        position, horizon = publisher.position, self._config.recount.horizon
        if created <= publisher.start:
            return "baseline", f"created before the start, {format_time(publisher.start)}"
        if position is None:
            return "unknown", "app.state_dir of this machine has no publisher's state"
        if created > position:
            return "waiting", f"events created by {format_time(position)} are read so far"
        if self._now - created < horizon:
            until = format_time(created + horizon)
            return "waiting", f"its second was read before it was there; recounted until {until}"
        if self._topics.is_cut:
            return (
                "unknown",
                "retention has removed the topic's first records: it may have been one",
            )
        return "missing", "it should be on the topic: see `eventpub verify`"


def _held(hold: Hold, stored: Stored | None) -> tuple[Verdict, str]:
    if hold.catching_up:
        return "held", "more events were waiting than one transaction may hold"
    how_long = (
        f"since {format_time(hold.first_seen)}, next try {format_time(hold.next_attempt)},"
        f" {hold.attempts} in vain"
    )
    if stored is None:
        return "missing", f"the aggregate waits for version {hold.first_missing} {how_long}"
    return "held", f"waits for version {hold.first_missing} {how_long}"


def _notes(
    config: Config, topics: _Topics, publisher: _Publisher, partitions: int, timeout: float
) -> list[str]:
    notes = []
    if not publisher.is_running:
        notes.append(
            "no publisher answers: what is held and how far it has read is as it was at its end"
        )
    if not partitions:
        notes.append(f"there is no topic {config.sink.topic} yet")
    for topic in sorted({topic for topic, _ in topics.unread}):
        numbers = sorted(number for of, number in topics.unread if of == topic)
        which = f"{len(numbers)} partitions of {topic} were"
        if len(numbers) == 1:
            which = f"{topic}[{numbers[0]}] was"
        notes.append(f"{which} not read to the end within {timeout:.0f} s")
    for other in topics.others:
        where = f"{other.topic}[{other.partition}] offset {other.offset}"
        notes.append(f"{where} was not written by this publisher: {other.reason}")
    return notes


def words(versions: Iterable[Traced]) -> dict[str, int]:
    """How many versions have each verdict."""
    counts: dict[str, int] = {}
    for traced in versions:
        counts[traced.verdict] = counts.get(traced.verdict, 0) + 1
    return counts
