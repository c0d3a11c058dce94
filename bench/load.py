"""Writers, a reader of the topic, and what came of it: the frame of every case under load."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pymysql
from pymysql.cursors import SSCursor
from sqlalchemy.engine import make_url

from tests.servers.connections import aggregate_name

from . import topic
from .compare import Ints, Records, codes, compare, over_time, spread, stored_codes
from .machine import PARTITIONS, PAYLOAD_BYTES, Machine
from .peers import module
from .publisher import Publisher, Settings
from .reader import Reader
from .usage import Usage, one

QUIET = 12.0
"""Seconds without a new record after which nothing more is expected: by then the recount has looked
at everything twice that was open for 5 s."""


@dataclass(frozen=True)
class Phase:
    """So many events a second for so many seconds.

    `open_fraction` of the transactions stay open for 0 to `open_seconds`. With `note_all` the time
    of every commit is known, not only of those.
    """

    rate: float
    seconds: float
    open_fraction: float = 0.0
    open_seconds: float = 5.0
    aggregates: int = 20_000
    zipf: float = 0.0
    bursts: tuple[float, float, float] | None = None
    events_per_transaction: int = 20
    note_all: bool = False


class Writers:
    """The writers of one phase, in a process of their own."""

    def __init__(self, url: str, phase: Phase, folder: Path, seed: int = 0) -> None:
        self._held = folder / f"held-{seed}-{time.time_ns()}.jsonl"
        bursts = ["--bursts", *map(str, phase.bursts)] if phase.bursts else []
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.servers.writers", "--url", url),
                *("--rate", str(phase.rate), "--seconds", str(phase.seconds)),
                *("--aggregates", str(phase.aggregates), "--zipf", str(phase.zipf), *bursts),
                *("--open-fraction", str(phase.open_fraction)),
                *("--open-seconds", "0", str(phase.open_seconds)),
                *("--payload-bytes", str(PAYLOAD_BYTES), "--seed", str(seed)),
                *("--events-per-transaction", str(phase.events_per_transaction)),
                *(["--note-all"] if phase.note_all else []),
                *("--held", str(self._held), "--no-close", "--json"),
            ],
            stdout=subprocess.PIPE,
        )
        self.pid = self._process.pid

    def finish(self, stop: threading.Event) -> dict[str, Any]:
        """Waits for the end, or ends it where `stop` is set; what was written.

        Raises:
            RuntimeError: the writers failed.
        """
        while self._process.poll() is None:
            if stop.wait(0.2):
                self._process.terminate()
                break
        out, _ = self._process.communicate()
        if self._process.returncode != 0:
            raise RuntimeError(f"the writers ended with status {self._process.returncode}")
        report: dict[str, Any] = json.loads(out.decode().splitlines()[-1])
        return report

    def held(self) -> list[tuple[str, int, int, int]]:
        """Aggregate, first and last version, and commit time (µs) of what was held open."""
        found = []
        for line in self._held.read_text().splitlines():
            committed, of_each = json.loads(line)
            for number, first, last in of_each:
                name = aggregate_name("order", number)
                found.append((name, first, last, round(committed * 1e6)))
        self._held.unlink()
        return found

    def kill(self) -> None:
        """Ends them at once, where they still write."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def write(
    url: str, phases: Sequence[Phase], folder: Path, stop: threading.Event
) -> tuple[list[dict[str, Any]], list[tuple[str, int, int, int]]]:
    """Runs the phases one after the other; their reports, and all that was held open."""
    reports, held = [], []
    for number, phase in enumerate(phases):
        if stop.is_set():
            break
        writers = Writers(url, phase, folder, number)
        try:
            reports.append(writers.finish(stop))
        finally:
            writers.kill()
        held += writers.held()
    return reports, held


def _connect(url: str) -> Any:
    address = make_url(url)
    return pymysql.connect(
        host=address.host,
        port=address.port or 3306,
        user=address.username,
        password=address.password or "",
        database=address.database,
        ssl_disabled=True,
        cursorclass=SSCursor,
    )


@contextmanager
def stored(url: str) -> Iterator[SSCursor]:
    """The keys of all events, streamed."""
    with _connect(url) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT aggregate_id, version FROM events")
        yield cursor


def newest(url: str) -> int:
    """The latest `create_time`, µs."""
    with _connect(url) as connection, connection.cursor() as cursor:
        cursor.execute(
            "SELECT CAST(UNIX_TIMESTAMP(MAX(create_time)) * 1000000 AS SIGNED) FROM events"
        )
        ((found,),) = cursor.fetchall()
    return int(found)


def facts(
    url: str, records: Records, held: list[tuple[str, int, int, int]], warm_up: float = 0.0
) -> dict[str, Any]:
    """Lost, repeated, out of order, and how long events waited.

    `at_once`: create_time → consumer, of events whose transaction was committed at once (one
    statement, autocommit). `held_open`: the same for the others, whose create_time lies up to 5 s
    before the commit, so that nobody could have seen them; `held_open_from_commit`: from the moment
    the writer had the answer to its COMMIT. All in seconds; database, writers and consumer share
    one clock. Latencies are without the events of the first `warm_up` seconds.
    """
    with stored(url) as rows:
        store = stored_codes(rows, records.names)
    verdict = compare(store, records)
    committed = commit_times(records, held)
    waited = records.arrived - records.created
    start = int(records.created.min(initial=2**62))
    warm = records.created >= start + warm_up * 1e6
    at_once, held_open = warm & (committed == 0), warm & (committed != 0)
    return {
        "verdict": vars(verdict),
        "latency": {
            "at_once": spread(waited[at_once]),
            "held_open": spread(waited[held_open]),
            "held_open_from_commit": spread((records.arrived - committed)[held_open]),
        },
        "started_at": start,
        "over_time": over_time(records.created[committed == 0], waited[committed == 0], start),
    }


