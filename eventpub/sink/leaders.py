"""Which broker leads a partition, as reported by more than one broker.

A broker that is cut off from the others, and not from us, goes on to answer for what it led, with
ends that are old. What must hold: nothing that follows from an end which has fallen, or has not
grown, is believed of one broker alone where another one answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from confluent_kafka import KafkaException

from eventpub.errors import SinkError
from eventpub.sink import client, faults
from eventpub.sink.client import Clients
from eventpub.sink.topics import REACH_TIMEOUT

_PATIENCE = 2.0
"""Seconds that one broker has to answer."""


def tail_gone(clients: Clients, place: tuple[str, int], saved: int, end: int) -> SinkError:
    """What it means that a partition ends before what was written to it.

    Its last records are gone, unless its brokers do not agree who leads it, or some do not answer.
    """
    topic, partition = place
    metadata = _metadata(clients, topic)
    found = _partitions(metadata, topic).get(partition)
    by_broker = {
        number: _partitions_said_by(clients, metadata, number, topic).get(partition)
        for number in (() if found is None else found.replicas)
    }
    leaders = {n: None if said is None else said.leader for n, said in by_broker.items()}
    if len(set(leaders.values())) < 2:
        return faults.records_gone(clients.sink, place, saved, end)
    why = f"one has answered with the end {end}, but {saved} was reached before"
    return _disagree(clients, place, leaders, why)


def check_leaders(clients: Clients, places: Iterable[tuple[str, int]]) -> None:
    """Check that a second broker names the same leaders for these partitions.

    If no second broker answers, it is unknown.

    Raises:
        SinkError: `sink.unreachable`: they do not agree, or none answers; ….
    """
    numbers: dict[str, set[int]] = {}
    for topic, partition in places:
        numbers.setdefault(topic, set()).add(partition)
    for topic, partitions in numbers.items():
        metadata = _metadata(clients, topic)
        first = metadata.orig_broker_id  # -1: of one whose number was not known yet
        found = {p: led for p, led in _partitions(metadata, topic).items() if p in partitions}
        alone = {p: led.leader for p, led in found.items() if first in {led.leader, -1}}
        for number in sorted({number for p in alone for number in found[p].replicas} - {first}):
            said = _partitions_said_by(clients, metadata, number, topic)
            for partition in alone.keys() & said.keys():
                if (leader := said[partition].leader) != alone[partition]:
                    both = {first: alone[partition], number: leader}
                    raise _disagree(clients, (topic, partition), both, "ends may be old")
                if number != leader:
                    del alone[partition]
            if not alone:
                break


def _disagree(
    clients: Clients, place: tuple[str, int], leaders: Mapping[int, int | None], why: str
) -> SinkError:
    clients.renew()  # the old one may ask the wrong broker for 15 minutes
    words = ", ".join(
        f"broker {number} {'does not answer' if leader is None else f'says {leader}'}"
        for number, leader in sorted(leaders.items())
    )
    return SinkError(
        "sink.unreachable",
        f"the brokers disagree about the leader of {place[0]}[{place[1]}] ({words}); {why}",
        where=f"sink.bootstrap_servers = {clients.sink.bootstrap_servers}",
        suggestion="look for a broker that is cut off from the others; publishing resumes when they"
        " agree",
        retriable=True,
    )


def _metadata(clients: Clients, topic: str) -> Any:
    admin, _ = clients.admin()
    try:
        return client.call(admin.list_topics, topic, REACH_TIMEOUT)
    except KafkaException as exception:
        error = faults.kafka_error(exception)
        clients.renew()
        raise faults.fault(error, "asking who leads", clients.sink) from exception


def _partitions_said_by(clients: Clients, metadata: Any, number: int, topic: str) -> dict[int, Any]:
    """A topic's partitions as one broker knows them; none where it does not answer."""
    broker = metadata.brokers.get(number)
    if broker is None:
        return {}
    host = f"[{broker.host}]" if ":" in broker.host else broker.host
    with suppress(KafkaException):
        # its first question goes to the only broker that it knows
        alone, _ = clients.admin_of(f"{host}:{broker.port}")
        return _partitions(client.call(alone.list_topics, topic, _PATIENCE), topic)
    return {}


def _partitions(metadata: Any, topic: str) -> dict[int, Any]:
    return metadata.topics[topic].partitions or {}
