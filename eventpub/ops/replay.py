"""Publishing a range of the store once more, on purpose, to another topic.

The rows are read by creation time, page by page, each page is one transaction, and every record
says which replay it belongs to. What must hold: within an aggregate versions ascend, also where
their times do not, and a replay that is run again publishes nothing twice. The topic says what is
done: its records tell up to where the replay has come. It takes the memory of a page, or of
the rows of one moment where these are more.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from eventpub.admission import EVENTS, VersionRange, values
from eventpub.config import Config, Sink, format_time
from eventpub.errors import ConfigError, SinkError
from eventpub.ops.committed import Committed, Message, Place, offsets_at
from eventpub.sink import faults, records
from eventpub.sink.batch import Batch, Events
from eventpub.sink.caution import Caution
from eventpub.sink.faults import RecordRefusedError
from eventpub.sink.owned_producer import OwnedProducer
from eventpub.sink.producing import no_crash
from eventpub.sink.topics import create, list_offsets, partition_counts
from eventpub.sink.transaction import Transactions
from eventpub.store import EventStore, Layout

REPLAY = "eventpub_replay"
"""Header with the id of the replay."""
AHEAD = "eventpub_replay_ahead"
"""Header of an event that was created after a later version of its aggregate."""

_PAGE_ROWS = 20_000
_PAGE_BYTES = 16 * 1024 * 1024
_BELOW = 16
"""Versions in a row, created outside the range, below which none is looked for that was created in
it, and later: so far apart, versions and times of an aggregate do not differ in order."""
_FAILURES = 4
"""So many in a row, without an event published, end a replay."""
_SETTLE = 30.0
_READ_BACK = 24 * 3600.0
_DAY = 24 * 3600 * 1_000_000
"""µs: where an event created so much later was published, what comes behind it is later, too."""
_HIGHEST = 2**63 - 1
_MOST_SHOWN = 20
_LOOKED_AT = 200
"""Offsets at the end of a partition: aborted records and the ends of transactions are of these."""
_TOPIC_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")
Key = tuple[str, int]


@dataclass(frozen=True)
class Range:
    """What is published again, and where.

    Attributes:
        first, last: of creation times, both included, µs.
        topic: the topic.
        aggregate_id: of one aggregate alone; None: of all.
        id: of the replay; "": made of all these.
    """

    first: int
    last: int
    topic: str
    aggregate_id: str | None = None
    id: str = ""

    def named(self, app_id: str) -> str:
        """Its id."""
        if self.id:
            return self.id
        parts = (app_id, self.first, self.last, self.topic, self.aggregate_id)
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


@dataclass
class Replayed:
    """What was published.

    Attributes:
        id: of the replay.
        events: published now.
        before: that an earlier run of this replay had published.
        refused: events that the broker does not take; the first of them in `examples`.
        transactions: committed.
    """

    id: str
    events: int = 0
    before: int = 0
    refused: int = 0
    transactions: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass
class _Done:
    """What of a replay is on the topic.

    Attributes:
        events: how many.
        position: everything created at or before is, µs.
        version: the highest.
        ahead: those created later that are, too, with their times.
        read_to: the next offset to read of each partition.
    """

    events: int = 0
    position: int = 0
    version: int = -1
    ahead: dict[Key, int] = field(default_factory=dict)
    read_to: dict[Place, int] = field(default_factory=dict)


Progress = Callable[[int, int | None], None]
"""Called with how many events are done, and how many there are in all, where that is known."""


def replay(config: Config, what: Range, on_progress: Progress | None = None) -> Replayed:
    """Publish it, or what of it is not published yet.

    Raises:
        ConfigError: replay.topic_name, replay.own_topic, replay.empty_range, replay.other_topic
        StoreError, SinkError: the store cannot be read, or the topic not be written.
    """
    _check(config, what)
    readable = config.store.model_copy(update={"allow_replica": True})
    layout = EventStore.discover(config.store)
    with EventStore(readable, layout) as store:
        partitions = _topic(config, what.topic)
        result = Replayed(what.named(config.app.id))
        done, total, failures, reached = _Done(), None, 0, 0
        hours: _RepeatedHours | None = None
        with _Writer(config, what.topic, partitions, result) as writer:
            while True:
                writer.take_over()
                _read_back(config, what, partitions, result.id, done)
                if hours is None:
                    result.before = done.events
                    if on_progress is not None:
                        total = _count(store, what)
                        on_progress(done.events, total)
                    hours = _second_pass(config, layout, what)
                result.events = done.events - result.before
                before, reached = reached, done.events + result.refused
                failures = 0 if reached > before else failures
                try:
                    for page, ahead in _pages(store, what, done, layout.unit, hours):
                        writer.publish(page, ahead)
                        if on_progress is not None:
                            on_progress(result.before + result.events + result.refused, total)
                        if writer.needs_replacement:
                            break
                    else:
                        return result
                except SinkError as error:
                    failures += 1
                    if not error.retriable or failures >= _FAILURES:
                        raise


def _check(config: Config, what: Range) -> None:
    """Whether it may be asked for, without a question to a server."""
    if not _TOPIC_NAME.fullmatch(what.topic) or what.topic in {".", ".."}:
        raise ConfigError(
            "replay.topic_name",
            f"no topic can be called {what.topic!r}",
            where="--topic",
            suggestion="give --topic a name of 1 to 249 letters (A-Z, a-z), digits, and . _ -",
        )
    if what.topic in config.sink.topics:
        raise ConfigError(
            "replay.own_topic",
            f"{what.topic} is a topic of the publisher itself: its events are there once",
            where="--topic",
            suggestion="name another topic; consumers that are to read the events again read that",
        )
    if what.first > what.last:
        raise ConfigError(
            "replay.empty_range",
            f"nothing lies between {format_time(what.first)} and {format_time(what.last)}",
            where="--from, --to",
            suggestion="give a --from that is before --to",
        )


def _count(store: EventStore, what: Range) -> int | None:
    if what.aggregate_id is not None:
        return None
    return store.counts([(what.first - 1, what.last)])[0]


def _topic(config: Config, topic: str) -> int:
    """How many partitions it has; made with those of the publisher's, where it is missing."""
    sink = config.sink
    found = partition_counts(sink)
    if topic in found:
        _refuse_other(sink, topic, found[topic])
        return found[topic]
    count = found.get(sink.topic, sink.partitions)
    if not sink.create_topics:
        raise faults.topic_missing(sink, topic, count)
    return create(sink, topic, count)


