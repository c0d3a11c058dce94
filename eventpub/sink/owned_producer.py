"""Owning a shard: a transactional id, and the older owners that taking it fences.

The last producer to call `init_transactions` for an id owns it: the broker aborts what an older has
open, and refuses whatever that one still sends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from confluent_kafka import KafkaException, Producer

from eventpub.errors import SinkError
from eventpub.sink import client, client_settings, faults
from eventpub.sink.client import Clients

_TAKEOVER_TIMEOUT = 3.0
"""Seconds that a sink which is closed waits for its own takeover of the shard."""
READY_TIMEOUT = 10.0
"""Seconds that `init_transactions` may take before the broker counts as away."""

_FIRST_TIMEOUT = 60.0
"""The same at a start: a new broker first creates the topic of the transactions."""


def transactional_id(app_id: str, number: int | str) -> str:
    """The id that a newer owner of the shard fences the older ones by."""
    return f"eventpub.{app_id}.{number}"


def fence_all(clients: Clients, app_id: str, upto: int) -> None:
    """Fences the writers of shards 0 to `upto` − 1 and ends their transactions.

    To be called at the start of a run, before any shard is folded, with the largest number of
    shards that may have been used before: the topic's partitions are always enough. Without it, a
    writer of a former number of shards could still write, or hold a transaction open, on
    partitions that belong to another shard now.

    Raises:
        SinkError: as `OwnedProducer.ready`.
    """
    if clients.sink.delivery != "exactly_once" or upto <= 0:
        return

    ids = [transactional_id(app_id, number) for number in range(upto)]
    with clients.pool(min(upto, 8), thread_name_prefix="eventpub-fence") as pool:
        for _ in pool.map(lambda id_: _fence(clients, id_), ids):
            pass


def try_transactions(clients: Clients, app_id: str) -> None:
    """Takes a transactional id that no shard has, to see whether the broker lets us.

    Raises:
        SinkError: as `OwnedProducer.ready`.
    """
    _fence(clients, transactional_id(app_id, "doctor"))


def _fence(clients: Clients, id_: str) -> None:
    client_log = client.ClientLog()
    producer = clients.producer(id_, client_log)
    take_over(clients, producer, client_log, lambda: False, _FIRST_TIMEOUT)


def take_over(
    clients: Clients,
    producer: Producer,
    client_log: client.ClientLog,
    cancelled: Callable[[], bool],
    timeout: float = READY_TIMEOUT,
) -> None:
    """Takes the producer's id over; returns early, without it, once `cancelled`.

    Args:
        timeout: seconds without an answer after which the broker counts as away.

    Raises:
        SinkError: as `OwnedProducer.ready`.
    """
    started = clients.clock.monotonic()
    doing = "taking over the shard"
    while not cancelled():
        try:
            client.call(producer.init_transactions, 0.5)
            return
        except KafkaException as exception:
            error = faults.kafka_error(exception)
            try:
                client.call(producer.poll, 0)  # hands over what the client has met
            except KafkaException as fatal:
                error = faults.kafka_error(fatal)
            if not error.retriable():
                raise faults.fault(error, doing, clients.sink) from exception
            last_error = client_log.last_error
            if last_error is not None and faults.is_refusal(last_error):
                raise faults.auth_failed(clients.sink, last_error) from exception
            waited = clients.clock.monotonic() - started
            if waited > timeout:
                raise faults.unreachable(
                    clients.sink, doing, waited, last_error or error
                ) from exception


@dataclass
class Caution:
    """What the producers of one transactional id do until a batch was published.

    A producer that has failed is replaced, so what it has learned is kept here.

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


cautions: dict[tuple[str, str], Caution] = {}
"""By bootstrap servers and transactional id."""


class OwnedProducer:
    """Owns the shard from `ready()` until another one is made for it.

    Args:
        app_id, number: of the application and the shard (or the replay), for the transactional id.

    Attributes:
        caution: of its transactional id.
        sends_singly: whether it sends each record by itself.
        is_transactional: whether batches are transactions; fencing is by these.
        log: what the client says of itself.
        needs_replacement: True when it must not be used again.
        commit_slice: seconds of one call that waits for a commit.
        flush_timeout: seconds until records that were not delivered are given up.
        message_limit: bytes of the largest record that the client takes.
    """

    def __init__(self, clients: Clients, app_id: str, number: int | str) -> None:
        self._clients, self._sink = clients, clients.sink
        self.is_transactional = clients.sink.delivery == "exactly_once"
        id_ = transactional_id(app_id, number)
        self._id = id_ if self.is_transactional else None
        self.log = client.ClientLog()
        self.caution = cautions.setdefault((clients.sink.bootstrap_servers, id_), Caution())
        self.sends_singly = self.caution.sends_singly
        self._closed = False
        self._failure: BaseException | None = None
        self._producer: Producer | None = None
        conf = client_settings.producer_settings(self._sink, self._id)
        self.commit_slice = min(5.0, int(conf["socket.timeout.ms"]) / 2000)
        self.flush_timeout = (
            int(conf.get("message.timeout.ms") or conf["delivery.timeout.ms"]) / 1000 + 5.0
        )
        self.message_limit = int(conf["message.max.bytes"])
        self.needs_replacement = False
        name = f"eventpub-sink-{number}"
        self._starting = clients.thread(target=self._start, name=name, daemon=True)
        self._starting.start()

    def _start(self) -> None:
        try:
            try:
                producer = self._made()
            except SinkError as error:
                # A request that librdkafka repeats by itself may fence its own first try.
                if error.code not in {"sink.fenced", "sink.own_request_late"}:
                    raise
                producer = self._made()
            if not self._closed:
                self._producer = producer
        except BaseException as error:  # handed to the thread that asks ready()
            self._failure = error

    def _made(self) -> Producer:
        producer = self._clients.producer(self._id, self.log, careful=self.sends_singly)
        if self.is_transactional:
            take_over(self._clients, producer, self.log, lambda: self._closed)
        return producer

    def ready(self) -> None:
        """Waits until the shard is owned: older owners are fenced, their transactions over.

        Raises:
            SinkError: `sink.unreachable`, `sink.auth_failed`, `sink.not_authorized`,
                `sink.transactions_refused`, `sink.fenced`, `sink.fatal`.
        """
        self._starting.join(READY_TIMEOUT + 10)
        if self._starting.is_alive():
            self.needs_replacement = True
            raise faults.unreachable(self._sink, "taking over the shard", READY_TIMEOUT + 10, None)
        if self._failure is not None:
            self.needs_replacement = True
            raise self._failure

    def close(self) -> None:
        """Lets go of the producer; an open transaction is left to the next owner, which aborts it.

        May be called at any time, more than once. Waits for nothing but the shard's takeover, where
        `ready` was not called: a request still in flight would fence the next owner.
        """
        self._starting.join(_TAKEOVER_TIMEOUT)
        self._closed = True
        producer, self._producer = self._producer, None
        if producer is not None:
            client.let_go(producer)

    @property
    def client(self) -> Producer:
        """The client's producer.

        Raises:
            SinkError: `sink.fatal`: it was let go.
        """
        if self._producer is None:
            raise SinkError("sink.fatal", "this sink is closed")
        return self._producer

    def serve(self) -> None:
        """Lets the client hand over its log lines, errors and delivery reports.

        It keeps them until they are fetched, some 300 B each.
        """
        try:
            client.call(self.client.poll, 0)
        except KafkaException as exception:
            # A fatal error is raised here as well; the call that met it says so, too.
            self.needs_replacement = True
            client.log.debug("poll: %s", faults.says(faults.kafka_error(exception)))
