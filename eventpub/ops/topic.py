"""Reading the topic as any service would: an independent witness.

This shares no code with the sink: what it says about the topic must not depend on the code that
wrote it. It sees committed records only, from the low to the high watermark, and a partition that
cannot be read to its end (a transaction that hangs open) is an error, never an end.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
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
Place = tuple[str, int]
"""A topic and one of its partitions."""

Chosen = Callable[[bytes], bool]
"""Whether the aggregate with a key is looked at."""

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

POLL_ROWS = 2_000  # more of them at once do not stay in a core's cache
CALL_SECONDS = 8.0
STALL_SECONDS = 60.0


@dataclass
class Records:
    """Records of all topics, as columns; the i-th of each belongs to one record.

    `kind` is one of EVENT, LATE, DEAD, DIVERTED and GAP. Of a gap, `version` and `to_version` are
    its first and last one. `payload`, `type` and `metadata` are Python's hashes: equal in all
    processes that have the same PYTHONHASHSEED.

    Attributes:
        ids: strings.
        reached: the next offset of each partition that these records are from.
    """

    ids: pa.Array[Any]
    columns: dict[str, npt.NDArray[Any]]
    reached: dict[Place, int] = field(default_factory=dict)


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
        """First offset and end of each partition, once no transaction is open below the end.

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
        while left:
            messages: list[Message] = consumer.consume(POLL_ROWS, 0.1)
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
        records = None
        if kind == EVENT and messages:
            records = self._standard(messages, partitions, offsets)
        if records is None:
            records = self._one_by_one(messages, name)
        if chosen is not None and kind == GAP:
            names: list[Any] = records.ids.to_pylist()
            records = _only(records, [chosen(name.encode()) for name in names])
        records.reached = reached
        return records

    def _is_end(self, message: Message, name: str, left: Mapping[int, int]) -> bool:
        """Whether a message that is no record says that a partition has no more."""
        error = message.error()
        if error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
            return False  # no group is joined, so that no right on one is needed
        if error.code() != KafkaError._PARTITION_EOF:
            raise self._mapped(error, message.topic() or name)
        offset: int = message.offset()
        return offset >= left.get(message.partition(), offset + 1)

    def _one_by_one(self, messages: Sequence[Message], name: str) -> Records:
        """Any records whatever."""
        rows = _Rows()
        kind, topic = self._kinds[name], self.topic
        for message in messages:
            if self._ignored and _source_of(message) in self._ignored:
                continue
            partition, offset = message.partition(), message.offset()
            problem = (
                rows.add_gap(message)
                if kind == GAP
                else rows.add(message, kind, partition, offset, self._sources)
            )
            if problem:
                topic.foreign_count += 1
                if len(topic.foreign) < 20:
                    key = (message.key() or b"").decode(errors="replace")
                    topic.foreign.append(Foreign(name, partition, offset, key, problem))
        return rows.records()

    def _standard(  # noqa: PLR0911, PLR0912 (each check has its own way out)
        self,
        messages: Sequence[Message],
        partitions: npt.NDArray[np.int32],
        offsets: npt.NDArray[np.int64],
    ) -> Records | None:
        """As `_one_by_one`, but all at once: records with the usual headers in the usual order.

        None where any of them has a header missing, or what cannot be read.
        """
        headers = [message.headers() or () for message in messages]
        shortest, longest = min(map(len, headers)), max(map(len, headers))
        if shortest < len(_USUAL):
            return self._divided(messages, headers)
        metadata = np.full(len(messages), _EMPTY_HASH, np.int64)
        if longest > len(_USUAL):
            for at, row in enumerate(headers):
                if len(row) > len(_USUAL):
                    more = row[len(_USUAL) :]
                    if any(name.startswith(_RESERVED) for name, _ in more):
                        return self._divided(messages, headers)
                    metadata[at] = _hash_of_pairs(more)
            headers = [row[: len(_USUAL)] for row in headers]
        values: list[tuple[bytes | None, ...]] = []
        for usual, column in zip(_USUAL, zip(*headers, strict=True), strict=True):
            names, of_each = zip(*column, strict=True)
            if names.count(usual) != len(names):
                return None
            values.append(of_each)
        specversions, ids, sources, types, times, subjects, sequences, _ = values
        if self._ignored.intersection(sources):
            return None
        keys = tuple(message.key() for message in messages)
        try:
            versions = np.array(list(map(int, sequences)), np.int64)  # type: ignore[arg-type]
            text = pa.array(keys, pa.binary()).cast(pa.string())
            created = _micros(times)
        except (ValueError, TypeError, OverflowError, pa.ArrowInvalid):
            return None
        if text.null_count:
            return None
        faults = np.zeros(len(messages), np.int8)
        wanted = [k + b"/" + s for k, s in zip(keys, sequences, strict=True)]
        faults |= BAD_ID * _differ(ids, wanted)
        faults |= BAD_SUBJECT * _differ(subjects, keys)
        if specversions.count(b"1.0") != len(keys) or not self._sources.issuperset(sources):
            for at, (version, source) in enumerate(zip(specversions, sources, strict=True)):
                if version != b"1.0" or source not in self._sources:
                    faults[at] |= BAD_ENVELOPE
        stamped = np.fromiter((m.timestamp()[1] for m in messages), np.int64, len(messages))
        nothing = np.zeros(len(messages), np.int64)
        columns: dict[str, npt.NDArray[Any]] = {
            "version": versions,
            "to_version": nothing,
            "kind": nothing,
            "partition": partitions,
            "offset": offsets,
            "faults": faults | _bad_timestamps(created, stamped),
            "payload": hashes([message.value() for message in messages]),
            "type": hashes(types),
            "metadata": metadata,
            "create_time": created,
        }
        return Records(text, columns)

    def _divided(self, messages: Sequence[Message], headers: Sequence[Any]) -> Records | None:
        """The unusual ones apart from the others; None where there are no others."""
        is_usual = np.array(
            [
                len(row) >= len(_USUAL)
                and not any(name.startswith(_RESERVED) for name, _ in row[len(_USUAL) :])
                for row in headers
            ]
        )
        if not is_usual.any():
            return None
        usual = [messages[at] for at in np.flatnonzero(is_usual).tolist()]
        others = [messages[at] for at in np.flatnonzero(~is_usual).tolist()]
        found = self._standard(
            usual,
            np.array([m.partition() for m in usual], np.int32),
            np.array([m.offset() for m in usual], np.int64),
        )
        if found is None:
            return None
        rest = self._one_by_one(others, self._sink.topic)
        columns = {n: np.concatenate([c, rest.columns[n]]) for n, c in found.columns.items()}
        order = np.lexsort((columns["offset"], columns["partition"]))
        ids: Any = pa.concat_arrays([found.ids, rest.ids])
        return Records(ids.take(pa.array(order)), {n: c[order] for n, c in columns.items()})

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


