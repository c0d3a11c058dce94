"""Pages read ahead, on a real database: what the tasks find, and what not."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pydantic import SecretStr

from eventpub.admission.model import Shard, values
from eventpub.channel import Report
from eventpub.config import App, Config, Read, Recount, Run, Sink, Spark, Store
from eventpub.errors import StoreError
from eventpub.sources.mysql import EventStore
from eventpub.spark.ahead import page
from eventpub.spark.driver import Observed
from eventpub.spark.journal import KEYS, Journal, Journals
from eventpub.spark.options import Plan
from eventpub.spark.place import Place
from eventpub.spark.planner import Planner
from tests.conftest import FreshDatabase
from tests.publisher.harness import create_table, insert, transaction

SHARDS, PARTITIONS, ROWS = 3, 7, 10  # partitions are no multiple of shards


class Backlog:
    """A publisher's planner with a backlog of 100 events, and shards that do what is planned."""

    def __init__(self, database: FreshDatabase, folder: Path, master: str) -> None:
        self.config = Config(
            app=App(id="a", state_dir=folder / "state"),
            store=Store(url=SecretStr(database.url)),
            sink=Sink(topic="t"),
            run=Run.model_validate({"shards": SHARDS}),
            read=Read.model_validate({"delay": "50ms", "page_rows": ROWS}),
            recount=Recount.model_validate({"horizon": 0}),  # its batches never end here
            spark=Spark.model_validate({"master": master}),
        )
        layout = EventStore.discover(self.config.store)
        self.store = EventStore(self.config.store, layout)
        self._journals = Journals(Place(str(folder)), "q")
        self.said: list[dict[str, Any]] = []
        observed = Observed(self.said.append)
        self.planner = Planner(
            self.config, layout, PARTITIONS, self._journals, None, observed=observed
        )
        self.pages = self.config.app.state_dir / "spark" / "pages"
        self._position = 0

    def done(self, plan: Plan, upto: int | None = None) -> None:
        """The shards have done a batch, up to this position (default: all of it)."""
        self._position = plan.upto if upto is None else upto
        for shard in range(SHARDS):
            report = Report(shard, done=plan.batch, position=self._position, low=self._position)
            self._journals.create(plan.batch, shard, Journal(report, KEYS.empty_table(), {}))

    def next(self, plan: Plan) -> Plan | None:
        """The next batch, once the page after it is there; None: none for a second."""
        if plan.batch:
            self.done(plan)
        found, until = None, time.monotonic() + 1
        while found is None and time.monotonic() < until:
            found = self.planner.next(plan)
        if self.planner._ahead is not None:
            self.planner._ahead.wait()
        return found

    def ids(self, rows: list[pa.RecordBatch] | None) -> list[str] | None:
        return None if rows is None else [a for b in rows for a in values(b, "aggregate_id")]

    def read(self, plan: Plan, shard: int, after: int) -> list[str] | None:
        return self.ids(page(self.config, after, plan.upto, shard))

    def of_the_table(self, plan: Plan, shard: int, after: int) -> list[str]:
        one = Shard(shard, SHARDS, PARTITIONS)
        return self.ids([*self.store.window(after, plan.upto, one)]) or []


Make = Callable[..., Backlog]


@pytest.fixture
def backlog(database: FreshDatabase, tmp_path: Path) -> Iterator[Make]:
    create_table(database)
    with transaction(database) as cursor:
        for number in range(100):
            insert(cursor, f"a-{number}", 1)
            cursor.connection.commit()
    time.sleep(0.2)
    with ExitStack() as stack:

        def make(master: str = "local[2]") -> Backlog:
            made = Backlog(database, tmp_path, master)
            stack.callback(made.store.close)
            stack.callback(made.planner.close)
            return made

        yield make


def test_each_shard_finds_what_it_would_read(backlog: Make) -> None:
    made = backlog()
    before = Plan("q")
    found: list[str] = []
    ahead_of_a_batch = 0
    while (plan := made.next(before)) is not None:
        for shard in range(SHARDS):
            there = made.of_the_table(plan, shard, before.upto)
            rows = made.read(plan, shard, before.upto)
            assert rows in (None, there), (plan.batch, shard)
            ahead_of_a_batch += rows is not None
            found += there
        before = plan
    assert sorted(found) == sorted(f"a-{n}" for n in range(100))
    assert ahead_of_a_batch >= 3 * SHARDS  # pages grow: 10, 10, 20, 40, 20
    assert len([*made.pages.iterdir()]) <= 2 * SHARDS


