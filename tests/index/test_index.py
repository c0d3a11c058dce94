"""The index keeps what a decision and a fold tell it, whole, across processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from eventpub.admission import EVENTS, Decision, Hold, SkippedGap
from eventpub.errors import StateError
from eventpub.index import Index

IDENTITY = {"app": "orders", "topic": "orders.events", "partitions": 8, "shard": [0, 2]}
HOLD = Hold("ä 'b' ", 3, 9, first_seen=100, attempts=2, next_attempt=300, since=50)
GAP = SkippedGap("a", 4, 5, 100, 200, 8, "max_backoff")


def decided(**changes: object) -> Decision:
    return Decision(EVENTS.empty_table(), **changes)  # type: ignore[arg-type]


def test_what_is_recorded_is_known_after_it_was_closed(tmp_path: Path) -> None:
    with Index(tmp_path / "0", IDENTITY) as index:
        assert index.is_new
        index.begin(baseline=7)
        index.record(
            decided(last={"a": 3, HOLD.aggregate_id: 2}, holds={HOLD.aggregate_id: HOLD}),
            {("orders.events", 2): 12},
            position=77,
        )
    with Index(tmp_path / "0", IDENTITY) as index:
        assert not index.is_new
        known = index.known(["a", "never", HOLD.aggregate_id])
        assert known.last == {"a": 3, HOLD.aggregate_id: 2}
        assert known.baseline == 7
        assert index.holds == {HOLD.aggregate_id: HOLD}
        assert index.offsets == {("orders.events", 2): 12}
        assert index.position == 77
        assert index.due(299) == []
        assert index.due(300) == [HOLD.aggregate_id]


def test_the_position_never_moves_back(tmp_path: Path) -> None:
    with Index(tmp_path, IDENTITY) as index:
        index.begin(None)
        index.record(decided(), {}, position=50)
        index.record(decided(), {}, position=40)
        assert index.position == 50


def test_a_closed_hold_is_gone(tmp_path: Path) -> None:
    with Index(tmp_path, IDENTITY) as index:
        index.begin(None)
        index.record(decided(holds={HOLD.aggregate_id: HOLD}), {}, 1)
        index.record(decided(holds={HOLD.aggregate_id: None}), {}, 2)
    with Index(tmp_path, IDENTITY) as index:
        assert index.holds == {}


def test_a_fold_raises_versions_and_never_lowers_them(tmp_path: Path) -> None:
    with Index(tmp_path, IDENTITY) as index:
        index.begin(None)
        index.record(decided(last={"a": 5}), {}, 1)
        index.fold_events({"a": 3, "b": 2}, {"a": [1, 2, 3], "b": [1, 2]}, {("t", 0): 9}, now=0)
        assert index.known(["a", "b"]).last == {"a": 5, "b": 2}
        assert index.offsets == {("t", 0): 9}


def test_a_fold_moves_a_hold_to_what_is_still_missing(tmp_path: Path) -> None:
    name = HOLD.aggregate_id
    with Index(tmp_path, IDENTITY) as index:
        index.begin(None)
        index.record(decided(holds={name: HOLD}), {}, 1)
        index.fold_events({name: 5}, {name: [3, 4, 5]}, {}, now=400)
        assert index.holds[name].first_missing == 6
        assert index.due(400) == [name]
        index.fold_events({name: 9}, {name: [6, 7, 8, 9]}, {}, now=500)
        assert index.holds == {}


def test_a_folded_skip_is_remembered_until_its_event_turns_up(tmp_path: Path) -> None:
    with Index(tmp_path, IDENTITY) as index:
        index.begin(None)
        index.fold_gaps([GAP], {("t.gaps", 0): 1}, now=0)
        assert index.known(["a"]).last == {"a": 5}
        assert index.known(["a"]).skipped == {"a": [(4, 5)]}
        index.fold_events({"a": 4}, {"a": [4]}, {}, now=0)
        assert index.known(["a"]).skipped == {"a": [(5, 5)]}
        index.fold_events({"a": 5}, {"a": [5]}, {}, now=0)
        assert index.known(["a"]).skipped == {}


def test_folding_a_skip_twice_changes_nothing(tmp_path: Path) -> None:
    with Index(tmp_path, IDENTITY) as index:
        index.begin(None)
        index.fold_gaps([GAP], {}, now=0)
        index.fold_events({"a": 4}, {"a": [4]}, {}, now=0)
        index.fold_gaps([GAP], {}, now=0)
        assert index.known(["a"]).skipped == {"a": [(5, 5)]}


def test_the_index_of_something_else_is_refused(tmp_path: Path) -> None:
    with Index(tmp_path, IDENTITY) as index:
        index.begin(None)
    with pytest.raises(StateError) as refused:
        Index(tmp_path, {**IDENTITY, "topic": "other"})
    assert refused.value.code == "index.foreign"
    Index(tmp_path, IDENTITY).close()


def test_an_index_that_another_has_open_is_refused_after_a_wait(tmp_path: Path) -> None:
    with Index(tmp_path, IDENTITY), pytest.raises(StateError) as refused:
        Index(tmp_path, IDENTITY, lock_timeout=0.2)
    assert refused.value.code == "index.locked"
    assert refused.value.retriable


def _record_and_die(path: Path) -> None:
    index = Index(path, IDENTITY)
    index.begin(None)
    index.record(decided(last={"a": 3}), {("t", 0): 5}, 9)
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_was_recorded_survives_a_kill(tmp_path: Path) -> None:
    child = multiprocessing.get_context("spawn").Process(target=_record_and_die, args=(tmp_path,))
    child.start()
    child.join(30)
    assert child.exitcode == -signal.SIGKILL
    with Index(tmp_path, IDENTITY) as index:
        assert index.known(["a"]).last == {"a": 3}
        assert index.offsets == {("t", 0): 5}


def test_rows_of_time_buckets_add_up_with_the_position_and_can_be_set(tmp_path: Path) -> None:
    with Index(tmp_path, IDENTITY) as index:
        index.begin(None)
        index.record(decided(), {}, 50, counted={7: 2, 8: 1})
        index.record(decided(), {}, 60, counted={8: 4})
    with Index(tmp_path, IDENTITY) as index:
        assert index.buckets == {7: 2, 8: 5}
        assert index.rows_of(9) == 0
        index.set_buckets({8: 3}, forget_below=8)
        assert index.buckets == {8: 3}


def test_refused_versions_are_remembered_and_folded(tmp_path: Path) -> None:
    with Index(tmp_path, IDENTITY) as index:
        index.begin(None)
        assert index.known(["a"]).refused == {}
        index.record(decided(), {}, 1, refused={"a": [0]})
        refused = {"a": [-1], "b": [0]}
        index.fold_events({}, {}, {("orders.events.dead", 0): 5}, 0, refused)
    with Index(tmp_path, IDENTITY) as index:
        assert index.known(["a", "b", "c"]).refused == {"a": [-1, 0], "b": [0]}
        assert index.offsets == {("orders.events.dead", 0): 5}


def test_how_many_dead_letters_came_in_a_row_is_kept(tmp_path: Path) -> None:
    with Index(tmp_path, IDENTITY) as index:
        index.begin(None)
        index.record(decided(), {}, 1, dead_run=3)
        index.record(decided(), {}, 2)
    with Index(tmp_path, IDENTITY) as index:
        assert index.dead_run == 3


def fill(
    directory: Path, ids: list[str], position: int, offsets: dict[tuple[str, int], int]
) -> None:
    """An index that knows version 5 of each aggregate, a skip and a hold of the first one."""
    hold = Hold(ids[0], 6, 8, first_seen=1, attempts=1, next_attempt=2, since=1)
    with Index(directory, IDENTITY) as index:
        index.begin(None)
        index.record(
            decided(last=dict.fromkeys(ids, 5), holds={ids[0]: hold}, skipped={ids[0]: [(2, 2)]}),
            offsets,
            position,
            refused={ids[0]: [0]},
        )


def test_indexes_of_another_number_of_shards_are_moved_aggregate_by_aggregate(
    tmp_path: Path,
) -> None:
    fill(tmp_path / "0", ["a", "b"], 70, {("t", 0): 10, ("t", 2): 12})
    fill(tmp_path / "1", ["c", "d"], 60, {("t", 1): 11, ("t", 3): 13})
    with Index(tmp_path / "new", IDENTITY) as index:
        index.move_from(
            [tmp_path / "0", tmp_path / "1"], {"a", "d"}.__contains__, [("t", 0), ("t", 3)], 40
        )
        assert set(index.holds) == {"a"}
    with Index(tmp_path / "new", IDENTITY) as index:
        assert not index.is_new
        known = index.known(["a", "b", "c", "d"])
        assert known.last == {"a": 5, "d": 5}
        assert known.skipped == {"a": [(2, 2)]}
        assert known.refused == {"a": [0]}
        assert set(index.holds) == {"a"}
        assert index.offsets == {("t", 0): 10, ("t", 3): 13}
        assert (index.position, index.baseline) == (60, 40)


def test_what_was_written_is_known_until_a_fold_has_moved_on(tmp_path: Path) -> None:
    here, there = ("t", 0), ("t", 1)
    with Index(tmp_path / "0", IDENTITY) as index:
        index.begin(None)
        index.record(decided(), {here: 11, there: 6}, 1, written={here: (0, 10), there: (0, 5)})
        index.record(decided(), {here: 31}, 2, written={here: (20, 30)})
        assert index.written == {here: (20, 30), there: (0, 5)}
        index.record(decided(), {there: 9}, 3, written={there: (5, 8)})
        assert index.written[there] == (0, 8), "written where the marker should have been"
        index.moved_to({here: 40, there: 9})
    with Index(tmp_path / "0", IDENTITY) as index:
        assert index.written == {there: (0, 8)}
        index.note_unmarked({there: (0, 8)})
    with Index(tmp_path / "1", IDENTITY) as index:
        index.move_from([tmp_path / "0"], lambda _: True, [there], None)
        assert (index.written, index.unmarked) == ({there: (0, 8)}, {there: (0, 8)})
        index.restored()
        assert (index.written, index.unmarked, index.offsets) == ({}, {}, {there: 0})


def test_what_is_restored_is_not_skipped_by_an_index_that_is_behind(tmp_path: Path) -> None:
    with Index(tmp_path, IDENTITY) as index:
        index.begin(None)
        index.note_unmarked({("t", 0): (5, 8)})
        index.restored()
        assert index.offsets == {}


def test_a_request_means_what_it_meant_first(tmp_path: Path) -> None:
    with Index(tmp_path, IDENTITY) as index:
        index.begin(None)
        assert index.resolved("one") is None
        index.resolve("one", 3, ["one", "two"])
        index.resolve("two", 4, ["one", "two"])
    with Index(tmp_path, IDENTITY) as index:
        assert (index.resolved("one"), index.resolved("two")) == (3, 4)
        index.resolve("three", 5, ["three"])
        assert index.resolved("one") is None


def test_where_one_of_the_former_indexes_is_gone_there_is_no_position(tmp_path: Path) -> None:
    fill(tmp_path / "0", ["a"], 70, {("t", 0): 10})
    with Index(tmp_path / "new", IDENTITY) as index:
        index.move_from(
            [tmp_path / "0", tmp_path / "1"], lambda _: True, [("t", 0), ("t", 1)], None
        )
        assert index.position is None
        assert index.offsets == {("t", 0): 10}


def test_holds_and_skips_are_seen_beside_the_process_that_has_the_index(tmp_path: Path) -> None:
    fill(tmp_path / "0", ["a", "b"], 1, {})
    with Index(tmp_path / "0", IDENTITY):
        holds, skipped = Index.glance(tmp_path / "0")
    assert [hold.aggregate_id for hold in holds] == ["a"]
    assert skipped == {"a": [(2, 2)]}
    assert Index.glance(tmp_path / "none") == ([], {})


def test_a_moved_index_has_read_only_as_far_as_all_that_it_came_from(tmp_path: Path) -> None:
    for number, position in ((0, 70), (1, None)):
        with Index(tmp_path / f"2-shards-{number}", IDENTITY) as former:
            former.begin(None)
            former.record(decided(last={f"a{number}": 1}), {}, position)
    with Index(tmp_path / "1-shards-0", IDENTITY) as index:
        directories = [tmp_path / f"2-shards-{number}" for number in (0, 1)]
        index.move_from(directories, lambda _: True, [], None)
        assert index.known(["a0", "a1"]).last == {"a0": 1, "a1": 1}
        assert index.position is None
