"""Owning a shard: a transactional id, and the older owners that taking it fences.

Whoever calls `init_transactions` last for an id owns it: the broker aborts what an older owner has
open, and refuses whatever that one still sends.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from confluent_kafka import KafkaException, Producer

from eventpub import config
from eventpub.sink import client, faults

READY_TIMEOUT = 10.0
"""Seconds that `init_transactions` may take before the broker counts as away."""

_FIRST_TIMEOUT = 60.0
"""The same at a start: a new broker first makes the topic that keeps the transactions."""


def transactional_id(app_id: str, number: int | str) -> str:
    """The id that a newer owner of the shard fences the older ones by."""
    return f"eventpub.{app_id}.{number}"


def fence_all(sink: config.Sink, app_id: str, upto: int) -> None:
    """Fences the writers of shards 0 to `upto` − 1 and ends their transactions.

    To be called at the start of a run, before any shard is folded, with the largest number of
    shards that may have been used before: the topic's partitions are always enough. Without it, a
    writer of a former number of shards could still write, or hold a transaction open, on
    partitions that belong to another shard now.

    Raises:
        SinkError: as `ShardSink.ready`.
    """
    if sink.delivery != "exactly_once" or upto <= 0:
        return

    def fence(number: int) -> None:
        client_log = client.ClientLog()
        producer = client.producer(sink, transactional_id(app_id, number), client_log)
        take_over(sink, producer, client_log, lambda: False, _FIRST_TIMEOUT)

    with ThreadPoolExecutor(min(upto, 8), thread_name_prefix="eventpub-fence") as pool:
        for _ in pool.map(fence, range(upto)):
            pass


def try_transactions(sink: config.Sink, app_id: str) -> None:
    """Takes a transactional id that no shard has, to see whether the broker lets us.

    Raises:
        SinkError: as `ShardSink.ready`.
    """
    client_log = client.ClientLog()
    producer = client.producer(sink, transactional_id(app_id, "doctor"), client_log)
    take_over(sink, producer, client_log, lambda: False, _FIRST_TIMEOUT)


def take_over(
    sink: config.Sink,
    producer: Producer,
    client_log: client.ClientLog,
    cancelled: Callable[[], bool],
    timeout: float = READY_TIMEOUT,
) -> None:
    """Takes the producer's id over; returns early, without it, once `cancelled`.

    Args:
        timeout: seconds without an answer after which the broker counts as away.

    Raises:
        SinkError: as `ShardSink.ready`.
    """
    started = time.monotonic()
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
                raise faults.fault(error, doing, sink) from exception
            last_error = client_log.last_error
            if last_error is not None and faults.is_refusal(last_error):
                raise faults.auth_failed(sink, last_error) from exception
            waited = time.monotonic() - started
            if waited > timeout:
                raise faults.unreachable(sink, doing, waited, last_error or error) from exception
