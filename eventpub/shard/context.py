"""What a shard's step works with: its index, sink, connections, and the next report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from eventpub.admission.model import CLOCK_STEP, WIDTH, Shard, VersionRange, oldest_needed
from eventpub.channel import Beginning, Lane, Post, Report, Window, latencies
from eventpub.errors import StateError
from eventpub.index import Index
from eventpub.index.database import FORMAT
from eventpub.shard.assignment import Assignment, identity_of
from eventpub.shard.pace import Pace
from eventpub.sink.base import Sink
from eventpub.sink.shard import ShardSink

COUNTED_LATE = 10_000_000
"""µs below the horizon at which a slow coordinator may still count a bucket."""


_INDEX_SIZE_EVERY = 10.0
"""Seconds between measurements of the index's size."""

_OF_NO_USE = {"state.foreign", "index.newer_format"}
"""Errors of an index that is intact but cannot be used."""


class ShardContext:
    """What a shard's step works with; `close` it.

    Attributes:
        reader, lookup: connections to the store, for windows and for everything else.
        now: the database's time when last read, µs.
        unread: position and `low` of an index that has read nothing, µs.
        window: the last one; before the first, open transactions are unknown: no gap is skipped.
        is_stopping: whether the step should end early.
    """

    index: Index
    sink: Sink
    is_stopping = False

    def __init__(self, assignment: Assignment, number: int) -> None:
        self.assignment = assignment
        self.parts = assignment.parts
        self.shard = assignment.shard(number)
        self.rules = assignment.rules()
        self.report = Report(number)
        self.unread = assignment.start or 0, assignment.start or 0
        self.now = 0
        self._looked_at = 0.0
        self._index_seen_at = float("-inf")
        self._passed_over = 0
        self.window = Window(0, 0, open_since=0)
        self._open = ExitStack()

    def _begin(self, index: Index) -> None:
        config, layout = self.assignment.config, self.assignment.layout
        self.index = self._open.enter_context(index)
        self.pace = Pace(
            config.sink.transaction_timeout / 1e6, self.parts.sizes, self.index.chunk_bytes
        )
        self.reader = self._open.enter_context(self.parts.stores(config.store, layout))
        self.lookup = self._open.enter_context(self.parts.stores(config.store, layout))

    def close(self) -> None:
        self._open.close()

    def fetch(
        self, ranges: Sequence[VersionRange], size: int | None = None, seconds: float | None = None
    ) -> tuple[pa.Table, list[VersionRange]]:
        """See `Source.fetch`; at most what one transaction may have."""
        sizes = self.parts.sizes
        return self.lookup.fetch(ranges, sizes.rows, size or sizes.most, seconds)

    def require_going_on(self) -> None:
        """Raise run.stopping if stopping; call regularly where work may take long."""

    def known_upto(self, place: tuple[str, int]) -> int:
        """The offset up to which the index knows a partition."""
        return self.index.offsets.get(place, 0)

    def look_at_clock(self) -> int:
        """Update `now`; if the clock went back, the waits measured by it restart."""
        before, self.now = self.now, self.lookup.now()
        self._looked_at = self.parts.clock.monotonic()
        if not before or self.now < before - CLOCK_STEP:
            latest = self.now + self.assignment.config.gaps.longest_wait + CLOCK_STEP
            self.index.restart_holds(latest, self.now, self.rules.next_attempt(self.now, 0))
            if self.window.open_since is not None:
                # a time of the earlier clock says nothing of newer transactions
                open_since = min(self.window.open_since, self.now)
                self.window = replace(self.window, open_since=open_since)
        return self.now

    def committed(self, created: npt.NDArray[np.int64]) -> None:
        """Add the ages of events that just became visible; `created` in µs."""
        now = self.now + (self.parts.clock.monotonic() - self._looked_at) * 1e6
        counts, total = latencies(created, now)
        before = self.report.latency or [0] * len(counts)
        self.report.latency = [a + b for a, b in zip(before, counts, strict=True)]
        self.report.latency_sum += total

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Add the block's duration to the report."""
        start = self.parts.clock.monotonic()
        try:
            yield
        finally:
            seconds = self.report.seconds
            seconds[step] = seconds.get(step, 0.0) + self.parts.clock.monotonic() - start

    def each_read(self, items: Iterator[pa.Table]) -> Iterator[pa.Table]:
        """The items; the waits for them count as the step `read`."""
        while True:
            with self.timed("read"):
                item = next(items, None)
            if item is None:
                return
            yield item

    def own_places(self) -> set[tuple[str, int]]:
        """The partitions of all topics that only this shard writes."""
        topics, own = self.assignment.config.sink.topics, self.shard.topic_partitions()
        return {(topic, partition) for topic in topics for partition in own}

    def oldest_bucket(self) -> int:
        """The first whose count may still be needed."""
        horizon = self.assignment.config.recount.horizon + COUNTED_LATE
        window = self.window
        return oldest_needed(self.now, horizon, window.hidden_since, window.uncounted_since)

    def low(self, position: int) -> int:
        """Up to where everything is published or skipped: below any held event."""
        oldest = self.index.holds.oldest()
        return position if oldest is None else min(position, oldest - 1)

    def take_report(self) -> Report:
        """Return the report and start the next one."""
        report, index = self.report, self.index
        holds, known_to = index.holds, index.position
        if known_to is None:  # a new index has read nothing yet
            report.position, report.low = self.unread
        else:
            report.position, report.low = known_to, self.low(known_to)
        passed_over = self.reader.without_identity
        report.counts.without_identity += passed_over - self._passed_over
        self._passed_over = passed_over
        report.hidden_since = self.window.hidden_since
        report.offsets = dict(index.offsets)
        report.holds = len(holds)
        if self.parts.clock.monotonic() - self._index_seen_at > _INDEX_SIZE_EVERY:
            self._index_seen_at = self.parts.clock.monotonic()
            report.index_bytes = index.size
        report.next_due = holds.next_due()
        self.report = Report(
            self.shard.number,
            done=report.done,
            position=report.position,
            compared=report.compared,
            unfinished=report.unfinished,
        )
        return report


