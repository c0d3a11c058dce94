"""Publishes a range of the store again, to another topic.

The keys of the range are sorted in a database that spills to disk: by creation time, but within an
aggregate by version. Each portion is one transaction, and every record names its replay. A repeated
replay reads the topic and publishes only events above those that it has of an aggregate: what is
missing below is left out, and named.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa

from eventpub.admission.model import EVENTS, Shard, values, version_ranges
from eventpub.config import Config, format_time
from eventpub.errors import ConfigError, SinkError
from eventpub.ops.dead import readable_store
from eventpub.ops.sides import no_space_is_named, open_database, spill_folder
from eventpub.ops.topic import committed_ends
from eventpub.sink import faults, records
from eventpub.sink.base import Content, RecordRefusedError
from eventpub.sink.client import Clients
from eventpub.sink.encoder import CloudEvents
from eventpub.sink.layout import check_age
from eventpub.sink.reading import Place, own_records, read_committed
from eventpub.sink.shard import ShardSink
from eventpub.sink.topics import create, list_offsets, offsets_at, partition_counts
from eventpub.sources.mysql import EventStore

REPLAY = "eventpub_replay"

Key: TypeAlias = tuple[str, int]
Page: TypeAlias = list[tuple[str, int, int]]

_PAGE_ROWS = 20_000
_PAGE_BYTES = 16 * 1024 * 1024
_FAILURES = 4
"""Consecutive failures without a published event that end a replay."""
_SETTLE = 30.0
_MOST_SHOWN = 20
_LAST_OFFSETS = 200
"""Offsets checked per partition for a publisher's events; many are aborted records and markers."""
_TOPIC_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")

_TABLES = """
CREATE TABLE event (id VARCHAR, version BIGINT, created BIGINT);
CREATE TABLE done (id VARCHAR, version BIGINT)
"""
_IN_ORDER = """
CREATE TABLE in_order AS
SELECT *, max(created) OVER (PARTITION BY id ORDER BY version) AS turn
FROM (SELECT id, version, min(created) AS created FROM event GROUP BY id, version)
"""
_LEFT = """
SELECT id, version, created FROM in_order
LEFT JOIN (SELECT id, max(version) AS done FROM done GROUP BY id) USING (id)
WHERE done IS NULL OR version > done ORDER BY turn, version, id
"""
_LEFT_OUT = """
SELECT id, version, count(*) OVER () FROM in_order ANTI JOIN done USING (id, version)
JOIN (SELECT id, max(version) AS done FROM done GROUP BY id) USING (id)
WHERE version < done ORDER BY id, version LIMIT 10
"""


@dataclass(frozen=True)
class Range:
    """What to publish again, and where; creation times are inclusive, µs."""

    first: int
    last: int
    topic: str
    id: str = ""

    def named(self, app_id: str) -> str:
        if self.id:
            return self.id
        parts = (app_id, self.first, self.last, self.topic)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


@dataclass
class Replayed:
    """The outcome of a replay; `before`: events published by its earlier runs, `left_out`: missing
    ones below these."""

    id: str
    events: int = 0
    before: int = 0
    refused: int = 0
    left_out: int = 0
    transactions: int = 0
    examples: list[str] = field(default_factory=list)


Progress = Callable[[int, int], None]


def replay(config: Config, what: Range, on_progress: Progress = lambda *_: None) -> Replayed:
    """Publish the range, except events that this replay has already published."""
    _check(config, what)
    with (
        readable_store(config) as store,
        spill_folder() as folder,
        closing(_Order(folder)) as order,
    ):
        places = [(what.topic, number) for number in range(_topic(config, what.topic))]
        sink = config.sink.model_copy(update={"topic": what.topic, "delivery": "exactly_once"})
        poll = store.poll(what.first - 1, 0, 1, at_most=what.last)
        if poll.page_end is not None:
            check_age(Clients(sink), poll.page_end, poll.now)
        config = config.model_copy(update={"sink": sink})
        with no_space_is_named():
            order.read(what, store)
        result = Replayed(what.named(config.app.id))
        return _Replay(config, what, store, order, places, result).run(on_progress)


