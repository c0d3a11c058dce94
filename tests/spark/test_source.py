"""`spark.readStream.format("eventstore")` in a user's own job."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

from eventpub.errors import ConfigError
from eventpub.spark.boundary import Bounds
from eventpub.spark.passed import told
from eventpub.spark.recount import bucket_of
from eventpub.spark.source import EventStoreStreamReader
from eventpub.spark.state import StateDir
from tests.conftest import FreshDatabase
from tests.publisher.harness import create_table, insert, transaction

SCHEMA = (
    "struct<aggregate_id:string,version:bigint,event_type:string,payload:binary,"
    "metadata:string,create_time:timestamp>"
)


def run_job(database: FreshDatabase, checkpoint: Path) -> list[dict[str, Any]]:
    """What the job prints."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.spark.own_job", database.url, str(checkpoint)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_a_job_of_ones_own_reads_pages_and_goes_on_where_it_was(
    database: FreshDatabase, tmp_path: Path
) -> None:
    create_table(database)
    with transaction(database) as cursor:
        for version in range(1, 31):
            insert(cursor, "a", version, b'{"n": 1}', metadata='{"tenant": "t"}')
        cursor.connection.commit()
    time.sleep(0.2)
    schema, *events = run_job(database, tmp_path / "checkpoint")
    assert schema["schema"] == SCHEMA
    assert sorted(e["version"] for e in events) == list(range(2, 31))
    assert len({e["batch"] for e in events}) == 3
    assert events[0]["payload"] == '{"n": 1}'
    with transaction(database) as cursor:
        insert(cursor, "b", 2)
        cursor.connection.commit()
    time.sleep(0.2)
    _, *events = run_job(database, tmp_path / "checkpoint")
    assert [(e["aggregate_id"], e["version"]) for e in events] == [("b", 2)]


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(ConfigError) as refused:
        EventStoreStreamReader({"url": "mysql+pymysql://x@y/z", "pages": "3"})
    assert refused.value.code == "config.unknown_key"
    assert "pages" in refused.value.message


