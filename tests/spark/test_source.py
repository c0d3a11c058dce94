"""The source `eventstore`, its tasks called as Spark calls them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from pyspark.sql.streaming.datasource import ReadMaxRows

from eventpub import times
from eventpub.channel import Request
from eventpub.config import Config
from eventpub.errors import StateError, find_marked
from eventpub.shard.assignment import Parts, real_parts
from eventpub.shard.pace import Sizes
from eventpub.sources.mysql import events as events_of_table
from eventpub.spark import SourceError, driver, planner, task
from eventpub.spark.journal import Journals, Snapshots
from eventpub.spark.notes import listed
from eventpub.spark.options import Plan, source_options
from eventpub.spark.place import Place
from eventpub.spark.source import EventStoreDataSource
from tests.conftest import FreshDatabase
from tests.publisher.harness import commit, create_table, eventually, insert, transaction
from tests.spark.query import Query, events
from tests.tcp_proxy import TcpProxy


@pytest.fixture
def table(database: FreshDatabase) -> FreshDatabase:
    """A database with an empty event table."""
    create_table(database)
    return database


def with_few_rows(config: Config) -> Parts:
    """Parts whose transactions have five rows."""
    return replace(real_parts(config), sizes=Sizes(rows=5))


def leave_machine(folder: Path) -> None:
    """An executor on another machine goes on, once what uploads a snapshot has ended here."""
    eventually(lambda: not [*(folder / "local").rglob("*.copy-*")], 30)
    shutil.rmtree(folder / "local")


def code_of(failed: pytest.ExceptionInfo[SourceError]) -> str:
    """The code of the error that came through Spark."""
    error = find_marked(str(failed.value))
    assert error is not None
    return error.code


def test_events_come_once_and_in_order_per_aggregate(table: FreshDatabase, tmp_path: Path) -> None:
    for version in range(1, 6):
        for number in range(10):
            commit(table, f"a-{number}", version)
    query = Query(table, tmp_path, shards="2", maxRowsPerTrigger="7")
    found = query.run(50)
    assert len(query.batches) >= 7
    assert sorted(events(found)) == sorted((f"a-{n}", v) for v in range(1, 6) for n in range(10))
    for number in range(10):
        assert [v for a, v in events(found) if a == f"a-{number}"] == [1, 2, 3, 4, 5]
    assert all(len(batch) == 2 for batch in query.batches)
    commit(table, "a-0", 6)
    assert events(query.run(1)) == [("a-0", 6)]
    assert not query.run()


@pytest.mark.parametrize("policy", ["hold_aggregate", "hold_shard"])
def test_what_is_too_large_for_a_task_is_left_to_the_next_batch(
    table: FreshDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    monkeypatch.setattr(task, "real_parts", with_few_rows)
    monkeypatch.setattr(planner, "_MOST_BYTES", 1)
    monkeypatch.setattr(Plan, "most_bytes", 1)
    for version in (1, 2, 3, 5):
        for number in range(10):
            commit(table, f"a-{number}", version)
    query = Query(table, tmp_path, shards="2", policy=policy, max_backoff="2", rows="all")
    found = query.run(50)
    assert max(len(rows) for batch in query.batches for rows in batch) < 20
    query.restart()
    found += query.run()
    kinds = Counter(row["kind"] for row in found)
    assert kinds == {"event": 40, "skip": 10}
    by_aggregate: dict[str, list[int]] = {}
    for aggregate_id, version in events([row for row in found if row["kind"] == "event"]):
        by_aggregate.setdefault(aggregate_id, []).append(version)
    assert [*by_aggregate.values()] == [[1, 2, 3, 5]] * 10


@pytest.mark.parametrize("at", [None, "2026-01-02 03:04:05"], ids=["each its own", "one"])
def test_a_batch_is_small_where_what_is_read_at_once_is_large(
    table: FreshDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str | None
) -> None:
    """A slow broker was given 12 MB again and again, of which each transaction expired."""
    monkeypatch.setattr(planner.BatchSize, "next_bytes", lambda *_, **__: 1 << 20)
    of_one_time = {} if at is None else {"create_time": at}
    commit(table, "a", *range(1, 31), payload=bytes(100_000), **of_one_time)
    query = Query(table, tmp_path, shards="1")
    assert events(query.run(30)) == [("a", version) for version in range(1, 31)]
    assert max(len(rows) for [rows] in query.batches) <= 20


def test_what_the_recount_finds_is_divided_like_windows(
    table: FreshDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_of_table, "_PORTION_ROWS", 5)
    monkeypatch.setattr(task, "real_parts", with_few_rows)
    query = Query(table, tmp_path, watermark="off")
    with transaction(table) as late:
        for number in range(60):
            insert(late, f"late-{number}", 1)
        time.sleep(0.2)
        commit(table, "a", 1)
        query.run(1)
        late.connection.commit()
    monkeypatch.setattr(planner.BatchSize, "next_bytes", lambda *_, **__: 400)
    commit(table, "a", 2)
    found = query.run(61, seconds=1.5)
    assert sorted(events(found)) == sorted([("a", 2), *((f"late-{n}", 1) for n in range(60))])
    assert max(len(rows) for batch in query.batches for rows in batch) < 30


def test_an_index_that_is_older_than_the_journals_is_fetched_anew(
    table: FreshDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of an executor that was away for long."""
    monkeypatch.setattr(driver, "_PRUNED_EVERY", 0.0)
    query = Query(table, tmp_path)
    commit(table, "a", 1)
    query.run(1)
    shutil.copytree(tmp_path / "local", tmp_path / "away")
    for version in range(2, 7):
        query.reader._driver._planner._snapshot_at = 0.0
        commit(table, "a", version)
        query.run(1, seconds=0.3)
        time.sleep(0.5)
    leave_machine(tmp_path)
    shutil.move(tmp_path / "away", tmp_path / "local")
    commit(table, "a", 7)
    while not query.plan():
        pass
    assert events(query.do()[0]) == [("a", 7)]


