"""A producer that owns one shard: it is made, and older owners fenced, in a thread of its own."""

from __future__ import annotations

import threading

from confluent_kafka import KafkaException, Producer

from eventpub import config
from eventpub.errors import SinkError
from eventpub.sink import client, faults, fencing

_TAKEOVER_TIMEOUT = 3.0
"""Seconds that a sink which is closed waits for its own takeover of the shard."""


class OwnedProducer:
    """Owns the shard from `ready()` until another one is made for it.

    Args:
        sink: the configuration.
        app_id, number: of the application and the shard (or the replay), for the transactional id.
        sends_singly: send each record by itself.

    Attributes:
        is_transactional: whether batches are transactions; fencing is by these.
        log: what the client says of itself.
        needs_replacement: True when it must not be used again.
        commit_slice: seconds of one call that waits for a commit.
        flush_timeout: seconds until records that were not delivered are given up.
        message_limit: bytes of the largest record that the client takes.
    """

    def __init__(
        self, sink: config.Sink, app_id: str, number: int | str, *, sends_singly: bool = False
    ) -> None:
        self._sink = sink
        self.is_transactional = sink.delivery == "exactly_once"
        self._id = fencing.transactional_id(app_id, number) if self.is_transactional else None
        self.log = client.ClientLog()
        self.sends_singly = sends_singly
        self._closed = False
        self._failure: BaseException | None = None
        self._producer: Producer | None = None
        conf = client.producer_settings(sink, self._id)
        self.commit_slice = min(5.0, int(conf["socket.timeout.ms"]) / 2000)
        self.flush_timeout = (
            int(conf.get("message.timeout.ms") or conf["delivery.timeout.ms"]) / 1000 + 5.0
        )
        self.message_limit = int(conf["message.max.bytes"])
        self.needs_replacement = False
        self._starting = threading.Thread(
            target=self._start, name=f"eventpub-sink-{number}", daemon=True
        )
        self._starting.start()

    def _start(self) -> None:
        try:
            producer = client.producer(self._sink, self._id, self.log, careful=self.sends_singly)
            if self.is_transactional:
                try:
                    fencing.take_over(self._sink, producer, self.log, lambda: self._closed)
                except SinkError as error:
                    # A request that librdkafka repeats by itself may fence its own first try.
                    if error.code not in {"sink.fenced", "sink.own_request_late"}:
                        raise
                    producer = client.producer(
                        self._sink, self._id, self.log, careful=self.sends_singly
                    )
                    fencing.take_over(self._sink, producer, self.log, lambda: self._closed)
            if not self._closed:
                self._producer = producer
        except BaseException as error:  # handed to the thread that asks ready()
            self._failure = error

    def ready(self) -> None:
        """Waits until the shard is owned: older owners are fenced, their transactions over.

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

    @property
    def client(self) -> Producer:
        """It.

        Raises:
            SinkError: `sink.fatal`: it was let go.
        """
        if self._producer is None:
            raise SinkError("sink.fatal", "this sink is closed")
        return self._producer

    def serve(self) -> None:
        """Lets the client hand over its log lines, errors and delivery reports."""
        try:
            client.call(self.client.poll, 0)
        except KafkaException as exception:
            # A fatal error is raised here as well; the call that met it says so, too.
            self.needs_replacement = True
            client.log.debug("poll: %s", faults.says(faults.kafka_error(exception)))
