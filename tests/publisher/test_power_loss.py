"""Scenario F8, finding A12: power fails, and each file of the state may have lost its end.

One publisher is killed while it writes; each case starts another on a copy of what it left, with
one file cut to nothing or to half. Most cases run the publisher in this process, which is quicker.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from eventpub import settings
from eventpub.coordinator.events import StopAsked
from eventpub.coordinator.progress import Progress
from eventpub.errors import StateError
from eventpub.index import Index
from eventpub.publisher import publisher as driver
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

AGGREGATES = 8
NOT_IN_QUESTION = {"spark.log", "LOG"}
OF_THE_PROCESS = {
    *("start.json", "progress.json", "run.json", "status.json", "eventpub.lock"),
    "requests/kept.json",
}


def commit(database: FreshDatabase, version: int) -> None:
    """One version of each aggregate."""
    with transaction(database) as cursor:
        for number in range(AGGREGATES):
            insert(cursor, f"a-{number}", version)
        cursor.connection.commit()


def cut(file: Path, part: int) -> None:
    """Leave nothing, or half."""
    os.truncate(file, file.stat().st_size // 2 * part)


@contextmanager
def started(publisher: Publisher) -> Iterator[Callable[[int], None]]:
    """The publisher's start and its threads, in this process; yields a wait for a version."""
    config = settings.load(publisher.config, {}, {}).config
    seen: list[Progress] = []
    failed: list[Exception] = []
    run = driver.Publisher(config, False, seen.append)

    def live() -> None:
        try:
            run.run()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=live)
    thread.start()

    def until(version: int) -> None:
        deadline = time.monotonic() + 60
        wanted = {(f"a-{number}", version) for number in range(AGGREGATES)}
        while not wanted <= {(r.key, r.version) for r in publisher.topic.read()}:
            assert time.monotonic() < deadline, seen and seen[-1].last_error
            if failed:
                raise failed[0]
            time.sleep(0.05)

    try:
        yield until
        if failed:
            raise failed[0]
    finally:
        run._events.put(StopAsked())
        thread.join(30)


@pytest.fixture
def left(new_publisher: NewPublisher, database: FreshDatabase) -> tuple[Publisher, int]:
    """A publisher that was killed while it wrote, and the last version that is committed."""
    create_table(database)
    with transaction(database) as cursor:
        insert(cursor, "before", 1)
        cursor.connection.commit()
    time.sleep(0.1)
    publisher = new_publisher(database, read={"start": "now", "delay": "100ms"})
    publisher.start()
    publisher.until_said("progress")
    stop = threading.Event()
    version = 0

    def write() -> None:
        nonlocal version
        while not stop.is_set():
            version += 1
            commit(database, version)
            time.sleep(0.05)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        publisher.until_spark_publishes()
        time.sleep(1.0)
        publisher.kill()
    finally:
        stop.set()
        writer.join()
    return publisher, version