def test_other_options_are_refused_before_a_planned_batch_is_done(
    table: FreshDatabase, tmp_path: Path
) -> None:
    query = Query(table, tmp_path, shards="2", partitions="3")
    commit(table, "a", 1)
    query.run(1)
    commit(table, "a", 2)
    while not query.plan():
        pass
    query.options |= {"partitions": "4"}
    query.restart()
    with pytest.raises(SourceError) as failed:
        query.do()
    assert code_of(failed) == "state.foreign"


def test_a_request_is_done_once_though_the_driver_starts_again(
    table: FreshDatabase, tmp_path: Path
) -> None:
    commit(table, "a", 1)
    commit(table, "a", 3)
    query = Query(table, tmp_path, rows="all", watermark="off", backoff_base="60s")
    query.run(1)
    request = Request("r1", "skip", "a", 2)
    query.reader._driver._planner._requests = lambda: [request]
    query.plan()
    query.do()
    query.restart()
    while query.plan():
        query.do()
    query.reader._driver._planner._requests = lambda: [request]
    query.run()
    assert sum("r1" in str(offset["requests"]) for offset in query.offsets) == 1


def test_a_row_has_what_the_table_has(table: FreshDatabase, tmp_path: Path) -> None:
    commit(table, "a", 1, payload=b"\xff\x00", metadata='{"tenant": "t"}')
    [row] = Query(table, tmp_path).run()
    assert row["payload"] == b"\xff\x00"
    assert row["metadata"] == '{"tenant": "t"}'
    assert row["event_type"] == "happened"
    assert abs(row["create_time"].timestamp() - time.time()) < 60
    assert row["late"] is False


def test_what_a_function_of_foreach_batch_leaves_unread_comes_with_the_next_batch(
    table: FreshDatabase, tmp_path: Path
) -> None:
    """`show()` reads some tasks to their ends, and who returns at once none."""
    query = Query(table, tmp_path, shards="2", watermark="off")  # all ten in one batch
    for number in range(10):
        commit(table, f"a-{number}", 1)
    assert query.plan()  # and nothing is read
    assert query.plan()
    first, second = query.parts()
    read = query.read(first)
    assert 0 < len(read) < 10
    del second
    found = read + query.run(10 - len(read))
    assert sorted(events(found)) == [(f"a-{n}", 1) for n in range(10)]
    query.restart()
    commit(table, "a-0", 2)
    assert events(query.run(1)) == [("a-0", 2)]


