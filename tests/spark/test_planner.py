"""What the planner plans, from journals that the test writes, on a real database."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from eventpub.admission.model import bucket_of
from eventpub.channel import Report, Request
from eventpub.config import App, Config, Read, Recount, Run, Sink, Spark, Store
from eventpub.coordinator.recounting import Recounting
from eventpub.errors import StoreError
from eventpub.publisher.workers import ChecksWork
from eventpub.sources.mysql import EventStore
from eventpub.spark.driver import Observed
from eventpub.spark.journal import KEYS, Journal, Journals
from eventpub.spark.options import FIRST_BYTES, Plan
from eventpub.spark.place import Place
from eventpub.spark.planner import Planner
from tests.conftest import FreshDatabase
from tests.publisher.harness import commit, create_table, insert, transaction

SECOND = 1_000_000
HOUR = 3_600 * SECOND
PARTITIONS = 1


class Played:
    """A planner of one shard, and a shard that does at once what is planned."""

    def __init__(self, planner: Planner, journals: Journals) -> None:
        self.planner = planner
        self.journals = journals

    def done(
        self,
        plan: Plan,
        took: float = 0.0,
        compared: int | None = None,
        *,
        is_cut: bool = False,
    ) -> None:
        """The shard has done a batch, or says that it has done another comparison."""
        report = Report(
            0,
            done=plan.batch,
            position=plan.upto - is_cut,
            low=plan.upto - is_cut,
            compared=plan.comparison if compared is None else compared,
            took=took,
        )
        self.journals.create(plan.batch, 0, Journal(report, KEYS.empty_table(), {}))

    def to_the_end(self, plan: Plan) -> None:
        """Batch after batch, until there is none."""
        found: Plan | None = plan
        while found is not None:
            plan = found
            if plan.batch:
                self.done(plan)
            found = self.planner.next(plan)


Make = Callable[..., Played]


@pytest.fixture
def played(database: FreshDatabase, tmp_path: Path) -> Iterator[Make]:
    """Makes planners that are closed in the end."""
    create_table(database)
    with ExitStack() as stack:

        def make(trigger: str = "100ms", **given: Any) -> Played:
            config = Config(
                app=App(id="a", state_dir=tmp_path / "state"),
                store=Store(url=SecretStr(database.url)),
                sink=Sink(topic="t"),
                run=Run.model_validate({"shards": 1}),
                read=Read.model_validate({"delay": "50ms", "watermark": "off"}),
                recount=Recount.model_validate({"horizon": "5m"}),
                spark=Spark.model_validate({"trigger": trigger}),
            )
            journals = Journals(Place(str(tmp_path)), "q")
            layout = EventStore.discover(config.store)
            given.setdefault("observed", Observed(None))
            planner = Planner(config, layout, PARTITIONS, journals, None, **given)
            stack.callback(planner.close)
            return Played(planner, journals)

        yield make


def now(database: FreshDatabase) -> int:
    """The database's time, µs."""
    statement = "SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
    return int(database.execute(statement)[0][0])


