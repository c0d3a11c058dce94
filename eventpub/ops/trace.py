"""Where one event is, or each version of an aggregate: in the store, on which topic, or held.

The publisher is asked first, then the store, then the topics: what a publisher has accounted for is
on the topics by the time they are read, so that nothing counts as missing which was on its way. The
topics are read as any service reads them, for a limited time: what was not read is said. Events are
looked for in the partition of the key, from their creation time on, and then in all others, where
those stand that were written before partitions were added; skips and dead letters in all at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from eventpub.admission import Hold, SkippedGap, in_ranges, topic_partition
from eventpub.config import Config
from eventpub.errors import ConfigError
from eventpub.ops.dead import OF_ANOTHER
from eventpub.ops.trace_answer import Found, Stored, Trace, Traced, Verdict
from eventpub.ops.trace_lookup import (
    Publisher,
    Topics,
    Versions,
    all_versions,
    ask_publisher,
    missing_of,
    stored_rows,
)
from eventpub.ops.unpublished import readable_store
from eventpub.sink.records import timestamp
from eventpub.sink.topics import partition_counts
from eventpub.times import format_time


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
    publisher = ask_publisher(config, aggregate_id, of_topic)
    with readable_store(config) as store:
        now = store.now()
        known = Versions(range(0) if version is None else range(version, version + 1))
        if version is None:
            known = all_versions(config, store, aggregate_id, publisher.hold, limit)
        versions = known.last(limit)
        stored, oldest = stored_rows(store, aggregate_id, versions)
        waits_for = missing_of(store, publisher.hold)
    topics = Topics(config, aggregate_id, partitions, timeout)
    judge = _Judge(config, topics, publisher, now)
    if count:
        topics.read_sides()
        if version is None and versions:
            known = known.and_of(topics.by_version)
            versions = known.last(limit)
            letters = [f for v in versions if v not in stored for f in topics.by_version.get(v, ())]
            if oldest is not None:
                oldest = min([oldest, *(letter.timestamp * 1000 for letter in letters)])
        topics.run(set(versions) or None, oldest)
        if versions:
            lost = [v for v in versions if judge.misses(v, stored.get(v), version is not None)]
            topics.look_elsewhere(lost, oldest)
        else:
            topics.look_elsewhere(set() if topics.by_version else None, oldest)
            known = known.and_of(topics.by_version)
            versions = known.last(limit)
    judged = [judge(v, stored.get(v)) for v in versions]
    notes = _notes(config, topics, publisher, count, timeout)
    if not (stored or topics.by_version) and len(columns := config.store.columns.aggregate_id) > 1:
        notes.append(f"an aggregate's id is {'|'.join(columns)} (in each, % is %25 and | is %7C)")
    return Trace(
        aggregate_id,
        judged,
        publisher.is_running,
        publisher.position,
        notes,
        known.total,
        waits_for,
        not topics.unread,
    )


# -- the verdict -------------------------------------------------------------------------------


class _Judge:
    """Says of each version where it is, from all that is known."""

    def __init__(self, config: Config, topics: Topics, publisher: Publisher, now: int) -> None:
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
        if stored is not None and stored.others and verdict != "dead":
            note = f"{note}; {1 + len(stored.others)} rows of one version".removeprefix("; ")
        if stored is None and any(f.topic == self._config.sink.topic for f in found):
            note = f"{note}; no row in the table".removeprefix("; ")
        if stored is not None and (stored.create_time or 0) > self._now:
            note = f"{note}; its create_time lies in the future".removeprefix("; ")
        return replace(traced, verdict=verdict, note=note)

    def misses(self, version: int, stored: Stored | None, is_asked_for: bool) -> bool:
        """Whether a version may be on the topic and was not found where it should be."""
        traced, position = self(version, stored), self._publisher.position
        if traced.skip is not None and not traced.found:  # it may have been published since
            is_missing = in_ranges(version, self._publisher.skipped)
            return (stored is not None or is_asked_for) and not is_missing
        if traced.verdict == "dead" and traced.note.startswith(OF_ANOTHER):
            return all(f.topic != self._config.sink.topic for f in traced.found)
        if traced.verdict == "dead":  # as may a row that was refused before partitions were added
            return any(self._topics.is_moved(f) for f in traced.found)
        if stored is None:
            return is_asked_for and traced.verdict == "unknown"
        is_due = position is None or (stored.create_time or 0) <= position
        return traced.verdict in {"missing", "waiting", "unknown", "invalid"} and is_due

    def _on_topics(
        self, found: Sequence[Found], stored: Stored | None
    ) -> tuple[Verdict, str] | None:
        sink = self._config.sink
        events = [f for f in found if f.topic == sink.topic]
        letters = [f.reason or "" for f in found if f.topic == sink.dead_topic]
        if events and stored is not None and letters and letters[-1].startswith(OF_ANOTHER):
            created = timestamp(stored.create_time or 0)
            if stored.others or all(event.timestamp != created for event in events):
                rows = 1 + len(stored.others)
                return "dead", letters[-1] + (f" ({rows} rows)" if rows > 1 else "")
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
        if stored is not None and (why := self._why_invalid(stored)):
            return "invalid", why
        if hold is not None:
            return _held(hold, stored)
        if self._topics.unread:
            return "unknown", "the topics were not read to their ends; see --timeout"
        if stored is None:
            return "unknown", "neither in the store nor on the topics"
        return self._in_store_only(stored)

    def _why_invalid(self, stored: Stored) -> str:
        """What keeps a row from being published, whatever is waited for; "": nothing does."""
        if stored.create_time is None:
            return (
                "it cannot be published: no create_time, or a zero date. The publisher stops when"
                " it is the missing version (store.row_invalid): correct or remove the row"
            )
        if stored.create_time <= 0 and self._publisher.start <= 0:
            return (
                "created before 1970, where reading by time begins: published only when it is the"
                " missing version"
            )
        return ""

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
        publisher, created = self._publisher, stored.create_time or 0
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
    config: Config, topics: Topics, publisher: Publisher, partitions: int, timeout: float
) -> list[str]:
    notes = []
    if not publisher.is_running:
        notes.append("no publisher answers: holds and read position are as of when it ended")
    if not partitions:
        notes.append(f"there is no topic {config.sink.topic} yet")
    for topic in sorted({topic for topic, _ in topics.unread}):
        numbers = sorted(number for of, number in topics.unread if of == topic)
        which = f"{len(numbers)} partitions of {topic} were"
        if len(numbers) == 1:
            which = f"{topic}[{numbers[0]}] was"
        notes.append(f"{which} not read to the end within {timeout:.0f} s")
    return notes
