"""One shard while a lease lasts: its index, sink, connections, and what it will report."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from eventpub.admission.buckets import WIDTH, oldest_needed
from eventpub.channel import Folding, Lease, Report
from eventpub.channel.lane import Link
from eventpub.errors import StateError
from eventpub.index import Copying, Index, Snapshots, folder_for, set_aside
from eventpub.shard.assignment import Assignment
from eventpub.shard.pace import Pace
from eventpub.sink import ShardSink
from eventpub.store import EventStore

_COUNTED_LATE = 10_000_000
"""µs behind the horizon at which a bucket may still be counted, by a coordinator that is slow."""

_SAID_EVERY = 1.0
"""Seconds after which a runner that fetches says that it is alive."""


class ShardContext:
    """A context manager: whatever is open is closed at its end.

    Args:
        takes_copy: whether a copy of the index may take its place where there is none.

    Attributes:
        report: what the next report will say.
        now: the database's time, as it was asked last, µs.
        open_since, hidden_since, uncounted_since: as of the last `Window`.
    """

    def __init__(
        self,
        assignment: Assignment,
        number: int,
        lease: Lease,
        link: Link,
        *,
        takes_copy: bool = True,
    ) -> None:
        config = assignment.config
        self.assignment = assignment
        self.lease = lease
        self.link = link
        self.shard = assignment.shard(number)
        self.rules = assignment.rules()
        self.report = Report(number)
        self.now = 0
        self.open_since: int | None = None
        self.hidden_since: int | None = None
        self.uncounted_since = lease.uncounted_since
        self._open = ExitStack()
        self._copying: Copying | None = None
        self._said_at = 0.0
        self.sink = self._new_sink()
        try:
            self._find_copy(takes_copy)
            self.index = self._open.enter_context(self._open_index())
            self.pace = Pace(config.sink.transaction_timeout / 1e6, self.index.chunk_bytes)
            self.reader = self._open.enter_context(EventStore(config.store, assignment.layout))
            self.lookup = self._open.enter_context(EventStore(config.store, assignment.layout))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> ShardContext:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of everything; an open transaction is aborted by the next owner."""
        self.sink.close()
        self._open.close()

    def _find_copy(self, takes_copy: bool) -> None:
        """Where this machine has no index of the shard, the newest copy is one.

        Not where what another number of shards or partitions knows, which is newer, is taken over.
        """
        state, app = self.assignment.config.state, self.assignment.config.app
        if not state.snapshots:
            return
        number, folder = self.shard.number, self.assignment.index(self.shard.number)
        shard, lease = self.shard, self.lease
        snapshots = Snapshots(state.snapshots, app.id, shard.partitions, shard.shards, number)
        supersedes_others = lease.former_shards is not None or bool(lease.former_indexes)
        if takes_copy and not supersedes_others and not folder.exists():
            self.report.copied_from = snapshots.get(folder, self._fetches)
        self._copying = Copying(snapshots, state.snapshot_every / 1e6)

    def _fetches(self) -> None:
        self.require_going_on()
        if time.monotonic() - self._said_at > _SAID_EVERY:
            self._said_at = time.monotonic()
            self.link.send(Folding(0, 0))

    def _open_index(self) -> Index:
        config, number = self.assignment.config, self.shard.number
        folder = self.assignment.index(number)
        identity = {
            "app": config.app.id,
            "topic": config.sink.topic,
            "partitions": self.assignment.partitions,
            "shard": [number, config.spark.shards],
        }
        was: dict[str, Any] = {}

        def adopts(found: Mapping[str, Any]) -> bool:
            was.update(found)
            return self._adopts(found)

        try:
            return Index(folder, identity, adopts=adopts)
        except StateError as error:
            has_grown = bool(was) and was["partitions"] != self.assignment.partitions
            if error.code != "index.foreign" or not (self.report.copied_from or has_grown):
                raise
        if self.report.copied_from:  # of another topic, say: it is as if there were no copy
            self.report.copied_from = None
            shutil.rmtree(folder)
        else:  # on the publisher's own disk it was moved to `former_indexes`; here, nobody did
            self.report.rebuilt = (
                f"the topic had {was['partitions']} partitions; it was moved to {set_aside(folder)}"
            )
        return Index(folder, identity, adopts=self._adopts)

    @property
    def keeps_copies(self) -> bool:
        """Whether copies of the index are kept."""
        return self._copying is not None

    def keep_copy(self) -> None:
        """Keep a copy of the index, where one is due."""
        copying, index = self._copying, self.index
        if copying is not None and copying.due(offsets := dict(index.offsets)):
            folder = folder_for(index.directory)
            try:
                index.copy_to(folder)
            except StateError as error:
                copying.failed(folder, error)
                if error.code == "index.corrupt":
                    raise
            else:
                copying.begin(folder, offsets)

    def _new_sink(self) -> ShardSink:
        config = self.assignment.config
        return ShardSink(config.sink, config.app.id, self.shard, config.app.former_ids)

    def replace_sink(self) -> None:
        """A new producer after an answer that leaves a doubt; fold before it publishes."""
        self.report.replaced += 1
        self.sink.close()
        self.sink = self._new_sink()

    def _adopts(self, identity: Mapping[str, Any]) -> bool:
        """Whether an index was this one before application or topic were renamed."""
        config, shard = self.assignment.config, self.shard
        app, topic = identity["app"], identity["topic"]
        former = {
            "app": app if app in config.app.former_ids else config.app.id,
            "topic": topic if self.assignment.accepts_topic else config.sink.topic,
            "partitions": shard.partitions,
            "shard": [shard.number, shard.shards],
        }
        return dict(identity) == {**identity, **former}

    @contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Adds what the block takes to the report."""
        start = time.perf_counter()
        try:
            yield
        finally:
            seconds = self.report.seconds
            seconds[step] = seconds.get(step, 0.0) + time.perf_counter() - start

    @property
    def is_stopping(self) -> bool:
        """Whether the runner is to leave."""
        return self.link.is_stopping

    def require_going_on(self) -> None:
        """Called again and again by what may take long.

        Raises:
            StateError: run.stopping
        """
        if self.is_stopping:
            raise StateError("run.stopping", "stopped while it read the topic back", retriable=True)

    def own_places(self) -> set[tuple[str, int]]:
        """The partitions of all topics that only this shard writes."""
        topics, own = self.assignment.config.sink.topics, self.shard.topic_partitions()
        return {(topic, partition) for topic in topics for partition in own}

    def oldest_bucket(self) -> int:
        """The first whose number of rows may still be of use."""
        horizon = self.assignment.config.recount.horizon + _COUNTED_LATE
        return oldest_needed(self.now, horizon, self.hidden_since, self.uncounted_since)

    def low(self, position: int) -> int:
        """Up to where everything is published or skipped: below the position where any waits."""
        oldest = self.index.holds.oldest()
        return position if oldest is None else min(position, oldest - 1)

    def take_report(self) -> Report:
        """What happened since the last one, and what is pending."""
        report, index = self.report, self.index
        holds, known_to = index.holds, index.position
        if known_to is None:  # a new index has yet to read what it does not know
            report.position, report.low = self.lease.position, self.lease.low
        else:
            report.position, report.low = known_to, self.low(known_to)
        report.hidden_since = self.hidden_since
        report.offsets = dict(index.offsets)
        report.holds = len(holds)
        report.next_due = holds.next_due()
        self.report = Report(
            self.shard.number,
            done=report.done,
            position=report.position,
            compared=report.compared,
            unfinished=report.unfinished,
        )
        return report


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
