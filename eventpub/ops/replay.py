"""Publishing a range of the store once more, on purpose, to another topic.

The rows are read by creation time, page by page; each page is one transaction of a `ShardSink`, and
every record says which replay it belongs to. What must hold: within an aggregate versions ascend,
also where their times do not, and a replay that is run again publishes nothing twice. The topic
says what is done: its records tell up to where the replay has come. It takes the memory of a page,
or of the rows of one moment where these are more.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pyarrow as pa

from eventpub.admission import Shard
from eventpub.config import Config, Sink, format_time
from eventpub.errors import ConfigError, SinkError
from eventpub.ops.repeated_hours import Key, RepeatedHours, keys_of
from eventpub.ops.replay_pages import Done, Pages, Range
from eventpub.sink import ShardSink, faults, records
from eventpub.sink.faults import RecordRefusedError
from eventpub.sink.reading import Place, offsets_at, read_committed
from eventpub.sink.topics import create, list_offsets, partition_counts
from eventpub.sources.mysql import EventStore

REPLAY = "eventpub_replay"
"""Header with the id of the replay."""
AHEAD = "eventpub_replay_ahead"
"""Header of an event that was created after a later version of its aggregate."""

_FAILURES = 4
"""So many in a row, without an event published, end a replay."""
_SETTLE = 30.0
_MOST_SHOWN = 20
_LAST_OFFSETS = 200
"""Of each partition, looked at for events of a publisher; aborted records and the ends of
transactions are of these."""
_TOPIC_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}")


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
    hours = RepeatedHours.of_range(config, layout, what.first, what.last)
    with EventStore(readable, layout) as store:
        partitions = _topic(config, what.topic)
        done = Done(places=[(what.topic, number) for number in range(partitions)])
        return _Replay(config, what, done, Pages(store, layout, what, done, hours)).run(
            lambda: store.counts([(what.first - 1, what.last)])[0], on_progress
        )


class _Replay:
    """One run of a replay."""

    def __init__(self, config: Config, what: Range, done: Done, pages: Pages) -> None:
        self._config = config
        self._what = what
        self._done = done
        self._pages = pages
        self._result = Replayed(what.named(config.app.id))
        self._refused: set[Key] = set()

    def run(self, count: Callable[[], int], on_progress: Progress | None) -> Replayed:
        """Publish what is left, with a new writer after each failure."""
        result, what = self._result, self._what
        failures, reached, total = 0, -1, None
        sink = self._config.sink.model_copy(
            update={"topic": what.topic, "delivery": "exactly_once"}
        )
        shard, owner = Shard(0, 1, len(self._done.places)), f"replay.{result.id}"

        def show() -> None:
            if on_progress is not None:
                on_progress(result.before + result.events + result.refused, total)

        while True:
            with ShardSink(sink, self._config.app.id, shard, owner=owner) as writer:
                writer.ready()  # whatever a writer before has sent is over, or refused
                self._read_back()
                if reached < 0:
                    result.before = self._done.events
                    total = count() if on_progress and what.aggregate_id is None else None
                    show()
                result.events = self._done.events - result.before
                failures = failures if self._done.events + result.refused == reached else 0
                reached = self._done.events + result.refused
                try:
                    if self._publish(writer, show):
                        return result
                except SinkError as error:
                    failures += 1
                    if not error.retriable or failures >= _FAILURES:
                        raise

    def _publish(self, writer: ShardSink, show: Callable[[], None]) -> bool:
        """Publish what is left; False where it goes on with another writer.

        Raises:
            SinkError: `RecordRefusedError`: that is left out from now on, and nothing was
                published. Others: it may be published; the topic is read back.
        """
        result = self._result
        for page, ahead in self._pages:
            is_left = [key not in self._refused for key in keys_of(page)]
            rows = page.filter(pa.array(is_left, pa.bool_()))
            if left := keys_of(rows):
                mark, is_ahead = (REPLAY, result.id), (AHEAD, "1")
                marks = [[mark, is_ahead] if key in ahead else [mark] for key in left]
                try:
                    writer.publish(rows, marks=marks)
                except RecordRefusedError as refused:
                    for row in sorted(refused.rows):
                        self._refuse(left[row], refused.reason)
                    raise
                result.events += rows.num_rows
                result.transactions += 1
            show()
            if writer.needs_replacement:
                return False
        return True

    def _refuse(self, key: Key, reason: str) -> None:
        self._refused.add(key)
        self._result.refused += 1
        if len(self._result.examples) < _MOST_SHOWN:
            self._result.examples.append(f"{key[0]}/{key[1]}: {reason}")

    def _read_back(self) -> None:
        """Add what is new on the topic to `done`; the replay's own open transactions are over."""
        what, done, places, sink = self._what, self._done, self._done.places, self._config.sink
        deadline = time.monotonic() + _SETTLE
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
        wanted = self._result.id.encode()
        for chunk in read_committed(sink, starts, ends=ends):
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
    starts = {place: max(0, end - _LAST_OFFSETS) for place, end in ends.items()}
    for chunk in read_committed(sink, starts, ends=ends):
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
