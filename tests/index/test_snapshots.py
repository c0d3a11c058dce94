"""Copies of indexes: whose they are, and what is left of those that were not finished."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.fs as pafs
import pytest
from rocksdict import Options, Rdict

from eventpub.admission import Shard
from eventpub.channel import Lease, Report
from eventpub.channel.lane import Link
from eventpub.config import Sink
from eventpub.errors import EventpubError, StateError
from eventpub.index import Copying, Index, Snapshots, folder_for
from eventpub.shard import folding, own_index, runner
from eventpub.shard.assignment import adopts
from eventpub.shard.own_index import IndexCopies, open_index
from eventpub.state import StateDir

SHARD = Shard(0, 2, 4)


def snapshots(context: Path, partitions: int = 4, shards: int = 2) -> Snapshots:
    return Snapshots(str(context), "orders", partitions, shards, 0)


def put(context: Path, text: str = "of an index") -> str:
    """Keep a copy of an index of one file."""
    made = context / "made"
    made.mkdir(parents=True)
    (made / "CURRENT").write_text(text)
    name = snapshots(context).put(made)
    shutil.rmtree(made)
    return name


def fetches(root: Path, *, copies: str | None = None, **lease: Any) -> str | None:
    """Which copy a shard's runner takes that has no index."""
    config = SimpleNamespace(
        state=SimpleNamespace(snapshots=copies or str(root / "copies"), snapshot_every=1_000_000),
        app=SimpleNamespace(id="orders"),
    )
    assignment: Any = SimpleNamespace(config=config, index=lambda _: root / "index" / "0")
    link: Any = SimpleNamespace(is_stopping=False, send=lambda _: None)
    found = IndexCopies(assignment, SHARD, link)
    return found.find(Lease(1, low=0, position=0, **lease))


@pytest.mark.parametrize("place", ["from_uri", "get_file_info"])
def test_a_place_that_is_away_keeps_nobody_from_publishing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """To make out the region of a bucket is a request, too."""
    tried: list[str] = []

    def away(*_: Any) -> Any:
        tried.append(place)
        raise OSError("no route to host")

    copies = f"file://{tmp_path / 'copies'}"
    files = SimpleNamespace(get_file_info=away)
    made = away if place == "from_uri" else lambda uri: (files, uri)
    arrow = SimpleNamespace(
        FileSystem=SimpleNamespace(from_uri=made), FileSelector=pafs.FileSelector
    )
    monkeypatch.setattr("eventpub.index.snapshots.pafs", arrow)
    monkeypatch.setattr(own_index, "_LOOKS_FOR", 0.5)
    monkeypatch.setattr(own_index, "_LOOKS_AGAIN_AFTER", 0.2)
    assert fetches(tmp_path, copies=copies) is None
    assert 1 < len(tried) <= 4, "it looks again, and not for ever"
    tried.clear()
    (tmp_path / "index" / "0").mkdir(parents=True)
    assert fetches(tmp_path, copies=copies) is None
    assert not tried, "who has an index asks nobody"


def test_a_copy_of_another_number_of_partitions_or_shards_is_none(tmp_path: Path) -> None:
    name = put(tmp_path / "copies")
    assert snapshots(tmp_path / "copies", partitions=8).get(tmp_path / "0") is None
    assert snapshots(tmp_path / "copies", shards=3).get(tmp_path / "0") is None
    assert snapshots(tmp_path / "copies").get(tmp_path / "0") == name
    assert (tmp_path / "0" / "CURRENT").read_text() == "of an index"


def test_a_runner_without_an_index_takes_the_newest_copy(tmp_path: Path) -> None:
    name = put(tmp_path / "copies")
    assert fetches(tmp_path) == name
    assert fetches(tmp_path) is None, "there is an index"


@pytest.mark.parametrize("former", [{"former_shards": 3}, {"former_indexes": ("/former/0",)}])
def test_what_another_number_knows_is_newer_than_a_copy(
    tmp_path: Path, former: dict[str, Any]
) -> None:
    put(tmp_path / "copies")
    assert fetches(tmp_path, **former) is None


@pytest.mark.parametrize("has_begun", [False, True])
def test_no_copy_takes_the_place_of_a_damaged_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_begun: bool
) -> None:
    """A copy has the same files. Who has taken work leaves: what was sent is lost with it."""
    put(tmp_path / "copies")
    tried: list[str | None] = []

    class Damaged:
        def __init__(self, *_: object) -> None:
            tried.append(fetches(tmp_path))
            (tmp_path / "index" / "0").mkdir(parents=True, exist_ok=True)
            self.report = SimpleNamespace(rebuilt=None)
            if not has_begun:
                raise self.error

        error = StateError("index.corrupt", "a block does not fit its checksum")

        def __enter__(self) -> Damaged:
            return self

        def __exit__(self, *_: object) -> None:
            return None

    class Working:
        has_begun = True

        def __init__(self, context: Damaged) -> None:
            self._context = context

        def run(self) -> None:
            raise self._context.error

    class Leased(Link):
        error: EventpubError | None = None
        is_stopping = False

        def _next(self) -> Lease:
            return Lease(1, low=0, position=0)

        def send(self, message: Any) -> None:
            self.error = message.error

        def wake(self) -> None:
            return None

        def confirm(self) -> None:
            return None

    monkeypatch.setattr(runner, "LeasedContext", Damaged)
    monkeypatch.setattr(runner, "Runner", Working)
    link = Leased()
    assignment: Any = SimpleNamespace(index=lambda _: tmp_path / "index" / "0")
    runner.serve(assignment, 0, link)
    assert link.error is not None
    assert link.error.code == "index.corrupt"
    assert link.error.retriable == has_begun
    if has_begun:
        assert "0.damaged" in link.error.message
        runner.serve(assignment, 0, Leased())
    first, second = tried
    assert first is not None
    assert second is None


