"""The article's load, backlogs, and `kill -9` under load: 0 lost, 0 repeated, 0 out of order."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from pymysql.cursors import DictCursor

from tests.conftest import FreshDatabase
from tests.publisher.conftest import NewPublisher
from tests.publisher.harness import Publisher, compare, create_table, eventually
from tests.servers.fill import fill

pytestmark = pytest.mark.alone

SECONDS = 60
RATE = 6_000


@contextmanager
def writers(
    database: FreshDatabase, report: Path, *, seconds: float, rate: int = RATE
) -> Iterator[subprocess.Popen[bytes]]:
    """The load in a process of its own: 10% of transactions stay open for 0 to 3 s.

    Nothing follows the last versions, so what commits late shows no gap.
    """
    with report.open("wb") as out:
        process = subprocess.Popen(
            [
                sys.executable, "-m", "tests.servers.writers",
                "--url", database.url, "--rate", str(rate), "--seconds", str(seconds),
                "--open-fraction", "0.1", "--open-seconds", "0", "3", "--no-close", "--json",
            ],
            stdout=out,
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


def test_6000_events_a_second_with_transactions_left_open(
    database: FreshDatabase, new_publisher: NewPublisher, tmp_path: Path
) -> None:
    """Nothing is lost; that a reader which only moves a window loses some, the bench shows."""
    create_table(database)
    publisher = new_publisher(database, read={"delay": "1s"}, gaps={"max_backoff": 8})
    publisher.start()
    eventually((publisher.state / "progress.json").exists)
    with writers(database, tmp_path / "load.json", seconds=SECONDS) as load:
        assert load.wait(SECONDS * 5) == 0
    assert publisher.stop() == 143
    publisher.publish_everything()
    report = json.loads((tmp_path / "load.json").read_text().splitlines()[-1])
    assert report["events"] >= 0.5 * SECONDS * RATE, report
    assert compare(database, publisher.topic).counts() == (0, 0, 0)


def test_kill_9_of_the_publisher_and_of_a_worker_ten_times_each_under_load(
    database: FreshDatabase, new_publisher: NewPublisher, tmp_path: Path
) -> None:
    create_table(database)
    publisher = new_publisher(
        database, read={"delay": "1s"}, gaps={"max_backoff": 8}, spark={"master": "local[*]"}
    )
    dice = random.Random(20261121)
    publisher.start()
    with writers(database, tmp_path / "load.json", seconds=1500) as load:
        for _ in range(10):
            wait_for_progress(publisher)
            time.sleep(dice.uniform(0, 3))
            publisher.kill()
            publisher.start()
        for _ in range(10):
            publisher.until_spark_publishes()
            wait_for_progress(publisher)
            time.sleep(dice.uniform(0, 1))
            dice.choice(eventually(publisher.workers)).kill()
        wait_for_progress(publisher)
        load.terminate()
        assert load.wait(120) == 0
    assert publisher.stop() == 143
    publisher.publish_everything(timeout=800)
    assert compare(database, publisher.topic).counts() == (0, 0, 0)


def wait_for_progress(publisher: Publisher) -> None:
    """Until something new is published."""
    before = position(publisher)

    def moved() -> bool:
        assert publisher.process is not None
        assert publisher.process.poll() is None, publisher.words()
        return position(publisher) > before

    eventually(moved)


def position(publisher: Publisher) -> int:
    """How far the publisher says that it is."""
    try:
        state: dict[str, Any] = json.loads((publisher.state / "progress.json").read_text())
    except FileNotFoundError:
        return -1
    return int(state["position"])


def test_b3_a_million_events_wait_and_memory_does_not_grow_with_them(
    database: FreshDatabase, new_publisher: NewPublisher
) -> None:
    """`run --available-now`, then `verify`; peak memory in both runs.

    Every window that the publisher asked for is explained by the server.
    """
    create_table(database)
    peaks = []
    for number, events in enumerate((400_000, 1_000_000)):
        database.execute("TRUNCATE TABLE events")
        fill(database.url, events, 20_000)
        publisher = new_publisher(
            database,
            app={"id": f"backlog-{number}"},
            sink={"topic": f"backlog.{database.name}.{number}", "partitions": 4},
        )
        publisher.topic.name = publisher.settings["sink"]["topic"]
        with watched(publisher) as peak, statements_of(database) as sent:
            publisher.publish_everything(timeout=800)
        peaks.append(peak)
        windows = {s for s in sent if " FORCE INDEX " in s and " ORDER BY " in s}
        windows = {s for s in windows if " WHERE " in s}  # the newest time is one entry, at its end
        assert_index_ranges(database, windows)
        pages = {s.partition(" BETWEEN ")[2].partition(" ORDER ")[0] for s in windows}
        assert len(pages) > events / 50_000, "page mode was not entered"
        verdict = publisher.command("verify", "--json", timeout=600)
        assert verdict.returncode == 0, verdict.stdout + verdict.stderr
        result = json.loads(verdict.stdout)["result"]
        assert compare(database, publisher.topic).counts() == (0, 0, 0), result
    print("PEAKS", peaks)
    # 364 and 373, 399 and 419, 381 and 425 MB were seen: what differs is how much waits at once
    assert sum(peaks[1].values()) <= 1.25 * sum(peaks[0].values()), peaks


@contextmanager
def statements_of(database: FreshDatabase) -> Iterator[list[str]]:
    """The statements about events that the server was sent meanwhile, from its general log."""
    sent: list[str] = []
    database.execute("SET GLOBAL log_output = 'TABLE'")
    database.execute("TRUNCATE TABLE mysql.general_log")
    database.execute("SET GLOBAL general_log = 'ON'")
    try:
        yield sent
    finally:
        database.execute("SET GLOBAL general_log = 'OFF'")
    rows = database.execute(
        "SELECT CONVERT(argument USING utf8mb4) FROM mysql.general_log"
        " WHERE command_type = 'Query' AND argument LIKE '%FROM `events`%'"
    )
    sent += [row[0] for row in rows]


def assert_index_ranges(database: FreshDatabase, windows: set[str]) -> None:
    """Each is read as a range of the index by time, in its order."""
    assert windows
    with database.connect() as connection, connection.cursor(DictCursor) as cursor:
        for statement in windows:
            cursor.execute(f"EXPLAIN FORMAT=TRADITIONAL {statement}")
            for plan in cursor.fetchall():
                if plan["table"] != "events":  # the outer part of a count
                    continue
                found = (plan["type"], plan["key"], "filesort" in (plan["Extra"] or ""))
                assert found == ("range", "create_time", False), (statement, plan)


@contextmanager
def watched(publisher: Publisher) -> Iterator[dict[str, int]]:
    """Peak memory of the largest process of each kind, shared pages counted once, in MB."""
    peaks: dict[str, int] = {}
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.25):
            if publisher.process is None:
                continue
            for process in publisher.family():
                try:
                    kind = Path(process.cmdline()[-1]).name
                    used = round(process.memory_full_info().pss / 1e6)
                except (psutil.Error, IndexError):
                    continue
                peaks[kind] = max(peaks.get(kind, 0), used)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peaks
    finally:
        done.set()
        thread.join()