_USUAL = (
    "ce_specversion", "ce_id", "ce_source", "ce_type", "ce_time", "ce_subject", "ce_sequence",
    "content-type",
)  # fmt: skip
_RESERVED = ("ce_", "eventpub_", "content-type")
_NOTHING = object()
_NULL = ("null",)  # hash(None) is not the same in all processes
_EMPTY_HASH = hash(frozenset())
_ENVELOPE = 7  # the headers that every event has


def hashes(values: Sequence[bytes | None]) -> npt.NDArray[np.int64]:
    """Of each value; of a NULL another than of any value."""
    if None in values:
        return np.fromiter((1 if v is None else hash(v) for v in values), np.int64, len(values))
    return np.fromiter(map(hash, values), np.int64, len(values))


def _micros(times: Sequence[bytes | None]) -> npt.NDArray[np.int64]:
    """Of RFC 3339 in UTC with microseconds; raises ArrowInvalid or ValueError for all else."""
    texts: Any = pa.array(times, pa.binary()).cast(pa.string())
    lengths = pc.binary_length(texts).to_numpy(zero_copy_only=False)
    if texts.null_count or (lengths != 27).any():
        raise ValueError
    if not pc.all(pc.ends_with(texts, "Z")).as_py():
        raise ValueError
    plain = pc.utf8_slice_codeunits(texts, 0, 26).cast(pa.timestamp("us")).cast(pa.int64())
    return np.asarray(plain.to_numpy(zero_copy_only=False), np.int64)


