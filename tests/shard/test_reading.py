"""A runner's work as it comes: in order, read ahead, and none of it lost where it stops reading."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from eventpub.admission.model import EVENTS, bucket_of
from eventpub.channel import Comparison, Lane, Report, Request, Stop, Window, Work
from eventpub.coordinator.recount import Recount
from eventpub.errors import SinkError
from eventpub.shard import runner as runner_module
from eventpub.shard.context import Accounted, PublishingContext
from eventpub.shard.pace import Sizes, read_ahead
from eventpub.shard.runner import Reading, Runner
from eventpub.shard.step import Step
from eventpub.times import SYSTEM_CLOCK

SECOND = 1_000_000
LOOK = Request("r", "retry", "a")
PARTS = SimpleNamespace(
    read_ahead=read_ahead, sizes=Sizes(), clock=SYSTEM_CLOCK, failpoint=lambda _: None
)


class Table:
    """A store with a row at each of some times; says which windows were read."""

    def __init__(self, *times: int) -> None:
        self.times = times
        self.windows: list[tuple[int, int]] = []

    def window(self, after: int, upto: int, shard: object) -> Iterator[pa.RecordBatch]:
        self.windows.append((after, upto))
        yield from rows_at(*(t for t in self.times if after < t <= upto)).to_batches()


def rows_at(*times: int) -> pa.Table:
    """A row created at each of these times."""
    return pa.Table.from_pylist([{"aggregate_id": "a", "create_time": t} for t in times], EVENTS)


def reading(
    *work: Work, position: int | None = 100, times: tuple[int, ...] = ()
) -> tuple[Reading, Any]:
    """A shard at a position, what came for it, and the store's rows."""
    lane = Lane()
    for message in work:
        lane.send(message)
    context: Any = SimpleNamespace(
        lane=lane,
        sink=SimpleNamespace(serve=lambda: None),
        index=SimpleNamespace(position=position),
        reader=Table(*times),
        shard=None,
        parts=PARTS,
        beginning=SimpleNamespace(low=75),
        assignment=SimpleNamespace(
            start=None, config=SimpleNamespace(recount=SimpleNamespace(horizon=0))
        ),
    )
    return Reading(context), context


def shown(item: Work | None) -> object:
    """An item in a few words: the times of rows, the end of a window, or the work itself."""
    if not isinstance(item, Window):
        return item
    return ("end", item.upto) if item.rows is None else item.rows.column("create_time").to_pylist()


def test_rows_ends_and_other_work_come_in_the_order_of_the_work() -> None:
    work: list[Work] = [Window(1, 110), LOOK, Window(2, 120), Comparison(1, (5,)), Stop()]
    read, context = reading(*work, times=(105, 106, 115))
    with read.prefetch() as items:
        found = [shown(next(items)) for _ in range(7)]
    assert found == [
        [105, 106],
        ("end", 110),
        LOOK,
        [115],
        ("end", 120),
        Comparison(1, (5,)),
        Stop(),
    ]
    assert context.reader.windows == [(100, 110), (110, 120)]


@pytest.mark.parametrize(
    ("position", "horizon", "begin"),
    [(115, 0, 115), (None, 0, 75), (None, 25, 50), (60, 25, 60), (20, 25, 20)],
)
def test_it_begins_where_the_index_is_and_a_new_one_below_what_all_have_published(
    position: int | None, horizon: int, begin: int
) -> None:
    read, context = reading(Window(1, 120), position=position)
    context.assignment.config.recount.horizon = horizon
    with read.prefetch() as items:
        while shown(next(items)) != ("end", 120):
            continue
    assert context.reader.windows == [(begin, 120)]


@pytest.mark.parametrize(
    ("position", "found", "windows"),
    [
        (100, [[105, 115]], []),
        (105, [[115]], []),
        (80, [[85], [105, 115]], [(80, 100)]),
        (120, [], []),
    ],
)
def test_the_rows_that_came_along_are_used_and_what_lies_before_them_is_read(
    position: int, found: list[list[int]], windows: list[tuple[int, int]]
) -> None:
    window = Window(1, 120, after=100, rows=rows_at(105, 115))
    read, context = reading(window, position=position, times=(85, 105, 115))
    with read.prefetch() as items:
        seen = []
        while (item := shown(next(items))) != ("end", 120):
            seen.append(item)
    assert seen == found
    assert context.reader.windows == windows


