"""A modelled Kafka: transactions, fencing, markers, and clients with the real calls and errors.

As a broker behaves towards librdkafka 2.x: a transactional id's epoch is raised by
`init_transactions` only; a commit is answered before its markers are written (`lazy_markers`); a
marker takes an offset; readers of committed records stop before the first open transaction; and an
EndTxn that was sent twice may arrive much later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_INVALID,
    KafkaError,
    KafkaException,
    TopicPartition,
)

from eventpub.config import Sink
from eventpub.sink import client
from eventpub.sink.records import FixedEvents
from tests.simulation.world import Clock, World, world

PartitionId = tuple[str, int]
BY_CLIENT, ALONE, WITH_ITS_BATCH = "!client", "!alone", "!batch"
"""What ends the payload of a record that is refused: by the client at once, by the broker alone,
or by the broker together with whatever was sent with it to its partition."""
_BY_CLIENT, _ALONE, _WITH_ITS_BATCH = (m.encode() for m in (BY_CLIENT, ALONE, WITH_ITS_BATCH))
MOST_AHEAD = 3_600_000
"""ms that a record's timestamp may be ahead of the broker's clock; `message.timestamp.after.max.ms`
of Kafka."""
ROOM = 5
"""Records that are taken at once, where many are handed over."""
_WORTHWHILE = 3
"""Records from which on they are."""


@dataclass(eq=False)
class Transaction:
    """What one producer has written since it began, and how it ended."""

    places: dict[PartitionId, int] = field(default_factory=dict)
    """place → first offset"""
    outcome: str | None = None
    """committed, aborted; None: open"""


@dataclass(eq=False)
class Owner:
    """A transactional id."""

    epoch: int = -1
    transaction: Transaction | None = None
    ending: Transaction | None = None
    """decided, its markers not yet written"""
    left_open: dict[PartitionId, Transaction] = field(default_factory=dict)
    """whose markers were left out: what the next transaction there ends with itself"""


class Message:
    """confluent_kafka.Message."""

    __slots__ = (
        "_error",
        "_headers",
        "_key",
        "_offset",
        "_place",
        "_value",
        "created",
        "cut_at",
        "is_foreign",
        "looked",
        "number",
    )

    def __init__(
        self,
        place: PartitionId,
        key: str | bytes | None,
        value: bytes | None,
        headers: list[Any],
        error: KafkaError | None = None,
        offset: int = -1,
    ) -> None:
        self._place = place
        self._key = key.encode() if isinstance(key, str) else key
        self._value = value
        self._headers = [(k, v.encode() if isinstance(v, str) else v) for k, v in headers]
        self._error = error
        self._offset = offset
        self.looked = 0
        """When who first wrote this had last asked the store for missing versions."""
        self.created = 0
        """Its timestamp, ms."""
        self.number = 0
        """Grows with each record that is appended, whatever the partition."""
        self.is_foreign = False
        """Whether another producer has written it."""
        self.cut_at: int | None = None
        """The last `number` when retention has removed it; None: it is there."""

    def error(self) -> KafkaError | None:
        """As there."""
        return self._error

    def topic(self) -> str:
        """As there."""
        return self._place[0]

    def partition(self) -> int:
        """As there."""
        return self._place[1]

    def offset(self) -> int:
        """As there."""
        return self._offset

    def key(self) -> bytes | None:
        """As there."""
        return self._key

    def value(self) -> bytes | None:
        """As there."""
        return self._value

    def timestamp(self) -> tuple[int, int]:
        """As there, but always the same: no test reads it."""
        return 1, 1

    def headers(self) -> list[tuple[str, bytes | None]]:
        """As there."""
        return self._headers

    @property
    def place(self) -> PartitionId:
        """Topic and partition."""
        return self._place

    def is_refused(self, *marks: bytes) -> bool:
        """Whether the value says that it is one that is refused."""
        return self._value is not None and self._value.endswith(marks) and not world().accepts

    def at(self, offset: int) -> Message:
        """The message where it was appended."""
        self._offset = offset
        return self


@dataclass(eq=False)
class Others:
    """A transaction of another producer.

    Attributes:
        write: begins one of its producer, as this one was.
        left: how often time passes until it ends.
        more: how many of the same length follow, each begun when half of the one before is over.
    """

    transaction: Transaction
    write: Callable[[], Transaction]
    lasts: int
    left: int
    more: int


Entry = tuple[Transaction, Message | None]
"""A record, or with None the marker of its transaction."""


class Broker:
    """The topics and the transaction coordinator."""

    def __init__(self, this: World, topics: list[str]) -> None:
        self._world = this
        self.topics = topics
        self.partitions = this.setup.partitions
        self.log: dict[PartitionId, list[Entry]] = {
            (t, p): [] for t in topics for p in range(self.partitions)
        }
        self.lows: dict[PartitionId, int] = {}
        """First offsets that retention has left, where it has cut; what is before stays in `log`,
        for the checker alone."""
        self.ids = dict.fromkeys(topics, 1)
        """Grows when a topic is made again."""
        self._appended = 0
        self.owners: dict[str, Owner] = {}
        self.others: list[Others] = []
        self.late_ends: list[tuple[str, int]] = []
        self.looked: dict[bytes, int] = {}
        """By what a record of a skip says: see `Message.looked`."""
        self.is_cut_off = False
        """Whether one of two brokers leads in its own view alone, until the end of the batch."""

    # -- transactions ----------------------------------------------------------------------------

    def take(self, name: str) -> int:
        """InitProducerId: whoever had this id is fenced, what it left open is aborted."""
        owner = self.owners.setdefault(name, Owner())
        self._settle(owner)
        if owner.epoch >= 0 and owner.transaction is not None:
            self._world.counts["left open, aborted"] += 1
            self._end(owner, "aborted")
            self._settle(owner)
        owner.epoch += 1
        return owner.epoch

    def append(self, name: str, epoch: int, message: Message, begin: bool) -> int:
        """Produce, and AddPartitionsToTxn where it is the first to the partition."""
        owner = self.owners[name]
        if owner.epoch != epoch:
            self._world.counts["fenced"] += 1
            raise _error(KafkaError.INVALID_PRODUCER_EPOCH)
        if begin:
            self._settle(owner)  # the coordinator says CONCURRENT_TRANSACTIONS until then
        if owner.transaction is None:
            if not begin:
                raise _error(KafkaError.INVALID_TXN_STATE, abort=True)
            owner.transaction = Transaction()
        place = message.topic(), message.partition()
        log = self.log[place]
        owner.transaction.places.setdefault(place, len(log))
        self._appended += 1
        message.number = self._appended
        log.append((owner.left_open.get(place, owner.transaction), message))
        return len(log) - 1

    def end(self, name: str, epoch: int, outcome: str) -> None:
        """EndTxn; answered before the markers are written."""
        owner = self.owners[name]
        if owner.epoch != epoch:
            self._world.counts["fenced"] += 1
            raise _error(KafkaError._FENCED, fatal=True)
        if owner.transaction is None:
            raise _error(KafkaError.INVALID_TXN_STATE, fatal=True)
        self._end(owner, outcome)
        if not self._world.setup.lazy_markers:
            self._settle(owner)

    def _end(self, owner: Owner, outcome: str) -> None:
        self._settle(owner)
        assert owner.transaction is not None
        owner.transaction.outcome = outcome
        owner.ending, owner.transaction = owner.transaction, None

    def _settle(self, owner: Owner) -> None:
        if owner.ending is not None:
            self._lose_decision(owner)
            # as a broker that comes back alone: none of its partitions has a leader, or all have
            left_out = self._world.fault("markers left out")
            for place, first in owner.ending.places.items():
                before = owner.left_open.pop(place, None)
                if left_out:
                    start = first if before is None else before.places[place]
                    owner.left_open[place] = still_open = Transaction({place: start})
                    log = self.log[place]
                    whose = {id(owner.ending), id(before)}
                    log[start:] = [
                        (still_open if id(t) in whose else t, message) for t, message in log[start:]
                    ]
                    continue
                if before is not None:
                    before.outcome = owner.ending.outcome
                self.log[place].append((owner.ending, None))
            owner.ending = None

    def _lose_decision(self, owner: Owner) -> None:
        """The coordinator's log has come back without the commit that it had answered."""
        assert owner.ending is not None
        if owner.ending.outcome == "committed" and self._world.fault("commit becomes abort"):
            self._world.counts["commits that became aborts"] += 1
            owner.ending.outcome = "aborted"
            owner.epoch += 1  # a transaction that is aborted for its age costs its producer the id
            if self._world.counts["commits that became aborts"] >= 3:  # as two publishers would
                self._world.may_refuse.add("sink.fenced")

    def settle(self) -> None:
        """Time passes: all markers are written, and other producers go on."""
        for owner in self.owners.values():
            self._settle(owner)
        for each in [*self.others]:
            each.left -= 1
            if each.left == each.lasts // 2 and each.more:
                self.others_begin(each.write, each.lasts, each.more - 1)
            if each.left <= 0:
                self._others_end(each)

    def others_begin(self, write: Callable[[], Transaction], lasts: int, more: int) -> None:
        """Another producer begins a transaction; see `Others`."""
        self.others.append(Others(write(), write, lasts, lasts, more))
        self._world.counts["transactions of others"] += 1

    def _others_end(self, each: Others) -> None:
        self.others.remove(each)
        each.transaction.outcome = "committed"
        for place in each.transaction.places:
            self.log[place].append((each.transaction, None))

    def time_out(self) -> None:
        """Open transactions have become too old: they are aborted, their producers fenced."""
        for each in [*self.others]:
            self._others_end(each)
        for owner in self.owners.values():
            if owner.transaction is not None:
                self._world.counts["transactions timed out"] += 1
                owner.epoch += 1
                self._end(owner, "aborted")

    def deliver_late_ends(self) -> None:
        """Second copies of an EndTxn arrive, and end whatever is open under their epoch."""
        for name, epoch in self.late_ends:
            owner = self.owners[name]
            self._world.counts["late EndTxn"] += 1
            if owner.epoch == epoch and owner.transaction is not None:
                self._world.counts["late EndTxn that ended another transaction"] += 1
                self._end(owner, "committed")
        self.late_ends.clear()

    # -- reading ---------------------------------------------------------------------------------

    def high(self, place: PartitionId) -> int:
        """The high watermark."""
        return len(self.log[place])

    def former_high(self, place: PartitionId) -> int:
        """The high watermark as a broker knows it that was cut off before the last transaction."""
        log = self.log[place]
        return log[-1][0].places.get(place, len(log)) if log else 0

    def stable(self, place: PartitionId) -> int:
        """The last stable offset."""
        end = len(self.log[place])
        for owner in self.owners.values():
            if not (owner.transaction or owner.ending or owner.left_open):
                continue
            for transaction in (owner.transaction, owner.ending, *owner.left_open.values()):
                if transaction is not None and place in transaction.places:
                    end = min(end, transaction.places[place])
        for each in self.others:
            end = min(end, each.transaction.places.get(place, end))
        return end

    def kept_from_readers(self) -> list[Message]:
        """Records of transactions that were left open."""
        return [
            message
            for owner in self.owners.values()
            for place, left_open in owner.left_open.items()
            for transaction, message in self.log[place]
            if message is not None and transaction is left_open
        ]

    def mark_cut(self, place: PartitionId) -> None:
        """Retention has removed what lies below the first offset of a partition."""
        for _, message in self.log[place][: self.lows[place]]:
            if message is not None and message.cut_at is None:
                message.cut_at = self._appended

    def read(self, place: PartitionId, start: int, committed: bool = True) -> list[Message]:
        """The records from an offset on: the committed ones up to the last stable, or all."""
        end = self.stable(place) if committed else self.high(place)
        return [
            message.at(offset)
            for offset, (transaction, message) in enumerate(self.log[place][start:end], start)
            if message is not None and (not committed or transaction.outcome == "committed")
        ]


