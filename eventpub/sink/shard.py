"""The transactional producer of one shard: a batch becomes visible whole, once, or not at all.

Created fresh for each task, since Spark's workers are not sticky; ownership is by fencing. What
must hold: nothing is produced outside a partition of the shard; the delivery reports counted before
a commit equal the records produced; after an answer that leaves a doubt (the T-rule: an error, more
than a second, a lost answer of the coordinator) the producer is never used again, because the
client may have sent its `EndTxn` twice and the first may still arrive and end a later transaction.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import confluent_kafka
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from eventpub import config
from eventpub.admission.model import Shard, SkippedGap
from eventpub.errors import SinkError
from eventpub.sink import bulk, client, faults, fencing, records
from eventpub.sink.batch import Batch, Events, batch_of
from eventpub.sink.fold import FOLD_TIMEOUT, Fold
from eventpub.sink.missing_markers import (
    MARKER_TIMEOUT,
    PartitionId,
    Written,
    hanging,
    iter_ranges,
    lost_records,
)
from eventpub.sink.origin import check_between, sources_of
from eventpub.sink.records import DeadRow
from eventpub.sink.topics import list_offsets

COMMIT_TIMEOUT = 30.0
"""Seconds until a commit without an answer is given up as indefinite."""
ABORT_TIMEOUT = 5.0
"""Seconds for an abort; what it leaves open, the next owner's `init_transactions` aborts."""
DOUBT_AFTER = 1.0
"""A commit or abort that took longer leaves a doubt (T-rule)."""

_TAKEOVER_TIMEOUT = 3.0
"""Seconds that a sink which is closed waits for its own takeover of the shard."""
_READ_BETWEEN = 5.0
"""Seconds to read, in an open transaction, what others have written since a fold."""

_CHECKED_EVERY = 10.0
"""Seconds between two checks at what others have written between this sink's transactions."""

_careful: set[tuple[str, str]] = set()
"""Owners whose sinks send each record by itself, to find the ones that the broker refuses, until a
batch was published."""
_reduced: set[tuple[str, str]] = set()
"""Owners whose dead letters have key, version and reason alone, since the broker has refused one,
until a batch was published."""
_one_by_one: set[tuple[str, str]] = set()
"""Owners whose sinks ask for a report of each record, to find what went wrong with the last batch,
until a batch was published."""


@dataclass(frozen=True)
class PublishedBatch:
    """What became visible. `events` counts the events only, not gaps, dead or diverted rows.

    `next_offsets`: of every partition touched, the offset after the last record and its
    transaction's marker. `written`: what of them are the records, where a marker follows. `lost`:
    events that were not delivered (only at most once).
    """

    events: int
    next_offsets: dict[PartitionId, int]
    produce_seconds: float
    commit_seconds: float
    written: dict[PartitionId, Written] = field(default_factory=dict)
    lost: int = 0


_log_is_strange = threading.Event()


def _say_that_the_log_is_strange() -> None:
    if not _log_is_strange.is_set():
        _log_is_strange.set()
        client.log.warning(
            "librdkafka's log does not show commits as it did when this version of eventpub was"
            " made (confluent-kafka %s): each transaction counts as in doubt, and is followed by a"
            " new producer and a read of the topic. Nothing is lost or repeated by that; it costs"
            " some 60 ms a transaction",
            confluent_kafka.__version__,
        )


def _aborted(error: KafkaError | None, sink: config.Sink) -> SinkError:
    why = "" if error is None else f" ({faults.says(error)})"
    return SinkError(
        "sink.aborted",
        f"the transaction was aborted, nothing was published{why}",
        where=f"topic {sink.topic}",
        retriable=True,
    )


def _no_crash(_point: str) -> None:
    return


def _passing(crash_point: Callable[[str], None], name: str) -> Iterator[Any]:
    """Nothing, to be chained between rows: what it costs, it costs once."""
    crash_point(name)
    yield from ()


