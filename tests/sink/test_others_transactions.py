"""Transactions of other producers that are wanted on the topic, and that overlap.

One of them is open at any time, so that the last stable offset may be below what was published.
That is no missing marker; nor may it hide one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import pytest
from confluent_kafka import KafkaException, Producer

from eventpub import config
from eventpub.errors import SinkError
from eventpub.sink import MissingMarkerError, ShardSink, are_left_open, check_topics
from eventpub.sink.missing_markers import MARKER_TIMEOUT, PartitionId
from eventpub.sink.origin import Sources
from tests.sink.conftest import OwnBroker
from tests.sink.helpers import (
    APP,
    PARTITIONS,
    WHOLE,
    high_watermarks,
    identities,
    open_transactions,
    read_topic,
    settings,
    some_events,
    stable_offsets,
)
from tests.sink.mock_cluster import PRODUCE
from tests.sink.test_hazards import eventually, verification

FIRST, SECOND, THIRD = (some_events(WHOLE, 40, version) for version in (1, 101, 201))
OTHER = "billing"
SOURCES = Sources(frozenset({APP}), frozenset({OTHER}))
LONG = 2 * MARKER_TIMEOUT + 1
"""Seconds that a transaction of theirs is open: as long as two markers would be waited for."""

NewSink = Callable[[], ShardSink]


@pytest.fixture
def sink(own_broker: OwnBroker, topic_name: str) -> Iterator[config.Sink]:
    made = settings(topic_name, own_broker.open, ignored_sources=(OTHER,))
    check_topics(made)
    yield made
    own_broker.proxy.calm()


class Others:
    """Another producer's transactions, each by an id of its own."""

    def __init__(self, sink: config.Sink) -> None:
        self._sink = sink
        self._open: list[Producer] = []

    def begin(self) -> Producer:
        """Open one, with a record in each partition."""
        name = f"{OTHER}-{self._sink.topic}-{threading.get_ident()}-{len(self._open)}"
        producer = Producer(
            {
                "bootstrap.servers": self._sink.bootstrap_servers,
                "transactional.id": name,
                "log_level": 0,
            }
        )
        self._open.append(producer)
        producer.init_transactions(20)
        producer.begin_transaction()
        for partition in range(PARTITIONS):
            producer.produce(self._sink.topic, b"x", b"k", partition, headers={"ce_source": OTHER})
        assert producer.flush(10) == 0
        return producer

    @contextmanager
    def overlapping(self) -> Iterator[None]:
        """One is open at any time inside of this: each for LONG, a new one every LONG / 2."""
        stops = threading.Event()

        def go_on() -> None:
            last = self.begin()
            while not stops.wait(LONG / 2):
                before, last = last, self.begin()
                stops.wait(LONG / 2)
                before.commit_transaction(20)
            last.commit_transaction(20)

        thread = threading.Thread(target=go_on)
        before = len(self._open)
        thread.start()
        eventually(lambda: len(self._open) > before)
        try:
            yield
        finally:
            stops.set()
            thread.join()

    def end(self) -> None:
        """End all that are open."""
        for each in self._open:
            with suppress(KafkaException):
                each.commit_transaction(10)


@pytest.fixture
def others(sink: config.Sink) -> Iterator[Others]:
    made = Others(sink)
    yield made
    made.end()


def later(seconds: float, do: Callable[[], object]) -> threading.Timer:
    """Has it done in another thread."""
    timer = threading.Timer(seconds, do)
    timer.start()
    return timer


def ours(sink: config.Sink) -> list[tuple[str, int]]:
    """(aggregate, version) of each event of ours that consumers see."""
    found = read_topic(sink.bootstrap_servers, sink.topic)
    return identities([m for m in found if dict(m.headers() or ()).get("ce_source") != b"billing"])


def pairs(*tables: object) -> list[tuple[str, int]]:
    return sorted(
        pair
        for rows in tables
        for pair in zip(rows["aggregate_id"].to_pylist(), rows["version"].to_pylist(), strict=True)  # type: ignore[index]
    )


def test_an_idle_publisher_does_not_take_them_for_its_own(
    sink: config.Sink, new_sink: NewSink, others: Others
) -> None:
    owner = new_sink()
    list(owner.fold({}))
    others.begin()
    batch = owner.publish(FIRST)
    stable = stable_offsets(sink.bootstrap_servers, sink.topic)
    assert all(stable[p] < end for (_, p), end in batch.next_offsets.items()), "it is behind theirs"
    assert not are_left_open(sink, SOURCES, batch.next_offsets, 5.0)


