"""`spark.readStream.format("eventstore")` in a user's own job."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

from eventpub.errors import ConfigError, find_marked
from eventpub.spark.source import EventStoreStreamReader, SourceError, Window
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
        env={**os.environ, "JDK_JAVA_OPTIONS": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.long
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


def test_windows_end_where_a_page_does_and_each_shard_reads_its_part(
    database: FreshDatabase,
) -> None:
    create_table(database)
    with transaction(database) as cursor:
        for number in range(25):
            insert(cursor, f"a-{number}", 1)
            cursor.connection.commit()
    time.sleep(0.1)
    options = {"url": database.url, "delay": "0", "watermark": "off", "shards": "2"}
    source = EventStoreStreamReader(options | {"start": "beginning"})
    source.prepareForTriggerAvailableNow()
    at: Any = source.initialOffset()
    found: list[tuple[int, str]] = []
    pages = 0
    while (end := source.latestOffset(at, ReadMaxRows(10))) != at:
        for window in source.partitions(at, end):
            assert isinstance(window, Window)
            task = pickle.loads(pickle.dumps(source))  # as Spark does for a task
            for batch in task.read(window):
                ids = batch.column("aggregate_id").to_pylist()
                found += [(window.shard, aggregate_id) for aggregate_id in ids]
        at, pages = end, pages + 1
    source.stop()
    assert sorted(a for _, a in found) == sorted(f"a-{n}" for n in range(25))
    assert {shard for shard, _ in found} == {0, 1}
    assert pages >= 3


def test_an_error_keeps_its_code_on_its_way_through_spark() -> None:
    source = EventStoreStreamReader({"url": "mysql+pymysql://nobody@127.0.0.1:1/none"})
    with pytest.raises(SourceError) as failed:
        source.latestOffset({"position": 0}, ReadMaxRows(10))
    error = find_marked(str(failed.value))
    assert error is not None
    assert error.code == "store.unreachable"
    assert error.retriable
