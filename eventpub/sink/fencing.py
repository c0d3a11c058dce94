"""Fences former owners, and ends transactions a broker has left open (see `missing_markers`)."""

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
"""Seconds for `init_transactions` before the broker counts as unreachable."""
_FIRST_TIMEOUT = 60.0
"""The same at a start: a new broker first creates the topic of transactions."""
_ENDED_WITHIN = 3 * MARKER_TIMEOUT
"""Seconds within which ended transactions must be seen as ended."""


def transactional_id(app_id: str, number: int | str) -> str:
    return f"eventpub.{app_id}.{number}"


def fence_all(clients: Clients, app_id: str, upto: int) -> None:
    """Fence the writers of shards 0 to `upto` − 1 and end their transactions, before any fold.

    `upto` is at least every shard count used before; the topic's partition count is enough. A
    writer with a former shard count could still write to partitions that now are another shard's.
    """
    if clients.sink.delivery != "exactly_once" or upto <= 0:
        return
    ids = [transactional_id(app_id, number) for number in range(upto)]
    with clients.pool(min(upto, 8), thread_name_prefix="eventpub-fence") as pool:
        for _ in pool.map(lambda id_: _fence(clients, id_), ids):
            pass


def try_transactions(clients: Clients, app_id: str) -> None:
    """Check that the broker allows transactions, by taking an id that no shard has."""
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
    """Take over the producer's id, or return early once `cancelled`; `timeout` in seconds."""
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
    """`stable`: last stable offset; `end`: high watermark; `seconds`: time without progress."""
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
    """Raise `sink.hanging_transaction` if a fenced id has one open: its outcome is undecided."""
    ends = list_offsets(clients, [*places], "latest")
    for place, stable in open_below(clients, ends, MARKER_TIMEOUT).items():
        if is_held_by(clients, app_id, place, stable, ends[place]):
            raise hanging(clients.sink, place, stable, ends[place], MARKER_TIMEOUT)


def is_held_by(clients: Clients, app_id: str, place: PartitionId, stable: int, end: int) -> bool:
    """Whether the transaction open between last stable offset and high watermark is this id's."""
    first = next(iter_ranges(clients, {place: (stable, end)}, committed=False, few=True), None)
    return first is not None and records.is_ours(dict(first.headers() or ()), {app_id})


def end_all(
    clients: Clients,
    places: Collection[PartitionId],
    end_open: Callable[[Mapping[PartitionId, int]], None],
    meanwhile: Meanwhile = lambda: None,
) -> None:
    """Wait until no transaction is open below these partitions' current ends.

    `end_open` ends open ones, by last stable offset; it is called if waiting does not help, and
    `sink.hanging_transaction` is raised if that does not.
    """
    ends = list_offsets(clients, [*places], "latest")
    if held := open_below(clients, ends, MARKER_TIMEOUT, meanwhile):
        end_open(held)
        # the marker of the transaction that ended it may be missing, too
        ends |= list_offsets(clients, list(held), "latest")
        held = open_below(clients, ends, _ENDED_WITHIN, meanwhile)
    for place, stable in sorted(held.items()):
        raise hanging(clients.sink, place, stable, ends[place], _ENDED_WITHIN)
