"""Why a transaction was undone, and what the next sink of the shard does differently because of it.

A sink that has failed is replaced, so what it has learned is kept here, by owner, until a batch was
published.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaError

from eventpub import config
from eventpub.errors import SinkError
from eventpub.sink import faults
from eventpub.sink.batch import Batch
from eventpub.sink.owned_producer import OwnedProducer
from eventpub.terminal import counted


@dataclass
class Caution:
    """How the next sinks of one owner produce.

    Attributes:
        sends_singly: each record is sent by itself, to find the ones that the broker refuses.
        reports_each: a report of each record is asked for, to find what went wrong with the batch.
        reduces_dead: dead letters have key, version and reason alone, since one was refused.
    """

    sends_singly: bool = False
    reports_each: bool = False
    reduces_dead: bool = False

    def forget(self) -> None:
        """A batch was published."""
        self.sends_singly = self.reports_each = self.reduces_dead = False


_by_owner: dict[tuple[str, str], Caution] = {}


def caution_of(owner: tuple[str, str]) -> Caution:
    """The caution of an owner: bootstrap servers and transactional id."""
    return _by_owner.setdefault(owner, Caution())


class RecordRefusedError(SinkError):
    """The broker or the client will never take some records; nothing of the batch was published.

    Args:
        rows: indices into the events given to `publish`.
        diverted_rows: indices into its `diverted`.
        reason: what the refusal said.

    Attributes:
        by_topic: the rows of each topic.
    """

    def __init__(self, rows: Sequence[int], diverted_rows: Sequence[int], reason: str, topic: str):
        super().__init__(
            "sink.record_refused",
            f"{counted(len(rows) + len(diverted_rows), 'record')} can never be published: {reason}",
            where=f"topic {topic}",
            suggestion="if the size is the reason, raise the topic's max.message.bytes and, in"
            " [sink.properties], message.max.bytes",
            retriable=True,
        )
        self.by_topic: dict[str, list[int]] = {}
        self.rows = list(rows)
        self.diverted_rows = list(diverted_rows)
        self.reason = reason

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "type": SinkError.__name__}


def aborted(error: KafkaError | None, sink: config.Sink) -> SinkError:
    """Nothing was published, and the same may be tried again."""
    why = "" if error is None else f" ({faults.says(error)})"
    return SinkError(
        "sink.aborted",
        f"the transaction was aborted, nothing was published{why}",
        where=f"topic {sink.topic}",
        suggestion="nothing to do: the next transaction publishes the same events; if this"
        " repeats, see the broker's log",
        retriable=True,
    )


class Causes:
    """Finds them, and what the next sink of the shard has to do because of them.

    Args:
        owned: the producer, and what it has said of the transaction.
        caution: for the next one.
        fault: of an error of the client, by what it was doing.
    """

    def __init__(
        self,
        sink: config.Sink,
        partitions: int,
        owned: OwnedProducer,
        caution: Caution,
        fault: Callable[[KafkaError, str], SinkError],
    ) -> None:
        self._sink = sink
        self._partitions = partitions
        self._owned = owned
        self._caution = caution
        self._fault = fault

    def find(self, error: KafkaError | None, doing: str, batch: Batch) -> SinkError:
        """What to raise.

        Args:
            error: which the client has raised; None: none.
            doing: what it was doing.
            batch: what came of it.
        """
        if not self._owned.is_transactional:
            # What is still queued must not be sent after the caller has begun again.
            self._owned.needs_replacement = True
        failed = batch.failed()
        if batch.has_unreported:  # the next try, one by one, tells all that is refused
            by_broker = [
                e for e in (self._owned.log.transaction_error, *(e for _, e, _ in failed)) if e
            ]
            if any(e.code() in faults.REFUSED_RECORD for e in by_broker):
                self._caution.sends_singly = True
            failed = [f for f in failed if f[1].code() not in faults.REFUSED_RECORD]
        if batch.refused or failed:
            refusal = self._refusal(batch, failed)
            if refusal is not None:
                return refusal
            topic, error, _ = failed[0]
            if error.code() in faults.MISSING:
                return faults.topic_missing(self._sink, topic, self._partitions)
        # What was said about the transaction as a whole explains more than what a call met.
        error = self._owned.log.transaction_error or error
        if error is None and batch.has_unreported:
            return aborted(None, self._sink)
        if error is None:
            self._owned.needs_replacement = True
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
            return aborted(error, self._sink)
        return mapped

    def _refusal(self, batch: Batch, failed: list[tuple[str, KafkaError, int]]) -> SinkError | None:
        """The rows that can never be published, if that is what went wrong."""
        refused = list(batch.refused)
        by_broker = [f for f in failed if f[1].code() in faults.REFUSED_RECORD]
        if by_broker and not refused:
            if len(by_broker) > 1 and not self._owned.sends_singly:
                # The broker refuses a batch of records as one; alone, only the guilty one fails.
                self._caution.sends_singly = True
                self._owned.needs_replacement = True
                return aborted(by_broker[0][1], self._sink)
            refused = [
                (t, row, faults.refuses(e, "the topic's max.message.bytes"))
                for t, e, row in by_broker
            ]
        if not refused:
            return None
        of_events = [row for row in refused if row[0] in batch.events]
        if not of_events:
            topic, _, reason = refused[0]
            if topic == self._sink.dead_topic and not self._caution.reduces_dead:
                self._caution.reduces_dead = True
                self._owned.needs_replacement = True
                return aborted(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE, reason), self._sink)
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
        refused = of_events
        topic, _, reason = refused[0]
        refusal = RecordRefusedError(
            rows=[row for t, row, _ in refused if t == self._sink.topic],
            diverted_rows=[row for t, row, _ in refused if t == self._sink.late_topic],
            reason=reason,
            topic=topic,
        )
        for name, row, _ in refused:
            refusal.by_topic.setdefault(name, []).append(row)
        return refusal
