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
from eventpub.sink.batch import Batch, Producing
from eventpub.sink.client import Clients
from eventpub.sink.owned_producer import OwnedProducer
from eventpub.sink.records import Header, Record
from eventpub.sink.refusals import RecordRefusedError

PROBE: Header = ("eventpub_probe", "1")
"""Of a record that is aborted on purpose: readers of what is not committed see it."""

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
    """

    def __init__(self, clients: Clients, partitions: int, owned: OwnedProducer) -> None:
        self._clock, self._sink = clients.clock, clients.sink
        self._partitions = partitions
        self._owned = owned
        self._producing = Producing(clients, owned)
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
        self._owned.caution.forget()
        crash_point("after_commit")

    def run_in_vain(self, places: Iterable[tuple[str, int]]) -> None:
        """One transaction of a record for each partition that is aborted, which ends what the
        broker has left open there of this transactional id. Another's stays open.
        """
        if self._owned.needs_replacement:
            raise faults.aborted(None, self._sink)
        now = int(self._clock.time() * 1000)
        batch = Batch({}, [(t, Record("", b"", p, now, [PROBE])) for t, p in sorted(places)])
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
        error = self._end(self._owned.client.commit_transaction, COMMIT_TIMEOUT)
        if error is not None and error.txn_requires_abort():
            raise self.abort() or faults.aborted(error, self._sink)
        if error is not None:
            raise self._indefinite(error)
        if self._owned.log.is_strange:
            self._owned.needs_replacement = True
            _say_that_the_log_is_strange()

    def abort(self) -> SinkError | None:
        """Aborts the transaction; the error is None unless it tells more than what led here."""
        if not self._owned.is_transactional:
            return None
        error = self._end(self._owned.client.abort_transaction, ABORT_TIMEOUT)
        if error is None or error.retriable():
            return None
        mapped = self._fault(error, "aborting")
        return None if mapped.code == "sink.fatal" else mapped

    def _end(self, end: Callable[[float], None], seconds: float) -> KafkaError | None:
        """Commits or aborts; what the client met instead of an answer.

        Args:
            seconds: after which a retriable error is given back.
        """
        started = self._clock.monotonic()
        while True:
            try:
                client.call(end, min(self._owned.commit_slice, seconds))
                break
            except KafkaException as exception:
                self._owned.needs_replacement = True
                error = faults.kafka_error(exception)
                if not error.retriable() or self._clock.monotonic() - started > seconds:
                    return error
        self._owned.serve()
        if self._clock.monotonic() - started > DOUBT_AFTER or self._owned.log.in_doubt:
            self._owned.needs_replacement = True
        return None

    def _undo(self, error: KafkaError | None, doing: str, batch: Batch) -> SinkError:
        """Aborts, and names the cause: the refused rows, else what failed first."""
        worse = None if error is not None and error.fatal() else self.abort()
        # An abort that the broker leaves open would be undone by the next commit, and one that
        # ends more than this transaction must be found out: only a fold sees either. Without
        # transactions, what is still queued must not be sent after the caller has begun again.
        self._owned.needs_replacement = True
        if batch.has_unreported:
            self._owned.caution.reports_each = True
        # An abort brings the last delivery reports.
        self._owned.serve()
        return worse or self._cause(error, doing, batch)

    def _cause(self, error: KafkaError | None, doing: str, batch: Batch) -> SinkError:
        """What to raise.

        Args:
            error: which the client has raised; None: none.
            doing: what it was doing.
            batch: what came of it.
        """
        failed = batch.failed()
        if batch.has_unreported:  # the next try, one by one, tells all that is refused
            met = [self._owned.log.transaction_error, *(e for _, e, _ in failed)]
            if any(e is not None and e.code() in faults.REFUSED_RECORD for e in met):
                self._owned.caution.sends_singly = True
            failed = [f for f in failed if f[1].code() not in faults.REFUSED_RECORD]
        if refusal := self._refusal(batch, failed):
            return refusal
        if failed:
            topic, error, _ = failed[0]
            if error.code() in faults.MISSING:
                return faults.topic_missing(self._sink, topic, self._partitions)
        # What was said about the transaction as a whole explains more than what a call met.
        error = self._owned.log.transaction_error or error
        if error is None and batch.has_unreported:
            return faults.aborted(None, self._sink)
        if error is None:
            return SinkError(
                "sink.delivery_lost",
                f"{batch.produced} records were produced, but"
                f" {sum(r.count for r in batch.reports.values())} delivery reports came within"
                f" {self._owned.flush_timeout:.0f} s; nothing was committed",
                where=f"sink.bootstrap_servers = {self._sink.bootstrap_servers}",
                suggestion="nothing to do: the batch is retried; if this repeats, the brokers are"
                " too slow: lower read.page_rows, or see their logs",
                retriable=True,
            )
        mapped = self._fault(error, doing)
        if mapped.code == "sink.fatal" and not error.fatal():
            return faults.aborted(error, self._sink)
        return mapped

    def _refusal(self, batch: Batch, failed: list[tuple[str, KafkaError, int]]) -> SinkError | None:
        """The rows that can never be published, if that is what went wrong."""
        refused = list(batch.refused)
        by_broker = [f for f in failed if f[1].code() in faults.REFUSED_RECORD]
        if by_broker and not refused:
            if len(by_broker) > 1 and not self._owned.sends_singly:
                # The broker refuses a batch of records as one; alone, only the guilty one fails.
                self._owned.caution.sends_singly = True
                return faults.aborted(by_broker[0][1], self._sink)
            refused = [
                (t, row, faults.refuses(e, "the topic's max.message.bytes"))
                for t, e, row in by_broker
            ]
        if not refused:
            return None
        of_events = [row for row in refused if row[0] in batch.events]
        if not of_events:
            topic, _, reason = refused[0]
            if topic == self._sink.dead_topic and not self._owned.caution.reduces_dead:
                self._owned.caution.reduces_dead = True
                return faults.aborted(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE, reason), self._sink)
            return SinkError(
                "sink.side_record_refused",
                f"{topic} refuses a record even at its minimum size: {reason}",
                where=f"topic {topic}",
                suggestion=f"kafka-configs.sh --bootstrap-server {self._sink.bootstrap_servers}"
                f" --alter --entity-type topics --entity-name {topic} --add-config"
                " max.message.bytes=1048588 (or more); if [sink.properties] sets message.max.bytes,"
                " raise that to as much; if the reason is the timestamp: --delete-config"
                " message.timestamp.before.max.ms. Nothing was published",
            )
        by_topic: dict[str, list[int]] = {}
        for topic, row, _ in of_events:
            by_topic.setdefault(topic, []).append(row)
        return RecordRefusedError(by_topic, of_events[0][2])

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
            return faults.stalled(error, waited)
        return mapped