def test_a_version_that_commits_late_is_waited_for(table: FreshDatabase, tmp_path: Path) -> None:
    query = Query(table, tmp_path, watermark="off", backoff_base="1s")
    with transaction(table) as late:
        insert(late, "a", 1)
        time.sleep(0.05)
        commit(table, "a", 2)
        commit(table, "b", 1)
        assert events(query.run(1)) == [("b", 1)]
        late.connection.commit()
    with transaction(table) as cursor:
        insert(cursor, "c", 1)
        cursor.connection.commit()
    assert events(query.run(rows=3)) == [("c", 1), ("a", 1), ("a", 2)]


def test_a_last_event_that_commits_late_is_found_by_the_recount(
    table: FreshDatabase, tmp_path: Path
) -> None:
    """There is no later version that would show it."""
    query = Query(table, tmp_path, watermark="off")
    with transaction(table) as late:
        insert(late, "single", 1)
        time.sleep(0.05)
        commit(table, "b", 1)
        assert events(query.run(1)) == [("b", 1)]
        late.connection.commit()
    query.restart()  # what is to be counted again is known to the next driver, too
    assert events(query.run(rows=1)) == [("single", 1)]
    assert not query.run()


def test_a_gap_that_is_never_filled_is_skipped_and_what_comes_then_is_late(
    table: FreshDatabase, tmp_path: Path
) -> None:
    query = Query(table, tmp_path, rows="all", watermark="off")
    commit(table, "a", 1)
    commit(table, "a", 3)
    found = query.run(rows=3)
    assert [(r["kind"], r["version"]) for r in found] == [("event", 1), ("skip", 2), ("event", 3)]
    assert found[1]["reason"] == "max_backoff"
    commit(table, "a", 2)
    [late] = query.run(1)
    assert (late["version"], late["late"]) == (2, True)


def test_a_batch_that_is_repeated_has_the_same_rows_whatever_commits_meanwhile(
    table: FreshDatabase, tmp_path: Path
) -> None:
    query = Query(table, tmp_path, shards="2", rows="all", watermark="off")
    with transaction(table) as late:
        insert(late, "late", 1)
        time.sleep(0.05)
        for number in range(20):
            commit(table, f"a-{number}", 1)
        commit(table, "held", 2)
        assert query.plan()
        first = query.do()
        late.connection.commit()
    assert query.do() == first
    query.restart()
    assert query.do() == first
    leave_machine(tmp_path)
    assert query.do() == first
    assert ("late", 1) in events(query.run(rows=1))


def test_the_rows_of_a_first_batch_are_the_same_after_a_restart(
    table: FreshDatabase, tmp_path: Path
) -> None:
    """Spark asks for the initial offset again, and gets another one."""
    commit(table, "a", 1)
    query = Query(table, tmp_path)
    assert query.plan()
    first = query.do()
    query.restart()
    assert query.do() == first
    assert events(first[0]) == [("a", 1)]


def test_another_attempt_that_has_decided_differently_makes_the_task_fail(
    table: FreshDatabase, tmp_path: Path
) -> None:
    commit(table, "a", 1)
    query = Query(table, tmp_path, watermark="off")
    assert query.plan()
    [part] = query.parts()
    query.options["state_dir"] = str(tmp_path / "elsewhere")
    stalled = query.reader.read(part)
    assert next(stalled).num_rows == 1  # as a process that was frozen
    with transaction(table) as cursor:  # a row that commits behind the window
        insert(cursor, "b", 1, create_time="2026-01-01 00:00:00")
        cursor.connection.commit()
    other = query._new_reader()
    assert len([row for batch in other.read(part) for row in batch.to_pylist()]) == 2
    with pytest.raises(SourceError) as failed:
        list(stalled)
    assert code_of(failed) == "state.other_attempt"
    assert len(query.read(part)) == 2


def test_an_executor_without_an_index_applies_journals(
    table: FreshDatabase, tmp_path: Path
) -> None:
    query = Query(table, tmp_path, shards="2")
    for version in range(1, 4):
        for number in range(10):
            commit(table, f"a-{number}", version)
        assert len(query.run(10)) == 10
        leave_machine(tmp_path)
    with transaction(table) as cursor:  # the whole table is read again by the recount
        cursor.execute("SELECT 1")
    assert not query.run(seconds=3)


