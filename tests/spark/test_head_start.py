"""The head start's own rules, and what comes of one that failed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eventpub.admission import Shard
from eventpub.config import App, Config, Sink, Spark, Store
from eventpub.errors import StateError, StoreError
from eventpub.spark import failpoint, head_start, publisher
from eventpub.spark.head_start import HeadStart
from eventpub.spark.shard import Job, _ShardTask
from eventpub.spark.source import Window
from eventpub.spark.state import StateDir


def config_in(state: Path) -> Config:
    """A publisher's configuration with this state directory."""
    return Config(
        app=App(id="orders", state_dir=state),
        store=Store.model_validate({"url": "mysql+pymysql://u@h:1/d"}),
        sink=Sink(topic="events"),
    )


class FakeReader:
    """Windows up to 10, 20, 30, …; the first may be a full page."""

    def __init__(self, *, is_full: bool = False) -> None:
        self.is_full = is_full
        self.stopped = threading.Event()

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return {"position": 0}

    def getDefaultReadLimit(self) -> None:  # noqa: N802
        return None

    def latestOffset(self, start: dict[str, int], limit: None) -> dict[str, int]:  # noqa: N802
        del limit
        return {"position": start["position"] + 10}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[Window]:
        return [Window(0, start["position"], end["position"], more=self.is_full)]

    def stop(self) -> None:
        self.stopped.set()


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[HeadStart, list[Exception]]]:
    """A head start of a fake reader, and what it failed with."""

    def make(
        reader: FakeReader, publish: Any, look: Any = None
    ) -> tuple[HeadStart, list[Exception]]:
        monkeypatch.setattr(head_start, "EventStoreStreamReader", lambda options: reader)
        monkeypatch.setattr(head_start, "_PAUSE", 0.001)
        failures: list[Exception] = []
        return HeadStart({}, publish, look or (lambda: None), failures.append), failures

    return make


def test_batches_are_numbered_upwards_until_the_end_and_below_those_of_spark(begin: Any) -> None:
    numbers: list[int] = []
    enough, looked, reader = threading.Event(), threading.Event(), FakeReader()

    def publish(number: int, run: Any) -> None:
        numbers.append(number)
        if len(numbers) == 3:
            enough.set()

    started, failures = begin(reader, publish, looked.set)
    assert enough.wait(10)
    assert looked.wait(10)
    started.end()
    assert not started.is_running
    assert numbers[:3] == [head_start.FIRST + n for n in range(3)]
    assert max(numbers) < 0
    assert reader.stopped.is_set()
    assert failures == []


def test_a_full_page_is_left_to_spark(begin: Any) -> None:
    reader, numbers = FakeReader(is_full=True), []
    started, failures = begin(reader, lambda number, run: numbers.append(number))
    assert reader.stopped.wait(10)
    started.end()
    assert (numbers, failures) == ([], [])


def test_what_goes_wrong_ends_it_and_is_told(begin: Any) -> None:
    reader, error = FakeReader(), StoreError("store.unreachable", "away")

    def publish(number: int, run: Any) -> None:
        raise error

    started, failures = begin(reader, publish)
    assert reader.stopped.wait(10)
    started.end()
    assert failures == [error]


@pytest.mark.parametrize(
    ("master", "available_now", "failpoints", "begins"),
    [
        ("local[2]", False, None, True),
        ("local[2]", False, "head_start.before_begin:1:f", True),
        ("local[2]", False, "before_begin:1:f", False),
        ("local[2]", True, None, False),
        ("spark://host:7077", False, None, False),
    ],
)
def test_none_on_a_cluster_where_the_run_ends_by_itself_or_tasks_shall_stop(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    master: str,
    available_now: bool,
    failpoints: str | None,
    begins: bool,
) -> None:
    monkeypatch.setattr(failpoint, "_SPEC", failpoints)
    begun: list[Any] = []
    monkeypatch.setattr(publisher, "HeadStart", lambda *given: begun.append(given))
    config = config_in(tmp_path)
    config = config.model_copy(update={"spark": Spark(master=master)})
    layout: Any = None
    driver = publisher._Publisher(config, available_now, lambda _: None)
    driver._job = Job(config, layout, 1, None, 0, 5)
    driver._position = 0
    driver._until = 7 if available_now else None
    driver._begin_head_start()
    assert bool(begun) == begins


def test_without_java_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(StateError) as error:
        publisher._Publisher(config_in(tmp_path / "state"), False, lambda _: None)._prepare()
    assert error.value.code == "spark.java_missing"


@pytest.mark.parametrize(("takes_over", "skipped"), [(None, 0), (head_start.FIRST, 1)])
def test_what_a_failed_batch_had_told_is_counted_by_the_next(
    tmp_path: Path, takes_over: int | None, skipped: int
) -> None:
    state = StateDir(tmp_path)
    gap = {"aggregate_id": "a", "from_version": 1, "to_version": 1}
    told = {"shard": 0, "skipped": [gap], "published": 7}
    state.tell(5, head_start.FIRST, 0, {**told, "buckets": {}, "foreign": True})
    config = config_in(tmp_path)
    layout: Any = None
    task = object.__new__(_ShardTask)
    task._job = Job(config, layout, 1, None, 0, 5, goes_on=True, takes_over=takes_over)
    task._shard = Shard(0, 1, 1)
    report = task._begin_report()
    assert len(report.skipped) == skipped
    assert report.published == 7 * skipped
    assert not report.foreign