def _error(
    code: int, *, fatal: bool = False, retriable: bool = False, abort: bool = False
) -> KafkaException:
    return KafkaException(KafkaError(code, "simulated", fatal, retriable, abort))


class Producer:
    """confluent_kafka.Producer, transactional."""

    def __init__(self, name: str, log: Any, careful: bool) -> None:
        self._careful = careful
        self._world = world()
        self._broker = self._world.broker
        self._name = name
        self._log = log
        self._epoch = -1
        self._queue: list[tuple[Message, Callable[..., None] | None]] = []
        self._unreported: list[tuple[Callable[..., None] | None, KafkaError | None, Message]] = []
        self._places: set[PartitionId] = set()
        self._bytes = 0
        self._answered = False

    def init_transactions(self, timeout: float) -> None:
        """As there."""
        self._world.point("kafka.init")
        if self._world.fault("init slow"):
            self._world.monotonic += timeout
            raise _error(KafkaError._TIMED_OUT, retriable=True)
        self._epoch = self._broker.take(self._name)
        self._world.point("kafka.taken")

    def begin_transaction(self) -> None:
        """As there."""
        self._places = set()
        self._bytes = 0
        self._answered = False

    def produce(
        self,
        topic: str,
        value: bytes | None,
        key: str | bytes | None,
        partition: int,
        callback: Callable[..., None] | None,
        on_delivery: Callable[..., None] | None,
        timestamp: int,
        headers: list[Any],
    ) -> None:
        """As there; sent at once or with `flush`."""
        del callback
        if value is not None and value.endswith(_BY_CLIENT) and not self._world.accepts:
            raise _error(KafkaError.MSG_SIZE_TOO_LARGE)
        message = Message((topic, partition), key, value, headers)
        message.looked = self._broker.looked.setdefault(value or b"", self._world.process.looked)
        message.created = timestamp
        self._queue.append((message, on_delivery))
        if self._world.setup.eager_send:
            self._send()

    def _send(self) -> None:
        queue, self._queue = self._queue, []
        spoilt: set[PartitionId] = set()
        if not (self._careful or self._world.setup.eager_send):
            spoilt = {m.place for m, _ in queue if m.is_refused(_WITH_ITS_BATCH)}
        limits = self._world.setup
        latest = self._world.clock // 1000 + MOST_AHEAD
        for message, on_delivery in queue:
            place = message.place
            if message.created > latest:
                error = _error(KafkaError.INVALID_TIMESTAMP).args[0]
                self._unreported.append((on_delivery, error, message))
                continue
            if limits.most_bytes and place[0] == self._broker.topics[0]:
                self._bytes += len(message.value() or b"")
                if self._bytes > limits.most_bytes:
                    error = _error(KafkaError._MSG_TIMED_OUT).args[0]
                    self._world.counts["timed out, too many bytes"] += 1
                    self._unreported.append((on_delivery, error, message))
                    continue
            if place in spoilt or message.is_refused(_ALONE, _WITH_ITS_BATCH):
                code = KafkaError.INVALID_RECORD
                if place in spoilt or message.is_refused(_WITH_ITS_BATCH):
                    code = KafkaError.MSG_SIZE_TOO_LARGE
                self._unreported.append((on_delivery, _error(code).args[0], message))
                continue
            if self._world.fault("record rejected"):
                self._unreported.append(
                    (on_delivery, _error(KafkaError._MSG_TIMED_OUT).args[0], message)
                )
                continue
            try:
                begin = place not in self._places
                message.at(self._broker.append(self._name, self._epoch, message, begin))
            except KafkaException as exception:
                self._unreported.append((on_delivery, exception.args[0], message))
                continue
            self._places.add(place)
            if not self._world.fault("report lost"):
                self._unreported.append((on_delivery, None, message))

    def poll(self, timeout: float) -> int:
        """As there: delivery reports."""
        del timeout
        reports, self._unreported = self._unreported, []
        for on_delivery, error, message in reports:
            if on_delivery is not None:
                on_delivery(error, message)
        return len(reports)

    def __len__(self) -> int:
        """As there, of one that was served."""
        return 0

    def flush(self, timeout: float) -> int:
        """As there."""
        self._world.point("kafka.flush")
        self._send()
        self._world.point("kafka.flushed")
        self.poll(timeout)
        return 0

    def commit_transaction(self, timeout: float) -> None:
        """As there, with the ways in which its answer may be lost or refused."""
        if self._answered:  # asked again after a time-out: the first answer has come since
            return
        this = self._world
        this.point("kafka.commit")
        if this.fault("commit refused"):
            raise _error(KafkaError.COORDINATOR_NOT_AVAILABLE, abort=True)
        if this.fault("commit lost"):
            raise _error(KafkaError._STATE, fatal=True)
        self._broker.end(self._name, self._epoch, "committed")
        this.point("kafka.committed")
        if this.fault("commit unanswered"):
            raise _error(KafkaError._FAIL, fatal=True)
        if this.fault("commit times out"):
            this.monotonic += timeout
            self._answered = True
            raise _error(KafkaError._TIMED_OUT, retriable=True)
        self._log.log(7, "", "SEND", "", "Sent EndTxnRequest")
        if this.fault("commit sent twice"):
            self._broker.late_ends.append((self._name, self._epoch))
            self._log.log(7, "", "SEND", "", "Sent EndTxnRequest")
        self._log.log(7, "", "RECV", "", "Received EndTxnResponse")

    def abort_transaction(self, timeout: float) -> None:
        """As there."""
        del timeout
        self._world.point("kafka.abort")
        self._queue.clear()
        if self._broker.owners[self._name].transaction is None and not self._places:
            return
        self._broker.end(self._name, self._epoch, "aborted")