def test_a_window_that_was_cut_is_found_from_where_the_task_stands(backlog: Make) -> None:
    made = backlog()
    first = made.next(Plan("q"))
    assert first is not None
    second = made.next(first)
    assert second is not None
    there = [made.of_the_table(second, shard, first.upto) for shard in range(SHARDS)]
    assert [made.read(second, shard, first.upto) for shard in range(SHARDS)] == there
    time.sleep(1.5)  # more than what counts as a step of the clock
    middle = (first.upto + second.upto) // 2
    made.done(second, middle)
    third = made.planner.next(second)
    assert third is not None
    assert third.upto == second.upto
    # another page would be taken for that of a later window with more rows
    assert {file.name.partition("-")[0] for file in made.pages.iterdir()} == {str(second.upto)}
    for shard in range(SHARDS):
        assert made.read(third, shard, middle) == made.of_the_table(third, shard, middle)
        assert made.read(third, shard, first.upto - 1) is None  # it may miss rows
    fourth = made.next(third)  # what was read ahead before was forgotten: it is too old by now
    assert fourth is not None
    assert fourth.upto > third.upto
    assert made.read(fourth, 0, third.upto) in [None, made.of_the_table(fourth, 0, third.upto)]
    assert "clock went back" not in str(made.said)


def test_after_an_outage_nothing_is_left(backlog: Make) -> None:
    """As after an altered table, whose rows would be read in another way."""
    made = backlog()
    first = made.next(Plan("q"))
    assert first is not None
    second = made.next(first)
    assert second is not None
    assert made.read(second, 0, first.upto) is not None
    made.planner.reconnect()
    assert made.read(second, 0, first.upto) is None
    third = made.next(second)
    assert third is not None
    assert third.upto > second.upto


def test_an_error_is_that_of_the_next_poll(backlog: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = backlog()
    first = made.next(Plan("q"))
    assert first is not None
    second = made.next(first)
    assert second is not None

    def fails(*_: Any, **__: Any) -> Any:
        raise StoreError("store.unreachable", "away", retriable=True)

    made.done(second)
    assert made.planner._ahead is not None
    made.planner._ahead.wait()
    with monkeypatch.context() as patched:
        patched.setattr(EventStore, "poll", fails)
        third = made.planner.next(second)  # was read before
        assert third is not None
        made.done(third)
        with pytest.raises(StoreError, match="away"):
            made.planner.next(third)
    made.planner.reconnect()
    fourth = made.next(third)
    assert fourth is not None
    assert fourth.upto > third.upto


def test_on_a_full_disk_the_tasks_read(backlog: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = backlog()

    def fails(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pa.ipc, "new_file", fails)
    before, windows = Plan("q"), []
    while (plan := made.next(before)) is not None:
        windows.append(plan.upto)
        assert made.read(plan, 0, before.upto) is None
        before = plan
        assert not [*made.pages.glob("*")]  # also a file that was begun
    assert len(windows) > 3
    assert windows == sorted(set(windows))


def test_a_cluster_reads_nothing_ahead(backlog: Make) -> None:
    """Its executors would not find it."""
    assert backlog("spark://host:7077").planner._ahead is None


def test_a_row_of_long_ago_that_comes_after_its_page_was_read_is_noted(
    backlog: Make, database: FreshDatabase
) -> None:
    """It counted as one that is still to be read, and was lost."""
    database.execute("UPDATE events SET create_time = create_time - INTERVAL 1 HOUR")
    made = backlog()
    first = made.next(Plan("q"))
    assert first is not None
    second = made.next(first)
    assert second is not None
    time.sleep(1.1)  # until the next sample
    database.execute(
        "INSERT INTO events (aggregate_id, version, event_type, payload, create_time)"
        " VALUES ('late', 1, 't', '{}', FROM_UNIXTIME(%s / 1000000))",
        (second.upto + 1,),
    )
    third = made.next(second)
    assert third is not None
    assert third.upto > second.upto + 1
    assert made.planner._observed.progress.rows_in_past == 1


def test_what_is_left_of_a_full_disk_is_for_indexes(
    backlog: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no page is read in vain."""
    made = backlog()
    free = SimpleNamespace(free=100 << 20)
    monkeypatch.setattr("eventpub.spark.ahead.shutil.disk_usage", lambda _: free)
    first = made.next(Plan("q"))
    assert first is not None
    with monkeypatch.context() as patched:
        patched.setattr(EventStore, "page", None)  # is not called
        second = made.next(first)
        assert second is not None
        assert made.next(second) is not None, "an error of reading would be raised here"
    assert not [*made.pages.glob("*")]