def _refuse_other(sink: Sink, topic: str, partitions: int) -> None:
    """Refuse a topic to which a publisher writes: its events are there once, in their order.

    The last records of each partition are looked at, whichever application wrote them.
    """
    places: list[Place] = [(topic, number) for number in range(partitions)]
    ends = list_offsets(sink, places, "latest", committed=True)
    starts = {place: max(0, end - _LOOKED_AT) for place, end in ends.items()}
    for chunk in Committed(sink, starts, time.monotonic() + _READ_BACK, ends):
        for message in chunk:
            headers = dict(message.headers() or ())
            is_event = headers.keys() >= {records.SOURCE, records.SEQUENCE}
            if is_event and REPLAY not in headers:
                source = (headers[records.SOURCE] or b"").decode(errors="replace")
                raise ConfigError(
                    "replay.other_topic",
                    f"{topic} has events that are no replay's, of the publisher {source}"
                    f" (partition {message.partition()} offset {message.offset()})",
                    where="--topic",
                    suggestion="name a new topic, or one to which only replays write",
                )


# -- what is done already ------------------------------------------------------------------------


def _read_back(config: Config, what: Range, partitions: int, replay_id: str, done: _Done) -> None:
    """Add what is new on the topic to `done`; the replay's own open transactions are over."""
    places: list[Place] = [(what.topic, number) for number in range(partitions)]
    sink, deadline = config.sink, time.monotonic() + _SETTLE
    while True:
        ends = list_offsets(sink, places, "latest")
        if ends == list_offsets(sink, places, "latest", committed=True):
            break
        if time.monotonic() > deadline:
            raise SinkError(
                "sink.hanging_transaction",
                f"a transaction is open on {what.topic}: what is on it cannot be known",
                where=f"topic {what.topic}",
                suggestion="run it again when that has ended",
                retriable=True,
            )
        time.sleep(0.1)
    starts = done.read_to or offsets_at(sink, places, records.timestamp(what.first))
    reading = Committed(sink, starts, time.monotonic() + _READ_BACK, ends)
    wanted = replay_id.encode()
    for chunk in reading:
        for message in chunk:
            headers = dict(message.headers() or ())
            if headers.get(REPLAY) != wanted:
                continue
            done.events += 1
            version = int(headers[records.SEQUENCE])
            created = int(records.parse_times([headers[records.TIME].decode()])[0])
            done.version = max(done.version, version)
            if AHEAD in headers:
                done.ahead[message.key().decode(), version] = created
            else:
                done.position = max(done.position, created)
    done.ahead = {key: at for key, at in done.ahead.items() if at > done.position}
    done.read_to = ends