def test_a_fold_waits_for_the_one_that_is_open_and_not_for_those_that_follow(
    sink: config.Sink, new_sink: NewSink, others: Others
) -> None:
    first = new_sink()
    list(first.fold({}))
    theirs = others.begin()
    batch = first.publish(FIRST)
    second = new_sink()
    before = high_watermarks(sink.bootstrap_servers, sink.topic)
    timers = [later(1, others.begin), later(LONG, theirs.commit_transaction)]
    began = time.monotonic()
    fold = second.fold(batch.next_offsets, batch.written, acknowledged=batch.next_offsets)
    assert list(fold) == [], "nothing of ours is unknown"
    waited = time.monotonic() - began
    for timer in timers:
        timer.join()
    assert LONG - 1 < waited < LONG + 5, waited
    assert len(open_transactions(sink.bootstrap_servers, sink.topic)) == PARTITIONS
    after = high_watermarks(sink.bootstrap_servers, sink.topic)
    written = {p: after[p] - before[p] for p in after}
    assert set(written.values()) == {2}, "another record of theirs and a marker: none of ours"
    second.publish(SECOND)


def test_what_is_not_known_of_ours_is_read_when_theirs_has_ended(
    sink: config.Sink, new_sink: NewSink, others: Others
) -> None:
    first = new_sink()
    list(first.fold({}))
    theirs = others.begin()
    first.publish(FIRST)
    timers = [later(1, others.begin), later(LONG, theirs.abort_transaction)]
    found = [
        pair
        for part in new_sink().fold({})
        for pair in zip(part.aggregate_ids, part.versions.tolist(), strict=True)
    ]
    for timer in timers:
        timer.join()
    assert sorted(found) == pairs(FIRST)


def test_who_is_asked_to_stop_does_not_wait_for_them(
    sink: config.Sink, new_sink: NewSink, others: Others
) -> None:
    others.begin()

    class StopError(Exception):
        pass

    def stop() -> None:
        raise StopError

    with pytest.raises(StopError):
        list(new_sink().fold({}, meanwhile=stop))
    with pytest.raises(StopError):
        new_sink().restore({(sink.topic, 0): (0, 1)}, stop)


def test_a_range_in_doubt_is_restored_beside_them(
    sink: config.Sink, new_sink: NewSink, others: Others
) -> None:
    first = new_sink()
    list(first.fold({}))
    with others.overlapping():
        batch = first.publish(FIRST)
        assert new_sink().restore(batch.written) == 0, "all of it was committed"


def test_publishing_goes_on_beside_them(
    sink: config.Sink, new_sink: NewSink, others: Others
) -> None:
    owner = new_sink()
    list(owner.fold({}))
    others.begin()
    began = time.monotonic()
    for number in range(5):
        others.begin()
        owner.publish(some_events(WHOLE, 40, 1 + 100 * number))
        owner.check_between()
        assert not owner.needs_replacement
    seconds = time.monotonic() - began
    others.end()
    assert sorted(ours(sink)) == pairs(*(some_events(WHOLE, 40, 1 + 100 * n) for n in range(5)))
    assert seconds < 5, "what stands between is read without waiting for theirs"


@pytest.mark.parametrize("theirs_is_first", [True, False])
def test_one_of_ours_that_was_left_open_is_found_beside_them(
    own_broker: OwnBroker,
    sink: config.Sink,
    new_sink: NewSink,
    others: Others,
    theirs_is_first: bool,
) -> None:
    """Before it or behind it; what of ours is open behind theirs shows when theirs has ended."""
    first = new_sink()
    list(first.fold({}))
    first.publish(FIRST)
    if theirs_is_first:
        theirs = others.begin()
    before, after = _leave_open(own_broker, sink)
    ranges = {place: (before[place], end) for place, end in after.items() if end > before[place]}
    saved = {place: end + 1 for place, (_, end) in ranges.items()}
    with others.overlapping():
        if theirs_is_first:
            later(LONG, theirs.commit_transaction)
        second = new_sink()
        with pytest.raises(MissingMarkerError) as caught:
            list(second.fold(saved, ranges, acknowledged=saved))
        assert caught.value.written.keys() == ranges.keys()
        assert are_left_open(sink, SOURCES, saved, 5.0)
        again = second.restore(caught.value.written)
        assert again > 0
        assert second.restore(ranges) == 0, "done again"
    second.publish(THIRD)
    seen = ours(sink)
    assert len(seen) == len(set(seen)) == 40 + again + 40
    assert set(seen) >= set(pairs(FIRST, THIRD))


def _leave_open(
    own_broker: OwnBroker, sink: config.Sink
) -> tuple[Mapping[PartitionId, int], Mapping[PartitionId, int]]:
    """Some of SECOND is written, and no marker follows; the ends before and after."""
    hasty = {"socket.timeout.ms": "1000", "message.timeout.ms": "900"}
    through = {"bootstrap_servers": own_broker.proxied, "properties": hasty}

    def ends() -> dict[PartitionId, int]:
        return {
            (sink.topic, p): end for p, end in high_watermarks(own_broker.open, sink.topic).items()
        }

    with verification(own_broker, on=False):
        with ShardSink(sink.model_copy(update=through), APP, WHOLE) as late:
            late.ready()
            own_broker.proxy.strike_next(PRODUCE, "held")
            with pytest.raises(SinkError):
                late.publish(SECOND)
        time.sleep(2)  # its abort is written
        before = ends()
        own_broker.proxy.release()
        eventually(lambda: ends() != before)
        time.sleep(1)
        return before, ends()