class TestARunThatEndsByItself:
    def test_counts_all_that_the_run_before_left(
        self, database: FreshDatabase, played: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It made one count of at most so many buckets, and ended."""
        counted: set[int] = set()
        count = EventStore.counts

        def counting(self: EventStore, ranges: Sequence[tuple[int, int]]) -> list[int]:
            counted.update(bucket_of(upto) for _, upto in ranges)
            return count(self, ranges)

        monkeypatch.setattr(EventStore, "counts", counting)
        until = now(database)
        position = until - HOUR
        left = Plan("q", upto=position, unpublished_since=position - 300 * SECOND)
        played(until=until).to_the_end(left)
        wanted = range(bucket_of(position - 300 * SECOND) + 1, bucket_of(position))
        assert [bucket for bucket in wanted if bucket not in counted] == []

    def test_does_not_end_where_the_last_count_fails(
        self, database: FreshDatabase, played: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fails = [StoreError("store.timeout", "too slow", retriable=True) for _ in range(4)]
        answered: list[int] = []
        count = EventStore.counts

        def failing(self: EventStore, ranges: Sequence[tuple[int, int]]) -> list[int]:
            if fails:
                raise fails.pop()
            answered.append(len(ranges))
            return count(self, ranges)

        monkeypatch.setattr(EventStore, "counts", failing)
        until = now(database)
        played(until=until).to_the_end(Plan("q", upto=until - 60 * SECOND))
        assert not fails
        assert answered


def test_a_comparison_is_planned_again_until_it_is_done(
    database: FreshDatabase, played: Make
) -> None:
    """The plan that had it was never returned, or a journal names another one: nothing would ever
    be compared again."""
    fails = [OSError("no space"), None]

    def requests() -> Sequence[Request]:
        if error := fails.pop() if fails else None:
            raise error
        return ()

    shown = played(requests=requests)
    commit(database, "a", 1)
    time.sleep(3.1)  # so old the second is counted, of which the shard says that it has no rows
    first = shown.planner.next(Plan("q", upto=now(database) - HOUR))
    assert first is not None
    shown.done(first)
    with pytest.raises(OSError, match="no space"):
        shown.planner.next(first)
    second = shown.planner.next(first)
    assert second is not None
    assert second.buckets
    shown.done(second, compared=0)
    third = shown.planner.next(second)
    assert third is not None
    assert (third.comparison, third.buckets) == (second.comparison, second.buckets)
    shown.done(third)
    fourth = shown.planner.next(third)
    assert fourth is None or fourth.comparison > third.comparison or not fourth.buckets


def test_one_plan_counts_all_that_is_due(
    database: FreshDatabase, played: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is late is counted after what is due: with a second between plans that never came."""
    shown = played()
    first = shown.planner.next(Plan("q", upto=now(database) - HOUR))
    assert first is not None
    shown.done(first)
    due, counted = ["in turn", "late"], list[object]()
    monkeypatch.setattr(Recounting, "next_count", lambda *_: due.pop(0) if due else None)
    monkeypatch.setattr(ChecksWork, "count", lambda _, asked: counted.append(asked))
    monkeypatch.setattr(Recounting, "counted", lambda *_: None)
    shown.planner.next(first)
    assert counted == ["in turn", "late"]


class TestTheSizeOfABatch:
    """After a quick batch the next may have four times as many bytes, after a slow one half."""

    def sizes(
        self,
        database: FreshDatabase,
        played: Make,
        took: Sequence[tuple[float, float]],
        *,
        are_cut: bool = True,
        **given: Any,
    ) -> list[int]:
        """By how long after a batch the next was asked for, and how long its task took."""
        clock = [1_000.0]
        shown = played(clock=lambda: clock[0], **given)
        plan, sizes = Plan("q", upto=now(database)), []
        for number, (waited, of_task) in enumerate([(0.0, 0.0), *took]):
            if plan.batch:
                shown.done(plan, of_task, is_cut=are_cut)
            clock[0] += waited
            with transaction(database) as cursor:
                insert(cursor, "a", number + 1)
                cursor.connection.commit()
            time.sleep(0.2)
            found = shown.planner.next(plan)
            assert found is not None
            plan = found
            sizes.append(plan.most_bytes)
        assert sizes[0] == FIRST_BYTES
        return sizes[1:]

    def test_of_the_publisher(self, database: FreshDatabase, played: Make) -> None:
        took = [(1.0, 0.9), (20.0, 0.9), (7.0, 0.9)]
        found = self.sizes(database, played, took, observed=Observed(lambda _: None))
        assert found == [4 * FIRST_BYTES, 2 * FIRST_BYTES, 2 * FIRST_BYTES]

    def test_that_waits_for_a_long_trigger(self, database: FreshDatabase, played: Make) -> None:
        """The wait counted as the batch's: it got smaller and smaller, and the lag larger."""
        took = [(60.0, 2.0), (60.0, 30.0), (95.0, 2.0)]
        found = self.sizes(database, played, took, observed=Observed(lambda _: None), trigger="1m")
        assert found == [4 * FIRST_BYTES, 2 * FIRST_BYTES, FIRST_BYTES]

    def test_of_small_batches(self, database: FreshDatabase, played: Make) -> None:
        """A batch after an outage was as large as after a fast drain, and never fitted."""
        found = self.sizes(database, played, [(1.0, 0.9), (1.0, 0.9)], are_cut=False)
        assert found == [FIRST_BYTES, FIRST_BYTES]

    def test_of_a_job_whose_trigger_nobody_knows(
        self, database: FreshDatabase, played: Make
    ) -> None:
        found = self.sizes(database, played, [(60.0, 2.0), (60.0, 16.0), (60.0, 9.0)])
        assert found == [2 * FIRST_BYTES, FIRST_BYTES, FIRST_BYTES]


def test_a_window_is_a_page_from_where_the_batch_before_ended(
    database: FreshDatabase, played: Make
) -> None:
    begin = now(database) - HOUR
    with transaction(database) as cursor:
        insert(cursor, "a", 1)
        cursor.connection.commit()
    time.sleep(0.2)
    shown = played()
    first = shown.planner.next(Plan("q", upto=begin))
    assert first is not None
    assert first.after == begin
    assert Plan("q").after is None
    assert Plan.from_offset(first.to_offset()) == first


def test_a_hold_is_due_at_once_where_the_clock_was_set_back(
    database: FreshDatabase, played: Make
) -> None:
    """An idle table planned no batch in which holds restart, for as long as the clock was off."""
    shown = played()
    begin = now(database)
    with transaction(database) as cursor:
        insert(cursor, "a", 1)
        cursor.connection.commit()
    time.sleep(0.2)
    plan = shown.planner.next(Plan("q", upto=begin))
    assert plan is not None
    due = now(database) + 48 * HOUR
    report = Report(0, done=1, position=plan.upto, low=begin, holds=1, next_due=due)
    shown.journals.create(1, 0, Journal(report, KEYS.empty_table(), {}))
    again = shown.planner.next(plan)
    assert again is not None
    assert again.batch == 2
