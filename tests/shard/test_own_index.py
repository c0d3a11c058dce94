"""A shard's index on its machine: whose it is, and what comes of a damaged one."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rocksdict import Options, Rdict

from eventpub.admission.model import Shard
from eventpub.channel import Beginning, Lane, Report
from eventpub.errors import StateError
from eventpub.index import Index
from eventpub.index.database import ROCKSDB
from eventpub.shard import runner
from eventpub.shard.assignment import adopts
from eventpub.shard.context import open_index

SHARD = Shard(0, 2, 4)


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_damaged_index_is_set_aside_and_tried_once_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_begun: bool
) -> None:
    """Who has taken work leaves: what was sent is lost with it."""
    folder = tmp_path / "0"
    found: list[bool] = []

    class Damaged:
        def __init__(self, *_: object) -> None:
            found.append(folder.exists())
            folder.mkdir(exist_ok=True)
            self.report = SimpleNamespace(rebuilt=None)
            if not has_begun:
                raise self.error

        error = StateError("index.corrupt", "a block does not fit its checksum")

        def close(self) -> None:
            pass

    class Working:
        has_begun = True

        def __init__(self, context: Damaged) -> None:
            self._context = context

        def run(self) -> None:
            raise self._context.error

    monkeypatch.setattr(runner, "PublishingContext", Damaged)
    monkeypatch.setattr(runner, "Runner", Working)
    parts = SimpleNamespace(storage=ROCKSDB)
    assignment: Any = SimpleNamespace(index=lambda _: folder, parts=parts)
    said: list[Any] = []

    def serve() -> None:
        runner.serve(assignment, 0, Beginning(low=0, position=0), Lane(), said.append)

    serve()
    [ended] = said
    assert ended.error.code == "index.corrupt"
    assert ended.error.retriable == has_begun
    if has_begun:
        assert "0.damaged" in ended.error.message
        serve()
    assert found == [False, False], "the second one is new, too"


@pytest.mark.parametrize("met", [KeyError("a"), SystemExit(1)])
def test_whatever_ends_a_runner_is_said(
    monkeypatch: pytest.MonkeyPatch, met: BaseException
) -> None:
    """Or its shard would never have another one."""

    def fail(*_: object) -> None:
        raise met

    monkeypatch.setattr(runner, "PublishingContext", fail)
    said: list[Any] = []
    assignment: Any = SimpleNamespace()
    with suppress(SystemExit):
        runner.serve(assignment, 3, Beginning(low=0, position=0), Lane(), said.append)
    [ended] = said
    assert (ended.shard, ended.error.code, ended.error.retriable) == (3, "shard.failed", True)


def opens(folder: Path, topic: str, start_id: str = "") -> tuple[bool, Any]:
    """Whether a runner begins a new index where there is one of something else, and its report."""
    report = Report(0)
    config = SimpleNamespace(
        app=SimpleNamespace(id="orders"),
        sink=SimpleNamespace(topic=topic),
        store=SimpleNamespace(full_table=OF["table"], key=OF["key"]),
        run=SimpleNamespace(shards=2),
    )
    assignment: Any = SimpleNamespace(
        config=config,
        index=lambda _: folder,
        partitions=4,
        parts=SimpleNamespace(storage=ROCKSDB),
        start_id=start_id,
        adopts=lambda found: (
            found.get("start", "") == start_id and adopts(config, found, accepts_topic=False)  # type: ignore[arg-type]
        ),
    )
    with open_index(assignment, SHARD, report) as index:
        is_new = index.is_new
        if is_new:
            index.begin(7)
        return is_new, report


OF = {
    "app": "orders",
    "topic": "former",
    "table": "shop.events",
    "key": "one column",
    "partitions": 4,
    "shard": [0, 2],
}


def test_an_index_of_a_newer_version_is_left_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "0"
    with Index(folder, OF) as index:
        index.begin(7)
    with Rdict(str(folder), Options(raw_mode=True)) as db:
        db[b"midentity"] = json.dumps({"format": 99, **OF}).encode()
    with pytest.raises(StateError, match=r"index\.newer_format"):
        opens(folder, "former")


def test_an_index_of_fewer_partitions_is_moved_out_of_the_way(tmp_path: Path) -> None:
    """On the disk of an executor nobody has moved it, and the publisher ended at each start."""
    for partitions in (2, 4):
        with Index(tmp_path / str(partitions), {**OF, "partitions": partitions}) as index:
            index.begin(7)
    is_new, report = opens(tmp_path / "2", "former")
    assert is_new
    assert "had 2 partitions" in report.rebuilt
    assert (tmp_path / "2.former").exists()
    assert not opens(tmp_path / "4", "former")[0]
    with pytest.raises(StateError, match=r"state\.foreign"):
        opens(tmp_path / "4", "events")


def test_an_index_of_before_the_first_start_is_moved_out_of_the_way(tmp_path: Path) -> None:
    """The state was removed where the publisher runs, but not where its executors ran."""
    folder = tmp_path / "0"
    assert opens(folder, "former", "100")[0]
    is_new, report = opens(folder, "former", "100")
    assert (is_new, report.rebuilt) == (False, None)
    is_new, report = opens(folder, "former", "200")
    assert is_new
    assert "earlier state" in report.rebuilt
    assert (tmp_path / "0.former").exists()
    assert not opens(folder, "former", "200")[0]
    with pytest.raises(StateError, match=r"state\.foreign"):
        opens(folder, "events", "200")


def test_an_index_of_a_version_without_starts_is_its_state_s(tmp_path: Path) -> None:
    for folder in ("kept", "left"):
        with Index(tmp_path / folder, OF) as index:
            index.begin(7)
    assert not opens(tmp_path / "kept", "former")[0]
    assert opens(tmp_path / "left", "former", "100")[0]