def test_a_copy_is_newer_than_those_of_a_machine_whose_clock_is_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each new copy was the oldest by its name, and was removed as soon as it was made."""
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now + 86_400 * 10**9)
    for text in ("old", "older"):
        put(tmp_path / "copies", text)
    monkeypatch.setattr(time, "time_ns", lambda: now)
    names = [put(tmp_path / "copies", f"new {n}") for n in range(3)]
    assert names == sorted(names)
    assert snapshots(tmp_path / "copies").get(tmp_path / "0") == names[-1]
    assert (tmp_path / "0" / "CURRENT").read_text() == "new 2"


def test_two_that_fetch_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Of one that is slow the lease is given to another, on the same machine perhaps."""
    name = put(tmp_path / "copies")
    of_shard, folder = snapshots(tmp_path / "copies"), tmp_path / "0"
    found: list[str | None] = []

    def another_one_does() -> None:
        if not found:
            found.append(snapshots(tmp_path / "copies").get(folder))

    assert of_shard.get(folder, another_one_does) is None, "the other one was faster"
    assert found == [name]
    assert (folder / "CURRENT").read_text() == "of an index"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("0.")] == []


def test_who_is_told_to_stop_does_not_fetch_to_the_end(tmp_path: Path) -> None:
    put(tmp_path / "copies")
    of_shard, folder = snapshots(tmp_path / "copies"), tmp_path / "0"

    def stops() -> None:
        raise StateError("run.stopping", "stopped")

    with pytest.raises(StateError, match=r"run\.stopping"):
        of_shard.get(folder, stops)
    assert [path.name for path in tmp_path.iterdir()] == ["copies"]


def test_a_copy_that_cannot_be_made_is_made_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk without links, say: the publisher ended, at each start, when the first was due."""
    with Index(tmp_path / "0", {"app": "orders"}) as index:
        copies: Any = object.__new__(IndexCopies)
        copies._copying = copying = Copying(snapshots(tmp_path / "copies"), every=0.0)

        def refuses(self: Index, folder: Path) -> None:
            folder.mkdir()
            raise StateError("index.unusable", "Operation not permitted")

        index.begin(None)
        with monkeypatch.context() as patched:
            patched.setattr(Index, "copy_to", refuses)
            copies.keep(index)
        assert [path.name for path in tmp_path.iterdir()] == ["0"]
        index.moved_to({("events", 0): 1})
        copies.keep(index)
        copying.end(10.0)
    assert snapshots(tmp_path / "copies").get(tmp_path / "1") is not None


def opens(folder: Path, topic: str, copied_from: str | None) -> tuple[bool, Any]:
    """Whether a runner begins a new index where there is one of something else, and its report."""
    report = Report(0, copied_from=copied_from)
    config = SimpleNamespace(
        app=SimpleNamespace(id="orders", former_ids=()),
        sink=SimpleNamespace(topic=topic),
        store=SimpleNamespace(full_table=OF["table"]),
        run=SimpleNamespace(shards=2),
    )
    assignment: Any = SimpleNamespace(
        config=config,
        index=lambda _: folder,
        partitions=4,
        adopts=lambda found: adopts(config, found, accepts_topic=False),  # type: ignore[arg-type]
    )
    with open_index(assignment, SHARD, report) as index:
        return index.is_new, report


OF = {
    "app": "orders",
    "topic": "former",
    "table": "shop.events",
    "partitions": 4,
    "shard": [0, 2],
}


def test_a_copy_of_an_index_of_another_topic_is_none(tmp_path: Path) -> None:
    """The publisher ended, and deleting the index, as it says, brought the copy back."""
    with Index(tmp_path / "made", OF) as index:
        index.begin(7)
        index.copy_to(tmp_path / "copy")
    snapshots(tmp_path / "copies").put(tmp_path / "copy")
    folder = tmp_path / "index" / "0"
    for topic, is_new in (("events", True), ("former", False)):
        shutil.rmtree(folder, ignore_errors=True)
        name = snapshots(tmp_path / "copies").get(folder)
        found, report = opens(folder, topic, name)
        assert found == is_new
        assert report.copied_from == (None if is_new else name)


@pytest.mark.parametrize("name", ["../../victim", "/victim", "a/../../victim"])
def test_a_copy_that_names_files_elsewhere_is_none(tmp_path: Path, name: str) -> None:
    """Whoever could write to the place of the copies wrote any file of the publisher's user."""
    put(tmp_path / "copies")
    [made] = (path.parent for path in tmp_path.rglob("complete.json"))
    victim = tmp_path / "index" / name.strip("/")
    name = str(victim) if name.startswith("/") else name
    (made / "complete.json").write_text(json.dumps({"files": {name: 5, "CURRENT": 11}}))
    source = Path(f"{made}/{name}")
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text("12345")
    folder = tmp_path / "state" / "index" / "0"
    assert snapshots(tmp_path / "copies").get(folder) is None
    assert not folder.exists()
    assert [path for path in (tmp_path / "state").rglob("*") if path.is_file()] == []


