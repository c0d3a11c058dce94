"""Scenarios B5 and B6: a database whose clock is stepped back, or goes through a change of DST.

The server's calls for the time of day go through a library that adds what a file says. It is
compiled here: where there is no C compiler, or the server is not a process of ours, these are
skipped.
"""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.conftest import FreshDatabase
from tests.publisher.conftest import NewPublisher
from tests.publisher.harness import (
    Publisher,
    compare,
    create_table,
    eventually,
    insert,
    transaction,
)
from tests.servers.databases import mysql

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long long *ahead;  /* nanoseconds */

__attribute__((constructor)) static void start(void) {
  const char *name = getenv("CLOCK_AHEAD");
  int file = name ? open(name, O_RDONLY) : -1;
  if (file < 0) return;
  void *at = mmap(0, sizeof *ahead, PROT_READ, MAP_SHARED, file, 0);
  if (at != MAP_FAILED) ahead = at;
  close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  int answer = (int)syscall(SYS_clock_gettime, clock, now);
  if (answer == 0 && ahead && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
    long long all = now->tv_sec * 1000000000LL + now->tv_nsec + *ahead;
    now->tv_sec = all / 1000000000LL;
    now->tv_nsec = all % 1000000000LL;
  }
  return answer;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec precise;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &precise);
  now->tv_sec = precise.tv_sec;
  now->tv_usec = precise.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *out) {
  struct timespec precise;
  clock_gettime(CLOCK_REALTIME, &precise);
  if (out) *out = precise.tv_sec;
  return precise.tv_sec;
}
"""


class Clock:
    """The clock of one server."""

    def __init__(self, file: Path) -> None:
        file.write_bytes(bytes(8))
        with file.open("r+b") as opened:
            self._shared = mmap.mmap(opened.fileno(), 8)

    def step(self, seconds: float) -> None:
        """Forward, or back where negative."""
        (ahead,) = struct.unpack("=q", self._shared[:8])
        self._shared[:8] = struct.pack("=q", ahead + int(seconds * 1e9))

    def set_to(self, moment: datetime) -> None:
        """From this moment on it goes on as clocks do."""
        self._shared[:8] = bytes(8)
        self.step((moment - datetime.now(UTC)).total_seconds())


@pytest.fixture
def moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[FreshDatabase, Clock]]:
    """A server in Berlin, and its clock."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    source, library = tmp_path / "clock.c", tmp_path / "clock.so"
    source.write_text(SHIM)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O2", "-o", library, source],
        check=True,
        capture_output=True,
    )
    clock = Clock(tmp_path / "ahead")
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("CLOCK_AHEAD", str(tmp_path / "ahead"))
    server = mysql(tmp_path / "mysql", options=["--skip-log-bin"], time_zone="Europe/Berlin")
    monkeypatch.undo()
    with server:
        database = FreshDatabase(server, "eventpub")
        clock.step(3600)
        ahead = time_of(database) - datetime.now(UTC)
        clock.step(-3600)
        if ahead < timedelta(minutes=30):
            pytest.skip("this server's clock cannot be moved")
        yield database, clock


def time_of(database: FreshDatabase) -> datetime:
    """The database's time."""
    found: datetime = database.execute("SELECT UTC_TIMESTAMP(6)")[0][0]
    return found.replace(tzinfo=UTC)


def commit(database: FreshDatabase, aggregate_id: str, *versions: int) -> None:
    """Committed at once, at the database's present time."""
    with database.connect() as connection, connection.cursor() as cursor:
        for version in versions:
            insert(cursor, aggregate_id, version)


@pytest.fixture
def running(
    moved: tuple[FreshDatabase, Clock], new_publisher: NewPublisher
) -> tuple[FreshDatabase, Clock, Publisher]:
    """A publisher of the server's events, not started."""
    database, clock = moved
    return database, clock, new_publisher(database)