class _Pool:
    """A pool that does one thing after the other."""

    def __init__(self, size: int, thread_name_prefix: str) -> None:
        del size, thread_name_prefix

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    map = map


class Clients(client.Clients):
    """Those of the broker of the current world."""

    def __init__(self, sink: Sink) -> None:
        pool: Any = _Pool
        super().__init__(sink, Clock(), pool)

    def producer(
        self, transactional_id: Any, client_log: client.ClientLog, *, careful: bool = False
    ) -> Any:
        """As there."""
        return Producer(transactional_id, client_log, careful)

    def bulk(self, producer: Any, rows: int) -> Any:
        """As there."""
        return Bulk(producer) if rows >= _WORTHWHILE else None

    def consumer(
        self, client_log: client.ClientLog, *, committed: bool = True, few: bool = False
    ) -> Any:
        """As there."""
        del client_log, few
        return Consumer(committed)

    def admin(self) -> Any:
        """As there."""
        return Admin(), _LOG

    def admin_of(self, servers: str) -> Any:
        """As there."""
        return Admin(int(servers[-1])), _LOG

    def asking_consumer(self, *, committed: bool) -> Any:
        """As there."""
        return AskingConsumer(committed), _LOG

    def renew(self) -> None:
        """These know nothing."""


_LOG = client.ClientLog()


