"""The sink of one shard: a batch becomes visible whole, once, or not at all.

Created fresh for each task, since Spark's workers are not sticky; ownership is by fencing. What
must hold: nothing is produced outside a partition of the shard, and nothing is committed where
something of ours stands that was not read. `transaction` has the steps of one transaction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from eventpub import config
from eventpub.admission.model import Shard, SkippedGap
from eventpub.errors import SinkError
from eventpub.sink import client, faults, fencing, records
from eventpub.sink.batch import Batch, Content, batch_of
from eventpub.sink.causes import aborted
from eventpub.sink.caution import caution_of
from eventpub.sink.fold import FOLD_TIMEOUT, Fold, Known
from eventpub.sink.folded import Scope
from eventpub.sink.missing_markers import (
    MARKER_TIMEOUT,
    PartitionId,
    Written,
    hanging,
    lost_records,
)
from eventpub.sink.origin import check_between, other_publisher, sources_of
from eventpub.sink.owned_producer import OwnedProducer
from eventpub.sink.producing import CrashPoint, no_crash
from eventpub.sink.reading import iter_ranges
from eventpub.sink.records import DeadRow
from eventpub.sink.stable_ends import StandingStill
from eventpub.sink.topics import list_offsets
from eventpub.sink.transaction import Transactions

_READ_BETWEEN = 5.0
"""Seconds to read, in an open transaction, what others have written since a fold."""

_CHECKED_EVERY = 10.0
"""Seconds between two checks at what others have written between this sink's transactions."""


@dataclass(frozen=True)
class PublishedBatch:
    """What became visible. `events` counts the events only, not gaps, dead or diverted rows.

    `next_offsets`: of every partition touched, the offset after the last record and its
    transaction's marker. `written`: what of them are the records, where a marker follows. `lost`:
    events that were not delivered (only at most once).
    """

    events: int
    next_offsets: dict[PartitionId, int]
    written: dict[PartitionId, Written] = field(default_factory=dict)
    lost: int = 0