class PublishingContext(ShardContext):
    """A shard that publishes to Kafka; `lane` brings work, `post` takes messages."""

    sink: ShardSink

    def __init__(
        self, assignment: Assignment, number: int, beginning: Beginning, lane: Lane, post: Post
    ) -> None:
        super().__init__(assignment, number)
        self.beginning = beginning
        self.unread = beginning.position, beginning.low
        self.lane = lane
        self.post = post
        self.window = replace(self.window, uncounted_since=beginning.uncounted_since)
        self.sink = self._new_sink()
        try:
            self._begin(open_index(assignment, self.shard, self.report))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close everything; the next owner aborts an open transaction."""
        self.sink.close()
        super().close()

    def _new_sink(self) -> ShardSink:
        config = self.assignment.config
        return ShardSink(self.parts.clients, config.app.id, self.shard)

    def replace_sink(self) -> None:
        """Replace the producer after an ambiguous answer; fold before publishing."""
        self.report.replaced += 1
        self.sink.close()
        self.sink = self._new_sink()

    @property
    def is_stopping(self) -> bool:  # type: ignore[override]
        return self.lane.is_stopping

    def require_going_on(self) -> None:
        if self.is_stopping:
            raise StateError(
                "run.stopping",
                "stopped while it read the topic back",
                suggestion="nothing to do: it was asked to stop",
                retriable=True,
            )


def open_index(assignment: Assignment, shard: Shard, report: Report) -> Index:
    """Open a shard's index; a new one, with `report.rebuilt`, if the topic has more partitions, or
    if it is from before the publisher's first start.

    An index of anything but this shard of this topic is never published from.

    Raises:
        StateError: index.…, state.foreign
    """
    folder = assignment.index(shard.number)
    identity = {
        **identity_of(assignment.config),
        "partitions": assignment.partitions,
        "shard": [shard.number, assignment.config.run.shards],
        "start": assignment.start_id,
    }
    was: dict[str, Any] = {}

    def adopts(found: Mapping[str, Any]) -> bool:
        was.update(found)
        is_same = all(found.get(name) == identity[name] for name in ("partitions", "shard"))
        return is_same and found.get("format") == FORMAT and assignment.adopts(found)

    try:
        return Index(folder, identity, adopts=adopts, storage=assignment.parts.storage)
    except StateError as error:
        is_old = was.get("start", "") != assignment.start_id
        had = was.get("partitions")
        has_grown = bool(was) and had != assignment.partitions
        if error.code not in _OF_NO_USE or not ((was and is_old) or has_grown):
            raise
    # on the publisher's own disk it was moved or removed; on an executor's it was not
    former = assignment.parts.storage.set_aside(folder, is_damaged=False)
    why = "it is of an earlier state" if is_old else f"the topic had {had} partitions"
    report.rebuilt = f"{why}; it was moved to {former}"
    return Index(folder, identity, adopts=adopts, storage=assignment.parts.storage)


class Accounted:
    """Rows that windows have shown, until the index records them; counts none if `horizon` is 0."""

    def __init__(self, horizon: int) -> None:
        self._horizon = horizon
        self._times: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def add(self, times: npt.NDArray[np.int64], since: int) -> None:
        """Add the sorted times of rows; those up to `since` do not count."""
        if self._horizon and times[-1] > since:
            self._times = np.append(self._times, times[times > since])

    def forget(self) -> None:
        """Drop all: what the index lacks is read again."""
        self._times = self._times[:0]

    def take(self, position: int | None) -> Counter[int]:
        """Remove the rows up to a position; their number per bucket."""
        if position is None or not len(self._times):
            return Counter()
        ready = self._times <= position
        counted = Counter(((self._times[ready] - 1) // WIDTH).tolist())
        self._times = self._times[~ready]
        return counted
