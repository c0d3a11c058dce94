"""Queries brokers for partitions, ids, rights, offsets and open transactions; creates topics.

No query waits for ever for a broker that is silent or leads no longer. Each may raise
`sink.unreachable`, `sink.auth_failed`, `sink.not_authorized` or `sink.topic_missing`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Literal

from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    OFFSET_INVALID,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import NewTopic  # type: ignore[attr-defined]  # not in its stubs

from eventpub import config
from eventpub.errors import SinkError
from eventpub.sink import client, faults
from eventpub.sink.client import ClientLog, Clients
from eventpub.sink.records import PartitionId

REACH_TIMEOUT = 10.0
"""Seconds without an answer after which a broker counts as unreachable."""

MARKER_TIMEOUT = 2.0
"""Seconds by which a marker may follow the answer that its transaction is over."""
_ENDED_WITHIN = 3 * MARKER_TIMEOUT
"""Seconds within which ended transactions must be seen as ended."""

_NO_IDS = {"", "None", "AAAAAAAAAAAAAAAAAAAAAA", "AAAAAAAAAAAAAAAAAAAAAQ"}

_FIRST_PATIENCE = 2.0
"""Seconds for the known leader of a partition to answer; doubled with each retry."""

End = Literal["earliest", "latest"]

Meanwhile = Callable[[], None]
"""Called repeatedly while reading or waiting; an exception ends that."""

_NO_TOPIC = faults.MISSING | {KafkaError.TOPIC_AUTHORIZATION_FAILED}


def partition_counts(clients: Clients, timeout: float | None = None) -> dict[str, int]:
    """Partition count of each topic that this client may see."""
    return counts_of(metadata(clients, timeout=timeout))


def counts_of(cluster: Any) -> dict[str, int]:
    return {
        name: len(topic.partitions)
        for name, topic in cluster.topics.items()
        if topic.error is None and topic.partitions
    }


def metadata(clients: Clients, topic: str | None = None, timeout: float | None = None) -> Any:
    """Brokers, and one topic or all, with partitions and leaders."""
    timeout = REACH_TIMEOUT if timeout is None else timeout
    met: KafkaError | None = None
    for admin, client_log, patience in _tries(clients, clients.admin, timeout):
        try:
            return client.call(admin.list_topics, topic, patience)
        except KafkaException as exception:
            _serve(admin)
            met = client_log.last_error or faults.kafka_error(exception)
            if faults.is_refusal(met):
                raise faults.auth_failed(clients.sink, met) from exception
    raise faults.unreachable(clients.sink, "asking for the topics", timeout, met)


def topic_ids(
    clients: Clients, names: Iterable[str], timeout: float = REACH_TIMEOUT
) -> dict[str, str]:
    """Kafka's topic ids; a recreated topic has another one.

    Leaves out topics that do not exist, may not be described, or have no id (brokers before 2.8).
    """
    found: dict[str, str] = {}
    if not (asking := set(names)):
        return found
    met: KafkaError | None = None
    for admin, client_log, patience in _tries(clients, clients.admin, timeout):
        for name, answer in described(clients, asking, patience).items():
            if isinstance(answer, KafkaError):
                met = answer
                if met.code() == KafkaError._TIMED_OUT:
                    continue
                if met.code() not in _NO_TOPIC | faults.MOMENTARY:
                    _serve(admin)
                    raise faults.fault(
                        client_log.last_error or met, "describing topics", clients.sink
                    )
            elif (id_ := str(answer.topic_id)) not in _NO_IDS:
                found[name] = id_
            asking.discard(name)
        if not asking:
            return found
        # It asks only the broker that it knows as the controller, whoever else answers.
        _serve(admin)
        met = client_log.last_error or met
    raise faults.unreachable(clients.sink, "describing topics", timeout, met)


def _tries(
    clients: Clients, asking: Callable[[], tuple[Any, ClientLog]], timeout: float
) -> Iterator[tuple[Any, ClientLog, float]]:
    """Yield a client per attempt, its log, and the attempt's timeout (s), while there is time.

    A silent broker may lead no longer: the next query, also after giving up, has new clients,
    which find the leader.
    """
    deadline = clients.clock.monotonic() + timeout
    patience, failed = min(_FIRST_PATIENCE, timeout), None
    while True:
        asked, client_log = asking()
        _serve(asked)  # what it has logged since the last call
        client_log.forget()
        client_log.failed_connection = client_log.failed_connection or failed
        yield asked, client_log, patience
        failed = client_log.failed_connection
        clients.renew()
        left = deadline - clients.clock.monotonic()
        if left <= 0:
            return
        clients.clock.sleep(0.1)
        patience = min(2 * patience, max(left, _FIRST_PATIENCE))


def described(
    clients: Clients, names: Iterable[str], timeout: float, *, with_rights: bool = False
) -> dict[str, Any]:
    """Per topic, its description or a KafkaError."""
    admin, _ = clients.admin()
    futures = admin.describe_topics(
        TopicCollection(sorted(names)),
        include_authorized_operations=with_rights,
        request_timeout=timeout,
    )
    answers: dict[str, Any] = {}
    for name, future in futures.items():
        try:
            answers[name] = future.result(timeout + 5)
        except TimeoutError:
            answers[name] = KafkaError(KafkaError._TIMED_OUT)
        except KafkaException as exception:
            answers[name] = faults.kafka_error(exception)
    return answers


def visible_ends(
    clients: Clients,
    places: Sequence[PartitionId] | None = None,
    timeout: float = REACH_TIMEOUT,
) -> dict[PartitionId, int]:
    """Last stable offsets, by default of all partitions of the topic."""
    if places is None:
        count = partition_counts(clients, timeout).get(clients.sink.topic, 0)
        places = [(clients.sink.topic, number) for number in range(count)]
    optional = frozenset(clients.sink.topics[1:])
    return list_offsets(
        clients, list(places), "latest", committed=True, optional=optional, timeout=timeout
    )


def _serve(admin: Any) -> None:
    try:
        client.call(admin.poll, 0)
    except KafkaException:
        return


def create(
    clients: Clients,
    topics: list[str],
    partitions: int,
    policy: str = "delete",
) -> dict[str, int]:
    """Create topics unless they exist; returns the partition counts of all topics."""
    admin, _ = clients.admin()
    new = [
        NewTopic(
            topic,
            partitions,
            clients.sink.replication_factor,
            # Records have the time of their event, so retention by time would delete an old store's
            # events on arrival. Settings not given here are the broker's defaults.
            config={"retention.ms": "-1", "retention.bytes": "-1", "cleanup.policy": policy},
        )
        for topic in topics
    ]
    created: dict[str, Future[None]] = admin.create_topics(new, request_timeout=REACH_TIMEOUT)
    for topic, future in created.items():
        try:
            future.result(REACH_TIMEOUT + 5)
        except KafkaException as exception:
            error = faults.kafka_error(exception)
            if error.code() == KafkaError.TOPIC_ALREADY_EXISTS:
                continue
            if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
                raise faults.rights_missing(clients.sink, {topic: ["Create"]}) from exception
            raise faults.fault(error, f"creating the topic {topic}", clients.sink) from exception
    return _wait_for(clients, topics)


def _wait_for(clients: Clients, topics: list[str]) -> dict[str, int]:
    # A broker answers "created" before all brokers' metadata has the topic.
    deadline = clients.clock.monotonic() + REACH_TIMEOUT
    while True:
        found = partition_counts(clients)
        missing = [t for t in topics if t not in found]
        if not missing:
            # … and before its partitions have a leader that answers.
            list_offsets(clients, [(t, p) for t in topics for p in range(found[t])], "latest")
            return found
        if clients.clock.monotonic() > deadline:
            raise faults.topic_missing(clients.sink, missing[0])
        clients.clock.sleep(0.05)


def list_offsets(  # noqa: PLR0913 (options, by keyword)
    clients: Clients,
    partitions: list[PartitionId],
    end: End,
    *,
    committed: bool = False,
    optional: frozenset[str] = frozenset(),
    timeout: float = REACH_TIMEOUT,
) -> dict[PartitionId, int]:
    """The low or high watermark, or with `committed` the last stable offset, of each partition.

    Leaves out missing topics that are `optional`. Queries a consumer: librdkafka's admin client
    (up to 2.16) frees its request twice if the topic's metadata changes meanwhile
    (docs/hazards.md, "A question for offsets").
    """
    at = OFFSET_BEGINNING if end == "earliest" else OFFSET_END
    return _ask(
        *(clients, partitions, at, lambda _, offset: offset >= 0),
        committed=committed,
        optional=optional,
        timeout=timeout,
    )


def offsets_at(
    clients: Clients, places: Iterable[PartitionId], millis: int
) -> dict[PartitionId, int]:
    """Offsets below which no record has a timestamp at or after `millis` (ms since 1970)."""
    ends = list_offsets(clients, list(places), "latest", committed=True)

    def is_answer(place: PartitionId, offset: int) -> bool:
        # anything else is the query's own value: no answer
        return offset == OFFSET_END or 0 <= offset <= ends[place]

    found = _ask(clients, list(ends), millis, is_answer, committed=True, timeout=2 * REACH_TIMEOUT)
    return {place: ends[place] if at == OFFSET_END else at for place, at in found.items()}


def _ask(  # noqa: PLR0913 (options, by keyword)
    clients: Clients,
    partitions: list[PartitionId],
    at: int,
    is_answer: Callable[[PartitionId, int], bool],
    *,
    committed: bool,
    optional: frozenset[str] = frozenset(),
    timeout: float,
) -> dict[PartitionId, int]:
    """Query offsets until each partition has answered; a lost connection gives no answer."""
    offsets: dict[PartitionId, int] = {}
    if not (asking := set(partitions)):
        return offsets
    met: KafkaError | None = None
    missing: str | None = None
    asks = partial(clients.asking_consumer, committed=committed)
    for consumer, client_log, patience in _tries(clients, asks, timeout):
        missing = None
        for place, offset, error in _asked(clients, consumer, sorted(asking), at, patience):
            if error is None:
                if is_answer(place, offset):
                    offsets[place] = offset
                    asking.discard(place)
            elif error.code() in faults.MISSING and place[0] in optional:
                asking.discard(place)
            elif error.code() in faults.MISSING:
                missing = place[0]  # or so new that this broker does not know of it
            elif error.code() not in faults.MOMENTARY | faults.AWAY:
                raise faults.fault(error, f"asking for offsets of {place[0]}", clients.sink)
            else:
                met = error
        if not asking:
            return offsets
        _serve(consumer)
        met = client_log.last_error or met
    if missing is not None:
        raise faults.topic_missing(clients.sink, missing)
    raise faults.unreachable(clients.sink, "asking for offsets", timeout, met)


def open_below(
    clients: Clients,
    ends: Mapping[PartitionId, int],
    patience: float,
    meanwhile: Meanwhile = lambda: None,
    timeout: float = REACH_TIMEOUT,
) -> dict[PartitionId, int]:
    """Wait up to `patience` seconds until no transaction is open below these offsets.

    Returns:
        The last stable offset of each partition where one is still open.
    """
    deadline = clients.clock.monotonic() + patience
    while True:
        stable = list_offsets(clients, list(ends), "latest", committed=True, timeout=timeout)
        held = {place: stable[place] for place, end in ends.items() if stable[place] < end}
        if not held or clients.clock.monotonic() >= deadline:
            return held
        meanwhile()
        clients.clock.sleep(0.02)


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


def _asked(
    clients: Clients, consumer: Any, places: list[PartitionId], at: int, patience: float
) -> Iterator[tuple[PartitionId, int, KafkaError | None]]:
    """Per partition, its offset (negative: none), or the error."""
    try:
        asked = [TopicPartition(topic, number, at) for topic, number in places]
        for answer in client.call(consumer.offsets_for_times, asked, patience):
            yield (answer.topic, answer.partition), answer.offset, answer.error
    except KafkaException as exception:
        error = faults.kafka_error(exception)
        if error.code() != KafkaError._UNKNOWN_PARTITION:
            for place in places:
                yield place, OFFSET_INVALID, error
            return
        # it knows none of them, and does not say why
        why = described(clients, {topic for topic, _ in places}, patience)
        for place in places:
            answer = why.get(place[0])
            yield place, OFFSET_INVALID, answer if isinstance(answer, KafkaError) else error
