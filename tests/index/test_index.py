"""The index keeps what a decision and a fold tell it, whole, across processes."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import shutil
import signal
import uuid
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from rocksdict import Options, Rdict

from eventpub.admission.model import EVENTS, Decision, Hold, Rewritten, Seen, SkippedGap
from eventpub.errors import StateError
from eventpub.index import Index, Pending, folder_for, glance, summary
from eventpub.index.database import ROCKSDB, Database, Overlay
from eventpub.times import ZONES_DIFFER

SECOND = 1_000_000
IDENTITY = {"app": "orders", "topic": "orders.events", "partitions": 8, "shard": [0, 2]}
HOLD = Hold("ä 'b' ", 3, 9, first_seen=100, attempts=2, next_attempt=300, since=50)
TEXT, UUIDS, COLUMNS = "text of `id`", "UUID of `id`", ("`id`", "`other`")
GAP = SkippedGap("a", 4, 5, 100, 200, 8, "max_backoff")


def decided(**changes: object) -> Decision:
    return Decision(EVENTS.empty_table(), **changes)  # type: ignore[arg-type]


def move(index: Index, *arguments: Any, everywhere: bool = False) -> None:
    """Take over former indexes of the same identity."""

    def adopts(found: Any) -> bool:
        return bool(found["app"] == IDENTITY["app"])

    def settled(_: int | None, highest: int) -> int:
        return highest - 10

    index.move_from(*arguments, settled=settled, adopts=adopts, everywhere=everywhere)


def fold(index: Index, last: dict[str, int], *arguments: Any, **more: Any) -> None:
    """Events that were read back, of which no time is asked."""
    index.fold_events(last, *arguments, times=dict.fromkeys(last, Seen(1, True)), **more)


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
        assert index.holds.due(299) == []
        assert index.holds.due(300) == [HOLD.aggregate_id]


def test_c11_it_can_be_closed_on_a_full_disk_and_has_what_it_said_afterwards(
    small_disk: Path,
) -> None:
    index = Index(small_disk / "0", IDENTITY)
    index.begin(None)
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as out, suppress(OSError):
        while out.write(b"\0" * 65536) == 65536:
            pass

    def record_until_it_fails() -> None:
        for position in range(10_000):
            last = {f"a-{position}-{n}": 1 for n in range(1000)}
            index.record(decided(last=last), {}, position)

    with pytest.raises(StateError) as caught:
        record_until_it_fails()
    assert caught.value.code == "index.disk_full"
    written = index.position
    index.close()
    ballast.unlink()
    with Index(small_disk / "0", IDENTITY) as index:
        assert index.position == written


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
        fold(index, {"a": 3, "b": 2}, {"a": [1, 2, 3], "b": [1, 2]}, {("t", 0): 9}, now=0)
        assert index.known(["a", "b"]).last == {"a": 5, "b": 2}
        assert index.offsets == {("t", 0): 9}


def test_a_fold_moves_a_hold_to_what_is_still_missing(tmp_path: Path) -> None:
    name = HOLD.aggregate_id
    with Index(tmp_path, IDENTITY) as index:
        index.begin(None)
        index.record(decided(holds={name: HOLD}), {}, 1)
        fold(index, {name: 5}, {name: [3, 4, 5]}, {}, now=400)
        assert index.holds[name].first_missing == 6
        assert index.holds.due(400) == [name]
        fold(index, {name: 9}, {name: [6, 7, 8, 9]}, {}, now=500)
        assert index.holds == {}


def test_a_folded_skip_is_remembered_until_its_event_turns_up(tmp_path: Path) -> None:
    with Index(tmp_path, IDENTITY) as index:
        index.begin(None)
        index.fold_gaps([GAP], {("t.gaps", 0): 1}, now=0)
        assert index.known(["a"]).last == {"a": 5}
        assert index.known(["a"]).skipped == {"a": [(4, 5)]}
        fold(index, {"a": 4}, {"a": [4]}, {}, now=0)
        assert index.known(["a"]).skipped == {"a": [(5, 5)]}
        fold(index, {"a": 5}, {"a": [5]}, {}, now=0)
        assert index.known(["a"]).skipped == {}


def test_folding_a_skip_twice_changes_nothing(tmp_path: Path) -> None:
    with Index(tmp_path, IDENTITY) as index:
        index.begin(None)
        index.fold_gaps([GAP], {}, now=0)
        fold(index, {"a": 4}, {"a": [4]}, {}, now=0)
        index.fold_gaps([GAP], {}, now=0)
        assert index.known(["a"]).skipped == {"a": [(5, 5)]}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"topic": "other"}, "sink.topic 'orders.events', not to sink.topic 'other'"),
        (
            {"app": "sales", "topic": "other"},
            "app.id 'orders' and sink.topic 'orders.events', not to app.id 'sales' and"
            " sink.topic 'other'",
        ),
        ({"shard": [1, 2]}, "shard 0 of 2, not to shard 1 of 2"),
    ],
)
def test_the_index_of_something_else_is_refused(
    tmp_path: Path, other: dict[str, Any], said: str
) -> None:
    with Index(tmp_path, IDENTITY) as index:
        index.begin(None)
    with pytest.raises(StateError) as refused:
        Index(tmp_path, {**IDENTITY, **other})
    assert refused.value.code == "state.foreign"
    assert refused.value.message == f"this state belongs to {said}"
    fix = refused.value.suggestion or ""
    for name, advice in (("app", "change it back"), ("topic", "sink.accept_topic_id")):
        assert (advice in fix) is (name in other), fix
    assert fix.endswith("what was published is read back from the topic")
    Index(tmp_path, IDENTITY).close()


def test_an_index_that_another_has_open_is_refused_after_a_wait(tmp_path: Path) -> None:
    with Index(tmp_path, IDENTITY), pytest.raises(StateError) as refused:
        Index(tmp_path, IDENTITY, lock_timeout=0.2)
    assert refused.value.code == "index.locked"
    assert refused.value.retriable


@pytest.mark.parametrize("folder", ["BLOCKCHAIN", "LOCK: Corruption, Permission denied"])
def test_what_is_wrong_is_told_whatever_the_folder_is_called(tmp_path: Path, folder: str) -> None:
    """A damaged index in a folder BLOCKCHAIN counted as locked, and its shard waited for good."""
    place = tmp_path / folder / "LOCK" / "0"
    with Index(place, IDENTITY) as index:
        index.begin(None)
        with pytest.raises(StateError) as of:
            Index(place, IDENTITY, lock_timeout=0.0)
    assert of.value.code == "index.locked"
    (place / (place / "CURRENT").read_text().strip()).write_bytes(b"")
    with pytest.raises(StateError) as of:
        Index(place, IDENTITY)
    assert of.value.code == "index.corrupt"


def test_a_lack_of_descriptors_passes(tmp_path: Path) -> None:
    """It stopped the publisher, which advised to delete the index."""
    with Index(tmp_path / "0", IDENTITY) as index:
        index.begin(None)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(lowest := os.dup(0))
    codes = []
    for more in range(30):
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + more, limits[1]))
        try:
            Index(tmp_path / "0", IDENTITY, lock_timeout=0.0).close()
            codes.append("")
        except StateError as error:
            codes.append(error.code if error.retriable else f"not retriable: {error.code}")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert set(codes) == {"state.too_many_files", ""}, codes


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
        assert index.counts.since(0) == {7: 2, 8: 5}
        assert index.counts.of(9) == 0
        index.set_buckets({8: 3}, forget_below=8)
        assert index.counts.since(0) == {8: 3}


def test_a17_thirty_idle_days_leave_the_buckets_of_the_horizon(tmp_path: Path) -> None:
    """Of an event a minute."""
    day, horizon, began = 86_400, 300, 1_795_000_000
    ended = began + 30 * day
    with Index(tmp_path, IDENTITY) as index:
        index.begin(None)
        for now in range(began, ended, 1200):
            counted = dict.fromkeys(range(now - 1140, now + 60, 60), 1)
            index.record(decided(), {}, now, counted=counted, forget_below=now - horizon)
    with Index(tmp_path, IDENTITY) as index:
        kept = index.counts.since(0)
        assert list(kept) == list(range(ended - 1200 - horizon, ended - 1140, 60))
        # what an open transaction still needs is not taken
        first = min(kept)
        index.record(decided(), {}, ended, counted={ended: 1}, forget_below=first)
        assert min(index.counts.since(0)) == first


def test_a10_whether_there_is_a_baseline_stays_undecided_until_it_is_decided(
    tmp_path: Path,
) -> None:
    with Index(tmp_path, IDENTITY) as index:
        index.begin(None)
        index.note_truncated(True, 70)
        index.note_truncated(False, 60)
    with Index(tmp_path, IDENTITY) as index:
        assert index.undecided == (True, 70, True)
        index.decide_baseline(50)
        index.note_truncated(False, 90)
    with Index(tmp_path, IDENTITY) as index:
        assert index.undecided is None
        index.note_truncated(True, 0)  # an older copy, which lacks what was cut off since
        index.note_truncated(True, 95)
    with Index(tmp_path, IDENTITY) as index:
        assert index.undecided == (True, 95, False)
        assert index.baseline == 50


def test_a9_very_many_holds_are_opened_fast_and_asked_for_in_their_order(tmp_path: Path) -> None:
    holds = {f"a-{n}": replace(HOLD, aggregate_id=f"a-{n}", next_attempt=n) for n in range(50_000)}
    with Index(tmp_path, IDENTITY) as index:
        index.begin(None)
        index.record(decided(holds=holds), {}, 1)
    with Index(tmp_path, IDENTITY) as index:
        assert len(index.holds) == 50_000
        assert index.holds.due(10, 3) == ["a-0", "a-1", "a-2"]
        later = {f"a-{n}": replace(holds[f"a-{n}"], next_attempt=10**6) for n in range(2)}
        index.record(decided(holds={**later, "a-2": None}), {}, 1)
        assert index.holds.due(5) == ["a-3", "a-4", "a-5"]
        assert index.holds.next_due() == 3
        assert index.holds.oldest() == HOLD.since
        assert index.holds["a-1"] == later["a-1"]


def test_holds_of_a_clock_that_was_ahead_are_as_if_seen_now(tmp_path: Path) -> None:
    holds = {a: replace(HOLD, aggregate_id=a, attempts=5, next_attempt=n) for a, n in NEXT.items()}
    with Index(tmp_path, IDENTITY) as index:
        index.begin(None)
        index.record(decided(holds=holds), {}, 1)
        index.restart_holds(100, 60, 65)
        assert index.holds.next_due() == 65
    with Index(tmp_path, IDENTITY) as index:
        assert index.holds.due(100) == ["wrong", "right"]
        wrong = replace(holds["wrong"], first_seen=60, attempts=0, next_attempt=65)
        assert index.holds == {"right": holds["right"], "wrong": wrong}


NEXT = {"right": 100, "wrong": 101}


def test_refused_versions_are_remembered_and_folded(tmp_path: Path) -> None:
    with Index(tmp_path, IDENTITY) as index:
        index.begin(None)
        assert index.known(["a"]).refused == {}
        index.record(decided(), {}, 1, refused={"a": [0]})
        refused = {"a": [-1], "b": [0]}
        fold(index, {}, {}, {("orders.events.dead", 0): 5}, 0, refused=refused)
    with Index(tmp_path, IDENTITY) as index:
        assert index.known(["a", "b", "c"]).refused == {"a": [-1, 0], "b": [0]}
        assert index.offsets == {("orders.events.dead", 0): 5}


@pytest.mark.parametrize(
    ("by", "position", "counts"), [(2_500_000, 5_000_000, {3: 1, 4: 2}), (None, None, {})]
)
def test_what_is_read_again_is_not_counted_twice(
    tmp_path: Path, by: int | None, position: int | None, counts: dict[int, int]
) -> None:
    """Else a bucket seems to have more rows than the table, and a late one is never looked for."""
    with Index(tmp_path, IDENTITY) as index:
        index.begin(None)
        counted = {3: 1, 4: 2, 5: 4, 7: 8}
        index.record(decided(), {}, 8_000_000, counted=counted, forget_below=0)
        index.go_back(by)
    with Index(tmp_path, IDENTITY) as index:
        assert (index.position, index.counts.since(0)) == (position, counts)


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
        move(
            index,
            [tmp_path / "0", tmp_path / "1"],
            {"a", "d"}.__contains__,
            [("t", 0), ("t", 3)],
            40,
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


@pytest.mark.parametrize(("of_each", "of_all"), [((55, 55), 55), ((30, 55), 45), ((50, 55), 50)])
def test_a4_what_all_of_them_have_forgotten_stays_so(
    tmp_path: Path, of_each: tuple[int, int], of_all: int
) -> None:
    """What one has, only as far as the others have published what was created until then."""
    fill(tmp_path / "0", ["a"], 70, {("t", 0): 10})
    fill(tmp_path / "1", ["c"], 60, {("t", 1): 11})
    for number, baseline in enumerate(of_each):
        with Index(tmp_path / str(number), IDENTITY) as index:
            index.decide_baseline(baseline)
    with Index(tmp_path / "new", IDENTITY) as index:
        move(index, [tmp_path / "0", tmp_path / "1"], lambda _: True, [("t", 0), ("t", 1)], 40)
        assert (index.baseline, index.position, index.undecided) == (of_all, 60, (False, 0, False))
        assert index.known(["a", "c"]).last == {"a": 5, "c": 5}


@pytest.mark.parametrize("are_kept", [True, False])
def test_contents_that_all_former_indexes_have_are_not_read_from_the_topic_again(
    tmp_path: Path, are_kept: bool
) -> None:
    for number, name in enumerate(["a", "c"]):
        fill(tmp_path / str(number), [name], 70, {("t", number): 10})
    for number, kept in ((0, True), (1, are_kept)):
        with Index(tmp_path / str(number), IDENTITY) as index:
            index.note(has_contents=kept)
    with Index(tmp_path / "new", IDENTITY) as index:
        move(index, [tmp_path / "0", tmp_path / "1"], lambda _: True, [("t", 0), ("t", 1)], None)
        assert index.has_contents is are_kept


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
        index.note_missing_markers({there: (0, 8)})
    with Index(tmp_path / "1", IDENTITY) as index:
        move(index, [tmp_path / "0"], lambda _: True, [there], None)
        assert (index.written, index.missing_markers) == ({there: (0, 8)}, {there: (0, 8)})
        index.restored()
        assert (index.written, index.missing_markers, index.offsets) == ({}, {}, {there: 0})


def test_what_is_restored_is_not_skipped_by_an_index_that_is_behind(tmp_path: Path) -> None:
    with Index(tmp_path, IDENTITY) as index:
        index.begin(None)
        index.note_missing_markers({("t", 0): (5, 8)})
        index.restored()
        assert index.offsets == {}


def test_where_one_of_the_former_indexes_is_gone_there_is_no_position(tmp_path: Path) -> None:
    fill(tmp_path / "0", ["a"], 70, {("t", 0): 10})
    with Index(tmp_path / "new", IDENTITY) as index:
        move(index, [tmp_path / "0", tmp_path / "1"], lambda _: True, [("t", 0), ("t", 1)], None)
        assert index.position is None
        assert index.offsets == {("t", 0): 10}


@pytest.mark.parametrize(
    ("of_each", "expected"),
    [
        ([({0: 20, 1: 9}, True), ({0: 3, 1: 30}, True)], {0: 3, 1: 9}),
        ([({0: 20, 1: 9}, True), ({0: 3}, True)], {0: 3}),
        ([({0: 20, 1: 9}, True), None], {}),
        ([({0: 8}, False), ({0: 30, 1: 9}, True)], {0: 8, 1: 9}),
        ([({0: 50}, False), ({0: 30, 1: 9}, True)], {0: 30, 1: 9}),
        ([({0: 50}, False), ({1: 9}, True)], {1: 9}),
        ([({0: 8}, False), None], {}),
    ],
)
def test_an_index_that_was_reading_all_partitions_knows_only_its_own_aggregates(
    tmp_path: Path, of_each: list[Any], expected: dict[int, int]
) -> None:
    """Stopped there and started with other shards, it would have repeated events."""
    for number, of in enumerate(of_each):
        if of is not None:
            offsets, everywhere = of
            fill(tmp_path / str(number), [f"a-{number}"], 70, {})
            with Index(tmp_path / str(number), IDENTITY) as index:
                written = {("t", p): (at - 1, at) for p, at in offsets.items()}
                moved = {("t", p): at for p, at in offsets.items()}
                index.record(decided(), moved, 70, written=written)
                index.note(reads_everywhere=everywhere)
    with Index(tmp_path / "new", IDENTITY) as index:
        folders = [tmp_path / str(number) for number in range(len(of_each))]
        move(index, folders, lambda _: True, [("t", 0), ("t", 1)], None, everywhere=True)
        assert index.offsets == {("t", p): at for p, at in expected.items()}
        assert index.reads_everywhere


def test_a_position_that_others_have_passed_is_moved_up_to_a_whole_bucket(tmp_path: Path) -> None:
    with Index(tmp_path, IDENTITY) as index:
        index.begin(None)
        index.skip_to(9 * SECOND)
        assert not index.position
        index.record(decided(), {}, 4 * SECOND + 5, counted={3: 2, 4: 1})
        index.skip_to(4 * SECOND + 7)
        assert index.position == 4 * SECOND + 5
        index.skip_to(9 * SECOND + 7)
        assert index.position == 9 * SECOND
        assert index.counts.since(0) == {3: 2}, "the other is not whole"


def test_holds_and_skips_are_seen_beside_the_process_that_has_the_index(tmp_path: Path) -> None:
    fill(tmp_path / "0", ["a", "b"], 1, {})
    with Index(tmp_path / "0", IDENTITY):
        found = glance(tmp_path / "0", 0, {"a"})
    assert [hold.aggregate_id for hold in found.holds] == ["a"]
    assert found.skipped == {"a": [(2, 2)]}
    assert glance(tmp_path / "none") == Pending([], 0, {})


def test_of_very_many_holds_those_are_seen_that_were_asked_for(tmp_path: Path) -> None:
    """All of them, and all skips, went through messages of hundreds of megabytes."""
    many = {f"a-{n}": replace(HOLD, aggregate_id=f"a-{n}", first_seen=n) for n in range(3_000)}
    with Index(tmp_path / "0", IDENTITY) as index:
        index.record(decided(holds=many), {}, position=77)
        for found in (index.pending(3, ["a-9"]), glance(tmp_path / "0", 3, ["a-9"])):
            assert found.count == 3_000
            assert [hold.aggregate_id for hold in found.holds] == ["a-9", "a-0", "a-1", "a-2"]
            assert found.skipped == {}


def test_a_moved_index_has_read_only_as_far_as_all_that_it_came_from(tmp_path: Path) -> None:
    for number, position in ((0, 70), (1, None)):
        with Index(tmp_path / f"2-shards-{number}", IDENTITY) as former:
            former.begin(None)
            former.record(decided(last={f"a{number}": 1}), {}, position)
    with Index(tmp_path / "1-shards-0", IDENTITY) as index:
        directories = [tmp_path / f"2-shards-{number}" for number in (0, 1)]
        move(index, directories, lambda _: True, [], None)
        assert index.known(["a0", "a1"]).last == {"a0": 1, "a1": 1}
        assert index.position is None


def test_a6_a_topic_that_was_made_again_has_no_offsets(tmp_path: Path) -> None:
    side, main = ("orders.events.dead", 0), ("orders.events", 0)
    with Index(tmp_path, IDENTITY) as index:
        index.begin(None)
        index.record(decided(last={"a": 5}), {side: 3, main: 9}, 1, written={side: (1, 2)})
        index.note_topics({"orders.events": "x", "orders.events.dead": "y"}, [])
        index.note_topics({"orders.events.dead": "z"}, ["orders.events.dead"])
    with Index(tmp_path, IDENTITY) as index:
        assert index.topics == {"orders.events": "x", "orders.events.dead": "z"}
        assert (index.offsets, index.written) == ({main: 9}, {})
        assert index.known(["a"]).last == {"a": 5}
        assert not index.is_new


def test_a15_what_former_partitions_are_read_for_is_forgotten_at_the_end(tmp_path: Path) -> None:
    own, other = ("orders.events", 0), ("orders.events", 1)
    with Index(tmp_path / "former", IDENTITY) as index:
        index.begin(None)
        index.record(decided(last={"a": 5}), {own: 3, other: 9}, 1)
        index.note_topics({"orders.events": "x"}, [])
    more = IDENTITY | {"partitions": 12}
    with Index(tmp_path / "new", more) as index:
        move(index, [tmp_path / "former"], lambda _: True, [own, other], None, everywhere=True)
        assert index.reads_everywhere
        assert index.offsets == {own: 3, other: 9}
        assert index.topics == {"orders.events": "x"}
    with Index(tmp_path / "new", more) as index:
        assert index.reads_everywhere, "until it has ended"
        index.has_read_everywhere({own})
        assert index.offsets == {own: 3}
    with Index(tmp_path / "new", more) as index:
        assert not index.reads_everywhere


def test_an_index_is_adopted_where_that_is_known_to_be_right(tmp_path: Path) -> None:
    with Index(tmp_path, IDENTITY) as index:
        index.begin(None)
        index.record(decided(last={"a": 5}), {}, 1)
    renamed = IDENTITY | {"app": "sales"}
    with pytest.raises(StateError, match="belongs to"):
        Index(tmp_path, renamed)
    with Index(tmp_path, renamed, adopts=lambda found: found["app"] == "orders") as index:
        assert index.known(["a"]).last == {"a": 5}
    with Index(tmp_path, renamed) as index:
        assert index.known(["a"]).last == {"a": 5}


def as_of_format(number: int, directory: Path, **more: bytes) -> Path:
    """An index as a version of that format may leave it."""
    with Rdict(str(directory), Options(raw_mode=True)) as db:
        db[b"moffsets"] = b"{}"
        db[b"midentity"] = json.dumps({"format": number, **IDENTITY}).encode()
        for key, value in more.items():
            db[key.encode()] = value
    return directory


def test_former_indexes_of_something_else_are_not_taken_over(tmp_path: Path) -> None:
    """Nothing of them: their versions would make this topic lose events."""
    with Index(tmp_path / "0", IDENTITY | {"app": "another"}) as index:
        index.begin(None)
        index.record(decided(last={"a": 5}), {}, 9)
    with Index(tmp_path / "mine", IDENTITY) as index:
        with pytest.raises(StateError, match=r"belongs to app\.id 'another'") as refused:
            move(index, [tmp_path / "0"], lambda _: True, [], None)
        assert refused.value.code == "state.foreign"
        assert index.is_new
        assert index.known(["a"]).last == {}


def test_an_index_of_a_newer_version_is_refused_by_whoever_reads_it(tmp_path: Path) -> None:
    """Whatever stands in it in another form is not what fails."""
    newer = as_of_format(99, tmp_path / "newer", ha=b"?", mnumbers=b"?", sa=b"?")

    def moves() -> None:
        with Index(tmp_path / "mine", IDENTITY) as index:
            move(index, [newer], lambda _: True, [("orders.events", 0)], None)

    for reads in (
        lambda: Index(newer, IDENTITY),
        lambda: Index(newer, IDENTITY | {"app": "sales"}, adopts=lambda _: True),
        lambda: glance(newer),
        moves,
    ):
        with pytest.raises(StateError) as refused:
            reads()
        assert refused.value.code == "index.newer_format"
        assert refused.value.where == str(newer)
        assert not refused.value.retriable
    assert summary(newer, ROCKSDB) is None
    with Rdict(str(newer), Options(raw_mode=True)) as db:
        assert json.loads(db[b"midentity"] or "")["format"] == 99, (
            "the newer version still reads it"
        )
        assert db[b"ha"] == b"?"


def test_when_rows_were_created_is_kept_and_folded(tmp_path: Path) -> None:
    with Index(tmp_path / "new", IDENTITY) as index:
        index.begin(None)
        index.keep_times("UTC/1", now=5)
        seen = {"a": Seen(30, True), "b": Seen(20, False)}
        index.fold_events({"a": 3, "b": 2}, {}, {}, 0, times=seen)
        known = index.known(["a", "b"])
        assert {a: Seen.unpacked(t) for a, t in known.times.items()} == seen
        assert known.times_since is None
        # a dead letter of a published version, then an event above it
        index.fold_events({"a": 3}, {}, {}, 0, times={"a": Seen(40, False)})
        assert Seen.unpacked(index.known(["a"]).times["a"]) == Seen(40, False)
        index.fold_events({"a": 4}, {"a": [4]}, {}, 0, times={"a": Seen(41, True)})
        assert Seen.unpacked(index.known(["a"]).times["a"]) == Seen(41, True)
        index.keep_times("Europe/Berlin/1", now=50)
        assert index.known(["a"]).times_since == 50 + ZONES_DIFFER


def test_rows_that_have_other_times_than_before_are_read_again(tmp_path: Path) -> None:
    with Index(tmp_path / "new", IDENTITY) as index:
        index.keep_times("UTC/1", now=5)
        position = 10 * ZONES_DIFFER
        index.record(decided(last={"a": 5}), {}, position)
        index.keep_times("UTC/1", now=6)
        assert index.position == position
        index.keep_times("Europe/Berlin/1", now=7)
        assert 0 <= position - ZONES_DIFFER - (index.position or 0) <= 1_000_000


def test_versions_written_anew_are_kept_and_move_with_their_aggregate(tmp_path: Path) -> None:
    of = Rewritten(40, 5).plus(4, 50).plus(5, 50)
    assert of.decided == ((4, 5),)
    with Index(tmp_path / "0", IDENTITY) as index:
        index.begin(None)
        assert index.known(["a"]).rewritten == {}
        index.record(replace(decided(last={"a": 5, "b": 1}), rewritten={"a": of}), {}, 1)
        assert index.known(["a", "b"]).rewritten == {"a": of}
    with Index(tmp_path / "1", IDENTITY) as index:
        move(index, [tmp_path / "0"], lambda _: True, [], None)
        assert index.known(["a"]).rewritten == {"a": of}
        fold(index, {"a": 5}, {"a": [3]}, {}, 0, rewritten={"a": of.plus(3, 60)})
        assert index.known(["a"]).rewritten["a"].decided == ((3, 5),)


def test_what_killed_processes_have_left_of_copies_is_removed(tmp_path: Path) -> None:
    index = tmp_path / "0"
    left, under_way = tmp_path / "0.copy-12", tmp_path / "0.copy-34"
    of_another_shard = tmp_path / "10.copy-12"
    for folder in (left, under_way, of_another_shard):
        folder.mkdir()
    for folder in (left, of_another_shard):
        os.utime(folder, (1, 1))
    assert folder_for(index) != folder_for(index)
    assert not left.exists()
    assert under_way.exists()
    assert of_another_shard.exists()


def test_a_dead_letter_below_the_first_version_leaves_what_was_skipped(tmp_path: Path) -> None:
    with Index(tmp_path / "0", IDENTITY) as index:
        index.begin(None)
        index.fold_gaps([GAP], {}, now=300)
        fold(index, {}, {}, {("orders.events.dead", 2): 1}, 300, refused={"a": [0]})
        known = index.known(["a"])
        assert (known.skipped, known.refused) == ({"a": [(4, 5)]}, {"a": [0]})


def test_what_was_taken_over_survives_a_power_failure(tmp_path: Path) -> None:
    """The former indexes are removed then, and a topic cut by retention does not say it again."""
    with Index(tmp_path / "0", IDENTITY) as index:
        index.begin(baseline=7)
        index.record(decided(last={"a": 3}), {}, position=77)
    with Index(tmp_path / "new", IDENTITY) as index:
        move(index, [tmp_path / "0"], lambda _: True, [], None)
        shutil.copytree(tmp_path / "new", tmp_path / "after")
        index.record(decided(last={"b": 1}), {}, position=78)
        shutil.copytree(tmp_path / "new", tmp_path / "without")
    for log in (tmp_path / "after").glob("*.log"):
        log.write_bytes(b"")
    with Index(tmp_path / "after", IDENTITY) as index:
        assert not index.is_new
        assert index.known(["a"]).last == {"a": 3}
    for manifest in (tmp_path / "without").glob("MANIFEST-*"):
        manifest.write_bytes(manifest.read_bytes()[:-40])  # without the file that has it
    with pytest.raises(StateError, match="a part of what was written is missing"):
        Index(tmp_path / "without", IDENTITY)


def test_an_index_of_an_earlier_state_is_not_taken_over(tmp_path: Path) -> None:
    """An executor still has it, after the state was removed where the publisher runs."""
    for number, start in enumerate(("100", "200")):
        with Index(tmp_path / str(number), {**IDENTITY, "start": start}) as index:
            index.begin(baseline=7)
            index.record(decided(last={f"a{number}": 3}), {}, position=77)

    def adopts(found: Any) -> bool:
        return bool(found["start"] == "200" and found["app"] == "orders")

    with Index(tmp_path / "new", {**IDENTITY, "start": "200"}) as index:
        former = [tmp_path / "0", tmp_path / "1"]
        index.move_from(
            former, lambda _: True, [], None, settled=lambda _, highest: highest, adopts=adopts
        )
        assert index.known(["a0", "a1"]).last == {"a1": 3}


def test_ids_that_are_spelled_in_another_way_than_before_are_refused(tmp_path: Path) -> None:
    """A column changed from CHAR(32) to BINARY(16) published everything again under new keys."""
    one, other = uuid.uuid4(), uuid.uuid4()
    published = {one.hex.upper(): 2, other.hex.upper(): 7, "not one": 1}
    with Index(tmp_path / "0", IDENTITY) as index:
        index.begin(None)
        index.keep_ids(TEXT, COLUMNS, lambda _: pytest.fail("nothing has changed"))
        index.record(decided(last=published), {}, position=5)
        index.keep_ids(TEXT, COLUMNS, lambda _: pytest.fail("nothing has changed"))
        with pytest.raises(StateError, match=f"read as {UUIDS} now, before as {TEXT}") as failed:
            index.keep_ids(UUIDS, COLUMNS, lambda _: {(str(other), 7)})
        assert failed.value.code == "state.foreign"
        assert failed.value.where == f"aggregate {other.hex.upper()}"
    with Index(tmp_path / "0", IDENTITY) as index:
        found = [(str(one), 2), (one.hex.upper(), 2)]  # and the other was archived
        index.keep_ids(UUIDS, COLUMNS, lambda asked: [event for event in asked if event in found])
        index.keep_ids(UUIDS, COLUMNS, lambda _: pytest.fail("nothing has changed"))


def test_a_few_keys_are_read_and_changed_ones_are_seen_without_reading_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the engine spark, a look at 200 aggregates took a large index into memory."""
    database, items, read = Overlay(tmp_path / "0", 1, ROCKSDB), Database.items, list[bytes]()
    try:
        Database.write(database, {b"v%03d" % n: b"old" for n in range(0, 1000, 2)} | {b"w": b""})
        database.write(
            {b"v001": b"new", b"v002": b"new", b"v004": None, b"x": b"", b"v999": b"new"}
        )

        def noted(*arguments: Any) -> Any:
            for item in items(*arguments):
                read.append(item[0])
                yield item

        monkeypatch.setattr(Database, "items", noted)
        few = [*islice(database.items(b"v"), 4)]
        assert few == [(b"v000", b"old"), (b"v001", b"new"), (b"v002", b"new"), (b"v006", b"old")]
        assert len(read) < 10
        all_of_them = dict(database.items(b"v", b"003"))
        assert [*all_of_them] == [b"v%03d" % n for n in range(6, 1000, 2)] + [b"v999"]
    finally:
        database.close()


def test_another_column_of_the_table_is_refused_and_a_renamed_one_taken(tmp_path: Path) -> None:
    other = "text of `other`"
    with Index(tmp_path / "0", IDENTITY) as index:
        index.begin(None)
        index.keep_ids(other, COLUMNS, set)
        index.keep_ids(TEXT, COLUMNS, set)  # nothing is published
        index.record(decided(last={"a": 3}), {}, position=5)
        with pytest.raises(StateError, match=f"read as {other} now, before as {TEXT}") as failed:
            index.keep_ids(other, COLUMNS, set)
        assert failed.value.code == "state.foreign"
    with Index(tmp_path / "0", IDENTITY) as index:
        index.keep_ids(other, ["`other`"], set)
        assert index.ids_as == other