# -- the hour that is lived twice ----------------------------------------------------------------


@dataclass(frozen=True)
class _RepeatedHours:
    """Which instant a local time is that stands for two, since the clocks went back.

    The publisher reads these rows before the change, as of the first pass, and again behind it, as
    of the second: what it has not published by then was written in the second. The table cannot
    tell afterwards, but the topic can. What is not there any more counts as of the first pass.

    Attributes:
        changes: the instants at which the clocks go back within the range, and by how much, µs.
        second: the events of the second passes.
    """

    changes: list[tuple[int, int]] = field(default_factory=list)
    second: set[Key] = field(default_factory=set)

    def once(self, rows: pa.Table) -> pa.Table:
        """Rows of a window without those that are of the other pass."""
        created = rows.column("create_time").to_numpy()
        is_first, is_second = self._passes(created)
        if not (is_first.any() or is_second.any()):
            return rows
        keys = (key in self.second for key in _keys(rows))
        was_second = np.fromiter(keys, bool, rows.num_rows)
        return rows.filter(pa.array(~((is_first & was_second) | (is_second & ~was_second))))

    def timed(self, rows: pa.Table) -> pa.Table:
        """Rows that were read as of the first pass, each with its time."""
        created = rows.column("create_time").to_numpy()
        if not self._passes(created)[0].any():
            return rows
        of_each = zip(_keys(rows), created.tolist(), strict=True)
        times = [self.instant(key, at) for key, at in of_each]
        place = rows.schema.get_field_index("create_time")
        return rows.set_column(place, EVENTS.field("create_time"), pa.array(times, pa.int64()))

    def instant(self, key: Key, created: int) -> int:
        """When an event was created, by what it would be of the first pass."""
        if key in self.second:
            for change, back in self.changes:
                if change - back <= created < change:
                    return created + back
        return created

    def _passes(self, created: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        is_first, is_second = np.zeros((2, len(created)), bool)
        for change, back in self.changes:
            is_first |= (created >= change - back) & (created < change)
            is_second |= (created >= change) & (created < change + back)
        return is_first, is_second


def _second_pass(config: Config, layout: Layout, what: Range) -> _RepeatedHours:
    """What the topic says of the range's repeated hours."""
    changes = [
        (change, back)
        for change, back in layout.repeated
        if change - back <= what.last and what.first < change + back
    ]
    hours = _RepeatedHours(changes)
    if not changes:
        return hours
    sink = config.sink
    counts = partition_counts(sink)
    places: list[Place] = [
        (topic, number)
        for topic in (sink.topic, sink.late_topic)
        for number in range(counts.get(topic, 0))
    ]
    for change, back in changes:
        starts = offsets_at(sink, places, change // 1000)
        reading, passed = Committed(sink, starts, time.monotonic() + _READ_BACK), set[Place]()
        for chunk in reading:
            for key, created, place in _events(config, chunk):
                if change <= created < change + back:
                    hours.second.add(key)
                elif created >= change + back + _DAY:
                    passed.add(place)
            if reading.unread <= passed:
                reading.close()
                break
    return hours


def _events(config: Config, chunk: list[Message]) -> Iterator[tuple[Key, int, Place]]:
    """Of records of ours: which event, when it was created, and where it stands."""
    ours = {app_id.encode() for app_id in (config.app.id, *config.app.former_ids)}
    for message in chunk:
        headers = dict(message.headers() or ())
        if headers.get(records.SOURCE) in ours and records.TIME in headers:
            key = message.key().decode(), int(headers[records.SEQUENCE])
            created = int(records.parse_times([headers[records.TIME].decode()])[0])
            yield key, created, (message.topic(), message.partition())


# -- pages ---------------------------------------------------------------------------------------


def _pages(
    store: EventStore, what: Range, done: _Done, unit: int, hours: _RepeatedHours
) -> Iterator[tuple[pa.Table, set[Key]]]:
    """Pages in the order in which they are published, and what of each was created after it."""
    if what.aggregate_id is not None:
        yield from _of_aggregate(store, what, done, hours)
        return
    # the boundary is below a value of a coarse column whose time may go on
    upto = what.last if unit == 1 else what.last + unit
    after, ahead = max(what.first - 1, done.position), set(done.ahead)
    while after < what.last:
        poll = store.poll(after, 0, None, at_most=upto)
        if not poll.has_rows or poll.upper <= after:
            return
        while after < poll.upper:
            page = store.page(after, poll.upper, _PAGE_ROWS, _PAGE_BYTES)
            batches, end = page.batches, poll.upper if page.end is None else page.end
            if not batches and page.end is not None:  # more rows of one moment than a page has
                batches = list(store.window(after, end, None))
            rows = hours.once(pa.Table.from_batches(batches, EVENTS))
            rows = _without(rows, ahead)
            early = _created_later(store, rows, end, what, ahead, hours)
            new = set(_keys(early))
            if rows.num_rows or new:
                yield _in_order(pa.concat_tables([rows, early])), new
            ahead |= new
            after = end


def _of_aggregate(
    store: EventStore, what: Range, done: _Done, hours: _RepeatedHours
) -> Iterator[tuple[pa.Table, set[Key]]]:
    assert what.aggregate_id is not None
    left = [VersionRange(what.aggregate_id, done.version + 1, _HIGHEST)]
    while left:
        rows, left = store.fetch(left, _PAGE_ROWS, _PAGE_BYTES)
        if not rows.num_rows:
            return
        rows = hours.timed(rows)
        created = rows.column("create_time").to_numpy()
        rows = rows.filter(pa.array((created >= what.first) & (created <= what.last)))
        if rows.num_rows:
            yield rows, set()


def _keys(rows: pa.Table) -> list[Key]:
    return list(zip(values(rows, "aggregate_id"), values(rows, "version"), strict=True))


def _without(rows: pa.Table, published: set[Key]) -> pa.Table:
    """Rows that were not published ahead of their time; those that were are forgotten."""
    if not published:
        return rows
    keys = _keys(rows)
    found = [key in published for key in keys]
    published.difference_update(key for key, is_there in zip(keys, found, strict=True) if is_there)
    return rows.filter(pa.array([not is_there for is_there in found], pa.bool_()))


def _created_later(  # noqa: PLR0913, PLR0917 (a page, and what it is compared with)
    store: EventStore, rows: pa.Table, end: int, what: Range, ahead: set[Key], hours: _RepeatedHours
) -> pa.Table:
    """Versions below those of a page that were created after it, within the range.

    Below the highest versions of each aggregate it looks down to one that was published before,
    since what is below that was looked at then; or past `_BELOW` that are none of the range's.
    """
    here = set(_keys(rows))
    found: list[pa.Table] = []
    asked, limit = list(_highest_runs(here).items()), 1
    while asked:
        lower: list[Key] = []
        below: dict[str, tuple[int, bool]] = {}
        for aggregate_id, chunk in _below(store, asked, limit).items():
            goes_on = limit == 1
            for version, read_as in chunk:
                key = (aggregate_id, version)
                created = hours.instant(key, read_as)
                is_within = what.first <= created <= what.last
                if key in ahead or (is_within and created <= end and key not in here):
                    break
                goes_on = goes_on or is_within
                if is_within and key not in here:
                    lower.append(key)
            else:
                below[aggregate_id] = chunk[-1][0], goes_on
        here.update(lower)
        left = [VersionRange(a, v, v) for a, v in lower]
        while left:
            some, left = store.fetch(left, _PAGE_ROWS, _PAGE_BYTES)
            found.append(hours.timed(some))
        asked, limit = [(a, version) for a, (version, on) in below.items() if on], _BELOW
    return pa.concat_tables(found) if found else EVENTS.empty_table()


def _highest_runs(keys: set[Key]) -> dict[str, int]:
    """Of each aggregate, where the highest versions begin that follow on one another."""
    begin: dict[str, int] = {}
    for aggregate_id, version in sorted(keys):
        if (aggregate_id, version - 1) not in keys:
            begin[aggregate_id] = version
    return begin


def _below(store: EventStore, bounds: list[Key], limit: int) -> dict[str, list[tuple[int, int]]]:
    """By aggregate: version and creation time of what is next below, the highest first."""
    found: dict[str, list[tuple[int, int]]] = {}
    for batch in store.below(bounds, limit):
        columns = (values(batch, name) for name in ("aggregate_id", "version", "create_time"))
        for aggregate_id, version, created in zip(*columns, strict=True):
            found.setdefault(aggregate_id, []).append((version, created))
    return {a: sorted(of, reverse=True) for a, of in found.items()}


def _in_order(rows: pa.Table) -> pa.Table:
    """By creation time across aggregates, by version within each."""
    codes = rows.column("aggregate_id").combine_chunks().dictionary_encode().indices.to_numpy()
    version = rows.column("version").to_numpy()
    created = rows.column("create_time").to_numpy()
    order = np.lexsort((version, codes))
    key = created[order].copy()
    starts = np.flatnonzero(np.append(True, codes[order][1:] != codes[order][:-1]))
    for start, end in zip(starts, np.append(starts[1:], len(order)), strict=True):
        np.maximum.accumulate(key[start:end], out=key[start:end])
    return rows.take(order[np.lexsort((version[order], key))])


# -- writing -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Events(Events):
    """Events that carry the headers of a replay."""

    replay_id: str = ""
    ahead: frozenset[Key] = frozenset()

    def _columns_of(self, rows: Any, late: Any, placed: npt.NDArray[np.int32]) -> records.Columns:
        columns = super()._columns_of(rows, late, placed)
        mark, ahead = (REPLAY, self.replay_id), (AHEAD, "1")
        each = zip(columns.headers, _keys(rows), strict=True)
        headers = [[*own, mark, *([ahead] if key in self.ahead else [])] for own, key in each]
        return replace(columns, headers=headers)


class _Writer:
    """Publishes pages, each in a transaction, by a transactional id of the replay's own.

    After an answer that leaves a doubt, `take_over` and a read of the topic come first.
    """

    def __init__(self, config: Config, topic: str, partitions: int, result: Replayed) -> None:
        self._app_id = config.app.id
        self._sink = config.sink.model_copy(update={"topic": topic, "delivery": "exactly_once"})
        self._partitions = partitions
        self._result = result
        self._refused: set[Key] = set()
        self._caution = Caution()
        self._owned: OwnedProducer | None = None

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._owned is not None:
            self._owned.close()

    def take_over(self) -> None:
        """A new producer: whatever an older one has sent is over, or refused."""
        if self._owned is not None:
            self._owned.close()
        self._owned = OwnedProducer(
            self._sink,
            self._app_id,
            f"replay.{self._result.id}",
            sends_singly=self._caution.sends_singly,
        )
        self._owned.ready()
        self._transactions = Transactions(
            self._sink, self._app_id, self._partitions, self._owned, self._caution
        )

    @property
    def needs_replacement(self) -> bool:
        """Whether the producer must not be used again, or is slow without need."""
        assert self._owned is not None
        return self._owned.needs_replacement or self._owned.sends_singly

    def publish(self, rows: pa.Table, ahead: set[Key]) -> None:
        """One page, without what the broker has refused before.

        Raises:
            SinkError: `RecordRefusedError`: that is left out from now on, and nothing was
                published. Others: it may be published; `take_over`, and read the topic back.
        """
        if self._refused:
            left = [key not in self._refused for key in _keys(rows)]
            rows = rows.filter(pa.array(left, pa.bool_()))
        if not rows.num_rows:
            return
        self._caution.reports_each = True  # which the headers of a replay need
        events = _Events(
            rows,
            self._app_id,
            self._partitions,
            None,
            records.partitions_of(rows, self._partitions),
            int(time.time() * 1e6),
            self._result.id,
            frozenset(ahead),
        )
        batch = Batch({self._sink.topic: events}, [])
        try:
            self._transactions.run(batch, no_crash, lambda _: None)
        except RecordRefusedError as refused:
            keys = _keys(rows)
            for row in sorted(refused.rows):
                self._refuse(keys[row], refused.reason)
            raise
        self._result.events += rows.num_rows
        self._result.transactions += 1

    def _refuse(self, key: Key, reason: str) -> None:
        self._refused.add(key)
        self._result.refused += 1
        if len(self._result.examples) < _MOST_SHOWN:
            self._result.examples.append(f"{key[0]}/{key[1]}: {reason}")