def test_what_was_read_ahead_of_a_block_is_not_lost() -> None:
    """The shard begins to wait for a hold; requests and comparisons had come already."""
    read, context = reading(Window(1, 110), LOOK, Comparison(1, (5,)), times=(105,))
    with read.prefetch() as items:
        assert shown(next(items)) == [105]
        assert items.wait(20.0)
    context.lane.send(Window(2, 120))
    context.lane.send(Stop())
    assert [read.next() for _ in range(4)] == [LOOK, Comparison(1, (5,)), Window(2, 120), Stop()]


def test_what_was_not_handled_comes_first_in_the_next_block() -> None:
    read, context = reading(Window(1, 110), LOOK, times=(105,))
    with read.prefetch() as items:
        assert shown(next(items)) == [105]
        assert items.wait(20.0)
        assert [shown(next(items)) for _ in range(2)] == [("end", 110), LOOK]
    context.index.position = 110
    context.lane.send(Window(2, 120))
    with read.prefetch() as items:
        assert [shown(next(items)) for _ in range(3)] == [LOOK, ("end", 110), ("end", 120)]


@pytest.mark.parametrize("last", [LOOK, Window(2, 120)])
def test_what_comes_at_the_moment_when_a_block_is_left_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, last: Request | Window
) -> None:
    read, context = reading(Window(1, 110))

    wake_now = context.lane.wake

    def wake() -> None:
        context.lane.send(last)
        wake_now()

    monkeypatch.setattr(context.lane, "wake", wake)
    with read.prefetch() as items:
        assert shown(next(items)) == ("end", 110)
    if isinstance(last, Request):
        assert read.next() == last
        return
    wake_now()
    with read.prefetch() as items:
        assert shown(next(items)) == ("end", 120), "nothing behind it was planned"


def test_what_was_handled_is_not_done_again() -> None:
    read, context = reading(LOOK, Comparison(1, (5,)))
    with read.prefetch() as items:
        assert shown(next(items)) == LOOK
        read.handled()
        assert shown(next(items)) == Comparison(1, (5,))
    assert read.next() == Comparison(1, (5,)), "it was given out, and nobody said that it is done"
    context.lane.send(Stop())
    assert read.next() == Stop()


def test_a_window_that_came_while_the_shard_waited_is_read_behind_its_position() -> None:
    read, context = reading(Window(1, 110))
    assert read.next() == Window(1, 110)
    context.index.position = 104
    with read.prefetch() as items:
        assert shown(next(items)) == ("end", 110)
    assert context.reader.windows == [(104, 110)]


def test_a_wake_that_was_for_a_block_before_ends_no_later_one() -> None:
    read, context = reading()
    for number in range(1, 4):
        context.lane.wake()
        with read.prefetch() as items:
            context.lane.send(Window(number, 100 + 10 * number))
            while shown(next(items)) != ("end", 100 + 10 * number):
                continue
        context.index.position = 100 + 10 * number
    context.lane.send(LOOK)
    assert read.next() == LOOK


def test_a5_an_error_ends_who_reads_ahead_though_nothing_comes_any_more() -> None:
    """It waited for the thread that reads ahead, which waited for minutes."""
    read, _ = reading(Window(1, 110), times=(105,))
    began = time.monotonic()

    def publish() -> None:
        with read.prefetch() as items:
            while shown(next(items)) != ("end", 110):
                continue
            raise SinkError("sink.unreachable", "the broker restarts", retriable=True)

    with pytest.raises(SinkError):
        publish()
    assert time.monotonic() - began < 5.0


class TestAccounted:
    def test_rows_count_with_the_position_that_they_are_behind(self) -> None:
        accounted = Accounted(60 * SECOND)
        accounted.add(np.array([SECOND, SECOND + 1, 2 * SECOND, 3 * SECOND]), since=0)
        assert accounted.take(None) == {}
        assert accounted.take(2 * SECOND) == {0: 1, 1: 2}
        assert accounted.take(2 * SECOND) == {}, "once"
        accounted.add(np.array([3 * SECOND]), since=0)
        assert accounted.take(9 * SECOND) == {2: 2}

    def test_what_was_old_when_it_was_read_is_not_counted(self) -> None:
        """Nobody would count it again; a row without a number would be compared by its key."""
        accounted = Accounted(60 * SECOND)
        accounted.add(np.array([SECOND, 5 * SECOND]), since=2 * SECOND)
        assert accounted.take(9 * SECOND) == {4: 1}

    def test_without_a_horizon_nothing_is_counted(self) -> None:
        accounted = Accounted(0)
        accounted.add(np.array([SECOND]), since=0)
        assert accounted.take(9 * SECOND) == {}


