"""Notes of Spark's processes, requests to them, and what a planner reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from eventpub.channel import Request
from eventpub.coordinator.events import Log
from eventpub.errors import StoreError
from eventpub.spark.driver import Observed
from eventpub.spark.notes import Notes, asked, leave, of_one_batch
from eventpub.state import StateDir


@pytest.fixture
def state(tmp_path: Path) -> StateDir:
    return StateDir(tmp_path / "state")


def test_a_note_is_taken_once_in_the_order_of_its_writer(state: StateDir) -> None:
    writer, reader = Notes(state), Notes(state)
    for number in range(3):
        writer.put({"number": number})
    assert [note["number"] for note in reader.take()] == [0, 1, 2]
    assert [*reader.take()] == []


def test_a_note_whose_writer_was_killed_is_none(state: StateDir) -> None:
    notes = Notes(state)
    notes.put({"number": 1})
    (state.spark_scratch / "notes" / "2.json.abc.new").write_text('{"num')
    (state.spark_scratch / "notes" / "3.json").write_text('{"num')  # as after a power failure
    notes.put({"number": 4})
    assert [note["number"] for note in notes.take()] == [1, 4]


def test_no_more_notes_are_left_than_a_publisher_that_hangs_can_take(
    state: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eventpub.spark.notes._MOST", 2)
    notes = Notes(state)
    for number in range(5):
        notes.put({"number": number})
    assert [note["number"] for note in notes.take()] == [0, 1]


def test_the_planner_is_asked_what_was_left_last(state: StateDir) -> None:
    assert asked(state) == []
    requests = [Request("r", "publish", "a", 1, searched=(4, 5)), Request("s", "retry", "b")]
    leave(state, requests)
    assert asked(state) == requests
    leave(state, requests[1:])
    assert asked(state) == requests[1:]


def test_what_was_answered_is_not_asked_again_on_a_full_disk(
    state: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(state, [Request("r", "publish", "a", 1)])
    monkeypatch.setattr("eventpub.spark.notes.replace_file", Mock(side_effect=OSError))
    leave(state, [])
    assert asked(state) == []


def test_one_request_of_a_batch_publishes() -> None:
    """The second would not find on the topic what the first publishes."""
    first, again = Request("1", "publish", "a", 2), Request("2", "publish", "a", 2)
    others = [Request("4", "retry", "a"), Request("5", "retry", "a")]
    assert of_one_batch([first, again, *others]) == [first, *others]
    listed = Request("6", "list", "")
    assert of_one_batch([listed, others[0], first, others[1]]) == [listed, *others], "next time"
    assert of_one_batch([listed, again]) == [listed, again]


def test_what_a_planner_sees_is_noted_once_a_second_and_a_line_at_once() -> None:
    notes: list[dict[str, Any]] = []
    observed = Observed(notes.append)
    observed.polled(0.0)
    observed.progress.comparisons += 1
    observed.polled(0.5)
    assert len(notes) == 1
    observed.do(Log("warning", "something", {"rows": 1}))
    observed.polled(0.6)
    assert notes[1]["lines"] == [("warning", "something", {"rows": 1})]
    assert notes[1]["counted"]["comparisons"] == 1
    observed.polled(2.0)
    assert (notes[2]["lines"], notes[2]["counted"]["comparisons"]) == ([], 0)
    observed.failed(StoreError("store.unreachable", "gone"), 4.0)
    assert notes[3]["checks"]["boundary"] == ("error", "store.unreachable: gone")
    assert "store.unreachable" in notes[3]["error"]
    observed.polled(6.0)
    assert notes[4]["checks"]["database"] == ("ok", "")