def test_a_copy_of_an_index_of_a_newer_version_is_none(tmp_path: Path) -> None:
    """Deleting the index, as the error says, would bring the copy back."""
    folder = tmp_path / "0"
    with Index(folder, OF) as index:
        index.begin(7)
    with Rdict(str(folder), Options(raw_mode=True)) as db:
        db[b"midentity"] = json.dumps({"format": 99, **OF}).encode()
    with pytest.raises(StateError, match=r"index\.newer_format"):
        opens(folder, "former", None)
    is_new, report = opens(folder, "former", "a copy")
    assert is_new
    assert report.copied_from is None


@pytest.mark.parametrize(
    ("copied_from", "acknowledged", "code"),
    [
        ("a copy", {}, "index.corrupt"),
        ("a copy", {("events", 0): 7}, "sink.topic_recreated"),
        (None, {}, "sink.topic_recreated"),
    ],
)
def test_a_copy_is_none_where_the_topic_was_deleted_since(
    monkeypatch: pytest.MonkeyPatch,
    copied_from: str | None,
    acknowledged: dict[tuple[str, int], int],
    code: str,
) -> None:
    """The operator who had removed the state, as the error says, got the same error again. As long
    as there is a state, what was lost is for the operator to decide."""
    monkeypatch.setattr(folding, "topic_ids", lambda *_: {"events": "new"})
    context: Any = SimpleNamespace(
        assignment=SimpleNamespace(config=SimpleNamespace(sink=Sink(topic="events"))),
        index=SimpleNamespace(topics={"events": "former"}),
        report=SimpleNamespace(copied_from=copied_from, made_again=[]),
        lease=SimpleNamespace(acknowledged=acknowledged),
        own_places=lambda: [("events", 0)],
    )
    with pytest.raises(EventpubError) as raised:
        folding.Fold(context)._check_topics()
    assert raised.value.code == code


def test_an_index_of_fewer_partitions_is_moved_out_of_the_way(tmp_path: Path) -> None:
    """On the disk of an executor nobody has moved it, and the publisher ended at each start."""
    for partitions in (2, 4):
        with Index(tmp_path / str(partitions), {**OF, "partitions": partitions}) as index:
            index.begin(7)
    is_new, report = opens(tmp_path / "2", "former", None)
    assert is_new
    assert "had 2 partitions" in report.rebuilt
    assert (tmp_path / "2.former").exists()
    assert not opens(tmp_path / "4", "former", None)[0]
    with pytest.raises(StateError, match=r"state\.foreign"):
        opens(tmp_path / "4", "events", None)


def test_what_killed_processes_have_left_of_copies_is_removed(tmp_path: Path) -> None:
    index = tmp_path / "0"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as lives:
        left, ours, others = (
            tmp_path / f"0.copy-{pid}-12" for pid in ("999999999", os.getpid(), lives.pid)
        )
        of_another_shard = tmp_path / "10.copy-999999999-12"
        for folder in (left, ours, others, of_another_shard):
            folder.mkdir()
        first = folder_for(index)
        first.mkdir()
        second = folder_for(index)
        assert first.exists(), "it is on its way"
        assert second != first
        assert {f for f in (left, ours, others, of_another_shard) if f.exists()} == {
            others,
            of_another_shard,
        }
        assert lives.stdin is not None
        lives.stdin.close()


def test_a_copy_on_its_way_is_no_index_of_a_former_number_of_partitions(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    for name in ("0", "1", "0.copy-12-ab"):
        (state.index / "former-4" / name).mkdir(parents=True)
    assert [folder.name for folder in state.former_indexes()] == ["0", "1"]


def test_a_connection_that_is_lost_while_a_copy_is_fetched_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was as if there were no copy: the whole topic was read back."""
    name = put(tmp_path / "copies")
    monkeypatch.setattr("eventpub.index.snapshots._TRIES_AGAIN_AFTER", 0.0)
    lost = iter([OSError("reset by peer")])

    def meanwhile() -> None:
        for error in lost:
            raise error

    assert snapshots(tmp_path / "copies").get(tmp_path / "0", meanwhile) == name