@pytest.mark.engines("threads", "here")
def test_b6_the_databases_clock_steps_back_by_30_seconds(
    running: tuple[FreshDatabase, Clock, Publisher],
) -> None:
    """As at a failover: what is created from now on lies behind the position for 30 s."""
    database, clock, publisher = running
    create_table(database)
    publisher.start()
    commit(database, "before", 1)
    commit(database, "goes-on", 1)
    publisher.until_published("before", [1])
    before = time_of(database)
    clock.step(-30)
    commit(database, "goes-on", 2)
    commit(database, "alone", 1)
    assert time_of(database) < before
    time.sleep(3.0)
    clock.step(28)  # what would be waited for
    assert time_of(database) > before
    commit(database, "after", 1)
    publisher.until_published("after", [1])
    assert publisher.words().count("clock went back") == 1
    commit(database, "goes-on", 3)
    publisher.until_published("goes-on", [1, 2, 3])
    publisher.until_published("alone", [1])
    assert publisher.stop() == 143
    differences = compare(database, publisher.topic)
    assert not differences, differences


def test_b6_what_is_held_when_the_clock_is_set_back_does_not_wait_until_it_is_there_again(
    running: tuple[FreshDatabase, Clock, Publisher],
) -> None:
    """A hold is tried again at a time of a clock that was an hour ahead."""
    database, clock, publisher = running
    create_table(database)
    publisher.start()
    commit(database, "a", 1)
    publisher.until_published("a", [1])
    clock.step(3600)
    with transaction(database) as late:
        insert(late, "held", 1)
        commit(database, "held", 2)
        commit(database, "a", 2)
        publisher.until_published("a", [1, 2])
        eventually(lambda: publisher.command("gaps", "list").returncode == 1, 30)  # one is open
        clock.step(-3600)
        late.connection.commit()
    publisher.until_published("held", [1, 2], timeout=40)
    assert publisher.stop() == 143
    differences = compare(database, publisher.topic)
    assert not differences, differences


def test_b6_while_the_clock_is_behind_nothing_is_forgotten_neither_running_nor_down(
    running: tuple[FreshDatabase, Clock, Publisher],
) -> None:
    """It was ten minutes ahead for a moment, and then the position is for ten minutes."""
    database, clock, publisher = running
    create_table(database)
    publisher.settings["recount"] = {"horizon": "5s"}
    publisher.start()
    clock.step(600)
    commit(database, "ahead", 1)
    publisher.until_published("ahead", [1])
    clock.step(-600)
    commit(database, "back", 1)
    publisher.until_published("back", [1])
    with transaction(database) as late:  # for longer than the horizon
        insert(late, "late", 1)
        for number in range(8):
            commit(database, f"other-{number}", 1)
            time.sleep(1)
        late.connection.commit()
    publisher.until_published("late", [1])
    time.sleep(3)  # until only progress.json knows that the clock went back
    assert publisher.stop() == 143
    for number in range(20):
        commit(database, f"down-{number}", 1)
    time.sleep(8)
    publisher.start()
    publisher.until_published("down-19", [1])
    clock.step(605)
    commit(database, "after", 1)
    publisher.until_published("after", [1])
    assert publisher.stop() == 143
    differences = compare(database, publisher.topic)
    assert not differences, differences


@pytest.mark.parametrize(
    "change",
    [datetime(2025, 10, 26, 1, tzinfo=UTC), datetime(2026, 3, 29, 1, tzinfo=UTC)],
    ids=["an hour is lived twice", "an hour is left out"],
)
def test_b5_the_clocks_change_while_the_publisher_runs(
    running: tuple[FreshDatabase, Clock, Publisher], change: datetime
) -> None:
    """A DATETIME column has local time; the delay is neither an hour longer nor ignored.

    Events before, at and behind the change, and in an open transaction across it.
    """
    database, clock, publisher = running
    create_table(database, time="DATETIME(6)")
    clock.set_to(change - timedelta(hours=1, minutes=30))
    publisher.start()
    commit(database, "a", 1)
    publisher.until_published("a", [1])
    version = 1
    for minutes in (61, 29, 30, 30, 31):  # 00:31, 01:00, 01:30, 02:00, 02:31 UTC, if at 01:00
        clock.step(minutes * 60)
        version += 1
        commit(database, "a", version)
        commit(database, f"alone-{version}", 1)
        publisher.until_published("a", list(range(1, version + 1)), timeout=30)
        publisher.until_published(f"alone-{version}", [1], timeout=30)
    assert publisher.stop() == 143
    differences = compare(database, publisher.topic)
    assert not differences, differences
    said = publisher.log.read_text()
    assert "version_conflict" not in said
    assert "store.rows_in_past" not in said
