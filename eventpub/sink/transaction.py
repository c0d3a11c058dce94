"""The transactions of one shard's producer: begin, produce, count what was delivered, commit.

What must hold: the delivery reports counted before a commit equal the records produced; after an
answer that leaves a doubt (the T-rule: an error, more than a second, a lost answer of the
coordinator) the producer is never used again, because the client may have sent its `EndTxn` twice
and the first may still arrive and end a later transaction.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException

from eventpub.errors import SinkError
from eventpub.sink import client, faults
from eventpub.sink.base import CrashPoint, no_crash
from eventpub.sink.batch import Batch
from eventpub.sink.causes import Causes, Caution, aborted
from eventpub.sink.client import Clients
from eventpub.sink.owned_producer import OwnedProducer
from eventpub.sink.producing import Producing
from eventpub.sink.records import Record

COMMIT_TIMEOUT = 30.0
"""Seconds until a commit without an answer is given up as indefinite."""
ABORT_TIMEOUT = 5.0
"""Seconds for an abort; what it leaves open, the next owner's `init_transactions` aborts."""
DOUBT_AFTER = 1.0
"""A commit or abort that took longer leaves a doubt (T-rule)."""

_log_is_strange = threading.Event()


def _say_that_the_log_is_strange() -> None:
    if not _log_is_strange.is_set():
        _log_is_strange.set()
        client.log.warning(
            "librdkafka's log does not show commits in the form that this version of eventpub"
            " expects (confluent-kafka %s): each transaction counts as in doubt, so the producer is"
            " replaced and the topic read back after it. Nothing is lost or repeated, but it costs"
            " some 60 ms per transaction",
            confluent_kafka.__version__,
        )


