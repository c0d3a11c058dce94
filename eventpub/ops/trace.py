"""Where an event is, or each version of an aggregate: in the store, on which topic, or held.

The publisher is asked first, then the store, then the topics, so that no event in flight counts as
missing. The topics are read for a limited time; partitions not read to the end are named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from eventpub.admission.model import Hold, SkippedGap, VersionRange, in_ranges, topic_partition
from eventpub.config import Config
from eventpub.errors import named_versions
from eventpub.ops.asking import ask_running
from eventpub.ops.dead import OF_ANOTHER, readable_store
from eventpub.ops.gaps import missing_versions, pending
from eventpub.ops.lookup import (
    HIGHEST,
    LOWEST,
    Found,
    Topics,
    require_utf8,
    shown_record,
    shown_rows,
    stored_rows,
    with_times,
)
from eventpub.sink.records import timestamp
from eventpub.sources.base import RowSeen, start_position
from eventpub.sources.mysql import EventStore
from eventpub.state import StateDir
from eventpub.times import format_time


@dataclass(frozen=True)
class Traced:
    """One version.

    Attributes:
        verdict: "published": on the topic. "late": published, diverted or dropped after its version
            was skipped. "dead": a dead letter. "skipped": given up. "baseline": created before the
            start, never published. "invalid": its row has no usable time. "held": its aggregate
            waits for a version. "waiting": newer than the position. "missing": not where it should
            be. "unknown": nothing is known, or time ran out.
        note: the verdict in a sentence, where the word is not enough.
        hold: of its aggregate, if this version waits or is waited for.
    """

    version: int
    verdict: str
    note: str = ""
    stored: Sequence[RowSeen] = ()
    records: tuple[Found, ...] = ()
    hold: Hold | None = None
    skip: SkippedGap | None = None

    @property
    def is_accounted_for(self) -> bool:
        is_answered = self.verdict in {"published", "late", "baseline"}
        return is_answered or (self.verdict == "skipped" and not self.stored)

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {
            "stored": shown_rows(self.stored),
            "records": [shown_record(found) for found in self.records],
            "hold": self.hold and with_times(self.hold),
            "skip": self.skip and with_times(self.skip),
        }


@dataclass(frozen=True)
class Trace:
    """What was found of an aggregate.

    Attributes:
        position: everything created at or before is accounted for; None: unknown.
        total: number of versions; `versions` are the last of them; None: unknown.
        is_whole: the topics were read as far as needed.
    """

    aggregate_id: str
    versions: list[Traced]
    publisher_is_running: bool
    position: str | None
    notes: list[str] = field(default_factory=list)
    total: int | None = None
    waits_for: dict[str, int] | None = None
    is_whole: bool = True

    @property
    def ok(self) -> bool:
        return bool(self.versions) and all(v.is_accounted_for for v in self.versions)

    @property
    def counts(self) -> dict[str, int]:
        return dict(Counter(traced.verdict for traced in self.versions))

    def summary(self, version: int | None = None) -> str:
        if not self.versions:
            nothing = "not in the store; the topics were not read to their ends"
            if self.is_whole:
                nothing = "nothing is known of it, in the store or on the topics"
            return f"{self.aggregate_id}: {nothing}"
        if version is not None:
            return f"{self.aggregate_id}/{version}: {self.versions[0].verdict}"
        text = ", ".join(f"{count} {word}" for word, count in self.counts.items())
        shown, total = len(self.versions), self.total
        if total is None or total > shown:
            of = "" if total is None else f" of {total:,}"
            text = f"the last {shown}{of} versions: {text}"
        if self.waits_for is not None:
            text += f"; waits for {named_versions(*self.waits_for.values())}"
        return f"{self.aggregate_id}: {text}"

    def to_dict(self) -> dict[str, Any]:
        versions = [traced.to_dict() for traced in self.versions]
        shown = vars(self) | {"versions": versions, "counts": self.counts}
        del shown["is_whole"]
        return shown


def trace(
    config: Config,
    aggregate_id: str,
    version: int | None = None,
    *,
    limit: int = 20,
    timeout: float = 60.0,
) -> Trace:
    """Find one version of an aggregate or, without `version`, the highest `limit` known ones."""
    require_utf8(aggregate_id)
    topics = Topics(config, aggregate_id, timeout)
    publisher = _ask_publisher(config, aggregate_id, topics.partitions)
    topics.read_sides()
    with readable_store(config) as store:
        now, hold, may_move = store.now(), publisher.hold, store.moved_by is None
        span = range(0) if version is not None else _known(config, store, aggregate_id, hold)

        def last() -> list[int]:
            if version is not None:
                return [version]
            others = sorted(v for v in topics.by_version if v not in span)
            return sorted([*span[-limit:], *others[-limit:]])[-limit:]

        versions = last()
        stored, oldest = stored_rows(store, aggregate_id, versions)
        gap = None if hold is None else missing_versions(store, hold)
    judge = _Judge(config, topics, publisher, now)
    if oldest is not None:
        letters = [f for v in versions if v not in stored for f in topics.by_version.get(v, ())]
        oldest = min([oldest, *(letter.timestamp * 1000 for letter in letters)])
        if any((row.create_time or 0) > now for of in stored.values() for row in of):
            oldest = 0  # it may have been published before its time
    topics.read_events(versions or None, oldest)
    is_one = version is not None
    doubtful = {"missing", "unknown"} | ({"skipped", "dead"} if is_one else set())

    def is_doubtful(found: Traced) -> bool:
        return found.verdict in doubtful or (found.verdict == "waiting" and may_move)

    if any(is_doubtful(judge(v, stored.get(v, ()))) for v in versions):
        topics.read_older_events(versions)
    versions = versions or last()
    notes = _notes(config, topics, publisher, timeout)
    if not (stored or topics.by_version) and len(columns := config.store.columns.aggregate_id) > 1:
        notes.append(f"an aggregate's id is {'|'.join(columns)} (in each, % is %25 and | is %7C)")
    return Trace(
        aggregate_id,
        [judge(v, stored.get(v, ())) for v in versions],
        publisher.is_running,
        None if publisher.position is None else format_time(publisher.position),
        notes,
        # len() overflows at 2^63
        None if is_one else span.stop - span.start + sum(v not in span for v in topics.by_version),
        gap and {"from_version": gap[0], "to_version": gap[1]},
        not topics.unread,
    )


@dataclass(frozen=True)
class _Publisher:
    is_running: bool
    position: int | None
    start: int
    hold: Hold | None
    skipped: list[tuple[int, int]]


def _ask_publisher(config: Config, aggregate_id: str, partitions: int) -> _Publisher:
    state = StateDir(config.app.state_dir)
    is_running = state.is_running()
    kept = (state.read(state.progress_file) if is_running else state.read_progress()) or {}
    start = (state.read(state.start_file) or {}).get("position")
    if start is None:
        start = start_position(config.read, lambda: 0)
    position = kept.get("position")
    status = ask_running(state, "status")
    if status is not None and status["shards"] and partitions:
        shards = {shard["shard"]: shard["position"] for shard in status["shards"]}
        own = topic_partition(aggregate_id, partitions) % len(shards)
        position = shards.get(own) or position
    found, _ = pending(config, state, 0, (aggregate_id,))
    hold, skipped = next(iter(found.holds), None), found.skipped.get(aggregate_id, [])
    return _Publisher(status is not None, position, int(start), hold, skipped)


def _known(config: Config, store: EventStore, aggregate_id: str, hold: Hold | None) -> range:
    newest = store.versions(VersionRange(aggregate_id, LOWEST, HIGHEST), 1, highest=True)
    if hold is not None:
        newest.append(hold.seen)
    first = config.store.first_version
    return range(first, max(first, max(newest) + 1)) if newest else range(0)


@dataclass(frozen=True)
class _Judge:
    _config: Config
    _topics: Topics
    _publisher: _Publisher
    _now: int

    def __call__(self, version: int, stored: Sequence[RowSeen]) -> Traced:
        skips = self._topics.own_skips
        skip = next((s for s in skips if s.from_version <= version <= s.to_version), None)
        hold = self._publisher.hold
        if hold is not None and not hold.first_missing <= version <= hold.seen:
            hold = None
        found = tuple(self._topics.by_version.get(version, ()))
        traced = Traced(version, "unknown", "", stored, found, hold, skip)
        verdict, note = self._on_topics(found, stored) or self._not_on_topics(traced)
        notes = [note] if note else []
        if len(stored) > 1:
            notes.append(f"{len(stored)} rows of one version")
        if not stored and any(f.topic == self._config.sink.topic for f in found):
            notes.append("no row in the table")
        if stored and (stored[0].create_time or 0) > self._now:
            notes.append("its create_time lies in the future")
        return replace(traced, verdict=verdict, note="; ".join(notes))

    def _on_topics(
        self, found: Sequence[Found], stored: Sequence[RowSeen]
    ) -> tuple[str, str] | None:
        sink = self._config.sink
        events = [f for f in found if f.topic == sink.topic]
        letters = [f.reason or "" for f in found if f.topic == sink.dead_topic]
        if events and stored and letters and letters[-1].startswith(OF_ANOTHER):
            created = timestamp(stored[0].create_time or 0)
            if len(stored) > 1 or all(event.timestamp != created for event in events):
                return "dead", letters[-1]
        if len(events) > 1:
            return "published", f"{len(events)} times: see `eventpub verify`"
        if events:
            late = "published, marked as late"
            return ("late", late) if events[0].is_late else ("published", "")
        if any(f.topic == sink.late_topic for f in found):
            return "late", f"diverted to {sink.late_topic}"
        return ("dead", letters[-1]) if letters else None

    def _not_on_topics(self, traced: Traced) -> tuple[str, str]:  # noqa: PLR0911, PLR0912
        stored, hold, publisher = traced.stored, traced.hold, self._publisher
        if (skip := traced.skip) is not None:
            when = f"skipped at {format_time(skip.skipped_at)} ({skip.reason})"
            if stored and in_ranges(traced.version, publisher.skipped):
                return "skipped", f"{when}; it is in the store by now: see `eventpub gaps retry`"
            if stored and self._config.gaps.late == "drop":
                return "late", f"{when}, and dropped when it came (gaps.late)"
            return (
                "skipped",
                f"{when}; it is in the store: see `eventpub publish`" if stored else when,
            )
        created = stored[0].create_time if stored else 0
        if created is None:
            return "invalid", (
                "no create_time, or a zero date. The publisher stops when it is the missing version"
                " (store.row_invalid): correct or remove the row"
            )
        if stored and created <= 0 and publisher.start <= 0:
            return "invalid", "created before 1970: published only when it is the missing version"
        if hold is not None and hold.catching_up:
            return "held", "more events were waiting than one transaction may hold"
        if hold is not None:
            waits = (
                f"waits for version {hold.first_missing} since {format_time(hold.first_seen)}, next"
                f" attempt {format_time(hold.next_attempt)}, {hold.attempts} failed"
            )
            return ("held", waits) if stored else ("missing", f"the aggregate {waits}")
        if self._topics.unread:
            return "unknown", "the topics were not read to their ends; see --timeout"
        if not stored:
            return "unknown", "neither in the store nor on the topics"
        if created <= publisher.start:
            return "baseline", f"created before the start, {format_time(publisher.start)}"
        if publisher.position is None:
            return "unknown", "app.state_dir of this machine has no publisher's state"
        if created > publisher.position:
            return "waiting", f"events created by {format_time(publisher.position)} are read so far"
        if self._topics.is_cut:
            return "unknown", "retention has removed the topic's first records"
        if self._now - created < (horizon := self._config.recount.horizon):
            until = format_time(created + horizon)
            return "waiting", f"its second was read before it was there; recounted until {until}"
        return "missing", "it should be on the topic: see `eventpub verify`"


def _notes(config: Config, topics: Topics, publisher: _Publisher, timeout: float) -> list[str]:
    notes = []
    if not publisher.is_running:
        notes.append("no publisher answers: holds and read position are as of when it ended")
    if not topics.partitions:
        notes.append(f"there is no topic {config.sink.topic} yet")
    for topic, count in Counter(topic for topic, _ in topics.unread).items():
        notes.append(
            f"{count} partitions of {topic} were not read to the end within {timeout:.0f} s"
        )
    return notes
