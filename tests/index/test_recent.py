"""What the index keeps in memory is what is on the disk, and never too much of it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from eventpub.admission.model import EVENTS, Decision, Seen
from eventpub.errors import StateError
from eventpub.index import Index, aggregates
from eventpub.index.database import Database

IDENTITY = {"app": "orders", "topic": "orders.events", "partitions": 8, "shard": [0, 2]}


def decided(**last: int) -> Decision:
    return Decision(EVENTS.empty_table(), last=last)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The aggregates whose last versions are read from the disk."""
    asked: list[str] = []
    get = Database.get

    def noted(self: Database, keys: Any) -> Any:
        if isinstance(keys, list):
            asked.extend(key[1:].decode() for key in keys if key[:1] == b"v")
        return get(self, keys)

    monkeypatch.setattr(Database, "get", noted)
    return asked


@pytest.fixture
def index(tmp_path: Path) -> Iterable[Index]:
    with Index(tmp_path / "0", IDENTITY) as index:
        index.begin(None)
        yield index


def test_what_was_recorded_is_not_read_again(index: Index, read: list[str]) -> None:
    index.record(decided(a=1, b=2), {}, 1)
    index.record(decided(b=3), {}, 2)
    index.set_buckets({1: 1}, 0)
    assert index.known(["b", "c", "a", "d"]).last == {"a": 1, "b": 3}
    assert read == ["c", "d"]


def test_a_fold_is_seen_at_once(index: Index, read: list[str]) -> None:
    index.record(decided(a=1, b=2), {}, 1)
    index.fold_events({"a": 4}, {"a": [2, 3, 4]}, {("t", 0): 9}, now=0, times={"a": Seen(1, True)})
    assert index.known(["a", "b"]).last == {"a": 4, "b": 2}
    assert read == []


@pytest.mark.parametrize("is_written", [True, False])
def test_after_a_write_that_failed_the_disk_is_asked(
    index: Index, read: list[str], monkeypatch: pytest.MonkeyPatch, is_written: bool
) -> None:
    index.record(decided(a=1, b=2), {}, 1)
    write = Database.write

    def fails(self: Database, batch: Any) -> None:
        if is_written:
            write(self, batch)
        raise StateError("index.disk_full", "it is full")

    monkeypatch.setattr(Database, "write", fails)
    with pytest.raises(StateError):
        index.record(decided(a=5), {}, 2)
    assert index.known(["a", "b"]).last == {"a": 5 if is_written else 1, "b": 2}
    assert read == ["a", "b"]


def test_what_is_kept_has_a_bound(
    index: Index, read: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aggregates, "_MOST_RECENT", 3)
    index.record(decided(a=1, b=1), {}, 1)
    index.record(decided(c=1, d=1), {}, 2)
    assert index.known(["a", "b", "c", "d"]).last == dict.fromkeys("abcd", 1)
    assert read == ["a", "b"]
