"""What a lane promises: a runner's work comes to it in order, and a stop at once."""

from __future__ import annotations

import threading

import pyarrow as pa
import pytest

from eventpub.admission.model import EVENTS
from eventpub.channel import Comparison, Lane, Request, Stop, Window, Work


def test_work_comes_in_order() -> None:
    lane = Lane()
    rows = pa.Table.from_pylist([{"aggregate_id": "a", "version": 1, "payload": b"\0"}], EVENTS)
    work: list[Work] = [
        Window(1, 10, open_since=3),
        Window(2, 20, after=10, rows=rows),
        Window(3, 30, after=20, rows=EVENTS.empty_table()),
        Comparison(1, (4, 5)),
        Request("r", "skip", "ä", 1, 2),
        Stop(),
    ]
    for message in work:
        lane.send(message)
    found = [lane.receive() for _ in work]
    assert found == work
    tables = [message.rows for message in found if isinstance(message, Window)]
    assert tables[0] is None
    assert tables[1] is not None
    assert tables[1].equals(rows)
    assert tables[2] is not None
    assert tables[2].num_rows == 0


def test_a_stop_is_known_before_its_turn_comes() -> None:
    """A fold may take hours, and a transaction a minute."""
    lane = Lane()
    lane.send(Window(1, 10))
    lane.send(Stop())
    assert lane.is_stopping
    assert lane.receive() == Window(1, 10), "what a runner does with it is its own affair"


def test_who_waits_for_work_is_woken() -> None:
    lane = Lane()
    found: list[object] = []
    waits = threading.Thread(target=lambda: found.append(lane.receive()))
    waits.start()
    lane.wake()
    waits.join(10.0)
    assert found == [None]
    lane.wake()
    lane.send(Window(1, 10))
    assert lane.receive() is None, "or the next one that waits"
    assert lane.receive() == Window(1, 10)


def test_who_waits_for_long_may_do_what_is_due_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eventpub.channel._IDLE_AFTER", 0.1)
    lane = Lane()
    assert [lane.receive() for _ in range(3)] == [None] * 3
    lane.send(Window(1, 10))
    assert lane.receive() == Window(1, 10)