@pytest.mark.parametrize(("hidden", "counted"), [(None, [950, 990]), (700, [800, 900, 950, 990])])
def test_what_is_old_when_it_is_read_is_counted_where_something_hides_there(
    hidden: int | None, counted: list[int]
) -> None:
    """A row without a number would be compared by its key when that has ended."""
    since = None if hidden is None else hidden * SECOND
    step: Any = object.__new__(Step)
    step._context, step._horizon = (
        SimpleNamespace(now=1_000 * SECOND, window=Window(1, 0, hidden_since=since)),
        60 * SECOND,
    )
    step.accounted = Accounted(60 * SECOND)
    steps: list[int] = []

    def publish(_: pa.Table, position: int) -> bool:
        steps.append(position)
        return True

    step._publishing = SimpleNamespace(step=publish)
    assert step.rows(rows_at(*(at * SECOND for at in (650, 800, 900, 950, 990))))
    assert steps == [990 * SECOND - 1], "rows of the last time may follow"
    assert sorted(step.accounted.take(1_000 * SECOND)) == [at - 1 for at in counted]


def test_rows_that_are_read_again_after_a_hold_count_once() -> None:
    """Too high a number would hide a row that commits late in that second."""
    runner: Any = object.__new__(Runner)
    read, context = reading(Window(1, 9 * SECOND), position=0)
    context.reader = Table(SECOND, 5 * SECOND, 6 * SECOND)
    context.assignment.config.recount.horizon = 60 * SECOND
    context.now, context.is_stopping, context.keeps_copies = 9 * SECOND, False, False
    context.report = Report(0)
    context.timed = lambda _: nullcontext()
    context.keep_copy = context.take_report = lambda: None
    context.post = lambda _: None
    context.window = Window(0, 0)
    runner._context, runner._reading = context, read
    runner._comparing = SimpleNamespace(is_under_way=False, go_on=lambda: False)
    shard: Any = object.__new__(Step)
    runner._step = shard
    shard._context, shard._horizon = context, 60 * SECOND
    shard.accounted = Accounted(60 * SECOND)
    shard.end = lambda upto, **_: None
    counted: Counter[int] = Counter()
    waits = iter([True, False])

    def step(rows: pa.Table, position: int) -> bool:
        whole = not next(waits)
        context.index.position = position if whole else 5 * SECOND - 1
        counted.update(shard.accounted.take(context.index.position))
        return whole

    shard._publishing = SimpleNamespace(step=step)
    assert runner._read_on(), "it waits"
    assert counted == {0: 1}
    context.lane.send(Stop())  # not before, or it may have come by then, and ends it at once
    assert not runner._read_on()
    counted.update(shard.accounted.take(9 * SECOND))
    assert counted == {0: 1, 4: 1, 5: 1}


