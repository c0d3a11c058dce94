"""The sink of one shard: a batch becomes visible whole, once, or not at all.

Ownership is by fencing. Nothing is produced outside the shard's partitions, and nothing is
committed where own records were not read. `transaction` has the steps of one transaction.
"""

from __future__ import annotations

from collections.abc import Mapping

from eventpub.admission.model import Shard
from eventpub.errors import SinkError
from eventpub.sink import client, faults
from eventpub.sink.base import Content, CrashPoint, PublishedBatch, no_crash
from eventpub.sink.batch import Batch, batch_of
from eventpub.sink.client import Clients
from eventpub.sink.encoder import CloudEvents, Encoder
from eventpub.sink.fold import Fold
from eventpub.sink.folded import Decoder
from eventpub.sink.missing_markers import lost_records
from eventpub.sink.reading import first_own
from eventpub.sink.records import PartitionId, Written
from eventpub.sink.topics import Meanwhile, end_all
from eventpub.sink.transaction import TransactionWriter

_READ_BETWEEN = 5.0
"""Seconds to read, in an open transaction, what others have written since a fold."""


class ShardSink:
    """Publishes one shard's batches; owns the shard from `ready()` until another sink takes over.

    `owner` replaces the shard's number in the transactional id.
    """

    def __init__(
        self,
        clients: Clients,
        app_id: str,
        shard: Shard,
        *,
        owner: str | None = None,
        encoder: Encoder | None = None,
    ) -> None:
        self._clients, self._sink = clients, clients.sink
        self._encoder = encoder or CloudEvents(app_id)
        self._shard = shard
        name = shard.number if owner is None else owner
        self._writer = TransactionWriter(clients, app_id, name)
        self._app_id = app_id
        self._fold: Fold | None = None
        self._published: dict[PartitionId, int] = {}

        self.ready, self.close = self._writer.ready, self._writer.close
        self.serve = self._writer.serve
        """Call it once a minute while nothing is published."""

    def __enter__(self) -> ShardSink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def needs_replacement(self) -> bool:
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
        """Read the shard's partitions back from the saved offsets to their ends.

        It costs two requests if there is nothing to read. For arguments, see `Fold` and `Decoder`.

        Raises:
            MissingMarkerError: while iterating: some of `written` is not visible; `restore` it.
            SinkError: while iterating: `sink.hanging_transaction`, `sink.topic_recreated`,
                `sink.other_publisher`, `sink.topic_missing`, `sink.unreachable`, ….
        """
        self.ready()
        self._published = {}
        is_transactional = self._writer.is_transactional
        decoder = Decoder(self._clients, self._shard, self._app_id, everywhere, with_contents)
        self._fold = Fold(
            decoder,
            dict(saved),
            written=written or {},
            acknowledged=(acknowledged if is_transactional else None) or {},
            end_open=self._writer.run_aborted if is_transactional else None,
            meanwhile=meanwhile,
        )
        return self._fold

    def restore(
        self,
        written: Mapping[PartitionId, Written],
        meanwhile: Meanwhile = lambda: None,
    ) -> int:
        """Republish what was committed in these ranges and got lost; returns the number of records.

        After an error, repeat it, with any sink, until it returns; publish nothing else before.
        """
        self.ready()
        self._fold, self._published = None, {}  # unknown until the next fold
        restored = 0
        while True:
            # until it is seen: the marker of what is published here may be missing, too
            end_all(self._clients, written, self._writer.run_aborted, meanwhile)
            lost = lost_records(self._clients, self._app_id, written, meanwhile)
            if not lost:
                return restored
            self._writer.run([Batch({}, lost)], no_crash, self._check_offsets)
            restored += len(lost)

    @property
    def offsets(self) -> dict[PartitionId, int]:
        return dict(self.last_fold.offsets)

    @property
    def last_fold(self) -> Fold:
        assert self._fold is not None, "nothing was folded yet"
        return self._fold

    def publish(self, content: Content, crash_point: CrashPoint = no_crash) -> PublishedBatch:
        self.ready()
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
        """Check that records follow all written before, with no unread own record in between.

        If a transaction's marker is missing, they begin at its offset.
        """
        if not batch.events:
            return
        marker = 1 if self._writer.is_transactional else 0
        unread: dict[PartitionId, Written] = {}
        for place, reports in batch.reports.items():
            at = -1 if reports.first is None else reports.first.offset()
            if 0 <= at < self._reached(place, at) - marker:
                self._give_up()
                if place[0] != self._sink.topic:  # recreated: the next fold treats it as new
                    raise faults.aborted(None, self._sink)
                raise faults.records_gone(self._sink, place, self._reached(place, at), at)
            if self._fold is not None and at > (end := self._reached(place, 0)):
                unread[place] = end, at
        if unread and self._has_missed(unread):
            self._give_up()
            self._clients.renew()  # the old ones take that broker for the leader
            raise faults.aborted(None, self._sink)

    def _give_up(self) -> None:
        self._writer.abort()
        self._writer.needs_replacement = True

    def _has_missed(self, unread: Mapping[PartitionId, Written]) -> bool:
        """Whether the last fold ended before own records.

        A broker cut off from the others keeps answering with its old end for partitions that
        another one leads by now, while the producer finds the new leader. So before the first
        commit after a fold, the offsets in between are read. Later, this detects a publisher of
        this application with another shard count, which writes here under another id.
        """
        try:
            own = first_own(self._clients, self._app_id, unread, _READ_BETWEEN)
        except SinkError as error:
            if error.code == "sink.other_publisher":
                # before the commit, or both would publish the same
                self._give_up()
                raise
            client.log.warning("reading past the end of a fold failed: %s", error)
            return self._writer.is_transactional
        if own is None or not self._writer.is_transactional:
            return False  # without transactions, a former sink's records may come late
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
        """The next offset of a partition known to this sink."""
        if place in self._published:
            return self._published[place]
        return default if self._fold is None else self._fold.offsets.get(place, default)
