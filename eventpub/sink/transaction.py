"""Transactions of one transactional id: own, begin, produce, count, commit.

The last writer to call `init_transactions` for an id owns it: the broker aborts an older owner's
open transaction, and refuses whatever that one still sends.

Before a commit, delivery reports must equal the records produced. After a doubtful answer (an
error, more than a second, a lost answer of the coordinator) the producer is never used again: the
client may have sent `EndTxn` twice, and the first may still arrive and end a later transaction.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException, Producer

from eventpub.errors import EventpubError, SinkError, from_dict
from eventpub.sink import client, client_settings, faults
from eventpub.sink.base import CrashPoint, RecordRefusedError, Refused, no_crash
from eventpub.sink.batch import Batch, Caution, Producing
from eventpub.sink.client import Clients
from eventpub.sink.records import Header, PartitionId, Record

PROBE: Header = ("eventpub_probe", "1")
"""Marks records that are aborted on purpose; readers of uncommitted records see them."""

READY_TIMEOUT = 10.0
"""Seconds for `init_transactions` before the broker counts as unreachable."""
_FIRST_TIMEOUT = 60.0
"""The same at a start: a new broker first creates the topic of transactions."""
COMMIT_TIMEOUT = 30.0
"""Seconds without an answer after which a commit is indefinite."""
ABORT_TIMEOUT = 5.0
"""Seconds for an abort; what it leaves open, the next owner's `init_transactions` aborts."""
DOUBT_AFTER = 1.0
"""Seconds; a slower commit or abort is doubtful."""

cautions: dict[tuple[str, str], Caution] = {}
"""By bootstrap servers and transactional id."""

_log_is_strange = threading.Event()


def transactional_id(app_id: str, number: int | str) -> str:
    return f"eventpub.{app_id}.{number}"


def fence_all(clients: Clients, app_id: str, upto: int) -> None:
    """Fence the writers of shards 0 to `upto` − 1 and end their transactions, before any fold.

    `upto` is at least every shard count used before; the topic's partition count is enough. A
    writer with a former shard count could still write to partitions that now are another shard's.
    """
    if clients.sink.delivery != "exactly_once" or upto <= 0:
        return
    with clients.pool(min(upto, 8), thread_name_prefix="eventpub-fence") as pool:
        for _ in pool.map(lambda number: fence(clients, app_id, number), range(upto)):
            pass


def fence(clients: Clients, app_id: str, number: int | str) -> None:
    """Take over an id and give it up."""
    with TransactionWriter(clients, app_id, number, _FIRST_TIMEOUT):
        pass


