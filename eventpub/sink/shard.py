"""The sink of one shard: a batch becomes visible whole, once, or not at all.

Ownership is by fencing. What must hold: nothing is produced outside a partition of the shard, and
nothing is committed where something of ours was not read. `transaction` has the steps of one
transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from eventpub.admission.model import Shard
from eventpub.errors import SinkError
from eventpub.sink import client, faults
from eventpub.sink.base import Content, CrashPoint, PublishedBatch, no_crash
from eventpub.sink.batch import Batch, batch_of
from eventpub.sink.client import Clients
from eventpub.sink.encoder import CloudEvents, Encoder
from eventpub.sink.fencing import end_all
from eventpub.sink.fold import Fold
from eventpub.sink.folded import Scope
from eventpub.sink.missing_markers import lost_records
from eventpub.sink.origin import first_own, sources_of
from eventpub.sink.records import PartitionId, Written
from eventpub.sink.topics import Meanwhile
from eventpub.sink.transaction import TransactionWriter

_READ_BETWEEN = 5.0
"""Seconds to read, in an open transaction, what others have written since a fold."""


class ShardSink:
    """Publishes one shard's batches; owns the shard from `ready()` until another one is made.

    Args:
        app_id: the application's id, part of the transactional id and `ce_source`.
        shard: whose partitions this writes.
        former_ids: application ids that this publisher had before: their records count.
        owner: who writes where it is not the shard's runner, for the transactional id.
        encoder: makes the records; by default CloudEvents.
    """

    def __init__(  # noqa: PLR0913 (options, by keyword)
        self,
        clients: Clients,
        app_id: str,
        shard: Shard,
        former_ids: Sequence[str] = (),
        *,
        owner: str | None = None,
        encoder: Encoder | None = None,
    ) -> None:
        self._clients, self._sink = clients, clients.sink
        self._encoder = encoder or CloudEvents(app_id)
        self._shard = shard
        name = shard.number if owner is None else owner
        self._writer = TransactionWriter(clients, app_id, name)
        self._sources = sources_of(app_id, former_ids)
        self._fold: Fold | None = None
        self._published: dict[PartitionId, int] = {}

        self.ready, self.close = self._writer.ready, self._writer.close
        self.serve = self._writer.serve
        """To be called once a minute where nothing is published."""

    def __enter__(self) -> ShardSink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def needs_replacement(self) -> bool:
        """True when it must not be used again: close it, make a new one, fold, go on."""
        is_slow = self._writer.sends_singly and not self._writer.caution.sends_singly
        return self._writer.needs_replacement or is_slow

    def fold(  # noqa: PLR0913 (options, by keyword)
        self,
        saved: Mapping[PartitionId, int],
        written: Mapping[PartitionId, Written] | None = None,
        *,
        acknowledged: Mapping[PartitionId, int] | None = None,
        everywhere: bool = False,
        with_contents: bool = False,
        meanwhile: Meanwhile = lambda: None,
    ) -> Fold:
        """Read the shard's own partitions back from the saved next offsets to their end.

        A partition that is not in `saved` is read from its beginning. Nothing to read costs two
        requests. See also `last_fold`.

        Args:
            saved: next offsets, by topic and partition.
            written: of those that came from a `PublishedBatch`, what that one had written.
            acknowledged: as of `Fold`.
            everywhere, with_contents: as of `Scope`.

        Raises:
            MissingMarkerError: while iterating: some of `written` is not visible; `restore` it.
            SinkError: while iterating: `sink.hanging_transaction`, `sink.topic_recreated`,
                `sink.other_publisher`, `sink.topic_missing`, `sink.unreachable`, ….
        """
        self.ready()
        self._published = {}
        is_transactional = self._writer.is_transactional
        self._fold = Fold(
            Scope(
                self._clients,
                self._shard,
                self._sources,
                everywhere=everywhere,
                with_contents=with_contents,
            ),
            saved,
            written=written or {},
            acknowledged=(acknowledged if is_transactional else None) or {},
            end_open=self._writer.run_in_vain if is_transactional else None,
            meanwhile=meanwhile,
        )
        return self._fold

    def restore(
        self,
        written: Mapping[PartitionId, Written],
        meanwhile: Meanwhile = lambda: None,
    ) -> int:
        """Publish again what was committed in these ranges and got lost; how many records.

        May be repeated after any error, by another sink, too, until it has returned; nothing else
        must be published in between. See `missing_markers`.
        """
        self.ready()
        self._fold, self._published = None, {}  # what was reached is about to be found out
        restored = 0
        while True:
            # until it is seen: the marker of what is published here may be left out as well
            end_all(self._clients, written, self._writer.run_in_vain, meanwhile)
            lost = lost_records(self._clients, self._sources, written, meanwhile)
            if not lost:
                return restored
            if self.needs_replacement:
                raise faults.aborted(None, self._sink)
            self._writer.run([Batch({}, lost)], no_crash, self._check_offsets)
            restored += len(lost)

    @property
    def offsets(self) -> dict[PartitionId, int]:
        """The next offset of each own partition as the last fold left it."""
        return dict(self.last_fold.offsets)

    @property
    def last_fold(self) -> Fold:
        """The last one, and what it has found so far."""
        assert self._fold is not None, "nothing was folded yet"
        return self._fold

    def publish(self, content: Content, crash_point: CrashPoint = no_crash) -> PublishedBatch:
        self.ready()
        if self.needs_replacement:
            raise SinkError(
                "sink.fatal",
                "the Kafka producer cannot be reused after an indefinite answer",
                where=f"topic {self._sink.topic}",
                suggestion="nothing to do: the shard restarts with a new producer",
                retriable=True,
            )
        if content.is_empty:
            return PublishedBatch(0, {})
        reduced = self._writer.caution.reduces_dead
        batch = batch_of(self._sink, self._encoder, self._shard, content, reduced=reduced)
        self._writer.run([batch], crash_point, self._check_offsets)
        lost = len(batch.refused) + sum(len(r.failed) for r in batch.reports.values())
        written = {
            place: (reports.first.offset(), reports.last.offset() + 1)
            for place, reports in batch.reports.items()
            if reports.last is not None and reports.last.offset() >= 0
        }
        marker = 1 if self._writer.is_transactional else 0
        next_offsets = {place: end + marker for place, (_, end) in written.items()}
        self._published.update(next_offsets)
        return PublishedBatch(
            events=len(content.events) - lost,
            next_offsets=next_offsets,
            written=written if self._writer.is_transactional else {},
            lost=lost,
        )

    def _check_offsets(self, batch: Batch) -> None:
        """Nothing is written before what was written already, nor is anything of ours in between.

        Where a marker is missing, its offset is written.
        """
        if not batch.events:
            return
        marker = 1 if self._writer.is_transactional else 0
        unread: dict[PartitionId, Written] = {}
        for place, reports in batch.reports.items():
            at = -1 if reports.first is None else reports.first.offset()
            if 0 <= at < self._reached(place, at) - marker:
                self._give_up()
                if place[0] != self._sink.topic:  # made again: the next fold takes it as new
                    raise faults.aborted(None, self._sink)
                raise faults.records_gone(self._sink, place, self._reached(place, at), at)
            if self._fold is not None and at > (end := self._reached(place, 0)):
                unread[place] = end, at
        if unread and self._has_missed(unread):
            self._give_up()
            self._clients.renew()  # the old one knows that broker for the leader
            raise faults.aborted(None, self._sink)

    def _give_up(self) -> None:
        self._writer.abort()
        self._writer.needs_replacement = True

    def _has_missed(self, unread: Mapping[PartitionId, Written]) -> bool:
        """Whether the last fold ended too early: before records of ours.

        A broker that is cut off from the others goes on to answer for partitions that another one
        leads by now, with the end that it knows; a producer comes to the new leader. So before the
        first commit after a fold, what lies between its end and the new records must be read.
        Later it shows a publisher of this application with another number of shards, which has this
        partition under another transactional id.
        """
        try:
            own = first_own(self._clients, self._sources, unread, _READ_BETWEEN)
        except SinkError as error:
            if error.code == "sink.other_publisher":
                # before it is committed, or what both publish would be there twice
                self._give_up()
                raise
            client.log.warning("reading past the end of a fold failed: %s", error)
            return self._writer.is_transactional
        if own is None or not self._writer.is_transactional:
            return False  # without transactions, a former sink's may come late
        client.log.warning(
            "%s[%d] was read back to offset %d, but has records of this publisher after it (at"
            " %d): either a broker answered that no longer leads the partition, such as one cut"
            " off from the others, or a second publisher with this app.id runs with a different"
            " number of shards. Nothing is published until the topic has been read back again",
            own.topic(),
            own.partition(),
            unread[own.topic(), own.partition()][0],
            own.offset(),
        )
        return True

    def _reached(self, place: PartitionId, default: int) -> int:
        """The next offset of a partition, as far as this sink knows."""
        if place in self._published:
            return self._published[place]
        return default if self._fold is None else self._fold.offsets.get(place, default)
