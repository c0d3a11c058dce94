"""What others have open: owners of before are fenced, and what the broker has left open is ended.

A coordinator that finds a partition without a leader while it writes a transaction's markers takes
the partition for deleted, leaves the marker out, and calls the transaction complete (Kafka 4.3.1).
Such a transaction stays open until its producer ends another one there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from confluent_kafka import KafkaException, Producer

from eventpub import config
from eventpub.errors import SinkError
from eventpub.sink import client, faults, records
from eventpub.sink.client import Clients
from eventpub.sink.reading import MARKER_TIMEOUT, iter_ranges
from eventpub.sink.records import PartitionId
from eventpub.sink.topics import Meanwhile, list_offsets, open_below

READY_TIMEOUT = 10.0
"""Seconds that `init_transactions` may take before the broker counts as away."""
_FIRST_TIMEOUT = 60.0
"""The same at a start: a new broker first creates the topic of the transactions."""
_ENDED_WITHIN = 3 * MARKER_TIMEOUT
"""Seconds in which what was ended in partitions is to be seen as ended."""


def transactional_id(app_id: str, number: int | str) -> str:
    """The id that a newer owner of a shard fences the older ones by."""
    return f"eventpub.{app_id}.{number}"


def fence_all(clients: Clients, app_id: str, upto: int) -> None:
    """Fence the writers of shards 0 to `upto` − 1 and end their transactions.

    Before any shard is folded, with the largest number of shards that may have been used before
    (the topic's partitions are always enough): a writer of a former number of shards could still
    write to partitions that belong to another shard now.
    """
    if clients.sink.delivery != "exactly_once" or upto <= 0:
        return
    ids = [transactional_id(app_id, number) for number in range(upto)]
    with clients.pool(min(upto, 8), thread_name_prefix="eventpub-fence") as pool:
        for _ in pool.map(lambda id_: _fence(clients, id_), ids):
            pass


def try_transactions(clients: Clients, app_id: str) -> None:
    """Take a transactional id that no shard has, to see whether the broker allows it."""
    _fence(clients, transactional_id(app_id, "doctor"))


def _fence(clients: Clients, id_: str) -> None:
    client_log = client.ClientLog()
    producer = clients.producer(id_, client_log)
    take_over(clients, producer, client_log, timeout=_FIRST_TIMEOUT)


def take_over(
    clients: Clients,
    producer: Producer,
    client_log: client.ClientLog,
    cancelled: Callable[[], bool] = lambda: False,
    timeout: float | None = None,
) -> None:
    """Take the producer's id over; returns early, without it, once `cancelled`.

    Args:
        timeout: seconds without an answer after which the broker counts as away.
    """
    timeout = READY_TIMEOUT if timeout is None else timeout
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
            last = client_log.last_error
            if last is not None and faults.is_refusal(last):
                raise faults.auth_failed(clients.sink, last) from exception
            waited = clients.clock.monotonic() - started
            if waited > timeout:
                raise faults.unreachable(clients.sink, doing, waited, last or error) from exception


def hanging(
    sink: config.Sink, place: PartitionId, stable: int, end: int, seconds: float
) -> SinkError:
    """What holds a partition, and how an operator ends it.

    Args:
        stable: the last stable offset.
        end: what could not be reached.
        seconds: for how long.
    """
    topic, partition = place
    tool = f"kafka-transactions.sh --bootstrap-server {sink.bootstrap_servers}"
    return SinkError(
        "sink.hanging_transaction",
        f"an open transaction holds {topic}[{partition}]: last stable offset {stable},"
        f" high watermark {end}, no progress for {seconds:.0f} s",
        where=f"topic {topic}",
        suggestion="make sure its producer is no longer running, since an abort discards its"
        f" records: {tool} find-hanging --topic {topic} --partition {partition}; then {tool}"
        f" abort --topic {topic} --partition {partition} --start-offset {stable}",
        retriable=True,
    )


def require_none_left_open(clients: Clients, app_id: str, places: Collection[PartitionId]) -> None:
    """Check that no transaction of an id is open in partitions, when its producers are fenced.

    Else its records would be visible, or not, by the outcome of whatever is written there next.

    Raises:
        SinkError: `sink.hanging_transaction`, or as `check_topics`.
    """
    ends = list_offsets(clients, [*places], "latest")
    for place, stable in open_below(clients, ends, MARKER_TIMEOUT).items():
        if is_held_by(clients, app_id, place, stable, ends[place]):
            raise hanging(clients.sink, place, stable, ends[place], MARKER_TIMEOUT)


def is_held_by(clients: Clients, app_id: str, place: PartitionId, stable: int, end: int) -> bool:
    """Whether the open transaction that holds a partition is one of this id.

    Args:
        stable: the last stable offset, where that transaction begins.
        end: the high watermark.
    """
    first = next(iter_ranges(clients, {place: (stable, end)}, committed=False, few=True), None)
    return first is not None and records.is_ours(dict(first.headers() or ()), {app_id})


def end_all(
    clients: Clients,
    places: Collection[PartitionId],
    end_open: Callable[[Mapping[PartitionId, int]], None],
    meanwhile: Meanwhile = lambda: None,
) -> None:
    """Wait until no transaction is open before the ends of these partitions as they are now.

    Args:
        end_open: ends what a writer has open in partitions; called where waiting does not help.

    Raises:
        SinkError: `sink.hanging_transaction`.
    """
    ends = list_offsets(clients, [*places], "latest")
    if held := open_below(clients, ends, MARKER_TIMEOUT, meanwhile):
        end_open(held)
        # the marker of what has ended it may be left out as well
        ends |= list_offsets(clients, list(held), "latest")
        held = open_below(clients, ends, _ENDED_WITHIN, meanwhile)
    for place, stable in sorted(held.items()):
        raise hanging(clients.sink, place, stable, ends[place], _ENDED_WITHIN)
