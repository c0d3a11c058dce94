"""The load must do what it reports, or every test that trusts it proves nothing."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pymysql
import pytest

from tests.conftest import FreshDatabase
from tests.servers.connections import aggregate_name
from tests.servers.databases import mariadb
from tests.servers.fill import fill
from tests.servers.load import Load, Report
from tests.servers.writers import run

BOTH = pytest.mark.parametrize("database", ["mysql", "mariadb"], indirect=True)
TABLE = """
CREATE TABLE events (
  id BIGINT AUTO_INCREMENT PRIMARY KEY,
  aggregate_id VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
  version BIGINT NOT NULL,
  event_type VARCHAR(255) NOT NULL,
  payload LONGBLOB NULL,
  metadata JSON NULL,
  create_time TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6),
  UNIQUE KEY (aggregate_id, version),
  KEY (create_time)
)
"""


@pytest.fixture(autouse=True)
def _events(request: pytest.FixtureRequest) -> None:
    if "database" in request.fixturenames:
        request.getfixturevalue("database").execute(TABLE)


def count(database: FreshDatabase) -> Any:
    return database.execute("SELECT COUNT(*) FROM events")[0][0]


def holes(database: FreshDatabase) -> dict[str, Any]:
    """How many versions are missing below the last one, by aggregate."""
    return dict(
        database.execute(
            "SELECT aggregate_id, MAX(version) - COUNT(*) FROM events "
            "GROUP BY aggregate_id HAVING MAX(version) > COUNT(*)"
        )
    )


@BOTH
def test_leaves_versions_without_holes_and_counts_them(database: FreshDatabase) -> None:
    load = Load(
        database.url,
        rate=1_500,
        seconds=2,
        aggregates=2_000,
        open_fraction=0.1,
        open_seconds=(0, 1),
        rollback_fraction=0.1,
        close_all=False,
    )
    report = run(load)
    assert count(database) == report.events
    assert holes(database) == {}
    assert dict(
        database.execute("SELECT aggregate_id, MAX(version) FROM events GROUP BY aggregate_id")
    ) == (load.versions)
    assert report.held_open > 0
    assert report.rolled_back > 0
    assert (report.failed, report.unsure, report.skipped_versions) == (0, 0, 0)
    assert 500 < report.rate < 1_600


def test_goes_on_from_the_versions_that_are_there(database: FreshDatabase) -> None:
    load = Load(database.url, rate=1_000, seconds=0.5, aggregates=50, events_per_transaction=5)
    fill(database.url, events=100, aggregates=50)
    first, second = run(load), run(replace(load, seed=1))
    assert holes(database) == {}
    assert count(database) == 100 + sum(
        report.events + report.closing_events for report in (first, second)
    )


def test_shows_late_commits_to_who_reads_meanwhile(database: FreshDatabase) -> None:
    load = Load(
        database.url,
        rate=300,
        seconds=1.5,
        aggregates=500,
        open_fraction=1,
        open_seconds=(0.5, 1),
    )
    database.execute("CREATE TABLE seen (latest TIMESTAMP(6), events INT)")
    writer = threading.Thread(target=run, args=(load,))
    writer.start()
    time.sleep(1.2)
    ((moment, events),) = database.execute("SELECT MAX(create_time), COUNT(*) FROM events")
    writer.join()
    ((then,),) = database.execute("SELECT COUNT(*) FROM events WHERE create_time <= %s", (moment,))
    assert then > events > 0


def test_makes_the_gaps_that_it_reports(database: FreshDatabase) -> None:
    load = Load(database.url, rate=200, seconds=1, aggregates=500, gap_fraction=0.5)
    report = run(load)
    assert report.skipped_versions > 0
    assert holes(database) == {name: len(gone) for name, gone in load.skipped.items()}
    assert sum(map(len, load.skipped.values())) == report.skipped_versions


def test_commits_in_reverse_order_and_leaves_no_hole(database: FreshDatabase) -> None:
    load = Load(database.url, rate=200, seconds=1.5, aggregates=500, reversed_fraction=1)
    reports: list[Report] = []
    writer = threading.Thread(target=lambda: reports.append(run(load)))
    writer.start()
    seen: set[str] = set()
    while writer.is_alive():
        seen.update(holes(database))
        time.sleep(0.05)
    writer.join()
    assert reports[0].reversed > 10
    assert len(seen) > 5
    assert holes(database) == {}


def test_closes_every_aggregate_with_one_more_event(database: FreshDatabase) -> None:
    load = Load(database.url, rate=500, seconds=0.5, aggregates=300)
    report = run(load)
    assert report.closing_events == len(load.versions) > 0
    assert count(database) == report.events + report.closing_events == sum(load.versions.values())


def test_stops_at_sigterm_with_nothing_left_open(database: FreshDatabase, tmp_path: Path) -> None:
    arguments = "--rate 500 --open-fraction 0.5 --open-seconds 30 60 --json --live --versions"
    command = [sys.executable, "-m", "tests.servers.writers", "--url", database.url]
    with subprocess.Popen(
        [*command, *arguments.split(), str(tmp_path / "versions.json")],
        stdout=subprocess.PIPE,
        text=True,
    ) as writers:
        assert writers.stdout is not None
        assert json.loads(writers.stdout.readline())["seconds"] > 0
        began = time.monotonic()
        writers.send_signal(signal.SIGTERM)
        lines = writers.stdout.read().splitlines()
    assert writers.returncode == 0
    assert time.monotonic() - began < 10
    report = Report(**json.loads(lines[-1]))
    assert count(database) == report.events + report.closing_events
    assert holes(database) == {}
    versions = json.loads((tmp_path / "versions.json").read_text())["versions"]
    assert sum(versions.values()) == count(database)


def test_knows_what_was_committed_when_connections_are_killed(database: FreshDatabase) -> None:
    load = Load(
        database.url,
        rate=500,
        seconds=3,
        aggregates=500,
        open_fraction=0.3,
        open_seconds=(0.2, 1),
    )
    reports: list[Report] = []
    writer = threading.Thread(target=lambda: reports.append(run(load)))
    writer.start()
    for _ in range(4):
        time.sleep(0.5)
        for (number,) in database.execute(
            "SELECT id FROM information_schema.processlist WHERE db = DATABASE() "
            "AND id <> CONNECTION_ID() LIMIT 10"
        ):
            with contextlib.suppress(pymysql.err.OperationalError):  # it has ended by itself
                database.execute(f"KILL {number}")
    writer.join()
    assert reports[0].unsure > 0
    assert count(database) == reports[0].events + reports[0].closing_events
    assert holes(database) == {}


def test_the_writers_of_the_demo_count_all_that_was_committed(database: FreshDatabase) -> None:
    """The event that each aggregate gets at the end was missing."""
    command = [sys.executable, "-m", "eventpub.local.writers", "--url", database.url]
    done = subprocess.run(
        [*command, "--rate", "50", "--seconds", "2"], check=False, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["events"] == count(database)


def test_the_writers_of_the_demo_end_where_there_is_no_table(database: FreshDatabase) -> None:
    database.execute("DROP TABLE events")
    command = [sys.executable, "-m", "eventpub.local.writers", "--url", database.url]
    command += ["--rate", "50"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")
    assert "events" in done.stderr


def test_goes_on_after_the_database_was_restarted(tmp_path: Path) -> None:
    with mariadb(tmp_path) as server:
        database = FreshDatabase(server, "eventpub")
        database.execute(TABLE)
        load = Load(database.url, rate=500, aggregates=1_000, open_fraction=0.3)
        stopped = threading.Event()
        reports: list[Report] = []
        writer = threading.Thread(target=lambda: reports.append(run(load, stop=stopped.is_set)))
        writer.start()
        time.sleep(1)
        server.kill()
        server.start()
        before = count(database)
        deadline = time.monotonic() + 20
        while count(database) < before + 500 and time.monotonic() < deadline:
            time.sleep(0.1)
        stopped.set()
        writer.join()
        assert count(database) == reports[0].events + reports[0].closing_events > before + 500
        assert holes(database) == {}


def test_bursts_come_at_the_end_of_each_period() -> None:
    load = Load("", rate=100, bursts=(30, 5, 10))
    planned = [load.planned(elapsed) for elapsed in (0, 25, 26, 30, 31, 60)]
    assert planned == [0, 2_500, 3_500, 7_500, 7_600, 15_000]


def test_writes_the_bursts_that_are_asked_for(database: FreshDatabase) -> None:
    load = Load(database.url, rate=200, seconds=2, bursts=(1, 0.5, 5), close_all=False)
    assert run(load).events == count(database)
    assert 200 * 2 * 1.2 < count(database) < 1_200 * 1.1


def test_popular_aggregates_have_more_events(database: FreshDatabase) -> None:
    run(Load(database.url, rate=1_000, seconds=1, aggregates=200, zipf=1.2, close_all=False))
    popular = database.execute(
        "SELECT aggregate_id FROM events GROUP BY aggregate_id ORDER BY COUNT(*) DESC LIMIT 3"
    )
    assert {name for (name,) in popular} <= {aggregate_name("order", n) for n in range(10)}
    assert holes(database) == {}


def test_notes_what_was_held_open_and_when_it_was_committed(
    database: FreshDatabase, tmp_path: Path
) -> None:
    held = tmp_path / "held.jsonl"
    command = [
        *(sys.executable, "-m", "tests.servers.writers", "--url", database.url, "--json"),
        *("--rate", "500", "--seconds", "1.5", "--aggregates", "1000", "--no-close"),
        *("--open-fraction", "0.3", "--open-seconds", "0.2", "0.5", "--held", str(held)),
    ]
    report = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    lines = [json.loads(line) for line in held.read_text().splitlines()]
    assert len(lines) == report["held_open"] > 0
    for committed, of_each in lines:
        for number, first, last in of_each:
            ((oldest, events),) = database.execute(
                "SELECT UNIX_TIMESTAMP(MIN(create_time)), COUNT(*) FROM events"
                " WHERE aggregate_id = %s AND version BETWEEN %s AND %s",
                (aggregate_name("order", number), first, last),
            )
            assert events == last - first + 1
            assert committed > oldest


@BOTH
def test_fill_makes_a_backlog_in_the_time_that_is_given(database: FreshDatabase) -> None:
    first, last = 1_700_000_000_000_000, 1_700_000_600_000_000
    fill(database.url, events=25_000, aggregates=1_000, first=first, last=last)
    assert count(database) == 25_000
    assert holes(database) == {}
    with database.connect(init_command="SET time_zone = '+00:00'") as session:
        cursor = session.cursor()
        cursor.execute(
            "SELECT FLOOR(UNIX_TIMESTAMP(MIN(create_time))), "
            "FLOOR(UNIX_TIMESTAMP(MAX(create_time))), MAX(version), MIN(aggregate_id), "
            "SUM(JSON_VALID(CONVERT(payload USING utf8mb4))) FROM events"
        )
        assert cursor.fetchall() == (
            (1_700_000_000, 1_700_000_599, 25, aggregate_name("order", 0), 25_000),
        )
        cursor.execute(
            "SELECT COUNT(*) FROM events a JOIN events b ON a.aggregate_id = b.aggregate_id "
            "AND b.version = a.version + 1 WHERE b.create_time <= a.create_time"
        )
        assert cursor.fetchall() == ((0,),)