def test_the_publishers_source_goes_on_looking_where_there_is_nothing_new(
    database: FreshDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_table(database)
    options = {"url": database.url, "windows": "true", "position": "0", "watermark": "off"}
    source = EventStoreStreamReader(options | {"looks_every": "1000"})
    at: Any = source.initialOffset()
    at = source.latestOffset(at, ReadMaxRows(10))
    monkeypatch.setattr("eventpub.spark.source._LOOKS_FOR", 0.02)
    assert source.latestOffset(at, ReadMaxRows(10)) == at

    pauses: list[float] = []

    def commit_meanwhile(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            with transaction(database) as cursor:
                insert(cursor, "a-1", 1, create_time=created)
                cursor.connection.commit()

    [(created,)] = database.execute("SELECT CURRENT_TIMESTAMP(6) - INTERVAL 2 SECOND")
    at["position"] -= 10_000_000
    monkeypatch.setattr("eventpub.spark.source._LOOKS_FOR", 60.0)
    monkeypatch.setattr("eventpub.spark.source.time.sleep", commit_meanwhile)
    assert source.latestOffset(at, ReadMaxRows(10))["position"] > at["position"]
    assert pauses == [0.001] * 3
    source.stop()


@pytest.mark.parametrize(("max_wait", "is_soon"), [("1h", True), ("59m", False)])
def test_open_transactions_are_looked_at_before_the_delay_of_the_first_rows_has_passed(
    database: FreshDatabase, monkeypatch: pytest.MonkeyPatch, max_wait: str, is_soon: bool
) -> None:
    """Those of which one may still be waited for then; so a long delay asks no more of them."""
    create_table(database)
    options = {"url": database.url, "windows": "true", "position": "0", "delay": "1h"}
    source = EventStoreStreamReader(options | {"max_wait": max_wait})
    now = source._connected().now()
    source._first = False
    assert source._watermark is not None
    looks: list[int] = []
    monkeypatch.setattr(source._watermark, "look", lambda: looks.append(1))
    assert source._next_window(now) is None
    assert source._next_look() is None
    assert not looks
    with transaction(database) as cursor:
        insert(cursor, "a-1", 1)
        cursor.connection.commit()
    assert source._next_window(now) is None
    assert bool(looks) is is_soon
    assert (source._next_look() is not None) is is_soon, "or the thread rests, and sees them late"
    source.stop()


def test_the_end_of_a_transaction_that_was_passed_by_is_looked_for_and_told(
    database: FreshDatabase, tmp_path: Path
) -> None:
    """Also where nothing else comes; as seldom as for rows then."""
    create_table(database)
    file = tmp_path / "passed.json"
    options = {"url": database.url, "windows": "true", "position": "0", "max_wait": "10ms"}
    source = EventStoreStreamReader(options | {"passed_file": str(file)})
    assert source._watermark is not None
    now = source._connected().now()
    with transaction(database) as cursor:
        insert(cursor, "a-1", 1)
        source.latestOffset({"position": now, "tick": 0}, ReadMaxRows(10))  # the first look
        source._first = False
        deadline = time.monotonic() + 10.0
        while not source._watermark.passed:
            assert time.monotonic() < deadline
            assert source._next_window(now + 3_600_000_000) is None
            assert source._next_look() is None
            time.sleep(0.02)
        assert told(file) == {}
        cursor.connection.commit()
    while not told(file):
        assert time.monotonic() < deadline
        assert source._next_window(now + 3_600_000_000) is None
        time.sleep(0.02)
    [(created,)] = database.execute(
        "SELECT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', create_time) FROM events"
    )
    assert any(first <= bucket_of(created) <= last for first, last in told(file))
    assert not source._watermark.has_open
    source.stop()


def test_a_window_without_rows_is_announced_where_tasks_have_something_to_do(
    database: FreshDatabase, tmp_path: Path
) -> None:
    """Once for each time that they tell of it: of a hold that is due, and of a comparison."""
    create_table(database)
    state = StateDir(tmp_path)
    options = {"url": database.url, "windows": "true", "position": "0"}
    files = {
        "wake_file": str(state.progress_file),
        "boundary_file": str(state.boundary_file),
        "live_dir": str(state.live),
    }
    source = EventStoreStreamReader(options | files)
    now = source._connected().now()
    assert source._next_window(now) is None

    state.tell(1, 1, 0, {"position": now, "next_due": now + 3_600_000_000, "compared": 2})
    assert source._next_window(now) is None
    state.tell(1, 1, 0, {"position": now, "next_due": now, "compared": 2})
    assert source._next_window(now) == Bounds(now)
    assert source._next_window(now) is None, "it is on its way"
    state.tell(1, 1, 0, {"position": now, "next_due": now, "compared": 2, "again": True})
    assert source._next_window(now) == Bounds(now)

    state.tell(1, 1, 0, {"position": now, "next_due": None, "compared": 2})
    for number, buckets, found in ((2, [7], None), (3, [], None), (3, [7], Bounds(now))):
        comparison = {"run": 1, "number": number, "buckets": buckets}
        state.write(state.progress_file, {"comparison": comparison})
        assert source._next_window(now) == found
    source.stop()


def test_where_nothing_is_new_a_batch_begins_whose_tasks_wait(
    database: FreshDatabase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_table(database)
    state = StateDir(tmp_path)
    monkeypatch.setattr("eventpub.spark.source._LOOKS_FOR", 0.02)
    options = {"url": database.url, "windows": "true", "position": "5", "rests_in_tasks": "true"}
    files = {"boundary_file": str(state.boundary_file), "wake_file": str(state.progress_file)}
    source = EventStoreStreamReader(options | files | {"looks_every": "1000"})
    at: Any = source.latestOffset(source.initialOffset(), ReadMaxRows(10))
    assert [w.moves for w in source.partitions(at, at)] == [False]  # type: ignore[attr-defined]
    reached = at["position"] + 7
    state.write(state.progress_file, {"position": reached})  # by tasks that followed
    rests: Any = source.latestOffset(at, ReadMaxRows(10))
    assert rests == {"position": reached, "tick": at["tick"] + 1}
    assert [w.moves for w in source.partitions(at, rests)] == [True]  # type: ignore[attr-defined]
    assert (state.read(state.boundary_file) or {})["upto"] == reached
    source.stop()