def test_who_compares_for_long_is_heard_of_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who says nothing for a minute counts as standing still, and is ended at last."""
    monkeypatch.setattr(runner_module, "_REPORTS_EVERY", 0.0)
    runner: Any = object.__new__(Runner)
    reports: list[int] = []
    monkeypatch.setattr(Runner, "_report", lambda _: reports.append(1))
    runner._reported_at = 0.0
    runner._context = SimpleNamespace(
        keeps_copies=False,
        keep_copy=lambda: None,
        sink=SimpleNamespace(serve=lambda: None),
        parts=PARTS,
        timed=lambda _: nullcontext(),
    )
    runner._comparing = SimpleNamespace(is_under_way=True, go_on=lambda: False)
    ready = iter([False, False, False, True])

    class Items:
        def wait(self, _: float) -> bool:
            return next(ready)

        def __next__(self) -> str:
            return "rows"

    assert runner._next(Items()) == "rows"
    assert len(reports) == 3


@pytest.mark.parametrize("waits_for_a_hold", [False, True])
def test_a_producer_hands_over_its_log_while_nothing_comes(
    monkeypatch: pytest.MonkeyPatch, waits_for_a_hold: bool
) -> None:
    """It keeps each line and error until it is asked: memory would grow for weeks."""
    monkeypatch.setattr(runner_module, "_SERVES_EVERY", 0.01)
    runner: Any = object.__new__(Runner)
    read, context = reading()
    served: list[int] = []

    def serve() -> None:
        served.append(len(served))
        if len(served) == 3:
            context.lane.send(Stop())

    context.sink = SimpleNamespace(serve=serve)
    context.is_stopping, context.keeps_copies, context.report = False, False, Report(0)
    context.timed = lambda _: nullcontext()
    context.keep_copy = context.take_report = lambda: None
    context.post = lambda _: None
    context.index.holds = {"a": None}
    runner._context, runner._reading = context, read
    runner._step = SimpleNamespace(accounted=Accounted(0))
    runner._comparing = SimpleNamespace(is_under_way=False, go_on=lambda: False)
    runner._reported_at = 0.0
    if waits_for_a_hold:
        for _ in range(3):
            context.lane.wake()
        assert not runner._wait_for_holds()
    else:
        assert not runner._read_on()
    assert len(served) >= 3


def test_after_a_long_time_down_the_numbers_that_a_start_counts_again_are_kept() -> None:
    now, position, horizon = 9_000 * SECOND, 5_000 * SECOND, 60 * SECOND
    context: Any = object.__new__(PublishingContext)
    config = SimpleNamespace(recount=SimpleNamespace(horizon=horizon))
    context.assignment = SimpleNamespace(config=config)
    context.now = now
    since = Recount(horizon, 0, now, position).uncounted_since
    context.window = Window(1, now, uncounted_since=since)
    assert context.oldest_bucket() <= bucket_of(position - horizon + 1)
    context.window = Window(1, now)
    assert context.oldest_bucket() > bucket_of(position)


class TestReports:
    @pytest.fixture
    def context(self) -> Any:
        """What a shard has in its hands, as far as a report asks."""
        context: Any = object.__new__(PublishingContext)
        context.report, context.parts = Report(1), PARTS
        context.unread = 70, 50
        context.shard = SimpleNamespace(number=1)
        context.window = Window(1, 100)
        context._index_seen_at = float("inf")
        context._passed_over = 0
        context.reader = SimpleNamespace(without_identity=0)
        context.index = SimpleNamespace(
            position=100, offsets={("events", 1): 5}, holds=Holds(oldest=None, next_due=None)
        )
        return context

    def test_what_happened_is_said_once_and_what_is_every_time(self, context: Any) -> None:
        context.report.published, context.report.done = 3, 4
        context.report.buckets, context.report.answers = {7: 2}, {"r": "found"}
        context.report.compared, context.report.unfinished = 2, [9]
        first, second = context.take_report(), context.take_report()
        assert (first.published, first.buckets, first.answers) == (3, {7: 2}, {"r": "found"})
        assert (second.published, second.buckets, second.answers) == (0, {}, {})
        for report in (first, second):
            assert (report.shard, report.done, report.position) == (1, 4, 100)
            assert (report.compared, report.unfinished) == (2, [9])
            assert report.offsets == {("events", 1): 5}

    def test_a_report_does_not_change_behind_the_back_of_who_has_it(self, context: Any) -> None:
        report = context.take_report()
        context.index.offsets["events", 1] = 9
        context.report.buckets[1] = 1
        assert report.offsets == {("events", 1): 5}
        assert report.buckets == {}

    def test_who_has_no_index_must_read_again_from_the_oldest_hold_on(self, context: Any) -> None:
        context.index.holds = Holds(oldest=80, next_due=90)
        report = context.take_report()
        assert (report.position, report.low) == (100, 79)
        assert (report.holds, report.next_due) == (1, 90)

    def test_a_new_index_is_where_the_runner_begins(self, context: Any) -> None:
        context.index.position = None
        report = context.take_report()
        assert (report.position, report.low) == (70, 50)


class Holds:
    """One hold, or none."""

    def __init__(self, oldest: int | None, next_due: int | None) -> None:
        self._oldest, self._next_due = oldest, next_due

    def __len__(self) -> int:
        return self._oldest is not None

    def oldest(self) -> int | None:
        return self._oldest

    def next_due(self) -> int | None:
        return self._next_due
