"""What a shard's step works with: its index, sink, connections, and what it will report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from eventpub.admission import Shard, VersionRange
from eventpub.admission.model import CLOCK_STEP, WIDTH, oldest_needed
from eventpub.channel import LATENCY_BOUNDS, Beginning, Lane, Post, Report, Window
from eventpub.errors import StateError
from eventpub.index import Index
from eventpub.index.database import FORMAT
from eventpub.shard.assignment import Assignment, identity_of
from eventpub.shard.pace import Pace
from eventpub.sink.base import Sink
from eventpub.sink.shard import ShardSink

COUNTED_LATE = 10_000_000
"""µs behind the horizon at which a bucket may still be counted, by a coordinator that is slow."""


_INDEX_SIZE_EVERY = 10.0
"""Seconds between two looks at how large the index is."""

_OF_NO_USE = {"state.foreign", "index.newer_format"}
"""Errors of an index that is intact but cannot be used."""


class ShardContext:
    """What a shard's step works with. A context manager: whatever is open is closed at its end.

    Args:
        assignment: of all shards.
        number: the shard's.

    Attributes:
        parts: of the assignment.
        index, sink: the shard's.
        reader, lookup: two connections to the store: windows, and everything else.
        report: what the next report will say.
        now: the database's time, as it was asked last, µs.
        open_since, hidden_since, uncounted_since: as of the last `Window`.
        is_stopping: whether the step is to end early.
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
        self.now = 0
        self._looked_at = 0.0
        self._index_seen_at = float("-inf")
        self._passed_over = 0
        self.open_since: int | None = 0  # unknown before the first window: no gap is skipped
        self.hidden_since: int | None = None
        self.uncounted_since: int | None = None
        self._open = ExitStack()

    def _begin(self, index: Index) -> None:
        config, layout = self.assignment.config, self.assignment.layout
        self.index = self._open.enter_context(index)
        self.pace = Pace(
            config.sink.transaction_timeout / 1e6, self.parts.sizes, self.index.chunk_bytes
        )
        self.reader = self._open.enter_context(self.parts.stores(config.store, layout))
        self.lookup = self._open.enter_context(self.parts.stores(config.store, layout))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of everything."""
        self._open.close()

    def fetch(
        self, ranges: Sequence[VersionRange], size: int | None = None, seconds: float | None = None
    ) -> tuple[pa.Table, list[VersionRange]]:
        """As of `Source`, as much as one transaction may have."""
        sizes = self.parts.sizes
        return self.lookup.fetch(ranges, sizes.rows, size or sizes.most, seconds)

    def require_going_on(self) -> None:
        """Called again and again by what may take long.

        Raises:
            StateError: run.stopping
        """

    def known_upto(self, place: tuple[str, int]) -> int:
        """Up to which offset of a partition everything that was published before is."""
        return self.index.offsets.get(place, 0)

    def take_bounds(self, window: Window) -> None:
        """Take over what a window says of open transactions."""
        self.open_since = window.open_since
        self.hidden_since = window.hidden_since
        self.uncounted_since = window.uncounted_since

    def look_at_clock(self) -> int:
        """The database's time, µs; also `now` from then on.

        Holds are measured by it: if it went back since they were seen, their wait restarts.
        """
        before, self.now = self.now, self.lookup.now()
        self._looked_at = self.parts.clock.monotonic()
        if not before or self.now < before - CLOCK_STEP:
            latest = self.now + self.assignment.config.gaps.longest_wait + CLOCK_STEP
            self.index.see_holds_anew(latest, self.now, self.rules.next_attempt(self.now, 0))
            if self.open_since is not None:
                # by the clock of before it says nothing of what has begun since
                self.open_since = min(self.open_since, self.now)
        return self.now

    def committed(self, created: npt.NDArray[np.int64]) -> None:
        """Events have just become visible: their ages go into the report.

        Args:
            created: when, µs.
        """
        now = self.now + (self.parts.clock.monotonic() - self._looked_at) * 1e6
        ages = np.maximum((now - created) / 1e6, 0.0)
        found = np.searchsorted(LATENCY_BOUNDS, ages)
        counts = np.bincount(found, minlength=len(LATENCY_BOUNDS) + 1)
        before = self.report.latency
        self.report.latency = (counts + before if before else counts).tolist()
        self.report.latency_sum += float(ages.sum())

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Adds what the block takes to the report."""
        start = self.parts.clock.monotonic()
        try:
            yield
        finally:
            seconds = self.report.seconds
            seconds[step] = seconds.get(step, 0.0) + self.parts.clock.monotonic() - start

    def own_places(self) -> set[tuple[str, int]]:
        """The partitions of all topics that only this shard writes."""
        topics, own = self.assignment.config.sink.topics, self.shard.topic_partitions()
        return {(topic, partition) for topic in topics for partition in own}

    @property
    def is_full(self) -> bool:
        """Whether what is decided next belongs to another transaction."""
        return False

    def oldest_bucket(self) -> int:
        """The first whose number of rows may still be of use."""
        horizon = self.assignment.config.recount.horizon + COUNTED_LATE
        return oldest_needed(self.now, horizon, self.hidden_since, self.uncounted_since)

    def low(self, position: int) -> int:
        """Up to where everything is published or skipped: below the position where any waits."""
        oldest = self.index.holds.oldest()
        return position if oldest is None else min(position, oldest - 1)

    @property
    def _unread(self) -> tuple[int, int]:
        """Position and `low` of an index that has read nothing, µs."""
        start = self.assignment.start or 0
        return start, start

    def take_report(self) -> Report:
        """What happened since the last one, and what is pending."""
        report, index = self.report, self.index
        holds, known_to = index.holds, index.position
        if known_to is None:  # a new index has yet to read what it does not know
            report.position, report.low = self._unread
        else:
            report.position, report.low = known_to, self.low(known_to)
        passed_over = self.reader.without_identity
        report.counts.without_identity += passed_over - self._passed_over
        self._passed_over = passed_over
        report.hidden_since = self.hidden_since
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
    """A shard that publishes to Kafka.

    Args:
        assignment: of all shards.
        number: the shard's.
        beginning: what is known of it.
        lane: brings its work.
        post: takes what it says.
    """

    sink: ShardSink

    def __init__(
        self, assignment: Assignment, number: int, beginning: Beginning, lane: Lane, post: Post
    ) -> None:
        super().__init__(assignment, number)
        self.beginning = beginning
        self.lane = lane
        self.post = post
        self.uncounted_since = beginning.uncounted_since
        self.sink = self._new_sink()
        try:
            self._begin(open_index(assignment, self.shard, self.report))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of everything; an open transaction is aborted by the next owner."""
        self.sink.close()
        super().close()

    def _new_sink(self) -> ShardSink:
        config = self.assignment.config
        return ShardSink(self.parts.clients, config.app.id, self.shard, config.app.former_ids)

    def replace_sink(self) -> None:
        """A new producer after an answer that leaves a doubt; fold before it publishes."""
        self.report.replaced += 1
        self.sink.close()
        self.sink = self._new_sink()

    @property
    def is_stopping(self) -> bool:  # type: ignore[override]
        """Whether the runner is to leave."""
        return self.lane.is_stopping

    def require_going_on(self) -> None:
        """As of `ShardContext`."""
        if self.is_stopping:
            raise StateError(
                "run.stopping",
                "stopped while it read the topic back",
                suggestion="nothing to do: it was asked to stop",
                retriable=True,
            )

    @property
    def _unread(self) -> tuple[int, int]:
        return self.beginning.position, self.beginning.low


def open_index(assignment: Assignment, shard: Shard, report: Report) -> Index:
    """The index of a shard; a new one where the one that is there is of no use.

    One of anything else than this shard of this topic is never published from.

    Args:
        assignment: of all shards.
        shard: whose.
        report: says why it is a new one.

    Raises:
        StateError: index.…
    """
    folder = assignment.index(shard.number)
    identity = {
        **identity_of(assignment.config),
        "partitions": assignment.partitions,
        "shard": [shard.number, assignment.config.run.shards],
    }
    was: dict[str, Any] = {}

    def adopts(found: Mapping[str, Any]) -> bool:
        was.update(found)
        is_same = all(found.get(name) == identity[name] for name in ("partitions", "shard"))
        return is_same and found.get("format") == FORMAT and assignment.adopts(found)

    try:
        return Index(folder, identity, adopts=adopts, storage=assignment.parts.storage)
    except StateError as error:
        has_grown = bool(was) and was["partitions"] != assignment.partitions
        if error.code not in _OF_NO_USE or not has_grown:
            raise
    # on the publisher's own disk it was moved to `former_indexes`; on an executor's it was not
    former = assignment.parts.storage.set_aside(folder, is_damaged=False)
    report.rebuilt = f"the topic had {was['partitions']} partitions; it was moved to {former}"
    return Index(folder, identity, adopts=adopts, storage=assignment.parts.storage)


class Accounted:
    """Rows that windows have shown, until the index has them with its position.

    Args:
        horizon: of the recount, µs; 0: nothing is counted.
    """

    def __init__(self, horizon: int) -> None:
        self._horizon = horizon
        self._times: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def add(self, times: npt.NDArray[np.int64], since: int) -> None:
        """Note the times, in order, of rows that were read; those up to `since` do not count."""
        if self._horizon and times[-1] > since:
            self._times = np.append(self._times, times[times > since])

    def forget(self) -> None:
        """What the index does not have yet is read, and shown, again."""
        self._times = self._times[:0]

    def take(self, position: int | None) -> Counter[int]:
        """Rows per time bucket up to a position that are accounted for with it."""
        if position is None or not len(self._times):
            return Counter()
        ready = self._times <= position
        counted = Counter(((self._times[ready] - 1) // WIDTH).tolist())
        self._times = self._times[~ready]
        return counted
