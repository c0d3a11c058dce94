"""What the channel between the coordinator and a runner promises."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pyarrow as pa
import pytest

from eventpub.admission import EVENTS
from eventpub.channel import (
    Comparison,
    Farewell,
    Folding,
    FromRunner,
    Hello,
    Lease,
    Report,
    Request,
    Stop,
    Window,
    Work,
)
from eventpub.channel.lane import Lost, Received
from eventpub.channel.local import LocalLink
from eventpub.errors import SinkError, StateError
from tests.channel.ends import Coordinator

Connect = Callable[[int], LocalLink]

LEASE = Lease(3, low=5, position=9, acknowledged={("events", 1): 17})


@pytest.fixture
def coordinator() -> Coordinator:
    return Coordinator()


@pytest.fixture
def connect(coordinator: Coordinator) -> Connect:
    return lambda shard: LocalLink(
        Hello(shard, "here", 7), coordinator.events.put, coordinator.is_current
    )


def test_a_runner_joins_and_is_given_its_lease(coordinator: Coordinator, connect: Connect) -> None:
    link = connect(2)
    lane = coordinator.joined()
    assert (lane.shard, lane.hello.attempt, lane.hello.where) == (2, 7, "here")
    lane.send(LEASE)
    assert link.lease() == LEASE


def test_work_comes_in_order(coordinator: Coordinator, connect: Connect) -> None:
    link = connect(0)
    lane = coordinator.joined()
    rows = pa.Table.from_pylist([{"aggregate_id": "a", "version": 1, "payload": b"\0"}], EVENTS)
    work: list[Work] = [
        Window(1, 10, open_since=3),
        Window(2, 20, after=10, rows=rows),
        Window(3, 30, after=20, rows=EVENTS.empty_table()),
        Comparison(1, (4, 5)),
        Request("r", "skip", "ä", 1, 2),
        Stop(),
    ]
    lane.send(LEASE)
    for message in work:
        lane.send(message)
    link.lease()
    found = [link.receive() for _ in work]
    assert found == work
    tables = [message.rows for message in found if isinstance(message, Window)]
    assert tables[0] is None
    assert tables[1] is not None
    assert tables[1].equals(rows)
    assert tables[2] is not None
    assert tables[2].num_rows == 0


def test_what_a_runner_says_comes_in_order(coordinator: Coordinator, connect: Connect) -> None:
    link = connect(0)
    lane = coordinator.joined()
    refused = SinkError("sink.denied", "no", where="topic", suggestion="ask", retriable=True)
    sent: list[FromRunner] = [
        Folding(5, 9),
        Report(0, done=4, buckets={7: 2}, unfinished=[7]),
        Farewell(refused),
    ]
    for message in sent:
        link.send(message)
    for message in sent:
        received = coordinator.next(Received)
        assert received.lane is lane
        if isinstance(message, Farewell):
            assert isinstance(received.message, Farewell)
            assert isinstance(received.message.error, SinkError)
            assert received.message.error.to_dict() == refused.to_dict()
        else:
            assert received.message == message


def test_a_farewell_is_the_last_that_is_heard(coordinator: Coordinator, connect: Connect) -> None:
    link = connect(0)
    coordinator.joined()
    link.send(Farewell())
    assert coordinator.next(Received).message == Farewell()
    assert coordinator.nothing_happens(), "it was not lost"


def test_who_is_told_to_stop_before_there_was_a_lease_has_none(
    coordinator: Coordinator, connect: Connect
) -> None:
    link = connect(0)
    coordinator.joined().send(Stop())
    assert link.lease() is None
    assert link.is_stopping


def test_a_stop_is_known_before_its_turn_comes(coordinator: Coordinator, connect: Connect) -> None:
    """A fold may take hours, and a transaction a minute."""
    link = connect(0)
    lane = coordinator.joined()
    lane.send(LEASE)
    lane.send(Window(1, 10))
    lane.send(Stop())
    assert link.is_stopping
    link.lease()
    assert link.receive() == Window(1, 10), "what it does with it is its own affair"


def test_a_runner_that_ends_without_a_farewell_is_lost(
    coordinator: Coordinator, connect: Connect
) -> None:
    link = connect(0)
    lane = coordinator.joined()
    link.lose()
    assert coordinator.next(Lost).lane is lane


def test_who_waits_for_work_is_woken(coordinator: Coordinator, connect: Connect) -> None:
    link = connect(0)
    lane = coordinator.joined()
    found: list[object] = []
    waits = threading.Thread(target=lambda: found.append(link.receive()))
    waits.start()
    link.wake()
    waits.join(10.0)
    assert found == [None]
    link.wake()
    lane.send(Window(1, 10))
    assert link.receive() is None, "or the next one that waits"
    assert link.receive() == Window(1, 10)


def test_who_waits_for_long_may_do_what_is_due_meanwhile(
    coordinator: Coordinator, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eventpub.channel.local._IDLE_AFTER", 0.1)
    link = connect(0)
    lane = coordinator.joined()
    coordinator.leases = {(0, LEASE.number)}
    threading.Timer(0.5, lambda: lane.send(LEASE)).start()
    assert link.lease() == LEASE
    assert [link.receive() for _ in range(3)] == [None] * 3
    lane.send(Window(1, 10))
    while (work := link.receive()) is None:
        continue
    assert work == Window(1, 10)


def test_whether_a_lease_is_still_in_force_is_asked(
    coordinator: Coordinator, connect: Connect
) -> None:
    link = connect(2)
    coordinator.joined().send(LEASE)
    link.lease()
    coordinator.leases = {(2, LEASE.number)}
    link.confirm()
    coordinator.leases = {(2, LEASE.number + 1), (1, LEASE.number)}
    with pytest.raises(StateError) as error:
        link.confirm()
    assert (error.value.code, error.value.retriable) == ("run.superseded", True)


def test_runners_do_not_share_anything(coordinator: Coordinator, connect: Connect) -> None:
    links = [connect(number) for number in range(3)]
    joined = [coordinator.joined() for _ in links]
    lanes = {lane.shard: lane for lane in joined}
    for number, lane in lanes.items():
        lane.send(Window(number, 10 * number))
    assert links[0].receive() == Window(0, 0)
    assert links[2].receive() == Window(2, 20)
    links[2].send(Report(2, done=2))
    while not isinstance(event := coordinator.events.get(timeout=10.0), Received):
        pass
    assert event.lane is lanes[2]