class Transactions:
    """Runs them, one after the other; without exactly once, what is left of them.

    Args:
        clients: of the cluster.
        partitions: of the topic.
        owned: the producer.
        caution: what failures before have taught.
    """

    def __init__(
        self,
        clients: Clients,
        partitions: int,
        owned: OwnedProducer,
        caution: Caution,
    ) -> None:
        self._clock, self._sink = clients.clock, clients.sink
        self._owned = owned
        self._caution = caution
        self._producing = Producing(clients, owned, caution)
        self._causes = Causes(clients.sink, partitions, owned, caution, self._fault)
        self._began = 0.0

    def run(
        self,
        parts: Iterable[Batch],
        crash_point: CrashPoint,
        check: Callable[[Batch], None] = lambda _: None,
    ) -> None:
        """One transaction.

        Args:
            parts: one after the other; the next is asked for when the one before is delivered.
            check: called for each that is delivered; what it raises ends the transaction.
        """
        crash_point("before_begin")
        self._begin()
        crash_point("after_begin")
        for batch in parts:
            self._produce(batch, crash_point)
            crash_point("after_produce")
            self._flush(batch)
            check(batch)
        crash_point("before_commit")
        self._commit()
        self._caution.forget()
        crash_point("after_commit")

    def run_in_vain(self, places: Iterable[tuple[str, int]]) -> None:
        """One transaction of a record for each partition that is aborted, which ends what the
        broker has left open there of this transactional id. Another's stays open.
        """
        if self._owned.needs_replacement:
            raise aborted(None, self._sink)
        now = int(self._clock.time() * 1000)
        batch = Batch({}, [(t, Record("", b"", p, now, [])) for t, p in sorted(places)])
        self._begin()
        self._produce(batch, no_crash)
        self._flush(batch)
        error = self.abort()
        if error is not None:
            raise error

    def _begin(self) -> None:
        self._owned.serve()
        self._owned.log.forget()
        self._began = self._clock.monotonic()
        if not self._owned.is_transactional:
            return
        try:
            client.call(self._owned.client.begin_transaction)
        except KafkaException as exception:
            self._owned.needs_replacement = True
            error = faults.kafka_error(exception)
            raise self._fault(error, "beginning a transaction") from exception

    def _produce(self, batch: Batch, crash_point: CrashPoint) -> None:
        try:
            self._producing.produce(batch, crash_point)
        except KafkaException as exception:
            raise self._undo(faults.kafka_error(exception), "producing", batch) from exception
        if batch.refused and self._sink.delivery != "at_most_once":
            raise self._undo(None, "producing", batch)

    def _flush(self, batch: Batch) -> None:
        deadline = self._clock.monotonic() + self._owned.flush_timeout
        try:
            while (
                client.call(self._owned.client.flush, 0.1)
                and not batch.failed()
                and self._owned.log.transaction_error is None
                and self._clock.monotonic() < deadline
            ):
                pass
        except KafkaException as exception:
            raise self._undo(faults.kafka_error(exception), "producing", batch) from exception
        if self._sink.delivery == "at_most_once":
            return
        delivered = sum(r.count for r in batch.reports.values())
        if delivered != batch.produced or not all(r.is_whole for r in batch.reports.values()):
            raise self._undo(None, "producing", batch)

    def _commit(self) -> None:
        if not self._owned.is_transactional:
            return
        started = self._clock.monotonic()
        while True:
            try:
                client.call(self._owned.client.commit_transaction, self._owned.commit_slice)
                break
            except KafkaException as exception:
                self._owned.needs_replacement = True
                error = faults.kafka_error(exception)
                if error.retriable() and self._clock.monotonic() - started < COMMIT_TIMEOUT:
                    continue
                if error.txn_requires_abort():
                    raise (self.abort() or aborted(error, self._sink)) from exception
                raise self._indefinite(error) from exception
        self._doubt(started)
        if self._owned.log.is_strange:
            self._owned.needs_replacement = True
            _say_that_the_log_is_strange()

    def abort(self) -> SinkError | None:
        """Aborts the transaction; the error is None unless it tells more than what led here."""
        if not self._owned.is_transactional:
            return None
        started = self._clock.monotonic()
        while True:
            try:
                client.call(
                    self._owned.client.abort_transaction,
                    min(self._owned.commit_slice, ABORT_TIMEOUT),
                )
                break
            except KafkaException as exception:
                self._owned.needs_replacement = True
                error = faults.kafka_error(exception)
                if not error.retriable():
                    mapped = self._fault(error, "aborting")
                    return None if mapped.code == "sink.fatal" else mapped
                if self._clock.monotonic() - started > ABORT_TIMEOUT:
                    return None
        self._doubt(started)
        return None

    def _undo(self, error: KafkaError | None, doing: str, batch: Batch) -> SinkError:
        """Aborts, and names the cause: the refused rows, else what failed first."""
        worse = None if error is not None and error.fatal() else self.abort()
        # An abort that the broker leaves open would be undone by the next commit, and one that
        # ends more than this transaction must be found out: only a fold sees either.
        self._owned.needs_replacement = True
        if batch.has_unreported:
            self._caution.reports_each = True
        # An abort brings the last delivery reports.
        self._owned.serve()
        return worse or self._causes.find(error, doing, batch)

    def _doubt(self, started: float) -> None:
        self._owned.serve()
        if self._clock.monotonic() - started > DOUBT_AFTER or self._owned.log.in_doubt:
            self._owned.needs_replacement = True

    def _indefinite(self, error: KafkaError) -> SinkError:
        mapped = self._fault(error, "committing")
        if mapped.code in {"sink.unreachable", "sink.fatal"}:
            return SinkError(
                "sink.indefinite",
                f"the outcome of the commit is unknown ({faults.says(error)})",
                where=f"topic {self._sink.topic}",
                suggestion="nothing to do: the topic is read back before anything is published",
                retriable=True,
            )
        return mapped

    def _fault(self, error: KafkaError, doing: str) -> SinkError:
        """As `faults.fault`; not fenced is who has merely let a transaction become too old."""
        self._owned.serve()  # what the client has logged before tells whether the broker was silent
        mapped = faults.fault(error, doing, self._sink)
        waited = self._clock.monotonic() - self._began
        if mapped.code == "sink.fenced" and waited * 1e6 >= self._sink.transaction_timeout:
            self._owned.needs_replacement = True
            return faults.stalled(self._sink, error, waited)
        return mapped