class ShardSink:
    """Publishes one shard's batches; owns the shard from `ready()` until another one is made.

    Args:
        sink: the configuration.
        app_id: the application's id, part of the transactional id and `ce_source`.
        shard: whose partitions this writes.
        former_ids: application ids that this publisher had before: their records count.
        owner: who writes where it is not the shard's runner, for the transactional id.
    """

    def __init__(
        self,
        sink: config.Sink,
        app_id: str,
        shard: Shard,
        former_ids: Sequence[str] = (),
        owner: str | None = None,
    ) -> None:
        self._sink = sink
        self._app_id = app_id
        self._shard = shard
        name = shard.number if owner is None else owner
        self._caution = caution_of((sink.bootstrap_servers, fencing.transactional_id(app_id, name)))
        self._owned = OwnedProducer(sink, app_id, name, sends_singly=self._caution.sends_singly)
        self._transactions = Transactions(
            sink, app_id, shard.partitions, self._owned, self._caution
        )
        self._sources = sources_of(app_id, former_ids)
        self._fold: Fold | None = None
        self._published: dict[PartitionId, int] = {}
        self._between: dict[PartitionId, Written] = {}
        self._check_at = 0.0

    def __enter__(self) -> ShardSink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ready(self) -> None:
        """Waits until this sink owns its shard: older owners are fenced, their transactions over.

        Raises:
            SinkError: `sink.unreachable`, `sink.auth_failed`, `sink.not_authorized`,
                `sink.transactions_refused`, `sink.fenced`, `sink.fatal`.
        """
        self._owned.ready()

    @property
    def needs_replacement(self) -> bool:
        """True when it must not be used again: close it, make a new one, fold, go on."""
        is_slow = self._owned.sends_singly and not self._caution.sends_singly
        return self._owned.needs_replacement or is_slow

    def serve(self) -> None:
        """Lets the producer hand over its log lines and errors.

        It keeps them until somebody asks, some 300 B each: to be called once a minute where nothing
        is published.
        """
        self._owned.serve()

    def close(self) -> None:
        """Lets go of the producer; an open transaction is left to the next owner, which aborts it.

        May be called at any time, more than once. Waits for nothing but the shard's takeover, where
        `ready` was not called: what of it is under way would fence whoever comes next.
        """
        self._owned.close()

    def fold(  # noqa: PLR0913 (options, by keyword)
        self,
        saved: Mapping[PartitionId, int],
        written: Mapping[PartitionId, Written] | None = None,
        *,
        acknowledged: Mapping[PartitionId, int] | None = None,
        everywhere: bool = False,
        with_contents: bool = False,
        timeout: float = FOLD_TIMEOUT,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Fold:
        """Reads the shard's own partitions back from the saved next offsets to their end.

        A partition that is not in `saved` is read from its beginning. Nothing to read costs two
        requests. What the iteration found besides is in `offsets`, `truncated` and `not_ours`.

        Args:
            saved: next offsets, by topic and partition.
            written: of those that came from a `PublishedBatch`, what that one had written.
            acknowledged: next offsets up to which all was acknowledged as committed; `saved` may be
                behind.
            everywhere: read all partitions, for the shard's aggregates: where the number of
                partitions may have been another one.
            with_contents: as of `Scope`.
            timeout: seconds without any progress after which it gives up.
            meanwhile: called again and again while nothing comes; what it raises ends the reading.

        Raises:
            MissingMarkerError: while iterating: some of `written` is not visible; `restore` it.
            SinkError: while iterating: `sink.hanging_transaction`, `sink.topic_recreated`,
                `sink.other_publisher`, `sink.topic_missing`, `sink.unreachable`, ….
        """
        self.ready()
        self._published, self._between = {}, {}
        is_transactional = self._owned.is_transactional
        self._fold = Fold(
            Scope(
                self._sink,
                self._shard,
                self._sources,
                everywhere=everywhere,
                with_contents=with_contents,
            ),
            Known(saved, written or {}, (acknowledged if is_transactional else None) or {}),
            end_open=self._end_open if is_transactional else None,
            timeout=timeout,
            meanwhile=meanwhile,
        )
        return self._fold

    def restore(
        self,
        written: Mapping[PartitionId, Written],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> int:
        """Publishes again what was committed in these ranges and got lost; see `missing_markers`.

        May be repeated after any error, by another sink, too, until it has returned; nothing else
        must be published in between.

        Args:
            written: the ranges.
            meanwhile: called again and again while it reads; what it raises ends that.

        Returns:
            How many records it has published again.

        Raises:
            SinkError: as `publish`.
        """
        self.ready()
        self._fold, self._published = None, {}  # what was reached is about to be found out
        restored = 0
        while True:
            # until it is seen: the marker of what is published here may be left out as well
            self._end_all(list(written), meanwhile)
            lost = lost_records(self._sink, self._sources.own, written, meanwhile)
            if not lost:
                return restored
            if self.needs_replacement:
                raise aborted(None, self._sink)
            self._transactions.run(Batch({}, lost), no_crash, self._check_offsets)
            restored += len(lost)

    def _end_all(self, places: list[PartitionId], meanwhile: Callable[[], None]) -> None:
        """Waits until no transaction is open before the ends of these partitions as they are now.

        Those of this producer are ended.
        """
        ends = list_offsets(self._sink, places, "latest")
        still = StandingStill()
        began = time.monotonic()
        ended: set[PartitionId] = set()
        while True:
            stable = list_offsets(self._sink, places, "latest", committed=True)
            now = time.monotonic()
            still.seen(stable, now)
            behind = {place for place in places if stable[place] < ends[place]}
            if not behind:
                return
            if now - began > MARKER_TIMEOUT and (new := behind - ended):
                self._end_open(new)
                ended |= new
                # the marker of what has ended it may be left out as well
                ends |= list_offsets(self._sink, list(new), "latest")
                began = time.monotonic()
            elif now - began > MARKER_TIMEOUT:
                for place in sorted(behind):
                    seconds = still.seconds(place)
                    if seconds > MARKER_TIMEOUT:
                        raise hanging(self._sink, place, stable[place], ends[place], seconds)
            meanwhile()
            time.sleep(0.05 if now - began < MARKER_TIMEOUT else 0.2)

    def _end_open(self, places: set[PartitionId]) -> None:
        """Ends what this producer, or one before it of the same id, has open in these partitions.

        By a transaction of one record each, which is aborted. One of somebody else stays open.
        """
        if self.needs_replacement:
            raise aborted(None, self._sink)
        client.log.warning("ending transactions that the broker has left open: %s", sorted(places))
        probes = [(topic, records.Record("", b"", p, 0, [])) for topic, p in sorted(places)]
        batch = Batch({}, probes)
        self._transactions.run_in_vain(batch)

    @property
    def offsets(self) -> dict[PartitionId, int]:
        """The next offset of each own partition as the last fold left it."""
        return dict(self._last_fold.offsets)

    @property
    def truncated(self) -> bool:
        """True if retention had removed events before the last fold could read them."""
        return self._last_fold.truncated

    @property
    def unread(self) -> int:
        """Offsets between what the last fold has read and the ends of the shard's partitions."""
        return self._last_fold.unread

    @property
    def misplaced(self) -> int:
        """As of `Fold`, of the last one."""
        return self._last_fold.misplaced

    @property
    def not_ours(self) -> int:
        """How many records the last fold has read that do not count."""
        return self._last_fold.not_ours

    def check_between(self) -> None:
        """Look at offsets between what this sink has written: another publisher's may stand there.

        Costs nothing where there are none, as in the common batch; where somebody else writes who
        may, one check in a while. What cannot be read now is checked later, or by the next fold.

        Raises:
            SinkError: `sink.other_publisher`.
        """
        if not self._between or time.monotonic() < self._check_at:
            return
        between, self._between = self._between, {}
        self._check_at = time.monotonic() + _CHECKED_EVERY
        try:
            check_between(self._sink, self._sources, between)
        except SinkError as error:
            if error.code == "sink.other_publisher":
                raise
            self._between = between

    @property
    def _last_fold(self) -> Fold:
        if self._fold is None:
            raise RuntimeError("nothing was folded yet")
        return self._fold

    def publish(  # noqa: PLR0913 (options, by keyword)
        self,
        events: pa.Table | pa.RecordBatch,
        *,
        late: npt.NDArray[np.bool_] | None = None,
        gaps: Sequence[SkippedGap] = (),
        dead: Sequence[DeadRow] = (),
        diverted: pa.Table | None = None,
        now: int | None = None,
        marks: Sequence[Sequence[records.Header]] | None = None,
        crash_point: CrashPoint = no_crash,
    ) -> PublishedBatch:
        """Makes all of it visible in one transaction, in the given order.

        Args:
            events: rows of `EVENTS`, to the topic.
            late: marks the events that get the header `eventpub_late`.
            gaps: skips, to ``<topic>.gaps``.
            dead: refused rows, to ``<topic>.dead``.
            diverted: late rows of `EVENTS`, to ``<topic>.late``.
            now: the database's time, µs; no record's timestamp is later.
            marks: more headers of each event.
            crash_point: called with the name of each step, for tests that die there.

        Raises:
            RecordRefusedError: some rows can never be published; nothing was. Name them dead, redo.
            SinkError: `sink.aborted` (nothing was published; redo), `sink.fenced`,
                `sink.side_record_refused`, `sink.topic_recreated`,
                `sink.indefinite`, `sink.unreachable`, `sink.fatal`, `sink.wrong_partition`, ….
                Look at `needs_replacement` before the next call.
        """
        self.ready()
        if self.needs_replacement:
            raise SinkError(
                "sink.fatal",
                "the Kafka producer cannot be reused after an indefinite answer",
                where=f"topic {self._sink.topic}",
                suggestion="nothing to do: the shard starts again with a new one",
                retriable=True,
            )
        content = Content(events, late, gaps, dead, diverted, now, marks)
        if content.is_empty:
            return PublishedBatch(0, {})

        reduced = self._caution.reduces_dead
        batch = batch_of(self._sink, self._app_id, self._shard, content, reduced=reduced)
        self._transactions.run(batch, crash_point, self._check_offsets)
        lost = len(batch.refused) + sum(len(r.failed) for r in batch.reports.values())
        written = {
            place: (reports.first.offset(), reports.last.offset() + 1)
            for place, reports in batch.reports.items()
            if reports.last is not None and reports.last.offset() >= 0
        }
        marker = 1 if self._owned.is_transactional else 0
        next_offsets = {place: end + marker for place, (_, end) in written.items()}
        for place, (first, _) in written.items():
            if first > self._reached(place, first):
                self._between.setdefault(place, (self._reached(place, first), first))
        self._published.update(next_offsets)
        return PublishedBatch(
            events=len(events) - lost,
            next_offsets=next_offsets,
            written=written if self._owned.is_transactional else {},
            lost=lost,
        )

    def _check_offsets(self, batch: Batch) -> None:
        """Nothing is written before what was written already: there it is another topic.

        Where a marker is missing, its offset is written. Nor is there anything of ours between the
        end of the last fold, or what was written since, and what is written now: see `_has_missed`.
        """
        if not batch.events:
            return
        marker = 1 if self._owned.is_transactional else 0
        unread: dict[PartitionId, Written] = {}
        for place, reports in batch.reports.items():
            at = -1 if reports.first is None else reports.first.offset()
            if 0 <= at < self._reached(place, at) - marker:
                self._transactions.abort()
                self._owned.needs_replacement = True
                if place[0] != self._sink.topic:
                    raise aborted(None, self._sink)  # made again: the next fold takes it as new
                raise faults.records_gone(self._sink, place, self._reached(place, at), at)
            if not self._owned.is_transactional or self._fold is None:
                continue
            end = self._published.get(place, self._fold.offsets.get(place, 0))
            if at > end:
                unread[place] = end, at
        if unread and self._has_missed(unread):
            self._transactions.abort()
            self._owned.needs_replacement = True
            client.renew(self._sink)  # the old one knows that broker for the leader
            raise aborted(None, self._sink)

    def _has_missed(self, unread: Mapping[PartitionId, Written]) -> bool:
        """Whether the last fold ended too early: before records of ours.

        A broker that is cut off from the others, and not from us, goes on to answer for partitions
        that another one leads by now, with the end that it knows. Who writes comes to the new
        leader, since the old one finds nobody who copies a record. Before the first commit behind a
        fold it shows: the records do not follow on its end. What stands between must then be read:
        others may write there, too.

        Later it shows another publisher of this application whose number of shards differs: it has
        this partition under another transactional id, and neither fences the other there.

        Args:
            unread: by place, the fold's end and the first offset that was written now.
        """
        try:
            for message in iter_ranges(self._sink, unread, committed=False, timeout=_READ_BETWEEN):
                origin = self._sources.origin(message, dict(message.headers() or ()))
                if origin == "other_publisher" and message.topic() == self._sink.topic:
                    # before it is committed, or what both publish would be there twice
                    self._transactions.abort()
                    self._owned.needs_replacement = True
                    raise other_publisher(self._sink, message)
                if origin == "own":
                    place = message.topic(), message.partition()
                    client.log.warning(
                        "%s[%d] is known to offset %d, and has records of this publisher behind"
                        " it (%d): a broker has answered that does not lead it any more, as one"
                        " does that is cut off from the others, or a second publisher of this"
                        " application runs with another number of shards. Nothing is published"
                        " before the topic was read back again",
                        *place,
                        unread[place][0],
                        message.offset(),
                    )
                    return True
        except SinkError as error:
            if error.code == "sink.other_publisher":
                raise
            client.log.warning("reading past the end of a fold failed: %s", error)
            return True
        return False

    def _reached(self, place: PartitionId, default: int) -> int:
        """The next offset of a partition, as far as this sink knows."""
        if place in self._published:
            return self._published[place]
        return default if self._fold is None else self._fold.offsets.get(place, default)