class TransactionWriter:
    """Owns a transactional id from `ready()` until another writer takes it over.

    Attributes:
        sends_singly: one record per record batch.
        is_transactional: batches are transactions; without them nothing is fenced.
        needs_replacement: it must not be used again.
        flush_timeout: seconds until undelivered records are given up.
        message_limit: largest record that the client accepts, bytes.
    """

    def __init__(
        self, clients: Clients, app_id: str, number: int | str, timeout: float | None = None
    ) -> None:
        self._clients, self._sink, self._clock = clients, clients.sink, clients.clock
        self.is_transactional = clients.sink.delivery == "exactly_once"
        id_ = transactional_id(app_id, number)
        self._id = id_ if self.is_transactional else None
        self.log = client.ClientLog()
        self.caution = cautions.setdefault((clients.sink.bootstrap_servers, id_), Caution())
        self.sends_singly = self.caution.sends_singly
        self.needs_replacement = self._is_slow = False
        self._producing = Producing(clients, self)
        self._began, self._timeout, self._closed = 0.0, timeout, False
        self._failure: dict[str, Any] | None = None
        self._producer: Producer | None = None
        conf = client_settings.producer_settings(self._sink, self._id)
        self._commit_slice = min(5.0, int(conf["socket.timeout.ms"]) / 2000)
        message_timeout = int(conf.get("message.timeout.ms") or conf["delivery.timeout.ms"]) / 1000
        self.flush_timeout, self._advances_within = message_timeout + 5.0, message_timeout / 2
        self.message_limit = int(conf["message.max.bytes"])

    def __enter__(self) -> TransactionWriter:
        try:
            self.ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- ownership --------------------------------------------------------------------------------

    def ready(self) -> None:
        """Own the id: older owners are fenced, their transactions over.

        Raises:
            SinkError: `sink.unreachable`, `sink.auth_failed`, `sink.not_authorized`,
                `sink.transactions_refused`, `sink.fenced`, `sink.fatal`.
        """
        if self._producer is not None or self._closed:
            return
        if self._failure is not None:  # who was fenced does not fence back
            raise from_dict(self._failure)
        try:
            try:
                self._producer = self._take_over()
            except SinkError as error:
                # librdkafka's own retry may fence its first attempt.
                if error.code not in {"sink.fenced", "sink.own_request_late"}:
                    raise
                self._producer = self._take_over()
        except EventpubError as error:
            # without its frames, which keep the producer alive, and taking over
            self.needs_replacement, self._failure = True, error.to_dict()
            raise

    def _take_over(self) -> Producer:
        producer = self._clients.producer(self._id, self.log, careful=self.sends_singly)
        timeout = READY_TIMEOUT if self._timeout is None else self._timeout
        started, doing = self._clock.monotonic(), "taking over the shard"
        while self.is_transactional:
            try:
                client.call(producer.init_transactions, 0.5)
                break
            except KafkaException as exception:
                error = faults.kafka_error(exception)
                try:
                    client.call(producer.poll, 0)  # hands over what the client has met
                except KafkaException as fatal:
                    error = faults.kafka_error(fatal)
                if not error.retriable():
                    raise faults.fault(error, doing, self._sink) from exception
                last = self.log.last_error
                if last is not None and faults.is_refusal(last):
                    raise faults.auth_failed(self._sink, last) from exception
                waited = self._clock.monotonic() - started
                if waited > timeout:
                    last = last or error
                    raise faults.unreachable(self._sink, doing, waited, last) from exception
        return producer

    def close(self) -> None:
        """Release the producer; the next owner aborts its open transaction. May be repeated."""
        self._closed = True
        producer, self._producer = self._producer, None
        if producer is not None:
            client.let_go(producer)

    @property
    def client(self) -> Producer:
        """The client's producer; raises `sink.fatal` if it was closed."""
        if self._producer is None:
            raise SinkError("sink.fatal", "this sink is closed")
        return self._producer

    def serve(self) -> None:
        """Fetch log lines, errors and delivery reports; the client keeps them, some 300 B each."""
        try:
            client.call(self.client.poll, 0)
        except KafkaException as exception:
            # Fatal errors are raised here, too; the call that met one reports it.
            self.needs_replacement = True
            client.log.debug("poll: %s", faults.says(faults.kafka_error(exception)))

    # -- transactions (without exactly once, plain batches) ---------------------------------------

    def run(
        self,
        parts: Iterable[Batch],
        crash_point: CrashPoint = no_crash,
        check: Callable[[Batch], None] = lambda _: None,
        on_refusal: Callable[[RecordRefusedError], None] | None = None,
    ) -> None:
        """Run one transaction; each part is requested when the previous one is delivered.

        `check` is called after each delivery; an exception ends the transaction. `on_refusal` is
        called for each part with refused rows; the other parts are tried, but nothing is committed.
        """
        refusal: RecordRefusedError | None = None
        crash_point("before_begin")
        self._begin()
        crash_point("after_begin")
        for batch in parts:
            try:
                self._deliver(batch, crash_point)
                check(batch)
            except RecordRefusedError as error:
                if on_refusal is None:
                    raise
                on_refusal(error)
                refusal = error
                self.begin_again()
        if refusal is not None:
            raise self.abort() or refusal
        crash_point("before_commit")
        self._commit()
        self.caution.forget()
        crash_point("after_commit")

    def run_aborted(self, places: Iterable[PartitionId]) -> None:
        """Abort a record in each partition, to end what the broker has left open of this id."""
        client.log.warning("ending transactions that the broker has left open: %s", sorted(places))
        now = int(self._clock.time() * 1000)
        batch = Batch({}, [(t, Record("", b"", p, now, [PROBE])) for t, p in sorted(places)])
        self._begin()
        self._deliver(batch, no_crash)
        if (error := self.abort()) is not None:
            raise error

    def _begin(self) -> None:
        if self.needs_replacement:
            raise faults.aborted(None, self._sink)
        self.serve()
        self.log.forget()
        self._began, self._is_slow = self._clock.monotonic(), False
        if not self.is_transactional:
            return
        try:
            client.call(self.client.begin_transaction)
        except KafkaException as exception:
            self.needs_replacement = True
            error = faults.kafka_error(exception)
            raise self._fault(error, "beginning a transaction") from exception

    def _deliver(self, batch: Batch, crash_point: CrashPoint) -> None:
        accepts_loss = self._sink.delivery == "at_most_once"
        try:
            self._producing.produce(batch, crash_point)
            if accepts_loss or not batch.refused:
                crash_point("after_produce")
                self.wait_for_delivery(batch)
        except KafkaException as exception:
            raise self._undo(faults.kafka_error(exception), batch) from exception
        if not accepts_loss and (batch.refused or not batch.is_delivered):
            raise self._undo(None, batch)

    def begin_again(self) -> bool:
        """Begin another transaction with a new producer, unless this one cannot be aborted."""
        if self.abort() is not None:
            return False
        client.let_go(self.client)
        self._producer, self.needs_replacement = None, True
        self._producer, self.needs_replacement = self._take_over(), False
        self._begin()
        self.needs_replacement = True  # nothing is committed any more
        return True

    def wait_for_delivery(self, batch: Batch) -> bool:
        """Wait until nothing is queued; False if something has failed or takes too long."""
        before, advanced, began = 1 << 62, self._began, self._clock.monotonic()
        while True:
            left, now = client.call(self.client.flush, 0.1), self._clock.monotonic()
            has_failed = bool(batch.failed()) or self.log.transaction_error is not None
            if has_failed or now - began >= self.flush_timeout or not left:
                is_advancing = now - advanced < self._advances_within
                self._is_slow = self.is_transactional and has_failed and is_advancing
                return not left
            if left < before:
                before, advanced = left, now

    def _commit(self) -> None:
        if not self.is_transactional:
            return
        error = self._end(self.client.commit_transaction, COMMIT_TIMEOUT)
        if error is not None and error.txn_requires_abort():
            raise self.abort() or faults.aborted(error, self._sink)
        if error is not None:
            mapped = self._fault(error, "committing")
            if mapped.code in {"sink.unreachable", "sink.fatal"}:
                raise faults.indefinite(error, self._sink)
            raise mapped
        if self.log.is_strange:
            self.needs_replacement = True
            if not _log_is_strange.is_set():
                _log_is_strange.set()
                client.log.warning(
                    "librdkafka's log does not show commits in the form that eventpub expects"
                    " (confluent-kafka %s), so the producer is replaced and the topic read back"
                    " after each transaction: nothing is lost or repeated, at some 60 ms each",
                    confluent_kafka.__version__,
                )

    def abort(self) -> SinkError | None:
        """Abort; returns an error only if it says more than what led here."""
        if not self.is_transactional:
            return None
        error = self._end(self.client.abort_transaction, ABORT_TIMEOUT)
        if error is None or error.retriable():
            return None
        mapped = self._fault(error, "aborting")
        return None if mapped.code == "sink.fatal" else mapped

    def _end(self, end: Callable[[float], None], seconds: float) -> KafkaError | None:
        """Commit or abort; returns what the client met instead of an answer."""
        started = self._clock.monotonic()
        while True:
            try:
                client.call(end, min(self._commit_slice, seconds))
                break
            except KafkaException as exception:
                self.needs_replacement = True
                error = faults.kafka_error(exception)
                if not error.retriable() or self._clock.monotonic() - started > seconds:
                    return error
        self.serve()
        took = self._clock.monotonic() - started
        self.needs_replacement |= took > DOUBT_AFTER or self.log.in_doubt
        return None

    def _undo(self, error: KafkaError | None, batch: Batch) -> SinkError:
        """Abort, and find the cause: the refused rows, else the first failure."""
        worse = None if error is not None and error.fatal() else self.abort()
        # The next commit would undo an abort that the broker leaves open, and an abort may end more
        # than this transaction: only a fold sees either. Without transactions, queued records must
        # not be sent after the caller has begun again.
        self.needs_replacement = True
        self.caution.reports_each |= batch.has_unreported
        self.serve()  # an abort brings the last delivery reports
        return worse or self._cause(error, batch)

    def _cause(self, error: KafkaError | None, batch: Batch) -> SinkError:
        failed = batch.failed()
        if batch.has_unreported:  # the retry, one by one, finds all refused records
            met = [self.log.transaction_error, *(e for _, e, _ in failed)]
            if any(e is not None and e.code() in faults.REFUSED_RECORD for e in met):
                self.caution.sends_singly = True
            failed = [f for f in failed if f[1].code() not in faults.REFUSED_RECORD]
        if refusal := self._refusal(batch, failed):
            return refusal
        if failed:
            topic, error, _ = failed[0]
            if error.code() in faults.MISSING:
                return faults.topic_missing(self._sink, topic)
        # The transaction's own error explains more than what one call met.
        error = self.log.transaction_error or error
        if error is None and batch.has_unreported:
            return faults.aborted(None, self._sink)
        if error is None:
            counts = batch.produced, batch.delivered
            return faults.delivery_lost(self._sink, *counts, self.flush_timeout)
        mapped = self._fault(error, "producing")
        if mapped.code == "sink.fatal" and not error.fatal():
            return faults.aborted(error, self._sink)
        return mapped

    def _refusal(self, batch: Batch, failed: list[tuple[str, KafkaError, int]]) -> SinkError | None:
        """The error for rows that can never be published, if they are the cause."""
        refused = list(batch.refused)
        by_broker = [f for f in failed if f[1].code() in faults.REFUSED_RECORD]
        if by_broker and not refused:
            if len(by_broker) > 1 and not self.sends_singly:
                # A record batch is refused as a whole; sent singly, only the bad record fails.
                self.caution.sends_singly = True
                return faults.aborted(by_broker[0][1], self._sink)
            refused = [(t, row, faults.refuses(e)) for t, e, row in by_broker]
        if not refused:
            return None
        by_topic: Refused = {}
        for topic, row, reason in refused:
            if topic in batch.events:
                by_topic.setdefault(topic, {})[row] = reason
        if by_topic:
            return RecordRefusedError(by_topic)
        topic, _, reason = refused[0]
        if topic == self._sink.dead_topic and not self.caution.reduces_dead:
            self.caution.reduces_dead = True
            return faults.aborted(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE, reason), self._sink)
        return faults.side_record_refused(self._sink, topic, reason)

    def _fault(self, error: KafkaError, doing: str) -> SinkError:
        """As `faults.fault`, but one that expired was not fenced, nor is a slow broker away."""
        self.serve()  # its log lines show whether the broker was silent
        mapped = faults.fault(error, doing, self._sink)
        waited = self._clock.monotonic() - self._began
        is_fenced = mapped.code in {"sink.fenced", "sink.own_request_late"}
        is_slow = doing == "producing" and self._is_slow and mapped.code == "sink.unreachable"
        has_expired = is_fenced and waited * 1e6 >= self._sink.transaction_timeout
        return faults.stalled(error, waited) if has_expired or is_slow else mapped