def commit_times(records: Records, held: list[tuple[str, int, int, int]]) -> Ints:
    """When the transaction of each record was committed, µs; 0: it was not held open."""
    numbers = {name: number for number, name in enumerate(records.names)}
    keys, versions, times = [], [], []
    for name, first, last, committed in held:
        number = numbers.get(name)
        if number is None:
            continue
        for version in range(first, last + 1):
            keys.append(number)
            versions.append(version)
            times.append(committed)
    known = codes(np.array(keys, np.int64), np.array(versions, np.int64))
    order = np.argsort(known)
    known, sorted_times = known[order], np.array(times, np.int64)[order]
    found: npt.NDArray[np.int64] = np.zeros(len(records.keys), np.int64)
    if len(known):
        read = codes(records.keys, records.versions)
        at = np.minimum(np.searchsorted(known, read), len(known) - 1)
        hit = known[at] == read
        found[hit] = sorted_times[at[hit]]
    return found


def _steady(records: Records, first: float, usage: Usage) -> dict[str, Any]:
    """Of the events that were created after `first` (Unix, s): how many, and CPU until the last."""
    created = records.created[records.created >= first * 1e6]
    last = int(created.max(initial=round(first * 1e6))) / 1e6
    return {
        "events": len(created),
        "seconds": round(last - first, 2),
        "cpu_seconds": usage.cpu_between(first, last),
    }


def under_load(  # noqa: PLR0913 (what a case is measured with)
    machine: Machine,
    database: str,
    phases: Sequence[Phase],
    settings: Settings | None,
    *,
    quiet: float = QUIET,
    verify: bool = False,
    warm_up: float = 0.0,
    backlog: int = 0,
    meanwhile: Callable[[Publisher], None] | None = None,
    examine: Callable[[Records], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """One publisher under load, on a table and a topic of its own, and a reader that judges.

    Args:
        settings: what differs from the defaults; None: the timestamp poller instead of a publisher.
        verify: also ask `eventpub verify`.
        quiet: seconds without a new record that end it.
        warm_up: see `facts`.
        backlog: so many events are there before the publisher starts.
        meanwhile: what is done to the publisher while the writers write; they end with it.
        examine: more facts from what was read.
    """
    url = machine.table(database)
    if backlog:
        machine.fill(url, backlog, 100_000, prefix="backlog")
    servers = machine.broker.bootstrap_servers
    name = machine.name(database)
    folder = machine.folder / name
    folder.mkdir()
    topic.create(servers, name, PARTITIONS)
    verified = None
    with ExitStack() as stack:
        if settings is None:
            command = module(
                "poller",
                *("--url", url, "--bootstrap-servers", servers, "--topic", name),
                *("--partitions", str(PARTITIONS)),
            )
            poller = subprocess.Popen(command)
            stack.callback(poller.kill)
            group = one("poller", poller.pid)
        else:
            publisher = stack.enter_context(Publisher(folder, url, servers, name, settings))
            publisher.start()
            publisher.started()
            group = publisher.group
        with (
            Reader(servers, name, folder) as reader,
            topic.Watch(servers, name, PARTITIONS) as watch,
        ):
            with Usage(group, *machine.groups(), one("reader", reader.pid)) as usage:
                stop = threading.Event()
                with ThreadPoolExecutor(1) as pool:
                    writing = pool.submit(write, url, phases, folder, stop)
                    try:
                        if meanwhile is not None:
                            meanwhile(publisher)
                            stop.set()
                        reports, held = writing.result()
                    except BaseException:
                        stop.set()
                        raise
                if settings is not None:
                    publisher.reaches(newest(url))
                watch.settled(1, quiet)
            if settings is None:
                poller.send_signal(signal.SIGTERM)
                poller.wait(60)
            else:
                publisher.stop()
                if verify:
                    verified = json.loads(publisher.command("verify", "--json"))
    found = facts(url, reader.records, held, warm_up)
    return {
        "settings": settings,
        "writers": reports,
        **found,
        "steady": _steady(reader.records, found["started_at"] / 1e6 + warm_up, usage),
        "disk": {
            "topic_bytes": machine.topic_bytes(name),
            "table_bytes": machine.table_bytes(database),
            "index_bytes": 0 if settings is None else publisher.index_bytes(),
        },
        "cpu_seconds": usage.cpu,
        "peak_memory_mb": {k: round(v / 1e6) for k, v in usage.peak_memory.items()},
        "peak_rss_mb": {k: round(v / 1e6) for k, v in usage.peak_rss.items()},
        "eventpub_verify": verified and {"ok": verified["ok"], "summary": verified["summary"]},
        **(examine(reader.records) if examine else {}),
    }
