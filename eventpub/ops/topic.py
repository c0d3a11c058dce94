"""Reading the topic as any service would: an independent witness.

This shares no code with the sink: what it says about the topic must not depend on the code that
wrote it. It sees committed records only, from the low to the high watermark, and a partition that
cannot be read to its end (a transaction that hangs open) is an error, never an end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    Consumer,
    KafkaError,
    KafkaException,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient

from eventpub import config
from eventpub.errors import SinkError
from eventpub.ops.records import (
    DEAD,
    DIVERTED,
    EVENT,
    GAP,
    Foreign,
    Message,
    Parser,
    Place,
    Records,
)
from eventpub.tokens import TokenProvider

Chosen = Callable[[bytes], bool]
"""Whether the aggregate with a key is looked at."""

_SHARED_PROPERTIES = (
    "security.", "sasl.", "ssl.", "enable.ssl.", "enable.sasl.", "https.", "client.", "socket.",
    "broker.", "metadata.", "topic.", "reconnect.", "retry.", "api.version.", "debug", "check.crcs",
)  # fmt: skip
"""How brokers are reached. Without what limits sizes: a producer's limit above what a consumer
fetches at once is refused, though the broker sends a larger record all the same."""

_LARGEST_ANSWER = 2_147_483_647
"""Bytes, the most that librdkafka takes: a record that is in the topic can be read."""

_MOMENTARY = frozenset(
    {
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError._TRANSPORT,
        KafkaError._DESTROY_BROKER,
    }
)
"""What a partition says until its leader is known to all."""

_log = logging.getLogger("eventpub.verify")
_client_log = logging.getLogger("eventpub.verify.client")
_client_log.setLevel(logging.ERROR)

POLL_ROWS = 2_000  # more of them at once do not stay in a core's cache
_POLL_BYTES = 8 << 20
"""So much is taken at once where records are large: the values of a chunk are held together."""
CALL_SECONDS = 8.0
STALL_SECONDS = 60.0
MARGIN_MS = 60_000
"""Of the time from which on a topic is read, should its timestamps not be `create_time`."""


@dataclass
class Topic:
    """What was found beside the records.

    Attributes:
        partitions: of the topic itself.
        truncated: partitions whose first records are gone, and may be some that were to be read.
        foreign: the first records that are not ours, of those that count.
        foreign_count: how many there are.
    """

    partitions: int
    truncated: set[int] = field(default_factory=set)
    foreign: list[Foreign] = field(default_factory=list)
    foreign_count: int = 0
    read: int = 0


class TopicReader:
    """Reads a publisher's topics once, to what is there now.

    Args:
        sink: the section `[sink]`.
        sources: the application's ids, now and before, one of which every event names.
        patience: seconds to wait for open transactions to end.
        first: `create_time` of the earliest events that count, µs, and the timestamp of the
            earliest records that are not ours and count: the topic is read from there on; None:
            from its first record.
        last: the timestamp of the last records that are not ours and count, µs; None: no bound.
    """

    def __init__(
        self,
        sink: config.Sink,
        sources: Collection[str],
        patience: float = 15.0,
        *,
        first: int | None = None,
        last: int | None = None,
    ) -> None:
        self._sink = sink
        self._first, self._last = first, last
        self._parser = Parser(sources, self._found_foreign)
        self._patience = patience
        self._trouble: KafkaError | None = None
        self._kinds = {
            sink.topic: EVENT,
            sink.dead_topic: DEAD,
            sink.late_topic: DIVERTED,
            sink.gaps_topic: GAP,
        }
        self.topic = Topic(0)

    def check(self) -> None:
        """Whether there is a topic to read, before anything takes long.

        Raises:
            SinkError: as `read`.
        """
        self.places()

    def read(self) -> Iterator[Records]:
        """All records, in chunks; of each partition in order.

        Raises:
            SinkError: sink.unreachable, sink.auth_failed, sink.topic_missing,
                sink.hanging_transaction, sink.read_stalled, sink.not_authorized.
        """
        yield from self.consume(self.spans(self.places()))

    def places(self) -> list[Place]:
        """The partitions of the topic and its side topics.

        Raises:
            SinkError: as `read`.
        """
        try:
            return self._partitions(AdminClient(self._settings(), logger=_client_log))
        except KafkaException as e:
            raise self._mapped(e.args[0], self._sink.topic) from e

    def spans(self, places: Collection[Place]) -> dict[Place, tuple[int, int]]:
        """Where each partition is read from, and its end, once no transaction is open below it.

        Raises:
            SinkError: as `read`.
        """
        settings = self._settings() | {"group.id": f"eventpub-verify-{self._sink.topic}"}
        every = Consumer(settings | {"isolation.level": "read_uncommitted"}, logger=_client_log)
        committed = Consumer(settings | {"isolation.level": "read_committed"}, logger=_client_log)
        try:
            return self._ends(committed, every, [TopicPartition(t, p) for t, p in places])
        except KafkaException as e:
            raise self._mapped(e.args[0], self._sink.topic) from e
        finally:
            every.close()
            committed.close()

    def consume(
        self, spans: Mapping[Place, tuple[int, int]], chosen: Chosen | None = None
    ) -> Iterator[Records]:
        """The records of some partitions from an offset up to another, in chunks.

        Args:
            chosen: whose records are looked at; None: all.

        Raises:
            SinkError: as `read`.
        """
        consumer = Consumer(
            self._settings()
            | {
                "group.id": f"eventpub-verify-{self._sink.topic}",
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "error",
                "fetch.wait.max.ms": 100,
                "fetch.queue.backoff.ms": 2,  # else it rests for a second where we are too slow
                "queued.min.messages": 20_000,
                "queued.max.messages.kbytes": 8_192,
                "fetch.max.bytes": 4_194_304,
                "max.partition.fetch.bytes": 1_048_576,
            },
            logger=_client_log,
        )
        try:
            for name in self._kinds:
                ends = {p: span for (topic, p), span in spans.items() if topic == name}
                yield from self._consume(consumer, name, ends, chosen)
        except KafkaException as e:
            raise self._mapped(e.args[0], self._sink.topic) from e
        finally:
            consumer.close()

    def _settings(self) -> dict[str, Any]:
        tokens: dict[str, Any] = {}
        if self._sink.token_provider is not None:
            properties = self._sink.properties.get("sasl.oauthbearer.config", "")
            tokens["oauth_cb"] = TokenProvider(self._sink.token_provider, properties)
        return tokens | {
            "bootstrap.servers": self._sink.bootstrap_servers,
            "error_cb": self._remember,
            "enable.sparse.connections": False,
            "receive.message.max.bytes": _LARGEST_ANSWER,
            **{
                name: value
                for name, value in self._sink.properties.items()
                if name.startswith(_SHARED_PROPERTIES)
            },
        }

    def _remember(self, error: KafkaError) -> None:
        if error.code() != KafkaError._ALL_BROKERS_DOWN or self._trouble is None:
            self._trouble = error

    def _partitions(self, admin: AdminClient) -> list[Place]:
        known = admin.list_topics(timeout=CALL_SECONDS).topics
        found: list[Place] = []
        for name in self._kinds:
            if name in known and known[name].error is None:
                found += [(name, p) for p in sorted(known[name].partitions)]
        self.topic.partitions = sum(name == self._sink.topic for name, _ in found)
        if not self.topic.partitions:
            raise SinkError(
                "sink.topic_missing",
                f"there is no topic {self._sink.topic}",
                where="sink.topic",
                suggestion="check sink.topic and sink.bootstrap_servers; `eventpub run` creates it",
            )
        return found

    def _offsets(
        self, consumer: Consumer, partitions: list[TopicPartition], at: int
    ) -> dict[tuple[str, int], int]:
        """What this consumer sees of each partition.

        Args:
            at: OFFSET_BEGINNING; OFFSET_END; or a time, ms: the first record that is not older,
                whatever is before and behind it, -1 where there is none.
        """
        deadline = time.monotonic() + CALL_SECONDS
        found: dict[tuple[str, int], int] = {}
        while True:
            left = [
                TopicPartition(tp.topic, tp.partition, at)
                for tp in partitions
                if (tp.topic, tp.partition) not in found
            ]
            met = KafkaError(KafkaError._TRANSPORT, "no offset was given")
            try:
                answers = consumer.offsets_for_times(left, CALL_SECONDS)
            except KafkaException as e:
                met, answers = e.args[0], []
            for answer in answers:
                if answer.error is not None:
                    met = answer.error
                elif answer.offset != at:  # else: the connection was lost before the answer
                    found[answer.topic, answer.partition] = answer.offset
            if len(found) == len(partitions):
                return found
            # a topic that was just created, or a broker that was just started
            if met.code() not in _MOMENTARY or time.monotonic() > deadline:
                raise KafkaException(met)
            time.sleep(0.1)

    def _ends(
        self, committed: Consumer, every: Consumer, partitions: list[TopicPartition]
    ) -> dict[tuple[str, int], tuple[int, int]]:
        """As `spans`."""
        kept = self._offsets(every, partitions, OFFSET_BEGINNING)
        ends = self._offsets(every, partitions, OFFSET_END)
        first = kept | self._since(every, partitions, ends)
        deadline = time.monotonic() + self._patience
        while True:
            stable = self._offsets(committed, partitions, OFFSET_END)
            hanging = {at: stable[at] for at in ends if stable[at] < ends[at]}
            if not hanging:
                break
            if time.monotonic() > deadline:
                (name, number), offset = next(iter(hanging.items()))
                raise SinkError(
                    "sink.hanging_transaction",
                    f"{name} partition {number} has a transaction open since offset {offset}; its"
                    f" end is {ends[name, number]}, and {len(hanging)} partitions are like that",
                    where=name,
                    suggestion="start the publisher, which ends its own; or find whose it is:"
                    f" kafka-transactions.sh --bootstrap-server {self._sink.bootstrap_servers}"
                    " find-hanging --broker-id <id>",
                    retriable=True,
                )
            time.sleep(0.2)
        for (name, number), offset in first.items():
            if name == self._sink.topic and 0 < offset == kept[name, number]:
                self.topic.truncated.add(number)
        return {at: (first[at], end) for at, end in ends.items()}

    def _since(
        self, every: Consumer, partitions: list[TopicPartition], ends: Mapping[Place, int]
    ) -> dict[Place, int]:
        """Where to read the topic's partitions from; empty: from their first record.

        That is the first record in the order of offsets that is no older than the events that
        count, whatever is behind it: a record's timestamp is the `create_time` of its event. The
        marker that ends a transaction has the time at which it was written, so nothing is spared
        where a backlog was published since.

        Args:
            ends: of the partitions, asked for before.
        """
        if self._first is None or (time_ms := self._first // 1000 - MARGIN_MS) <= 0:
            return {}
        events = [tp for tp in partitions if tp.topic == self._sink.topic]
        found = self._offsets(every, events, time_ms)
        return {at: ends[at] if offset < 0 else offset for at, offset in found.items()}

    def _consume(
        self,
        consumer: Consumer,
        name: str,
        spans: Mapping[int, tuple[int, int]],
        chosen: Chosen | None,
    ) -> Iterator[Records]:
        left = {p: end for p, (first, end) in spans.items() if end > first}
        if not left:
            return
        consumer.assign([TopicPartition(name, p, spans[p][0]) for p in left])
        progressed_at = time.monotonic()
        rows = 1
        while left:
            messages: list[Message] = consumer.consume(rows, 0.1)
            if not messages:
                if time.monotonic() - progressed_at > STALL_SECONDS:
                    number = next(iter(left))
                    if self._trouble is not None:
                        raise self._mapped(self._trouble, name)
                    raise SinkError(
                        "sink.read_stalled",
                        f"nothing was read from {name} partition {number} for"
                        f" {STALL_SECONDS:.0f} s, before its end at {left[number]}",
                        where=name,
                        suggestion="look at the broker's log for this partition",
                        retriable=True,
                    )
                continue
            progressed_at = time.monotonic()
            largest = max(map(len, messages))  # of their values
            rows = max(1, min(POLL_ROWS, 4 * rows, _POLL_BYTES // max(1, largest)))
            yield self._parse(messages, name, left, chosen)

    def _parse(
        self, messages: list[Message], name: str, left: dict[int, int], chosen: Chosen | None
    ) -> Records:
        """Take the records apart; partitions that have reached their end leave `left`."""
        ended = []
        marks = [message for message in messages if message.error() is not None]
        if marks:
            ended = [m.partition() for m in marks if self._is_end(m, name, left)]
            messages = [message for message in messages if message.error() is None]
        partitions = np.fromiter((m.partition() for m in messages), np.int32, len(messages))
        offsets = np.fromiter((m.offset() for m in messages), np.int64, len(messages))
        reached: dict[Place, int] = {}
        kept = np.zeros(len(messages), np.bool_)
        for partition in np.unique(partitions).tolist():
            if (end := left.get(partition)) is None:
                continue
            own = partitions == partition
            kept |= own & (offsets < end)
            upto = int(offsets[own].max()) + 1
            reached[name, partition] = min(upto, end)
            if upto >= end:
                del left[partition]
        for partition in ended:
            if (end := left.pop(partition, None)) is not None:
                reached[name, partition] = end
        self.topic.read += int(kept.sum())
        kind = self._kinds[name]
        if chosen is not None and kind != GAP:
            for at in np.flatnonzero(kept).tolist():
                key = messages[at].key()
                kept[at] = key is None or chosen(key)
        if not kept.all():
            messages = [messages[at] for at in np.flatnonzero(kept).tolist()]
            partitions, offsets = partitions[kept], offsets[kept]
        records = self._parser.parse(messages, kind, partitions, offsets)
        if chosen is not None and kind == GAP:
            names: list[Any] = records.ids.to_pylist()
            records = records.only([chosen(name.encode()) for name in names])
        records.reached = reached
        return records

    def _found_foreign(self, record: Foreign) -> None:
        micros = record.timestamp * 1000
        if record.timestamp and (
            (self._first is not None and micros + 999 < self._first)
            or (self._last is not None and micros > self._last)
        ):
            return
        self.topic.foreign_count += 1
        if len(self.topic.foreign) < 20:
            self.topic.foreign.append(record)

    def _is_end(self, message: Message, name: str, left: Mapping[int, int]) -> bool:
        """Whether a message that is no record says that a partition has no more."""
        error = message.error()
        if error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
            return False  # no group is joined, so that no right on one is needed
        if error.code() != KafkaError._PARTITION_EOF:
            raise self._mapped(error, message.topic() or name)
        offset: int = message.offset()
        return offset >= left.get(message.partition(), offset + 1)

    def _mapped(self, error: KafkaError, where: str) -> SinkError:
        """The error that explains another: a refused login shows up as a timeout elsewhere."""
        for candidate in (self._trouble, error):
            if candidate is not None and candidate.code() in {
                KafkaError._AUTHENTICATION,
                KafkaError.SASL_AUTHENTICATION_FAILED,
                KafkaError._SSL,
            }:
                return SinkError(
                    "sink.auth_failed",
                    f"the broker refused the login: {candidate.str()}",
                    where="sink.properties",
                    suggestion="check security.protocol, sasl.* and ssl.* in [sink.properties]",
                )
        match error.code():
            case KafkaError.TOPIC_AUTHORIZATION_FAILED:
                return SinkError(
                    "sink.not_authorized",
                    f"the broker does not let this account read: {error.str()}",
                    where=where,
                    suggestion=f"kafka-acls.sh --add --allow-principal User:… --operation Read"
                    f" --operation Describe --topic {where}",
                )
            case KafkaError.UNKNOWN_TOPIC_OR_PART | KafkaError._UNKNOWN_TOPIC:
                return SinkError(
                    "sink.topic_missing", f"there is no topic {where}", where="sink.topic",
                    suggestion="check sink.topic; `eventpub run` creates it",
                )  # fmt: skip
            case (
                KafkaError._TRANSPORT
                | KafkaError._TIMED_OUT
                | KafkaError._ALL_BROKERS_DOWN
                | (KafkaError._RESOLVE)
            ):
                return SinkError(
                    "sink.unreachable",
                    f"no broker answers at {self._sink.bootstrap_servers}",
                    where="sink.bootstrap_servers",
                    suggestion="check sink.bootstrap_servers, that the broker runs, and that"
                    " security.protocol fits it: a broker that requires TLS or a login closes"
                    " others' connections",
                    retriable=True,
                )
        return SinkError(
            "sink.read_failed",
            f"reading failed: {error.str()}",
            where=where,
            suggestion="run it again; if it goes on, see the log of the broker",
        )