class Bulk:
    """eventpub.private_apis.bulk.Bulk of such a producer."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer

    def produce(self, topic: str, events: FixedEvents, rows: Any) -> int:
        """As there; the queue is full after a few."""
        rows = rows[:ROOM]
        for row in rows.tolist():
            headers = [
                (name, value if isinstance(value, bytes) else value[row].as_py())
                for name, value in events.headers
            ]
            self._producer.produce(
                topic,
                events.values[row].as_py(),
                events.keys[row].as_py(),
                int(events.partitions[row]),
                None,
                None,
                int(events.timestamps[row]),
                [(name, value) for name, value in headers if value is not None],
            )
        return len(rows)


class Consumer:
    """confluent_kafka.Consumer, assigned its partitions."""

    def __init__(self, committed: bool) -> None:
        self._committed = committed
        self._world = world()
        self._broker = self._world.broker
        self._at: dict[PartitionId, int] = {}
        self._buffer: list[Message] = []
        self._ended: dict[PartitionId, int] = {}

    def assign(self, places: list[TopicPartition]) -> None:
        """As there."""
        self._at = {
            (p.topic, p.partition): p.offset
            for p in sorted(places, key=lambda p: (p.topic, p.partition))
        }
        self._buffer.clear()
        self._ended.clear()

    def _fetch(self) -> None:
        for place, at in self._at.items():
            if at < self._broker.lows.get(place, 0):
                self._at[place] = self._broker.high(place)  # and nothing more of it
                gone = KafkaError(KafkaError._AUTO_OFFSET_RESET)
                self._buffer.append(Message(place, None, None, [], gone, at))
                self._ended[place] = self._at[place]
                continue
            upto = self._broker.stable(place) if self._committed else self._broker.high(place)
            self._buffer += self._broker.read(place, at, self._committed)
            self._at[place] = max(at, upto)
            if self._ended.get(place) != self._at[place]:
                self._ended[place] = self._at[place]
                end = KafkaError(KafkaError._PARTITION_EOF)
                self._buffer.append(Message(place, None, None, [], end, self._at[place]))

    def pause(self, places: list[TopicPartition]) -> None:
        """As there; what is behind a range is passed over by who asked for the range."""

    def poll(self, timeout: float) -> Message | None:
        """As there."""
        del timeout
        self._world.point("kafka.read")
        if not self._buffer:
            self._fetch()
        if not self._buffer:
            self._world.monotonic += 5.0  # shorter than any real wait is dear
            self._broker.settle()
            return None
        return self._buffer.pop(0)

    def consume(self, most: int, timeout: float) -> list[Message]:
        """As there."""
        del timeout
        size = min(most, self._world.setup.fetch)
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        return taken

    def close(self) -> None:
        """As there."""


class AskingConsumer:
    """confluent_kafka.Consumer, of no partition, which asks for offsets."""

    def __init__(self, committed: bool) -> None:
        self._committed = committed

    def poll(self, timeout: float) -> None:
        """As there."""

    def offsets_for_times(
        self, wanted: list[TopicPartition], timeout: float
    ) -> list[SimpleNamespace]:
        """As there: of the beginnings, or of the ends."""
        del timeout
        this = world()
        broker = this.broker
        this.point("kafka.offsets")
        if this.fault("offsets away"):
            this.monotonic += 10.0  # for as long as anybody asks
            raise _error(KafkaError._TIMED_OUT)
        unknown = this.fault("offsets unknown")
        is_high = all(p.offset != OFFSET_BEGINNING for p in wanted) and not self._committed
        is_old = is_high and this.fault("old ends")
        broker.is_cut_off = broker.is_cut_off or is_old
        answers = []
        for place in wanted:
            key = (place.topic, place.partition)
            error, offset = None, OFFSET_INVALID
            if key not in broker.log:
                error = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)
            elif unknown:
                pass
            elif place.offset == OFFSET_BEGINNING:
                offset = broker.lows.get(key, 0)
            elif self._committed:
                offset = broker.stable(key)
            else:
                offset = broker.former_high(key) if is_old else broker.high(key)
            answers.append(
                SimpleNamespace(
                    topic=place.topic, partition=place.partition, offset=offset, error=error
                )
            )
        return answers


class _Described:
    """TopicDescription, as far as it is asked for."""

    def __init__(self, topic_id: str) -> None:
        self.topic_id = topic_id
        self.authorized_operations = None  # as where there is no authorizer

    def result(self, timeout: float) -> _Described:
        del timeout
        return self


class Admin:
    """confluent_kafka.admin.AdminClient; `number`: of the broker that it asks who leads."""

    def __init__(self, number: int = 1) -> None:
        self._number = number

    def poll(self, timeout: float) -> int:
        """As there."""
        del timeout
        return 0

    def list_topics(self, topic: object, timeout: float) -> Any:
        """As there."""
        del topic, timeout
        this = world()
        leader = self._number if this.broker.is_cut_off else 1
        one = SimpleNamespace(replicas=(1, 2), leader=leader)
        partitions = dict.fromkeys(range(this.broker.partitions), one)
        brokers = {n: SimpleNamespace(host="broker", port=n) for n in one.replicas}
        return SimpleNamespace(
            orig_broker_id=self._number,
            brokers=brokers,
            topics=dict.fromkeys(
                this.broker.topics, SimpleNamespace(error=None, partitions=partitions)
            ),
        )

    def describe_configs(self, resources: Any, request_timeout: float) -> dict[Any, Any]:
        """No setting may be read."""
        del request_timeout
        return {resource: SimpleNamespace(result=lambda _: {}) for resource in resources}

    def describe_topics(
        self, topics: Any, request_timeout: float, include_authorized_operations: bool = False
    ) -> dict[str, _Described]:
        """As there; asked so that the client connects, and for rights, which are all there."""
        del request_timeout, include_authorized_operations
        ids = world().broker.ids
        return {name: _Described(f"{name} {ids[name]}") for name in topics.topic_names}
