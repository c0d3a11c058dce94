"""Copies of indexes: whose they are, and what is left of those that were not finished."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eventpub.channel import Lease
from eventpub.channel.lane import Link
from eventpub.errors import EventpubError, StateError
from eventpub.index import Snapshots, folder_for
from eventpub.shard import runner
from eventpub.shard.context import ShardContext
from eventpub.state import StateDir


def snapshots(place: Path, partitions: int = 4, shards: int = 2) -> Snapshots:
    return Snapshots(str(place), "orders", partitions, shards, 0)


def put(place: Path, text: str = "of an index") -> str:
    """Keep a copy of an index of one file."""
    made = place / "made"
    made.mkdir(parents=True)
    (made / "CURRENT").write_text(text)
    name = snapshots(place).put(made)
    shutil.rmtree(made)
    return name


def fetches(root: Path, *, takes_copy: bool = True, **lease: Any) -> str | None:
    """Which copy a shard's runner takes that has no index."""
    context: Any = object.__new__(ShardContext)
    context.shard = SimpleNamespace(number=0, partitions=4, shards=2)
    config = SimpleNamespace(
        state=SimpleNamespace(snapshots=str(root / "copies"), snapshot_every=1_000_000),
        app=SimpleNamespace(id="orders"),
    )
    context.assignment = SimpleNamespace(config=config, index=lambda _: root / "index" / "0")
    context.lease = Lease(1, low=0, position=0, **lease)
    context.report = SimpleNamespace(copied_from=None)
    context._find_copy(takes_copy)
    found: str | None = context.report.copied_from
    return found


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


def test_no_copy_takes_the_place_of_a_damaged_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy has the same files: the publisher would end at each start."""
    put(tmp_path / "copies")
    assert fetches(tmp_path, takes_copy=False) is None
    tried: list[bool] = []

    class Damaged:
        def __init__(self, *_: object, takes_copy: bool) -> None:
            tried.append(takes_copy)
            raise StateError("index.corrupt", "a block does not fit its checksum")

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

    monkeypatch.setattr(runner, "ShardContext", Damaged)
    link = Leased()
    assignment: Any = SimpleNamespace(index=lambda _: tmp_path / "index" / "0")
    runner.serve(assignment, 0, link)
    assert tried == [True, False]
    assert link.error is not None
    assert link.error.code == "index.corrupt"


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
    for name in ("0", "1", "0.copy-12-ab", "1.fetched"):
        (state.index / "former-4" / name).mkdir(parents=True)
    assert [folder.name for folder in state.former_indexes()] == ["0", "1"]