def test_a12_each_file_of_the_state_is_cut(
    left: tuple[Publisher, int], database: FreshDatabase, tmp_path: Path
) -> None:
    publisher, version = left
    state, kept = publisher.state, tmp_path / "kept"
    state.rename(kept)
    (kept / "publisher.sock").unlink()  # of the killed one: a socket cannot be copied
    request = {"id": "kept", "action": "retry", "aggregate_id": "a-0", "version": None}
    (kept / "requests").mkdir(exist_ok=True)
    (kept / "requests" / "kept.json").write_text(json.dumps(request))
    files = [
        file.relative_to(kept)
        for file in sorted(kept.rglob("*"))
        if file.is_file() and file.stat().st_size and file.name not in NOT_IN_QUESTION
    ]
    of_kind = {}
    for file in files:  # one of each kind is enough: of offsets/0, offsets/1 …, of both shards
        name = "".join(c for c in file.name if not c.isdigit() and c not in "abcdef-")
        of_kind[file.parts[0], name] = file
    groups = [[f for f in files if f.parts[0] == "index"]]
    groups += [[f for f in files if f.parts[0] != "index"]]
    groups += [[Path("progress.json"), next(f for f in files if f.name.startswith("MANIFEST"))]]
    cases = [(case, number % 2) for number, case in enumerate(groups)]
    for file in of_kind.values():  # of an index, one of the two
        cases += [([file], part) for part in (0, 1) if part or file.parts[0] != "index"]
    assert {str(f) for f in files} >= OF_THE_PROCESS
    assert len(cases) > 15
    for case, part in cases:
        shutil.rmtree(state, ignore_errors=True)
        shutil.copytree(kept, state)
        for file in case:
            cut(state / file, part)
        version += 1
        commit(database, version)
        with started(publisher) as until:
            until(version)
    # what stands nowhere any more is not guessed
    for part in (0, 1):
        shutil.rmtree(state)
        shutil.copytree(kept, state)
        for file in files:
            cut(state / file, part)
        version += 1
        commit(database, version)
        with pytest.raises(StateError) as refused, started(publisher) as until:
            until(version)
        assert refused.value.code == "state.start_lost"
    database.execute("DELETE FROM events WHERE aggregate_id = 'before'")
    publisher.settings["read"]["start"] = "beginning"  # a time, as the suggestion says
    with started(publisher) as until:
        until(version)
    differences = compare(database, publisher.topic)
    assert not differences, differences
    assert publisher.topic.versions("before") == []


def test_a12_a_damaged_index_is_set_aside_and_it_is_said(
    left: tuple[Publisher, int], database: FreshDatabase
) -> None:
    """With the command, and nothing of the state but what the index and progress.json say."""
    publisher, version = left
    for manifest in (publisher.state / "index").rglob("MANIFEST-*"):
        cut(manifest, 1)
    for name in ("start.json", "run.json"):
        cut(publisher.state / name, 0)
    os.chmod(publisher.state, 0o755)
    os.chmod(publisher.state / "progress.json", 0o644)
    commit(database, version + 1)
    publisher.start()
    publisher.until_published("a-3", [*range(1, version + 2)])
    publisher.until_said("rebuilding the index from the topic")
    publisher.until_said("start.json was lost")
    publisher.until_said("other users had access")
    for path in [publisher.state, *publisher.state.rglob("*")]:
        if path.exists() and not path.is_symlink():
            assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path
    publisher.kill()
    database.execute("DELETE FROM events WHERE aggregate_id = 'before'")
    assert not compare(database, publisher.topic)


def test_a12_an_index_of_which_a_part_in_the_middle_is_missing_is_not_believed(
    tmp_path: Path,
) -> None:
    """RocksDB opens it and says nothing: newer offsets without the versions read up to there."""
    index = Index(tmp_path / "index", {})
    index.begin(None)
    for number in range(6):
        changes = {b"v%d-%d" % (number, key): os.urandom(5_000) for key in range(800)}
        index._db.write({**changes, b"mlast": b"%d" % number})
    kept, tried = tmp_path / "kept", tmp_path / "tried"

    def is_copied() -> bool:
        """As a kill leaves it; files that are flushed go away meanwhile."""
        shutil.rmtree(kept, ignore_errors=True)
        try:
            shutil.copytree(tmp_path / "index", kept)
        except shutil.Error:
            return False
        return len([*kept.glob("*.log")]) == 1

    eventually(is_copied)
    index.close()
    (manifest,) = kept.glob("MANIFEST-*")
    whole = manifest.read_bytes()

    def keys_and_last(size: int) -> tuple[int, int]:
        shutil.rmtree(tried, ignore_errors=True)
        shutil.copytree(kept, tried)
        (tried / manifest.name).write_bytes(whole[:size])
        with Index(tried, {}) as opened:
            return len([*opened._db.items(b"v")]), int(opened._db.get(b"mlast") or -1)

    refused = []
    for size in [*range(0, len(whole), 40), len(whole)]:
        try:
            keys, last = keys_and_last(size)
        except StateError as error:
            refused.append((error.code, error.message))
            continue
        assert keys == 800 * (last + 1), size
    assert {code for code, _ in refused} == {"index.corrupt"}
    assert any("a part of what was written is missing" in message for _, message in refused)
    assert keys_and_last(len(whole)) == (4_800, 5)