class ShardSink:
    """Publishes one shard's batches; owns the shard from `ready()` until another one is made.

    Args:
        sink: the configuration.
        app_id: the application's id, part of the transactional id and `ce_source`.
        shard: whose partitions this writes.
        former_ids: application ids that this publisher had before: their records count.

    Attributes:
        needs_replacement: True when this sink must not be used again: close it, make a new one,
            fold, go on.
    """

    def __init__(
        self, sink: config.Sink, app_id: str, shard: Shard, former_ids: Sequence[str] = ()
    ) -> None:
        self._sink = sink
        self._app_id = app_id
        self._shard = shard
        self._transactional = sink.delivery == "exactly_once"
        self._id = fencing.transactional_id(app_id, shard.number) if self._transactional else None
        self._log = client.ClientLog()
        self._owner = (sink.bootstrap_servers, fencing.transactional_id(app_id, shard.number))
        self._careful = self._owner in _careful
        self._sources = sources_of(sink, app_id, former_ids)
        self._fold: Fold | None = None
        self._published: dict[PartitionId, int] = {}
        self._between: dict[PartitionId, Written] = {}
        self._check_at = 0.0
        self._began = 0.0
        self._closed = False
        self._failure: BaseException | None = None
        self._producer: Producer | None = None
        conf = client.producer_settings(sink, self._id)
        self._commit_slice = min(5.0, int(conf["socket.timeout.ms"]) / 2000)
        self._flush_timeout = (
            int(conf.get("message.timeout.ms") or conf["delivery.timeout.ms"]) / 1000 + 5.0
        )
        self.needs_replacement = False
        self._starting = threading.Thread(
            target=self._start, name=f"eventpub-sink-{shard.number}", daemon=True
        )
        self._starting.start()

    def __enter__(self) -> ShardSink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        try:
            producer = client.producer(self._sink, self._id, self._log, careful=self._careful)
            if self._transactional:
                try:
                    fencing.take_over(self._sink, producer, self._log, lambda: self._closed)
                except SinkError as error:
                    # A request that librdkafka repeats by itself may fence its own first try.
                    if error.code != "sink.fenced":
                        raise
                    producer = client.producer(
                        self._sink, self._id, self._log, careful=self._careful
                    )
                    fencing.take_over(self._sink, producer, self._log, lambda: self._closed)
            if not self._closed:
                self._producer = producer
        except BaseException as error:  # handed to the thread that asks ready()
            self._failure = error

    def ready(self) -> None:
        """Waits until this sink owns its shard: older owners are fenced, their transactions over.

        Raises:
            SinkError: `sink.unreachable`, `sink.auth_failed`, `sink.not_authorized`,
                `sink.transactions_refused`, `sink.fenced`, `sink.fatal`.
        """
        self._starting.join(fencing.READY_TIMEOUT + 10)
        if self._starting.is_alive():
            self.needs_replacement = True
            raise faults.unreachable(
                self._sink, "taking over the shard", fencing.READY_TIMEOUT + 10, None
            )
        if self._failure is not None:
            self.needs_replacement = True
            raise self._failure

    def fold(
        self,
        saved: Mapping[PartitionId, int],
        written: Mapping[PartitionId, Written] | None = None,
        *,
        acknowledged: Mapping[PartitionId, int] | None = None,
        everywhere: bool = False,
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
            timeout: seconds without any progress after which it gives up.
            meanwhile: called again and again while nothing comes; what it raises ends the reading.

        Raises:
            MissingMarkerError: while iterating: some of `written` is not visible; `restore` it.
            SinkError: while iterating: `sink.hanging_transaction`, `sink.topic_recreated`,
                `sink.other_publisher`, `sink.topic_missing`, `sink.unreachable`, ….
        """
        self.ready()
        self._published, self._between = {}, {}
        end_open = self._end_open if self._transactional else None
        self._fold = Fold(
            self._sink,
            self._shard,
            saved,
            written,
            acknowledged=acknowledged if self._transactional else None,
            end_open=end_open,
            timeout=timeout,
            sources=self._sources,
            everywhere=everywhere,
            meanwhile=meanwhile,
        )
        return self._fold

    def restore(self, written: Mapping[PartitionId, Written]) -> int:
        """Publishes again what was committed in these ranges and got lost; see `missing_markers`.

        May be repeated after any error, by another sink, too, until it has returned; nothing else
        must be published in between.

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
            self._end_all(list(written))
            lost = lost_records(self._sink, self._sources.own, written)
            if not lost:
                return restored
            if self.needs_replacement:
                raise _aborted(None, self._sink)
            self._transact(Batch({}, lost), _no_crash)
            restored += len(lost)

    def _end_all(self, places: list[PartitionId]) -> None:
        """Waits until no transaction is open in these partitions; ends those of this producer."""
        ends = list_offsets(self._sink, places, "latest")
        for tries in range(2):
            deadline = time.monotonic() + MARKER_TIMEOUT
            while True:
                stable = list_offsets(self._sink, places, "latest", committed=True)
                behind = {place for place in places if stable[place] < ends[place]}
                if not behind:
                    return
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)
            if not tries:
                self._end_open(behind)
        place = min(behind)
        raise hanging(self._sink, place, stable[place], ends[place], MARKER_TIMEOUT)

    def _end_open(self, places: set[PartitionId]) -> None:
        """Ends what this producer, or one before it of the same id, has open in these partitions.

        By a transaction of one record each, which is aborted. One of somebody else stays open.
        """
        if self.needs_replacement:
            raise _aborted(None, self._sink)
        client.log.warning("ending transactions that the broker has left open: %s", sorted(places))
        probes = [(topic, records.Record("", b"", p, 0, [])) for topic, p in sorted(places)]
        batch = Batch({}, probes)
        self._begin()
        self._produce(batch, _no_crash)
        self._flush(batch)
        error = self._abort()
        if error is not None:
            raise error

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
    def not_ours(self) -> dict[str, int]:
        """By origin, the records that the last fold has read and that do not count."""
        return dict(self._last_fold.not_ours)

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

    def publish(
        self,
        events: pa.Table | pa.RecordBatch,
        *,
        late: npt.NDArray[np.bool_] | None = None,
        gaps: Sequence[SkippedGap] = (),
        dead: Sequence[DeadRow] = (),
        diverted: pa.Table | None = None,
        now: int | None = None,
        crash_point: Callable[[str], None] = _no_crash,
    ) -> PublishedBatch:
        """Makes all of it visible in one transaction, in the given order.

        Args:
            events: rows of `EVENTS`, to the topic.
            late: marks the events that get the header `eventpub_late`.
            gaps: skips, to ``<topic>.gaps``.
            dead: refused rows, to ``<topic>.dead``.
            diverted: late rows of `EVENTS`, to ``<topic>.late``.
            now: the database's time, µs; no record's timestamp is later.
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
            raise SinkError("sink.fatal", "this sink had to be replaced", retriable=True)
        if not (len(events) or gaps or dead or (diverted is not None and len(diverted))):
            return PublishedBatch(0, {}, 0.0, 0.0)

        started = time.perf_counter()
        batch = batch_of(
            self._sink,
            self._app_id,
            self._shard,
            events,
            late,
            gaps,
            dead,
            diverted,
            now=now,
            reduced=self._owner in _reduced,
        )
        produced, committed = self._transact(batch, crash_point)
        lost = len(batch.refused) + sum(len(r.failed) for r in batch.reports.values())
        written = {
            place: (reports.first.offset(), reports.last.offset() + 1)
            for place, reports in batch.reports.items()
            if reports.last is not None and reports.last.offset() >= 0
        }
        marker = 1 if self._transactional else 0
        next_offsets = {place: end + marker for place, (_, end) in written.items()}
        for place, (first, _) in written.items():
            if first > self._reached(place, first):
                self._between.setdefault(place, (self._reached(place, first), first))
        self._published.update(next_offsets)
        return PublishedBatch(
            events=len(events) - lost,
            next_offsets=next_offsets,
            produce_seconds=produced - started,
            commit_seconds=committed - produced,
            written=written if self._transactional else {},
            lost=lost,
        )

    def _transact(self, batch: Batch, crash_point: Callable[[str], None]) -> tuple[float, float]:
        """One transaction; when its records were delivered, and when it was committed."""
        crash_point("before_begin")
        self._begin()
        crash_point("after_begin")
        self._produce(batch, crash_point)
        crash_point("after_produce")
        self._flush(batch)
        if batch.events:
            self._check_offsets(batch)
        crash_point("before_commit")
        produced = time.perf_counter()
        self._commit()
        _careful.discard(self._owner)
        _one_by_one.discard(self._owner)
        _reduced.discard(self._owner)
        crash_point("after_commit")
        return produced, time.perf_counter()

    def close(self) -> None:
        """Lets go of the producer; an open transaction is left to the next owner, which aborts it.

        May be called at any time, more than once. Waits for nothing but the shard's takeover, where
        `ready` was not called: what of it is under way would fence whoever comes next.
        """
        self._starting.join(_TAKEOVER_TIMEOUT)
        self._closed = True
        producer, self._producer = self._producer, None
        if producer is not None:
            client.let_go(producer)

    # -- the steps of a batch -------------------------------------------------------------------

    def _begin(self) -> None:
        self._serve()
        self._log.forget()
        self._began = time.monotonic()
        if not self._transactional:
            return
        try:
            client.call(self._client.begin_transaction)
        except KafkaException as exception:
            self.needs_replacement = True
            error = faults.kafka_error(exception)
            raise faults.fault(error, "beginning a transaction", self._sink) from exception

    def _produce(self, batch: Batch, crash_point: Callable[[str], None]) -> None:
        try:
            for topic, events in batch.events.items():
                self._produce_events(topic, events, batch, crash_point)
            for topic, r in batch.side:
                on_delivery = batch.reports_of(topic, r.partition).on_delivery
                try:
                    self._produce_one(
                        topic, r.value, r.key, r.partition, on_delivery, r.timestamp, r.headers
                    )
                except KafkaException as exception:
                    error = faults.kafka_error(exception)
                    if error.code() not in faults.REFUSED_RECORD:
                        raise
                    batch.refused.append((topic, 0, faults.says(error)))
                    break
                batch.produced += 1
        except KafkaException as exception:
            raise self._undo(faults.kafka_error(exception), "producing", batch) from exception
        if batch.refused and self._sink.delivery != "at_most_once":
            raise self._undo(None, "producing", batch)

    def _produce_events(
        self,
        topic: str,
        events: Events,
        batch: Batch,
        crash_point: Callable[[str], None],
    ) -> None:
        # At once only in a transaction: what failed without a report is not visible then.
        one_by_one = not self._transactional or self._careful or self._owner in _one_by_one
        if (
            one_by_one
            or len(events.rows) < bulk.WORTHWHILE
            or not records.have_fixed_headers(events.rows, events.late)
            or (at_once := bulk.bulk_of(self._client)) is None
        ):
            self._produce_columns(topic, events.columns, batch, crash_point)
            return
        first, last = events.ends()
        between = np.ones(len(events.rows), np.bool_)
        between[first] = between[last] = False
        rows = np.flatnonzero(between)
        half = len(rows) // 2
        fixed = records.fixed_events(events.rows, self._app_id, events.partitions, events.limit)
        batch.has_unreported = True
        self._produce_columns(topic, events.taken(first), batch, _no_crash, first)
        self._produce_at_once(at_once, topic, fixed, rows[:half])
        crash_point("during_produce")
        self._produce_at_once(at_once, topic, fixed, rows[half:])
        self._produce_columns(topic, events.taken(last), batch, _no_crash, last)
        for partition, count in enumerate(np.bincount(events.partitions[rows]).tolist()):
            batch.reports_of(topic, partition).between = count

    def _produce_at_once(
        self, at_once: bulk.Bulk, topic: str, events: records.FixedEvents, rows: npt.NDArray[Any]
    ) -> None:
        deadline = time.monotonic() + self._flush_timeout
        while len(rows):
            if done := at_once.produce(topic, events, rows):
                deadline = time.monotonic() + self._flush_timeout
            rows = rows[done:]
            if len(rows):
                self._wait_for_room(deadline)

    def _wait_for_room(self, deadline: float) -> None:
        """The producer's queue is full."""
        if time.monotonic() > deadline:
            self.needs_replacement = True
            raise faults.unreachable(
                self._sink, "producing", self._flush_timeout, self._log.last_error
            )
        client.call(self._client.poll, 0.05)

    def _produce_columns(
        self,
        topic: str,
        columns: records.Columns,
        batch: Batch,
        crash_point: Callable[[str], None],
        numbers: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """One by one; `numbers` are those of the rows in the batch, where these are only some."""
        produce = self._client.produce
        partitions = columns.partitions.tolist()
        callbacks = {p: batch.reports_of(topic, p).on_delivery for p in set(partitions)}
        refused_here = len(batch.refused)
        rows = zip(
            columns.keys,
            columns.values,
            partitions,
            columns.timestamps,
            columns.headers,
            strict=True,
        )
        row = -1
        first_half = islice(rows, len(partitions) // 2)
        rows_and_point = chain(first_half, _passing(crash_point, "during_produce"), rows)
        for row, (key, value, partition, timestamp, headers) in enumerate(rows_and_point):
            on_delivery = callbacks[partition]
            try:
                # By position: keywords cost more than the call.
                produce(topic, value, key, partition, on_delivery, on_delivery, timestamp, headers)
            except BufferError:
                self._produce_one(topic, value, key, partition, on_delivery, timestamp, headers)
            except KafkaException as exception:
                error = faults.kafka_error(exception)
                if error.code() not in faults.REFUSED_RECORD:
                    raise
                number = row if numbers is None else int(numbers[row])
                batch.refused.append((topic, number, faults.says(error)))
                if self._sink.delivery == "at_least_once":
                    break
        batch.produced += row + 1 - (len(batch.refused) - refused_here)

    def _produce_one(
        self,
        topic: str,
        value: bytes | None,
        key: str | None,
        partition: int,
        on_delivery: Callable[[KafkaError | None, Message], None],
        timestamp: int,
        headers: list[records.Header],
    ) -> None:
        deadline = time.monotonic() + self._flush_timeout
        while True:
            try:
                self._client.produce(
                    topic, value, key, partition, on_delivery, on_delivery, timestamp, headers
                )
                return
            except BufferError:
                self._wait_for_room(deadline)

    def _flush(self, batch: Batch) -> None:
        deadline = time.monotonic() + self._flush_timeout
        try:
            while (
                client.call(self._client.flush, 0.1)
                and not batch.failed()
                and self._log.transaction_error is None
                and time.monotonic() < deadline
            ):
                pass
        except KafkaException as exception:
            raise self._undo(faults.kafka_error(exception), "producing", batch) from exception
        if self._sink.delivery == "at_most_once":
            return
        delivered = sum(r.count for r in batch.reports.values())
        if delivered != batch.produced or not all(r.is_whole for r in batch.reports.values()):
            raise self._undo(None, "producing", batch)

    def _check_offsets(self, batch: Batch) -> None:
        """Nothing is written before what was written already: there it is another topic.

        Where a marker is missing, its offset is written. Nor is there anything of ours between the
        end of the last fold, or what was written since, and what is written now: see `_has_missed`.
        """
        marker = 1 if self._transactional else 0
        unread: dict[PartitionId, Written] = {}
        for place, reports in batch.reports.items():
            at = -1 if reports.first is None else reports.first.offset()
            if 0 <= at < self._reached(place, at) - marker:
                self._abort()
                self.needs_replacement = True
                if place[0] != self._sink.topic:
                    raise _aborted(None, self._sink)  # made again: the next fold takes it as new
                raise faults.records_gone(self._sink, place, self._reached(place, at), at)
            if not self._transactional or self._fold is None:
                continue
            # behind what was published only where nobody else may write: it costs a read each time
            end = self._fold.offsets.get(place, 0)
            if not self._sources.ignored:
                end = self._published.get(place, end)
            elif place in self._published:
                continue
            if at > end:
                unread[place] = end, at
        if unread and self._has_missed(unread):
            self._abort()
            self.needs_replacement = True
            client.renew(self._sink)  # the old one knows that broker for the leader
            raise _aborted(None, self._sink)

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
                if records.is_ours(message.headers(), self._sources.own):
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
            client.log.warning("reading what stands behind the end of a fold: %s", error)
            return True
        return False

    def _reached(self, place: PartitionId, default: int) -> int:
        """The next offset of a partition, as far as this sink knows."""
        if place in self._published:
            return self._published[place]
        return default if self._fold is None else self._fold.offsets.get(place, default)

    def _fault(self, error: KafkaError, doing: str) -> SinkError:
        """As `faults.fault`; not fenced is who has merely let a transaction become too old."""
        mapped = faults.fault(error, doing, self._sink)
        waited = time.monotonic() - self._began
        if mapped.code == "sink.fenced" and waited * 1e6 >= self._sink.transaction_timeout:
            self.needs_replacement = True
            return faults.stalled(self._sink, error, waited)
        return mapped

    def _commit(self) -> None:
        if not self._transactional:
            return
        started = time.monotonic()
        while True:
            try:
                client.call(self._client.commit_transaction, self._commit_slice)
                break
            except KafkaException as exception:
                self.needs_replacement = True
                error = faults.kafka_error(exception)
                if error.retriable() and time.monotonic() - started < COMMIT_TIMEOUT:
                    continue
                if error.txn_requires_abort():
                    raise (self._abort() or _aborted(error, self._sink)) from exception
                raise self._indefinite(error) from exception
        self._doubt(started)
        if not self._log.shows_commits:
            self.needs_replacement = True
            _say_that_the_log_is_strange()

    def _doubt(self, started: float) -> None:
        self._serve()
        if time.monotonic() - started > DOUBT_AFTER or self._log.in_doubt:
            self.needs_replacement = True

    def _indefinite(self, error: KafkaError) -> SinkError:
        mapped = self._fault(error, "committing")
        if mapped.code in {"sink.unreachable", "sink.fatal"}:
            return SinkError(
                "sink.indefinite",
                f"the broker has not said whether it committed ({faults.says(error)})",
                where=f"topic {self._sink.topic}",
                suggestion="nothing to do: the topic is read back before anything is published",
                retriable=True,
            )
        return mapped

    def _undo(self, error: KafkaError | None, doing: str, batch: Batch) -> SinkError:
        """Aborts, and names the cause: the refused rows, else what failed first."""
        worse = None if error is not None and error.fatal() else self._abort()
        # An abort that the broker leaves open would be undone by the next commit, and one that
        # ends more than this transaction must be found out: only a fold sees either.
        self.needs_replacement = True
        if batch.has_unreported:
            _one_by_one.add(self._owner)
        # An abort brings the last delivery reports.
        self._serve()
        return worse or self._cause(error, doing, batch)

    def _cause(self, error: KafkaError | None, doing: str, batch: Batch) -> SinkError:
        if not self._transactional:
            # What is still queued must not be sent after the caller has begun again.
            self.needs_replacement = True
        failed = batch.failed()
        if batch.has_unreported:  # the next try, one by one, tells all that is refused
            by_broker = [e for e in (self._log.transaction_error, *(e for _, e, _ in failed)) if e]
            if any(e.code() in faults.REFUSED_RECORD for e in by_broker):
                _careful.add(self._owner)
            failed = [f for f in failed if f[1].code() not in faults.REFUSED_RECORD]
        if batch.refused or failed:
            refusal = self._refusal(batch, failed)
            if refusal is not None:
                return refusal
            topic, error, _ = failed[0]
            if error.code() in faults.MISSING:
                return faults.topic_missing(self._sink, topic, self._shard.partitions)
        # What was said about the transaction as a whole explains more than what a call met.
        error = self._log.transaction_error or error
        if error is None and batch.has_unreported:
            return _aborted(None, self._sink)
        if error is None:
            self.needs_replacement = True
            return SinkError(
                "sink.delivery_lost",
                f"{batch.produced} records were produced, but"
                f" {sum(r.count for r in batch.reports.values())} delivery reports came within"
                f" {self._flush_timeout:.0f} s; nothing was committed",
                where=f"sink.bootstrap_servers = {self._sink.bootstrap_servers}",
                retriable=True,
            )
        mapped = self._fault(error, doing)
        if mapped.code == "sink.fatal" and not error.fatal():
            return _aborted(error, self._sink)
        return mapped

    def _refusal(self, batch: Batch, failed: list[tuple[str, KafkaError, Any]]) -> SinkError | None:
        """The rows that can never be published, if that is what went wrong."""
        refused = list(batch.refused)
        by_broker = [f for f in failed if f[1].code() in faults.REFUSED_RECORD]
        if by_broker and not refused:
            if len(by_broker) > 1 and not self._careful:
                # The broker refuses a batch of records as one; alone, only the guilty one fails.
                _careful.add(self._owner)
                self.needs_replacement = True
                return _aborted(by_broker[0][1], self._sink)
            refused = batch.rows_of(by_broker)
        if not refused:
            return None
        of_events = [row for row in refused if row[0] in batch.events]
        if not of_events:
            topic, _, reason = refused[0]
            if topic == self._sink.dead_topic and self._owner not in _reduced:
                _reduced.add(self._owner)
                self.needs_replacement = True
                return _aborted(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE, reason), self._sink)
            return SinkError(
                "sink.side_record_refused",
                f"{topic} does not take a record, though it has been made as small as it can be:"
                f" {reason}",
                where=f"topic {topic}",
                suggestion=f"kafka-configs.sh --bootstrap-server {self._sink.bootstrap_servers}"
                f" --alter --entity-type topics --entity-name {topic} --add-config"
                " max.message.bytes=1048588 (more, where it has that), and message.max.bytes in"
                " [sink.properties] where it is set; where the reason is the timestamp:"
                " --delete-config message.timestamp.before.max.ms; nothing was published",
            )
        refused = of_events
        topic, _, reason = refused[0]
        return faults.RecordRefusedError(
            rows=[row for t, row, _ in refused if t == self._sink.topic],
            diverted_rows=[row for t, row, _ in refused if t == self._sink.late_topic],
            reason=reason,
            topic=topic,
        )

    def _abort(self) -> SinkError | None:
        """Aborts the transaction; the error is None unless it tells more than what led here."""
        if not self._transactional:
            return None
        started = time.monotonic()
        while True:
            try:
                client.call(self._client.abort_transaction, min(self._commit_slice, ABORT_TIMEOUT))
                break
            except KafkaException as exception:
                self.needs_replacement = True
                error = faults.kafka_error(exception)
                if not error.retriable():
                    mapped = self._fault(error, "aborting")
                    return None if mapped.code == "sink.fatal" else mapped
                if time.monotonic() - started > ABORT_TIMEOUT:
                    return None
        self._doubt(started)
        return None

    def _serve(self) -> None:
        """Lets the client hand over its log lines, errors and delivery reports."""
        try:
            client.call(self._client.poll, 0)
        except KafkaException as exception:
            # A fatal error is raised here as well; the call that met it says so, too.
            self.needs_replacement = True
            client.log.info("poll: %s", faults.says(faults.kafka_error(exception)))

    @property
    def _client(self) -> Producer:
        if self._producer is None:
            raise SinkError("sink.fatal", "this sink is closed")
        return self._producer
