"""Reading the topic as any service would: an independent witness.

This shares no code with the sink: what it says about the topic must not depend on the code that
wrote it. It sees committed records only, from the low to the high watermark, and a partition that
cannot be read to its end (a transaction that hangs open) is an error, never an end.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
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
from eventpub.tokens import TokenProvider

Message = Any  # its types say None where there is always a value

EVENT, LATE, DEAD, DIVERTED, GAP = range(5)

BAD_ID, BAD_SUBJECT, BAD_TIMESTAMP, BAD_ENVELOPE = 1, 2, 4, 8
FAULTS = {
    BAD_ID: "ce_id",
    BAD_SUBJECT: "ce_subject",
    BAD_TIMESTAMP: "timestamp",
    BAD_ENVELOPE: "ce_specversion or ce_source",
}

NO_TIME = np.iinfo(np.int64).min

_SHARED_PROPERTIES = (
    "security.", "sasl.", "ssl.", "enable.ssl.", "enable.sasl.", "https.", "client.", "socket.",
    "broker.", "metadata.", "receive.", "message.max.bytes", "message.copy.max.bytes", "fetch.",
    "queued.", "topic.", "reconnect.", "retry.", "api.version.", "debug", "check.crcs",
    "max.partition.",
)  # fmt: skip

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

POLL_ROWS = 10_000
CALL_SECONDS = 8.0
STALL_SECONDS = 60.0


@dataclass
class Records:
    """Records of all topics, as columns; the i-th of each belongs to one record.

    `kind` is one of EVENT, LATE, DEAD, DIVERTED and GAP. Of a gap, `version` and `to_version` are
    its first and last one. `payload`, `type` and `metadata` are hashes of this process.
    """

    ids: list[str]
    columns: dict[str, npt.NDArray[Any]]


@dataclass
class Foreign:
    """A record that no publisher of ours can have written."""

    topic: str
    partition: int
    offset: int
    key: str
    reason: str


@dataclass
class Topic:
    """What was found beside the records.

    Attributes:
        partitions: of the topic itself.
        truncated: partitions whose first records are gone, with their first offset.
        foreign: the first records that are not ours.
        foreign_count: how many there are.
    """

    partitions: int
    truncated: dict[int, int] = field(default_factory=dict)
    foreign: list[Foreign] = field(default_factory=list)
    foreign_count: int = 0
    read: int = 0


class TopicReader:
    """Reads a publisher's topics once, from their first record to what is there now.

    Args:
        sink: the section `[sink]`.
        sources: the application's ids, now and before, one of which every event names.
        patience: seconds to wait for open transactions to end.
    """

    def __init__(self, sink: config.Sink, sources: Collection[str], patience: float = 15.0) -> None:
        self._sink = sink
        self._sources = frozenset(source.encode() for source in sources)
        self._ignored = frozenset(source.encode() for source in sink.ignored_sources)
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
        try:
            self._partitions(AdminClient(self._settings(), logger=_client_log))
        except KafkaException as e:
            raise self._mapped(e.args[0], self._sink.topic) from e

    def read(self) -> Iterator[Records]:
        """All records, in chunks; of each partition in order.

        Raises:
            SinkError: sink.unreachable, sink.auth_failed, sink.topic_missing,
                sink.hanging_transaction, sink.read_stalled, sink.not_authorized.
        """
        settings = self._settings()
        admin = AdminClient(settings, logger=_client_log)
        settings["group.id"] = f"eventpub-verify-{self._sink.topic}"
        every = Consumer(settings | {"isolation.level": "read_uncommitted"}, logger=_client_log)
        consumer = Consumer(
            settings
            | {
                "isolation.level": "read_committed",
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "error",
                "fetch.wait.max.ms": 100,
                "queued.min.messages": 50_000,
                "queued.max.messages.kbytes": 32_768,
                "fetch.max.bytes": 16_777_216,
                "max.partition.fetch.bytes": 4_194_304,
            },
            logger=_client_log,
        )
        try:
            partitions = self._partitions(admin)
            ends = self._ends(consumer, every, partitions)
            yield from self._consume(consumer, ends)
        except KafkaException as e:
            raise self._mapped(e.args[0], self._sink.topic) from e
        finally:
            every.close()
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
            **{
                name: value
                for name, value in self._sink.properties.items()
                if name.startswith(_SHARED_PROPERTIES)
            },
        }

    def _remember(self, error: KafkaError) -> None:
        if error.code() != KafkaError._ALL_BROKERS_DOWN or self._trouble is None:
            self._trouble = error

    def _partitions(self, admin: AdminClient) -> list[TopicPartition]:
        known = admin.list_topics(timeout=CALL_SECONDS).topics
        found: list[TopicPartition] = []
        for name in self._kinds:
            if name in known and known[name].error is None:
                found += [TopicPartition(name, p) for p in sorted(known[name].partitions)]
        self.topic.partitions = sum(tp.topic == self._sink.topic for tp in found)
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
        """OFFSET_BEGINNING or OFFSET_END of each partition, as far as this consumer sees them."""
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
                elif answer.offset >= 0:  # else: the connection was lost before the answer
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
        """The first offset and the end of each partition, once nothing is open below the end."""
        first = self._offsets(every, partitions, OFFSET_BEGINNING)
        ends = self._offsets(every, partitions, OFFSET_END)
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
            if name == self._sink.topic and offset > 0:
                self.topic.truncated[number] = offset
        return {at: (first[at], end) for at, end in ends.items()}

    def _consume(
        self, consumer: Consumer, ends: dict[tuple[str, int], tuple[int, int]]
    ) -> Iterator[Records]:
        left = {at: end for at, (first, end) in ends.items() if end > first}
        consumer.assign([TopicPartition(t, p, ends[t, p][0]) for t, p in left])
        progressed_at = time.monotonic()
        while left:
            messages: list[Message] = consumer.consume(POLL_ROWS, 0.1)
            if not messages:
                if time.monotonic() - progressed_at > STALL_SECONDS:
                    name, number = next(iter(left))
                    if self._trouble is not None:
                        raise self._mapped(self._trouble, name)
                    raise SinkError(
                        "sink.read_stalled",
                        f"nothing was read from {name} partition {number} for"
                        f" {STALL_SECONDS:.0f} s, before its end at {left[name, number]}",
                        where=name,
                        suggestion="look at the broker's log for this partition",
                        retriable=True,
                    )
                continue
            progressed_at = time.monotonic()
            yield self._parse(messages, left)

    def _parse(self, messages: list[Message], left: dict[tuple[str, int], int]) -> Records:
        """Take the records apart; partitions that have reached their end leave `left`."""
        rows = _Rows()
        kinds, sources, topic = self._kinds, self._sources, self.topic
        for message in messages:
            name, partition = message.topic(), message.partition()
            offset = message.offset()
            error = message.error()
            if error is not None:
                if error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
                    continue  # no group is joined, so that no right on one is needed
                if error.code() != KafkaError._PARTITION_EOF:
                    raise self._mapped(error, name or self._sink.topic)
                if offset >= left.get((name, partition), offset + 1):
                    del left[name, partition]
                continue
            end = left.get((name, partition))
            if end is None or offset >= end:
                left.pop((name, partition), None)
                continue
            topic.read += 1
            kind = kinds[name]
            if self._ignored and _source_of(message) in self._ignored:
                if offset + 1 >= end:
                    del left[name, partition]
                continue
            problem = (
                rows.add_gap(message)
                if kind == GAP
                else rows.add(message, kind, partition, offset, sources)
            )
            if problem:
                topic.foreign_count += 1
                if len(topic.foreign) < 20:
                    key = (message.key() or b"").decode(errors="replace")
                    topic.foreign.append(Foreign(name, partition, offset, key, problem))
            if offset + 1 >= end:
                del left[name, partition]
        return rows.records()

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
                    suggestion="check sink.bootstrap_servers, and that the broker runs",
                    retriable=True,
                )
        return SinkError(
            "sink.read_failed",
            f"reading failed: {error.str()}",
            where=where,
            suggestion="run it again; if it goes on, see the log of the broker",
        )


_NOTHING = object()
_EMPTY_HASH = hash(frozenset())
_ENVELOPE = 7  # the headers that every event has


class _Rows:
    """Rows as they come; `records` turns them into columns."""

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._numbers: list[tuple[int, ...]] = []
        self._times: list[str] = []

    def add(
        self,
        message: Message,
        kind: int,
        partition: int,
        offset: int,
        sources: frozenset[bytes],
    ) -> str | None:
        """Take an event, or a row on a side topic; says why where it is no such record."""
        headers = message.headers() or []
        by_name: dict[str, bytes | None] = dict(headers)
        key = message.key()
        sequence = by_name.get("ce_sequence")
        created = by_name.get("ce_time")
        if key is None or sequence is None:
            if kind == DEAD:  # a row without identity: there is nothing to compare it with
                return None
            return "it has no key" if key is None else "it has no header ce_sequence"
        try:
            version = int(sequence)
            aggregate_id = key.decode()
        except ValueError:
            return "its key is not UTF-8 or its ce_sequence is not a number"
        if not -(1 << 63) <= version < 1 << 63:
            return "its ce_sequence is out of range"
        time_text = (created or b"").decode(errors="replace")
        if len(time_text) != 27 or time_text[-1] != "Z":
            time_text = "NaT"
            if kind != DEAD:
                return "its ce_time is not RFC 3339 in UTC with microseconds"
        else:
            time_text = time_text[:-1]
        faults = 0
        if by_name.get("ce_id") != key + b"/" + sequence:
            faults |= BAD_ID
        if by_name.get("ce_subject") != key:
            faults |= BAD_SUBJECT
        if by_name.get("ce_source") not in sources or by_name.get("ce_specversion") != b"1.0":
            faults |= BAD_ENVELOPE
        if "eventpub_late" in by_name and kind == EVENT:
            kind = LATE
        plain = _ENVELOPE + ("content-type" in by_name) + (kind == LATE)
        metadata = _EMPTY_HASH if len(headers) == plain else _hash_of_metadata(headers)
        value = message.value()
        self._ids.append(aggregate_id)
        self._times.append(time_text)
        self._numbers.append(
            (
                version, 0, kind, partition, offset, faults, message.timestamp()[1],
                1 if value is None else hash(value), hash(by_name.get("ce_type")), metadata,
            )
        )  # fmt: skip
        return None

    def add_gap(self, message: Message) -> str | None:
        """Take a recorded skip; says why where it is none."""
        try:
            gap = json.loads(message.value() or b"")
            row = (int(gap["from_version"]), int(gap["to_version"]), GAP)
            aggregate_id = str(gap["aggregate_id"])
        except (ValueError, KeyError, TypeError):
            return "it is not a recorded skip"
        self._ids.append(aggregate_id)
        self._times.append("NaT")
        self._numbers.append((*row, message.partition(), message.offset(), 0, 0, 0, 0, 0))
        return None

    def records(self) -> Records:
        """All rows that were taken."""
        table = np.array(self._numbers, np.int64).reshape(-1, 10).T
        names = (
            "version", "to_version", "kind", "partition", "offset", "faults", "timestamp",
            "payload", "type", "metadata",
        )  # fmt: skip
        columns: dict[str, npt.NDArray[Any]] = dict(zip(names, table, strict=True))
        times = np.array(self._times, "datetime64[us]").astype(np.int64)
        columns["create_time"] = times
        stamped = columns.pop("timestamp")
        # what lay in the future has the time of its publication
        latest = np.maximum(times // 1000, 1)
        right = (times == NO_TIME) | (stamped == latest) | ((stamped > 0) & (stamped < latest))
        columns["faults"] = columns["faults"] | np.where(right, 0, BAD_TIMESTAMP)
        return Records(self._ids, columns)


def _source_of(message: Message) -> bytes | None:
    value: bytes | None = dict(message.headers() or ()).get("ce_source")
    return value


def _hash_of_metadata(headers: list[tuple[str, bytes | None]]) -> int:
    """Of the headers that come from a row's metadata; names of ours are all others."""
    return hash(
        frozenset(
            (name, value)
            for name, value in headers
            if name != "content-type" and not name.startswith(("ce_", "eventpub_"))
        )
    )


def hash_of_metadata(text: str | None) -> int:
    """Of a row's metadata, by the documented rules of how they become headers."""
    if not text:
        return _EMPTY_HASH
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        data = _NOTHING
    if data is None:
        return _EMPTY_HASH
    if not isinstance(data, Mapping):
        return hash(frozenset({("metadata", text.encode(errors="replace"))}))
    pairs: dict[str, bytes | None] = {}
    for name, value in data.items():
        if name == "content-type":
            continue
        renamed = f"metadata_{name}" if name.startswith(("ce_", "eventpub_")) else name
        pairs[renamed.encode(errors="replace").decode()] = _header_bytes(value)
    return hash(frozenset(pairs.items()))


def _header_bytes(value: Any) -> bytes | None:
    if value is None:
        return None
    if not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return str(value).encode(errors="replace")