class _Order:
    def __init__(self, folder: Path) -> None:
        self._database = open_database(folder).execute(_TABLES)
        self.total = 0

    def close(self) -> None:
        self._database.close()

    def read(self, what: Range, store: EventStore) -> None:
        """Read the keys.

        A row of an hour that the clocks repeat is included if either of its times is in the range,
        and is published with the first.
        """
        for batch in store.keys(what.first - 1, min(what.last, store.now()), None):
            self._add("event", *map(batch.column, ("aggregate_id", "version", "create_time")))
        self._database.execute(_IN_ORDER)
        [(self.total,)] = self._database.execute("SELECT count(*) FROM in_order").fetchall()

    def _add(self, table: str, *columns: Any) -> None:
        portion = dict(zip(("id", "version", "created"), columns, strict=False))
        self._database.register("portion", pa.table(portion))
        self._database.execute(f"INSERT INTO {table} FROM portion")

    def mark_done(self, keys: list[Key]) -> None:
        if keys:
            self._add("done", *zip(*keys, strict=True))

    def left_out(self) -> list[tuple[str, int, int]]:
        """The first keys left out, each with the number of all."""
        return self._database.execute(_LEFT_OUT).fetchall()

    def left(self) -> Iterator[Page]:
        with self._database.cursor() as cursor:
            cursor.execute(_LEFT)
            while page := cursor.fetchmany(_PAGE_ROWS):
                yield page


@dataclass
class _Replay:
    _config: Config
    _what: Range
    _store: EventStore
    _order: _Order
    _places: list[Place]
    _result: Replayed
    _read_to: dict[Place, int] = field(default_factory=dict)
    _on_topic: int = 0
    _refused: set[Key] = field(default_factory=set)

    def run(self, on_progress: Progress) -> Replayed:
        config, result, failures, reached = self._config, self._result, 0, -1
        shard, owner = Shard(0, 1, len(self._places)), f"replay.{result.id}"
        encoder = CloudEvents(config.app.id, ((REPLAY, result.id.encode()),))

        def show() -> None:
            reached = result.before + result.events + result.refused + result.left_out
            on_progress(reached, self._order.total)

        while True:
            with ShardSink(
                Clients(config.sink), config.app.id, shard, owner=owner, encoder=encoder
            ) as writer:
                writer.ready()  # fences the previous writer: its transactions are over
                self._read_back()
                if reached < 0:
                    result.before = self._on_topic
                    for key in self._order.left_out():
                        result.left_out = key[2]
                        self._name(key, "left out, since a later version is on the topic")
                    show()
                result.events = self._on_topic - result.before
                failures = failures if self._on_topic + result.refused == reached else 0
                reached = self._on_topic + result.refused
                try:
                    if self._publish(writer, show):
                        return result
                except SinkError as error:
                    failures += 1
                    if not error.retriable or failures >= _FAILURES:
                        raise

    def _publish(self, writer: ShardSink, show: Callable[[], None]) -> bool:
        """Publish unpublished events; False to continue with another writer.

        On RecordRefusedError, rows are left out and nothing was published; on SinkError, read back.
        """
        result = self._result
        for page in self._order.left():
            for rows in self._rows([event for event in page if event[:2] not in self._refused]):
                try:
                    writer.publish(Content(rows))
                except RecordRefusedError as refused:
                    for row in sorted(refused.rows):
                        key = _keys(rows)[row]
                        self._refused.add(key)
                        self._name(key, refused.reason)
                    result.refused = len(self._refused)
                    raise
                result.events += rows.num_rows
                result.transactions += 1
                show()
                if writer.needs_replacement:
                    return False
        return True

    def _rows(self, page: Page) -> Iterator[pa.Table]:
        turns = {event[:2]: turn for turn, event in enumerate(page)}
        left = version_ranges([event[:2] for event in page])
        while left:
            found, left = self._store.fetch(left, _PAGE_ROWS, _PAGE_BYTES)
            rows: dict[int, int] = {}
            for row, key in enumerate(_keys(found)):
                rows.setdefault(turns[key], row)  # the first row, where a version has several
            if rows:
                order = sorted(rows)
                table = found.take([rows[turn] for turn in order])
                times = pa.array([page[turn][2] for turn in order], pa.int64())
                place = EVENTS.get_field_index("create_time")
                yield table.set_column(place, EVENTS.field(place), times)

    def _name(self, key: Sequence[Any], reason: str) -> None:
        if len(self._result.examples) < _MOST_SHOWN:
            self._result.examples.append(f"{key[0]}/{key[1]}: {reason}")

    def _read_back(self) -> None:
        clients, wanted = Clients(self._config.sink), self._result.id.encode()
        ends = committed_ends(clients, self._places, _SETTLE)
        first = records.timestamp(self._what.first)
        starts = self._read_to or offsets_at(clients, self._places, first)
        for chunk in read_committed(clients, starts, ends=ends):
            done: list[Key] = []
            for message, headers in own_records(chunk, self._config.app.id):
                if headers.get(REPLAY) == wanted:
                    self._on_topic += 1
                    done.append((message.key().decode(), int(headers[records.SEQUENCE])))
            self._order.mark_done(done)
        self._read_to = ends