def test_the_index_of_a_query_long_unused_is_removed_and_comes_back(
    table: FreshDatabase, tmp_path: Path
) -> None:
    """Those of former checkpoints stayed on the disks of executors for ever."""
    former, new = Query(table, tmp_path), Query(table, tmp_path)
    commit(table, "a", 1)
    assert events(former.run(1)) == [("a", 1)]
    folder = tmp_path / "local" / "query" / former.offsets[-1]["query"]
    eventually(lambda: not [*folder.rglob("*.copy-*")], 30)
    old = time.time() - 4 * 24 * 3600
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (old, old))
    assert events(new.run(1)) == [("a", 1)]
    assert [path.name for path in folder.parent.iterdir()] == [new.offsets[-1]["query"]]
    commit(table, "a", 2)
    assert events(former.run(1)) == [("a", 2)]
    assert len([*folder.parent.iterdir()]) == 2


def test_holds_are_known_where_the_executor_was_another_machine_s(
    table: FreshDatabase, tmp_path: Path
) -> None:
    """By an index of before, by a snapshot, or not at all."""
    query = Query(table, tmp_path, max_backoff="9", backoff_base="60s")
    commit(table, "a", 1)
    query.run(1)
    eventually(lambda: not [*(tmp_path / "local").rglob("*.copy-*")], 30)
    name, place = query.offsets[-1]["query"], Place(str(tmp_path / "state"))
    (index,) = (tmp_path / "local" / "query" / name).iterdir()
    shutil.copytree(index, tmp_path / "before")
    commit(table, "a", 3)
    assert not query.run()
    upto, request = query.offsets[-1]["batch"], Request("x", "list", most=5)
    journals, snapshots = Journals(place, name), Snapshots(place, name, 0)
    of_snapshot = snapshots.pending(upto, request, journals)
    (here,) = listed([index], upto, request)
    for found in (of_snapshot, here):
        assert [(hold.aggregate_id, hold.first_missing) for hold in found.holds] == [("a", 2)]
        assert (found.count, found.batch) == (1, upto)
    assert not listed([tmp_path / "before"], upto, request)
    assert not listed([index, tmp_path / "none"], upto, request)
    place.delete(*place.names(f"{name}/snapshot"))
    with pytest.raises(StateError) as unknown:
        snapshots.pending(upto, request, journals)
    assert unknown.value.code == "state.holds_unknown"
    assert "while the publisher runs" in str(unknown.value.suggestion)


def test_a_run_that_ends_by_itself_waits_for_holds_and_the_last_count(
    table: FreshDatabase, tmp_path: Path
) -> None:
    commit(table, "a", 1)
    commit(table, "a", 3)
    query = Query(table, tmp_path, delay="200ms")
    assert events(query.run_to_the_end()) == [("a", 1), ("a", 3)]