def _differ(found: Sequence[Any], wanted: Sequence[Any]) -> npt.NDArray[np.int8]:
    if tuple(found) == tuple(wanted):
        return np.zeros(len(found), np.int8)
    return np.array([f != w for f, w in zip(found, wanted, strict=True)], np.int8)


def _bad_timestamps(
    created: npt.NDArray[np.int64], stamped: npt.NDArray[np.int64]
) -> npt.NDArray[np.int8]:
    # what lay in the future has the time of its publication
    latest = np.maximum(created // 1000, 1)
    right = (created == NO_TIME) | (stamped == latest) | ((stamped > 0) & (stamped < latest))
    return np.where(right, 0, BAD_TIMESTAMP).astype(np.int8)


def _only(records: Records, wanted: Sequence[bool]) -> Records:
    kept = np.flatnonzero(np.array(wanted, np.bool_))
    columns = {name: column[kept] for name, column in records.columns.items()}
    return Records(records.ids.take(pa.array(kept)), columns)  # type: ignore[arg-type]


class _Rows:
    """Rows as they come; `records` turns them into columns."""

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._numbers: list[tuple[int, ...]] = []
        self._times: list[int] = []

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
        micros = NO_TIME
        try:
            if created is None or len(created) != 27 or not created.endswith(b"Z"):
                raise ValueError
            micros = int(np.datetime64(created[:-1].decode(), "us").astype(np.int64))
        except ValueError:
            if kind != DEAD:
                return "its ce_time is not RFC 3339 in UTC with microseconds"
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
        self._times.append(micros)
        self._numbers.append(
            (
                version, 0, kind, partition, offset, faults, message.timestamp()[1],
                1 if value is None else hash(value), hash(by_name.get("ce_type") or b""), metadata,
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
        self._times.append(NO_TIME)
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
        times = np.array(self._times, np.int64)
        columns["create_time"] = times
        columns["faults"] = columns["faults"] | _bad_timestamps(times, columns.pop("timestamp"))
        return Records(pa.array(self._ids, pa.string()), columns)


def _source_of(message: Message) -> bytes | None:
    value: bytes | None = dict(message.headers() or ()).get("ce_source")
    return value


def _hash_of_metadata(headers: Sequence[tuple[str, bytes | None]]) -> int:
    """Of the headers that come from a row's metadata; names of ours are all others."""
    return _hash_of_pairs([(n, v) for n, v in headers if not _is_reserved(n)])


def _is_reserved(name: str) -> bool:
    return name == "content-type" or name.startswith(("ce_", "eventpub_"))


def _hash_of_pairs(pairs: Collection[tuple[str, bytes | None]]) -> int:
    return hash(frozenset((name, _NULL if value is None else value) for name, value in pairs))


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
        return _hash_of_pairs([("metadata", text.encode(errors="replace"))])
    pairs: dict[str, bytes | None] = {}
    for name, value in data.items():
        if name == "content-type":
            continue
        renamed = f"metadata_{name}" if name.startswith(("ce_", "eventpub_")) else name
        pairs[renamed.encode(errors="replace").decode()] = _header_bytes(value)
    return _hash_of_pairs(pairs.items())


def _header_bytes(value: Any) -> bytes | None:
    if value is None:
        return None
    if not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return str(value).encode(errors="replace")