def _keys(rows: pa.Table) -> list[Key]:
    return list(zip(values(rows, "aggregate_id"), values(rows, "version"), strict=True))


def _check(config: Config, what: Range) -> None:
    if not _TOPIC_NAME.fullmatch(what.topic) or what.topic in {".", ".."}:
        raise ConfigError(
            "replay.topic_name",
            f"{what.topic!r} is not a valid topic name",
            where="--topic",
            suggestion="give --topic a name of 1 to 249 letters (A-Z, a-z), digits, and . _ -",
        )
    if what.topic in config.sink.topics:
        raise ConfigError(
            "replay.own_topic",
            f"{what.topic} is one of the publisher's own topics, where each event occurs once",
            where="--topic",
            suggestion="name another topic, for the consumers that are to read the events again",
        )
    if what.first > what.last:
        raise ConfigError(
            "replay.empty_range",
            f"the range from {format_time(what.first)} to {format_time(what.last)} is empty",
            where="--from, --to",
            suggestion="give a --from that is before --to",
        )


def _topic(config: Config, topic: str) -> int:
    sink, clients = config.sink, Clients(config.sink)
    found = partition_counts(clients)
    if topic in found:
        _refuse_other(clients, topic, found[topic])
        return found[topic]
    count = found.get(sink.topic, sink.partitions)
    if not sink.create_topics:
        raise faults.topic_missing(sink, topic, count)
    return create(clients, [topic], count)[topic]


def _refuse_other(clients: Clients, topic: str, partitions: int) -> None:
    """Refuse a topic written by a publisher, judged by the last records of each partition."""
    places: list[Place] = [(topic, number) for number in range(partitions)]
    ends = list_offsets(clients, places, "latest", committed=True)
    starts = {place: max(0, end - _LAST_OFFSETS) for place, end in ends.items()}
    for chunk in read_committed(clients, starts, ends=ends):
        for message in chunk:
            headers = dict(message.headers() or ())
            is_event = headers.keys() >= {records.SOURCE, records.SEQUENCE}
            if is_event and REPLAY not in headers:
                source = (headers[records.SOURCE] or b"").decode(errors="replace")
                raise ConfigError(
                    "replay.other_topic",
                    f"{topic} has events of the publisher {source} itself, not of a replay"
                    f" (partition {message.partition()} offset {message.offset()})",
                    where="--topic",
                    suggestion="name a new topic, or one to which only replays write",
                )