def test_a_run_that_ends_by_itself_waits_for_its_snapshot(
    table: FreshDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else none would complete in runs on new machines that are shorter than its upload, and each
    would start with all journals."""
    monkeypatch.setenv("SPARK_REUSE_WORKER", "1")
    keep = Snapshots.keep

    def slow(snapshots: Snapshots, folder: Path, batch: int) -> None:
        time.sleep(1.5)
        keep(snapshots, folder, batch)

    monkeypatch.setattr(Snapshots, "keep", slow)
    query = Query(table, tmp_path)
    commit(table, "a", 1)
    query.reader.prepareForTriggerAvailableNow()
    query.plan()
    query.do()
    assert [*Place(query.options["state"]).names(f"{query.offsets[-1]['query']}/snapshot")]


def test_hold_shard_waits_with_all_events_of_the_shard(
    table: FreshDatabase, tmp_path: Path
) -> None:
    query = Query(table, tmp_path, policy="hold_shard", watermark="off", backoff_base="400ms")
    commit(table, "a", 2)
    time.sleep(0.02)
    commit(table, "b", 1)
    assert not query.run(seconds=0.2)
    commit(table, "a", 1)
    assert events(query.run(rows=3)) == [("a", 1), ("a", 2), ("b", 1)]


def test_only_events_after_the_start_are_yielded(table: FreshDatabase, tmp_path: Path) -> None:
    commit(table, "a", 1)
    time.sleep(0.05)
    query = Query(table, tmp_path, start="now")
    assert not query.run()
    commit(table, "a", 2)
    commit(table, "b", 1)
    assert events(query.run(2)) == [("a", 2), ("b", 1)]


def test_a_batch_has_the_rows_of_a_time(table: FreshDatabase) -> None:
    for number, hour in enumerate((1, 2, 3), 1):
        commit(table, "a", number, create_time=f"2026-01-01 0{hour}:00:00")
    given = {"url": table.url, "shards": "2", "from": "2026-01-01T02:00:00Z"}

    def read(**more: str) -> list[tuple[str, int]]:
        source = EventStoreDataSource(given | more)
        reader = source.reader(source.schema())
        rows = [b for part in reader.partitions() for b in reader.read(part)]
        return events([row for batch in rows for row in batch.to_pylist()])

    assert read() == [("a", 2), ("a", 3)]
    assert read(to="2026-01-01T02:30:00Z") == [("a", 2)]
    with pytest.raises(SourceError, match="2026-01-31T09"):
        read(to="tomorrow")
    with pytest.raises(SourceError, match="before 'from'"):
        read(**{"from": "2026-02-01T00:00:00Z", "to": "2026-01-01T00:00:00Z"})
    with pytest.raises(SourceError, match="a batch of eventstore has no option 'start'"):
        read(start="now")


class TestRefused:
    """What is wrong is refused by name."""

    @pytest.mark.parametrize(
        ("changed", "code", "says"),
        [
            ({"pages": "3"}, "config.unknown_key", "did you mean"),
            ({"shards": "0"}, "config.invalid_value", "greater than 0"),
            ({"shards": "4", "partitions": "2"}, "config.invalid_value", "at least shards"),
            ({"from": "2026-01-01T00:00:00Z"}, "config.unknown_key", " start,"),
            ({"rows": "some"}, "config.invalid_value", "'events' or 'all'"),
            ({"late": "divert"}, "config.invalid_value", "column late"),
            ({"state": "ftp://host/x"}, "config.invalid_value", "ftp"),
            ({"delay": "soon"}, "config.invalid_value", "delay"),
        ],
    )
    def test_options(
        self, table: FreshDatabase, tmp_path: Path, changed: dict[str, str], code: str, says: str
    ) -> None:
        with pytest.raises(SourceError) as failed:
            Query(table, tmp_path, **changed).run()
        assert code_of(failed) == code
        assert says in str(failed.value)

    def test_missing_options(self) -> None:
        for given, missing in (({}, "url"), ({"url": "mysql+pymysql://u@h/d"}, "state")):
            with pytest.raises(Exception, match=f"option '{missing}' is required"):
                source_options(given)

    def test_a_checkpoint_with_another_table_or_other_shards(
        self, table: FreshDatabase, tmp_path: Path
    ) -> None:
        commit(table, "a", 1)
        query = Query(table, tmp_path)
        assert query.run(1)
        create_table(table, "others")
        for changed in ({"table": "others"}, {"shards": "2"}):
            before = query.options
            query.options = before | changed
            query.restart()
            with pytest.raises(SourceError) as failed:
                query.run()
            assert code_of(failed) == "state.foreign"
            query.options = before
        query.restart()
        assert not query.run()

    def test_a_state_that_is_gone(self, table: FreshDatabase, tmp_path: Path) -> None:
        commit(table, "a", 1)
        query = Query(table, tmp_path)
        assert query.run(1)
        shutil.rmtree(tmp_path / "state")
        query.restart()
        with pytest.raises(SourceError) as failed:
            query.run()
        assert code_of(failed) == "state.journal_missing"

    def test_a_location_that_an_executor_does_not_share(
        self, table: FreshDatabase, tmp_path: Path
    ) -> None:
        """Each machine has a folder of that name."""
        commit(table, "a", 1)
        query = Query(table, tmp_path)
        assert query.plan()
        (tmp_path / "state").rename(tmp_path / "of_driver")
        task.require_shared.cache_clear()  # as in another process
        with pytest.raises(SourceError) as failed:
            query.do()
        error = find_marked(str(failed.value))
        assert error is not None
        assert (error.code, error.retriable) == ("state.not_shared", False)
        assert socket.gethostname() in error.message
        assert str(tmp_path / "state") in str(error.where)
        shutil.rmtree(tmp_path / "state")
        (tmp_path / "of_driver").rename(tmp_path / "state")
        query.do()

    def test_rows_that_a_repeated_batch_needs_and_that_are_gone(
        self, table: FreshDatabase, tmp_path: Path
    ) -> None:
        commit(table, "a", 1)
        query = Query(table, tmp_path)
        assert query.plan()
        while not any(query.do()):  # the boundary may be below it
            query.plan()
        table.execute("DELETE FROM events")
        with pytest.raises(SourceError) as failed:
            query.do()
        assert code_of(failed) == "store.rows_gone"

    def test_a_checkpoint_of_another_version(self, table: FreshDatabase, tmp_path: Path) -> None:
        commit(table, "a", 1)
        query = Query(table, tmp_path)
        assert query.run(1)
        for offset in ({**query.offsets[-1], "of_later": 1}, {"offset": 7}):
            with pytest.raises(SourceError) as failed:
                query.reader.latestOffset(offset, ReadMaxRows(1))
            assert code_of(failed) == "state.checkpoint_version"

    def test_a_state_that_is_older_than_its_checkpoint(
        self, table: FreshDatabase, tmp_path: Path
    ) -> None:
        """By one batch it looks like one that a function of `foreachBatch` has left unread."""
        query = Query(table, tmp_path, shards="2")
        for number in range(5):
            commit(table, f"a-{number}", 1)
        assert query.run(5)
        shutil.copytree(tmp_path / "state", tmp_path / "older")
        commit(table, "a-0", 2)
        batches = len(query.offsets)
        assert query.run(1)
        assert len(query.offsets) == batches + 1
        query.restart()
        for folder in ("state", "local"):
            shutil.rmtree(tmp_path / folder)
        shutil.move(tmp_path / "older", tmp_path / "state")
        with pytest.raises(SourceError) as failed:
            query.run()
        assert code_of(failed) == "state.journal_missing"


class TestAnOutage:
    """Whatever Spark calls waits until the database, or the state's location, is back."""

    @pytest.fixture
    def proxy(self, table: FreshDatabase) -> Iterator[TcpProxy]:
        with TcpProxy(table.server.port) as proxy:
            yield proxy

    def query(self, table: FreshDatabase, folder: Path, proxy: TcpProxy, **more: str) -> Query:
        url = table.url.replace(f":{table.server.port}/", f":{proxy.port}/")
        return Query(table, folder, **{"url": url, **more})

    @contextmanager
    def away(self, proxy: TcpProxy, seconds: float = 1.5) -> Iterator[None]:
        """The database, until so many seconds have passed."""
        target, proxy.target = proxy.target, None
        proxy.cut()
        back = threading.Timer(seconds, lambda: setattr(proxy, "target", target))
        back.start()
        yield
        back.join()

    def test_of_the_database_at_the_start(
        self, table: FreshDatabase, tmp_path: Path, proxy: TcpProxy
    ) -> None:
        commit(table, "a", 1)
        query = self.query(table, tmp_path, proxy)
        with self.away(proxy):
            query.plan()
        assert events(query.do()[0]) == [("a", 1)]

    def test_of_the_database_while_the_planner_is_made_and_later(
        self, table: FreshDatabase, tmp_path: Path, proxy: TcpProxy
    ) -> None:
        commit(table, "a", 1)
        query = self.query(table, tmp_path, proxy)
        assert query.run(1)
        for version in (2, 3):
            commit(table, "a", version)
            with self.away(proxy):
                assert not query.plan()
            assert events(query.run(1)) == [("a", version)]
            query.restart()

    def test_of_the_database_before_a_batch_is_repeated(
        self, table: FreshDatabase, tmp_path: Path, proxy: TcpProxy
    ) -> None:
        commit(table, "a", 1)
        query = self.query(table, tmp_path, proxy)
        assert query.plan()
        query.restart()
        with self.away(proxy):
            [part] = query.parts()
        query.restart()
        with self.away(proxy):
            query.reader.prepareForTriggerAvailableNow()
            [part] = query.parts()
        assert part.plan.batch == 1

    def test_of_the_database_in_a_run_that_ends_by_itself(
        self, table: FreshDatabase, tmp_path: Path, proxy: TcpProxy
    ) -> None:
        commit(table, "a", 1)
        query = self.query(table, tmp_path, proxy)
        query.reader.prepareForTriggerAvailableNow()
        with self.away(proxy):
            assert query.plan()
        assert events(query.do()[0]) == [("a", 1)]

    def test_of_the_location(self, table: FreshDatabase, tmp_path: Path) -> None:
        commit(table, "a", 1)
        query = Query(table, tmp_path)
        assert query.run(1)
        commit(table, "a", 2)
        query.restart()
        (tmp_path / "state").rename(tmp_path / "away")
        (tmp_path / "state").touch()
        assert not query.plan()
        (tmp_path / "state").unlink()
        (tmp_path / "away").rename(tmp_path / "state")
        assert events(query.run(1)) == [("a", 2)]

    def test_of_the_location_at_the_start_and_in_a_task(
        self, table: FreshDatabase, tmp_path: Path
    ) -> None:
        """Spark begins with a batch from where it stands, which no task could decide."""
        commit(table, "a", 1)
        query, state = Query(table, tmp_path), tmp_path / "state"
        state.mkdir()

        def come_back() -> None:
            state.unlink()
            (tmp_path / "away").rename(state)

        found: list[Any] = []
        for call in (query.plan, lambda: found.extend(query.do()[0])):
            state.rename(tmp_path / "away")
            state.touch()
            back = threading.Timer(1.5, come_back)
            back.start()
            call()
            back.join()
        assert events(found) == [("a", 1)]

    def test_that_lasts_ends_a_call_that_needs_an_answer(
        self, table: FreshDatabase, tmp_path: Path, proxy: TcpProxy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(times, "OUTAGE", 1.0)
        query = self.query(table, tmp_path, proxy)
        with self.away(proxy, 3.0), pytest.raises(SourceError) as failed:
            query.reader.initialOffset()
        assert code_of(failed) in {"store.unreachable", "store.connection_lost"}

    def test_a_task_waits_for_a_database_that_is_away(
        self, table: FreshDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        commit(table, "a", 1)
        url = sa.make_url(table.url)
        with TcpProxy(url.port) as proxy, ThreadPoolExecutor() as pool:
            query = Query(table, tmp_path)
            away = url.set(host="127.0.0.1", port=proxy.port).render_as_string(hide_password=False)
            query.options["url"] = away
            query.restart()
            assert query.plan()
            [part] = query.parts()
            proxy.target = None
            proxy.cut()
            with monkeypatch.context() as patched:
                patched.setattr(times, "OUTAGE", 0.5)
                with pytest.raises(SourceError) as failed:
                    query.read(part)
                assert code_of(failed) in {"store.connection_lost", "store.unreachable"}
            rows = pool.submit(query.read, part)
            time.sleep(2)
            assert not rows.done()
            proxy.target = url.port
            assert events(rows.result(30)) == [("a", 1)]


def test_a_request_is_answered_by_the_shard_of_its_aggregate(
    table: FreshDatabase, tmp_path: Path
) -> None:
    commit(table, "a", 1)
    commit(table, "a", 3)
    query = Query(table, tmp_path, shards="2", rows="all", watermark="off", backoff_base="60s")
    assert events(query.run(1)) == [("a", 1)]

    def answers(action: Any, **of: Any) -> list[str]:
        request = Request(f"r{len(query.offsets)}", action, **of)
        query.reader._driver._planner._requests = lambda: [request]
        query.run()
        plan = query.offsets[-1]
        heads = [query.reader._driver._planner._journals.head(plan["batch"], n) for n in range(2)]
        return [answer for head in heads for answer in head["report"].answers.values()]

    listed = [json.loads(answer) for answer in answers("list", about=("a",))]
    assert len(listed) == 2
    [hold] = [hold for found in listed for hold in found["holds"]]
    assert (hold["aggregate_id"], hold["first_missing"], hold["seen"]) == ("a", 2, 3)
    [skipped] = answers("skip", aggregate_id="a", version=2, to_version=2)
    assert skipped == "skipped"
    assert [r["kind"] for r in query.batches[-1][0] + query.batches[-1][1]] == ["skip", "event"]
